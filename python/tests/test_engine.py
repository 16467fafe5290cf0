"""The engine in Python: traces and arrays, replay and comparison, errors, interruption.

What the program prints for the same question is the yardstick; it is `$HAE_PROGRAM`, by default
`build/bin/hae` of this repository.
"""

import ast
import gc
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import weakref
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
import torch

sys.path.insert(0, os.path.dirname(__file__))

from test_replay_agrees import make_case  # noqa: E402

import hae  # noqa: E402
from hae import _engine  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[2]
BOARDS = REPOSITORY / "traces" / "data" / "boards-test.h5"
VALIDATION = REPOSITORY / "traces" / "data" / "validation" / "boards-validation.h5"
LAYERS, QUERY_HEADS, KV_HEADS, TOKENS, PROMPT, HEAD_DIM = 2, 4, 2, 24, 14, 8


def program(*arguments):
    command = os.environ.get("HAE_PROGRAM", REPOSITORY / "build" / "bin" / "hae")
    return subprocess.run(
        [str(command), *map(str, arguments)], capture_output=True, text=True, timeout=300
    )


def sentence_of(*arguments):
    """What the program complains about, in its one line."""
    done = program(*arguments)
    assert done.returncode != 0 and done.stderr.startswith("hae: ")
    assert done.stderr.count("\n") == 1
    return done.stderr.removeprefix("hae: ").rstrip("\n")


def python(code, *arguments, **options):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, **options
    ).stdout


@pytest.fixture
def arrays():
    """q, k, v whose numbers are eighths of small integers: exact in float16 and bfloat16 too."""
    rng = np.random.default_rng(5)

    def eighths(heads):
        return (rng.integers(-16, 17, (LAYERS, heads, TOKENS, HEAD_DIM)) / 8).astype(np.float32)

    return {"q": eighths(QUERY_HEADS), "k": eighths(KV_HEADS), "v": eighths(KV_HEADS)}


@pytest.fixture
def image():
    return [-1, 0, 0, 0, 0, -1, 3, 3, 3] + [-1] * (TOKENS - 9)


@pytest.fixture
def sequence(arrays, image):
    return hae.sequence(**arrays, prompt=PROMPT, image=image, name="small")


def attention_rows(layers=1, heads=2, tokens=5):
    """Row i gives each of its i + 1 keys the same."""
    rows = np.tril(np.ones((tokens, tokens), np.float32)) / np.arange(1, tokens + 1)[:, None]
    return np.broadcast_to(rows, (layers, heads, tokens, tokens)).astype(np.float32)


# The package


def test_import_of_hae_loads_no_library():
    loaded = python("import sys, hae; print(*sys.modules)").split()
    assert "hae" in loaded and not {"numpy", "pandas", "torch", "h5py"} & set(loaded)


def test_recorder_and_traces_do_not_load_pandas():
    code = "import sys, hae, hae.record, hae.trace; hae.open(sys.argv[1]); print(*sys.modules)"
    assert "pandas" not in python(code, BOARDS).split()


def test_type_checkers_are_told_the_same_names():
    stub = ast.parse(Path(hae.__file__).with_suffix(".pyi").read_text())
    told = {
        name.asname: node.module.removeprefix("hae.")
        for node in stub.body
        if isinstance(node, ast.ImportFrom) and node.module != "hae"
        for name in node.names
    }
    assert told == hae._HOME


def test_every_public_name_is_there_and_says_what_it_is():
    for name in hae._HOME:
        thing = getattr(hae, name)
        assert thing.__doc__ or issubclass(thing, Exception), name
    with pytest.raises(AttributeError, match="no attribute 'compear'"):
        hae.compear  # noqa: B018


def test_the_stub_names_everything_of_the_module():
    stub = Path(_engine.__file__).with_name("_engine.pyi").read_text()
    for name in dir(_engine):
        assert name.startswith("_") or re.search(rf"^(class|def) {name}\b", stub, re.M), name
    assert (Path(hae.__file__).parent / "py.typed").exists()


def test_package_engine_and_program_have_one_version():
    assert importlib.metadata.version("hae") == hae.__version__
    assert _engine.version().startswith(f"hae {hae.__version__} (")


@pytest.mark.skipif(
    "site-packages" not in _engine.__file__, reason="the module was built in place, not installed"
)
def test_installing_the_package_installs_its_programs():
    scripts = sysconfig.get_path("scripts")
    version = subprocess.run(
        [shutil.which("hae", path=scripts), "--version"], capture_output=True, text=True
    )
    assert version.stdout.strip() == _engine.version()
    assert shutil.which("hae-record", path=scripts)


@pytest.mark.parametrize("order", ["import h5py, hae", "import hae, h5py"])
def test_h5py_with_an_hdf5_of_its_own_reads_beside_the_engine(order):
    code = f"""{order}; import sys
path = sys.argv[1]
with h5py.File(path) as file:
    sequence = hae.open(path, lock=False)[3]
    stored = file["sequences/000003/layers/000001/k"][...]
    assert (sequence.keys(1) == stored.astype("float32")).all()
    assert hae.replay(sequence, "greedy:budget=60")[0].decode["missed_mass"].max() > 0
assert hae.check(path) == []
print("well")"""
    assert python(code, BOARDS) == "well\n"


# Traces


def test_a_trace_is_a_sequence_of_sequences_by_index_and_by_name():
    trace = hae.open(BOARDS)
    with h5py.File(BOARDS) as file:
        names = [group.attrs["name"] for group in file["sequences"].values()]
    assert len(trace) == 16 and trace.names == names
    assert [sequence.info.name for sequence in trace] == names
    assert trace[-1].info.name == trace[15].info.name == names[15]
    assert trace[names[4]].index == 4 and trace[4].path == str(BOARDS)
    for index in (16, -17):
        with pytest.raises(IndexError, match=f"sequence {index} of 16"):
            trace[index]
    with pytest.raises(KeyError, match="no sequence is named 'nobody'"):
        trace["nobody"]


def test_a_sequence_says_what_the_file_says():
    sequence = hae.open(BOARDS)[2]
    info, details = sequence.info, sequence.details
    with h5py.File(BOARDS) as file:
        group = file["sequences/000002"]
        for name in (
            *("name", "group", "payload", "layers", "query_heads", "kv_heads", "head_dim"),
            *("tokens", "prompt", "generated", "scale"),
        ):
            assert getattr(info, name) == group.attrs[name], name
        assert info.element_bytes == 2 and info.has_values
        assert info.steps == info.tokens - info.prompt
        assert np.array_equal(info.image, group["image"])
        assert np.array_equal(info.window, group["window"])
        assert info.bidirectional == ["none"] * info.layers
        assert np.array_equal(info.prompt_rows, np.arange(info.prompt))
        assert details.model == group.attrs["model"]
        assert details.token == [token.decode() for token in group["token"][...]]
        assert np.array_equal(details.token_id, group["token_id"])
        assert np.array_equal(details.patch, group["patch"])
        assert details.frame is None
        for layer in range(info.layers):
            stored = {name: group[f"layers/{layer:06d}/{name}"][...] for name in "qkv"}
            assert np.array_equal(sequence.queries(layer), stored["q"].astype(np.float32))
            assert np.array_equal(sequence.keys(layer), stored["k"].astype(np.float32))
            assert np.array_equal(sequence.values(layer), stored["v"].astype(np.float32))
    for layer in (-1, info.layers):
        with pytest.raises(IndexError, match=f"layer {layer} of {info.layers}"):
            sequence.keys(layer)


def test_numbers_of_a_float32_file_are_views_that_outlive_the_trace(sequence, arrays, tmp_path):
    hae.write(tmp_path / "t.h5", [sequence])
    trace = hae.open(tmp_path / "t.h5")
    stored = trace[0]
    keys, values = stored.keys(1), stored.values(0)
    assert np.shares_memory(keys, stored.keys(1))
    del trace, stored
    gc.collect()
    assert np.array_equal(keys, arrays["k"][1]) and np.array_equal(values, arrays["v"][0])
    with pytest.raises(ValueError, match="read-only"):
        keys[0, 0, 0] = 1


def test_the_attention_of_a_layer_is_the_softmax_over_what_the_mask_allows(arrays):
    windows = [0, 5]
    sequence = hae.sequence(**arrays, prompt=PROMPT, window=windows)
    i, j = np.indices((TOKENS, TOKENS))
    for layer, window in enumerate(windows):
        kv_head = np.arange(QUERY_HEADS) // (QUERY_HEADS // KV_HEADS)
        logits = np.einsum(
            "hid,hjd->hij",
            arrays["q"][layer].astype(np.float64),
            arrays["k"][layer].astype(np.float64)[kv_head],
        ) / np.sqrt(HEAD_DIM)
        seen = (j <= i) & ((i - j < window) | (window == 0))
        weights = np.where(seen, np.exp(logits - logits.max(-1, keepdims=True)), 0)
        # Logits below 40 in float32 are off by 40 * 2^-22 at most, and so, relatively, is a weight.
        expected = weights / weights.sum(-1, keepdims=True)
        assert np.allclose(sequence.attention(layer), expected, rtol=2e-5, atol=1e-30)


# Arrays


def test_float32_arrays_are_viewed_and_kept_alive(arrays):
    sequence = hae.sequence(**arrays, prompt=PROMPT)
    assert np.shares_memory(sequence.keys(1), arrays["k"])
    assert np.shares_memory(sequence.values(0), arrays["v"])
    kept = weakref.ref(arrays["k"])
    arrays.clear()
    gc.collect()
    assert kept() is not None and np.array_equal(sequence.keys(0), kept()[0])
    del sequence
    gc.collect()
    assert kept() is None


def test_a_torch_tensor_of_float32_is_viewed(arrays):
    tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    sequence = hae.sequence(**tensors, prompt=PROMPT)
    assert np.shares_memory(sequence.keys(1), tensors["k"].numpy())


class OnlyDlpack:
    """An array of a framework that this package does not know."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def wider(array):
    """The same numbers, not contiguous."""
    return np.repeat(array, 2, axis=-1)[..., ::2]


FORMS = {
    "float64": lambda a: a.astype(np.float64),
    "float16": lambda a: a.astype(np.float16),
    "integers of 64 bits": lambda a: np.rint(a).astype(np.int64),
    "other byte order": lambda a: a.astype(">f4"),
    "Fortran order": np.asfortranarray,
    "every second element": wider,
    "a list of layers": list,
    "a generator of layers": iter,
    "nested lists": lambda a: a.tolist(),
    "torch": torch.from_numpy,
    "torch.bfloat16": lambda a: torch.from_numpy(a).bfloat16(),
    "torch.float16, transposed": lambda a: torch.from_numpy(a).half().mT.contiguous().mT,
    "torch, with a gradient": lambda a: torch.from_numpy(a).requires_grad_(),
    "DLPack": OnlyDlpack,
    "a list of DLPack": lambda a: [OnlyDlpack(layer) for layer in a],
    "read-only": lambda a: np.frombuffer(a.tobytes(), np.float32).reshape(a.shape),
}


@pytest.mark.parametrize("form", FORMS)
def test_arrays_in_any_form_give_the_same_run(arrays, form):
    if form == "integers of 64 bits":
        arrays = {name: np.rint(array) for name, array in arrays.items()}
    policy = "greedy:budget=6,lane=kv_head"
    [plain] = hae.replay(hae.sequence(**arrays, prompt=PROMPT), policy)
    formed = {name: FORMS[form](array) for name, array in arrays.items()}
    [run] = hae.replay(hae.sequence(**formed, prompt=PROMPT), policy)
    assert len(run.log) > 20 and run.json_lines() == plain.json_lines()
    for metric, values in plain.decode.items():
        assert np.array_equal(run.decode[metric], values), metric


@pytest.mark.parametrize(
    ("dtype", "element_bytes"),
    [(np.float32, 4), (np.float16, 2), (np.float64, 8), (torch.bfloat16, 2), (torch.float32, 4)],
)
def test_bytes_are_those_of_the_arrays_unless_told(arrays, dtype, element_bytes):
    is_torch = isinstance(dtype, torch.dtype)
    given = {
        name: torch.from_numpy(array).to(dtype) if is_torch else array.astype(dtype)
        for name, array in arrays.items()
    }
    assert hae.sequence(**given, prompt=PROMPT).info.element_bytes == element_bytes
    assert hae.sequence(**given, prompt=PROMPT, element_bytes=1).info.element_bytes == 1


def test_what_is_not_said_of_arrays_has_the_defaults_of_the_npz_schema(arrays):
    info = hae.sequence(**arrays, prompt=PROMPT).info
    assert (info.name, info.group, info.payload) == ("arrays", "arrays", "qkv")
    assert info.scale == 1 / np.sqrt(HEAD_DIM) and info.generated == TOKENS - PROMPT + 1
    assert (info.image == -1).all() and (info.window == 0).all()
    attention = hae.sequence(attention=attention_rows(), prompt=3).info
    assert (attention.payload, attention.kv_heads, attention.head_dim) == ("attention", 2, None)
    assert attention.element_bytes is None and not attention.has_values


WRONG_ARRAYS = {
    "nothing": (lambda a: {}, "give q, k and v, or attention"),
    "no k": (lambda a: {"q": a["q"], "v": a["v"]}, "give q, k and v, or attention"),
    "both": (lambda a: {**a, "attention": attention_rows()}, "give q, k and v, or attention"),
    "no layer": (lambda a: {"q": [], "k": []}, "neither q nor attention has a layer"),
    "one layer less": (lambda a: {**a, "k": a["k"][:1]}, "k has 1 layers, expected 2"),
    "other tokens": (
        lambda a: {**a, "v": a["v"][:, :, 1:]},
        r"v of layer 0 is \[2, 23, 8\], expected \[2, 24, 8\]",
    ),
    "other dimensions": (
        lambda a: {**a, "q": [a["q"][0], a["q"][1][..., 1:]]},
        r"q of layer 1 is \[4, 24, 7\], expected \[4, 24, 8\]",
    ),
    "heads that do not divide": (
        lambda a: {**a, "k": a["k"][:, [0, 1, 1]], "v": a["v"][:, [0, 1, 1]]},
        "4 query heads do not divide by 3 KV heads",
    ),
    "three axes": (lambda a: {**a, "q": a["q"][0]}, "q of layer 0 has 2 axes, expected 3"),
    "no head": (lambda a: {**a, "q": a["q"][:, :0]}, "query_heads is 0"),
    "no token": (lambda a: {n: x[:, :, :0] for n, x in a.items()}, "tokens is 0"),
    "no dimension": (lambda a: {n: x[..., :0] for n, x in a.items()}, "head_dim is 0"),
    "strings": (lambda a: {**a, "k": a["k"].astype(str)}, "k of layer 0 is no array of real"),
    "complex": (lambda a: {**a, "v": a["v"] + 0j}, "v of layer 0 .* its type is complex64"),
    "objects": (lambda a: {**a, "v": a["v"].astype(object)}, "v of layer 0 .* type is object"),
    "ragged lists": (lambda a: {**a, "v": [[[1, 2], [3]]] * 2}, "v of layer 0 is no array of real"),
    "square rows": (
        lambda a: {"attention": attention_rows()[..., 1:], "prompt": 3},
        r"attention of layer 0 is \[2, 5, 4\], expected \[2, 5, 5\]",
    ),
    "no prompt": (lambda a: {**a, "prompt": 0}, "prompt is 0, expected 1 to tokens = 24"),
    "all prompt and more": (lambda a: {**a, "prompt": 25}, "prompt is 25, expected 1 to tokens"),
    "window for one layer": (lambda a: {**a, "window": [3]}, "mask rules cover 1 layers"),
    "negative window": (lambda a: {**a, "window": [3, -1]}, "a window is -1"),
    "short image": (lambda a: {**a, "image": [-1] * 3}, "image has 3 entries, expected tokens = "),
    "empty image": (lambda a: {**a, "image": np.array([], int)}, "image has 0 entries"),
    "image that is a picture": (lambda a: {**a, "image": np.zeros((24, 2), int)}, "image is int64"),
    "image of floats": (lambda a: {**a, "image": [0.5] * 24}, "image is float64 of 1 axes"),
    "unknown image number": (lambda a: {**a, "image": [-2] + [-1] * 23}, "image holds -2"),
    "infinite scale": (lambda a: {**a, "scale": float("inf")}, "scale is .*, expected a finite"),
    "odd bytes": (lambda a: {**a, "element_bytes": 3}, "element_bytes is 3, expected 1, 2, 4 or 8"),
    "heads twice": (lambda a: {**a, "kv_heads": 2}, "kv_heads and head_dim follow from k and v"),
    "few tokens": (lambda a: {**a, "tokens": ["a", "b"]}, "tokens has 2 entries, expected 24"),
}


@pytest.mark.parametrize("case", WRONG_ARRAYS)
def test_arrays_that_do_not_fit_are_refused_in_one_line(arrays, case):
    make, message = WRONG_ARRAYS[case]
    with pytest.raises(hae.TraceError, match=message) as error:
        hae.sequence(**{"prompt": PROMPT, **make(arrays)})
    assert "\n" not in str(error.value)


def test_arguments_of_the_wrong_kind_are_type_errors(arrays):
    with pytest.raises(TypeError):
        hae.sequence(**arrays, prompt=3.5)
    with pytest.raises(TypeError, match="not a path, hae.Trace or hae.Sequence"):
        hae.replay([arrays], "full")
    with pytest.raises(TypeError, match="not a policy"):
        hae.replay(hae.sequence(**arrays, prompt=PROMPT), [7])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_recorded_rows_may_sum_to_1_as_coarsely_as_their_type_does(dtype):
    rows = attention_rows(tokens=40)
    rounded = torch.from_numpy(rows).to(getattr(torch, dtype))
    sums = rounded.double().sum(-1)
    assert (sums - 1).abs().max() > 1e-4  # more than float32 rows may be off
    assert hae.replay(hae.sequence(attention=rounded, prompt=30), "greedy:budget=4")
    with pytest.raises(hae.TraceError, match="row sums to .*, expected 1 ± 1e-04"):
        hae.replay(hae.sequence(attention=rounded.float(), prompt=30), "greedy:budget=4")


# Numbers that are not finite


def test_nan_is_an_error_that_names_the_place_or_counts_as_the_lowest(arrays):
    arrays["k"][1, 0, 3, 2] = np.nan
    sequence = hae.sequence(**arrays, prompt=PROMPT)
    place = "layer 1, head 0, row 3: the logit of key 3 is NaN"
    with pytest.raises(hae.TraceError, match=place):
        hae.replay(sequence, "greedy:budget=6")
    with pytest.raises(hae.TraceError, match=place):
        sequence.attention(1)
    [run] = hae.replay(sequence, "greedy:budget=6", nan="lowest")
    # Key 3 of one KV head, whose two query heads have a row for each of the positions 3 to 23.
    assert run.figures["lowered_weights"] == 2 * (TOKENS - 3)
    with pytest.raises(hae.ConfigError, match="nan is 'ignore'; allowed: error, lowest"):
        hae.replay(sequence, "full", nan="ignore")


def test_a_float64_that_is_too_large_is_found_like_an_infinity(arrays):
    arrays["v"] = arrays["v"].astype(np.float64)
    arrays["v"][0, 1, 2, 0] = 1e300
    with pytest.raises(hae.TraceError, match="layer 0, KV head 1, token 2: the value vector is"):
        hae.replay(hae.sequence(**arrays, prompt=PROMPT), "greedy:budget=6")


# Writing and checking


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_written_sequence_is_the_one_that_was_given(arrays, image, dtype, tmp_path):
    words = [f"w{i}" for i in range(TOKENS - 1)] + ["Wörter"]
    given = hae.sequence(
        **arrays, prompt=PROMPT, image=image, window=[0, 7], tokens=words, name="a", group="g"
    )
    hae.write(tmp_path / "t.h5", [given], dtype=dtype)
    assert hae.check(tmp_path / "t.h5") == []
    assert program("check", tmp_path / "t.h5").returncode == 0
    [read] = hae.open(tmp_path / "t.h5")
    for name in ("name", "group", "layers", "tokens", "prompt", "generated", "scale"):
        assert getattr(read.info, name) == getattr(given.info, name)
    assert read.info.element_bytes == 4  # of the cache that was described, not of the file
    assert read.details.token == words
    assert np.array_equal(read.info.image, image) and np.array_equal(read.info.window, [0, 7])
    for layer in range(LAYERS):  # eighths are exact in all three types
        assert np.array_equal(read.queries(layer), arrays["q"][layer])
        assert np.array_equal(read.keys(layer), arrays["k"][layer])
        assert np.array_equal(read.values(layer), arrays["v"][layer])


def test_numbers_are_rounded_to_nearest_even(arrays, tmp_path):
    rng = np.random.default_rng(1)
    arrays = {name: rng.normal(size=a.shape).astype(np.float32) for name, a in arrays.items()}
    for dtype in ("float16", "bfloat16"):
        hae.write(tmp_path / "t.h5", [hae.sequence(**arrays, prompt=PROMPT)], dtype=dtype)
        rounded = torch.from_numpy(arrays["k"]).to(getattr(torch, dtype)).float().numpy()
        assert np.array_equal(hae.open(tmp_path / "t.h5")[0].keys(1), rounded[1])


def test_sequences_of_files_and_arrays_are_written_into_one_file(sequence, tmp_path):
    boards = hae.open(BOARDS)
    hae.write(tmp_path / "t.h5", [boards[5], sequence, boards[1]], dtype="float16")
    trace = hae.open(tmp_path / "t.h5")
    assert trace.names == [boards.names[5], "small", boards.names[1]]
    assert trace[0].details.token == boards[5].details.token
    assert np.array_equal(trace[0].details.patch, boards[5].details.patch)
    same = [hae.replay(s, "hae:r=0.007,alpha=0.008")[0] for s in (boards[1], trace[2])]
    assert len(same[0].log) > 100 and same[0].json_lines() == same[1].json_lines()


def test_an_attention_sequence_is_written_row_by_row(tmp_path):
    rows = attention_rows(layers=2, heads=4, tokens=9)
    rows[1, 2, 7] = 0  # masked: legal
    values = np.random.default_rng(0).normal(size=(2, 2, 9, 3)).astype(np.float32)
    given = hae.sequence(attention=rows, v=values, prompt=5)
    hae.write(tmp_path / "t.h5", [given])
    assert hae.check(tmp_path / "t.h5") == []
    [read] = hae.open(tmp_path / "t.h5")
    assert (read.info.payload, read.info.kv_heads, read.info.head_dim) == ("attention", 2, 3)
    assert read.keys(0) is None and read.queries(0) is None
    assert np.array_equal(read.values(1), values[1])
    # A row is divided by its sum, which is 1 up to a few roundings.
    assert np.allclose(read.attention(1), rows[1], rtol=1e-6, atol=0)
    runs = [hae.replay(s, "greedy:budget=3")[0] for s in (given, read)]
    assert len(runs[0].log) > 4 and runs[0].json_lines() == runs[1].json_lines()


def spoiled(change):
    def make(arrays):
        sequence = {**arrays, "prompt": PROMPT, "name": "s"}
        change(sequence)
        return [hae.sequence(**sequence)]

    return make


def set_value(name, place, value):
    def change(sequence):
        sequence[name][place] = value

    return spoiled(change)


UNWRITABLE = {
    "nothing": (lambda a: [], "float32", "no sequence is given"),
    "one name twice": (
        lambda a: [hae.sequence(**a, prompt=PROMPT)] * 2,
        "float32",
        "two sequences are named 'arrays'",
    ),
    "no values": (
        spoiled(lambda s: s.pop("v")),
        "float32",
        "sequence 's' has q and k but no v",
    ),
    "NaN": (
        set_value("q", (1, 3, 2, 5), np.nan),
        "float32",
        r"sequence 's', layer 1, q\[3, 2, 5\]: found NaN, expected a finite number",
    ),
    "too large for float16": (
        set_value("v", (0, 1, 23, 0), 70000),
        "float16",
        r"layer 0, v\[1, 23, 0\]: found 70000, .* that float16 can hold",
    ),
    "unknown type": (set_value("q", (0, 0, 0, 0), 0), "int8", "dtype is 'int8'; allowed: float32,"),
    "a row that is none": (
        lambda a: [hae.sequence(attention=attention_rows() * 0.9, prompt=3)],
        "float32",
        "layer 0, query head 0, row 0: sums to 0.89999",
    ),
    "a decode row that is none": (
        lambda a: [hae.sequence(attention=attention_rows() * [[1], [1], [1], [1], [2]], prompt=3)],
        "float32",
        "layer 0, query head 0, row 4: sums to 2",
    ),
    "a row that sees the future": (
        lambda a: [hae.sequence(attention=np.ones((1, 1, 3, 3)) / 3, prompt=3)],
        "float32",
        "row 0: key 1 has weight .*, expected 0 because the mask forbids it",
    ),
}


@pytest.mark.parametrize("case", UNWRITABLE)
def test_what_a_file_cannot_hold_is_refused_and_leaves_an_earlier_file(arrays, case, tmp_path):
    make, dtype, message = UNWRITABLE[case]
    (tmp_path / "t.h5").write_bytes(b"earlier")
    with pytest.raises((hae.TraceError, hae.ConfigError), match=message) as error:
        hae.write(tmp_path / "t.h5", make(arrays), dtype=dtype)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["t.h5"]
    assert (tmp_path / "t.h5").read_bytes() == b"earlier"


def test_a_file_that_cannot_be_written_is_an_output_error(sequence, tmp_path):
    with pytest.raises(hae.OutputError, match="nowhere/t.h5") as error:
        hae.write(tmp_path / "nowhere" / "t.h5", [sequence])
    assert isinstance(error.value, OSError)


def test_check_finds_what_the_program_finds(sequence, tmp_path):
    path = tmp_path / "t.h5"
    hae.write(path, [sequence])
    with h5py.File(path, "r+") as file:
        keys = file["sequences/000000/layers/000001/k"]
        keys[1, 5, 2] = np.nan
        keys[0, 3, 1] = np.inf
    found = hae.check(path)
    complaints = program("check", path)
    assert complaints.returncode == 3
    assert complaints.stderr.splitlines()[:-1] == found and len(found) == 2
    assert hae.check(path, most=1) == found[:1] and hae.check(path, most=0) == []
    with pytest.raises(hae.ConfigError, match="most is -1"):
        hae.check(path, most=-1)


# Errors


@pytest.fixture
def broken_files(tmp_path):
    (tmp_path / "text.h5").write_text("no HDF5")
    (tmp_path / "empty.h5").write_bytes(b"")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = 1
    shutil.copy(BOARDS, tmp_path / "unfinished.h5")
    with h5py.File(tmp_path / "unfinished.h5", "r+") as file:
        file.attrs["complete"] = 0
    (tmp_path / "folder.h5").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    "name", ["nowhere.h5", "text.h5", "empty.h5", "other.h5", "unfinished.h5", "folder.h5"]
)
def test_a_bad_file_is_a_trace_error_with_the_sentence_of_the_program(broken_files, name):
    path = broken_files / name
    of_one = sentence_of("replay", path, "--policy", "full")
    of_many = sentence_of("compare", path, "--policy", "full")  # which takes a folder of traces too
    uses = [
        (hae.open, of_one),
        (hae.check, of_one),
        (lambda path: hae.replay(path, "full"), of_many),
    ]
    for use, expected in uses:
        with pytest.raises(hae.TraceError) as error:
            use(path)
        assert str(error.value) == expected
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    "policy",
    [
        "greedyy",
        "",
        "greedy:",
        "greedy:budget=0",
        "greedy:budget=many",
        "greedy:budget=4,budget=5",
        "greedy:size=4",
        "random",
        "window:budget=9,recent=3",
        "hae:ddes=none,bin=3",
        "hae:dap=mass,eps=2,r=0.1",
        "greedy:budget=4,sinks=9",  # turns out impossible while it runs
        "log:path=nowhere.h5",
        "log",
    ],
)
def test_a_bad_policy_is_an_error_with_the_sentence_of_the_program(policy):
    expected = sentence_of("compare", BOARDS, "--policy", policy)
    with pytest.raises((hae.ConfigError, hae.TraceError)) as error:
        hae.compare(BOARDS, policy)
    assert str(error.value) == expected


def test_errors_of_a_comparison_have_the_sentences_of_the_program():
    twice = sentence_of("compare", BOARDS, "--policy", "full", "--policy", "full")
    with pytest.raises(hae.ConfigError) as error:
        hae.compare(BOARDS, ["full", "full"])
    assert str(error.value) == twice
    for wrong, message in (
        ({"match": "median"}, "match is 'median'; allowed: mean, peak, None"),
        ({"threads": -1}, "threads is -1; allowed: 0"),
    ):
        with pytest.raises(hae.ConfigError, match=message):
            hae.compare(BOARDS, "full", **wrong)
    with pytest.raises(hae.ConfigError, match="no policy is given"):
        hae.replay(BOARDS, [])


def test_a_trace_that_lacks_what_a_policy_needs_is_refused_before_anything_runs(tmp_path):
    hae.write(tmp_path / "t.h5", [hae.sequence(attention=attention_rows(), prompt=4)])
    with h5py.File(tmp_path / "t.h5", "r+") as file:
        group = file["sequences/000000"]
        del group["prompt_rows"]
        group["prompt_rows"] = [1, 3]
        rows = group["layers/000000/prompt"][...][:, [1, 3]]
        del group["layers/000000/prompt"]
        group["layers/000000/prompt"] = rows
    expected = sentence_of("replay", tmp_path / "t.h5", "--policy", "greedy:budget=2")
    with pytest.raises(hae.NeedsError) as error:
        hae.replay(tmp_path / "t.h5", "greedy:budget=2")
    assert str(error.value) == expected and isinstance(error.value, hae.TraceError)
    assert hae.replay(tmp_path / "t.h5", "window:budget=3,sinks=1")


# Policies


def test_policies_are_those_of_the_program():
    table = hae.policies()
    printed = program("policies").stdout
    assert {"hae", "greedy", "full", "log"} <= set(table.index)
    for name, line in table.iterrows():
        assert re.search(rf"^{re.escape(name)}\b", printed, re.M), name
        described = program("policies", name).stdout
        assert line.summary in printed
        for key, option in line.options.items():
            assert re.search(rf"^ *{key}\b", described, re.M), (name, key)
            assert option.keys() == {"default", "allowed", "meaning"}


def test_a_policy_knows_its_spec_and_all_its_options():
    policy = hae.policy("hae:lane=kv_head,bin=4,budget=64")
    assert policy.spec == "hae:budget=64,bin=4,lane=kv_head"  # in the order of its table
    assert policy.lanes == "kv_head" and hae.policy("full").lanes == "layer"
    assert list(policy.options) == list(hae.policies().loc["hae"].options)
    assert policy.options["bin"] == "4" and policy.options["score"] == "sum"
    with pytest.raises(hae.ConfigError, match="greedyy"):
        hae.policy("greedyy")


def test_a_spec_and_its_policy_are_the_same(sequence):
    by_spec, by_policy = (
        hae.replay(sequence, policy)[0]
        for policy in ("greedy:budget=5", hae.policy("greedy:budget=5"))
    )
    assert by_spec.figures == by_policy.figures


# Replay


def test_the_log_is_the_one_that_the_program_prints():
    sequence = hae.open(BOARDS)[6]
    for policy in ("hae:r=0.007,alpha=0.008,bin=12,budget=70", "h2o/layerwise:budget=50", "full"):
        [run] = hae.replay(sequence, policy)
        printed = program("replay", BOARDS, "--policy", policy, "--events", "--sequence", 6).stdout
        assert run.json_lines() == printed
        entries = [json.loads(line) for line in printed.splitlines()]
        assert len(run.log) == len(entries)
        for name in run.log.columns:
            column = [None if pd.isna(value) else value for value in run.log[name]]
            assert column == [entry[name] for entry in entries], name
    assert run.log.within.dtype == bool and run.log.score.dtype == np.float64
    assert str(run.log.pending_since.dtype) == "Int64"


def residents_of(run, layer, kv_head):
    """[steps, T] bool: by the log, what the lane of a KV head holds at attention time."""
    info, log = run.info, run.log
    lane = kv_head if run.lanes == "kv_head" else -1
    entries = log[(log.layer == layer) & (log.lane == lane)]
    steps = np.arange(1, info.steps + 1)
    gone = np.full(info.tokens, info.steps + 1)
    gone[entries.token] = entries.step
    joined = np.arange(info.tokens)[None, :] <= info.prompt + steps[:, None] - 1
    return joined & (gone[None, :] >= steps[:, None])


@pytest.mark.parametrize("policy", ["greedy:budget=6", "hae:budget=6,bin=3,lane=kv_head", "full"])
def test_the_arrays_of_a_run_follow_from_attention_and_log(sequence, policy):
    [run] = hae.replay(sequence, policy)
    info = run.info
    lanes = KV_HEADS if run.lanes == "kv_head" else 1
    assert run.decode["missed_mass"].shape == (LAYERS, QUERY_HEADS, info.steps)
    assert run.attention_tokens.shape == (LAYERS, lanes, info.steps)
    for layer in range(LAYERS):
        attention = sequence.attention(layer).astype(np.float64)[:, PROMPT:]
        for head in range(QUERY_HEADS):
            kv_head = head // (QUERY_HEADS // KV_HEADS)
            held = residents_of(run, layer, kv_head)
            missed = np.where(held, 0, attention[head]).sum(-1)
            # Float32 quotients of a row of 24: each off by 2^-24, and their sum by as much.
            assert np.allclose(run.decode["missed_mass"][layer, head], missed, atol=24 * 2.0**-23)
            tokens = run.attention_tokens[layer, kv_head if lanes > 1 else 0]
            assert np.array_equal(tokens, held.sum(-1))
            best = -np.sort(-attention[head], axis=-1)
            least = [row[n:].sum() for row, n in zip(best, tokens, strict=True)]
            assert np.allclose(run.top_now[layer, head], least, atol=24 * 2.0**-23)
    assert run.prefill is None
    assert (len(run.log) == 0) == (policy == "full")


def test_the_figures_of_a_run_are_those_of_its_arrays(sequence):
    [run] = hae.replay(sequence, "hae:budget=6,bin=3,r=0.5,alpha=2")
    assert run.log.within.any() and len(run.pending) > 0
    for population, metrics in (("decode", run.decode), ("prefill", run.prefill)):
        for metric, values in metrics.items():
            finite = values[~np.isnan(values)]
            figures = run.figures[population][metric]
            assert figures["max"] == finite.max()
            assert figures["mean"] == pytest.approx(finite.mean(), rel=1e-13)
            rank = int(np.ceil(0.95 * finite.size)) - 1
            assert figures["p95"] == np.sort(finite)[rank]
    assert run.figures["tokens"]["mean"] == run.attention_tokens.mean()
    assert run.figures["tokens"]["final"] == run.final_tokens.mean()
    assert run.figures["evictions"] == len(run.log)
    assert run.figures["pending_final"] == len(run.pending)
    assert run.options == run.figures["options"]
    assert [[lane["budget"] for lane in layer] for layer in run.limits] == [[6], [6]]
    assert (run.pending.since >= 1).all() and set(run.pending.layer) <= {0, 1}


def test_arrays_of_a_run_are_read_only_views_that_outlive_it(sequence):
    [run] = hae.replay(sequence, "greedy:budget=5")
    missed, copy = run.decode["missed_mass"], run.decode["missed_mass"].copy()
    assert np.shares_memory(missed, run.decode["missed_mass"])
    del run
    gc.collect()
    assert np.array_equal(missed, copy)
    with pytest.raises(ValueError, match="read-only"):
        missed[0] = 0


def test_a_sequence_without_decode_steps_has_no_decode_figures(arrays):
    sequence = hae.sequence(**arrays, prompt=TOKENS)
    [run] = hae.replay(sequence, "greedy:budget=5")
    assert run.decode is None and run.figures["decode"] is None
    assert run.top_now.shape == (LAYERS, QUERY_HEADS, 0)
    assert run.attention_tokens.shape == (LAYERS, 1, 0)
    assert np.array_equal(run.final_tokens, [[5], [5]])
    assert len(run.log) == LAYERS * (TOKENS - 5)


def test_a_sequence_of_one_token_runs():
    one = np.ones((1, 1, 1, 1), np.float32)
    [run] = hae.replay(hae.sequence(q=one, k=one, v=one, prompt=1), "full")
    assert len(run.log) == len(run.pending) == 0 and run.figures["evictions"] == 0


def test_without_values_there_are_no_output_errors(arrays):
    del arrays["v"]
    [run] = hae.replay(hae.sequence(**arrays, prompt=PROMPT), "greedy:budget=5")
    assert np.isnan(run.decode["output_error"]).all()
    assert run.decode["missed_mass"].max() > 0


def test_runs_come_by_sequence_then_by_policy():
    trace = hae.open(BOARDS)
    policies = ["greedy:budget=50", "full"]
    sources = [trace[3], VALIDATION, trace[0]]
    runs = hae.replay(sources, policies)
    names = [trace.names[3], *hae.open(VALIDATION).names, trace.names[0]]
    expected = [(name, policy) for name in names for policy in policies]
    assert [(run.sequence, run.policy) for run in runs] == expected


def test_the_number_of_threads_changes_nothing():
    policies = ["hae:r=0.007,alpha=0.008", "random:budget=60"]
    one, two = (
        hae.compare(BOARDS, policies, threads=threads, match="mean").result["runs"]
        for threads in (1, 2)
    )
    assert one == two


# Comparison


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The program's result of a comparison of two files, and Python's."""
    policies = [
        "hae:r=0.007,alpha=0.008",
        "greedy",
        "hae:dap=none,lane=kv_head,score=mean",
        "random:seed=3",
        "full",
    ]
    folder = tmp_path_factory.mktemp("compared")
    words = [word for policy in policies for word in ("--policy", policy)]
    done = program("compare", BOARDS, VALIDATION, *words, "--match", "mean", "--out", folder)
    assert done.returncode == 0, done.stderr
    printed = json.loads((folder / "result.json").read_text())
    return printed, hae.compare([BOARDS, VALIDATION], policies, match="mean"), folder


def test_compare_gives_what_the_program_gives(compared):
    printed, comparison, _ = compared
    expected, found = printed.copy(), comparison.result.copy()
    manifests = expected.pop("manifest"), found.pop("manifest")
    assert found == expected
    assert len(found["runs"]) == 24 * 5 and len(found["summary"]) == 5
    commands = [manifest.pop("command") for manifest in manifests]
    assert manifests[0] == manifests[1]
    assert commands[0].startswith("hae compare") and "pytest" in commands[1]


@pytest.mark.parametrize("asked", [{}, {"threshold": 0.01, "r": [0.007], "alpha": 0.008}], ids=len)
def test_stats_give_what_the_program_gives(asked, tmp_path):
    words = [word for key, value in asked.items() for word in (f"--{key}", str(value).strip("[]"))]
    done = program("stats", BOARDS, VALIDATION, *words, "--json", tmp_path / "stats.json")
    assert done.returncode == 0, done.stderr
    expected = json.loads((tmp_path / "stats.json").read_text())
    found = hae.stats([BOARDS, VALIDATION], **asked)
    commands = [result["manifest"].pop("command") for result in (expected, found)]
    assert found == expected
    assert commands[0].startswith("hae stats") and "pytest" in commands[1]


def test_stats_of_sequences_in_memory_have_no_manifest(sequence):
    result = hae.stats(sequence, threads=1)
    assert result["manifest"] is None
    assert len(result["sequences"]) == 1
    with pytest.raises(hae.ConfigError, match="r is empty"):
        hae.stats(sequence, r=[])
    with pytest.raises(hae.ConfigError, match="alpha is -1"):
        hae.stats(sequence, alpha=-1)


def test_the_program_repeats_a_result_of_python(compared, tmp_path):
    _, comparison, _ = compared
    (tmp_path / "result.json").write_text(json.dumps(comparison.result))
    repeated = program("rerun", tmp_path / "result.json")
    assert repeated.returncode == 0, repeated.stderr
    assert "identical" in repeated.stdout


def test_a_result_of_sequences_in_memory_cannot_be_repeated(sequence, tmp_path):
    comparison = hae.compare(sequence, "greedy:budget=6")
    (tmp_path / "result.json").write_text(json.dumps(comparison.result))
    assert "has no manifest" in sentence_of("rerun", tmp_path / "result.json")


def test_frames_hold_every_figure(compared):
    _, comparison, _ = compared
    runs, summary = comparison.runs, comparison.summary
    assert len(runs) == 24 * 5 and list(summary.index) == [
        line["policy"] for line in comparison.result["summary"]
    ]
    for line, figures in zip(runs.itertuples(), comparison.result["runs"], strict=True):
        assert (line.sequence, line.policy) == (figures["sequence"]["name"], figures["policy"])
    for place, path in (
        ("decode.missed_mass.p95", ("decode", "missed_mass", "p95")),
        ("bytes.prefill", ("bytes", "prefill")),
        ("optimal", ("optimal",)),
    ):
        for value, figures in zip(runs[place], comparison.result["runs"], strict=True):
            for key in path:
                figures = figures[key]
            assert value == figures
    for line in comparison.result["summary"]:
        row = summary.loc[line["policy"]]["decode.missed_mass.mean"]
        given = line["decode.missed_mass.mean"]
        assert row["mean"] == given["mean"] and row["groups"] == given["groups"]
        assert [row["low"], row["high"]] == given["interval95"]


def kept_to_the_end(run):
    """[layers, kv_heads, T] bool, from the log alone; a layer stands for each of its KV heads."""
    kept = np.ones((run.info.layers, run.info.kv_heads, run.info.tokens), bool)
    for entry in run.log.itertuples():
        heads = slice(None) if entry.lane == -1 else entry.lane
        kept[entry.layer, heads, entry.token] = False
    return kept


def mean_over_groups(runs, values):
    return pd.Series(values).groupby([run.info.group for run in runs], sort=False).mean().mean()


def test_overlap_is_the_jaccard_index_of_what_the_logs_leave(compared):
    _, comparison, _ = compared
    policies = list(comparison.overlap.index)
    assert policies == list(comparison.summary.index) == list(comparison.overlap.columns)
    by_policy = {
        policy: [run for run in comparison.raw if run.policy == policy] for policy in policies
    }
    kept = {policy: [kept_to_the_end(run) for run in runs] for policy, runs in by_policy.items()}
    for first in policies:
        for second in policies:
            indices = [
                ((a & b).sum(-1) / (a | b).sum(-1)).mean()
                for a, b in zip(kept[first], kept[second], strict=True)
            ]
            place = policies.index(second)
            found = [run.figures["overlap"][place] for run in by_policy[first]]
            np.testing.assert_allclose(found, indices, rtol=1e-12)
            expected = mean_over_groups(by_policy[first], indices)
            assert comparison.overlap.loc[first, second] == pytest.approx(expected, rel=1e-12)
    overlap = comparison.overlap.to_numpy()
    assert (np.diag(overlap) == 1).all() and (overlap == overlap.T).all()
    assert 0 < overlap.min() < 0.5  # something differs


def kind_of_tokens(info):
    """[T] names, by the positions of the pictures' tokens in the prompt."""
    position = np.arange(info.tokens)
    in_prompt = position < info.prompt
    visual = (np.asarray(info.image) >= 0) & in_prompt
    first = np.flatnonzero(visual)[0]
    return np.select(
        [~in_prompt, visual, position < first], ["generated", "visual", "text_before"], "text_after"
    )


def test_kinds_are_what_the_logs_and_the_pictures_say(compared):
    _, comparison, _ = compared
    runs = comparison.runs
    seen = dict.fromkeys(["visual", "text_before", "text_after", "generated"], 0)
    for place, run in enumerate(comparison.raw):
        kinds = kind_of_tokens(run.info)
        evicted = kinds[run.log["token"].to_numpy(int)]
        kept = kept_to_the_end(run)
        for kind in seen:
            count = (evicted == kind).sum()
            assert runs[f"evicted_kinds.{kind}"][place] == count
            share = kept[..., kinds == kind].mean()
            assert runs[f"kept_kinds.{kind}"][place] == pytest.approx(share, rel=1e-12)
            seen[kind] += count
    assert min(seen.values()) > 0
    for policy, line in comparison.summary.iterrows():
        mine = [place for place, run in enumerate(comparison.raw) if run.policy == policy]
        expected = mean_over_groups(
            [comparison.raw[place] for place in mine],
            runs["kept_kinds.visual"][mine].to_numpy(),
        )
        assert line["kept_kinds.visual", "mean"] == pytest.approx(expected, rel=1e-12)


def test_a_folder_stands_for_the_traces_in_it(tmp_path):
    shutil.copy(VALIDATION, tmp_path / "b.h5")
    shutil.copy(VALIDATION, tmp_path / "a.h5")
    policies = ["greedy:budget=60", "full"]
    found = hae.compare(tmp_path, policies, optimal=False).result
    files = [str(tmp_path / name) for name in ("a.h5", "b.h5")]
    assert [trace["path"] for trace in found["manifest"]["traces"]] == files
    assert found["runs"] == hae.compare(files, policies, optimal=False).result["runs"]
    (tmp_path / "none").mkdir()
    with pytest.raises(hae.TraceError, match="none: holds no \\*.h5 file"):
        hae.compare(tmp_path / "none", policies)
    assert sentence_of("stats", tmp_path / "none").startswith(str(tmp_path / "none"))


def test_sequences_in_memory_give_the_figures_of_the_file():
    trace = hae.open(VALIDATION)
    in_memory = []
    for stored in trace:
        layers = range(stored.info.layers)
        in_memory.append(
            hae.sequence(
                q=[stored.queries(layer) for layer in layers],
                k=[stored.keys(layer) for layer in layers],
                v=[stored.values(layer) for layer in layers],
                prompt=stored.info.prompt,
                image=stored.info.image,
                scale=stored.info.scale,
                element_bytes=stored.info.element_bytes,
                name=stored.info.name,
                group=stored.info.group,
            )
        )
    policies = ["hae:r=0.007,alpha=0.008", "greedy"]
    from_file, from_memory = (hae.compare(s, policies, match="peak") for s in (trace, in_memory))
    assert from_memory.result["manifest"] is None
    assert from_memory.result["runs"] == from_file.result["runs"]
    assert from_memory.result["summary"] == from_file.result["summary"]


@pytest.mark.parametrize("seed", range(0, 40, 3))
def test_random_arrays_give_the_figures_that_the_program_gives_of_their_npz(seed, tmp_path):
    case = make_case(seed)
    np.savez(tmp_path / "a.npz", **case.arrays)
    imported = program("import", tmp_path / "a.npz", "--from", "npz", "--out", tmp_path / "a.h5")
    assert imported.returncode == 0, imported.stderr
    given = dict(case.arrays)
    given.pop("modality", None)
    for name in ("kv_heads", "head_dim", "prompt"):
        if name in given:
            given[name] = int(given[name])
    if "scale" in given:
        given["scale"] = float(given["scale"])
    image = hae.open(tmp_path / "a.h5")[0].info.image  # spans of `modality` have become pictures
    sequence = hae.sequence(**{**given, "image": image}, name="a")
    policies = [spec for spec, run in case.runs.items() if run is not None] or ["full"]
    hae.write(
        tmp_path / "b.h5",
        [sequence],
        dtype=next(str(given[name].dtype) for name in ("q", "attention") if name in given),
    )
    from_memory = hae.compare(sequence, policies).result["runs"]
    words = [word for policy in policies for word in ("--policy", policy)]
    for path in (tmp_path / "a.h5", tmp_path / "b.h5"):
        out = tmp_path / "out.json"
        program("compare", path, *words, "--allow-unequal", "--json", out)
        assert json.loads(out.read_text())["runs"] == from_memory


def test_a_stored_log_is_a_policy_for_its_file_and_not_for_arrays(compared, sequence):
    _, comparison, folder = compared
    log = f"log:path={folder / 'runs.h5'},index=1"
    [run] = hae.replay(hae.open(BOARDS)[2], log)
    assert run.json_lines() == comparison.raw[2 * 5 + 1].json_lines()
    with pytest.raises(hae.TraceError, match="sequence 'small' is in memory; write it to a file"):
        hae.replay(sequence, log)


# Other threads, and Ctrl-C


def long_sequence(layers):
    """Much work in little memory: every layer has the same arrays, which are viewed."""
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(heads, 3000, 16)).astype(np.float32) for heads in (8, 1))
    return hae.sequence(q=[q] * layers, k=[k] * layers, v=[k] * layers, prompt=2990)


def test_other_threads_run_while_the_engine_does():
    sequence = long_sequence(1)
    finished = threading.Event()

    def work():
        hae.replay(sequence, "greedy:budget=100")
        finished.set()

    ticks = 0
    worker = threading.Thread(target=work)
    worker.start()
    while not finished.is_set():
        ticks += 1
    worker.join()
    assert ticks > 10_000  # a thread that waits for the interpreter's lock makes one or two


class Interrupting(hae.Policy):
    """Presses Ctrl-C at the first block of rows."""

    blocks = 0

    def begin(self, info):
        policy = self

        class Run(hae.PolicyRun):
            def observe(self, rows):
                if policy.blocks == 0:
                    os.kill(os.getpid(), signal.SIGINT)
                policy.blocks += 1

        return Run()


def test_ctrl_c_stops_the_engine_and_python_goes_on():
    policy = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        hae.replay(long_sequence(3000), policy)
    assert policy.blocks > 0
    [run] = hae.replay(long_sequence(1), "full")
    assert len(run.log) == 0


@pytest.mark.parametrize(
    "work", ["hae.compare(sequence, ['greedy', policy])", "hae.compare([sequence] * 2, policy)"]
)
def test_ctrl_c_ends_a_script_in_the_middle_of_a_comparison(work):
    script = f"""
import hae, os, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from test_engine import long_sequence
class Announcing(hae.Policy):
    def begin(self, info):
        os.write(1, b"running\\n")  # in one piece: sequences begin on several threads
        return hae.PolicyRun()
sequence, policy = long_sequence(3000), Announcing()
{work}
print("done")
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout.readline() == "running\n"
            child.send_signal(signal.SIGINT)
            out, err = child.communicate(timeout=120)
        finally:
            child.kill()
    assert "done" not in out and err.rstrip().endswith("KeyboardInterrupt")
    assert child.returncode == -signal.SIGINT


def test_ctrl_c_during_a_write_leaves_nothing_behind(tmp_path):
    script = f"""
import hae, os, signal, sys, threading
sys.path.insert(0, {os.path.dirname(__file__)!r})
from test_engine import long_sequence
sequence = long_sequence(200)
def press():
    while not os.path.exists("t.h5.partial"):
        pass
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=press).start()
hae.write("t.h5", [sequence])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == -signal.SIGINT, done.stderr
    assert list(tmp_path.iterdir()) == []


# Policies written in Python


class Faulty(hae.Policy):
    def __init__(self, decision):
        self._decision = decision

    def begin(self, info):
        decision = self._decision

        class Run(hae.PolicyRun):
            def step(self, rows, cache):
                return decision()

        return Run()


def no_decision():
    raise LookupError("no score for token 3")


@pytest.mark.parametrize(
    ("decision", "error", "message"),
    [
        (no_decision, LookupError, "no score for token 3"),
        (lambda: hae.Decision(evict=[hae.Evict(99)]), hae.ContractViolation, "token 99"),
        (lambda: hae.Decision(effect="soon"), hae.ConfigError, "effect is 'soon'; allowed: after"),
    ],
)
def test_what_a_policy_in_python_does_wrong_is_raised(sequence, decision, error, message):
    with pytest.raises(error, match=message):
        hae.replay(sequence, Faulty(decision))


# The documentation
