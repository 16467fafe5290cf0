"""hae-export: which tokens a policy keeps, as arrays for programs of one's own."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hae import cleanup
from hae.arguments import OneLineParser, fail
from hae.errors import USAGE

PROGRAM = "hae-export"
INTERRUPTED = "interrupted; nothing was written"
FORMATS = (".npz", ".safetensors")


def moment(text: str) -> str | int:
    """prefill, end, or the number of a decode step"""
    if text in ("prefill", "end"):
        return text
    if text.isascii() and text.isdigit():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text}: expected prefill, end or the number of a step")


def output(text: str) -> Path:
    path = Path(text)
    if path.suffix not in FORMATS:
        raise argparse.ArgumentTypeError(
            f"{text}: expected a name that ends in .npz or .safetensors"
        )
    return path


def argument_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog=PROGRAM,
        description="Write the positions of the tokens that a policy keeps, of each layer or KV "
        "head, as arrays of integers (docs/export.md).",
        epilog="example: hae export traces/data/boards-test.h5 --policy hae:r=0.007,alpha=0.008 "
        "--out kept.safetensors",
    )
    parser.add_argument(
        "input",
        type=Path,
        metavar="INPUT",
        help="a folder of hae compare --out, a file of hae replay --out, or with --policy a trace "
        "or a folder of traces",
    )
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="SPEC",
        help="of a trace: the policy to replay; of stored runs: only those of this policy; "
        "several: give it again",
    )
    parser.add_argument(
        "--at",
        type=moment,
        default="prefill",
        metavar="prefill|end|STEP",
        help="when: after the prompt was pruned (default), after the last decode step, or after "
        "that step, counted from 1",
    )
    parser.add_argument(
        "--trace",
        action="append",
        default=[],
        type=Path,
        metavar="TRACE",
        help="where a trace of stored runs is now, if it has moved; several: give it again",
    )
    parser.add_argument(
        "--out",
        type=output,
        required=True,
        metavar="F",
        help="file to write: .npz or .safetensors",
    )
    return parser


def program(arguments: Sequence[str] | None = None) -> NoReturn:
    """hae-export as a process of its own: `main`, and what signals do."""
    cleanup.end_by_signals(PROGRAM, INTERRUPTED)
    sys.exit(main(arguments))


def main(arguments: Sequence[str] | None = None) -> int:
    """hae-export within a process of others. Returns its exit code."""
    options = argument_parser().parse_args(arguments)
    from hae import kept  # here: the libraries behind it take a while to load

    try:
        kept.export(options)
    except KeyboardInterrupt:
        return fail(INTERRUPTED, cleanup.BY_SIGNAL + signal.SIGINT, PROGRAM)
    except ImportError as error:
        return fail(f"{error}; install it with: pip install 'hae[export]'", USAGE, PROGRAM)
    except Exception as error:
        code = kept.exit_code_of(error)
        if code is None:
            raise
        return fail(str(error), code, PROGRAM)
    return 0


if __name__ == "__main__":
    program()
