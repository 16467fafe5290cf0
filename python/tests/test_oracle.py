"""The oracle against hand-sized examples; the arithmetic is in the comments."""

import math
import os
import sys
from fractions import Fraction

import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(__file__))

from oracle import (  # noqa: E402
    Eviction,
    Impossible,
    PolicyError,
    Trace,
    exp32,
    fma32,
    measure,
    parse_policy,
    priority,
    replay,
    row_sum,
)
from oracle.trace import logits  # noqa: E402

F32 = np.float32


def one_head(rows, prompt, layers=1, **fields):
    """An attention trace of one query head; `rows` are the lower triangle, the same in every
    layer.
    """
    return heads_trace([rows], prompt, layers, **fields)


def heads_trace(heads, prompt, layers=1, **fields):
    tokens = len(heads[0])
    attention = np.zeros((layers, len(heads), tokens, tokens), F32)
    for h, rows in enumerate(heads):
        for i, row in enumerate(rows):
            attention[:, h, i, : len(row)] = row
    return Trace.from_arrays({"attention": attention, "prompt": prompt, **fields})


def self_attending(tokens):
    """Every token attends to itself alone, so every token's score is 1 for ever."""
    return [[0.0] * i + [1.0] for i in range(tokens)]


def run(trace, spec):
    return replay(trace, parse_policy(spec))


def kept(trace, spec, lane=-1):
    gone = {
        entry.token for entry in run(trace, spec).log if entry.lane == lane and entry.layer == 0
    }
    return set(range(trace.tokens)) - gone


def brief(log):
    return [(entry.step, entry.token, entry.pending_since) for entry in log]


# Arithmetic


def nearest_float32(exact):
    """Round a Fraction to float32, to nearest even, without any floating-point sum."""
    if exact == 0:
        return F32(0)
    magnitude, exponent = abs(exact), 0
    while magnitude >= 2:
        magnitude, exponent = magnitude / 2, exponent + 1
    while magnitude < 1 and exponent > -126:
        magnitude, exponent = magnitude * 2, exponent - 1
    digits = round(magnitude * 2**23)  # Python rounds a Fraction to nearest even.
    return F32(math.copysign(math.ldexp(digits, exponent - 23), exact))


def test_fma32_rounds_once():
    random = np.random.default_rng(1)
    # Few significant bits make exact ties common; a wide range of exponents meets subnormal
    # numbers.
    bits = random.integers(-(2**13), 2**13, (3, 4000)).astype(F32)
    x, y = (
        np.ldexp(bits[0], random.integers(-90, 3, 4000)),
        np.ldexp(bits[1], random.integers(-90, 3, 4000)),
    )
    near = (x * y * (1 + random.integers(-1, 2, 4000) * 2.0**-23)).astype(F32)
    far = np.ldexp(bits[2], random.integers(-149, 20, 4000)).astype(F32)
    z = np.where(random.random(4000) < 0.3, -near, far)
    result = fma32(x, y, z)
    for k in range(4000):
        exact = Fraction(float(x[k])) * Fraction(float(y[k])) + Fraction(float(z[k]))
        assert result[k] == nearest_float32(exact)
    assert (np.abs(result) < 2.0**-126).sum() > 100


def test_fma32_is_right_where_rounding_twice_is_wrong():
    x, y, z = F32(2**-12 * (1 + 2**-23)), F32(2**-12 * (1 - 2**-23)), F32(1 + 2**-23)
    # x*y = 2^-24 (1 - 2^-46) = 2^-24 - 2^-70, so z + x*y lies just below the midpoint of z and z +
    # 2^-23: it rounds to z. Double rounds it to the midpoint itself, whose even neighbour is z +
    # 2^-23.
    assert F32(float(x) * float(y) + float(z)) == F32(1 + 2**-22)
    assert fma32(x, y, z) == z


def test_exp32_values():
    # -float32(ln 2): n = -1, the rest is about -2e-9, p = 1 - 2e-9 rounds to 1, and 1 * 2^-1 = 0.5.
    x = F32([0.0, -0.0, -math.log(2), -104.5, -1000.0])
    assert exp32(x).tolist() == [1.0, 1.0, 0.5, 0.0, 0.0]


def test_exp32_is_within_two_ulps_and_underflows_gradually():
    x = -np.concatenate([np.linspace(0, 104, 100001), np.geomspace(1e-30, 1, 20001)]).astype(F32)
    exact = np.exp(x.astype(float))
    ulp = np.maximum(np.ldexp(1.0, np.frexp(exact)[1] - 24), 2.0**-149)
    assert (np.abs(exp32(x).astype(float) - exact) <= 2 * ulp).all()
    assert 0 < exp32(F32(-100)) < 2.0**-126


def test_row_sum_has_32_partials_then_a_tree():
    tiny = F32(2**-24)  # 1 + tiny rounds to 1, 1 + 2 tiny is the next number
    values = np.zeros(40, F32)
    values[0], values[32] = 1, tiny
    assert row_sum(values) == 1  # keys 0 and 32 are in one partial, where tiny is lost
    values[1] = values[33] = tiny
    assert row_sum(values) == 1 + 2**-23  # keys 1 and 33 make 2 tiny before they meet the 1
    values[:] = 0
    values[0], values[1], values[17] = 1, tiny, tiny
    assert row_sum(values) == 1 + 2**-23  # s[1] += s[17] comes before s[0] += s[1]
    values[1], values[16] = 0, tiny
    assert (
        row_sum(values) == 1
    )  # s[0] += s[16] comes first and loses it; s[17] is lost in s[1] -> s[0] as well


def test_logits_are_fused_and_ascend_by_dimension():
    # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24 rounds to 1 + 2^-11; minus 1 leaves 2^-11.
    # The other way round -1 + (1 + 2^-12)^2 is exact in one fused step: 2^-11 + 2^-24.
    a = 1 + 2**-12
    q, k = F32([[[a, 1]]]), F32([[[a, -1]]])
    assert logits(q, k, 1.0) == F32(2**-11)
    assert logits(q[..., ::-1], k[..., ::-1], 1.0) == F32(2**-11 + 2**-24)


def test_recomputed_attention_of_equal_logits_is_exact():
    arrays = {
        "q": np.zeros((1, 1, 4, 2), F32),
        "k": np.ones((1, 1, 4, 2), F32),
        "v": np.ones((1, 1, 4, 2), F32),
    }
    trace = Trace.from_arrays({**arrays, "prompt": 1})
    assert trace.weights[0][0].tolist() == np.tril(np.ones((4, 4))).tolist()
    assert trace.totals[0][0].tolist() == [1, 2, 3, 4]


def test_window_masks_all_but_the_newest_keys():
    arrays = {name: np.zeros((2, 1, 10, 1), F32) for name in "qkv"}
    trace = Trace.from_arrays({**arrays, "prompt": 2, "window": np.array([4, 0])})
    assert np.flatnonzero(trace.allowed[0][9]).tolist() == [6, 7, 8, 9]
    assert np.flatnonzero(trace.weights[0][0, 9]).tolist() == [6, 7, 8, 9]
    assert trace.allowed[1][9].all()


# Policy specs


@pytest.mark.parametrize(
    "spec",
    [
        "h2o:budget=4",
        "hae:budget=4,budget=4",
        "hae:budget=",
        "hae:budget=0",
        "hae:ddes=none,bin=2",
        "hae:ddes=none,score=mean",
        "hae:dap=none,r=0.1",
        "hae:dap=mass,eps=0.1,r=0.1",
        "hae:dap=mass",
        "hae:eps=0.1",
        "hae:broadcast=none,effect=after",
        "hae:group=max",
        "greedy:bin=2",
        "greedy:alpha=0.1",
        "window",
        "window:recent=4,budget=8",
        "random",
    ],
)
def test_a_meaningless_spec_is_refused(spec):
    with pytest.raises(PolicyError):
        parse_policy(spec)


@pytest.mark.parametrize(
    ("tokens", "share", "capacity"),
    # 100 * 0.29 is 28.999999999999996 in double; 15 % of 10 is 1.5; half of 1 rounds down to 0,
    # and at least 1.
    [
        (100, "0.29", 29),
        (100, "29%", 29),
        (10, "15%", 1),
        (1, "0.5", 1),
        (2, "0.75", 1),
        (10, "90%", 9),
        (9, "4", 4),
    ],
)
def test_shares_become_counts_exactly(tokens, share, capacity):
    trace = one_head(self_attending(tokens + 1), prompt=tokens)
    assert run(trace, f"hae:dap=none,bin={share}").limits[0].bin == capacity


# Eviction


def test_protected_tokens_leave_the_ranking_and_the_older_of_equals_goes_first():
    # Eight equal scores, two protected as recent: of the other six the four oldest go.
    assert kept(one_head(self_attending(8), prompt=8), "greedy:budget=4,recent=2") == {4, 5, 6, 7}
    assert kept(one_head(self_attending(8), prompt=8), "greedy:budget=4,recent=1,sinks=2") == {
        0,
        1,
        6,
        7,
    }


def test_a_budget_above_the_tokens_evicts_nothing():
    for spec in (
        "greedy:budget=8",
        "hae:dap=none,budget=8",
        "random:budget=8",
        "window:budget=8",
        "full",
    ):
        assert run(one_head(self_attending(5), prompt=3), spec).log == []


def test_sinks_and_recent_must_fit_the_budget():
    with pytest.raises(Impossible):
        run(one_head(self_attending(5), prompt=3), "greedy:budget=4,recent=3,sinks=2")
    with pytest.raises(Impossible):
        run(one_head(self_attending(5), prompt=1), "hae:dap=none,recent=2")


def test_window_keeps_sinks_and_recent():
    # From one token to ten: {0} and the newest three.
    assert kept(one_head(self_attending(10), prompt=1), "window:sinks=1,recent=3") == {0, 7, 8, 9}
    log = run(one_head(self_attending(10), prompt=6), "window:sinks=1,budget=4").log
    assert [(entry.step, entry.token) for entry in log] == [
        (0, 1),
        (0, 2),
        (1, 3),
        (2, 4),
        (3, 5),
        (4, 6),
    ]
    assert log[0] == Eviction(0, 0, -1, 1, False, None, None)


def frozen_heavy_hitters():
    """Prompt sums 2.0, 1.0, 0.6, 0.4; each later row gives token 0 0.5, token 1 0.3 and the others
    0.2 together.
    """
    rows = [[1], [0.5, 0.5], [0.3, 0.3, 0.4], [0.2, 0.2, 0.2, 0.4]]
    return rows + [[0.5, 0.3] + [0.2 / (i - 1)] * (i - 1) for i in range(4, 10)]


def test_cumulative_scores_keep_the_prompt_unless_recent_tokens_are_protected():
    trace = one_head(frozen_heavy_hitters(), prompt=4)
    # A new token starts with at most 0.2/3 of its own row: the minimum, gone at once.
    assert kept(trace, "greedy:budget=4,recent=0") == {0, 1, 2, 3}
    # Two heavy and two recent: 2 (0.6) goes in step 1, 3 (0.4) in step 2, then each token that
    # stops being recent.
    assert kept(trace, "greedy:budget=4,recent=2") == {0, 1, 8, 9}
    assert kept(trace, "h2o/layerwise:budget=4,recent=2", lane=0) == {0, 1, 8, 9}
    # Half of the budget is recent, at least 1.
    assert run(trace, "h2o/layerwise:budget=1").limits[0].recent == 1
    assert run(trace, "h2o/layerwise:budget=7").limits[0].recent == 3


def test_query_heads_read_kv_heads_interleaved():
    # Rows 0 and 1 are masked, so the scores are row 2's. KV head 0 <- heads 0 and 1: (.55, .35,
    # .10) keeps 0; KV head 1 <- heads 2 and 3: (.10, .15, .75) keeps 2.
    last_rows = [[0.6, 0.3, 0.1], [0.5, 0.4, 0.1], [0.1, 0.2, 0.7], [0.1, 0.1, 0.8]]
    trace = heads_trace([[[], [], row] for row in last_rows], prompt=3, kv_heads=2)
    spec = "greedy:budget=1,recent=0,lane=kv_head"
    assert kept(trace, spec, lane=0) == {0}
    assert kept(trace, spec, lane=1) == {2}
    scores = {(entry.lane, entry.token): entry.score for entry in run(trace, spec).log}
    assert scores == pytest.approx({(0, 1): 0.35, (0, 2): 0.10, (1, 0): 0.10, (1, 1): 0.15})
    # The largest of each group: lane 0 (.6, .4, .1), lane 1 (.1, .2, .8); their sums: twice the
    # means.
    scores = {
        (entry.lane, entry.token): entry.score for entry in run(trace, spec + ",group=max").log
    }
    assert scores == pytest.approx({(0, 1): 0.4, (0, 2): 0.1, (1, 0): 0.1, (1, 1): 0.2})
    scores = {
        (entry.lane, entry.token): entry.score for entry in run(trace, spec + ",group=sum").log
    }
    assert scores == pytest.approx({(0, 1): 0.7, (0, 2): 0.2, (1, 0): 0.2, (1, 1): 0.3})
    with pytest.raises(ValueError):
        heads_trace([[[], [], last_rows[0]]] * 6, prompt=3, kv_heads=4)


def test_mark_flushes_a_full_bin():
    # l = 2, D = 2, all scores equal. Step 1: {0,1,2} unmarked, 0 is marked. Step 2: {1,2,3}
    # unmarked, 1 is marked, the bin is full: 0 and 1 go. Steps 3 and 4: 2, then 3. Step 5 marks 4,
    # which is left pending.
    result = run(one_head(self_attending(7), prompt=2), "hae:dap=none,bin=2,budget=2")
    assert brief(result.log) == [(2, 0, 1), (2, 1, 2), (4, 2, 3), (4, 3, 4)]
    assert result.pending == [(0, -1, 4, 5)]
    assert [entry.score for entry in result.log] == [1.0] * 4


def test_mark_with_a_bin_of_one_is_greedy():
    trace = one_head(frozen_heavy_hitters(), prompt=4)
    marked = run(trace, "hae:dap=none,bin=1,recent=2").log
    greedy = run(trace, "greedy:recent=2").log
    assert [entry[:6] for entry in marked] == [entry[:6] for entry in greedy]
    assert [entry.pending_since for entry in marked] == [1, 2, 3, 4, 5, 6]
    assert [entry.pending_since for entry in greedy] == [None] * 6


def test_a_pending_token_is_still_attended_to():
    # Token 0 is marked in step 1 with score 1 + 0.25; row 3 gives it another 0.25, which the log's
    # score includes.
    rows = [[1], [0, 1], [0.25, 0.75, 0], [0.25, 0, 0.75, 0]]
    log = run(one_head(rows, prompt=2), "hae:dap=none,bin=2,budget=2,recent=1").log
    # Step 1: scores 1.25, 1.75, 0 with 2 recent: 0 is marked. Step 2: 1 has 1.75, 2 has 0.75: 2 is
    # marked, both go.
    assert log == [Eviction(2, 0, -1, 0, False, 1.5, 1), Eviction(2, 0, -1, 2, False, 0.75, 2)]


def test_batch_waits_for_a_full_bin():
    # l = 2, D = 2, recent = min(D, l) = 2: four residents in steps 2, 4, and the two that are not
    # recent go.
    log = run(one_head(self_attending(7), prompt=2), "hae:dap=none,ddes=batch,bin=2").log
    assert brief(log) == [(2, 0, None), (2, 1, None), (4, 2, None), (4, 3, None)]


def test_the_prefill_ends_at_the_budget():
    # Column sums of three prompt rows: 1 + .5 + .25 = 1.75, .5 + .25 = .75, .5: tokens 1 and 2,
    # but 2 is recent.
    trace = one_head([[1], [0.5, 0.5], [0.25, 0.25, 0.5]], prompt=3)
    assert run(trace, "hae:dap=none,budget=2").log == [Eviction(0, 0, -1, 1, False, 0.75, None)]


def test_observed_scores_renormalise_and_full_scores_do_not():
    # greedy(2), recent 1: token 0 or 1 with equal scores 1: 0 goes in step 1. Row 3 then gives 0
    # 0.5, so that 1's share of the residents {1, 2, 3} is 0.25 / 0.5.
    rows = [[1], [0, 1], [0, 0, 1], [0.5, 0.25, 0, 0.25]]
    trace = one_head(rows, prompt=2)
    assert [(e.token, e.score) for e in run(trace, "greedy").log] == [(0, 1.0), (2, 1.0)]
    rows[3] = [0.5, 0.25, 0.25, 0]
    trace = one_head(rows, prompt=2)
    assert [(e.token, e.score) for e in run(trace, "greedy").log] == [(0, 1.0), (1, 1.5)]
    assert [(e.token, e.score) for e in run(trace, "greedy:scores=full").log] == [
        (0, 1.0),
        (1, 1.25),
    ]


def test_a_mean_score_divides_by_the_rows_that_could_see_the_token():
    # Sums 1.5 and 0.5 over 2 and 1 rows: 0.75 and 0.5. Row 2 is masked and still counts: 1.5/3 and
    # 0.5/2 tie no more.
    trace = one_head([[1], [0.5, 0.5], []], prompt=3)
    log = run(trace, "greedy:budget=1,recent=1,score=mean").log
    assert [(e.token, e.score) for e in log] == [(0, 0.5), (1, 0.25)]


def test_fixed_scores_refute_a_comparison_at_equal_peak():
    # T = 5, P = 1: row i < 4 gives itself 2^-i and token 0 the rest, row 4 gives token 3 0.9375.
    rows = (
        [[1]]
        + [[1 - 2.0**-i] + [0] * (i - 1) + [2.0**-i] for i in (1, 2, 3)]
        + [[0.0625, 0, 0, 0.9375, 0]]
    )
    trace = one_head(rows, prompt=1)

    def missed(spec):
        return measure(trace, run(trace, spec))["missed_mass_total"]

    assert missed("hae:dap=none,budget=1,bin=2,recent=0,scores=full") == 0
    assert missed("greedy:budget=2,recent=0,scores=full") == 0.9375


def test_random_priorities():
    assert priority(1, 0, 0, 0) == 0xE28195DDD9EE4956
    trace = one_head(self_attending(6), prompt=6)
    order = sorted(range(6), key=lambda j: priority(7, 0, 0, j))
    assert kept(trace, "random:budget=2,seed=7") == set(order[4:])
    assert {entry.score for entry in run(trace, "random:budget=2,seed=7").log} == {None}


# DAP


def two_images(layers=1):
    """Images {1, 2} and {3, 4}, one text row that gives them .5, .125, .25, .0625, .0625 (token 0
    first).
    """
    rows = self_attending(5) + [[0.5, 0.125, 0.25, 0.0625, 0.0625]]
    return one_head(
        rows, 6, layers, modality=np.array([0, 1, 1, 1, 1, 0]), image=np.array([-1, 0, 0, 1, 1, -1])
    )


def dap_tokens(spec, trace=None):
    return [entry.token for entry in run(two_images() if trace is None else trace, spec).log]


def test_dap_compares_with_the_images_or_the_sequences_total():
    # A_V = 0.5: r = 0.3 gives 0.15. Per image 0.3 * 0.375 = 0.1125 and 0.3 * 0.125 = 0.0375.
    assert dap_tokens("hae:ddes=none,r=0.3,alpha=1") == [1, 3, 4]
    assert dap_tokens("hae:ddes=none,r=0.3,alpha=1,scope=image") == []
    assert dap_tokens("hae:ddes=none,r=0.4,alpha=1,scope=image") == [1]  # 0.15 and 0.05


def test_dap_is_strict_in_both_thresholds():
    # r = 0.25: 0.25 * 0.5 = 0.125 = A_1 is not below; alpha = 0.0625 equals the largest of tokens
    # 3 and 4.
    assert dap_tokens("hae:ddes=none,r=0.25,alpha=1") == [3, 4]
    assert dap_tokens("hae:ddes=none,r=0.25,alpha=0.0625") == []


def test_dap_spares_sinks_that_still_count():
    # Tokens 0 to 3 are sinks; A_V stays 0.5.
    assert dap_tokens("hae:ddes=none,r=0.25,alpha=1,sinks=4") == [4]
    assert dap_tokens("hae:ddes=none,r=0.3,alpha=1,sinks=2") == [3, 4]


def test_dap_limits_what_one_decision_takes():
    # The lowest (A_j, position) first: 3 and 4 tie at 0.0625.
    assert dap_tokens("hae:ddes=none,r=0.3,alpha=1,max_evicted=1") == [3]
    assert dap_tokens("hae:ddes=none,r=0.3,alpha=1,max_evicted=2") == [3, 4]


def test_dap_by_mass_takes_the_lightest_up_to_the_share():
    # Ascending .0625, .0625, .125, .25 of 0.5: running .0625, .125, .25, .5.
    assert dap_tokens("hae:ddes=none,dap=mass,eps=0.25") == [3, 4]
    assert dap_tokens("hae:ddes=none,dap=mass,eps=0.5") == [1, 3, 4]
    assert dap_tokens("hae:ddes=none,dap=mass,eps=1") == [1, 2, 3, 4]
    # Without the sinks 1 to 3 the running sum is .0625 for token 4 only.
    assert dap_tokens("hae:ddes=none,dap=mass,eps=0.2,sinks=4") == [4]
    assert dap_tokens("hae:ddes=none,dap=mass,eps=1,alpha=0.125") == [3, 4]
    # Per image: .125 of .375 is a third; .0625 of .125 is half.
    assert dap_tokens("hae:ddes=none,dap=mass,eps=0.5,scope=image") == [1, 3]
    # 0.5 * 0.375 = 0.1875 takes 1; 0.5 * 0.125 = 0.0625 takes 3; one decision in total takes the
    # lightest.
    assert dap_tokens("hae:ddes=none,dap=mass,eps=0.5,scope=image,max_evicted=1") == [3]


def test_dap_without_visual_or_text_tokens_does_nothing():
    text = one_head(self_attending(6), prompt=5)
    pictures = one_head(self_attending(6), prompt=6, modality=np.ones(6, int))
    # A text token before the image cannot see it.
    unseen = one_head(self_attending(3), prompt=3, modality=np.array([0, 1, 1]))
    for trace in (text, pictures, unseen):
        assert dap_tokens("hae:ddes=none,r=1000,alpha=2", trace) == []
    assert [e.token for e in run(text, "hae:budget=3,bin=1").log] == [0, 1, 2]


def test_dap_reduces_over_the_heads_by_mean_or_maximum():
    # One image token 0, one text row: 0.5 and 0 give a mean of 0.25; alpha = 0.4 spares the
    # maximum.
    heads = [[[1], [0.5, 0.5]], [[1], [0, 1]]]
    trace = heads_trace(heads, 2, modality=np.array([1, 0]))
    log = run(trace, "hae:ddes=none,r=2,alpha=0.4").log
    assert log == [Eviction(0, 0, -1, 0, False, 0.25, None)]
    assert dap_tokens("hae:ddes=none,r=2,alpha=0.4,heads=max", trace) == []


def test_dap_acts_within_the_prefill_of_later_layers():
    log = run(two_images(layers=2), "hae:ddes=none,r=0.25,alpha=1").log
    assert log == [
        Eviction(0, 0, -1, 3, False, 0.0625, None),
        Eviction(0, 0, -1, 4, False, 0.0625, None),
        Eviction(0, 1, -1, 3, True, 0.0625, None),
        Eviction(0, 1, -1, 4, True, 0.0625, None),
    ]
    for option in ("effect=after", "broadcast=none"):
        log = run(two_images(layers=2), f"hae:ddes=none,r=0.25,alpha=1,{option}").log
        assert [entry.within for entry in log] == [False] * 4


def test_a_token_evicted_within_gives_no_row_and_no_key():
    # Layer 1 without tokens 3 and 4: row 5's shares of the rest are .5, .125, .25 over .875.
    # Budget 3 of the four residents evicts 1 (0.125/0.875 and its own row's 1). In layer 0 it is 1
    # + 0.125.
    log = run(two_images(layers=2), "hae:r=0.25,alpha=1,budget=3").log
    fitted = {entry.layer: entry for entry in log if entry.token == 1}
    assert fitted[0].score == 1.125
    assert fitted[1].score == 1 + float(F32(0.125) / F32(0.875))
    log = run(two_images(layers=2), "hae:r=0.25,alpha=1,budget=3,scores=full").log
    assert {entry.layer: entry.score for entry in log if entry.token == 1} == {0: 1.125, 1: 1.125}


def test_dap_takes_a_token_from_every_lane():
    rows = self_attending(2) + [[0.75, 0.25, 0]]
    trace = heads_trace([rows, rows], 3, modality=np.array([0, 1, 0]))
    log = run(trace, "hae:ddes=none,r=2,alpha=1,lane=kv_head").log
    assert log == [Eviction(0, 0, lane, 1, False, 0.25, None) for lane in (0, 1)]


def test_the_default_budget_is_the_size_after_dap():
    assert [limits.budget for limits in run(two_images(layers=2), "hae:r=0.25,alpha=1").limits] == [
        4,
        4,
    ]


# Metrics


def test_metrics_of_one_eviction():
    # greedy(2) evicts token 0 in step 1 (scores 1 and 1, the older goes). Row 3 = (.25, .25, .5,
    # 0) then misses 0.25. o = .25*4 + .25*0 + .5*2 = 2; o' = (.25*0 + .5*2)/.75, with the shares
    # 1/3 and 2/3 in float32: about 4/3.
    rows = [[1], [0, 1], [0, 0, 1], [0.25, 0.25, 0.5, 0]]
    values = F32([4, 0, 2, 1]).reshape(1, 1, 4, 1)
    trace = one_head(rows, prompt=2, v=values)
    figures = measure(trace, run(trace, "greedy"))
    decode = figures["decode"]
    assert decode["missed_mass"] == {"mean": 0.125, "max": 0.25, "p50": 0.0, "p95": 0.25}
    assert decode["kl"]["max"] == -math.log(0.75)
    error = abs(2 - float(F32(0.5) / F32(0.75)) * 2)
    assert decode["output_error"] == {"mean": error / 2, "max": error, "p50": 0.0, "p95": error}
    assert decode["output_error_relative"]["max"] == error / 2
    # Token 0 pulled by .25 * |4 - 2|.
    assert decode["missed_pull"] == {"mean": 0.125, "max": 0.25, "p50": 0.0, "p95": 0.25}
    assert figures["prefill"] is None
    # 3 residents at both steps; 2 at the end. One token: K and V, 1 dimension, 4 bytes.
    assert figures["tokens"] == {"mean": 3.0, "peak": 3, "final": 2.0}
    assert figures["bytes"] == {"mean": 24.0, "peak": 24, "final": 16, "prefill": 16}
    # Step 1 evicts 0 and moves {1, 2}. Step 2 evicts the lower of 1 (1 + 1/3) and 2 (1 + 2/3): 1,
    # which moves {2, 3}.
    assert (figures["evictions"], figures["events"], figures["moved"]) == (2, 2, 4)


def test_masked_rows_and_rows_that_lost_everything():
    # Step 1 evicts 0 (older of equals). Row 3 looks at 0 alone: all its mass is gone. Row 4 is
    # masked.
    rows = [[1], [0, 1], [0, 0, 1], [1, 0, 0, 0], []]
    trace = one_head(rows, prompt=2, v=np.ones((1, 1, 5, 1), F32))
    result = run(trace, "greedy")
    figures = measure(trace, result)
    assert figures["masked_rows"] == 1
    assert figures["removed_all_rows"] == 1
    assert figures["decode"]["missed_mass"] == {"mean": 0.5, "max": 1.0, "p50": 0.0, "p95": 1.0}
    assert figures["decode"]["kl"]["max"] == 0.0
    # Rows 3 and 4 add nothing to any score: 1 goes with its 1 in step 2; in step 3 token 3 has 0
    # against 2's 1.
    assert [(e.token, e.score) for e in result.log] == [(0, 1.0), (1, 1.0), (3, 0.0)]


def test_prefill_metrics_cover_the_layers_with_evictions_within():
    # Layer 1 loses tokens 3 and 4 (0.125 of row 5); rows 0, 1, 2 lose nothing; rows 3 and 4 do not
    # exist.
    trace = two_images(layers=2)
    figures = measure(trace, run(trace, "hae:ddes=none,r=0.25,alpha=1"))
    assert figures["decode"] is None and figures["tokens"] is None
    assert figures["prefill"]["missed_mass"] == {
        "mean": 0.125 / 4,
        "max": 0.125,
        "p50": 0.0,
        "p95": 0.125,
    }
    # Layer 0: evicting 3 moves 5. Layer 1: within, the same.
    assert (figures["evictions"], figures["events"], figures["moved"]) == (4, 2, 2)


def test_nothing_is_measured_without_decode_steps():
    trace = one_head([[1]], prompt=1)
    figures = measure(trace, run(trace, "hae"))
    assert figures["decode"] is None and figures["tokens"] is None and figures["bytes"] is None
    assert figures["evictions"] == 0
