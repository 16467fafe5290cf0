"""Metrics of a run. Everything follows from (trace, log); nothing of the policy is used."""

import math
from fractions import Fraction

import numpy as np

from .arithmetic import divide_or_zero, row_sum

METRICS = ("missed_mass", "missed_pull", "kl", "output_error", "output_error_relative")
NEVER = 1 << 62


def measure(trace, run):
    """The figures of one run, named as in `hae compare --json`. Absent figures are None."""
    kv_lanes = run.options.lane == "kv_head"
    evicted_at, within = _evictions(trace, run)

    decode, prefill = _Population(), _Population()
    for layer in range(trace.layers):
        for head in range(trace.query_heads):
            kv_head = head * trace.kv_heads // trace.query_heads
            key = layer, kv_head if kv_lanes else -1
            queries = np.arange(trace.prompt, trace.tokens)
            # What goes in a step goes after the step's rows were formed.
            gone = evicted_at[key][None, :] < (queries - trace.prompt + 1)[:, None]
            decode.add(trace, layer, head, kv_head, queries, gone)
            if within[key].any():
                queries = np.flatnonzero(~within[key][: trace.prompt])
                gone = np.broadcast_to(within[key], (len(queries), trace.tokens))
                prefill.add(trace, layer, head, kv_head, queries, gone)

    has_within = any(entry.within for entry in run.log)
    sizes = _Sizes(trace, evicted_at, within)
    return {
        "tokens": sizes.tokens(),
        "bytes": sizes.bytes(),
        "byte_total": sizes.byte_total(),
        "token_mean": sizes.token_mean(),
        "decode": decode.aggregates() if trace.steps else None,
        "prefill": prefill.aggregates() if has_within else None,
        "missed_mass_total": _ordered_sum(decode.values["missed_mass"]) if trace.steps else None,
        "removed_all_rows": decode.removed_all + prefill.removed_all,
        "masked_rows": sum(int((totals == 0).sum()) for totals in trace.totals),
        "lowered_weights": trace.lowered,
        "evictions": len(run.log),
        "events": len({entry[:3] for entry in run.log}),
        "moved": _moved(trace, run.log, evicted_at, within),
        "pending_final": len(run.pending),
    }


def sizes_at_attention(trace, run):
    """Residents of each lane at the attention of each decode step: (layer, lane) -> [step - 1]."""
    evicted_at, within = _evictions(trace, run)
    sizes = _Sizes(trace, evicted_at, within)
    return dict(zip(evicted_at, sizes.at_attention, strict=True))


def _evictions(trace, run):
    """By (layer, lane): the step in which each token goes, and whether it went within the
    prefill.
    """
    lanes = range(trace.kv_heads) if run.options.lane == "kv_head" else [-1]
    evicted_at = {
        (layer, lane): np.full(trace.tokens, NEVER)
        for layer in range(trace.layers)
        for lane in lanes
    }
    within = {key: np.zeros(trace.tokens, bool) for key in evicted_at}
    for entry in run.log:
        evicted_at[entry.layer, entry.lane][entry.token] = entry.step
        within[entry.layer, entry.lane][entry.token] |= entry.within
    return evicted_at, within


class _Population:
    """The rows of an aggregate, in the order (layer, head, row)."""

    def __init__(self):
        self.values = {metric: [] for metric in METRICS}
        self.removed_all = 0

    def add(self, trace, layer, head, kv_head, queries, gone):
        """Rows of one head; gone [row, key] are the evicted tokens of the lane."""
        if not len(queries):
            return
        weights = trace.weights[layer][head][queries]
        zero = np.float32(0)
        kept_weights = np.where(gone, zero, weights)
        total = trace.totals[layer][head][queries]
        lost = row_sum(np.where(gone, weights, zero))
        kept = row_sum(kept_weights)
        errors = [(None, None)] * len(queries)
        pulls = [None] * len(queries)
        if trace.values is not None:
            shares = divide_or_zero(weights, total[:, None])
            outputs = _outputs(shares, trace.values[layer][kv_head])
            pulls = _missed_pulls(shares, trace.values[layer][kv_head], outputs, gone)
            outputs_kept = _outputs(
                divide_or_zero(kept_weights, kept[:, None]), trace.values[layer][kv_head]
            )
            errors = list(zip(_norms(outputs - outputs_kept), _norms(outputs), strict=True))
        any_gone = gone.any(axis=1)
        for row in range(len(queries)):
            if total[row] == 0:
                continue  # masked: in no aggregate
            self.values["missed_mass"].append(min(1.0, float(lost[row]) / float(total[row])))
            if pulls[row] is not None:
                self.values["missed_pull"].append(pulls[row])
            if kept[row] == 0:
                self.removed_all += 1
                continue
            kl = -math.log(float(kept[row]) / float(total[row])) if any_gone[row] else 0.0
            self.values["kl"].append(kl)
            error, norm = errors[row]
            if error is not None:
                self.values["output_error"].append(error)
                if norm != 0:
                    self.values["output_error_relative"].append(error / norm)

    def aggregates(self):
        return {metric: _aggregate(values) for metric, values in self.values.items()}


def _outputs(shares, values):
    """sum_j a_j v_j in double, ascending by position: [row, key] and [key, dimension] -> [row,
    dimension]
    """
    output = np.zeros((shares.shape[0], values.shape[1]))
    shares, values = shares.astype(np.float64), values.astype(np.float64)
    for j in range(values.shape[0]):
        output = output + shares[:, j, None] * values[j]
    return output


def _missed_pulls(shares, values, outputs, gone):
    """sum over evicted j, ascending, of a_j^2 |v_j - o|^2, the squares over dimensions in the stated
    order but for the fused multiply-adds, which numpy lacks: [row, key], [key, dimension] and [row,
    dimension] -> [row]
    """
    shares, values = shares.astype(np.float64), values.astype(np.float64)
    missed = np.zeros(shares.shape[0])
    for j in range(values.shape[0]):
        difference = values[j] - outputs
        sums = [np.zeros(shares.shape[0]) for _ in range(8)]
        for dimension in range(values.shape[1]):
            square = difference[:, dimension] * difference[:, dimension]
            sums[dimension % 8] = sums[dimension % 8] + square
        for half in (4, 2, 1):
            sums = [sums[p] + sums[p + half] for p in range(half)]
        missed = missed + np.where(gone[:, j], shares[:, j] * shares[:, j] * sums[0], 0.0)
    return [float(x) for x in missed]


def _norms(vectors):
    squares = np.zeros(vectors.shape[0])
    for dimension in range(vectors.shape[1]):
        squares = squares + vectors[:, dimension] * vectors[:, dimension]
    return [float(x) for x in np.sqrt(squares)]


def _ordered_sum(values):
    total = 0.0
    for value in values:
        total = total + value
    return total


def _aggregate(values):
    """Mean in order, maximum, and percentiles by nearest rank; None over no rows."""
    if not values:
        return None
    ordered = sorted(values)

    def nearest_rank(percent):
        return ordered[-(-len(values) * percent // 100) - 1]

    return {
        "mean": _ordered_sum(values) / len(values),
        "max": ordered[-1],
        "p50": nearest_rank(50),
        "p95": nearest_rank(95),
    }


class _Sizes:
    """Residents of each lane: at the attention of each decode step, at the end, and at the end of
    its prefill.
    """

    def __init__(self, trace, evicted_at, within):
        self.trace = trace
        self.lanes = len(evicted_at)
        self.at_attention = []  # [lane][step - 1]
        self.final = []
        self.prefill = []
        for key, steps in evicted_at.items():
            sizes = [trace.prompt + s - int((steps < s).sum()) for s in range(1, trace.steps + 1)]
            self.at_attention.append(sizes)
            self.final.append(trace.tokens - int((steps != NEVER).sum()))
            self.prefill.append(trace.prompt - int(within[key].sum()))

    def token_total(self):
        return sum(sum(sizes) for sizes in self.at_attention)

    def token_mean(self):
        """Exact, as a Fraction; None without decode steps."""
        return (
            Fraction(self.token_total(), self.lanes * self.trace.steps)
            if self.trace.steps
            else None
        )

    def tokens(self):
        if not self.trace.steps:
            return None
        return {
            "mean": self.token_total() / (self.lanes * self.trace.steps),
            "peak": max(max(sizes) for sizes in self.at_attention),
            "final": sum(self.final) / self.lanes,
        }

    def _token_bytes(self):
        """Bytes of one token in one lane; a lane that is a layer holds all its KV heads."""
        trace = self.trace
        if trace.head_dim is None:
            return None
        kv_heads_of_lane = trace.layers * trace.kv_heads // self.lanes
        return 2 * trace.head_dim * trace.element_bytes * kv_heads_of_lane

    def byte_total(self):
        """Summed over lanes and decode steps."""
        each = self._token_bytes()
        return None if each is None else each * self.token_total()

    def bytes(self):
        each, steps = self._token_bytes(), self.trace.steps
        if each is None:
            return None
        by_step = [each * sum(sizes[s] for sizes in self.at_attention) for s in range(steps)]
        return {
            "mean": self.byte_total() / steps if steps else None,
            "peak": max(by_step) if steps else None,
            "final": each * sum(self.final),
            "prefill": each * sum(self.prefill),
        }


def _moved(trace, log, evicted_at, within):
    """Residents above the lowest evicted position, once a (step, layer, lane); `within` entries
    are a group apart.
    """
    lowest = {}
    for entry in log:
        group = entry.step, entry.layer, entry.lane, entry.within
        lowest[group] = min(lowest.get(group, NEVER), entry.token)
    moved = 0
    for (step, layer, lane, is_within), token in lowest.items():
        present = np.arange(trace.tokens) < trace.prompt + step
        if is_within:
            present &= ~within[layer, lane]
        else:
            present &= evicted_at[layer, lane] > step
        moved += int(present[token + 1 :].sum())
    return moved
