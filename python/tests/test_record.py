"""The recorder, from models of random weights to finished trace files."""

import argparse
import io
import json
import sys
import tracemalloc
from pathlib import Path

import h5py
import numpy as np
import pytest
import tiny_models
import torch
from recording import ORIGIN, contents, record_one
from safetensors.torch import load_file, save_file
from tiny_models import HEAD_DIM, KV_HEADS, LAYERS, QUERY_HEADS, VISUAL_TOKENS
from transformers import AttentionInterface, AttentionMaskInterface

from hae import capture, decoder, observers, record, recorder, session, trace, verify
from hae.progress import progress

FIVE_TOKENS = "a b c d"  # and <bos>


@pytest.fixture(scope="session")
def text_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    return tiny_models.save(tiny_models.llama(), tiny_models.tokenizer(), folder)


@pytest.fixture(scope="session")
def picture_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny-llava"
    return tiny_models.save(tiny_models.llava(), tiny_models.processor(), folder)


def run(folder, model, entries, *options):
    """What a user calls: hae-record's exit code, and the path of its file."""
    prompts = tiny_models.write_prompts(folder, entries)
    out = folder / "out.h5"
    arguments = [str(model), "--out", str(out), "--prompts", str(prompts), *options]
    return record.main(arguments), out


def one_line(text: str) -> str:
    lines = text.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


# ---------------------------------------------------------------------------- what is written


def test_rows_are_one_fewer_than_generated_tokens(tmp_path, text_model):
    code, out = run(tmp_path, text_model, [{"text": FIVE_TOKENS}], "--max-new-tokens", "3")
    assert code == 0
    with trace.open_trace(out) as file:
        attributes = file["sequences/000000"].attrs
        prompt, tokens = attributes["prompt"], attributes["tokens"]
        assert (prompt, tokens, attributes["generated"]) == (5, 7, 3)
        assert attributes["generated"] == tokens - prompt + 1


def test_one_generated_token_leaves_no_decode_row(tmp_path, text_model):
    code, out = run(tmp_path, text_model, [{"text": FIVE_TOKENS}], "--max-new-tokens", "1")
    assert code == 0
    with trace.open_trace(out) as file:
        assert file["sequences/000000"].attrs["tokens"] == 5


def test_every_layer_has_query_key_and_value_of_every_token(tmp_path, text_model):
    code, out = run(tmp_path, text_model, [{"text": FIVE_TOKENS}], "--max-new-tokens", "3")
    assert code == 0
    with trace.open_trace(out) as file:
        group = file["sequences/000000"]
        assert list(group["layers"]) == [f"{layer:06d}" for layer in range(LAYERS)]
        for layer in group["layers"].values():
            assert layer["q"].shape == (QUERY_HEADS, 7, HEAD_DIM)
            assert layer["k"].shape == layer["v"].shape == (KV_HEADS, 7, HEAD_DIM)
        assert group.attrs["scale"] == HEAD_DIM**-0.5
        assert group.attrs["model"] == "tiny-llama"
        assert group.attrs["attention_implementation"] == "eager"
        assert file.attrs["command"].startswith("hae-record ")


def test_a_text_model_has_no_visual_tokens(tmp_path, text_model):
    _, out = run(tmp_path, text_model, [{"text": FIVE_TOKENS}], "--max-new-tokens", "2")
    with trace.open_trace(out) as file:
        group = file["sequences/000000"]
        assert not group["modality"][()].any()
        assert (group["image"][()] == -1).all()
        assert "pictures" not in group
        assert group["token"].asstr()[()].tolist()[:5] == ["<bos>", "a", "b", "c", "d"]


def test_two_pictures_in_one_prompt_are_mapped_and_kept(tmp_path, picture_model):
    for number in range(2):
        tiny_models.picture(number).save(tmp_path / f"{number}.png")
    entry = {"text": "a <image> b <image> c", "images": ["0.png", "1.png"], "group": "g"}
    code, out = run(tmp_path, picture_model, [entry], "--max-new-tokens", "3")
    assert code == 0
    with trace.open_trace(out) as file:
        group = file["sequences/000000"]
        pictures = [0] * VISUAL_TOKENS + [-1] + [1] * VISUAL_TOKENS
        assert group["image"][()].tolist() == [-1, -1, *pictures, -1, -1, -1]
        assert (group["modality"][()] == (group["image"][()] >= 0)).all()
        assert group["patch"][2 + 5].tolist() == [1, 1]
        assert (group["pictures/1"][()] == np.asarray(tiny_models.picture(1))).all()
        assert group.attrs["group"] == "g"


def test_generation_stops_at_an_end_token_which_is_counted(tmp_path):
    model = tiny_models.llama()
    info, _ = record_one(model, FIVE_TOKENS, tmp_path / "a.h5", max_new_tokens=4)
    model.generation_config.eos_token_id = [int(info.token_id[5])]  # the first one generated
    info, _ = record_one(model, FIVE_TOKENS, tmp_path / "b.h5", max_new_tokens=4)
    assert (info.tokens, info.generated) == (5, 1)


def test_attention_is_stored_as_a_square_and_rows_of_growing_width(tmp_path):
    model = tiny_models.llama()
    info, inputs = record_one(model, FIVE_TOKENS, tmp_path / "a.h5", payload="attention")
    assert (info.generated, info.tokens) == (3, 7)
    with trace.open_trace(tmp_path / "a.h5") as file:
        layer = file["sequences/000000/layers/000000"]
        assert layer["prompt"].shape == (QUERY_HEADS, 5, 5)
        assert layer["decode"].shape == (QUERY_HEADS, 6 + 7)
        assert layer["decode"][:, :6].sum(axis=1) == pytest.approx(1, abs=1e-5)
        assert layer["decode"][:, 6:].sum(axis=1) == pytest.approx(1, abs=1e-5)
        assert "q" not in layer
    assert verify.verify_sequence(model, inputs, tmp_path / "a.h5", 1e-5) <= 1e-5


def test_unrotated_queries_are_those_of_the_projection(tmp_path):
    model = tiny_models.llama()
    seen = []
    projection = model.model.layers[1].self_attn.q_proj
    hook = projection.register_forward_hook(lambda module, given, output: seen.append(output[0]))
    record_one(model, FIVE_TOKENS, tmp_path / "a.h5", unrotated=True)
    hook.remove()
    # Three forward passes, of 5, 1 and 1 rows, after the probe's none.
    expected = torch.cat(seen).reshape(7, QUERY_HEADS, HEAD_DIM).transpose(0, 1)
    with trace.open_trace(tmp_path / "a.h5") as file:
        group = file["sequences/000000"]
        found = group["layers/000001/q_unrotated"][()]
        assert group["rotary/inverse_frequency"].shape == (HEAD_DIM // 2,)
        assert group["rotary"].attrs["interleaved"] == 0
    # A rotation and its inverse in float32: a few units in the last place of numbers below 8.
    assert np.abs(found - expected.numpy()).max() < 1e-5


def test_embedding_similarity_is_between_visual_and_text_tokens_of_the_prompt(tmp_path):
    model = tiny_models.llava()
    picture = tiny_models.picture(0)
    options = {"images": [picture], "reader": tiny_models.processor()}
    _, inputs = record_one(
        model, "a <image> b", tmp_path / "a.h5", embedding_similarity=True, **options
    )
    features = model.get_image_features(pixel_values=inputs.pixel_values).pooler_output[0]
    text = model.get_input_embeddings()(torch.tensor([1, 5, 6]))  # <bos> a b
    with trace.open_trace(tmp_path / "a.h5") as file:
        found = file["sequences/000000/embedding_similarity"][()]
    assert found == pytest.approx((features @ text.T).detach().numpy(), rel=1e-4, abs=1e-5)


def test_the_same_command_writes_the_same_bytes(tmp_path, text_model):
    files = []
    for _ in range(2):
        run(tmp_path, text_model, [{"text": FIVE_TOKENS}], "--max-new-tokens", "3")
        files.append((tmp_path / "out.h5").read_bytes())
    assert files[0] == files[1]


def test_a_sliding_window_becomes_the_mask_rule(tmp_path):
    model = tiny_models.mistral(window=4)
    path = tmp_path / "a.h5"
    _, inputs = record_one(model, "a b c d e f g", path, max_new_tokens=6)
    with trace.open_trace(path) as file:
        assert file["sequences/000000/window"][()].tolist() == [4, 4]
    assert verify.verify_sequence(model, inputs, path, 1e-5) <= 1e-5
    with h5py.File(path, "r+") as file:
        file["sequences/000000/window"][...] = 0
    with pytest.raises(verify.VerificationError):
        verify.verify_sequence(model, inputs, path, 1e-5)


def test_a_sliding_window_keeps_its_width_in_stored_attention(tmp_path):
    model = tiny_models.mistral(window=4)
    path = tmp_path / "a.h5"
    _, inputs = record_one(model, "a b c", path, max_new_tokens=6, payload="attention")
    assert verify.verify_sequence(model, inputs, path, 1e-5) <= 1e-5


# -------------------------------------------------------------------------------- verification


@pytest.mark.parametrize(("dtype", "tolerance"), verify.TOLERANCE.items())
def test_attention_from_the_file_is_the_models_within_the_tolerance(tmp_path, dtype, tolerance):
    model = tiny_models.llava()
    _, inputs = record_one(
        model,
        "a <image> b",
        tmp_path / "a.h5",
        images=[tiny_models.picture(0)],
        reader=tiny_models.processor(),
        dtype=dtype,
    )
    worst = verify.verify_sequence(model, inputs, tmp_path / "a.h5", tolerance)
    assert 0 < worst <= tolerance


def test_sdpa_records_what_eager_records(tmp_path):
    model = tiny_models.llama()
    for implementation in ("eager", "sdpa"):
        path = tmp_path / f"{implementation}.h5"
        record_one(model, FIVE_TOKENS, path, implementation=implementation)
    with (
        trace.open_trace(tmp_path / "eager.h5") as eager,
        trace.open_trace(tmp_path / "sdpa.h5") as sdpa,
    ):
        for name in ("q", "k", "v"):
            where = f"sequences/000000/layers/000001/{name}"
            assert np.abs(eager[where][()] - sdpa[where][()]).max() < 1e-4
        assert sdpa["sequences/000000"].attrs["attention_implementation"] == "sdpa"


def test_query_heads_read_interleaved_kv_heads(tmp_path):
    model = tiny_models.llama()
    path = tmp_path / "a.h5"
    _, inputs = record_one(model, FIVE_TOKENS, path)
    with h5py.File(path, "r+") as file:
        for layer in file["sequences/000000/layers"].values():
            # Heads 0 2 1 3: what a reader that tiles KV heads would make of the file.
            layer["q"][...] = layer["q"][()][[0, 2, 1, 3]]
    with pytest.raises(verify.VerificationError, match="query head 1"):
        verify.verify_sequence(model, inputs, path, 5e-3)


@pytest.mark.parametrize("payload", ["qkv", "attention"])
def test_a_tampered_number_fails_verification_and_is_named(tmp_path, payload):
    model = tiny_models.llama()
    path = tmp_path / "a.h5"
    _, inputs = record_one(model, FIVE_TOKENS, path, payload=payload)
    with h5py.File(path, "r+") as file:
        name = "q" if payload == "qkv" else "prompt"
        numbers = file[f"sequences/000000/layers/000001/{name}"]
        numbers[2, 4] = numbers[2, 4][::-1]
    with pytest.raises(verify.VerificationError, match="layer 1, query head 2, row 4"):
        verify.verify_sequence(model, inputs, path, 5e-3)


def test_a_nan_in_the_file_fails_verification(tmp_path):
    model = tiny_models.llama()
    _, inputs = record_one(model, FIVE_TOKENS, tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        file["sequences/000000/layers/000000/k"][0, 0, 0] = np.nan
    with pytest.raises(verify.VerificationError):
        verify.verify_sequence(model, inputs, tmp_path / "a.h5", 5e-3)


def test_a_failed_verification_leaves_no_file(tmp_path, text_model, monkeypatch, capsys):
    exact = trace.encoded
    monkeypatch.setattr(trace, "encoded", lambda values, dtype: exact(values * 0.5, dtype))
    code, out = run(tmp_path, text_model, [{"text": FIVE_TOKENS}], "--max-new-tokens", "3")
    assert code == 1
    error = one_line(capsys.readouterr().err)
    assert "differs from the model's" in error and "try --dtype float32" in error
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_the_tolerance_follows_the_coarser_type():
    assert verify.tolerance_of("float32", "float32") == 1e-5
    assert verify.tolerance_of("float32", "float16") == 5e-3
    assert verify.tolerance_of("bfloat16", "float32") == 4e-2


# -------------------------------------------------------- models that give nothing to record


class ClosedAttention(torch.nn.Module):
    """Attention that does not go through transformers' interface."""

    def __init__(self, attention: torch.nn.Module) -> None:
        super().__init__()
        self.v_proj, self.o_proj = attention.v_proj, attention.o_proj

    def forward(self, hidden_states, **options):
        value = self.v_proj(hidden_states)
        return self.o_proj(torch.cat([value, value], dim=-1)), None


def closed_model(layers) -> torch.nn.Module:
    model = tiny_models.llama()
    for layer in layers:
        model.model.layers[layer].self_attn = ClosedAttention(model.model.layers[layer].self_attn)
    return model


@pytest.mark.parametrize("layers", [[0, 1], [1]])
def test_attention_that_is_not_dispatched_stops_before_generation(
    tmp_path, monkeypatch, capsys, layers
):
    model = closed_model(layers)
    monkeypatch.setattr(session, "load_model", lambda *_: (model, tiny_models.tokenizer()))
    monkeypatch.setattr(recorder, "generate", lambda *_: pytest.fail("generated"))
    code, out = run(tmp_path, tmp_path, [{"text": FIVE_TOKENS}])
    assert code == 1
    error = one_line(capsys.readouterr().err)
    assert "attention implementation in use: sdpa" in error
    assert "(eager or sdpa) needed" in error
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_a_compiled_model_stops_before_generation(tmp_path, monkeypatch, capsys):
    model = torch.compile(tiny_models.llama())
    monkeypatch.setattr(session, "load_model", lambda *_: (model, tiny_models.tokenizer()))
    code, _ = run(tmp_path, tmp_path, [{"text": FIVE_TOKENS}])
    assert code == 1
    error = one_line(capsys.readouterr().err)
    assert "compiled" in error and "in use: sdpa" in error and "eager or sdpa" in error


@pytest.mark.parametrize(
    ("setting", "value", "feature"),
    [
        ("attn_logit_softcapping", 50.0, "logit soft-capping"),
        ("block_configs", [{}, {}], "head counts that differ between layers"),
        ("add_cross_attention", True, "cross-attention"),
        ("layer_types", ["full_attention", "linear_attention"], "linear_attention"),
        ("is_encoder_decoder", True, "cross-attention"),
    ],
)
def test_a_feature_that_a_trace_cannot_express_is_refused_by_name(setting, value, feature):
    model = tiny_models.llama()
    setattr(model.config, setting, value)
    with pytest.raises(decoder.UnsupportedModel, match=feature):
        decoder.decoder_of(model)


def test_soft_capping_passed_to_attention_is_refused_by_name():
    model = tiny_models.llama()
    with (
        pytest.raises(capture.CaptureError, match="logit soft-capping"),
        capture.intercepted(model, "eager", lambda call: None),
    ):
        model(input_ids=torch.ones((1, 3), dtype=torch.long), softcap=30.0)


def test_head_counts_that_differ_between_layers_are_seen_in_the_probe():
    model = tiny_models.llama()
    attention = model.model.layers[1].self_attn
    for name in ("k_proj", "v_proj"):
        setattr(attention, name, torch.nn.Linear(32, QUERY_HEADS * HEAD_DIM, bias=False))
    attention.num_key_value_groups = 1
    with pytest.raises(capture.CaptureError, match="head counts"):
        capture.probe(model, "eager")


# ----------------------------------------------------------------------- every call, exactly once


def test_four_layers_and_three_steps_are_twelve_records(tmp_path, monkeypatch):
    counted = []
    exact = capture.CallCount.add
    monkeypatch.setattr(
        capture.CallCount,
        "add",
        lambda self, layer, step: (counted.append((layer, step)), exact(self, layer, step)),
    )
    record_one(tiny_models.llama(num_hidden_layers=4), FIVE_TOKENS, tmp_path / "a.h5")
    assert sorted(counted) == [(layer, step) for layer in range(4) for step in range(3)]


def test_missing_and_duplicate_pairs_are_listed():
    count = capture.CallCount(layers=2)
    for layer, step in [(0, 0), (1, 0), (1, 0), (0, 1)]:
        count.add(layer, step)
    with pytest.raises(capture.CaptureError, match=r"expected 4 .* missing: \(1, 1\); .*\(1, 0\)"):
        count.check(steps=2)


def test_a_layer_that_runs_twice_leaves_no_file(tmp_path):
    model = tiny_models.llama()
    attention = model.model.layers[1].self_attn
    once = attention.forward

    def twice(*given, **options):
        cache = "cache" if "cache" in options else "past_key_values"
        once(*given, **{**options, cache: None})
        return once(*given, **options)

    attention.forward = twice
    with pytest.raises(capture.CaptureError, match=r"duplicate or unexpected: \(1, 0\)"):
        record_one(model, FIVE_TOKENS, tmp_path / "a.h5")
    assert list(tmp_path.iterdir()) == []


def test_hooks_and_registrations_are_gone_after_an_exception():
    model = tiny_models.llama()
    before = capture.implementation_in_use(model)
    with pytest.raises(ZeroDivisionError), capture.intercepted(model, "eager", lambda call: 1 / 0):
        model(input_ids=torch.ones((1, 3), dtype=torch.long))
    assert capture.implementation_in_use(model) == before
    for interface in (AttentionInterface, AttentionMaskInterface):
        assert not [name for name in interface._global_mapping if "hae" in name]
    model(input_ids=torch.ones((1, 3), dtype=torch.long))


def test_surplus_slots_of_a_pre_allocated_cache_are_trimmed_when_zero():
    rows = torch.zeros((2, 5, 9))
    rows[..., :5] = 0.2
    assert observers.own_keys(rows, 5).shape == (2, 5, 5)


def test_attention_to_a_surplus_slot_is_an_error():
    rows = torch.zeros((2, 5, 9))
    rows[0, 1, 7] = 1e-9
    with pytest.raises(capture.CaptureError, match="slots beyond the 5 tokens"):
        observers.own_keys(rows, 5)


@pytest.fixture
def image_token_generator():
    """Whatever this model reads, it goes on with an image token."""
    model = tiny_models.llava()
    with torch.no_grad():
        model.lm_head.weight.zero_()
        # The last state is always all ones, and only one token likes that.
        norm = model.model.language_model.norm
        norm.weight.zero_()
        norm.register_forward_hook(lambda module, given, output: output + 1)
        model.lm_head.weight[tiny_models.IMAGE_TOKEN] = 1.0
    return model


def test_a_generated_image_token_stops_the_recording_in_one_line(
    tmp_path, image_token_generator, monkeypatch, capsys
):
    reader = tiny_models.processor()
    monkeypatch.setattr(session, "load_model", lambda *_: (image_token_generator, reader))
    tiny_models.picture(0).save(tmp_path / "p.png")
    entry = {"text": "a <image> b", "images": ["p.png"]}
    code, out = run(tmp_path, tmp_path, [entry], "--max-new-tokens", "3")
    assert code == 1 and not out.exists()
    assert "generated an image token (id 4) as new token 1" in one_line(capsys.readouterr().err)
    assert not (tmp_path / "out.h5.parts").exists()


def test_an_image_token_that_is_never_fed_back_is_recorded(
    tmp_path, image_token_generator, monkeypatch
):
    reader = tiny_models.processor()
    monkeypatch.setattr(session, "load_model", lambda *_: (image_token_generator, reader))
    assert run(tmp_path, tmp_path, [{"text": "a"}], "--max-new-tokens", "1")[0] == 0


def test_a_token_without_text_is_shown_by_its_number(tmp_path):
    rows = len(tiny_models.WORDS) + 9
    model = tiny_models.llama(vocab_size=rows)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[-1] = 0.1
        model.lm_head.weight[-2] = -0.1  # one of the two has the largest logit
    info, _ = record_one(model, FIVE_TOKENS, tmp_path / "a.h5")
    assert set(info.token[5:]) <= {f"<{rows - 1}>", f"<{rows - 2}>"}


# ----------------------------------------------------------------------------- size and memory


def test_full_attention_of_a_large_model_is_counted_before_recording():
    shape = decoder.Shape(layers=32, query_heads=32, kv_heads=8, head_dim=128)
    assert shape.prefill_attention_bytes(3000, 2) == 18_432_000_000
    assert shape.prefill_attention_bytes(3000, 2) // shape.layers == 576_000_000
    assert session.size_text(18_432_000_000) == "18,432,000,000 bytes (17.17 GiB)"
    # (32 + 2 * 8) heads of 128 numbers.
    assert shape.qkv_bytes(3000, 2) == 32 * 3000 * 48 * 128 * 2


@pytest.mark.parametrize("payload", trace.PAYLOADS)
def test_the_planned_size_is_what_the_payload_takes(tmp_path, payload):
    model = tiny_models.llama()
    info, _ = record_one(model, FIVE_TOKENS, tmp_path / "a.h5", payload=payload)
    with trace.open_trace(tmp_path / "a.h5") as file:
        layers = file["sequences/000000/layers"].values()
        stored = sum(numbers.nbytes for layer in layers for numbers in layer.values())
    shape = decoder.shape_of(model)
    assert shape.payload_bytes(payload, info.prompt, info.tokens, 4) == stored


def test_the_planned_size_has_room_for_pictures_similarity_and_metadata(
    tmp_path, picture_model, monkeypatch
):
    planned = []
    exact = session.refuse_above_limit
    monkeypatch.setattr(
        session,
        "refuse_above_limit",
        lambda total, *rest: (planned.append(total), exact(total, *rest)),
    )
    tiny_models.picture(0).resize((16, 16)).save(tmp_path / "p.png")
    entries = [{"text": "a <image> b", "images": ["p.png"]}, {"text": "c"}]
    options = ["--max-new-tokens", "3", "--embedding-similarity", "--unrotated"]
    code, out = run(tmp_path, picture_model, entries, *options)
    assert code == 0
    assert out.stat().st_size <= planned[0]


def test_pictures_and_similarity_are_counted():
    options = argparse.Namespace(embedding_similarity=False, max_new_tokens=1)
    bare = session.Extent(tokens=30, visual=10, picture_bytes=0, pictures=0)
    full = session.Extent(tokens=30, visual=10, picture_bytes=10**6, pictures=0)
    without = bare.metadata_bytes(2, options)
    assert full.metadata_bytes(2, options) - without == 10**6
    options.embedding_similarity = True
    assert bare.metadata_bytes(2, options) - without == 10 * 20 * 4


@pytest.mark.parametrize(("finished", "fits"), [(0, False), (1000, True)])
def test_parts_and_joined_file_must_fit_together(tmp_path, monkeypatch, finished, fits):
    monkeypatch.setattr(session.shutil, "disk_usage", lambda _: argparse.Namespace(free=1500))
    options = argparse.Namespace(
        limit_bytes=None, out=tmp_path / "a.h5", payload="qkv", dtype="float16"
    )
    if fits:
        session.refuse_above_limit(1000, finished, options)
        return
    with pytest.raises(session.RecordError, match="above the free space of 1,500 bytes"):
        session.refuse_above_limit(1000, finished, options)


@pytest.mark.parametrize(
    ("options", "instead"),
    [
        (["--payload", "attention"], "--payload qkv"),
        (["--dtype", "float32"], "--dtype float16"),
        ([], "--max-new-tokens"),
    ],
)
def test_a_recording_above_the_limit_is_refused_with_an_alternative(
    tmp_path, text_model, capsys, options, instead
):
    code, out = run(tmp_path, text_model, [{"text": "a b"}], "--limit-bytes", "9", *options)
    assert code == 2
    printed = capsys.readouterr()
    assert "above the --limit-bytes of 9 bytes" in printed.err and instead in one_line(printed.err)
    assert "full attention of the longest prompt would take" in printed.out
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_extra_memory_stays_within_two_layers(tmp_path):
    shape = decoder.Shape(layers=12, query_heads=4, kv_heads=4, head_dim=32)
    prompt, steps = 400, 4
    spool = observers.Spool(tmp_path / "spool", "float16")
    taken = observers.SequenceCapture(spool, shape, "qkv", None)
    one_layer = shape.qkv_bytes(prompt + steps, 2) // shape.layers
    keys = torch.randn(shape.kv_heads, prompt + steps, shape.head_dim)
    tracemalloc.start()
    for rows in [prompt] + [1] * steps:
        taken.begin_step(rows)
        query = keys[:, :rows]
        for layer in range(shape.layers):
            seen = keys[:, : taken._tokens]
            taken.observe(capture.AttentionCall(layer, query, seen, seen, None, 1.0, 0))
        taken.end_step()
    with h5py.File(tmp_path / "a.h5", "w") as file:
        taken.write(file.create_group("s"), prompt, "float16")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * one_layer


# --------------------------------------------------------------------------- interrupted runs


ENTRIES = [{"text": "a b"}, {"text": "c d e"}, {"text": "f"}]


def interrupt_at(monkeypatch, index: int) -> None:
    """Ctrl-C in the batch that has this sequence."""
    exact = recorder.Recorder.record

    def interrupted(self, jobs, *rest):
        for job in jobs:
            if job.part.name == f"{index:06d}.h5":
                # What a kill in the middle of a sequence leaves behind.
                job.part.with_name(job.part.name + ".partial").write_bytes(b"half")
                job.part.with_name(job.part.name + ".spool").mkdir()
                raise KeyboardInterrupt
        return exact(self, jobs, *rest)

    monkeypatch.setattr(recorder.Recorder, "record", interrupted)


def test_a_killed_recorder_keeps_its_finished_sequences(tmp_path, text_model, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2)
        code, out = run(tmp_path, text_model, ENTRIES, "--max-new-tokens", "2")
    assert code == 130 and not out.exists()
    for index, name in enumerate(["000000", "000001"]):
        with trace.open_trace(tmp_path / "out.h5.parts" / f"{name}.h5") as file:
            assert file["sequences/000000"].attrs["name"] == f"{index:06d}"


def test_resume_gives_what_an_uninterrupted_run_gives(tmp_path, text_model, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        interrupt_at(patch, 1)
        run(tmp_path, text_model, ENTRIES, "--max-new-tokens", "2")
    code, out = run(tmp_path, text_model, ENTRIES, "--max-new-tokens", "2")
    assert code == 2 and "--resume" in capsys.readouterr().err
    code, out = run(tmp_path, text_model, ENTRIES, "--max-new-tokens", "2", "--resume")
    assert code == 0 and not (tmp_path / "out.h5.parts").exists()
    whole = tmp_path / "whole"
    whole.mkdir()
    _, expected = run(whole, text_model, ENTRIES, "--max-new-tokens", "2")
    assert contents(out) == contents(expected)


def test_a_finished_part_of_another_model_is_not_joined(tmp_path, text_model, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        interrupt_at(patch, 1)
        run(tmp_path, text_model, ENTRIES, "--max-new-tokens", "2")
    other = tiny_models.llama(initializer_range=0.8)
    monkeypatch.setattr(session, "load_model", lambda *_: (other, tiny_models.tokenizer()))
    code, out = run(tmp_path, text_model, ENTRIES, "--max-new-tokens", "2", "--resume")
    assert code == 1 and not out.exists()
    assert "000000.h5: not of this model" in capsys.readouterr().err
    assert (tmp_path / "out.h5.parts" / "000000.h5").exists()


def test_parts_of_other_prompts_are_not_resumed(tmp_path, text_model, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        interrupt_at(patch, 1)
        run(tmp_path, text_model, ENTRIES, "--max-new-tokens", "2")
    code, _ = run(tmp_path, text_model, [{"text": "z", "name": "other"}], "--resume")
    assert code == 2
    assert "which is not prompt 0 of this run" in capsys.readouterr().err


@pytest.fixture
def interrupted_run(tmp_path, text_model, monkeypatch):
    """Two of three sequences are finished."""
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2)
        run(tmp_path, text_model, ENTRIES, "--max-new-tokens", "2", "--compute-dtype", "float32")
    return tmp_path / "out.h5.parts"


@pytest.mark.parametrize(
    ("options", "differs"),
    [
        (["--max-new-tokens", "3"], r"--max-new-tokens (2, now 3)"),
        (["--dtype", "bfloat16"], "--dtype (float16, now bfloat16)"),
        (["--compute-dtype", "bfloat16"], "--compute-dtype (float32, now bfloat16)"),
        (["--attention", "sdpa"], "--attention (eager, now sdpa)"),
        (["--payload", "attention"], "--payload (qkv, now attention)"),
        (["--unrotated"], "--unrotated (False, now True)"),
        (["--embedding-similarity"], "--embedding-similarity (False, now True)"),
    ],
)
def test_parts_recorded_with_other_options_are_not_resumed(
    tmp_path, text_model, interrupted_run, capsys, options, differs
):
    capsys.readouterr()
    code, out = run(tmp_path, text_model, ENTRIES, "--max-new-tokens", "2", "--resume", *options)
    assert code == 2 and not out.exists()
    error = one_line(capsys.readouterr().err)
    assert "000000.h5" in error and differs in error


@pytest.mark.parametrize(
    ("changed", "differs"),
    [({"text": "c d z"}, "the prompt's tokens"), ({"text": "c d e", "group": "g"}, "group")],
)
def test_a_part_of_a_changed_prompt_is_not_resumed(
    tmp_path, text_model, interrupted_run, capsys, changed, differs
):
    capsys.readouterr()
    entries = [ENTRIES[0], changed, ENTRIES[2]]
    code, _ = run(tmp_path, text_model, entries, "--max-new-tokens", "2", "--resume")
    error = one_line(capsys.readouterr().err)
    assert code == 2 and "000001.h5" in error and differs in error


def test_a_part_of_another_picture_is_not_resumed(tmp_path, picture_model, monkeypatch, capsys):
    entries = [{"text": "<image>", "images": ["p.png"]}, {"text": "a"}]
    tiny_models.picture(0).save(tmp_path / "p.png")
    with monkeypatch.context() as patch:
        interrupt_at(patch, 1)
        run(tmp_path, picture_model, entries, "--max-new-tokens", "2")
    tiny_models.picture(1).save(tmp_path / "p.png")
    capsys.readouterr()
    code, _ = run(tmp_path, picture_model, entries, "--max-new-tokens", "2", "--resume")
    assert code == 2 and "the prompt's pictures" in one_line(capsys.readouterr().err)


def test_a_part_of_another_recorder_is_named(tmp_path, text_model, interrupted_run, capsys):
    capsys.readouterr()
    with h5py.File(interrupted_run / "000001.h5", "r+") as file:
        file.attrs["command"] = "hae-record --old-option"
    code, _ = run(tmp_path, text_model, ENTRIES, "--max-new-tokens", "2", "--resume")
    error = one_line(capsys.readouterr().err)
    assert code == 3 and "000001.h5: cannot be read: its command" in error


def test_a_damaged_part_is_named_and_can_be_recorded_again(
    tmp_path, text_model, interrupted_run, capsys
):
    capsys.readouterr()
    part = interrupted_run / "000000.h5"
    part.write_bytes(b"damaged")
    options = ["--max-new-tokens", "2", "--resume"]
    code, _ = run(tmp_path, text_model, ENTRIES, *options)
    error = one_line(capsys.readouterr().err)
    assert code == 3 and "000000.h5: cannot be read" in error and "remove it" in error
    part.unlink()
    code, out = run(tmp_path, text_model, ENTRIES, *options)
    assert code == 0 and capsys.readouterr().out.count("verified") == 2
    with trace.open_trace(out) as file:
        assert len(file["sequences"]) == 3


def test_resume_leaves_a_complete_file_of_the_same_run_as_it_is(tmp_path, text_model, capsys):
    _, out = run(tmp_path, text_model, ENTRIES, "--max-new-tokens", "2")
    folder = tmp_path / "out.h5.parts"  # the recorder was killed while it removed its parts
    folder.mkdir()
    with h5py.File(out) as whole, trace.new_trace(folder / "000002.h5", ORIGIN) as part:
        part.attrs["recorder"], part.attrs["command"] = (
            whole.attrs[name] for name in ("recorder", "command")
        )
        whole.copy("sequences/000002", part["sequences"], name="000000")
    before = out.stat()
    capsys.readouterr()
    code, _ = run(tmp_path, text_model, ENTRIES, "--max-new-tokens", "2", "--resume")
    assert code == 0 and "generated" not in capsys.readouterr().out
    assert (out.stat().st_ino, out.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert not folder.exists()


@pytest.mark.parametrize("differs", ["options", "prompts", "model"])
def test_resume_replaces_a_complete_file_of_another_run(
    tmp_path, text_model, monkeypatch, capsys, differs
):
    run(tmp_path, text_model, ENTRIES, "--max-new-tokens", "2")
    entries, options = list(ENTRIES), ["--max-new-tokens", "2", "--resume"]
    if differs == "options":
        options[1] = "3"
    if differs == "prompts":
        entries.append({"text": "z"})
    if differs == "model":
        other = tiny_models.llama(initializer_range=0.8)
        monkeypatch.setattr(session, "load_model", lambda *_: (other, tiny_models.tokenizer()))
    capsys.readouterr()
    code, out = run(tmp_path, text_model, entries, *options)
    assert code == 0 and capsys.readouterr().out.count("generated") == len(entries)
    with trace.open_trace(out) as file:
        assert len(file["sequences"]) == len(entries)


# ------------------------------------------------------------------------------- the output


def refused(capsys, model, out, prompts) -> str:
    """The one line with which an output path is refused, before the model loads."""
    code = record.main([str(model), "--out", str(out), "--prompts", str(prompts)])
    assert code == 2
    return one_line(capsys.readouterr().err)


def test_no_input_is_overwritten(tmp_path, picture_model, capsys):
    tiny_models.picture(0).save(tmp_path / "p.partial", format="PNG")
    tiny_models.picture(0).save(tmp_path / "p.png")
    entry = {"text": "<image> <image>", "images": ["p.png", "p.partial"]}
    prompts = tiny_models.write_prompts(tmp_path, [entry])
    files = [prompts, tmp_path / "p.png", picture_model / "config.json"]
    before = [path.read_bytes() for path in files]
    for out in (prompts, tmp_path / "p.png", tmp_path / "p"):
        assert "would overwrite the input" in refused(capsys, picture_model, out, prompts)
    error = refused(capsys, picture_model, picture_model / "config.json", prompts)
    assert "a file of the model" in error
    assert [path.read_bytes() for path in files] == before


def test_prompts_in_the_folder_of_parts_are_not_removed(tmp_path, text_model, capsys):
    folder = tmp_path / "out.h5.parts"
    folder.mkdir()
    prompts = tiny_models.write_prompts(folder, [{"text": "a"}])
    assert "overwrite" in refused(capsys, text_model, tmp_path / "out.h5", prompts)
    assert prompts.exists()


def test_only_an_earlier_trace_is_overwritten(tmp_path, text_model, capsys):
    out = tmp_path / "out.h5"
    out.write_bytes(b"mine")
    prompts = tiny_models.write_prompts(tmp_path, [{"text": "a"}])
    assert "exists and is not a trace" in refused(capsys, text_model, out, prompts)
    assert out.read_bytes() == b"mine"
    with h5py.File(out, "w") as file:
        file.attrs["format"] = "hae-run"
    assert "exists and is not a trace" in refused(capsys, text_model, out, prompts)
    with h5py.File(out, "w") as file:
        file.attrs["format"] = trace.FORMAT
    assert run(tmp_path, text_model, [{"text": "a"}], "--max-new-tokens", "1")[0] == 0


def test_an_output_that_cannot_be_written_is_a_usage_error(
    tmp_path, text_model, capsys, monkeypatch
):
    prompts = tiny_models.write_prompts(tmp_path, [{"text": "a"}])
    monkeypatch.chdir(tmp_path)
    for out in (".", "..", str(tmp_path)):
        assert "is a folder" in refused(capsys, text_model, out, prompts)
    assert "no such folder" in refused(capsys, text_model, "none/a.h5", prompts)
    assert "name too long" in refused(capsys, text_model, "n" * 300, prompts)
    assert "name too long" in refused(capsys, text_model, "n" * 250, prompts)
    Path("a.h5.parts").write_text("")
    assert "a.h5.parts is not a folder" in refused(capsys, text_model, "a.h5", prompts)
    monkeypatch.setattr(session.os, "access", lambda *_: False)
    assert "nothing can be written" in refused(capsys, text_model, "b.h5", prompts)


def test_a_full_disk_is_one_line_and_leaves_no_file(tmp_path, text_model, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(observers.Spool, "append", full)
    code, out = run(tmp_path, text_model, [{"text": "a"}])
    assert code == 2
    error = one_line(capsys.readouterr().err)
    assert str(out) in error and "No space left" in error
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_a_closed_stdout_does_not_stop_the_recording(tmp_path, text_model, monkeypatch):
    class Closed:
        def write(self, text):
            raise BrokenPipeError

        def flush(self):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    code, out = run(tmp_path, text_model, [{"text": "a"}], "--max-new-tokens", "2")
    assert code == 0 and out.exists()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_how_far_it_is_and_the_time_left(tmp_path, text_model, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    code, _ = run(tmp_path, text_model, ENTRIES, "--max-new-tokens", "2")
    assert code == 0
    last = sys.stderr.getvalue().split("\r")[-1]
    assert "recording: 100%" in last and "6/6" in last and "<00:00" in last


def test_sequences_that_end_early_count_as_whole(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress(sequences=3, max_new_tokens=10) as bar:
        bar.step(2)
        bar.step(1)  # one of two has ended
        bar.finish(2)
        bar.step(1)
    assert "21/30" in sys.stderr.getvalue().split("\r")[-1]


def test_nothing_but_a_terminal_shows_progress(tmp_path, text_model, capsys):
    assert run(tmp_path, text_model, [{"text": "a"}], "--max-new-tokens", "2")[0] == 0
    assert capsys.readouterr().err == ""


# ------------------------------------------------------------------------------ model folders


def change_weights(folder, change) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def saved_llama(tmp_path, **changes):
    model = tiny_models.llama(**changes)
    return tiny_models.save(model, tiny_models.tokenizer(), tmp_path / "model")


def test_missing_weights_are_refused_by_name(tmp_path, capsys):
    folder = saved_llama(tmp_path)
    change_weights(folder, lambda weights: weights.pop("model.layers.1.self_attn.v_proj.weight"))
    code, out = run(tmp_path, folder, [{"text": "a"}])
    assert code == 3 and not out.exists()
    error = one_line(capsys.readouterr().err)
    assert "1 weights are missing: model.layers.1.self_attn.v_proj.weight" in error


def test_weights_of_another_shape_are_refused_by_name(tmp_path, capsys):
    folder = saved_llama(tmp_path)
    change_weights(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(5)}))
    assert run(tmp_path, folder, [{"text": "a"}])[0] == 3
    assert "1 weights are of another shape: model.norm.weight" in capsys.readouterr().err


def test_tied_weights_are_not_missing(tmp_path):
    folder = saved_llama(tmp_path, tie_word_embeddings=True)
    assert run(tmp_path, folder, [{"text": "a"}], "--max-new-tokens", "2")[0] == 0


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
def test_a_model_that_asks_for_flash_attention_is_recorded(tmp_path, key):
    folder = saved_llama(tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: "flash_attention_2"}))
    assert run(tmp_path, folder, [{"text": "a"}], "--max-new-tokens", "2")[0] == 0


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", b"cut off"),
        ("model.safetensors", b""),
        ("config.json", b"{"),
        ("config.json", b"\xff"),
        ("config.json", b"[]"),
        ("tokenizer.json", b"{}"),
    ],
)
def test_a_damaged_model_file_is_bad_input(tmp_path, capsys, name, content):
    folder = saved_llama(tmp_path)
    (folder / name).write_bytes(content)
    code, out = run(tmp_path, folder, [{"text": "a"}])
    assert code == 3 and not out.exists()
    assert f"{folder}: the model does not load" in one_line(capsys.readouterr().err)


def test_a_tokenizer_with_more_words_than_the_model_is_bad_input(tmp_path, capsys):
    folder = saved_llama(tmp_path, vocab_size=10)
    code, out = run(tmp_path, folder, [{"text": "z"}])
    assert code == 3 and not out.exists()
    assert "index out of range" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize("device", ["cuda:99", "nonsense"])
def test_a_device_that_is_not_there_is_a_usage_error(tmp_path, text_model, capsys, device):
    code, _ = run(tmp_path, text_model, [{"text": "a"}], "--device", device)
    assert code == 2
    assert f"--device {device}" in one_line(capsys.readouterr().err)


def test_pictures_for_a_text_model_are_bad_input(tmp_path, text_model, capsys):
    tiny_models.picture(0).save(tmp_path / "p.png")
    code, out = run(tmp_path, text_model, [{"text": "a", "images": ["p.png"]}])
    assert code == 3 and not out.exists()
    assert "has 1 picture, but the model takes none" in one_line(capsys.readouterr().err)


def test_unrotated_queries_are_refused_for_other_rotations(tmp_path):
    model = tiny_models.llama()
    model.config.model_type = "cohere"
    with pytest.raises(decoder.UnsupportedModel, match="--unrotated: model type cohere"):
        record_one(model, "a", tmp_path / "a.h5", unrotated=True)


# --------------------------------------------------------------------------------- messages


def test_a_folder_without_a_model_is_bad_input(tmp_path, capsys):
    code, _ = run(tmp_path, tmp_path, [{"text": "a"}])
    assert code == 3
    assert "no config.json" in one_line(capsys.readouterr().err)


def test_a_missing_prompts_file_is_bad_input(tmp_path, text_model, capsys):
    arguments = ["--out", str(tmp_path / "a.h5"), "--prompts", str(tmp_path / "none.jsonl")]
    assert record.main([str(text_model), *arguments]) == 3
    assert "none.jsonl: cannot be read" in one_line(capsys.readouterr().err)


def test_pictures_that_do_not_match_their_placeholders_are_bad_input(
    tmp_path, picture_model, capsys
):
    tiny_models.picture(0).save(tmp_path / "p.png")
    entry = {"text": "a b", "images": ["p.png"]}
    code, out = run(tmp_path, picture_model, [entry])
    assert code == 3 and not out.exists()
    assert "000000" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    "options", [["--dtype", "float8"], ["--max-new-tokens", "0"], ["--payload", "kv"], []]
)
def test_a_wrong_option_is_a_usage_error(options, capsys):
    with pytest.raises(SystemExit) as stopped:
        record.main(["model", "--out", "f.h5", *options])
    assert stopped.value.code == 2
    assert "see hae-record --help" in one_line(capsys.readouterr().err)


def test_options_that_exclude_each_other_are_a_usage_error(tmp_path, text_model, capsys):
    code, _ = run(tmp_path, text_model, [{"text": "a"}], "--unrotated", "--payload", "attention")
    assert code == 2
    assert "--unrotated" in one_line(capsys.readouterr().err)


def test_attention_cannot_be_stored_finer_than_it_is_computed(capsys):
    options = ["--payload", "attention", "--dtype", "float32", "--compute-dtype", "bfloat16"]
    assert record.main(["model", "--out", "f.h5", "--prompts", "p.jsonl", *options]) == 2
    assert "use --dtype bfloat16 or --payload qkv" in one_line(capsys.readouterr().err)


def test_a_number_too_large_for_the_type_is_named_and_leaves_no_file(tmp_path):
    model = tiny_models.llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.mul_(1e6)
    with pytest.raises(trace.TraceError, match="layer 1, v: .* does not fit in float16"):
        record_one(model, FIVE_TOKENS, tmp_path / "a.h5", dtype="float16")
    assert list(tmp_path.iterdir()) == []


def test_joining_removes_its_own_parts_and_nothing_of_others(tmp_path, text_model):
    folder = tmp_path / "out.h5.parts"
    (folder / "000000.h5.spool").mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    code, out = run(tmp_path, text_model, [{"text": "a b"}])
    assert code == 0 and out.exists()
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
