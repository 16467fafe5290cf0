"""Prompts to record, and where the pictures stand among their tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedModel

from hae.errors import reason
from hae.pictures import PICTURE_FAMILIES, Grids, PictureFamily
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
    messages        instead of text, for a chat template
    special_tokens  whether the tokenizer adds its own, as the one that begins a text
    """

    name: str
    text: str
    images: list[Image.Image] = field(default_factory=list)
    group: str = ""
    paths: list[Path] = field(default_factory=list)
    answer: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    special_tokens: bool = True


_KEYS = {"name", "text", "messages", "images", "group", "answer"}


def load_prompts(path: Path, *, chat: bool = False) -> list[Prompt]:
    """Read a JSON Lines file: one object a line with `text` and, optionally, `name` (default:
    its number), `group` (default: its name), `images` (paths relative to the file) and `answer`.

    chat    a line may have `messages` instead of `text`
    raises  PromptError naming the file and the line
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise PromptError(f"{path}: cannot be read: {error}") from None
    prompts: list[Prompt] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            entry = json.loads(line.decode("utf-8"), object_pairs_hook=_without_repeats)
        except (ValueError, RecursionError) as error:
            raise PromptError(f"{where}: not JSON: {error}") from None
        prompt = _prompt(entry, where, path.parent, f"{len(prompts):06d}", chat)
        if prompt.name in line_of:
            raise PromptError(
                f"{where}: name {prompt.name!r} appears twice, first in line "
                f"{line_of[prompt.name]}; names must differ"
            )
        line_of[prompt.name] = number
        prompts.append(prompt)
    if not prompts:
        raise PromptError(f"{path}: holds no prompt")
    return prompts


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"key {key!r} appears twice in an object")
    return dict(pairs)


def _prompt(entry: Any, where: str, folder: Path, default_name: str, chat: bool) -> Prompt:
    if not isinstance(entry, dict) or ("text" in entry) == ("messages" in entry):
        raise PromptError(f'{where}: expected an object with a string "text", or with "messages"')
    if unknown := sorted(entry.keys() - _KEYS):
        raise PromptError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(sorted(_KEYS))}")
    if not isinstance(entry.get("text", ""), str):
        raise PromptError(f'{where}: "text" must be a string')
    if "messages" in entry and not chat:
        raise PromptError(f'{where}: "messages" are read by hae-record --chat only; give "text"')
    messages = _messages(entry["messages"], where) if chat and "messages" in entry else []
    name = entry.get("name", default_name)
    group = entry.get("group", name)
    paths = entry.get("images", [])
    if not isinstance(name, str) or not isinstance(group, str) or not name or not group:
        raise PromptError(f'{where}: "name" and "group" must be strings that are not empty')
    if "\0" in name + group or not all(map(_is_unicode, _strings([name, group, entry]))):
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
        name=name,
        text=entry.get("text", ""),
        images=images,
        group=group,
        paths=files,
        answer=answer,
        messages=messages,
    )


def _messages(messages: Any, where: str) -> list[dict[str, Any]]:
    """raises PromptError unless they are a list of roles with contents"""
    if not isinstance(messages, list) or not messages:
        raise PromptError(f'{where}: "messages" must be a list that is not empty')
    for number, message in enumerate(messages):
        fits = isinstance(message, dict) and message.keys() == {"role", "content"}
        content = message["content"] if fits else None
        if not fits or not isinstance(message["role"], str) or not _is_content(content):
            raise PromptError(
                f'{where}: message {number} (counted from 0): expected "role", a string, and '
                '"content", a string or a list of {"type": "text", "text": ...} and '
                '{"type": "image"}'
            )
    return messages


def _is_content(content: Any) -> bool:
    if not isinstance(content, list):
        return isinstance(content, str)
    return all(
        item == {"type": "image"}
        or isinstance(item, dict)
        and item.keys() == {"type", "text"}
        and item["type"] == "text"
        and isinstance(item["text"], str)
        for item in content
    )


def _strings(value: Any) -> Iterator[str]:
    """All strings in what JSON holds, without the keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


# ---------------------------------------------------------------------------------- inputs


@dataclass(frozen=True)
class Inputs:
    """A prompt as the model takes it.

    input_ids       [1, P]
    pictures        what the prefill is given of the pictures; empty without any
    image, patch    [P], [P, 2]  as in the trace: -1 where there is none
    per_token       [1, P] each: what it is given of the tokens beside their numbers, 0 for text
    """

    input_ids: torch.Tensor
    pictures: dict[str, torch.Tensor]
    image: np.ndarray
    patch: np.ndarray
    per_token: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def modality(self) -> np.ndarray:
        return np.where(self.image == NO_IMAGE, TEXT, IMAGE)

    @property
    def pixel_values(self) -> torch.Tensor | None:
        """As the vision tower takes them, or None without pictures."""
        return self.pictures.get("pixel_values")

    def beside(self, tokens: int) -> dict[str, torch.Tensor]:
        """What the model is given beside so many tokens, of which those after the prompt are
        text.
        """
        more = tokens - self.input_ids.shape[1]
        per_token = {
            key: torch.nn.functional.pad(numbers, (0, more))
            for key, numbers in self.per_token.items()
        }
        return self.pictures | per_token


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


def patch_map(image: np.ndarray, grids: Grids) -> np.ndarray:
    """Patch row and column of each token, [P, 2], -1 -1 where there is none.

    grids  rows and columns of each picture

    A picture with rows x columns tokens is a grid, row-major; one more token than that is a
    class token before the grid. Any other number has no grid.
    """
    patch = np.full((len(image), 2), -1)
    for number, (rows, columns) in enumerate(grids):
        tokens = np.flatnonzero(image == number)
        grid = tokens[len(tokens) - rows * columns :] if len(tokens) > rows * columns else tokens
        if len(grid) == rows * columns and len(tokens) - len(grid) <= 1:
            patch[grid] = np.stack(np.divmod(np.arange(rows * columns), columns), axis=1)
    return patch


@torch.no_grad()
def prepare(model: PreTrainedModel, processor: Any, prompt: Prompt) -> Inputs:
    """Tokenize one prompt, alone, never padded.

    processor  the model's processor when the prompt has pictures, else its tokenizer will do
    raises PromptError when pictures and image tokens do not fit together
    """
    if prompt.images and not hasattr(model.config, "vision_config"):
        pictures = "1 picture" if len(prompt.images) == 1 else f"{len(prompt.images)} pictures"
        raise PromptError(f"prompt {prompt.name}: has {pictures}, but the model takes none")
    batch = _tokenized(processor, prompt)
    if "attention_mask" in batch and not bool(batch["attention_mask"].all()):
        raise PromptError(f"prompt {prompt.name}: the tokenizer padded it; padding is not recorded")
    input_ids = batch["input_ids"].to(model.device)
    if input_ids.shape[1] == 0:
        raise PromptError(f"prompt {prompt.name}: has no tokens")
    features: list[int] = []
    grids: Grids = []
    family = _family_of(model, batch, prompt)
    pictures: dict[str, torch.Tensor] = {}
    per_token: dict[str, torch.Tensor] = {}
    if prompt.images and family is not None:
        pictures = {key: batch[key].to(model.device) for key in family.keys}
        pictures["pixel_values"] = pictures["pixel_values"].to(model.dtype)
        per_token = {key: batch[key].to(model.device) for key in family.per_token}
        output = model.get_image_features(**pictures)
        features = [len(one) for one in getattr(output, "pooler_output", output)]
        if len(features) != len(prompt.images):
            raise PromptError(
                f"prompt {prompt.name}: the processor made {len(features)} pictures of "
                f"{len(prompt.images)}, which is not recorded; turn its cutting of pictures off"
            )
        grids = family.grids(model.config, pictures)
    image_token_id = getattr(model.config, "image_token_id", None)
    if image_token_id is None:
        image = np.full(input_ids.shape[1], NO_IMAGE)
    else:
        try:
            image = image_map(input_ids[0].tolist(), image_token_id, features)
        except PromptError as error:
            raise PromptError(f"prompt {prompt.name}: {error}") from None
    return Inputs(input_ids, pictures, image, patch_map(image, grids), per_token)


def _tokenized(processor: Any, prompt: Prompt) -> Any:
    """raises PromptError when the processor refuses the prompt"""
    options = {} if prompt.special_tokens else {"add_special_tokens": False}
    try:
        if prompt.images:
            return processor(images=prompt.images, text=prompt.text, return_tensors="pt", **options)
        tokenizer = getattr(processor, "tokenizer", processor)
        return tokenizer(prompt.text, return_tensors="pt", **options)
    except Exception as error:  # a processor may raise anything
        raise PromptError(
            f"prompt {prompt.name}: the processor refused it: {reason(error)}"
        ) from None


_OF_THE_TEXT = {"input_ids", "attention_mask", "token_type_ids"}


def _family_of(model: PreTrainedModel, batch: Any, prompt: Prompt) -> PictureFamily | None:
    """None for a model without pictures.

    raises PromptError when the processor gives what the model's family does not take
    """
    family = PICTURE_FAMILIES.get(model.config.model_type)
    known = (*family.keys, *family.per_token) if family else ()
    unused = set(family.unused) if family else set()
    if unknown := sorted(batch.keys() - _OF_THE_TEXT - set(known) - unused):
        raise PromptError(
            f"prompt {prompt.name}: the processor also gives {', '.join(unknown)}, which is not "
            f"recorded; expected {', '.join(known) or 'none'} for {model.config.model_type}"
        )
    return family
