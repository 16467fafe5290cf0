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
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    LlavaProcessor,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen2VLProcessor,
    Qwen3Config,
    Qwen3ForCausalLM,
    SiglipVisionConfig,
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


def qwen3() -> Qwen3ForCausalLM:
    """Norms of queries and keys, with weights that are not all the same."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**decoder_options())).eval()
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            torch.nn.init.uniform_(norm.weight, 0.5, 2.0)
    return model


ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]


def gemma2(window: int, cap: float | None = None) -> Gemma2ForCausalLM:
    """Windows in turn, a softmax scale that is not 1 / sqrt(head_dim)."""
    torch.manual_seed(0)
    options = decoder_options(
        num_hidden_layers=3,
        sliding_window=window,
        layer_types=ALTERNATING,
        query_pre_attn_scalar=3,
        attn_logit_softcapping=cap,
    )
    return Gemma2ForCausalLM(Gemma2Config(**options)).eval()


def gemma3(window: int) -> Gemma3ForCausalLM:
    """Windows in turn, norms of queries and keys, two rotary bases."""
    torch.manual_seed(0)
    options = decoder_options(
        num_hidden_layers=3,
        sliding_window=window,
        layer_types=ALTERNATING,
        query_pre_attn_scalar=3,
    )
    return Gemma3ForCausalLM(Gemma3TextConfig(**options)).eval()


def clip() -> CLIPVisionConfig:
    return CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=PICTURE_PIXELS,
        patch_size=PATCH_PIXELS,
        projection_dim=16,
    )


def llava() -> LlavaForConditionalGeneration:
    torch.manual_seed(0)
    config = LlavaConfig(
        vision_config=clip(),
        text_config=LlamaConfig(**decoder_options()),
        image_token_index=IMAGE_TOKEN,
        vision_feature_layer=-1,
        image_seq_length=VISUAL_TOKENS,
    )
    return LlavaForConditionalGeneration(config).eval()


# Sizes that a picture is fitted to, before it is cut into parts of PICTURE_PIXELS.
PINPOINTS = [[16, 32], [32, 16], [32, 32]]


def llava_next() -> LlavaNextForConditionalGeneration:
    torch.manual_seed(0)
    config = LlavaNextConfig(
        vision_config=clip(),
        text_config=LlamaConfig(**decoder_options()),
        image_token_index=IMAGE_TOKEN,
        image_grid_pinpoints=PINPOINTS,
        vision_feature_layer=-1,
    )
    return LlavaNextForConditionalGeneration(config).eval()


def llava_next_processor() -> LlavaNextProcessor:
    side = {"height": PICTURE_PIXELS, "width": PICTURE_PIXELS}
    pictures = LlavaNextImageProcessorPil(
        size={"shortest_edge": PICTURE_PIXELS}, crop_size=side, image_grid_pinpoints=PINPOINTS
    )
    return LlavaNextProcessor(
        image_processor=pictures,
        tokenizer=tokenizer(),
        patch_size=PATCH_PIXELS,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
    )


# Of Gemma: so many tokens a picture.
GEMMA_TOKENS = 4


def gemma3_pictures(window: int) -> Gemma3ForConditionalGeneration:
    torch.manual_seed(0)
    vision = SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=PICTURE_PIXELS,
        patch_size=PATCH_PIXELS,
        vision_use_head=False,
    )
    config = Gemma3Config(
        vision_config=vision,
        text_config=gemma3(window).config,
        mm_tokens_per_image=GEMMA_TOKENS,
        image_token_index=IMAGE_TOKEN,
        boi_token_index=WORDS.index("x"),
        eoi_token_index=WORDS.index("y"),
    )
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config).eval()
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.4)
    return model


def gemma3_processor() -> Gemma3Processor:
    """In a text x stands for a picture."""
    side = {"height": PICTURE_PIXELS, "width": PICTURE_PIXELS}
    reader = tokenizer()
    reader.image_token, reader.image_token_id = " <image>", IMAGE_TOKEN
    reader.boi_token, reader.boi_token_id = "x", WORDS.index("x")
    reader.eoi_token = " y"
    return Gemma3Processor(
        Gemma3ImageProcessorPil(size=side), reader, image_seq_length=GEMMA_TOKENS
    )


# Of Qwen's models: four patches become one visual token.
MERGE = 2


def _qwen_vl_options(vision: dict) -> dict:
    # The token that begins a picture is any word; no token is a video.
    return {
        "vision_config": vision | {"patch_size": PATCH_PIXELS, "spatial_merge_size": MERGE},
        "text_config": decoder_options(
            rope_parameters={"rope_type": "default", "mrope_section": [2, 1, 1]}
        ),
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": len(WORDS) - 1,
        "vision_start_token_id": WORDS.index("x"),
        "vision_end_token_id": WORDS.index("y"),
    }


def qwen2_vl() -> Qwen2VLForConditionalGeneration:
    torch.manual_seed(0)
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2}
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(**_qwen_vl_options(vision))).eval()


def qwen2_5_vl() -> Qwen2_5_VLForConditionalGeneration:
    torch.manual_seed(0)
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
        "window_size": 16,
        "fullatt_block_indexes": [0],
    }
    config = Qwen2_5_VLConfig(**_qwen_vl_options(vision))
    return Qwen2_5_VLForConditionalGeneration(config).eval()


class PicturesOnly(Qwen2VLProcessor):
    """Without its part for videos, which needs torchvision."""

    def get_attributes(self) -> list[str]:
        return ["image_processor", "tokenizer"]


def qwen_vl_processor() -> PicturesOnly:
    pictures = Qwen2VLImageProcessorPil(
        patch_size=PATCH_PIXELS,
        merge_size=MERGE,
        size={"shortest_edge": 8 * 8, "longest_edge": 64 * 64},
    )
    reader = tokenizer()
    reader.image_token, reader.image_token_id = "<image>", IMAGE_TOKEN
    reader.video_token, reader.video_token_id = WORDS[-1], len(WORDS) - 1
    return PicturesOnly(image_processor=pictures, tokenizer=reader)


def save(model, reader, folder: Path) -> Path:
    model.save_pretrained(folder)
    reader.save_pretrained(folder)
    return folder


def write_prompts(folder: Path, entries: list[dict]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


def picture(seed: int, height: int = PICTURE_PIXELS, width: int = PICTURE_PIXELS) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3))
    return Image.fromarray(pixels.astype(np.uint8))
