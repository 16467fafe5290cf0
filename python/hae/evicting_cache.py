"""A transformers cache whose lanes hold different tokens, each at its original position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicLayer

ABSENT = -1


class ClosedLoopError(Exception):
    """The model, or how it is run, does not fit a closed loop. The message says why."""


class EvictingLayer(DynamicLayer):
    """Keys and values of one layer, of the tokens it still holds.

    keys, values  [1, kv_heads, n, head_dim]
    positions     [lanes, n] ascending original positions, one lane a layer or one a KV head. A lane
                  that holds fewer tokens than the fullest one begins with unused slots, ABSENT
    seen          tokens of the sequence so far, evicted ones too: what the model takes for the
                  cache's length
    """

    is_croppable = False

    def __init__(self, lanes: int) -> None:
        super().__init__()
        self.positions = np.empty((lanes, 0), dtype=np.int64)
        self.seen = 0

    def enter(self, positions: np.ndarray, seen: int) -> None:
        """The tokens whose keys and values come with the next update."""
        new = positions[np.newaxis].repeat(len(self.positions), axis=0)
        self.positions = np.concatenate([self.positions, new], axis=1)
        self.seen = seen

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        held = 0 if self.keys is None else self.keys.shape[-2]
        if held + key_states.shape[-2] != self.positions.shape[1]:
            raise ClosedLoopError(
                f"{key_states.shape[-2]} new tokens, but {self.positions.shape[1] - held} were "
                "announced: use the cache only within the block of hae.hf.evicting it comes from"
            )
        return super().update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self) -> int:
        return self.seen

    @property
    def ragged(self) -> bool:
        """Whether some lane holds fewer tokens than another."""
        return bool((self.positions[:, :1] == ABSENT).any())

    def retain(self, residents: Sequence[np.ndarray]) -> None:
        """Keeps these positions of each lane, ascending; the rest of the memory is given back."""
        kept = max(len(lane) for lane in residents)
        slots = np.zeros((len(residents), kept), dtype=np.int64)
        positions = np.full((len(residents), kept), ABSENT)
        for lane, resident in enumerate(residents):
            first = kept - len(resident)
            slots[lane, first:] = np.searchsorted(self.positions[lane], resident)
            positions[lane, first:] = resident
        self.positions = positions
        self.keys, self.values = _gathered(self.keys, slots), _gathered(self.values, slots)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values that are held."""
        return 0 if self.keys is None else self.keys.nbytes + self.values.nbytes

    def _refuse(self, *_: Any) -> NoReturn:
        raise ClosedLoopError(
            "a cache that evicts follows one run of one sequence: it cannot be cut, emptied or "
            "reordered; no beam search, no assisted decoding, a new block for a new run"
        )

    crop = reset = reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse


def _gathered(numbers: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
    """numbers [1, kv_heads, n, head_dim] at slots [lanes, kept], in memory of their own."""
    index = torch.from_numpy(slots).to(numbers.device)
    if len(slots) == 1:
        return numbers.index_select(2, index[0])
    shape = (*numbers.shape[:2], slots.shape[1], numbers.shape[3])
    return numbers.gather(2, index[None, :, :, None].expand(shape))


class EvictingCache(Cache):
    """Batch of one. It tells the model the length of the whole sequence, so that rotary positions
    and masks are those of a run that evicts nothing.
    """

    def __init__(self, layers: int, lanes: int) -> None:
        super().__init__(layers=[EvictingLayer(lanes) for _ in range(layers)])

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values that are held."""
        return sum(layer.nbytes for layer in self.layers)


def prefill_mask(mask: torch.Tensor | None, present: np.ndarray) -> torch.Tensor | None:
    """The model's own mask over the prompt, cut to the tokens that are present.

    mask     [1, 1, P, P]; None: causal
    present  [n] positions, ascending
    returns  [1, 1, n, n]; None: causal
    """
    if mask is None or len(present) == mask.shape[-1]:
        return mask
    kept = torch.from_numpy(present).to(mask.device)
    return mask.index_select(2, kept).index_select(3, kept)


def decode_mask(
    mask: torch.Tensor | None, cache: EvictingLayer, query: torch.Tensor
) -> torch.Tensor | None:
    """The model's own mask of one row over the whole sequence, cut to what a layer holds.

    mask     [1, 1, 1, seen] bool (true: attend) or additive; None: all keys
    query    [1, query_heads, 1, head_dim]
    returns  [1, 1 or query_heads, 1, n]; None as long as nothing has to be masked
    """
    lanes, length = cache.positions.shape
    ragged = cache.ragged
    if not ragged and (mask is None or length == mask.shape[-1]):
        return mask
    if mask is None:
        mask = query.new_zeros((1, 1, 1, cache.seen))
    columns = torch.from_numpy(cache.positions.clip(min=0)).to(mask.device)
    cut = mask[0, 0, 0][columns]  # [lanes, n]
    if ragged:
        unused = torch.from_numpy(cache.positions == ABSENT).to(mask.device)
        hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        cut = cut.masked_fill(unused, hidden)
    if lanes > 1:
        cut = cut.repeat_interleave(query.shape[1] // lanes, dim=0)
    return cut[None, :, None]
