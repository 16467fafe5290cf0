"""A whole recording: from a model folder and prompts to one trace file."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
import transformers
from transformers.utils import logging

from hae import __version__, chat, trace
from hae.capture import AttentionRule, CaptureError, probe, refuse_compiled
from hae.cleanup import finally_do
from hae.decoder import Shape, UnsupportedModel, decoder_of, shape_of
from hae.errors import ANSWER_IS_NO, BAD_INPUT, USAGE, RecordError, reason
from hae.observers import remove_spool_of
from hae.parts import finished_parts, is_joined, refuse_other_recording
from hae.pictures import PICTURE_FAMILIES
from hae.progress import progress, say
from hae.prompts import Inputs, Prompt, PromptError, load_prompts, prepare
from hae.recorder import Job, Recorder, Settings
from hae.verify import VerificationError, tolerance_of, verify_sequence

# ----------------------------------------------------------------------------------- loading


def load_model(
    folder: Path, compute_dtype: str, device: str, implementation: str
) -> tuple[Any, Any]:
    """A model and its processor (or tokenizer) from a local folder.

    implementation  of attention, eager or sdpa, whatever the model's config.json asks for
    raises RecordError when the folder holds none that can be recorded, or not all of its weights
    """
    try:
        if not (folder / "config.json").is_file():
            raise RecordError(
                f"{folder}: no config.json; give the folder of a saved model", BAD_INPUT
            )
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        pictures = hasattr(config, "vision_config")
        loader = (
            transformers.AutoModelForImageTextToText
            if pictures
            else transformers.AutoModelForCausalLM
        )
        model, loaded = loader.from_pretrained(
            folder,
            config=config,
            dtype=getattr(torch, compute_dtype),
            attn_implementation=implementation,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            output_loading_info=True,
        )
        _refuse_random_weights(folder, loaded)
        reader = transformers.AutoProcessor if pictures else transformers.AutoTokenizer
        processor = reader.from_pretrained(folder, local_files_only=True)
    except RecordError:
        raise
    except Exception as error:  # the libraries that read a model have many kinds of their own
        raise RecordError(
            f"{folder}: the model does not load: {reason(error)}", BAD_INPUT
        ) from None
    try:
        return model.eval().to(device), processor
    except (RuntimeError, AssertionError, ImportError) as error:
        raise RecordError(f"--device {device}: {reason(error)}", USAGE) from None


def _refuse_random_weights(folder: Path, loaded: Mapping[str, Any]) -> None:
    """What the files lack, transformers fills with random numbers."""
    missing = sorted(loaded["missing_keys"])
    mismatched = sorted(key for key, *_ in loaded["mismatched_keys"])
    for names, what in ((missing, "missing"), (mismatched, "of another shape")):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise RecordError(
                f"{folder}: {len(names)} weights are {what}: {', '.join(names[:3])}{more}; "
                "give the folder of a whole model",
                BAD_INPUT,
            )


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


# More than what an HDF5 group or dataset takes beside its numbers, with its alignment; and more
# than modality, image, patch, number and text of a token.
OBJECT_BYTES, TOKEN_BYTES = 2048, 128


@dataclass(frozen=True)
class Extent:
    """What of a prompt decides how large its sequence can be."""

    tokens: int
    visual: int
    picture_bytes: int
    pictures: int

    @classmethod
    def of(cls, prompt: Prompt, inputs: Inputs) -> Extent:
        return cls(
            tokens=inputs.input_ids.shape[1],
            visual=int((inputs.image != trace.NO_IMAGE).sum()),
            picture_bytes=sum(np.asarray(image).nbytes for image in prompt.images),
            pictures=len(prompt.images),
        )

    def metadata_bytes(self, layers: int, options: argparse.Namespace) -> int:
        """Everything of the sequence but its payload."""
        similarity = self.visual * (self.tokens - self.visual) * 4
        tokens = self.tokens + options.max_new_tokens - 1
        objects = 5 * layers + self.pictures + 12  # a layer is a group of up to four datasets
        return (
            self.picture_bytes
            + (similarity if options.embedding_similarity else 0)
            + tokens * TOKEN_BYTES
            + objects * OBJECT_BYTES
        )


def plan(shape: Shape, extents: Sequence[Extent], options: argparse.Namespace) -> int:
    """Print what the recording may grow to, and what all of attention would take.

    returns the largest possible size in bytes
    """
    prompt_tokens = [extent.tokens for extent in extents]
    width = trace.element_bytes(options.dtype)
    extra = options.max_new_tokens - 1
    total = sum(
        shape.payload_bytes(options.payload, prompt, prompt + extra, width)
        for prompt in prompt_tokens
    )
    if options.unrotated and options.payload == "qkv":
        queries = shape.layers * shape.query_heads * shape.head_dim * width
        total += sum(queries * (prompt + extra) for prompt in prompt_tokens)
    total += sum(extent.metadata_bytes(shape.layers, options) for extent in extents)
    longest = max(prompt_tokens)
    square = shape.prefill_attention_bytes(longest, width)
    say(
        f"{len(prompt_tokens)} sequences, prompts of {min(prompt_tokens)} to {longest} tokens, up "
        f"to {options.max_new_tokens} new ones: at most {size_text(total)} as "
        f"{options.payload} in {options.dtype}"
    )
    say(
        f"full attention of the longest prompt would take {size_text(square)}, "
        f"{size_text(square // shape.layers)} a layer"
    )
    return total


def stored_layers(chosen: Sequence[int] | None, layers: int) -> Sequence[int] | None:
    """What is stored of a model with so many layers; None: all.

    raises RecordError when the model has no such layer
    """
    if chosen is None or len(chosen) == layers == chosen[-1] + 1:
        return None
    if chosen[-1] >= layers:
        raise RecordError(
            f"--layers: no layer {chosen[-1]}; the model has 0 to {layers - 1}", USAGE
        )
    numbers = ", ".join(str(layer) for layer in chosen)
    say(f"layers {numbers} of the model are layers 0 to {len(chosen) - 1} of the file")
    return chosen


def refuse_batch(model: Any) -> None:
    """raises RecordError for a model whose prompts can only run alone"""
    family = PICTURE_FAMILIES.get(model.config.model_type)
    if family is not None and family.axes > 1:
        raise RecordError(
            f"--batch: {model.config.model_type} numbers the tokens of pictures in three "
            "dimensions, which are not padded here; leave --batch out",
            USAGE,
        )


def refuse_wide_pictures(
    model: Any, windows: Sequence[int], prompt: Prompt, inputs: Inputs
) -> None:
    """raises PromptError when tokens of a picture see each other, but a sliding window is narrower
    than the picture: models differ in what they see then
    """
    family = PICTURE_FAMILIES.get(model.config.model_type)
    narrowest = min((window for window in windows if window > 0), default=None)
    if family is None or not family.bidirectional or narrowest is None:
        return
    widest = max(np.bincount(inputs.image[inputs.image != trace.NO_IMAGE]), default=0)
    if widest > narrowest:
        raise PromptError(
            f"prompt {prompt.name}: a picture of {widest} tokens in a sliding window of "
            f"{narrowest}: a trace cannot say what its tokens see"
        )


def refuse_above_limit(total: int, finished: int, options: argparse.Namespace) -> None:
    """raises RecordError when `total` bytes are above the limit, or do not fit on the disk

    finished  bytes of the parts that are there already
    """
    if options.limit_bytes is not None and total > options.limit_bytes:
        above = f"above the --limit-bytes of {size_text(options.limit_bytes)}"
    else:
        free = shutil.disk_usage(options.out.parent).free
        # The parts lie beside the joined file until that is complete.
        if 2 * total - finished <= free:
            return
        above = f"and as much again while it is made, above the free space of {size_text(free)}"
    if options.payload == "attention":
        instead = "--payload qkv, which grows with the tokens and not with their square"
    elif options.dtype == "float32":
        instead = "--dtype float16, which takes half"
    else:
        instead = "fewer prompts, fewer --layers or a smaller --max-new-tokens"
    raise RecordError(
        f"{options.out}: may take {size_text(total)}, {above}; try {instead}",
        USAGE,
    )


# -------------------------------------------------------------------------------- the output


def parts_folder(out: Path) -> Path:
    return out.with_name(out.name + ".parts")


def _parts(folder: Path, count: int) -> list[Path]:
    return [folder / f"{index:06d}.h5" for index in range(count)]


def refuse_unfit_output(options: argparse.Namespace, prompts: Sequence[Prompt]) -> None:
    """Writing must neither fail later nor destroy anything but an earlier trace.

    raises RecordError
    """

    def refuse(what: str) -> None:
        raise RecordError(f"--out {options.out}: {what}", USAGE)

    out = options.out
    if out.is_dir():
        refuse("is a folder; give the path of a file")
    if not out.parent.is_dir():
        refuse(f"no such folder as {out.parent}; make it first")
    if not os.access(out.parent, os.W_OK | os.X_OK):
        refuse(f"nothing can be written in {out.parent}; choose another folder")
    partial, folder = trace.partial_of(out), parts_folder(out)
    with contextlib.suppress(FileNotFoundError):
        partial.lstat()  # the longest name that is to be made
    if folder.exists() and not folder.is_dir():
        refuse(f"{folder} is not a folder; remove it or choose another path")
    inputs = [options.prompts, *(path for prompt in prompts for path in prompt.paths)]
    for path in (path.resolve() for path in inputs):
        if path in (out.resolve(), partial.resolve()) or folder.resolve() in path.parents:
            refuse(f"would overwrite the input {path}; choose another path")
    if not out.exists():
        return
    if options.model.resolve() in out.resolve().parents:
        refuse("is a file of the model; choose another path")
    if not out.is_file() or not trace.is_trace(out):
        refuse("exists and is not a trace; remove it or choose another path")


# ----------------------------------------------------------------------------------- the run


def record(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Everything hae-record does after its options are read.

    arguments  as typed, for the file's `command`
    raises     RecordError
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with _as_record_errors(options.out):
        prompts = load_prompts(options.prompts, chat=options.chat)
        refuse_unfit_output(options, prompts)
        folder = parts_folder(options.out)
        finished = finished_parts(folder, [prompt.name for prompt in prompts], options.resume)

        model, processor, shape, rule = _loaded(options)
        if options.chat:
            prompts = chat.rendered(processor, prompts)
        extents = []
        for index, prompt in enumerate(prompts):
            inputs = prepare(model, processor, prompt)
            refuse_wide_pictures(model, rule.window, prompt, inputs)
            extents.append(Extent.of(prompt, inputs))
            if index in finished:
                refuse_other_recording(
                    finished[index], prompt, inputs, _name_of(options.model), options
                )
        complete = options.resume and _is_complete(model, processor, prompts, options)
        if complete:
            say(f"{options.out}: holds all sequences already")
        else:
            there = sum(part.stat().st_size for part in finished.values())
            refuse_above_limit(plan(shape, extents, options), there, options)

        origin = origin_of(arguments)
        with finally_do(lambda: _remove_if_empty(folder)):
            folder.mkdir(exist_ok=True)
            parts = _parts(folder, len(prompts))
            if not complete:
                _record_parts(model, processor, prompts, parts, finished, options, origin)
                trace.join_traces(parts, options.out, origin)
            _remove_parts(parts, options.out)
        say(f"{options.out}: {len(prompts)} sequences, {size_text(options.out.stat().st_size)}")


def _loaded(options: argparse.Namespace) -> tuple[Any, Any, Shape, AttentionRule]:
    """A model that can be recorded as the options ask, its processor, the sizes of what is stored
    of it, and how it attends. `options.layers` become those of the model, None for all.
    """
    model, processor = load_model(
        options.model, options.compute_dtype, options.device, options.attention
    )
    decoder = decoder_of(model)
    refuse_compiled(model)
    rule = probe(decoder, options.attention)
    if options.batch > 1:
        refuse_batch(model)
    shape = shape_of(decoder)
    options.layers = stored_layers(options.layers, shape.layers)
    if options.layers is not None:
        shape = replace(shape, layers=len(options.layers))
    return model, processor, shape, rule


def _remove_parts(parts: Sequence[Path], out: Path) -> None:
    """With what recorders left beside them that were killed: one just after it finished a part, or
    one that wrote the joined file again.
    """
    for part in parts:
        part.unlink(missing_ok=True)
        remove_spool_of(part)
    trace.partial_of(out).unlink(missing_ok=True)


def _remove_if_empty(folder: Path) -> None:
    """Unless finished sequences, or files of others, lie in it."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def _is_complete(
    model: Any, processor: Any, prompts: Sequence[Prompt], options: argparse.Namespace
) -> bool:
    """Whether the run was killed after its parts were joined: only they are to be removed."""
    if not options.out.exists():
        return False
    prepared = (prepare(model, processor, prompt) for prompt in prompts)
    if not is_joined(options.out, prompts, prepared, _name_of(options.model), options):
        return False
    inputs = prepare(model, processor, prompts[0])
    tolerance = tolerance_of(options.dtype, options.compute_dtype)
    try:
        verify_sequence(model, inputs, options.out, tolerance)
    except VerificationError:
        return False
    return True


def _name_of(model: Path) -> str:
    return model.resolve().name


def _record_parts(
    model: Any,
    processor: Any,
    prompts: Sequence[Prompt],
    parts: Sequence[Path],
    finished: Mapping[int, Path],
    options: argparse.Namespace,
    origin: trace.Origin,
) -> None:
    """Record every prompt that has no finished part.

    Batches are the same whatever is finished, so that all numbers are those of an uninterrupted
    run. Verified against the model are the first part, of the first batch also that with the most
    padding, and the first one that was kept.
    """
    settings = Settings(
        payload=options.payload,
        dtype=options.dtype,
        max_new_tokens=options.max_new_tokens,
        implementation=options.attention,
        unrotated=options.unrotated,
        embedding_similarity=options.embedding_similarity,
        layers=options.layers,
        beams=options.beams,
    )
    tokenizer = getattr(processor, "tokenizer", processor)
    recorder = Recorder(model, tokenizer, settings, origin, _name_of(options.model))
    with progress(len(prompts) - len(finished), options.max_new_tokens) as bar:
        for first in range(0, len(prompts), options.batch):
            batch = range(first, min(first + options.batch, len(prompts)))
            to_verify = {0, min(finished, default=0)} & set(batch)
            if not to_verify and finished.keys() >= set(batch):
                continue
            jobs = {
                index: Job(
                    prompts[index],
                    prepare(model, processor, prompts[index]),
                    parts[index],
                    kept=index in finished,
                )
                for index in batch
            }
            if first == 0:
                to_verify.add(min(jobs, key=lambda index: jobs[index].inputs.input_ids.shape[1]))
            if not all(job.kept for job in jobs.values()):
                written = recorder.record(list(jobs.values()), bar.step)
                bar.finish(len(written))
                for info in written:
                    say(f"{info.name}: {info.prompt} prompt tokens, {info.generated} generated")
            for index in sorted(to_verify):
                _verify(model, jobs[index], list(jobs.values()), options)


def _verify(model: Any, job: Job, batch: Sequence[Job], options: argparse.Namespace) -> None:
    """raises RecordError for a kept part, VerificationError after the batch's parts are removed"""
    tolerance = tolerance_of(options.dtype, options.compute_dtype)
    try:
        worst = verify_sequence(model, job.inputs, job.part, tolerance)
    except VerificationError as error:
        if job.kept:
            raise RecordError(f"{job.part}: not of this model: {error}", ANSWER_IS_NO) from None
        for written in batch:
            if not written.kept:
                written.part.unlink()
        finer = "" if options.dtype == "float32" else "; try --dtype float32"
        raise VerificationError(f"{error}{finer}") from None
    say(
        f"verified: attention from the file is within {worst:.1e} of the model's eager "
        f"attention (allowed {tolerance:g})"
    )


_EXIT_CODES: dict[type[Exception], tuple[int, str]] = {
    CaptureError: (ANSWER_IS_NO, ""),
    VerificationError: (ANSWER_IS_NO, "; nothing was kept"),
    trace.TraceError: (ANSWER_IS_NO, "; nothing of this sequence was kept"),
    UnsupportedModel: (
        BAD_INPUT,
        ", which cannot be recorded; nothing was written; python/README.md lists what can",
    ),
    PromptError: (BAD_INPUT, ""),
    # The model's files or a prompt ask for something that the model's code does not have.
    LookupError: (BAD_INPUT, " (the model or a prompt does not fit)"),
    ValueError: (BAD_INPUT, " (the model or a prompt does not fit)"),
    AttributeError: (BAD_INPUT, " (the model or a prompt does not fit)"),
    AssertionError: (BAD_INPUT, " (the model or a prompt does not fit)"),
    # torch: out of memory, or shapes that do not fit.
    RuntimeError: (ANSWER_IS_NO, " (the model failed while it ran)"),
}


@contextlib.contextmanager
def _as_record_errors(out: Path) -> Iterator[None]:
    """Give every error that the world can cause its exit code."""
    try:
        yield
    except OSError as error:  # inputs have their own errors; this is the file and its parts
        raise RecordError(f"--out {out}: {reason(error)}", USAGE) from error
    except tuple(_EXIT_CODES) as error:
        exit_code, hint = next(
            answer for kind, answer in _EXIT_CODES.items() if isinstance(error, kind)
        )
        raise RecordError(f"{reason(error)}{hint}", exit_code) from error
