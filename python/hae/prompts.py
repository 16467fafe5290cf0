"""Prompts to record, and where the pictures stand among their tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedModel

from hae.errors import reason
from hae.trace import IMAGE, NO_IMAGE, TEXT


class PromptError(Exception):
    """A prompts file or a prompt is wrong. The message says where and what was expected."""


@dataclass(frozen=True)
class Prompt:
    """One sequence to record.

    text    with one image placeholder of the model (often <image>) for each picture
    images  the pictures, in the order of their placeholders
    paths   the files that the pictures came from, if any
    group   sequences about one picture or document share it: they are not independent
    answer  the right answer, where one is known: for hae-closed-loop
    """

    name: str
    text: str
    images: list[Image.Image] = field(default_factory=list)
    group: str = ""
    paths: list[Path] = field(default_factory=list)
    answer: str | None = None


_KEYS = {"name", "text", "images", "group", "answer"}


def load_prompts(path: Path) -> list[Prompt]:
    """Read a JSON Lines file: one object a line with `text` and, optionally, `name` (default:
    its number), `group` (default: its name), `images` (paths relative to the file) and `answer`.

    raises PromptError naming the file and the line
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise PromptError(f"{path}: cannot be read: {error}") from None
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            entry = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise PromptError(f"{where}: not JSON: {error}") from None
        prompts.append(_prompt(entry, where, path.parent, default_name=f"{len(prompts):06d}"))
    if not prompts:
        raise PromptError(f"{path}: holds no prompt")
    names = [prompt.name for prompt in prompts]
    for name in names:
        if names.count(name) > 1:
            raise PromptError(f"{path}: name {name!r} appears twice; names must differ")
    return prompts


def _prompt(entry: Any, where: str, folder: Path, default_name: str) -> Prompt:
    if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
        raise PromptError(f'{where}: expected an object with a string "text"')
    if unknown := sorted(entry.keys() - _KEYS):
        raise PromptError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(sorted(_KEYS))}")
    name = entry.get("name", default_name)
    group = entry.get("group", name)
    paths = entry.get("images", [])
    if not isinstance(name, str) or not isinstance(group, str) or not name or not group:
        raise PromptError(f'{where}: "name" and "group" must be strings that are not empty')
    if "\0" in name + group or any(not _is_unicode(text) for text in (name, group, entry["text"])):
        raise PromptError(f"{where}: a string holds half a surrogate pair, or a name U+0000")
    answer = entry.get("answer")
    if answer is not None and not isinstance(answer, str):
        raise PromptError(f'{where}: "answer" must be a string')
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise PromptError(f'{where}: "images" must be a list of paths')
    images = []
    for image_path in paths:
        try:
            with Image.open(folder / image_path) as image:
                images.append(image.copy() if image.mode == "L" else image.convert("RGB"))
        except Exception as error:  # each of Pillow's decoders has kinds of its own
            raise PromptError(f"{where}: picture {image_path}: {reason(error)}") from None
    files = [folder / image_path for image_path in paths]
    return Prompt(
        name=name, text=entry["text"], images=images, group=group, paths=files, answer=answer
    )


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


# ---------------------------------------------------------------------------------- inputs


@dataclass(frozen=True)
class Inputs:
    """A prompt as the model takes it.

    input_ids       [1, P]
    pixel_values    [image, channel, height, width], or None without pictures
    image, patch    [P], [P, 2]  as in the trace: -1 where there is none
    """

    input_ids: torch.Tensor
    pixel_values: torch.Tensor | None
    image: np.ndarray
    patch: np.ndarray

    @property
    def modality(self) -> np.ndarray:
        return np.where(self.image == NO_IMAGE, TEXT, IMAGE)


def image_map(input_ids: Sequence[int], image_token_id: int, features: Sequence[int]) -> np.ndarray:
    """Which picture each token belongs to, read from the tokens themselves: [P], -1 for text.

    features  visual features of each picture, in order

    When there are as many spans of image tokens as pictures, each picture must fill its span.
    Otherwise (pictures side by side, or a picture interrupted by text) the pictures take the
    image tokens in order.

    raises PromptError naming the picture when its image tokens and features differ in number
    """
    placeholders = np.flatnonzero(np.asarray(input_ids) == image_token_id)
    gaps = np.flatnonzero(np.diff(placeholders) != 1) + 1
    spans = [len(span) for span in np.split(placeholders, gaps)] if len(placeholders) else []
    if not features and spans:
        raise PromptError(f"{len(placeholders)} image tokens in the prompt, but no picture")
    found = spans if len(spans) == len(features) else _taken_in_order(len(placeholders), features)
    for number, (expected, tokens) in enumerate(zip(features, found, strict=True)):
        if tokens != expected:
            raise PromptError(
                f"image {number} (counted from 0): expected {expected} image tokens, one for each "
                f"visual feature, found {tokens}; nothing is padded or cut: check the prompt, its "
                "truncation and the processor's patch size"
            )
    image = np.full(len(input_ids), NO_IMAGE)
    image[placeholders] = np.repeat(np.arange(len(features)), np.array(features, dtype=int))
    return image


def _taken_in_order(placeholders: int, features: Sequence[int]) -> list[int]:
    """Image tokens each picture gets when they are handed out in order; the last gets the rest."""
    found = []
    for expected in features[:-1]:
        found.append(min(expected, placeholders))
        placeholders -= found[-1]
    return [*found, placeholders]


def patch_map(image: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Patch row and column of each token, [P, 2], -1 -1 where there is none.

    A picture with rows x columns tokens is a grid, row-major; one more token than that is a
    class token before the grid. Any other number has no grid.
    """
    patch = np.full((len(image), 2), -1)
    for number in range(image.max(initial=NO_IMAGE) + 1):
        tokens = np.flatnonzero(image == number)
        grid = tokens[len(tokens) - rows * columns :] if len(tokens) > rows * columns else tokens
        if len(grid) == rows * columns and len(tokens) - len(grid) <= 1:
            patch[grid] = np.stack(np.divmod(np.arange(rows * columns), columns), axis=1)
    return patch


_PASSED_ON = {"input_ids", "pixel_values", "attention_mask", "token_type_ids"}


@torch.no_grad()
def prepare(model: PreTrainedModel, processor: Any, prompt: Prompt) -> Inputs:
    """Tokenize one prompt, alone: a batch of one, never padded.

    processor  the model's processor when the prompt has pictures, else its tokenizer will do
    raises PromptError when pictures and image tokens do not fit together
    """
    if prompt.images and not hasattr(model.config, "vision_config"):
        pictures = "1 picture" if len(prompt.images) == 1 else f"{len(prompt.images)} pictures"
        raise PromptError(f"prompt {prompt.name}: has {pictures}, but the model takes none")
    try:
        if prompt.images:
            batch = processor(images=prompt.images, text=prompt.text, return_tensors="pt")
        else:
            tokenizer = getattr(processor, "tokenizer", processor)
            batch = tokenizer(prompt.text, return_tensors="pt")
    except Exception as error:  # a processor may raise anything
        raise PromptError(
            f"prompt {prompt.name}: the processor refused it: {reason(error)}"
        ) from None
    if "attention_mask" in batch and not bool(batch["attention_mask"].all()):
        raise PromptError(f"prompt {prompt.name}: the tokenizer padded it; padding is not recorded")
    input_ids = batch["input_ids"].to(model.device)
    if unknown := sorted(batch.keys() - _PASSED_ON):
        raise PromptError(
            f"prompt {prompt.name}: the processor also gives {', '.join(unknown)}, which is not "
            "recorded; a LLaVA model with pictures of one size is needed"
        )
    if input_ids.shape[1] == 0:
        raise PromptError(f"prompt {prompt.name}: has no tokens")
    pixel_values = batch.get("pixel_values")
    features: list[int] = []
    rows = columns = 0
    if pixel_values is not None:
        pixel_values = pixel_values.to(model.device, model.dtype)
        output = model.get_image_features(pixel_values=pixel_values)
        features = [len(one) for one in getattr(output, "pooler_output", output)]
        patch_pixels = model.config.vision_config.patch_size
        rows, columns = (side // patch_pixels for side in pixel_values.shape[-2:])
    image_token_id = getattr(model.config, "image_token_id", None)
    if image_token_id is None:
        image = np.full(input_ids.shape[1], NO_IMAGE)
    else:
        try:
            image = image_map(input_ids[0].tolist(), image_token_id, features)
        except PromptError as error:
            raise PromptError(f"prompt {prompt.name}: {error}") from None
    return Inputs(input_ids, pixel_values, image, patch_map(image, rows, columns))
