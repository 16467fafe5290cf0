"""What is taken from a model while it runs, and kept on disk until the sequence is written."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np
import torch
from transformers import PreTrainedModel

from hae import trace
from hae.capture import AttentionCall, CallCount, CaptureError
from hae.decoder import Shape, UnsupportedModel, layers_of


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


def without_padding(probabilities: torch.Tensor, padding: int) -> torch.Tensor:
    """Rows without the first `padding` keys, which the mask must have hidden.

    raises CaptureError when it has not
    """
    if bool((probabilities[..., :padding] != 0).any()):
        raise CaptureError(f"attention to the {padding} tokens of padding is not 0")
    return probabilities[..., padding:]


class SequenceCapture:
    """Takes the attention calls of one sequence, in order of steps, into a spool.

    layers   of the model, those that are kept; default all
    padding  tokens before the prompt, which are left out
    """

    def __init__(
        self,
        spool: Spool,
        shape: Shape,
        payload: str,
        unrotate: Unrotation | None,
        layers: Sequence[int] | None = None,
        padding: int = 0,
    ) -> None:
        self._spool, self._shape, self._payload, self._unrotate = spool, shape, payload, unrotate
        self._layers = range(shape.layers) if layers is None else layers
        self.padding = padding
        self._count = CallCount(shape.layers)
        self._step, self._first_row, self._tokens = -1, 0, 0
        self._finished = False
        self.scale: float | None = None
        self._windows = np.zeros(shape.layers, dtype=np.int64)

    @property
    def window(self) -> np.ndarray:
        """[layers that are kept]"""
        return self._windows[list(self._layers)]

    def finish(self) -> None:
        """The sequence has ended; others of the batch may go on."""
        self._finished = True

    def begin_step(self, rows: int) -> None:
        self._step += 1
        self._first_row, self._tokens = self._tokens, self._tokens + rows

    def end_step(self) -> None:
        """raises CaptureError when a layer did not come, or came twice"""
        self._count.check(self._step + 1)

    def observe(self, call: AttentionCall) -> None:
        if self._finished:
            return
        self._count.add(call.layer, self._step)
        rows = self._tokens - self._first_row
        padding = self.padding if self._step == 0 else 0
        if call.query.shape[1] != padding + rows:
            raise CaptureError(
                f"layer {call.layer}, step {self._step}: attention of {call.query.shape[1]} rows, "
                f"expected {padding + rows}"
            )
        self.scale = call.scale
        self._windows[call.layer] = call.window
        if call.layer in self._layers:
            self._keep(call, query=call.query[:, padding:])

    def _keep(self, call: AttentionCall, query: torch.Tensor) -> None:
        # New rows end where the tokens end; a pre-allocated cache has empty slots after them.
        end = min(call.key.shape[1], self.padding + self._tokens)
        new = slice(end - query.shape[1], end)
        if self._payload == "qkv":
            self._rows(call.layer, "q", query)
            self._rows(call.layer, "k", call.key[:, new])
            if self._unrotate is not None:
                positions = torch.arange(self._first_row, self._tokens)
                self._rows(call.layer, "q_unrotated", self._unrotate(query, positions))
        else:
            if call.probabilities is None:
                raise CaptureError("the attention implementation gives no probabilities; use eager")
            name = "prompt" if self._step == 0 else "decode"
            probabilities = call.probabilities[:, -query.shape[1] :]
            # A sliding window's cache may have lost a part of the padding, or all of it.
            padding = max(0, end - self._tokens)
            probabilities = own_keys(without_padding(probabilities, padding), self._tokens)
            self._spool.append(call.layer, name, probabilities)
        self._rows(call.layer, "v", call.value[:, new])

    def _rows(self, layer: int, name: str, values: torch.Tensor) -> None:
        # Row-major on disk, so that a later row can follow: [row, head, head_dim].
        self._spool.append(layer, name, values.transpose(0, 1))

    def write(self, group: h5py.Group, prompt: int, dtype: str) -> None:
        """Lay the spooled numbers out as the payload of a sequence."""
        shape, tokens = self._shape, self._tokens
        for number, layer in enumerate(self._layers):
            folder = group.create_group(f"layers/{number:06d}")
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
    """Takes what the first layer is given at the prefill: the prompts' input embeddings."""

    def __init__(self, decoder: PreTrainedModel) -> None:
        self._prompts: torch.Tensor | None = None
        first_layer = layers_of(decoder)[0]
        self._hook = first_layer.register_forward_pre_hook(self._take, with_kwargs=True)

    def _take(self, layer: torch.nn.Module, given: tuple, options: dict) -> None:
        if self._prompts is None:
            hidden = given[0] if given else options["hidden_states"]
            self._prompts = hidden.detach().to("cpu", torch.float32)

    def remove(self) -> None:
        self._hook.remove()

    def similarity(self, row: int, modality: np.ndarray) -> np.ndarray:
        """Inner products, [visual prompt tokens, text prompt tokens], of a row of the batch."""
        prompt = self._prompts[row, -len(modality) :]
        visual = torch.from_numpy(modality == trace.IMAGE)
        return (prompt[visual] @ prompt[~visual].T).numpy()


class PositionCapture:
    """Takes the positions that the rotary embedding is given."""

    def __init__(self, decoder: PreTrainedModel) -> None:
        self._steps: list[torch.Tensor] = []
        rotary = getattr(getattr(decoder, "model", decoder), "rotary_emb", None)
        self._hook = rotary and rotary.register_forward_pre_hook(self._take, with_kwargs=True)

    def _take(self, rotary: torch.nn.Module, given: tuple, options: dict) -> None:
        positions = given[1] if len(given) > 1 else options["position_ids"]
        positions = positions.detach().to("cpu", torch.int64)
        # Some models ask once for each kind of layer.
        if not self._steps or not torch.equal(positions, self._steps[-1]):
            self._steps.append(positions)

    def remove(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def of(self, row: int, padding: int, tokens: int) -> np.ndarray | None:
        """[T] or [T, axes] of a row of the batch; None when they are 0 .. T - 1."""
        if not self._steps:
            return None
        steps = torch.cat(
            self._steps, dim=-1
        )  # [batch or 1, tokens], or [axes, batch or 1, tokens]
        row = min(row, steps.shape[-2] - 1)
        positions = steps[..., row, padding : padding + tokens].numpy().T
        if len(positions) != tokens:
            raise CaptureError(f"positions of {len(positions)} tokens, expected {tokens}")
        counted = np.arange(tokens) if positions.ndim == 1 else np.arange(tokens)[:, None]
        return None if (positions == counted).all() else positions
