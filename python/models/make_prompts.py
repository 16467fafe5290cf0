"""Write prompts about boards of one split, with their pictures, for hae-record.

    python python/models/make_prompts.py --split test --boards 16 --out build/prompts/test

writes OUT/prompts.jsonl and one PNG per board. Board i is asked one long question; the three
take turns. The right answers go to OUT/answers.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))
import boards

RECORDING_SEED = 7


def main() -> None:
    parser = argparse.ArgumentParser(description="Write prompts about boards for hae-record.")
    parser.add_argument("--split", choices=boards.SPLIT_SIZES, required=True)
    parser.add_argument("--boards", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=RECORDING_SEED)
    options = parser.parse_args()

    options.out.mkdir(parents=True, exist_ok=True)
    prompts, answers = [], []
    for index, board in enumerate(boards.boards(options.split, options.boards, options.seed)):
        task = boards.LONG_TASKS[index % len(boards.LONG_TASKS)]
        picture = f"board-{index:02d}"
        Image.fromarray(board.pixels).save(options.out / f"{picture}.png")
        prompts.append(
            {
                "name": f"{options.split}-{index:02d}-{task}",
                "group": f"{options.split}-{picture}",
                "text": boards.prompt(task),
                "images": [f"{picture}.png"],
            }
        )
        answers.append({"name": prompts[-1]["name"], "answer": boards.answer(board, task)})
    for name, entries in (("prompts", prompts), ("answers", answers)):
        text = "".join(json.dumps(entry) + "\n" for entry in entries)
        (options.out / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
