"""How well a figure of the open loop ranks policies by what they do in the closed loop.

A cell is a policy with its settings. Figures and closed-loop loss (KL) are means over sequences; a
figure is reliable when it orders the cells as the loss does. Arrays hold F figures, then the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from intervals import Estimate, mean_of
from measured import Part
from scipy.stats import rankdata

RESAMPLES, SEED = 1000, 20260202


def spearman(cells: np.ndarray) -> np.ndarray:
    """[..., F] rank correlation of [..., cells, F + 1]'s columns with the last; 0 if constant."""
    ranks = rankdata(cells, axis=-2)
    ranks -= ranks.mean(-2, keepdims=True)
    length = np.sqrt((ranks**2).sum(-2, keepdims=True))
    ranks /= np.where(length == 0, 1.0, length)
    return (ranks[..., :-1] * ranks[..., -1:]).sum(-2)


def spearman_within(cells: np.ndarray, groups: list[np.ndarray]) -> np.ndarray:
    """[..., F] mean of the rank correlations within groups of cells, e.g. those of one budget."""
    return np.mean([spearman(cells[..., group, :]) for group in groups], axis=0)


@dataclass(frozen=True)
class Scores:
    """Of one figure on one part of the study.

    Intervals are over sequences.

    overall       Spearman over all cells
    same_budget   Spearman over the policies of one budget, mean over budgets
    least         the smallest same_budget when one policy is left out
    pairs         of the pairs of policies with one budget whose loss differs beyond the interval of
                  the paired difference, the share that the figure orders as the loss does
    pairs_count   how many such pairs there are
    per_sequence  Spearman over all cells within one sequence, mean over sequences
    """

    overall: Estimate
    same_budget: Estimate
    least: float
    pairs: float
    pairs_count: int
    per_sequence: Estimate


def _cube(part: Part, figures: list[str]) -> np.ndarray:
    """[sequences, cells, F + 1] figures, then the loss."""
    return np.stack([part.table(name).to_numpy(float) for name in (*figures, "kl")], axis=-1)


def _budgets(part: Part, specs: dict[int, list[str]]) -> list[np.ndarray]:
    """Cells of each budget, in the order of `specs`."""
    return [np.array([part.place(spec) for spec in group]) for group in specs.values()]


def _resampled(cube: np.ndarray, groups: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """[RESAMPLES, F] overall and same-budget correlations, sequences drawn with replacement."""
    count = len(cube)
    draw = np.random.default_rng(SEED)
    times = draw.multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    cells = np.tensordot(times / count, cube, axes=1)
    return spearman(cells), spearman_within(cells, groups)


def _least(cells: np.ndarray, groups: list[np.ndarray]) -> np.ndarray:
    """[F] the smallest same-budget correlation when the i-th policy of every budget is left out."""
    left_out = [
        spearman_within(cells, [np.delete(group, index) for group in groups])
        for index in range(len(groups[0]))
    ]
    return np.min(left_out, axis=0)


def _pairs(cube: np.ndarray, groups: list[np.ndarray]) -> tuple[np.ndarray, int]:
    """[F] share of the clear pairs that a figure orders rightly, a tie counting half, NaN without
    such pairs; how many there are.
    """
    cells = cube.mean(0)
    right = np.zeros(cells.shape[1] - 1)
    clear = 0
    for group in groups:
        for a, b in combinations(group, 2):
            order = mean_of(cube[:, a, -1] - cube[:, b, -1]).sign
            if order != 0:
                clear += 1
                right += (1 + order * np.sign(cells[a, :-1] - cells[b, :-1])) / 2
    return (right / clear if clear else np.full_like(right, np.nan)), clear


def plain(
    part: Part, figures: list[str], specs: dict[int, list[str]]
) -> dict[str, tuple[float, float]]:
    """Spearman over all cells and within budgets, without intervals."""
    cells = _cube(part, figures).mean(0)
    found = zip(spearman(cells), spearman_within(cells, _budgets(part, specs)), strict=True)
    return {name: (float(a), float(b)) for name, (a, b) in zip(figures, found, strict=True)}


def scores(part: Part, figures: list[str], specs: dict[int, list[str]]) -> dict[str, Scores]:
    """Every figure's reliability on one part.

    specs  budget -> canonical specs of its policies, the same policies in the same order each time
    """
    groups = _budgets(part, specs)
    cube = _cube(part, figures)
    cells = cube.mean(0)
    overall, same = spearman(cells), spearman_within(cells, groups)
    overall_drawn, same_drawn = _resampled(cube, groups)
    least = _least(cells, groups)
    pairs, clear = _pairs(cube, groups)
    single = spearman(cube)

    def drawn(value: float, draws: np.ndarray) -> Estimate:
        return Estimate(float(value), *np.quantile(draws, (0.025, 0.975)))

    return {
        name: Scores(
            overall=drawn(overall[i], overall_drawn[:, i]),
            same_budget=drawn(same[i], same_drawn[:, i]),
            least=float(least[i]),
            pairs=float(pairs[i]),
            pairs_count=clear,
            per_sequence=mean_of(single[:, i]),
        )
        for i, name in enumerate(figures)
    }


def advantage(
    part: Part, figure: str, other: str, specs: dict[int, list[str]]
) -> tuple[Estimate, Estimate]:
    """By how much `figure` is more reliable than `other`, overall and at the same budget. Sequences
    are drawn for both alike.
    """
    cube = _cube(part, [figure, other])
    groups = _budgets(part, specs)
    cells = cube.mean(0)
    values = spearman(cells), spearman_within(cells, groups)
    found = []
    for value, draws in zip(values, _resampled(cube, groups), strict=True):
        low, high = np.quantile(draws[:, 0] - draws[:, 1], (0.025, 0.975))
        found.append(Estimate(float(value[0] - value[1]), float(low), float(high)))
    return found[0], found[1]
