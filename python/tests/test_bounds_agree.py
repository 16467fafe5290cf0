"""The program's bounds against the oracle's, on the random traces of `test_replay_agrees.py`.

    python -m pytest python/tests/test_bounds_agree.py -k seed_17_
"""

import functools
import json
from collections import Counter

import numpy as np
import pytest
from oracle import mean_top_now, measure, optimal_total, sizes_at_attention
from test_replay_agrees import hae, make_case, replay_or_none

SEEDS = range(40)
MORE_POLICIES = ["greedy:budget=5", "random:budget=5,seed=3", "window:sinks=1,budget=6", "full"]

# What the cases must contain: policies with decode steps first, then traces.
INTERESTING = {
    "a policy loses more than it must": 60,
    "something must be lost": 60,
    "nothing must be lost, and a policy loses something": 3,
    "lanes of KV heads": 10,
    "masked rows": 5,
    "sliding windows": 5,
    "no decode step": 3,
}


def mass_rounding(tokens):
    """By how much a missed mass, relative to itself, can differ from that of the same tokens in
    exact arithmetic, the row's sum of all weights being given.

    The masses of evicted tokens are summed in 32 partial sums and a tree of 5 additions, each of
    which rounds by at most 2^-24 of what it gives.
    """
    return (-(-tokens // 32) - 1 + 5) * 2.0**-24


def optimum_rounding(trace, total):
    """By how much two totals of equally good logs can differ, and an optimum of costs in units of
    2^-40 from the exact one: a lane adds at most one cost a token, each rounded to half a unit.
    """
    lanes = trace.layers * trace.kv_heads
    return 2 * mass_rounding(trace.tokens) * total + lanes * trace.tokens * 2.0**-40


@functools.cache
def runs_of(seed):
    """The trace of a seed, and of each of its policies the oracle's run."""
    case = make_case(seed)
    specs = [*case.runs, *MORE_POLICIES]
    runs = {spec: replay_or_none(case.trace, spec) for spec in specs}
    return case, {spec: run for spec, run in runs.items() if run is not None}


def compare(case, specs, folder, *options):
    """`hae compare` of a trace: its runs, in the order of the specs."""
    npz, trace_file, result = folder / "trace.npz", folder / "trace.h5", folder / "result.json"
    np.savez(npz, **case.arrays)
    hae("import", npz, "--from", "npz", "--out", trace_file)
    policies = [argument for spec in specs for argument in ("--policy", spec)]
    hae("compare", trace_file, *policies, "--allow-unequal", "--json", result, *options)
    return json.loads(result.read_text())["runs"]


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"seed_{seed}_")
def test_program_and_oracle_agree_on_bounds(seed, tmp_path):
    case, oracle_runs = runs_of(seed)
    trace = case.trace
    for spec, run in zip(oracle_runs, compare(case, oracle_runs, tmp_path), strict=True):
        sizes = sizes_at_attention(trace, oracle_runs[spec])
        expected = optimal_total(trace, sizes)
        if expected is None:
            assert run["optimal"] is run["regret"] is run["top_now"] is None, spec
            continue
        rounding = optimum_rounding(trace, expected)
        assert run["optimal"] == pytest.approx(expected, rel=0, abs=rounding), spec
        total = run["missed_mass_total"]
        assert run["regret"] == total - run["optimal"], spec
        assert run["regret"] >= -optimum_rounding(trace, total), spec
        agree_on_top_now(trace, spec, run, mean_top_now(trace, sizes))


def agree_on_top_now(trace, spec, run, expected):
    found = run["top_now"]
    if expected is None:  # every row is masked
        assert found is None, spec
        return
    # Which of equal weights are outside can change how a row's sum rounds, and in which order the
    # rows are added how their mean does.
    rows = trace.layers * trace.query_heads * trace.steps
    rounding = 2 * mass_rounding(trace.tokens) + rows * 2.0**-53
    assert found == pytest.approx(expected, rel=rounding, abs=0), spec
    # Not even a set that changes from row to row can lose less.
    assert found <= run["decode"]["missed_mass"]["mean"] * (1 + rounding), spec


def test_the_optimum_can_be_left_out(tmp_path):
    case, oracle_runs = runs_of(0)
    runs = compare(case, oracle_runs, tmp_path, "--no-optimal")
    for spec, run in zip(oracle_runs, runs, strict=True):
        assert run["optimal"] is run["regret"] is None
        assert run["top_now"] is not None, spec


def test_the_cases_are_interesting_for_bounds():
    happened = Counter()
    for seed in SEEDS:
        case, oracle_runs = runs_of(seed)
        trace = case.trace
        happened["no decode step"] += trace.steps == 0
        happened["masked rows"] += any((totals == 0).any() for totals in trace.totals)
        happened["sliding windows"] += any(0 < window < trace.tokens for window in trace.windows)
        for run in oracle_runs.values() if trace.steps else []:
            happened.update(what_is_interesting(trace, run))
    found = "\n".join(
        f"{happened[name]:4} of at least {least:3}: {name}" for name, least in INTERESTING.items()
    )
    print(found)
    assert all(happened[name] >= least for name, least in INTERESTING.items()), found


def what_is_interesting(trace, run):
    sizes = sizes_at_attention(trace, run)
    optimum, total = optimal_total(trace, sizes), measure(trace, run)["missed_mass_total"]
    return {
        "a policy loses more than it must": total > optimum + 0.01,
        "something must be lost": optimum > 0.01,
        "nothing must be lost, and a policy loses something": optimum == 0 and total > 0.01,
        "lanes of KV heads": len(sizes) > trace.layers,
    }
