"""Numbers that programs stumble over, through every command: NaN and infinities, logits that
overflow, rows of zeros, rows that lost all their mass, subnormal weights, thousands of ties and
thousands of tiny additions.

The program is `$HAE_PROGRAM`, by default `build/bin/hae` of this repository. Random traces come
from their seed alone:

    python -m pytest python/tests/test_hard_numbers.py -k seed_3_
"""

import csv
import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(__file__))

from oracle import Trace, measure, parse_policy, replay  # noqa: E402
from test_replay_agrees import compare_events, compare_one, program, random_spec  # noqa: E402

from hae import trace as traces  # noqa: E402

NAN, INFINITY = np.nan, np.inf
NOT_FINITE = [NAN, -NAN, INFINITY, -INFINITY]
LARGEST = {"float32": 3.4028235e38, "float16": 65504.0, "bfloat16": 3.3895314e38}
# The tolerance of a row's sum (traces/FORMAT.md).
TOLERANCE = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1e-2}
ORIGIN = traces.Origin(recorder="test", libraries="numpy", command="test_hard_numbers")


# Traces


def stored(values, dtype):
    """What is stored of float32 values: the array for the file, NaN and infinities included."""
    values = np.asarray(values, np.float32)
    if dtype == "bfloat16":
        return traces.bfloat16_codes(values)
    with np.errstate(over="ignore"):
        return values.astype(traces.storage_dtype(dtype))


def rounded(values, dtype):
    """The float32 values that a reader gets back."""
    codes = stored(values, dtype)
    return traces.bfloat16_values(codes) if dtype == "bfloat16" else codes.astype(np.float32)


def write_trace(path, *sequences):
    """Each sequence is a dictionary as `hae import --from npz` takes it, and `dtype`, `name`."""
    with traces.new_trace(path, ORIGIN) as file:
        for index, arrays in enumerate(sequences):
            _write_sequence(file, index, arrays)
    return path


def _write_sequence(file, index, arrays):
    info = _info(arrays, f"s{index}")
    group = traces.create_sequence(file, index, info)
    dtype = arrays.get("dtype", "float32")
    for layer in range(info.layers):
        part = group.create_group(f"layers/{layer:06d}")
        payload = {name: arrays[name][layer] for name in ("q", "k", "v") if name in arrays}
        if info.payload == "attention":
            payload |= _attention_datasets(arrays["attention"][layer], info.prompt)
        for name, values in payload.items():
            dataset = traces.create_numbers(part, name, values.shape, dtype)
            for head, numbers in enumerate(values):
                traces.write_numbers(dataset, head, stored(numbers, dtype))


def _info(arrays, name):
    payload = "attention" if "attention" in arrays else "qkv"
    main = arrays["attention" if payload == "attention" else "q"]
    layers, query_heads, tokens = main.shape[:3]
    sizes = arrays.get("v", arrays.get("k", np.empty((layers, query_heads, tokens, 1))))
    modality = np.asarray(arrays.get("modality", np.zeros(tokens)))
    prompt = int(arrays["prompt"])
    return traces.SequenceInfo(
        name=arrays.get("name", name),
        group=arrays.get("name", name),
        payload=payload,
        layers=layers,
        query_heads=query_heads,
        kv_heads=sizes.shape[1],
        head_dim=sizes.shape[3],
        prompt=prompt,
        generated=tokens - prompt + 1,
        scale=float(arrays.get("scale", 1 / np.sqrt(sizes.shape[3]))),
        model="",
        attention_implementation="",
        modality=modality,
        image=np.where(modality == 1, 0, -1),
        patch=None,
        token_id=np.arange(tokens),
        token=[""] * tokens,
        window=np.asarray(arrays.get("window", np.zeros(layers))),
    )


def _attention_datasets(square, prompt):
    """Square attention of one layer as the format keeps it; what it cannot keep must be 0."""
    tokens = square.shape[1]
    assert not square[:, :prompt, prompt:].any()
    assert not np.triu(square[:, prompt:], k=prompt + 1).any()
    datasets = {"prompt": square[:, :prompt, :prompt]}
    if tokens > prompt:
        rows = [square[:, query, : query + 1] for query in range(prompt, tokens)]
        datasets["decode"] = np.concatenate(rows, axis=1)
    return datasets


def as_read(arrays):
    """The arrays as a reader gets them, and the bytes of one of their numbers."""
    dtype = arrays.get("dtype", "float32")
    names = ("q", "k", "v", "attention")
    numbers = {name: rounded(arrays[name], dtype) for name in names if name in arrays}
    return arrays | numbers, traces.element_bytes(dtype)


def oracle_trace(arrays):
    """What `--nan=lowest` makes of it."""
    read, element_bytes = as_read(arrays)
    return dataclasses.replace(
        Trace.from_arrays(read, nan_is_lowest=True), element_bytes=element_bytes
    )


# The program


def hae(*arguments, expected=0, lines=1):
    """What it prints. A success is silent on stderr, an error one line there and nothing else."""
    command = [program(), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == expected, f"{done.returncode}: {' '.join(command)}\n{done.stderr}"
    if expected == 0:
        assert done.stderr == ""
        return done.stdout
    assert done.stdout == ""
    assert done.stderr.count("\n") == lines, done.stderr
    return done.stderr


def strict_json(path):
    """A JSON document without the NaN and Infinity that Python, unlike JSON, would accept."""

    def refuse(word):
        raise AssertionError(f"{path} holds {word}")

    return json.loads(Path(path).read_text(), parse_constant=refuse)


def events(trace, spec, *more):
    text = hae("replay", trace, "--policy", spec, "--events", *more)
    return [json.loads(line) for line in text.splitlines()]


def compared(trace, specs, folder, *more):
    """The runs of a comparison, in order of `specs`."""
    result = folder / "result.json"
    policies = [word for spec in specs for word in ("--policy", spec)]
    hae("compare", trace, *policies, "--allow-unequal", "--json", result, *more)
    return strict_json(result)["runs"]


def error(trace, *more, spec="full"):
    """The line that a replay ends with, and a comparison as well, on any number of threads."""
    line = hae("replay", trace, "--policy", spec, *more, expected=3)
    for threads in (1, 2):
        policies = ("--policy", spec, "--policy", "window:sinks=0,recent=1")
        command = ("compare", trace, *policies, "--threads", threads, *more)
        assert hae(*command, expected=3) == line
    return line


# Random traces

SEEDS = range(36)
LAYOUTS = [(1, 1), (1, 2), (2, 2), (2, 4), (1, 4)]  # KV heads and query heads
INTERESTING = {
    "qkv": 12,
    "attention": 12,
    "float32": 8,
    "float16": 8,
    "bfloat16": 8,
    "several query heads a KV head": 12,
    "sliding window": 4,
    "bad in the prompt": 15,
    "bad in decode rows alone": 2,
    "logit that overflows though all is finite": 3,
    "masked rows": 15,
    "rows that lost all mass": 8,
    "within evictions": 4,
    "decode evictions": 15,
    "no decode step": 2,
}


def hard_arrays(seed):
    """A trace of ordinary numbers with a few that are not."""
    rng = np.random.default_rng(seed)
    kv_heads, query_heads = LAYOUTS[seed % len(LAYOUTS)]
    tokens = int(rng.choice([9, 12, 31, 33, 40, 65]))
    prompt = tokens if seed % 16 == 5 else int(rng.integers(2, tokens))
    layers = int(rng.integers(1, 4))
    dtype = traces.DTYPES[seed % 3]
    shape = layers, kv_heads, query_heads, tokens, prompt
    arrays = hard_qkv(rng, shape, dtype) if seed % 2 else hard_attention(rng, shape, dtype)
    visual = int(rng.integers(0, prompt)) if rng.random() < 0.6 else 0
    modality = np.arange(tokens) < visual
    return arrays | {"prompt": np.array(prompt), "modality": modality, "dtype": dtype}


def hard_qkv(rng, shape, dtype):
    layers, kv_heads, query_heads, tokens, prompt = shape
    head_dim = int(rng.choice([1, 2, 4, 8]))
    heads = {"q": query_heads, "k": kv_heads, "v": kv_heads}
    arrays = {
        name: rng.normal(size=(layers, count, tokens, head_dim)).astype(np.float32)
        for name, count in heads.items()
    }
    finite_only = rng.random() < 0.4
    bad = [LARGEST[dtype], -LARGEST[dtype]] + ([] if finite_only else NOT_FINITE)
    late = rng.random() < 0.3
    for _ in range(int(rng.integers(1, 5))):
        array = arrays[rng.choice(["q", "k"])]
        position = int(rng.integers(prompt, tokens)) if late and prompt < tokens else None
        place = [int(rng.integers(0, extent)) for extent in array.shape]
        place[2] = place[2] if position is None else position
        array[tuple(place)] = rng.choice(bad)
    if finite_only or rng.random() < 0.3:
        # Logits of float16 numbers overflow float32 only by their scale.
        arrays["scale"] = np.array(rng.choice([1e30, 3e38] if dtype == "float16" else [1.0, 3e38]))
    if rng.random() < 0.5:
        arrays["window"] = rng.choice([0, 1, 4, 9], layers)
    return arrays


def hard_attention(rng, shape, dtype):
    layers, kv_heads, query_heads, tokens, prompt = shape
    attention = np.zeros((layers, query_heads, tokens, tokens), np.float32)
    for layer, head, query in np.ndindex(attention.shape[:3]):
        kind = rng.choice(["smooth", "smooth", "first", "zeros", "minus zeros"])
        row = attention[layer, head, query, : query + 1]
        if kind == "smooth":
            row[:] = rng.random(query + 1)
            row[:] /= row.sum()
        elif kind == "first":
            row[0] = 1
        elif kind == "minus zeros":
            row[:] = -0.0
    late = rng.random() < 0.3
    for _ in range(int(rng.integers(1, 6))):
        first = prompt if late and prompt < tokens else 0
        query = int(rng.integers(first, tokens))
        keys = prompt if query < prompt else query + 1  # in prompt rows above the diagonal, too
        layer, head = int(rng.integers(layers)), int(rng.integers(query_heads))
        count = int(rng.choice([1, 2, keys]))
        attention[layer, head, query, rng.integers(0, keys, count)] = rng.choice(NOT_FINITE)
    v = rng.normal(size=(layers, kv_heads, tokens, 3)).astype(np.float32)
    return {"attention": attention, "v": v}


def first_bad_place(arrays):
    """(layer, head, row, key) of the first NaN or infinity as a replay meets them: prompt rows of
    each layer, then decode rows of each layer; in a layer the first row, in it the first head, in
    it the first key. None if there is none.
    """
    read, _ = as_read(arrays)
    prompt = int(read["prompt"])
    if "attention" in read:
        bad = ~np.isfinite(read["attention"])
    else:
        bad = _bad_logits(read)
    for rows in (slice(0, prompt), slice(prompt, None)):
        for layer in range(len(bad)):
            places = np.argwhere(bad[layer, :, rows].transpose(1, 0, 2))
            if len(places):
                row, head, key = places[0].tolist()
                return layer, head, row + rows.start, key
    return None


def _bad_logits(read):
    """Logits in double: beyond float32's range, or not finite. [layer, query_head, query, key]"""
    q, k = read["q"].astype(float), read["k"].astype(float)
    group = q.shape[1] // k.shape[1]
    tokens = q.shape[2]
    with np.errstate(over="ignore", invalid="ignore"):
        products = q[:, :, :, None, :] * np.repeat(k, group, axis=1)[:, :, None, :, :]
        # A partial sum that leaves float32 makes an infinity, whatever is added afterwards.
        sums = np.cumsum(products, axis=-1)
        scaled = sums[..., -1] * float(np.float32(read.get("scale", 1 / np.sqrt(q.shape[3]))))
        bad = ~(np.abs(sums) <= LARGEST["float32"]).all(axis=-1)
        bad |= ~(np.abs(scaled) <= LARGEST["float32"])
    windows = read.get("window", np.zeros(len(q)))
    seen = np.stack([traces.visible(tokens, int(window)) for window in windows])
    return bad & seen[:, None]


def specs_for(seed, trace):
    """Two policies that this trace allows, and `full`."""
    rng = np.random.default_rng([seed, 1])
    runs = {}
    while len(runs) < 2:
        spec = random_spec(rng, trace)
        try:
            runs[spec] = replay(trace, parse_policy(spec))
        except ValueError:  # impossible on this trace
            continue
    return runs


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"seed_{seed}_")
def test_without_the_option_the_first_bad_place_is_named(seed, tmp_path):
    arrays = hard_arrays(seed)
    trace = write_trace(tmp_path / "t.h5", arrays)
    place = first_bad_place(arrays)
    assert "payload" in hae("info", trace)
    if place is None:
        hae("replay", trace, "--policy", "full")
        return
    what = "probability" if "attention" in arrays else "logit"
    layer, head, row, key = place
    beginning = f"hae: {trace}: sequence 's0', layer {layer}, head {head}, row {row}: "
    said = error(trace)
    assert said.startswith(f"{beginning}the {what} of key {key} is "), said
    assert re.search(r" is (NaN|\+infinity|-infinity), expected a finite number; ", said)
    assert "--nan=lowest" in said


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"seed_{seed}_")
def test_check_finds_every_bad_number_that_is_stored(seed, tmp_path):
    arrays = hard_arrays(seed)
    trace = write_trace(tmp_path / "t.h5", arrays)
    read, _ = as_read(arrays)
    numbers = [read[name] for name in ("q", "k", "attention") if name in read]
    # One message a vector of q or k, or a row of attention.
    bad = sum(int((~np.isfinite(array)).any(axis=-1).sum()) for array in numbers)
    if bad == 0:
        assert "sound" in hae("check", trace)
        return
    said = hae("check", trace, "--messages", 1000, expected=3, lines=bad + 1)
    assert f"{bad} violation" in said.splitlines()[-1]


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"seed_{seed}_")
def test_with_nan_lowest_program_and_oracle_agree(seed, tmp_path):
    arrays = hard_arrays(seed)
    trace, file = oracle_trace(arrays), write_trace(tmp_path / "t.h5", arrays)
    runs = specs_for(seed, trace)
    runs["full"] = replay(trace, parse_policy("full"))
    texts = {}
    for spec, run in runs.items():
        texts[spec] = hae("replay", file, "--policy", spec, "--events", "--nan=lowest")
        compare_events(texts[spec], run.log)
    said = compared(file, runs, tmp_path, "--nan=lowest", "--threads", 1)
    assert said == compared(file, runs, tmp_path, "--nan=lowest", "--threads", 2)
    for line, (spec, run) in zip(said, runs.items(), strict=True):
        figures = measure(trace, run)
        compare_one(f"{spec}: ", line, figures, trace.steps)
        assert line["log_sha256"] == hashlib.sha256(texts[spec].encode()).hexdigest()
        expect_sane_bounds(line, trace, figures)


def expect_sane_bounds(line, trace, figures):
    """The bounds of a run: no worse than the run but for their rounding, absent where it is."""
    if trace.steps == 0:
        assert line["optimal"] is line["regret"] is line["top_now"] is None
        return
    measured = figures["decode"]["missed_mass"]
    assert (line["top_now"] is None) == (line["optimal_mean"] is None) == (measured is None)
    row_rounding = (trace.tokens / 32 + 8) * 2.0**-22  # docs/results-format.md, `regret`
    rounding = row_rounding * trace.layers * trace.query_heads * trace.steps
    assert -rounding <= line["regret"] <= line["missed_mass_total"]
    assert 0 <= line["optimal"] <= line["missed_mass_total"] + rounding
    if measured is not None:
        assert 0 <= line["top_now"] <= measured["mean"] + row_rounding


def test_the_random_traces_are_interesting():
    found = dict.fromkeys(INTERESTING, 0)
    for seed in SEEDS:
        arrays = hard_arrays(seed)
        trace, place = oracle_trace(arrays), first_bad_place(arrays)
        read, _ = as_read(arrays)
        is_qkv = "q" in read
        is_finite = is_qkv and np.isfinite(read["q"]).all() and np.isfinite(read["k"]).all()
        facts = {
            arrays["dtype"],
            "qkv" if is_qkv else "attention",
            "several query heads a KV head" if trace.query_heads > trace.kv_heads else "",
            "sliding window" if any(0 < window < trace.tokens for window in trace.windows) else "",
            "bad in the prompt" if place and place[2] < trace.prompt else "",
            "bad in decode rows alone" if place and place[2] >= trace.prompt else "",
            "logit that overflows though all is finite" if place and is_finite else "",
            "no decode step" if trace.steps == 0 else "",
        }
        for run in specs_for(seed, trace).values():
            figures = measure(trace, run)
            facts |= {
                "masked rows" if figures["masked_rows"] else "",
                "rows that lost all mass" if figures["removed_all_rows"] else "",
                "within evictions" if any(entry.within for entry in run.log) else "",
                "decode evictions" if any(entry.step for entry in run.log) else "",
            }
        for fact in facts - {""}:
            found[fact] += 1
    assert all(found[name] >= least for name, least in INTERESTING.items()), found


# By hand: sums that half precision would stop


@pytest.mark.parametrize("dtype", traces.DTYPES)
def test_4096_equal_logits_are_1_in_4096_each(dtype, tmp_path):
    # Prompt of 4,095, one decode row of 4,096 keys with one of them evicted in step 0: it misses
    # 1/4096, and its sum was 4,096, where a sum in half precision would stay at 2,048.
    ones = np.ones((1, 1, 4096, 1), np.float32)
    trace = write_trace(
        tmp_path / "t.h5", {"q": ones, "k": ones, "v": ones, "prompt": 4095, "dtype": dtype}
    )
    (run,) = compared(trace, ["greedy:budget=4094,recent=1"], tmp_path)
    assert run["decode"]["missed_mass"]["mean"] == 1 / 4096 == 2.44140625e-4
    assert run["decode"]["output_error"]["mean"] == 0  # the remaining 4,095 weigh 1/4095 each


# 1/1000, as each type rounds it, in whole numbers of a unit.
THOUSANDTH = {
    "float32": (8589935, 2.0**-33),
    "float16": (1049, 2.0**-20),
    "bfloat16": (131, 2.0**-17),
}


@pytest.mark.parametrize("dtype", traces.DTYPES)
def test_5000_steps_of_a_thousandth_add_up(dtype, tmp_path):
    # Token 0 receives 1/1000 in 5,000 decode rows. What is left goes to the token itself and, in
    # numbers that the type can hold, to the rest of the prompt: each row sums to 1 exactly. The
    # prompt's rows are masked. In the last step one token is over the budget, and all but token 0
    # are recent: its score is 5,000 thousandths, where half precision would have stuck at 4
    # (float16) or 0.5 (bfloat16).
    share, unit = THOUSANDTH[dtype]
    prompt, steps = 4, 5000
    own, *others = split(round(1 / unit) - share, dtype, prompt)
    decode = [np.zeros(prompt + step, np.float32) for step in range(1, steps + 1)]
    for row in decode:
        row[:prompt] = np.array([share, *others]) * unit
        row[-1] = own * unit
    assert (rounded(decode[0], dtype) == decode[0]).all()
    assert decode[0].astype(float).sum() == 1
    trace = write_rows(tmp_path / "t.h5", np.zeros((prompt, prompt)), decode, dtype)
    budget = prompt + steps - 1
    (last,) = events(trace, f"greedy:budget={budget},recent={budget},scores=full")
    assert (last["step"], last["token"]) == (steps, 0)
    # The sum of a row has room for every bit of the 16-bit shares; of the float32 ones it may be
    # one unit, 2^-24, below 1.
    rounding = 2.0**-23 if dtype == "float32" else 0
    assert last["score"] == pytest.approx(5000 * share * unit, rel=rounding)
    in_decimals = {"float32": 5.0, "float16": 5.00202, "bfloat16": 4.99725}
    assert last["score"] == pytest.approx(in_decimals[dtype], abs=5e-6)


def split(whole, dtype, parts):
    """A whole number as a sum of `parts` that have as few bits as the type's numbers do."""
    bits = {"float32": 24, "float16": 11, "bfloat16": 8}[dtype]
    shares = []
    for _ in range(parts):
        below = max(0, int(whole).bit_length() - bits)
        shares.append(whole >> below << below)
        whole -= shares[-1]
    assert whole == 0
    return shares


def write_rows(path, prompt_rows, decode_rows, dtype):
    """One layer and one head of attention, without the square in between."""
    prompt, tokens = len(prompt_rows), len(prompt_rows) + len(decode_rows)
    empty = {"attention": np.zeros((1, 1, tokens, 0)), "prompt": np.array(prompt)}
    with traces.new_trace(path, ORIGIN) as file:
        group = traces.create_sequence(file, 0, _info(empty, "s0"))
        part = group.create_group("layers/000000")
        decode = np.concatenate(decode_rows) if decode_rows else np.empty(0)
        for name, values in (("prompt", prompt_rows), ("decode", decode)):
            values = np.asarray(values)
            dataset = traces.create_numbers(part, name, (1, *values.shape), dtype)
            traces.write_numbers(dataset, 0, stored(values, dtype))
    return path


# By hand: rows with nothing to attend to, and rows that lost it


def one_head(rows, prompt, v=None, dtype="float32"):
    """One layer and one head: `rows` are its rows of attention, each as long as it sees."""
    attention = np.zeros((1, 1, len(rows), len(rows)), np.float32)
    for query, row in enumerate(rows):
        attention[0, 0, query, : len(row)] = row
    arrays = {"attention": attention, "prompt": np.array(prompt), "dtype": dtype}
    return arrays if v is None else arrays | {"v": np.array(v, np.float32)[None, None]}


def column(keys, queries=None, scale=1.0):
    """One head of dimension 1 with these keys; queries and values are 1."""
    k = np.array(keys, np.float32)[None, None, :, None]
    q = np.ones_like(k) if queries is None else np.array(queries, np.float32)[None, None, :, None]
    return {"q": q, "k": k, "v": np.ones_like(k), "scale": np.array(scale)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_that_are_all_the_lowest_finite_number_are_equal(dtype, tmp_path):
    # Row 2 of (-3.4e38, -3.4e38, -3.4e38) is 1/3 each: nothing in the trace says that the number
    # stands for a mask. Token 0 is one of three in the last row.
    arrays = column([-LARGEST[dtype]] * 3) | {"prompt": np.array(2), "dtype": dtype}
    trace = write_trace(tmp_path / "t.h5", arrays)
    assert "sound" in hae("check", trace)
    (run,) = compared(trace, ["window:sinks=0,recent=1"], tmp_path)
    assert run["masked_rows"] == run["lowered_weights"] == 0
    assert run["decode"]["missed_mass"]["mean"] == float(np.float32(1)) / 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_as_far_apart_as_can_be_leave_one_key(dtype, tmp_path):
    # 3.4e38 - (-3.4e38) is infinite: the weights of the last row are (1, 0, 0), and nothing is NaN.
    largest = LARGEST[dtype]
    arrays = column([largest, -largest, -largest]) | {"prompt": np.array(2), "dtype": dtype}
    trace = write_trace(tmp_path / "t.h5", arrays)
    full, window = compared(trace, ["full", "window:sinks=0,recent=2"], tmp_path)
    assert full["decode"]["kl"]["mean"] == 0
    # After the prompt of two nothing has to go; the row has all three.
    assert window["decode"]["missed_mass"]["mean"] == 0
    (window,) = compared(trace, ["window:sinks=0,recent=1"], tmp_path)
    assert window["decode"]["missed_mass"]["mean"] == 1
    assert window["removed_all_rows"] == 1


BAD_ROWS = [[NAN] * 3, [-INFINITY] * 3, [INFINITY] * 3, [NAN, INFINITY, -INFINITY]]


@pytest.mark.parametrize("keys", BAD_ROWS, ids=str)
@pytest.mark.parametrize("dtype", traces.DTYPES)
def test_a_row_without_a_finite_logit_is_masked(keys, dtype, tmp_path):
    # Rows 0, 1, 2 see one, two and three keys of which none has a finite logit.
    arrays = column(keys) | {"prompt": np.array(2), "dtype": dtype}
    trace = write_trace(tmp_path / "t.h5", arrays)
    assert ", head 0, row 0: the logit of key 0 is " in error(trace)
    spec = "greedy:budget=1,recent=0"
    (run,) = compared(trace, [spec], tmp_path, "--nan=lowest")
    assert (run["masked_rows"], run["lowered_weights"]) == (3, 6)
    assert run["removed_all_rows"] == 0
    expect_no_decode_row_in_any_aggregate(run)
    # Nothing scored: equals, of which the older goes first.
    gone = [(event["token"], event["score"]) for event in events(trace, spec, "--nan=lowest")]
    assert gone == [(0, 0.0), (1, 0.0)]


def expect_no_decode_row_in_any_aggregate(run):
    nothing = dict.fromkeys(("mean", "max", "p50", "p95"))
    assert set(map(str, run["decode"].values())) == {str(nothing)}
    assert run["missed_mass_total"] == run["optimal"] == run["regret"] == 0
    assert run["optimal_mean"] is run["top_now"] is None
    for means in run["per_layer"]["decode"].values():
        assert set(means) == {None}


def test_a_masked_trace_prints_a_dash_and_no_nan(tmp_path):
    trace = write_trace(tmp_path / "t.h5", one_head([[0]] * 4, 2, v=[[1]] * 4))
    specs = ["greedy:budget=1,recent=0", "full"]
    words = [word for spec in specs for word in ("--policy", spec)]
    files = ("--json", tmp_path / "r.json", "--csv", tmp_path / "r.csv", "--out", tmp_path / "kept")
    table = hae("compare", trace, *words, "--allow-unequal", *files)
    assert "nan" not in table.lower()
    assert table.splitlines()[3].split() == [
        # 2 tokens x 2 x 4 bytes = 16 / 1024 KiB
        *("greedy:budget=1,recent=0", "2.0", "2.0", "1.6e-02"),
        # missed mass, optimal, p95, max, missed pull, relative output error
        *["-"] * 6,
        *("3.0", "3.0"),
    ]
    # What the trace holds is said once, not for each policy.
    assert table.count("warning: ") == 1
    assert "warning: all policies: masked rows, which attend to nothing: 4\n" in table
    for run in strict_json(tmp_path / "r.json")["runs"]:
        expect_no_decode_row_in_any_aggregate(run)
        assert run["masked_rows"] == 4
    with open(tmp_path / "r.csv", newline="") as file:
        for line in csv.DictReader(file):
            for figure in ("decode.missed_mass.mean", "decode.kl.mean", "optimal_mean", "top_now"):
                assert line[figure] == "", figure
            assert (line["masked_rows"], line["lowered_weights"]) == ("4", "0")
    assert "identical: 2 logs" in hae("rerun", tmp_path / "kept")
    (summary, _) = strict_json(tmp_path / "kept/result.json")["summary"]
    assert summary["decode.missed_mass.mean"] is summary["top_now"] is None
    assert summary["masked_rows"]["mean"] == 4


def test_a_row_that_lost_all_its_mass_counts_as_1_and_has_no_divergence(tmp_path):
    # The window keeps the newest 2 of 3 after the prompt; row 3 gives all to token 0, row 4 half to
    # token 3 and half to itself, row 5 nothing to anything.
    rows = [[1], [0, 1], [0, 0, 1], [1], [0, 0, 0, 0.5, 0.5], [0]]
    v = [[4, 3], [0, 0], [0, 0], [1, 1], [2, 2], [0, 0]]
    trace = write_trace(tmp_path / "t.h5", one_head(rows, 3, v))
    (run,) = compared(trace, ["window:sinks=0,recent=2"], tmp_path)
    assert (run["removed_all_rows"], run["masked_rows"], run["lowered_weights"]) == (1, 1, 0)
    missed = run["decode"]["missed_mass"]
    assert missed == {"mean": 0.5, "max": 1, "p50": 0, "p95": 1}
    zeros = {"mean": 0, "max": 0, "p50": 0, "p95": 0}
    for metric in ("kl", "output_error", "output_error_relative"):
        assert run["decode"][metric] == zeros, metric  # of row 4 alone, which lost nothing
    # Two tokens of row 3 and of row 4 hold all their mass, and keeping token 0 costs nothing.
    assert run["top_now"] == run["optimal"] == 0
    assert run["missed_mass_total"] == run["regret"] == 1
    table = hae("compare", trace, "--policy", "window:sinks=0,recent=2")
    assert "warning: window:sinks=0,recent=2: rows that lost all their attention mass: 1\n" in table


def test_a_prompt_row_that_lost_all_its_mass_is_counted_too(tmp_path):
    # Token 0 is visual and gets nothing in layer 0, so it leaves within layer 1's prefill, where
    # row 1 gave it everything and row 2 half.
    layer0 = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    layer1 = [[1, 0, 0, 0], [1, 0, 0, 0], [0.5, 0, 0.5, 0], [0, 0, 0, 1]]
    attention = np.array([layer0, layer1], np.float32)[:, None]
    modality = np.array([1, 1, 0, 0])
    # Token 1 is visual too and gets 1/2 of the text rows, which keeps it.
    attention[0, 0, 2] = [0, 0.5, 0.5, 0]
    trace = write_trace(
        tmp_path / "t.h5", {"attention": attention, "prompt": np.array(3), "modality": modality}
    )
    (run,) = compared(trace, ["hae:ddes=none,r=0.5,alpha=0.5"], tmp_path)
    assert [e["token"] for e in events(trace, "hae:ddes=none,r=0.5,alpha=0.5")] == [0, 0]
    assert run["removed_all_rows"] == 1
    assert run["prefill"]["missed_mass"] == {"mean": 0.75, "max": 1, "p50": 0.5, "p95": 1}
    # KL of row 2 alone: half of its mass is left.
    assert run["prefill"]["kl"]["mean"] == pytest.approx(np.log(2), rel=1e-15)


SMALLEST = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}


@pytest.mark.parametrize("dtype", traces.DTYPES)
def test_a_row_is_not_empty_while_a_subnormal_weight_is_left(dtype, tmp_path):
    # Token 0 had (nearly) all of row 2 and is gone; the smallest number of the type is left to row
    # 2 itself. Σ over all is 1 in float32 (float16: 1 + 2^-24, a tie, rounds to 1), so m = 1, KL =
    # -ln of that number, and o' is the value of token 2: the error is |(3, 4) - (0, 0)| = 5.
    rows = [[1], [0, 1], [1, 0, SMALLEST[dtype]]]
    trace = write_trace(tmp_path / "t.h5", one_head(rows, 2, [[3, 4], [1, 1], [0, 0]], dtype))
    (run,) = compared(trace, ["window:sinks=0,recent=1"], tmp_path)
    decode = run["decode"]
    assert (decode["missed_mass"]["mean"], run["removed_all_rows"]) == (1, 0)
    assert decode["kl"]["mean"] == pytest.approx(-np.log(SMALLEST[dtype]), rel=1e-15)
    assert decode["output_error"]["mean"] == 5
    assert decode["output_error_relative"]["mean"] == 1


def test_a_minus_zero_is_a_zero(tmp_path):
    # Of rows of -0 each token's score is +0, as printed: the older goes first.
    trace = write_trace(tmp_path / "t.h5", one_head([[-0.0] * (q + 1) for q in range(4)], 2))
    assert "4 attention rows read, 4 of them masked" in hae("check", trace)
    text = hae("replay", trace, "--policy", "greedy:budget=1,recent=0", "--events")
    assert [json.loads(line)["token"] for line in text.splitlines()] == [0, 1, 2]
    assert "-0" not in text


# By hand: what is an error


@pytest.mark.parametrize("position", [1, 4], ids=["prompt", "decode"])
@pytest.mark.parametrize("value", NOT_FINITE, ids=str)
@pytest.mark.parametrize("array", ["q", "k"])
@pytest.mark.parametrize("dtype", traces.DTYPES)
def test_a_bad_number_in_queries_or_keys_is_named(dtype, array, value, position, tmp_path):
    # 2 layers, 2 KV heads, 4 query heads. In layer 1 query head 3, or KV head 1 that the query
    # heads 2 and 3 read, is bad at `position`: row `position` is the first to meet it.
    shape = {"q": (2, 4, 6, 2), "k": (2, 2, 6, 2), "v": (2, 2, 6, 2)}
    arrays = {name: np.ones(shape[name], np.float32) for name in shape}
    arrays[array][1, -1, position, 1] = value
    trace = write_trace(tmp_path / "t.h5", arrays | {"prompt": np.array(3), "dtype": dtype})
    head, key = (3, 0) if array == "q" else (2, position)
    where = f"sequence 's0', layer 1, head {head}, row {position}: the logit of key {key} is "
    assert error(trace).startswith(f"hae: {trace}: {where}")
    kind = "query head 3" if array == "q" else "KV head 1"
    name = "NaN" if np.isnan(value) else "+infinity" if value > 0 else "-infinity"
    said = hae("check", trace, expected=3, lines=2).splitlines()
    assert said[0] == (
        f"{trace}: sequence 0 's0', layer 1, {kind}, position {position}: {array}[1] is {name}, "
        "expected a finite number"
    )
    # The query's row sees as many keys as it has; the key is seen by 6 - position rows of 2 heads.
    lowered = position + 1 if array == "q" else 2 * (6 - position)
    for run in compared(trace, ["greedy", "full"], tmp_path, "--nan=lowest"):
        assert run["lowered_weights"] == lowered
        assert run["masked_rows"] == (1 if array == "q" else 0)


def test_a_logit_that_overflows_is_named_though_every_number_is_finite(tmp_path):
    # 2e38 + 2e38 is beyond float32, whatever the scale makes of it afterwards.
    q = np.full((1, 1, 3, 2), 1, np.float32)
    k = np.full((1, 1, 3, 2), 1e38, np.float32)
    k[0, 0, 1] = 2e38
    arrays = {"q": q, "k": k, "v": q, "prompt": np.array(2), "scale": np.array(1e-30)}
    trace = write_trace(tmp_path / "t.h5", arrays)
    assert "head 0, row 1: the logit of key 1 is +infinity, expected a finite" in error(trace)
    assert "sound" in hae("check", trace)  # It reads numbers, and computes no attention.
    (run,) = compared(trace, ["full"], tmp_path, "--nan=lowest")
    assert run["lowered_weights"] == 2  # rows 1 and 2
    # A scale that is no float32 makes every logit infinite, or NaN where q . k is 0.
    arrays = column([0, 1, 2], scale=1e300) | {"prompt": np.array(2)}
    trace = write_trace(tmp_path / "u.h5", arrays)
    assert "row 0: the logit of key 0 is NaN" in error(trace)


def test_a_bad_key_outside_the_window_of_every_later_row_is_met_by_its_own_row_alone(tmp_path):
    arrays = column([0, NAN, 0, 0]) | {"prompt": np.array(2), "window": np.array([1])}
    trace = write_trace(tmp_path / "t.h5", arrays)
    assert "row 1: the logit of key 1 is NaN" in error(trace)
    (run,) = compared(trace, ["full"], tmp_path, "--nan=lowest")
    # With a window of 1 a row sees itself alone.
    assert (run["lowered_weights"], run["masked_rows"]) == (1, 1)


def test_the_first_bad_row_is_named_before_the_first_bad_head(tmp_path):
    # Head 0 is bad in row 3, head 1 in row 2 (keys 1 and 2); both rows are in one block. Layer 0 is
    # bad in a decode row, which comes after every layer's prompt.
    attention = np.broadcast_to(np.eye(6, dtype=np.float32), (2, 2, 6, 6)).copy()
    attention[1, 0, 3, 0] = attention[1, 1, 2, 1] = attention[1, 1, 2, 2] = NAN
    attention[0, 0, 5, 0] = INFINITY
    trace = write_trace(tmp_path / "t.h5", {"attention": attention, "prompt": np.array(4)})
    assert "layer 1, head 1, row 2: the probability of key 1 is NaN" in error(trace)
    q = np.ones((1, 2, 6, 1), np.float32)
    q[0, 0, 3] = q[0, 1, 2] = NAN
    arrays = {"q": q, "k": np.ones_like(q), "v": np.ones_like(q), "prompt": np.array(4)}
    assert "layer 0, head 1, row 2: the logit of key 0 is NaN" in error(
        write_trace(tmp_path / "u.h5", arrays)
    )
    arrays["prompt"] = np.array(1)  # the same rows while decoding
    assert "layer 0, head 1, row 2: the logit of key 0 is NaN" in error(
        write_trace(tmp_path / "w.h5", arrays)
    )


@pytest.mark.parametrize(
    ("dtype", "value"), [("float32", -NAN), ("float16", INFINITY), ("bfloat16", -INFINITY)], ids=str
)
@pytest.mark.parametrize("payload", ["qkv", "attention"])
@pytest.mark.parametrize("prompt", [2, 4], ids=["decode steps", "no decode step"])
def test_a_value_that_is_not_finite_is_always_an_error(dtype, prompt, payload, value, tmp_path):
    v = np.ones((2, 1, 4, 2), np.float32)
    v[1, 0, 3, 1] = value
    if payload == "qkv":
        arrays = {"q": np.ones_like(v), "k": np.ones_like(v)}
    else:
        arrays = {"attention": np.broadcast_to(np.eye(4, dtype=np.float32), (2, 1, 4, 4))}
    trace = write_trace(
        tmp_path / "t.h5", arrays | {"v": v, "prompt": np.array(prompt), "dtype": dtype}
    )
    for option in ([], ["--nan=lowest"]):
        said = error(trace, *option)
        assert f"{trace}: sequence 's0', layer 1, KV head 0, token 3: " in said
        assert "not finite" in said
    assert "layer 1, KV head 0, position 3: v[1] is " in hae("check", trace, expected=3, lines=2)


def test_values_of_any_size_give_finite_errors(tmp_path):
    # |o| = 3.4e38 after token 0, |o'| = 0: squares of such lengths fit in double.
    rows = [[1], [0, 1], [1, 0, 0], [0.5, 0, 0, 0.5]]
    largest = LARGEST["float32"]
    v = [[largest, -largest], [0, 0], [0, 0], [2.0**-149, 0]]
    trace = write_trace(tmp_path / "t.h5", one_head(rows, 2, v))
    (run,) = compared(trace, ["window:sinks=0,recent=1"], tmp_path)
    assert run["removed_all_rows"] == 1  # row 2
    # Row 3: o = v0/2 + v3/2, o' = v3.
    assert run["decode"]["output_error"]["mean"] == pytest.approx(largest / np.sqrt(2), rel=1e-6)
    assert run["decode"]["output_error_relative"]["mean"] == pytest.approx(1, rel=1e-6)


def wrong_rows(dtype):
    """Row 3 of four, what `hae check` says of it, and what a replay says."""
    unit = {"float32": 2.0**-25, "float16": 2.0**-12, "bfloat16": 2.0**-9}[dtype]  # of [1/4, 1/2)
    most = int(TOLERANCE[dtype] / unit)
    sums = "sums to "
    return {
        "negative": ([0.5, -0.25, 0.5, 0.25], "key 1 has weight -0.25", "key 1 is -0.25"),
        "smallest negative": ([0.5, 0.5, 0, -SMALLEST[dtype]], "key 3 has", "key 3 is -"),
        "above the diagonal": ([0.5, 0.5, 0, 0, SMALLEST[dtype]], "mask forbids", "mask forbids"),
        "too much": ([0.5, 0.25, 0.25 + (most + 1) * unit, 0], sums, sums),
        "too little": ([0.5, 0.5 - (most + 1) * unit, 0, 0], sums, sums),
        "subnormal alone": ([0, SMALLEST[dtype], 0, 0], sums, sums),
        "within the tolerance above": ([0.5, 0.25, 0.25 + most * unit, 0], None, None),
        "within the tolerance below": ([0.5, 0.5 - most * unit, 0, 0], None, None),
    }


@pytest.mark.parametrize("kind", wrong_rows("float32"))
@pytest.mark.parametrize("dtype", traces.DTYPES)
def test_a_row_of_attention_is_held_to_the_format(dtype, kind, tmp_path):
    row, check_says, replay_says = wrong_rows(dtype)[kind]
    attention = np.broadcast_to(np.eye(6, dtype=np.float32), (2, 2, 6, 6)).copy()
    attention[1, 1, 3] = 0
    attention[1, 1, 3, : len(row)] = row
    arrays = {"attention": attention, "prompt": np.array(5), "dtype": dtype}
    assert (rounded(row, dtype) == np.array(row, np.float32)).all()
    trace = write_trace(tmp_path / "t.h5", arrays)
    if check_says is None:
        assert "sound" in hae("check", trace)
        compared(trace, ["full"], tmp_path)
        return
    said = hae("check", trace, expected=3, lines=2)
    assert "sequence 0 's0', layer 1, query head 1, row 3: " in said
    assert check_says in said
    for option in ([], ["--nan=lowest"]):  # which is about NaN and infinities alone
        said = error(trace, *option)
        assert f"{trace}: sequence 's0', layer 1, head 1, row 3: " in said
        assert replay_says in said


def test_only_the_row_that_lost_a_number_is_spared_its_sum(tmp_path):
    # Row 2 without its NaN sums to 1/2, row 1 sums to 3/4 by itself.
    arrays = one_head([[1], [0, 1], [NAN, 0, 0.5], [0, 0, 0, 1]], 3)
    trace = write_trace(tmp_path / "t.h5", arrays)
    assert hae("replay", trace, "--policy", "full", "--nan=lowest", "--events") == ""
    arrays["attention"][0, 0, 1, 1] = 0.75
    trace = write_trace(tmp_path / "u.h5", arrays)
    assert "row 1: the row sums to 0.75" in error(trace, "--nan=lowest")
    arrays = one_head([[1], [0, 1], [NAN, -0.5, 0.5], [0, 0, 0, 1]], 3)
    trace = write_trace(tmp_path / "w.h5", arrays)
    assert "row 2: the probability of key 1 is -0.5" in error(trace, "--nan=lowest")


# Through the other commands


def two_sequences():
    """`clean`, and `bad` with a NaN key at position 2 that rows 2 to 7 see."""
    rng = np.random.default_rng(7)
    clean = {
        name: rng.normal(size=(2, 1, 8, 4)).astype(np.float32) for name in ("q", "k", "v")
    } | {"prompt": np.array(5)}
    bad = clean | {"k": clean["k"].copy(), "name": "bad"}
    bad["k"][1, 0, 2, 3] = NAN
    return clean | {"name": "clean"}, bad


def test_the_sequence_with_the_bad_number_is_named_and_others_can_be_picked(tmp_path):
    trace = write_trace(tmp_path / "t.h5", *two_sequences())
    assert "sequence 'bad', layer 1, head 0, row 2: the logit of key 2 is NaN" in error(trace)
    compared(trace, ["greedy:budget=3"], tmp_path, "--sequence", "clean")
    said = hae("check", trace, expected=3, lines=2)
    assert "sequence 1 'bad', layer 1, KV head 0, position 2: k[3] is NaN" in said


def test_an_error_leaves_no_file(tmp_path):
    trace = write_trace(tmp_path / "t.h5", *two_sequences())
    files = ("--json", tmp_path / "r.json", "--csv", tmp_path / "r.csv", "--out", tmp_path / "kept")
    hae("compare", trace, "--policy", "greedy", *files, expected=3)
    hae("replay", trace, "--policy", "greedy", "--out", tmp_path / "run.h5", expected=3)
    assert [path.name for path in tmp_path.iterdir()] == ["t.h5"]


@pytest.mark.parametrize("bounds", [[], ["--no-optimal"]], ids=["optimal", "no optimal"])
@pytest.mark.parametrize("match", ["mean", "peak"])
def test_a_kept_result_repeats_itself_with_its_own_rule(match, bounds, tmp_path):
    trace = write_trace(tmp_path / "t.h5", *two_sequences())
    kept = tmp_path / "kept"
    specs = ["greedy:budget=3", "random", "hae:bin=2"]
    options = ["--match", match, "--nan=lowest", *bounds]
    runs = compared(trace, specs, tmp_path, *options, "--out", kept)
    assert [run["lowered_weights"] for run in runs] == [0] * 3 + [6] * 3  # rows 2 to 7 of one head
    document = strict_json(kept / "result.json")
    assert document["manifest"]["nan"] == "lowest"
    for stored_result in (kept, kept / "runs.h5", tmp_path / "result.json"):
        for threads in (1, 2):
            assert "identical: 6 logs" in hae("rerun", stored_result, "--threads", threads)
    # The rule is part of the result: without it the same numbers are an error again.
    document["manifest"]["nan"] = "error"
    (tmp_path / "strict.json").write_text(json.dumps(document))
    assert "sequence 'bad'" in hae("rerun", tmp_path / "strict.json", expected=3)


def test_a_stored_log_replays_under_the_same_rule(tmp_path):
    trace = write_trace(tmp_path / "t.h5", two_sequences()[1])
    run_file = tmp_path / "run.h5"
    spec = "greedy:budget=3,lane=kv_head"
    text = hae("replay", trace, "--policy", spec, "--nan=lowest", "--events", "--out", run_file)
    assert text.count("\n") == 2 * (8 - 3)  # both layers, down to 3 of 8
    assert "identical: 1 log" in hae("rerun", run_file)
    log = f"log:path={run_file}"
    assert hae("replay", trace, "--policy", log, "--nan=lowest", "--events") != ""
    first, again = compared(trace, [spec, log], tmp_path, "--nan=lowest")
    for figure in ("tokens", "decode", "missed_mass_total", "top_now", "per_layer", "log_sha256"):
        assert first[figure] == again[figure], figure
    assert "the logit of key 2 is NaN" in error(trace, spec=log)


def test_the_kept_series_marks_rows_outside_a_population(tmp_path):
    # Row 3 lost all, row 4 lost nothing, row 5 is masked (as above).
    rows = [[1], [0, 1], [0, 0, 1], [1], [0, 0, 0, 0.5, 0.5], [0]]
    trace = write_trace(tmp_path / "t.h5", one_head(rows, 3, [[1]] * 6))
    compared(trace, ["window:sinks=0,recent=2"], tmp_path, "--out", tmp_path / "kept")
    with h5py.File(tmp_path / "kept/runs.h5") as file:
        run = file["runs/000000"]
        np.testing.assert_array_equal(run["decode/missed_mass"][0, 0], [1, 0, NAN])
        np.testing.assert_array_equal(run["decode/kl"][0, 0], [NAN, 0, NAN])
        np.testing.assert_array_equal(run["decode/output_error"][0, 0], [NAN, 0, NAN])
        np.testing.assert_array_equal(run["top_now"][0, 0], [0, 0, NAN])


TYPE_AND_VALUE = [("float16", NAN), ("float16", INFINITY), ("float32", NAN), ("float32", -INFINITY)]


@pytest.mark.parametrize(("dtype", "value"), TYPE_AND_VALUE, ids=str)
@pytest.mark.parametrize("array", ["q", "k", "v", "attention"])
def test_a_numpy_archive_with_a_bad_number_is_not_imported(dtype, array, value, tmp_path):
    eye = np.broadcast_to(np.eye(4, dtype=dtype), (2, 2, 4, 4))
    names = ["attention", "v"] if array == "attention" else ["q", "k", "v"]
    arrays = {name: eye.copy() for name in names}
    arrays[array][1, 1, 2, 1] = value
    np.savez(tmp_path / "t.npz", prompt=3, **arrays)
    out = tmp_path / "t.h5"
    said = hae("import", tmp_path / "t.npz", "--from", "npz", "--out", out, expected=3)
    assert f"t.npz:/{array}[1, 1, 2" in said
    assert "finite" in said
    assert not out.exists()


@pytest.mark.parametrize(("dtype", "value"), TYPE_AND_VALUE, ids=str)
def test_what_attention_saver_saved_with_a_bad_number_is_not_imported(dtype, value, tmp_path):
    with h5py.File(tmp_path / "in.h5", "w") as file:
        for layer, head in np.ndindex(2, 2):
            square = np.eye(4, dtype=dtype)
            square[2, 1] = value if (layer, head) == (1, 1) else 0
            file[f"layer_{layer}/batch_0/head_{head}"] = square
    told = ("--from", "attention-saver", "--prompt", 3, "--text-only")
    said = hae("import", tmp_path / "in.h5", *told, "--out", tmp_path / "t.h5", expected=3)
    assert "in.h5:/layer_1/batch_0/head_1[2]: key 1 has weight " in said
    assert not (tmp_path / "t.h5").exists()


@pytest.mark.parametrize(("dtype", "value"), TYPE_AND_VALUE, ids=str)
@pytest.mark.parametrize("name", ["q_group", "k", "v"])
def test_tensors_with_a_bad_number_are_not_imported(dtype, name, value, tmp_path):
    save_file = pytest.importorskip("safetensors.numpy").save_file
    for kv_head in range(2):
        folder = tmp_path / f"in/layer_000000/kv_head_{kv_head:03d}"
        folder.mkdir(parents=True)
        tensors = {"k": np.ones((4, 2), dtype), "v": np.ones((4, 2), dtype)}
        tensors["q_group"] = np.ones((2, 4, 2), dtype)
        if kv_head == 1:
            tensors[name][..., 2, 1] = value
        save_file(tensors, folder / "attention_tensors.safetensors")
    told = ("--from", "kvp", "--prompt", 3, "--text-only")
    said = hae("import", tmp_path / "in", *told, "--out", tmp_path / "t.h5", expected=3)
    assert "kv_head_001/attention_tensors.safetensors" in said
    assert f"{name}[" in said and "2, 1]: found a NaN or infinity, expected finite numbers" in said
    assert not (tmp_path / "t.h5").exists()
