"""One recorded sequence, read from the `.npz` schema of `traces/FORMAT.md`, and its full-cache
attention.
"""

from dataclasses import dataclass

import numpy as np

from .arithmetic import exp32, fma32, row_sum


@dataclass(frozen=True)
class Trace:
    """A sequence with the attention weights of the full cache.

    weights  per layer [query_head, query, key]  float32; exp(logit - maximum), or as recorded
    totals   per layer [query_head, query]       float32; sum over all keys
    allowed  per layer [query, key]              what the mask allows
    values   [layer, kv_head, token, dimension]  float32, or None
    lowered  how many weights were NaN or infinite, and counted as +0
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int | None
    element_bytes: int
    tokens: int
    prompt: int
    visual: np.ndarray
    image: np.ndarray
    windows: tuple  # per layer, 0 for none
    allowed: list
    weights: list
    totals: list
    values: np.ndarray | None
    lowered: int

    @property
    def steps(self):
        return self.tokens - self.prompt

    @staticmethod
    def from_npz(path):
        with np.load(path) as file:
            return Trace.from_arrays({name: file[name] for name in file.files})

    @staticmethod
    def from_arrays(arrays, nan_is_lowest=False):
        """What `--nan=lowest` makes of the arrays, or else ValueError for a NaN or an infinity."""
        if "attention" in arrays:
            payload = np.asarray(arrays["attention"])
            layers, query_heads, tokens = payload.shape[:3]
        else:
            payload = np.asarray(arrays["q"])
            layers, query_heads, tokens, _ = payload.shape
        windows = tuple(int(window) for window in arrays.get("window", [0] * layers))
        allowed = [_mask(tokens, window) for window in windows]
        values = np.asarray(arrays["v"], np.float32) if "v" in arrays else None
        kv_heads, head_dim = _cache_shape(arrays, query_heads, values)
        if query_heads % kv_heads:
            raise ValueError(f"{query_heads} query heads do not divide by {kv_heads} KV heads")
        weights, lowered = _weights(arrays, payload, allowed)
        if lowered and not nan_is_lowest:
            raise ValueError("a weight or a logit is not finite")
        visual, image = _modality(arrays, tokens)
        return Trace(
            layers=layers,
            query_heads=query_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            element_bytes=payload.dtype.itemsize,
            tokens=tokens,
            prompt=int(arrays["prompt"]),
            visual=visual,
            image=image,
            windows=windows,
            allowed=allowed,
            weights=weights,
            totals=[row_sum(layer_weights) for layer_weights in weights],
            values=values,
            lowered=lowered,
        )


def _cache_shape(arrays, query_heads, values):
    if values is not None:
        return values.shape[1], values.shape[3]
    head_dim = arrays.get("head_dim")
    return int(arrays.get("kv_heads", query_heads)), None if head_dim is None else int(head_dim)


def _mask(tokens, window):
    """Causal; with a window W the keys j with query - j < W, the query's own included."""
    distance = np.arange(tokens)[:, None] - np.arange(tokens)[None, :]
    allowed = distance >= 0
    return allowed & (distance < window) if window else allowed


def _modality(arrays, tokens):
    """Which tokens are visual, and of which image; by default a contiguous span is one image."""
    visual = np.asarray(arrays.get("modality", np.zeros(tokens))).astype(np.int64) == 1
    if "image" in arrays:
        return visual, np.asarray(arrays["image"]).astype(np.int64)
    begins = visual & ~np.concatenate([[False], visual[:-1]])
    return visual, np.where(visual, np.cumsum(begins) - 1, -1)


def _weights(arrays, payload, allowed):
    """The weights of each layer, and how many of them or of their logits were not finite: these
    weights are 0.
    """
    if "attention" in arrays:
        weights = [np.array(layer_weights, np.float32) for layer_weights in payload]
        bad = [~np.isfinite(layer_weights) for layer_weights in weights]
        for layer_weights, lowered in zip(weights, bad, strict=True):
            layer_weights[lowered] = 0
    else:
        all_logits = _recomputed_logits(arrays, payload)
        bad = [~np.isfinite(z) & seen for z, seen in zip(all_logits, allowed, strict=True)]
        weights = [
            softmax_weights(z, seen & ~lowered)
            for z, seen, lowered in zip(all_logits, allowed, bad, strict=True)
        ]
    return weights, sum(int(lowered.sum()) for lowered in bad)


def _recomputed_logits(arrays, queries):
    head_dim = queries.shape[3]
    scale = np.float32(float(arrays.get("scale", 1.0 / np.sqrt(np.float64(head_dim)))))
    keys = np.asarray(arrays["k"])
    with np.errstate(over="ignore", invalid="ignore"):
        return [logits(queries[layer], keys[layer], scale) for layer in range(len(queries))]


def logits(queries, keys, scale):
    """Logits of one layer: one fused multiply-add a dimension, ascending, from +0; then times the
    scale.

    queries [query_head, query, dimension], keys [kv_head, key, dimension] -> [query_head, query,
    key] float32
    """
    group = queries.shape[0] // keys.shape[0]
    keys = np.repeat(keys, group, axis=0)  # query head h reads KV head h // group
    total = np.zeros((queries.shape[0], queries.shape[1], keys.shape[1]), np.float32)
    for dimension in range(queries.shape[2]):
        total = fma32(queries[:, :, None, dimension], keys[:, None, :, dimension], total)
    return total * np.float32(scale)


def softmax_weights(row_logits, allowed):
    """exp(logit - the largest allowed logit of its row) where allowed, +0 elsewhere.

    row_logits [query_head, query, key], finite where allowed; allowed broadcasts to its shape
    """
    candidates = np.where(allowed, row_logits, np.float32(-np.inf))
    largest = candidates.max(axis=-1, keepdims=True)
    # A difference below -float32's largest number becomes -inf, and its weight 0.
    with np.errstate(over="ignore", invalid="ignore"):
        below_largest = np.where(allowed, row_logits - largest, np.float32(0))
    return np.where(allowed, exp32(below_largest), np.float32(0))
