"""Policies written in Python: the same moments, checks, metrics and log as those of the table.

A policy proposes and the engine disposes: what it returns is checked, then applied.
docs/python-policies.md shows a whole one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from hae._engine import Cache, Rows, SequenceInfo


@dataclass(frozen=True)
class Merge:
    """Where the key and value of an evicted token go: into those of a token that stays.

    With E all the tokens that go into it, k = kept_weight k_into + sum of weight_e k_e over E, v
    likewise; then its weight in a row is multiplied by size.

    kept_weight, size  the same for all of E
    """

    into: int
    kept_weight: float = 0.5
    weight: float = 0.5
    size: float = 1.0


@dataclass(frozen=True)
class Evict:
    """Evict `token` from one lane of a layer.

    layer  None: the layer that is deciding
    lane   None: every lane of the layer
    score  the token's importance, for the log; None where the policy has none
    merge  prefill only, all merges of a layer in one decision; None: its key and value are gone
    """

    token: int
    layer: int | None = None
    lane: int | None = None
    score: float | None = None
    merge: Merge | None = None


@dataclass(frozen=True)
class Mark:
    """Put a resident token into the recycle bin: it stays, and is attended to, until it is evicted.
    Decode only.
    """

    token: int
    lane: int = 0


@dataclass(frozen=True)
class Decision:
    """What a policy proposes.

    evict     applied after the marks
    mark      decode only
    effect    how an eviction acts on a layer whose prefill has not begun: "within", the token gives
              no row and no key there, or "after" that layer's prefill
    warnings  for the run's warnings
    """

    evict: Iterable[Evict] = ()
    mark: Iterable[Mark] = ()
    effect: str = "within"
    warnings: Iterable[str] = ()


@dataclass(frozen=True)
class Limits:
    """What a policy promises about a lane; the engine holds it to them.

    sinks     positions 0 .. sinks - 1 are never evicted
    recent    the newest residents, never evicted but by prune
    budget    shown in results; capacity follows from it
    bin       most pending tokens
    capacity  most residents of a lane after the prefill, and after a step
    grows     the capacity grows by one a step: nothing is evicted while decoding
    """

    sinks: int = 0
    recent: int = 0
    budget: int | None = None
    bin: int | None = None
    capacity: int | None = None
    grows: bool = False


@dataclass(frozen=True)
class Needs:
    """What a policy needs of a layer; a trace that lacks it is refused before anything runs.

    prompt_rows         which prompt rows it must observe: "all", "text" or "none"
    newest_prompt_rows  besides those, the last rows of the prompt
    keys, values        whether begin_layer gets them
    """

    prompt_rows: str = "all"
    newest_prompt_rows: int = 0
    keys: bool = False
    values: bool = False


class PolicyRun:
    """State over one sequence. The engine calls, for each layer in order: begin_layer, observe
    (prompt rows in blocks, ascending), prune, fit; then balance once; then step for each decode
    step and layer.
    Layers share nothing while decoding and may come in any order; steps of a layer ascend.

    What is returned is a Decision, or None: nothing. Rows and caches are valid during the call.
    """

    def begin_layer(
        self, layer: int, keys: np.ndarray | None, values: np.ndarray | None
    ) -> None:
        """Before a layer's first row. keys and values are [kv_heads, T, head_dim] float32, by
        position, keys after rotary embedding; None where the policy did not ask for them. The
        arrays are yours.
        """

    def observe(self, rows: Rows) -> None:
        """Prompt rows of residents. The size of a block must not change any result."""

    def prune(self, layer: int, cache: Cache) -> Decision | None:
        """After a layer's last prompt row: evictions for any layers."""

    def fit(self, layer: int, cache: Cache) -> Decision | None:
        """After the layer's pruning was applied: down to budget, in this layer."""

    def balance(self, caches: list[Cache]) -> Decision | None:
        """After the last layer's prefill."""

    def step(self, rows: Rows, cache: Cache) -> Decision | None:
        """One decode step of layer `rows.layer`: its one row, whose token has joined the cache."""

    def limits(self, layer: int, lane: int) -> Limits:
        """Sinks hold from the beginning, recent from fit on, the rest from the prefill's end."""
        return Limits()


class Policy:
    """A configured policy: immutable, shared by sequences. Override `begin`.

    name         of its spec; default the class's
    options      shown in results and in the spec, `name:key=value`
    lanes        "layer", or "kv_head": each KV head evicts on its own
    merges       whether it merges what it evicts; `needs` must then ask for keys and values
    prompt_rows  which prompt rows it must observe: "all", "text" or "none"; more by `needs`
    """

    name: str = ""
    options: Mapping[str, object] = MappingProxyType({})
    lanes: str = "layer"
    merges: bool = False
    prompt_rows: str = "all"

    def spec(self) -> str:
        """Canonical: the name and the options."""
        name = self.name or type(self).__name__
        values = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{name}:{values}" if values else name

    def needs(self, info: SequenceInfo, layer: int) -> Needs:
        """What is needed of one layer."""
        return Needs(prompt_rows=self.prompt_rows, keys=self.merges, values=self.merges)

    def begin(self, info: SequenceInfo) -> PolicyRun:
        """Starts a sequence; nothing is remembered from another one."""
        raise NotImplementedError(f"{type(self).__name__} has no begin(info)")
