"""The command line of hae-record."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from hae.errors import USAGE


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected at least 1")
    return value


MOST_LAYERS = 1_000_000  # of a trace


def layer_numbers(text: str) -> tuple[int, ...]:
    """`0,5-7` as 0 5 6 7, ascending, each once."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise argparse.ArgumentTypeError(f"{text!r}: expected layers as in 0,5-7")
        begin, end = int(first), int(last if dash else first)
        if not begin <= end < MOST_LAYERS:
            raise argparse.ArgumentTypeError(
                f"{part.strip()}: expected the smaller number first, and below {MOST_LAYERS}"
            )
        numbers.update(range(begin, end + 1))
    return tuple(sorted(numbers))


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line; --help shows the rest."""

    def error(self, message: str) -> NoReturn:
        sys.exit(fail(f"{message}; see {self.prog} --help", USAGE, self.prog))


def argument_parser() -> argparse.ArgumentParser:
    from hae import trace  # here: the libraries behind it take seconds to load

    parser = OneLineParser(
        prog="hae-record",
        description="Run a Hugging Face model and write one trace sequence per prompt.",
        epilog="example: hae record MODEL_DIR --prompts prompts.jsonl --max-new-tokens 32 "
        "--out trace.h5",
    )
    parser.add_argument(
        "model", type=Path, metavar="MODEL_DIR", help="of a family in python/README.md"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="F.h5")
    parser.add_argument(
        "--prompts",
        type=Path,
        required=True,
        metavar="F.jsonl",
        help="one JSON object a line: text, and optionally name, group, images (paths)",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="render each text, or `messages`, with the model's chat template",
    )
    parser.add_argument("--max-new-tokens", type=positive, default=64, metavar="N")
    parser.add_argument(
        "--beams",
        type=positive,
        default=1,
        metavar="N",
        help="record the best path of a beam search; default 1, greedy",
    )
    parser.add_argument(
        "--batch", type=positive, default=1, metavar="N", help="prompts that run at a time"
    )
    parser.add_argument("--payload", choices=trace.PAYLOADS, default="qkv")
    parser.add_argument(
        "--layers",
        type=layer_numbers,
        metavar="LIST",
        help="store these of the model's layers only, as in 0,5-7; default all",
    )
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
        type=positive,
        metavar="N",
        help="refuse a recording that may grow larger (and always what the disk cannot hold)",
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep the sequences that an interrupted run finished"
    )
    return parser


def fail(message: str, exit_code: int, program: str = "hae-record") -> int:
    """Says what is wrong in one line. Returns the exit code."""
    print(f"{program}: {' '.join(message.split())}", file=sys.stderr)
    return exit_code
