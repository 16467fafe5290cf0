"""Reading prompts, and finding the pictures among their tokens."""

import numpy as np
import pytest
import tiny_models
from hypothesis import given
from hypothesis import strategies as st

from hae.prompts import Prompt, PromptError, image_map, load_prompts, patch_map, prepare

I = 4  # noqa: E741  the image token in these prompts; 9 is text


def test_pictures_are_found_wherever_they_stand():
    # 5 system tokens, images at [5, 9) and [12, 18), 20 tokens in all.
    ids = [9] * 5 + [I] * 4 + [9] * 3 + [I] * 6 + [9] * 2
    expected = [-1] * 5 + [0] * 4 + [-1] * 3 + [1] * 6 + [-1] * 2
    assert image_map(ids, I, [4, 6]).tolist() == expected


def test_pictures_side_by_side_are_told_apart_by_their_features():
    assert image_map([I] * 5, I, [2, 3]).tolist() == [0, 0, 1, 1, 1]


def test_a_picture_may_be_interrupted_by_text():
    assert image_map([I, I, 9, I, I], I, [4]).tolist() == [0, 0, -1, 0, 0]


def test_a_prompt_without_pictures_is_all_text():
    assert image_map([9, 9, 9], I, []).tolist() == [-1, -1, -1]


def test_one_image_token_too_many_names_the_picture_and_both_counts():
    with pytest.raises(PromptError, match=r"image 0 .*expected 2640 image tokens.*found 2641"):
        image_map([9] + [I] * 2641, I, [2640])


def test_a_truncated_prompt_names_the_picture_that_lost_tokens():
    ids = ([9] * 5 + [I] * 4 + [9] * 3 + [I] * 6 + [9] * 2)[:15]
    with pytest.raises(PromptError, match=r"image 1 .*expected 6 image tokens.*found 3"):
        image_map(ids, I, [4, 6])


def test_a_truncated_first_picture_is_not_blamed_on_the_second():
    with pytest.raises(PromptError, match=r"image 0 .*expected 4 .*found 3"):
        image_map([I] * 3 + [9] + [I] * 4, I, [4, 4])


def test_a_picture_without_any_image_token_is_named():
    with pytest.raises(PromptError, match=r"image 1 .*expected 4 .*found 0"):
        image_map([I] * 4 + [9], I, [4, 4])


def test_image_tokens_without_a_picture_are_refused():
    with pytest.raises(PromptError, match="2 image tokens in the prompt, but no picture"):
        image_map([9, I, I], I, [])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), max_size=5), st.integers(0, 3))
def test_every_picture_gets_as_many_tokens_as_it_has_features(spans, tail):
    ids, expected = [], []
    for number, (text, features) in enumerate(spans):
        ids += [9] * text + [I] * features
        expected += [-1] * text + [number] * features
    ids, expected = ids + [9] * tail, expected + [-1] * tail
    assert image_map(ids, I, [features for _, features in spans]).tolist() == expected


def test_patches_are_numbered_row_by_row():
    patch = patch_map(np.array([-1, 0, 0, 0, 0, 0, 0, -1]), [(2, 3)])
    assert patch.tolist() == [
        [-1, -1], [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [-1, -1],
    ]  # fmt: skip


def test_a_class_token_before_the_grid_has_no_patch():
    patch = patch_map(np.zeros(5, dtype=int), [(2, 2)])
    assert patch.tolist() == [[-1, -1], [0, 0], [0, 1], [1, 0], [1, 1]]


def test_a_picture_that_is_no_grid_has_no_patches():
    assert (patch_map(np.zeros(7, dtype=int), [(2, 2)]) == -1).all()


# ------------------------------------------------------------------------------ with a model


def test_a_batch_of_one_is_never_padded():
    inputs = [
        prepare(tiny_models.llama(), tiny_models.tokenizer(), Prompt("p", text))
        for text in ("a b c d e", "a b c")
    ]
    assert [one.input_ids.shape for one in inputs] == [(1, 6), (1, 4)]
    assert all(0 not in one.input_ids for one in inputs)


def test_the_map_follows_the_image_tokens_that_the_processor_made():
    prompt = Prompt("p", "a <image> b <image> c", [tiny_models.picture(0), tiny_models.picture(1)])
    inputs = prepare(tiny_models.llava(), tiny_models.processor(), prompt)
    n = tiny_models.VISUAL_TOKENS
    assert inputs.image.tolist() == [-1, -1] + [0] * n + [-1] + [1] * n + [-1]
    assert inputs.patch[2].tolist() == [0, 0]
    assert inputs.patch[2 + n - 1].tolist() == [3, 3]


def test_a_processor_of_another_patch_size_is_refused_by_counts():
    # 8-pixel patches: 2 x 2 image tokens, but the vision tower gives 4 x 4 features.
    prompt = Prompt("p", "a <image>", [tiny_models.picture(0)])
    with pytest.raises(PromptError, match=r"prompt p: image 0 .*expected 16 .*found 4"):
        prepare(tiny_models.llava(), tiny_models.processor(patch_pixels=8), prompt)


# --------------------------------------------------------------------------------- the file


def test_names_and_groups_have_defaults(tmp_path):
    path = tiny_models.write_prompts(tmp_path, [{"text": "a"}, {"text": "b", "name": "second"}])
    prompts = load_prompts(path)
    assert [(p.name, p.group) for p in prompts] == [("000000", "000000"), ("second", "second")]


def test_pictures_are_found_beside_the_file(tmp_path):
    tiny_models.picture(0).save(tmp_path / "p.png")
    path = tiny_models.write_prompts(tmp_path, [{"text": "<image>", "images": ["p.png"]}])
    assert load_prompts(path)[0].images[0].size == (16, 16)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"prompts.jsonl:2: not JSON"),
        ('{"txt": "a"}', r"prompts.jsonl:2: expected an object"),
        ('{"text": "a", "image": []}', r"prompts.jsonl:2: unknown key 'image'"),
        ('{"text": 1}', r'prompts.jsonl:2: "text" must be a string'),
        ('{"text": "a", "text": "b"}', r"prompts.jsonl:2: .*key 'text' appears twice"),
        ('{"text": "a", "name": "first"}', r"jsonl:2: name 'first' appears twice, first in line 1"),
        ('{"text": "a", "images": ["none.png"]}', r"prompts.jsonl:2: picture none.png"),
        ('{"text": "a", "images": ["prompts.jsonl"]}', r"prompts.jsonl:2: picture prompts.jsonl"),
        ('{"text": "a", "images": ["\\u0000"]}', r"prompts.jsonl:2: picture"),
        ('{"text": "\\ud800"}', r"prompts.jsonl:2: a string holds half a surrogate pair"),
        ('{"text": "a", "name": "\\u0000"}', r"prompts.jsonl:2: .* U\+0000"),
        ("[" * 100_000, r"prompts.jsonl:2: not JSON"),
        ("9" * 5000, r"prompts.jsonl:2: not JSON"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "a", "name": "first"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(PromptError, match=message):
        load_prompts(path)


def test_a_default_name_that_another_prompt_has_is_refused(tmp_path):
    path = tiny_models.write_prompts(tmp_path, [{"text": "a", "name": "000001"}, {"text": "b"}])
    with pytest.raises(PromptError, match="jsonl:2: name '000001' appears twice, first in line 1"):
        load_prompts(path)


def test_ten_thousand_prompts_are_read_in_a_moment(tmp_path):
    path = tiny_models.write_prompts(tmp_path, [{"text": "a"}] * 10_000)
    assert len({prompt.name for prompt in load_prompts(path)}) == 10_000


def test_a_line_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "prompts.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(PromptError, match=r"prompts.jsonl:2: not JSON: .*utf-8"):
        load_prompts(tmp_path / "prompts.jsonl")


def test_only_a_newline_ends_a_line(tmp_path):
    text = "a\u2028b\u0085c"
    line = f'{{"text": "{text}"}}\r\n'
    (tmp_path / "prompts.jsonl").write_bytes(2 * line.encode())
    assert [prompt.text for prompt in load_prompts(tmp_path / "prompts.jsonl")] == [text, text]


def test_a_picture_for_a_model_that_takes_none_is_refused():
    prompt = Prompt("p", "a", [tiny_models.picture(0)])
    with pytest.raises(PromptError, match="prompt p: has 1 picture, but the model takes none"):
        prepare(tiny_models.llama(), tiny_models.tokenizer(), prompt)


def test_a_file_without_prompts_is_refused(tmp_path):
    (tmp_path / "prompts.jsonl").write_text("\n")
    with pytest.raises(PromptError, match="holds no prompt"):
        load_prompts(tmp_path / "prompts.jsonl")
