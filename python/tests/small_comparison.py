"""A small trace with everything that makes a report hard, and `hae compare --out` of it."""

import os
import subprocess
from pathlib import Path

import h5py
import numpy as np

import hae

REPOSITORY = Path(__file__).resolve().parents[2]

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 4
PROMPT, TOKENS = 14, 20
# Token 0 text; picture 0 of 2 x 3 patches; text; picture 1 of 2 x 2; text; six generated tokens.
IMAGE = np.array([-1] + [0] * 6 + [-1] + [1] * 4 + [-1] * 8)
PATCH = np.full((TOKENS, 2), -1)
PATCH[1:7] = [(r, c) for r in range(2) for c in range(3)]
PATCH[8:12] = [(r, c) for r in range(2) for c in range(2)]

HOSTILE = [
    "</script><script>alert(1)</script>",
    "\"'`",
    "a\nb\tc",
    "\u202eabc",
    "👩‍👩‍👧",
    "",
    "\x01\x1b[31m",
]
NAMES = ("</script><img src=x onerror=alert(1)>", 'plain \u202e & "quoted"')

POLICIES = (
    "hae:bin=2,budget=8",
    "greedy:budget=8",
    "greedy:lane=kv_head,budget=8",
    "window:recent=6",
    "full",
)


def arrays(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)

    def normal(heads: int) -> np.ndarray:
        return random.standard_normal((LAYERS, heads, TOKENS, HEAD_DIM)).astype(np.float32)

    return {"q": 2 * normal(QUERY_HEADS), "k": normal(KV_HEADS), "v": normal(KV_HEADS)}


def write_trace(path: Path, *, pictures: bool = True, patches: bool = True) -> Path:
    tokens = [HOSTILE[j % len(HOSTILE)] for j in range(TOKENS)]
    with_pictures = hae.sequence(
        prompt=PROMPT, **arrays(1), image=IMAGE, tokens=tokens, name=NAMES[0]
    )
    of_text = hae.sequence(prompt=PROMPT, **arrays(2), name=NAMES[1])
    hae.write(path, [with_pictures, of_text])
    with h5py.File(path, "r+") as file:
        group = file["sequences/000000"]
        if patches:
            group["patch"] = PATCH
        if pictures:
            group["pictures/0"] = np.arange(8 * 12, dtype=np.uint8).reshape(8, 12)  # 2 x 3 patches
            group["pictures/1"] = np.full((10, 30, 3), 128, np.uint8)  # not as 2 x 2 patches are
    return path


def hae_program(*arguments: object, cwd: Path = REPOSITORY) -> str:
    program = os.environ.get("HAE_PROGRAM", REPOSITORY / "build" / "bin" / "hae")
    words = [str(program), *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=cwd, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def compare(trace: Path, folder: Path, *options: str, policies=POLICIES) -> Path:
    words = [word for policy in policies for word in ("--policy", policy)]
    hae_program("compare", trace, *words, "--allow-unequal", "--out", folder, *options)
    return folder
