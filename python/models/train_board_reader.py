"""Train the board reader: a small LLaVA model that reads boards of handwritten digits.

    python python/models/train_board_reader.py

writes the model, its tokenizer and processor, and `training.log` to python/models/board-reader.
An interrupted run resumes from its checkpoint. Same seed, machine and thread count: same run.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import boards

WIDTH = 128
PREFIX_IDS = boards.word_ids(
    [boards.BOS] + boards.PREFIX.split()[:-1] + [boards.IMAGE] * boards.PATCHES
)
FIRST_PATCH = len(PREFIX_IDS) - boards.PATCHES
CELL_QUESTIONS = 5
TASK_WEIGHT = {"story": 1.0, "rows": 1.0, "list": 2.5, "total": 1.0, "cell": 1.0}
AUXILIARY_WEIGHT = 0.3
EVALUATION_BATCH = 50
NOT_AN_ANSWER = -100


@dataclass(frozen=True)
class Stage:
    """One part of the training.

    digits_until  [(share of the stage, most digits on a board)], shares ascending
    token_dropout  probability that a picture loses visual tokens
    distortion     probability that a digit is written in another way
    """

    name: str
    steps: int
    batch: int
    peak_rate: float
    final_rate: float
    digits_until: tuple[tuple[float, int, int], ...]
    token_dropout: float = 0.0
    distortion: float = 0.0


STAGES = (
    Stage("vision", 1000, 24, 2e-3, 5e-4, ((1.0, 3, 9),)),
    Stage("joint", 2200, 10, 2e-3, 4e-4, ((0.2, 2, 5), (0.4, 2, 7), (1.0, 3, 9))),
    Stage("dropout", 1400, 10, 1e-3, 2e-5, ((1.0, 3, 9),), token_dropout=0.75),
    Stage("distortion", 900, 10, 1e-3, 1e-5, ((1.0, 3, 9),), token_dropout=0.6, distortion=0.7),
)


# ------------------------------------------------------------------------------------ the model


def build_model():
    """The untrained model: CLIP vision tower, two-layer projector, Llama decoder."""
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    vision = CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_channels=3,
        image_size=boards.BOARD_PIXELS,
        patch_size=boards.PATCH_PIXELS,
        projection_dim=WIDTH,
    )
    pad, bos, eos, image = boards.word_ids([boards.PAD, boards.BOS, boards.EOS, boards.IMAGE])
    text = LlamaConfig(
        vocab_size=len(boards.WORDS),
        hidden_size=WIDTH,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=pad,
        bos_token_id=bos,
        eos_token_id=eos,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=image,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=boards.PATCHES,
        tie_word_embeddings=True,
    )
    return LlavaForConditionalGeneration(config)


def build_processor():
    """Word-level tokenizer and image preparation, as one LlavaProcessor."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import CLIPImageProcessorPil, LlavaProcessor, PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(boards.WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=boards.UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{boards.BOS} $A", special_tokens=[(boards.BOS, words[boards.BOS])]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=boards.PAD,
        bos_token=boards.BOS,
        eos_token=boards.EOS,
        unk_token=boards.UNKNOWN,
        additional_special_tokens=[boards.IMAGE],
        clean_up_tokenization_spaces=False,
    )
    side = {"height": boards.BOARD_PIXELS, "width": boards.BOARD_PIXELS}
    pictures = CLIPImageProcessorPil(
        do_resize=False,
        do_center_crop=False,
        size=side,
        crop_size=side,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    return LlavaProcessor(
        image_processor=pictures,
        tokenizer=fast,
        patch_size=boards.PATCH_PIXELS,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=boards.IMAGE,
    )


def pixel_values(batch: list[boards.Board]) -> torch.Tensor:
    """What the processor makes of the pictures: [board, 3, 96, 96] in -1..1."""
    pixels = torch.from_numpy(np.stack([board.pixels for board in batch])).float()
    return (pixels / 255.0 - 0.5).div(0.5).unsqueeze(1).expand(-1, 3, -1, -1).contiguous()


# ------------------------------------------------------------------------------- training data


@dataclass
class Packed:
    """Several questions about one picture in one row of the batch.

    The prefix (text and picture) is shared; each question sees the prefix and itself only, and
    its positions continue from the prefix.

    ids, positions, labels  [board, token]  labels NOT_AN_ANSWER where nothing is asked
    weights                 [board, token]  of the loss
    allowed                 [board, 1, query, key]  bool
    """

    ids: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    allowed: torch.Tensor


def questions_of(board: boards.Board, rng: np.random.Generator) -> list[tuple[str, str, float]]:
    """(question, answer, loss weight) of everything that one step asks about a board."""
    asked = [
        (boards.QUESTIONS[task], boards.answer(board, task), TASK_WEIGHT[task])
        for task in boards.QUESTIONS
    ]
    with_digit = np.argwhere(board.digits != boards.NO_DIGIT)
    for index in range(CELL_QUESTIONS):
        if index < 3:
            row, column = (int(x) for x in with_digit[rng.integers(len(with_digit))])
        else:
            row, column = (int(x) for x in rng.integers(boards.CELLS, size=2))
        text = boards.cell_question(row, column)
        asked.append((text, boards.cell_answer(board, row, column), TASK_WEIGHT["cell"]))
    return asked


def visual_token_dropout(
    patch_digits: np.ndarray,
    block: np.ndarray,
    in_answer: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """Which (query, key) pairs lose their visual key: [token, token] bool.

    Loses 20 to 100 % of the patches without a digit and 0 to 50 % of those with one, for all
    rows, for the rows after the picture, or for the answer's rows.
    """
    empty = patch_digits == boards.NO_DIGIT
    drop_share = np.where(empty, rng.uniform(0.2, 1.0), rng.uniform(0.0, 0.5))
    dropped = rng.random(boards.PATCHES) < drop_share
    keys = np.zeros(len(block), dtype=bool)
    keys[FIRST_PATCH : FIRST_PATCH + boards.PATCHES] = dropped
    rows = (np.ones(len(block), dtype=bool), block > 0, in_answer)[rng.integers(3)]
    return rows[:, None] & keys[None, :]


def pack(batch: list[boards.Board], rng: np.random.Generator, token_dropout: float) -> Packed:
    rows = []
    for board in batch:
        ids, positions = list(PREFIX_IDS), list(range(len(PREFIX_IDS)))
        block, in_answer = [0] * len(ids), [False] * len(ids)
        labels, weights = [NOT_AN_ANSWER] * len(ids), [0.0] * len(ids)
        for number, (question, text, weight) in enumerate(questions_of(board, rng), start=1):
            asked = boards.word_ids(boards.dialogue(question))
            said = boards.word_ids(text.split() + [boards.EOS])
            ids += asked + said[:-1]
            length = len(asked) + len(said) - 1
            positions += range(len(PREFIX_IDS), len(PREFIX_IDS) + length)
            block += [number] * length
            in_answer += [False] * len(asked) + [True] * (len(said) - 1)
            labels += [NOT_AN_ANSWER] * (len(asked) - 1) + said
            weights += [weight] * length
        rows.append((board, ids, positions, block, in_answer, labels, weights))

    longest = max(len(ids) for _, ids, *_ in rows)
    shape = (len(batch), longest)
    packed = Packed(
        ids=torch.zeros(shape, dtype=torch.long),
        positions=torch.zeros(shape, dtype=torch.long),
        labels=torch.full(shape, NOT_AN_ANSWER),
        weights=torch.zeros(shape),
        allowed=torch.zeros((len(batch), 1, longest, longest), dtype=torch.bool),
    )
    for index, (board, ids, positions, block, in_answer, labels, weights) in enumerate(rows):
        length = len(ids)
        packed.ids[index, :length] = torch.tensor(ids)
        packed.positions[index, :length] = torch.tensor(positions)
        packed.labels[index, :length] = torch.tensor(labels)
        packed.weights[index, :length] = torch.tensor(weights)
        blocks = np.array(block)
        allowed = np.tril(np.ones((length, length), dtype=bool))
        allowed &= (blocks[None, :] == 0) | (blocks[None, :] == blocks[:, None])
        if rng.random() < token_dropout:
            lost = visual_token_dropout(board.patch_digits(), blocks, np.array(in_answer), rng)
            allowed &= ~lost
        packed.allowed[index, 0, :length, :length] = torch.from_numpy(allowed)
        packed.allowed[index, 0, :, 0] = True  # no row is ever empty, padding included
    return packed


# ------------------------------------------------------------------------------------- training


class Trainee(nn.Module):
    """The model and the auxiliary heads on its visual tokens, which are thrown away later."""

    def __init__(self) -> None:
        super().__init__()
        self.llava = build_model()
        self.tower_digit = nn.Linear(WIDTH, boards.NO_DIGIT + 1)
        self.digit = nn.Linear(WIDTH, boards.NO_DIGIT + 1)
        self.row = nn.Linear(WIDTH, boards.CELLS)
        self.column = nn.Linear(WIDTH, boards.CELLS)
        patch = torch.arange(boards.PATCHES)
        per_cell = boards.CELL_PIXELS // boards.PATCH_PIXELS
        self.register_buffer("patch_row", patch // boards.PATCHES_PER_SIDE // per_cell)
        self.register_buffer("patch_column", patch % boards.PATCHES_PER_SIDE // per_cell)

    def vision_loss(self, batch: list[boards.Board]) -> torch.Tensor:
        """Cross-entropy of the digit under each patch, from the vision tower alone."""
        digits = torch.from_numpy(np.stack([board.patch_digits() for board in batch]))
        tower = self.llava.model.vision_tower(pixel_values(batch)).last_hidden_state[:, 1:]
        logits = self.tower_digit(tower)
        return F.cross_entropy(logits.flatten(0, 1), digits.flatten())

    def joint_loss(self, batch: list[boards.Board], packed: Packed) -> torch.Tensor:
        """Weighted cross-entropy of the answers, plus the auxiliary losses of the patches."""
        digits = torch.from_numpy(np.stack([board.patch_digits() for board in batch]))
        model = self.llava.model
        tower = model.vision_tower(pixel_values(batch)).last_hidden_state[:, 1:]
        visual = model.multi_modal_projector(tower)
        embedded = model.language_model.embed_tokens(packed.ids)
        embedded = torch.cat(
            [
                embedded[:, :FIRST_PATCH],
                visual,
                embedded[:, FIRST_PATCH + boards.PATCHES :],
            ],
            dim=1,
        )
        hidden = model.language_model(
            inputs_embeds=embedded,
            attention_mask=packed.allowed,
            position_ids=packed.positions,
            use_cache=False,
        ).last_hidden_state
        asked = packed.labels != NOT_AN_ANSWER
        logits = self.llava.lm_head(hidden[asked])
        heads = self.digit(visual), self.row(visual), self.column(visual)
        weights = packed.weights[asked]
        losses = F.cross_entropy(logits, packed.labels[asked], reduction="none")
        loss = (losses * weights).sum() / weights.sum()
        targets = (
            digits,
            self.patch_row.expand_as(digits),
            self.patch_column.expand_as(digits),
        )
        for head, target in zip(heads, targets, strict=True):
            auxiliary = F.cross_entropy(head.flatten(0, 1), target.flatten())
            loss = loss + AUXILIARY_WEIGHT * auxiliary
        return loss


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised, for matrices (Jordan et al., 2024), in float32.

    torch.optim.Muon does the same in bfloat16, which takes most of the training time on a
    processor without bfloat16 products. Matrices of one shape are orthogonalised together.
    """

    def __init__(self, parameters, lr: float, momentum: float = 0.95, weight_decay: float = 0.01):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[tuple[nn.Parameter, torch.Tensor]]] = {}
            for parameter in group["params"]:
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(momentum, group["momentum"])
                by_shape.setdefault(parameter.shape, []).append((parameter, update))
            for shape, pairs in by_shape.items():
                updates = orthogonalised(torch.stack([update for _, update in pairs]))
                # 0.2 * sqrt(larger side) gives the update the size of an AdamW update.
                rate = group["lr"] * 0.2 * math.sqrt(max(shape))
                for (parameter, _), update in zip(pairs, updates, strict=True):
                    parameter.mul_(1 - group["lr"] * group["decay"]).sub_(update, alpha=rate)


def orthogonalised(matrices: torch.Tensor) -> torch.Tensor:
    """Push the singular values of [matrix, rows, columns] towards 1: five Newton-Schulz steps."""
    wide = matrices.shape[1] <= matrices.shape[2]
    x = matrices if wide else matrices.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if wide else x.transpose(1, 2)


def optimizers_for(module: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for everything else."""
    hidden, rest = [], []
    for name, parameter in module.named_parameters():
        matrix = parameter.ndim == 2 and "embed" not in name and name.startswith("llava.")
        (hidden if matrix and "lm_head" not in name else rest).append(parameter)
    return [
        Muon(hidden, lr=rate),
        torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate_at(stage: Stage, steps: int, step: int) -> float:
    """Learning rate: warm-up over 5 % of the stage, then a cosine down to the final rate."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return stage.peak_rate * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return stage.final_rate + (stage.peak_rate - stage.final_rate) * cosine


def train_stage(
    trainee: Trainee,
    stage_number: int,
    steps: int,
    first_step: int,
    optimizers: list[torch.optim.Optimizer],
    seed: int,
    log: Callable[[str], None],
    save: Callable[[int], None],
) -> None:
    """Run the steps first_step .. steps-1 of a stage; a step's data depend on (seed, step) only."""
    stage = STAGES[stage_number]
    pool = boards.DigitPool("train")
    started = time.monotonic()
    recent: list[float] = []
    trainee.train()
    for step in range(first_step, steps):
        rng = np.random.default_rng((seed, stage_number, step))
        fewest, most = next(
            (low, high) for until, low, high in stage.digits_until if step < until * steps
        )
        batch = [
            boards.make_board(pool, rng, fewest, most, stage.distortion) for _ in range(stage.batch)
        ]
        if stage.name == "vision":
            loss = trainee.vision_loss(batch)
        else:
            loss = trainee.joint_loss(batch, pack(batch, rng, stage.token_dropout))
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
            for group in optimizer.param_groups:
                group["lr"] = rate_at(stage, steps, step)
        loss.backward()
        for parameter in trainee.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        nn.utils.clip_grad_norm_(trainee.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        recent.append(loss.item())
        if (step + 1) % 50 == 0 or step + 1 == steps:
            seconds = (time.monotonic() - started) / (step + 1 - first_step)
            log(
                f"{stage.name} step {step + 1}/{steps} loss {np.mean(recent):.4f} "
                f"rate {rate_at(stage, steps, step):.2e} seconds/step {seconds:.2f}"
            )
            recent.clear()
        if (step + 1) % 200 == 0:
            save(step + 1)


# ----------------------------------------------------------------------------------- evaluation


def wilson_interval(right: int, total: int) -> tuple[float, float]:
    """95 % Wilson score interval of a proportion."""
    z = 1.959963984540054
    share = right / total
    middle = share + z * z / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return (middle - half) / scale, (middle + half) / scale


@torch.no_grad()
def exact_answers(model, examples: list[boards.Board], task: str) -> int:
    """How many greedy answers are right to the last word, <eos> included."""
    pad, eos = boards.word_ids([boards.PAD, boards.EOS])
    asked = PREFIX_IDS + boards.word_ids(boards.dialogue(boards.QUESTIONS[task]))
    right = 0
    for start in range(0, len(examples), EVALUATION_BATCH):
        batch = examples[start : start + EVALUATION_BATCH]
        ids = torch.tensor([asked] * len(batch))
        generated = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pixel_values=pixel_values(batch),
            max_new_tokens=80,
            do_sample=False,
            pad_token_id=pad,
            eos_token_id=eos,
        )[:, len(asked) :]
        for board, row in zip(batch, generated.tolist(), strict=True):
            expected = boards.word_ids(boards.answer(board, task).split() + [boards.EOS])
            right += row[: len(expected)] == expected
    return right


def evaluate(model, split: str, count: int, seed: int, log: Callable[[str], None]) -> None:
    model.eval()
    examples = boards.boards(split, count, seed)
    for task in boards.QUESTIONS:
        right = exact_answers(model, examples, task)
        low, high = wilson_interval(right, count)
        log(
            f"{split} {task}: {right}/{count} exact = {right / count:.3f} "
            f"(95 % Wilson interval {low:.3f} to {high:.3f})"
        )


# ------------------------------------------------------------------------------------------ run


def save_model(trainee: Trainee, folder: Path) -> None:
    """Write the float16 model, its generation settings and its processor."""
    from transformers import GenerationConfig

    pad, bos, eos = boards.word_ids([boards.PAD, boards.BOS, boards.EOS])
    model = build_model()
    model.load_state_dict(trainee.llava.state_dict())
    model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=80, pad_token_id=pad, bos_token_id=bos, eos_token_id=eos
    )
    model.to(torch.float16).save_pretrained(folder)
    build_processor().save_pretrained(folder)


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description="Train the board reader.")
    parser.add_argument("--out", type=Path, default=here / "board-reader")
    parser.add_argument("--checkpoint", type=Path, help="default: OUT/checkpoint.pt")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the steps, for a trial")
    parser.add_argument("--boards", type=int, default=300, help="boards per evaluation")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    checkpoint = options.checkpoint or options.out / "checkpoint.pt"
    log_path = options.out / "training.log"

    trainee = Trainee()
    first_stage, first_step, restored = 0, 0, None
    if checkpoint.exists():
        restored = torch.load(checkpoint, weights_only=True)
        trainee.load_state_dict(restored["trainee"])
        first_stage, first_step = restored["stage"], restored["step"]
    elif log_path.exists():
        log_path.unlink()

    def log(line: str) -> None:
        print(line, flush=True)
        with log_path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    parameters = sum(parameter.numel() for parameter in trainee.llava.parameters())
    log(
        f"{parameters} parameters, torch {torch.__version__}, {options.threads} threads, "
        f"seed {options.seed}" + (", resumed" if restored else "")
    )

    for number in range(first_stage, len(STAGES)):
        stage = STAGES[number]
        steps = max(1, round(stage.steps * options.scale))
        optimizers = optimizers_for(trainee, stage.peak_rate)
        if restored and number == first_stage:
            for optimizer, state in zip(optimizers, restored["optimizers"], strict=True):
                optimizer.load_state_dict(state)

        def save(step: int, number: int = number, optimizers=optimizers) -> None:
            state = {
                "trainee": trainee.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "stage": number,
                "step": step,
            }
            partial = checkpoint.with_suffix(".partial")
            torch.save(state, partial)
            os.replace(partial, checkpoint)

        start = first_step if number == first_stage else 0
        train_stage(trainee, number, steps, start, optimizers, options.seed, log, save)
        save(steps)
        evaluated = options.boards // 3
        if stage.name != "vision" and number + 1 < len(STAGES):
            evaluate(trainee.llava, "validation", evaluated, seed=0, log=log)

    save_model(trainee, options.out)
    # What is evaluated is what was written: float16 weights, computed in float32.
    from transformers import LlavaForConditionalGeneration

    written = LlavaForConditionalGeneration.from_pretrained(options.out, dtype=torch.float32)
    for split in ("validation", "test"):
        evaluate(written, split, options.boards, seed=1, log=log)
    checkpoint.unlink()


if __name__ == "__main__":
    main()
