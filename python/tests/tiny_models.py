"""Models of a few thousand random weights, saved as folders that hae-record can load."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

WORDS = ["<pad>", "<bos>", "<eos>", "<unk>", "<image>", *"abcdefghijklmnopqrstuvwxyz"]
IMAGE_TOKEN = WORDS.index("<image>")
LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 8
PICTURE_PIXELS, PATCH_PIXELS = 16, 4
VISUAL_TOKENS = (PICTURE_PIXELS // PATCH_PIXELS) ** 2


def decoder_options(**changes) -> dict:
    """A decoder with two query heads a KV head, and no token that ends a generation."""
    options = {
        "vocab_size": len(WORDS),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": QUERY_HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 256,
        "initializer_range": 0.4,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    return options | changes


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: index for index, word in enumerate(WORDS)}
    words_only = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    words_only.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words_only.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words_only,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<image>"],
    )


def processor(patch_pixels: int = PATCH_PIXELS) -> LlavaProcessor:
    side = {"height": PICTURE_PIXELS, "width": PICTURE_PIXELS}
    pictures = CLIPImageProcessorPil(
        do_resize=False, do_center_crop=False, size=side, crop_size=side
    )
    return LlavaProcessor(
        image_processor=pictures,
        tokenizer=tokenizer(),
        patch_size=patch_pixels,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
    )


def llama(**changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**decoder_options(**changes))).eval()


def mistral(window: int) -> MistralForCausalLM:
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**decoder_options(sliding_window=window))).eval()


def qwen2(window: int) -> Qwen2ForCausalLM:
    """Full attention in the first layer, a sliding window in the others."""
    torch.manual_seed(0)
    options = decoder_options(
        sliding_window=window, use_sliding_window=True, max_window_layers=1, num_hidden_layers=3
    )
    return Qwen2ForCausalLM(Qwen2Config(**options)).eval()


def llava() -> LlavaForConditionalGeneration:
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=PICTURE_PIXELS,
        patch_size=PATCH_PIXELS,
        projection_dim=16,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=LlamaConfig(**decoder_options()),
        image_token_index=IMAGE_TOKEN,
        vision_feature_layer=-1,
        image_seq_length=VISUAL_TOKENS,
    )
    return LlavaForConditionalGeneration(config).eval()


def save(model, reader, folder: Path) -> Path:
    model.save_pretrained(folder)
    reader.save_pretrained(folder)
    return folder


def write_prompts(folder: Path, entries: list[dict]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


def picture(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (PICTURE_PIXELS, PICTURE_PIXELS, 3))
    return Image.fromarray(pixels.astype(np.uint8))
