"""A transformers cache whose lanes hold different tokens, each at its original position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicLayer

ABSENT = -1


class EvictingLayer(DynamicLayer):
    """Keys and values of one layer, of the tokens it still holds.

    keys, values  [1, kv_heads, n, head_dim]
    positions     [lanes, n] ascending original positions, one lane a layer or one a KV head. A lane
                  that holds fewer tokens than the fullest one begins with unused slots, ABSENT
    seen          tokens that ever entered or passed: what the model takes for the cache's length
    """

    is_croppable = False

    def __init__(self, lanes: int) -> None:
        super().__init__()
        self.positions = torch.empty((lanes, 0), dtype=torch.long)
        self.seen = 0

    def enter(self, positions: np.ndarray, seen: int) -> None:
        """The tokens whose keys and values come with the next update."""
        new = torch.as_tensor(positions, device=self.positions.device)
        self.positions = torch.cat([self.positions, new.expand(len(self.positions), -1)], dim=1)
        self.seen = seen

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.positions = self.positions.to(self.device)

    def get_seq_length(self) -> int:
        return self.seen

    def retain(self, residents: Sequence[np.ndarray]) -> None:
        """Keeps these positions of each lane, ascending; the rest of the memory is given back."""
        kept = max(len(lane) for lane in residents)
        slots = np.zeros((len(residents), kept), dtype=np.int64)
        positions = np.full((len(residents), kept), ABSENT, dtype=np.int64)
        held = self.positions.cpu().numpy()
        for lane, resident in enumerate(residents):
            first = kept - len(resident)
            slots[lane, first:] = np.searchsorted(held[lane], resident)
            positions[lane, first:] = resident
        self.positions = torch.from_numpy(positions).to(self.device)
        index = torch.from_numpy(slots).to(self.device)
        if len(residents) == 1:
            self.keys = self.keys.index_select(2, index[0])
            self.values = self.values.index_select(2, index[0])
            return
        index = index[None, :, :, None]
        self.keys = self.keys.gather(
            2, index.expand(*self.keys.shape[:2], kept, self.keys.shape[3])
        )
        self.values = self.values.gather(
            2, index.expand(*self.values.shape[:2], kept, self.values.shape[3])
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values that are held."""
        return 0 if self.keys is None else self.keys.nbytes + self.values.nbytes


class EvictingCache(Cache):
    """Batch of one. It tells the model the length of the whole sequence, so that rotary positions and
    masks are those of a run that evicts nothing.
    """

    def __init__(self, layers: int, lanes: int) -> None:
        super().__init__(layers=[EvictingLayer(lanes) for _ in range(layers)])

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values that are held."""
        return sum(layer.nbytes for layer in self.layers)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        raise NotImplementedError("a cache that evicts follows one sequence: use num_beams=1")


def mask_of(
    mask: torch.Tensor | None,
    rows: np.ndarray | None,
    positions: torch.Tensor,
    query_heads: int,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """The model's own mask over the whole sequence, cut to what a layer holds.

    mask       [1, 1, rows, seen] bool (true: attend) or additive; None: causal, or all keys
    rows       of the mask that the queries are; None: all of them
    positions  [lanes, n]  ABSENT: an unused slot
    returns    [1, 1 or query_heads, rows, n]; None as long as nothing has to be masked
    """
    unused = positions == ABSENT
    if mask is None:
        if not bool(unused.any()):
            return None
        mask = torch.ones(
            (1, 1, 1, int(positions.max()) + 1), dtype=torch.bool, device=unused.device
        )
    if rows is not None:
        mask = mask[:, :, torch.as_tensor(rows, device=mask.device)]
    lanes, length = positions.shape
    if lanes == 1 and length == mask.shape[-1]:
        return mask  # nothing is missing
    # [1, lanes, rows, n]: column j of a lane is the column of its position.
    cut = mask[:, 0][..., positions.clamp(min=0)].permute(0, 2, 1, 3)
    hidden = unused[None, :, None, :]
    cut = (
        cut & ~hidden
        if mask.dtype == torch.bool
        else cut.masked_fill(hidden, torch.finfo(dtype).min)
    )
    return cut if lanes == 1 else cut.repeat_interleave(query_heads // lanes, dim=1)
