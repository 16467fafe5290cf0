"""The closed loop inside transformers models, against plain generation, against a forward pass that
masks what was evicted, and against the open loop.
"""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

sys.path.insert(0, os.path.dirname(__file__))

import tiny_models  # noqa: E402
from tiny_models import llama, mistral  # noqa: E402

import hae  # noqa: E402
from hae import hf  # noqa: E402
from hae.capture import CaptureError, dispatched_to  # noqa: E402
from hae.decoder import cache_name, decoder_of  # noqa: E402
from hae.prompts import Prompt, prepare  # noqa: E402
from hae.session import load_model  # noqa: E402

LAYERS, KV_HEADS = tiny_models.LAYERS, tiny_models.KV_HEADS
STEPS = 12
# A forward pass without a cache adds the same float32 numbers in another order; logits are below 30.
LOGITS_ABSOLUTE = 1e-4


@pytest.fixture(scope="module")
def llava():
    return tiny_models.llava(), tiny_models.processor()


def text_prompt(model, length=14):
    ids = torch.randint(5, 31, (1, length), generator=torch.Generator().manual_seed(1))
    return hf.prepared(model, ids)


def picture_prompt(model, processor):
    picture = tiny_models.picture(0)
    prompt = Prompt(name="p", text="a b <image> c d e", images=[picture])
    inputs = prepare(model, processor, prompt)
    return hf.prepared(model, inputs.input_ids, inputs.pixel_values, inputs.image)


@pytest.fixture
def sequences(llava):
    """name -> (model, prompt): plain text, a sliding window, a picture."""
    model, processor = llava
    models = {"llama": llama(), "mistral": mistral(window=6)}
    return {name: (m, text_prompt(m)) for name, m in models.items()} | {
        "llava": (model, picture_prompt(model, processor))
    }


NAMES = ["llama", "mistral", "llava"]


# ------------------------------------------------------------------- nothing is evicted


@pytest.mark.parametrize(
    "policy", ["full", "greedy:budget=500", "hae:dap=none,budget=500,lane=kv_head"]
)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", NAMES)
def test_with_nothing_evicted_every_bit_is_plain_generation(
    sequences, name, implementation, policy
):
    model, prompt = sequences[name]
    decoder_of(model).set_attn_implementation(implementation)
    plain = hf.generate(model, prompt, None, max_new_tokens=STEPS)
    closed = hf.generate(model, prompt, policy, max_new_tokens=STEPS)
    assert len(plain.tokens) == STEPS
    assert closed.tokens == plain.tokens
    assert torch.equal(closed.logits, plain.logits)
    assert closed.run.log.empty
    assert closed.run.info.steps == STEPS - 1


def test_model_generate_runs_with_the_cache(llava):
    model, processor = llava
    picture = tiny_models.picture(0)
    prompt = Prompt(name="p", text="a b <image> c d e", images=[picture])
    inputs = prepare(model, processor, prompt)
    fed = {"input_ids": inputs.input_ids, "pixel_values": inputs.pixel_values}
    options = {"max_new_tokens": STEPS, "do_sample": False, "return_dict_in_generate": True}
    plain = model.generate(**fed, past_key_values=DynamicCache(), output_logits=True, **options)
    with hf.evicting(
        model, "full", prompt=len(inputs.image), image=inputs.image, max_new_tokens=STEPS
    ) as loop:
        closed = model.generate(**fed, **loop.as_cache, output_logits=True, **options)
    assert torch.equal(closed.sequences, plain.sequences)
    assert all(torch.equal(a, b) for a, b in zip(closed.logits, plain.logits, strict=True))
    manual = hf.prepared(model, inputs.input_ids, inputs.pixel_values, inputs.image)
    ours = hf.generate(model, manual, "greedy:budget=18", max_new_tokens=STEPS)
    with hf.evicting(
        model,
        "greedy:budget=18",
        prompt=len(inputs.image),
        image=inputs.image,
        max_new_tokens=STEPS,
    ) as loop:
        theirs = model.generate(**fed, **loop.as_cache, **options)
    assert theirs.sequences[0].tolist()[-STEPS:] == ours.tokens
    assert loop.run().json_lines() == ours.run.json_lines()


# ------------------------------------- a forward pass that masks what was evicted, without a cache


def hidden_keys(run: hae.Run, layer: int) -> np.ndarray:
    """[lanes, T, T] bool: row i may not see key j, because j left before row i attended."""
    tokens, prompt = run.info.tokens, run.info.prompt
    hidden = np.zeros((run.attention_tokens.shape[1], tokens, tokens), dtype=bool)
    for entry in run.log.itertuples():
        if entry.layer == layer:
            # Step s's row is position P + s - 1; evicted at step s, a token is missing from the next.
            first = 0 if entry.within else prompt + entry.step
            hidden[max(entry.lane, 0), first:, entry.token] = True
    return hidden


@torch.no_grad()
def masked_logits(model, prompt: hf.Prepared, answer: list[int], run: hae.Run) -> torch.Tensor:
    """Logits of a whole forward pass in which each layer's rows see what they saw in the loop."""

    def attention(module, query, key, value, mask, scaling=None, **options):
        heads = query.shape[1]
        key = key.repeat_interleave(heads // key.shape[1], dim=1)
        value = value.repeat_interleave(heads // value.shape[1], dim=1)
        logits = query @ key.transpose(2, 3) * scaling
        gone = torch.from_numpy(hidden_keys(run, module.layer_idx))
        gone = gone.repeat_interleave(heads // len(gone), dim=0)[None]
        # Rows of tokens that are gone themselves mean nothing; keep them finite.
        gone = gone & ~torch.eye(gone.shape[-1], dtype=torch.bool)
        weights = (logits + mask).masked_fill(gone, -torch.inf).softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    embed = model.get_input_embeddings()
    before = prompt.fed.get("inputs_embeds")
    before = embed(prompt.fed["input_ids"]) if before is None else before
    embeddings = torch.cat([before, embed(torch.tensor([answer[:-1]]))], dim=1)
    with dispatched_to(decoder_of(model), "masked", attention, "eager"):
        output = model(inputs_embeds=embeddings, use_cache=False)
    return output.logits[0, prompt.prompt - 1 :].float()


class Scripted(hae.Policy):
    """Evicts at random, by a seed: prunes within or after, then lanes at their own pace."""

    def __init__(self, seed: int, lanes: str, effect: str) -> None:
        self.lanes = lanes
        self.options = {"seed": seed, "effect": effect}

    def begin(self, info):
        return ScriptedRun(self.options["seed"], self.options["effect"], info)


class ScriptedRun(hae.PolicyRun):
    def __init__(self, seed, effect, info) -> None:
        self.random = np.random.default_rng(seed)
        self.effect, self.info = effect, info

    def prune(self, layer, cache):
        if layer > 0:
            return None
        gone = self.random.choice(self.info.prompt - 1, size=4, replace=False)
        return hae.Decision(
            evict=[hae.Evict(int(t), layer=l) for l in range(self.info.layers) for t in gone],  # noqa: E741
            effect=self.effect,
        )

    def step(self, rows, cache):
        evict, mark = [], []
        for lane in range(cache.lanes):
            pending = cache.pending(lane)
            free = np.setdiff1d(cache.residents(lane), pending)
            if len(pending) >= 2:  # the bin is emptied at once
                evict += [hae.Evict(int(t), lane=lane) for t in pending]
            elif len(free) > 3 and self.random.random() < 0.7:
                mark.append(hae.Mark(int(self.random.choice(free)), lane=lane))
            if len(free) > 5 and self.random.random() < 0.3:
                marked = [m.token for m in mark if m.lane == lane]
                evict.append(
                    hae.Evict(int(self.random.choice(np.setdiff1d(free, marked))), lane=lane)
                )
        return hae.Decision(evict=evict, mark=mark)


@pytest.mark.parametrize("effect", ["within", "after"])
@pytest.mark.parametrize("lanes", ["layer", "kv_head"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_logits_are_those_of_a_forward_pass_without_the_evicted_keys(
    sequences, name, implementation, lanes, effect, seed
):
    model, prompt = sequences[name]
    decoder_of(model).set_attn_implementation(implementation)
    answer = np.random.default_rng(seed).integers(5, 31, STEPS).tolist()
    closed = hf.teacher_forced(model, prompt, Scripted(seed, lanes, effect), answer)
    log = closed.run.log
    assert log.within.any() == (effect == "within")
    assert log.pending_since.notna().any() and (log.step > 0).sum() >= 6
    if lanes == "kv_head":  # lanes of one layer hold different numbers of tokens
        assert (closed.run.attention_tokens[:, 0] != closed.run.attention_tokens[:, 1]).any()
    torch.testing.assert_close(
        closed.logits,
        masked_logits(model, prompt, answer, closed.run),
        rtol=0,
        atol=LOGITS_ABSOLUTE,
    )
    plain = hf.teacher_forced(model, prompt, None, answer)
    assert not torch.allclose(closed.logits[1:], plain.logits[1:], atol=1e-3)


@pytest.mark.parametrize(
    "policy",
    [
        "hae:r=0.08,alpha=1,budget=16,bin=3",
        "hae:r=0.08,alpha=1,effect=after,ddes=none",
        "hae:r=0.08,alpha=1,broadcast=none,ddes=batch,bin=2,budget=15,recent=1",
        "greedy:budget=12,score=mean",
        "h2o/layerwise:budget=10",
        "window:sinks=2,recent=9",
        "random:budget=11",
    ],
)
def test_policies_of_the_table_evict_what_their_log_says(sequences, policy):
    model, prompt = sequences["llava"]
    answer = np.random.default_rng(9).integers(5, 31, STEPS).tolist()
    closed = hf.teacher_forced(model, prompt, policy, answer)
    assert len(closed.run.log) > 4
    torch.testing.assert_close(
        closed.logits,
        masked_logits(model, prompt, answer, closed.run),
        rtol=0,
        atol=LOGITS_ABSOLUTE,
    )


# ------------------------------------------------------------------------------- the open loop


@pytest.mark.parametrize(
    "policy", ["greedy:budget=12", "hae:dap=none,budget=12,bin=3", "h2o/layerwise:budget=9"]
)
@pytest.mark.parametrize("name", NAMES)
def test_teacher_forced_it_agrees_with_the_open_loop_where_inputs_are_equal(
    sequences, name, policy
):
    """Layer 0 computes from the same embeddings whatever is evicted: everything is equal there, bit
    for bit. Later layers are equal in the prefill, and while nothing has been evicted below them.
    """
    model, prompt = sequences[name]
    answer = np.random.default_rng(2).integers(5, 31, STEPS).tolist()
    with hf.recording(model, prompt) as recorded:
        hf.teacher_forced(model, prompt, None, answer)
        sequence = recorded()
    open_run = hae.replay(sequence, policy)[0]
    closed_run = hf.teacher_forced(model, prompt, policy, answer).run
    first = open_run.log[open_run.log.layer == 0]
    assert len(first) > 4
    assert closed_run.log[closed_run.log.layer == 0].equals(first)
    for metric, values in open_run.decode.items():
        np.testing.assert_array_equal(closed_run.decode[metric][0], values[0])

    # Prefill decisions of every layer come before any changed activation.
    def at_prefill(run):
        return run.log[run.log.step == 0].reset_index(drop=True)

    assert at_prefill(closed_run).equals(at_prefill(open_run))


def test_a_recording_is_what_the_model_attended_to(sequences):
    model, prompt = sequences["llava"]
    decoder_of(model).set_attn_implementation("eager")
    with hf.recording(model, prompt, name="n", group="g") as recorded:
        plain = hf.generate(model, prompt, None, max_new_tokens=STEPS)
        sequence = recorded()
    info = sequence.info
    assert (info.name, info.group, info.prompt, info.steps) == ("n", "g", prompt.prompt, STEPS - 1)
    np.testing.assert_array_equal(info.image[: info.prompt], prompt.image)
    embed = model.get_input_embeddings()
    embeddings = torch.cat(
        [prompt.fed["inputs_embeds"], embed(torch.tensor([plain.tokens[:-1]]))], dim=1
    )
    with torch.no_grad():
        output = model(inputs_embeds=embeddings, use_cache=False, output_attentions=True)
    for layer, attention in enumerate(output.attentions):
        np.testing.assert_allclose(sequence.attention(layer), attention[0].numpy(), atol=1e-5)


# ------------------------------------------------------------------------------------ memory


def test_eviction_gives_memory_back(sequences):
    model, prompt = sequences["llama"]
    with hf.evicting(
        model, "hae:dap=none,budget=8,bin=3", prompt=prompt.prompt, max_new_tokens=STEPS
    ) as loop:
        name = cache_name(model)
        with torch.no_grad():
            model(**prompt.fed, **{name: loop.cache})
        # 2 layers x K and V x 2 KV heads x 8 tokens x 8 dimensions x 4 bytes
        assert loop.cache.nbytes == LAYERS * 2 * KV_HEADS * 8 * 8 * 4
        sizes = []
        for step in range(1, STEPS):
            with torch.no_grad():
                model(input_ids=torch.tensor([[step + 5]]), **{name: loop.cache})
            layer = loop.cache.layers[1]
            assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes
            assert loop.cache.nbytes == sum(one.nbytes for one in loop.cache.layers)
            sizes.append(layer.keys.shape[2])
    # l = 8, D = 3: a token is marked a step from the first step on, and the third mark empties the bin.
    assert sizes == [9, 10, 8, 9, 10, 8, 9, 10, 8, 9, 10]
    run = loop.run()
    # At attention time: before the step's own decision.
    assert run.attention_tokens[1, 0].tolist() == [9, 10, 11, 9, 10, 11, 9, 10, 11, 9, 10]


def test_pruned_tokens_are_not_computed(sequences):
    model, prompt = sequences["llava"]
    rows = []
    layers = getattr(decoder_of(model), "model", decoder_of(model)).layers
    hook = layers[1].mlp.register_forward_hook(lambda _, given, __: rows.append(given[0].shape[1]))
    try:
        closed = hf.generate(model, prompt, "hae:r=0.08,alpha=1,ddes=none", max_new_tokens=2)
    finally:
        hook.remove()
    pruned = int((closed.run.log.within & (closed.run.log.layer == 1)).sum())
    assert pruned > 3
    assert rows == [prompt.prompt - pruned, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models_run(dtype):
    model = llama().to(dtype)
    prompt = text_prompt(model)
    plain = hf.generate(model, prompt, None, max_new_tokens=STEPS)
    closed = hf.generate(model, prompt, "full", max_new_tokens=STEPS)
    assert torch.equal(closed.logits, plain.logits)
    evicted = hf.generate(model, prompt, "greedy:budget=6", max_new_tokens=STEPS)
    assert evicted.run.info.element_bytes == 2 and len(evicted.run.log) > 0


# ---------------------------------------------------------------------------------- refusals


def state_of(model) -> tuple:
    layers = getattr(decoder_of(model), "model", decoder_of(model)).layers
    return (
        decoder_of(model).config._attn_implementation,
        sorted(ALL_ATTENTION_FUNCTIONS._global_mapping),
        sorted(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping),
        [len(layer._forward_pre_hooks) for layer in layers],
    )


class Prunes(hae.Policy):
    def __init__(self, evict):
        self.entries = evict

    def begin(self, info):
        entries = self.entries

        class Run(hae.PolicyRun):
            def prune(self, layer, cache):
                return hae.Decision(evict=entries) if layer == 0 else None

        return Run()


@pytest.mark.parametrize(
    "case, message",
    [
        ("batch", "attention over a batch of 2, expected a batch of 1"),
        ("chunked", "a prefill of 5 rows, expected 14"),
        ("many", "2 rows in one step after the prefill, expected 1"),
        ("steps", "outgrows the 15 tokens that were announced"),
        ("last", "the last prompt token left within the prefill of layer 1"),
        ("image", "image has 3 entries, expected prompt = 14"),
        ("spec", "unknown option 'budgt'"),
        ("empty", "0 new ones; expected 1 or more"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence_and_undone(case, message):
    model = llama()
    prompt = text_prompt(model)
    ids = prompt.fed["input_ids"]
    before = state_of(model)
    policy = Prunes([hae.Evict(13, layer=1)]) if case == "last" else "full"
    policy = "greedy:budgt=3" if case == "spec" else policy
    name = cache_name(model)
    options = {"image": [-1] * 3} if case == "image" else {}
    most = {"steps": 2, "empty": 0}.get(case, 5)
    with pytest.raises(
        (hf.ClosedLoopError, CaptureError, hae.ConfigError), match=message
    ) as raised:  # noqa: PT012
        with hf.evicting(model, policy, prompt=14, max_new_tokens=most, **options) as loop:
            with torch.no_grad():
                first = {"batch": ids.repeat(2, 1), "chunked": ids[:, :5]}.get(case, ids)
                model(input_ids=first, **{name: loop.cache})
                rows = [[7, 8]] if case == "many" else [[7]]
                for _ in range(2):
                    model(input_ids=torch.tensor(rows), **{name: loop.cache})
    assert "\n" not in str(raised.value)
    assert state_of(model) == before


def test_a_token_cannot_return_to_a_later_layer():
    model = llama(num_hidden_layers=3)
    prompt = text_prompt(model)
    with pytest.raises(
        hf.ClosedLoopError, match="token 2 left within the prefill of layer 1 and not of layer 2"
    ):
        hf.generate(model, prompt, Prunes([hae.Evict(2, layer=1)]), max_new_tokens=2)


def test_a_model_that_gives_numbers_that_are_not_finite_is_named():
    model = llama()
    prompt = text_prompt(model)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] = torch.nan
    with pytest.raises(
        hae.TraceError, match="layer 1, KV head 0, token 0: the value vector is not finite"
    ):
        hf.generate(model, prompt, "greedy:budget=4", max_new_tokens=2)


def test_compiled_models_and_other_attention_are_refused():
    model = llama()
    compiled = torch.compile(llama())
    with pytest.raises(CaptureError, match="is compiled"):
        with hf.evicting(compiled, "full", prompt=3, max_new_tokens=2):
            pass
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(CaptureError, match="flex_attention"):
        with hf.evicting(model, "full", prompt=3, max_new_tokens=2):
            pass


def test_an_error_of_a_python_policy_comes_through():
    class Broken(hae.Policy):
        def begin(self, info):
            class Run(hae.PolicyRun):
                def step(self, rows, cache):
                    raise KeyError("mine")

            return Run()

    model = llama()
    before = state_of(model)
    with pytest.raises(KeyError, match="mine"):
        hf.generate(model, text_prompt(model), Broken(), max_new_tokens=3)
    assert state_of(model) == before


def test_the_board_reader_reads_on_with_pruned_pictures():
    """The committed model: its answer survives when nothing but empty patches leave."""
    folder = Path(__file__).resolve().parents[1] / "models" / "board-reader"
    model, processor = load_model(folder, "float32", "cpu", "sdpa")
    sys.path.insert(0, str(folder.parent))
    import boards
    from PIL import Image

    board = boards.boards("validation", 1, seed=1)[0]
    prompt = Prompt(name="b", text=boards.prompt("list"), images=[Image.fromarray(board.pixels)])
    inputs = prepare(model, processor, prompt)
    ready = hf.prepared(model, inputs.input_ids, inputs.pixel_values, inputs.image)
    plain = hf.generate(model, ready, None, max_new_tokens=12)
    pruned = hf.generate(model, ready, "hae:r=0.0066,alpha=1,ddes=none", max_new_tokens=12)
    assert len(pruned.run.log) > 20
    assert pruned.tokens == plain.tokens
