"""Read what `hae compare --out DIR` keeps: result.json and runs.h5 (docs/results-format.md)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hae import _engine, files, result_shapes
from hae.comparison import Comparison
from hae.run_file import ResultError, RunFile, StoredRun
from hae.sequences import open as open_trace

SCHEMA = "hae.compare/1"
RESULT_NAME, RUNS_NAME = "result.json", "runs.h5"


def read_json(path: Path, schema: str, shape: dict[str, Any]) -> dict[str, Any]:
    """A result file of one schema and shape (hae.result_shapes). Numbers that JSON does not have
    (NaN) are read as null.

    raises ResultError
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ResultError(f"{path}: cannot be read: {_reason(error)}") from None
    try:
        result = json.loads(text, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise ResultError(f"{path}: is no JSON: {error}; write it again") from None
    found = result.get("schema") if isinstance(result, dict) else None
    if found != schema:
        what = "has no schema" if found is None else f"is of schema {found!r}"
        raise ResultError(f"{path}: {what}, expected {schema}")
    try:
        result_shapes.expect(result, shape)
    except result_shapes.ShapeError as error:
        raise ResultError(f"{path}: is not as {schema} says: {error}; write it again") from None
    return result


def read_comparison(
    folder: str | os.PathLike[str], *, traces: Iterable[str | os.PathLike[str]] = ()
) -> Comparison:
    """The comparison that `hae compare --out DIR` kept in a folder.

    traces   where traces are that are no longer where they were compared, known by their bytes
    raises   ResultError for a folder that is not whole, ConfigError for a trace of another result

    Traces that are not found, or have changed, are no error: their elements of `sequences` are None
    and `missing` says why.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ResultError(f"{folder}: no such folder; make it with: hae compare ... --out {folder}")
    if not (folder / RESULT_NAME).is_file():
        raise ResultError(
            f"{folder}: has no {RESULT_NAME}; make it with: hae compare ... --out {folder}"
        )
    result = read_json(folder / RESULT_NAME, SCHEMA, result_shapes.COMPARISON)
    raw = _runs(result, RunFile(folder / RUNS_NAME), folder)
    found, missing = _find_traces(result, folder, [Path(trace) for trace in traces])
    sequences = [_sequence(found, run) for run in raw[:: len(result["summary"])]]
    return Comparison(raw, result, sequences, missing)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _runs(result: dict[str, Any], stored: RunFile, folder: Path) -> list[StoredRun]:
    """raises ResultError when both files are not of the same runs"""
    runs = [stored.run(index) for index in range(len(stored))]
    of_result = [(run["sequence"]["name"], run["policy"]) for run in result["runs"]]
    policies = [line["policy"] for line in result["summary"]]
    in_order = bool(policies) and of_result == [
        (of_result[i - i % len(policies)][0], policies[i % len(policies)])
        for i in range(len(of_result))
    ]
    if not runs or not in_order or [(run.sequence, run.policy) for run in runs] != of_result:
        raise ResultError(
            f"{folder}: {RESULT_NAME} and {RUNS_NAME} are of different runs; "
            "compare again with --out"
        )
    return runs


def _find_traces(
    result: dict[str, Any], folder: Path, given: list[Path]
) -> tuple[dict[str, _engine.Trace], list[str]]:
    """The traces by their SHA-256, each one of `given` or where it was, and what is missing."""
    manifest = result["manifest"] or {"traces": []}
    wanted = {trace["sha256"]: trace["path"] for trace in manifest["traces"]}
    places = {}
    for path in given:
        try:
            sha256 = files.sha256(path)
        except OSError as error:
            raise _engine.ConfigError(f"--trace {path}: cannot be read: {_reason(error)}") from None
        if sha256 not in wanted:
            raise _engine.ConfigError(
                f"--trace {path}: {folder} was made from no such bytes (SHA-256 {sha256}); "
                "name the trace it was made from"
            )
        places[sha256] = path
    found, missing = {}, []
    for sha256, stated in wanted.items():
        try:
            found[sha256] = _opened(places.get(sha256, Path(stated)), sha256)
        except (OSError, ResultError, _engine.TraceError) as error:
            missing.append(f"{stated}: {_reason(error)}; name the right file with --trace")
    return found, missing


def _opened(path: Path, sha256: str) -> _engine.Trace:
    if (now := files.sha256(path)) != sha256:
        raise ResultError(f"has changed: its SHA-256 is {now}, the result was made from {sha256}")
    return open_trace(path)


def _sequence(found: dict[str, _engine.Trace], run: StoredRun) -> _engine.Sequence | None:
    trace = found.get(run.trace_sha256)
    if trace is None or not 0 <= run.sequence_index < len(trace):
        return None
    sequence = trace[run.sequence_index]
    return sequence if sequence.info.name == run.sequence else None
