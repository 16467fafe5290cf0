"""What docs/closed-loop.md says about policies and their settings, by the names in its template."""

from __future__ import annotations

from collections.abc import Iterable

import cells
from cells import BUDGETS, EQUAL_MEMORY, FAMILIES, with_budget
from intervals import share_of
from measured import Part
from tables import (
    COLUMNS,
    between,
    cell_table,
    compared,
    difference_table,
    markdown,
    number,
    options_of,
    paired,
    percent,
)

import hae

TASKS = ("story", "rows", "list")
MEMORIES = ("equal budget", "equal mean", "equal peak")
MOST, MIDDLE, LEAST = BUDGETS

DDES = with_budget(FAMILIES["DDES, mean"], LEAST)
DAP = "hae:r=0.007,alpha=1,ddes=none"
BOTH = "hae:r=0.0066,alpha=1,bin=16,budget=65,score=mean"


def _without(spec: str, option: str) -> str:
    return spec.replace(f"{option},", "")


def _labelled(specs: Iterable[str]) -> list[tuple[str, str]]:
    return [(f"`{hae.policy(spec).spec}`", spec) for spec in specs]


# --------------------------------------------------------------------- accuracy and kept tokens


def _family_table(part: Part, column: str) -> str:
    """Policies against budgets."""
    rows = [
        [name, *(COLUMNS[column](part, with_budget(spec, budget)) for budget in BUDGETS)]
        for name, spec in FAMILIES.items()
    ]
    return markdown([column, *(f"l = {budget}" for budget in BUDGETS)], rows)


def _task_table(part: Part) -> str:
    def row(name: str, spec: str) -> list[str]:
        exact = [part.only(task).of("exact", with_budget(spec, MIDDLE)) for task in TASKS]
        return [name, *(between(share_of(one)) for one in exact)]

    full = part.full.groupby("task").exact
    counts = full.size()
    return markdown(
        [f"exact, l = {MIDDLE}", *(f"{task} ({counts[task]} boards)" for task in TASKS)],
        [row(name, spec) for name, spec in FAMILIES.items()]
        + [["full cache", *(between(share_of(full.get_group(task))) for task in TASKS)]],
    )


def _losses(part: Part, budget: int) -> dict[str, float]:
    """Families and their KL at one budget, least first."""
    loss = {
        name: float(part.of("kl", with_budget(spec, budget)).mean())
        for name, spec in FAMILIES.items()
    }
    return dict(sorted(loss.items(), key=lambda one: one[1]))


def _loss_order(part: Part, budget: int) -> str:
    found = (f"{name} {number(loss)}" for name, loss in _losses(part, budget).items())
    return f"- l = {budget}: {' · '.join(found)}"


def _short_accuracy(part: Part) -> str:
    """Of the best family at the smallest budget, the worst at the largest, and the controls."""
    shown = [next(iter(_losses(part, LEAST))), list(_losses(part, MOST))[-1], "H2O", "random"]
    exact = {
        (name, budget): part.of("exact", with_budget(FAMILIES[name], budget)).mean()
        for name in shown
        for budget in (MOST, LEAST)
    }
    return ", ".join(
        f"*{name}* {percent(exact[name, MOST])} and {percent(exact[name, LEAST])}"
        for name in dict.fromkeys(shown)
    )


def accuracy_fields(part: Part) -> dict[str, str]:
    full = share_of(part.full.exact.astype(bool))
    return {
        "most": str(MOST),
        "middle": str(MIDDLE),
        "least": str(LEAST),
        "full_exact": between(full),
        "full_percent": percent(full.value),
        "short_accuracy": _short_accuracy(part),
        "exact_table": _family_table(part, "exact"),
        "token_table": _family_table(part, "token accuracy"),
        "loss_table": _family_table(part, "KL"),
        "task_table": _task_table(part),
        "loss_order": "\n".join(_loss_order(part, budget) for budget in BUDGETS),
    }


# -------------------------------------------------------------------------- the bin and greedy


def _memory_table(part: Part, specs: dict[str, str]) -> str:
    """DDES and its rivals, then the differences."""
    values = [(f"{name} `{hae.policy(spec).spec}`", spec) for name, spec in specs.items()]
    differences = [(f"DDES − {name}", specs["DDES"], specs[name]) for name in MEMORIES]
    return f"{cell_table(part, values)}\n\n{difference_table(part, differences)}"


def _memory_sentence(part: Part, score: str, budget: int) -> str:
    specs = EQUAL_MEMORY[score, budget]
    found = [
        compared(part, ("DDES", specs["DDES"]), (f"greedy of {name}", specs[name]))
        for name in MEMORIES
    ]
    return f"- score={score}, l = {budget}: {'; '.join(found)}."


def _bin_counts(part: Part, score: str) -> str:
    def count(memory: str) -> str:
        signs = [
            paired(part, "kl", specs["DDES"], specs[memory]).sign
            for (kind, _), specs in EQUAL_MEMORY.items()
            if kind == score
        ]
        return f"{signs.count(-1)} (more in {signs.count(1)}) at {memory}"

    return f"with score={score} DDES loses less than greedy in " + ", ".join(
        count(memory) for memory in MEMORIES
    )


def memory_fields(part: Part) -> dict[str, str]:
    return {
        "memory_count": str(len({budget for _, budget in EQUAL_MEMORY})),
        "short_bin": "; ".join(_bin_counts(part, score) for score in ("sum", "mean")),
        "memory_sentences": "\n".join(_memory_sentence(part, *key) for key in EQUAL_MEMORY),
        "memory_tables": "\n\n".join(_memory_table(part, specs) for specs in EQUAL_MEMORY.values()),
    }


# ------------------------------------------------------------------------- parts and options


def _score_pair(kind: str, budget: int) -> tuple[str, str]:
    return (
        with_budget(FAMILIES[f"{kind}, mean"], budget),
        with_budget(FAMILIES[f"{kind}, sum"], budget),
    )


def _short_scores(part: Part) -> str:
    def sentence(kind: str) -> str:
        mean, total = _score_pair(kind, MIDDLE)
        return compared(part, (f"{kind} with score=mean", mean), ("with score=sum", total))

    return ", ".join(sentence(kind) for kind in ("greedy", "DDES"))


def _layer_rows() -> list[tuple[str, str, str]]:
    kinds = (
        ("broadcast=none", "none − all", cells.DAP_PER_LAYER),
        ("effect=after", "after − within", cells.DAP_AFTER),
    )
    return [
        (f"r = {options_of(spec)['r']}: {label}", spec, _without(spec, option))
        for option, label, specs in kinds
        for spec in specs
    ]


def option_fields(part: Part) -> dict[str, str]:
    per_layer = cells.DAP_PER_LAYER[0]
    scores = [
        (f"{kind}, l = {budget}: mean − sum", *_score_pair(kind, budget))
        for kind in ("greedy", "DDES")
        for budget in BUDGETS
    ]
    return {
        "short_scores": _short_scores(part),
        "per_layer_r": options_of(per_layer)["r"],
        "short_broadcast": compared(
            part,
            ("pruning each layer by its own attention", per_layer),
            ("index broadcast", _without(per_layer, "broadcast=none")),
        ),
        "both_or_ddes": compared(part, ("DAP with DDES", BOTH), ("DDES alone", DDES)),
        "ddes_or_dap": compared(part, ("DDES alone", DDES), ("DAP alone", DAP)),
        "dap_table": cell_table(
            part, _labelled((*cells.DAP_ALONE, *cells.DAP_ALPHA, *cells.DAP_MASS))
        ),
        "both_table": cell_table(part, _labelled((DAP, DDES, *cells.BOTH))),
        "bin_table": cell_table(part, _labelled((DDES, *cells.BINS))),
        "layer_table": difference_table(part, _layer_rows()),
        "score_table": difference_table(part, scores),
    }
