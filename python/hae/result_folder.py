"""Read what `hae compare --out DIR` keeps: result.json and runs.h5 (docs/results-format.md)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd

from hae import _engine, files, result_shapes
from hae.comparison import Comparison
from hae.sequences import open as open_trace

SCHEMA = "hae.compare/1"
RESULT_NAME, RUNS_NAME = "result.json", "runs.h5"

_FIGURES = ("missed_mass", "missed_pull", "kl", "output_error", "output_error_relative")
_MOST_BYTES = 1 << 30  # of one dataset


class ResultError(Exception):
    """A result that cannot be read: one line that says what is wrong, and where."""


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
    raw = _runs(result, _StoredRuns(folder / RUNS_NAME), folder)
    found, missing = _find_traces(result, folder, [Path(trace) for trace in traces])
    sequences = [_sequence(found, run) for run in raw[:: len(result["summary"])]]
    return Comparison(raw, result, sequences, missing)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _runs(result: dict[str, Any], stored: _StoredRuns, folder: Path) -> list[StoredRun]:
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


class _StoredRuns:
    """A run file (traces/FORMAT.md, "Run files"), open for reading."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.file = h5py.File(path, "r")
        except OSError as error:
            raise ResultError(f"{path}: cannot be opened as HDF5: {error}") from None
        attributes = self.file.attrs
        if attributes.get("format") != "hae-run" or attributes.get("version") != 2:
            raise ResultError(f"{path}: no run file of version 2; compare again with --out")
        if attributes.get("complete") != 1:
            raise ResultError(f"{path}: incomplete, its writer did not finish; compare again")

    def __len__(self) -> int:
        runs = self._member(self.file, "runs")
        return len(runs) if isinstance(runs, h5py.Group) else 0

    def run(self, index: int) -> StoredRun:
        try:
            return StoredRun(self, self._member(self.file, f"runs/{index:06d}"))
        except (OSError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ResultError(f"{self.path}: run {index}: {error}; compare again") from None

    def array(self, group: h5py.Group, name: str) -> np.ndarray:
        """A dataset that is stored in this file and whole.

        raises ResultError: nothing is read through links, or unpacked beyond a limit
        """
        try:
            dataset = self._member(group, name)
            if not isinstance(dataset, h5py.Dataset) or dataset.is_virtual or dataset.external:
                raise ValueError("no dataset of this file")
            stored = dataset.id.get_storage_size()
            whole = dataset.chunks is not None or stored == dataset.nbytes
            if dataset.nbytes > _MOST_BYTES or not whole:
                raise ValueError(f"{stored} bytes are stored of {dataset.nbytes}")
            return dataset[()]
        except (OSError, KeyError, RuntimeError, TypeError, ValueError) as error:
            where = f"{self.path}:{group.name}/{name}"
            raise ResultError(f"{where}: cannot be read: {error}; compare again") from None

    @staticmethod
    def _member(group: h5py.Group, path: str) -> Any:
        for name in path.split("/"):
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                raise KeyError(f"{name} is not there")
            group = group[name]
        return group


class StoredRun:
    """A run of a folder, with the arrays of hae.Run that runs.h5 keeps; each is read when it is
    first used.
    """

    def __init__(self, file: _StoredRuns, group: h5py.Group) -> None:
        self._file, self._group = file, group
        attributes = group.attrs
        self.sequence = str(attributes["sequence"])
        self.policy = str(attributes["policy"])
        self.lanes = str(attributes["lanes"])
        self.sequence_index = int(attributes["sequence_index"])
        hashes = file.array(file.file, "trace_sha256")
        self.trace_sha256 = hashes[int(attributes["trace"])].decode("ascii", "replace")

    def _array(self, name: str) -> np.ndarray:
        return self._file.array(self._group, name)

    def _columns(self, folder: str, names: Sequence[str]) -> pd.DataFrame:
        """raises ResultError unless all are as long as each other"""
        columns = {name: self._array(f"{folder}/{name}") for name in names}
        if len({column.shape for column in columns.values()}) > 1:
            raise self._damaged(f"columns of {folder} are not equally long")
        for name, column in columns.items():
            if column.ndim != 1 or (name != "score" and column.dtype.kind not in "iub"):
                raise self._damaged(f"{folder}/{name} is no column of whole numbers")
        return pd.DataFrame(columns)

    def _damaged(self, what: str) -> ResultError:
        return ResultError(f"{self._file.path}:{self._group.name}: {what}; compare again")

    def check_fits(self, info: _engine.SequenceInfo) -> None:
        """raises ResultError when the log names what the sequence does not have"""
        log, lanes = self.log, info.kv_heads if self.lanes == "kv_head" else 1
        lane = np.maximum(log.lane, 0)
        fits = (
            log.step.between(0, info.steps)
            & log.layer.between(0, info.layers - 1)
            & log.lane.between(0 if self.lanes == "kv_head" else -1, lanes - 1)
            & log.token.between(0, info.tokens - 1)
        )
        tokens = pd.DataFrame({"layer": log.layer, "lane": lane, "token": log.token})
        if self.lanes not in ("layer", "kv_head") or not fits.all() or tokens.duplicated().any():
            raise self._damaged("its log evicts tokens that are not there")

    @cached_property
    def log(self) -> pd.DataFrame:
        """As hae.Run.log, without what merging adds."""
        names = ("step", "layer", "lane", "token", "within", "pending_since", "into", "score")
        frame = self._columns("log", names)
        frame["within"] = frame["within"].astype(bool)
        frame["score"] = frame["score"].where(self._array("log/has_score") == 1)
        for name in ("pending_since", "into"):
            frame[name] = frame[name].astype("Int64").where(frame[name] >= 0)
        return frame

    @cached_property
    def pending(self) -> pd.DataFrame:
        names = ("layer", "lane", "token", "since")
        return self._columns("pending", names)

    @cached_property
    def decode(self) -> dict[str, np.ndarray] | None:
        if "decode" not in self._group:
            return None
        stored = [name for name in _FIGURES if f"decode/{name}" in self._group]
        rows = {name: self._array(f"decode/{name}") for name in stored}
        if any(of_figure.ndim != 3 for of_figure in rows.values()):
            raise self._damaged("decode is not [layers, query_heads, steps]")
        return rows

    @cached_property
    def attention_tokens(self) -> np.ndarray:
        return self._array("attention_tokens")
