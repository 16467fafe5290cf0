"""hae-record: run a Hugging Face model and write what its attention saw as a trace file."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from hae import cleanup

# Other modules of `hae` are imported in functions: the libraries behind them take seconds to load,
# and a signal meanwhile is to end in one line too.

USAGE, BY_SIGNAL = 2, 128
INTERRUPTED = "interrupted; --resume continues after the finished sequences"


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected at least 1")
    return value


class _OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line; --help shows the rest."""

    def error(self, message: str) -> NoReturn:
        sys.exit(_fail(f"{message}; see hae-record --help", USAGE))


def argument_parser() -> argparse.ArgumentParser:
    from hae import trace

    parser = _OneLineParser(
        prog="hae-record",
        description="Run a Hugging Face model greedily and write one trace sequence per prompt.",
    )
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="Llama family, or LLaVA")
    parser.add_argument("--out", type=Path, required=True, metavar="F.h5")
    parser.add_argument(
        "--prompts",
        type=Path,
        required=True,
        metavar="F.jsonl",
        help="one JSON object a line: text, and optionally name, group, images (paths)",
    )
    parser.add_argument("--max-new-tokens", type=_positive, default=64, metavar="N")
    parser.add_argument("--payload", choices=trace.PAYLOADS, default="qkv")
    parser.add_argument(
        "--dtype", choices=trace.DTYPES, default="float16", help="type of the stored numbers"
    )
    parser.add_argument(
        "--compute-dtype", choices=trace.DTYPES, default="float32", help="type the model runs in"
    )
    parser.add_argument("--device", default="cpu", help="where the model runs: cpu, cuda, ...")
    parser.add_argument(
        "--attention",
        choices=("eager", "sdpa"),
        default="eager",
        help="how attention is computed while recording; sdpa needs less memory",
    )
    parser.add_argument(
        "--unrotated", action="store_true", help="also store queries before rotary embedding"
    )
    parser.add_argument(
        "--embedding-similarity",
        action="store_true",
        help="also store inner products of the prompt's visual and text input embeddings",
    )
    parser.add_argument(
        "--limit-bytes",
        type=_positive,
        metavar="N",
        help="refuse a recording that may grow larger (and always what the disk cannot hold)",
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep the sequences that an interrupted run finished"
    )
    return parser


def program(arguments: Sequence[str] | None = None) -> NoReturn:
    """hae-record as a process of its own: `main`, and what signals do."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup asked
            signal.signal(number, _clean_up_and_die)
    sys.exit(main(arguments))


def _clean_up_and_die(signal_number: int, _: FrameType | None) -> NoReturn:
    """Not by an exception: Python drops those that come up while it finalises an object."""
    cleanup.do_all_now()
    with contextlib.suppress(OSError):  # the terminal is gone
        # Not by print: the signal may have come in the middle of one.
        os.write(2, f"hae-record: {INTERRUPTED}\n".encode())
    os._exit(BY_SIGNAL + signal_number)


def main(arguments: Sequence[str] | None = None) -> int:
    """hae-record within a process of others. Returns its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        return _fail(INTERRUPTED, BY_SIGNAL + signal.SIGINT)


def _run(arguments: Sequence[str]) -> int:
    from hae import trace

    options = argument_parser().parse_args(arguments)
    if options.unrotated and options.payload != "qkv":
        return _fail("--unrotated: only with --payload qkv", USAGE)
    if options.payload == "attention" and options.attention != "eager":
        return _fail("--payload attention: needs --attention eager", USAGE)
    if options.payload == "attention" and trace.is_finer(options.dtype, options.compute_dtype):
        return _fail(
            f"--payload attention: --dtype {options.dtype} is finer than --compute-dtype "
            f"{options.compute_dtype}, whose rows do not sum to 1 in it; use --dtype "
            f"{options.compute_dtype} or --payload qkv",
            USAGE,
        )
    try:
        from hae import session
    except ImportError as error:
        return _fail(f"{error}; install the recorder with: pip install 'hae[record]'", USAGE)
    try:
        session.record(options, arguments)
    except session.RecordError as error:
        return _fail(str(error), error.exit_code)
    return 0


def _fail(message: str, exit_code: int) -> int:
    print(f"hae-record: {message}", file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    program()
