"""Writes docs/closed-loop.md, its data and its plots from what measure.py left behind.

    python python/studies/report.py MEASURED [--out docs]

The text is closed-loop.md beside this file; every number in it is computed here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).parent))

import plots  # noqa: E402
from figure_fields import OUTPUT_ERROR, PARTS, Reliability, figure_fields  # noqa: E402
from figures import FIGURES  # noqa: E402
from measured import Part, StudyError  # noqa: E402
from policy_fields import accuracy_fields, memory_fields, option_fields  # noqa: E402
from tables import CHOSEN, MISSED_MASS  # noqa: E402

TEMPLATE = Path(__file__).with_name("closed-loop.md")
PLOTTED = {
    "missed mass": MISSED_MASS,
    "missed pull": CHOSEN,
    "relative output error": OUTPUT_ERROR,
}


def size_fields(parts: dict[str, Part]) -> dict[str, str]:
    cells = {"boards": "board_cells", "choosing": "choosing_cells", "text": "text_cells"}
    return {name: str(len(part.sequences)) for name, part in parts.items()} | {
        cells[name]: str(len(part.policies)) for name, part in parts.items()
    }


def judged(parts: dict[str, Part]) -> dict[str, Part]:
    """For figures: the test boards without the settings that the choosing part has too."""
    return parts | {"boards": parts["boards"].without(parts["choosing"].policies)}


def document(parts: dict[str, Part], found: Reliability) -> str:
    boards = parts["boards"]
    fields = (
        size_fields(parts)
        | accuracy_fields(boards)
        | memory_fields(boards)
        | option_fields(boards)
        | {"judged_cells": str(len(judged(parts)["boards"].policies))}
        | figure_fields(judged(parts), found)
    )
    return TEMPLATE.read_text(encoding="utf-8").format_map(fields)


def cell_means(parts: dict[str, Part]) -> pd.DataFrame:
    """One line a (part, policy): means over sequences of all measures and figures."""
    answers = ["token_accuracy", "same", "exact"]
    frames = []
    for name, part in parts.items():
        measures = ["tokens", "peak", "kl", "agreement", "nll_increase"]
        measures += answers if name == "boards" else []
        means = {key: part.table(key).astype(float).mean() for key in (*measures, *FIGURES)}
        frame = pd.DataFrame(means).rename_axis("policy").reset_index()
        frame.insert(0, "part", name)
        frames.append(frame)
    return pd.concat(frames)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measured", type=Path, help="the folder that measure.py wrote to")
    parser.add_argument("--out", type=Path, default=Path("docs"))
    options = parser.parse_args()
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    try:
        parts = {name: Part(options.measured / name) for name in PARTS}
        found = Reliability(judged(parts))
        (out / "closed-loop.md").write_text(document(parts, found), encoding="utf-8")
    except StudyError as error:
        sys.exit(str(error))
    cell_means(parts).to_csv(out / "closed-loop-cells.csv", index=False, float_format="%.5g")
    found.frame().to_csv(out / "closed-loop-figures.csv", index=False, float_format="%.4g")
    plots.accuracy(parts["boards"], out / "closed-loop-accuracy.svg")
    plots.figures(parts["boards"], PLOTTED, out / "closed-loop-figures.svg")


if __name__ == "__main__":
    main()
