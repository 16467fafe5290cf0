"""Let a model generate: greedily, several prompts at a time, or along the best path of beams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from transformers import GenerationConfig, PreTrainedModel

from hae.capture import CaptureError
from hae.decoder import cache_name, end_tokens_of
from hae.prompts import Inputs


class Recorded(Protocol):
    """What follows one row of the batch."""

    def begin_step(self, rows: int) -> None: ...
    def end_step(self) -> None: ...
    def finish(self) -> None: ...


def paddings(batch: Sequence[Inputs]) -> list[int]:
    """Tokens that stand before each prompt so that all of them end together."""
    lengths = [inputs.input_ids.shape[1] for inputs in batch]
    return [max(lengths) - length for length in lengths]


def generate(
    model: PreTrainedModel,
    names: Sequence[str],
    batch: Sequence[Inputs],
    rows: Sequence[Recorded],
    max_new_tokens: int,
    given: Sequence[Sequence[int]] | None = None,
    on_step: Callable[[int], None] = lambda generating: None,
) -> list[list[int]]:
    """Greedy decoding, or along given tokens. Returns the tokens of each prompt and those that
    follow it, the last of which was not fed back.

    A prompt alone is neither padded nor masked. Several are padded on the left, where the mask
    hides the padding; positions count from each prompt's own first token.

    on_step  gets the number of prompts that got a token
    raises   CaptureError when the model generates an image token and would be fed it
    """
    ids = [inputs.input_ids[0].tolist() for inputs in batch]
    end_tokens = end_tokens_of(model)
    generating = list(range(len(batch)))
    name = cache_name(model)
    fed = _prefill(model, batch)
    _forget_positions(model)
    for step in range(max_new_tokens):
        for row in generating:
            rows[row].begin_step(1 if step else len(ids[row]))
        output = _forward(model, fed)
        tokens = output.logits[:, -1].argmax(dim=-1).tolist()
        for row in generating:
            rows[row].end_step()
            if given is not None:
                tokens[row] = given[row][step]
            ids[row].append(tokens[row])
        on_step(len(generating))
        for row in tuple(generating):
            ended = tokens[row] in end_tokens or step + 1 == max_new_tokens
            if ended or (given is not None and step + 1 == len(given[row])):
                rows[row].finish()
                generating.remove(row)
            else:
                _refuse_image_token(model, names[row], tokens[row], step + 1)
        if not generating:
            break
        fed = _next(fed, tokens) | {name: getattr(output, name)}
    return ids


@torch.no_grad()
def _forward(model: PreTrainedModel, fed: dict[str, Any]) -> Any:
    return model(**fed, use_cache=True, logits_to_keep=1)


def _refuse_image_token(model: PreTrainedModel, name: str, token: int, number: int) -> None:
    if token == getattr(model.config, "image_token_id", None):
        raise CaptureError(
            f"prompt {name}: the model generated an image token (id {token}) as new token "
            f"{number}, for which there is no picture; record with --max-new-tokens {number}, or "
            "without this prompt"
        )


def _forget_positions(model: PreTrainedModel) -> None:
    """Models that number a picture's tokens in three dimensions keep what that took for the tokens
    after it, also when the next prompt has no picture.
    """
    if hasattr(getattr(model, "model", None), "rope_deltas"):
        model.model.rope_deltas = None


def _prefill(model: PreTrainedModel, batch: Sequence[Inputs]) -> dict[str, Any]:
    if len(batch) == 1:
        return {"input_ids": batch[0].input_ids, **batch[0].beside(batch[0].input_ids.shape[1])}
    # Any token will do, as the mask hides it, but no image token: for it there is no picture.
    padding_token = 0 if getattr(model.config, "image_token_id", None) != 0 else 1
    widths = paddings(batch)

    def padded(tokens: torch.Tensor, width: int, value: int) -> torch.Tensor:
        return torch.nn.functional.pad(tokens, (width, 0), value=value)

    pairs = [(inputs.input_ids, width) for inputs, width in zip(batch, widths, strict=True)]
    mask = torch.cat([padded(torch.ones_like(ids), width, 0) for ids, width in pairs])
    fed = {
        "input_ids": torch.cat([padded(ids, width, padding_token) for ids, width in pairs]),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
    }
    with_pictures = [inputs for inputs in batch if inputs.pictures]
    if not with_pictures:
        return fed
    for key in with_pictures[0].pictures:
        fed[key] = _joined([inputs.pictures[key] for inputs in with_pictures])
    for key in with_pictures[0].per_token:
        numbers = [i.per_token.get(key, torch.zeros_like(i.input_ids)) for i in batch]
        fed[key] = torch.cat([padded(*pair, 0) for pair in zip(numbers, widths, strict=True)])
    return fed


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The pictures of all prompts. Where each is cut into parts, [picture, part, channel, row,
    column], all get as many parts as the one of most; the model takes no more than it has.
    """
    if parts[0].ndim < 5:
        return torch.cat(list(parts))
    most = max(part.shape[1] for part in parts)
    no_parts = (0,) * 6
    return torch.cat(
        [torch.nn.functional.pad(part, (*no_parts, 0, most - part.shape[1])) for part in parts]
    )


def _next(fed: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
    """What a decode step is given beside the cache."""
    ids = torch.tensor(tokens, device=fed["input_ids"].device)[:, None]
    if "attention_mask" not in fed:
        return {"input_ids": ids}
    mask = fed["attention_mask"]
    return {
        "input_ids": ids,
        "attention_mask": torch.cat([mask, torch.ones_like(ids)], dim=1),
        "position_ids": fed["position_ids"][:, -1:] + 1,
    }


@torch.no_grad()
def best_of_beams(
    model: PreTrainedModel, inputs: Inputs, max_new_tokens: int, beams: int
) -> list[int]:
    """The new tokens of the winning path of transformers' beam search, its end token included.

    The folder's generation_config.json decides on end tokens and on nothing else.
    """
    end_tokens = sorted(end_tokens_of(model))
    prompt = inputs.input_ids.shape[1]
    plain = GenerationConfig(
        num_beams=beams,
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=end_tokens or None,
        pad_token_id=end_tokens[0] if end_tokens else 0,
    )
    before = model.generation_config
    model.generation_config = plain  # generate fills what is not set from here
    try:
        found = model.generate(
            input_ids=inputs.input_ids,
            attention_mask=torch.ones_like(inputs.input_ids),
            **inputs.beside(prompt),
        )
    finally:
        model.generation_config = before
    path = found[0, prompt:].tolist()
    ends = [place for place, token in enumerate(path) if token in end_tokens]
    return path[: ends[0] + 1] if ends else path
