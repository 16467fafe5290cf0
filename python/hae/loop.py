"""A policy deciding inside a running transformers decoder; hae.hf is its face."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel

from hae import _engine
from hae.capture import (
    IMPLEMENTATIONS,
    NEEDED,
    AttentionRule,
    CaptureError,
    attention_function,
    dispatched_to,
    implementation_in_use,
    probe,
    refuse_compiled,
    refuse_inexpressible,
)
from hae.comparison import Run
from hae.decoder import cache_name, decoder_of, layers_of, refuse_in_loop, shape_of
from hae.evicting_cache import (
    ClosedLoopError,
    EvictingCache,
    EvictingLayer,
    decode_mask,
    prefill_mask,
)

if TYPE_CHECKING:
    from hae.comparison import AnyPolicy

# What a decoder layer is given for each token beside its hidden state -> the axis of the tokens.
_PER_TOKEN = {"position_embeddings": -2, "position_ids": -1}


class Loop:
    """One sequence with one policy. `cache` goes to the model; `run()` is what became of it."""

    def __init__(
        self,
        model: PreTrainedModel,
        policy: AnyPolicy,
        rule: AttentionRule,
        prompt: int,
        image: list[int],
        max_new_tokens: int,
        name: str,
        nan: str,
    ) -> None:
        decoder = decoder_of(model)
        shape = shape_of(decoder)
        self._policy = policy
        self._prompt = prompt
        self._window = rule.window
        self._cache_name = cache_name(model)
        self._engine = _engine.ClosedLoop(
            policy,
            name=name,
            layers=shape.layers,
            query_heads=shape.query_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            prompt=prompt,
            tokens=prompt + max_new_tokens - 1,  # the last one is never fed back
            scale=rule.scale,
            image=image,
            window=rule.window,
            element_bytes=torch.finfo(decoder.dtype).bits // 8,
            nan=nan,
        )
        lanes = shape.kv_heads if self._engine.lanes == "kv_head" else 1
        self.cache = EvictingCache(shape.layers, lanes)
        self._evicted = [0] * shape.layers
        self._present = np.arange(prompt)  # in the layer whose prefill it is
        self._run: Run | None = None

    @property
    def as_cache(self) -> dict[str, EvictingCache]:
        """`**loop.as_cache`: the cache by the name that the model takes."""
        return {self._cache_name: self.cache}

    def run(self) -> Run:
        """Ends the loop: its log, and metrics of the evicting model's own rows.

        Missed mass is what a row would have given to evicted tokens, had they stayed until then. A
        token pruned within a layer's prefill has no key there and is in no figure of that layer.
        """
        if self._run is None:
            self._run = Run(self._engine.finish())
        return self._run

    # ------------------------------------------------------------------- called while it runs

    def enter_layer(self, layer: int, given: tuple, options: dict) -> tuple[tuple, dict] | None:
        """Before a decoder layer: tells the cache whose keys will come. In the prefill, drops what
        was pruned within it from the hidden states, so that nothing is computed for it.

        returns the layer's arguments when they change
        """
        cache: EvictingLayer = self.cache.layers[layer]
        hidden = given[0] if given else options["hidden_states"]
        if cache.seen:
            if hidden.shape[1] != 1:
                self._refuse_rows(hidden.shape[1], "a step", 1)
            cache.enter(np.array([cache.seen]), cache.seen + 1)
            return None
        if hidden.shape[1] != len(self._present):
            self._refuse_rows(hidden.shape[1], "a prefill", len(self._present))
        before, self._present = self._present, self._present_in(layer)
        cache.enter(self._present, self._prompt)
        if len(self._present) == self._prompt:
            return None
        hidden = _taken(hidden, 1, np.searchsorted(before, self._present))
        options = {name: one for name, one in options.items() if name != "hidden_states"}
        self._refuse_unknown_tensors(given[1:], options)
        for name in _PER_TOKEN.keys() & options.keys():
            options[name] = _taken(options[name], _PER_TOKEN[name], self._present)
        return (hidden, *given[1:]), options

    def _refuse_rows(self, found: int, what: str, expected: int) -> None:
        raise ClosedLoopError(
            f"{what} of {found} rows, expected {expected}: a closed loop takes the prompt in one "
            "call, then one token a call (no chunked prefill, no assisted decoding)"
        )

    def _present_in(self, layer: int) -> np.ndarray:
        """Positions that the layer's prefill computes, ascending."""
        present = np.setdiff1d(np.arange(self._prompt), self._engine.absent(layer))
        returned = np.setdiff1d(present, self._present)
        if len(returned):
            raise ClosedLoopError(
                f"{self._policy}: token {returned[0]} left within the prefill of layer {layer - 1} "
                f"and not of layer {layer}, but a model computes no more of it; evict it from all "
                "later layers, or with effect after"
            )
        if self._prompt - 1 not in present:
            raise ClosedLoopError(
                f"{self._policy}: the last prompt token left within the prefill of layer {layer}, "
                "but the first new token is computed from it; keep it, or evict with effect after"
            )
        return present

    def _refuse_unknown_tensors(self, given: tuple, options: dict) -> None:
        """What a layer is given beside the table above may also be one a token, or may not."""
        known = {*_PER_TOKEN, "attention_mask"}  # the mask is cut where attention is computed
        beside = {f"argument {i}": one for i, one in enumerate(given, start=1)} | options
        for name, one in beside.items():
            if torch.is_tensor(one) and name not in known:
                raise ClosedLoopError(
                    f"{self._policy}: evicts within the prefill, but this model's layers also take "
                    f"{name}, of which nothing is known; evict with effect after"
                )

    def attend(self, implementation: str, module, query, key, value, mask, options):
        """One layer's attention over what it holds; then the policy decides."""
        refuse_inexpressible(module, query, options)
        layer = module.layer_idx
        cache: EvictingLayer = self.cache.layers[layer]
        if key is not cache.keys:
            raise ClosedLoopError(
                f"layer {layer} attends to other keys than those of the loop's cache: give the "
                "model **loop.as_cache"
            )
        prefill = cache.seen == self._prompt
        if prefill:
            self._refuse_other_mask(layer, mask)
            cut = prefill_mask(mask, self._present)
        else:
            cut = decode_mask(mask, cache, query)
        compute = attention_function(module, implementation)
        output, probabilities = compute(module, query, key, value, cut, **options)
        tell = self._engine.prefill if prefill else self._engine.step
        rows = query.shape[2]
        tell(layer, *(_numbers(one) for one in (query, key[:, :, -rows:], value[:, :, -rows:])))
        # A decision in the prefill may evict from earlier layers too.
        for changed in range(layer + 1) if prefill else (layer,):
            self._compact(changed)
        return output, probabilities

    def _refuse_other_mask(self, layer: int, mask: torch.Tensor | None) -> None:
        """The policy and the metrics see every key that the announced rule allows."""
        if mask is None:
            return
        window = self._window[layer] or self._prompt
        rule = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device)
        rule = rule.tril().triu(1 - window)
        seen = mask if mask.dtype == torch.bool else mask == 0
        if not torch.equal(seen[0, 0], rule):
            raise ClosedLoopError(
                f"layer {layer}: the model's mask is not causal with a window of {window}; a "
                "closed loop takes a prompt without padding, each token of which sees all before it"
            )

    def _compact(self, layer: int) -> None:
        """Gives back the memory of what has been evicted from a layer."""
        evicted = self._engine.changes(layer)
        if evicted != self._evicted[layer]:
            self._evicted[layer] = evicted
            self.cache.layers[layer].retain(self._engine.residents(layer))


def _taken(value: Any, axis: int, kept: np.ndarray) -> Any:
    """These entries of a tensor's axis, or of that of each tensor in a tuple."""
    if isinstance(value, tuple):
        return tuple(_taken(one, axis, kept) for one in value)
    if value is None or len(kept) == value.shape[axis]:
        return value
    return value.index_select(axis, torch.from_numpy(kept).to(value.device))


def _numbers(tensor: torch.Tensor) -> np.ndarray:
    """[heads, rows, head_dim] float32 in this process's memory."""
    return tensor[0].detach().to("cpu", torch.float32).contiguous().numpy()


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
    raises          UnsupportedModel, CaptureError, ClosedLoopError for a model or a use that does
                    not fit; ConfigError for a bad policy
    """
    if prompt < 1 or max_new_tokens < 1:
        raise ClosedLoopError(
            f"a prompt of {prompt} tokens and {max_new_tokens} new ones; expected 1 or more of each"
        )
    image = [-1] * prompt if image is None else [int(i) for i in image]
    if len(image) != prompt:
        raise ClosedLoopError(f"image has {len(image)} entries, expected prompt = {prompt}")
    decoder = decoder_of(model)
    refuse_in_loop(model)
    layers = layers_of(decoder)
    refuse_compiled(model)
    implementation = implementation_in_use(decoder)
    if implementation not in IMPLEMENTATIONS:
        raise CaptureError(f"attention implementation in use: {implementation}; {NEEDED} needed")
    rule = probe(decoder, implementation)
    loop = Loop(model, policy, rule, prompt, image, max_new_tokens, name, nan)

    def attention(module, query, key, value, mask, **options):
        return loop.attend(implementation, module, query, key, value, mask, options)

    with ExitStack() as undo:
        undo.enter_context(dispatched_to(decoder, "hae_closed_loop", attention, implementation))
        for number, layer in enumerate(layers):
            hook = layer.register_forward_pre_hook(
                lambda _, given, options, number=number: loop.enter_layer(number, given, options),
                with_kwargs=True,
            )
            undo.callback(hook.remove)
        yield loop
