"""The contract of policies as a library: right ones pass, mistakes are found on a few tokens."""

import importlib
import re
import sys

import numpy as np
import pytest
from hypothesis import given, settings

import hae
import hae.testing
from hae.testing import PROPERTIES, check_evictions, check_policy, check_property

BUDGET = 3  # so no sequence of fewer than four tokens shows a wrong eviction


class Lowest(hae.Policy):
    """Sums of attention: the lowest between the sink and the newest goes. `mistake` is a flaw."""

    def __init__(self, mistake=None, budget=BUDGET) -> None:
        self.mistake, self.budget, self.begun = mistake, budget, 0
        if mistake == "uses rows it does not ask for":
            self.prompt_rows = "none"

    def begin(self, info):
        self.begun += 1
        return LowestRun(info, self)


class LowestRun(hae.PolicyRun):
    def __init__(self, info, policy) -> None:
        self.mistake, self.budget = policy.mistake, policy.budget
        layers = 1 if self.mistake == "shares layers" else info.layers
        self.sums = np.zeros((layers, info.tokens))
        self.remembered = 9 * (policy.begun - 1) if self.mistake == "remembers" else 0

    def of_layer(self, layer):
        return self.sums[layer % len(self.sums)]

    def observe(self, rows):
        for i, row in enumerate(rows.values()):
            counts_more = self.mistake == "counts blocks" and i == 0
            weight = 9 if counts_more else 1 + self.remembered * (rows.queries[i] == 1)
            self.of_layer(rows.layer)[: len(row)] += weight * row

    def fit(self, layer, cache):
        first = 0 if self.mistake == "evicts its sink" else 1
        tokens = cache.residents()[:-1]
        tokens = tokens[tokens >= first]
        scores = self.of_layer(layer)[tokens]
        excess = max(0, cache.size() - self.budget)
        lowest = np.lexsort((tokens, scores))[:excess]
        return hae.Decision(
            evict=[hae.Evict(int(tokens[i]), score=float(scores[i])) for i in lowest]
        )

    def step(self, rows, cache):
        self.observe(rows)
        return self.fit(rows.layer, cache)

    def limits(self, layer, lane):
        return hae.Limits(sinks=1, recent=1, budget=self.budget, capacity=self.budget)


class NewestValues(hae.Policy):
    """Keeps the token whose value is largest, and says that it needs values, or does not."""

    prompt_rows = "none"

    def __init__(self, needs_values=True) -> None:
        self.needs_values = needs_values

    def needs(self, info, layer):
        return hae.Needs(prompt_rows="none", values=self.needs_values)

    def begin(self, info):
        class Run(hae.PolicyRun):
            def begin_layer(run, layer, keys, values):  # noqa: N805
                run.sizes = None if values is None else np.abs(values).sum((0, 2))

            def fit(run, layer, cache):  # noqa: N805
                tokens = cache.residents()[:-1]
                if run.sizes is not None:
                    tokens = tokens[np.argsort(run.sizes[tokens], kind="stable")]
                return hae.Decision(
                    evict=[hae.Evict(int(t)) for t in tokens[: max(0, cache.size() - BUDGET)]]
                )

        return Run()


@pytest.mark.parametrize("property", PROPERTIES, ids=str)
def test_a_right_policy_keeps_the_contract(property):
    check_property(property, Lowest, cases=30)


def test_a_policy_of_values_keeps_the_contract():
    check_policy(NewestValues, cases=10)


@pytest.mark.parametrize(
    "mistake, name",
    [
        ("remembers", "replaying_twice_gives_the_same_run"),
        ("remembers", "one_sequence_after_another_is_forgotten"),
        ("counts blocks", "the_size_of_a_block_changes_nothing"),
        ("shares layers", "the_order_of_layers_changes_nothing"),
        ("evicts its sink", "it_keeps_its_limits"),
        ("uses rows it does not ask for", "it_states_its_needs"),
    ],
)
def test_a_wrong_policy_is_found_on_a_few_tokens(mistake, name):
    (property,) = (one for one in PROPERTIES if one.name == name)
    with pytest.raises(AssertionError, match=f"^{name}: ") as raised:
        check_property(property, lambda: Lowest(mistake))
    tokens = [int(n) for n in re.findall(r", T (\d+),", str(raised.value))]
    assert len(tokens) == property.traces
    assert max(tokens) <= 5
    assert tokens[-1] >= BUDGET + 1
    assert "layer 0, v = [[[" in str(raised.value)


def test_the_first_mistake_of_a_policy_is_reported():
    with pytest.raises(
        AssertionError, match="^it_keeps_its_limits: .*\n.*protected sink"
    ) as raised:
        check_property(PROPERTIES[5], lambda: Lowest("evicts its sink"))
    assert isinstance(raised.value.__cause__, hae.ContractViolation)
    with pytest.raises(AssertionError, match="^replaying_twice_gives_the_same_run: "):
        check_policy(lambda: Lowest("remembers"))


def test_what_was_not_put_to_the_test_does_not_pass():
    with pytest.raises(AssertionError, match="nothing was evicted on any sequence"):
        check_evictions(lambda: Lowest(budget=1000))

    class Impossible(Lowest):
        def begin(self, info):
            raise hae.ConfigError("budget is too small")

    with pytest.raises(AssertionError, match="could run on 0 of 50 generated sequences"):
        check_property(PROPERTIES[0], Impossible)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(hae.testing.traces())
def test_generated_sequences_are_sound(trace):
    info = trace.info
    for layer in range(info.layers):
        rows = trace.attention(layer)
        sums = rows.sum(-1)
        assert np.all((np.abs(sums - 1) < 1e-5) | (sums == 0))
        assert not np.triu(rows, 1).any()
    assert hae.testing.describe(trace).startswith(f"{info.payload}: ")
    hae.replay(trace, "full")


def test_a_shorter_sequence_holds_the_numbers_of_a_longer_one():
    """What makes counterexamples shrink: with the same draws, fewer tokens are the first ones."""
    from hae import trace_strategies

    def shape(tokens):
        return {
            "layers": 1,
            "tokens": tokens,
            "random": np.random.default_rng(5),
            "widest": (3, 4, 40),
        }

    few, many = (trace_strategies._numbers(shape(n), 2, 3) for n in (4, 9))
    np.testing.assert_array_equal(many[:, :, :4], few)


def test_edge_sequences_have_what_they_are_named_after():
    edges = {trace.info.name: trace for trace in hae.testing.edge_traces()}
    assert len(edges) == 19
    assert edges["one token"].info.tokens == 1
    assert edges["prompt only"].info.steps == 0
    assert (edges["no text"].info.image == 0).all()
    assert edges["recomputed, windows only"].info.window.tolist() == [5, 33]
    assert (edges["masked rows"].attention(0).sum(-1) == 0).sum() == 4 * 3
    ties = edges["ties only"].attention(0)
    assert len(np.unique(ties[0, 23])) == 1


def test_without_hypothesis_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.delitem(sys.modules, "hae.testing")
    with pytest.raises(ImportError, match=r"pip install 'hae\[testing\]'"):
        importlib.import_module("hae.testing")
