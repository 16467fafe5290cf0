"""Runs the cells of the closed-loop study and keeps one JSON line a (sequence, cell).

    python python/studies/measure.py --part boards|choosing|text --sequences N --out FOLDER
        [--share I/OF] [--smollm2 MODEL.gguf] [--cells FIRST]

A sequence that is there already is not run again, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

import boards  # noqa: E402
import cells  # noqa: E402
import figures  # noqa: E402

import hae  # noqa: E402
from hae import effects, hf  # noqa: E402
from hae.decoder import decoder_of, end_tokens_of, shape_of  # noqa: E402
from hae.prompts import Prompt, prepare  # noqa: E402

BOARD_READER = Path(__file__).parents[1] / "models" / "board-reader"
BOARD_SEED = 20260202
MOST_NEW_TOKENS = 80
TEXT_PROMPT, TEXT_ANSWER = 192, 48


@dataclass(frozen=True)
class Item:
    """One sequence to run.

    right   the right answer, its end token included; None when there is none to know
    forced  what is fed; None: what the model says with the full cache
    """

    name: str
    group: str
    task: str
    prompt: hf.Prepared
    right: list[int] | None = None
    forced: list[int] | None = None


def board_items(model: Any, processor: Any, split: str, count: int) -> Iterator[Item]:
    """One board a sequence; the three long questions take turns."""
    (end,) = end_tokens_of(model)
    for index, board in enumerate(boards.boards(split, count, BOARD_SEED)):
        task = boards.LONG_TASKS[index % len(boards.LONG_TASKS)]
        name = f"{split}-{index:03d}-{task}"
        prompt = Prompt(name=name, text=boards.prompt(task), images=[Image.fromarray(board.pixels)])
        inputs = prepare(model, processor, prompt)
        prepared = hf.prepared(model, inputs.input_ids, inputs.pixel_values, inputs.image)
        right = [*boards.word_ids(boards.answer(board, task)), end]
        yield Item(name, f"{split}-{index:03d}", task, prepared, right)


def text_items(model: Any, tokenizer: Any, count: int) -> Iterator[Item]:
    """Pieces of the data set descriptions that come with scikit-learn: English, on every disk."""
    from sklearn import datasets

    loaders = ("load_iris", "load_wine", "load_breast_cancer", "load_diabetes", "load_digits")
    length = TEXT_PROMPT + TEXT_ANSWER
    pieces = []
    for loader in loaders:
        ids = tokenizer(getattr(datasets, loader)().DESCR)["input_ids"]
        pieces += [(loader, ids[at : at + length]) for at in range(0, len(ids) - length, length)]
    for index, (loader, ids) in enumerate(pieces[:: max(1, len(pieces) // count)][:count]):
        prompt = hf.prepared(model, torch.tensor([ids[:TEXT_PROMPT]]))
        name = f"{loader}-{index:02d}"
        yield Item(name, name, "text", prompt, forced=ids[TEXT_PROMPT:])


def load(part: str, smollm2: Path | None) -> tuple[Any, Any]:
    if part != "text":
        from hae.session import load_model

        return load_model(BOARD_READER, "float32", "cpu", "sdpa")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"gguf_file": smollm2.name}
    model = AutoModelForCausalLM.from_pretrained(
        smollm2.parent, dtype=torch.float32, attn_implementation="sdpa", **options
    )
    return model.eval(), AutoTokenizer.from_pretrained(smollm2.parent, **options)


class ResidualStream:
    """Length of what each layer's attention is added to, in every row that is computed."""

    def __init__(self, layers: Any) -> None:
        self._rows: list[list[np.ndarray]] = [[] for _ in layers]
        self._hooks = [
            layer.register_forward_pre_hook(
                lambda _, given, options, rows=rows: rows.append(
                    (given[0] if given else options["hidden_states"])[0].norm(dim=-1).numpy()
                ),
                with_kwargs=True,
            )
            for layer, rows in zip(layers, self._rows, strict=True)
        ]

    def take(self, prompt: int) -> np.ndarray:
        """[layers, steps] of the decode rows; stops listening."""
        for hook in self._hooks:
            hook.remove()
        return np.stack([np.concatenate(rows)[prompt:] for rows in self._rows]).astype(np.float64)


def measure(model: Any, item: Item, specs: list[str], free_running: bool) -> Iterator[dict]:
    """One line a cell: closed-loop effect, and candidate figures of the open loop."""
    decoder = decoder_of(model)
    layers = getattr(decoder, "model", decoder).layers
    shape = shape_of(decoder)
    projection = np.stack(
        [
            layer.self_attn.o_proj.weight.detach()
            .double()
            .numpy()
            .reshape(-1, shape.query_heads, shape.head_dim)
            for layer in layers
        ]
    )
    residual = ResidualStream(layers)
    full = effects.reference(
        model, item.prompt, max_new_tokens=MOST_NEW_TOKENS, answer=item.forced, name=item.name
    )
    recorded = figures.Recorded.of(full.sequence, projection, residual.take(item.prompt.prompt))
    base = {"sequence": item.name, "group": item.group, "task": item.task}
    yield base | {"policy": "full", "exact": full.answer.tokens == item.right}
    for run in hae.replay(full.sequence, specs, threads=1):
        found, closed = effects.effect(
            model,
            full,
            run.policy,
            is_right=lambda tokens: tokens == item.right,
            max_new_tokens=max(len(full.answer.tokens), len(item.right)) if free_running else None,
        )
        tokens = closed.attention_tokens
        yield (
            base
            | asdict(found)
            | {
                "policy": run.policy,
                "tokens": float(tokens.mean()),
                "peak": int(tokens.max()),
                "closed_missed_mass": float(closed.decode["missed_mass"].mean()),
                "figures": figures.figures(recorded, run),
            }
        )


SPECS = {
    "boards": cells.BOARD_CELLS,
    "choosing": cells.CHOOSING_CELLS,
    "text": cells.TEXT_CELLS,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=SPECS, required=True)
    parser.add_argument("--sequences", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--share", default="0/1", help="this process's share, e.g. 1/2")
    parser.add_argument("--smollm2", type=Path, help="the GGUF file of SmolLM2-135M")
    parser.add_argument("--cells", type=int, help="only the first so many cells; for trying it")
    options = parser.parse_args()
    share, of = (int(number) for number in options.share.split("/"))
    torch.set_num_threads(1)
    folder = options.out / options.part
    folder.mkdir(parents=True, exist_ok=True)
    model, reader = load(options.part, options.smollm2)
    if options.part == "text":
        items = text_items(model, reader, options.sequences)
    else:
        split = {"boards": "test", "choosing": "validation"}[options.part]
        items = board_items(model, reader, split, options.sequences)
    for index, item in enumerate(items):
        path = folder / f"{item.name}.jsonl"
        if index % of != share or path.exists():
            continue
        specs = SPECS[options.part][: options.cells]
        lines = measure(model, item, specs, options.part == "boards")
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        partial.rename(path)


if __name__ == "__main__":
    main()
