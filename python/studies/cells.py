"""What the closed-loop study runs: policies with settings, grouped by the study's questions."""

from __future__ import annotations

BUDGETS = (130, 95, 65)  # of 159 prompt tokens, 144 of them visual

# Family -> its spec without a budget. Equal budgets: what the comparison between policies is about.
FAMILIES = {
    "greedy, sum": "greedy",
    "greedy, mean": "greedy:score=mean",
    "DDES, sum": "hae:dap=none,bin=16",
    "DDES, mean": "hae:dap=none,bin=16,score=mean",
    "greedy, mean, KV heads": "greedy:lane=kv_head,score=mean",
    "H2O": "h2o/layerwise",
    "window": "window:sinks=4",
    "random": "random:seed=1",
}


def with_budget(spec: str, budget: int) -> str:
    return f"{spec}{',' if ':' in spec else ':'}budget={budget}"


FAMILY_CELLS = [with_budget(spec, budget) for budget in BUDGETS for spec in FAMILIES.values()]

# DDES with l = 95 or 65 and D = 16 holds l + 8.5 tokens on average at attention time and l + 16 at
# most; greedy with budget l' holds l' + 1.
EQUAL_MEMORY = {
    (score, budget): {
        "DDES": f"hae:dap=none,bin=16{mean},budget={budget}",
        "equal budget": f"greedy{colon}budget={budget}",
        "equal mean": f"greedy{colon}budget={budget + 8}",
        "equal peak": f"greedy{colon}budget={budget + 15}",
    }
    for score, mean, colon in (("sum", "", ":"), ("mean", ",score=mean", ":score=mean,"))
    for budget in (95, 65)
}

DAP_ALONE = [f"hae:r={r},alpha=1,ddes=none" for r in (0.0062, 0.0066, 0.007, 0.0074)]
DAP_ALPHA = [f"hae:r=0.007,alpha={alpha},ddes=none" for alpha in (0.02, 0.008)]
DAP_PER_LAYER = [f"hae:r={r},alpha=1,broadcast=none,ddes=none" for r in (0.0066, 0.007)]
DAP_AFTER = [f"hae:r={r},alpha=1,effect=after,ddes=none" for r in (0.0066, 0.007)]
DAP_MASS = [f"hae:dap=mass,eps={eps},ddes=none" for eps in (0.1, 0.2)]
BOTH = [
    f"hae:r={r},alpha=1,bin={bin},budget=65,score=mean" for r in (0.0062, 0.0066) for bin in (4, 16)
] + ["hae:r=0.0066,alpha=1,bin=16,budget=65"]
BINS = [f"hae:dap=none,bin={bin},budget=65,score=mean" for bin in (4, 32)] + [
    "hae:dap=none,ddes=batch,bin=16,budget=65,score=mean"
]


def _distinct(specs: list[str]) -> list[str]:
    return list(dict.fromkeys(specs))


BOARD_CELLS = _distinct(
    FAMILY_CELLS
    + [spec for cells in EQUAL_MEMORY.values() for spec in cells.values()]
    + DAP_ALONE
    + DAP_ALPHA
    + DAP_PER_LAYER
    + DAP_AFTER
    + DAP_MASS
    + BOTH
    + BINS
)

TEXT_BUDGETS = (160, 112, 64)  # of 192 prompt tokens
TEXT_CELLS = [
    with_budget(FAMILIES[name], budget)
    for budget in TEXT_BUDGETS
    for name in ("greedy, sum", "greedy, mean", "DDES, mean", "H2O", "window", "random")
]

# With these the figure was chosen, on boards of the validation split, at other budgets.
CHOOSING_BUDGETS = (140, 110, 80, 55)
CHOOSING_CELLS = [
    with_budget(spec, budget)
    for budget in CHOOSING_BUDGETS
    for spec in (
        *FAMILIES.values(),
        "window:sinks=16",
        "greedy:score=mean,recent=16",
        "h2o/layerwise:lane=layer",
        "greedy:score=mean,scores=full",
    )
] + [
    f"hae:r={r},alpha=1,{rest}"
    for r in (0.0062, 0.0066, 0.007, 0.0075, 0.009)
    for rest in ("ddes=none", "score=mean,bin=16,budget=80", "ddes=none,broadcast=none")
]
