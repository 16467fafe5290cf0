"""The closed-loop study: its statistics, what measures its cells, and the page that it writes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import hae

STUDIES = Path(__file__).resolve().parents[1] / "studies"
sys.path.insert(0, str(STUDIES))

import cells  # noqa: E402
import reliability  # noqa: E402
import report  # noqa: E402
from figure_fields import GROUPS  # noqa: E402
from figures import FIGURES, Lost, Recorded  # noqa: E402
from intervals import mean_of, share_of  # noqa: E402
from measured import Part, StudyError  # noqa: E402
from tables import CHOSEN, MISSED_MASS, markdown  # noqa: E402

SPECS = {
    "boards": cells.BOARD_CELLS,
    "choosing": cells.CHOOSING_CELLS,
    "text": cells.TEXT_CELLS,
}
TASKS = ("story", "rows", "list")


def run(program: str, *arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(STUDIES / program), *map(str, arguments)],
        capture_output=True,
        text=True,
    )


def write(folder: Path, lines: list[dict]) -> None:
    """One file a sequence, as measure.py leaves them."""
    folder.mkdir(parents=True, exist_ok=True)
    for sequence in {line["sequence"] for line in lines}:
        own = [json.dumps(line) + "\n" for line in lines if line["sequence"] == sequence]
        (folder / f"{sequence}.jsonl").write_text("".join(own))


def line(sequence: int, policy: str, kl: float, exact: bool, figures: dict[str, float]) -> dict:
    return {
        "sequence": f"board-{sequence}",
        "group": f"board-{sequence}",
        "task": TASKS[sequence % 3],
        "kl": kl,
        "agreement": 0.5,
        "nll_increase": kl,
        "token_accuracy": 0.75,
        "same": exact,
        "exact": exact,
        "policy": policy,
        "tokens": 100.5,
        "peak": 108,
        "closed_missed_mass": 0.1,
        "figures": figures,
    }


def full(sequence: int) -> dict:
    return {
        "sequence": f"board-{sequence}",
        "group": f"board-{sequence}",
        "task": TASKS[sequence % 3],
        "policy": "full",
        "exact": True,
    }


# ---------------------------------------------------------------------------------- statistics


def test_a_mean_has_students_interval():
    # Standard deviation 1, t(0.975, 2) = 4.302653: half 4.302653 / sqrt(3) = 2.484138.
    found = mean_of(np.array([1.0, 2.0, 3.0]))
    assert (found.value, found.low, found.high) == pytest.approx((2, 2 - 2.484138, 2 + 2.484138))
    assert found.sign == 0
    assert mean_of(np.array([1.0, 1.1, 1.2])).sign == 1
    assert mean_of(np.array([-1.0, -1.1, -1.2])).sign == -1


def test_a_share_has_wilsons_interval():
    # None of 10: from 0 to z^2 / (n + z^2), z = 1.959964.
    found = share_of(np.zeros(10, bool))
    assert (found.value, found.low) == (0, 0)
    assert found.high == pytest.approx(3.841459 / 13.841459)


def test_spearman_is_the_correlation_of_ranks():
    # Columns: the loss itself, its reverse, two neighbours swapped (1 - 6 * 2 / 60), a constant.
    loss = np.array([0.1, 0.2, 0.3, 4.0])
    swapped = np.array([1, 3, 2, 4])
    columns = np.stack([loss, -loss, swapped, np.ones(4), loss], axis=1)
    assert reliability.spearman(columns) == pytest.approx([1, -1, 0.8, 0])


def test_a_figure_that_only_knows_the_budget_is_worthless_within_a_budget():
    # Ranks 2 1 4 3 against 1 2 3 4: 1 - 6 * 4 / 60.
    columns = np.array([[2, 1], [1, 2], [12, 11], [11, 12]], float)
    groups = [np.array([0, 1]), np.array([2, 3])]
    assert reliability.spearman(columns) == pytest.approx([0.6])
    assert reliability.spearman_within(columns, groups) == pytest.approx([-1])


def test_pairs_count_only_where_the_loss_differs_beyond_its_interval(tmp_path):
    one, other, third = "greedy:budget=5", "h2o/layerwise:budget=5", "window:sinks=4,budget=5"
    # other is 1 worse than one in every sequence. third differs from one by 1, -1, 1, -1 and from
    # other by 0, -2, 0, -2 (-1 +- 1.8): neither is clear.
    lines = []
    for i, base in enumerate((1.0, 2.0, 3.0, 4.0)):
        lines.append(full(i))
        lines.append(line(i, one, base, True, {"right": 0.1, "wrong": 0.2, "tied": 0.1}))
        lines.append(line(i, other, base + 1, True, {"right": 0.2, "wrong": 0.1, "tied": 0.1}))
        last = base + (-1) ** i
        lines.append(line(i, third, last, True, {"right": 0.0, "wrong": 0.0, "tied": 0.0}))
    write(tmp_path / "boards", lines)
    found = reliability.scores(
        Part(tmp_path / "boards"), ["right", "wrong", "tied"], {5: [one, other, third]}
    )
    assert {score.pairs_count for score in found.values()} == {1}
    assert [found[name].pairs for name in ("right", "wrong", "tied")] == [1.0, 0.0, 0.5]


def test_every_budget_has_the_same_policies_in_the_same_order():
    for part, groups in GROUPS.items():
        names = [
            [re.sub(r"[:,]budget=\d+", "", spec) for spec in group] for group in groups.values()
        ]
        assert len(names) >= 3, part
        assert all(one == names[0] for one in names), part
        assert len(set(names[0])) == len(names[0]), part


def test_a_bar_in_a_name_does_not_end_a_table_cell():
    assert markdown(["a |v|"], [["b"]]) == "| a \\|v\\| |\n|---|\n| b |"


# ------------------------------------------------------------------------------------ measuring


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("measured")
    arguments = ("--part", "boards", "--sequences", 2, "--cells", 3, "--out", out)
    for share in ("0/2", "1/2"):
        process = run("measure.py", *arguments, "--share", share)
        assert process.returncode == 0, process.stderr
    return out


def test_every_cell_is_measured_on_every_board(measured):
    part = Part(measured / "boards")
    assert len(part.sequences) == 2
    assert part.policies == [hae.policy(spec).spec for spec in cells.BOARD_CELLS[:3]]
    budget = cells.BUDGETS[0]
    for spec in cells.BOARD_CELLS[:3]:
        assert (part.of("kl", spec) >= 0).all()
        # At attention time greedy holds l + 1, and DDES up to l + 16.
        assert part.of("peak", spec).between(budget + 1, budget + 16).all()
        assert part.of(MISSED_MASS, spec).between(0, 1).all()


def test_what_is_there_is_not_measured_again(measured):
    paths = sorted((measured / "boards").glob("*.jsonl"))
    before = [path.stat().st_mtime_ns for path in paths]
    process = run(
        "measure.py", "--part", "boards", "--sequences", 2, "--cells", 3, "--out", measured
    )
    assert process.returncode == 0, process.stderr
    assert [path.stat().st_mtime_ns for path in paths] == before


def test_the_chosen_figure_is_the_programs_missed_pull():
    random = np.random.default_rng(1)
    q, k, v = (random.normal(size=(2, heads, 30, 8)).astype("f4") for heads in (4, 2, 2))
    sequence = hae.sequence(q=q, k=k, v=v, prompt=20)
    recorded = Recorded.of(sequence, np.zeros((2, 1, 4, 8)), np.ones((2, 10)))
    for spec in ("greedy:budget=12", "greedy:budget=5,lane=kv_head"):
        (run_of,) = hae.replay(sequence, spec)
        # The study forms |v - o|^2 from |v|^2, |o|^2 and v o, which cancel a few digits of 15.
        measured = run_of.decode["missed_pull"].mean()
        assert FIGURES[CHOSEN](Lost(recorded, run_of)) == pytest.approx(measured, rel=1e-10)


# ------------------------------------------------------------------------------------- the page


@pytest.fixture(scope="module")
def page(tmp_path_factory, measured) -> Path:
    """Of measurements in which missed_pull is the loss and missed mass its reverse."""
    folder = tmp_path_factory.mktemp("planted")
    for part, specs in SPECS.items():
        lines = []
        for sequence in range(6):
            lines.append(full(sequence))
            for rank, spec in enumerate(dict.fromkeys(hae.policy(spec).spec for spec in specs)):
                loss = 0.01 * (rank + 1) + 0.001 * sequence
                planted = dict.fromkeys(FIGURES, 0.5) | {CHOSEN: loss, MISSED_MASS: 1 - loss}
                lines.append(line(sequence, spec, loss, sequence < 3, planted))
        write(folder / part, lines)
    real = json.loads(next((measured / "boards").glob("*.jsonl")).read_text().splitlines()[1])
    assert real.keys() == lines[-1].keys()  # what is planted looks like what is measured
    assert real["figures"].keys() == lines[-1]["figures"].keys()
    process = run("report.py", folder, "--out", folder / "docs")
    assert process.returncode == 0, process.stderr
    return folder / "docs"


def row(text: str, start: str) -> list[str]:
    (found,) = re.findall(rf"^\| {re.escape(start)}.*$", text, flags=re.MULTILINE)
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", found.strip("|"))]


def test_the_page_finds_the_planted_figure(page):
    text = (page / "closed-loop.md").read_text()
    boards = text.split("### Test boards")[1].split("### ")[0]
    assert row(boards, "**missed_pull**")[1:5] == [
        "1.00 (1.00 to 1.00)",
        "1.00 (1.00 to 1.00)",
        "1.00",
        "1.00",
    ]
    assert row(boards, MISSED_MASS)[1:5] == [
        "−1.00 (−1.00 to −1.00)",
        "−1.00 (−1.00 to −1.00)",
        "−1.00",
        "0.00",
    ]
    assert "number 1 of" in " ".join(text.split())


def test_the_page_shows_accuracy_and_paired_differences(page):
    text = (page / "closed-loop.md").read_text()
    # Half of the six boards are answered rightly under every policy. Wilson: 0.1876 to 0.8124.
    exact = text.split("| exact |")[1].split("\n\n")[0]
    assert row(exact, "greedy, sum")[1:] == ["0.50 (0.19 to 0.81)"] * len(cells.BUDGETS)
    # The cells stand in the order of their planted losses: 0.01 a cell.
    place = [hae.policy(spec).spec for spec in cells.BOARD_CELLS]
    per_layer = cells.DAP_PER_LAYER[0]
    other = hae.policy(per_layer.replace("broadcast=none,", "")).spec
    difference = 0.01 * (place.index(hae.policy(per_layer).spec) - place.index(other))
    assert row(text, "r = 0.0066: none − all")[4] == f"{difference:.3f} ± 0.000"
    assert "pruning each layer by its own attention loses more than index broadcast" in text


def test_no_setting_that_the_choice_saw_is_judged(page):
    cell_means = pd.read_csv(page / "closed-loop-cells.csv")
    specs = {part: set(cell_means[cell_means.part == part].policy) for part in SPECS}
    seen = specs["boards"] & specs["choosing"]
    assert seen
    judged = report.judged({part: Part(page.parent / part) for part in SPECS})["boards"]
    assert set(judged.policies) == specs["boards"] - seen
    text = (page / "closed-loop.md").read_text()
    assert f"{len(judged.policies)} cells that the choice did not see" in " ".join(text.split())


def test_the_page_is_whole(page):
    text = (page / "closed-loop.md").read_text()
    assert "{" not in text and "nan" not in text
    for name in re.findall(r"\((closed-loop[-\w.]+)\)", text):
        assert (page / name).stat().st_size > 0


def test_the_same_measurements_give_the_same_files(page, tmp_path):
    process = run("report.py", page.parent, "--out", tmp_path)
    assert process.returncode == 0, process.stderr
    for path in page.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_cell_that_was_not_measured_is_named(page, tmp_path):
    for part in SPECS:
        for path in (page.parent / part).glob("*.jsonl"):
            kept = [one for one in path.read_text().splitlines() if '"greedy:budget=95"' not in one]
            (tmp_path / part).mkdir(exist_ok=True)
            (tmp_path / part / path.name).write_text("\n".join(kept))
    process = run("report.py", tmp_path, "--out", tmp_path / "docs")
    assert process.returncode == 1
    assert "boards: greedy:budget=95 was not measured" in process.stderr
    assert not list((tmp_path / "docs").glob("*"))
    (tmp_path / "none").mkdir()
    with pytest.raises(StudyError, match="no measurements; run measure.py --part none"):
        Part(tmp_path / "none")


def test_a_cell_that_lacks_a_sequence_is_named(tmp_path):
    lines = [full(0), full(1), line(0, "greedy:budget=5", 1.0, True, {})]
    write(tmp_path / "boards", lines)
    with pytest.raises(StudyError, match="greedy:budget=5 was measured on 1 of 2 sequences"):
        Part(tmp_path / "boards")
