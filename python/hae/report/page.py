"""The page of hae-report: what stands on it, and how it becomes one file."""

from __future__ import annotations

import base64
import gzip
import json
import math
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from hae import fates, plots, result_shapes
from hae._engine import ConfigError
from hae.comparison import Comparison
from hae.result_folder import read_comparison, read_json

# What keeps a page small however much was compared; the page says what it leaves out.
MOST_RUNS = 600  # lines of the table of runs
MOST_SEQUENCES = 4  # in detail, unless they are named
MOST_TOKENS = 120_000  # lines of all timelines together
MOST_PICTURES = 12  # of a sequence
MOST_FILES = 100  # of the manifest

FIGURES = ("missed_mass", "missed_pull", "output_error_relative")


def of_folder(
    folder: Path,
    *,
    traces: Iterable[Path] = (),
    sequences: Sequence[str] = (),
    certificate: Path | None = None,
    closed_loop: Path | None = None,
) -> str:
    """The page of a folder of `hae compare --out`.

    sequences  names or numbers of those whose pictures and tokens are shown; none: the first ones
    raises     ResultError for what cannot be read, ConfigError for what was named and is not there
    """
    comparison = read_comparison(folder, traces=traces)
    certified = closed = None
    if certificate is not None:
        certified = read_json(certificate, "hae.certify/1", result_shapes.CERTIFICATE)
    if closed_loop is not None:
        closed = read_json(closed_loop, "hae.closed-loop/1", result_shapes.CLOSED_LOOP)
    chosen = _chosen(comparison, sequences)
    context = {
        "summary": summary_rows(comparison),
        "worst": _worst(comparison),
        "runs": run_rows(comparison),
        "missing": comparison.missing,
        "warnings": _warnings(comparison),
        "overview": _overview(comparison),
        "details": _details(comparison, chosen),
        "manifest": _manifest(comparison),
        "certificate": None if certified is None else _certificate(certified, comparison),
        "closed": None if closed is None else _closed(closed),
        "headline": _headline(comparison),
        "MOST_RUNS": MOST_RUNS,
        "MOST_POINTS": plots.MOST_POINTS,
    }
    return _rendered(context)


# ------------------------------------------------------------------------------------ the tables


def summary_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """One line a policy: means over groups and half the widths of their 95 % intervals."""
    rows = []
    for number, line in enumerate(comparison.result["summary"]):
        runs = comparison.result["runs"][number :: len(comparison.result["summary"])]

        def mean(name: str, scale: float = 1.0, *, line: dict[str, Any] = line) -> Any:
            figure = line.get(name) or {}
            value = figure.get("mean")
            interval = figure.get("interval95")
            half = None if value is None or not interval else (interval[1] - value) / scale
            return {"mean": None if value is None else value / scale, "half": half}

        rows.append(
            {
                "number": number,
                "policy": line["policy"],
                "colour": plots.policy_style(number),
                "unequal": sum(bool(run["unequal"]) for run in runs),
                "warnings": sum(bool(run["warnings"]) for run in runs),
                "runs": len(runs),
                "tokens": mean("tokens.mean"),
                "peak": mean("tokens.peak"),
                "kib": mean("bytes.mean", 1024),
                "missed_mass": mean("decode.missed_mass.mean"),
                "optimal": mean("optimal_mean"),
                "p95": mean("decode.missed_mass.p95"),
                "missed_pull": mean("decode.missed_pull.mean"),
                "output_error": mean("decode.output_error_relative.mean"),
                "evictions": mean("evictions"),
                "evicts": any(run["evictions"] for run in runs),
            }
        )
    for row in rows:
        own, first = ((of["kib"]["mean"] or of["tokens"]["mean"]) for of in (row, rows[0]))
        row["ratio"] = own / first if own and first else None
    return rows


def _worst(comparison: Comparison) -> dict[str, float | None]:
    """What the bars in the table are drawn against."""
    rows = summary_rows(comparison)

    def largest(figure: str) -> float | None:
        return max((row[figure]["mean"] for row in rows if row[figure]["mean"]), default=None)

    return {name: largest(name) for name in ("missed_mass", "missed_pull", "output_error")}


def run_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """One line a (sequence, policy), at most MOST_RUNS."""
    rows = []
    policies = len(comparison.result["summary"])
    for number, run in enumerate(comparison.result["runs"][:MOST_RUNS]):
        decode = run["decode"] or {}

        def mean(figure: str, *, decode: dict[str, Any] = decode) -> float | None:
            return (decode.get(figure) or {}).get("mean")

        size = run["bytes"]["mean"]
        rows.append(
            {
                "sequence": run["sequence"]["name"],
                "policy": run["policy"],
                "number": number % policies,
                "unequal": bool(run["unequal"]),
                "warnings": run["warnings"],
                "tokens": (run["tokens"] or {}).get("mean"),
                "kib": None if size is None else size / 1024,
                "missed_mass": mean("missed_mass"),
                "optimal": run["optimal_mean"],
                "missed_pull": mean("missed_pull"),
                "output_error": mean("output_error_relative"),
                "evictions": run["evictions"],
            }
        )
    return rows


def _warnings(comparison: Comparison) -> list[tuple[str, int]]:
    """What policies and the engine said, and in how many runs."""
    counts = Counter(
        (run["policy"], text) for run in comparison.result["runs"] for text in run["warnings"]
    )
    return [(f"{policy}: {text}", count) for (policy, text), count in counts.items()]


def _headline(comparison: Comparison) -> dict[str, Any]:
    """What a reader sees first: the policies that lose least, of those that may be compared."""
    rows = [row for row in summary_rows(comparison) if row["evicts"] and not row["unequal"]]

    def least(figure: str) -> dict[str, Any] | None:
        known = [row for row in rows if row[figure]["mean"] is not None]
        return min(known, key=lambda row: row[figure]["mean"], default=None)

    return {
        "sequences": len(comparison.sequences),
        "policies": len(comparison.result["summary"]),
        "match": (comparison.result["manifest"] or {}).get("match"),
        "missed_mass": least("missed_mass"),
        "missed_pull": least("missed_pull"),
        "unequal": sum(row["unequal"] > 0 for row in summary_rows(comparison)),
    }


# ----------------------------------------------------------------------------------- the figures


class _Figures(list):
    """Figures that share a place, of which the reader chooses one: (name, figure)."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self.label = label
        self.missing: list[str] = []

    def take(self, name: str, make: Any) -> None:
        try:
            self.append((name, make()))
        except plots.NothingToShow as error:
            self.missing.append(str(error))


def _overview(comparison: Comparison) -> dict[str, _Figures]:
    """The figures of all sequences together."""
    overview = {
        "steps": _Figures("a figure against the decode step, one line a policy"),
        "errors": _Figures("output error against the decode step, one line a policy"),
        "memory": _Figures("a figure against memory, one point a policy"),
        "layers": _Figures("heat map of a figure, policies against layers"),
    }
    for figure in FIGURES:
        title = plots.TITLES[figure]
        to_steps = overview["errors" if figure.startswith("output") else "steps"]
        to_steps.take(title, lambda f=figure: plots.over_steps(comparison, f))
        overview["memory"].take(title, lambda f=figure: plots.against_memory(comparison, f))
        overview["layers"].take(title, lambda f=figure: plots.layers(comparison, f))
    return overview


def _chosen(comparison: Comparison, wanted: Sequence[str]) -> list[int]:
    """Numbers of the sequences that are shown in detail. raises ConfigError"""
    policies = len(comparison.result["summary"])
    names = [run.sequence for run in comparison.raw[::policies]]
    if not wanted:
        return [i for i, found in enumerate(comparison.sequences) if found is not None][
            :MOST_SEQUENCES
        ]
    chosen = []
    for word in wanted:
        if word in names:
            chosen.append(names.index(word))
        elif word.isascii() and word.isdigit() and int(word) < len(names):
            chosen.append(int(word))
        else:
            raise ConfigError(
                f"--sequence {word}: no sequence of the result; names are {', '.join(names[:8])}"
                f"{', ...' if len(names) > 8 else ''}, numbers 0 to {len(names) - 1}"
            )
    return [i for i in dict.fromkeys(chosen) if comparison.sequences[i] is not None]


def _details(comparison: Comparison, chosen: Sequence[int]) -> dict[str, Any]:
    """Pictures and timelines of the chosen sequences, and what is left out of them."""
    left = MOST_TOKENS
    shown_sequences: list[dict[str, Any]] = []
    thinned = False
    for number in chosen:
        if left <= 0:
            break
        lines, whole = _timelines(comparison, number, left // (len(chosen) - len(shown_sequences)))
        left -= sum(len(line["figure"].data[0].y) for line in lines)
        thinned = thinned or not whole
        name = comparison.raw[number * len(comparison.result["summary"])].sequence
        shown_sequences.append(
            {"name": name, "pictures": _pictures(comparison, number), "timelines": lines}
        )
    return {
        "sequences": shown_sequences,
        "all": len(comparison.sequences),
        "thinned": thinned,
        "policies": [line["policy"] for line in comparison.result["summary"]],
    }


def _pictures(comparison: Comparison, number: int) -> list[dict[str, Any]]:
    """The pictures of a sequence under every policy; the pixels once for all of them."""
    found = []
    pictures = plots.pictures_of(comparison, number)
    left_out = len(pictures) - MOST_PICTURES
    for image, frame in pictures[:MOST_PICTURES]:
        line: dict[str, Any] = {
            "name": f"picture {image}" + ("" if frame < 0 else f", frame {frame}")
        }
        try:
            figures = [
                _json(plots.picture(comparison, policy, number, image, frame=frame))
                for policy in range(len(comparison.result["summary"]))
            ]
            line |= {"figures": figures, "note": figures[0]["layout"]["meta"]["note"]}
            line["pixels"] = [part.pop("source") for part in figures[0]["layout"].get("images", [])]
            for figure in figures[1:]:
                for part in figure["layout"].get("images", []):
                    del part["source"]
        except plots.NothingToShow as error:
            line |= {"figures": [], "note": str(error), "pixels": []}
        if left_out > 0:
            line["note"] = f"{line['note']} {left_out} more pictures are left out.".strip()
        found.append(line)
    return found


def _timelines(comparison: Comparison, number: int, most: int) -> tuple[list[dict[str, Any]], bool]:
    """Timelines of a sequence, of as many layers as fit in so many lines, or of one layer as many
    lanes; and whether all did.
    """
    policies = [line["policy"] for line in comparison.result["summary"]]
    info = comparison.sequences[number].info
    runs = comparison.raw[number * len(policies) : (number + 1) * len(policies)]
    lanes = [fates.lanes_of(run, info) for run in runs]
    fit = most // max(1, min(info.tokens, plots.MOST_TOKENS) * len(policies))  # lanes of a policy
    layers = _spread(info.layers, fit * info.layers // max(map(len, lanes)))
    of_layer = _spread(info.kv_heads, fit // len(layers))
    lines = []
    for layer in layers:
        for policy, of_run in enumerate(lanes):
            for lane in (lane for of, lane in of_run if of == layer and max(lane, 0) in of_layer):
                figure = plots.timeline(comparison, policy, number, layer, lane)
                name = f"layer {layer}" + ("" if lane < 0 else f", KV head {lane}")
                lines.append({"policy": policy, "lane": name, "figure": figure})
    return lines, len(lines) == sum(map(len, lanes))


def _spread(count: int, most: int) -> list[int]:
    """As many of 0 .. count - 1, at least one, the first and the last among them."""
    chosen = max(1, min(count, most))
    return sorted({round(i * (count - 1) / max(1, chosen - 1)) for i in range(chosen)})


# ------------------------------------------------------------------------------- what is optional


def _certificate(result: dict[str, Any], comparison: Comparison) -> dict[str, Any]:
    steps = max((run.attention_tokens.shape[2] for run in comparison.raw if run.decode), default=0)
    figures = _Figures("bounds on the attention of evicted tokens against the steps since")
    figures.take("decay", lambda: plots.decay_envelope(result, ages=max(2, steps)))
    return {
        "policy": result["policy"],
        "epsilon": result["epsilon"],
        "loss": result["loss"],
        "claims": result["claims"],
        "decay": [
            *((str(line["layer"]), line) for line in result["decay"]["layers"]),
            ("all", result["decay"]["all_layers"]),
        ],
        "figures": figures,
    }


def _closed(result: dict[str, Any]) -> dict[str, Any]:
    figures = []
    for name, title in plots.CLOSED_TITLES.items():
        group = _Figures(f"{title} of every policy with 95 % intervals")
        group.take(title, lambda name=name: plots.closed_loop(result, name))
        figures += [group] if group else []
    return {
        "manifest": {key: result["manifest"][key] for key in ("model", "command")},
        "sequences": len(result["sequences"]),
        "columns": plots.CLOSED_TITLES,
        "rows": result["summary"],
        "figures": figures,
    }


# -------------------------------------------------------------------------------------- the end


def _manifest(comparison: Comparison) -> dict[str, Any]:
    """What a reader needs to repeat the result."""
    manifest = comparison.result["manifest"] or {}
    words = ["hae", "compare", *(trace["path"] for trace in manifest.get("traces", []))]
    for policy in manifest.get("policies", []):
        words += ["--policy", policy]
    if manifest.get("sequence") is not None:
        words += ["--sequence", str(manifest["sequence"])]
    if manifest.get("match"):
        words += ["--match", manifest["match"]]
    if manifest.get("optimal") is False:
        words += ["--no-optimal"]
    if manifest.get("nan") not in (None, "error"):
        words += [f"--nan={manifest['nan']}"]
    if manifest.get("backend") not in (None, "reference"):
        words += ["--backend", manifest["backend"]]
    known = ("command", "traces", "logs", "policies")
    return {
        "command": shlex.join(words),
        "given": manifest.get("command"),
        "traces": manifest.get("traces", [])[:MOST_FILES],
        "more_traces": max(0, len(manifest.get("traces", [])) - MOST_FILES),
        "logs": (manifest.get("logs") or [])[:MOST_FILES],
        "rest": list(_flat({k: v for k, v in manifest.items() if k not in known})),
    }


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield prefix + key, value if isinstance(value, str) else json.dumps(value)


def _number(value: Any, format_: str = ".4f") -> str:
    """A figure as the reader sees it."""
    if value is None or isinstance(value, float) and not math.isfinite(value):
        return "–"
    text = format(value, format_)
    # A small number must not read as none.
    return format(value, ".1e") if value != 0 and float(text) == 0 else text


def _json(value: Any) -> Any:
    """A figure as the page draws it: the page has its own templates and slider."""
    if isinstance(value, go.Figure):
        figure = json.loads(value.to_json())
        figure["layout"].pop("template", None)
        figure["layout"].pop("sliders", None)
        return figure
    raise TypeError(f"not for a page: {type(value).__name__}")


def _packed(value: Any) -> str:
    """JSON, compressed, as letters that may stand in a page."""
    text = json.dumps(value, separators=(",", ":"), default=_json)
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def _rendered(context: dict[str, Any]) -> str:
    files = resources.files(__package__)
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: files.joinpath(name).read_text("utf-8")),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"number": _number, "shown": plots.shown, "packed": _packed}
    templates = {
        name: plots.template(dark=name == "dark").to_plotly_json() for name in ("light", "dark")
    }
    return environment.get_template("page.html.j2").render(
        **context,
        templates=templates,
        plotly_js=get_plotlyjs(),
        style=files.joinpath("page.css").read_text("utf-8"),
        script=files.joinpath("page.js").read_text("utf-8"),
    )
