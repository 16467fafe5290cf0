"""What an interrupted run finished: which of its sequences can be kept."""

from __future__ import annotations

import argparse
import contextlib
import io
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hae import __version__, trace
from hae.arguments import argument_parser
from hae.errors import BAD_INPUT, USAGE, RecordError, reason
from hae.prompts import Inputs, Prompt


def finished_parts(folder: Path, names: Sequence[str], resume: bool) -> dict[int, Path]:
    """The parts of an interrupted run, by number of the prompt.

    raises RecordError when there are some and `resume` is not given, or they are of other prompts
    """
    paths = sorted(folder.glob("[0-9]*.h5"))
    if paths and not resume:
        raise RecordError(
            f"{folder}: holds {len(paths)} finished sequences of an interrupted run; keep them "
            "with --resume, or remove the folder",
            USAGE,
        )
    numbered = {f"{index:06d}.h5": index for index in range(len(names))}
    parts = {}
    for position, path in enumerate(paths):
        with _opened(path) as file:
            found = file["sequences/000000"].attrs["name"]
        index = numbered.get(path.name)
        if index is None or found != names[index]:
            raise RecordError(
                f"{path}: holds sequence {found!r}, which is not prompt "
                f"{position if index is None else index} of this run; remove the folder",
                USAGE,
            )
        parts[index] = path
    return parts


def refuse_other_recording(
    part: Path, prompt: Prompt, inputs: Inputs, model_name: str, options: argparse.Namespace
) -> None:
    """raises RecordError when this run would record something else than what the part holds"""
    with _opened(part) as file:
        differs = _difference(file, 0, prompt, inputs, model_name, options)
    if differs is not None:
        raise RecordError(
            f"{part}: was recorded with another value of {differs}; resume with what "
            f"the run began with, or remove {part.parent}",
            USAGE,
        )


def is_joined(
    out: Path,
    prompts: Sequence[Prompt],
    prepared: Iterable[Inputs],
    model_name: str,
    options: argparse.Namespace,
) -> bool:
    """Whether `out` holds all that this run would record: its parts were joined already.

    prepared  the inputs of each prompt in turn
    """
    try:
        with _opened(out) as file:
            return len(file["sequences"]) == len(prompts) and all(
                _difference(file, index, prompt, inputs, model_name, options) is None
                for index, (prompt, inputs) in enumerate(zip(prompts, prepared, strict=True))
            )
    except RecordError:
        return False


def _difference(
    file: h5py.File,
    index: int,
    prompt: Prompt,
    inputs: Inputs,
    model_name: str,
    options: argparse.Namespace,
) -> str | None:
    """What of sequence `index` this run would record otherwise, with both values if short."""
    found = _recorded(file, index)
    expected = {
        "recorder": f"hae-record {__version__}",
        "model": model_name,
        "name": prompt.name,
        "group": prompt.group or prompt.name,
        "--payload": options.payload,
        "--dtype": options.dtype,
        "--compute-dtype": options.compute_dtype,
        "--attention": options.attention,
        "--max-new-tokens": options.max_new_tokens,
        "--beams": options.beams,
        "--batch": options.batch,
        "--chat": options.chat,
        "--layers": _layers_text(options.layers),
        "--unrotated": options.unrotated,
        "--embedding-similarity": options.embedding_similarity,
        "the prompt's tokens": inputs.input_ids[0].tolist(),
        "the prompt's pictures": [np.asarray(image).tolist() for image in prompt.images],
    }
    for what, wanted in expected.items():
        if found[what] != wanted:
            values = "" if isinstance(wanted, list) else f" ({found[what]}, now {wanted})"
            return what + values
    return None


def _recorded(file: h5py.File, index: int) -> dict[str, Any]:
    group = file[f"sequences/{index:06d}"]
    layer = group["layers/000000"]
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            typed = argument_parser().parse_args(shlex.split(file.attrs["command"])[1:])
    except SystemExit:
        raise trace.TraceError("its command is none of this hae-record") from None
    pictures = group.get("pictures", {})
    return {
        "recorder": file.attrs["recorder"],
        "model": group.attrs["model"],
        "name": group.attrs["name"],
        "group": group.attrs["group"],
        "--payload": group.attrs["payload"],
        "--dtype": trace.dtype_of(layer["v"]),
        "--compute-dtype": typed.compute_dtype,
        "--attention": group.attrs["attention_implementation"],
        "--max-new-tokens": typed.max_new_tokens,
        "--beams": group.attrs.get("beams", 1),
        "--batch": typed.batch,
        "--chat": typed.chat,
        "--layers": _layers_text(group["model_layer"][()] if "model_layer" in group else None),
        "--unrotated": "q_unrotated" in layer,
        "--embedding-similarity": "embedding_similarity" in group,
        "the prompt's tokens": group["token_id"][: group.attrs["prompt"]].tolist(),
        "the prompt's pictures": [
            pictures[name][()].tolist() for name in sorted(pictures, key=int)
        ],
    }


def _layers_text(layers: Iterable[int] | None) -> str:
    return "all" if layers is None else ",".join(str(layer) for layer in layers)


@contextlib.contextmanager
def _opened(part: Path) -> Iterator[h5py.File]:
    try:
        with trace.open_trace(part) as file:
            yield file
    except (trace.TraceError, OSError, LookupError, ValueError, RuntimeError) as error:
        raise RecordError(
            f"{part}: cannot be read: {reason(error)}; remove it to record its sequence again",
            BAD_INPUT,
        ) from None
