"""What docs/results.md compares: every policy of `hae policies`, at three budgets."""

from __future__ import annotations

BUDGETS = (130, 95, 65)  # as in docs/closed-loop.md; of 159 prompt tokens, 144 of them visual

# `hae compare --match mean` sets their budgets, sequence by sequence. Windows and blocks are
# smaller than their defaults, which were made for prompts of thousands of tokens.
MATCHED = (
    "greedy:score=mean",
    "hae:dap=none",
    "hae:dap=none,score=mean",
    "h2o/layerwise",
    "h2o/flexgen",
    "h2o/prefill-window",
    "h2o/observed-mean",
    "h2o/history",
    "h2o/ov-block:block=4,sinks=4,recent=32",
    "scissorhands",
    "tova",
    "streaming",
    "snapkv:window=8",
    "snapkv/kvpress:window=8",
    "pyramidkv",
    "adakv:window=8",
    "nacl",
    "knorm",
    "keydiff",
    "lookm:recent=8",
    "window",
    "random:seed=1",
    "random:seed=2",
    "random:seed=3",
)
# Not in the running model, whose cache does not merge tokens.
RECORDED_ONLY = ("lookm:recent=8,merge=mean",)

# One setting a budget. HAE's r is one that leaves DDES more than its budget to begin with, or its
# memory could not be matched. The others have no budget at all: a keep or thresholds stand in for
# it, chosen on the recordings for their mean tokens alone. A model of four layers is pruned as
# early as each policy can.
SET_BY_BUDGET = (
    tuple(f"hae:r={r},alpha=0.008" for r in (0.0058, 0.0062, 0.007)),
    tuple(f"hae:r={r},alpha=0.008,score=mean" for r in (0.0058, 0.0062, 0.007)),
    tuple(f"fastv:layer=1,keep={keep}" for keep in (84, 37, 1)),
    tuple(f"fastv/text-mean:layer=1,keep={keep}" for keep in (84, 37, 1)),
    tuple(
        f"mustdrop:tau_global={share},tau_individual={most},layers=0/1/2"
        for share, most in ((0.0052, 0.008), (0.007, 0.008), (0.0073, 0.012))
    ),
)
# The first needs the similarity of embeddings, which a running model does not hand on; the other
# merges.
RECORDED_ONLY_BY_BUDGET = (
    tuple(f"sparsevlm:raters=embedding,keep={keep},layers=0" for keep in (84, 37, 1)),
    tuple(f"tome/decoder:keep={keep}" for keep in (99, 64, 34)),
)


def first(budget: int) -> str:
    """What the others are measured against: it holds budget + 1 tokens at every step."""
    return f"greedy:budget={budget}"


def _at(budget: int, settings: tuple[tuple[str, ...], ...]) -> list[str]:
    return [of_policy[BUDGETS.index(budget)] for of_policy in settings]


def closed_loop_specs(budget: int) -> list[str]:
    """Of the running model."""
    return [first(budget), *MATCHED, *_at(budget, SET_BY_BUDGET)]


def specs(budget: int) -> list[str]:
    """Of the recordings."""
    recorded_only = [*RECORDED_ONLY, *_at(budget, RECORDED_ONLY_BY_BUDGET)]
    return [*closed_loop_specs(budget), *recorded_only, "full"]
