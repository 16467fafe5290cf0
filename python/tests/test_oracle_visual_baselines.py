"""The published policies for visual tokens of the oracle against hand arithmetic."""

import os
import sys

import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(__file__))

from oracle.visual_baselines import (  # noqa: E402
    SPARSEVLM_KEPT,
    dual_attention_filter,
    fastv,
    fastv_count,
    fastv_text_mean,
    lookm,
    lookm_merge,
    mustdrop,
    sparsevlm,
    sparsevlm_raters,
    sparsevlm_raters_by_attention,
    tome_decoder,
    without,
)

F32 = np.float32


def last_rows(tokens, rows):
    """One head, rows before the given ones empty."""
    attention = np.zeros((1, tokens, tokens), F32)
    for row, shares in rows.items():
        for key, share in shares.items():
            attention[0, row, key] = share
    return attention


def test_the_last_query_and_the_mean_of_text_queries_choose_differently():
    # Visual 2 to 5 of 8. Means .105, .030, .015, .025.
    attention = last_rows(
        8,
        {6: {2: 0.20, 3: 0.02, 4: 0.01, 5: 0.02}, 7: {2: 0.01, 3: 0.04, 4: 0.02, 5: 0.03}},
    )
    visual, texts = [2, 3, 4, 5], [0, 1, 6, 7]
    assert fastv(attention, visual, 2) == [2, 4]  # keeps 3 and 5
    assert fastv_text_mean(attention, visual, texts, 2) == [4, 5]  # keeps 2 and 3
    assert fastv(attention, visual, 0) == visual and fastv(attention, visual, 9) == []


def test_a_token_is_rated_by_the_rows_that_can_see_it():
    # Images {1} and {3}, text 0, 2, 4: token 1 has (.4 + .1)/2 = .25, token 3 has .3.
    attention = last_rows(5, {2: {1: 0.4}, 4: {1: 0.1, 3: 0.3}})
    assert fastv_text_mean(attention, [1, 3], [0, 2, 4], 1) == [1]


@pytest.mark.parametrize(
    ("reduction", "images", "exact", "original"),
    [("0.5", 576, 288, 288), ("0.75", 10, 2, 2), ("0.5", 5, 2, 2), ("0.5", 7, 3, 4)]
    + [("0.9", 4, 1, 0)],
)
def test_counts_of_visual_tokens(reduction, images, exact, original):
    # (1 - R) n = 3.5 -> 3 and 4; 2.5 -> 2 and 2, half to even; 0.4 -> at least 1, and 0.
    assert fastv_count(reduction, images) == exact
    assert fastv_count(reduction, images, rounding="original") == original


def test_raters_are_the_text_tokens_above_the_mean():
    # softmax over two texts: ln 3 against 0 is (.75, .25) and 0 against 0 (.5, .5): means .625 and
    # .375 around .5.
    assert sparsevlm_raters([[np.log(3), 0], [0, 0]], [4, 7]) == [4]
    assert sparsevlm_raters([[0, 0], [0, 0]], [4, 7]) == []  # none is above
    # Text 0 sees nothing, 3 gives .2 and .2, 4 gives .4 and .1: means 0, .2, .25 around .15.
    attention = last_rows(5, {3: {1: 0.2, 2: 0.2}, 4: {1: 0.4, 2: 0.1}})
    assert sparsevlm_raters_by_attention(attention, [1, 2], [0, 3, 4]) == [3, 4]


def test_pruning_goes_on_with_what_earlier_layers_left():
    # Layer 2 keeps two of 1, 2, 3 (.1, .3, .2): 1 goes. Layer 6 keeps one of 2 and 3. Layer 15: of
    # one token n_v - 1 = 0 stay.
    weights = last_rows(5, {4: {0: 0.4, 1: 0.1, 2: 0.3, 3: 0.2}})
    asked = []

    def attention_of(layer, gone):
        asked.append((layer, tuple(gone)))
        return without(weights, gone)

    decisions = sparsevlm(attention_of, [1, 2, 3], [4], (2, 1, 1))
    assert decisions == {2: [1], 6: [3], 15: [2]}
    assert asked == [(2, ()), (6, (1,)), (15, (1, 3))]
    assert sparsevlm(attention_of, [1, 2, 3], [], (2, 1, 1)) == {2: [], 6: [], 15: []}
    assert SPARSEVLM_KEPT[1][192] == (300, 200, 110)


def test_what_is_gone_gives_no_row_and_no_key():
    weights = np.tril(np.ones((1, 4, 4), F32))
    shares = without(weights, [1])
    assert shares[0, 1].tolist() == [0, 0, 0, 0]
    assert shares[0, 3].tolist() == [F32(1) / F32(3), 0, F32(1) / F32(3), F32(1) / F32(3)]


def test_the_filter_is_strict_in_both_thresholds():
    # Sums .25, .25, .5 of 1; largest .125, .25, .25.
    attention = last_rows(
        6, {4: {0: 0.375, 1: 0.125, 2: 0.25, 3: 0.25}, 5: {0: 0.625, 1: 0.125, 3: 0.25}}
    )
    visual, texts = [1, 2, 3], [4, 5]
    assert dual_attention_filter(attention, visual, texts, 0.25, 1.0) == []
    assert dual_attention_filter(attention, visual, texts, 0.5, 1.0) == [1, 2]
    assert dual_attention_filter(attention, visual, texts, 0.5, 0.25) == [1]
    assert dual_attention_filter(attention, visual, texts, 0.5, 1.0, spared={1}) == [2]
    # Everything goes, and nothing can: both are what the formula says.
    assert dual_attention_filter(attention, visual, texts, 2.0, 1.0) == visual
    assert dual_attention_filter(attention, visual, [], 2.0, 1.0) == []
    decisions = mustdrop(lambda _, gone: without(attention, gone), visual, texts, 0.5, 0.3)
    # Then 3 alone has the whole sum, which is not below its half.
    assert decisions == {2: [1, 2], 6: [], 10: [], 14: []}


def test_all_text_survives_beside_the_heaviest_pictures():
    # Text 0, 1; pictures 2, 3, 4 with sums .1, .3, .2 of the last row; 5 recent.
    attention = last_rows(6, {5: {0: 0.0, 1: 0.0, 2: 0.1, 3: 0.3, 4: 0.2}})
    assert lookm(attention, 1, [2, 3, 4], budget=4, recent=1) == [[0, 1, 3, 5]]
    # hh = 1 < T' = 2: more than the budget stays, and no picture.
    assert lookm(attention, 1, [2, 3, 4], budget=2, recent=1) == [[0, 1, 5]]
    # A picture in the recent window stays.
    assert lookm(attention, 1, [2, 3, 4], budget=4, recent=2) == [[0, 1, 4, 5]]


def test_evicted_keys_merge_into_the_most_similar_one():
    # 0 and 1 point like 2, with cosines 1 and .6; 3 points elsewhere (cosines 0 and .8 -> 3).
    keys, values = F32([[2, 0], [0.6, 0.8], [4, 0], [0, 5]]), F32([[6], [3], [0], [1]])
    into, merged_keys, merged_values = lookm_merge(keys, values, [2, 3], "mean")
    assert into == {0: 2, 1: 3}
    assert merged_keys[2].tolist() == [3, 0] and merged_values[2].tolist() == [3]
    assert merged_keys[3] == pytest.approx([0.3, 2.9]) and merged_values[3].tolist() == [2]
    # (1 + .8 * 3)/2 = 1.7; (0 + 1 * 6)/2.
    _, _, merged_values = lookm_merge(keys, values, [2, 3], "weighted")
    assert merged_values[2:] == pytest.approx(np.array([[3], [1.7]]))
    # (1 + (3 + 1)/2)/2 = 1.5; (0 + (6 + 0)/2)/2 = 1.5.
    _, _, merged_values = lookm_merge(keys, values, [2, 3], "pivot")
    assert merged_values[2:] == pytest.approx(np.array([[1.5], [1.5]]))


def test_visual_tokens_merge_by_the_sizes_of_what_they_hold():
    # Visual 1 to 4: A = {1, 3}, B = {2, 4}. 1 is like 2 (cosine 1), 3 is like 4 less so.
    keys = F32([[[9, 9], [1, 0], [3, 0], [1, 1], [0, 2]]])
    values = F32([[[0], [2], [4], [6], [8]]])
    into, merged_keys, merged_values, size = tome_decoder(keys, values, [1, 2, 3, 4], 3)
    assert into == {1: 2} and merged_keys[0, 2].tolist() == [2, 0]
    assert merged_values[0, 2].tolist() == [3] and size.tolist() == [1, 1, 2, 1, 1]
    # Two: 3 goes too, by cosine 1/sqrt 2 with 4, as with 2: of equals the newer.
    into, _, merged_values, size = tome_decoder(keys, values, [1, 2, 3, 4], 2)
    assert into == {1: 2, 3: 4} and merged_values[0, 4].tolist() == [7]
    # One: a second round, A = {2}, B = {4}, both of size 2: (3 * 2 + 7 * 2)/4 = 5.
    into, _, merged_values, size = tome_decoder(keys, values, [1, 2, 3, 4], 1)
    assert into == {1: 4, 3: 4, 2: 4} and merged_values[0, 4].tolist() == [5] and size[4] == 4
