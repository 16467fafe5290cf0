"""`hae stats` against the oracle, figure for figure and bit for bit."""

import json
import math
import os
import sys
from collections import Counter
from pathlib import Path

import h5py
import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(__file__))

from oracle import Trace  # noqa: E402
from oracle.statistics import age_bins, describe  # noqa: E402
from test_replay_agrees import hae, random_arrays  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[2]
RECORDINGS = REPOSITORY / "traces" / "data" / "boards-test.h5"
SEEDS = range(40)
R_LIST = [0.0015, 0.007, 0.05, 0.3]


def program_stats(trace_file, *options):
    out = trace_file.parent / "stats.json"
    hae("stats", trace_file, "--json", out, *options)

    def refuse(constant):
        raise AssertionError(f"{constant} in the result")

    return json.loads(out.read_text(), parse_constant=refuse)


def agree(trace, sequence, options, prompt_rows=None):
    rows = np.arange(trace.prompt) if prompt_rows is None else np.asarray(prompt_rows, int)
    layers, all_layers = describe(trace, rows, options["threshold"], options["r"], options["alpha"])
    found = [*sequence["layers"], sequence["all_layers"]]
    for number, (said, expected) in enumerate(zip(found, [*layers, all_layers], strict=True)):
        for key, value in expected.items():
            assert said[key] == value, f"layer {number}: {key}"
    assert sequence["rows"] == {
        "prompt": trace.prompt,
        "prompt_stored": len(rows),
        "decode": trace.steps,
    }


def imported(arrays, tmp_path):
    np.savez(tmp_path / "t.npz", **arrays)
    hae("import", tmp_path / "t.npz", "--from", "npz", "--out", tmp_path / "t.h5")
    return tmp_path / "t.h5"


def stats_of(trace_file, alpha=0.2, threshold=0.01):
    r_list = ",".join(map(str, R_LIST))
    return program_stats(trace_file, "--r", r_list, "--alpha", alpha, "--threshold", threshold)


@pytest.mark.parametrize("seed", SEEDS)
def test_program_and_oracle_agree(seed, tmp_path):
    arrays = random_arrays(np.random.default_rng(seed), seed)
    trace = Trace.from_arrays(arrays)
    result = stats_of(imported(arrays, tmp_path))
    assert result["options"]["ages"] == age_bins(trace.tokens)
    agree(trace, result["sequences"][0], result["options"])


def test_the_random_traces_show_everything():
    """Sets that layers share in part, masked rows, and nulls of each kind; else agreement shows
    nothing.
    """
    seen = Counter()
    for seed in SEEDS:
        trace = Trace.from_arrays(random_arrays(np.random.default_rng(seed), seed))
        layers, _ = describe(trace, np.arange(trace.prompt), 0.01, R_LIST, 0.2)
        shared = [x for layer in layers for x in layer["broadcast"]["shared"] if x is not None]
        seen["part shared"] += any(0 < x < 1 for x in shared)
        seen["masked"] += any(layer["masked_rows"] for layer in layers)
        seen["no decode"] += layers[0]["sparsity"]["decode"]["all"] is None
        seen["no visual"] += layers[0]["column_sums"]["visual"]["tokens"] == 0
        seen["ratio"] += layers[0]["column_sums"]["variance_ratio"] is not None
        seen["no ratio"] += layers[0]["column_sums"]["variance_ratio"] is None
        seen["several layers"] += len(layers) > 1
    assert len(seen) == 7 and min(seen.values()) >= 2, seen


def recorded(sequence):
    """A sequence of the committed file, read by h5py alone."""
    layers = [sequence["layers"][name] for name in sorted(sequence["layers"])]
    return {
        **{name: np.stack([layer[name][()] for layer in layers]) for name in "qkv"},
        "prompt": sequence.attrs["prompt"],
        "scale": sequence.attrs["scale"],
        "modality": sequence["modality"][()],
        "image": sequence["image"][()],
        "window": sequence["window"][()],
    }


@pytest.mark.parametrize("index", [0, 5, 11])
def test_program_and_oracle_agree_on_the_recordings(index, tmp_path):
    with h5py.File(RECORDINGS) as file:
        trace = Trace.from_arrays(recorded(file["sequences"][f"{index:06d}"]))
    (tmp_path / "t.h5").symlink_to(RECORDINGS)
    result = program_stats(
        tmp_path / "t.h5", "--sequence", index, "--r", "0.0015,0.007", "--alpha", 0.008
    )
    (sequence,) = result["sequences"]
    agree(trace, sequence, result["options"])
    assert 0 < sequence["layers"][3]["broadcast"]["shared"][1] < 1


@pytest.mark.parametrize("kept", [[], [2], [0, 3, 5], list(range(6))], ids=len)
def test_only_stored_prompt_rows_count(kept, tmp_path):
    rng = np.random.default_rng(3)
    attention = np.tril(rng.random((2, 2, 9, 9)).astype(np.float32) + 0.01)
    attention /= attention.sum(axis=-1, keepdims=True)
    arrays = {"attention": attention, "prompt": 6, "modality": [0, 1, 1, 0, 1, 0, 0, 0, 0]}
    trace_file = imported(arrays, tmp_path)
    with h5py.File(trace_file, "r+") as file:
        sequence = file["sequences/000000"]
        if "prompt_rows" in sequence:
            del sequence["prompt_rows"]
        sequence["prompt_rows"] = np.array(kept, np.int64)
        for layer in sequence["layers"].values():
            rows = layer["prompt"][()][:, kept]
            del layer["prompt"]
            layer["prompt"] = rows
    result = stats_of(trace_file)
    (sequence,) = result["sequences"]
    agree(Trace.from_arrays(arrays), sequence, result["options"], kept)
    # The text rows are 0, 3 and 5: without one of them DAP cannot decide.
    assert (sequence["all_layers"]["broadcast"] is None) == (not {0, 3, 5} <= set(kept))
    if not kept:
        assert sequence["all_layers"]["sparsity"]["prefill"]["all"] is None
        assert sequence["all_layers"]["column_sums"]["text"]["variance"] is None
        assert result["summary"]["all_layers"]["column_sums"]["text"]["variance"] is None


def test_lowered_weights_are_counted_and_leave_no_nan(tmp_path):
    rng = np.random.default_rng(5)
    arrays = {name: rng.normal(size=(2, 2, 12, 4)).astype(np.float32) for name in "qkv"}
    arrays |= {"prompt": 8, "modality": [0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]}
    arrays["k"][1, 0, 2] = 3e38  # logits overflow
    trace = Trace.from_arrays(arrays, nan_is_lowest=True)
    result = program_stats(imported(arrays, tmp_path), "--nan", "lowest")
    agree(trace, result["sequences"][0], result["options"])
    assert result["sequences"][0]["all_layers"]["lowered_weights"] == trace.lowered > 0
    for mean in result["sequences"][0]["all_layers"]["age"]["visual"]:
        assert mean is None or math.isfinite(mean)
