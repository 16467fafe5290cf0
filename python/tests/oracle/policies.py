"""Policy specs: `name` or `name:key=value,key=value` (reference/README.md)."""

from dataclasses import dataclass
from fractions import Fraction

DAP_OPTIONS = ("dap", "r", "alpha", "eps", "heads", "scope", "max_evicted", "broadcast", "effect")
RANKING_OPTIONS = ("budget", "recent", "group", "score", "scores")
CHOICES = {
    "dap": ("threshold", "mass", "none"),
    "heads": ("mean", "max"),
    "scope": ("sequence", "image"),
    "broadcast": ("all", "none"),
    "effect": ("within", "after"),
    "ddes": ("mark", "batch", "none"),
    "lane": ("layer", "kv_head"),
    "group": ("mean", "max", "sum"),
    "score": ("sum", "mean"),
    "scores": ("observed", "full"),
}
OPTIONS = {
    "hae": (*DAP_OPTIONS, "ddes", "bin", "sinks", "lane", *RANKING_OPTIONS),
    "greedy": (*DAP_OPTIONS, "sinks", "lane", *RANKING_OPTIONS),
    "h2o/layerwise": ("budget", "recent", "lane", "group"),
    "random": ("budget", "seed"),
    "window": ("sinks", "recent", "budget"),
    "full": (),
}


class PolicyError(ValueError):
    """The spec is not one that the program accepts."""


@dataclass(frozen=True)
class Options:
    """A policy with every default filled in. `decode` is mark, batch, greedy, window or none."""

    name: str
    decode: str
    dap: str = "none"
    r: float = 0.0015
    alpha: float | None = None
    eps: float | None = None
    heads: str = "mean"
    scope: str = "sequence"
    max_evicted: int | None = None
    broadcast: str = "all"
    effect: str = "within"
    budget: int | None = None  # None: the lane's size after DAP
    bin: int | Fraction = Fraction(15, 100)
    sinks: int = 0
    recent: int | None = None
    lane: str = "layer"
    group: str = "mean"
    score: str = "sum"  # sum, mean, or priority (a fixed random number a token)
    scores: str = "observed"
    seed: int = 0


def parse_policy(spec):
    name, _, text = spec.partition(":")
    if name not in OPTIONS:
        raise PolicyError(f"unknown policy {name}")
    given = _parse_pairs(name, text)
    if name == "full":
        return Options(name, decode="none")
    if name == "window":
        return _window(given)
    if name == "random":
        if "budget" not in given:
            raise PolicyError("random: budget is missing")
        return Options(name, "greedy", recent=0, score="priority", **given)
    if name == "h2o/layerwise":
        if "budget" not in given:
            raise PolicyError("h2o/layerwise: budget is missing")
        return _checked(Options(name, "greedy", **{"lane": "kv_head", "recent": None, **given}))
    if name == "greedy":
        given.setdefault("dap", "none")
        _refuse_meaningless(given)
        return _checked(Options(name, "greedy", **_dap_defaults(given)))
    given.setdefault("dap", "threshold")
    _refuse_meaningless(given)
    return _checked(Options(name, given.pop("ddes", "mark"), **_dap_defaults(given)))


def _parse_pairs(name, text):
    given = {}
    for pair in text.split(",") if text else []:
        key, equals, value = pair.partition("=")
        if not equals or not value or key in given or key not in OPTIONS[name]:
            raise PolicyError(f"{name}: bad option {pair!r}")
        given[key] = _value(key, value)
    if given.get("budget", 1) is None:
        del given["budget"]  # budget=prompt is the default
    return given


def _value(key, text):
    if key in CHOICES:
        if text not in CHOICES[key]:
            raise PolicyError(f"{key}={text}: allowed are {CHOICES[key]}")
        return text
    if key in ("r", "alpha", "eps"):
        return float(text)
    if key == "budget" and text == "prompt":
        return None
    if key == "bin" and ("." in text or "%" in text):
        return Fraction(text[:-1]) / 100 if text.endswith("%") else Fraction(text)
    number = int(text)
    if number < (1 if key in ("budget", "bin", "max_evicted") else 0):
        raise PolicyError(f"{key}={text} is too small")
    return number


def _window(given):
    sinks = given.get("sinks", 4)
    if ("recent" in given) == ("budget" in given):
        raise PolicyError("window: give either recent or budget")
    recent = given["recent"] if "recent" in given else given["budget"] - sinks
    if recent < 0:
        raise PolicyError("window: the budget does not hold the sinks")
    return Options("window", "window", sinks=sinks, recent=recent)


def _dap_defaults(given):
    if given["dap"] == "threshold":
        return {"alpha": 0.0005, **given}
    return given


def _refuse_meaningless(given):
    """An option that another one makes meaningless is an error."""
    refused = []
    if given.get("ddes") == "none":
        refused += [*RANKING_OPTIONS, "bin"]
    if given["dap"] == "none":
        refused += [option for option in DAP_OPTIONS if option != "dap"]
    refused += {"mass": ["r"], "threshold": ["eps"]}.get(given["dap"], [])
    if given.get("broadcast") == "none":
        refused.append("effect")
    for option in refused:
        if option in given:
            raise PolicyError(f"{option} has no meaning here")
    if given["dap"] == "mass" and "eps" not in given:
        raise PolicyError("dap=mass needs eps")


def _checked(options):
    if options.group != "mean" and options.lane != "kv_head":
        raise PolicyError("a group other than mean needs lane=kv_head")
    return options
