"""The program against the oracle: random small traces under random policies, event for event and
figure for figure.

The program is `$HAE_PROGRAM`, by default `build/bin/hae` of this repository. Every trace comes
from its seed alone:

    python -m pytest python/tests/test_replay_agrees.py -k seed_17_
"""

import functools
import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(__file__))

from oracle import Impossible, PolicyError, Trace, measure, parse_policy, replay  # noqa: E402
from oracle.dap import decide_dap  # noqa: E402

SEEDS = range(80)
POLICIES_PER_TRACE = 2
REPOSITORY = Path(__file__).resolve().parents[2]

# ln differs in its last digits between machines, and KL near 0 is the logarithm of a number near
# 1, whose relative error is that of the last digit of 1: hence the absolute part.
LN_RELATIVE, LN_ABSOLUTE = 1e-12, 1e-15
# The oracle forms o' from the residents' a'; the program may form it from the complement,
# (o - sum over evicted of a v) / (1 - m), when m <= 1/2. a, a' and m are float32 quotients, each
# off by 2^-24 relative, and values stay below 10: the two agree within 4 * 10 * 2^-24, or in
# relative terms where |o| is small.
OUTPUT_RELATIVE, OUTPUT_ABSOLUTE = 1e-6, 40 * 2.0**-24
# Both form the same a and o. Of squares over at most 16 dimensions the program rounds a fused
# multiply-add where the oracle rounds a square and a sum: with the tree and the product by a^2 each
# is within 6 * 2^-53, relative. All terms are >= 0, so sums keep that and add 2^-53 a term on
# either side: 4,000 tokens and rows.
PULL_RELATIVE = (2 * 6 + 2 * 4000) * 2.0**-53

# What the cases must contain for this test to mean anything, in (trace, policy) pairs.
INTERESTING = {
    "within evictions": 20,
    "decode evictions": 70,
    "pending at the end": 15,
    "ties broken": 30,
    "kv_head lanes with evictions": 25,
    "batch evictions": 10,
    "several images and DAP evictions": 15,
    "interleaved images and DAP evictions": 4,
    "scope=image evictions": 5,
    "dap=mass evictions": 10,
    "sliding windows and evictions": 12,
    "masked rows": 10,
    "rows that lost all mass": 5,
    "group of several query heads": 40,
    "float16": 30,
    "no decode step": 8,
    "one token": 2,
    "score=mean evictions": 10,
    "scores=full evictions": 10,
    "output errors": 50,
    "refused as impossible": 3,
}


# Traces


def random_arrays(rng, seed):
    """The arrays of one small `.npz` trace; a few seeds ask for one without decode steps or of one
    token.
    """
    tokens = int(rng.choice([8, 12, 17, 24, 31, 32, 33, 40, 48, 64, 65, 80]))
    prompt = int(max(rng.integers(1, tokens + 1, int(rng.integers(1, 3)))))
    if seed % 16 == 3:
        prompt = tokens
    if seed % 40 == 7:
        tokens = prompt = 1
    layers = int(
        rng.choice([1, 2, 3, 4], p=[0.15, 0.35, 0.25, 0.25]) if tokens <= 40 else rng.integers(1, 3)
    )
    kv_heads, group = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (2, 3), (4, 1), (3, 2)][
        rng.integers(8)
    ]
    shape = layers, kv_heads * group, kv_heads, tokens
    dtype = np.float16 if rng.random() < 0.4 else np.float32
    payload = _attention_payload if rng.random() < 0.5 else _qkv_payload
    arrays = payload(rng, shape, dtype)
    arrays["prompt"] = np.array(prompt, rng.choice(["u1", "i4", "i8", "u2"]))
    arrays.update(_modality(rng, tokens, prompt))
    return {
        name: np.asfortranarray(a) if a.ndim > 1 and rng.random() < 0.2 else a
        for name, a in arrays.items()
    }


def _qkv_payload(rng, shape, dtype):
    layers, query_heads, kv_heads, tokens = shape
    head_dim = int(rng.choice([1, 2, 3, 4, 8, 16]))
    kind = rng.choice(["normal", "peaked", "equal", "integers"], p=[0.4, 0.25, 0.1, 0.25])
    sizes = {"q": query_heads, "k": kv_heads, "v": kv_heads}
    arrays = {
        name: rng.normal(size=(layers, heads, tokens, head_dim)) for name, heads in sizes.items()
    }
    if kind == "peaked":
        # Logits far apart: most weights of a row underflow, to subnormal numbers or to nothing.
        arrays["q"] *= 20
        arrays["k"] *= 4
    if kind == "equal":
        arrays["q"] *= 0
    if kind == "integers":
        arrays = {name: np.rint(array) for name, array in arrays.items()}
    arrays = {name: array.astype(dtype) for name, array in arrays.items()}
    if rng.random() < 0.3:
        arrays["scale"] = np.array(rng.choice([1.0, 0.3, 0.0625]))
    if rng.random() < 0.4:
        arrays["window"] = rng.choice([0, 1, 3, 5, 9, 16, tokens + 3], layers)
    return arrays


def _attention_payload(rng, shape, dtype):
    layers, query_heads, kv_heads, tokens = shape
    kind = rng.choice(["smooth", "peaked", "equal", "dyadic", "self", "halves"])
    zero_rows = 0.1 if rng.random() < 0.5 else 0.0
    attention = np.zeros((layers, query_heads, tokens, tokens))
    for index in np.ndindex(layers, query_heads, tokens):
        if rng.random() >= zero_rows:
            attention[index][: index[2] + 1] = _row(rng, kind, index[2] + 1)
    arrays = {"attention": attention.astype(dtype)}
    if rng.random() < 0.6:
        arrays["v"] = rng.normal(size=(layers, kv_heads, tokens, int(rng.integers(1, 9)))).astype(
            dtype
        )
    else:
        arrays["kv_heads"] = np.array(kv_heads)
        if rng.random() < 0.5:
            arrays["head_dim"] = np.array(int(rng.integers(1, 9)))
    return arrays


def _row(rng, kind, keys):
    """One row of probabilities."""
    if kind == "equal":
        return np.full(keys, 1.0 / keys)
    if kind in ("self", "halves"):
        # All of it to the token itself, or half of it to the token before: all scores are equal.
        own = 1.0 if kind == "self" or keys == 1 else 0.5
        return np.array([0.0] * (keys - 2) + [1 - own, own])[-keys:]
    if kind == "dyadic":
        # 1/2, 1/4, ..., the last one twice, in any order: every sum is exact, and equal scores are
        # common.
        exponents = np.minimum(np.arange(1, keys + 1), keys - 1)
        return rng.permutation(0.5 ** np.minimum(exponents, 200)) if keys > 1 else np.ones(1)
    row = rng.random(keys)
    if kind == "peaked":
        row = np.exp(12 * rng.normal(size=keys)) * (rng.random(keys) < 0.7)
    total = row.sum()
    return row / total if total > 0 else np.full(keys, 1.0 / keys)


def _modality(rng, tokens, prompt):
    """0 to 3 images: spans anywhere, also at both ends and beyond the prompt, or tokens of several
    images in turn.
    """
    images = int(rng.choice(4, p=[0.15, 0.25, 0.3, 0.3]))
    if not images:
        return {} if rng.random() < 0.5 else {"modality": np.zeros(tokens, "u1")}
    image = np.full(tokens, -1)
    if rng.random() < 0.3:
        chosen = rng.random(tokens) < 0.6
        chosen[prompt:] = False
        image[chosen] = rng.integers(0, images, int(chosen.sum()))
    else:
        for number in rng.permutation(images):
            length = int(rng.integers(1, max(2, prompt * 3 // (2 * images))))
            first = int(
                rng.choice(
                    [0, max(0, prompt - length), rng.integers(0, prompt), rng.integers(0, tokens)]
                )
            )
            image[first : first + length] = number
    # Numbered in the order of their first tokens or not; an image that another one covers leaves a
    # gap to close.
    present = [number for number in range(images) if (image == number).any()]
    for new, old in enumerate(present):
        image[image == old] = new
    visual = image >= 0
    fields = {"modality": visual.astype(rng.choice(["u1", "i4", "i8"]))}
    begins = visual & ~np.concatenate([[False], visual[:-1]])
    by_span = np.where(visual, np.cumsum(begins) - 1, -1)
    if not (by_span == image).all() or rng.random() < 0.5:
        fields["image"] = image.astype(rng.choice(["i2", "i4", "i8"]))
    return fields


# Policies


def random_spec(rng, trace):
    """A spec that the program accepts; on this trace it may still be impossible."""
    name = rng.choice(
        ["hae", "greedy", "h2o/layerwise", "window", "random"], p=[0.68, 0.14, 0.07, 0.05, 0.06]
    )
    if name == "hae":
        options = _hae_options(rng, trace)
    elif name == "greedy":
        options = {**_ranking(rng, trace), **_protection(rng, trace)}
        if rng.random() < 0.4:
            options.update(_dap(rng, trace, ["threshold", "mass"]))
    elif name == "h2o/layerwise":
        # Its default of `recent` is half the budget as given, so the budget stays below every
        # sliding window.
        options = {
            "budget": min(_budget(rng, trace), _narrowest(trace)),
            **_lane(rng, trace, [None, "kv_head", "layer"], "kv_head"),
        }
        if rng.random() < 0.5:
            options["recent"] = int(rng.integers(0, options["budget"] + 1))
    elif name == "window":
        # The size of a window policy is no budget, so it stays below every sliding window.
        sinks = int(rng.integers(0, 4))
        size = sinks + int(rng.integers(1, _narrowest(trace) + 1))
        if size > _narrowest(trace):
            sinks, size = 0, _narrowest(trace)
        options = {
            "sinks": sinks,
            **({"budget": size} if rng.random() < 0.5 else {"recent": size - sinks}),
        }
    else:
        options = {"budget": _budget(rng, trace), "seed": int(rng.integers(0, 2**40))}
    keys = rng.permutation(list(options)) if options else []
    return name + (":" + ",".join(f"{key}={options[key]}" for key in keys) if options else "")


def _narrowest(trace):
    """The most tokens that a row of every layer can see."""
    return min([trace.tokens, *(window for window in trace.windows if window)])


def _budget(rng, trace):
    most = _narrowest(trace) if rng.random() < 0.7 else trace.tokens
    return int(rng.integers(1, max(2, int(most * rng.choice([0.3, 0.6, 1.1])) + 1)))


def _hae_options(rng, trace):
    options = _dap(rng, trace, ["threshold", "threshold", "threshold", "mass", "none"])
    ddes = rng.choice(["mark", "batch", "none", None], p=[0.3, 0.3, 0.1, 0.3])
    if ddes is not None:
        options["ddes"] = ddes
    options.update(_protection(rng, trace))
    if ddes == "none":
        options.pop("recent", None)
        options.pop("budget", None)
        options.update(
            {
                key: value
                for key, value in _lane(rng, trace, [None, "layer", "kv_head"]).items()
                if key == "lane"
            }
        )
        return options
    options.update(_ranking(rng, trace))
    if rng.random() < 0.7:
        options["bin"] = rng.choice(["1", "2", "3", "5", "7", "10%", "0.5", "33%", "0.29", "100%"])
    return options


def _protection(rng, trace):
    """budget, sinks and recent, mostly such that they fit together."""
    options = {}
    room = trace.prompt
    if rng.random() < 0.6:
        room = options["budget"] = _budget(rng, trace)
    elif rng.random() < 0.2:
        options["budget"] = "prompt"
    if rng.random() < 0.4:
        options["sinks"] = int(rng.integers(0, max(1, room // 2) + (rng.random() < 0.1) * 5))
    if rng.random() < 0.4:
        options["recent"] = int(
            rng.integers(0, max(1, room - options.get("sinks", 0)) + (rng.random() < 0.1) * 5)
        )
    return options


def _lane(rng, trace, lanes, default="layer"):
    options = {}
    lane = lanes[rng.integers(len(lanes))]
    if lane is not None:
        options["lane"] = lane
    if (lane or default) == "kv_head" and rng.random() < 0.5:
        options["group"] = rng.choice(["mean", "max", "sum"])
    return options


def _ranking(rng, trace):
    options = _lane(rng, trace, [None, "layer", "kv_head", "kv_head"])
    if rng.random() < 0.4:
        options["score"] = rng.choice(["sum", "mean", "mean"])
    if rng.random() < 0.4:
        options["scores"] = rng.choice(["observed", "full", "full"])
    return options


def _dap(rng, trace, kinds):
    """DAP options whose thresholds lie where some of this trace's visual tokens are on either
    side.
    """
    kind = kinds[rng.integers(len(kinds))]
    options = (
        {} if kind == "threshold" and kinds[-1] == "none" and rng.random() < 0.5 else {"dap": kind}
    )
    if kind == "none":
        return options
    visual = max(1, int(trace.visual[: trace.prompt].sum()))
    if kind == "mass":
        options["eps"] = rng.choice([0.03, 0.2, 0.5, 0.9, 1.0, 1.0, 1.0, 1.5])
    elif rng.random() < 0.9:
        options["r"] = float(rng.choice([0.3, 0.8, 1.0, 1.2, 2.0, 10.0])) / visual
    if rng.random() < (0.9 if kind == "threshold" else 0.4):
        options["alpha"] = rng.choice([0.001, 0.05, 0.2, 0.5, 0.5, 2.0, 2.0])
    for key, choices, chance in (
        ("heads", ["mean", "max", "max"], 0.4),
        ("scope", ["sequence", "image", "image"], 0.6),
        ("max_evicted", [1, 2, 5, 100], 0.2),
        ("broadcast", ["all", "none"], 0.3),
    ):
        if rng.random() < chance:
            options[key] = rng.choice(choices)
    if options.get("broadcast") != "none" and rng.random() < 0.3:
        options["effect"] = rng.choice(["within", "after", "after"])
    return options


# Cases


@dataclass(frozen=True)
class Case:
    seed: int
    arrays: dict
    trace: Trace
    runs: dict  # spec -> Run, or None where the options are impossible on this trace


# What is looked for, in turn, among the random policies of a trace; most runs would be uneventful
# otherwise.
WANTED = (
    lambda run: run is not None and any(entry.within for entry in run.log),
    lambda run: run is not None and run.ties_broken > 0,
    lambda run: run is not None and bool(run.log) and bool(run.pending),
    lambda run: run is not None and bool(run.log),
    lambda run: run is not None and run.options.dap == "mass" and bool(run.log),
    lambda run: run is not None and run.options.scope == "image" and bool(run.log),
    lambda run: run is not None and any(entry.step for entry in run.log),
    lambda run: run is None or run.ties_broken > 0,
)
TRACE_ATTEMPTS, SPEC_ATTEMPTS = 6, 25


@functools.cache
def make_case(seed):
    rng = np.random.default_rng(seed)
    wanted = [WANTED[(seed + 3 * number) % len(WANTED)] for number in range(POLICIES_PER_TRACE)]
    for _ in range(TRACE_ATTEMPTS):
        arrays = random_arrays(rng, seed)
        trace = Trace.from_arrays(arrays)
        runs = {}
        for is_wanted in wanted:
            spec, run = _random_run(rng, trace, is_wanted, runs)
            runs[spec] = run
        if all(is_wanted(run) for is_wanted, run in zip(wanted, runs.values(), strict=False)):
            break
    return Case(seed, arrays, trace, runs)


def _random_run(rng, trace, is_wanted, other_specs):
    for _ in range(SPEC_ATTEMPTS):
        spec = random_spec(rng, trace)
        run = replay_or_none(trace, spec)
        if is_wanted(run) and spec not in other_specs:
            break
    return spec, run


def self_attention(tokens):
    """One head in which every token attends to itself alone: all scores are equal."""
    return np.eye(tokens, dtype=np.float32)[None, None]


def nearly_halfway_logits():
    """Row 2's logit of key 0 is 1 + 2^-23 plus 2^-24 - 2^-70: just below halfway to key 1's 1 +
    2^-22.

    Fused it stays 1 + 2^-23. A sum in double is exactly halfway, and rounds to the even 1 + 2^-22.
    """
    q = np.zeros((1, 1, 3, 2), np.float32)
    q[0, 0, 2] = [1, 2**-12 * (1 + 2**-23)]
    k = np.zeros((1, 1, 3, 2), np.float32)
    k[0, 0, 0] = [1 + 2**-23, 2**-12 * (1 - 2**-23)]
    k[0, 0, 1] = [1 + 2**-22, 0]
    return {"q": q, "k": k, "v": np.ones((1, 1, 3, 2), np.float32), "scale": np.array(1.0)}


def rows_that_refute_equal_peak():
    """Row i < 4 gives itself 2^-i and token 0 the rest; row 4 gives token 3 0.9375."""
    rows = np.diag([1, 0.5, 0.25, 0.125, 0]).astype(np.float32)
    rows[1:4, 0] = [0.5, 0.75, 0.875]
    rows[4, [0, 3]] = [0.0625, 0.9375]
    return rows[None, None]


def one_text_row(*shares):
    """Visual tokens, then one text row that gives them these shares; two layers."""
    tokens = len(shares) + 1
    attention = np.eye(tokens, dtype=np.float32)
    attention[-1] = [*shares, 1 - sum(shares)]
    modality = np.arange(tokens) < len(shares)
    return {
        "attention": np.stack([attention[None]] * 2),
        "modality": modality.astype("u1"),
    }


# What random traces hit too rarely: arrays, prompt, specs.
FIXED = {
    # 100 * 0.29 is 28.999999999999996 in double.
    "shares_are_exact": (
        {"attention": self_attention(131)},
        100,
        ["hae:dap=none,bin=0.29", "hae:dap=none,ddes=batch,bin=29%"],
    ),
    # l = 4: recent = min(3, 4 - 3) = 1.
    "sinks_leave_one_recent": (
        {"attention": self_attention(20)},
        4,
        ["hae:dap=none,ddes=batch,sinks=3,bin=3", "hae:dap=none,ddes=batch,sinks=4,bin=3,budget=5"],
    ),
    # DDES misses nothing, greedy 0.9375.
    "equal_peak_is_refuted": (
        {"attention": rows_that_refute_equal_peak()},
        1,
        [
            "hae:dap=none,budget=1,bin=2,recent=0,scores=full",
            "greedy:budget=2,recent=0,scores=full",
        ],
    ),
    # Shares and thresholds are equal: A_V = 0.5, and ascending running sums of 1/16, 1/8, 1/4, 1/2.
    "dap_thresholds_are_met_exactly": (
        one_text_row(0.125, 0.25, 0.0625, 0.0625),
        5,
        [
            "hae:ddes=none,r=0.25,alpha=2",
            "hae:ddes=none,r=0.3,alpha=0.125",
            "hae:ddes=none,dap=mass,eps=0.25",
            "hae:ddes=none,dap=mass,eps=1,alpha=0.125",
            "hae:ddes=none,dap=mass,eps=0.25,sinks=3",
        ],
    ),
    # By position 1 + 2^-53 + 2^-53 rounds to 1; ascending it is 1 + 2^-52, more than all of it.
    "eps_of_one_takes_all": (
        one_text_row(1, 2**-53, 2**-53),
        4,
        ["hae:ddes=none,dap=mass,eps=1", "hae:ddes=none,dap=mass,eps=0.5"],
    ),
    # The scores that are evicted in step 0 show row 2's weights.
    "logits_are_fused": (
        nearly_halfway_logits(),
        3,
        ["greedy:budget=1", "greedy:budget=1,recent=0"],
    ),
}


def fixed_case(name):
    arrays, prompt, specs = FIXED[name]
    arrays = {**arrays, "prompt": np.array(prompt)}
    trace = Trace.from_arrays(arrays)
    return Case(0, arrays, trace, {spec: replay_or_none(trace, spec) for spec in specs})


def replay_or_none(trace, spec):
    try:
        return replay(trace, parse_policy(spec))
    except Impossible:
        return None


def what_is_interesting(case):
    """Counts, over the runs of one case, of what INTERESTING asks for."""
    count = Counter()
    trace = case.trace
    images = len(set(trace.image[: trace.prompt][trace.visual[: trace.prompt]].tolist()))
    spans = int((np.diff(trace.image) != 0).sum())
    for run in case.runs.values():
        if run is None:
            count["refused as impossible"] += 1
            continue
        options, log = run.options, run.log
        by_dap = evicts_by_dap(trace, options)
        figures = measure(trace, run)
        count.update(
            {
                "within evictions": any(entry.within for entry in log),
                "decode evictions": any(entry.step for entry in log),
                "pending at the end": bool(run.pending),
                "ties broken": run.ties_broken > 0,
                "kv_head lanes with evictions": trace.kv_heads > 1
                and any(entry.lane >= 0 for entry in log),
                "batch evictions": options.decode == "batch" and any(entry.step for entry in log),
                "several images and DAP evictions": images > 1 and by_dap,
                "interleaved images and DAP evictions": images > 1
                and spans > 2 * images
                and by_dap,
                "scope=image evictions": images > 1 and by_dap and options.scope == "image",
                "dap=mass evictions": by_dap and options.dap == "mass",
                "sliding windows and evictions": any(0 < w < trace.tokens for w in trace.windows)
                and bool(log),
                "masked rows": figures["masked_rows"] > 0,
                "rows that lost all mass": figures["removed_all_rows"] > 0,
                "group of several query heads": trace.query_heads > trace.kv_heads,
                "float16": trace.element_bytes == 2,
                "no decode step": trace.steps == 0,
                "one token": trace.tokens == 1,
                "score=mean evictions": options.score == "mean" and bool(log),
                "scores=full evictions": options.scores == "full" and bool(log),
                "output errors": bool(figures["decode"] and figures["decode"]["output_error"]),
            }
        )
    return count


def evicts_by_dap(trace, options):
    deciding = range(trace.layers) if options.broadcast == "none" else [0]
    return any(decide_dap(trace, layer, options) for layer in deciding)


def test_the_cases_are_interesting():
    total = Counter()
    for seed in SEEDS:
        total.update(what_is_interesting(make_case(seed)))
    found = "\n".join(
        f"{total[name]:4} of at least {least:3}: {name}" for name, least in INTERESTING.items()
    )
    print(found)
    assert all(total[name] >= least for name, least in INTERESTING.items()), (
        f"too few of some:\n{found}"
    )


def test_the_generated_specs_are_valid():
    for seed in SEEDS:
        for spec in make_case(seed).runs:
            try:
                parse_policy(spec)
            except PolicyError as error:
                pytest.fail(f"seed {seed}: {spec}: {error}")


# The program


def program():
    path = Path(os.environ.get("HAE_PROGRAM", REPOSITORY / "build" / "bin" / "hae"))
    if not os.access(path, os.X_OK):
        pytest.fail(
            f"{path} is not there: run script/build first, or set HAE_PROGRAM", pytrace=False
        )
    return str(path)


def hae(*arguments, expected=0):
    command = [program(), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == expected, (
        f"exit code {done.returncode}, expected {expected}: {' '.join(command)}\n{done.stderr}"
    )
    return done.stdout


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"seed_{seed}_")
def test_program_and_oracle_agree(seed, tmp_path):
    print(f"to repeat: python -m pytest {__file__} -k seed_{seed}_")
    agree(make_case(seed), tmp_path)


@pytest.mark.parametrize("name", FIXED)
def test_program_and_oracle_agree_where(name, tmp_path):
    case = fixed_case(name)
    assert all(run is not None and run.log for run in case.runs.values())
    print(f"to repeat: python -m pytest {__file__} -k {name}")
    agree(case, tmp_path)


def agree(case, tmp_path):
    npz, trace_file = tmp_path / "trace.npz", tmp_path / "trace.h5"
    save = np.savez_compressed if case.seed % 3 == 0 else np.savez
    save(npz, **case.arrays)
    print(f"  hae import {npz} --from npz --out {trace_file}")
    hae("import", npz, "--from", "npz", "--out", trace_file)
    texts = {}
    for spec, run in case.runs.items():
        print(f"  hae replay {trace_file} --policy {spec} --events")
        if run is None:
            assert hae("replay", trace_file, "--policy", spec, "--events", expected=2) == ""
            continue
        texts[spec] = hae("replay", trace_file, "--policy", spec, "--events")
        compare_events(texts[spec], run.log)
    if texts:
        compare_figures(case, trace_file, tmp_path / "compare.json", texts)


def compare_events(text, log):
    """Line for line: same entries in the same order, and scores that are the same double."""
    printed = [json.loads(line) for line in text.splitlines()]
    names = ("step", "layer", "lane", "token", "within", "score", "pending_since")
    for line, (event, entry) in enumerate(zip(printed, log, strict=False)):
        expected = {**dict(zip(names, entry, strict=True)), "into": None}
        assert event == expected, f"line {line}: the program says {event}, the oracle {expected}"
        assert type(event["within"]) is bool
    assert len(printed) == len(log), (
        f"the program evicts {len(printed)} times, the oracle {len(log)}; only one of them has "
        f"{(printed[len(log) :] or log[len(printed) :])[0]}"
    )


def compare_figures(case, trace_file, json_file, texts):
    """`hae compare` of the case's runs and `full`, which comes first in some cases."""
    specs = [*texts, "full"]
    if case.seed % 4 == 0:
        specs.reverse()
    policies = [argument for spec in specs for argument in ("--policy", spec)]
    arguments = [trace_file, *policies, "--json", json_file, "--allow-unequal"]
    print("  hae compare " + " ".join(map(str, arguments)))
    hae("compare", *arguments)
    runs = json.loads(json_file.read_text())["runs"]
    assert len(runs) == len(specs)
    all_figures = [
        measure(case.trace, case.runs.get(spec) or replay_or_none(case.trace, spec))
        for spec in specs
    ]
    for spec, run, figures in zip(specs, runs, all_figures, strict=True):
        where = f"{spec}: "
        assert run["policy"].partition(":")[0] == spec.partition(":")[0], where + run["policy"]
        compare_one(where, run, figures, case.trace.steps)
        if spec in texts:
            assert run["log_sha256"] == hashlib.sha256(texts[spec].encode()).hexdigest(), (
                where + "log_sha256"
            )
        assert run["unequal"] is is_unequal(case.trace, spec, figures, all_figures[0]), (
            where + "unequal"
        )


COUNTS = (
    "removed_all_rows",
    "masked_rows",
    "lowered_weights",
    "evictions",
    "events",
    "moved",
    "pending_final",
)


def compare_one(where, run, figures, steps):
    for name in COUNTS:
        assert run[name] == figures[name], (
            f"{where}{name}: the program says {run[name]}, the oracle {figures[name]}"
        )
    exact = [("tokens", name) for name in ("mean", "peak", "final")]
    exact += [
        ("bytes", name) for name in ("mean", "prefill", *(("peak", "final") if steps else ()))
    ]
    for path in exact:
        check(where, run, figures, path, 0, 0)
    for population in ("decode", "prefill"):
        for statistic in ("mean", "max", "p50", "p95"):
            # A quotient of defined floats, its mean a sum in a defined order.
            check(where, run, figures, (population, "missed_mass", statistic), 0, 0)
            check(where, run, figures, (population, "missed_pull", statistic), PULL_RELATIVE, 0)
            check(where, run, figures, (population, "kl", statistic), LN_RELATIVE, LN_ABSOLUTE)
            for metric in ("output_error", "output_error_relative"):
                check(
                    where,
                    run,
                    figures,
                    (population, metric, statistic),
                    OUTPUT_RELATIVE,
                    OUTPUT_ABSOLUTE,
                )
    check(where, run, figures, ("missed_mass_total",), 0, 0)


def check(where, run, figures, path, relative, absolute):
    """Absent is absent: a null, or a null in place of what would contain it."""
    said, expected = at_path(run, path), at_path(figures, path)
    message = f"{where}{'.'.join(path)}: the program says {said}, the oracle {expected}"
    assert (said is None) == (expected is None), message
    if expected is not None:
        assert abs(said - expected) <= relative * abs(expected) + absolute, message


def at_path(tree, path):
    for name in path:
        tree = None if tree is None else tree[name]
    return tree


def is_unequal(trace, spec, figures, first):
    """Mean bytes (tokens where there are none) more than max(1 %, one token a lane) from the first
    run's.
    """
    if spec == "full" or not trace.steps:
        return False
    if first["bytes"] is None:
        mean, of_first, token = Fraction(figures["token_mean"]), Fraction(first["token_mean"]), 1
    else:
        mean, of_first = (
            Fraction(figures["byte_total"], trace.steps),
            Fraction(first["byte_total"], trace.steps),
        )
        token = 2 * trace.head_dim * trace.element_bytes * trace.kv_heads * trace.layers
    return abs(mean - of_first) > max(of_first / 100, token)
