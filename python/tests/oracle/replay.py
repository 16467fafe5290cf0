"""The replay engine: one pass over a trace for one policy, whose only result is the eviction log.

Open loop: queries, keys and values are those of the recorded full-cache run, so eviction acts on a
row only through renormalisation over the residents.
"""

from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from .arithmetic import divide_or_zero, row_sum
from .dap import decide_dap, head_reduced_rows


class Impossible(ValueError):
    """The options cannot be met on this trace: sinks + recent > budget."""


class Eviction(NamedTuple):
    step: int
    layer: int
    lane: int  # -1 when the layer is the lane
    token: int
    within: bool
    score: float | None
    pending_since: int | None


@dataclass
class Run:
    """The log, sorted by (step, layer, lane, token), and what was left pending as (layer, lane,
    token, since).
    """

    options: object
    log: list = field(default_factory=list)
    pending: list = field(default_factory=list)
    limits: list = field(default_factory=list)  # per layer
    ties_broken: int = 0


@dataclass(frozen=True)
class Limits:
    """What the options come to in one layer."""

    budget: int
    bin: int
    recent: int
    decode: str  # mark, batch, greedy or window


MASK64 = (1 << 64) - 1


def _mix(x):
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK64
    return x ^ x >> 31


def priority(seed, layer, lane, token):
    """The fixed priority of a token under `random`; the lowest goes first."""
    return _mix(_mix(_mix(_mix(seed) ^ layer) ^ lane) ^ token)


def replay(trace, options):
    run = Run(options)
    broadcast = {}
    for layer in range(trace.layers):
        decided_here = layer == 0 or options.broadcast == "none"
        if decided_here:
            broadcast = decide_dap(trace, layer, options)
        within = set() if decided_here or options.effect == "after" else set(broadcast)
        _replay_layer(trace, layer, broadcast, within, run)
    run.log.sort(key=lambda entry: entry[:4])
    return run


def _replay_layer(trace, layer, condemned, within, run):
    options = run.options
    rows = np.array([i for i in range(trace.prompt) if i not in within], np.int64)
    lanes = _make_lanes(trace, layer, rows, run)
    for lane in lanes:
        lane.observe(rows)
    # Prune. Tokens that left within the prefill were never resident in this layer's caches.
    for lane in lanes:
        for token, received in condemned.items():
            lane.evict(0, token, received, within=token in within)
    if options.decode == "none":
        return
    written = _limits(options, lanes[0].size(), trace, layer)
    limits = capped(written, options.sinks, trace.windows[layer])
    run.limits.append(limits)
    for lane in lanes:
        lane.fit(limits)
        for step in range(1, trace.steps + 1):
            query = trace.prompt + step - 1
            lane.join(query)
            lane.observe(np.array([query]))
            lane.decide(step, limits)
        lane.finish()


def _make_lanes(trace, layer, rows, run):
    heads = range(trace.query_heads)
    if run.options.lane == "layer":
        return [Lane(trace, layer, -1, heads, rows, run)]
    group = trace.query_heads // trace.kv_heads
    return [
        Lane(trace, layer, lane, heads[lane * group : (lane + 1) * group], rows, run)
        for lane in range(trace.kv_heads)
    ]


def _limits(options, size_after_dap, trace, layer):
    if options.decode == "window":
        return Limits(options.sinks + options.recent, 1, options.recent, "window")
    budget = size_after_dap if options.budget is None else options.budget
    capacity = options.bin
    if isinstance(capacity, Fraction):
        capacity = max(1, int(capacity * budget))  # exact, rounds down
    recent = options.recent
    if recent is None:
        recent = {
            "batch": max(0, min(capacity or 0, budget - options.sinks)),
            "mark": 1,
            "greedy": max(1, budget // 2) if options.name == "h2o/layerwise" else 1,
        }[options.decode]
    if options.sinks + recent > budget:
        raise Impossible(
            f"layer {layer}: sinks {options.sinks} + recent {recent} > budget {budget}"
        )
    return Limits(budget, capacity, recent, options.decode)


def capped(limits, sinks, window):
    """A budget above a layer's sliding window becomes the window: beside sinks its newest W - 1,
    all that a later row sees of it; else W.
    """
    recent = window - 1 if sinks else window
    if not window or limits.budget <= sinks + recent:
        return limits
    return Limits(sinks + recent, 1, recent, "window")


class Lane:
    """One cache that evicts on its own, with the scores of its residents."""

    def __init__(self, trace, layer, index, heads, prompt_rows, run):
        self.trace, self.layer, self.index, self.run = trace, layer, index, run
        self.options = run.options
        self.heads = list(heads)
        self.resident = np.zeros(trace.tokens, bool)
        self.resident[prompt_rows] = True
        self.marked_at = {}
        self.sums = np.zeros(trace.tokens)
        self.exposures = np.zeros(trace.tokens, np.int64)

    def size(self):
        return int(self.resident.sum())

    def join(self, token):
        self.resident[token] = True

    def observe(self, rows):
        """Add the rows to the scores of the residents, Eq. (5): reduced over heads, then rows
        ascending.
        """
        if self.options.score == "priority" or self.options.decode in ("none", "window"):
            return
        weights = self.trace.weights[self.layer][self.heads][:, rows]
        weights = np.where(self.resident, weights, np.float32(0))
        if self.options.scores == "observed":
            totals = row_sum(weights)
        else:
            totals = self.trace.totals[self.layer][self.heads][:, rows]
        shares = divide_or_zero(weights, totals[..., None])
        for row in head_reduced_rows(shares, self.options.group):
            self.sums = self.sums + row
        self.exposures += (self.trace.allowed[self.layer][rows] & self.resident).sum(axis=0)

    def rank(self, token):
        """What orders the tokens; among equals the older one goes first."""
        if self.options.score == "priority":
            return priority(self.options.seed, self.layer, max(self.index, 0), token), token
        return self.score(token), token

    def score(self, token):
        if self.options.score == "priority" or self.options.decode == "window":
            return None
        total = float(self.sums[token])
        return total / int(self.exposures[token]) if self.options.score == "mean" else total

    def evict(self, step, token, score, within=False):
        since = self.marked_at.pop(token, None)
        self.resident[token] = False
        self.run.log.append(Eviction(step, self.layer, self.index, token, within, score, since))

    def lowest(self, count, recent):
        """The `count` lowest unmarked tokens that are neither sinks nor recent (pending tokens
        count as recent).
        """
        positions = [int(j) for j in np.flatnonzero(self.resident)]
        unprotected = positions[: len(positions) - recent] if recent else positions
        eligible = [j for j in unprotected if j >= self.options.sinks and j not in self.marked_at]
        order = sorted(eligible, key=self.rank)
        if 0 < count < len(order) and self.rank(order[count - 1])[0] == self.rank(order[count])[0]:
            self.run.ties_broken += 1
        return order[:count]

    def fit(self, limits):
        """The end of the prefill: down to the budget."""
        if limits.decode == "window":
            self._slide(0, limits)
        else:
            self._shrink(0, self.size() - limits.budget, limits)

    def decide(self, step, limits):
        how = limits.decode
        if how == "mark":
            self._mark(step, limits)
        elif how == "batch" and self.size() >= limits.budget + limits.bin:
            # Def. 2: the D lowest at once.
            self._shrink(step, limits.bin, limits)
        elif how == "greedy":
            self._shrink(step, self.size() - limits.budget, limits)
        elif how == "window":
            self._slide(step, limits)

    def _mark(self, step, limits):
        # Fig. 1: mark one token a step, flush the recycle bin when it is full.
        if self.size() - len(self.marked_at) > limits.budget:
            for token in self.lowest(1, limits.recent):
                self.marked_at[token] = step
        if len(self.marked_at) == limits.bin:
            for token in sorted(self.marked_at):
                self.evict(step, token, self.score(token))

    def _shrink(self, step, count, limits):
        for token in self.lowest(max(0, count), limits.recent):
            self.evict(step, token, self.score(token))

    def _slide(self, step, limits):
        positions = [int(j) for j in np.flatnonzero(self.resident)]
        for token in positions[: max(0, len(positions) - limits.recent)]:
            if token >= self.options.sinks:
                self.evict(step, token, None)

    def finish(self):
        self.run.pending += [
            (self.layer, self.index, token, since)
            for token, since in sorted(self.marked_at.items())
        ]
