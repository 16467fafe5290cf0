"""The program hae-report."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hae import cleanup, files
from hae.arguments import OneLineParser, fail
from hae.errors import BAD_INPUT, USAGE

PROGRAM = "hae-report"
INTERRUPTED = "interrupted; nothing was written"


def argument_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog=PROGRAM,
        description="Write one self-contained HTML page about a comparison: tables, figures, the "
        "pictures with what was evicted dimmed, every token's life. It needs no network.",
        epilog="example: hae report results -o report.html",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="of hae compare --out DIR")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="F.html")
    parser.add_argument(
        "--trace",
        type=Path,
        action="append",
        default=[],
        metavar="F.h5",
        help="a trace that is no longer where it was compared, known by its bytes; several: give "
        "it again",
    )
    parser.add_argument(
        "--sequence",
        action="append",
        default=[],
        metavar="NAME_OR_INDEX",
        help="show the pictures and tokens of this sequence; several: give it again (default: the "
        "first ones)",
    )
    parser.add_argument(
        "--certificate", type=Path, metavar="F.json", help="of hae certify --json F.json"
    )
    parser.add_argument(
        "--closed-loop", type=Path, metavar="F.json", help="of hae closed-loop --json F.json"
    )
    return parser


def program(arguments: Sequence[str] | None = None) -> NoReturn:
    """hae-report as a process of its own: `main`, and what signals do."""
    cleanup.end_by_signals(PROGRAM, INTERRUPTED)
    sys.exit(main(arguments))


def main(arguments: Sequence[str] | None = None) -> int:
    """hae-report within a process of others. Returns its exit code."""
    try:
        options = argument_parser().parse_args(arguments)
        return _run(options)
    except KeyboardInterrupt:
        return fail(INTERRUPTED, cleanup.BY_SIGNAL + signal.SIGINT, PROGRAM)


def _run(options: argparse.Namespace) -> int:
    try:
        from hae.report import page
    except ImportError as error:
        return fail(f"{error}; install it with: pip install 'hae[report]'", USAGE, PROGRAM)
    from hae._engine import ConfigError
    from hae.run_file import ResultError

    if (problem := _unfit_output(options)) is not None:
        return fail(problem, USAGE, PROGRAM)
    try:
        text = page.of_folder(
            options.folder,
            traces=options.trace,
            sequences=options.sequence,
            certificate=options.certificate,
            closed_loop=options.closed_loop,
        )
    except ResultError as error:
        return fail(str(error), BAD_INPUT, PROGRAM)
    except ConfigError as error:
        return fail(str(error), USAGE, PROGRAM)
    try:
        files.write_whole(options.out, text.encode())
    except OSError as error:
        return fail(f"-o {options.out}: cannot be written: {error.strerror}", USAGE, PROGRAM)
    print(f"{options.out}: {len(text.encode()) / 2**20:.1f} MiB, one page that needs no network")
    return 0


def _unfit_output(options: argparse.Namespace) -> str | None:
    """Before any work: why the page cannot be written there."""
    out = options.out
    try:
        return _unfit(out, options)
    except (OSError, RuntimeError) as error:  # a name too long, a circle of links
        reason = getattr(error, "strerror", None) or error
        return f"-o {out}: cannot be written: {reason}; give another path"


def _unfit(out: Path, options: argparse.Namespace) -> str | None:
    if out.is_dir() or not out.parent.is_dir() or not os.access(out.parent, os.W_OK | os.X_OK):
        return f"-o {out}: cannot be written; give the path of a file in a folder that is there"
    inputs = [*options.trace, options.certificate, options.closed_loop]
    of_folder = [options.folder / name for name in ("result.json", "runs.h5")]
    inputs += [*of_folder, *_files_of_manifest(of_folder[0])]
    if out.resolve() in [path.resolve() for path in inputs if path is not None]:
        return f"-o {out}: would overwrite an input; choose another path"
    return None


def _files_of_manifest(result: Path) -> list[Path]:
    """Traces and logs that a result was made from; none where it cannot be read, which is told
    later.
    """
    try:
        manifest = json.loads(result.read_text(encoding="utf-8"))["manifest"]
        return [Path(file["path"]) for kind in ("traces", "logs") for file in manifest[kind] or ()]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return []
