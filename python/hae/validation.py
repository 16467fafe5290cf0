"""Is this kernel right, and if not, what is the smallest input that shows it?

    def attend(queries, keys, values, scale):
        ...
        return {"probabilities": p, "output": o}

    hae.validate("attend", attend, framework="torch").check()

Operations, their arguments and what they mean: hae/kernels.h; how verdicts come about:
docs/validate.md.
The function is put behind the same C table that `hae validate --kernels` loads from a library.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hae import _engine

_DONE, _UNSUPPORTED, _RAISED = 0, 1, 2
_INT, _LONG, _VOID = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
_TYPES = ["float32", "float16", "bfloat16", "float64", "int32", "int64", "uint8"]
_REDUCTIONS = ["mean", "sum", "max"]


class _Array(ctypes.Structure):
    _fields_ = [
        ("data", _VOID),
        ("dtype", _INT),
        ("rank", _INT),
        ("shape", _LONG * 4),
        ("strides", _LONG * 4),
    ]


def _arguments(*fields: tuple[str, Any]) -> type[ctypes.Structure]:
    return type("Arguments", (ctypes.Structure,), {"_fields_": list(fields)})


def _arrays(names: str) -> list[tuple[str, Any]]:
    return [(name, _Array) for name in names.split()]


# The structs of hae/kernels.h, in its order.
_ARGUMENTS = {
    "add_scores": _arguments(
        *_arrays("probabilities lengths counted"), ("reduction", _INT), *_arrays("scores largest")
    ),
    "select_lowest": _arguments(
        *_arrays("scores positions eligible lengths counts"),
        ("ordered", _INT),
        *_arrays("chosen chosen_scores"),
    ),
    "select_from_rows": _arguments(*_arrays("probabilities lengths counts chosen chosen_scores")),
    "prune": _arguments(
        *_arrays("sums largest scope"),
        ("sinks", _LONG),
        ("r", ctypes.c_double),
        ("alpha", ctypes.c_double),
        *_arrays("evicted"),
    ),
    "compact": _arguments(
        *_arrays("keep lengths keys values positions scores"),
        *_arrays("keys_out values_out positions_out scores_out kept"),
    ),
    "attend": _arguments(
        *_arrays("queries keys values block_table lengths visible positions query_positions"),
        ("window", _LONG),
        ("scale", ctypes.c_float),
        *_arrays("probabilities output log_sum_exp sums"),
    ),
}

# What a function returns, the one that an only array means first.
_OUTPUTS = {
    "add_scores": ["scores", "largest"],
    "select_lowest": ["chosen", "chosen_scores"],
    "select_from_rows": ["chosen", "chosen_scores"],
    "prune": ["evicted"],
    "compact": ["kept", "keys_out", "values_out", "positions_out", "scores_out"],
    "attend": ["output", "probabilities", "log_sum_exp", "sums"],
}

_Kernel = ctypes.CFUNCTYPE(_INT, _VOID, _VOID)


class _Memory(ctypes.Structure):
    _fields_ = [
        *[(name, _VOID) for name in ("allocate", "release", "copy_in", "copy_out", "synchronize")],
        ("device_type", _INT),
        ("device", _INT),
        ("stream", _VOID),
        ("other_stream", _VOID),
    ]


class _Table(ctypes.Structure):
    _fields_ = [
        ("abi", _INT),
        ("accumulation", _INT),
        ("name", ctypes.c_char_p),
        ("memory", _Memory),
        ("workspace_bytes", _VOID),
        *[(name, _Kernel) for name in _ARGUMENTS],
    ]


def _numpy_view(array: _Array, type_name: str) -> np.ndarray:
    """The array where it lies; bfloat16 as its codes."""
    dtype = np.dtype("int16" if type_name == "bfloat16" else type_name)
    shape = tuple(array.shape[: array.rank])
    if 0 in shape:
        return np.empty(shape, dtype)
    strides = tuple(stride * dtype.itemsize for stride in array.strides[: array.rank])
    span = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + dtype.itemsize
    memory = (ctypes.c_char * span).from_address(array.data)
    return np.ndarray(shape, dtype, buffer=memory, strides=strides)


def _torch_view(array: _Array, type_name: str) -> Any:
    import torch

    tensor = torch.from_numpy(_numpy_view(array, type_name))
    return tensor.view(torch.bfloat16) if type_name == "bfloat16" else tensor


def _copy_on(device: str, host: Any) -> Any:
    """The tensor on a device, with the strides that it has here."""
    import torch

    span = 1 + sum((n - 1) * s for n, s in zip(host.shape, host.stride(), strict=True))
    try:
        memory = torch.empty(max(span, 0), dtype=host.dtype, device=device)
    except torch.OutOfMemoryError:
        raise _Unsupported from None  # arrays beyond 2^31 elements, on a small device
    return memory.as_strided(host.shape, host.stride()).copy_(host)


def _torch_tensor(result: Any) -> Any:
    """What a function returned: a tensor, or anything with DLPack."""
    import torch

    return result if isinstance(result, torch.Tensor) else torch.from_dlpack(result)


class _Unsupported(Exception):
    """The case asks for what the function does not take or give."""


class _Adapter:
    """One Python function as a kernel of the C table."""

    def __init__(
        self, operation: str, function: Callable[..., Any], framework: str, device: str | None
    ) -> None:
        self._operation = operation
        self._function = function
        self._view = _torch_view if framework == "torch" else _numpy_view
        self._device = device
        self._copies: list[tuple[Any, Any]] = []  # of inputs: here, and on the device
        self._has_bfloat16 = framework == "torch"
        parameters = inspect.signature(function).parameters.values()
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._takes = {p.name for p in parameters}
        self.error: BaseException | None = None  # the last that the function raised

    def __call__(self, arguments: int, _context: int) -> int:
        try:
            struct = _ARGUMENTS[self._operation].from_address(arguments)
            self._run({name: getattr(struct, name) for name, *_ in struct._fields_})
        except (_Unsupported, NotImplementedError):
            return _UNSUPPORTED
        except Exception as error:  # the case fails, and shrinks like any other
            self.error = error
            return _RAISED
        return _DONE

    def _run(self, given: dict[str, Any]) -> None:
        outputs = {}
        inputs = {}
        self._copies.clear()
        for name, value in given.items():
            if isinstance(value, _Array):
                is_output = name in _OUTPUTS[self._operation]
                view = self._open(value)
                if is_output and view is not None:
                    outputs[name] = view
                if not is_output or self._operation == "add_scores":  # there they are in and out
                    inputs[name] = self._on_device(view)
            else:
                inputs[name] = _REDUCTIONS[value] if name == "reduction" else value
        if "chosen" in outputs:
            inputs["most"] = outputs["chosen"].shape[1]  # a list is as long as its array
        result = self._function(**self._taken(inputs))
        for here, there in self._copies:
            here.copy_(there)  # an input that was changed is found here
        self._write(result, outputs)

    def _on_device(self, view: Any) -> Any:
        if view is None or self._device is None:
            return view
        self._copies.append((view, _copy_on(self._device, view)))
        return self._copies[-1][1]

    def _open(self, array: _Array) -> Any:
        if not array.data:
            return None
        type_name = _TYPES[array.dtype]
        if type_name == "bfloat16" and not self._has_bfloat16:
            raise _Unsupported
        return self._view(array, type_name)

    def _taken(self, inputs: dict[str, Any]) -> dict[str, Any]:
        if self._takes_all:
            return inputs
        for name, value in inputs.items():
            if name not in self._takes and not self._is_plain(name, value, inputs):
                raise _Unsupported
        return {name: value for name, value in inputs.items() if name in self._takes}

    def _is_plain(self, name: str, value: Any, inputs: dict[str, Any]) -> bool:
        """Whether a function that does not take an argument may be called all the same."""
        if name == "scale":
            usual = np.float32(1 / math.sqrt(inputs["queries"].shape[-1]))
            return bool(np.float32(value) == usual)
        plain = {"window": 0, "sinks": 0, "ordered": 1, "reduction": "mean"}
        return value is None or name == "most" or (name in plain and value == plain[name])

    def _write(self, result: Any, outputs: dict[str, Any]) -> None:
        if not isinstance(result, Mapping):
            many = result if isinstance(result, tuple) else (result,)
            result = dict(zip(_OUTPUTS[self._operation], many, strict=False))
        for name, view in outputs.items():
            if result.get(name) is None:
                raise _Unsupported
            if tuple(result[name].shape) != tuple(view.shape):
                raise ValueError(
                    f"{name} has shape {tuple(result[name].shape)}, expected {tuple(view.shape)}"
                )
            if isinstance(view, np.ndarray):
                np.copyto(view, np.asarray(result[name]), casting="unsafe")
            else:
                view.copy_(_torch_tensor(result[name]))


@dataclass
class Validation:
    """What became of a function: true when it is right."""

    operation: str
    passed: int
    failed: int
    unsupported: int
    fault: str  #: a guess at what is wrong
    failures: list[dict[str, Any]] = field(repr=False)
    left_out: int = 0  #: for want of memory: arrays beyond 2^31 elements
    smallest: dict[str, Any] | None = None  #: the counterexample in words
    error: BaseException | None = None  #: the last that the function raised

    def __bool__(self) -> bool:
        return self.failed == 0 and self.passed > 0

    def __str__(self) -> str:
        cases = self.passed + self.failed + self.unsupported + self.left_out
        text = f"{self.operation}: {self.passed} of {cases} cases passed, "
        text += f"{self.failed} failed, {self.unsupported} not supported"
        if self.left_out:
            text += f", {self.left_out} left out: no memory for arrays beyond 2^31 elements"
        if self.smallest is not None:
            text += f"\n  fault: {self.fault}\n  smallest: {self.smallest['problem']}"
            text += f"\n  found in case {self.smallest['case']}"
            for line in self.smallest["arrays"]:
                text += f"\n    {line}"
            for finding in self.smallest["findings"]:
                text += f"\n    {finding['kind']}: {finding['text']}"
        if self.error is not None:
            text += f"\n  it raised {type(self.error).__name__}: {self.error}"
        return text

    def check(self) -> None:
        """Raises AssertionError with the report unless the function is right."""
        if not self:
            raise AssertionError(str(self)) from self.error


def _expect_same_structs() -> None:
    mine = {
        "hae_array": _Array,
        "hae_memory": _Memory,
        "hae_kernels": _Table,
        **_ARGUMENTS,
    }
    theirs = _engine.kernel_struct_bytes()
    for name, struct in mine.items():
        if ctypes.sizeof(struct) != theirs[name]:
            raise ImportError(f"hae.validation and hae/kernels.h disagree about {name}")


def validate(
    operation: str,
    function: Callable[..., Any],
    *,
    framework: str = "numpy",
    device: str | None = None,
    outputs: Iterable[str] = (),
    accumulation: str = "float32",
    case: str = "",
    seed: int = 0,
) -> Validation:
    """Holds a function to every case of an operation of hae/kernels.h.

    operation     add_scores, select_lowest, select_from_rows, prune, compact or attend
    function      takes arguments by the names of the header, those it serves; a case that gives
                  others is not supported. What is absent is None. Arrays are views with the
                  strides of the case; `most` is the length of the lists that a selection fills.
                  Returns a mapping by the names of outputs, or a tuple or one array, in the order
                  of _OUTPUTS (attend: output, probabilities, log_sum_exp, sums).
                  NotImplementedError means "not supported"; what else it raises is a failure.
    framework     numpy or torch: what arrays are given as; bfloat16 only with torch. The result
                  may be anything with DLPack.
    device        of torch: arrays are copied there with their strides, as "cuda". Without it they
                  are views of the process's memory. CuPy, Triton and JAX take torch tensors by
                  DLPack.
    outputs       ask for these outputs only
    accumulation  float32 or float64: the narrowest type it keeps a sum in; bounds follow from it
    case          only this one
    """
    if operation not in _ARGUMENTS:
        raise _engine.ConfigError(
            f"operation {operation!r} is unknown; expected one of {', '.join(_ARGUMENTS)}"
        )
    if framework not in ("numpy", "torch"):
        raise _engine.ConfigError(f"framework {framework!r} is unknown; expected numpy or torch")
    if device is not None and framework != "torch":
        raise _engine.ConfigError(
            f"device {device!r} needs framework='torch'; numpy arrays lie in the process's memory"
        )
    if accumulation not in ("float32", "float64"):
        raise _engine.ConfigError(
            f"accumulation {accumulation!r} is unknown; expected float32 or float64"
        )
    _expect_same_structs()
    adapter = _Adapter(operation, function, framework, device)
    table = _Table(abi=1, accumulation=_TYPES.index(accumulation), name=b"python")
    kernel = _Kernel(adapter)  # lives until the engine is done
    setattr(table, operation, kernel)
    report = json.loads(
        _engine.validate_table(
            ctypes.addressof(table), operation, case, list(outputs), seed, lambda name, done: None
        )
    )
    keys = ("operation", "passed", "failed", "unsupported", "fault", "failures", "left_out")
    return Validation(
        *(report[key] for key in keys), smallest=report.get("smallest"), error=adapter.error
    )
