"""Run files: what `hae compare --out` and `hae replay --out` keep of runs (traces/FORMAT.md)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd

from hae import _engine

_FIGURES = ("missed_mass", "missed_pull", "kl", "output_error", "output_error_relative")
_MOST_BYTES = 1 << 30  # of one dataset


class ResultError(Exception):
    """A result that cannot be read: one line that says what is wrong, and where."""


class RunFile:
    """A run file (traces/FORMAT.md, "Run files"), open for reading.

    raises ResultError, as everything here does, for a file that is not whole or not one
    """

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
    """A stored run, with what a run file keeps of hae.Run; each array is read when it is first
    used.
    """

    def __init__(self, file: RunFile, group: h5py.Group) -> None:
        self._file, self._group = file, group
        attributes = group.attrs
        self.sequence = str(attributes["sequence"])
        self.policy = str(attributes["policy"])
        self.lanes = str(attributes["lanes"])
        self.sequence_index = int(attributes["sequence_index"])
        trace = int(attributes["trace"])
        self.trace_sha256, self.trace_path = (
            file.array(file.file, f"trace_{what}")[trace].decode("utf-8", "replace")
            for what in ("sha256", "path")
        )

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
            & (log.token >= 0)
            & (log.token < info.prompt + log.step)
        )
        tokens = pd.DataFrame({"layer": log.layer, "lane": lane, "token": log.token})
        if self.lanes not in ("layer", "kv_head") or not fits.all() or tokens.duplicated().any():
            raise self._damaged("its log evicts tokens that are not there")

    @cached_property
    def options(self) -> dict[str, str]:
        """Every option as it was run."""
        keys, values = (self._array(f"option_{part}") for part in ("key", "value"))
        return {key.decode(): value.decode() for key, value in zip(keys, values, strict=True)}

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
