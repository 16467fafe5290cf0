"""`hae import` of recordings that other libraries wrote: h5py, safetensors, and bytes by hand.

A recording must give the same trace, whatever format it comes in: the same numbers through
`--from npz` replay to the same evictions and figures, bit for bit.
"""

import json
import os
import struct
import subprocess
from pathlib import Path

import h5py
import numpy as np
import pytest
from safetensors.numpy import save_file

REPOSITORY = Path(__file__).resolve().parents[2]
LAYERS, KV_HEADS, GROUP, TOKENS, PROMPT, HEAD_DIM = 2, 2, 3, 40, 28, 8
QUERY_HEADS = KV_HEADS * GROUP
IMAGES = [(3, 9), (9, 12), (15, 21)]  # the first two touch
TOLD = ["--prompt", PROMPT, *[word for a, b in IMAGES for word in ("--image", f"{a}:{b}")]]
# 15 visual tokens: a share of 1/15 is what the mean one gets, so DAP evicts some and keeps some.
POLICIES = [
    "hae:r=0.07,alpha=2,budget=14,bin=5",
    "hae:dap=none,ddes=batch,budget=16,bin=4,lane=kv_head,score=mean",
    "greedy:budget=12",
    "random:budget=12,seed=7",
]


def hae(*arguments, expected=0):
    program = os.environ.get("HAE_PROGRAM", REPOSITORY / "build" / "bin" / "hae")
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == expected, f"{' '.join(command)}\n{done.stderr}"
    return done.stdout if expected == 0 else done.stderr


def import_(source, kind, out, *more):
    hae("import", source, "--from", kind, "--out", out, "--name", "one", "--group", "g", *more)
    assert "sound" in hae("check", out)
    return out


def image_of_each_token():
    image = np.full(TOKENS, -1)
    for number, (begin, end) in enumerate(IMAGES):
        image[begin:end] = number
    return image


def import_npz(arrays, folder, name="npz"):
    np.savez(
        folder / f"{name}.npz", prompt=np.array(PROMPT), image=image_of_each_token(), **arrays
    )
    return import_(folder / f"{name}.npz", "npz", folder / f"{name}.h5")


def events(trace):
    return [hae("replay", trace, "--policy", policy, "--events") for policy in POLICIES]


def figures(trace):
    """All that a comparison says, but for where the trace lies."""
    policies = [word for policy in (*POLICIES, "full") for word in ("--policy", policy)]
    result = trace.with_suffix(".json")
    hae("compare", trace, *policies, "--json", result, "--allow-unequal")
    document = json.loads(result.read_text())
    return {"runs": document["runs"], "summary": document["summary"]}


def expect_same_replay(trace, reference):
    logs = events(reference)
    assert all(log.count("\n") > 20 for log in logs)
    assert '"within":true' in logs[0]
    assert events(trace) == logs
    assert figures(trace) == figures(reference)


# attention-saver


def random_attention(dtype):
    """Causal rows, peaked and flat ones; a few attend to nothing, as left padding does."""
    rng = np.random.default_rng(20260202)
    logits = rng.normal(size=(LAYERS, QUERY_HEADS, TOKENS, TOKENS)) * rng.choice(
        [0.1, 1, 4], (LAYERS, QUERY_HEADS, TOKENS, 1)
    )
    rows = np.where(np.tri(TOKENS, dtype=bool), np.exp(logits), 0)
    rows /= rows.sum(-1, keepdims=True)
    rows[:, 0, :2] = 0
    return rows.astype(dtype)


def save_attention(path, attention, batch=0, **storage):
    """Head by head and row by row, as the package attention-saver does."""
    with h5py.File(path, "a") as file:
        for layer, head in np.ndindex(attention.shape[:2]):
            dataset = file.create_dataset(
                f"layer_{layer}/batch_{batch}/head_{head}",
                attention.shape[2:],
                dtype=attention.dtype,
                **storage,
            )
            for row in range(len(dataset)):
                dataset[row, :] = attention[layer, head, row]


STORAGES = {
    "contiguous": {},
    "auto chunks, shuffled and deflated": dict(chunks=True, compression="gzip", shuffle=True),
    "tall chunks": dict(chunks=(33, 7), compression="gzip", fletcher32=True),
}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", ["float16", "float32", ">f2", ">f4"])
def test_attention_saver_replays_as_npz_does(dtype, storage, tmp_path):
    attention = random_attention(dtype)
    save_attention(tmp_path / "saved.h5", attention, **STORAGES[storage])
    trace = import_(tmp_path / "saved.h5", "attention-saver", tmp_path / "trace.h5", *TOLD)
    expect_same_replay(trace, import_npz({"attention": attention}, tmp_path))


def test_attention_saver_is_told_kv_heads_and_head_dim(tmp_path):
    attention = random_attention("float16")
    save_attention(tmp_path / "saved.h5", attention)
    more = ["--kv-heads", KV_HEADS, "--head-dim", 64]
    trace = import_(tmp_path / "saved.h5", "attention-saver", tmp_path / "trace.h5", *TOLD, *more)
    known = {"kv_heads": np.array(KV_HEADS), "head_dim": np.array(64)}
    reference = import_npz({"attention": attention, **known}, tmp_path)
    expect_same_replay(trace, reference)
    assert figures(trace)["runs"][0]["bytes"]["mean"] > 0


def test_attention_saver_takes_one_batch_of_several(tmp_path):
    attention = random_attention("float16")
    save_attention(tmp_path / "saved.h5", np.flip(attention, 1))
    save_attention(tmp_path / "saved.h5", attention, batch=1)
    arguments = [tmp_path / "saved.h5", "attention-saver", tmp_path / "trace.h5", *TOLD]
    trace = import_(*arguments, "--batch", 1)
    expect_same_replay(trace, import_npz({"attention": attention}, tmp_path))
    source, kind, out, *told = arguments
    message = hae("import", source, "--from", kind, "--out", out, *told, expected=2)
    assert "batch is missing, expected one of the 2" in message


def test_attention_saver_keeps_the_codes_of_halves(tmp_path):
    """Row 1 holds 2^-24 in place of nothing, and the largest half below 1."""
    attention = np.zeros((1, 1, 3, 3), np.float16)
    attention.view(np.uint16)[0, 0] = [[0x3C00, 0, 0], [0x0001, 0x3BFF, 0], [0x3BFF, 0x03FF, 0x0001]]
    save_attention(tmp_path / "saved.h5", attention)
    trace = import_(
        tmp_path / "saved.h5", "attention-saver", tmp_path / "t.h5", "--prompt", 2, "--text-only"
    )
    with h5py.File(trace) as file:
        layer = file["sequences/000000/layers/000000"]
        assert layer["prompt"][0].view(np.uint16).tolist() == [[0x3C00, 0], [0x0001, 0x3BFF]]
        assert layer["decode"][0].view(np.uint16).tolist() == [0x3BFF, 0x03FF, 0x0001]


# kvp


def random_qkv(dtype):
    rng = np.random.default_rng(20260203)
    shapes = {"q": QUERY_HEADS, "k": KV_HEADS, "v": KV_HEADS}
    return {
        name: (2 * rng.normal(size=(LAYERS, heads, TOKENS, HEAD_DIM))).astype(dtype)
        for name, heads in shapes.items()
    }


def save_by_hand(tensors, path):
    """A safetensors file from its definition; the type of a tensor of codes is bfloat16."""
    names = {"float32": "F32", "float16": "F16", "uint16": "BF16"}
    header, data = {"__metadata__": {"made": "by hand"}}, b""
    for name, tensor in tensors.items():
        codes = tensor.astype(tensor.dtype.newbyteorder("<")).tobytes()
        offsets = [len(data), len(data) + len(codes)]
        fields = {"data_offsets": offsets, "shape": tensor.shape, "dtype": names[tensor.dtype.name]}
        header[name] = fields
        data += codes
    text = json.dumps(header, indent=1).encode() + b"   "
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)


def save_kvp(directory, arrays, save):
    for layer, kv_head in np.ndindex(LAYERS, KV_HEADS):
        folder = directory / f"layer_{layer:06d}" / f"kv_head_{kv_head:03d}"
        folder.mkdir(parents=True)
        heads = slice(kv_head * GROUP, (kv_head + 1) * GROUP)
        tensors = {
            "k": arrays["k"][layer, kv_head],
            "v": arrays["v"][layer, kv_head],
            "q_group": arrays["q"][layer, heads],
        }
        tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
        save(tensors, folder / "attention_tensors.safetensors")
    (directory / "all_text.txt").write_text("what the model read")


@pytest.mark.parametrize("save", [save_file, save_by_hand], ids=["safetensors", "by_hand"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_kvp_replays_as_npz_does(dtype, save, tmp_path):
    arrays = random_qkv(dtype)
    save_kvp(tmp_path / "sample", arrays, save)
    trace = import_(tmp_path / "sample", "kvp", tmp_path / "trace.h5", *TOLD)
    expect_same_replay(trace, import_npz(arrays, tmp_path))


def test_kvp_is_told_scale_and_window(tmp_path):
    arrays = random_qkv("float32")
    save_kvp(tmp_path / "sample", arrays, save_file)
    more = ["--scale", 0.1, "--window", 30]
    trace = import_(tmp_path / "sample", "kvp", tmp_path / "trace.h5", *TOLD, *more)
    told = {"scale": np.array(0.1), "window": np.full(LAYERS, 30)}
    expect_same_replay(trace, import_npz({**arrays, **told}, tmp_path))


def test_kvp_keeps_bfloat16(tmp_path):
    """numpy has no bfloat16: its reference holds the same numbers as float32, in twice the bytes."""
    codes = {
        name: (array.view(np.uint32) >> 16).astype(np.uint16)
        for name, array in random_qkv("float32").items()
    }
    save_kvp(tmp_path / "sample", codes, save_by_hand)
    trace = import_(tmp_path / "sample", "kvp", tmp_path / "trace.h5", *TOLD)
    with h5py.File(trace) as file:
        for name, array in codes.items():
            for layer in range(LAYERS):
                # h5py cannot read the type, only its bytes.
                stored = file[f"sequences/000000/layers/{layer:06d}/{name}"]
                offset, size = stored.id.get_offset(), array[layer].nbytes
                assert trace.read_bytes()[offset : offset + size] == array[layer].tobytes()
    floats = {
        name: (array.astype(np.uint32) << 16).view(np.float32) for name, array in codes.items()
    }
    reference = import_npz(floats, tmp_path)
    assert events(trace) == events(reference)
    for run, expected in zip(figures(trace)["runs"], figures(reference)["runs"], strict=True):
        assert run["bytes"]["mean"] == expected["bytes"]["mean"] / 2
        for key in ("decode", "prefill", "tokens", "missed_mass_total", "per_layer"):
            assert run[key] == expected[key], key
