"""Which tokens stay: the positions that each lane of a run holds at some step (docs/export.md)."""

from __future__ import annotations

import argparse
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from tqdm import tqdm

from hae import _engine, comparison, sequences
from hae.errors import BAD_INPUT, USAGE, RecordError, reason
from hae.files import sha256, write_whole

SCHEMA = "hae.export/1"
METADATA = "hae"  # the key of the JSON text: one, as safetensors does not keep several in order
RUN_FORMAT, RUN_VERSION = "hae-run", 2
RUNS_NAME = "runs.h5"  # of a folder of hae compare --out
COLUMNS = ("step", "layer", "lane", "token", "into")

_EXIT_CODES: dict[type[Exception], int] = {
    _engine.ConfigError: USAGE,
    _engine.NeedsError: USAGE,
    _engine.TraceError: BAD_INPUT,
    OSError: USAGE,
}


def exit_code_of(error: Exception) -> int | None:
    """What the program ends with; None: a fault of ours."""
    if isinstance(error, RecordError):
        return error.exit_code
    return next((code for kind, code in _EXIT_CODES.items() if isinstance(error, kind)), None)


@dataclass(frozen=True)
class KeptRun:
    """One policy's run over one sequence, as far as an export needs it.

    lanes  "layer" or "kv_head"
    log    COLUMNS as integers, one element an eviction; lane -1 when the layer is the lane, into -1
           where nothing was merged
    """

    sequence: _engine.Sequence
    trace_sha256: str
    policy: str
    options: Mapping[str, str]
    lanes: str
    log: Mapping[str, np.ndarray]


def kept_positions(run: KeptRun, step: int) -> list[list[np.ndarray]]:
    """Positions that are resident after a step's evictions: [layer][lane], ascending, int64.

    step    0: the prefill, when all prompt tokens have been cached; s: the s-th decode step, when
            tokens up to position P + s - 1 have
    raises  RecordError when the log does not fit the sequence, or tokens were merged
    """
    info, log = run.sequence.info, run.log
    lanes = info.kv_heads if run.lanes == "kv_head" else 1
    lane = np.maximum(log["lane"], 0)
    _refuse_unfit(run, lane, lanes)
    gone = log["step"] <= step
    kept = []
    for layer in range(info.layers):
        resident = np.ones((lanes, info.prompt + step), dtype=bool)
        here = gone & (log["layer"] == layer)
        resident[lane[here], log["token"][here]] = False
        kept.append([np.flatnonzero(of_lane).astype(np.int64) for of_lane in resident])
    return kept


def _refuse_unfit(run: KeptRun, lane: np.ndarray, lanes: int) -> None:
    info, log = run.sequence.info, run.log
    where = f"policy '{run.policy}', sequence '{info.name}'"
    if (log["into"] >= 0).any():
        raise RecordError(
            f"{where}: tokens were merged, so positions alone do not say what is kept; export a "
            "policy that does not merge",
            USAGE,
        )
    fits = (
        (log["step"] >= 0)
        & (log["step"] <= info.steps)
        & (log["layer"] >= 0)
        & (log["layer"] < info.layers)
        & (log["lane"] >= (0 if run.lanes == "kv_head" else -1))
        & (lane < lanes)
        & (log["token"] >= 0)
        & (log["token"] < info.prompt + log["step"])
    )
    tokens = np.stack([log["layer"], lane, log["token"]])
    if not fits.all() or np.unique(tokens, axis=1).shape[1] < tokens.shape[1]:
        raise RecordError(f"{where}: its log evicts tokens that are not there", BAD_INPUT)


# ------------------------------------------------------------------------------------ runs


class Traces:
    """Trace files, each opened once.

    given  where those of stored runs may be now
    """

    def __init__(self, given: Sequence[Path] = ()) -> None:
        self._given = given
        self._open: dict[Path, tuple[_engine.Trace, str]] = {}

    def at(self, path: Path) -> tuple[_engine.Trace, str]:
        """The trace and its SHA-256. raises TraceError"""
        if path not in self._open:
            self._open[path] = sequences.open(path), sha256(path)
        return self._open[path]

    def of(self, runs: Path, stored: Path, digest: str) -> _engine.Trace:
        """The trace that stored runs were made from. raises RecordError when it is not found"""
        for path in (*self._given, stored):
            if path.is_file():
                trace, found = self.at(path)
                if found == digest:
                    return trace
        raise RecordError(
            f"{runs}: its trace {stored} is not there, or has changed; name the one with SHA-256 "
            f"{digest} by --trace",
            BAD_INPUT,
        )


def _replayed(source: Path, policies: Sequence[str]) -> Iterator[KeptRun]:
    paths = [Path(path) for path in _engine.trace_files([os.fspath(source)])]
    traces = Traces()
    all_sequences = [(sequence, path) for path in paths for sequence in traces.at(path)[0]]
    progress = tqdm(all_sequences, desc="replaying", unit="sequence", disable=None, delay=1)
    for sequence, path in progress:
        for run in comparison.replay(sequence, policies):
            log = run.log
            columns = {name: log[name].to_numpy(np.int64, na_value=-1) for name in COLUMNS}
            digest = traces.at(path)[1]
            yield KeptRun(sequence, digest, run.policy, run.options, run.lanes, columns)


def _stored(path: Path, policies: Sequence[str], traces: Traces) -> Iterator[KeptRun]:
    """The runs of a run file, in its order; of all policies where none is named."""
    wanted = [_engine.NativePolicy(policy).spec for policy in policies]
    with h5py.File(path, "r") as file:
        groups = [file["runs"][name] for name in sorted(file["runs"])]
        there = [group.attrs["policy"] for group in groups]
        for policy in wanted:
            if policy not in there:
                raise RecordError(
                    f"{path}: holds no run of '{policy}'; it has {', '.join(dict.fromkeys(there))}",
                    USAGE,
                )
        paths, digests = (file[f"trace_{what}"].asstr()[()] for what in ("path", "sha256"))
        for group, policy in zip(groups, there, strict=True):
            if wanted and policy not in wanted:
                continue
            index = int(group.attrs["trace"])
            trace = traces.of(path, Path(paths[index]), digests[index])
            sequence = trace[int(group.attrs["sequence_index"])]
            keys, values = (group[f"option_{part}"].asstr()[()] for part in ("key", "value"))
            options = dict(zip(keys, values, strict=True))
            yield KeptRun(
                sequence, digests[index], policy, options, group.attrs["lanes"], _log_of(group)
            )


def _log_of(group: h5py.Group) -> dict[str, np.ndarray]:
    """raises ValueError for columns that are no log"""
    log = {name: group[f"log/{name}"] for name in COLUMNS}
    shapes = {column.shape for column in log.values()}
    integers = all(np.issubdtype(column.dtype, np.integer) for column in log.values())
    if not integers or len(shapes) > 1 or len(shapes.pop()) != 1:
        raise ValueError(f"{group.name}/log is not a list of evictions")
    return {name: column[()].astype(np.int64) for name, column in log.items()}


def _run_file(source: Path) -> Path | None:
    """The file of stored runs that the input is, or that lies in it; None for traces."""
    path = source / RUNS_NAME if source.is_dir() else source
    if not path.is_file():
        return None
    try:
        with h5py.File(path, "r") as file:
            kind, version, complete = (
                file.attrs.get(name) for name in ("format", "version", "complete")
            )
    except (OSError, RuntimeError, ValueError, TypeError):
        return None  # The engine will say what is wrong.
    if not isinstance(kind, str) or kind != RUN_FORMAT:
        return None
    if version != RUN_VERSION or not complete:
        raise RecordError(
            f"{path}: not a whole run file of version {RUN_VERSION}; make it again with hae "
            "compare --out",
            BAD_INPUT,
        )
    return path


def runs_of(source: Path, policies: Sequence[str], given: Sequence[Path]) -> list[KeptRun]:
    """The runs that an input stands for: stored ones, or those of policies over its traces.

    given   where the traces of stored runs may be now
    raises  RecordError, TraceError, ConfigError, NeedsError
    """
    path = _run_file(source)
    if path is None:
        if not policies:
            for trace in _engine.trace_files([os.fspath(source)]):
                sequences.open(trace)  # What cannot be read needs no policy.
            raise RecordError(f"{source}: holds no stored runs; name a --policy to replay", USAGE)
        return list(_replayed(source, policies))
    try:
        return list(_stored(path, policies, Traces(given)))
    except (LookupError, ValueError, TypeError, OSError, RuntimeError, MemoryError) as error:
        if isinstance(error, (RecordError, _engine.TraceError, _engine.ConfigError)):
            raise
        raise RecordError(
            f"{path}: cannot be read: {reason(error)}; make it again with hae compare --out",
            BAD_INPUT,
        ) from None


# ------------------------------------------------------------------------------------ file


def step_of(at: str | int, run: KeptRun) -> int:
    """raises RecordError for a step that the sequence does not have"""
    info = run.sequence.info
    if isinstance(at, int) and at > info.steps:
        raise RecordError(
            f"--at {at}: sequence '{info.name}' has {info.steps} decode steps; name one of them",
            USAGE,
        )
    return {"prefill": 0, "end": info.steps}.get(at, at)


def arrays_of(runs: Sequence[KeptRun], at: str | int) -> dict[str, np.ndarray]:
    """Every lane's positions by name: runs.R.layers.L, or runs.R.layers.L.kv_heads.K."""
    arrays = {}
    for number, run in enumerate(runs):
        for layer, lanes in enumerate(kept_positions(run, step_of(at, run))):
            for lane, positions in enumerate(lanes):
                of_lane = f".kv_heads.{lane}" if run.lanes == "kv_head" else ""
                arrays[f"runs.{number}.layers.{layer}{of_lane}"] = positions
    return arrays


def metadata_of(runs: Sequence[KeptRun], at: str | int) -> str:
    """What the arrays are of, as JSON text."""
    described = []
    for run in runs:
        info = run.sequence.info
        described.append(
            {
                "sequence": info.name,
                "group": info.group,
                "sequence_index": run.sequence.index,
                "trace_sha256": run.trace_sha256,
                "policy": run.policy,
                "options": dict(run.options),
                "lanes": run.lanes,
                "step": step_of(at, run),
                "prompt": info.prompt,
                "cached": info.prompt + step_of(at, run),
                "layers": info.layers,
                "query_heads": info.query_heads,
                "kv_heads": info.kv_heads,
                "head_dim": info.head_dim,
            }
        )
    whole = {"schema": SCHEMA, "version": _engine.version(), "at": str(at), "runs": described}
    return json.dumps(whole)


def file_bytes(suffix: str, arrays: Mapping[str, np.ndarray], metadata: str) -> bytes:
    """The same for the same arguments."""
    if suffix == ".safetensors":
        from safetensors.numpy import save

        return save(dict(arrays), metadata={METADATA: metadata})
    buffer = io.BytesIO()
    np.savez(buffer, **{METADATA: np.array(metadata)}, **arrays)
    return buffer.getvalue()


def export(options: argparse.Namespace) -> None:
    """Everything hae-export does after its options are read. raises what exit_code_of knows"""
    out = options.out
    if out.is_dir() or not out.parent.is_dir() or not os.access(out.parent, os.W_OK | os.X_OK):
        raise RecordError(f"--out {out}: cannot be written; give the path of a file", USAGE)
    if out.resolve() in [path.resolve() for path in (options.input, *options.trace)]:
        raise RecordError(f"--out {out}: would overwrite an input; choose another path", USAGE)
    if out.suffix == ".safetensors":
        import safetensors  # noqa: F401  # before the work, not after it
    runs = runs_of(options.input, options.policy, options.trace)
    arrays = arrays_of(runs, options.at)
    data = file_bytes(out.suffix, arrays, metadata_of(runs, options.at))
    try:
        write_whole(out, data)
    except OSError as error:
        raise RecordError(
            f"--out {out}: cannot be written ({error.strerror}); check the disk", USAGE
        ) from None
    print(f"{out}: {len(arrays)} arrays of {len(runs)} runs")
