"""Closed loop: a policy evicts inside a running transformers model.

    with hae.hf.evicting(model, "hae:budget=64", prompt=P, image=image, max_new_tokens=80) as loop:
        output = model.generate(**inputs, max_new_tokens=80, do_sample=False, **loop.as_cache)
    run = loop.run()

The policy is any of the table or one written in Python; it decides through the same engine objects
as in a replay, and the run has the same log and metrics. Original positions are kept, per layer and
per KV head; what is pruned within the prefill is dropped from the hidden states; memory is given
back when tokens are evicted. Batch of one, on a CPU or a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from hae.capture import AttentionCall, implementation_in_use, intercepted
from hae.comparison import Run
from hae.decoder import cache_name, decoder_of, end_tokens_of, refuse_in_loop, shape_of
from hae.evicting_cache import ClosedLoopError, EvictingCache
from hae.loop import Loop, evicting
from hae.sequences import sequence as sequence_of

if TYPE_CHECKING:
    from hae._engine import Sequence
    from hae.comparison import AnyPolicy

__all__ = [
    "ClosedLoopError",
    "EvictingCache",
    "Generated",
    "Loop",
    "Prepared",
    "evicting",
    "generate",
    "prepared",
    "recording",
    "teacher_forced",
]

# -------------------------------------------------------------------------------------- prompts


@dataclass(frozen=True)
class Prepared:
    """A prompt ready to be run many times: what comes before the decoder is computed once.

    fed    what the model's forward is given for the prompt
    image  [P] picture of each token, -1 for text
    """

    fed: dict[str, torch.Tensor]
    image: np.ndarray

    @property
    def prompt(self) -> int:
        return len(self.image)


class _Captured(Exception):
    """Stops a forward pass when its decoder is reached."""


@torch.no_grad()
def prepared(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    pixel_values: torch.Tensor | None = None,
    image: Tokens[int] | np.ndarray | None = None,
) -> Prepared:
    """Runs the vision tower, so that policies that are compared share its output.

    input_ids     [1, P]
    pixel_values  as the model takes them; None without pictures
    image         [P] picture of each token, -1 for text; default all text
    raises        UnsupportedModel for pictures of another family than LLaVA
    """
    refuse_in_loop(model)
    image = np.full(input_ids.shape[1], -1) if image is None else np.asarray(image)
    if pixel_values is None:
        return Prepared({"input_ids": input_ids}, image)
    embeddings: list[torch.Tensor] = []

    def capture(_, given: tuple, options: dict) -> None:
        embeddings.append(options["inputs_embeds"])
        raise _Captured

    hook = decoder_of(model).register_forward_pre_hook(capture, with_kwargs=True)
    try:
        model(input_ids=input_ids, pixel_values=pixel_values, use_cache=False)
    except _Captured:
        pass
    finally:
        hook.remove()
    return Prepared({"inputs_embeds": embeddings[0].clone()}, image)


@dataclass(frozen=True)
class Generated:
    """What came of one sequence.

    tokens  [n] the answer: as generated, or as it was forced
    logits  [n, vocabulary] float32; row i predicts tokens[i]
    run     None with the full cache
    """

    tokens: list[int]
    logits: torch.Tensor
    run: Run | None


# (number of the token, logits [vocabulary] that predict it) -> (the token, whether it is the last)
Choice = Callable[[int, torch.Tensor], tuple[int, bool]]


@torch.no_grad()
def _decode(
    model: PreTrainedModel, prompt: Prepared, cache: Cache, most: int, choose: Choice
) -> tuple[list[int], torch.Tensor]:
    """Feeds what `choose` returns, until it says that was the last or `most` tokens are there."""
    name = cache_name(model)
    tokens: list[int] = []
    rows: list[torch.Tensor] = []
    fed = prompt.fed
    while True:
        output = model(**fed, **{name: cache}, use_cache=True, logits_to_keep=1)
        rows.append(output.logits[0, -1].float())
        token, last = choose(len(tokens), rows[-1])
        tokens.append(token)
        if last or len(tokens) == most:
            return tokens, torch.stack(rows)
        fed = {"input_ids": torch.tensor([[token]], device=model.device)}


def _run(
    model: PreTrainedModel,
    prompt: Prepared,
    policy: AnyPolicy | None,
    most: int,
    choose: Choice,
    name: str,
) -> Generated:
    if most < 1:
        raise ClosedLoopError("an answer of 0 tokens, expected 1 or more")
    if policy is None:
        tokens, logits = _decode(model, prompt, DynamicCache(), most, choose)
        return Generated(tokens, logits, None)
    loop_of = evicting(
        model, policy, prompt=prompt.prompt, image=prompt.image, max_new_tokens=most, name=name
    )
    with loop_of as loop:
        tokens, logits = _decode(model, prompt, loop.cache, most, choose)
    return Generated(tokens, logits, loop.run())


class _Recorder:
    """The new rows of every attention call, in memory."""

    def __init__(self, layers: int) -> None:
        self.rows: list[dict[str, list[np.ndarray]]] = [
            {"q": [], "k": [], "v": []} for _ in range(layers)
        ]
        self.scale = 1.0
        self.window = [0] * layers

    def observe(self, call: AttentionCall) -> None:
        new = slice(call.key.shape[1] - call.query.shape[1], None)
        self.scale = call.scale
        self.window[call.layer] = call.window
        for name, tensor in (("q", call.query), ("k", call.key[:, new]), ("v", call.value[:, new])):
            self.rows[call.layer][name].append(tensor.detach().to("cpu", torch.float32).numpy())

    def layers(self, name: str) -> list[np.ndarray]:
        return [np.concatenate(layer[name], axis=1) for layer in self.rows]


@contextmanager
def recording(
    model: PreTrainedModel, prompt: Prepared, *, name: str = "sequence", group: str = ""
) -> Iterator[Callable[[], Sequence]]:
    """While the block runs, what the model attends to is kept in memory. Called after the model has
    run, what the block gets returns the recorded hae.Sequence, float32 whatever the model's type.
    """
    decoder = decoder_of(model)
    recorder = _Recorder(shape_of(decoder).layers)

    def recorded() -> Sequence:
        queries = recorder.layers("q")
        image = np.pad(prompt.image, (0, queries[0].shape[1] - prompt.prompt), constant_values=-1)
        return sequence_of(
            q=queries,
            k=recorder.layers("k"),
            v=recorder.layers("v"),
            prompt=prompt.prompt,
            image=image,
            window=recorder.window,
            scale=recorder.scale,
            element_bytes=torch.finfo(decoder.dtype).bits // 8,
            name=name,
            group=group,
        )

    with intercepted(decoder, implementation_in_use(decoder), recorder.observe):
        yield recorded


def generate(
    model: PreTrainedModel,
    prompt: Prepared,
    policy: AnyPolicy | None,
    *,
    max_new_tokens: int,
    name: str = "sequence",
) -> Generated:
    """Free-running greedy decoding up to the model's end token, that included. policy None: with
    the full cache.
    """
    end_tokens = end_tokens_of(model)

    def choose(_: int, logits: torch.Tensor) -> tuple[int, bool]:
        token = int(logits.argmax())
        return token, token in end_tokens

    return _run(model, prompt, policy, max_new_tokens, choose, name)


def teacher_forced(
    model: PreTrainedModel,
    prompt: Prepared,
    policy: AnyPolicy | None,
    answer: Tokens[int],
    *,
    name: str = "sequence",
) -> Generated:
    """Feeds a given answer, whatever the model would have said. policy None: with the full cache.

    answer  one token or more; the last one is predicted and not fed
    """
    forced = [int(token) for token in answer]

    def choose(step: int, _: torch.Tensor) -> tuple[int, bool]:
        return forced[step], step + 1 == len(forced)

    return _run(model, prompt, policy, len(forced), choose, name)
