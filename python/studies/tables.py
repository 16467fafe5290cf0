"""Numbers, tables and parts of sentences of docs/closed-loop.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from intervals import Estimate, mean_of, share_of
from measured import Part

MISSED_MASS = "missed mass, mean"
CHOSEN = "lost squared a |v - o|, mean"  # `missed_pull` of hae compare


def number(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}".replace("-", "−")


def percent(value: float) -> str:
    return f"{number(100 * value, 0)} %"


def plus_minus(estimate: Estimate, digits: int = 2) -> str:
    half = (estimate.high - estimate.low) / 2
    return f"{number(estimate.value, digits)} ± {number(half, digits)}"


def between(estimate: Estimate, digits: int = 2) -> str:
    ends = f"{number(estimate.low, digits)} to {number(estimate.high, digits)}"
    return f"{number(estimate.value, digits)} ({ends})"


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [[cell.replace("|", r"\|") for cell in row] for row in (header, *rows)]
    text = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([text[0], "|" + "---|" * len(lines[0]), *text[1:]])


def options_of(spec: str) -> dict[str, str]:
    """Of a spec `name:key=value,key=value`."""
    pairs = spec.partition(":")[2]
    return dict(pair.split("=") for pair in pairs.split(",")) if pairs else {}


def paired(part: Part, measure: str, spec: str, reference: str) -> Estimate:
    """Of `spec` less `reference` over the same sequences."""
    difference = part.of(measure, spec).astype(float) - part.of(measure, reference).astype(float)
    return mean_of(difference.to_numpy())


def compared(part: Part, one: tuple[str, str], other: tuple[str, str]) -> str:
    """What a sentence says about the loss of two (name, spec)."""
    difference = paired(part, "kl", one[1], other[1])
    found = f"KL {plus_minus(difference)}"
    if difference.sign == 0:
        return f"{one[0]} and {other[0]} are not told apart ({found})"
    return f"{one[0]} loses {'more' if difference.sign > 0 else 'less'} than {other[0]} ({found})"


COLUMNS: dict[str, Callable[[Part, str], str]] = {
    "tokens": lambda part, spec: number(part.of("tokens", spec).mean(), 1),
    "peak": lambda part, spec: number(part.of("peak", spec).mean(), 1),
    "exact": lambda part, spec: between(share_of(part.of("exact", spec))),
    "token accuracy": lambda part, spec: plus_minus(mean_of(part.of("token_accuracy", spec))),
    "KL": lambda part, spec: plus_minus(mean_of(part.of("kl", spec))),
}
DIFFERENCES = {
    "exact": "exact",
    "token accuracy": "token_accuracy",
    "KL": "kl",
    "missed mass": MISSED_MASS,
    "missed pull": CHOSEN,
}


def cell_table(part: Part, rows: Iterable[tuple[str, str]]) -> str:
    """Tokens, accuracy and loss of each (label, spec)."""
    body = [[label, *(show(part, spec) for show in COLUMNS.values())] for label, spec in rows]
    return markdown(["", *COLUMNS], body)


def difference_table(part: Part, rows: Iterable[tuple[str, str, str]]) -> str:
    """Of each (label, spec, reference): what spec has more than reference on the same boards."""
    body = [
        [
            label,
            number(part.of("tokens", spec).mean() - part.of("tokens", reference).mean(), 1),
            *(plus_minus(paired(part, key, spec, reference), 3) for key in DIFFERENCES.values()),
        ]
        for label, spec, reference in rows
    ]
    return markdown(["difference", "tokens", *DIFFERENCES], body)
