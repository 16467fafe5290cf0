"""The published policies of the oracle against hand arithmetic, which stands in the comments."""

import os
import sys

import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(__file__))

from oracle import baselines  # noqa: E402
from oracle.baselines import (  # noqa: E402
    DoesNotFit,
    H2OFlexgen,
    H2OHistory,
    H2OOvBlock,
    Streaming,
    Tova,
    decode_lane,
    highest,
)

F32 = np.float32


def heads(*lower_triangles):
    """[head, row, key] from lower triangles."""
    tokens = max(len(row) for rows in lower_triangles for row in rows)
    attention = np.zeros((len(lower_triangles), len(lower_triangles[0]), tokens), F32)
    for h, rows in enumerate(lower_triangles):
        for i, row in enumerate(rows):
            attention[h, i, : len(row)] = row
    return attention


def uniform(tokens):
    return [[1 / (i + 1)] * (i + 1) for i in range(tokens)]


def test_protected_tokens_survive_ties_and_the_older_of_equals_goes():
    # The last two are protected, six equal scores share two places: the newer of them.
    rows = [[0] * (i + 1) for i in range(6)] + [[0.1] * 6 + [0.4, 0.0], [0.1] * 6 + [0.2, 0.2]]
    attention = heads(rows)
    assert baselines.snapkv(attention, 1, 4, window=2, kernel=1) == [[4, 5, 6, 7]]
    assert baselines.snapkv_kvpress(attention, 1, 4, window=2, kernel=1) == [[4, 5, 6, 7]]
    assert baselines.h2o_prefill_window(attention, 1, 4, window=2) == [[4, 5, 6, 7]]
    assert baselines.scissorhands([attention[:, 6:]], 1, 4, 0, 2, 0.5) == [[4, 5, 6, 7]]


def test_equal_scores_order_by_position():
    assert highest([3, 2, 3, 2, 1, 1], 2) == [0, 2]
    assert highest([3, 2, 3, 2, 1, 1], 3) == [0, 2, 3]
    assert highest([0.0, -0.0, 1, 0.0], 3) == [1, 2, 3]


@pytest.mark.parametrize(
    ("tokens", "share", "kept"),
    [(1, "0.5", 1), (2, "0.25", 1), (10, "0.1", 1), (100, "10%", 10), (1000, "0.1", 100)],
)
def test_a_share_becomes_a_count_once_and_exactly(tokens, share, kept):
    assert baselines.kept_of_share(share, tokens) == kept


def e05_rows():
    """Cumulative scores 3.0, 2.0, 1.0, 0.9 are impossible for four causal rows (they sum to 4);
    proportional ones are not: 1.7, 1.3, 0.6, 0.4. Each new row gives 0 .5 and 1 .3, the rest of
    the row is shared equally.
    """
    rows = [[1.0], [0.3, 0.7], [0.2, 0.4, 0.4], [0.2, 0.2, 0.2, 0.4]]
    return rows + [[0.5, 0.3] + [0.2 / (i - 1)] * (i - 1) for i in range(4, 10)]


def kept_at_the_end(weights, prompt, policy):
    log = decode_lane(weights, prompt, policy)
    return set(range(weights.shape[2])) - {token for _, token, _ in log}


def test_cumulative_scores_keep_the_prompt_unless_recent_tokens_are_safe():
    weights = heads(e05_rows())
    # recent = 2: the newest two are safe in decode; 2 (0.6) goes in step 1, 3 (0.4) in step 2, then
    # what stops being recent.
    assert kept_at_the_end(weights, 4, H2OFlexgen(4, 2)) == {0, 1, 8, 9}
    # One is safe, the token of the step: in every step the one before it is the lowest.
    assert kept_at_the_end(weights, 4, H2OFlexgen(4, 1)) == {0, 1, 2, 9}
    assert [H2OFlexgen(budget).recent for budget in (1, 2, 7)] == [1, 1, 3]


def test_a_history_of_means_lets_new_tokens_in():
    # Prompt: (1 + .5)/2 = .75 and .5/1. Step 1: row (.1, .3, .6): 0 has (.75 + .1)/2 = .425, 1 has
    # (.5 + .3)/2 = .4, 2 has .6: 1 goes. With the last value alone it would be 0 with .1.
    weights = heads([[1], [0.5, 0.5], [0.1, 0.3, 0.6]])
    log = decode_lane(weights, 2, H2OHistory(2, sinks=0, recent=0))
    assert [(step, token) for step, token, _ in log] == [(1, 1)]
    assert log[0][2] == pytest.approx(0.4)
    # The last two values: the same here. Indicator with n = 3: A >= 1/3 is true for 2 alone;
    # prompt (1 + 1)/2 = 1 and 1/1 = 1; then 1/2, 1/2, 1: the older goes.
    assert decode_lane(weights, 2, H2OHistory(2, 0, 0, history=2)) == log
    log = decode_lane(weights, 2, H2OHistory(2, 0, 0, indicator=True))
    assert log == [(1, 0, 0.5)]
    # Sinks and recent tokens are out of the ranking: 1 is all there is.
    assert decode_lane(weights, 2, H2OHistory(2, 1, 1, indicator=True)) == [(1, 1, 0.5)]


def test_a_history_forgets_values_older_than_its_length():
    # History 2: token 0 has .75, then .1, .1: the mean of the last two is .1 and not .95/3.
    weights = heads([[1], [0.5, 0.5], [0.1, 0.5, 0.4], [0.1, 0.3, 0.3, 0.3]])
    policy = H2OHistory(4, 0, 0, history=2)
    decode_lane(weights, 2, policy)
    assert policy.score(0) == pytest.approx(0.1)
    policy = H2OHistory(4, 0, 0)
    decode_lane(weights, 2, policy)
    assert policy.score(0) == pytest.approx(0.95 / 3)


def test_blocks_go_whole_and_the_lower_index_first():
    # Blocks of 2 over 8 tokens; the first and the last are safe; of two equal blocks the lower.
    policy = H2OOvBlock(6, 2, sinks=2, recent=2, pool=1, window=1)
    attention = heads([[0.125] * 8])[:, [0] * 8]
    assert [j for _, j, _ in decode_lane(attention, 8, policy)] == [2, 3]
    # The forward pool of 2 gives token 3 its neighbour's 0.5: block 1 then equals block 2.
    row = [0.1, 0, 0.1, 0, 0.5, 0.1, 0.1, 0.1]
    policy = H2OOvBlock(6, 2, sinks=2, recent=2, pool=2, window=1)
    policy.prefill(heads([row])[:, [0] * 8])
    assert policy.sums[2:6] == pytest.approx([0.1, 0.5, 0.5, 0.1])
    policy = H2OOvBlock(6, 2, sinks=2, recent=2, pool=1, window=1)
    assert [j for _, j, _ in decode_lane(heads([row])[:, [0] * 8], 8, policy)] == [2, 3]


def test_query_heads_read_kv_heads_interleaved():
    rows = ([0.6, 0.3, 0.1], [0.5, 0.4, 0.1], [0.1, 0.2, 0.7], [0.1, 0.1, 0.8])
    attention = heads(*([[0.0], [0.0], row] for row in rows))
    assert baselines.h2o_observed_mean(attention[:, 2:], 2, 1) == [[0], [2]]
    # Means (.55, .35, .10) and (.10, .15, .75), maxima (.6, .4, .1) and (.1, .2, .8).
    assert baselines.by_lane(attention[:, 2], 2, "mean") == pytest.approx(
        np.array([[0.55, 0.35, 0.10], [0.10, 0.15, 0.75]])
    )
    assert baselines.by_lane(attention[:, 2], 2, "max") == pytest.approx(
        np.array([[0.6, 0.4, 0.1], [0.1, 0.2, 0.8]])
    )


def test_an_observed_mean_divides_by_the_rows_that_could_see_the_token():
    # Sums 1.5, 0.9, 0.6 over 3, 2, 1 rows: .5, .45, .6. Plain sums would keep 0.
    attention = heads([[1], [0.3, 0.7], [0.2, 0.2, 0.6]])
    assert baselines.h2o_observed_mean(attention, 1, 1) == [[2]]
    assert baselines.h2o_observed_mean(attention, 1, 2) == [[0, 2]]


def test_pooling_and_the_group_do_not_commute_for_a_maximum():
    # Heads (9, 0, 0) and (0, 0, 6), width 3. Pooling first: (9, 9, 0), (0, 6, 6): mean (4.5, 7.5,
    # 3). The group first: (4.5, 0, 3): pooled (4.5, 4.5, 3).
    scores = np.array([[9.0, 0, 0], [0, 0, 6]])
    first = baselines.by_lane(baselines.pooled(scores, 3, "max"), 1, "mean")
    last = baselines.pooled(baselines.by_lane(scores, 1, "mean"), 3, "max")
    assert first.tolist() == [[4.5, 7.5, 3]] and last.tolist() == [[4.5, 4.5, 3]]
    # The mean divides by the width at the border too: 9/3, 9/3, 0.
    assert baselines.pooled(scores, 3, "mean")[0].tolist() == [3, 3, 0]


def test_snapkv_sums_its_window_and_keeps_it():
    # Window {3, 4}: sums .5 + .1, .1 + .3, .1 + .3; 1 and 2 tie for the second place: 2 stays.
    rows = [[1], [0.5, 0.5], [0, 0, 1], [0.5, 0.1, 0.1, 0.3], [0.1, 0.3, 0.3, 0.2, 0.1]]
    assert baselines.snapkv(heads(rows), 1, 4, window=2, kernel=1) == [[0, 2, 3, 4]]
    assert baselines.snapkv(heads(rows), 1, 9, window=2, kernel=1) == [[0, 1, 2, 3, 4]]
    with pytest.raises(DoesNotFit):
        baselines.snapkv(heads(rows), 1, 1, window=2)
    # All rows: 1 + .5 + .6 = 2.1, .9, 1.4.
    assert baselines.h2o_prefill_window(heads(rows), 1, 3, window=2) == [[0, 3, 4]]


@pytest.mark.parametrize(
    ("budget", "window", "excess"), [(128, 8, 4.6), (128, 32, 15.1), (256, 8, 1.4), (512, 8, 2.8)]
)
def test_the_floor_of_a_pyramid_keeps_more_than_was_promised(budget, window, excess):
    # 128, 8: b = 120, min 6, max 234, step floor(228/31) = 7: 32*234 - 7*496 = 4016 of 3840.
    counts = baselines.pyramidkv_budgets(budget, window, 32, 10**6)
    promised = 32 * (budget - window)
    assert 100 * (sum(counts) - promised) / promised == pytest.approx(excess, abs=0.05)


def test_a_pyramid_is_flat_where_the_prompt_is_short():
    assert baselines.pyramidkv_budgets(20, 4, 3, 19) is None
    assert baselines.pyramidkv_budgets(20, 4, 3, 31) == [16, 16, 16]
    # N = 32 >= 2b: min 0, max 32 >= N - w = 28: max 28, min 4, step 12.
    assert baselines.pyramidkv_budgets(20, 4, 3, 32) == [28, 16, 4]


def test_budgets_of_heads_are_rounded_one_by_one():
    # B = 5, f = .5, F = 2. Head 0 has 7 of the 10 largest, head 1 has 3: 3.5 + 2 = 5.5 -> 6 and
    # 1.5 + 2 = 3.5 -> 4 (half to even): 10 = H B. With 6 and 4: 5 and 4: one is lost.
    def scores(in_head_0):
        high = np.zeros((2, 12))
        high[0, :in_head_0] = high[1, : 10 - in_head_0] = 1
        return high

    assert baselines.adakv_counts(scores(7), 5, "0.5") == [6, 4]
    assert baselines.adakv_counts(scores(6), 5, "0.5") == [5, 4]
    # floor 0.2: F = 1; 7 * .8 + 1 = 6.6 -> 7, 3 * .8 + 1 = 3.4 -> 3.
    assert baselines.adakv_counts(scores(7), 5, "0.2") == [7, 3]


def test_kvpress_shares_an_exact_total_between_heads():
    # Two heads of six before a window of one, budget 3: 6 in total, 2 for the windows. Head 0 has
    # the four best, but int(.7 * 3) = 2 are safe in head 1: its window and its best.
    scores = np.array([[9, 8, 7, 6, 1, 1], [0.1, 0.5, 0.2, 0, 0, 0]])
    assert baselines.adakv_kvpress(scores, 1, 3, "0.7") == [[0, 1, 2, 6], [1, 6]]
    assert baselines.adakv_kvpress(scores, 1, 3, "0.2") == [[0, 1, 2, 3, 6], [6]]


def test_streaming_keeps_the_first_and_the_newest():
    # One sink and three recent of ten, one by one.
    weights = heads(uniform(10))
    assert kept_at_the_end(weights, 1, Streaming(recent=3, sinks=1)) == {0, 7, 8, 9}
    log = decode_lane(weights, 6, Streaming(recent=3, sinks=1))
    assert [(step, token) for step, token, _ in log] == [
        (0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 6),
    ]  # fmt: skip


def test_tova_may_drop_the_newest_token():
    # Mean of the heads' last rows: (.5, .3, .2): the newest goes; kvpress forces it to stay.
    attention = heads([[1], [1, 0], [0.6, 0.2, 0.2]], [[1], [1, 0], [0.4, 0.4, 0.2]])
    log = decode_lane(attention, 3, Tova(2))
    assert [(step, token) for step, token, _ in log] == [(0, 2)]
    assert baselines.tova_kvpress(attention, 2) == [0, 2]
    # In decode a row is renormalised over what is resident: (.5, -, .2)/.7.
    log = decode_lane(heads([[1], [0.5, 0.5], [0.2, 0.3, 0.5], [0.1, 0.4, 0.2, 0.3]]), 2, Tova(2))
    assert [(step, token) for step, token, _ in log] == [(1, 0), (2, 2)]
    assert log[1][2] == pytest.approx(0.2 / 0.9)


def test_the_lowest_norms_stay():
    keys = F32([[[3, 4], [1, 0], [0, 2], [2, 0]]])  # 5, 1, 2, 2: of the equal ones the newer
    assert baselines.knorm(keys, 2) == [[1, 3]]


def test_keys_unlike_the_mean_direction_stay():
    # Directions (1,0), (1,0), (0,1): the mean (2/3, 1/3); cosines 2/sqrt 5, 2/sqrt 5, 1/sqrt 5.
    keys = F32([[[5, 0], [1, 0], [0, 9]]])
    assert baselines.keydiff_scores(keys)[0] == pytest.approx(
        [-2 / 5**0.5, -2 / 5**0.5, -1 / 5**0.5]
    )
    assert baselines.keydiff(keys, 2) == [[1, 2]]


def test_expected_attention_of_constant_queries_is_attention_times_length():
    # Queries (2, 0) without spread, no rotation at position 0: z = k_0 * 2/sqrt 2; p is their
    # softmax; the values' lengths 1, 1, 4.
    rotation = baselines.mean_rotation(2, 10000.0, 0, 1)
    assert rotation.tolist() == [[1, 0], [0, 1]]
    queries = np.tile(F32([2, 0]), (1, 3, 1))
    keys, values = F32([[[0, 1], [1, 0], [0, 0]]]), F32([[[1, 0], [0, 1], [4, 0]]])
    scores = baselines.expected_attention_scores(queries, keys, values, rotation, sinks=0)
    e = np.exp(2**0.5)
    assert scores[0] == pytest.approx(np.array([1, e, 4]) / (2 + e))
    # Spread along the second dimension: (2, 1) and (2, -1): Sigma = diag(0, 1), which adds
    # 1 * 1/(2 d) = 1/4 to token 0.
    queries = F32([[[2, 1], [2, -1], [2, 1], [2, -1]]])
    keys, values = np.concatenate([keys, keys[:, 2:]], 1), np.ones((1, 4, 2), F32)
    scores = baselines.expected_attention_scores(queries, keys, values, rotation, sinks=0)
    assert scores[0][0] / scores[0][2] == pytest.approx(np.exp(0.25))


def test_a_mean_rotation_turns_the_halves():
    # Positions 1 and 2 of d = 2, one radian each.
    cos, sin = np.cos([1, 2]).mean(), np.sin([1, 2]).mean()
    assert baselines.mean_rotation(2, 10000.0, 1, 2) == pytest.approx(
        np.array([[cos, -sin], [sin, cos]])
    )


def test_nacl_without_chance_is_a_top_of_its_proxies():
    # Proxy rows 3 and 4 give 1 and 2 .2 and .4; 0 is a sink, 4 recent.
    rows = [[1], [1, 0], [1, 0, 0], [0.5, 0.1, 0.2, 0.2], [0.5, 0.1, 0.2, 0.1, 0.1]]
    draws = np.full((1, 5), 0.5)
    assert baselines.nacl(heads(rows), 1, 3, 1, 1, 2, 0, draws) == [[0, 2, 4]]
    # One by rank (2), one by chance of {1, 3}: uniform when T <= 0, so the larger draw.
    for favoured in (1, 3):
        draws = np.full((1, 5), 0.5)
        draws[0, favoured] = 0.9
        kept = baselines.nacl(heads(rows), 1, 4, 1, 1, 2, 1, draws, temperature=0)
        assert kept == [sorted([0, 2, favoured, 4])]


def test_importance_decays_from_window_to_window():
    # Windows give 0 .8 and 1 .6, one after the other: .5 * .8 < .6; without decay .8 wins.
    first, second = heads([[0.8, 0, 0.2]]), heads([[0, 0.6, 0.4]])
    assert baselines.scissorhands([first, second], 1, 2, 0, 1, 0.5) == [[1, 2]]
    assert baselines.scissorhands([first, second], 1, 2, 0, 1, 1.0) == [[0, 2]]
