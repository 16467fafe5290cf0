"""Compares every policy on the committed recordings: writes docs/results.csv and docs/results.md.

    python python/studies/results.py [--program build/bin/hae] [--out docs]

One `hae compare` a budget. The page is made of results.csv, of results-closed-loop.csv, which
results_closed_loop.py measures, and of the text in results.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd
from scipy import stats

sys.path.insert(0, str(Path(__file__).parent))

from intervals import Estimate  # noqa: E402
from result_policies import BUDGETS, first, specs  # noqa: E402
from tables import between, markdown, number, percent, plus_minus  # noqa: E402

TEMPLATE = Path(__file__).with_name("results.md")
TRACES = ("traces/data/boards-test.h5",)

# Figures of `summary` in a result file, by their columns on the page.
FIGURES = {
    "missed mass": "decode.missed_mass.mean",
    "missed pull": "decode.missed_pull.mean",
    "rel. output error": "decode.output_error_relative.mean",
}
MEASURED = ("tokens.mean", "tokens.peak", *FIGURES.values())
ABSENT = "-"


def compare(program: Path, budget: int) -> dict:
    """The result of `hae compare`, schema hae.compare/1."""
    command = [str(program), "compare", *TRACES, "--match", "mean", "--no-optimal"]
    for spec in specs(budget):
        command += ["--policy", spec]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command += ["--allow-unequal", "--json", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(path.read_text(encoding="utf-8"))


def lines(budget: int, result: dict) -> list[dict[str, object]]:
    """One line a policy. bytes_ratio: mean bytes over the first policy's."""
    of_first = result["summary"][0]["bytes.mean"]["mean"]
    written = []
    for summary in result["summary"]:
        line: dict[str, object] = {
            "budget": budget,
            "policy": summary["policy"],
            "sequences": summary["sequences"],
            "kib": summary["bytes.mean"]["mean"] / 1024,
            "bytes_ratio": summary["bytes.mean"]["mean"] / of_first,
            "unequal": summary["unequal"],
        }
        for name in MEASURED:
            found = summary[name] or {"mean": None, "interval95": (None, None)}
            low, high = found["interval95"]
            line |= {name: found["mean"], f"{name}.low": low, f"{name}.high": high}
        written.append(line)
    return written


# --------------------------------------------------------------------------------- the page


def estimate(line: pd.Series, name: str) -> Estimate:
    return Estimate(line[name], line[f"{name}.low"], line[f"{name}.high"])


def shown(line: pd.Series, name: str, digits: int) -> str:
    return ABSENT if pd.isna(line[name]) else plus_minus(estimate(line, name), digits)


def row(line: pd.Series) -> list[str]:
    """A policy in a budget's table."""
    unequal = " unequal" if line.unequal else ""
    return [
        f"`{line.policy}`",
        shown(line, "tokens.mean", 1),
        number(line.kib, 1),
        f"{number(line.bytes_ratio)}{unequal}",
        *(shown(line, name, 3) for name in FIGURES.values()),
        ABSENT if pd.isna(line.exact) else between(estimate(line, "exact")),
        shown(line, "token_accuracy", 2),
        shown(line, "kl", 2),
    ]


HEADER = [
    "policy",
    "tokens",
    "KiB",
    "bytes / first's",
    *FIGURES,
    "right answers",
    "token accuracy",
    "KL",
]


def table(joined: pd.DataFrame, budget: int) -> str:
    """Least missed pull first; then those that have none, for they merge; then the full cache."""
    own = joined[joined.budget == budget]
    full = own.policy == "full"
    ordered = pd.concat([own[~full].sort_values(FIGURES["missed pull"], kind="stable"), own[full]])
    return markdown(HEADER, (row(line) for _, line in ordered.iterrows()))


def agreement(joined: pd.DataFrame, budget: int) -> str:
    """How well the open loop ranks the policies of equal memory by what they do to the model."""
    own = joined[(joined.budget == budget) & (joined.policy != "full") & ~joined.unequal]
    own = own.dropna(subset="kl")
    found = (
        f"{column} {number(stats.spearmanr(own[name], own.kl).statistic)}"
        for column, name in FIGURES.items()
    )
    return f"- {budget}: {' · '.join(found)} ({len(own)} policies)"


def page(opened: pd.DataFrame, closed: pd.DataFrame) -> str:
    """Of the lines of results.csv and of results-closed-loop.csv."""
    joined = opened.merge(
        closed.drop(columns=["tokens", "tokens.low", "tokens.high"]),
        how="left",
        on=["budget", "policy"],
        validate="one_to_one",
    )
    full = opened[opened.policy == "full"].iloc[0]["tokens.mean"]
    fields = {
        "sequences": str(opened.sequences.iloc[0]),
        "boards": str(closed.boards.iloc[0]),
        "budgets": ", ".join(map(str, BUDGETS)),
        "full_tokens": number(full, 0),
        "shares": ", ".join(percent((budget + 1) / full) for budget in BUDGETS),
        "agreement": "\n".join(agreement(joined, budget) for budget in BUDGETS),
        "tables": "\n\n".join(
            f"## {budget + 1} tokens\n\nThe first is `{first(budget)}`.\n\n{table(joined, budget)}"
            for budget in BUDGETS
        ),
    }
    return TEMPLATE.read_text(encoding="utf-8").format_map(fields)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", type=Path, default=Path("build/bin/hae"))
    parser.add_argument("--out", type=Path, default=Path("docs"))
    options = parser.parse_args()
    opened = options.out / "results.csv"
    measured = [
        line for budget in BUDGETS for line in lines(budget, compare(options.program, budget))
    ]
    pd.DataFrame(measured).to_csv(opened, index=False, float_format="%.6g")
    closed = pd.read_csv(options.out / "results-closed-loop.csv")
    # From the file, so that the page and its data round alike.
    text = page(pd.read_csv(opened), closed)
    (options.out / "results.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
