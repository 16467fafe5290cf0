"""Draws the pictures of docs/concepts.md: python docs/pictures/draw.py [FOLDER], here by default.

Each has a light ground of its own, so it can be read on a dark page too. Schematic: the numbers are
made up, the rules are those of the policies.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.patches import FancyBboxPatch, Rectangle  # noqa: E402

GROUND, INK, FAINT = "#fbfbf8", "#263238", "#90a4ae"
VISUAL, TEXT, GENERATED, MARKED, GONE = "#4db6ac", "#7986cb", "#ffb74d", "#e57373", "#eceff1"
matplotlib.rcParams.update(
    {
        "figure.constrained_layout.h_pad": 0.12,
        "figure.constrained_layout.w_pad": 0.12,
        "svg.fonttype": "none",  # text stays text: it can be searched and read aloud
        "svg.hashsalt": "hae",  # the same bytes each time
        "font.family": "sans-serif",
        "font.size": 11,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": FAINT,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "figure.facecolor": GROUND,
        "axes.facecolor": GROUND,
    }
)


def board(width: float, height: float) -> Axes:
    """Axes for boxes: one unit a token, y downwards."""
    _, axes = plt.subplots(figsize=(8.4, 8.4 * height / width), layout="constrained")
    axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
    axes.axis("off")
    return axes


def token(axes: Axes, x: float, y: float, colour: str, label: str = "", gone: bool = False) -> None:
    edge = {"edgecolor": FAINT, "linestyle": ":"} if gone else {"edgecolor": INK}
    face = GONE if gone else colour
    axes.add_patch(Rectangle((x + 0.08, y + 0.08), 0.84, 0.84, facecolor=face, linewidth=1, **edge))
    axes.text(x + 0.5, y + 0.53, "" if gone else label, ha="center", va="center", fontsize=9)


def legend(axes: Axes, y: float, entries: list[tuple[str, str, float]]) -> None:
    for name, colour, x in entries:
        token(axes, x, y, colour, gone=colour == GONE)
        axes.text(x + 1.15, y + 0.53, name, va="center", fontsize=10)


def cache() -> None:
    axes = board(20, 7.4)
    kinds = [TEXT] * 2 + [VISUAL] * 8 + [TEXT] * 3 + [GENERATED] * 4
    evicted = [{3, 4, 6, 9}, {3, 4, 6, 9, 12}, {3, 4, 6, 9, 13}]
    for layer, gone in enumerate(evicted):
        axes.text(1.9, layer * 1.3 + 0.5, f"layer {layer}", ha="right", va="center")
        for position, colour in enumerate(kinds):
            token(axes, 2.3 + position, layer * 1.3, colour, "K V", gone=position in gone)
    axes.annotate(
        "", (19.3, 4.1), (2.3, 4.1), arrowprops={"arrowstyle": "->", "color": INK, "linewidth": 1}
    )
    axes.text(10.8, 4.7, "position in the sequence", ha="center", va="center")
    entries = [("picture", VISUAL, 2.3), ("prompt text", TEXT, 6.2), ("generated", GENERATED, 11)]
    legend(axes, 5.7, [*entries, ("evicted", GONE, 15.4)])


def stages() -> None:
    axes = board(22, 9.2)
    prompt = [TEXT] * 2 + [VISUAL] * 8 + [TEXT] * 3
    pruned, evicted = {3, 4, 6, 9}, {2, 8, 11}
    rows = [
        ("prompt", prompt, set()),
        ("after the prefill", prompt, pruned),
        ("step 1", [*prompt, GENERATED], pruned),
        ("step 5", [*prompt, *[GENERATED] * 5], pruned | evicted),
    ]
    for y, (name, kinds, gone) in zip((0, 2, 4.6, 5.9), rows, strict=True):
        axes.text(3.7, y + 0.5, name, ha="right", va="center")
        for position, colour in enumerate(kinds):
            token(axes, 4 + position, y, colour, gone=position in gone)
    told = {"arrowprops": {"arrowstyle": "->", "color": INK}, "fontsize": 10}
    axes.annotate("DAP prunes the picture", (9, 2), (9.4, 1.55), va="center", **told)
    axes.text(4, 3.9, "then one token a step; DDES evicts when its bin is full", fontsize=10)
    entries = [("picture", VISUAL, 4), ("prompt text", TEXT, 8), ("generated", GENERATED, 12.8)]
    legend(axes, 7.8, [*entries, ("evicted", GONE, 17.2)])


def recycle_bin() -> None:
    """Budget l = 4; the oldest unmarked token is always the lowest. Greedy beside a bin of 3."""
    axes = board(22, 10.4)
    for left, name, capacity in ((1.6, "greedy eviction", 1), (12.4, "recycle bin, D = 3", 3)):
        axes.text(left + 4.5, 0.5, name, ha="center", weight="bold")
        gone, marked = set(), set()
        for step in range(6):
            present = [p for p in range(4 + step) if p not in gone]
            if len(present) - len(marked) > 4:
                marked.add(min(set(present) - marked))
            if len(marked) == capacity:
                gone, marked = gone | marked, set()
            axes.text(left - 0.2, 1.1 + step * 1.2 + 0.5, f"{step}", ha="right", va="center")
            for position in range(4 + step):
                colour = MARKED if position in marked else TEXT
                token(axes, left + position, 1.1 + step * 1.2, colour, gone=position in gone)
    axes.text(0.5, 4.6, "step", rotation=90, ha="center", va="center")
    legend(
        axes,
        9,
        [("kept", TEXT, 2), ("in the bin: still attended to", MARKED, 6), ("evicted", GONE, 15.4)],
    )


def box(axes: Axes, x: float, y: float, width: float, text: str, colour: str) -> None:
    shape = FancyBboxPatch(
        (x, y), width, 1.2, boxstyle="round,pad=0.1", facecolor=colour, edgecolor=INK
    )
    axes.add_patch(shape)
    axes.text(x + width / 2, y + 0.62, text, ha="center", va="center", fontsize=10)


def loops() -> None:
    axes = board(22.4, 7.6)
    arrow = {"arrowstyle": "->", "color": INK, "linewidth": 1.2}
    axes.text(0.3, 0.8, "open loop", weight="bold")
    for x, text, colour in (
        (0.4, "model, full cache", TEXT),
        (6.3, "trace: Q, K, V", GONE),
        (12.2, "policy evicts", MARKED),
        (18, "figures", GENERATED),
    ):
        box(axes, x, 1.4, 4.1, text, colour)
    for x in (4.8, 10.7, 16.6):
        axes.annotate("", (x + 1.2, 2), (x, 2), arrowprops=arrow)
    axes.text(0.3, 4.3, "closed loop", weight="bold")
    for x, text, colour in (
        (0.4, "model", TEXT),
        (6.3, "policy evicts", MARKED),
        (12.2, "its own cache", VISUAL),
        (18, "the answer", GENERATED),
    ):
        box(axes, x, 4.9, 4.1, text, colour)
    for x in (4.8, 10.7, 16.6):
        axes.annotate("", (x + 1.2, 5.5), (x, 5.5), arrowprops=arrow)
    axes.annotate(
        "", (2.4, 6.3), (14.2, 6.3), arrowprops=arrow | {"connectionstyle": "arc3,rad=-0.12"}
    )
    axes.text(8.4, 7.35, "the next token sees what is left", ha="center", fontsize=10)


def missed_mass() -> None:
    _, (full, left) = plt.subplots(1, 2, figsize=(8.4, 2.9), sharey=True, layout="constrained")
    weights = [0.30, 0.05, 0.20, 0.05, 0.15, 0.25]
    evicted = {1, 2}
    missed = sum(weights[t] for t in evicted)
    colours = [MARKED if t in evicted else TEXT for t in range(6)]
    full.bar(range(6), weights, color=colours, edgecolor=INK)
    full.set_title(f"full cache: red is missed, m = {missed:.2f}", fontsize=11)
    kept = [0 if t in evicted else w / (1 - missed) for t, w in enumerate(weights)]
    left.bar(range(6), kept, color=TEXT, edgecolor=INK)
    left.set_title("after eviction: the rest, divided by 1 − m", fontsize=11)
    for axes in (full, left):
        axes.set(xlabel="token", xticks=range(6))
    full.set_ylabel("attention of one row")


def budgets() -> None:
    """Sizes of one lane: greedy holds its budget, a bin of D = 8 swings above it."""
    _, panels = plt.subplots(1, 2, figsize=(8.4, 2.9), sharey=True, layout="constrained")
    steps = range(40)
    swing = [20 + step % 8 for step in steps]
    mean, peak = sum(swing) / len(swing), max(swing)
    for axes, name, level in zip(panels, ("equal mean", "equal peak"), (mean, peak), strict=True):
        axes.step(steps, swing, color=MARKED, where="post", label="recycle bin, D = 8")
        axes.axhline(level, color=TEXT, linewidth=2, label="greedy")
        axes.set(title=name, xlabel="decode step", ylim=(0, 34))
        axes.title.set_fontsize(11)
    panels[0].set_ylabel("tokens held")
    panels[1].legend(frameon=False, loc="lower right", fontsize=10)


def regret() -> None:
    _, axes = plt.subplots(figsize=(8.4, 2.3), layout="constrained")
    optimal, measured, bound = 0.30, 0.37, 0.55
    axes.hlines(0, 0, 0.7, color=FAINT)
    marks = (
        (optimal, "optimal", VISUAL),
        (measured, "measured", MARKED),
        (bound, "ε, or a bound", TEXT),
    )
    for x, name, colour in marks:
        axes.plot([x], [0], "o", markersize=13, color=colour, markeredgecolor=INK)
        axes.text(x, 0.32, f"{name}", ha="center")
    axes.annotate(
        "", (measured, -0.3), (optimal, -0.3), arrowprops={"arrowstyle": "<->", "color": INK}
    )
    axes.text((optimal + measured) / 2, -0.62, "regret", ha="center")
    axes.annotate(
        "", (bound, -0.3), (measured, -0.3), arrowprops={"arrowstyle": "<->", "color": INK}
    )
    axes.text((measured + bound) / 2, -0.62, "slack", ha="center")
    axes.set(xlim=(0, 0.7), ylim=(-0.8, 0.7), yticks=[], xlabel="mean missed mass")
    axes.spines["left"].set_visible(False)


PICTURES = {
    "cache": cache,
    "stages": stages,
    "recycle-bin": recycle_bin,
    "loops": loops,
    "missed-mass": missed_mass,
    "budgets": budgets,
    "regret": regret,
}


def main(folder: Path) -> None:
    for name, draw in PICTURES.items():
        draw()
        plt.savefig(folder / f"{name}.svg", metadata={"Date": None})
        plt.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
