"""The plots of docs/closed-loop.md."""

from __future__ import annotations

from pathlib import Path

import cells
import matplotlib
from measured import Part

matplotlib.use("svg")
# The same text gives the same file.
matplotlib.rcParams.update(
    {"svg.hashsalt": "closed-loop", "svg.fonttype": "none", "font.size": 9, "axes.grid": True}
)
matplotlib.rcParams["grid.alpha"] = 0.3

from matplotlib import pyplot  # noqa: E402

MARKERS = "osD^vP*X"


def _families() -> list[tuple[str, str, str]]:
    """(name, spec, marker)."""
    return [
        (name, spec, marker)
        for (name, spec), marker in zip(cells.FAMILIES.items(), MARKERS, strict=True)
    ]


def _save(figure: pyplot.Figure, path: Path) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=8)
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)


def accuracy(part: Part, path: Path) -> None:
    """Exact answers and KL of each family against the tokens that it holds on average."""
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    for name, spec, marker in _families():
        specs = [cells.with_budget(spec, budget) for budget in cells.BUDGETS]
        tokens = [part.of("tokens", one).mean() for one in specs]
        for axis, measure in zip(axes, ("exact", "kl"), strict=True):
            values = [part.of(measure, one).astype(float).mean() for one in specs]
            axis.plot(tokens, values, marker=marker, label=name, linewidth=1)
    axes[0].axhline(part.full.exact.astype(float).mean(), color="black", linewidth=1, linestyle=":")
    axes[0].set(xlabel="tokens held, mean", ylabel="exact answers", ylim=(-0.03, 1.03))
    axes[1].set(xlabel="tokens held, mean", ylabel="KL, nats a token", yscale="log")
    _save(figure, path)


def figures(part: Part, shown: dict[str, str], path: Path) -> None:
    """KL against figures of the open loop, one point a cell. Families have markers.

    shown  label -> figure
    """
    loss = part.table("kl").mean()
    figure, axes = pyplot.subplots(
        1, len(shown), figsize=(10, 3.4), sharey=True, layout="constrained"
    )
    for axis, (label, name) in zip(axes, shown.items(), strict=True):
        axis.plot(part.table(name).mean(), loss, ".", color="lightgrey", markersize=5)
        for family, spec, marker in _families():
            specs = [cells.with_budget(spec, budget) for budget in cells.BUDGETS]
            axis.plot(
                [part.of(name, one).mean() for one in specs],
                [part.of("kl", one).mean() for one in specs],
                marker,
                label=family,
                markersize=5,
            )
        axis.set(xlabel=label, yscale="log")
    axes[0].set_ylabel("KL, nats a token")
    _save(figure, path)
