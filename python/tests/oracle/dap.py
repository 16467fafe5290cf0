"""Dual-attention pruning, the prefill half of HAE: Eq. (1) to (3), arXiv 2602.02197, and its
variant by mass.
"""

import numpy as np

from .arithmetic import divide_or_zero


def head_reduced_rows(shares, how):
    """Reduce [head, row, key] float32 over the heads, ascending, in double: their mean, maximum or
    sum.
    """
    reduced = shares[0].astype(np.float64)
    for share in shares[1:]:
        share = share.astype(np.float64)
        reduced = np.maximum(reduced, share) if how == "max" else reduced + share
    return reduced / len(shares) if how == "mean" else reduced


def decide_dap(trace, layer, options):
    """The visual prompt tokens that one layer's prompt attention condemns, as {token: A_j},
    ascending.

    a_ij  mean (or maximum) over all query heads of the layer, for prompt text rows i
    A_j   sum of a_ij over the rows, ascending, in double
    """
    text_rows = np.flatnonzero(~trace.visual[: trace.prompt])
    if options.dap == "none" or not len(text_rows):
        return {}
    weights = trace.weights[layer][:, text_rows]
    shares = divide_or_zero(weights, trace.totals[layer][:, text_rows, None])
    rows = head_reduced_rows(shares, options.heads)
    received = np.zeros(trace.tokens)
    for row in rows:
        received = received + row
    largest = rows.max(axis=0)
    seen = trace.allowed[layer][text_rows].any(axis=0)
    candidates = [j for j in range(trace.prompt) if trace.visual[j] and seen[j]]

    condemned = []
    for part in _scopes(trace, candidates, options.scope):
        total = 0.0
        for j in part:
            total = total + float(received[j])
        if options.dap == "threshold":
            condemned += _below_thresholds(part, received, largest, total, options)
        else:
            condemned += _lightest(part, received, largest, total, options)
    if options.max_evicted is not None:
        condemned = sorted(condemned, key=lambda j: (received[j], j))[: options.max_evicted]
    return {j: float(received[j]) for j in sorted(condemned)}


def _scopes(trace, candidates, scope):
    if scope == "sequence":
        return [candidates]
    images = sorted({int(trace.image[j]) for j in candidates})
    return [[j for j in candidates if trace.image[j] == image] for image in images]


def _below_thresholds(part, received, largest, total, options):
    """Eq. (3): A_j < r * A_V and max_i a_ij < alpha, both strict. Sinks count in A_V but stay."""
    global_threshold = options.r * total
    return [
        j
        for j in part
        if j >= options.sinks and received[j] < global_threshold and largest[j] < options.alpha
    ]


def _lightest(part, received, largest, total, options):
    """Not in the paper: ascending (A_j, position) while the running sum stays <= eps * A_V."""
    if total == 0:
        return []
    condemned, running = [], 0.0
    for j in sorted(part, key=lambda j: (received[j], j)):
        if j < options.sinks or (options.alpha is not None and largest[j] >= options.alpha):
            continue
        running = running + float(received[j])
        if options.eps < 1 and running > options.eps * total:
            break
        condemned.append(j)
    return condemned
