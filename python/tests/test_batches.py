"""Several prompts at a time, beams and chosen layers: the same sequences as one at a time."""

import numpy as np
import pytest
import tiny_models
import torch
from recording import contents, job_of, record_jobs, record_one
from test_families import PICTURE_FAMILIES, TEXT_FAMILIES, two_pictures
from transformers import LlamaForCausalLM

import hae
from hae import capture, generation, observers, record, trace, verify

TEXTS = ["a b c d e f g", "h", "i j k"]  # and <bos>: 8, 2 and 4 tokens
# Sums of a batch may be added up in another order. float32, numbers below 10.
CLOSE = 1e-5


def in_a_batch_and_alone(folder, model, reader, prompts, **settings):
    """Pairs of sequence groups: from one batch of all prompts, and each alone."""
    files = []
    for kind in ("batch", "alone"):
        (folder / kind).mkdir()
        jobs = [
            job_of(model, reader, f"p{i}", text, folder / kind / f"{i}.h5", images)
            for i, (text, images) in enumerate(prompts)
        ]
        for batch in [jobs] if kind == "batch" else [[job] for job in jobs]:
            record_jobs(model, batch, reader, **settings)
        files.append([job.part for job in jobs])
    return list(zip(*files, strict=True))


def expect_alike(found, expected):
    """Two files of one sequence: everything is equal, and payloads are close."""
    with trace.open_trace(found) as found, trace.open_trace(expected) as expected:
        names = []
        expected["sequences"].visit(names.append)
        found_names = []
        found["sequences"].visit(found_names.append)
        assert found_names == names
        for name in names:
            one, other = found["sequences"][name], expected["sequences"][name]
            assert dict(one.attrs) == dict(other.attrs)
            if not hasattr(other, "shape"):
                continue
            assert one.shape == other.shape
            if "/layers/" in name or name.endswith("embedding_similarity"):
                assert np.abs(one[()] - other[()]).max(initial=0) < CLOSE, name
            else:
                assert (one[()] == other[()]).all(), name


@pytest.mark.parametrize(
    ("family", "implementation"),
    [(family, "eager") for family in TEXT_FAMILIES]
    + [(family, "sdpa") for family in TEXT_FAMILIES if family != "gemma2"],  # which has none
)
def test_a_text_in_a_batch_is_recorded_as_alone(tmp_path, family, implementation):
    model, reader = TEXT_FAMILIES[family][0](), tiny_models.tokenizer()
    prompts = [(text, ()) for text in TEXTS]
    settings = {"max_new_tokens": 6, "implementation": implementation}
    for pair in in_a_batch_and_alone(tmp_path, model, reader, prompts, **settings):
        expect_alike(*pair)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_stored_attention_of_a_batch_has_no_padding(tmp_path, family):
    # A window of 4 loses the six tokens of padding of the second prompt one by one.
    model, reader = TEXT_FAMILIES[family][0](), tiny_models.tokenizer()
    prompts = [(text, ()) for text in TEXTS]
    settings = {"max_new_tokens": 6, "payload": "attention"}
    for pair in in_a_batch_and_alone(tmp_path, model, reader, prompts, **settings):
        expect_alike(*pair)


def test_pictures_whose_tokens_see_each_other_in_a_batch_are_recorded_as_alone(tmp_path):
    make, processor = PICTURE_FAMILIES["gemma3"]
    one, two = two_pictures()
    prompts = [("a b c x", [two]), ("c", []), ("x d e x", [one, two])]
    for pair in in_a_batch_and_alone(tmp_path, make(), processor(), prompts):
        expect_alike(*pair)


@pytest.mark.parametrize("family", ["llava", "llava_next"])
def test_pictures_in_a_batch_are_recorded_as_alone(tmp_path, family):
    make, processor = PICTURE_FAMILIES[family]
    one, two = two_pictures(family)
    if family == "llava_next":
        one = tiny_models.picture(0, 32, 32)  # five parts, and the other has three
    prompts = [("a <image> b", [two]), ("c", []), ("d <image> e <image>", [one, two])]
    settings = {"unrotated": True, "embedding_similarity": True}
    for pair in in_a_batch_and_alone(tmp_path, make(), processor(), prompts, **settings):
        expect_alike(*pair)


def test_a_sequence_of_a_batch_may_end_before_others(tmp_path):
    model, reader = tiny_models.llama(), tiny_models.tokenizer()
    info, _ = record_one(model, TEXTS[0], tmp_path / "a.h5", max_new_tokens=5)
    # What the first prompt goes on with second, and no other prompt first or second.
    model.generation_config.eos_token_id = int(info.token_id[9])
    prompts = [(text, ()) for text in TEXTS]
    pairs = in_a_batch_and_alone(tmp_path, model, reader, prompts, max_new_tokens=5)
    for pair in pairs:
        expect_alike(*pair)
    generated = []
    for path, _ in pairs:
        with trace.open_trace(path) as file:
            generated.append(int(file["sequences/000000"].attrs["generated"]))
    assert generated[0] == 2 and max(generated) > 2


def test_attention_to_padding_is_an_error():
    rows = torch.zeros((2, 5, 9))
    rows[0, 1, 2] = 1e-9
    assert observers.without_padding(rows, 2).shape == (2, 5, 7)
    with pytest.raises(capture.CaptureError, match="3 tokens of padding is not 0"):
        observers.without_padding(rows, 3)


# ---------------------------------------------------------------------------- the program


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "llama": tiny_models.save(tiny_models.llama(), tiny_models.tokenizer(), folder / "llama"),
        "qwen2": tiny_models.save(tiny_models.qwen2(4), tiny_models.tokenizer(), folder / "qwen2"),
    }


def run(folder, model, *options, texts=TEXTS):
    folder.mkdir(exist_ok=True)
    prompts = tiny_models.write_prompts(folder, [{"text": text} for text in texts])
    out = folder / "out.h5"
    arguments = [str(model), "--out", str(out), "--prompts", str(prompts), *options]
    return record.main([*arguments, "--max-new-tokens", "4", "--dtype", "float32"]), out


def test_what_is_verified_of_a_batch_includes_the_most_padding(
    tmp_path, folders, monkeypatch, capsys
):
    assert run(tmp_path / "right", folders["llama"], "--batch", "2")[0] == 0
    assert capsys.readouterr().out.count("verified: ") == 2
    exact = generation._prefill

    def unmasked(*given):  # the first prompt is the longest, so only others attend to padding
        fed = exact(*given)
        return fed | {"attention_mask": torch.ones_like(fed["attention_mask"])}

    monkeypatch.setattr(generation, "_prefill", unmasked)
    code, out = run(tmp_path / "wrong", folders["llama"], "--batch", "3")
    printed = capsys.readouterr()
    assert code == 1 and printed.out.count("verified: ") == 1
    assert "differs from the model's" in printed.err
    assert {path.name for path in out.parent.iterdir()} == {"prompts.jsonl"}


def test_a_model_that_numbers_tokens_in_three_dimensions_runs_alone(tmp_path, monkeypatch, capsys):
    from hae import session

    model, reader = tiny_models.qwen2_vl(), tiny_models.qwen_vl_processor()
    monkeypatch.setattr(session, "load_model", lambda *_: (model, reader))
    code, _ = run(tmp_path / "batch", tmp_path, "--batch", "2")
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert code == 2 and "--batch: qwen2_vl numbers the tokens" in line


# ---------------------------------------------------------------------------------- beams


BEAMS = 4


class Beams:
    """What transformers' beam search computed: queries and keys of all beams, and the path."""

    @torch.no_grad()
    def __init__(self, model: LlamaForCausalLM, ids: torch.Tensor, new_tokens: int) -> None:
        self.calls: dict[int, list] = {}

        def attention(module, query, key, value, mask, **options):
            new = slice(key.shape[2] - query.shape[2], None)
            taken = (query.clone(), key[:, :, new].clone(), value[:, :, new].clone())
            self.calls.setdefault(module.layer_idx, []).append(taken)
            return capture.attention_function(module, "eager")(
                module, query, key, value, mask, **options
            )

        with capture.dispatched_to(model, "beams", attention, "eager"):
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                num_beams=BEAMS,
                do_sample=False,
                max_new_tokens=new_tokens,
                return_dict_in_generate=True,
                output_scores=True,
            )
        self.tokens = found.sequences[0].tolist()
        # The beam whose scores gave the token, of each new token.
        self.beam = found.beam_indices[0].tolist()

    def along_the_path(self, layer: int, name: int, beams: list[int]) -> np.ndarray:
        """q, k or v of the tokens that were fed: [head, token, head_dim]."""
        steps = [call[name][beam] for call, beam in zip(self.calls[layer], beams, strict=True)]
        return torch.cat(steps, dim=1).numpy()


def test_the_winning_beam_is_recorded_along_its_path(tmp_path):
    model = tiny_models.llama()
    info, inputs = record_one(model, "a b c", tmp_path / "a.h5", max_new_tokens=8, beams=BEAMS)
    searched = Beams(model, inputs.input_ids, 8)
    assert info.token_id.tolist() == searched.tokens[:-1] and info.generated == 8
    greedy, _ = record_one(model, "a b c", tmp_path / "g.h5", max_new_tokens=8)
    assert greedy.token_id.tolist() != info.token_id.tolist()
    first = [0] * 8
    assert searched.beam != first
    with trace.open_trace(tmp_path / "a.h5") as file:
        group = file["sequences/000000"]
        assert group.attrs["beams"] == BEAMS
        for layer in range(2):
            for name, array in enumerate("qkv"):
                found = group[f"layers/{layer:06d}/{array}"][()]
                path = searched.along_the_path(layer, name, searched.beam)
                assert np.abs(found - path).max() < CLOSE
                # Beam 0 of every step is another sequence.
                assert np.abs(found - searched.along_the_path(layer, name, first)).max() > 0.1
    assert verify.verify_sequence(model, inputs, tmp_path / "a.h5", 1e-5) <= 1e-5
    assert hae.check(tmp_path / "a.h5") == []
    assert "beams" not in trace_attributes(tmp_path / "g.h5")


def trace_attributes(path):
    with trace.open_trace(path) as file:
        return dict(file["sequences/000000"].attrs)


def test_a_path_ends_at_its_end_token(tmp_path):
    model = tiny_models.llama()
    inputs = job_of(model, tiny_models.tokenizer(), "p", "a b c", tmp_path).inputs
    path = generation.best_of_beams(model, inputs, 8, BEAMS)
    assert len(path) == 8
    for end in set(path):
        model.generation_config.eos_token_id = [end]
        ended = generation.best_of_beams(model, inputs, 8, BEAMS)
        assert end not in ended[:-1] and (len(ended) == 8 or ended[-1] == end)
        info, _ = record_one(model, "a b c", tmp_path / "a.h5", max_new_tokens=8, beams=BEAMS)
        assert info.generated == len(ended)
        assert info.token_id[4:].tolist() == ended[:-1]


def test_what_else_a_model_asks_of_generation_does_not_change_the_path():
    model = tiny_models.llama()
    inputs = job_of(model, tiny_models.tokenizer(), "p", "a b c", None).inputs
    path = generation.best_of_beams(model, inputs, 8, BEAMS)
    asked = model.generation_config
    asked.repetition_penalty, asked.do_sample, asked.temperature = 50.0, True, 3.0
    assert generation.best_of_beams(model, inputs, 8, BEAMS) == path
    assert model.generation_config is asked


def test_beams_of_a_batch_and_of_pictures_are_those_of_one_alone(tmp_path):
    make, processor = PICTURE_FAMILIES["llava_next"]
    prompts = [("a <image> b", two_pictures()[:1]), ("c", [])]
    for pair in in_a_batch_and_alone(tmp_path, make(), processor(), prompts, beams=3):
        expect_alike(*pair)


def test_beams_with_positions_in_three_dimensions(tmp_path):
    model, reader = tiny_models.qwen2_5_vl(), tiny_models.qwen_vl_processor()
    images = two_pictures()[:1]
    path = tmp_path / "a.h5"
    info, inputs = record_one(model, "a x <image> y", path, images, reader, beams=3)
    assert info.position[-1].tolist() == [9] * 3  # as with greedy decoding
    assert verify.verify_sequence(model, inputs, path, 1e-5) <= 1e-5


# --------------------------------------------------------------------------------- layers


def test_chosen_layers_are_those_of_the_model(tmp_path, folders, capsys):
    _, whole = run(tmp_path / "whole", folders["qwen2"], "--unrotated")
    code, out = run(tmp_path / "some", folders["qwen2"], "--unrotated", "--layers", "2,1")
    assert code == 0
    assert "layers 1, 2 of the model are layers 0 to 1 of the file" in capsys.readouterr().out
    assert hae.check(out) == []
    with trace.open_trace(out) as file, trace.open_trace(whole) as full:
        group, expected = file["sequences/000001"], full["sequences/000001"]
        assert group["model_layer"][()].tolist() == [1, 2]
        assert (group.attrs["layers"], expected.attrs["layers"]) == (2, 3)
        assert group["window"][()].tolist() == [4, 4]
        assert expected["window"][()].tolist() == [0, 4, 4]
        for name in ("q", "k", "v", "q_unrotated"):
            for stored, layer in enumerate([1, 2]):
                found = group[f"layers/{stored:06d}/{name}"][()]
                assert (found == expected[f"layers/{layer:06d}/{name}"][()]).all()
        assert "model_layer" not in expected
    assert out.stat().st_size < whole.stat().st_size


def test_all_layers_by_number_are_all_layers(tmp_path, folders):
    code, out = run(tmp_path / "all", folders["qwen2"], "--layers", "0-2")
    assert code == 0
    with trace.open_trace(out) as file:
        assert "model_layer" not in file["sequences/000000"]


def test_a_layer_that_the_model_has_not_is_refused(tmp_path, folders, capsys):
    code, out = run(tmp_path / "none", folders["qwen2"], "--layers", "0,5-7")
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert code == 2 and "--layers: no layer 7; the model has 0 to 2" in line
    assert {path.name for path in out.parent.iterdir()} == {"prompts.jsonl"}


@pytest.mark.parametrize("layers", ["", "a", "3-1", "-1", "1-", "0,,1", "0-9999999999", "1.5", "²"])
def test_layers_that_are_no_list_are_a_usage_error(layers, capsys):
    with pytest.raises(SystemExit) as stopped:
        record.main(["m", "--out", "f.h5", "--prompts", "p.jsonl", f"--layers={layers}"])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "--layers" in line


# --------------------------------------------------------------------------------- resume


def test_a_resumed_run_of_batches_is_that_of_an_uninterrupted_one(
    tmp_path, folders, monkeypatch, capsys
):
    """The second of the first batch and the last sequence are missing."""
    options = ["--batch", "2", "--beams", "2"]
    _, whole = run(tmp_path / "whole", folders["llama"], *options)
    from hae import session

    exact = session.trace.join_traces

    def interrupted(parts, path, origin):
        parts[1].unlink()
        parts[2].unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(session.trace, "join_traces", interrupted)
    code, out = run(tmp_path / "resumed", folders["llama"], *options)
    assert code == 130 and not out.exists()
    monkeypatch.setattr(session.trace, "join_traces", exact)
    capsys.readouterr()
    for changed in (["--batch", "3"], ["--beams", "3"], ["--layers", "0"]):
        code, _ = run(tmp_path / "resumed", folders["llama"], *options, *changed, "--resume")
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert code == 2 and f"another value of {changed[0]} (" in line
    code, out = run(tmp_path / "resumed", folders["llama"], *options, "--resume")
    assert code == 0
    said = capsys.readouterr().out
    assert "000000: " not in said and "000001: 2 prompt tokens" in said and "000002: " in said
    assert contents(out) == contents(whole)
