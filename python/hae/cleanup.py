"""What is done when a block ends, also when a signal ends the process in it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

BY_SIGNAL = 128

_pending: list[Callable[[], None]] = []


@contextmanager
def finally_do(action: Callable[[], None]) -> Iterator[None]:
    """Call `action` when the block ends; it may be called again when a signal comes meanwhile."""
    _pending.append(action)
    try:
        yield
    finally:
        action()
        _pending.remove(action)


def write_whole(path: Path, text: str) -> None:
    """Under a temporary name, then renamed: the file is there only when it is whole."""
    partial = path.with_name(path.name + ".partial")

    def remove() -> None:
        with suppress(OSError):
            partial.unlink(missing_ok=True)

    with finally_do(remove):
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)


def do_all_now() -> None:
    """The actions of all blocks that have not ended, the innermost first."""
    for action in reversed(_pending):
        with suppress(OSError):
            action()


def end_by_signals(program: str, words: str) -> None:
    """From now on SIGINT, SIGTERM and SIGHUP end the process: the actions of all blocks are done,
    the words stand on stderr in one line, and the exit code is 128 and the signal's number. A
    signal that was ignored stays so, as nohup asks.
    """

    def end(number: int, _: FrameType | None) -> NoReturn:
        # Not by an exception: Python drops those that come up while it finalises an object.
        do_all_now()
        with suppress(OSError):  # the terminal is gone
            # Not by print: the signal may have come in the middle of one.
            os.write(2, f"{program}: {words}\n".encode())
        os._exit(BY_SIGNAL + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
