"""The committed recordings, compared as the README shows."""

import json
import math
import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
RECORDINGS = sorted((REPOSITORY / "traces" / "data").glob("*.h5"))
POLICIES = [
    "hae:r=0.007,alpha=0.008",
    "greedy",
    "h2o/layerwise",
    "window",
    "random:seed=1",
    "full",
]


def hae(*arguments):
    program = os.environ.get("HAE_PROGRAM", REPOSITORY / "build" / "bin" / "hae")
    return subprocess.run(
        [str(program), *map(str, arguments)], capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("compare") / "out.json"
    policies = [part for policy in POLICIES for part in ("--policy", policy)]
    done = hae("compare", *RECORDINGS, *policies, "--match", "mean", "--json", out)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


def runs_of(result, policy):
    return [run for run in result["runs"] if run["policy"] == policy]


def test_there_are_sixteen_test_pictures():
    info = [json.loads(hae("info", path, "--json").stdout) for path in RECORDINGS]
    assert sum(len(file["sequences"]) for file in info) == 16


def test_every_recording_keeps_every_invariant_of_the_format():
    for path in RECORDINGS:
        assert hae("check", path).returncode == 0


def test_figures_are_finite_and_memory_is_equal(result):
    assert len(result["runs"]) == 16 * len(POLICIES)
    for run in result["runs"]:
        assert not run["unequal"]
        for metric in ("missed_mass", "missed_pull", "kl", "output_error", "output_error_relative"):
            for figure in run["decode"][metric].values():
                assert math.isfinite(figure) and figure >= 0
    for policy in POLICIES[1:-1]:
        for first, run in zip(runs_of(result, POLICIES[0]), runs_of(result, policy), strict=True):
            # Within 1 % or one token a lane, whichever is more.
            one_token = first["bytes"]["mean"] / first["tokens"]["mean"]
            difference = abs(run["bytes"]["mean"] - first["bytes"]["mean"])
            assert difference <= max(0.01 * first["bytes"]["mean"], one_token)


def test_hae_evicts_within_the_prefill_and_while_decoding(result):
    within = decode = 0
    for path in RECORDINGS:
        events = hae("replay", path, "--policy", POLICIES[0], "--events").stdout.splitlines()
        entries = [json.loads(line) for line in events]
        within += sum(entry["within"] for entry in entries)
        decode += sum(entry["step"] > 0 for entry in entries)
    assert within > 0 and decode > 0


def test_full_misses_nothing(result):
    for run in runs_of(result, "full"):
        assert run["evictions"] == 0
        assert run["decode"]["missed_mass"]["max"] == 0
        assert run["decode"]["output_error"]["max"] == 0
