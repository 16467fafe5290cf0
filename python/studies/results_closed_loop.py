"""What the policies of docs/results.md do to the running model's answers about the boards that were
recorded: writes docs/results-closed-loop.csv.

    python python/studies/results_closed_loop.py [--boards 16] [--work build/results] [--out docs]

One `hae closed-loop` a budget, two at a time. Shares have Wilson's interval, means Student's, over
boards, 95 %.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).parent))

from intervals import Estimate, mean_of, share_of  # noqa: E402
from result_policies import BUDGETS, closed_loop_specs  # noqa: E402

MODELS = Path(__file__).parents[1] / "models"
MOST_NEW_TOKENS = 80  # as the recordings were made
PROCESSES = 2


def write_prompts(folder: Path, count: int) -> Path:
    """The boards of traces/data/boards-test.h5, with their right answers."""
    make = [sys.executable, MODELS / "make_prompts.py", "--split", "test", "--boards", count]
    subprocess.run([*map(str, make), "--out", str(folder)], check=True)
    lines = [
        json.loads(prompt) | json.loads(answer)
        for prompt, answer in zip(
            (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines(),
            (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines(),
            strict=True,
        )
    ]
    path = folder / "answered.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def measure(budget: int, prompts: Path, work: Path) -> dict:
    """The result of `hae closed-loop`, schema hae.closed-loop/1."""
    path = work / f"closed-loop-{budget}.json"
    command = [sys.executable, "-m", "hae.closed_loop", str(MODELS / "board-reader")]
    for spec in closed_loop_specs(budget):
        command += ["--policy", spec]
    command += ["--prompts", str(prompts), "--max-new-tokens", str(MOST_NEW_TOKENS)]
    command += ["--match", "mean", "--json", str(path)]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=alone)
    return json.loads(path.read_text(encoding="utf-8"))


def lines(budget: int, result: dict) -> list[dict[str, object]]:
    """One line a policy, and one of the full cache."""

    def line(policy: str, found: dict[str, Estimate]) -> dict[str, object]:
        ends = {
            f"{name}.{end}".removesuffix(".value"): value
            for name, estimate in found.items()
            for end, value in asdict(estimate).items()
        }
        boards = len(result["sequences"])
        return {"budget": budget, "policy": policy, "boards": boards} | ends

    full = share_of([one["exact"] for one in result["sequences"]])
    written = []
    for summary in result["summary"]:
        runs = [run for run in result["runs"] if run["policy"] == summary["policy"]]
        closed = pd.DataFrame([run["closed"] for run in runs])
        found = {
            "tokens": mean_of([run["closed_run"]["tokens"]["mean"] for run in runs]),
            "exact": share_of(closed.exact),
            "token_accuracy": mean_of(closed.token_accuracy),
            "kl": mean_of(closed.kl),
        }
        written.append(line(summary["policy"], found))
    return [*written, line("full", {"exact": full})]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--boards", type=int, default=16)
    parser.add_argument("--work", type=Path, default=Path("build/results"))
    parser.add_argument("--out", type=Path, default=Path("docs"))
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    prompts = write_prompts(options.work / "prompts", options.boards)
    with ThreadPoolExecutor(PROCESSES) as processes:
        results = processes.map(lambda budget: measure(budget, prompts, options.work), BUDGETS)
        written = [
            line
            for budget, result in zip(BUDGETS, results, strict=True)
            for line in lines(budget, result)
        ]
    frame = pd.DataFrame(written)
    frame.to_csv(options.out / "results-closed-loop.csv", index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
