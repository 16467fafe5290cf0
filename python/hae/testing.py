"""The contract of policies, for policies of your own: what holds for each policy of the table must
hold for yours, on fixed sequences at the edges and on generated ones (Hypothesis), whose
counterexample shrinks.

    def test_mine_keeps_the_contract():
        hae.testing.check_policy(lambda: Mine(budget=8))

docs/python-policies.md says what is checked.

And kernels of your own, each case of hae/kernels.h a test (docs/validate.md):

    @pytest.mark.parametrize("case", hae.testing.kernel_cases("attend"))
    def test_my_attention(case):
        hae.testing.check_kernel(case, my_attention, framework="torch")
"""

from __future__ import annotations

import math
import unittest
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

try:
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st
except ImportError:
    raise ImportError("hae.testing needs Hypothesis: pip install 'hae[testing]'") from None

from hae import _engine
from hae.comparison import Run, replay
from hae.policy_class import Needs
from hae.sequences import sequence
from hae.trace_strategies import attention_traces, describe, edge_traces, qkv_traces, traces
from hae.validation import validate

if TYPE_CHECKING:
    from hae._engine import Rows, Sequence, SequenceInfo
    from hae.policy_class import Policy

__all__ = [
    "PROPERTIES",
    "Property",
    "attention_traces",
    "check_kernel",
    "check_policy",
    "check_property",
    "describe",
    "edge_traces",
    "kernel_cases",
    "qkv_traces",
    "traces",
]

MakePolicy = Callable[[], "Policy"]


@dataclass(frozen=True)
class Property:
    """One sentence of the contract.

    name    as a test is called
    claim   what must hold
    traces  how many sequences it is about
    check   check(make_policy, *sequences): raises where it does not hold
    qkv     it is about sequences of queries and keys alone
    """

    name: str
    claim: str
    traces: int
    check: Callable[..., None]
    qkv: bool = False

    def __str__(self) -> str:
        return self.name


def _replay(trace: Sequence, policy: Any) -> Run:
    return replay(trace, [policy], threads=1)[0]


def _expect(holds: bool, complaint: str) -> None:
    if not holds:
        raise AssertionError(complaint)


def _expect_same_log(found: Run, expected: Run, when: str) -> None:
    pairs = [run.json_lines().splitlines() for run in (found, expected)]
    for i in range(max(map(len, pairs))):
        now, before = (lines[i] if i < len(lines) else "missing" for lines in pairs)
        _expect(now == before, f"{when}, eviction {i} is\n  {now}\nand was\n  {before}")
    _expect(found.pending.equals(expected.pending), f"{when}, other tokens are pending at the end")


def _expect_same(found: Run, expected: Run, when: str) -> None:
    _expect_same_log(found, expected, when)
    for population in ("decode", "prefill"):
        values, others = getattr(found, population), getattr(expected, population)
        _expect((values is None) == (others is None), f"{when}, {population} has other rows")
        for metric in values or {}:
            _expect(
                np.array_equal(values[metric], others[metric], equal_nan=True),
                f"{when}, the logs agree, but not {population} {metric}",
            )
    _expect(
        np.array_equal(found.attention_tokens, expected.attention_tokens)
        and np.array_equal(found.final_tokens, expected.final_tokens),
        f"{when}, the logs agree, but not the sizes",
    )


# --------------------------------------------------------- blocks, and rows that are stated


class _SomeRows:
    """Some rows of a block, as if they were one: of an engine's rows, by index."""

    def __init__(self, rows: Rows, which: np.ndarray) -> None:
        self._rows, self._which = rows, which
        self.layer = rows.layer
        self.queries = rows.queries[which]

    def visible(self) -> np.ndarray:
        seen = self._rows.visible()[self._which]
        return seen[:, : np.flatnonzero(seen.any(0))[-1] + 1]

    def values(self, *arguments: Any, **options: Any) -> np.ndarray:
        values = self._rows.values(*arguments, **options)[self._which]
        return np.ascontiguousarray(values[:, : self.visible().shape[1]])


class _Delegating:
    """An object of which a part is replaced."""

    def __init__(self, whole: Any) -> None:
        self._whole = whole

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


class _Divided(_Delegating):
    """A policy whose prompt rows come divided, or not all of them.

    divide  gives of the positions of a block's queries the indices of each part
    """

    def __init__(
        self, policy: Policy, divide: Callable[[int, np.ndarray], Iterable[np.ndarray]]
    ) -> None:
        super().__init__(policy)
        self._divide = divide

    def begin(self, info: SequenceInfo) -> Any:
        return _DividedRun(self._whole.begin(info), self._divide)


class _DividedRun(_Delegating):
    def __init__(self, run: Any, divide: Callable[[int, np.ndarray], Iterable[np.ndarray]]) -> None:
        super().__init__(run)
        self._divide = divide

    def observe(self, rows: Rows) -> None:
        for which in self._divide(rows.layer, rows.queries):
            if len(which):
                self._whole.observe(_SomeRows(rows, which))


def _in_blocks(size: int) -> Callable[[int, np.ndarray], Iterable[np.ndarray]]:
    return lambda layer, queries: (
        np.arange(begin, min(begin + size, len(queries))) for begin in range(0, len(queries), size)
    )


def _is_stated(needs: Needs, info: SequenceInfo, query: int) -> bool:
    return (
        needs.prompt_rows == "all"
        or (needs.prompt_rows == "text" and info.image[query] < 0)
        or query >= info.prompt - needs.newest_prompt_rows
    )


# ---------------------------------------------------------------------------- the properties


def _repeats_itself(make: MakePolicy, trace: Sequence) -> None:
    policy = make()
    first = _replay(trace, policy)
    _expect_same(_replay(trace, policy), first, "replayed again")


def _ignores_blocks(make: MakePolicy, trace: Sequence) -> None:
    whole = _replay(trace, make())
    for size in (1, 2, 7):
        divided = _replay(trace, _Divided(make(), _in_blocks(size)))
        _expect_same(divided, whole, f"in blocks of {size} rows")


def _forgets(make: MakePolicy, earlier: Sequence, trace: Sequence) -> None:
    alone = _replay(trace, make())
    policy = make()
    _replay(earlier, policy)
    _expect_same(_replay(trace, policy), alone, "after another sequence")


def _in_a_closed_loop(policy: Policy, trace: Sequence) -> Run:
    """All layers of a step before the next step, by a model that computes what was recorded."""
    info = trace.info
    shape = ("layers", "query_heads", "kv_heads", "head_dim", "prompt", "tokens", "scale")
    loop = _engine.ClosedLoop(
        policy,
        name=info.name,
        image=info.image[: info.prompt].tolist(),
        window=info.window.tolist(),
        **{name: getattr(info, name) for name in shape},
    )
    arrays = [
        [np.asarray(rows(layer)) for rows in (trace.queries, trace.keys, trace.values)]
        for layer in range(info.layers)
    ]
    for layer, vectors in enumerate(arrays):
        loop.prefill(layer, *(np.ascontiguousarray(x[:, : info.prompt]) for x in vectors))
    for token in range(info.prompt, info.tokens):
        for layer, vectors in enumerate(arrays):
            loop.step(layer, *(np.ascontiguousarray(x[:, token : token + 1]) for x in vectors))
    return Run(loop.finish())


def _keeps_layers_apart(make: MakePolicy, trace: Sequence) -> None:
    """A replay decodes one layer after another. Threads would show no more: their order is another
    each time, so a counterexample of theirs cannot shrink.
    """
    policy = make()
    in_order = _replay(trace, policy)
    if trace.info.payload != "qkv" or policy.merges or in_order.log["within"].any():
        return  # a model's cache merges nothing; what left within a prefill is in none of its rows
    closed = _in_a_closed_loop(make(), trace)
    _expect_same(closed, in_order, "with all layers of a step before the next step")


def _is_measured(make: MakePolicy, trace: Sequence) -> None:
    info, run = trace.info, _replay(trace, make())
    rows = info.layers * info.query_heads * info.steps
    masked = sum(
        int((trace.attention(layer)[:, info.prompt :].sum(-1) == 0).sum())
        for layer in range(info.layers)
    )
    numbers = {
        metric: int(np.sum(np.isfinite(values) & (values >= 0)))
        for metric, values in (run.decode or {}).items()
    }
    measured = rows - masked
    lost = run.removed_all_rows
    if run.decode is None or measured == 0:
        return
    with_mass = numbers["output_error"]
    _expect(measured - lost <= with_mass <= measured, "output errors are missing")
    if not make().merges:  # such a run has output errors alone
        _expect(numbers["missed_mass"] == measured, "missed masses are missing")
        _expect(numbers["missed_pull"] == measured, "missed pulls are missing")
        _expect(numbers["kl"] == with_mass, "KLs are missing")
        _expect(not (run.decode["missed_mass"] > 1).any(), "a missed mass exceeds 1")


def _keeps_its_limits(make: MakePolicy, trace: Sequence) -> None:
    """The engine holds every run to its limits; this counts once more."""
    run = _replay(trace, make())
    for layer, lanes in enumerate(run.limits):
        for lane, limits in enumerate(lanes):
            of_lane = run.log[(run.log.layer == layer) & run.log.lane.isin([-1, lane])]
            _expect(not (of_lane.token < limits["sinks"]).any(), f"a sink of layer {layer} left")
            if limits["capacity"] is None:
                continue
            held = run.attention_tokens[layer, lane] - 1  # each step's own token joins before
            sizes = np.append(held, run.final_tokens[layer, lane])
            grown = np.arange(len(sizes)) if limits["grows"] else 0
            _expect(
                bool((sizes <= limits["capacity"] + grown).all()),
                f"lane {lane} of layer {layer} holds {sizes.max()} tokens, above its capacity",
            )


def _copy(trace: Sequence, *, values: bool = True, keys: bool = True) -> Sequence:
    """The sequence without its values, or with probabilities in place of queries and keys."""
    info = trace.info
    layers = range(info.layers)
    payload: dict[str, Any] = {}
    if info.payload == "qkv" and keys:
        payload["q"] = [trace.queries(layer) for layer in layers]
        payload["k"] = [trace.keys(layer) for layer in layers]
        payload |= {"window": info.window, "scale": info.scale}
    else:
        payload["attention"] = [trace.attention(layer) for layer in layers]
    if values:
        payload["v"] = [trace.values(layer) for layer in layers]
    elif "attention" in payload:
        payload |= {"kv_heads": info.kv_heads, "head_dim": info.head_dim}
    return sequence(prompt=info.prompt, image=info.image, name=info.name, **payload)


def _expect_refusal(make: MakePolicy, trace: Sequence, what: str) -> None:
    try:
        _replay(trace, make())
    except _engine.NeedsError:
        return
    raise AssertionError(f"a sequence without {what}, which it needs, is not refused")


def _states_its_needs(make: MakePolicy, trace: Sequence) -> None:
    info, policy = trace.info, make()
    needs = [policy.needs(info, layer) for layer in range(info.layers)]
    with_everything = _replay(trace, make())

    def stated(layer: int, queries: np.ndarray) -> list[np.ndarray]:
        return [np.flatnonzero([_is_stated(needs[layer], info, query) for query in queries])]

    rows_alone = _replay(trace, _Divided(make(), stated))
    _expect_same_log(rows_alone, with_everything, "with no more rows than it says it needs")
    if any(one.values for one in needs):
        _expect_refusal(make, _copy(trace, values=False), "values")
    else:
        with_values, without = (
            _replay(_copy(trace, values=values), make()) for values in (True, False)
        )
        _expect_same_log(without, with_values, "without values, which it does not need")
    if any(one.keys for one in needs):
        _expect_refusal(make, _copy(trace, keys=False), "keys")


PROPERTIES = [
    Property(
        "replaying_twice_gives_the_same_run",
        "a sequence that is replayed again gives the same run",
        1,
        _repeats_itself,
    ),
    Property(
        "the_size_of_a_block_changes_nothing",
        "the size of a block of prompt rows changes nothing",
        1,
        _ignores_blocks,
    ),
    Property(
        "one_sequence_after_another_is_forgotten", "begin forgets all sequences before", 2, _forgets
    ),
    Property(
        "the_order_of_layers_changes_nothing",
        "layers share nothing while decoding",
        1,
        _keeps_layers_apart,
        qkv=True,
    ),
    Property(
        "every_row_is_measured_and_finite",
        "every decode row is measured by finite numbers",
        1,
        _is_measured,
    ),
    Property(
        "it_keeps_its_limits",
        "it proposes what it may, and stays within the limits it promises",
        1,
        _keeps_its_limits,
    ),
    Property(
        "it_states_its_needs",
        "it uses what it says it needs, and a sequence that lacks that is refused",
        1,
        _states_its_needs,
    ),
]


# ---------------------------------------------------------------------------------- checking


def _strategy(property: Property, make: MakePolicy, sizes: dict[str, int]) -> Any:
    policy, info = make(), edge_traces()[0].info
    keys = any(policy.needs(info, layer).keys for layer in range(info.layers))
    return (qkv_traces if keys or property.qkv else traces)(**sizes)


def _holds(property: Property, make: MakePolicy, given_traces: tuple[Sequence, ...]) -> bool:
    """Checks a property on given sequences. Returns whether the policy could run on them."""
    try:
        property.check(make, *given_traces)
    except (_engine.NeedsError, _engine.ConfigError):
        return False
    except Exception as error:
        shown = "\nthen ".join(map(describe, given_traces))
        raise AssertionError(
            f"{property.name}: {property.claim}, but\n{error or type(error).__name__}\non {shown}"
        ) from error
    return True


def check_property(
    property: Property, make_policy: MakePolicy, *, cases: int = 50, **sizes: int
) -> None:
    """Checks one property: on generated sequences that have what the policy needs, then on those of
    edge_traces(). The same cases each time.

    make_policy  makes the policy, a new object each time: `lambda: Mine(budget=8)`
    cases        generated cases
    sizes        min_tokens, max_tokens, max_layers of the generated sequences
    raises       AssertionError with the smallest counterexample found; also when fewer than one
                 generated case in ten could be run
    """
    counts = {True: 0, False: 0}

    @settings(
        max_examples=cases,
        deadline=None,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.tuples(*[_strategy(property, make_policy, sizes)] * property.traces))
    def on_generated(generated: tuple[Sequence, ...]) -> None:
        counts[_holds(property, make_policy, generated)] += 1

    on_generated()
    if counts[True] < math.ceil(sum(counts.values()) / 10):
        raise AssertionError(
            f"{property.name}: the policy could run on {counts[True]} of {sum(counts.values())} "
            "generated sequences only; options that need more tokens than a sequence has are "
            "impossible there, so raise min_tokens"
        )
    edges = edge_traces()
    if property.traces == 1:
        for edge in edges:
            _holds(property, make_policy, (edge,))
        return
    for before, after in zip(edges, edges[1:], strict=False):
        _holds(property, make_policy, (before, after))
        _holds(property, make_policy, (after, before))


def check_evictions(make_policy: MakePolicy) -> None:
    """Raises AssertionError when a policy evicts nothing on any of edge_traces(): then no property
    was put to the test.
    """
    for edge in edge_traces():
        try:
            if len(_replay(edge, make_policy()).log):
                return
        except (_engine.NeedsError, _engine.ConfigError):
            continue
    raise AssertionError(
        "nothing was evicted on any sequence, so no property was put to the test; give the policy "
        "a smaller budget"
    )


def check_policy(make_policy: MakePolicy, *, cases: int = 50, **sizes: int) -> None:
    """Checks every property of PROPERTIES and that something is evicted. Arguments and errors as in
    check_property. For one test a property:

        @pytest.mark.parametrize("property", hae.testing.PROPERTIES, ids=str)
        def test_contract(property):
            hae.testing.check_property(property, lambda: Mine(budget=8))
    """
    for property in PROPERTIES:
        check_property(property, make_policy, cases=cases, **sizes)
    check_evictions(make_policy)


def kernel_cases(operation: str) -> list[str]:
    """The names of all cases of an operation of hae/kernels.h, in order."""
    return _engine.validate_cases(operation)


def check_kernel(case: str, function: Callable[..., Any], **options: Any) -> None:
    """Holds a function to one case, as hae.validate does, which takes the same options.

    Raises AssertionError with the smallest input that fails, and unittest.SkipTest where the
    function does not serve what the case asks for.
    """
    report = validate(case.partition("/")[0], function, case=case, **options)
    if report.failed == 0 and report.passed == 0:
        raise unittest.SkipTest(f"{case}: not supported")
    report.check()
