"""Families of models with pictures: what they take beside the tokens, and how patches lie."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Grids = list[tuple[int, int]]


@dataclass(frozen=True)
class PictureFamily:
    """
    keys       what the processor gives of the pictures, and the model's prefill takes
    per_token  what it gives of the tokens, [1, P]: 0 for text
    unused     what else it gives
    grids      rows and columns of visual tokens of each picture; 0 0 where they are no grid
    axes       numbers that place a token
    bidirectional  the prompt's tokens of one picture see each other, also those that follow
    """

    keys: tuple[str, ...]
    grids: Callable[[Any, Mapping[str, torch.Tensor]], Grids]
    per_token: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    axes: int = 1
    bidirectional: bool = False


def _grids_of_one_size(config: Any, pictures: Mapping[str, torch.Tensor]) -> Grids:
    pixels = pictures["pixel_values"]
    patch = config.vision_config.patch_size
    return [(pixels.shape[-2] // patch, pixels.shape[-1] // patch)] * len(pixels)


def _no_grids(_: Any, pictures: Mapping[str, torch.Tensor]) -> Grids:
    """A picture as a whole, then its parts with a token after each row."""
    return [(0, 0)] * len(pictures["image_sizes"])


def _square_grids(config: Any, pictures: Mapping[str, torch.Tensor]) -> Grids:
    side = math.isqrt(config.mm_tokens_per_image)
    return [(side, side)] * len(pictures["pixel_values"])


def _grids_of_merged_patches(config: Any, pictures: Mapping[str, torch.Tensor]) -> Grids:
    merge = config.vision_config.spatial_merge_size
    frames = pictures["image_grid_thw"].tolist()
    return [(rows // merge, columns // merge) for _, rows, columns in frames]


_QWEN_VL = PictureFamily(
    keys=("pixel_values", "image_grid_thw"),
    grids=_grids_of_merged_patches,
    per_token=("mm_token_type_ids",),
    axes=3,
)

# By the model type in config.json.
PICTURE_FAMILIES = {
    "llava": PictureFamily(keys=("pixel_values",), grids=_grids_of_one_size),
    "llava_next": PictureFamily(keys=("pixel_values", "image_sizes"), grids=_no_grids),
    "gemma3": PictureFamily(
        keys=("pixel_values",),
        grids=_square_grids,
        per_token=("token_type_ids",),
        unused=("num_crops",),
        bidirectional=True,
    ),
    "qwen2_vl": _QWEN_VL,
    "qwen2_5_vl": _QWEN_VL,
}
