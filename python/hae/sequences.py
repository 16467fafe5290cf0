"""Recorded sequences: of trace files, and of arrays in memory."""

from __future__ import annotations

import operator
import os
import platform
import shlex
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from hae import __version__, _engine

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from hae._engine import Sequence, Trace


def open(path: str | os.PathLike[str], *, lock: bool = True) -> Trace:
    """A trace file: `len(trace)`, `trace[0]`, `trace["board 3"]`, `for sequence in trace`.

    lock    hold a shared lock, so that nothing writes to it
    raises  TraceError naming file, dataset and element
    """
    return _engine.open_trace(os.fspath(path), lock)


def check(path: str | os.PathLike[str], *, most: int = 10) -> list[str]:
    """Reads a whole trace file. Returns at most `most` sentences on what breaks the format; none:
    it is sound.

    raises TraceError when it is no trace file at all
    """
    return _engine.check_file(os.fspath(path), most)


def sequence(
    *,
    prompt: int,
    q: ArrayLike | Iterable[Any] | None = None,
    k: ArrayLike | Iterable[Any] | None = None,
    v: ArrayLike | Iterable[Any] | None = None,
    attention: ArrayLike | Iterable[Any] | None = None,
    image: ArrayLike | None = None,
    window: ArrayLike | None = None,
    scale: float | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    element_bytes: int | None = None,
    tokens: Iterable[str] = (),
    name: str = "arrays",
    group: str | None = None,
) -> Sequence:
    """A sequence of arrays: numpy's, or tensors of any framework with DLPack. float32 in C order in
    this process's memory is viewed, not copied: leave it as it is while the sequence lives. Other
    numbers are copied and rounded to float32. Causal. T tokens.

    q              [layers, query_heads, T, head_dim], or one array a layer, after rotary embedding
    k, v           [layers, kv_heads, T, head_dim]; without v there are no output errors
    attention      [layers, query_heads, T, T] instead of q and k: row i over keys j, 0 where j > i
    prompt         P: the first P rows are the prompt's, the other T - P are decode steps
    image          [T] picture of the token, -1 for text; default all text
    window         [layers] sliding window, 0 none; default none
    scale          logit = scale * q . k; default 1 / sqrt(head_dim)
    kv_heads, head_dim  of an `attention` sequence without v; default query_heads, unknown
    element_bytes  of a cached number, for figures in bytes; default that of k, or of attention
    tokens         [T] the tokens as text, for `details.token`
    group          sequences of one group are not independent; default the name
    raises         TraceError when the parts do not fit together
    """
    if (attention is None) == (q is None) or (q is None) != (k is None):
        raise _engine.TraceError("arrays: give q, k and v, or attention")
    given = {"q": _per_layer(q), "k": _per_layer(k), "v": _per_layer(v)}
    given["attention"] = _per_layer(attention)
    cached = next(iter(given["k"] or given["attention"]), None)
    dtype = str(getattr(cached, "dtype", "")).removeprefix("torch.")
    return _engine.sequence_of_arrays(
        name=name,
        group=group,
        prompt=operator.index(prompt),
        scale=scale,
        kv_heads=kv_heads,
        head_dim=head_dim,
        element_bytes=getattr(cached, "itemsize", 4) if element_bytes is None else element_bytes,
        stored=dtype if dtype in ("float16", "bfloat16") else "float32",
        window=None if window is None else _integers(window, "window"),
        image=None if image is None else _integers(image, "image"),
        tokens=list(tokens),
        **{
            name: [_float32(layer, f"{name} of layer {i}") for i, layer in enumerate(layers)]
            for name, layers in given.items()
        },
    )


def _per_layer(arrays: ArrayLike | Iterable[Any] | None) -> list[Any]:
    """A list of arrays, or an array whose first axis is the layer, as a list."""
    if arrays is None:
        return []
    return list(arrays if hasattr(arrays, "__iter__") else _as_numpy(arrays))


def _as_numpy(array: Any) -> np.ndarray:
    """An array, a tensor or a nested list; memory is shared where that is possible."""
    if hasattr(array, "detach"):  # torch: bfloat16 and memory of a GPU have no numpy array
        array = array.detach().to("cpu")
        half = array.is_floating_point() and array.element_size() < 4
        return (array.float() if half else array).numpy()
    if hasattr(array, "__dlpack__") and not isinstance(array, np.ndarray):
        return np.from_dlpack(array)
    return np.asarray(array)


def _float32(array: Any, what: str) -> np.ndarray:
    """Three axes of float32 in C order: the array itself where it is that already, else a copy."""
    try:
        numbers = _as_numpy(array)
        if numbers.dtype.kind in "bcmMOSU":  # bool, complex, times, objects, strings
            raise TypeError(f"its type is {numbers.dtype}")
        with np.errstate(over="ignore"):  # what overflows is infinite, which is found where it is
            numbers = np.ascontiguousarray(numbers, dtype=np.float32)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise _engine.TraceError(f"arrays: {what} is no array of real numbers: {reason}") from None
    if numbers.ndim != 3:
        raise _engine.TraceError(f"arrays: {what} has {numbers.ndim} axes, expected 3")
    return numbers


def _integers(numbers: ArrayLike, what: str) -> list[int]:
    array = _as_numpy(numbers)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise _engine.TraceError(
            f"arrays: {what} is {array.dtype} of {array.ndim} axes, expected a list of integers"
        )
    return array.tolist()


def write(
    path: str | os.PathLike[str], sequences: Iterable[Sequence], *, dtype: str = "float32"
) -> None:
    """Writes a trace file. It is there when it is whole, and replaces an earlier one only then.

    Of a sequence of a file, queries before rotary embedding, pictures and similarities of
    embeddings are not copied.

    dtype   of the stored numbers: float32, float16 or bfloat16, rounded to nearest even
    raises  OutputError when it cannot be written, TraceError for a sequence that a file cannot
            hold: two of one name, numbers that are not finite, rows that are no attention
    """
    _engine.write_file(
        os.fspath(path),
        list(sequences),
        dtype,
        f"hae {__version__}",
        f"python {platform.python_version()}, numpy {np.__version__}",
        shlex.join(sys.orig_argv),
    )
