"""hae-closed-loop: what eviction policies do to a running model's answers, beside what the open
loop says of the same sequences.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hae import cleanup, trace
from hae.arguments import OneLineParser, fail, positive
from hae.errors import USAGE

PROGRAM = "hae-closed-loop"
INTERRUPTED = "interrupted; nothing was written"


def argument_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog=PROGRAM,
        description="Let eviction policies evict inside a running model, and compare its answers "
        "with those of the full cache: with the full cache's answer forced, and free-running.",
        epilog="example: hae closed-loop MODEL_DIR --prompts prompts.jsonl --policy hae:bin=16 "
        "--policy greedy:score=mean --match mean --json closed.json",
    )
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="Llama family, or LLaVA")
    parser.add_argument(
        "--prompts",
        type=Path,
        required=True,
        metavar="F.jsonl",
        help="one JSON object a line: text, and optionally name, group, images (paths), answer",
    )
    parser.add_argument(
        "--policy",
        action="append",
        required=True,
        metavar="SPEC",
        help="name or name:key=value,key=value; several: give it again",
    )
    parser.add_argument(
        "--match",
        choices=("mean", "peak"),
        help="give every policy without a budget the one that comes nearest to the first one's "
        "tokens, by the open loop",
    )
    parser.add_argument("--max-new-tokens", type=positive, default=64, metavar="N")
    parser.add_argument("--json", type=Path, metavar="F.json", help="write everything to this file")
    parser.add_argument(
        "--compute-dtype", choices=trace.DTYPES, default="float32", help="type the model runs in"
    )
    parser.add_argument("--device", default="cpu", help="where the model runs: cpu, cuda, ...")
    parser.add_argument("--attention", choices=("eager", "sdpa"), default="sdpa")
    return parser


def program(arguments: Sequence[str] | None = None) -> NoReturn:
    """hae-closed-loop as a process of its own: `main`, and what signals do."""
    cleanup.end_by_signals(PROGRAM, INTERRUPTED)
    sys.exit(main(arguments))


def main(arguments: Sequence[str] | None = None) -> int:
    """hae-closed-loop within a process of others. Returns its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = argument_parser().parse_args(arguments)
        try:
            from hae import closed_loop_session as session
        except ImportError as error:
            return fail(f"{error}; install it with: pip install 'hae[record]'", USAGE, PROGRAM)
        session.run(options, arguments)
    except KeyboardInterrupt:
        return fail(INTERRUPTED, cleanup.BY_SIGNAL + signal.SIGINT, PROGRAM)
    except Exception as error:
        from hae.closed_loop_session import exit_code_of

        code = exit_code_of(error)
        if code is None:
            raise
        return fail(str(error), code, PROGRAM)
    return 0


if __name__ == "__main__":
    program()
