"""Recorded sequences for tests: Hypothesis strategies, and fixed ones at the edges. hae.testing is
their face.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from hae.sequences import sequence

if TYPE_CHECKING:
    from hae._engine import Sequence

SHOWN_TOKENS = 6

# What most rows of a head look like; every fifth row is spread.
ROW_KINDS = ("spread", "one hot", "uniform", "ties", "with zeros", "subnormal", "masked")

_HEADS = ((1, 1), (2, 1), (1, 3), (2, 2))  # KV heads, query heads of each


@st.composite
def _shape(draw: st.DrawFn, min_tokens: int, max_tokens: int, max_layers: int) -> dict[str, Any]:
    """Layers, heads, tokens and pictures. Hypothesis shrinks toward the small and the first."""
    tokens = draw(st.integers(min_tokens, max_tokens))
    prompt = draw(st.integers(1, tokens))
    image = np.full(tokens, -1)
    for picture in range(draw(st.integers(0, 2))):
        begin = draw(st.integers(0, prompt - 1))
        image[begin : draw(st.integers(begin + 1, prompt))] = picture
    kv_heads, group = draw(st.sampled_from(_HEADS))
    return {
        "layers": draw(st.integers(1, max_layers)),
        "kv_heads": kv_heads,
        "query_heads": kv_heads * group,
        "tokens": tokens,
        "prompt": prompt,
        "image": image,
        "random": np.random.default_rng(draw(st.integers(0, 2**32 - 1))),
        "widest": (max_layers, 4, max_tokens),
    }


def _numbers(shape: dict[str, Any], heads: int, size: int) -> np.ndarray:
    """Normal numbers [layers, heads, tokens, size], cut out of as many as the largest shape needs:
    those of a token are the same in a sequence of fewer tokens, layers or heads, which is therefore
    likely to fail like the longer one.
    """
    numbers = shape["random"].normal(size=(*shape["widest"], size))
    return numbers[: shape["layers"], :heads, : shape["tokens"]]


def _vectors(shape: dict[str, Any], heads: int, dims: int, scale: float, ties: bool) -> np.ndarray:
    values = _numbers(shape, heads, dims) * scale
    return (np.round(values * 2) / 2 if ties else values).astype(np.float32)


@st.composite
def qkv_traces(
    draw: st.DrawFn, *, min_tokens: int = 1, max_tokens: int = 40, max_layers: int = 3
) -> Sequence:
    """A sequence of queries, keys and values: grouped heads, pictures, windows, ties."""
    shape = draw(_shape(min_tokens, max_tokens, max_layers))
    dims = draw(st.integers(1, 4))
    scale = draw(st.sampled_from([1.0, 0.3, 3.0]))
    ties = draw(st.booleans())
    return sequence(
        q=_vectors(shape, shape["query_heads"], dims, scale, ties),
        k=_vectors(shape, shape["kv_heads"], dims, scale, ties),
        v=_vectors(shape, shape["kv_heads"], dims, 1.0, False),
        prompt=shape["prompt"],
        image=shape["image"],
        window=[draw(st.sampled_from([0, 1, 3, 7])) for _ in range(shape["layers"])],
        name="generated",
    )


@st.composite
def attention_traces(
    draw: st.DrawFn, *, min_tokens: int = 1, max_tokens: int = 40, max_layers: int = 3
) -> Sequence:
    """A sequence of probabilities and values: causal rows of every kind of ROW_KINDS, grouped
    heads, pictures.
    """
    shape = draw(_shape(min_tokens, max_tokens, max_layers))
    kinds = [draw(st.sampled_from(ROW_KINDS)) for _ in range(shape["query_heads"])]
    uniform = np.abs(_numbers(shape, shape["query_heads"], max_tokens))[..., : shape["tokens"]]
    attention = np.stack(
        [_rows_of_kind(kind, uniform[:, head]) for head, kind in enumerate(kinds)], axis=1
    )
    return sequence(
        attention=attention,
        v=_vectors(shape, shape["kv_heads"], draw(st.integers(1, 4)), 1.0, False),
        prompt=shape["prompt"],
        image=shape["image"],
        name="generated",
    )


def _rows_of_kind(kind: str, numbers: np.ndarray) -> np.ndarray:
    """Rows of probabilities [layers, T, T] of non-negative numbers that are as good as random."""
    spread = numbers**2 + 1e-4  # squares spread the weights
    of_kind = {
        "spread": spread,
        "one hot": np.zeros_like(numbers),
        "uniform": np.ones_like(numbers),
        "ties": 1.0 + (numbers > 0.7),
        "with zeros": np.where(numbers > 0.7, numbers, 0.0),
        "subnormal": np.floor(4 * numbers) * 2.0**-149,
        "masked": np.zeros_like(numbers),
    }[kind]
    tokens = numbers.shape[-1]
    rows = np.where(np.arange(tokens)[:, None] % 5 == 4, spread, of_kind)
    rows = np.tril(rows)
    largest = np.argmax(np.tril(spread), axis=-1, keepdims=True)
    peaks = rows.sum(-1, keepdims=True) == 0 if kind != "masked" else np.zeros((1, 1, 1), bool)
    peaks = peaks | (kind == "subnormal")  # a subnormal row has a 1 beside them
    peak = np.where(peaks, 1.0, np.take_along_axis(rows, largest, -1))
    np.put_along_axis(rows, largest, peak, -1)
    sums = rows.sum(-1, keepdims=True)
    return (rows / np.where(sums == 0, 1, sums)).astype(np.float32)


def traces(
    *, min_tokens: int = 1, max_tokens: int = 40, max_layers: int = 3
) -> st.SearchStrategy[Sequence]:
    """A sequence of either payload. Shrinks to fewer tokens, layers and heads."""
    sizes = {"min_tokens": min_tokens, "max_tokens": max_tokens, "max_layers": max_layers}
    return st.one_of(qkv_traces(**sizes), attention_traces(**sizes))


def _irregular(*shape: int) -> np.ndarray:
    """Numbers in [-1, 1] that look irregular and are the same everywhere."""
    return np.sin(37.0 * np.arange(np.prod(shape)) ** 1.3).reshape(shape)


def _pictures(tokens: int, *spans: tuple[int, int]) -> np.ndarray:
    image = np.full(tokens, -1)
    for picture, (begin, end) in enumerate(spans):
        image[begin:end] = picture
    return image


def _recorded(name: str, rows: np.ndarray, prompt: int, *spans: tuple[int, int]) -> Sequence:
    """Two layers of four query heads that attend alike, of two KV heads; rows of weights [T, T]."""
    causal = np.tril(rows)
    sums = causal.sum(-1, keepdims=True)
    attention = (causal / np.where(sums == 0, 1, sums)).astype(np.float32)
    tokens = len(rows)
    return sequence(
        attention=np.broadcast_to(attention, (2, 4, tokens, tokens)).copy(),
        v=_irregular(2, 2, tokens, 8),
        prompt=prompt,
        image=_pictures(tokens, *spans),
        name=name,
    )


def _recomputed(
    name: str,
    tokens: int,
    prompt: int,
    *spans: tuple[int, int],
    window: tuple[int, ...] = (0, 0),
    all_equal: bool = False,
) -> Sequence:
    layers = len(window)
    q, k = (
        np.ones((layers, heads, tokens, 8))
        if all_equal
        else 2 * _irregular(layers, heads, tokens, 8)
        for heads in (4, 2)
    )
    return sequence(
        q=q,
        k=k,
        v=_irregular(layers, 2, tokens, 8),
        prompt=prompt,
        scale=0.5,
        window=list(window),
        image=_pictures(tokens, *spans),
        name=name,
    )


def edge_traces() -> list[Sequence]:
    """Fixed sequences at the edges: sizes around a warp, ties only, no text, no picture, one token,
    no decode step, masked rows, windows, grouped heads.
    """
    i, j = np.indices((65, 65))
    uneven = 1.0 + (i * 7 + j * j * 3) % 11
    masked = uneven[:16, :16].copy()
    masked[[2, 5, 12]] = 0
    return [
        *(
            _recorded(f"uneven {n}", uneven[:n, :n], n - 9, (2, 8), (10, 14))
            for n in (31, 32, 33, 65)
        ),
        _recorded("ties only", np.ones((24, 24)), 16, (0, 9)),
        _recorded("no picture", uneven[:20, :20], 10),
        _recorded("no text", uneven[:12, :12], 12, (0, 12)),
        _recorded("one token", uneven[:1, :1], 1),
        _recorded("prompt only", uneven[:18, :18], 18, (3, 9)),
        _recorded("prompt of one token", uneven[:14, :14], 1),
        _recorded("masked rows", masked, 9, (1, 5)),
        _recomputed("recomputed", 30, 20, (4, 12)),
        _recomputed("recomputed, with a window", 30, 20, (4, 12), window=(0, 6)),
        _recomputed("recomputed, windows only", 70, 40, (4, 12), window=(5, 33)),
        _recomputed("recomputed, ties only", 30, 20, (4, 12), all_equal=True),
        _recomputed("recomputed, two pictures", 66, 50, (2, 20), (25, 31), window=(0, 0, 0)),
        _recomputed("recomputed, no picture", 30, 20, window=(0,)),
        _recomputed("recomputed, prompt only", 33, 33),
        _recomputed("recomputed, one token", 1, 1),
    ]


def describe(trace: Sequence) -> str:
    """The shape and, of at most SHOWN_TOKENS tokens, every number: what a failure prints."""
    info = trace.info
    text = (
        f"{info.payload}: {info.layers} layers, {info.query_heads} query heads, "
        f"{info.kv_heads} KV heads, P {info.prompt}, T {info.tokens}, scale {info.scale}, "
        f"image {info.image.tolist()}, window {info.window.tolist()}"
    )
    if info.tokens > SHOWN_TOKENS:
        return text
    for layer in range(info.layers):
        attention = trace.attention(layer) if info.payload == "attention" else None
        arrays = {
            "attention": attention,
            "q": trace.queries(layer),
            "k": trace.keys(layer),
            "v": trace.values(layer),
        }
        for name, array in arrays.items():
            if array is not None:
                text += f"\nlayer {layer}, {name} = {array.tolist()}"
    return text
