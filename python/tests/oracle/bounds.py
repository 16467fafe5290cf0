"""What no eviction could lose less than: bounds from a trace and the sizes of a run's lanes.

`sizes` are the residents at attention time, (layer, lane) -> [step - 1], lane -1 when the layer is
the lane: what `sizes_at_attention` says of a run.
"""

import numpy as np
from scipy.optimize import linear_sum_assignment

from .arithmetic import row_sum
from .metrics import measure
from .policies import Options
from .replay import Eviction, Run


def optimal_total(trace, sizes):
    """The least total missed mass over decode rows that evictions with these sizes can have.

    Tokens never return; what goes in step 0 is chosen freely, nothing is protected, and a token
    may go in the step it came. None without decode steps.
    """
    log = [entry for lane in sizes for entry in _optimal_log(trace, lane, sizes[lane])]
    by_head = any(lane >= 0 for _, lane in sizes)
    options = Options("optimal", decode="none", lane="kv_head" if by_head else "layer")
    return measure(trace, Run(options, sorted(log)))["missed_mass_total"]


def _optimal_log(trace, lane, sizes):
    """An assignment of tokens to eviction slots, each costing the attention still to come.

    Every slot is filled; more tokens than slots means that the others stay.
    """
    slots = _eviction_steps(trace, sizes)
    if not slots:
        return []
    costs = _attention_to_come(trace, *lane)[:, slots]
    came = np.maximum(np.arange(trace.tokens) - trace.prompt + 1, 0)
    costs[came[:, None] > np.array(slots)[None, :]] = np.inf  # it is not there yet
    tokens, filled = linear_sum_assignment(costs)
    return [
        Eviction(slots[slot], *lane, int(token), False, None, None)
        for token, slot in zip(tokens, filled, strict=True)
    ]


def _eviction_steps(trace, sizes):
    """The step of each eviction that comes before the last row. sizes[s - 1] are resident in step
    s, the new token included; what goes in step s is missing from s + 1 on.
    """
    gone = [trace.prompt + step - size for step, size in enumerate(sizes, start=1)]
    leaving = np.diff([0, *gone])
    return [step for step, count in enumerate(leaving) for _ in range(count)]


def _attention_to_come(trace, layer, lane):
    """[token, step]: shares of the lane's heads that the rows after `step` give to the token."""
    group = trace.query_heads // trace.kv_heads
    heads = slice(None) if lane < 0 else slice(lane * group, (lane + 1) * group)
    weights = trace.weights[layer][heads, trace.prompt :].astype(np.float64)
    totals = trace.totals[layer][heads, trace.prompt :, None].astype(np.float64)
    shares = np.divide(weights, totals, out=np.zeros_like(weights), where=totals != 0).sum(axis=0)
    to_come = np.cumsum(shares[::-1], axis=0)[::-1]  # [step, token]: from the row of step + 1 on
    return to_come.T.copy()


def top_now(weights, keys):
    """The share of a row outside its `keys` largest weights, or None for a row without any weight.
    Of equal weights the older ones are outside.

    weights  [key] float32
    """
    total = row_sum(weights)
    if total == 0:
        return None
    outside = np.zeros_like(weights)
    lowest = np.argsort(weights, kind="stable")[: max(0, len(weights) - keys)]
    outside[lowest] = weights[lowest]
    return min(1.0, float(row_sum(outside)) / float(total))


def mean_top_now(trace, sizes):
    """Over the decode rows, each with as many keys as its lane has residents; at most those that
    its mask allows. None without rows.
    """
    shares = []
    for layer in range(trace.layers):
        for head in range(trace.query_heads):
            kv_head = head * trace.kv_heads // trace.query_heads
            lane = (layer, -1) if (layer, -1) in sizes else (layer, kv_head)
            for query, size in enumerate(sizes[lane], start=trace.prompt):
                keys = min(size, int(trace.allowed[layer][query].sum()))
                shares.append(top_now(trace.weights[layer][head, query], keys))
    shares = [share for share in shares if share is not None]
    return sum(shares) / len(shares) if shares else None
