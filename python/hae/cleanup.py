"""What is done when a block ends, also when a signal ends the process in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

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


def do_all_now() -> None:
    """The actions of all blocks that have not ended, the innermost first."""
    for action in reversed(_pending):
        with suppress(OSError):
            action()
