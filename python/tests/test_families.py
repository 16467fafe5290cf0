"""Each family of models in python/README.md: what is recorded is what the model computed."""

import h5py
import numpy as np
import pytest
import tiny_models
import torch
from recording import record_one

import hae
from hae import decoder, record, session, trace, verify
from hae.prompts import Prompt, PromptError, prepare

WINDOW = 4
TEXT = "a b c d e f g"  # and <bos>: 8 tokens, more than a window
# model type -> model, and the windows that its layers have.
TEXT_FAMILIES = {
    "llama": (tiny_models.llama, [0, 0]),
    "mistral": (lambda: tiny_models.mistral(WINDOW), [WINDOW] * 2),
    "qwen2": (lambda: tiny_models.qwen2(WINDOW), [0, WINDOW, WINDOW]),
    "qwen3": (tiny_models.qwen3, [0, 0]),
    "gemma2": (lambda: tiny_models.gemma2(WINDOW), [WINDOW, 0, WINDOW]),
    "gemma3_text": (lambda: tiny_models.gemma3(WINDOW), [WINDOW, 0, WINDOW]),
}
# model type -> model and processor.
PICTURE_FAMILIES = {
    "llava": (tiny_models.llava, tiny_models.processor),
    "llava_next": (tiny_models.llava_next, tiny_models.llava_next_processor),
    "gemma3": (lambda: tiny_models.gemma3_pictures(WINDOW), tiny_models.gemma3_processor),
    "qwen2_vl": (tiny_models.qwen2_vl, tiny_models.qwen_vl_processor),
    "qwen2_5_vl": (tiny_models.qwen2_5_vl, tiny_models.qwen_vl_processor),
}
ROWS_OF_PIXELS, COLUMNS_OF_PIXELS = 16, 32


@torch.no_grad()
def attended(model, inputs, tokens):
    """What each layer's output projection is given when the model reads all tokens at once."""
    given = []
    attention = [layer.self_attn for layer in decoder.layers_of(decoder.decoder_of(model))]
    hooks = [
        one.o_proj.register_forward_pre_hook(lambda _, values: given.append(values[0][0]))
        for one in attention
    ]
    model(input_ids=torch.tensor([tokens]), **inputs.beside(len(tokens)), use_cache=False)
    for hook in hooks:
        hook.remove()
    return [values.numpy() for values in given]


def attended_of_the_file(group, layer):
    """The same from recorded queries, keys, values, window and scale, a token at a time."""
    q, k, v = (group[f"layers/{layer:06d}/{name}"][()].astype(float) for name in "qkv")
    window, shared = int(group["window"][layer]), len(q) // len(k)
    image = group["image"][()].tolist()
    rows = []
    for token in range(q.shape[1]):
        first = max(0, token - window + 1) if window else 0
        seen = set(range(first, token + 1))
        if "bidirectional" in group and image[token] != -1:
            seen |= {other for other in range(len(image)) if image[other] == image[token]}
        row = []
        for head in range(len(q)):
            keys, values = (x[head // shared, sorted(seen)] for x in (k, v))
            weights = np.exp(group.attrs["scale"] * keys @ q[head, token])
            row.append(weights @ values / weights.sum())
        rows.append(np.concatenate(row))
    return np.array(rows)


def expect_what_the_model_attends_to(model, inputs, path):
    with trace.open_trace(path) as file:
        group = file["sequences/000000"]
        expected = attended(model, inputs, group["token_id"][()].tolist())
        assert len(expected) == len(group["layers"])
        for layer, values in enumerate(expected):
            # float32, sums of at most 60 products of numbers below 10.
            assert np.abs(attended_of_the_file(group, layer) - values).max() < 1e-4


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_a_text_family_is_recorded_as_it_attends(tmp_path, family):
    make, windows = TEXT_FAMILIES[family]
    model = make()
    assert model.config.model_type == family
    path = tmp_path / "a.h5"
    info, inputs = record_one(model, TEXT, path, max_new_tokens=6)
    assert info.window.tolist() == windows and info.tokens == 8 + 5
    assert info.position is None
    expect_what_the_model_attends_to(model, inputs, path)
    assert verify.verify_sequence(model, inputs, path, 1e-5) <= 1e-5


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_stored_attention_of_a_text_family_is_the_models(tmp_path, family):
    model = TEXT_FAMILIES[family][0]()
    path = tmp_path / "a.h5"
    _, inputs = record_one(model, TEXT, path, max_new_tokens=6, payload="attention")
    assert verify.verify_sequence(model, inputs, path, 1e-5) <= 1e-5


def two_pictures(family=None):
    """A wide one and a high one; for LLaVA, which takes one size only, square ones."""
    size = (16, 16) if family == "llava" else (ROWS_OF_PIXELS, COLUMNS_OF_PIXELS)
    return [tiny_models.picture(0, *size), tiny_models.picture(1, *size[::-1])]


@pytest.mark.parametrize("payload", trace.PAYLOADS)
@pytest.mark.parametrize("family", PICTURE_FAMILIES)
def test_a_family_with_pictures_is_recorded_as_it_attends(tmp_path, family, payload):
    make, processor = PICTURE_FAMILIES[family]
    model, reader = make(), processor()
    assert model.config.model_type == family
    path = tmp_path / "a.h5"
    # In Gemma's prompts the token that begins a picture stands for all of it.
    text = "a x b x c" if family == "gemma3" else "a x <image> y b x <image> y c"
    info, inputs = record_one(model, text, path, two_pictures(family), reader, payload=payload)
    assert (np.unique(info.image) == [-1, 0, 1]).all()
    if payload == "qkv":
        expect_what_the_model_attends_to(model, inputs, path)
    assert verify.verify_sequence(model, inputs, path, 1e-5) <= 1e-5


def test_tokens_of_a_picture_see_each_other_where_the_model_lets_them(tmp_path):
    """Gemma 3: 4 visual tokens, two of them in the same row of the picture's 2 x 2."""
    model, reader = tiny_models.gemma3_pictures(WINDOW), tiny_models.gemma3_processor()
    path = tmp_path / "a.h5"
    images = two_pictures()[:1]
    info, inputs = record_one(model, "a x b", path, images, reader, payload="attention")
    assert info.image.tolist() == [-1] * 3 + [0] * 4 + [-1] * 4  # <bos> a x, then y b and two new
    assert info.patch[3:7].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert hae.check(path) == []
    with h5py.File(path, "r+") as file:
        group = file["sequences/000000"]
        assert group["bidirectional"][()].tolist() == [1, 1, 1]
        assert (group["layers/000000/prompt"][0, 3:7, 3:7] > 0).all()
        # A window of 4: the first visual token sees three before it and three after it.
        assert np.flatnonzero(group["layers/000000/prompt"][0, 3]).tolist() == list(range(7))
        del group["bidirectional"]
    assert hae.check(path) != []
    without, _ = record_one(model, "a b", path, (), reader)
    assert not without.bidirectional


def test_a_picture_wider_than_the_window_is_refused_where_its_tokens_see_each_other(
    tmp_path, monkeypatch, capsys
):
    # The model hides keys that are 3 and more before the query, also of its own picture.
    model, reader = tiny_models.gemma3_pictures(3), tiny_models.gemma3_processor()
    info, inputs = record_one(model, "a x b", tmp_path / "a.h5", two_pictures()[:1], reader)
    with pytest.raises(verify.VerificationError):
        verify.verify_sequence(model, inputs, tmp_path / "a.h5", 1e-5)
    monkeypatch.setattr(session, "load_model", lambda *_: (model, reader))
    tiny_models.picture(0).save(tmp_path / "p.png")
    prompts = tiny_models.write_prompts(tmp_path, [{"text": "a x b", "images": ["p.png"]}])
    out = tmp_path / "out.h5"
    assert record.main([str(tmp_path), "--out", str(out), "--prompts", str(prompts)]) == 3
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "prompt 000000: a picture of 4 tokens in a sliding window of 3" in line
    assert not out.exists()


def test_a_picture_that_the_processor_cuts_up_is_refused(monkeypatch):
    reader = tiny_models.processor()
    model = tiny_models.llava()
    exact = reader.__call__
    monkeypatch.setattr(
        type(reader), "__call__", lambda self, images, **rest: exact(images=images[:1] * 3, **rest)
    )
    prompt = Prompt("p", "a <image> <image> <image>", two_pictures("llava"))
    with pytest.raises(PromptError, match="prompt p: the processor made 3 pictures of 2"):
        prepare(model, reader, prompt)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_positions_in_three_dimensions_are_recorded(tmp_path, family):
    make, processor = PICTURE_FAMILIES[family]
    path = tmp_path / "a.h5"
    info, _ = record_one(make(), "a x <image> y", path, two_pictures()[:1], processor())
    # 16 x 32 pixels are 2 x 4 visual tokens. They begin at position 3, and the text after them
    # follows the largest: 3 + 4 - 1.
    text = [[0] * 3, [1] * 3, [2] * 3]
    picture = [[3, 3 + row, 3 + column] for row in range(2) for column in range(4)]
    after = [[7] * 3, [8] * 3, [9] * 3]  # y, and two that were fed back
    assert info.position.tolist() == text + picture + after
    assert info.patch[3:11].tolist() == [[row, column] for row in range(2) for column in range(4)]
    with trace.open_trace(path) as file:
        assert (file["sequences/000000/position"][()] == info.position).all()


def test_a_prompt_without_pictures_counts_from_0_after_one_with_pictures(tmp_path):
    model, reader = tiny_models.qwen2_vl(), tiny_models.qwen_vl_processor()
    record_one(model, "a x <image> y", tmp_path / "a.h5", two_pictures()[:1], reader)
    info, inputs = record_one(model, "a b c", tmp_path / "b.h5", (), reader)
    assert info.position is None
    assert verify.verify_sequence(model, inputs, tmp_path / "b.h5", 1e-5) <= 1e-5


def test_visual_tokens_of_llava_next_are_those_of_the_whole_and_of_its_parts(tmp_path):
    reader = tiny_models.llava_next_processor()
    images = two_pictures()[:1]
    info, _ = record_one(tiny_models.llava_next(), "a <image> b", tmp_path / "a.h5", images, reader)
    # The whole picture in 4 x 4 patches; then 1 x 2 parts of 4 x 4, and the end of each of 4 rows.
    assert (info.image == 0).sum() == 16 + 4 * 8 + 4
    assert (info.patch == -1).all()


def test_a_picture_of_another_number_of_features_is_refused_by_counts():
    reader = tiny_models.qwen_vl_processor()
    reader.image_processor.merge_size = 1  # 32 patches, 32 image tokens; the model makes 8 of them
    prompt = Prompt("p", "a x <image> y", two_pictures()[:1])
    with pytest.raises(PromptError, match="expected 8 image tokens, one .* found 32"):
        prepare(tiny_models.qwen2_vl(), reader, prompt)


# ------------------------------------------------------------------------------- refused


def refusal(tmp_path, capsys, model, *options):
    """The one line with which hae-record refuses a model's folder; nothing is left."""
    folder = tiny_models.save(model, tiny_models.tokenizer(), tmp_path / "model")
    prompts = tiny_models.write_prompts(tmp_path, [{"text": "a"}])
    arguments = [str(folder), "--out", str(tmp_path / "out.h5"), "--prompts", str(prompts)]
    capsys.readouterr()  # saving shows its progress
    code = record.main([*arguments, *options])
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert {path.name for path in tmp_path.iterdir()} == {"model", "prompts.jsonl"}
    return code, line


def test_soft_capping_is_refused_in_one_line_before_any_work(tmp_path, capsys):
    code, line = refusal(tmp_path, capsys, tiny_models.gemma2(WINDOW, cap=50.0))
    assert code == 3
    assert "gemma2: logit soft-capping (attn_logit_softcapping is 50.0)" in line
    assert "python/README.md lists what can" in line


def test_gemma2_is_recorded_with_eager_attention_only(tmp_path, capsys):
    code, line = refusal(tmp_path, capsys, tiny_models.gemma2(WINDOW), "--attention", "sdpa")
    assert code == 3 and "does not support" in line and "eager" in line


def test_a_family_with_pictures_that_is_not_listed_is_refused(monkeypatch):
    model = tiny_models.llava()
    model.config.model_type = "newest_vl"
    with pytest.raises(decoder.UnsupportedModel, match="newest_vl: .* llava, llava_next, gemma3, qwen2_vl"):
        decoder.decoder_of(model)


def test_the_closed_loop_refuses_positions_that_it_would_lose():
    from hae import hf
    from hae.loop import evicting

    model, reader = tiny_models.qwen2_vl(), tiny_models.qwen_vl_processor()
    inputs = prepare(model, reader, Prompt("p", "a x <image> y", two_pictures()[:1]))
    with pytest.raises(decoder.UnsupportedModel, match="qwen2_vl: .* hae-record records this one"):
        hf.prepared(model, inputs.input_ids, inputs.pixel_values, inputs.image)
    with (
        pytest.raises(decoder.UnsupportedModel, match="qwen2_vl"),
        evicting(model, "greedy:budget=4", prompt=3, max_new_tokens=2),
    ):
        pass
