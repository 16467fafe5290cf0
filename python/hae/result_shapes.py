"""What readers of result files rely on (docs/results-format.md), checked before anything is made
of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class ShapeError(Exception):
    """A member that is not as it should be: where, what was expected and what is there."""


@dataclass(frozen=True)
class Maybe:
    """Null or of a shape. What is absent from its object becomes null."""

    shape: Any


@dataclass(frozen=True)
class Each:
    """An object whose members are of one shape, if they are objects."""

    shape: Any


NUMBER = (int, float)
_MEAN = {"mean": Maybe(NUMBER)}
_OF_LAYERS = Maybe([Maybe(NUMBER)])
_INTERVAL = {**_MEAN, "interval95": Maybe([NUMBER, NUMBER]), "groups": int}
_FIGURES = ("missed_mass", "missed_pull", "kl", "output_error", "output_error_relative")
_FILE = {"path": str, "sha256": str}

COMPARISON = {
    "manifest": Maybe(
        {
            "traces": [_FILE],
            "logs": Maybe([_FILE]),
            "policies": [str],
            "command": Maybe(str),
            "match": Maybe(str),
            "sequence": Maybe((str, int)),
            "nan": Maybe(str),
            "backend": Maybe(str),
        }
    ),
    "runs": [
        {
            "sequence": {"name": str},
            "policy": str,
            "tokens": Maybe(_MEAN),
            "bytes": _MEAN,
            "decode": Maybe(dict.fromkeys(_FIGURES, Maybe(_MEAN))),
            "optimal_mean": Maybe(NUMBER),
            "per_layer": {"decode": Maybe(dict.fromkeys(_FIGURES, _OF_LAYERS))},
            "evictions": int,
            "unequal": bool,
            "warnings": [str],
        }
    ],
    "summary": [Each(Maybe(_INTERVAL))],
}

_ENVELOPE = Maybe({"initial": NUMBER, "rate": NUMBER, "future_loss_of_one": Maybe(NUMBER)})
_DECAY = {
    "evictions": int,
    "envelope": _ENVELOPE,
    "tested": Maybe({"groups": int, "exceeding": int}),
}
CERTIFICATE = {
    "policy": str,
    "epsilon": NUMBER,
    "loss": {"measured": Maybe(NUMBER), "conformal": {"bound": Maybe(NUMBER), "delta": NUMBER}},
    "claims": [
        {
            **dict.fromkeys(("id", "title", "statement", "status", "verdict"), str),
            **dict.fromkeys(("measured", "bound", "slack"), Maybe(NUMBER)),
            "cases": int,
            "unmet": Maybe(str),
        }
    ],
    "decay": {"layers": [{**_DECAY, "layer": int}], "all_layers": _DECAY},
}

CLOSED_LOOP = {
    "manifest": {"command": str, "model": str},
    "sequences": [dict],
    "summary": [Each(Maybe(_INTERVAL))],
}


def expect(value: Any, shape: Any, where: str = "") -> None:
    """raises ShapeError"""
    if isinstance(shape, Maybe):
        if value is not None:
            expect(value, shape.shape, where)
        return
    kind = _kind(shape)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise ShapeError(f"{where or 'the file'} is {type(value).__name__}, expected {names}")
    if isinstance(shape, Each):
        for name, member in value.items():
            if name not in ("policy", "sequences", "unequal"):
                expect(member, shape.shape, f"{where}.{name}")
        expect(value.get("policy"), str, f"{where}.policy")
    elif isinstance(shape, dict):
        for name, inner in shape.items():
            if isinstance(inner, Maybe):
                value.setdefault(name)
            expect(value.get(name), inner, f"{where}.{name}".removeprefix("."))
    elif isinstance(shape, list):
        if len(shape) > 1 and len(value) != len(shape):
            raise ShapeError(f"{where} has {len(value)} members, expected {len(shape)}")
        for i, member in enumerate(value):
            expect(member, shape[0], f"{where}[{i}]")


def _kind(shape: Any) -> Any:
    if isinstance(shape, (Each, dict)):
        return dict
    return list if isinstance(shape, list) else shape
