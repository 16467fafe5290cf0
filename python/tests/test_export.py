"""hae-export: what is kept, by a file that anyone can read."""

from __future__ import annotations

import functools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys

import h5py
import numpy as np
import pytest
import torch
from pseudo_terminal import Terminal
from safetensors import safe_open
from test_docs import blocks
from test_replay_agrees import REPOSITORY, program
from transformers import DynamicCache

import hae
from hae import export
from hae.files import sha256

TRACE = REPOSITORY / "traces" / "data" / "boards-test.h5"
LAYERS, KV_HEADS = 4, 4  # of the recorded model
POLICIES = [
    "hae:r=0.007,alpha=0.008,budget=60,bin=9",  # prunes within the prefill, and while decoding
    "hae:r=0.02,alpha=0.1,broadcast=none,lane=kv_head",
    "adakv:budget=50",
    "streaming:budget=40",
    "fastv:layer=2,keep=30",
    "full",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The results of a comparison, and in events/N what hae replay --events prints of each."""
    folder = tmp_path_factory.mktemp("export")
    policies = [argument for policy in POLICIES for argument in ("--policy", policy)]
    command = [program(), "compare", str(TRACE), *policies, "--no-optimal", "--allow-unequal"]
    subprocess.run([*command, "--out", str(folder / "results")], check=True, capture_output=True)
    return folder


def contents(path):
    """(arrays, metadata) of a file, read as its users do."""
    if path.suffix == ".npz":
        with np.load(path) as archive:
            arrays = {name: archive[name] for name in archive.files}
        return arrays, json.loads(str(arrays.pop("hae")))
    with safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(  # noqa: SIM118
            file.metadata()["hae"]
        )


@functools.cache
def events_of(policy):
    text = subprocess.run(
        [program(), "replay", str(TRACE), "--policy", policy, "--events"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [json.loads(line) for line in text.splitlines()]


def residents(events, lanes, prompt, step):
    """By hand: every lane begins with the prompt, each step adds a token, each event takes one."""
    held = {(layer, lane): set(range(prompt)) for layer in range(LAYERS) for lane in lanes}
    for now in range(step + 1):
        for lane in held.values() if now > 0 else ():
            lane.add(prompt + now - 1)
        for event in events:
            if event["step"] == now:
                held[event["layer"], event["lane"]].remove(event["token"])
    return held


def name_of(run, layer, lane):
    return f"runs.{run}.layers.{layer}" + ("" if lane < 0 else f".kv_heads.{lane}")


@pytest.mark.parametrize("at", ["prefill", "1", "5", "end"])
def test_what_is_kept_is_what_the_events_leave(folder, at):
    out = folder / f"{at}.npz"
    assert export.main([str(folder / "results"), "--at", at, "--out", str(out)]) == 0
    arrays, metadata = contents(out)
    runs = metadata["runs"]
    assert len(runs) == 16 * len(POLICIES)
    expected = {}
    for policy in dict.fromkeys(run["policy"] for run in runs):
        events = events_of(policy)
        for number, run in enumerate(runs):
            if run["policy"] != policy:
                continue
            step = {"prefill": 0, "end": run["cached"] - run["prompt"]}.get(at, run["step"])
            assert run["step"] == step
            own = [event for event in events if event["sequence"] == run["sequence_index"]]
            lanes = range(KV_HEADS) if run["lanes"] == "kv_head" else [-1]
            for (layer, lane), held in residents(own, lanes, run["prompt"], step).items():
                expected[name_of(number, layer, lane)] = sorted(held)
    assert {name: array.tolist() for name, array in arrays.items()} == expected
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.int64)}


def test_as_many_are_kept_as_the_engine_says(folder):
    out = folder / "counted.npz"
    assert export.main([str(folder / "results"), "--at", "end", "--out", str(out)]) == 0
    arrays, metadata = contents(out)
    runs = hae.replay(TRACE, POLICIES)
    assert [run["policy"] for run in metadata["runs"]] == [run.policy for run in runs]
    for number, run in enumerate(runs):
        for (layer, lane), count in np.ndenumerate(run.final_tokens):
            of_lane = lane if run.lanes == "kv_head" else -1
            assert len(arrays[name_of(number, layer, of_lane)]) == count


def test_a_trace_gives_what_stored_runs_give(folder):
    kept = [folder / "of-trace.safetensors", folder / "of-runs.safetensors"]
    policies = [argument for policy in POLICIES for argument in ("--policy", policy)]
    assert export.main([str(TRACE), *policies, "--out", str(kept[0])]) == 0
    assert export.main([str(folder / "results" / "runs.h5"), "--out", str(kept[1])]) == 0
    assert kept[0].read_bytes() == kept[1].read_bytes()
    (arrays, metadata), (again, same) = contents(kept[0]), contents(folder / "prefill.npz")
    assert metadata == same
    assert arrays.keys() == again.keys()
    assert all(np.array_equal(arrays[name], again[name]) for name in arrays)
    first = metadata["runs"][0]
    assert first["trace_sha256"] == sha256(TRACE)
    assert (metadata["schema"], metadata["at"]) == ("hae.export/1", "prefill")
    info = hae.open(TRACE)[0].info
    for key in ("prompt", "layers", "query_heads", "kv_heads", "head_dim", "group"):
        assert first[key] == getattr(info, key)


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_the_same_export_has_the_same_bytes(folder, suffix):
    files = []
    for seed in ("1", "2"):
        out = folder / f"seed-{seed}.{suffix}"
        command = [sys.executable, "-m", "hae.export", str(TRACE), "--policy", "adakv:budget=50"]
        environment = os.environ | {
            "PYTHONPATH": str(REPOSITORY / "python"),
            "PYTHONHASHSEED": seed,
        }
        subprocess.run([*command, "--out", str(out)], check=True, env=environment)
        files.append(out.read_bytes())
    assert files[0] == files[1]


def test_policies_choose_among_stored_runs(folder):
    out = folder / "chosen.npz"
    given = "adakv:budget=50"
    assert export.main([str(folder / "results"), "--policy", given, "--out", str(out)]) == 0
    _, metadata = contents(out)
    assert [run["policy"] for run in metadata["runs"]] == [given] * 16


def test_names_may_be_anything(tmp_path):
    names = ["../../x", "a/b\\c", "猫 😀", "runs.0.layers.0", "tab\tand\nline"]
    rng = np.random.default_rng(5)
    sequences = [
        hae.sequence(
            q=rng.standard_normal((1, 2, 9, 4)).astype(np.float32),
            k=rng.standard_normal((1, 2, 9, 4)).astype(np.float32),
            v=rng.standard_normal((1, 2, 9, 4)).astype(np.float32),
            prompt=6,
            name=name,
        )
        for name in names
    ]
    trace = tmp_path / "odd 'name'.h5"
    hae.write(trace, sequences)
    for suffix in ("npz", "safetensors"):
        out = tmp_path / f"kept.{suffix}"
        newest = ["--policy", "window:budget=3,sinks=0", "--at", "end"]
        assert export.main([str(trace), *newest, "--out", str(out)]) == 0
        arrays, metadata = contents(out)
        assert [run["sequence"] for run in metadata["runs"]] == names
        assert all(array.tolist() == [6, 7, 8] for array in arrays.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [trace.name, "kept.npz", "kept.safetensors"]
    )


def test_a_trace_that_has_moved_is_named(folder, tmp_path, capsys):
    shutil.copy(TRACE, tmp_path / "before.h5")
    replay = [program(), "replay", "before.h5", "--policy", "greedy:budget=50", "--out", "run.h5"]
    subprocess.run(replay, cwd=tmp_path, check=True, capture_output=True)
    run, out = str(tmp_path / "run.h5"), tmp_path / "kept.npz"
    assert export.main([run, "--out", str(out)]) == 3
    assert "--trace" in one_line(capsys)
    assert not out.exists()
    assert export.main([run, "--trace", str(TRACE), "--out", str(out)]) == 0
    with h5py.File(tmp_path / "before.h5", "r+") as file:
        file.attrs["recorder"] = "another"
    changed = str(tmp_path / "before.h5")
    assert export.main([run, "--trace", changed, "--out", str(tmp_path / "no.npz")]) == 3


def one_line(capsys):
    error = capsys.readouterr().err
    assert error.startswith("hae-export: ")
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["missing.h5", "--policy", "full"], 3, "missing.h5"),
        (["missing.h5"], 3, "missing.h5"),
        (["text.h5"], 3, "text.h5"),
        ([str(TRACE)], 2, "--policy"),
        ([str(TRACE), "--policy", "nobody"], 2, "nobody"),
        ([str(TRACE), "--policy", "full", "--at", "200"], 2, "decode steps"),
        ([str(TRACE), "--policy", "full", "--at", "-1"], 2, "--at"),
        ([str(TRACE), "--policy", "lookm:budget=50,recent=9,merge=mean"], 2, "merged"),
        (["results", "--policy", "greedy:budget=1"], 2, "holds no run of"),
        (["damaged.h5"], 3, "damaged.h5"),
        (["wrong.h5"], 3, "not there"),
        (["unfinished.h5"], 3, "unfinished.h5"),
        (["fractions.h5"], 3, "fractions.h5"),
        (["ragged.h5"], 3, "ragged.h5"),
    ],
)
def test_what_cannot_be_exported_is_said_in_a_line(
    folder, arguments, code, words, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").symlink_to(folder / "results")
    (tmp_path / "text.h5").write_text("not a trace", encoding="utf-8")
    stored = folder / "results" / "runs.h5"
    for name in ("damaged.h5", "wrong.h5", "unfinished.h5", "fractions.h5", "ragged.h5"):
        shutil.copy(stored, name)
    with h5py.File("damaged.h5", "r+") as file:
        del file["runs/000003/log/token"]
    with h5py.File("wrong.h5", "r+") as file:
        file["runs/000000/log/token"][0] = 10**6
    with h5py.File("unfinished.h5", "r+") as file:
        file.attrs["complete"] = 0
    for name, step in (("fractions.h5", [np.nan]), ("ragged.h5", [0])):
        with h5py.File(name, "r+") as file:
            del file["runs/000000/log/step"]
            file["runs/000000/log/step"] = np.array(step)
    before = sorted(os.listdir())
    try:
        assert export.main([*arguments, "--out", "kept.npz"]) == code
    except SystemExit as refused:
        assert refused.code == code
    assert words in one_line(capsys)
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("out", ["kept.txt", "kept", "nowhere/kept.npz", ".", "self.npz"])
def test_an_output_that_cannot_be_is_refused_before_the_work(out, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    shutil.copy(TRACE, "self.npz")
    try:
        assert export.main(["self.npz", "--policy", "full", "--out", out]) == 2
    except SystemExit as refused:
        assert refused.code == 2
    assert "--out" in one_line(capsys)
    assert os.listdir() == ["self.npz"]
    assert sha256(tmp_path / "self.npz") == sha256(TRACE)


def test_the_page_reads_what_is_written(folder, monkeypatch, tmp_path):
    read_npz, prune = (code for language, code in blocks("docs/export.md") if language == "python")
    monkeypatch.chdir(tmp_path)
    policy = ["--policy", "hae:r=0.007,alpha=0.008"]
    for name in ("kept.npz", "kept.safetensors"):
        assert export.main([str(TRACE), *policy, "--out", name]) == 0
    names = {"cache": DynamicCache()}
    exec(compile(read_npz, "docs/export.md", "exec"), names)
    prompt, arrays = names["runs"][0]["prompt"], names["kept"]
    assert 0 < names["shares"][0] < 1
    for layer in range(LAYERS):
        positions = torch.arange(prompt, dtype=torch.float32).expand(1, KV_HEADS, prompt)
        states = positions[..., None].repeat(1, 1, 1, 2)
        names["cache"].update(states, -states, layer)
    exec(compile(prune, "docs/export.md", "exec"), names)
    for index, layer in enumerate(names["cache"].layers):
        expected = arrays[f"runs.0.layers.{index}"].tolist()
        assert layer.keys[0, KV_HEADS - 1, :, 1].tolist() == expected
        assert (-layer.values[0, 0, :, 0]).tolist() == expected


def test_a_full_disk_leaves_nothing(tmp_path):
    out = tmp_path / "kept.npz"
    command = [sys.executable, "-m", "hae.export", str(TRACE), "--policy", "full"]
    done = subprocess.run(
        [*command, "--out", str(out)],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "python")},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert re.fullmatch(r"hae-export: --out .*kept\.npz: cannot be written .*\n", done.stderr)
    assert list(tmp_path.iterdir()) == []


def test_interrupted_it_leaves_nothing(tmp_path):
    trace, out = tmp_path / "long.h5", tmp_path / "kept.npz"
    shape = "--layers 8 --query-heads 8 --kv-heads 4 --prompt 1200 --tokens 1300 --sequences 12"
    synth = [program(), "synth", "--kind", "heavy-hitters", "--out", str(trace), *shape.split()]
    subprocess.run(synth, check=True, capture_output=True)
    command = [sys.executable, "-m", "hae.export", str(trace), "--policy", "greedy:budget=200"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "python")}
    with Terminal([*command, "--out", str(out)], env=environment) as terminal:
        terminal.read(r"replaying: +\d+%.*<")  # the time left
        terminal.process.send_signal(signal.SIGINT)
        text = terminal.read()
        assert terminal.process.wait() == 128 + signal.SIGINT
    assert text.endswith("hae-export: interrupted; nothing was written\n")
    assert [path.name for path in tmp_path.iterdir()] == ["long.h5"]
