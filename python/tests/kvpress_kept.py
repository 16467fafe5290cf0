"""Which tokens kvpress keeps of recorded tensors. Runs in the environment of `script/install
kvpress`, which has other versions than the rest of the project.

    .venv-kvpress/bin/python python/tests/kvpress_kept.py CASE.npz ...

Beside each CASE.npz it writes CASE.kept.npz. A case holds, float32,

    unrotated  [layers, query_heads, n, d]  queries before rotary embedding
    attention  [layers, query_heads, n, n]  probabilities, causal
    k, v       [layers, kv_heads, n, d]     keys after rotary embedding, values
    ratio      compression_ratio: the share that goes
    window     rows of SnapKV's observation window
    base       of the rotary embedding

and the answer, for each press P of the table below,

    P.kept     [layers, kv_heads, n]  what stays
    P.scores   [layers, kv_heads, n]  float32, the press's own

No model runs. A press reads an attention module's configuration, its query projection and rotary
embedding; the module given here projects with the identity, so that its hidden states are the
queries before rotary embedding, all heads side by side.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import kvpress
import numpy as np
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

# Name, press, whether it is given the attention (else it forms its own from the queries).
PRESSES: list[tuple[str, Callable, bool]] = [
    ("KnormPress", lambda ratio, _: kvpress.KnormPress(ratio), True),
    ("KeyDiffPress", lambda ratio, _: kvpress.KeyDiffPress(ratio), True),
    ("StreamingLLMPress", lambda ratio, _: kvpress.StreamingLLMPress(ratio), True),
    ("ObservedAttentionPress", lambda ratio, _: kvpress.ObservedAttentionPress(ratio), True),
    ("TOVAPress", lambda ratio, _: kvpress.TOVAPress(ratio), True),
    ("SnapKVPress", lambda ratio, window: kvpress.SnapKVPress(ratio, window), True),
    ("SnapKVPress without attention",
     lambda ratio, window: kvpress.SnapKVPress(ratio, window), False),
    ("PyramidKVPress", lambda ratio, window: kvpress.PyramidKVPress(ratio, window), True),
    ("AdaKVPress(SnapKVPress)",
     lambda ratio, window: kvpress.AdaKVPress(kvpress.SnapKVPress(ratio, window)), True),
    ("ExpectedAttentionPress", lambda ratio, _: kvpress.ExpectedAttentionPress(ratio), True),
]  # fmt: skip


class RecordedLayer(torch.nn.Module):
    """What a press reads of an attention module."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer
        self.head_dim = config.head_dim
        self.q_proj = torch.nn.Identity()
        self.rotary_emb = LlamaRotaryEmbedding(config)


def model_config(case: dict[str, np.ndarray]) -> LlamaConfig:
    layers, query_heads, _, head_dim = case["unrotated"].shape
    config = LlamaConfig(
        hidden_size=query_heads * head_dim,
        head_dim=head_dim,
        num_hidden_layers=layers,
        num_attention_heads=query_heads,
        num_key_value_heads=case["k"].shape[1],
        rope_parameters={"rope_type": "default", "rope_theta": float(case["base"])},
    )
    config._attn_implementation = "sdpa"  # AdaKVPress refuses "eager", whatever it is given.
    return config


def kept_in_layer(
    press: kvpress.BasePress, config: LlamaConfig, case: dict[str, np.ndarray], layer: int,
    give_attention: bool,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """What stays, and the scores: both [kv_heads, n]."""
    module = RecordedLayer(config, layer)
    queries, attention, keys, values = (
        torch.from_numpy(case[name][layer : layer + 1])
        for name in ("unrotated", "attention", "k", "v")
    )
    tokens = keys.shape[2]
    hidden_states = queries.transpose(1, 2).reshape(1, tokens, -1)
    rotary = module.rotary_emb(hidden_states, torch.arange(tokens)[None])
    given = (
        hidden_states, keys, values, attention if give_attention else None,
        {"position_embeddings": rotary},
    )  # fmt: skip
    scorer = press.press if isinstance(press, kvpress.AdaKVPress) else press
    scores = scorer.score(module, *given)[0]
    short_keys, _ = press.compress(module, *given)
    if isinstance(press, kvpress.AdaKVPress):
        stays = np.ones((keys.shape[1], tokens), bool)
        _, heads, masked = module.masked_key_indices
        stays[heads.numpy(), masked.numpy()] = False
    else:
        stays = np.stack([_rows_of(keys[0, h], short_keys[0, h]) for h in range(keys.shape[1])])
    return stays, scores.numpy().astype(np.float32)


def _rows_of(keys: torch.Tensor, short: torch.Tensor) -> np.ndarray:
    """Which tokens' keys are in the shorter cache. Keys are all different."""
    place = {key.numpy().tobytes(): j for j, key in enumerate(keys)}
    assert len(place) == len(keys), "two tokens with the same key"
    stays = np.zeros(len(keys), bool)
    stays[[place[key.numpy().tobytes()] for key in short]] = True
    assert stays.sum() == len(short)
    return stays


def main(paths: list[str]) -> None:
    torch.set_num_threads(1)
    for path in paths:
        with np.load(path) as file:
            case = dict(file)
        config = model_config(case)
        answer = {}
        for name, make, give_attention in PRESSES:
            press = make(float(case["ratio"]), int(case["window"]))
            layers = [
                kept_in_layer(press, config, case, layer, give_attention)
                for layer in range(config.num_hidden_layers)
            ]
            answer[f"{name}.kept"] = np.stack([stays for stays, _ in layers])
            answer[f"{name}.scores"] = np.stack([scores for _, scores in layers])
        np.savez(Path(path).with_suffix(".kept.npz"), **answer)


if __name__ == "__main__":
    with torch.no_grad():
        main(sys.argv[1:])
