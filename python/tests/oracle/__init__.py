"""The replay a second time, in plain numpy: slow, readable, and sharing no code with the program.

`test_replay_agrees.py` compares the two, bit for bit.

    arithmetic  the float32 arithmetic, emulated exactly       docs/arithmetic.md
    trace       the `.npz` schema and the attention of a trace traces/FORMAT.md
    policies    policy specs and their options                 reference/README.md
    dap         HAE's prefill eviction, Eq. (1) to (3)         arXiv 2602.02197
    replay      the engine, DDES (Eq. (4) and (5)) and greedy  arXiv 2602.02197
    baselines   the published policies, as functions over arrays
    visual_baselines  those that tell visual tokens from text
    baseline_replay   both over a whole sequence, by policy spec
    metrics     everything that follows from (trace, log)
    bounds      what no log of the same sizes could lose less than
    statistics  what `hae stats` says of the attention itself; test_statistics.py compares
"""

from .arithmetic import exp32, fma32, row_sum
from .bounds import mean_top_now, optimal_total, top_now
from .metrics import measure, sizes_at_attention
from .policies import PolicyError, parse_policy
from .replay import Eviction, Impossible, priority, replay
from .trace import Trace

__all__ = [
    "Eviction",
    "Impossible",
    "PolicyError",
    "Trace",
    "exp32",
    "fma32",
    "mean_top_now",
    "measure",
    "optimal_total",
    "parse_policy",
    "priority",
    "replay",
    "row_sum",
    "sizes_at_attention",
    "top_now",
]
