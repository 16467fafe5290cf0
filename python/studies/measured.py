"""What measure.py left behind: one part of the study as tables over sequences and policies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import copy
from pathlib import Path

import pandas as pd

import hae


class StudyError(Exception):
    """A folder does not hold what the study needs. The message says what, where and what next."""


class Part:
    """Every policy over every sequence.

    name  boards, choosing or text
    full  lines of the full cache, by sequence
    """

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        lines = list(_lines(folder))
        if not lines:
            raise StudyError(f"{folder}: no measurements; run measure.py --part {self.name} first")
        frame = pd.DataFrame(lines)
        self.full = frame[frame.policy == "full"].set_index("sequence")
        self._frame = frame[frame.policy != "full"]
        counts = self._frame.groupby("policy").sequence.nunique()
        if len(short := counts[counts < len(self.full)]):
            raise StudyError(
                f"{folder}: {short.index[0]} was measured on {short.iloc[0]} of {len(self.full)} "
                "sequences; the cells have changed: measure into an empty folder"
            )

    @property
    def sequences(self) -> list[str]:
        return list(self.full.index)

    @property
    def policies(self) -> list[str]:
        """Canonical specs."""
        return list(dict.fromkeys(self._frame.policy))

    def only(self, task: str) -> Part:
        """The sequences of one task."""
        part = copy(self)
        part.full = self.full[self.full.task == task]
        part._frame = self._frame[self._frame.task == task]
        return part

    def table(self, measure: str) -> pd.DataFrame:
        """[sequences, policies] of one measure or figure."""
        wide = self._frame.pivot(index="sequence", columns="policy", values=measure)
        return wide.loc[self.sequences, self.policies]

    def of(self, measure: str, spec: str, task: str | None = None) -> pd.Series:
        """[sequences] of one measure under one policy.

        raises StudyError when the policy was not measured
        """
        policy = hae.policy(spec).spec
        found = self._frame[self._frame.policy == policy]
        if found.empty:
            raise StudyError(
                f"{self.name}: {policy} was not measured; measure into an empty folder"
            )
        if task is not None:
            found = found[found.task == task]
        return found.set_index("sequence")[measure]


def _lines(folder: Path) -> Iterator[dict]:
    """Measures and figures of every (sequence, cell), flat."""
    for path in sorted(folder.glob("*.jsonl")):
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            yield line | line.pop("figures", {})
