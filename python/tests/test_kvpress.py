"""What stays according to kvpress 0.5.5, the oracle, and the program, of the same tensors.

kvpress lives in an environment of its own (`script/install kvpress`); without it these tests are
skipped. Its scores are float32 and its order of equal scores is that of a library: a token may
differ only where its score is that of another one, within float32's rounding.
"""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from oracle import baselines, row_sum  # noqa: E402
from oracle.arithmetic import divide_or_zero  # noqa: E402
from oracle.trace import logits, softmax_weights  # noqa: E402

import hae  # noqa: E402

HERE = Path(__file__).resolve().parent
KVPRESS = HERE.parents[1] / ".venv-kvpress" / "bin" / "python"
MOST_DIFFERENCES = 0.01  # of the tokens of a press, all cases together
BASE = 10000.0


class Shape(NamedTuple):
    layers: int
    query_heads: int
    kv_heads: int
    tokens: int
    head_dim: int
    ratio: float
    window: int
    sharpness: float = 1.0  # factor of the logits in half of the query heads, and its inverse


SHAPES = [
    Shape(3, 4, 4, 64, 16, 0.5, 8),
    Shape(4, 8, 2, 131, 16, 0.75, 16),
    Shape(2, 6, 3, 300, 32, 0.9, 8),
    Shape(5, 4, 1, 200, 8, 0.3, 32),
    Shape(6, 8, 4, 257, 16, 0.8, 8),
    Shape(1, 2, 1, 100, 64, 0.6, 1),
    Shape(4, 4, 4, 150, 16, 0.6, 1, sharpness=4.0),
    Shape(4, 4, 2, 290, 16, 0.66, 4),  # a pyramid that the prompt does not cut off
]


class Case(NamedTuple):
    """Tensors of one shape, by layer first; `budget` is the count that kvpress makes of a ratio."""

    shape: Shape
    unrotated: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    attention: np.ndarray

    @property
    def budget(self) -> int:
        return max(1, int(self.shape.tokens * (1 - self.shape.ratio)))


def rotated(x: np.ndarray) -> np.ndarray:
    """Rotary embedding, dimension i with i + d/2; x [..., token, dimension] from position 0 on."""
    tokens, d = x.shape[-2:]
    angles = np.arange(tokens)[:, None] * BASE ** (-2.0 * np.arange(d // 2) / d)
    first, second = x[..., : d // 2], x[..., d // 2 :]
    turned = [
        first * np.cos(angles) - second * np.sin(angles),
        second * np.cos(angles) + first * np.sin(angles),
    ]
    return np.concatenate(turned, axis=-1).astype(np.float32)


def make_case(seed: int, shape: Shape) -> Case:
    """Keys and queries with a common part, so that some tokens draw attention and others do not;
    with sharp heads beside flat ones a budget that heads share leaves some only their safe part.
    """
    random = np.random.default_rng(seed)

    def normal(heads):
        size = (shape.layers, heads, shape.tokens, shape.head_dim)
        return random.normal(size=size).astype(np.float32)

    common = random.normal(size=(shape.layers, 1, 1, shape.head_dim)).astype(np.float32)
    sharpness = shape.sharpness ** np.where(np.arange(shape.query_heads) % 2, 1.0, -1.0)
    unrotated = (normal(shape.query_heads) + common) * sharpness[:, None, None].astype(np.float32)
    pull = random.exponential(0.7, size=(shape.layers, shape.kv_heads, shape.tokens, 1))
    k = rotated(normal(shape.kv_heads) + (pull * common).astype(np.float32))
    q = rotated(unrotated)
    scale = np.float32(1 / np.sqrt(np.float64(shape.head_dim)))
    causal = np.tril(np.ones((shape.tokens, shape.tokens), bool))
    attention = []
    for layer in range(shape.layers):
        weights = softmax_weights(logits(q[layer], k[layer], scale), causal)
        attention.append(divide_or_zero(weights, row_sum(weights)[..., None]))
    return Case(shape, unrotated, q, k, normal(shape.kv_heads), np.array(attention))


def pyramidkv(case: Case, layer: int) -> list[list[int]]:
    shape = case.shape
    budget = baselines.pyramidkv_kvpress_budget(
        1 - shape.ratio, shape.window, layer, shape.layers, shape.tokens
    )
    return baselines.snapkv_kvpress(case.attention[layer], shape.kv_heads, budget, shape.window)


def adakv(case: Case, layer: int) -> list[list[int]]:
    shape = case.shape
    scores = baselines.snapkv_kvpress_scores(case.attention[layer], shape.kv_heads, shape.window)
    return baselines.adakv_kvpress(scores, shape.window, case.budget)


def snapkv(case: Case, layer: int) -> list[list[int]]:
    shape = case.shape
    return baselines.snapkv_kvpress(
        case.attention[layer], shape.kv_heads, case.budget, shape.window
    )


def streaming(case: Case, layer: int) -> list[list[int]]:
    policy = baselines.Streaming(recent=case.budget - 4)
    log = baselines.decode_lane(case.attention[layer], case.shape.tokens, policy)
    gone = {token for _, token, _ in log}
    return [[j for j in range(case.shape.tokens) if j not in gone]] * case.shape.kv_heads


def expected_attention(case: Case, layer: int) -> list[list[int]]:
    shape = case.shape
    rotation = baselines.mean_rotation(shape.head_dim, BASE, shape.tokens, 512)
    return baselines.expected_attention(
        case.unrotated[layer], case.k[layer], case.v[layer], rotation, case.budget
    )


# Press of kvpress_kept.py -> what the oracle keeps of a layer, per KV head.
ORACLE: dict[str, Callable[[Case, int], list[list[int]]]] = {
    "KnormPress": lambda case, layer: baselines.knorm(case.k[layer], case.budget),
    "KeyDiffPress": lambda case, layer: baselines.keydiff(case.k[layer], case.budget),
    "StreamingLLMPress": streaming,
    "ObservedAttentionPress": lambda case, layer: baselines.h2o_observed_mean(
        case.attention[layer], case.shape.kv_heads, case.budget
    ),
    "TOVAPress": lambda case, layer: (
        [baselines.tova_kvpress(case.attention[layer], case.budget)] * case.shape.kv_heads
    ),
    "SnapKVPress": snapkv,
    "SnapKVPress without attention": snapkv,
    "PyramidKVPress": pyramidkv,
    "AdaKVPress(SnapKVPress)": adakv,
    "ExpectedAttentionPress": expected_attention,
}

# Press and the policy of the program that keeps the same.
PROGRAM: list[tuple[str, Callable[[Case], str]]] = [
    ("KnormPress", lambda case: f"knorm:budget={case.budget}"),
    ("KeyDiffPress", lambda case: f"keydiff:budget={case.budget}"),
    ("StreamingLLMPress", lambda case: f"window:sinks=4,budget={case.budget}"),
    ("StreamingLLMPress", lambda case: f"streaming:sinks=4,recent={case.budget - 4}"),
    ("ObservedAttentionPress", lambda case: f"h2o/observed-mean:budget={case.budget}"),
    (
        "SnapKVPress",
        lambda case: f"snapkv/kvpress:budget={case.budget},window={case.shape.window}",
    ),
]


def program_kept(case: Case, spec: str) -> np.ndarray:
    """What is resident at the end of the prefill: [layers, kv_heads, token]."""
    sequence = hae.sequence(q=case.q, k=case.k, v=case.v, prompt=case.shape.tokens)
    (run,) = hae.replay(sequence, spec)
    stays = np.ones((case.shape.layers, case.shape.kv_heads, case.shape.tokens), bool)
    for layer, lane, token in run.log[["layer", "lane", "token"]].itertuples(index=False):
        stays[layer, slice(None) if lane < 0 else lane, token] = False
    return stays


def oracle_kept(case: Case, press: str) -> np.ndarray:
    shape = case.shape
    stays = np.zeros((shape.layers, shape.kv_heads, shape.tokens), bool)
    for layer in range(shape.layers):
        for lane, tokens in enumerate(ORACLE[press](case, layer)):
            stays[layer, lane, tokens] = True
    return stays


def differences(theirs: np.ndarray, ours: np.ndarray, scores: np.ndarray) -> tuple[int, int]:
    """Of one lane: tokens in one set only, and how many of these no tie explains.

    A tie explains as many as both sets have for themselves, when their scores lie no further apart
    than float32's rounding of a sum of that many terms.
    """
    apart = theirs != ours
    if not apart.any():
        return 0, 0
    only_theirs, only_ours = scores[theirs & ~ours], scores[ours & ~theirs]
    spread = scores[apart].max() - scores[apart].min()
    rounding = len(scores) * 2.0**-24 * np.abs(scores[apart]).max()
    tie = len(only_theirs) == len(only_ours) and spread <= rounding
    return int(apart.sum()), 0 if tie else int(apart.sum())


def test_only_a_tie_excuses_a_difference():
    scores = np.float32([0.5, 0.25, 0.25, 0.1])
    kept = np.array([True, True, False, False])
    assert differences(kept, kept, scores) == (0, 0)
    assert differences(kept, np.array([True, False, True, False]), scores) == (2, 0)
    assert differences(kept, np.array([True, False, False, True]), scores) == (2, 2)
    assert differences(kept, np.array([True, False, False, False]), scores) == (1, 1)


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> list[tuple[Case, dict[str, np.ndarray]]]:
    if not KVPRESS.exists():
        pytest.skip("no kvpress: script/install kvpress")
    folder = tmp_path_factory.mktemp("kvpress")
    cases = [make_case(seed, shape) for seed, shape in enumerate(SHAPES)]
    paths = [folder / f"{seed}.npz" for seed in range(len(cases))]
    for case, path in zip(cases, paths, strict=True):
        np.savez(
            path, unrotated=case.unrotated, k=case.k, v=case.v, attention=case.attention,
            ratio=case.shape.ratio, window=case.shape.window, base=BASE,
        )  # fmt: skip
    subprocess.run([KVPRESS, HERE / "kvpress_kept.py", *paths], check=True)
    return [
        (case, dict(np.load(path.with_suffix(".kept.npz"))))
        for case, path in zip(cases, paths, strict=True)
    ]


def compare(press: str, answers, kept: Callable[[Case], np.ndarray]) -> Counter:
    """Cases, tokens, tokens that differ, and how many of these are no ties."""
    count: Counter = Counter()
    for case, answer in answers:
        theirs, scores, ours = answer[f"{press}.kept"], answer[f"{press}.scores"], kept(case)
        count.update(cases=1, tokens=theirs.size, kept=int(theirs.sum()))
        for lane in np.ndindex(theirs.shape[:2]):
            apart, wrong = differences(theirs[lane], ours[lane], scores[lane])
            count.update(differ=apart, wrong=wrong)
    return count


def test_the_same_tokens_stay_as_in_kvpress(answers, capsys):
    counts = {
        (press, "oracle"): compare(press, answers, lambda case, p=press: oracle_kept(case, p))
        for press in ORACLE
    }
    absent = []
    for press, spec in PROGRAM:
        name = spec(answers[0][0]).partition(":")[0]
        if name not in hae.policies().index:
            absent.append(name)
            continue
        counts[press, name] = compare(
            press, answers, lambda case, spec=spec: program_kept(case, spec(case))
        )
    with capsys.disabled():
        print(f"\n{'kvpress 0.5.5':31}{'compared with':20}cases  tokens    kept  differ  no tie")
        for (press, with_), n in counts.items():
            print(
                f"{press:31}{with_:20}{n['cases']:5}{n['tokens']:8}{n['kept']:8}{n['differ']:8}"
                f"{n['wrong']:8}"
            )
        if absent:
            print(f"not compared, as this build has no policy of that name: {', '.join(absent)}")
    for key, count in counts.items():
        assert count["wrong"] == 0, key
        assert count["differ"] <= MOST_DIFFERENCES * count["tokens"], key
        assert 0 < count["kept"] < count["tokens"], key


def test_every_press_that_answers_is_compared(answers):
    presses = {name.removesuffix(".kept") for name in answers[0][1] if name.endswith(".kept")}
    assert presses == set(ORACLE) and {press for press, _ in PROGRAM} <= presses
