"""docs/results.md: its numbers are the program's, and no policy of the table is missing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
sys.path.insert(0, str(REPOSITORY / "python" / "studies"))

import result_policies  # noqa: E402
import results  # noqa: E402

OPENED = pd.read_csv(DOCS / "results.csv")
CLOSED = pd.read_csv(DOCS / "results-closed-loop.csv")
PAGE = (DOCS / "results.md").read_text(encoding="utf-8")


def hae(*arguments: str) -> str:
    program = os.environ.get("HAE_PROGRAM", REPOSITORY / "build" / "bin" / "hae")
    done = subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, cwd=REPOSITORY, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_policy_of_the_table_is_on_the_page():
    names = [line.split("  ")[0] for line in hae("policies").split("\n\n")[0].splitlines()]
    assert len(names) > 20
    for name in names:
        assert f"`{name}`" in PAGE or f"`{name}:" in PAGE, f"{name} is missing: run script/results"


def test_every_budget_compares_all_policies_that_have_one():
    """All but the stored log, which takes part by its path, and what recordings do not carry."""
    names = {line.split("  ")[0] for line in hae("policies").split("\n\n")[0].splitlines()}
    for budget in result_policies.BUDGETS:
        compared = {spec.split(":")[0] for spec in result_policies.specs(budget)}
        assert compared == names - {"log", "expected-attention"}


@pytest.mark.parametrize("policy", ["tova", "lookm:recent=8,merge=mean", "fastv:layer=1,keep=37"])
def test_the_committed_figures_are_those_of_a_fresh_comparison(policy, tmp_path):
    budget, path = 95, tmp_path / "result.json"
    first = ["--policy", result_policies.first(budget), "--policy", policy]
    options = ["--match", "mean", "--no-optimal", "--allow-unequal", "--json", str(path)]
    hae("compare", "traces/data/boards-test.h5", *first, *options)
    of_first, fresh = json.loads(path.read_text())["summary"]
    own = OPENED[(OPENED.budget == budget) & (OPENED.policy == policy)].iloc[0]
    ratio = fresh["bytes.mean"]["mean"] / of_first["bytes.mean"]["mean"]
    assert own.bytes_ratio == pytest.approx(ratio, rel=1e-5)  # six digits are stored
    assert own.unequal == fresh["unequal"]
    for figure in ("tokens.mean", "decode.missed_pull.mean", "decode.output_error_relative.mean"):
        if fresh[figure] is None:
            assert pd.isna(own[figure])
        else:
            low, high = fresh[figure]["interval95"]
            assert own[figure] == pytest.approx(fresh[figure]["mean"], rel=1e-5)
            assert own[f"{figure}.low"] == pytest.approx(low, rel=1e-5)
            assert own[f"{figure}.high"] == pytest.approx(high, rel=1e-5)


def test_the_page_is_made_of_the_committed_data():
    assert results.page(OPENED, CLOSED) == PAGE


def test_the_closed_loop_ran_every_policy_that_can_run_there():
    for budget in result_policies.BUDGETS:
        ran = set(CLOSED[CLOSED.budget == budget].policy)
        wanted = OPENED[OPENED.budget == budget].policy
        # A merge and the similarity of embeddings are for recordings alone.
        recorded_only = wanted.str.contains("merge=|^tome/|raters=embedding")
        assert ran == set(wanted[~recorded_only])


def test_an_interval_and_an_absent_figure_are_shown_as_such():
    line = pd.Series({"kl": 0.5, "kl.low": 0.25, "kl.high": 0.75, "exact": float("nan")})
    assert results.shown(line, "kl", 2) == "0.50 ± 0.25"
    assert results.shown(line, "exact", 2) == "-"
