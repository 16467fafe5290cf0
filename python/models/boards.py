"""Boards of handwritten digits, the questions about them, and the vocabulary of both.

A board is a grey picture of 6 x 6 cells of 16 x 16 pixels. Some cells hold a real handwritten
digit (scikit-learn's `load_digits`, 8 x 8 pixels, slightly rotated, scaled and shifted), most of
the others hold faint clutter. A question about a board has exactly one right answer.

Everything here is a function of its seed; nothing needs torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

CELLS = 6
CELL_PIXELS = 16
BOARD_PIXELS = CELLS * CELL_PIXELS
PATCH_PIXELS = 8
PATCHES_PER_SIDE = BOARD_PIXELS // PATCH_PIXELS
PATCHES = PATCHES_PER_SIDE**2
NO_DIGIT = 10

SPLIT_SEED = 20260202
SPLIT_SIZES = {"train": 1300, "validation": 200, "test": 297}

PAD, BOS, EOS, UNKNOWN, IMAGE = "<pad>", "<bos>", "<eos>", "<unk>", "<image>"
SPECIAL_WORDS = (PAD, BOS, EOS, UNKNOWN, IMAGE)
ROW_WORDS = tuple(f"r{row + 1}" for row in range(CELLS))
COLUMN_WORDS = tuple(f"c{column + 1}" for column in range(CELLS))
PLAIN_WORDS = (
    "you see a board of digits . : ; ? question answer row col has total none "
    "list all in order tell the story per what is at how many"
)
WORDS = (
    SPECIAL_WORDS
    + tuple(str(digit) for digit in range(10))
    + ROW_WORDS
    + COLUMN_WORDS
    + tuple(PLAIN_WORDS.split())
)

PREFIX = f"you see a board of digits . {IMAGE}"
LONG_TASKS = ("story", "rows", "list")
QUESTIONS = {
    "list": "list all digits in order",
    "story": "tell the story",
    "rows": "digits per row",
    "total": "how many digits",
}


@dataclass(frozen=True)
class Board:
    """One picture and what is on it.

    pixels  [96, 96]  uint8
    digits  [6, 6]    int, the digit in each cell, NO_DIGIT where there is none
    """

    pixels: np.ndarray
    digits: np.ndarray

    def patch_digits(self) -> np.ndarray:
        """The digit under each patch, [144], row-major; NO_DIGIT where there is none."""
        patches_per_cell = CELL_PIXELS // PATCH_PIXELS
        by_row = np.repeat(self.digits, patches_per_cell, axis=0)
        return np.repeat(by_row, patches_per_cell, axis=1).reshape(-1)


class DigitPool:
    """The handwritten digits of one split.

    split   train, validation or test: disjoint sets of samples
    raises  ValueError for any other split
    """

    def __init__(self, split: str) -> None:
        from sklearn.datasets import load_digits

        if split not in SPLIT_SIZES:
            raise ValueError(f"split {split!r}: expected one of {', '.join(SPLIT_SIZES)}")
        data = load_digits()
        order = np.random.default_rng(SPLIT_SEED).permutation(len(data.target))
        start = 0
        for name, size in SPLIT_SIZES.items():
            if name == split:
                self.samples = order[start : start + size]
            start += size
        self._images = data.images
        self._labels = data.target

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, int]:
        """A random sample: its 8 x 8 image (values 0 to 16) and its label."""
        sample = self.samples[rng.integers(len(self.samples))]
        return self._images[sample], int(self._labels[sample])


def _place_digit(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One digit in a cell, [16, 16] float in 0..255: rotated, scaled and shifted a little."""
    angle = np.deg2rad(rng.uniform(-12.0, 12.0))
    scale = rng.uniform(1.5, 1.9)
    shift_x, shift_y = rng.uniform(-1.0, 1.0, size=2)
    cos, sin = np.cos(angle) / scale, np.sin(angle) / scale
    middle = CELL_PIXELS / 2
    # PIL maps output pixels to input pixels: turn around the middle of the cell, then go to the
    # middle of the 8 x 8 image.
    offset_x = 4.0 - cos * (middle + shift_x) - sin * (middle + shift_y)
    offset_y = 4.0 + sin * (middle + shift_x) - cos * (middle + shift_y)
    source = Image.fromarray((image * (255.0 / 16.0)).astype(np.uint8))
    placed = source.transform(
        (CELL_PIXELS, CELL_PIXELS),
        Image.Transform.AFFINE,
        (cos, sin, offset_x, -sin, cos, offset_y),
        resample=Image.Resampling.BILINEAR,
    )
    return np.asarray(placed, dtype=np.float64)


def _distorted(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Another way of writing a digit, 8 x 8: turned, sheared, stretched, thicker or thinner."""
    angle = np.deg2rad(rng.uniform(-10.0, 10.0))
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    shear = np.array([[1.0, rng.uniform(-0.25, 0.25)], [0.0, 1.0]])
    matrix = np.diag(1.0 / rng.uniform(0.85, 1.15, size=2)) @ shear @ turn
    offset = 16.0 - matrix @ (16.0 + rng.uniform(-2.0, 2.0, size=2))
    large = Image.fromarray((image * (255.0 / 16.0)).astype(np.uint8)).resize(
        (32, 32), Image.Resampling.BICUBIC
    )
    warped = large.transform(
        (32, 32),
        Image.Transform.AFFINE,
        (*matrix[0], offset[0], *matrix[1], offset[1]),
        resample=Image.Resampling.BILINEAR,
    )
    values = np.asarray(warped.resize((8, 8), Image.Resampling.BOX), dtype=np.float64) / 255.0
    values = values ** rng.uniform(0.6, 1.6) + rng.normal(0.0, 0.05, size=values.shape)
    return np.clip(values, 0.0, 1.0) * 16.0


def make_board(
    pool: DigitPool,
    rng: np.random.Generator,
    fewest_digits: int = 4,
    most_digits: int = 9,
    distortion: float = 0.0,
) -> Board:
    """A random board with `fewest_digits` to `most_digits` digits (both included).

    distortion  probability that a digit is distorted as well; for training only
    """
    count = int(rng.integers(fewest_digits, most_digits + 1))
    pixels = np.zeros((BOARD_PIXELS, BOARD_PIXELS))
    digits = np.full((CELLS, CELLS), NO_DIGIT)
    cells = rng.permutation(CELLS * CELLS)
    for rank, cell in enumerate(cells):
        row, column = divmod(int(cell), CELLS)
        top, left = row * CELL_PIXELS, column * CELL_PIXELS
        view = pixels[top : top + CELL_PIXELS, left : left + CELL_PIXELS]
        if rank < count:
            image, label = pool.draw(rng)
            if distortion > 0 and rng.random() < distortion:
                image = _distorted(image, rng)
            digits[row, column] = label
            view += _place_digit(image, rng) * rng.uniform(0.8, 1.0)
        elif rng.random() < 0.6:
            size = int(rng.integers(2, 6))
            y, x = rng.integers(0, CELL_PIXELS - size, size=2)
            view[y : y + size, x : x + size] += rng.uniform(0, 90, size=(size, size))
    pixels += rng.normal(0.0, 8.0, size=pixels.shape)
    return Board(np.clip(np.rint(pixels), 0, 255).astype(np.uint8), digits)


def boards(split: str, count: int, seed: int) -> list[Board]:
    """`count` boards of one split; board i depends on (split, seed, i) only."""
    pool = DigitPool(split)
    split_number = list(SPLIT_SIZES).index(split)
    return [make_board(pool, np.random.default_rng((seed, split_number, i))) for i in range(count)]


def answer(board: Board, task: str) -> str:
    """The right answer to QUESTIONS[task], words separated by blanks, without <eos>."""
    digits = board.digits
    present = np.argwhere(digits != NO_DIGIT)
    if task == "list":
        return " ".join([str(digits[r, c]) for r, c in present] + ["."])
    if task == "total":
        return f"{len(present)} ."
    if task == "story":
        lines = [
            f"row {ROW_WORDS[r]} col {COLUMN_WORDS[c]} has {digits[r, c]} ;" for r, c in present
        ]
        return " ".join(lines + [f"total {len(present)} ."])
    if task == "rows":
        parts = []
        for row in range(CELLS):
            found = [str(digit) for digit in digits[row] if digit != NO_DIGIT] or ["none"]
            parts.append(f"row {ROW_WORDS[row]} : {' '.join(found)}")
        return " ; ".join(parts) + " ."
    raise ValueError(f"task {task!r}: expected one of {', '.join(QUESTIONS)}")


def cell_question(row: int, column: int) -> str:
    """A short question about one cell, used in training only."""
    return f"what is at {ROW_WORDS[row]} {COLUMN_WORDS[column]}"


def cell_answer(board: Board, row: int, column: int) -> str:
    digit = board.digits[row, column]
    return "none ." if digit == NO_DIGIT else f"{digit} ."


def dialogue(question: str) -> str:
    """The text that follows the picture; the answer comes after it."""
    return f"question {question} ? answer :"


def prompt(task: str) -> str:
    """The whole prompt of a task, with one <image> placeholder and without <bos>."""
    return f"{PREFIX} {dialogue(QUESTIONS[task])}"


def word_ids(words: Sequence[str] | str) -> list[int]:
    """Token ids of words (a list, or a text separated by blanks)."""
    if isinstance(words, str):
        words = words.split()
    return [_WORD_ID[word] for word in words]


_WORD_ID = {word: index for index, word in enumerate(WORDS)}
