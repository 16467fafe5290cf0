"""What a recorder says: lines, and on a terminal how far it is and the time left."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

from tqdm import tqdm

# The lock that tqdm makes by itself is shared with forked processes: one that is killed while it
# holds it would stop the others.
tqdm.set_lock(RLock())


def say(text: str) -> None:
    """Print a line. When nobody reads any more, the recording goes on in silence."""
    try:
        with tqdm.external_write_mode():  # above the bar, if there is one
            print(text, flush=True)
    except BrokenPipeError:
        sys.stdout = None


class Progress:
    """Counts new tokens. A sequence that ends early counts as if it had them all."""

    def __init__(self, bar: tqdm, max_new_tokens: int) -> None:
        self._bar, self._max_new_tokens = bar, max_new_tokens
        self._finished = 0

    def step(self, tokens: int) -> None:
        self._bar.update(tokens)

    def finish(self, sequences: int) -> None:
        self._finished += sequences
        self._bar.update(self._finished * self._max_new_tokens - self._bar.n)


@contextmanager
def progress(sequences: int, max_new_tokens: int) -> Iterator[Progress]:
    total = sequences * max_new_tokens
    # disable=None: shown when stderr is a terminal.
    with tqdm(total=total, desc="recording", unit="token", disable=None) as bar:
        yield Progress(bar, max_new_tokens)
