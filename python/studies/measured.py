"""What measure.py left behind: one part of the study as tables over sequences and policies."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from copy import copy
from pathlib import Path

import pandas as pd

import hae


class StudyError(Exception):
    """A folder does not hold what the study needs. The message says what, where and what next."""


class Part:
    """Every policy over every sequence.

    name      boards, choosing or text
    full      lines of the full cache, by sequence
    policies  canonical specs, in the order in which they were measured
    """

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        lines = list(_lines(folder))
        if not lines:
            raise StudyError(f"{folder}: no measurements; run measure.py --part {self.name} first")
        frame = pd.DataFrame(lines)
        self.full = frame[frame.policy == "full"].set_index("sequence")
        cells = frame[frame.policy != "full"]
        self.policies = list(dict.fromkeys(cells.policy))
        counts = cells.groupby("policy").sequence.nunique()
        if len(short := counts[counts < len(self.full)]):
            raise StudyError(
                f"{folder}: {short.index[0]} was measured on {short.iloc[0]} of {len(self.full)} "
                "sequences; the cells have changed: measure into an empty folder"
            )
        self._tables = cells.pivot(index="sequence", columns="policy")

    @property
    def sequences(self) -> list[str]:
        return list(self.full.index)

    def only(self, task: str) -> Part:
        """The sequences of one task."""
        part = copy(self)
        part.full = self.full[self.full.task == task]
        return part

    def without(self, policies: Iterable[str]) -> Part:
        """Without some cells, by canonical spec."""
        part = copy(self)
        part.policies = [policy for policy in self.policies if policy not in set(policies)]
        return part

    def table(self, measure: str) -> pd.DataFrame:
        """[sequences, policies] of one measure or figure."""
        return self._tables[measure].loc[self.sequences, self.policies]

    def place(self, policy: str) -> int:
        """Where a canonical spec stands in `policies`.

        raises StudyError when it was not measured
        """
        if policy not in self.policies:
            raise StudyError(
                f"{self.name}: {policy} was not measured; measure into an empty folder"
            )
        return self.policies.index(policy)

    def of(self, measure: str, spec: str) -> pd.Series:
        """[sequences] of one measure under one policy.

        raises StudyError when the policy was not measured
        """
        return self.table(measure).iloc[:, self.place(hae.policy(spec).spec)]


def _lines(folder: Path) -> Iterator[dict]:
    """Measures and figures of every (sequence, cell), flat."""
    for path in sorted(folder.glob("*.jsonl")):
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            yield line | line.pop("figures", {})
