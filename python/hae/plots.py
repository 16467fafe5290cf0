"""Pictures of a comparison, as plotly figures: the ones that `hae report` shows (docs/report.md).

    comparison = hae.compare("mine.h5", ["hae:bin=64", "greedy"], match="mean")
    hae.plots.against_memory(comparison)

Each function takes a Comparison, or a folder that `hae compare --out` wrote. `pip install
'hae[report]'` brings plotly. Colours are those of Okabe and Ito, which colour-blind readers can
tell apart; lines differ by dash too, and points by their symbol.
"""

from __future__ import annotations

import base64
import html
import io
import os
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import h5py
import numpy as np
import pandas as pd
import plotly.graph_objects as go
from PIL import Image

from hae import fates
from hae.comparison import Comparison
from hae.comparison import policy as canonical
from hae.result_folder import read_comparison

Source = Comparison | str | os.PathLike[str]

# What figures of a result are called.
TITLES = {
    "missed_mass": "missed mass",
    "missed_pull": "missed pull",
    "kl": "KL divergence",
    "output_error": "output error",
    "output_error_relative": "relative output error",
}

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_GREY = "#8C8C8C"
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "triangle-down")
_RESIDENT, _PENDING, _GONE, _VEIL = "#56B4E9", "#E69F00", "#D55E00", "#7F8790"

_KIND_COLOURS = {"picture": _COLOURS[3], "generated": _COLOURS[2]}

MOST_POINTS = 400  # along decode steps, where more are averaged; of single sequences
_MOST_FRAMES = 24  # of a picture
_MOST_CELLS = 65_536  # of its frames together
MOST_TOKENS = 2000  # of a timeline
_MOST_PIXELS = 768  # of a picture's longer side


class NothingToShow(Exception):
    """A figure that these data do not have; the sentence says why."""


def shown(text: object) -> str:
    """Text as it can be printed anywhere: what is invisible or changes the order of letters becomes
    visible, and no text at all too.
    """

    def letter(character: str) -> str:
        code = ord(character)
        if code < 0x20:
            return chr(0x2400 + code)
        if unicodedata.category(character) in ("Cc", "Cs", "Co", "Cn", "Zl", "Zp") or (
            unicodedata.bidirectional(character)
            in ("LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI")
            or code in (0x200E, 0x200F, 0x061C, 0xFEFF)
        ):
            return f"⟨{code:04X}⟩"
        return character

    return "".join(map(letter, str(text))) or "(empty)"


def template(*, dark: bool = False) -> go.layout.Template:
    """How all figures look, on a light page or on a dark one."""
    ink, line = ("#D5DBE3", "#3A424D") if dark else ("#2B323B", "#DDE2E8")
    axis = {
        "gridcolor": line,
        "linecolor": line,
        "zerolinecolor": line,
        "automargin": True,
        "title": {"standoff": 8},
    }
    return go.layout.Template(
        layout={
            "font": {"family": "system-ui, sans-serif", "size": 13, "color": ink},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "colorway": list(_COLOURS),
            "xaxis": axis,
            "yaxis": axis,
            "legend": {
                "orientation": "h",
                "x": 0,
                "xanchor": "left",
                "y": 1.02,
                "yanchor": "bottom",
            },
            "margin": {"l": 60, "r": 16, "t": 24, "b": 48},
            "hoverlabel": {"align": "left", "namelength": -1},
        }
    )


# ------------------------------------------------------------------------- all policies together


def over_steps(
    comparison: Source, figure: str = "missed_mass", *, sequence: int | None = None
) -> go.Figure:
    """A figure of the decode rows against the decode step, one line a policy: the mean over all
    layers and query heads of a sequence, then over the sequences that reach the step.

    sequence  one of them alone
    """
    comparison = _read(comparison)
    of_policy = [
        _series(comparison, policy, figure, sequence)
        for policy in range(len(_policies(comparison)))
    ]
    steps = max((len(series) for runs in of_policy for series in runs), default=0)
    if steps == 0 or not any(np.isfinite(series).any() for runs in of_policy for series in runs):
        raise NothingToShow(f"No decode row has a {TITLES[figure]}.")
    bins = np.array_split(np.arange(steps), min(steps, MOST_POINTS))
    plot = _figure(
        height=380,
        xaxis={"title": {"text": "decode step"}},
        yaxis={"title": {"text": TITLES[figure]}, "rangemode": "tozero"},
        hovermode="x unified",
    )
    for policy, runs in enumerate(of_policy):
        padded = np.full((len(runs), steps), np.nan)
        for row, series in zip(padded, runs, strict=True):
            row[: len(series)] = series
        counts = np.isfinite(padded).sum(axis=0)
        sums = np.nansum(padded, axis=0)
        values = [sums[b].sum() / counts[b].sum() if counts[b].sum() > 0 else np.nan for b in bins]
        plot.add_scatter(
            x=[float(b.mean()) + 1 for b in bins],
            y=_numbers(values),
            customdata=[int(counts[b].max()) for b in bins],
            mode="lines",
            line={"width": 2.2, "dash": _dash(policy), "color": _colour(policy)},
            hovertemplate="%{y:.4~g}  (%{customdata} sequences)",
            **_named(comparison, policy),
        )
    _mark_half(plot, of_policy[0])
    return plot


def against_memory(
    comparison: Source, figure: str = "missed_mass", *, sequence: int | None = None
) -> go.Figure:
    """The mean of a figure over decode rows against the mean memory of the cache: large points are
    means over sequences with their 95 % intervals, small ones single sequences. Of missed mass also
    `optimal`, the least that any eviction of these sizes reaches, which no policy beats.

    sequence  one of them alone
    """
    comparison = _read(comparison)
    unit, size, runs = _memory(comparison)
    summary = comparison.summary
    column = f"decode.{figure}.mean"
    if column not in runs or not runs[column].notna().any():
        raise NothingToShow(f"No decode row has a {TITLES[figure]}.")
    plot = _figure(
        height=440,
        xaxis={"title": {"text": f"mean cache size, {unit}"}},
        yaxis={"title": {"text": f"mean {TITLES[figure]}"}, "rangemode": "tozero"},
    )
    optima = []
    for policy, name in enumerate(_policies(comparison)):
        own = runs[runs.number % len(_policies(comparison)) == policy]
        if sequence is not None:
            own = own.iloc[[sequence]]
        else:
            own = own.iloc[:MOST_POINTS]
            plot.add_scatter(
                x=_numbers(own["size"]),
                y=_numbers(own[column]),
                text=[html.escape(shown(text), quote=False) for text in own.sequence],
                mode="markers",
                marker=_marker(policy, 5) | {"opacity": 0.35},
                hovertemplate="%{text}<br>%{x:.1f} " + unit + ", %{y:.4~g}",
                **_named(comparison, policy, legend=False),
            )
        if sequence is not None:
            x, mean, error = float(own["size"].iloc[0]), float(own[column].iloc[0]), None
            least = own["optimal_mean"].iloc[0] if "optimal_mean" in own else np.nan
        else:
            x = float(summary.loc[name, (_SIZES[unit], "mean")]) / size
            mean, low = (float(summary.loc[name, (column, part)]) for part in ("mean", "low"))
            error = mean - low
            least = summary.loc[name].get(("optimal_mean", "mean"), np.nan)
        optima.append((x, least))
        plot.add_scatter(
            x=_numbers([x]),
            y=_numbers([mean]),
            error_y={"array": _numbers([error]), "thickness": 1.6, "width": 5},
            mode="markers",
            marker=_marker(policy, 13) | {"line": {"width": 1.5, "color": "#FFFFFF"}},
            hovertemplate="%{x:.1f} " + unit + ", %{y:.4~g}",
            **_named(comparison, policy),
        )
    if figure == "missed_mass":
        _add_optimal(plot, optima, unit)
    return plot


def layers(
    comparison: Source, figure: str = "missed_mass", *, sequence: int | None = None
) -> go.Figure:
    """The mean of a figure over the decode rows of each layer, policies against layers, mean over
    sequences.

    sequence  one of them alone
    """
    comparison = _read(comparison)
    policies = _policies(comparison)
    rows = []
    for policy in range(len(policies)):
        runs = comparison.result["runs"][policy :: len(policies)]
        chosen = runs if sequence is None else runs[sequence : sequence + 1]
        rows.append(_mean_of_layers(chosen, figure))
    width = max((len(row) for row in rows), default=0)
    if width == 0:
        raise NothingToShow(f"No decode row has a {TITLES[figure]}.")
    rows = [row if len(row) else np.full(width, np.nan) for row in rows]
    numbers = list(range(len(policies)))
    plot = _figure(
        height=130 + 34 * len(policies),
        xaxis={"title": {"text": "layer"}, "dtick": max(1, width // 16), "showgrid": False},
        yaxis={
            "tickvals": numbers,
            "ticktext": [_short(name, 24) for name in policies],
            "autorange": "reversed",
            "showgrid": False,
        },
    )
    plot.add_heatmap(
        z=[_numbers(row) for row in rows],
        x=list(range(width)),
        y=numbers,
        customdata=[[_label(name)] * width for name in policies],
        colorscale=[[0, "#F1F5F9"], [0.5, "#8FC1E3"], [1, "#08407E"]],
        showscale=width > 12,
        zmin=0,
        xgap=2,
        ygap=2,
        colorbar={"title": {"text": TITLES[figure], "side": "right"}, "thickness": 14},
        texttemplate="%{z:.3f}" if width <= 12 else None,  # no colour bar needs room then
        hovertemplate="%{customdata}<br>layer %{x}: %{z:.4~g}<extra></extra>",
        hoverongaps=False,
    )
    return plot


# ---------------------------------------------------------------------------------- one sequence


def pictures_of(comparison: Source, sequence: int = 0) -> list[tuple[int, int]]:
    """(image id, frame) of each picture in a sequence's prompt; frame -1 where it has none."""
    found = _sequence(_read(comparison), sequence)
    image, frame = found.info.image, found.details.frame
    visual = np.flatnonzero(image[: found.info.prompt] >= 0)
    return sorted({(int(image[j]), -1 if frame is None else int(frame[j])) for j in visual})


def picture(
    comparison: Source,
    policy: str | int,
    sequence: int = 0,
    image: int = 0,
    *,
    frame: int = -1,
) -> go.Figure:
    """A picture of the prompt, each patch veiled by the share of lanes (layers, or their KV heads)
    that have evicted it; a slider goes through the decode steps.

    policy  its spec, or its number in the comparison
    raises  NothingToShow when the trace does not say where the patches are
    """
    comparison = _read(comparison)
    number, run = _run(comparison, policy, sequence)
    found = _sequence(comparison, sequence)
    tokens, patch = _patches(found, image, frame)
    rows, columns = (int(n) for n in patch.max(axis=0) + 1)
    drawn, note = _drawn(found, image, rows, columns)
    frames = max(1, min(_MOST_FRAMES, _MOST_CELLS // (rows * columns)))
    steps = np.unique(np.linspace(0, found.info.steps, frames + 1).round().astype(int))
    evicted = fates.evicted_at(run, found.info)[:, tokens]

    def veil(step: int) -> list[list[float | None]]:
        grid = np.full((rows, columns), np.nan)
        grid[patch[:, 0], patch[:, 1]] = (evicted <= step).mean(axis=0)
        return [_numbers(line) for line in grid.round(4)]

    bare = {"visible": False, "constrain": "domain"}
    plot = _figure(
        title={"text": _short(_policies(comparison)[number], 34), "x": 0.5, "font": {"size": 13}},
        height=int(44 + 320 * min(2.0, rows / columns)),
        margin={"l": 4, "r": 4, "t": 34, "b": 4},
        xaxis={"range": [-0.5, columns - 0.5], **bare},
        yaxis={"range": [rows - 0.5, -0.5], "scaleanchor": "x", **bare},
        sliders=[_slider(steps)],
        meta={"note": note, "ratio": min(2.0, rows / columns)},
    )
    if drawn is not None:
        place = {"x": -0.5, "y": -0.5, "sizex": columns, "sizey": rows, "sizing": "stretch"}
        plot.add_layout_image(source=drawn, xref="x", yref="y", layer="below", **place)
    plot.add_heatmap(
        z=veil(int(steps[-1])),
        zmin=0,
        zmax=1,
        colorscale=[[0, _clear(0.0 if drawn else 0.12)], [1, _clear(0.88)]],
        showscale=False,
        xgap=1,
        ygap=1,
        hovertemplate="row %{y}, column %{x}<br>evicted in %{z:.0%} of the lanes<extra></extra>",
        hoverongaps=False,
    )
    plot.frames = [
        go.Frame(name=str(step), data=[{"type": "heatmap", "z": veil(int(step))}]) for step in steps
    ]
    return plot


def timeline(
    comparison: Source,
    policy: str | int,
    sequence: int = 0,
    layer: int = 0,
    lane: int | None = None,
) -> go.Figure:
    """The life of each token in one lane: a bar while it is in the cache, in another colour while
    it is marked and waits in the bin, and a cross where it is evicted, the larger the more
    attention it would still have received.

    policy  its spec, or its number in the comparison
    lane    the KV head, where the lanes are KV heads; None: the first
    """
    comparison = _read(comparison)
    _, run = _run(comparison, policy, sequence)
    found = _sequence(comparison, sequence)
    if lane is None:
        lane = fates.lanes_of(run, found.info)[0][1]
    frame = fates.token_fates(run, found, layer, lane)
    kept = _most_telling(frame)
    left_out = len(frame) - len(kept)
    frame = frame.loc[kept]
    last = found.info.steps
    end = frame.evicted.fillna(last).astype(int) + 0.5
    start = frame.born - 0.5
    end = end.where(~frame.within, start)  # it never was in this layer
    marked = frame.marked.astype("Float64").fillna(np.inf).astype(float) + 0.5
    marked = np.minimum(marked, end)
    columns = ("token", "kind", "born", "marked", "evicted", "score", "still_received")
    rows = [[str(j), *map(_cell, line)] for j, *line in frame[list(columns)].itertuples()]
    plot = _figure(
        height=int(min(1500, max(420, 140 + 5 * len(frame)))),
        xaxis={"title": {"text": "decode step (0: prefill)"}, "range": [-1, last + 1]},
        yaxis={
            "title": {"text": "position of the token"},
            "range": [frame.index.max() + 1, frame.index.min() - 1],
            "showgrid": False,
        },
        margin={"r": 44},
        barmode="overlay",
        bargap=0.12,
        hovermode="closest",
        meta={"note": _timeline_note(frame, left_out), "columns": ["position", *columns]},
    )
    hover = (
        "%{customdata[0]}: <b>%{customdata[1]}</b> (%{customdata[2]})<br>"
        "born in step %{customdata[3]}, marked %{customdata[4]}, evicted %{customdata[5]}<br>"
        "score %{customdata[6]}, attention still to come %{customdata[7]}<extra></extra>"
    )
    rest = {"orientation": "h", "y": frame.index.tolist(), "hoverinfo": "skip"}
    # A bar of every token's whole life, clear: what the pointer finds.
    plot.add_bar(
        **rest | {"hoverinfo": None},
        base=start.tolist(),
        x=np.maximum(end - start, 1).tolist(),
        customdata=rows,
        marker={"color": "rgba(0,0,0,0)"},
        hovertemplate=hover,
        showlegend=False,
    )
    in_cache = {"marker": {"color": _RESIDENT}, "name": "in the cache"}
    plot.add_bar(**rest, base=start.tolist(), x=(marked - start).tolist(), **in_cache)
    waits = (end - marked).to_numpy()
    if (waits > 0).any():
        pending = {"color": _PENDING, "pattern": {"shape": "/", "size": 5, "solidity": 0.4}}
        plot.add_bar(
            **rest,
            base=marked.tolist(),
            x=waits.tolist(),
            marker=pending,
            name="marked, in the bin",
        )
    gone = frame[frame.evicted.notna()]
    received = gone.still_received.fillna(0).to_numpy()
    size = 3 + 11 * np.sqrt(received / max(received.max(initial=0), 1e-300))
    plot.add_scatter(
        x=end.loc[gone.index].tolist(),
        y=gone.index.tolist(),
        mode="markers",
        marker={"symbol": "x-thin", "size": size.round(1).tolist(), "line": _line(_GONE, 1.6)},
        hoverinfo="skip",
        name="evicted (size: attention still to come)",
    )
    _add_kinds(plot, frame.kind)
    return plot


# ------------------------------------------------------------------------- certificates and models


def decay_envelope(certificate: Mapping[str, Any], *, ages: int = 100) -> go.Figure:
    """A (1-λ)^age of each layer of a result of `hae certify --json`: a bound on the attention that
    an evicted token would still receive, as recorded.
    """
    decay = certificate["decay"]
    lines = [(f"layer {line['layer']}", line) for line in decay["layers"]]
    lines.append(("all layers", decay["all_layers"]))
    plot = _figure(
        height=360,
        xaxis={"title": {"text": "steps since the eviction"}},
        yaxis={"title": {"text": "attention, at most"}, "rangemode": "tozero"},
    )
    age = np.arange(1, ages + 1)
    for number, (name, line) in enumerate(lines):
        envelope = line["envelope"]
        if envelope is None:
            continue
        is_all = number == len(lines) - 1
        plot.add_scatter(
            x=age.tolist(),
            y=_numbers(envelope["initial"] * (1 - envelope["rate"]) ** age),
            mode="lines",
            name=name,
            line=_line(_GREY if is_all else _colour(number), 3 if is_all else 1.8)
            | {"dash": "solid" if is_all else _dash(number + 1)},
            hovertemplate="after %{x} steps at most %{y:.4~g}",
        )
    if not plot.data:
        raise NothingToShow("No evicted token would have received attention.")
    return plot


CLOSED_TITLES = {
    "closed.exact": "right answers",
    "closed.same": "same answer as the full cache",
    "closed.token_accuracy": "token accuracy",
    "closed.agreement": "agreement (answer fed)",
    "closed.kl": "KL divergence (answer fed)",
    "open.missed_pull": "missed pull (open loop)",
}


def closed_loop(result: Mapping[str, Any], figure: str = "closed.token_accuracy") -> go.Figure:
    """What each policy does to the running model's answers, from a result of `hae closed-loop
    --json`: the mean of a figure over groups, with its 95 % interval.

    figure  one of CLOSED_TITLES
    """
    summary = result["summary"]
    if not any(figure in line for line in summary):
        raise NothingToShow(f"The closed loop has no {CLOSED_TITLES[figure]}.")
    plot = _figure(
        title={"text": CLOSED_TITLES[figure], "x": 0.5, "font": {"size": 13}},
        height=90 + 30 * len(summary),
        margin={"l": 8, "r": 16, "t": 36, "b": 28},
        showlegend=False,
        xaxis={"rangemode": "tozero", "nticks": 6},
        yaxis={
            "tickvals": list(range(len(summary))),
            "ticktext": [_short(line["policy"], 24) for line in summary],
            "range": [len(summary) - 0.5, -0.5],
        },
    )
    for policy, line in enumerate(summary):
        value = line.get(figure)
        if value is None:
            continue
        low, high = value.get("interval95") or (value["mean"], value["mean"])
        plot.add_scatter(
            x=[value["mean"]],
            y=[policy],
            error_x={
                "array": [high - value["mean"]],
                "arrayminus": [value["mean"] - low],
                "thickness": 1.6,
            },
            mode="markers",
            marker=_marker(policy, 11),
            hovertemplate="%{meta[0]}<br>%{x:.4~g}<extra></extra>",
            meta=[_label(line["policy"])],
        )
    return plot


# --------------------------------------------------------------------------------------- the parts


def _read(comparison: Source) -> Comparison:
    return comparison if isinstance(comparison, Comparison) else read_comparison(comparison)


def _policies(comparison: Comparison) -> list[str]:
    return [line["policy"] for line in comparison.result["summary"]]


def _run(comparison: Comparison, policy: str | int, sequence: int) -> tuple[int, Any]:
    """A policy's number, and its run over a sequence. raises ConfigError, ValueError"""
    policies = _policies(comparison)
    number = policy
    if isinstance(policy, str):
        own = policy if policy in policies else canonical(policy).spec
        if own not in policies:
            raise ValueError(f"{policy}: not compared; policies are {', '.join(policies)}")
        number = policies.index(own)
    return number, comparison.raw[sequence * len(policies) + number]


def _sequence(comparison: Comparison, number: int) -> Any:
    sequence = comparison.sequences[number]
    if sequence is None:
        raise NothingToShow(f"The trace is not there: {'; '.join(map(shown, comparison.missing))}.")
    return sequence


def _figure(**layout: Any) -> go.Figure:
    return go.Figure(layout={"template": template(), **layout})


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _dash(number: int) -> str:
    """Another one for each policy of one colour."""
    return _DASHES[(number + number // len(_COLOURS)) % len(_DASHES)]


def _line(colour: str, width: float) -> dict[str, Any]:
    return {"color": colour, "width": width}


def _marker(policy: int, size: int) -> dict[str, Any]:
    return {"symbol": _SYMBOLS[policy % len(_SYMBOLS)], "size": size, "color": _colour(policy)}


def _clear(opacity: float) -> str:
    red, green, blue = (int(_VEIL[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def _label(text: str) -> str:
    """As plotly takes text: it reads a little HTML."""
    return html.escape(shown(text), quote=False)


def policy_style(policy: int) -> dict[str, str]:
    """Colour, dash and symbol of a policy, by its number, in all figures."""
    return {
        "colour": _colour(policy),
        "dash": _dash(policy),
        "symbol": _SYMBOLS[policy % len(_SYMBOLS)],
    }


def _short(text: str, most: int) -> str:
    text = shown(text)
    return html.escape(text if len(text) <= most else text[: most - 1] + "…", quote=False)


def _named(comparison: Comparison, policy: int, *, legend: bool = True) -> dict[str, Any]:
    return {
        "name": _short(_policies(comparison)[policy], 32),
        "legendgroup": str(policy),
        "showlegend": legend,
    }


def _numbers(values: Any) -> list[float | None]:
    """As JSON holds them: null for what is no number."""
    return [None if v is None or not np.isfinite(v) else float(v) for v in values]


def _cell(value: Any) -> str:
    """A value of a token as the reader sees it."""
    if isinstance(value, str):
        return _label(value)
    if pd.isna(value):
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _series(
    comparison: Comparison, policy: int, figure: str, sequence: int | None
) -> list[np.ndarray]:
    """[steps] of each run of a policy: the mean over layers and query heads, NaN without rows."""
    runs = comparison.raw[policy :: len(_policies(comparison))]
    series = []
    for run in runs if sequence is None else runs[sequence : sequence + 1]:
        rows = (run.decode or {}).get(figure)
        if rows is not None:
            counts = np.isfinite(rows).sum(axis=(0, 1))
            sums = np.nansum(rows, axis=(0, 1))
            series.append(np.where(counts > 0, sums / np.maximum(counts, 1), np.nan))
    return series


def _mark_half(plot: go.Figure, runs: Sequence[np.ndarray]) -> None:
    """A line after which fewer than half of the sequences are left."""
    lengths = sorted(map(len, runs))
    if len(lengths) < 2 or lengths[len(lengths) // 2] == lengths[-1]:
        return
    plot.add_vline(
        x=lengths[len(lengths) // 2],
        line={"dash": "dot", "width": 1, "color": _GREY},
        annotation={"text": "half have ended", "font": {"size": 11}, "yanchor": "top", "y": 0.06},
        annotation_position="top left",
    )


_SIZES = {"KiB": "bytes.mean", "tokens": "tokens.mean"}


def _memory(comparison: Comparison) -> tuple[str, float, pd.DataFrame]:
    """Its unit, how many bytes or tokens one is, and the runs with their `size` in it."""
    runs = comparison.runs.copy()
    unit = "KiB" if "bytes.mean" in runs and runs["bytes.mean"].notna().all() else "tokens"
    size = 1024.0 if unit == "KiB" else 1.0
    if _SIZES[unit] not in runs:
        raise NothingToShow("Without decode steps no cache has a mean size.")
    runs["size"] = runs[_SIZES[unit]] / size
    runs["number"] = np.arange(len(runs))
    return unit, size, runs


def _add_optimal(plot: go.Figure, optima: list[tuple[float, float]], unit: str) -> None:
    """The least of each size, sizes within 1 % together, since several policies share a budget."""
    least: list[tuple[float, float]] = []
    for x, value in sorted((x, value) for x, value in optima if np.isfinite(value)):
        if least and x <= 1.01 * least[-1][0]:
            least[-1] = (least[-1][0], min(value, least[-1][1]))
        else:
            least.append((x, float(value)))
    if least:
        plot.add_scatter(
            x=[x for x, _ in least],
            y=[value for _, value in least],
            mode="lines+markers",
            line={"dash": "dot", "width": 2, "color": _GREY},
            marker={"symbol": "line-ew-open", "size": 22, "line": {"width": 3}},
            name="optimal: no eviction misses less",
            hovertemplate="%{x:.1f} " + unit + ": at least %{y:.4~g}<extra>optimal</extra>",
        )


def _mean_of_layers(runs: Sequence[Mapping[str, Any]], figure: str) -> np.ndarray:
    rows = [(run["per_layer"]["decode"] or {}).get(figure) for run in runs]
    rows = [np.array(row, dtype=float) for row in rows if row is not None]
    if not rows:
        return np.empty(0)
    layers = max(map(len, rows))  # traces of models with fewer have none of the last
    rows = [np.pad(row, (0, layers - len(row)), constant_values=np.nan) for row in rows]
    counts = np.isfinite(rows).sum(axis=0)
    return np.where(counts > 0, np.nansum(rows, axis=0) / np.maximum(counts, 1), np.nan)


def _patches(sequence: Any, image: int, frame: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of a picture and [tokens, 2] their rows and columns.

    raises NothingToShow where the trace does not say them, or says one place twice
    """
    info, details = sequence.info, sequence.details
    chosen = info.image[: info.prompt] == image
    if details.frame is not None:
        chosen &= details.frame[: info.prompt] == frame
    if not chosen.any():
        raise NothingToShow(f"There is no picture {image} in the prompt.")
    if details.patch is None:
        raise NothingToShow(f"The trace does not say where the patches of picture {image} are.")
    patch = np.asarray(details.patch)[: info.prompt]
    tokens = np.flatnonzero(chosen & (patch >= 0).all(axis=1))
    if not len(tokens):
        raise NothingToShow(f"The trace does not say where the patches of picture {image} are.")
    if len(np.unique(patch[tokens], axis=0)) < len(tokens):
        raise NothingToShow(f"In picture {image} several tokens have the same patch.")
    if np.prod(patch[tokens].max(axis=0) + 1) > _MOST_CELLS:
        raise NothingToShow(f"The grid of picture {image} is too large to draw.")
    return tokens, patch[tokens]


def _drawn(sequence: Any, image: int, rows: int, columns: int) -> tuple[str | None, str]:
    """The picture as a data URI, or None, and a sentence where something must be said."""
    pixels = _pixels(sequence, image)
    if pixels is None:
        return None, "The trace has no picture: its patches are drawn without it."
    height, width = pixels.shape[:2]
    if abs(np.log(height / width * columns / rows)) > np.log1p(0.5 / min(rows, columns)):
        return None, (
            f"The picture has {width} × {height} pixels and its tokens {columns} × {rows} patches. "
            "Where they lie in it the trace does not say: they are drawn without it."
        )
    drawn = Image.fromarray(pixels)
    drawn.thumbnail((_MOST_PIXELS, _MOST_PIXELS))
    file = io.BytesIO()
    if max(drawn.size) < 384:  # small: enlarged, so that a browser does not blur it
        factor = -(-384 // max(drawn.size))
        drawn = drawn.resize(
            (drawn.width * factor, drawn.height * factor), Image.Resampling.NEAREST
        )
        drawn.save(file, "PNG", optimize=True)
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode(), ""
    drawn.convert("RGB").save(file, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode(), ""


def _pixels(sequence: Any, image: int) -> np.ndarray | None:
    """uint8, grey or RGB; None where the trace has none. The engine has checked the file."""
    if not sequence.path:
        return None
    with h5py.File(sequence.path, "r") as file:
        pictures = file[f"sequences/{sequence.index:06d}"].get("pictures", {})
        pixels = pictures[str(image)][()] if str(image) in pictures else None
    if pixels is None or pixels.dtype != np.uint8 or 0 in pixels.shape:
        return None
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        return pixels[:, :, 0]
    if pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4)):
        return pixels
    return None


def _most_telling(frame: pd.DataFrame) -> np.ndarray:
    """Tokens of a timeline: all, or evicted ones first, those that would still have received most,
    then the oldest.
    """
    if len(frame) <= MOST_TOKENS:
        return frame.index.to_numpy()
    stayed = frame.evicted.isna().to_numpy()
    order = np.lexsort((-frame.still_received.fillna(-1).to_numpy(), stayed))
    return np.sort(frame.index.to_numpy()[order[:MOST_TOKENS]])


def _timeline_note(frame: pd.DataFrame, left_out: int) -> str:
    """What a timeline does not show, and why."""
    said = []
    if left_out:
        said.append(f"{left_out} tokens are left out: shown are evicted ones first.")
    if frame.evicted.notna().any() and frame.still_received.isna().all():
        said.append(
            "What evicted tokens would still have received is not known: the layer's attention is "
            "too large to form here, or has a NaN."
        )
    return " ".join(said)


def _add_kinds(plot: go.Figure, kinds: pd.Series) -> None:
    """What each stretch of tokens is, in the margin."""
    starts = np.flatnonzero(kinds.to_numpy()[1:] != kinds.to_numpy()[:-1]) + 1
    for stretch in np.split(np.arange(len(kinds)), starts):
        kind = kinds.iloc[stretch[0]]
        top, bottom = kinds.index[stretch[0]] - 0.5, kinds.index[stretch[-1]] + 0.5
        plot.add_shape(
            xref="paper",
            x0=1.006,
            x1=1.014,
            y0=top,
            y1=bottom,
            line={"width": 0},
            fillcolor=_KIND_COLOURS.get(kind, _GREY),
        )
        if len(stretch) * 16 >= len(kinds):
            plot.add_annotation(
                xref="paper",
                x=1.016,
                xanchor="left",
                y=(top + bottom) / 2,
                text=kind,
                textangle=90,
                showarrow=False,
                font={"size": 11},
            )


def _slider(steps: np.ndarray) -> dict[str, Any]:
    now = {"mode": "immediate", "frame": {"duration": 0}, "transition": {"duration": 0}}
    return {
        "active": len(steps) - 1,
        "currentvalue": {"prefix": "after step "},
        "steps": [
            {"label": str(step), "method": "animate", "args": [[str(step)], now]} for step in steps
        ],
    }
