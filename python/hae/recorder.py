"""Run a model and write what its attention saw as a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from hae import trace
from hae.capture import intercepted
from hae.cleanup import finally_do
from hae.decoder import decoder_of, shape_of
from hae.generation import best_of_beams, generate, paddings
from hae.observers import (
    EmbeddingCapture,
    PositionCapture,
    SequenceCapture,
    Spool,
    Unrotation,
    remove_spool_of,
    spool_of,
)
from hae.pictures import PICTURE_FAMILIES
from hae.prompts import Inputs, Prompt


@dataclass(frozen=True)
class Settings:
    """How to record.

    implementation  eager or sdpa: how attention is computed while recording
    unrotated       also store queries before rotary embedding
    embedding_similarity  also store inner products of the prompt's input embeddings
    layers          of the model, ascending, that are stored; None: all
    beams           1: greedy; more: the best path of a beam search
    """

    payload: str = "qkv"
    dtype: str = "float16"
    max_new_tokens: int = 64
    implementation: str = "eager"
    unrotated: bool = False
    embedding_similarity: bool = False
    layers: Sequence[int] | None = None
    beams: int = 1


@dataclass(frozen=True)
class Job:
    """One sequence to record. kept: its part is there already, from an earlier run."""

    prompt: Prompt
    inputs: Inputs
    part: Path
    kept: bool = False


def _texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """The tokens as text; a row of a padded vocabulary has none, so its number stands for it."""
    texts = tokenizer.convert_ids_to_tokens(ids)
    return [f"<{id}>" if text is None else text for id, text in zip(ids, texts, strict=True)]


class Recorder:
    """Generates from prompts and writes each as a trace of its own."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        settings: Settings,
        origin: trace.Origin,
        model_name: str,
    ) -> None:
        self._model, self._tokenizer, self._settings = model, tokenizer, settings
        self._origin, self._model_name = origin, model_name
        self._decoder = decoder_of(model)
        self._shape = shape_of(self._decoder)
        family = PICTURE_FAMILIES.get(model.config.model_type)
        self._bidirectional = family is not None and family.bidirectional
        head_dim = self._shape.head_dim
        self._unrotate = Unrotation(self._decoder, head_dim) if settings.unrotated else None

    def record(
        self, jobs: Sequence[Job], on_step: Callable[[int], None] = lambda generating: None
    ) -> list[trace.SequenceInfo]:
        """Runs the jobs as one batch. Returns what was written: all but those that are kept.

        A trace holds T = P + generated - 1 tokens: the last generated one was never fed back.

        on_step  gets the number of prompts that got a token
        raises   CaptureError when a (layer, step) is missing or came twice, TraceError when a
                 number does not fit the type; no file is left then that was not there
        """
        settings = self._settings
        given = None
        if settings.beams > 1:
            given = [
                best_of_beams(self._model, job.inputs, settings.max_new_tokens, settings.beams)
                for job in jobs
            ]
        with ExitStack() as undo:
            captures = [
                undo.enter_context(self._capture(job, padding))
                for job, padding in zip(jobs, paddings([job.inputs for job in jobs]), strict=True)
            ]
            positions = PositionCapture(self._decoder)
            undo.callback(positions.remove)
            embeddings = EmbeddingCapture(self._decoder) if settings.embedding_similarity else None
            if embeddings is not None:
                undo.callback(embeddings.remove)
            with intercepted(
                self._decoder,
                settings.implementation,
                lambda call: captures[call.row].observe(call),
                batch=len(jobs),
            ):
                ids = generate(
                    self._model,
                    [job.prompt.name for job in jobs],
                    [job.inputs for job in jobs],
                    captures,
                    settings.max_new_tokens,
                    given,
                    on_step,
                )
            return [
                self._write(job, row, captures[row], ids[row], positions, embeddings)
                for row, job in enumerate(jobs)
                if not job.kept
            ]

    @contextmanager
    def _capture(self, job: Job, padding: int) -> Iterator[SequenceCapture]:
        settings = self._settings
        with finally_do(lambda: remove_spool_of(job.part)):
            capture = SequenceCapture(
                Spool(spool_of(job.part), settings.dtype),
                self._shape,
                settings.payload,
                self._unrotate,
                () if job.kept else settings.layers,
                padding,
            )
            yield capture

    def _write(
        self,
        job: Job,
        row: int,
        capture: SequenceCapture,
        ids: list[int],
        positions: PositionCapture,
        embeddings: EmbeddingCapture | None,
    ) -> trace.SequenceInfo:
        prompt, inputs, settings, shape = job.prompt, job.inputs, self._settings, self._shape
        prompt_tokens = inputs.input_ids.shape[1]
        generated = len(ids) - prompt_tokens
        fed_back = generated - 1
        info = trace.SequenceInfo(
            name=prompt.name,
            group=prompt.group or prompt.name,
            payload=settings.payload,
            layers=len(capture.window),
            query_heads=shape.query_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            prompt=prompt_tokens,
            generated=generated,
            scale=capture.scale,
            model=self._model_name,
            attention_implementation=settings.implementation,
            modality=np.pad(inputs.modality, (0, fed_back), constant_values=trace.TEXT),
            image=np.pad(inputs.image, (0, fed_back), constant_values=trace.NO_IMAGE),
            patch=np.pad(inputs.patch, ((0, fed_back), (0, 0)), constant_values=-1),
            token_id=np.array(ids[:-1]),
            token=_texts(self._tokenizer, ids[:-1]),
            window=capture.window,
            pictures={i: np.asarray(image) for i, image in enumerate(prompt.images)},
            embedding_similarity=embeddings and embeddings.similarity(row, inputs.modality),
            position=positions.of(row, capture.padding, len(ids) - 1),
            bidirectional=bool(prompt.images) and self._bidirectional,
            model_layer=settings.layers,
            beams=settings.beams if settings.beams > 1 else None,
        )
        with trace.new_trace(job.part, self._origin) as file:
            group = trace.create_sequence(file, 0, info)
            capture.write(group, prompt_tokens, settings.dtype)
        return info
