"""The published policies of the program against the oracle's, eviction for eviction.

Half of the traces have only exact sums and many equal scores, so that the order of equal tokens
decides; in the others no two scores are equal.
"""

import sys
from collections import Counter
from pathlib import Path

import h5py
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from oracle.baseline_replay import (  # noqa: E402
    items,
    log_of_decisions,
    parse_baseline,
    replay_baseline,
    share_or_count,
    sparsevlm_decisions,
    visual_and_text,
)
from oracle.baselines import pyramidkv_budgets  # noqa: E402
from oracle.trace import Trace  # noqa: E402
from oracle.visual_baselines import SPARSEVLM_KEPT, sparsevlm_raters  # noqa: E402

import hae  # noqa: E402

SEEDS = range(6)
SPECS = [
    "window:sinks=2,recent=5",
    "streaming:sinks=4,recent=7",
    "tova:budget=9",
    "tova:budget=1",
    "h2o/flexgen:budget=9",
    "h2o/flexgen:budget=12,recent=2",
    "h2o/prefill-window:budget=12,window=4",
    "h2o/prefill-window:budget=9,window=3,group=max",
    "h2o/observed-mean:budget=10",
    "h2o/observed-mean:budget=30%",
    "h2o/history:budget=16",
    "h2o/history:budget=9,sinks=1,recent=2,history=3",
    "h2o/history:budget=9,sinks=0,recent=1,indicator=yes",
    "h2o/ov-block:budget=12,block=3,sinks=3,recent=6",
    "h2o/ov-block:budget=12,block=4,sinks=0,recent=4,pool=2,window=5,norm=norm_sum",
    "h2o/ov-block:budget=9,block=1,sinks=2,recent=1,pool=1,window=40",
    "scissorhands:budget=16",
    "scissorhands:budget=9,sinks=0,recent=1,window=3,decay=0.5",
    "nacl:budget=18",
    "nacl:budget=12,sinks=2,recent=2,proxies=3,random=4,temperature=0.25,seed=7",
    "nacl:budget=9,sinks=0,recent=1,random=50%,temperature=0,seed=1",
    "snapkv:budget=12,window=4",
    "snapkv:budget=9,window=2,kernel=3,pool=max,group=max",
    "snapkv:budget=9,window=2,kernel=7,group=sum",
    "snapkv/kvpress:budget=13,window=4",
    "pyramidkv:budget=10,window=3",
    "pyramidkv:budget=9,window=2,beta=5,kernel=3,pool=max",
    "adakv:budget=10,window=2",
    "adakv:budget=11,window=4,floor=0.5,kernel=3,pool=mean,group=max",
    "lookm:budget=14,recent=4",
    "lookm:budget=30,recent=3",
    "knorm:budget=11",
    "keydiff:budget=11",
    "fastv:layer=1,keep=3",
    "fastv:layer=2,keep=50%",
    "fastv/text-mean:layer=1,keep=3",
    "sparsevlm:layers=1/2,keep=9/4",
    "sparsevlm:layers=1/2,keep=300/50%",
    "mustdrop:layers=0/1/2,tau_global=0.06,tau_individual=0.15",
    "mustdrop:layers=1/3,tau_global=0.05,tau_individual=1",
]
LAYERS = 4


def make_arrays(seed):
    """A sequence of four layers; every other seed has powers of two as probabilities."""
    rng = np.random.default_rng(seed)
    kv_heads, group = [(1, 1), (2, 2), (2, 4), (3, 1), (1, 2), (4, 2)][seed % 6]
    prompt, tokens, d = int(rng.integers(24, 60)), 0, 8
    tokens = prompt + int(rng.integers(1, 20))
    image = np.full(tokens, -1)
    image[3:12], image[15:21] = 0, 1
    arrays = {"prompt": np.array(prompt), "image": image, "modality": (image >= 0).astype("u1")}

    def normal(heads):
        return rng.normal(size=(LAYERS, heads, tokens, d)).astype(np.float32)

    if seed % 2:
        attention = np.zeros((LAYERS, kv_heads * group, tokens, tokens), np.float32)
        for layer, head, i in np.ndindex(attention.shape[:3]):
            # Ten exponents at most: sums over rows and heads, and halves of them, are exact.
            exponents = np.minimum(np.arange(1, i + 2), min(i, 10)) if i else np.zeros(1)
            row = 0.5**exponents
            row[11:] = 0
            attention[layer, head, i, : i + 1] = rng.permutation(row)
        return arrays | {"attention": attention, "kv_heads": np.array(kv_heads)}
    return arrays | {"q": normal(kv_heads * group), "k": normal(kv_heads), "v": normal(kv_heads)}


def program_sequence(arrays):
    given = {name: arrays[name] for name in ("q", "k", "v", "attention", "image") if name in arrays}
    if "kv_heads" in arrays:
        given["kv_heads"] = int(arrays["kv_heads"])
    return hae.sequence(prompt=int(arrays["prompt"]), **given)


def program_log(trace, spec):
    (run,) = hae.replay(trace, spec)
    columns = run.log[["step", "layer", "lane", "token", "within"]]
    return sorted(tuple(row) for row in columns.itertuples(index=False))


def test_traces_of_powers_of_two_have_rows_that_sum_to_one():
    for seed in SEEDS:
        arrays = make_arrays(seed)
        if "attention" in arrays:
            assert (arrays["attention"].sum(axis=-1) == 1).all()


@pytest.mark.parametrize("spec", SPECS)
def test_the_program_evicts_what_the_oracle_evicts(spec):
    name = parse_baseline(spec).name
    assert name in hae.policies().index
    evictions = 0
    for seed in SEEDS:
        arrays = make_arrays(seed)
        if "k" not in arrays and name in ("knorm", "keydiff"):
            continue
        expected = replay_baseline(arrays, spec)
        assert program_log(program_sequence(arrays), spec) == expected, f"seed {seed}"
        evictions += len(expected)
    assert evictions > 50


def test_raters_by_embedding_are_those_of_the_oracle(tmp_path):
    choices = set()
    for seed in SEEDS:
        arrays = make_arrays(seed)
        trace = Trace.from_arrays(arrays)
        visual, texts = visual_and_text(trace)
        similarity = np.random.default_rng(seed).normal(size=(len(visual), len(texts)), scale=3)
        path = tmp_path / f"{seed}.h5"
        hae.write(path, [program_sequence(arrays)])
        with h5py.File(path, "r+") as file:
            file["sequences/000000/embedding_similarity"] = similarity
        # Text before the first picture cannot rate it.
        raters = sparsevlm_raters(similarity[:, 3:], texts[3:])
        decisions = sparsevlm_decisions(
            trace, visual, raters, target=None, version=None, keep="9/7/4", layers="0/1/2"
        )
        spec = "sparsevlm:raters=embedding,layers=0/1/2,keep=9/7/4"
        assert program_log(hae.open(path), spec) == log_of_decisions(decisions, LAYERS)
        choices.add(tuple(raters))
    assert len(choices) == len(SEEDS)


def size_of_lane(spec, arrays, layer):
    """What a lane holds in the end, by the words of the policy; None where only a sum is given."""
    name, options = parse_baseline(spec)
    prompt, images = int(arrays["prompt"]), int((arrays["image"] >= 0).sum())
    decoded = len(arrays["image"]) - prompt
    if name in ("window", "streaming"):
        return options["sinks"] + options["recent"]
    if name in ("tova", "h2o/flexgen", "h2o/history", "scissorhands"):
        return options["budget"]
    if name == "h2o/ov-block":  # Full blocks and the newest one.
        newest = (len(arrays["image"]) - 1) % options["block"] + 1
        return options["budget"] - options["block"] + newest
    if name.startswith("fastv"):
        gone = images - share_or_count(options["keep"], images)
        return prompt + decoded - (gone if layer >= options["layer"] else 0)
    if name == "sparsevlm":
        left = images
        published = SPARSEVLM_KEPT[options["version"]][options["target"]]
        kept = items(options["keep"]) if options["keep"] else published
        for decided, count in zip(items(options["layers"]), kept, strict=True):
            if decided < layer:
                left = min(share_or_count(count, images), left - 1)
        return prompt + decoded - (images - left)
    if name == "pyramidkv":
        counts = pyramidkv_budgets(
            options["budget"], options["window"], LAYERS, prompt, options["beta"]
        )
        return options["window"] + counts[layer] + decoded
    if name == "lookm":
        text = int((arrays["image"][: prompt - options["recent"]] < 0).sum())
        return max(options["budget"] - options["recent"], text) + options["recent"] + decoded
    return None if name == "adakv" else share_or_count(options["budget"], prompt) + decoded


@pytest.mark.parametrize("spec", [spec for spec in SPECS if not spec.startswith("mustdrop")])
def test_a_lane_of_the_oracle_ends_with_as_many_tokens_as_its_policy_says(spec):
    name, options = parse_baseline(spec)
    for seed in SEEDS:
        arrays = make_arrays(seed)
        if "k" not in arrays and name in ("knorm", "keydiff"):
            continue
        log = replay_baseline(arrays, spec)
        assert len({entry[1:4] for entry in log}) == len(log), "a token goes once"
        gone = Counter((layer, lane) for _, layer, lane, _, _ in log)
        lanes = {lane for _, lane in gone}
        for layer in range(LAYERS):
            sizes = [len(arrays["image"]) - gone[layer, lane] for lane in lanes]
            expected = size_of_lane(spec, arrays, layer)
            if expected is None:  # Every lane is rounded alone.
                decoded = len(arrays["image"]) - int(arrays["prompt"])
                promised = len(lanes) * (options["budget"] + decoded)
                assert abs(sum(sizes) - promised) <= len(lanes)
            else:
                assert set(sizes) == {expected}
