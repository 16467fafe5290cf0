"""Compare a recording with the attention of the model it was made from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import torch
from transformers import PreTrainedModel

from hae import trace
from hae.capture import AttentionCall, CallCount, intercepted
from hae.decoder import decoder_of
from hae.prompts import Inputs

# Largest difference between attention recomputed from a file and the model's eager attention.
# float16 numbers carry 11 significant bits, bfloat16 8: eight times the error.
TOLERANCE = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}


class VerificationError(Exception):
    """A recording is not what the model computed. The message says where."""


def recomputed_attention(query: np.ndarray, key: np.ndarray, scale: float, visible: np.ndarray):
    """softmax(scale * q k^T) of what is visible, of one query head, in double.

    query, key  [T, head_dim]
    visible     [T, T]
    returns     [T, T]  query, key; each row sums to 1
    """
    logits = scale * (query.astype(np.float64) @ key.astype(np.float64).T)
    logits[~visible] = -np.inf
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def _visible(group: h5py.Group, layer: int) -> np.ndarray:
    """Generated tokens are text, so all tokens of a picture are the prompt's."""
    bidirectional = "bidirectional" in group and group["bidirectional"][layer] == 1
    return trace.visible(
        int(group.attrs["tokens"]),
        int(group["window"][layer]),
        group["image"][()] if bidirectional else None,
    )


def _stored_attention(group: h5py.Group, layer: int) -> Iterator[np.ndarray]:
    """[T, T] of each query head in turn, as a reader of the file gets it."""
    folder = group[f"layers/{layer:06d}"]
    query_heads, kv_heads = int(group.attrs["query_heads"]), int(group.attrs["kv_heads"])
    if group.attrs["payload"] == "qkv":
        query, key = trace.read_numbers(folder["q"]), trace.read_numbers(folder["k"])
        scale, visible = float(group.attrs["scale"]), _visible(group, layer)
        for head in range(query_heads):
            kv_head = head // (query_heads // kv_heads)
            yield recomputed_attention(query[head], key[kv_head], scale, visible)
        return
    tokens, prompt = int(group.attrs["tokens"]), int(group.attrs["prompt"])
    square = trace.read_numbers(folder["prompt"])
    decode = trace.read_numbers(folder["decode"]) if tokens > prompt else None
    for head in range(query_heads):
        attention = np.zeros((tokens, tokens))
        attention[:prompt, :prompt] = square[head]
        start = 0
        for row in range(prompt, tokens):
            attention[row, : row + 1] = decode[head, start : start + row + 1]
            start += row + 1
        yield attention


@torch.no_grad()
def verify_sequence(model: PreTrainedModel, inputs: Inputs, part: Path, tolerance: float) -> float:
    """Compare the file with the model's own eager attention over the same tokens.

    The model reads all T tokens in one pass, so this checks the rotary positions, the cache and
    the mask rule as well as the numbers.

    returns the largest absolute difference of a probability
    raises VerificationError naming the place when a difference is not within `tolerance`
    """
    decoder = decoder_of(model)
    layers = decoder.config.num_hidden_layers
    count = CallCount(layers)
    worst = 0.0
    with trace.open_trace(part) as file:
        group = file["sequences/000000"]
        stored = trace.model_layers(group)

        def observe(call: AttentionCall) -> None:
            nonlocal worst
            count.add(call.layer, 0)
            if call.layer not in stored:
                return
            for head, found in enumerate(_stored_attention(group, stored.index(call.layer))):
                expected = call.probabilities[head].to("cpu", torch.float64).numpy()
                error = np.abs(found - expected)
                row, key = np.unravel_index(error.argmax(), error.shape)
                if not error[row, key] <= tolerance:
                    raise VerificationError(
                        f"layer {call.layer}, query head {head}, row {row}, key {key}: attention "
                        f"from the file differs from the model's by {error[row, key]:.2e}, "
                        f"expected at most {tolerance:g}"
                    )
                worst = max(worst, float(error[row, key]))

        ids = torch.tensor(group["token_id"][()][None, :], device=model.device)
        with intercepted(decoder, "eager", observe):
            model(input_ids=ids, **inputs.beside(ids.shape[1]), use_cache=False, logits_to_keep=1)
    count.check(steps=1)
    return worst


def tolerance_of(dtype: str, compute_dtype: str) -> float:
    """The coarser of the stored type and the type the model computed in decides."""
    return max(TOLERANCE[dtype], TOLERANCE[compute_dtype])
