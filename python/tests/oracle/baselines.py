"""The published policies a second time, each as literally as its formula is written.

Plain functions over arrays of one layer; what stays is told per lane as ascending positions. The
rows are softmax probabilities under the causal mask, `attention` [query_head, row, key] float32,
row i the query at position i. Query head h reads KV head h // (query_heads / kv_heads).

Scores are double: sums over rows and heads ascend. Lower scores go first, among equals the older
token, among equal tokens of a layer the lower KV head. Protected tokens leave the ranking.
"""

import math
from fractions import Fraction

import numpy as np

from .arithmetic import divide_or_zero, row_sum
from .dap import head_reduced_rows


class DoesNotFit(ValueError):
    """The protected tokens are more than the budget."""


def kept_of_share(share, tokens):
    """A share of a number of tokens: exact, rounded down, at least 1.

    share  decimal text, as "0.9" or "15%"
    """
    exact = Fraction(share[:-1]) / 100 if share.endswith("%") else Fraction(share)
    return max(1, math.floor(exact * tokens))


def highest(scores, count, candidates=None):
    """The `count` candidates (default: all) that go last, ascending."""
    candidates = range(len(scores)) if candidates is None else candidates
    order = sorted(candidates, key=lambda j: (scores[j], j))
    return sorted(order[max(0, len(order) - count) :])


def column_sums(attention):
    """S_h[j] = sum_i A[h,i,j] -> [head, key] in double, rows ascending."""
    total = np.zeros((attention.shape[0], attention.shape[2]))
    for row in range(attention.shape[1]):
        total = total + attention[:, row].astype(np.float64)
    return total


def pooled(scores, kernel, pool):
    """Pooling of an odd width, stride 1, over the last axis; [head, key] -> [head, key].

    mean: what lies outside counts as 0 and the divisor is the width. max: it does not count.
    """
    half, keys = kernel // 2, scores.shape[1]
    result = np.zeros(scores.shape)
    for head in range(scores.shape[0]):
        for j in range(keys):
            window = [float(s) for s in scores[head, max(0, j - half) : j + half + 1]]
            result[head, j] = max(window) if pool == "max" else _ascending_sum(window) / kernel
    return result


def by_lane(per_head, kv_heads, group):
    """[query_head, key] -> [kv_head, key]: mean, max or sum over a group's heads, ascending."""
    size = len(per_head) // kv_heads
    return np.array(
        [
            head_reduced_rows(per_head[lane * size : (lane + 1) * size], group)
            for lane in range(kv_heads)
        ]
    )


def _ascending_sum(numbers):
    total = 0.0
    for number in numbers:
        total = total + float(number)
    return total


def _protect_window(tokens, budget, window):
    if window > budget:
        raise DoesNotFit(f"window {window} > budget {budget}")
    return list(range(tokens - window, tokens))


# Section 1, H2O


def h2o_prefill_window(attention, kv_heads, budget, window=8, group="mean"):
    """S_h[j] = sum_{i=0..N-1} A[h,i,j], j < N - w; keep top_{cap-w}(S) and the last w."""
    tokens = attention.shape[2]
    recent = _protect_window(tokens, budget, window)
    if tokens < budget:
        return [list(range(tokens))] * kv_heads
    scores = by_lane(column_sums(attention)[:, : tokens - window], kv_heads, group)
    return [highest(lane, budget - window) + recent for lane in scores]


def h2o_observed_mean(attention, kv_heads, budget):
    """S_h[j] = (sum_i A[h,i,j])/(N - j), then mean over the group; top_budget, no window."""
    tokens = attention.shape[2]
    per_head = column_sums(attention) / (tokens - np.arange(tokens))
    return [highest(lane, budget) for lane in by_lane(per_head, kv_heads, "mean")]


class H2OFlexgen:
    """prefill S[j] = sum_i A; decode acc[last] = 0, acc += a_t.

    prefill: top of S[0 : N-k+1] and the last k-1; decode: evict argmin acc[0 : s-k], the newest k
    are safe. k is `recent`, the cache holds `budget`; theirs is the budget 2k - 1.
    """

    def __init__(self, budget, recent=None):
        self.budget = budget
        self.recent = max(1, budget // 2) if recent is None else recent
        if self.recent > budget:
            raise DoesNotFit(f"recent {self.recent} > budget {budget}")

    def prefill(self, attention):
        self.sums = np.zeros(attention.shape[2])
        for row in head_reduced_rows(attention, "mean"):
            self.sums = self.sums + row

    def observe(self, query, row):
        self.sums = self.sums + head_reduced_rows(row, "mean")

    def evict(self, residents, step):
        safe = self.recent if step else self.recent - 1
        unsafe = residents[: len(residents) - safe]
        order = sorted(unsafe, key=lambda j: (self.sums[j], j))
        return [(j, float(self.sums[j])) for j in order[: max(0, len(residents) - self.budget)]]


class H2OHistory:
    """prefill sum_i A/(N - pos), one value of the history; decode: mean of the last m values.

    history    m; 1 means all history
    indicator  A >= 1/n in place of A, n the tokens in the cache
    protected  the first `sinks` positions and the newest `recent` residents
    """

    def __init__(self, budget, sinks=4, recent=10, history=1, indicator=False):
        if sinks + recent > budget:
            raise DoesNotFit(f"sinks {sinks} + recent {recent} > budget {budget}")
        self.budget, self.sinks, self.recent = budget, sinks, recent
        self.history, self.indicator = history, indicator

    def _value(self, row, residents):
        return (row >= 1 / residents).astype(np.float64) if self.indicator else row

    def prefill(self, attention):
        rows = head_reduced_rows(attention, "mean")
        tokens = len(rows)
        sums = np.zeros(attention.shape[2])
        for i, row in enumerate(rows):
            sums = sums + self._value(row, i + 1)
        self.values = {j: [float(sums[j]) / (tokens - j)] for j in range(tokens)}

    def observe(self, query, row):
        self.values[query] = []
        value = self._value(head_reduced_rows(row, "mean"), len(self.values))
        for j in self.values:
            self.values[j].append(float(value[j]))

    def score(self, token):
        values = self.values[token]
        last = values if self.history == 1 else values[-self.history :]
        return _ascending_sum(last) / len(last)

    def evict(self, residents, step):
        middle = residents[: len(residents) - self.recent] if self.recent else residents
        eligible = [j for j in middle if j >= self.sinks]
        order = sorted(eligible, key=lambda j: (self.score(j), j))
        gone = [(j, self.score(j)) for j in order[: max(0, len(residents) - self.budget)]]
        for j, _ in gone:
            del self.values[j]
        return gone


class H2OOvBlock:
    """Per layer, heads summed; each score vector is max-pooled forward over the cache; the prompt
    gives its last `window` rows; the lowest blocks between the first and the newest ones go.

    s'[j] = max(s[j .. j+pool-1]);  norm=sum: sum of s'; norm_sum: that over the rows that counted
    block score: sum over its tokens. Lowest (score, index) first. Blocks are counted, the last one
    also when it is not full: evicted down to budget / block.

    budget, sinks, recent are tokens and whole blocks
    """

    def __init__(self, budget, block, sinks, recent, pool=7, window=8, norm="sum"):
        if any(size % block for size in (budget, sinks, recent)):
            raise DoesNotFit("budget, sinks and recent are whole blocks")
        if sinks + recent > budget:
            raise DoesNotFit(f"sinks {sinks} + recent {recent} > budget {budget}")
        self.budget, self.block, self.sinks, self.recent = budget, block, sinks, recent
        self.pool, self.window, self.norm = pool, window, norm

    def prefill(self, attention):
        self.sums = np.zeros(attention.shape[2])
        self.rows = np.zeros(attention.shape[2], np.int64)
        prompt = attention.shape[1]
        self.residents = list(range(prompt))
        for query in range(max(0, prompt - self.window), prompt):
            self._add(head_reduced_rows(attention[:, query], "sum"), self.residents[: query + 1])

    def observe(self, query, row):
        self.residents.append(query)
        self._add(head_reduced_rows(row, "sum"), self.residents)

    def _add(self, row, residents):
        for place, j in enumerate(residents):
            self.sums[j] += max(row[i] for i in residents[place : place + self.pool])
            self.rows[j] += 1

    def token_score(self, token):
        divisor = self.rows[token] if self.norm == "norm_sum" else 1
        return float(self.sums[token]) / max(1, int(divisor))

    def evict(self, residents, step):
        blocks = sorted({j // self.block for j in residents})
        excess = max(0, len(blocks) - self.budget // self.block)
        first, last = self.sinks // self.block, self.recent // self.block
        middle = [b for b in blocks[: len(blocks) - last] if b >= first]
        members = {b: [j for j in residents if j // self.block == b] for b in middle}
        score = {b: _ascending_sum(self.token_score(j) for j in members[b]) for b in middle}
        lowest = sorted(middle, key=lambda b: (score[b], b))[:excess]
        gone = sorted(j for b in lowest for j in members[b])
        self.residents = [j for j in residents if j not in gone]
        return [(j, self.token_score(j)) for j in gone]


# Sections 2 to 4, SnapKV, PyramidKV, AdaKV


def snapkv_scores(attention, window, kernel=5, pool="mean"):
    """S_h[j] = sum_{i=N-w}^{N-1} A[h,i,j], j < N - w, pooled -> [query_head, N - w]."""
    tokens = attention.shape[2]
    return pooled(column_sums(attention[:, tokens - window :])[:, : tokens - window], kernel, pool)


def snapkv(attention, kv_heads, budget, window=32, kernel=5, pool="mean", group="mean"):
    """top_{cap-w} of the pooled scores and the last w, only if N >= cap. Pooling per query head,
    then the group.
    """
    tokens = attention.shape[2]
    _protect_window(tokens, budget, window)
    if tokens < budget:
        return [list(range(tokens))] * kv_heads
    return _snapkv_top(attention, kv_heads, budget - window, window, kernel, pool, group)


def _snapkv_top(attention, kv_heads, count, window, kernel, pool, group):
    tokens = attention.shape[2]
    scores = by_lane(snapkv_scores(attention, window, kernel, pool), kv_heads, group)
    return [highest(lane, count) + list(range(tokens - window, tokens)) for lane in scores]


def snapkv_kvpress_scores(attention, kv_heads, window=64, kernel=5):
    """mean over the window's rows, mean pooling, then mean over the group -> [kv_head, N - w]."""
    tokens = attention.shape[2]
    mean = column_sums(attention[:, tokens - window :])[:, : tokens - window] / window
    return by_lane(pooled(mean, kernel, "mean"), kv_heads, "mean")


def snapkv_kvpress(attention, kv_heads, budget, window=64, kernel=5):
    """top_{budget-w} of that and the last w."""
    tokens = attention.shape[2]
    recent = _protect_window(tokens, budget, window)
    scores = snapkv_kvpress_scores(attention, kv_heads, window, kernel)
    return [highest(lane, budget - window) + recent for lane in scores]


def pyramidkv_budgets(budget, window, layers, tokens, beta=20):
    """How many tokens each layer keeps beside its window; None: everything.

    b = cap - w, min = floor(b/beta), max = 2b - min. If max >= N - w: max = N - w, min = 2b - max.
    step = floor((max - min)/(L - 1)), b_l = max - l step. If N < cap: nothing is evicted. If
    N < 2b: b for each layer; so for one layer, for which there is no step.
    """
    b = budget - window
    if b < 0:
        raise DoesNotFit(f"window {window} > budget {budget}")
    if tokens < budget:
        return None
    if tokens < 2 * b or layers == 1:
        return [b] * layers
    lowest = b // beta
    largest = 2 * b - lowest
    if largest >= tokens - window:
        largest = tokens - window
        lowest = 2 * b - largest
    step = (largest - lowest) // (layers - 1)
    return [largest - layer * step for layer in range(layers)]


def pyramidkv(
    attention, kv_heads, layer, layers, budget, window=8, kernel=5, pool="mean", group="mean",
    beta=20,
):  # fmt: skip
    """top_{b_l} of the SnapKV score and the last w."""
    tokens = attention.shape[2]
    counts = pyramidkv_budgets(budget, window, layers, tokens, beta)
    if counts is None:
        return [list(range(tokens))] * kv_heads
    return _snapkv_top(attention, kv_heads, counts[layer], window, kernel, pool, group)


def pyramidkv_kvpress_budget(share, window, layer, layers, tokens, beta=20):
    """What kvpress 0.5.5 keeps in a layer, its window included.

    c = N(1 - rho); min = c/beta, max = 2c - min; if max >= N - w: max = N - w, min = 2c - max; if
    not (N >= max >= min >= w): round(c), at least 1; else round(max - l (max - min)/(L - 1)).

    share  1 - rho, a double, as all of this
    """
    capacity = tokens * share
    lowest = capacity / beta
    largest = capacity * 2 - lowest
    if largest >= tokens - window:
        largest = tokens - window
        lowest = capacity * 2 - largest
    if not tokens >= largest >= lowest >= window:
        return max(1, round(capacity))
    step = (largest - lowest) / (layers - 1) if layers > 1 else 0.0
    return round(largest - layer * step)


def adakv_counts(scores, budget, floor="0.2", normalise=False):
    """n_h of each lane, tokens beside the window.

    scores  [lane, key]; B = budget; F = int(B f). The H B largest of all lanes' scores, each lane
    first times sum top_B(S_h)/sum S_h if normalised; c_h of them are in lane h;
    n_h = round(c_h (1-f) + F), half to even.
    """
    f = Fraction(floor)
    lanes, keys = scores.shape
    if normalise:
        weights = [
            _ascending_sum(lane[j] for j in highest(lane, budget)) / _ascending_sum(lane)
            for lane in scores
        ]
        scores = scores * np.array(weights)[:, None]
    everywhere = [(scores[h, j], j, h) for h in range(lanes) for j in range(keys)]
    largest = sorted(everywhere)[max(0, len(everywhere) - lanes * budget) :]
    taken = [sum(1 for _, _, lane in largest if lane == h) for h in range(lanes)]
    return [round(c * (1 - f) + math.floor(budget * f)) for c in taken]


def adakv(
    attention, kv_heads, budget, window=32, kernel=7, pool="max", group="mean", floor="0.2",
    normalise=False,
):  # fmt: skip
    """Mean over the window's rows, the group, then pooling; top_{n_h}(S_h) and the last w.
    Everything stays when B > N - w.
    """
    tokens = attention.shape[2]
    recent = _protect_window(tokens, budget, window)
    middle = budget - window
    if middle > tokens - window:
        return [list(range(tokens))] * kv_heads
    mean = column_sums(attention[:, tokens - window :])[:, : tokens - window] / window
    scores = pooled(by_lane(mean, kv_heads, group), kernel, pool)
    counts = adakv_counts(scores, middle, floor, normalise)
    return [highest(scores[h], counts[h]) + recent for h in range(kv_heads)]


def adakv_kvpress(scores, window, budget, floor="0.2"):
    """Protect each head's top int(f n) (at least 1 when f > 0), then remove the H (N - n) smallest
    over all heads, n the budget; the exact total.

    scores  [kv_head, N - w] of the tokens before the window, which belongs to the best ones
    """
    lanes, middle = scores.shape
    tokens, f = middle + window, Fraction(floor)
    safe = max(1, math.floor(budget * f)) if f else 0
    protected = [set(highest(lane, max(0, safe - window))) for lane in scores]
    ranked = [
        (scores[h, j], j, h) for h in range(lanes) for j in range(middle) if j not in protected[h]
    ]
    excess = lanes * (tokens - budget)
    if excess > len(ranked):
        raise DoesNotFit(f"window {window} does not fit in budget {budget}")
    gone = {(h, j) for _, j, h in sorted(ranked)[:excess]}
    return [[j for j in range(tokens) if (h, j) not in gone] for h in range(lanes)]


# Sections 5 and 6, StreamingLLM and TOVA


class Streaming:
    """Keep the first s and the last r if n > s + r."""

    def __init__(self, recent, sinks=4):
        self.recent, self.sinks = recent, sinks

    def prefill(self, attention):
        pass

    def observe(self, query, row):
        pass

    def evict(self, residents, step):
        old = residents[: max(0, len(residents) - self.recent)]
        return [(j, None) for j in old if j >= self.sinks]


class Tova:
    """s_j = (1/H) sum_h A[h,last,j] over all heads of the layer; keep top_C(s). The newest token
    may be dropped.
    """

    def __init__(self, budget):
        self.budget = budget

    def prefill(self, attention):
        self.observe(attention.shape[1] - 1, attention[:, -1])

    def observe(self, query, row):
        self.scores = head_reduced_rows(row, "mean")

    def evict(self, residents, step):
        stay = highest(self.scores, self.budget, residents)
        return [(j, float(self.scores[j])) for j in residents if j not in stay]


def tova_kvpress(attention, budget):
    """kvpress keeps the last token whatever it gets, and does nothing in decode."""
    tokens = attention.shape[2]
    scores = head_reduced_rows(attention[:, -1], "mean")
    return highest(scores, budget - 1, range(tokens - 1)) + [tokens - 1]


# Sections 11 and 12, NACL and Scissorhands


def nacl(attention, kv_heads, budget, sinks, recent, proxies, random, draws, temperature=1.0):
    """Sinks, recent, top_{m1} of S_j = sum_{last q rows} A in the middle, and m2 of the rest drawn
    without replacement with probability softmax(S/T), uniform if T <= 0; m1 + m2 is what is left.

    random  m2
    draws   [kv_head, key], uniform in (0, 1): the largest S/T - ln(-ln u) are drawn (Gumbel), which
            is drawing without replacement
    """
    tokens = attention.shape[2]
    middle = range(min(sinks, tokens), max(min(sinks, tokens), tokens - recent))
    best = budget - sinks - recent - random
    if best < 0:
        raise DoesNotFit("sinks + recent + random > budget")
    scores = by_lane(column_sums(attention[:, tokens - proxies :]), kv_heads, "mean")
    kept = []
    for lane in range(kv_heads):
        chosen = highest(scores[lane], best, middle)
        rest = [j for j in middle if j not in chosen]
        logits = scores[lane] / temperature if temperature > 0 else np.zeros(tokens)
        keys = logits - np.log(-np.log(draws[lane]))
        drawn = highest(keys, random, rest)
        protected = [j for j in range(tokens) if j not in middle]
        kept.append(sorted({*protected, *chosen, *drawn}))
    return kept


def scissorhands(windows, kv_heads, budget, sinks, recent, decay):
    """I_j <- decay I_j + sum_{window rows} A; sinks and recent protected; top-k of the rest.

    windows  one array [query_head, row, key] a call, oldest first; all with the same keys
    """
    tokens = windows[0].shape[2]
    importance = np.zeros((kv_heads, tokens))
    for attention in windows:
        importance = decay * importance + by_lane(column_sums(attention), kv_heads, "mean")
    if sinks + recent > budget:
        raise DoesNotFit(f"sinks {sinks} + recent {recent} > budget {budget}")
    if tokens <= budget:
        return [list(range(tokens))] * kv_heads
    middle = range(sinks, tokens - recent)
    protected = [*range(sinks), *range(tokens - recent, tokens)]
    return [
        sorted(protected + highest(lane, budget - sinks - recent, middle)) for lane in importance
    ]


# Sections 13 and 14, policies of keys alone, and ExpectedAttention


def norm(vector):
    """The L2 norm in double, dimensions ascending."""
    return math.sqrt(_ascending_sum(float(x) * float(x) for x in vector))


def cosine(x, y):
    """x.y / (|x| |y|) in double, dimensions ascending; 0 for a zero vector."""
    lengths = norm(x) * norm(y)
    product = _ascending_sum(float(a) * float(b) for a, b in zip(x, y, strict=True))
    return product / lengths if lengths else 0.0


def knorm(keys, budget):
    """Score -|k_j|: keep the lowest norms. keys [kv_head, token, dimension]."""
    return [highest([-norm(key) for key in lane], budget) for lane in keys]


def keydiff_scores(keys):
    """-cos(k_j, mean_i k_i/|k_i|) -> [kv_head, token]."""
    scores = []
    for lane in keys.astype(np.float64):
        anchor = np.zeros(lane.shape[1])
        for key in lane:
            length = norm(key)
            anchor = anchor + (key / length if length else key)
        anchor = anchor / len(lane)
        scores.append([-cosine(key, anchor) for key in lane])
    return np.array(scores)


def keydiff(keys, budget):
    return [highest(lane, budget) for lane in keydiff_scores(keys)]


def mean_rotation(head_dim, base, begin, count):
    """Mean of the rotary matrices [d, d] at positions begin .. begin + count - 1.

    Dimension i turns with i + d/2 by position / base^(2i/d).
    """
    half = head_dim // 2
    total = np.zeros((head_dim, head_dim))
    for position in range(begin, begin + count):
        for i in range(half):
            angle = position * base ** (-2.0 * i / head_dim)
            total[i, i] += math.cos(angle)
            total[i + half, i + half] += math.cos(angle)
            total[i, i + half] -= math.sin(angle)
            total[i + half, i] += math.sin(angle)
    return total / count


def expected_attention_scores(unrotated, keys, values, rotation, sinks=4, epsilon=0.0):
    """mu, Sigma of the queries before rotary embedding without the first s (divisor: their
    number); mu' = R mu, Sigma' = R Sigma R^T; z_j = k_j.mu'/sqrt(d) + k_j.Sigma' k_j/(2d);
    p = softmax_j(z) over j >= s; mean over the group; (p + epsilon) |v_j|.

    unrotated [query_head, token, dimension]; -> [kv_head, token - s]
    """
    heads, _, d = unrotated.shape
    per_head = []
    for head in range(heads):
        queries = unrotated[head, sinks:].astype(np.float64)
        mean = queries.mean(axis=0)
        covariance = (queries - mean).T @ (queries - mean) / len(queries)
        mean, covariance = rotation @ mean, rotation @ covariance @ rotation.T
        lane = keys[head * len(keys) // heads, sinks:].astype(np.float64)
        z = np.array([k @ mean / math.sqrt(d) + k @ covariance @ k / (2 * d) for k in lane])
        p = np.exp(z - z.max())
        per_head.append(p / p.sum())
    lanes = by_lane(np.array(per_head), len(keys), "mean")
    lengths = np.array([[norm(v) for v in lane[sinks:]] for lane in values])
    return (lanes + epsilon) * lengths


def expected_attention(unrotated, keys, values, rotation, budget, sinks=4, epsilon=0.0):
    if budget < sinks:
        raise DoesNotFit(f"sinks {sinks} > budget {budget}")
    scores = expected_attention_scores(unrotated, keys, values, rotation, sinks, epsilon)
    return [[*range(sinks), *(j + sinks for j in highest(lane, budget - sinks))] for lane in scores]


# A lane that decides in every step


def decode_lane(weights, prompt, policy):
    """One lane through a sequence. The log: (step, token, score), step 0 the end of the prefill.

    weights  [query_head, T, T] float32, the lane's heads; shares are renormalised over residents
    policy   prefill(attention [head, prompt, T]), observe(query, row [head, T]),
             evict(residents, step)
    """
    tokens = weights.shape[2]
    resident = np.arange(tokens) < prompt
    policy.prefill(_shares(weights[:, :prompt], resident))
    log = []
    for step in range(tokens - prompt + 1):
        if step:
            resident[prompt + step - 1] = True
            query = prompt + step - 1
            policy.observe(query, _shares(weights[:, query], resident))
        for token, score in policy.evict([int(j) for j in np.flatnonzero(resident)], step):
            resident[token] = False
            log.append((step, token, score))
    return sorted(log, key=lambda entry: entry[:2])


def _shares(weights, resident):
    weights = np.where(resident, weights, np.float32(0))
    return divide_or_zero(weights, row_sum(weights)[..., None])
