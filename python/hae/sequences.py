"""Recorded sequences: of trace files, and of arrays in memory."""

from __future__ import annotations

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

TEXT = -1


def open(path: str | os.PathLike[str], *, lock: bool = True) -> Trace:
    """A trace file: `len(trace)`, `trace[0]`, `trace["board 3"]`, `for sequence in trace`.

    lock    hold a shared lock, so that nothing writes to it
    raises  TraceError naming file, dataset and element
    """
    return _engine.open_trace(os.fspath(path), lock)


def check(path: str | os.PathLike[str], *, most: int = 10) -> list[str]:
    """Reads a whole trace file. What breaks the format, at most `most` sentences; empty: it is sound.

    raises TraceError when it is no trace file at all
    """
    return _engine.check_file(os.fspath(path), most)


def float32(array: Any, what: str, ndim: int = 3) -> np.ndarray:
    """An array, or a tensor of any framework with DLPack, as float32 in C order: itself where it is
    that already, else a copy. Tensors on a GPU are copied to this process's memory.

    raises TraceError for another number of dimensions, or what is no array of numbers
    """
    if hasattr(array, "detach"):  # torch: bfloat16 and memory of a GPU have no numpy array
        array = array.detach().to("cpu")
        array = (
            array.numpy()
            if array.dtype.is_floating_point and array.itemsize >= 4
            else (array.float().numpy())
        )
    elif hasattr(array, "__dlpack__") and not isinstance(array, np.ndarray):
        array = np.from_dlpack(array)
    try:
        numbers = np.ascontiguousarray(array, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise _engine.TraceError(f"arrays: {what} is no array of numbers: {error}") from None
    if numbers.ndim != ndim:
        raise _engine.TraceError(f"arrays: {what} has {numbers.ndim} dimensions, expected {ndim}")
    return numbers


def _layers(arrays: ArrayLike | Iterable[Any] | None, what: str) -> list[np.ndarray]:
    """One array a layer: of a list of arrays, or of one array whose first axis is the layer."""
    if arrays is None:
        return []
    return [float32(layer, f"{what} of layer {i}") for i, layer in enumerate(arrays)]


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
    name: str = "arrays",
    group: str = "",
) -> Sequence:
    """A sequence of arrays; float32 in C order is viewed, not copied. Causal. T tokens.

    q              [layers, query_heads, T, head_dim], or one array a layer, after rotary embedding
    k, v           [layers, kv_heads, T, head_dim]
    attention      [layers, query_heads, T, T] instead of q and k; v is optional then
    prompt         P: the first T - P rows after it are decode steps
    image          [T] picture of the token, -1 for text; default all text
    window         [layers] sliding window, 0 none; default none
    scale          logit = scale * q . k; default 1 / sqrt(head_dim)
    kv_heads, head_dim  of an `attention` sequence without v; default query_heads, unknown
    element_bytes  of a cached number, for figures in bytes; default those of the arrays
    name, group    sequences of one group are not independent; default the name
    raises         TraceError when the parts do not fit together
    """
    if (attention is None) == (q is None) or (q is None) != (k is None):
        raise _engine.TraceError("arrays: give q, k and v, or attention")
    given = attention if q is None else k
    first = next(iter(given), None)
    if element_bytes is None:
        element_bytes = int(getattr(first, "itemsize", 4))
    return _engine.sequence_of_arrays(
        name=name,
        group=group,
        prompt=int(prompt),
        scale=scale,
        kv_heads=kv_heads,
        head_dim=head_dim,
        element_bytes=element_bytes,
        window=[] if window is None else [int(w) for w in np.asarray(window)],
        image=[] if image is None else [int(i) for i in np.asarray(image)],
        q=_layers(q, "q"),
        k=_layers(k, "k"),
        v=_layers(v, "v"),
        attention=_layers(attention, "attention"),
    )


def write(
    path: str | os.PathLike[str], sequences: Iterable[Sequence], *, dtype: str = "float32"
) -> None:
    """Writes a trace file. It is there when it is whole, and replaces an earlier one only then.

    dtype   of the stored numbers: float32, float16 or bfloat16, rounded to nearest even
    raises  OutputError when it cannot be written, TraceError for a sequence that breaks the format
    """
    _engine.write_file(
        os.fspath(path),
        list(sequences),
        dtype,
        f"hae {__version__}",
        f"python {platform.python_version()}, numpy {np.__version__}",
        shlex.join(sys.argv) or "python",
    )
