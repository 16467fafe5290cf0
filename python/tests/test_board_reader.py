"""The boards, the stored model that reads them, and the recordings made from it."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hae import trace
from hae.prompts import Prompt, prepare
from hae.session import load_model
from hae.verify import TOLERANCE, verify_sequence

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = REPOSITORY / "python" / "models" / "board-reader"
RECORDINGS = REPOSITORY / "traces" / "data" / "boards-test.h5"
VALIDATION = REPOSITORY / "traces" / "data" / "validation" / "boards-validation.h5"
sys.path.insert(0, str(MODEL.parent))

import boards  # noqa: E402
import train_board_reader  # noqa: E402


@pytest.fixture(scope="module")
def reader():
    return load_model(MODEL, "float32", "cpu", "eager")


def board_of(cells: dict[tuple[int, int], int]) -> boards.Board:
    digits = np.full((boards.CELLS, boards.CELLS), boards.NO_DIGIT)
    for cell, digit in cells.items():
        digits[cell] = digit
    return boards.Board(np.zeros((96, 96), np.uint8), digits)


# ----------------------------------------------------------------------------------- boards


def test_no_digit_is_in_two_splits():
    samples = [boards.DigitPool(split).samples for split in boards.SPLIT_SIZES]
    assert len(set(np.concatenate(samples).tolist())) == 1797 == sum(map(len, samples))


def test_a_board_depends_on_its_number_and_seed_only():
    few, many = boards.boards("validation", 2, seed=3), boards.boards("validation", 4, seed=3)
    assert (few[1].pixels == many[1].pixels).all()
    assert (few[1].pixels != boards.boards("validation", 2, seed=4)[1].pixels).any()


def test_boards_hold_four_to_nine_digits():
    counts = [(b.digits != boards.NO_DIGIT).sum() for b in boards.boards("train", 60, seed=0)]
    assert set(counts) == {4, 5, 6, 7, 8, 9}


def test_answers_read_the_board_row_by_row():
    board = board_of({(2, 4): 7, (0, 1): 3, (2, 0): 0})
    assert boards.answer(board, "list") == "3 0 7 ."
    assert boards.answer(board, "total") == "3 ."
    assert boards.answer(board, "rows") == (
        "row r1 : 3 ; row r2 : none ; row r3 : 0 7 ; "
        "row r4 : none ; row r5 : none ; row r6 : none ."
    )
    assert boards.answer(board, "story") == (
        "row r1 col c2 has 3 ; row r3 col c1 has 0 ; row r3 col c5 has 7 ; total 3 ."
    )


def test_a_digit_lies_under_the_four_patches_of_its_cell():
    patches = board_of({(1, 2): 5}).patch_digits().reshape(12, 12)
    assert np.argwhere(patches == 5).tolist() == [[2, 4], [2, 5], [3, 4], [3, 5]]


# --------------------------------------------------------------------------------- the model


@pytest.mark.parametrize("task", boards.QUESTIONS)
def test_the_processor_prepares_what_the_model_was_trained_on(reader, task):
    model, processor = reader
    board = boards.boards("validation", 1, seed=9)[0]
    prompt = Prompt("p", boards.prompt(task), [Image.fromarray(board.pixels)])
    inputs = prepare(model, processor, prompt)
    asked = boards.word_ids(boards.dialogue(boards.QUESTIONS[task]))
    assert inputs.input_ids[0].tolist() == train_board_reader.PREFIX_IDS + asked
    expected = train_board_reader.pixel_values([board])
    assert torch.allclose(inputs.pixel_values, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("task", boards.LONG_TASKS)
def test_the_stored_model_reads_most_boards_without_a_mistake(reader, task):
    # About 95 % are right (python/models/README.md); fewer than 15 of 20 would be a broken model.
    examples = boards.boards("validation", 20, seed=9)
    assert train_board_reader.exact_answers(reader[0], examples, task) >= 15


# ---------------------------------------------------------------------------- the recordings


@pytest.mark.parametrize(
    ("path", "split", "count"), [(RECORDINGS, "test", 16), (VALIDATION, "validation", 8)]
)
def test_recordings_show_boards_of_their_split(path, split, count):
    expected = boards.boards(split, count, seed=7)
    with trace.open_trace(path) as file:
        sequences = list(file["sequences"].values())
        assert len(sequences) == count
        for sequence, board in zip(sequences, expected, strict=True):
            assert (sequence["pictures/0"][()] == board.pixels).all()
            assert (sequence["modality"][()] == 1).sum() == boards.PATCHES
            task = sequence.attrs["name"].split("-")[-1]
            prompt = sequence["token"].asstr()[: sequence.attrs["prompt"]].tolist()
            assert prompt[-2:] == ["answer", ":"]
            assert " ".join(prompt).endswith(boards.dialogue(boards.QUESTIONS[task]))


def test_no_two_recordings_share_a_picture():
    with trace.open_trace(RECORDINGS) as test, trace.open_trace(VALIDATION) as validation:
        groups = [
            sequence.attrs["group"]
            for file in (test, validation)
            for sequence in file["sequences"].values()
        ]
    assert len(set(groups)) == 24


def test_only_test_recordings_lie_directly_in_the_data_folder():
    assert list(RECORDINGS.parent.glob("*.h5")) == [RECORDINGS]


def test_the_first_recording_is_what_the_stored_model_computes(reader):
    model, processor = reader
    board = boards.boards("test", 1, seed=7)[0]
    prompt = Prompt("p", boards.prompt("story"), [Image.fromarray(board.pixels)])
    inputs = prepare(model, processor, prompt)
    assert verify_sequence(model, inputs, RECORDINGS, TOLERANCE["float16"]) > 0
