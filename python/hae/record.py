"""hae-record: run a Hugging Face model and write what its attention saw as a trace file."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from hae import cleanup
from hae.arguments import argument_parser, fail
from hae.errors import USAGE

# Other modules of `hae` are imported in functions: the libraries behind them take seconds to load,
# and a signal meanwhile is to end in one line too.

INTERRUPTED = "interrupted; --resume continues after the finished sequences"


def program(arguments: Sequence[str] | None = None) -> NoReturn:
    """hae-record as a process of its own: `main`, and what signals do."""
    cleanup.end_by_signals("hae-record", INTERRUPTED)
    sys.exit(main(arguments))


def main(arguments: Sequence[str] | None = None) -> int:
    """hae-record within a process of others. Returns its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        return fail(INTERRUPTED, cleanup.BY_SIGNAL + signal.SIGINT)


def _run(arguments: Sequence[str]) -> int:
    from hae import trace

    options = argument_parser().parse_args(arguments)
    if options.unrotated and options.payload != "qkv":
        return fail("--unrotated: only with --payload qkv", USAGE)
    if options.payload == "attention" and options.attention != "eager":
        return fail("--payload attention: needs --attention eager", USAGE)
    if options.payload == "attention" and trace.is_finer(options.dtype, options.compute_dtype):
        return fail(
            f"--payload attention: --dtype {options.dtype} is finer than --compute-dtype "
            f"{options.compute_dtype}, whose rows do not sum to 1 in it; use --dtype "
            f"{options.compute_dtype} or --payload qkv",
            USAGE,
        )
    try:
        from hae import session
    except ImportError as error:
        return fail(f"{error}; install the recorder with: pip install 'hae[record]'", USAGE)
    try:
        session.record(options, arguments)
    except session.RecordError as error:
        return fail(str(error), error.exit_code)
    return 0


if __name__ == "__main__":
    program()
