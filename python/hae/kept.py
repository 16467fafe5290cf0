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

from hae import _engine, comparison, fates, sequences
from hae.errors import BAD_INPUT, USAGE, RecordError
from hae.files import sha256, write_whole
from hae.run_file import ResultError, RunFile, StoredRun

SCHEMA = "hae.export/1"
METADATA = "hae"  # the key of the JSON text: one, as safetensors does not keep several in order
RUN_FORMAT = "hae-run"
RUNS_NAME = "runs.h5"  # of a folder of hae compare --out

_EXIT_CODES: dict[type[Exception], int] = {
    _engine.ConfigError: USAGE,
    _engine.NeedsError: USAGE,
    _engine.TraceError: BAD_INPUT,
    ResultError: BAD_INPUT,
    OSError: USAGE,
}


def exit_code_of(error: Exception) -> int | None:
    """What the program ends with; None: a fault of ours."""
    if isinstance(error, RecordError):
        return error.exit_code
    return next((code for kind, code in _EXIT_CODES.items() if isinstance(error, kind)), None)


@dataclass(frozen=True)
class KeptRun:
    """One policy's run over one sequence."""

    sequence: _engine.Sequence
    trace_sha256: str
    run: comparison.Run | StoredRun


def kept_positions(kept: KeptRun, step: int) -> list[list[np.ndarray]]:
    """Positions that are resident after a step's evictions: [layer][lane], ascending, int64.

    step    0: the prefill, when all prompt tokens have been cached; s: the s-th decode step, when
            tokens up to position P + s - 1 have
    raises  RecordError when tokens were merged, ResultError when the log does not fit the sequence
    """
    info = kept.sequence.info
    if kept.run.log.into.notna().any():
        raise RecordError(
            f"policy '{kept.run.policy}', sequence '{info.name}': tokens were merged, so positions "
            "alone do not say what is kept; export a policy that does not merge",
            USAGE,
        )
    evicted = fates.evicted_at(kept.run, info)
    of_lanes = [
        np.flatnonzero(lane[: info.prompt + step] > step).astype(np.int64) for lane in evicted
    ]
    lanes = len(of_lanes) // info.layers
    return [of_lanes[layer * lanes : (layer + 1) * lanes] for layer in range(info.layers)]


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
            yield KeptRun(sequence, traces.at(path)[1], run)


def _stored(path: Path, policies: Sequence[str], traces: Traces) -> Iterator[KeptRun]:
    """The runs of a run file, in its order; of all policies where none is named."""
    wanted = [_engine.NativePolicy(policy).spec for policy in policies]
    file = RunFile(path)
    runs = [file.run(index) for index in range(len(file))]
    there = [run.policy for run in runs]
    for policy in wanted:
        if policy not in there:
            raise RecordError(
                f"{path}: holds no run of '{policy}'; it has {', '.join(dict.fromkeys(there))}",
                USAGE,
            )
    for run in runs:
        if wanted and run.policy not in wanted:
            continue
        trace = traces.of(path, Path(run.trace_path), run.trace_sha256)
        if not 0 <= run.sequence_index < len(trace):
            raise ResultError(
                f"{path}: its trace has no sequence {run.sequence_index}; compare again"
            )
        yield KeptRun(trace[run.sequence_index], run.trace_sha256, run)


def _run_file(source: Path) -> Path | None:
    """The file of stored runs that the input is, or that lies in it; None for traces."""
    path = source / RUNS_NAME if source.is_dir() else source
    if not path.is_file():
        return None
    try:
        with h5py.File(path, "r") as file:
            return path if file.attrs.get("format") == RUN_FORMAT else None
    except (OSError, RuntimeError, ValueError, TypeError):
        return None  # The engine will say what is wrong.


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
    return list(_stored(path, policies, Traces(given)))


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
                of_lane = f".kv_heads.{lane}" if run.run.lanes == "kv_head" else ""
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
                "policy": run.run.policy,
                "options": dict(run.run.options),
                "lanes": run.run.lanes,
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
