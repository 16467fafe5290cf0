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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from hae import _engine
from hae.capture import (
    IMPLEMENTATIONS,
    NEEDED,
    AttentionCall,
    CaptureError,
    attention_function,
    dispatched_to,
    implementation_in_use,
    intercepted,
    refuse_compiled,
    refuse_inexpressible,
    scale_of,
)
from hae.comparison import Run
from hae.decoder import cache_name, decoder_of, end_tokens_of, shape_of
from hae.evicting_cache import EvictingCache, EvictingLayer, mask_of
from hae.sequences import sequence as sequence_of

if TYPE_CHECKING:
    from hae._engine import Sequence
    from hae.comparison import AnyPolicy

NAME = "hae_closed_loop"


class ClosedLoopError(Exception):
    """The model, or how it is run, does not fit a closed loop. The message says why."""


class Loop:
    """One sequence with one policy. `cache` goes to the model; `run()` is what became of it."""

    def __init__(
        self,
        decoder: PreTrainedModel,
        policy: AnyPolicy,
        prompt: int,
        image: Tokens[int] | np.ndarray | None,
        max_new_tokens: int,
        name: str,
        nan: str,
    ) -> None:
        if prompt < 1 or max_new_tokens < 1:
            raise ClosedLoopError(
                f"a prompt of {prompt} tokens and {max_new_tokens} new ones; expected 1 or more of each"
            )
        image = [-1] * prompt if image is None else [int(i) for i in image]
        if len(image) != prompt:
            raise ClosedLoopError(f"image has {len(image)} entries, expected prompt = {prompt}")
        self._shape = shape_of(decoder)
        self._policy = policy
        self._prompt = prompt
        self._announced: dict[str, Any] = {
            "name": name,
            "layers": self._shape.layers,
            "query_heads": self._shape.query_heads,
            "kv_heads": self._shape.kv_heads,
            "head_dim": self._shape.head_dim,
            "prompt": prompt,
            "tokens": prompt + max_new_tokens - 1,  # the last one is never fed back
            "image": image,
            "window": _windows(decoder),
            "element_bytes": torch.finfo(decoder.dtype).bits // 8,
            "nan": nan,
        }
        self._engine: _engine.ClosedLoop | None = None
        self._evicted = [0] * self._shape.layers
        self._present = np.arange(prompt)
        # The lanes are known when the engine is, at the first call; the cache must be there before.
        lanes = _lanes_of(policy)
        self.cache = EvictingCache(
            self._shape.layers, self._shape.kv_heads if lanes == "kv_head" else 1
        )

    @property
    def as_cache(self) -> dict[str, EvictingCache]:
        """`**loop.as_cache`: the cache by the name that model.generate takes."""
        return {"past_key_values": self.cache}

    def run(self) -> Run:
        """Ends the loop: its log, and metrics of the evicting model's own rows.

        Missed mass is what a row would have given to evicted tokens, had they stayed until then. A
        token pruned within a layer's prefill has no key there and is in no figure of that layer.
        """
        if self._engine is None:
            raise ClosedLoopError("the model has not run yet")
        return Run(self._engine.finish())

    # ------------------------------------------------------------------- called while it runs

    def enter_layer(self, layer: int, given: tuple, options: dict) -> tuple[tuple, dict]:
        """Before a decoder layer: drops what was pruned within its prefill from the hidden states.

        returns the layer's arguments
        """
        hidden = given[0] if given else options["hidden_states"]
        cache: EvictingLayer = self.cache.layers[layer]
        if cache.seen:
            self._expect(
                hidden.shape[1] == 1, f"{hidden.shape[1]} rows in one step after the prefill", 1
            )
            cache.enter(np.array([cache.seen]), cache.seen + 1)
            return given, options
        if layer == 0:
            self._expect(
                hidden.shape[1] == self._prompt,
                f"a prefill of {hidden.shape[1]} rows",
                self._prompt,
            )
            self._present = np.arange(self._prompt)
        else:
            before = self._present
            self._present = np.setdiff1d(np.arange(self._prompt), self._engine.absent(layer))
            self._refuse_impossible(before, layer)
            if len(self._present) < len(before):
                kept = torch.as_tensor(np.searchsorted(before, self._present), device=hidden.device)
                hidden = hidden.index_select(1, kept)
            if len(self._present) < self._prompt:
                options = options | self._cut(options, hidden.device)
        cache.enter(self._present, self._prompt)
        return (hidden, *given[1:]), {k: v for k, v in options.items() if k != "hidden_states"}

    def _cut(self, options: dict, device: torch.device) -> dict:
        """What comes along for every token of the prompt, cut to the tokens that are present."""
        kept = torch.as_tensor(self._present, device=device)
        cut: dict[str, Any] = {}
        if options.get("position_embeddings") is not None:
            cut["position_embeddings"] = tuple(
                part.index_select(-2, kept) for part in options["position_embeddings"]
            )
        if options.get("position_ids") is not None:
            cut["position_ids"] = options["position_ids"].index_select(-1, kept)
        return cut

    def _refuse_impossible(self, before: np.ndarray, layer: int) -> None:
        if returned := sorted(set(self._present) - set(before)):
            raise ClosedLoopError(
                f"{self._policy}: token {returned[0]} left within the prefill of layer {layer - 1} "
                f"and not of layer {layer}, but a model computes no more of it; evict it from all "
                "later layers, or with effect after"
            )
        if self._prompt - 1 not in self._present:
            raise ClosedLoopError(
                f"{self._policy}: the last prompt token left within the prefill of layer {layer}, but "
                "it is what the first new token is computed from; keep it, or evict with effect after"
            )

    def _expect(self, holds: bool, found: str, expected: int) -> None:
        if not holds:
            raise ClosedLoopError(
                f"{found}, expected {expected}: a closed loop takes the prompt in one call, then one "
                "token a call (no chunked prefill, no assisted decoding)"
            )

    def attend(self, implementation: str, module, query, key, value, mask, options):
        """One layer's attention over what it holds; then the policy decides."""
        refuse_inexpressible(module, query, options)
        layer = module.layer_idx
        rows = query.shape[2]
        prefill = (
            rows > 1 or self.cache.layers[layer].seen == self._prompt and not self._decoding(layer)
        )
        cut = mask_of(
            mask,
            self._present if prefill and len(self._present) < self._prompt else None,
            self.cache.layers[layer].positions,
            query.shape[1],
            query.dtype,
        )
        compute = attention_function(module, implementation)
        output, probabilities = compute(module, query, key, value, cut, **options)
        if self._engine is None:
            self._engine = _engine.ClosedLoop(
                self._policy, scale=scale_of(query, options), **self._announced
            )
        new = (query, key[:, :, -rows:], value[:, :, -rows:])
        tell = self._engine.prefill if prefill else self._engine.step
        tell(layer, *(_numbers(one) for one in new))
        for changed in range(layer + 1) if prefill else (layer,):
            self._compact(changed)
        return output, probabilities

    def _decoding(self, layer: int) -> bool:
        return self.cache.layers[layer].seen > self._prompt

    def _compact(self, layer: int) -> None:
        """Gives back the memory of what has been evicted from a layer."""
        evicted = self._engine.changes(layer)
        if evicted != self._evicted[layer]:
            self._evicted[layer] = evicted
            self.cache.layers[layer].retain(self._engine.residents(layer))


def _numbers(tensor: torch.Tensor) -> np.ndarray:
    """[heads, rows, head_dim] float32 in this process's memory."""
    return tensor[0].detach().to("cpu", torch.float32).contiguous().numpy()


def _lanes_of(policy: AnyPolicy) -> str:
    return (_engine.NativePolicy(policy) if isinstance(policy, str) else policy).lanes


def _windows(decoder: PreTrainedModel) -> list[int]:
    """[layers] sliding windows, 0 none."""
    config = decoder.config
    window = getattr(config, "sliding_window", None) or 0
    if getattr(config, "use_sliding_window", True) is False:
        window = 0
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


@contextmanager
def evicting(
    model: PreTrainedModel,
    policy: AnyPolicy,
    *,
    prompt: int,
    max_new_tokens: int,
    image: Tokens[int] | np.ndarray | None = None,
    name: str = "sequence",
    nan: str = "error",
) -> Iterator[Loop]:
    """While the block runs, the model evicts from `loop.cache` what the policy decides.

    prompt          P, tokens of the prompt (visual ones included)
    max_new_tokens  the most that will be generated
    image           [P] picture of each token, -1 for text; default all text
    name            of the sequence, in the log's run
    nan             "error", or "lowest": a weight that is NaN or infinite counts as 0
    raises          UnsupportedModel, CaptureError, ClosedLoopError for a model or a use that does not
                    fit; ConfigError for a bad policy
    """
    decoder = decoder_of(model)
    refuse_compiled(model)
    implementation = implementation_in_use(decoder)
    if implementation not in IMPLEMENTATIONS:
        raise CaptureError(f"attention implementation in use: {implementation}; {NEEDED} needed")
    loop = Loop(decoder, policy, prompt, image, max_new_tokens, name, nan)

    def attention(module, query, key, value, mask, **options):
        return loop.attend(implementation, module, query, key, value, mask, options)

    with ExitStack() as undo:
        undo.enter_context(dispatched_to(decoder, NAME, attention, implementation))
        for number, layer in enumerate(getattr(decoder, "model", decoder).layers):
            hook = layer.register_forward_pre_hook(
                lambda _, given, options, number=number: loop.enter_layer(number, given, options),
                with_kwargs=True,
            )
            undo.callback(hook.remove)
        yield loop


# ------------------------------------------------------------------------------ greedy decoding


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
    """
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


@torch.no_grad()
def _decode(
    model: PreTrainedModel, prompt: Prepared, cache: Any, most: int, choose: Any
) -> tuple[list[int], torch.Tensor]:
    """Feeds what `choose(step, logits)` returns, until that is None or `most` tokens are there."""
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
    choose: Any,
    name: str,
) -> Generated:
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

    def observe(self, call: AttentionCall) -> None:
        new = slice(call.key.shape[1] - call.query.shape[1], None)
        self.scale = call.scale
        for name, tensor in (("q", call.query), ("k", call.key[:, new]), ("v", call.value[:, new])):
            self.rows[call.layer][name].append(tensor.detach().to("cpu", torch.float32).numpy())

    def layers(self, name: str) -> list[np.ndarray]:
        return [np.concatenate(layer[name], axis=1) for layer in self.rows]


@contextmanager
def recording(
    model: PreTrainedModel, prompt: Prepared, *, name: str = "sequence", group: str = ""
) -> Iterator[Callable[[], Sequence]]:
    """While the block runs, what the model attends to is kept in memory. Called after the model has
    run, what the block gets returns the recorded hae.Sequence: float32, whatever the model computes in.
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
            window=_windows(decoder),
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
    """Free-running greedy decoding up to the model's end token, that included. policy None: with the
    full cache.
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
    """Feeds a given answer, whatever the model would have said. policy None: with the full cache."""
    forced = list(answer)

    def choose(step: int, _: torch.Tensor) -> tuple[int, bool]:
        return forced[step], step + 1 == len(forced)

    return _run(model, prompt, policy, len(forced), choose, name)
