"""The closed loop inside transformers models, against plain generation, against a forward pass that
masks what was evicted, and against the open loop.
"""

import os
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

sys.path.insert(0, os.path.dirname(__file__))

import tiny_models  # noqa: E402
from tiny_models import llama, mistral, qwen2  # noqa: E402

import hae  # noqa: E402
from hae import hf  # noqa: E402
from hae.capture import CaptureError, dispatched_to  # noqa: E402
from hae.decoder import UnsupportedModel, decoder_of, layers_of  # noqa: E402
from hae.evicting_cache import ABSENT  # noqa: E402
from hae.prompts import Prompt, prepare  # noqa: E402
from hae.session import load_model  # noqa: E402

LAYERS, KV_HEADS = tiny_models.LAYERS, tiny_models.KV_HEADS
STEPS = 12
WINDOW = 13  # of models that have one; a larger budget is capped there
# A forward pass without a cache adds the same float32 numbers in another order; logits are below
# 30, so this is a few parts in a million of them.
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
    """name -> (model, prompt): plain text, a sliding window, windows in some layers, a picture."""
    model, processor = llava
    models = {
        "llama": llama(num_hidden_layers=3),
        "mistral": mistral(WINDOW),
        "qwen2": qwen2(WINDOW),
    }
    return {name: (m, text_prompt(m)) for name, m in models.items()} | {
        "llava": (model, picture_prompt(model, processor))
    }


WITHOUT_WINDOW = ["llama", "llava"]
NAMES = [*WITHOUT_WINDOW, "mistral", "qwen2"]


# ------------------------------------------------------------------- nothing is evicted


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("name", "policy"),
    [(name, "full") for name in NAMES]
    + [
        (name, policy)
        for name in WITHOUT_WINDOW
        for policy in ("greedy:budget=500", "hae:dap=none,budget=500,lane=kv_head")
    ],
)
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


@pytest.mark.parametrize("policy", ["greedy:budget=500", "hae:dap=none,budget=500,lane=kv_head"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["mistral", "qwen2"])
def test_a_budget_that_is_capped_at_a_window_changes_no_answer(
    sequences, name, implementation, policy
):
    """What leaves is out of sight of every later row. Fewer keys are added in another order."""
    model, prompt = sequences[name]
    decoder_of(model).set_attn_implementation(implementation)
    plain = hf.generate(model, prompt, None, max_new_tokens=STEPS)
    closed = hf.generate(model, prompt, policy, max_new_tokens=STEPS)
    assert closed.tokens == plain.tokens
    torch.testing.assert_close(closed.logits, plain.logits, rtol=0, atol=LOGITS_ABSOLUTE)
    run = closed.run
    windowed = run.info.window == WINDOW
    assert windowed.tolist() == [True] * LAYERS if name == "mistral" else [False, True, True]
    assert set(run.log.layer) == set(np.flatnonzero(windowed))
    assert (run.decode["missed_mass"] == 0).all()
    assert (run.attention_tokens[windowed].max(axis=-1) == WINDOW + 1).all()
    assert sum("capped at 13" in warning for warning in run.warnings) == windowed.sum()


@pytest.mark.filterwarnings("error::FutureWarning")
def test_model_generate_runs_with_the_cache(llava):
    model, processor = llava
    picture = tiny_models.picture(0)
    prompt = Prompt(name="p", text="a b <image> c d e", images=[picture])
    inputs = prepare(model, processor, prompt)
    fed = {"input_ids": inputs.input_ids, "pixel_values": inputs.pixel_values}
    options = {"max_new_tokens": STEPS, "do_sample": False, "return_dict_in_generate": True}
    plain = model.generate(**fed, cache=DynamicCache(), output_logits=True, **options)
    with hf.evicting(
        model, "full", prompt=len(inputs.image), image=inputs.image, max_new_tokens=STEPS
    ) as loop:
        closed = model.generate(**fed, **loop.as_cache, output_logits=True, **options)
    assert torch.equal(closed.sequences, plain.sequences)
    assert all(torch.equal(a, b) for a, b in zip(closed.logits, plain.logits, strict=True))
    manual = hf.prepared(model, inputs.input_ids, inputs.pixel_values, inputs.image)
    whole = hf.generate(model, manual, None, max_new_tokens=STEPS)
    assert torch.equal(whole.logits, torch.cat(plain.logits).float())
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
            # Step s's row is position P + s - 1; what goes at step s is missing from the next row.
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
    fed_back = torch.tensor([answer[:-1]], dtype=torch.long)
    embeddings = torch.cat([before, embed(fed_back)], dim=1)
    with dispatched_to(decoder_of(model), "masked", attention, "eager"):
        output = model(inputs_embeds=embeddings, use_cache=False)
    return output.logits[0, prompt.prompt - 1 :].float()


class Scripted(hae.Policy):
    """Evicts at random, by a seed: each layer's prefill prunes two more tokens of all layers, done
    or to come, then lanes evict at their own pace.
    """

    def __init__(self, seed: int, lanes: str, effect: str) -> None:
        self.lanes = lanes
        self.options = {"seed": seed, "effect": effect}

    def begin(self, info):
        return ScriptedRun(self.options["seed"], self.options["effect"], info)


class ScriptedRun(hae.PolicyRun):
    def __init__(self, seed, effect, info) -> None:
        self.random = np.random.default_rng(seed)
        self.effect, self.info = effect, info
        self.there = np.arange(info.prompt - 1)  # the last prompt token has to stay

    def prune(self, layer, cache):
        gone = self.random.choice(self.there, size=2, replace=False)
        self.there = np.setdiff1d(self.there, gone)
        return hae.Decision(
            evict=[
                hae.Evict(int(token), layer=of) for of in range(self.info.layers) for token in gone
            ],
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
@pytest.mark.parametrize("seed", range(2))
def test_logits_are_those_of_a_forward_pass_without_the_evicted_keys(
    sequences, name, implementation, lanes, effect, seed
):
    model, prompt = sequences[name]
    decoder_of(model).set_attn_implementation(implementation)
    answer = np.random.default_rng(seed).integers(5, 31, STEPS).tolist()
    closed = hf.teacher_forced(model, prompt, Scripted(seed, lanes, effect), answer)
    log = closed.run.log
    assert log.within.any() == (effect == "within")
    if effect == "within":  # a layer's prefill lacks what the prefills before it pruned
        pruned = log[log.within].groupby("layer").token.nunique().to_dict()
        assert pruned == {layer: 2 * layer for layer in range(1, closed.run.info.layers)}
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


class KeepsNothing(hae.Policy):
    """After each step, of one KV head (lane 0) all leaves, of the other all but two tokens."""

    lanes = "kv_head"

    def begin(self, info):
        class Run(hae.PolicyRun):
            def step(self, rows, cache):
                return hae.Decision(
                    evict=[
                        hae.Evict(int(token), lane=lane)
                        for lane in range(cache.lanes)
                        for token in cache.residents(lane)[2 * lane :]
                    ]
                )

        return Run()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_lane_can_be_emptied(sequences, implementation):
    model, prompt = sequences["llama"]
    decoder_of(model).set_attn_implementation(implementation)
    answer = np.random.default_rng(3).integers(5, 31, STEPS).tolist()
    closed = hf.teacher_forced(model, prompt, KeepsNothing(), answer)
    # At attention time: the new token is there.
    assert closed.run.attention_tokens[0, :, 1:].tolist() == [[1] * (STEPS - 2), [3] * (STEPS - 2)]
    assert closed.run.final_tokens.tolist() == [[0, 2]] * 3
    torch.testing.assert_close(
        closed.logits,
        masked_logits(model, prompt, answer, closed.run),
        rtol=0,
        atol=LOGITS_ABSOLUTE,
    )


@pytest.mark.parametrize("steps", [1, STEPS])
@pytest.mark.parametrize("tokens", [1, 2])
def test_the_shortest_prompts_and_answers_run(tokens, steps):
    model = llama()
    prompt = text_prompt(model, tokens)
    plain = hf.generate(model, prompt, None, max_new_tokens=steps)
    closed = hf.generate(model, prompt, "full", max_new_tokens=steps)
    assert torch.equal(closed.logits, plain.logits)
    assert closed.run.info.steps == steps - 1
    evicting = hf.teacher_forced(model, prompt, "greedy:budget=2", plain.tokens)
    assert evicting.run.final_tokens.tolist() == [[min(2, tokens + steps - 1)]] * LAYERS
    torch.testing.assert_close(
        evicting.logits,
        masked_logits(model, prompt, plain.tokens, evicting.run),
        rtol=0,
        atol=LOGITS_ABSOLUTE,
    )


# ------------------------------------------------------------------------------- the open loop


def open_and_closed(model, prompt, policy) -> tuple[hae.Run, hae.Run]:
    """Runs of a policy over a given answer: replayed from a recording, and in the model."""
    answer = np.random.default_rng(2).integers(5, 31, STEPS).tolist()
    with hf.recording(model, prompt) as recorded:
        hf.teacher_forced(model, prompt, None, answer)
        sequence = recorded()
    return hae.replay(sequence, policy)[0], hf.teacher_forced(model, prompt, policy, answer).run


def entries(run: hae.Run, layer: int, last_step: int = STEPS):
    log = run.log[(run.log.layer == layer) & (run.log.step <= last_step)]
    return log.reset_index(drop=True)


@pytest.mark.parametrize(
    "policy",
    [
        "greedy:budget=12",
        "hae:dap=none,budget=12,bin=3",
        "hae:r=0.08,alpha=1,budget=10,bin=3",
        "hae:r=0.08,alpha=1,effect=after,budget=10,bin=2,lane=kv_head",
        "h2o/layerwise:budget=9",
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_teacher_forced_layer_0_is_the_open_loop(sequences, name, policy):
    """Layer 0 computes from the same embeddings, whatever is evicted: each bit is equal there."""
    opened, closed = open_and_closed(*sequences[name], policy)
    assert len(entries(opened, 0)) > 4
    assert entries(closed, 0).equals(entries(opened, 0))
    assert (opened.decode["missed_mass"][0] > 0).any()
    for metric, values in opened.decode.items():
        np.testing.assert_array_equal(closed.decode[metric][0], values[0])


@pytest.mark.parametrize(
    "policy", ["greedy:budget=12", "hae:dap=none,budget=12,bin=3", "h2o/layerwise:budget=9"]
)
@pytest.mark.parametrize("name", NAMES)
def test_decisions_of_the_prefill_are_the_open_loops_in_every_layer(sequences, name, policy):
    """A prefill is over before any of its tokens is missed, unless they leave within it."""
    opened, closed = open_and_closed(*sequences[name], policy)
    for layer in range(opened.info.layers):
        assert len(entries(opened, layer, last_step=0)) > 1
        assert entries(closed, layer, last_step=0).equals(entries(opened, layer, last_step=0))


@pytest.mark.parametrize("policy", ["greedy", "hae:bin=3", "hae:bin=3,lane=kv_head", "random"])
@pytest.mark.parametrize("name", WITHOUT_WINDOW)
def test_teacher_forced_a_layer_is_the_open_loop_until_a_layer_below_misses_a_token(
    sequences, name, policy
):
    """Budget P + 3 is passed at step 4, whose row is computed before anything leaves. So the rows
    of step 4 are equal in all layers, and the decisions on them; the next ones are not.
    """
    model, prompt = sequences[name]
    dap = "dap=none," if policy.startswith("hae") else ""
    separator = "," if ":" in policy else ":"
    spec = f"{policy}{separator}{dap}budget={prompt.prompt + 3}"
    opened, closed = open_and_closed(model, prompt, spec)
    below = STEPS
    for layer in range(opened.info.layers):
        assert entries(closed, layer, below).equals(entries(opened, layer, below))
        for metric in opened.decode:  # row s - 1 is that of step s
            np.testing.assert_array_equal(
                closed.decode[metric][layer, :, :below], opened.decode[metric][layer, :, :below]
            )
        below = min(below, int(opened.log[opened.log.layer == layer].step.min()))
        # Mark: a token a step from step 4 on, the third empties the bin.
        assert below == (6 if "bin=3" in policy else 4)
    last = opened.info.layers - 1
    assert len(entries(opened, last, below)) > 0
    differs = closed.decode["output_error"][last] != opened.decode["output_error"][last]
    assert differs[:, below:].any()


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
        with torch.no_grad():
            model(**prompt.fed, **loop.as_cache)
        # 3 layers x K and V x 2 KV heads x 8 tokens x 8 dimensions x 4 bytes
        assert loop.cache.nbytes == 3 * 2 * KV_HEADS * 8 * 8 * 4
        sizes = []
        for step in range(1, STEPS):
            with torch.no_grad():
                model(input_ids=torch.tensor([[step + 5]]), **loop.as_cache)
            layer = loop.cache.layers[1]
            assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes
            assert loop.cache.nbytes == sum(one.nbytes for one in loop.cache.layers)
            sizes.append(layer.keys.shape[2])
    # l = 8, D = 3: a token a step is marked from the first step on; the third mark empties the bin.
    assert sizes == [9, 10, 8, 9, 10, 8, 9, 10, 8, 9, 10]
    run = loop.run()
    # At attention time: before the step's own decision.
    assert run.attention_tokens[1, 0].tolist() == [9, 10, 11, 9, 10, 11, 9, 10, 11, 9, 10]


def test_the_fullest_kv_head_decides_what_a_layer_holds(sequences):
    model, prompt = sequences["llama"]
    with (
        torch.no_grad(),
        hf.evicting(model, KeepsNothing(), prompt=prompt.prompt, max_new_tokens=STEPS) as loop,
    ):
        model(**prompt.fed, **loop.as_cache)
        model(input_ids=torch.tensor([[7]]), **loop.as_cache)
    layer = loop.cache.layers[0]
    # Lane 0 holds nothing, lane 1 two tokens: one rectangle of two slots.
    assert layer.positions.tolist() == [[ABSENT, ABSENT], [0, 1]]
    assert layer.keys.shape == (1, KV_HEADS, 2, tiny_models.HEAD_DIM)
    assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes


def test_pruned_tokens_are_not_computed(sequences):
    model, prompt = sequences["llava"]
    rows = []
    layers = layers_of(decoder_of(model))
    policy = "hae:r=0.08,alpha=1,ddes=none"
    with (
        torch.no_grad(),
        hf.evicting(
            model, policy, prompt=prompt.prompt, image=prompt.image, max_new_tokens=2
        ) as loop,
    ):
        hook = layers[1].mlp.register_forward_hook(
            lambda _, given, __: rows.append(given[0].shape[1])
        )
        try:
            model(**prompt.fed, **loop.as_cache)
            model(input_ids=torch.tensor([[7]]), **loop.as_cache)
        finally:
            hook.remove()
    log = loop.run().log
    pruned = int((log.within & (log.layer == 1)).sum())
    assert pruned > 3
    assert rows == [prompt.prompt - pruned, 1]


def test_a_prepared_prompt_needs_the_vision_tower_once(llava):
    model, processor = llava
    calls = []
    hook = model.model.vision_tower.register_forward_hook(lambda *_: calls.append(1))
    try:
        prompt = picture_prompt(model, processor)
        prepared = len(calls)
        for policy in (None, "full", "greedy:budget=9"):
            hf.generate(model, prompt, policy, max_new_tokens=3)
    finally:
        hook.remove()
    assert len(calls) == prepared > 0


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
    layers = layers_of(decoder_of(model))
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


REFUSALS = (hf.ClosedLoopError, CaptureError, hae.ConfigError, hae.ContractViolation)


def feed(model, loop, *calls, **options):
    """Forward passes over lists of token ids, one after another."""
    for ids in calls:
        model(input_ids=torch.as_tensor(ids), **loop.as_cache, **options)


PROMPT = [[7] * 14]


@pytest.mark.parametrize(
    "case, message",
    [
        (lambda m, loop: feed(m, loop, PROMPT * 2), "a batch of 2, expected a batch of 1"),
        (lambda m, loop: feed(m, loop, [[7] * 5]), "a prefill of 5 rows, expected 14"),
        (lambda m, loop: feed(m, loop, PROMPT, [[7, 8]]), "a step of 2 rows, expected 1"),
        (
            lambda m, loop: feed(m, loop, PROMPT, [[7]], [[7]], [[7]]),
            "outgrows the 16 tokens that were announced",
        ),
        (
            lambda m, loop: feed(m, loop, PROMPT, attention_mask=torch.tensor([[0] + [1] * 13])),
            "layer 0: the model's mask is not causal",
        ),
        (
            lambda m, loop: m(input_ids=torch.tensor(PROMPT), use_cache=False),
            "layer 0 attends to other keys than those of the loop's cache",
        ),
        (
            lambda m, loop: m.generate(torch.tensor(PROMPT), max_new_tokens=3),
            "layer 0 attends to other keys than those of the loop's cache",
        ),
        (
            lambda m, loop: (feed(m, loop, PROMPT), loop.run(), feed(m, loop, [[7]])),
            "the run is finished already",
        ),
        (lambda m, loop: loop.run(), "the prefill of all layers is not over"),
        (lambda m, loop: (feed(m, loop, PROMPT), loop.cache.crop(-1)), "it cannot be cut"),
        (
            lambda m, loop: m.generate(
                torch.tensor(PROMPT), num_beams=2, max_new_tokens=3, **loop.as_cache
            ),
            "a batch of 2, expected a batch of 1",
        ),
        (
            lambda m, loop: m.generate(
                torch.tensor(PROMPT), assistant_model=llama(), max_new_tokens=3, **loop.as_cache
            ),
            "rows, expected 14: a closed loop takes the prompt in one call",
        ),
        (
            lambda m, loop: hf.generate(m, text_prompt(m), "full", max_new_tokens=2),
            "attention implementation in use: hae_closed_loop",
        ),
    ],
)
def test_a_use_that_does_not_fit_is_refused_in_one_sentence_and_undone(case, message):
    model = llama()
    before = state_of(model)
    with (
        pytest.raises(REFUSALS, match=message) as raised,
        hf.evicting(model, "greedy:budget=9", prompt=14, max_new_tokens=3) as loop,
        torch.no_grad(),
    ):
        case(model, loop)
    assert "\n" not in str(raised.value)
    assert state_of(model) == before


@pytest.mark.parametrize(
    "policy, options, message",
    [
        ("greedy:budgt=3", {}, "unknown option 'budgt'"),
        ("full", {"max_new_tokens": 0}, "0 new ones; expected 1 or more"),
        ("full", {"prompt": 0}, "a prompt of 0 tokens"),
        ("full", {"image": [-1] * 3}, "image has 3 entries, expected prompt = 14"),
    ],
)
def test_a_loop_that_cannot_begin_changes_nothing(policy, options, message):
    model = llama()
    before = state_of(model)
    arguments = {"prompt": 14, "max_new_tokens": 3} | options
    with pytest.raises(REFUSALS, match=message), hf.evicting(model, policy, **arguments):
        pass
    assert state_of(model) == before


def test_a_cache_is_of_no_use_after_its_block():
    model = llama()
    with torch.no_grad(), hf.evicting(model, "full", prompt=14, max_new_tokens=3) as loop:
        feed(model, loop, PROMPT)
    with pytest.raises(hf.ClosedLoopError, match="use the cache only within the block"):
        feed(model, loop, [[7]])


def test_two_models_run_side_by_side():
    """Each with its own loop: transformers' registries are shared by all models."""
    models = [llama(), llama(num_hidden_layers=3)]
    alone = [
        hf.generate(model, text_prompt(model), "greedy:budget=6", max_new_tokens=STEPS)
        for model in models
    ]
    before = [state_of(model) for model in models]
    with torch.no_grad(), ExitStack() as stack:
        loops = [
            stack.enter_context(
                hf.evicting(model, "greedy:budget=6", prompt=14, max_new_tokens=STEPS)
            )
            for model in models
        ]
        fed = [text_prompt(model).fed["input_ids"] for model in models]
        for step in range(STEPS):
            for i, (model, loop) in enumerate(zip(models, loops, strict=True)):
                logits = model(input_ids=fed[i], **loop.as_cache, logits_to_keep=1).logits[0, -1]
                assert torch.equal(logits, alone[i].logits[step])
                fed[i] = torch.tensor([[alone[i].tokens[step]]])
    for i, loop in enumerate(loops):
        assert loop.run().json_lines() == alone[i].run.json_lines()
        assert loop.run() is loop.run()
    assert [state_of(model) for model in models] == before


def test_the_last_prompt_token_cannot_leave_within_the_prefill():
    model = llama()
    with pytest.raises(
        hf.ClosedLoopError, match="the last prompt token left within the prefill of layer 1"
    ):
        hf.generate(model, text_prompt(model), Prunes([hae.Evict(13, layer=1)]), max_new_tokens=2)


def test_layers_that_take_more_tensors_are_refused_only_when_tokens_leave_within_the_prefill():
    model = llama()
    prompt = text_prompt(model)

    def add(_, given, options):
        return given, options | {"residual": torch.zeros(1, 14, 32)}

    hook = layers_of(decoder_of(model))[1].register_forward_pre_hook(add, with_kwargs=True)
    try:
        hf.generate(model, prompt, "greedy:budget=4", max_new_tokens=2)
        with pytest.raises(hf.ClosedLoopError, match="layers also take residual"):
            hf.generate(model, prompt, Prunes([hae.Evict(2, layer=1)]), max_new_tokens=2)
    finally:
        hook.remove()


def test_a_decoder_without_a_list_of_layers_is_refused():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=31, n_embd=32, n_layer=2, n_head=4)).eval()
    with (
        pytest.raises(UnsupportedModel, match="gpt2: a decoder without a list `layers`"),
        hf.evicting(model, "full", prompt=3, max_new_tokens=2),
    ):
        pass


@pytest.mark.parametrize("policy", [None, "full"])
def test_an_answer_has_a_token(policy):
    model = llama()
    with pytest.raises(hf.ClosedLoopError, match="an answer of 0 tokens, expected 1 or more"):
        hf.teacher_forced(model, text_prompt(model), policy, [])


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
    with (
        pytest.raises(CaptureError, match="is compiled"),
        hf.evicting(compiled, "full", prompt=3, max_new_tokens=2),
    ):
        pass
    model.config._attn_implementation = "flex_attention"
    with (
        pytest.raises(CaptureError, match="flex_attention"),
        hf.evicting(model, "full", prompt=3, max_new_tokens=2),
    ):
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


def test_a_word_for_nan_that_is_none_is_refused():
    with (
        pytest.raises(hae.ConfigError, match="nan is 'lowset'; allowed: error, lowest"),
        hf.evicting(llama(), "full", prompt=3, max_new_tokens=2, nan="lowset"),
    ):
        pass
