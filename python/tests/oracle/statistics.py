"""What `hae stats` reports, in plain numpy: slow, readable, sharing no code with the program."""

from types import SimpleNamespace

import numpy as np

from .arithmetic import divide_or_zero
from .dap import decide_dap, head_reduced_rows

KINDS = ("visual", "prompt_text", "generated")


def describe(trace, prompt_rows, threshold, r_list, alpha):
    """The `layers` and `all_layers` of one sequence, as in `hae.stats/1`.

    prompt_rows  the stored ones, ascending; the sets of DAP need all rows of prompt text
    """
    layers = [_Layer(trace, layer, prompt_rows, threshold) for layer in range(trace.layers)]
    text = np.flatnonzero(~trace.visual[: trace.prompt])
    sets = None
    if np.isin(text, prompt_rows).all():
        sets = [
            [set(decide_dap(trace, layer, _dap_options(r, alpha))) for r in r_list]
            for layer in range(trace.layers)
        ]
    described = [
        {**layer.figures(), "broadcast": _broadcast(sets, number)}
        for number, layer in enumerate(layers)
    ]
    return described, {**_over_layers(layers), "broadcast": _mean_broadcast(described)}


def _dap_options(r, alpha):
    return SimpleNamespace(
        dap="threshold", r=r, alpha=alpha, heads="mean", scope="sequence", max_evicted=None, sinks=0
    )


def age_bins(tokens):
    """[first, last] age of each bin, up to the one of age tokens - 1: 0, 1, 2, 3-4, 5-8, ..."""
    bins = [[0, 0]]
    width = 1
    while bins[-1][1] < tokens - 1:
        first = bins[-1][1] + 1
        bins.append([first, first + width - 1])
        width = width * 2 if first > 1 else 1
    return bins


class _Layer:
    """Counts and sums of one layer."""

    def __init__(self, trace, layer, prompt_rows, threshold):
        self.trace, self.layer = trace, layer
        self.shares = divide_or_zero(trace.weights[layer], trace.totals[layer][:, :, None])
        self.has_mass = trace.totals[layer] != 0
        rows = {"prefill": list(prompt_rows), "decode": list(range(trace.prompt, trace.tokens))}
        self.sparse = {name: self._sparse(part, threshold) for name, part in rows.items()}
        self.columns = self._columns(prompt_rows)
        self.age = self._ages()
        used = rows["prefill"] + rows["decode"]
        self.masked = int((~self.has_mass[:, used]).sum())

    def _sparse(self, rows, threshold):
        """{keys: [sparse, all]} of some rows."""
        trace = self.trace
        population = self.has_mass[:, rows, None] & trace.allowed[self.layer][None, rows]
        small = self.shares[:, rows].astype(np.float64) <= threshold
        return {
            name: [int((population & small)[:, :, keys].sum()), int(population[:, :, keys].sum())]
            for name, keys in (("visual", trace.visual), ("text", ~trace.visual))
        }

    def _columns(self, prompt_rows):
        """(tokens, mean, variance) of A_j by kind of token, or None."""
        trace = self.trace
        text_rows = [row for row in prompt_rows if not trace.visual[row]]
        if not text_rows:
            return {"visual": None, "text": None}
        received = np.zeros(trace.tokens)
        for row in head_reduced_rows(self.shares[:, text_rows], "mean"):
            received = received + row
        seen = trace.allowed[self.layer][text_rows].any(axis=0)
        prompt = np.arange(trace.tokens) < trace.prompt
        found = {}
        for name, kind in (("visual", trace.visual), ("text", ~trace.visual)):
            sums = [float(value) for value in received[kind & seen & prompt]]
            mean = ordered_sum(sums) / len(sums) if sums else None
            squares = [(value - mean) * (value - mean) for value in sums]
            found[name] = (len(sums), mean, ordered_sum(squares) / len(sums)) if sums else None
        return found

    def _ages(self):
        """{kind: [[sum, count] of each bin]} over decode rows, then heads, then keys."""
        trace = self.trace
        bins = age_bins(trace.tokens)
        bin_of = [number for number, (a, b) in enumerate(bins) for _ in range(a, b + 1)]
        found = {kind: [[0.0, 0] for _ in bins] for kind in KINDS}
        for query in range(trace.prompt, trace.tokens):
            keys = np.flatnonzero(trace.allowed[self.layer][query])
            for head in np.flatnonzero(self.has_mass[:, query]):
                for key in keys:
                    kind = "generated" if key >= trace.prompt else KINDS[int(not trace.visual[key])]
                    aged = found[kind][bin_of[query - key]]
                    aged[0] += float(self.shares[head, query, key])
                    aged[1] += 1
        return found

    def figures(self):
        return _figures(self.sparse, self.columns, self.age, self.masked)


def _figures(sparse, columns, age, masked):
    def columns_of(found):
        tokens, mean, variance = found or (0, None, None)
        return {"tokens": tokens, "mean": mean, "variance": variance}

    ratio = None
    if columns["visual"] and columns["text"] and columns["text"][2] != 0:
        ratio = columns["visual"][2] / columns["text"][2]
    return {
        "sparsity": {
            rows: {
                "all": _share([parts["visual"][i] + parts["text"][i] for i in (0, 1)]),
                "visual": _share(parts["visual"]),
                "text": _share(parts["text"]),
            }
            for rows, parts in sparse.items()
        },
        "column_sums": {
            "visual": columns_of(columns["visual"]),
            "text": columns_of(columns["text"]),
            "variance_ratio": ratio,
        },
        "age": {kind: [_share(aged) for aged in bins] for kind, bins in age.items()},
        "masked_rows": masked,
    }


def _share(part_and_all):
    return part_and_all[0] / part_and_all[1] if part_and_all[1] else None


def _over_layers(layers):
    """Counts and sums of attention added up; column sums averaged over layers that have them."""

    def added(parts):
        return [ordered_sum([part[0] for part in parts]), sum(part[1] for part in parts)]

    sparse = {
        rows: {
            keys: added([layer.sparse[rows][keys] for layer in layers])
            for keys in ("visual", "text")
        }
        for rows in ("prefill", "decode")
    }
    columns = {}
    for keys in ("visual", "text"):
        found = [layer.columns[keys] for layer in layers if layer.columns[keys]]
        columns[keys] = found and (
            max(tokens for tokens, _, _ in found),
            ordered_sum([mean for _, mean, _ in found]) / len(found),
            ordered_sum([variance for _, _, variance in found]) / len(found),
        )
    age = {
        kind: [added(bins) for bins in zip(*(layer.age[kind] for layer in layers), strict=True)]
        for kind in KINDS
    }
    return _figures(sparse, columns, age, sum(layer.masked for layer in layers))


def _broadcast(sets, layer):
    if sets is None:
        return None
    pairs = list(zip(sets[0], sets[layer], strict=True))
    return {
        "evicted": [len(own) for _, own in pairs],
        "shared": [len(first & own) / len(first) if first else None for first, own in pairs],
    }


def _mean_broadcast(described):
    if described[0]["broadcast"] is None:
        return None
    evicted = zip(*(layer["broadcast"]["evicted"] for layer in described), strict=True)
    above = [layer["broadcast"]["shared"] for layer in described[1:]]
    of_r = range(len(described[0]["broadcast"]["shared"]))
    return {
        "evicted": [sum(sizes) / len(described) for sizes in evicted],
        "shared": [
            ordered_sum([shares[r] for shares in above]) / len(above)
            if above and above[0][r] is not None
            else None
            for r in of_r
        ],
    }


def ordered_sum(values):
    """From the first to the last: Python's own sum compensates from 3.12 on."""
    total = 0.0
    for value in values:
        total = total + value
    return total
