"""See the queries, keys and values of every attention call of a transformers decoder."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

IMPLEMENTATIONS = ("eager", "sdpa")
_NUMBERS = itertools.count()  # of registrations: models that run side by side share the registries
NEEDED = "attention dispatched through transformers' AttentionInterface (eager or sdpa)"


class CaptureError(Exception):
    """The model cannot be recorded, or its calls do not add up. The message says why."""


@dataclass(frozen=True)
class AttentionCall:
    """One call of one layer's attention, of one row of the batch.

    row            of the batch, counted from 0
    query          [query_heads, rows, head_dim]  after rotary embedding
    key, value     [kv_heads, keys, head_dim]     the cache and the new rows, which come last
    probabilities  [query_heads, rows, keys]      None when the implementation gives none
    scale          logit = scale * q . k
    window         0 none; W: a query sees key j only when query - j < W
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    probabilities: torch.Tensor | None
    scale: float
    window: int
    row: int = 0


def implementation_in_use(model: PreTrainedModel) -> str:
    """Name of the attention implementation that the model was loaded with."""
    return str(getattr(model.config, "_attn_implementation", None))


def attention_function(module: torch.nn.Module, implementation: str) -> Callable:
    """What computes a layer's attention under `implementation`."""
    if implementation != "eager":
        return ALL_ATTENTION_FUNCTIONS[implementation]
    # The eager function is the only one that each model file brings along.
    model_file = sys.modules[type(module).__module__]
    function = getattr(model_file, "eager_attention_forward", None)
    if function is None:
        raise CaptureError(f"{model_file.__name__} has no eager attention to call; {NEEDED} needed")
    return function


def refuse_inexpressible(
    module: torch.nn.Module, query: torch.Tensor, options: dict, batch: int = 1
) -> None:
    """raises CaptureError for attention whose rows a trace cannot express"""
    if options.get("softcap") is not None:
        raise CaptureError("the model uses logit soft-capping, which a trace cannot express")
    if options.get("s_aux") is not None:
        raise CaptureError(
            "the model has attention sinks that are not tokens, which a trace cannot express"
        )
    if getattr(module, "is_cross_attention", False):
        raise CaptureError("the model uses cross-attention, which a trace cannot express")
    if query.shape[0] != batch:
        raise CaptureError(
            f"attention over a batch of {query.shape[0]}, expected a batch of {batch}"
        )


def refuse_compiled(model: torch.nn.Module) -> None:
    """raises CaptureError when the model, or a part of it, went through torch.compile"""
    for module in model.modules():
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            raise CaptureError(
                f"the model is compiled (attention implementation in use: "
                f"{implementation_in_use(model)}), so its calls cannot be seen; load it again "
                f"without torch.compile: {NEEDED} needed"
            )


def scale_of(query: torch.Tensor, options: dict) -> float:
    """logit = scale * q . k"""
    scale = options.get("scaling")
    return query.shape[-1] ** -0.5 if scale is None else float(scale)


@contextmanager
def dispatched_to(
    decoder: PreTrainedModel, name: str, attention: Callable, implementation: str
) -> Iterator[None]:
    """While the block runs, `attention` computes every attention call of the decoder, with the
    masks that `implementation` (eager or sdpa) gets.

    The decoder's own implementation and transformers' registries are as before afterwards, also
    after an error.

    name    how the name of the implementation begins while the block runs
    raises  CaptureError when the decoder's attention is not dispatched through the interface
    """
    before = implementation_in_use(decoder)
    name = f"{name}_{next(_NUMBERS)}"
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[implementation])
    try:
        try:
            decoder.set_attn_implementation(name)
            dispatched = implementation_in_use(decoder) == name
        except (ValueError, KeyError, ImportError):
            dispatched = False
        if not dispatched:
            raise CaptureError(
                f"attention implementation in use: {before}, which gives nothing to record; "
                f"{NEEDED} needed"
            )
        yield
    finally:
        if implementation_in_use(decoder) == name:
            decoder.set_attn_implementation(before)
        # transformers has no call that takes a registration back.
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


@contextmanager
def intercepted(
    decoder: PreTrainedModel,
    implementation: str,
    observe: Callable[[AttentionCall], None],
    batch: int = 1,
) -> Iterator[None]:
    """While the block runs, `observe` gets every attention call of the decoder, once for each row
    of the batch.

    The calls compute what `implementation` (eager or sdpa) computes.

    raises CaptureError when the decoder's attention is not dispatched through the interface
    """

    def attention(module, query, key, value, attention_mask, **options):
        refuse_inexpressible(module, query, options, batch)
        function = attention_function(module, implementation)
        output, probabilities = function(module, query, key, value, attention_mask, **options)
        for row in range(batch):
            observe(
                AttentionCall(
                    layer=module.layer_idx,
                    query=query[row],
                    key=key[row],
                    value=value[row],
                    probabilities=None if probabilities is None else probabilities[row],
                    scale=scale_of(query, options),
                    window=int(options.get("sliding_window") or 0),
                    row=row,
                )
            )
        return output, probabilities

    with dispatched_to(decoder, f"hae_record_{implementation}", attention, implementation):
        yield


class CallCount:
    """Counts the attention calls: every layer must be seen exactly once a step."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._calls: Counter[tuple[int, int]] = Counter()

    def add(self, layer: int, step: int) -> None:
        self._calls[layer, step] += 1

    def check(self, steps: int) -> None:
        """Every (layer, step) of the first `steps` steps came once, and nothing else came.

        raises CaptureError listing the missing and the duplicate pairs
        """
        expected = {(layer, step) for step in range(steps) for layer in range(self._layers)}
        missing = sorted(expected - self._calls.keys(), key=lambda pair: pair[::-1])
        duplicate = sorted(
            (pair for pair, count in self._calls.items() if count > 1 or pair not in expected),
            key=lambda pair: pair[::-1],
        )
        if missing or duplicate:
            raise CaptureError(
                f"expected {len(expected)} (layer, step) records, each once; "
                f"missing: {_listed(missing)}; duplicate or unexpected: {_listed(duplicate)}"
            )


def _listed(pairs: list[tuple[int, int]], most: int = 20) -> str:
    if not pairs:
        return "none"
    text = ", ".join(str(pair) for pair in pairs[:most])
    return text if len(pairs) <= most else f"{text} and {len(pairs) - most} more"


@dataclass(frozen=True)
class AttentionRule:
    """How a decoder's layers attend.

    scale   logit = scale * q . k
    window  [layers] 0 none; W: a query sees key j only when query - j < W
    """

    scale: float
    window: list[int]


@torch.no_grad()
def probe(decoder: PreTrainedModel, implementation: str) -> AttentionRule:
    """One forward pass of one token, before anything is generated.

    raises CaptureError when the decoder's attention cannot be recorded, naming the
    implementation in use and the one needed, or when its shapes differ between layers
    """
    in_use = implementation_in_use(decoder)
    layers = decoder.config.num_hidden_layers
    count = CallCount(layers)
    shapes = set()
    windows = {}

    def observe(call: AttentionCall) -> None:
        count.add(call.layer, 0)
        windows[call.layer] = call.window
        shapes.add((call.query.shape[0], *call.key.shape[::2], call.value.shape[-1], call.scale))

    token = torch.zeros((1, 1), dtype=torch.long, device=decoder.device)
    with intercepted(decoder, implementation, observe):
        decoder(input_ids=token, use_cache=False)
    try:
        count.check(steps=1)
    except CaptureError as error:
        raise CaptureError(
            f"attention implementation in use: {in_use}, which gives nothing to record for some "
            f"layers ({error}); {NEEDED} needed"
        ) from None
    if len(shapes) != 1:
        raise CaptureError(
            "head counts, head sizes or softmax scales differ between layers, which a trace "
            f"cannot express: (query heads, KV heads, key size, value size, scale) = "
            f"{sorted(shapes)}"
        )
    (query_heads, kv_heads, key_size, value_size, scale) = next(iter(shapes))
    if key_size != value_size:
        raise CaptureError(
            f"keys have {key_size} numbers and values {value_size}, which a trace cannot express"
        )
    if query_heads % kv_heads != 0:
        raise CaptureError(f"{query_heads} query heads do not divide by {kv_heads} KV heads")
    return AttentionRule(scale, [windows[layer] for layer in range(layers)])
