"""Policies written in Python: the same contract, metrics and log as those of the table."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hae

# --------------------------------------------------------------------- twins of C++ policies


class Lowest(hae.Policy):
    """Twin of greedy and of DDES's mark: sums of observed attention, the lowest goes.

    bin  None: evict at once; D: mark one a step, empty the bin when D are pending
    """

    def __init__(self, budget, lanes="layer", bin=None, recent=1, score="sum") -> None:
        self.lanes = lanes
        self.options = {"budget": budget, "bin": bin, "recent": recent, "score": score}

    def begin(self, info):
        return LowestRun(info, self.lanes, **self.options)


class LowestRun(hae.PolicyRun):
    def __init__(self, info, lanes, budget, bin, recent, score) -> None:
        count = info.kv_heads if lanes == "kv_head" else 1
        self.budget, self.bin, self.recent, self.score = budget, bin, recent, score
        self.sums = np.zeros((info.layers, count, info.tokens))
        self.exposures = np.zeros((info.layers, info.tokens))

    def observe(self, rows):
        seen = rows.visible()
        self.exposures[rows.layer, : seen.shape[1]] += seen.sum(0)
        for lane in range(self.sums.shape[1]):
            for row in rows.values(
                lane
            ):  # one after another: the order of sums is part of the result
                self.sums[rows.layer, lane, : len(row)] += row

    def scores(self, layer, lane):
        sums = self.sums[layer, lane]
        if self.score == "sum":
            return sums
        return sums / np.maximum(self.exposures[layer], 1)

    def lowest(self, layer, cache, lane, count):
        """The `count` lowest (score, position) among unmarked tokens before the recent ones."""
        residents = cache.residents(lane)
        eligible = np.setdiff1d(residents[: len(residents) - self.recent], cache.pending(lane))
        return eligible[np.lexsort((eligible, self.scores(layer, lane)[eligible]))][: max(0, count)]

    def evict(self, layer, lane, tokens):
        scores = self.scores(layer, lane)
        return [hae.Evict(int(t), lane=lane, score=float(scores[t])) for t in tokens]

    def fit(self, layer, cache):
        return hae.Decision(
            evict=[
                entry
                for lane in range(cache.lanes)
                for entry in self.evict(
                    layer,
                    lane,
                    self.lowest(layer, cache, lane, cache.size(lane) - self.budget),
                )
            ]
        )

    def step(self, rows, cache):
        self.observe(rows)
        if self.bin is None:
            return self.fit(rows.layer, cache)
        evict, mark = [], []
        for lane in range(cache.lanes):
            pending = list(cache.pending(lane))
            if cache.size(lane) - len(pending) > self.budget:
                token = int(self.lowest(rows.layer, cache, lane, 1)[0])
                mark.append(hae.Mark(token, lane))
                pending.append(token)
            if len(pending) == self.bin:
                evict += self.evict(rows.layer, lane, sorted(pending))
        return hae.Decision(evict=evict, mark=mark)

    def limits(self, layer, lane):
        capacity = self.budget + (self.bin - 1 if self.bin else 0)
        return hae.Limits(recent=self.recent, budget=self.budget, bin=self.bin, capacity=capacity)


class Window(hae.Policy):
    """Twin of window: the sinks and the newest tokens stay."""

    prompt_rows = "none"

    def __init__(self, sinks, recent) -> None:
        self.options = {"sinks": sinks, "recent": recent}

    def begin(self, info):
        class Run(hae.PolicyRun):
            def fit(run, layer, cache):  # noqa: N805
                middle = cache.residents()[self.options["sinks"] :]
                surplus = max(0, len(middle) - self.options["recent"])
                return hae.Decision(evict=[hae.Evict(int(t)) for t in middle[:surplus]])

            def step(run, rows, cache):  # noqa: N805
                return run.fit(rows.layer, cache)

        return Run()


@st.composite
def sequences(draw):
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    layers, dims = draw(st.integers(1, 2)), 4
    prompt = draw(st.integers(6, 40))
    tokens = prompt + draw(st.integers(1, 12))
    # A few large numbers make attention peaked; multiples of 1/2 make ties.
    scale = draw(st.sampled_from([0.3, 2.0]))

    def numbers(heads):
        values = random.normal(size=(layers, heads, tokens, dims)) * scale
        return (np.round(values * 2) / 2 if draw(st.booleans()) else values).astype(np.float32)

    return hae.sequence(
        q=numbers(kv_heads * group),
        k=numbers(kv_heads),
        v=numbers(kv_heads),
        prompt=prompt,
        # Wider than any budget below: of the program, policies are capped at it; the twins not.
        window=[draw(st.sampled_from([0, 13])) for _ in range(layers)],
        image=np.where(np.arange(tokens) // 3 % 2, 0, -1),
    )


def assert_same(python: hae.Run, native: hae.Run) -> None:
    assert python.json_lines() == native.json_lines()
    assert python.pending.equals(native.pending)
    for metric, values in native.decode.items():
        np.testing.assert_array_equal(python.decode[metric], values)
    np.testing.assert_array_equal(python.attention_tokens, native.attention_tokens)


@settings(max_examples=60, deadline=None)
@given(
    sequence=sequences(),
    budget=st.integers(3, 12),
    bin=st.sampled_from([None, 1, 3]),
    lanes=st.sampled_from(["layer", "kv_head"]),
    score=st.sampled_from(["sum", "mean"]),
    threads=st.sampled_from([1, 2]),
)
def test_a_twin_in_python_gives_the_very_log_and_figures(
    sequence, budget, bin, lanes, score, threads
):
    options = f"budget={budget},recent=1,lane={lanes},score={score}"
    native = f"greedy:{options}" if bin is None else f"hae:dap=none,bin={bin},{options}"
    twin = Lowest(budget, lanes, bin, score=score)
    assert_same(*hae.replay(sequence, [twin, native], threads=threads))


@settings(max_examples=30, deadline=None)
@given(sequence=sequences(), sinks=st.integers(0, 3), recent=st.integers(1, 9))
def test_a_window_in_python_is_the_window(sequence, sinks, recent):
    assert_same(
        *hae.replay(sequence, [Window(sinks, recent), f"window:sinks={sinks},recent={recent}"])
    )


# ------------------------------------------------------------------------------- the contract


@pytest.fixture
def sequence():
    random = np.random.default_rng(0)
    q, k, v = (random.normal(size=(2, heads, 12, 4)).astype(np.float32) for heads in (4, 2, 2))
    return hae.sequence(q=q, k=k, v=v, prompt=9)


def policy_of(moment, answer, limits=None, lanes="layer"):
    """A policy that gives one answer at one moment of layer 1."""

    class One(hae.PolicyRun):
        def limits(self, layer, lane):
            return limits or hae.Limits()

    def decide(self, first, *rest):
        layer = first if isinstance(first, int) else getattr(first, "layer", 1)
        return answer(first, *rest) if layer == 1 else None

    setattr(One, moment, decide)

    class Policy(hae.Policy):
        name = "mine"

        def begin(self, info):
            return One()

    policy = Policy()
    policy.lanes = lanes
    return policy


def evicts(*entries, **options):
    return lambda *_: hae.Decision(evict=entries, **options)


@pytest.mark.parametrize(
    "policy, message",
    [
        (
            policy_of("fit", evicts(hae.Evict(9))),
            "step 0, layer 1, lane -1: token 9 is evicted but not resident",
        ),
        (policy_of("step", evicts(hae.Evict(4), hae.Evict(4))), "token 4 is evicted but not resid"),
        (
            policy_of("step", evicts(hae.Evict(1)), hae.Limits(sinks=2)),
            "step 1, layer 1, lane -1: token 1 is a protected sink",
        ),
        (
            policy_of("step", evicts(hae.Evict(9)), hae.Limits(recent=2)),
            "step 1, layer 1, lane -1: token 9 is protected as recent",
        ),
        (
            policy_of("step", lambda *_: hae.Decision(mark=[hae.Mark(3), hae.Mark(3)])),
            "token 3 is marked twice",
        ),
        (policy_of("step", evicts(hae.Evict(3, lane=2)), lanes="kv_head"), "lane 2: token 3 names"),
        (
            policy_of("prune", evicts(hae.Evict(3, layer=2))),
            "layer 2, lane -1: token 3 names a layer",
        ),
        (policy_of("step", evicts(hae.Evict(3, layer=0))), "belongs to another layer"),
        (policy_of("step", lambda *_: None, hae.Limits(capacity=9)), "lane 0 holds 10 tokens"),
    ],
)
def test_what_a_policy_may_not_is_refused_by_name(sequence, policy, message):
    with pytest.raises(hae.ContractViolation, match=re.escape(message)) as raised:
        hae.replay(sequence, policy)
    assert "mine" in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "policy, error, message",
    [
        (policy_of("step", evicts(effect="later")), hae.ConfigError, "effect is 'later'"),
        (policy_of("fit", lambda *_: 1 / 0), ZeroDivisionError, "division"),
        (policy_of("fit", lambda *_: 3), AttributeError, "evict"),
        (policy_of("step", lambda rows, cache: cache.residents(1)), IndexError, "lane 1 of 1"),
        (
            policy_of("step", lambda rows, cache: rows.values(heads="median")),
            hae.ConfigError,
            "heads is 'median'; allowed: max, mean, sum",
        ),
        (object(), TypeError, "not a policy"),
        ("mine", hae.ConfigError, "mine"),
    ],
)
def test_errors_come_through(sequence, policy, error, message):
    with pytest.raises(error, match=re.escape(message)):
        hae.replay(sequence, policy)


def test_rows_and_caches_are_lent_for_one_call(sequence):
    kept = []
    policy = policy_of("step", lambda rows, cache: kept.extend([rows, cache, rows.values()]))
    hae.replay(sequence, policy)
    rows, cache, values = kept[:3]
    for use in (rows.values, lambda: rows.layer, cache.residents):
        with pytest.raises(hae.ContractViolation, match="lent for the call"):
            use()
    # The array is the policy's own: it is there still, and sums to 1.
    assert values.shape == (1, 10)
    assert values.sum() == pytest.approx(1, abs=1e-6)


def test_a_trace_without_the_rows_a_policy_needs_is_refused(sequence, tmp_path):
    class Text(hae.Policy):
        def needs(self, info, layer):
            return hae.Needs(prompt_rows="rows")

        def begin(self, info):
            return hae.PolicyRun()

    with pytest.raises(hae.ConfigError, match="prompt_rows is 'rows'; allowed: all, none, text"):
        hae.replay(sequence, Text())
