"""The published policies over a whole sequence: specs, and the evictions that they come to.

An eviction here is (step, layer, lane, token, within), lane -1 when the layer is the lane.
"""

from typing import NamedTuple

import numpy as np

from . import baselines, visual_baselines
from .arithmetic import divide_or_zero
from .replay import priority
from .trace import Trace

REQUIRED = object()


class Spec(NamedTuple):
    """A policy with every default filled in."""

    name: str
    options: dict


DEFAULTS = {
    "h2o/flexgen": {"budget": REQUIRED, "recent": None},
    "h2o/prefill-window": {"budget": REQUIRED, "window": 8, "group": "mean"},
    "h2o/observed-mean": {"budget": REQUIRED},
    "h2o/history": {
        "budget": REQUIRED, "sinks": 4, "recent": 10, "history": 1, "indicator": "no",
    },
    "snapkv": {"budget": REQUIRED, "window": 32, "kernel": 5, "pool": "mean", "group": "mean"},
    "snapkv/kvpress": {"budget": REQUIRED, "window": 64, "kernel": 5},
    "pyramidkv": {
        "budget": REQUIRED, "window": 8, "kernel": 5, "pool": "mean", "group": "mean", "beta": 20,
    },
    "adakv": {
        "budget": REQUIRED, "window": 32, "kernel": 7, "pool": "max", "group": "mean",
        "floor": "0.2",
    },
    "lookm": {"budget": REQUIRED, "recent": REQUIRED, "merge": "no"},
    "h2o/ov-block": {
        "budget": REQUIRED, "block": 32, "sinks": 32, "recent": 128, "pool": 7, "window": 8,
        "norm": "sum",
    },
    "scissorhands": {
        "budget": REQUIRED, "sinks": 4, "recent": 10, "window": 8, "decay": "0.9",
    },
    "nacl": {
        "budget": REQUIRED, "sinks": 4, "recent": 10, "proxies": 8, "random": "0.2",
        "temperature": 1, "seed": 0,
    },
    "window": {"recent": REQUIRED, "sinks": 4},
    "streaming": {"recent": REQUIRED, "sinks": 4},
    "tova": {"budget": REQUIRED},
    "knorm": {"budget": REQUIRED},
    "keydiff": {"budget": REQUIRED},
    "fastv": {"layer": 2, "keep": REQUIRED},
    "fastv/text-mean": {"layer": 2, "keep": REQUIRED},
    "sparsevlm": {"target": 192, "version": 1, "keep": None, "layers": "2/6/15"},
    "mustdrop": {
        "target": 192, "tau_global": None, "tau_individual": None, "layers": "2/6/10/14",
    },
}  # fmt: skip


def parse_baseline(spec):
    """KeyError for a name or option that is none; ValueError where a required one is missing."""
    name, _, text = spec.partition(":")
    given = dict(pair.split("=") for pair in text.split(",")) if text else {}
    options = {**DEFAULTS[name], **given}
    if unknown := given.keys() - DEFAULTS[name].keys():
        raise KeyError(unknown)
    if missing := [key for key, value in options.items() if value is REQUIRED]:
        raise ValueError(f"{name}: {missing} missing")
    numeric = {
        key: int(value) if isinstance(value, str) and value.isdecimal() else value
        for key, value in options.items()
    }
    return Spec(name, numeric)


def replay_baseline(arrays, spec):
    """All evictions of a sequence, sorted.

    arrays  of the `.npz` schema; `k` where a policy reads keys
    """
    name, options = parse_baseline(spec)
    trace = Trace.from_arrays(arrays)
    if name in DECODING:
        return _decoding(trace, name, options)
    if name in VISUAL:
        return _visual(trace, name, options)
    log = []
    for layer in range(trace.layers):
        for lane, kept in enumerate(PREFILL[name](_Layer(trace, arrays, layer), **options)):
            gone = sorted(set(range(trace.prompt)) - set(kept))
            log += [(0, layer, lane, token, False) for token in gone]
    return sorted(log)


class _Layer:
    """What a policy that decides once sees of a layer at the end of its prefill."""

    def __init__(self, trace, arrays, layer):
        prompt = trace.prompt
        self.layer, self.layers, self.kv_heads = layer, trace.layers, trace.kv_heads
        self.attention = divide_or_zero(
            trace.weights[layer][:, :prompt, :prompt], trace.totals[layer][:, :prompt, None]
        )
        self.visual = {int(j) for j in np.flatnonzero(trace.visual[:prompt])}
        self.keys = np.asarray(arrays["k"])[layer][:, :prompt] if "k" in arrays else None


def share_or_count(budget, tokens):
    """A budget as tokens or as a share of the prompt."""
    return baselines.kept_of_share(budget, tokens) if isinstance(budget, str) else budget


PREFILL = {
    "h2o/prefill-window": lambda at, **o: baselines.h2o_prefill_window(
        at.attention, at.kv_heads, **o
    ),
    "h2o/observed-mean": lambda at, budget: baselines.h2o_observed_mean(
        at.attention, at.kv_heads, share_or_count(budget, at.attention.shape[2])
    ),
    "snapkv": lambda at, **o: baselines.snapkv(at.attention, at.kv_heads, **o),
    "snapkv/kvpress": lambda at, **o: (
        [list(range(at.attention.shape[2]))] * at.kv_heads
        if at.attention.shape[2] <= o["budget"]
        else baselines.snapkv_kvpress(at.attention, at.kv_heads, **o)
    ),
    "pyramidkv": lambda at, **o: baselines.pyramidkv(
        at.attention, at.kv_heads, at.layer, at.layers, **o
    ),
    "adakv": lambda at, **o: baselines.adakv(at.attention, at.kv_heads, **o),
    "lookm": lambda at, budget, recent, merge: visual_baselines.lookm(
        at.attention, at.kv_heads, at.visual, budget, recent
    ),
    "nacl": lambda at, **o: _nacl(at, **o),
    "knorm": lambda at, budget: baselines.knorm(at.keys, budget),
    "keydiff": lambda at, budget: baselines.keydiff(at.keys, budget),
}


def _nacl(at, budget, sinks, recent, random, seed, temperature, **options):
    """NACL with the program's draws: one fixed number a (seed, layer, lane, token)."""
    tokens = at.attention.shape[2]
    if tokens <= budget:
        return [list(range(tokens))] * at.kv_heads
    draws = [[uniform(seed, at.layer, h, j) for j in range(tokens)] for h in range(at.kv_heads)]
    return baselines.nacl(
        at.attention, at.kv_heads, budget, sinks, recent,
        random=share_or_count(random, budget - sinks - recent), draws=np.array(draws),
        temperature=float(temperature), **options,
    )  # fmt: skip


def uniform(seed, *place):
    """The upper 52 bits of a token's priority, u = (bits + 1/2) / 2^52 in (0, 1)."""
    return ((priority(seed, *place) >> 12) + 0.5) * 2.0**-52


class ScissorhandsLane:
    """A call a forward: the last `window` rows of the prompt, then the row of each step."""

    def __init__(self, budget, sinks, recent, window, decay):
        self.protect = (budget, sinks, recent)
        self.window, self.decay = window, float(decay)

    def prefill(self, attention):
        self.calls = [attention[:, -self.window :]]

    def observe(self, query, row):
        self.calls.append(row[:, None])

    def evict(self, residents, step):
        calls = [call[:, :, residents] for call in self.calls]
        (kept,) = baselines.scissorhands(calls, 1, *self.protect, self.decay)
        return [(j, None) for place, j in enumerate(residents) if place not in kept]


# Name -> lanes are KV heads, the policy of a lane.
DECODING = {
    "h2o/flexgen": (True, lambda budget, recent: baselines.H2OFlexgen(budget, recent)),
    "h2o/history": (
        True,
        lambda indicator, **o: baselines.H2OHistory(indicator=indicator == "yes", **o),
    ),
    "h2o/ov-block": (False, baselines.H2OOvBlock),
    "scissorhands": (True, ScissorhandsLane),
    "window": (False, baselines.Streaming),
    "streaming": (False, baselines.Streaming),
    "tova": (False, baselines.Tova),
}


def _decoding(trace, name, options):
    by_head, make = DECODING[name]
    group = trace.query_heads // trace.kv_heads
    lanes = {-1: slice(None)}
    if by_head:
        lanes = {lane: slice(lane * group, (lane + 1) * group) for lane in range(trace.kv_heads)}
    log = []
    for layer in range(trace.layers):
        for lane, query_heads in lanes.items():
            weights = trace.weights[layer][query_heads]
            evictions = baselines.decode_lane(weights, trace.prompt, make(**options))
            log += [(step, layer, lane, token, False) for step, token, _ in evictions]
    return sorted(log)


def items(value):
    """The parts of `a/b/c`; counts as numbers, shares as they are written."""
    return [int(x) if x.isdecimal() else x for x in str(value).split("/")]


def log_of_decisions(decisions, layers, everywhere=False):
    """What a layer decides acts within the prefill of the layers after it.

    decisions   {layer: tokens that go}
    everywhere  also in the others, after the prefill
    """
    log = []
    for decided, gone in decisions.items():
        for layer in range(0 if everywhere else decided + 1, layers):
            log += [(0, layer, -1, token, layer > decided) for token in gone]
    return sorted(log)


def visual_and_text(trace):
    """Both of the prompt, ascending."""
    visual = [int(j) for j in np.flatnonzero(trace.visual[: trace.prompt])]
    return visual, [j for j in range(trace.prompt) if j not in visual]


def _visual(trace, name, options):
    visual, texts = visual_and_text(trace)
    if not visual or not texts:
        return []
    decisions = VISUAL[name](trace, visual, texts, **options)
    return log_of_decisions(decisions, trace.layers, everywhere=name == "mustdrop")


def _prompt_weights(trace, layer, gone=()):
    return visual_baselines.without(
        trace.weights[layer][:, : trace.prompt, : trace.prompt], list(gone)
    )


def _fastv(choose):
    """choose  (attention of layer K - 1, visual, texts, keep) -> the visual tokens that go; K = 0
    has no layer before it
    """

    def decide(trace, visual, texts, layer, keep):
        if not 0 < layer < trace.layers:
            return {}
        attention = _prompt_weights(trace, layer - 1)
        return {layer - 1: choose(attention, visual, texts, share_or_count(keep, len(visual)))}

    return decide


def sparsevlm_decisions(trace, visual, raters, target, version, keep, layers):
    """Layers that the model has not decide nothing; a share is of the prompt's visual tokens."""
    kept = items(keep) if keep else visual_baselines.SPARSEVLM_KEPT[version][target]
    stages = [
        (layer, share_or_count(count, len(visual)))
        for layer, count in zip(items(layers), kept, strict=True)
        if layer < trace.layers
    ]
    return visual_baselines.sparsevlm(
        lambda layer, gone: _prompt_weights(trace, layer, gone),
        visual,
        raters,
        [count for _, count in stages],
        [layer for layer, _ in stages],
    )


def _sparsevlm(trace, visual, texts, **options):
    """Raters are text tokens after the first visual one, by layer 0's attention."""
    after = [t for t in texts if t > visual[0]]
    first = _prompt_weights(trace, 0)
    raters = visual_baselines.sparsevlm_raters_by_attention(first, visual, after)
    return sparsevlm_decisions(trace, visual, raters, **options)


def _mustdrop(trace, visual, texts, target, tau_global, tau_individual, layers):
    share, single = visual_baselines.MUSTDROP_THRESHOLDS[target]
    if tau_global is not None:
        share, single = float(tau_global), float(tau_individual)
    return visual_baselines.mustdrop(
        lambda layer, gone: _prompt_weights(trace, layer, gone),
        visual,
        texts,
        share,
        single,
        layers=[layer for layer in items(layers) if layer < trace.layers],
    )


VISUAL = {
    "fastv": _fastv(
        lambda attention, visual, _, keep: visual_baselines.fastv(attention, visual, keep)
    ),
    "fastv/text-mean": _fastv(visual_baselines.fastv_text_mean),
    "sparsevlm": _sparsevlm,
    "mustdrop": _mustdrop,
}
