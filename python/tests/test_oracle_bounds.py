"""The oracle's bounds against all possible evictions of tiny traces."""

import os
import sys
from collections import Counter
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(__file__))

from oracle import (  # noqa: E402
    Trace,
    mean_top_now,
    measure,
    optimal_total,
    parse_policy,
    replay,
    sizes_at_attention,
    top_now,
)

F32 = np.float32
# A mass is a sum of at most 32 float32 numbers here, one a partial sum, so 5 of its additions round
# (the tree of partial sums), each by at most 2^-24 of it; so does that of all of the row.
MASS_RELATIVE = 10 * 2.0**-24


def random_trace(random, tokens, layers=1, query_heads=1, kv_heads=1, zero_rows=0.0):
    attention = np.zeros((layers, query_heads, tokens, tokens), F32)
    for index in np.ndindex(layers, query_heads, tokens):
        if random.random() >= zero_rows:
            # Few different shares, so that several evictions are equally good.
            row = random.integers(0, 4, index[2] + 1) + (np.arange(index[2] + 1) == index[2])
            attention[index][: index[2] + 1] = row / row.sum()
    prompt = int(random.integers(1, tokens))
    return Trace.from_arrays({"attention": attention, "prompt": prompt, "kv_heads": kv_heads})


def least_by_trying_all(trace, layer, lane, sizes):
    """The least exact total of one lane over every schedule of evictions with these sizes."""
    group = trace.query_heads // trace.kv_heads
    heads = range(trace.query_heads) if lane < 0 else range(lane * group, (lane + 1) * group)

    def missed(step, gone):
        total = Fraction(0)
        for head in heads:
            row = [Fraction(float(w)) for w in trace.weights[layer][head, trace.prompt + step - 1]]
            if sum(row):
                total += sum(row[token] for token in gone) / sum(row)
        return total

    def least(step, gone):
        """Of the rows from `step` on, when `gone` went before the step before it ended."""
        if step > trace.steps:
            return Fraction(0)
        there = [token for token in range(trace.prompt + step - 1) if token not in gone]
        leaving = len(there) + 1 - sizes[step - 1]
        return min(
            missed(step, gone | set(more)) + least(step + 1, gone | set(more))
            for more in combinations(there, leaving)
        )

    return least(1, frozenset())


SPECS = [
    "greedy:budget=2",
    "random:budget=2,seed=1",
    "hae:dap=none,ddes=batch,budget=1,bin=2,lane=kv_head",
    "h2o/layerwise:budget=2",
]


def test_the_optimum_is_the_least_of_all_evictions():
    happened = Counter()
    for seed in range(40):
        print(f"seed {seed}")
        random = np.random.default_rng(seed)
        heads = [(1, 1), (2, 1), (2, 2)][seed % 3]
        trace = random_trace(random, 6, 2, *heads, zero_rows=0.2 * (seed % 2))
        spec = SPECS[seed % len(SPECS)]
        run = replay(trace, parse_policy(spec))
        sizes = sizes_at_attention(trace, run)
        least = float(sum(least_by_trying_all(trace, *lane, sizes[lane]) for lane in sizes))
        found = optimal_total(trace, sizes)
        assert abs(found - least) <= MASS_RELATIVE * least
        regret = measure(trace, run)["missed_mass_total"] - found
        assert regret >= -2 * MASS_RELATIVE * least
        happened["something is lost"] += least > 0
        happened["the policy loses more"] += regret > 0.01
        happened["several lanes a layer"] += len(sizes) > trace.layers
    print(happened)
    assert len(happened) == 3 and min(happened.values()) >= 5


def trace_of(rows):
    """One layer and head of attention, row i over its i + 1 keys, after a prompt of one token."""
    attention = np.zeros((1, 1, len(rows), len(rows)), F32)
    for query, row in enumerate(rows):
        attention[0, 0, query, : query + 1] = row
    return Trace.from_arrays({"attention": attention, "prompt": 1})


def test_the_optimum_keeps_what_is_needed_once_more():
    # Rows of tokens 1, 2, 3 after a prompt of one; two residents at each attention, so one goes in
    # step 1 and one in step 2.
    #   step 1: row (1/2, 1/2)                 nothing is missing
    #   step 2: row (3/4, 0, 1/4)              without 0: 3/4; without 1: 0
    #   step 3: row (0, 1/2, 1/4, 1/4)         1 is gone: 1/2, and 0 may go: 1/2 in all;
    #                                          0 is gone and 2 goes: 3/4 + 1/4
    rows = [[1], [0.5, 0.5], [0.75, 0, 0.25], [0, 0.5, 0.25, 0.25]]
    trace = trace_of(rows)
    assert optimal_total(trace, {(0, -1): [2, 2, 2]}) == 0.5
    # With a second resident more in step 3, 1 still has to go for step 2 to miss nothing.
    assert optimal_total(trace, {(0, -1): [2, 2, 3]}) == 0.5
    # In the last step nobody needs 0: as step 2 needs all that is there, only step 3 misses.
    assert optimal_total(trace, {(0, -1): [2, 3, 3]}) == 0.0
    assert optimal_total(trace, {(0, -1): [2, 3, 4]}) == 0.0


def test_a_token_may_go_in_the_step_it_came_and_the_prompt_in_step_0():
    # One resident at each attention but the new token: 1 + 1. All later rows look at token 0.
    rows = [[1], [0.5, 0.5], [0.5, 0, 0.5], [0.5, 0, 0, 0.5]]
    trace = trace_of(rows)
    assert optimal_total(trace, {(0, -1): [2, 2, 2]}) == 0.0  # tokens 1 and 2 go as they came
    assert optimal_total(trace, {(0, -1): [1, 1, 1]}) == 1.5  # token 0 had to go in step 0


@pytest.mark.parametrize("seed", range(20))
def test_top_now_is_the_least_that_any_set_misses(seed):
    random = np.random.default_rng(seed)
    weights = (random.integers(0, 5, 7) / 4).astype(F32)  # every sum is exact
    for keys in range(8):
        missed = [
            sum(weights[list(outside)].tolist()) for outside in combinations(range(7), 7 - keys)
        ]
        total = weights.sum().item()
        expected = min(missed) / total if total else None
        assert top_now(weights, keys) == expected


def test_without_decode_steps_there_is_no_bound():
    trace = Trace.from_arrays({"attention": np.eye(3, dtype=F32)[None, None], "prompt": 3})
    assert optimal_total(trace, {(0, -1): []}) is None
    assert mean_top_now(trace, {(0, -1): []}) is None


def test_top_now_of_a_run_takes_the_residents_of_each_lane():
    # Two KV heads, decode rows of tokens 1 and 2: (1/2, 1/2), (1/8, 3/8, 1/2).
    rows = [[1, 0, 0], [0.5, 0.5, 0], [0.125, 0.375, 0.5]]
    trace = Trace.from_arrays({"attention": np.array([[rows, rows]], F32), "prompt": 1})
    # Head 0 with 1 and 2 keys: 1/2, 1/8. Head 1 with 2 and 1: 0, 1/2.
    assert mean_top_now(trace, {(0, 0): [1, 2], (0, 1): [2, 1]}) == (0.5 + 0.125 + 0 + 0.5) / 4
    assert mean_top_now(trace, {(0, -1): [2, 2]}) == (0 + 0.125 + 0 + 0.125) / 4


def test_masked_rows_are_in_no_bound():
    attention = np.zeros((1, 1, 3, 3), F32)
    attention[0, 0, 2] = [0.5, 0.25, 0.25]
    trace = Trace.from_arrays({"attention": attention, "prompt": 1})
    assert top_now(attention[0, 0, 1], 1) is None
    assert mean_top_now(trace, {(0, -1): [1, 1]}) == 0.5
    assert optimal_total(trace, {(0, -1): [1, 1]}) == 0.75  # 0 and 1 had to go
