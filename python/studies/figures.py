"""Open-loop figures of a run: candidates for predicting what eviction does to a model's answer.

All follow from the recorded full-cache run and the eviction log; some need the output projection of
the model too. Populations are decode rows. Symbols: a full-cache attention, m missed mass, o and o'
the output of a head with all keys and with the resident ones, W_o the output projection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

import hae


@dataclass
class Recorded:
    """The decode rows of a recorded sequence, all layers.

    attention  [layers, query_heads, steps, T] a
    values     [layers, query_heads, T, head_dim] of each query head's KV head
    output     [layers, query_heads, steps, head_dim] o
    projected  [layers, steps] length of W_o o, all heads together
    projection [layers, hidden, query_heads, head_dim] W_o
    residual   [layers, steps] length of the residual stream that the layer's attention is added to
    """

    attention: np.ndarray
    values: np.ndarray
    output: np.ndarray
    projected: np.ndarray
    projection: np.ndarray
    residual: np.ndarray
    prompt: int

    @classmethod
    def of(cls, sequence: hae.Sequence, projection: np.ndarray, residual: np.ndarray) -> Recorded:
        info = sequence.info
        group = info.query_heads // info.kv_heads
        rows = slice(info.prompt, info.tokens)
        attention = np.stack(
            [sequence.attention(layer)[:, rows].astype(np.float64) for layer in range(info.layers)]
        )
        values = np.stack(
            [np.repeat(sequence.values(layer), group, axis=0) for layer in range(info.layers)]
        ).astype(np.float64)
        output = attention @ values
        projected = np.einsum("lohd,lhsd->lso", projection, output)
        return cls(
            attention,
            values,
            output,
            np.linalg.norm(projected, axis=-1),
            projection,
            residual,
            info.prompt,
        )

    @cached_property
    def pull(self) -> np.ndarray:
        """[layers, query_heads, steps, T] (a |v - o|)^2: how far a token alone pulls the output."""
        v, o = self.values, self.output
        squares = (v**2).sum(-1)[:, :, None, :] + (o**2).sum(-1)[..., None]
        return self.attention**2 * np.maximum(squares - 2 * o @ v.swapaxes(-1, -2), 0.0)

    @cached_property
    def by_size(self) -> np.ndarray:
        """[layers, query_heads, steps, 5] the largest probabilities' keys, the largest last; among
        equal ones the newer counts as larger.
        """
        return np.argsort(self.attention, axis=-1, kind="stable")[..., -5:]

    def power(self, exponent: float) -> np.ndarray:
        """[layers, query_heads, steps, T] a to a power."""
        if exponent not in self._powers:
            self._powers[exponent] = self.attention**exponent
        return self._powers[exponent]

    @cached_property
    def _powers(self) -> dict[float, np.ndarray]:
        return {}


def residents(run: hae.Run) -> np.ndarray:
    """[layers, lanes, steps, T] bool: which tokens a lane holds when a step's row attends."""
    info = run.info
    lanes = run.attention_tokens.shape[1]
    tokens, steps = np.arange(info.tokens), np.arange(1, info.steps + 1)
    joined = tokens[None, :] < info.prompt + steps[:, None]
    held = np.broadcast_to(joined, (info.layers, lanes, info.steps, info.tokens)).copy()
    log = run.log
    for step, layer, lane, token in zip(log.step, log.layer, log.lane, log.token, strict=True):
        held[layer, max(lane, 0), step:, token] = False  # rows of later steps miss it
    return held


class Lost:
    """What one run takes from the rows of a recorded sequence."""

    def __init__(self, recorded: Recorded, run: hae.Run) -> None:
        self.recorded = recorded
        held = residents(run)
        heads = recorded.attention.shape[1]
        self.held = np.repeat(
            held, heads // held.shape[1], axis=1
        )  # [layers, query_heads, steps, T]
        kept = np.where(self.held, recorded.attention, 0.0)
        mass = kept.sum(-1)
        self.missed = np.clip(1.0 - mass, 0.0, 1.0)  # [layers, query_heads, steps] m
        renormalised = kept / np.maximum(mass, 1e-300)[..., None]
        self.error = (
            renormalised @ recorded.values - recorded.output
        )  # [layers, query_heads, steps, head_dim]
        self.kl = -np.log(np.maximum(mass, 1e-30))

    @property
    def error_length(self) -> np.ndarray:
        return np.linalg.norm(self.error, axis=-1)

    @property
    def projected_error(self) -> np.ndarray:
        """[layers, steps] length of W_o (o' - o), all heads together."""
        return np.linalg.norm(
            np.einsum("lohd,lhsd->lso", self.recorded.projection, self.error), axis=-1
        )

    @property
    def missing_everywhere(self) -> np.ndarray:
        """[steps, T] tokens that no head of any layer holds any more."""
        joined = self.recorded.attention.any(axis=(0, 1))
        return joined & ~self.held.any(axis=(0, 1))


def _relative_error(lost: Lost) -> np.ndarray:
    return lost.error_length / np.linalg.norm(lost.recorded.output, axis=-1)


def _everywhere(lost: Lost) -> float:
    """Attention of all heads to tokens that are missing in all layers."""
    mass = (lost.recorded.attention * lost.missing_everywhere).sum(-1)
    return float(mass.mean())


def _peaked(lost: Lost) -> np.ndarray:
    """[layers, query_heads, steps] weights that sum to 1: heads whose attention is concentrated."""
    a = lost.recorded.attention
    weight = (a**2).sum(-1)
    return weight / weight.sum()


def _lost_largest(lost: Lost) -> np.ndarray:
    """[layers, query_heads, steps] bool: the row's largest probability lies on an evicted token;
    among equal ones the newer counts as larger.
    """
    return ~np.take_along_axis(lost.held, lost.recorded.by_size[..., -1:], -1)[..., 0]


def _lost_top(lost: Lost, count: int) -> np.ndarray:
    """[layers, query_heads, steps] how many of the row's largest probabilities are lost."""
    top = lost.recorded.by_size[..., -count:]
    return (~np.take_along_axis(lost.held, top, -1)).sum(-1)


def _power(lost: Lost, exponent: float) -> np.ndarray:
    return lost.recorded.power(exponent).sum(-1)


def _lost_power(lost: Lost, exponent: float) -> np.ndarray:
    return np.where(lost.held, 0.0, lost.recorded.power(exponent)).sum(-1)


def _lost_pull(lost: Lost) -> np.ndarray:
    return np.where(lost.held, 0.0, lost.recorded.pull)


def _late(lost: Lost) -> np.ndarray:
    return lost.missed[..., lost.missed.shape[-1] // 2 :]


FIGURES: dict[str, Callable[[Lost], float]] = {
    "missed mass, mean": lambda x: float(x.missed.mean()),
    "missed mass, p95": lambda x: float(np.quantile(x.missed, 0.95)),
    "missed mass, max over heads, mean over layers and rows": lambda x: float(
        x.missed.max(1).mean()
    ),
    "missed mass, max over layers and heads, mean over rows": lambda x: float(
        x.missed.max((0, 1)).mean()
    ),
    "missed mass, min over heads, mean": lambda x: float(x.missed.min(1).mean()),
    "missed mass, min over layers and heads, mean over rows": lambda x: float(
        x.missed.min((0, 1)).mean()
    ),
    "missed mass, first layer": lambda x: float(x.missed[0].mean()),
    "missed mass, second layer": lambda x: float(x.missed[1].mean()),
    "missed mass, last layer": lambda x: float(x.missed[-1].mean()),
    "missed mass, second half of the layers": lambda x: float(
        x.missed[len(x.missed) // 2 :].mean()
    ),
    "missed mass, late rows": lambda x: float(_late(x).mean()),
    "missed mass, product of (1 - m) over layers": lambda x: float(
        1.0 - np.prod(1.0 - x.missed.mean(1), axis=0).mean()
    ),
    "missed mass, peaked heads weigh more": lambda x: float((_peaked(x) * x.missed).sum()),
    "missed mass squared, mean": lambda x: float((x.missed**2).mean()),
    "share of rows with m > 1/2": lambda x: float((x.missed > 0.5).mean()),
    "share of rows with m > 0.9": lambda x: float((x.missed > 0.9).mean()),
    "share of rows that lost their largest key": lambda x: float(_lost_largest(x).mean()),
    "share of rows that lost their largest key, second layer": lambda x: float(
        _lost_largest(x)[1].mean()
    ),
    "probability of a lost largest key, mean": lambda x: float(
        (_lost_largest(x) * x.recorded.attention.max(-1)).mean()
    ),
    "probability of a lost largest key / probability of a largest key": lambda x: float(
        (_lost_largest(x) * x.recorded.attention.max(-1)).sum() / x.recorded.attention.max(-1).sum()
    ),
    "lost squared probability, mean": lambda x: float(_lost_power(x, 2).mean()),
    "lost squared probability / squared probability, mean": lambda x: float(
        (_lost_power(x, 2) / _power(x, 2)).mean()
    ),
    "lost squared probability / squared probability, of all rows": lambda x: float(
        _lost_power(x, 2).sum() / _power(x, 2).sum()
    ),
    "lost cubed probability / cubed probability, mean": lambda x: float(
        (_lost_power(x, 3) / _power(x, 3)).mean()
    ),
    "lost p^1.5 / p^1.5, mean": lambda x: float((_lost_power(x, 1.5) / _power(x, 1.5)).mean()),
    "share of rows that lost two of their three largest keys": lambda x: float(
        (_lost_top(x, 3) >= 2).mean()
    ),
    "share of the three largest keys that are lost": lambda x: float(_lost_top(x, 3).mean() / 3),
    "share of the five largest keys that are lost": lambda x: float(_lost_top(x, 5).mean() / 5),
    "lost squared probability, max over heads, mean": lambda x: float(
        _lost_power(x, 2).max(1).mean()
    ),
    "lost squared a |v - o|, mean": lambda x: float(_lost_pull(x).sum(-1).mean()),
    "lost squared a |v - o| / squared a |v - o|, of all rows": lambda x: float(
        _lost_pull(x).sum() / x.recorded.pull.sum()
    ),
    "projected output error / residual, max over rows": lambda x: float(
        (x.projected_error / x.recorded.residual).mean(0).max()
    ),
    "largest single lost probability, mean": lambda x: float(
        (x.recorded.attention * ~x.held).max(-1).mean()
    ),
    "KL of attention, mean": lambda x: float(x.kl.mean()),
    "KL of attention, max over heads, mean": lambda x: float(x.kl.max(1).mean()),
    "output error, mean": lambda x: float(x.error_length.mean()),
    "output error, root mean square": lambda x: float(np.sqrt((x.error_length**2).mean())),
    "relative output error, mean": lambda x: float(_relative_error(x).mean()),
    "relative output error, max over heads, mean": lambda x: float(
        _relative_error(x).max(1).mean()
    ),
    "output error of all heads / output of all heads, mean": lambda x: float(
        (
            np.linalg.norm(x.error, axis=(1, 3)) / np.linalg.norm(x.recorded.output, axis=(1, 3))
        ).mean()
    ),
    "output error of all heads / output of all heads, max over layers": lambda x: float(
        (np.linalg.norm(x.error, axis=(1, 3)) / np.linalg.norm(x.recorded.output, axis=(1, 3)))
        .max(0)
        .mean()
    ),
    "projected output error / projected output, mean": lambda x: float(
        (x.projected_error / x.recorded.projected).mean()
    ),
    "projected output error / projected output, max over layers": lambda x: float(
        (x.projected_error / x.recorded.projected).max(0).mean()
    ),
    "projected output error, mean": lambda x: float(x.projected_error.mean()),
    "projected output error / residual, mean": lambda x: float(
        (x.projected_error / x.recorded.residual).mean()
    ),
    "projected output error / residual, root sum of squares over layers": lambda x: float(
        np.sqrt(((x.projected_error / x.recorded.residual) ** 2).sum(0)).mean()
    ),
    "projected output error / residual, max over layers": lambda x: float(
        (x.projected_error / x.recorded.residual).max(0).mean()
    ),
    "attention to tokens missing in all layers": _everywhere,
    "share of tokens missing in all layers": lambda x: float(
        x.missing_everywhere.sum() / x.recorded.attention.any(axis=(0, 1)).sum()
    ),
    "attention to tokens missing in all layers, max over layers and heads": lambda x: float(
        (x.recorded.attention * x.missing_everywhere).sum(-1).max((0, 1)).mean()
    ),
    "tokens evicted, share": lambda x: float(
        1
        - x.held.sum()
        / (x.held.shape[0] * x.held.shape[1] * x.recorded.attention.any(axis=(0, 1)).sum())
    ),
}


def figures(recorded: Recorded, run: hae.Run) -> dict[str, float]:
    lost = Lost(recorded, run)
    return {name: compute(lost) for name, compute in FIGURES.items()}
