"""Run a model greedily and write what its attention saw as a trace."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from transformers import PreTrainedModel

from hae import trace
from hae.capture import AttentionCall, CallCount, CaptureError, intercepted
from hae.cleanup import finally_do
from hae.decoder import (
    Shape,
    UnsupportedModel,
    cache_name,
    decoder_of,
    end_tokens_of,
    layers_of,
    shape_of,
)
from hae.prompts import Inputs, Prompt

# ------------------------------------------------------------------------------------ spool


def spool_of(part: Path) -> Path:
    """The folder in which a part's numbers grow."""
    return part.with_name(part.name + ".spool")


def remove_spool_of(part: Path) -> None:
    shutil.rmtree(spool_of(part), ignore_errors=True)


class Spool:
    """The numbers of one sequence on disk while it grows, one file a layer and array.

    A trace needs T before it can lay out an array; the spool does not, so memory holds one
    call of one layer at a time.
    """

    def __init__(self, folder: Path, dtype: str) -> None:
        self._folder = folder
        self._dtype = dtype
        shutil.rmtree(folder, ignore_errors=True)  # what a killed recorder left
        folder.mkdir(parents=True)

    def _path(self, layer: int, name: str) -> Path:
        return self._folder / f"{layer:06d}.{name}"

    def append(self, layer: int, name: str, values: torch.Tensor) -> None:
        """Round and append; raises TraceError when a value does not fit the type."""
        numbers = values.detach().to("cpu", torch.float32).numpy()
        try:
            codes = trace.encoded(numbers, self._dtype)
        except trace.TraceError as error:
            raise trace.TraceError(f"layer {layer}, {name}: {error}") from None
        with self._path(layer, name).open("ab") as file:
            file.write(np.ascontiguousarray(codes))

    def read(self, layer: int, name: str) -> np.ndarray:
        """All codes of one array, flat, mapped rather than loaded."""
        path = self._path(layer, name)
        dtype = trace.storage_dtype(self._dtype)
        if not path.exists():
            return np.empty(0, dtype)
        return np.memmap(path, dtype=dtype, mode="r")


def own_keys(probabilities: torch.Tensor, keys: int) -> torch.Tensor:
    """Rows over exactly `keys` keys: [query_head, row, keys].

    A pre-allocated cache has more key slots than tokens; those columns must be exactly 0. A
    sliding window's cache has fewer; the keys that left it get 0.

    raises CaptureError when a surplus column is not 0
    """
    surplus = probabilities[..., keys:]
    if surplus.numel() and bool((surplus != 0).any()):
        raise CaptureError(f"attention to cache slots beyond the {keys} tokens seen is not 0")
    missing = keys - probabilities.shape[-1]
    if missing > 0:
        return torch.nn.functional.pad(probabilities, (missing, 0))
    return probabilities[..., :keys]


class SequenceCapture:
    """Takes the attention calls of one sequence, in order of steps, into a spool."""

    def __init__(self, spool: Spool, shape: Shape, payload: str, unrotate: Unrotation | None):
        self._spool, self._shape, self._payload, self._unrotate = spool, shape, payload, unrotate
        self._count = CallCount(shape.layers)
        self._step, self._first_row, self._tokens = -1, 0, 0
        self.scale: float | None = None
        self.window = np.zeros(shape.layers, dtype=np.int64)

    def begin_step(self, rows: int) -> None:
        self._step += 1
        self._first_row, self._tokens = self._tokens, self._tokens + rows

    def end_step(self) -> None:
        """raises CaptureError when a layer did not come, or came twice"""
        self._count.check(self._step + 1)

    def observe(self, call: AttentionCall) -> None:
        self._count.add(call.layer, self._step)
        rows = self._tokens - self._first_row
        if call.query.shape[1] != rows:
            raise CaptureError(
                f"layer {call.layer}, step {self._step}: attention of {call.query.shape[1]} rows, "
                f"expected {rows}"
            )
        self.scale = call.scale
        self.window[call.layer] = call.window
        # New rows end where the tokens end; a pre-allocated cache has empty slots after them.
        end = min(call.key.shape[1], self._tokens)
        new = slice(end - rows, end)
        if self._payload == "qkv":
            self._rows(call.layer, "q", call.query)
            self._rows(call.layer, "k", call.key[:, new])
            if self._unrotate is not None:
                positions = torch.arange(self._first_row, self._tokens)
                self._rows(call.layer, "q_unrotated", self._unrotate(call.query, positions))
        else:
            if call.probabilities is None:
                raise CaptureError("the attention implementation gives no probabilities; use eager")
            name = "prompt" if self._step == 0 else "decode"
            probabilities = own_keys(call.probabilities, self._tokens)
            self._spool.append(call.layer, name, probabilities)
        self._rows(call.layer, "v", call.value[:, new])

    def _rows(self, layer: int, name: str, values: torch.Tensor) -> None:
        # Row-major on disk, so that a later row can follow: [row, head, head_dim].
        self._spool.append(layer, name, values.transpose(0, 1))

    def write(self, group: h5py.Group, prompt: int, dtype: str) -> None:
        """Lay the spooled numbers out as the payload of a sequence."""
        shape, tokens = self._shape, self._tokens
        for layer in range(shape.layers):
            folder = group.create_group(f"layers/{layer:06d}")
            names = {"v": shape.kv_heads}
            if self._payload == "qkv":
                names |= {"q": shape.query_heads, "k": shape.kv_heads}
                if self._unrotate is not None:
                    names["q_unrotated"] = shape.query_heads
            else:
                self._write_attention(folder, layer, prompt, dtype)
            for name, heads in names.items():
                rows = self._spool.read(layer, name).reshape(tokens, heads, shape.head_dim)
                dataset = trace.create_numbers(folder, name, (heads, tokens, shape.head_dim), dtype)
                for head in range(heads):
                    trace.write_numbers(dataset, head, rows[:, head])
        if self._unrotate is not None:
            self._unrotate.write(group)

    def _write_attention(self, folder: h5py.Group, layer: int, prompt: int, dtype: str) -> None:
        heads, tokens = self._shape.query_heads, self._tokens
        square = self._spool.read(layer, "prompt").reshape(heads, prompt, prompt)
        dataset = trace.create_numbers(folder, "prompt", square.shape, dtype)
        for head in range(heads):
            trace.write_numbers(dataset, head, square[head])
        if tokens == prompt:
            return
        flat = self._spool.read(layer, "decode")
        widths = range(prompt + 1, tokens + 1)
        dataset = trace.create_numbers(folder, "decode", (heads, sum(widths)), dtype)
        starts = np.cumsum([0, *(heads * width for width in widths)])
        for head in range(heads):
            rows = [
                flat[start + head * width : start + (head + 1) * width]
                for start, width in zip(starts, widths, strict=False)
            ]
            trace.write_numbers(dataset, head, np.concatenate(rows))


# Model types that rotate halves of the whole head against each other, in every layer.
ROTATING_HALVES = ("llama", "mistral", "qwen2", "qwen3")


class Unrotation:
    """Turns queries back to what they were before rotary embedding, in double precision."""

    def __init__(self, decoder: PreTrainedModel, head_dim: int) -> None:
        if decoder.config.model_type not in ROTATING_HALVES:
            raise UnsupportedModel(
                f"--unrotated: model type {decoder.config.model_type}, not one of "
                f"{', '.join(ROTATING_HALVES)}"
            )
        base = getattr(decoder, "model", decoder)
        rotary = getattr(base, "rotary_emb", None)
        frequency = getattr(rotary, "inv_freq", None)
        kind = getattr(rotary, "rope_type", None)
        if frequency is None or kind not in ("default", "linear", "llama3"):
            raise UnsupportedModel(f"--unrotated: rotary embedding of type {kind} is not constant")
        if len(frequency) != head_dim // 2 or getattr(rotary, "attention_scaling", 1.0) != 1.0:
            raise UnsupportedModel("--unrotated: rotary embedding of a part of the head, or scaled")
        self.inverse_frequency = frequency.detach().to("cpu", torch.float64)

    def __call__(self, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """query [query_heads, rows, head_dim] at positions [rows], halves rotating as in Llama."""
        angle = positions.to(torch.float64)[:, None] * self.inverse_frequency
        cos, sin = angle.cos(), angle.sin()
        low, high = query.to("cpu", torch.float64).chunk(2, dim=-1)
        return torch.cat([low * cos + high * sin, high * cos - low * sin], dim=-1)

    def write(self, group: h5py.Group) -> None:
        rotary = group.create_group("rotary")
        rotary.create_dataset("inverse_frequency", data=self.inverse_frequency.numpy())
        rotary.attrs["interleaved"] = np.int64(0)


class EmbeddingCapture:
    """Takes what the first layer is given at the prefill: the prompt's input embeddings."""

    def __init__(self, decoder: PreTrainedModel) -> None:
        self.prompt: torch.Tensor | None = None
        first_layer = layers_of(decoder)[0]
        self._hook = first_layer.register_forward_pre_hook(self._take, with_kwargs=True)

    def _take(self, layer: torch.nn.Module, given: tuple, options: dict) -> None:
        if self.prompt is None:
            hidden = given[0] if given else options["hidden_states"]
            self.prompt = hidden[0].detach().to("cpu", torch.float32)

    def remove(self) -> None:
        self._hook.remove()

    def similarity(self, modality: np.ndarray) -> np.ndarray:
        """Inner products, [visual prompt tokens, text prompt tokens]."""
        visual = torch.from_numpy(modality == trace.IMAGE)
        return (self.prompt[visual] @ self.prompt[~visual].T).numpy()


# ---------------------------------------------------------------------------------- running


@dataclass(frozen=True)
class Settings:
    """How to record.

    implementation  eager or sdpa: how attention is computed while recording
    unrotated       also store queries before rotary embedding
    embedding_similarity  also store inner products of the prompt's input embeddings
    """

    payload: str = "qkv"
    dtype: str = "float16"
    max_new_tokens: int = 64
    implementation: str = "eager"
    unrotated: bool = False
    embedding_similarity: bool = False


@torch.no_grad()
def _generate(
    model: PreTrainedModel, inputs: Inputs, max_new_tokens: int, capture: SequenceCapture
) -> list[int]:
    """Greedy decoding. Returns the prompt and the generated tokens, the last of which was not
    fed back.

    raises CaptureError when the model generates an image token and would be fed it
    """
    image_token = getattr(model.config, "image_token_id", None)
    ids = inputs.input_ids[0].tolist()
    end_tokens = end_tokens_of(model)
    name = cache_name(model)
    fed: dict[str, Any] = {"input_ids": inputs.input_ids}
    if inputs.pixel_values is not None:
        fed["pixel_values"] = inputs.pixel_values
    for step in range(max_new_tokens):
        capture.begin_step(rows=fed["input_ids"].shape[1])
        output = model(**fed, use_cache=True, logits_to_keep=1)
        capture.end_step()
        token = int(output.logits[0, -1].argmax())
        ids.append(token)
        if token in end_tokens or step + 1 == max_new_tokens:
            break
        if token == image_token:
            raise CaptureError(
                f"the model generated an image token (id {token}) as new token {step + 1}, for "
                f"which there is no picture; record with --max-new-tokens {step + 1}, or without "
                "this prompt"
            )
        fed = {
            "input_ids": torch.tensor([[token]], device=model.device),
            name: getattr(output, name),
        }
    return ids


def _texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """The tokens as text; a row of a padded vocabulary has none, so its number stands for it."""
    texts = tokenizer.convert_ids_to_tokens(ids)
    return [f"<{id}>" if text is None else text for id, text in zip(ids, texts, strict=True)]


def record_sequence(
    model: PreTrainedModel,
    tokenizer: Any,
    prompt: Prompt,
    inputs: Inputs,
    settings: Settings,
    part: Path,
    origin: trace.Origin,
    model_name: str,
) -> trace.SequenceInfo:
    """Generate from one prompt and write it as a trace of its own.

    The trace holds T = P + generated - 1 tokens: the last generated one was never fed back.

    raises CaptureError when a (layer, step) is missing or came twice, TraceError when a number
    does not fit `settings.dtype`; no file is left then
    """
    decoder = decoder_of(model)
    shape = shape_of(decoder)
    unrotate = Unrotation(decoder, shape.head_dim) if settings.unrotated else None
    embeddings = EmbeddingCapture(decoder) if settings.embedding_similarity else None
    with ExitStack() as removals:
        removals.enter_context(finally_do(lambda: remove_spool_of(part)))
        if embeddings is not None:
            removals.callback(embeddings.remove)
        spool = Spool(spool_of(part), settings.dtype)
        capture = SequenceCapture(spool, shape, settings.payload, unrotate)
        with intercepted(decoder, settings.implementation, capture.observe):
            ids = _generate(model, inputs, settings.max_new_tokens, capture)
        prompt_tokens = inputs.input_ids.shape[1]
        generated = len(ids) - prompt_tokens
        fed_back = generated - 1
        info = trace.SequenceInfo(
            name=prompt.name,
            group=prompt.group or prompt.name,
            payload=settings.payload,
            layers=shape.layers,
            query_heads=shape.query_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            prompt=prompt_tokens,
            generated=generated,
            scale=capture.scale,
            model=model_name,
            attention_implementation=settings.implementation,
            modality=np.pad(inputs.modality, (0, fed_back), constant_values=trace.TEXT),
            image=np.pad(inputs.image, (0, fed_back), constant_values=trace.NO_IMAGE),
            patch=np.pad(inputs.patch, ((0, fed_back), (0, 0)), constant_values=-1),
            token_id=np.array(ids[:-1]),
            token=_texts(tokenizer, ids[:-1]),
            window=capture.window,
            pictures={i: np.asarray(image) for i, image in enumerate(prompt.images)},
            embedding_similarity=embeddings and embeddings.similarity(inputs.modality),
        )
        with trace.new_trace(part, origin) as file:
            group = trace.create_sequence(file, 0, info)
            capture.write(group, prompt_tokens, settings.dtype)
    return info
