"""expected-attention against the oracle, on traces that carry queries before rotary embedding."""

import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from oracle import baselines  # noqa: E402

import hae  # noqa: E402

LAYERS, KV_HEADS, GROUP, PROMPT, TOKENS, HEAD_DIM, BASE = 2, 2, 2, 40, 44, 8, 10000.0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("budget", "sinks", "epsilon"), [(12, 4, 0.0), (7, 0, 0.0), (20, 2, 0.02)])
def test_the_program_keeps_what_the_oracle_keeps(tmp_path, seed, budget, sinks, epsilon):
    rng = np.random.default_rng(seed)

    def normal(heads):
        return rng.normal(size=(LAYERS, heads, TOKENS, HEAD_DIM)).astype(np.float32)

    heads = (KV_HEADS * GROUP, KV_HEADS, KV_HEADS, KV_HEADS * GROUP)
    q, k, v, unrotated = (normal(count) for count in heads)
    path = tmp_path / "unrotated.h5"
    hae.write(path, [hae.sequence(prompt=PROMPT, q=q, k=k, v=v)])
    with h5py.File(path, "r+") as file:
        group = file["sequences/000000"]
        for layer in range(LAYERS):
            group[f"layers/{layer:06d}/q_unrotated"] = unrotated[layer]
        rotary = group.create_group("rotary")
        rotary["inverse_frequency"] = BASE ** (-2.0 * np.arange(HEAD_DIM // 2) / HEAD_DIM)
        rotary.attrs["interleaved"] = 0
    spec = f"expected-attention:budget={budget},sinks={sinks},epsilon={epsilon}"
    (run,) = hae.replay(path, spec)
    rotation = baselines.mean_rotation(HEAD_DIM, BASE, PROMPT, 512)
    for layer in range(LAYERS):
        prompt = (x[layer][:, :PROMPT] for x in (unrotated, k, v))
        expected = baselines.expected_attention(*prompt, rotation, budget, sinks, epsilon)
        for lane, kept in enumerate(expected):
            log = run.log[(run.log.layer == layer) & (run.log.lane == lane)]
            assert sorted(log.token) == sorted(set(range(PROMPT)) - set(kept))
            assert len(log) == PROMPT - budget
