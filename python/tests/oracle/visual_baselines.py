"""The published policies that tell visual tokens from text, each as literally as its formula.

`attention` is [query_head, row, key] float32 of one layer's prompt, row i the query at position i.
`visual` and `texts` are ascending prompt positions. Orders and sums as in `baselines`.
"""

import math
from fractions import Fraction

import numpy as np

from .arithmetic import divide_or_zero, row_sum
from .baselines import by_lane, column_sums, cosine, highest
from .dap import head_reduced_rows


def without(weights, gone):
    """Shares of a layer in whose prefill the tokens `gone` give no row and no key.

    weights  [query_head, row, key] float32
    """
    weights = weights.copy()
    weights[:, :, list(gone)] = 0
    weights[:, list(gone), :] = 0
    return divide_or_zero(weights, row_sum(weights)[..., None])


# Section 7, FastV


def fastv_count(reduction, images, rounding="exact"):
    """How many of `images` visual tokens stay. original: round((1-R) n), binary, half to even;
    exact: rounded down, at least 1.
    """
    if rounding == "original":
        return round((1 - float(reduction)) * images)
    return min(images, max(1, math.floor((1 - Fraction(reduction)) * images)))


def fastv(attention, visual, keep):
    """s_j = (1/H) sum_h A^{(K-1)}[h,last,j]; the top `keep` of the visual tokens and all others
    stay in layers >= K.

    attention  of layer K - 1
    returns    the visual tokens that go, ascending
    """
    scores = head_reduced_rows(attention[:, -1], "mean")
    return _rest(visual, highest(scores, keep, visual))


def fastv_text_mean(attention, visual, texts, keep):
    """As the paper says it: the mean over the text rows that can see the token."""
    mean = head_reduced_rows(attention, "mean")
    scores = {}
    for j in visual:
        rows = [i for i in texts if i > j]
        total = 0.0
        for i in rows:
            total = total + float(mean[i, j])
        scores[j] = total / len(rows) if rows else 0.0
    return _rest(visual, highest(scores, keep, visual))


def _rest(tokens, kept):
    return [j for j in tokens if j not in kept]


# Section 8, SparseVLM

SPARSEVLM_KEPT = {  # version -> target -> what stays after each of the three layers
    1: {192: (300, 200, 110), 128: (303, 110, 36), 96: (238, 48, 26), 64: (66, 30, 17)},
    2: {192: (300, 200, 118), 128: (238, 108, 60), 96: (246, 54, 28), 64: (66, 34, 20)},
}


def sparsevlm_raters(similarity, texts):
    """m_t = mean_v softmax_t(x_v . x_t); the text tokens with m_t > mean(m).

    similarity  [visual, text] inner products of input embeddings
    """
    x = np.asarray(similarity, np.float64)
    shares = np.exp(x - x.max(axis=1, keepdims=True))
    shares = shares / shares.sum(axis=1, keepdims=True)
    return _above_mean(shares.mean(axis=0), texts)


def sparsevlm_raters_by_attention(attention, visual, texts):
    """The same rule on the mean over heads and visual tokens of layer 0's attention."""
    mean = head_reduced_rows(attention, "mean")
    given = []
    for t in texts:
        total = 0.0
        for v in visual:
            total = total + float(mean[t, v])
        given.append(total / len(visual))
    return _above_mean(given, texts)


def _above_mean(given, texts):
    total = 0.0
    for m in given:
        total = total + float(m)
    return [t for t, m in zip(texts, given, strict=True) if m > total / len(texts)]


def sparsevlm(attention_of, visual, raters, kept_counts, layers=(2, 6, 15)):
    """At each of `layers`: s_v = mean_{t in raters} mean_h A[h,t,v]; keep top_k, k =
    min(table[layer], n_v - 1). What goes is missing from the layers after it.

    attention_of  (layer, gone) -> [query_head, row, key] without the tokens gone
    returns       {layer: visual tokens that go there, ascending}
    """
    gone, decisions = [], {}
    for layer, count in zip(layers, kept_counts, strict=True):
        here = _rest(visual, gone)
        if not here or not raters:
            decisions[layer] = []
            continue
        mean = head_reduced_rows(attention_of(layer, gone), "mean")
        scores = np.zeros(mean.shape[1])
        for t in raters:
            scores = scores + mean[t]
        scores = scores / len(raters)
        decisions[layer] = _rest(here, highest(scores, min(count, len(here) - 1), here))
        gone = sorted(gone + decisions[layer])
    return decisions


# Section 9, MustDrop

MUSTDROP_THRESHOLDS = {192: (0.001, 0.001), 128: (0.0012, 0.001), 64: (0.011, 0.01)}


def dual_attention_filter(attention, visual, texts, share, single, spared=()):
    """a[t,v] = (1/H) sum_h A[h,t,v] over text rows after the image; c_v = sum_t, m_v = max_t. Drop
    v iff c_v < tau_g sum_u c_u and m_v < tau_i, both strict, unless it is spared (Kset).
    """
    if not texts or not visual:
        return []
    mean = head_reduced_rows(attention, "mean")
    sums, largest = np.zeros(mean.shape[1]), np.zeros(mean.shape[1])
    for t in texts:
        sums = sums + mean[t]
        largest = np.maximum(largest, mean[t])
    total = 0.0
    for v in visual:
        total = total + float(sums[v])
    return [
        v for v in visual if sums[v] < share * total and largest[v] < single and v not in spared
    ]


def mustdrop(attention_of, visual, texts, share, single, spared=(), layers=(2, 6, 10, 14)):
    """The filter at each of `layers`, on what the earlier ones left; what goes is missing from the
    later layers, and after the prefill from all. {layer: tokens}, ascending.
    """
    gone, decisions = [], {}
    for layer in layers:
        here = _rest(visual, gone)
        decisions[layer] = dual_attention_filter(
            attention_of(layer, gone), here, texts, share, single, spared
        )
        gone = sorted(gone + decisions[layer])
    return decisions


# Section 10, LOOK-M


def lookm(attention, kv_heads, visual, budget, recent):
    """H2O sums; all text before the recent window stays, then its image tokens by their sum up to
    hh = budget - recent of both, then the recent window: max(hh, T') + r tokens.
    """
    tokens = attention.shape[2]
    old = range(max(0, tokens - recent))
    text = [j for j in old if j not in visual]
    images = [j for j in old if j in visual]
    count = max(0, budget - recent - len(text))
    return [
        sorted([*text, *highest(lane, count, images), *range(len(old), tokens)])
        for lane in by_lane(column_sums(attention), kv_heads, "mean")
    ]


def lookm_merge(keys, values, kept, how):
    """Each evicted token goes into the kept key of the highest cosine (of equals the newest).

    With m tokens e merged into n, and for keys and values alike:
    mean      (x_n + sum x_e) / (1 + m)
    weighted  (x_n + sum cos(k_e, k_n) x_e) / (1 + m)
    pivot     (x_n + sum (x_e + x_n)/2) / (1 + m)

    keys, values  [token, dimension] of one KV head; returns ({e: n}, keys, values), double
    """
    into, similarity = {}, {}
    for e in _rest(range(len(keys)), kept):
        cosines = {n: cosine(keys[e], keys[n]) for n in kept}
        into[e] = max(kept, key=lambda n: (cosines[n], n))  # noqa: B023
        similarity[e] = cosines[into[e]]
    return into, *(_merged(x, kept, into, similarity, how) for x in (keys, values))


def _merged(x, kept, into, similarity, how):
    result = x.astype(np.float64)
    for n in kept:
        merged = [e for e in sorted(into) if into[e] == n]
        total = x[n].astype(np.float64)
        for e in merged:
            evicted = x[e].astype(np.float64)
            if how == "weighted":
                evicted = similarity[e] * evicted
            elif how == "pivot":
                evicted = (evicted + x[n].astype(np.float64)) / 2
            total = total + evicted
        result[n] = total / (1 + len(merged))
    return result


# Section 16, ToMe on a decoder


def tome_decoder(keys, values, visual, budget):
    """Bipartite soft matching of the visual tokens: alternately A and B, each of A to the most
    similar of B by the cosine of its key (mean over heads), the most similar pairs merge by a
    size-weighted mean, in rounds of at most all of A, until `budget` visual tokens are left.

    keys, values  [kv_head, token, dimension]
    returns       {removed: into} in the end, keys, values in double, size [token]
    """
    keys, values = keys.astype(np.float64), values.astype(np.float64)
    size = np.ones(keys.shape[1], np.int64)
    into, here = {}, list(visual)
    while len(here) > max(1, budget):
        first, second = here[0::2], here[1::2]
        metric = head_reduced_rows(keys, "mean")
        pairs = []
        for a in first:
            similarity = {b: cosine(metric[a], metric[b]) for b in second}
            b = max(second, key=lambda b: (similarity[b], b))  # noqa: B023
            pairs.append((similarity[b], a, b))
        best = sorted(pairs)[max(0, len(pairs) - (len(here) - budget)) :]
        for _, a, b in sorted(best, key=lambda pair: pair[1]):
            for x in (keys, values):
                x[:, b] = (size[a] * x[:, a] + size[b] * x[:, b]) / (size[a] + size[b])
            size[b] += size[a]
            into = {j: b if n == a else n for j, n in into.items()} | {a: b}
            here.remove(a)
    return into, keys, values, size
