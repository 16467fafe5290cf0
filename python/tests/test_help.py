"""Every command explains itself with an example, and the example works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import h5py
import numpy as np
import pytest
import tiny_models
from safetensors.numpy import save_file
from test_replay_agrees import REPOSITORY, program

TOKENS = 620  # enough for the prompt and the picture of the examples
GALLERY = Path(program()).parents[1] / "tests" / "libhae_gallery_library.so"


def output_of(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def commands():
    """Subcommands as --help lists them."""
    listed = output_of(program(), "--help").split("Subcommands:\n")[1].split("\n\n")[0]
    return re.findall(r"^  (\S+)", listed, re.MULTILINE)


def tools():
    """Programs in Python, and what each runs, as an argument of python -c."""
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    scripts = tomllib.loads(text)["project"]["scripts"]
    targets = {name: target.split(":") for name, target in scripts.items()}
    return {name: f"from {module} import {run}; {run}()" for name, (module, run) in targets.items()}


def examples_of_command(command):
    help_text = output_of(program(), command, "--help")
    found = re.search(r"^Examples?:\n((?:  .*\n)+)", help_text, re.MULTILINE)
    assert found, f"hae {command} --help shows no example"
    return [line.strip() for line in found[1].splitlines()]


def examples_of_tool(code):
    environment = os.environ | {"COLUMNS": "1000", "PYTHONPATH": str(REPOSITORY / "python")}
    done = subprocess.run(
        [sys.executable, "-c", code, "--help"], capture_output=True, text=True, env=environment
    )
    found = re.search(r"^examples?: (.*)", done.stdout, re.MULTILINE)
    assert found, f"{code} --help shows no example"
    return [found[1]]


EXAMPLES = [(name, line) for name in commands() for line in examples_of_command(name)] + [
    (name, line) for name, code in tools().items() for line in examples_of_tool(code)
]


def write_foreign_recordings(folder):
    """What others recorded, as the examples of hae import name it."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, heads, TOKENS, 4)).astype(np.float32) for heads in (2, 1, 1))
    np.savez(folder / "attention.npz", q=q, k=k, v=v, prompt=600)
    rows = np.tril(np.ones((TOKENS, TOKENS))) / np.arange(1, TOKENS + 1)[:, None]
    with h5py.File(folder / "attention.h5", "w") as file:
        for head in range(2):
            file[f"layer_0/batch_0/head_{head}"] = rows.astype(np.float16)
    kv_head = folder / "sample_0000001" / "layer_000000" / "kv_head_000"
    kv_head.mkdir(parents=True)
    arrays = {"q_group": q[0], "k": k[0, 0], "v": v[0, 0]}
    save_file(arrays, kv_head / "attention_tensors.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the examples find all that they name."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "traces").symlink_to(REPOSITORY / "traces")
    shutil.copy(REPOSITORY / "traces/data/boards-test.h5", folder / "trace.h5")
    write_foreign_recordings(folder)
    if GALLERY.exists():
        (folder / "libmine.so").symlink_to(GALLERY)
    tiny_models.save(tiny_models.llava(), tiny_models.processor(), folder / "MODEL_DIR")
    tiny_models.write_prompts(folder, [{"text": "a b c d e f"}, {"text": "g h i"}])
    (folder / "bin").mkdir()
    (folder / "bin" / "hae").symlink_to(program())
    for name, code in tools().items():
        tool = folder / "bin" / name
        tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{code}" "$@"\n', encoding="utf-8")
        tool.chmod(0o755)
    compare = ["compare", "traces/data/boards-test.h5", "--policy", "greedy:budget=50"]
    subprocess.run(
        [program(), *compare, "--no-optimal", "--out", "results"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    return folder


def shell_for(line):
    """The command line of the shell that an example is for."""
    if line.startswith("source <(hae completion zsh)"):
        return ["zsh", "-f", "-c", f"autoload -Uz compinit; compinit -D -u; {line}"]
    if line.startswith("hae completion fish"):
        return ["fish", "--no-config", "-c", line]
    return ["bash", "--norc", "-c", line]


@pytest.mark.parametrize(("name", "line"), EXAMPLES, ids=[line for _, line in EXAMPLES])
def test_the_example_works(folder, name, line):
    if "libmine.so" in line and not GALLERY.exists():
        pytest.skip("the library of the C++ tests is not built")
    if "--device" in line and "device (" not in output_of(program(), "--version"):
        pytest.skip("built without a device backend")
    command = shell_for(line)
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]} here")
    environment = os.environ | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY / "python"),
        "HOME": str(folder),
    }
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" or name in ("hae-record", "hae-closed-loop")  # bars of libraries
    for out in re.findall(r"(?:--out|--json|--junit|-o) (\S+)", line):
        assert (folder / out).stat().st_size > 0
