"""Means and shares over independent sequences, with 95 % intervals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A value and the ends of its interval; ends are NaN where one sequence is all there is."""

    value: float
    low: float
    high: float

    @property
    def sign(self) -> int:
        """+1 or -1 when the interval lies on one side of 0, else 0."""
        return int(self.low > 0) - int(self.high < 0)


def mean_of(values: np.ndarray) -> Estimate:
    """Student's interval of a mean, also of differences within pairs. values: [sequences]"""
    values = np.asarray(values, dtype=np.float64)
    mean, count = float(values.mean()), len(values)
    if count < 2:
        return Estimate(mean, np.nan, np.nan)
    error = float(values.std(ddof=1)) / count**0.5
    half = float(stats.t.ppf((1 + LEVEL) / 2, count - 1)) * error
    return Estimate(mean, mean - half, mean + half)


def share_of(happened: np.ndarray) -> Estimate:
    """Wilson's interval of a share. happened: [sequences] bool"""
    count, of = int(np.sum(happened)), len(happened)
    found = stats.binomtest(count, of).proportion_ci(LEVEL, method="wilson")
    return Estimate(count / of, float(found.low), float(found.high))
