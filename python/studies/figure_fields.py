"""What docs/closed-loop.md says about figures of the open loop, by the names in its template."""

from __future__ import annotations

from collections.abc import Iterable

import cells
import pandas as pd
import reliability
from figures import FIGURES
from measured import Part
from policy_fields import TASKS
from reliability import Scores
from tables import CHOSEN, MISSED_MASS, between, markdown, number, options_of, percent, plus_minus

import hae

OUTPUT_ERROR = "relative output error, mean"
NEEDS_MODEL = "projected output error / residual, max over rows"  # W_o and the residual stream
WITHOUT_VALUES = "lost squared probability, mean"

# What the tables show beside the best; closed-loop-figures.csv has all.
SHOWN = (
    CHOSEN,
    MISSED_MASS,
    "missed mass, p95",
    "missed mass, late rows",
    "KL of attention, mean",
    "output error, mean",
    OUTPUT_ERROR,
    "projected output error / residual, mean",
    NEEDS_MODEL,
    WITHOUT_VALUES,
    "lost squared a |v - o| / squared a |v - o|, of all rows",
    "probability of a lost largest key, mean",
    "share of rows that lost their largest key",
    "attention to tokens missing in all layers",
    "tokens evicted, share",
)
COMPARED = (CHOSEN, WITHOUT_VALUES, MISSED_MASS, OUTPUT_ERROR, NEEDS_MODEL)
PARTS = ("boards", "choosing", "text")


def budget_groups(specs: Iterable[str]) -> dict[int, list[str]]:
    """Budget -> canonical specs of the policies that have that budget, without DAP."""
    groups: dict[int, list[str]] = {}
    for spec in specs:
        options = options_of(spec)
        if "budget" in options and "r" not in options:
            groups.setdefault(int(options["budget"]), []).append(hae.policy(spec).spec)
    return groups


GROUPS = {
    "boards": budget_groups(cells.FAMILY_CELLS),
    "choosing": budget_groups(cells.CHOOSING_CELLS),
    "text": budget_groups(cells.TEXT_CELLS),
}


class Reliability:
    """Every candidate on every part."""

    def __init__(self, parts: dict[str, Part]) -> None:
        self.scores: dict[str, dict[str, Scores]] = {
            name: reliability.scores(parts[name], list(FIGURES), GROUPS[name]) for name in PARTS
        }

    def ranking(self, part: str) -> list[str]:
        """Figures by all cells and same budget together, best first."""
        scores = self.scores[part]

        def worth(figure: str) -> float:
            return scores[figure].overall.value + scores[figure].same_budget.value

        return sorted(scores, key=worth, reverse=True)

    def place(self, figure: str, part: str) -> str:
        return str(self.ranking(part).index(figure) + 1)

    def frame(self) -> pd.DataFrame:
        """One line a figure, every score by its dotted name."""
        lines = []
        for figure in self.ranking("choosing"):
            line: dict[str, object] = {"figure": figure}
            for part in PARTS:
                for key, value in vars(self.scores[part][figure]).items():
                    ends = vars(value) if hasattr(value, "low") else {"": value}
                    line |= {f"{part}.{key}.{end}".rstrip("."): one for end, one in ends.items()}
            lines.append(line)
        return pd.DataFrame(lines)


def _label(figure: str) -> str:
    return f"**missed_pull**: {figure}" if figure == CHOSEN else figure


def _reliability_table(found: Reliability, part: str) -> str:
    """The figures worth showing, the best of the choosing part first."""
    ranking = found.ranking("choosing")
    rows = []
    for figure in ranking:
        if figure in SHOWN or figure in ranking[:3]:
            score = found.scores[part][figure]
            rows.append(
                [
                    _label(figure),
                    between(score.overall),
                    between(score.same_budget),
                    number(score.least),
                    number(score.pairs),
                    plus_minus(score.per_sequence),
                ]
            )
    header = ["figure", "all cells", "same budget", "one policy out", "pairs", "within a sequence"]
    return markdown(header, rows)


def _pair_table(found: Reliability) -> str:
    rows = [
        [_label(figure), *(percent(found.scores[part][figure].pairs) for part in PARTS)]
        for figure in COMPARED
    ]
    counts = {part: found.scores[part][CHOSEN].pairs_count for part in PARTS}
    names = ("test boards", "choosing boards", "text")
    header = [f"{name}, {counts[part]} pairs" for name, part in zip(names, PARTS, strict=True)]
    return markdown(["figure", *header], rows)


def _advantage_table(parts: dict[str, Part]) -> str:
    rows = []
    for other in COMPARED[1:]:
        row = [other]
        for part in ("boards", "text"):
            row += map(between, reliability.advantage(parts[part], CHOSEN, other, GROUPS[part]))
        rows.append(row)
    header = [
        f"{name}, {kind}" for name in ("boards", "text") for kind in ("all cells", "same budget")
    ]
    return markdown(["missed_pull less", *header], rows)


def _task_table(part: Part) -> str:
    rows = {figure: [_label(figure)] for figure in COMPARED}
    for task in TASKS:
        of_task = reliability.plain(part.only(task), list(COMPARED), GROUPS["boards"])
        for figure, (overall, same) in of_task.items():
            rows[figure].append(f"{number(overall)} / {number(same)}")
    return markdown(["figure", *TASKS], rows.values())


def figure_fields(parts: dict[str, Part], found: Reliability) -> dict[str, str]:
    def short(label: str, figure: str) -> str:
        values = [found.scores[part][figure] for part in ("boards", "text")]
        boards, text = (
            f"{number(one.overall.value)} / {number(one.same_budget.value)}" for one in values
        )
        return f"{label} {boards} on boards and {text} on text"

    labels = {
        "`missed_pull`": CHOSEN,
        "missed mass": MISSED_MASS,
        "relative output error": OUTPUT_ERROR,
        "Σ_E a² (needs no V)": WITHOUT_VALUES,
    }
    return {
        "candidates": str(len(FIGURES)),
        "short_figures": "; ".join(short(*one) for one in labels.items()),
        "chosen_place": found.place(CHOSEN, "choosing"),
        "held_place": found.place(CHOSEN, "boards"),
        "text_place": found.place(CHOSEN, "text"),
        "pair_table": _pair_table(found),
        "advantage_table": _advantage_table(parts),
        "figure_task_table": _task_table(parts["boards"]),
        **{f"{part}_reliability": _reliability_table(found, part) for part in PARTS},
    }
