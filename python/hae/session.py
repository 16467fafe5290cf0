"""A whole recording: from a model folder and prompts to one trace file."""

from __future__ import annotations

import argparse
import contextlib
import platform
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
import transformers
from transformers.utils import logging

from hae import __version__, trace
from hae.capture import CaptureError, probe, refuse_compiled
from hae.decoder import Shape, UnsupportedModel, decoder_of, shape_of
from hae.prompts import Prompt, PromptError, load_prompts, prepare
from hae.recorder import Settings, record_sequence
from hae.verify import VerificationError, tolerance_of, verify_sequence

ANSWER_IS_NO, USAGE, BAD_INPUT = 1, 2, 3


class RecordError(Exception):
    """What stops a recording: one line, and the exit code it ends with."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(" ".join(message.split()))
        self.exit_code = exit_code


# ----------------------------------------------------------------------------------- loading


def load_model(folder: Path, compute_dtype: str, device: str) -> tuple[Any, Any]:
    """A model and its processor (or tokenizer) from a local folder.

    raises RecordError when the folder holds none that can be recorded
    """
    if not (folder / "config.json").is_file():
        raise RecordError(f"{folder}: no config.json; give the folder of a saved model", BAD_INPUT)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        pictures = hasattr(config, "vision_config")
        loader = (
            transformers.AutoModelForImageTextToText
            if pictures
            else transformers.AutoModelForCausalLM
        )
        model = loader.from_pretrained(
            folder, dtype=getattr(torch, compute_dtype), local_files_only=True
        )
        reader = transformers.AutoProcessor if pictures else transformers.AutoTokenizer
        processor = reader.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise RecordError(f"{folder}: the model does not load: {error}", BAD_INPUT) from None
    try:
        return model.eval().to(device), processor
    except RuntimeError as error:
        raise RecordError(f"--device {device}: {error}", USAGE) from None


def origin_of(arguments: Sequence[str]) -> trace.Origin:
    versions = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "h5py": h5py.__version__,
        "hdf5": h5py.version.hdf5_version,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return trace.Origin(
        recorder=f"hae-record {__version__}",
        libraries=", ".join(f"{name} {version}" for name, version in versions.items()),
        command=shlex.join(["hae-record", *arguments]),
    )


# ---------------------------------------------------------------------------------- the plan


def size_text(size: int) -> str:
    unit, name = next(
        ((unit, name) for unit, name in ((2**30, "GiB"), (2**20, "MiB")) if size >= unit),
        (2**10, "KiB"),
    )
    return f"{size:,} bytes ({size / unit:.2f} {name})"


def plan(shape: Shape, prompt_tokens: Sequence[int], options: argparse.Namespace) -> int:
    """Print what the recording may grow to, and what all of attention would take.

    returns the largest possible size in bytes
    """
    width = trace.element_bytes(options.dtype)
    extra = options.max_new_tokens - 1
    total = sum(
        shape.payload_bytes(options.payload, prompt, prompt + extra, width)
        for prompt in prompt_tokens
    )
    if options.unrotated and options.payload == "qkv":
        queries = shape.layers * shape.query_heads * shape.head_dim * width
        total += sum(queries * (prompt + extra) for prompt in prompt_tokens)
    longest = max(prompt_tokens)
    square = shape.prefill_attention_bytes(longest, width)
    print(
        f"{len(prompt_tokens)} sequences, prompts of {min(prompt_tokens)} to {longest} tokens, up "
        f"to {options.max_new_tokens} new ones: at most {size_text(total)} as "
        f"{options.payload} in {options.dtype}"
    )
    print(
        f"full attention of the longest prompt would take {size_text(square)}, "
        f"{size_text(square // shape.layers)} a layer"
    )
    return total


def refuse_above_limit(total: int, options: argparse.Namespace) -> None:
    limit, named = options.limit_bytes, "--limit-bytes"
    if limit is None:
        limit, named = shutil.disk_usage(options.out.parent).free, "free space"
    if total <= limit:
        return
    if options.payload == "attention":
        instead = "--payload qkv, which grows with the tokens and not with their square"
    elif options.dtype == "float32":
        instead = "--dtype float16, which takes half"
    else:
        instead = "fewer prompts or a smaller --max-new-tokens"
    raise RecordError(
        f"{options.out}: may take {size_text(total)}, above the {named} of {size_text(limit)}; "
        f"try {instead}",
        USAGE,
    )


# ----------------------------------------------------------------------------------- the run


def finished_parts(folder: Path, names: Sequence[str], resume: bool) -> list[Path]:
    """The parts of an interrupted run that can be kept.

    raises RecordError when there are some and `resume` is not given, or they are of other prompts
    """
    parts = sorted(folder.glob("[0-9]*.h5"))
    if parts and not resume:
        raise RecordError(
            f"{folder}: holds {len(parts)} finished sequences of an interrupted run; keep them "
            "with --resume, or remove the folder",
            USAGE,
        )
    for index, part in enumerate(parts):
        with trace.open_trace(part) as file:
            found = file["sequences/000000"].attrs["name"]
        if index >= len(names) or part.name != f"{index:06d}.h5" or found != names[index]:
            raise RecordError(
                f"{part}: holds sequence {found!r}, which is not prompt {index} of this run; "
                "remove the folder",
                USAGE,
            )
    return parts


def record(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Everything hae-record does after its options are read.

    arguments  as typed, for the file's `command`
    raises     RecordError
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with _as_record_errors():
        prompts = load_prompts(options.prompts)
        if not options.out.parent.is_dir():
            raise RecordError(f"{options.out.parent}: no such folder", USAGE)
        folder = options.out.with_name(options.out.name + ".parts")
        names = [prompt.name for prompt in prompts]
        finished = finished_parts(folder, names, options.resume)

        model, processor = load_model(options.model, options.compute_dtype, options.device)
        decoder = decoder_of(model)
        refuse_compiled(model)
        probe(decoder, options.attention)
        tokens = [prepare(model, processor, prompt).input_ids.shape[1] for prompt in prompts]
        refuse_above_limit(plan(shape_of(decoder), tokens, options), options)

        origin = origin_of(arguments)
        folder.mkdir(exist_ok=True)
        try:
            parts = _record_parts(model, processor, prompts, folder, finished, options, origin)
            trace.join_traces(parts, options.out, origin)
            shutil.rmtree(folder)
        finally:
            with contextlib.suppress(OSError):
                folder.rmdir()  # unless finished sequences lie in it
    print(f"{options.out}: {len(prompts)} sequences, {size_text(options.out.stat().st_size)}")


def _record_parts(
    model: Any,
    processor: Any,
    prompts: Sequence[Prompt],
    folder: Path,
    finished: Sequence[Path],
    options: argparse.Namespace,
    origin: trace.Origin,
) -> list[Path]:
    """Record every prompt that has no finished part; verify the first part against the model."""
    settings = Settings(
        payload=options.payload,
        dtype=options.dtype,
        max_new_tokens=options.max_new_tokens,
        implementation=options.attention,
        unrotated=options.unrotated,
        embedding_similarity=options.embedding_similarity,
    )
    tokenizer = getattr(processor, "tokenizer", processor)
    model_name = options.model.resolve().name
    parts = []
    for index, prompt in enumerate(prompts):
        part = folder / f"{index:06d}.h5"
        parts.append(part)
        if part in finished and index > 0:
            continue
        inputs = prepare(model, processor, prompt)
        if part not in finished:
            info = record_sequence(
                model, tokenizer, prompt, inputs, settings, part, origin, model_name
            )
            print(f"{info.name}: {info.prompt} prompt tokens, {info.generated} generated")
        if index > 0:
            continue
        tolerance = tolerance_of(options.dtype, options.compute_dtype)
        try:
            worst = verify_sequence(model, inputs, part, tolerance)
        except VerificationError as error:
            if part in finished:
                raise RecordError(f"{part}: not of this model: {error}", ANSWER_IS_NO) from None
            part.unlink()
            raise
        print(
            f"verified: attention from the file is within {worst:.1e} of the model's eager "
            f"attention (allowed {tolerance:g})"
        )
    return parts


_EXIT_CODES: dict[type[Exception], tuple[int, str]] = {
    CaptureError: (ANSWER_IS_NO, ""),
    VerificationError: (ANSWER_IS_NO, "; nothing was kept"),
    trace.TraceError: (ANSWER_IS_NO, "; nothing of this sequence was kept"),
    UnsupportedModel: (BAD_INPUT, ", which a trace cannot express; nothing was recorded"),
    PromptError: (BAD_INPUT, ""),
    # torch: out of memory, or shapes that do not fit.
    RuntimeError: (ANSWER_IS_NO, " (the model failed while it ran)"),
}


@contextlib.contextmanager
def _as_record_errors() -> Iterator[None]:
    """Give every error that the world can cause its exit code."""
    try:
        yield
    except tuple(_EXIT_CODES) as error:
        exit_code, hint = next(
            answer for kind, answer in _EXIT_CODES.items() if isinstance(error, kind)
        )
        raise RecordError(f"{error}{hint}", exit_code) from error
