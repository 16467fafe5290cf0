"""Runs that merge what they evict against the oracle: where tokens go, what a row's output becomes.

The oracle forms keys, values and outputs in double. The engine rounds merged vectors and a row's
weights to float32, a relative error of a few 2^-24 each; TOLERANCE is 64 of them.
"""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from oracle import visual_baselines  # noqa: E402

import hae  # noqa: E402

TOLERANCE = 64 * 2.0**-24
LAYERS, PROMPT, TOKENS, HEAD_DIM, KV_HEADS, GROUP = 2, 22, 28, 6, 2, 2
VISUAL = [3, 4, 5, 6, 7, 8, 13, 14, 15, 16]


def recording(seed):
    rng = np.random.default_rng(seed)

    def normal(heads):
        return rng.normal(size=(LAYERS, heads, TOKENS, HEAD_DIM)).astype(np.float32)

    image = np.full(TOKENS, -1)
    image[VISUAL] = 0
    q, k, v = normal(KV_HEADS * GROUP), normal(KV_HEADS), normal(KV_HEADS)
    return q, k, v, hae.sequence(prompt=PROMPT, q=q, k=k, v=v, image=image)


def output(query, keys, values, tokens, size):
    """Attention of one query over the tokens, in double; weights times their sizes."""
    logits = keys[tokens] @ query.astype(np.float64) / np.sqrt(HEAD_DIM)
    weights = np.exp(logits - logits.max()) * size[tokens]
    return weights / weights.sum() @ values[tokens]


def expected_errors(q, k, v, layer, head, kept, keys, values, size):
    """[steps] distance of the outputs with all keys and with the merged ones."""
    lane, errors = head // GROUP, []
    for query in range(PROMPT, TOKENS):
        every = np.arange(query + 1)
        resident = np.array([*kept, *range(PROMPT, query + 1)])
        plain = k[layer, lane].astype(np.float64), v[layer, lane].astype(np.float64)
        full = output(q[layer, head, query], *plain, every, np.ones(TOKENS))
        own = output(q[layer, head, query], keys, values, resident, size)
        errors.append(np.linalg.norm(full - own))
    return np.array(errors)


def with_generated(merged, all_vectors):
    """Merged vectors of the prompt, and the generated ones as they are."""
    return np.concatenate([merged, all_vectors[PROMPT:].astype(np.float64)])


@pytest.mark.parametrize("how", ["mean", "weighted", "pivot"])
@pytest.mark.parametrize("seed", range(4))
def test_lookm_merges_where_the_oracle_does(seed, how):
    q, k, v, sequence = recording(seed)
    (run,) = hae.replay(sequence, f"lookm:budget=15,recent=4,merge={how}")
    assert run.decode["missed_mass"].size and np.isnan(run.decode["missed_mass"]).all()
    for layer in range(LAYERS):
        attention = sequence.attention(layer)[:, :PROMPT, :PROMPT]
        kept = visual_baselines.lookm(attention, KV_HEADS, set(VISUAL), 15, 4)
        for lane in range(KV_HEADS):
            into, keys, values = visual_baselines.lookm_merge(
                k[layer, lane, :PROMPT], v[layer, lane, :PROMPT], kept[lane], how
            )
            log = run.log[(run.log.layer == layer) & (run.log.lane == lane)]
            assert dict(zip(log.token, log.into, strict=True)) == into and into
            for head in range(lane * GROUP, (lane + 1) * GROUP):
                expected = expected_errors(
                    q, k, v, layer, head, kept[lane],
                    with_generated(keys, k[layer, lane]), with_generated(values, v[layer, lane]),
                    np.ones(TOKENS),
                )  # fmt: skip
                found = run.decode["output_error"][layer, head]
                assert np.abs(found - expected).max() <= TOLERANCE * np.abs(v).max() * HEAD_DIM


@pytest.mark.parametrize("keep", [1, 4, 7])
@pytest.mark.parametrize("seed", range(4))
def test_tome_merges_what_the_oracle_merges(seed, keep):
    q, k, v, sequence = recording(seed)
    (run,) = hae.replay(sequence, f"tome/decoder:keep={keep}")
    into, _, _, size = visual_baselines.tome_decoder(
        k[0, :, :PROMPT], v[0, :, :PROMPT], VISUAL, keep
    )
    kept = [j for j in range(PROMPT) if j not in into]
    for layer in range(LAYERS):
        log = run.log[run.log.layer == layer]
        assert dict(zip(log.token, log.into, strict=True)) == into
        assert len(into) == len(VISUAL) - keep and (log.within == (layer > 0)).all()
        members = {n: [n, *(e for e, to in into.items() if to == n)] for n in kept}
        for head in range(KV_HEADS * GROUP):
            lane = head // GROUP
            expected = expected_errors(
                q, k, v, layer, head, kept,
                mean_of_groups(k[layer, lane], members), mean_of_groups(v[layer, lane], members),
                np.concatenate([size.astype(np.float64), np.ones(TOKENS - PROMPT)]),
            )  # fmt: skip
            found = run.decode["output_error"][layer, head]
            assert np.abs(found - expected).max() <= TOLERANCE * np.abs(v).max() * HEAD_DIM


def mean_of_groups(vectors, members):
    """The vectors, each of a group that merged replaced by the group's mean."""
    vectors = vectors.astype(np.float64)
    result = vectors.copy()
    for n, group in members.items():
        result[n] = vectors[group].mean(axis=0)
    return result


class MergeAtFit(hae.Policy):
    """Merges the same tokens in every layer, at the end of its prefill."""

    merges, prompt_rows = True, "none"

    def __init__(self, evict) -> None:
        self.evict = evict

    def begin(self, info):
        evict = self.evict

        class Run(hae.PolicyRun):
            def fit(self, layer, cache):
                return hae.Decision(evict=evict)

        return Run()


def test_a_policy_in_python_merges():
    q, k, v, sequence = recording(0)
    (run,) = hae.replay(sequence, MergeAtFit([hae.Evict(0, merge=hae.Merge(1, 0.5, 0.5, 2.0))]))
    assert list(run.log.into) == [1] * LAYERS and list(run.log["size"]) == [2.0] * LAYERS
    keys, values = k[0, 0].astype(np.float64), v[0, 0].astype(np.float64)
    size = np.ones(TOKENS)
    keys[1], values[1], size[1] = (keys[0] + keys[1]) / 2, (values[0] + values[1]) / 2, 2.0
    expected = expected_errors(q, k, v, 0, 0, range(1, PROMPT), keys, values, size)
    found = run.decode["output_error"][0, 0]
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(v).max() * HEAD_DIM
    assert '"into":1,"weights":[0.5,0.5],"size":2}' in run.json_lines()


@pytest.mark.parametrize(
    ("evict", "complaint"),
    [
        (
            [hae.Evict(0, merge=hae.Merge(1)), hae.Evict(1, merge=hae.Merge(2))],
            "token 0 is merged into a token that does not stay",
        ),
        ([hae.Evict(0, merge=hae.Merge(1, size=0.0))], "a size that is not above 0"),
        ([hae.Evict(0, merge=hae.Merge(1, weight=float("nan")))], "weights that are not finite"),
    ],
)
def test_a_merge_that_cannot_be_is_refused(evict, complaint):
    *_, sequence = recording(0)
    with pytest.raises(hae.ContractViolation, match=complaint):
        hae.replay(sequence, MergeAtFit(evict))
