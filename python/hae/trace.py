"""Write trace files: the layout of traces/FORMAT.md, version 1.

Numbers are rounded here, to nearest even, and stored as raw codes; HDF5 converts nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import numpy as np

from hae._engine import TraceError
from hae.cleanup import finally_do

FORMAT = "hae-trace"
VERSION = 1
DTYPES = ("float32", "float16", "bfloat16")
PAYLOADS = ("qkv", "attention")
TEXT, IMAGE = 0, 1
NO_IMAGE = -1


# ---------------------------------------------------------------------------------- numbers


def element_bytes(dtype: str) -> int:
    """Bytes of one number of a payload: 4, 2 or 2."""
    return 4 if dtype == "float32" else 2


def is_finer(dtype: str, than: str) -> bool:
    """Whether numbers of one type carry more significant bits than those of the other."""
    return DTYPES.index(dtype) < DTYPES.index(than)  # listed from fine to coarse


def bfloat16_codes(values: np.ndarray) -> np.ndarray:
    """float32 values as bfloat16 codes (uint16, any shape), rounded to nearest even.

    A NaN stays a NaN (quiet, sign kept); what is too large becomes infinity.
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    # Half a unit of the last place, one less when the kept part is even: ties go to even.
    rounded = bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))
    codes = (rounded >> 16).astype(np.uint16)
    quiet_nan = ((bits >> 16) | np.uint32(0x0040)).astype(np.uint16)
    return np.where(np.isnan(values), quiet_nan, codes)


def bfloat16_values(codes: np.ndarray) -> np.ndarray:
    """bfloat16 codes as float32 values, exact."""
    return (np.asarray(codes, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)


def encoded(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values as the array that is stored: float32, float16, or uint16 bfloat16 codes.

    raises TraceError when a value is not finite, or stops being finite in `dtype`
    """
    values = np.asarray(values, dtype=np.float32)
    if not np.isfinite(values).all():
        raise TraceError("a value is NaN or infinite")
    if dtype == "float32":
        return values
    if dtype == "float16":
        with np.errstate(over="ignore"):
            codes = values.astype(np.float16)
        overflow = ~np.isfinite(codes)
    else:
        codes = bfloat16_codes(values)
        overflow = (codes & 0x7F80) == 0x7F80
    if overflow.any():
        raise TraceError(f"{values[overflow].flat[0]:g} does not fit in {dtype}")
    return codes


def storage_dtype(dtype: str) -> np.dtype:
    """numpy type of what `encoded` returns."""
    return np.dtype({"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}[dtype])


def _file_type(dtype: str) -> h5py.h5t.TypeID:
    if dtype != "bfloat16":
        return h5py.h5t.py_create(storage_dtype(dtype))
    bfloat16 = h5py.h5t.IEEE_F16LE.copy()
    bfloat16.set_fields(15, 7, 8, 0, 7)
    bfloat16.set_ebias(127)
    return bfloat16


def create_numbers(
    group: h5py.Group, name: str, shape: Sequence[int], dtype: str
) -> h5py.h5d.DatasetID:
    """An empty contiguous dataset of `dtype`, to be filled by `write_numbers`."""
    space = h5py.h5s.create_simple(tuple(shape))
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.CONTIGUOUS)
    properties.set_obj_track_times(False)  # same numbers, same bytes
    return h5py.h5d.create(group.id, name.encode(), _file_type(dtype), space, properties)


def write_numbers(dataset: h5py.h5d.DatasetID, index: int, codes: np.ndarray) -> None:
    """Store dataset[index] = codes (from `encoded`), bit for bit."""
    codes = np.ascontiguousarray(codes)
    if codes.size == 0:
        return
    file_space = dataset.get_space()
    file_space.select_hyperslab((index,) + (0,) * codes.ndim, (1,) + codes.shape)
    memory_space = h5py.h5s.create_simple((1,) + codes.shape)
    dataset.write(memory_space, file_space, codes, mtype=dataset.get_type())


def dtype_of(dataset: h5py.Dataset) -> str:
    """One of DTYPES; raises TraceError for any other type."""
    kind = dataset.id.get_type()
    if isinstance(kind, h5py.h5t.TypeFloatID) and kind.get_size() == 2:
        layout = (kind.get_fields(), kind.get_ebias())
        if layout == ((15, 7, 8, 0, 7), 127):
            return "bfloat16"
        if layout == ((15, 10, 5, 0, 10), 15):
            return "float16"
        raise TraceError(f"{dataset.name}: unknown 16-bit float type")
    if dataset.dtype.kind == "f" and dataset.dtype.itemsize == 4:
        return "float32"
    raise TraceError(f"{dataset.name}: expected float32, float16 or bfloat16 numbers")


def read_numbers(dataset: h5py.Dataset) -> np.ndarray:
    """A whole dataset of float32, float16 or bfloat16 numbers as float32, exact.

    raises TraceError for any other type
    """
    if dtype_of(dataset) != "bfloat16":
        return dataset[()].astype(np.float32)
    kind = dataset.id.get_type()
    order = "<" if kind.get_order() == h5py.h5t.ORDER_LE else ">"
    codes = np.empty(dataset.shape, dtype=f"{order}u2")
    dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, codes, mtype=kind)
    return bfloat16_values(codes)


# -------------------------------------------------------------------------------- sequences


@dataclass(frozen=True)
class SequenceInfo:
    """Everything of a sequence but its payload. T = tokens, P = prompt.

    scale       logit = scale * q . k
    modality    [T]     0 text, 1 image
    image       [T]     picture the token belongs to, -1 exactly for text
    patch       [T, 2]  row and column of the patch, -1 -1 where there is none; or None
    token_id    [T]
    token       T strings
    window      [layers]  0 none; W > 0: a query sees key j only when query - j < W
    pictures    image id -> [height, width] or [height, width, channels] uint8
    embedding_similarity  [visual prompt tokens, text prompt tokens] inner products of the input
                embeddings, both in order of position; or None
    position    [T] or [T, axes] what the rotary embedding was given; None: 0 .. T - 1
    bidirectional  whether prompt tokens of one picture also see each other, in every layer
    model_layer [layers] the model's number of each layer, ascending; None: 0 .. layers - 1
    beams       of the beam search whose best path this is; None: greedy
    raises      TraceError when the parts do not fit together
    """

    name: str
    group: str
    payload: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    prompt: int
    generated: int
    scale: float
    model: str
    attention_implementation: str
    modality: np.ndarray
    image: np.ndarray
    patch: np.ndarray | None
    token_id: np.ndarray
    token: Sequence[str]
    window: np.ndarray
    pictures: Mapping[int, np.ndarray] = field(default_factory=dict)
    embedding_similarity: np.ndarray | None = None
    position: np.ndarray | None = None
    bidirectional: bool = False
    model_layer: Sequence[int] | None = None
    beams: int | None = None

    def __post_init__(self) -> None:
        def expect(condition: bool, what: str) -> None:
            if not condition:
                raise TraceError(f"sequence {self.name}: {what}")

        tokens = self.tokens
        expect(self.payload in PAYLOADS, f"payload {self.payload!r}, expected qkv or attention")
        expect(
            self.query_heads % self.kv_heads == 0,
            f"{self.query_heads} query heads do not divide by {self.kv_heads} KV heads",
        )
        expect(1 <= self.prompt <= tokens, f"{self.prompt} prompt tokens of {tokens} tokens")
        for what in ("image", "token_id", "token"):
            found = len(getattr(self, what))
            expect(found == tokens, f"{what} has {found} entries, expected {tokens}")
        expect(
            self.patch is None or self.patch.shape == (tokens, 2),
            f"patch must have shape ({tokens}, 2)",
        )
        visual = int(np.count_nonzero(self.modality[: self.prompt] == IMAGE))
        expect(
            self.embedding_similarity is None
            or self.embedding_similarity.shape == (visual, self.prompt - visual),
            f"embedding_similarity must have shape ({visual}, {self.prompt - visual})",
        )
        expect(len(self.window) == self.layers, f"window must have {self.layers} entries")
        expect(
            self.position is None or len(self.position) == tokens,
            f"position must have {tokens} rows",
        )
        expect(
            self.model_layer is None or len(self.model_layer) == self.layers,
            f"model_layer must have {self.layers} entries",
        )
        expect(
            bool(np.array_equal(self.modality == TEXT, self.image == NO_IMAGE)),
            "image must be -1 exactly for text tokens",
        )

    @property
    def tokens(self) -> int:
        return len(self.modality)


def visible(tokens: int, window: int, image: np.ndarray | None = None) -> np.ndarray:
    """The mask rule: [query, key] bool, true where the query sees the key.

    image  [tokens] picture of each token, where those of one picture see each other; -1 for others
    """
    distance = np.arange(tokens)[:, None] - np.arange(tokens)[None, :]
    seen = (distance >= 0) & ((distance < window) if window > 0 else True)
    if image is None:
        return seen
    return seen | ((image[:, None] == image[None, :]) & (image != NO_IMAGE))


def create_sequence(file: h5py.File, index: int, info: SequenceInfo) -> h5py.Group:
    """The group of sequence `index` with everything of `info`; the payload comes later."""
    group = file.create_group(f"sequences/{index:06d}")
    for name in ("name", "group", "payload", "model", "attention_implementation"):
        group.attrs[name] = getattr(info, name)
    for name in ("layers", "query_heads", "kv_heads", "head_dim", "tokens", "prompt", "generated"):
        group.attrs[name] = np.int64(getattr(info, name))
    group.attrs["scale"] = np.float64(info.scale)
    if info.beams is not None:
        group.attrs["beams"] = np.int64(info.beams)
    group.create_dataset("modality", data=np.asarray(info.modality, dtype=np.int8))
    group.create_dataset("image", data=np.asarray(info.image, dtype=np.int32))
    if info.patch is not None:
        group.create_dataset("patch", data=np.asarray(info.patch, dtype=np.int32))
    if info.position is not None:
        group.create_dataset("position", data=np.asarray(info.position, dtype=np.int64))
    group.create_dataset("token_id", data=np.asarray(info.token_id, dtype=np.int64))
    encoded_tokens = [token.encode("utf-8") for token in info.token]
    length = max([1, *map(len, encoded_tokens)])
    group.create_dataset(
        "token",
        data=np.array(encoded_tokens, dtype=h5py.string_dtype("utf-8", length)),
    )
    group.create_dataset("window", data=np.asarray(info.window, dtype=np.int64))
    if info.bidirectional:
        group.create_dataset("bidirectional", data=np.ones(info.layers, dtype=np.int64))
    if info.model_layer is not None:
        group.create_dataset("model_layer", data=np.asarray(info.model_layer, dtype=np.int64))
    if info.embedding_similarity is not None:
        similarity = np.asarray(info.embedding_similarity, dtype=np.float32)
        group.create_dataset("embedding_similarity", data=similarity)
    for image, picture in info.pictures.items():
        group.create_dataset(f"pictures/{image}", data=np.asarray(picture, dtype=np.uint8))
    return group


def model_layers(group: h5py.Group) -> list[int]:
    """The model's number of each layer of a sequence."""
    if "model_layer" in group:
        return group["model_layer"][()].tolist()
    return list(range(int(group.attrs["layers"])))


# ------------------------------------------------------------------------------------ files


@dataclass(frozen=True)
class Origin:
    """Who made a file: program and version, versions of its libraries, the command."""

    recorder: str
    libraries: str
    command: str


def partial_of(path: Path) -> Path:
    """Where a file is while it is written."""
    return path.with_name(path.name + ".partial")


@contextmanager
def new_trace(path: Path, origin: Origin) -> Iterator[h5py.File]:
    """A new trace file, readable by HDF5 1.10.

    Written as PATH.partial; renamed to PATH, complete, when the block ends well, and removed
    when it does not.
    """
    partial = partial_of(path)
    with finally_do(lambda: partial.unlink(missing_ok=True)):
        with h5py.File(
            partial,
            "w",
            libver=("earliest", "v110"),
            alignment_threshold=4096,
            alignment_interval=64,
        ) as file:
            file.attrs["format"] = FORMAT
            file.attrs["version"] = np.int64(VERSION)
            file.attrs["recorder"] = origin.recorder
            file.attrs["libraries"] = origin.libraries
            file.attrs["command"] = origin.command
            file.create_group("sequences")
            yield file
            file.attrs["complete"] = np.int64(1)
        os.replace(partial, path)


def is_trace(path: Path) -> bool:
    """Whether the file is a trace of any version, complete or not."""
    try:
        with h5py.File(path, "r") as file:
            found = file.attrs.get("format")
    except (OSError, RuntimeError, LookupError, ValueError):
        return False
    return isinstance(found, (str, bytes)) and found in (FORMAT, FORMAT.encode())


@contextmanager
def open_trace(path: Path) -> Iterator[h5py.File]:
    """A trace file for reading.

    raises TraceError when it is not a complete trace of version 1
    """
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise TraceError(f"{path}: cannot be opened as HDF5: {error}") from None
    with file:
        attributes = file.attrs
        if attributes.get("format") != FORMAT or attributes.get("version") != VERSION:
            raise TraceError(f"{path}: not a {FORMAT} file of version {VERSION}")
        if attributes.get("complete") != 1:
            raise TraceError(f"{path}: incomplete, its writer did not finish; record it again")
        yield file


def join_traces(parts: Iterable[Path], path: Path, origin: Origin) -> None:
    """One trace with the sequences of all parts, in order, bytes unchanged."""
    with new_trace(path, origin) as joined:
        index = 0
        for part in parts:
            with open_trace(part) as file:
                for name in sorted(file["sequences"]):
                    file.copy(f"sequences/{name}", joined["sequences"], name=f"{index:06d}")
                    index += 1
