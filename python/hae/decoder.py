"""The part of a model whose attention is recorded, and its sizes."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from hae.pictures import PICTURE_FAMILIES


class UnsupportedModel(Exception):
    """The model has a feature that a trace cannot express. The message names it."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder that decide how large a recording is."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int

    def qkv_bytes(self, tokens: int, element_bytes: int) -> int:
        """Q, K and V of all layers and `tokens` tokens."""
        numbers = (self.query_heads + 2 * self.kv_heads) * self.head_dim
        return self.layers * tokens * numbers * element_bytes

    def prefill_attention_bytes(self, prompt: int, element_bytes: int) -> int:
        """Every probability of the prompt, all layers: layers x heads x prompt x prompt."""
        return self.layers * self.query_heads * prompt * prompt * element_bytes

    def attention_bytes(self, prompt: int, tokens: int, element_bytes: int) -> int:
        """What the `attention` payload holds: the prompt's square, the decode rows, and V."""
        decode = sum(range(prompt + 1, tokens + 1))
        values = tokens * self.kv_heads * self.head_dim
        square = self.prefill_attention_bytes(prompt, element_bytes)
        return square + self.layers * (self.query_heads * decode + values) * element_bytes

    def payload_bytes(self, payload: str, prompt: int, tokens: int, element_bytes: int) -> int:
        if payload == "qkv":
            return self.qkv_bytes(tokens, element_bytes)
        return self.attention_bytes(prompt, tokens, element_bytes)


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a model whose attention is recorded.

    raises UnsupportedModel naming the feature that a trace cannot express
    """
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{config.model_type}: encoder-decoder models use cross-attention")
    decoder = model
    if hasattr(config, "vision_config"):
        if config.model_type not in PICTURE_FAMILIES:
            raise UnsupportedModel(
                f"{config.model_type}: a model with pictures of none of the model types "
                f"{', '.join(PICTURE_FAMILIES)}"
            )
        decoder = model.model.language_model
    text = decoder.config
    cap = getattr(text, "attn_logit_softcapping", None)
    if cap is not None:
        raise UnsupportedModel(
            f"{text.model_type}: logit soft-capping (attn_logit_softcapping is {cap})"
        )
    if getattr(text, "add_cross_attention", False) or getattr(text, "cross_attention_layers", None):
        raise UnsupportedModel(f"{text.model_type}: cross-attention")
    heads = [getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads")]
    if heads[0] is None:
        raise UnsupportedModel(f"{text.model_type}: a model without attention heads")
    if any(isinstance(count, (list, tuple)) for count in heads) or hasattr(text, "block_configs"):
        raise UnsupportedModel(f"{text.model_type}: head counts that differ between layers")
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise UnsupportedModel(f"{text.model_type}: layers of kind {', '.join(sorted(kinds))}")
    return decoder


def refuse_in_loop(model: PreTrainedModel) -> None:
    """raises UnsupportedModel for a model that can be recorded, but not evict while it runs"""
    kind = model.config.model_type
    if hasattr(model.config, "vision_config") and kind != "llava":
        raise UnsupportedModel(
            f"{kind}: of the models with pictures only llava runs in the closed loop; "
            "hae-record records this one"
        )


def shape_of(decoder: PreTrainedModel) -> Shape:
    config = decoder.config
    query_heads = config.num_attention_heads
    return Shape(
        layers=config.num_hidden_layers,
        query_heads=query_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or query_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // query_heads,
    )


def layers_of(decoder: PreTrainedModel) -> torch.nn.ModuleList:
    """The decoder's layers, first to last.

    raises UnsupportedModel when they are not where Llama has them
    """
    layers = getattr(getattr(decoder, "model", decoder), "layers", None)
    if layers is None:
        raise UnsupportedModel(f"{decoder.config.model_type}: a decoder without a list `layers`")
    return layers


def end_tokens_of(model: PreTrainedModel) -> set[int]:
    """Tokens that end a generation."""
    generation = getattr(model, "generation_config", None)
    end = getattr(generation, "eos_token_id", None)
    if end is None:
        return set()
    return set(end) if isinstance(end, (list, tuple)) else {end}


def cache_name(model: PreTrainedModel) -> str:
    """What the model's forward calls its cache: transformers renames past_key_values to cache, and
    both names are in use.
    """
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"
