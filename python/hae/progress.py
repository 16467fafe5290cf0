"""How far a recording is, and the time left: on a terminal only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm


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
    with tqdm(total=total, desc="recording", unit="token", disable=None, delay=1) as bar:
        yield Progress(bar, max_new_tokens)
