"""What became of each token of a run: when it was born, marked and evicted, and the attention that
it would still have received.
"""

from __future__ import annotations

from functools import lru_cache

import h5py
import numpy as np
import pandas as pd

from hae._engine import Sequence, SequenceInfo, TraceError
from hae.comparison import Run
from hae.run_file import StoredRun

NEVER = np.iinfo(np.int64).max  # the step of what did not happen
KINDS = ("picture", "text before", "text after", "generated")

_MOST_BYTES = 1 << 30  # of one layer's attention


def lanes_of(run: Run | StoredRun, info: SequenceInfo) -> list[tuple[int, int]]:
    """(layer, lane) of every cache that evicts on its own; lane -1 when the layer is the lane."""
    lanes = range(info.kv_heads) if run.lanes == "kv_head" else (-1,)
    return [(layer, lane) for layer in range(info.layers) for lane in lanes]


def evicted_at(run: Run | StoredRun, info: SequenceInfo) -> np.ndarray:
    """[lanes, T] int: the step after which a token left, NEVER if it stayed; as lanes_of."""
    if isinstance(run, StoredRun):
        run.check_fits(info)
    heads = info.kv_heads if run.lanes == "kv_head" else 1
    steps = np.full((info.layers * heads, info.tokens), NEVER)
    lane = run.log.layer.to_numpy() * heads + np.maximum(run.log.lane.to_numpy(), 0)
    steps[lane, run.log.token.to_numpy()] = run.log.step.to_numpy()
    return steps


def kinds_of(info: SequenceInfo) -> list[str]:
    """[T] one of KINDS, as `evicted_kinds` of a result counts them."""
    visual = info.image >= 0
    first = int(np.argmax(visual[: info.prompt])) if visual[: info.prompt].any() else 0

    def kind(token: int) -> str:
        if token >= info.prompt:
            return "generated"
        if visual[token]:
            return "picture"
        return "text before" if token < first else "text after"

    return [kind(token) for token in range(info.tokens)]


def still_received(attention: np.ndarray, evicted: np.ndarray, prompt: int) -> np.ndarray:
    """What evicted tokens would still have received (analysis/foregone_attention.hpp):

      sum_{t >= 1} a_j(s + t),  a_j the mean over the lane's query heads of full-cache attention

    attention  [query_heads of the lane, steps, T] full-cache attention of decode rows
    evicted    [T] step s after which the token left, NEVER if it stayed
    returns    [T] float64; NaN for a token that stayed
    order      heads ascending, then rows ascending, in double
    """
    mean = np.zeros(attention.shape[1:])
    for head in attention:
        mean += head
    mean /= len(attention)
    received = np.full(len(evicted), np.nan)
    for token in np.flatnonzero(evicted != NEVER):
        rows = mean[evicted[token] :, token]  # row of step s + 1 first
        received[token] = np.cumsum(rows)[-1] if len(rows) else 0.0
    return received


@lru_cache(maxsize=2)  # several policies look at one layer after another
def _decode_attention(sequence: Sequence, layer: int) -> np.ndarray | None:
    """[query_heads, steps, T]; None where it is too large to form, or has a NaN."""
    info = sequence.info
    if 4 * info.query_heads * info.tokens**2 > _MOST_BYTES:
        return None
    try:
        return sequence.attention(layer)[:, info.prompt :].copy()
    except TraceError:
        return None


def _texts(sequence: Sequence) -> list[str | None]:
    """[T] None where the trace has no text; what is no UTF-8, as the format asks, is replaced."""
    try:
        texts = sequence.details.token
    except UnicodeDecodeError:
        with h5py.File(sequence.path, "r") as file:
            stored = file[f"sequences/{sequence.index:06d}/token"][()]
        texts = [text.decode("utf-8", "replace") for text in stored]
    return list(texts) or [None] * sequence.info.tokens


def token_fates(
    run: Run | StoredRun, sequence: Sequence, layer: int = 0, lane: int = -1
) -> pd.DataFrame:
    """One line a token of one lane: token (its text, None where the trace has none), kind, born,
    marked, evicted (steps, 0 the prefill; <NA> if it was not), within, score, still_received (NaN
    if it stayed, and everywhere where attention cannot be formed).
    """
    info = sequence.info
    evicted = evicted_at(run, info)[lanes_of(run, info).index((layer, lane))]
    log = run.log[(run.log.layer == layer) & (run.log.lane == lane)].set_index("token")
    pending = run.pending[(run.pending.layer == layer) & (run.pending.lane == lane)]
    frame = pd.DataFrame(
        {
            "token": _texts(sequence),
            "kind": kinds_of(info),
            "born": np.maximum(np.arange(info.tokens) - info.prompt + 1, 0),
        }
    )
    frame["marked"] = pd.concat([log.pending_since, pending.set_index("token").since]).astype(
        "Int64"
    )
    frame["evicted"] = pd.array(np.where(evicted == NEVER, 0, evicted), dtype="Int64")
    frame.loc[evicted == NEVER, "evicted"] = pd.NA
    frame["within"] = log.within.reindex(frame.index, fill_value=False)
    frame["score"] = log.score
    attention = _decode_attention(sequence, layer)
    heads = slice(None)
    if lane >= 0:
        group = info.query_heads // info.kv_heads
        heads = slice(lane * group, (lane + 1) * group)
    frame["still_received"] = (
        np.nan if attention is None else still_received(attention[heads], evicted, info.prompt)
    )
    return frame
