"""Replay recorded sequences through eviction policies, compare what each loses, and describe their
attention.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from hae import _engine
from hae.sequences import open as open_trace

if TYPE_CHECKING:
    from hae._engine import NativePolicy, NativeRun, Sequence, SequenceInfo, Trace
    from hae.policy_class import Policy
    from hae.run_file import StoredRun

    Source = str | os.PathLike[str] | Trace | Sequence
    AnyPolicy = str | NativePolicy | Policy


def policy(spec: str) -> NativePolicy:
    """A policy of the table: `name` or `name:key=value,key=value`.

    raises ConfigError naming the key and what is allowed
    """
    return _engine.NativePolicy(spec)


def policies() -> pd.DataFrame:
    """The table of policies: name, summary, source, fidelity, and options as a dict
    {key: {default, allowed, meaning}}.
    """
    return pd.DataFrame(_engine.policy_table()).set_index("name")


class Run:
    """What one policy's run over one sequence left behind.

    decode, prefill   {metric: [layers, query_heads, rows] float64}, rows: decode steps, prompt
                      positions; NaN where a row is not in the metric's population. prefill is None
                      unless something was evicted within it
    top_now           [layers, query_heads, steps] missed mass of the best set of the row's size
    attention_tokens  [layers, lanes, steps] residents at attention time
    final_tokens      [layers, lanes] residents after the last step
    Arrays are views of the run; copy what is changed.
    """

    def __init__(self, native: NativeRun) -> None:
        self._native = native
        self.info: SequenceInfo = native.info
        self.policy: str = native.policy
        self.options: dict[str, str] = native.options
        self.lanes: str = native.lanes
        self.warnings: list[str] = native.warnings
        self.limits: list[list[dict[str, int | None]]] = native.limits
        self.removed_all_rows: int = native.removed_all_rows
        self.masked_rows: int = native.masked_rows
        self.optimal: float | None = native.optimal

    @property
    def sequence(self) -> str:
        return self.info.name

    @cached_property
    def log(self) -> pd.DataFrame:
        """The evictions, one a line, sorted by (step, layer, lane, token). Lane is -1 when the
        layer is the lane; score is NaN where the policy has none; pending_since and into are <NA>.
        A run that merges also has kept_weight, weight and size, NaN where nothing was merged.
        """
        columns = self._native.log_columns()
        columns["within"] = columns["within"].astype(bool)
        for name in ("pending_since", "into"):
            column = columns[name]
            columns[name] = pd.array(column, dtype="Int64")
            columns[name][column < 0] = pd.NA
        return pd.DataFrame(columns)

    @cached_property
    def pending(self) -> pd.DataFrame:
        """What was marked and still resident at the end: layer, lane, token, since."""
        return pd.DataFrame(self._native.pending_columns())

    @property
    def decode(self) -> dict[str, np.ndarray] | None:
        return self._native.decode

    @property
    def prefill(self) -> dict[str, np.ndarray] | None:
        return self._native.prefill

    @property
    def top_now(self) -> np.ndarray:
        return self._native.top_now

    @property
    def attention_tokens(self) -> np.ndarray:
        return self._native.attention_tokens

    @property
    def final_tokens(self) -> np.ndarray:
        return self._native.final_tokens

    @cached_property
    def figures(self) -> dict[str, Any]:
        """The run as an element of `runs` in `hae compare --json` (docs/results-format.md)."""
        return json.loads(self._native.json())

    def json_lines(self) -> str:
        """The log as `hae replay --events` prints it."""
        return self._native.json_lines()

    def __repr__(self) -> str:
        return f"<hae.Run of {self.policy} over '{self.sequence}': {len(self.log)} evictions>"


@dataclass(frozen=True)
class Comparison:
    """Every policy over every sequence.

    raw        one Run a (sequence, policy), in this order
    result     what `hae compare --json` writes; its manifest is null unless all sources are files
    sequences  what was compared; None for one of a stored comparison whose trace is not there
    missing    which traces of a stored comparison are not there, and why: a sentence each
    """

    raw: list[Run | StoredRun]
    result: dict[str, Any]
    sequences: list[Sequence | None]
    missing: list[str] = field(default_factory=list)

    @cached_property
    def runs(self) -> pd.DataFrame:
        """One line a run: sequence, group, policy, then every figure by its dotted name."""
        lines = []
        policies = len(self.result["summary"])
        for i, (run, figures) in enumerate(zip(self.raw, self.result["runs"], strict=True)):
            sequence = self.sequences[i // policies]
            group = None if sequence is None else sequence.info.group
            line = {"sequence": run.sequence, "group": group, "policy": run.policy}
            lines.append(line | dict(_numbers(figures)) | {"unequal": figures["unequal"]})
        return pd.DataFrame(lines)

    @cached_property
    def summary(self) -> pd.DataFrame:
        """One line a policy; columns (figure, part): mean over groups, ends low and high of its
        95 % t interval (NaN for one group), number of groups.
        """
        lines = {}
        for line in self.result["summary"]:
            values: dict[tuple[str, str], Any] = {}
            for figure, value in line.items():
                if isinstance(value, dict):
                    low, high = value.get("interval95") or (np.nan, np.nan)
                    values |= {
                        (figure, "mean"): value["mean"],
                        (figure, "low"): low,
                        (figure, "high"): high,
                        (figure, "groups"): value["groups"],
                    }
            lines[line["policy"]] = values
        frame = pd.DataFrame.from_dict(lines, orient="index")
        frame.columns = pd.MultiIndex.from_tuples(frame.columns, names=["figure", None])
        return frame.rename_axis("policy")

    @cached_property
    def overlap(self) -> pd.DataFrame:
        """How alike the tokens are that every two policies keep to the end, one line and one column
        a policy: the Jaccard index |A & B| / |A | B|, mean over layers and lanes, then over groups.
        """
        policies = self.result["overlap"]["policies"]
        frame = pd.DataFrame(self.result["overlap"]["mean"], index=policies, columns=policies)
        return frame.rename_axis("policy")


def _numbers(figures: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, float]]:
    """The numbers of a run by dotted name; lists (per layer) are left out."""
    for key, value in figures.items():
        if isinstance(value, dict) and key not in ("sequence", "options", "resolved", "per_layer"):
            yield from _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield prefix + key, value


def _as_list(value: Any) -> list[Any]:
    single = isinstance(value, (str, os.PathLike, _engine.Trace, _engine.Sequence))
    return [value] if single or not isinstance(value, Iterable) else list(value)


def _opened(sources: list[Any]) -> Iterator[Any]:
    """The sources, with the traces of a path in its place."""
    for source in sources:
        if isinstance(source, (str, os.PathLike)):
            yield from map(open_trace, _engine.trace_files([os.fspath(source)]))
        else:
            yield source


def _sequences(sources: Any) -> tuple[list[Sequence], list[str] | None]:
    """The sequences of all sources, and the paths of the files when all sources are files."""
    sequences: list[Sequence] = []
    paths: list[str] | None = []
    for source in _opened(_as_list(sources)):
        if isinstance(source, _engine.Sequence):
            sequences.append(source)
            paths = None
            continue
        if not isinstance(source, _engine.Trace):
            raise TypeError(f"not a path, hae.Trace or hae.Sequence: {source!r}")
        sequences += source
        if paths is not None:
            paths.append(source.path)
    return sequences, paths


def replay(
    sources: Source | Iterable[Source],
    policies: AnyPolicy | Iterable[AnyPolicy],
    *,
    nan: str = "error",
    threads: int = 0,
) -> list[Run]:
    """Replays sequences through policies. Returns one Run a (sequence, policy), in this order.

    sources   a path of a file or of a folder of *.h5 files, a Trace, a Sequence, or several
    policies  a spec, a policy, or several
    nan       "error", or "lowest": a NaN or infinite weight counts as 0
    threads   0: one a core. It never changes a result
    raises    TraceError, NeedsError, ConfigError; ContractViolation for a policy that proposes what
              it may not; what a policy written in Python raises
    """
    sequences, _ = _sequences(sources)
    runs = _engine.compare_sequences(sequences, _as_list(policies), None, nan, False, threads)
    return [Run(run) for run in runs]


def compare(
    sources: Source | Iterable[Source],
    policies: AnyPolicy | Iterable[AnyPolicy],
    *,
    match: str | None = None,
    optimal: bool = True,
    nan: str = "error",
    threads: int = 0,
) -> Comparison:
    """What `hae compare` does.

    match    "mean" or "peak": every policy that has a budget and was given none gets the one that
             comes nearest to the first policy's tokens
    optimal  search for the least missed mass that any eviction of the same sizes reaches
    Others and errors as in replay.
    """
    sequences, paths = _sequences(sources)
    chosen = _as_list(policies)
    native = _engine.compare_sequences(sequences, chosen, match, nan, optimal, threads)
    raw = [Run(run) for run in native]
    result = json.loads(_engine.result(native))
    if paths is not None:
        result["manifest"] = json.loads(_engine.manifest(paths, chosen, match, nan, optimal))
        result["manifest"]["command"] = shlex.join(sys.orig_argv)
    return Comparison(raw, result, sequences)


def stats(
    sources: Source | Iterable[Source],
    *,
    threshold: float = 1e-4,
    r: Iterable[float] = (0.0005, 0.001, 0.0015, 0.003, 0.006),
    alpha: float = 0.0005,
    nan: str = "error",
    threads: int = 0,
) -> dict[str, Any]:
    """What `hae stats` does: sparsity, column sums, agreement of layers under DAP, and attention
    against age, per layer. Returns a result of schema hae.stats/1 (docs/results-format.md), whose
    manifest is None for sequences in memory.

    threshold  a probability at most this is sparse
    r, alpha   of DAP, at which layers are compared
    Others and errors as in replay.
    """
    sequences, paths = _sequences(sources)
    result = json.loads(_engine.statistics(sequences, threshold, list(r), alpha, nan, threads))
    if paths is not None:
        result["manifest"] = json.loads(_engine.manifest(paths, [], None, nan, False))
        result["manifest"]["command"] = shlex.join(sys.orig_argv)
    return result
