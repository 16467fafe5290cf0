"""hae-closed-loop: one JSON file with the closed loop and the open loop of the same sequences."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, os.path.dirname(__file__))

import tiny_models  # noqa: E402

import hae  # noqa: E402
from hae import closed_loop, closed_loop_session, effects, hf  # noqa: E402
from hae.prompts import load_prompts, prepare  # noqa: E402
from hae.session import load_model  # noqa: E402

NEW_TOKENS = 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny LLaVA and three prompts, two of one group; the last has no right answer to know."""
    folder = tmp_path_factory.mktemp("closed")
    tiny_models.save(tiny_models.llava(), tiny_models.processor(), folder / "model")
    tiny_models.picture(0).save(folder / "0.png")
    model, processor = load_model(folder / "model", "float32", "cpu", "sdpa")
    entries = [
        {"name": "one", "group": "g", "text": "a b <image> c d", "images": ["0.png"]},
        {"name": "two", "group": "g", "text": "e f <image> g", "images": ["0.png"]},
        {"name": "three", "text": "h i j k l m n o p q r s"},
    ]
    tiny_models.write_prompts(folder, entries)
    (prompt, *_) = load_prompts(folder / "prompts.jsonl")
    inputs = prepare(model, processor, prompt)
    ready = hf.prepared(model, inputs.input_ids, inputs.pixel_values, inputs.image)
    answer = hf.generate(model, ready, None, max_new_tokens=NEW_TOKENS).tokens
    entries[0]["answer"] = "  " + processor.tokenizer.decode(answer, skip_special_tokens=True)
    entries[1]["answer"] = "never said"
    tiny_models.write_prompts(folder, entries)
    return folder


def run(folder: Path, *arguments: str) -> int:
    options = ["--prompts", str(folder / "prompts.jsonl"), "--max-new-tokens", str(NEW_TOKENS)]
    return closed_loop.main([str(folder / "model"), *options, *arguments])


@pytest.fixture(scope="module")
def result(folder):
    out = folder / "result.json"
    policies = [
        "--policy",
        "hae:dap=none,budget=11,bin=3",
        "--policy",
        "greedy",
        "--policy",
        "full",
    ]
    assert run(folder, *policies, "--match", "mean", "--json", str(out)) == 0
    return json.loads(out.read_text(encoding="utf-8"))


def test_one_line_a_sequence_and_policy(result):
    assert result["schema"] == "hae.closed-loop/1"
    assert [line["name"] for line in result["sequences"]] == ["one", "two", "three"]
    assert [line["exact"] for line in result["sequences"]] == [True, False, None]
    names = [(run["sequence"], run["policy"].split(":")[0]) for run in result["runs"]]
    assert names == [(s, p) for s in ("one", "two", "three") for p in ("hae", "greedy", "full")]


def test_full_changes_nothing(result):
    for run in result["runs"]:
        if run["policy"] == "full":
            closed = run["closed"]
            assert (closed["kl"], closed["agreement"], closed["nll_increase"]) == (0, 1, 0)
            assert (closed["token_accuracy"], closed["same"]) == (1, True)
            expected = {"one": True, "two": False, "three": None}[run["sequence"]]
            assert closed["exact"] is expected


def test_the_matched_budget_is_what_the_closed_loop_ran(result):
    for sequence in ("one", "two", "three"):
        hae_run, greedy, _ = (r for r in result["runs"] if r["sequence"] == sequence)
        budget = greedy["options"]["budget"]
        assert greedy["closed_run"]["options"]["budget"] == budget != "prompt"
        assert greedy["closed_run"]["tokens"] == greedy["open"]["tokens"]
        difference = greedy["open"]["tokens"]["mean"] - hae_run["open"]["tokens"]["mean"]
        assert abs(difference) <= 0.5


def test_the_summary_is_the_mean_over_groups(result):
    greedy = [r for r in result["runs"] if r["policy"] == "greedy"]
    (line,) = (line for line in result["summary"] if line["policy"] == "greedy")
    kl = {run["sequence"]: run["closed"]["kl"] for run in greedy}
    means = [(kl["one"] + kl["two"]) / 2, kl["three"]]
    assert line["closed.kl"]["mean"] == pytest.approx(sum(means) / 2)
    # Student's t with one degree of freedom: 12.7062 at 97.5 %; s / sqrt(2) is half the difference.
    half = 12.706204736 * abs(means[0] - means[1]) / 2
    low, high = line["closed.kl"]["interval95"]
    assert (high - low) / 2 == pytest.approx(half, rel=1e-6)
    assert line["closed.kl"]["groups"] == 2
    assert line["closed.exact"]["groups"] == 1  # of the prompts with a right answer
    missed = [run["open"]["decode"]["missed_mass"]["mean"] for run in greedy]
    mean = ((missed[0] + missed[1]) / 2 + missed[2]) / 2
    assert line["open.missed_mass"]["mean"] == pytest.approx(mean)


def test_the_open_loop_beside_it_is_that_of_a_replay(folder, result):
    model, processor = load_model(folder / "model", "float32", "cpu", "sdpa")
    prompt = load_prompts(folder / "prompts.jsonl")[2]
    inputs = prepare(model, processor, prompt)
    ready = hf.prepared(model, inputs.input_ids, None, inputs.image)
    with hf.recording(model, ready, name="three") as recorded:
        hf.generate(model, ready, None, max_new_tokens=NEW_TOKENS)
        (replayed,) = hae.replay(recorded(), "hae:dap=none,budget=11,bin=3")
    (found,) = (
        r for r in result["runs"] if r["sequence"] == "three" and r["policy"].startswith("hae")
    )
    assert found["open"]["log_sha256"] == replayed.figures["log_sha256"]


def test_effects_are_what_their_names_say():
    """Two answer tokens, a vocabulary of two: p = (3/4, 1/4), then (1/2, 1/2); q = (1/4, 3/4), then p."""
    log = np.log
    full = hf.Generated([0, 1], torch.tensor(log([[0.75, 0.25], [0.5, 0.5]])), None)
    evicting = hf.Generated([0, 1], torch.tensor(log([[0.25, 0.75], [0.5, 0.5]])), None)
    effect = effects.forced_effect(full, evicting)
    # KL: 3/4 ln 3 + 1/4 ln 1/3 = 1/2 ln 3 for the first token, 0 for the second.
    assert effect.kl == pytest.approx(0.25 * log(3))
    assert effect.agreement == 0.5
    assert effect.nll_increase == pytest.approx(log(3) / 2)  # token 0: 3/4 -> 1/4


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["--policy", "greedy:budgt=3"], 2, "unknown option 'budgt'"),
        (["--policy", "greedy", "--policy", "greedy"], 2, "given twice"),
        (["--policy", "random"], 2, "budget"),
        (["--policy", "greedy:budget=5", "--json", "{folder}/prompts.jsonl"], 2, "an input"),
        (["--policy", "greedy:budget=5", "--json", "{folder}/none/x.json"], 2, "cannot be written"),
        (["--policy", "greedy:budget=5", "--device", "moon"], 2, "--device moon"),
    ],
)
def test_errors_are_one_line(folder, capsys, arguments, code, message):
    before = sorted(folder.rglob("*"))
    arguments = [argument.replace("{folder}", str(folder)) for argument in arguments]
    assert run(folder, *arguments) == code
    error = capsys.readouterr().err.strip()
    assert error.startswith("hae-closed-loop: ") and "\n" not in error and message in error
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    "line, message",
    [('{"text": "a", "answer": 3}', '"answer" must be a string'), ("[]", "expected an object")],
)
def test_bad_prompts_are_bad_input(folder, tmp_path, capsys, line, message):
    (tmp_path / "p.jsonl").write_text(line + "\n", encoding="utf-8")
    arguments = [str(folder / "model"), "--prompts", str(tmp_path / "p.jsonl"), "--policy", "full"]
    assert closed_loop.main(arguments) == 3
    assert message in capsys.readouterr().err


def test_without_options_usage_says_what_is_missing(capsys):
    with pytest.raises(SystemExit) as raised:
        closed_loop.main([])
    assert raised.value.code == 2
    assert "see hae-closed-loop --help" in capsys.readouterr().err


def test_interrupted_it_leaves_nothing(folder, tmp_path):
    out = tmp_path / "out.json"
    arguments = [str(folder / "model"), "--prompts", str(folder / "prompts.jsonl")]
    arguments += ["--policy", "greedy:budget=5", "--max-new-tokens", "3000", "--json", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "hae.closed_loop", *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    time.sleep(3)  # whatever it is doing by then
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT, error
    assert error.strip().splitlines()[-1] == "hae-closed-loop: interrupted; nothing was written"
    assert not list(tmp_path.iterdir())


def test_a_fault_of_ours_is_not_hidden(folder, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(closed_loop_session, "load_prompts", broken)
    with pytest.raises(ZeroDivisionError):
        run(folder, "--policy", "full")
