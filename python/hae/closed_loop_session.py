"""A whole run of hae-closed-loop: a model, prompts and policies to one table and one JSON file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd
import torch
import transformers
from tqdm import tqdm
from transformers.utils import logging

from hae import _engine, effects, hf
from hae.capture import CaptureError
from hae.cleanup import write_whole
from hae.comparison import Run, compare
from hae.decoder import UnsupportedModel, decoder_of
from hae.errors import ANSWER_IS_NO, BAD_INPUT, USAGE, RecordError
from hae.prompts import Prompt, PromptError, load_prompts, prepare
from hae.result_folder import sha256_of_file
from hae.session import load_model

SCHEMA = "hae.closed-loop/1"

# Figures of the closed loop (hae.effects.Effect), and of the open loop beside them.
CLOSED = ("kl", "agreement", "nll_increase", "token_accuracy", "same", "exact")
OPEN = (
    ("missed_mass", ("decode", "missed_mass", "mean")),
    ("missed_pull", ("decode", "missed_pull", "mean")),
    ("output_error_relative", ("decode", "output_error_relative", "mean")),
    ("tokens", ("tokens", "mean")),
)

_EXIT_CODES: dict[type[Exception], int] = {
    _engine.ConfigError: USAGE,
    UnsupportedModel: BAD_INPUT,
    PromptError: BAD_INPUT,
    _engine.TraceError: ANSWER_IS_NO,
    CaptureError: ANSWER_IS_NO,
    hf.ClosedLoopError: ANSWER_IS_NO,
    RuntimeError: ANSWER_IS_NO,  # torch: out of memory, or shapes that do not fit
    OSError: USAGE,
}


def exit_code_of(error: Exception) -> int | None:
    """What the program ends with; None: a fault of ours."""
    if isinstance(error, RecordError):
        return error.exit_code
    return next((code for kind, code in _EXIT_CODES.items() if isinstance(error, kind)), None)


def run(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Everything hae-closed-loop does after its options are read.

    raises  what exit_code_of knows
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    specs = _specs(options.policy)
    prompts = load_prompts(options.prompts)
    _refuse_unfit_output(options, prompts)
    model, reader = load_model(
        options.model, options.compute_dtype, options.device, options.attention
    )
    decoder_of(model)
    manifest = _manifest(options, arguments, specs)  # before the work that it describes
    runs: list[dict[str, Any]] = []
    sequences: list[dict[str, Any]] = []
    for prompt in tqdm(prompts, desc="closed loop", unit="prompt", disable=None, delay=1):
        line, lines = _one_prompt(model, reader, prompt, specs, options)
        sequences.append(line)
        runs += lines
    result = {
        "schema": SCHEMA,
        "manifest": manifest,
        "sequences": sequences,
        "runs": runs,
        "summary": [_summary(spec, runs) for spec in specs],
    }
    if options.json is not None:
        write_whole(options.json, json.dumps(result, indent=1, allow_nan=False) + "\n")
    print(f"{len(sequences)} sequences, closed loop; ± is half a 95 % t interval over groups\n")
    print(_table(result["summary"]))


def _specs(policies: Sequence[str]) -> list[str]:
    """Canonical. raises ConfigError for a bad one, or one given twice"""
    specs = [_engine.NativePolicy(policy).spec for policy in policies]
    for spec in specs:
        if specs.count(spec) > 1:
            raise _engine.ConfigError(f"policy '{spec}' is given twice; give it once")
    return specs


def _refuse_unfit_output(options: argparse.Namespace, prompts: Sequence[Prompt]) -> None:
    """Before any work: the file can be written, and is no input. raises RecordError"""
    if options.json is None:
        return
    out = options.json
    if out.is_dir() or not out.parent.is_dir() or not os.access(out.parent, os.W_OK | os.X_OK):
        raise RecordError(f"--json {out}: cannot be written; give the path of a file", USAGE)
    inputs = [options.prompts, *(path for prompt in prompts for path in prompt.paths)]
    inside = options.model.resolve() in out.resolve().parents
    if inside or out.resolve() in [path.resolve() for path in inputs]:
        raise RecordError(f"--json {out}: would overwrite an input; choose another path", USAGE)


def _one_prompt(
    model: Any, reader: Any, prompt: Prompt, specs: list[str], options: argparse.Namespace
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The full cache's answer as a line of `sequences`, and one line of `runs` a policy."""
    tokenizer = getattr(reader, "tokenizer", reader)

    def text_of(tokens: list[int]) -> str:
        return " ".join(tokenizer.decode(tokens, skip_special_tokens=True).split())

    def is_right(tokens: list[int]) -> bool:
        return text_of(tokens) == " ".join(prompt.answer.split())

    inputs = prepare(model, reader, prompt)
    ready = hf.prepared(model, inputs.input_ids, inputs.pixel_values, inputs.image)
    full = effects.reference(
        model,
        ready,
        max_new_tokens=options.max_new_tokens,
        name=prompt.name,
        group=prompt.group,
    )
    right = None if prompt.answer is None else is_right
    line = {
        "name": prompt.name,
        "group": prompt.group or prompt.name,
        "prompt": ready.prompt,
        "tokens": full.answer.tokens,
        "answer": text_of(full.answer.tokens),
        "exact": None if right is None else right(full.answer.tokens),
    }
    lines = []
    for open_run in compare(full.sequence, specs, match=options.match, optimal=False).raw:
        found, closed = effects.effect(
            model,
            full,
            _as_run(open_run),
            is_right=right,
            max_new_tokens=options.max_new_tokens,
            name=prompt.name,
        )
        lines.append(
            {
                "sequence": prompt.name,
                "group": line["group"],
                "policy": open_run.policy,
                "options": open_run.options,
                "closed": asdict(found),
                "closed_run": closed.figures,
                "open": open_run.figures,
            }
        )
    return line, lines


def _as_run(run: Run) -> str:
    """The spec with the budget that was matched, if one was."""
    budget = run.options.get("budget")
    if budget is None or not budget.isdigit() or "budget=" in run.policy:
        return run.policy
    return f"{run.policy}{',' if ':' in run.policy else ':'}budget={budget}"


def _figures(run: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """What the summary averages; absent figures are left out."""
    for name in CLOSED:
        if run["closed"][name] is not None:
            yield f"closed.{name}", float(run["closed"][name])
    for name, path in OPEN:
        value: Any = run["open"]
        for key in path:
            value = None if value is None else value[key]
        if value is not None:
            yield f"open.{name}", float(value)


def _summary(spec: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean over groups, each the mean of its sequences, and the mean's 95 % t interval."""
    observations: dict[str, list[tuple[str, float]]] = {}
    members = [run for run in runs if run["policy"] == spec]
    for run in members:
        for name, value in _figures(run):
            observations.setdefault(name, []).append((run["group"], value))
    figures = {
        name: json.loads(_engine.group_interval(values)) for name, values in observations.items()
    }
    return {"policy": spec, "sequences": len(members), **figures}


def _table(summary: list[dict[str, Any]]) -> str:
    def cell(value: dict[str, Any] | None) -> str:
        if value is None:
            return "-"
        half = (
            ""
            if value["interval95"] is None
            else f" ± {value['interval95'][1] - value['mean']:.3f}"
        )
        return f"{value['mean']:.3f}{half}"

    columns = {
        "tokens": "open.tokens",
        "exact": "closed.exact",
        "as full cache": "closed.same",
        "token accuracy": "closed.token_accuracy",
        "KL (forced)": "closed.kl",
        "agreement (forced)": "closed.agreement",
        "missed pull (open)": "open.missed_pull",
        "missed mass (open)": "open.missed_mass",
    }
    rows = {
        line["policy"]: {title: cell(line.get(name)) for title, name in columns.items()}
        for line in summary
    }
    return pd.DataFrame.from_dict(rows, orient="index").to_string()


def _manifest(
    options: argparse.Namespace, arguments: Sequence[str], specs: list[str]
) -> dict[str, Any]:
    weights = sorted(options.model.glob("*.safetensors"))
    return {
        "command": shlex.join(["hae-closed-loop", *arguments]),
        "version": _engine.version(),
        "machine": platform.machine(),
        "libraries": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "model": str(options.model),
        "weights_sha256": {path.name: sha256_of_file(path) for path in weights},
        "prompts": {"path": str(options.prompts), "sha256": sha256_of_file(options.prompts)},
        "policies": specs,
        "match": options.match,
        "max_new_tokens": options.max_new_tokens,
        "compute_dtype": options.compute_dtype,
        "attention": options.attention,
        "device": options.device,
    }
