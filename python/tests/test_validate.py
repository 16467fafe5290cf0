"""hae.validate on functions of numpy and torch: the right pass, the wrong are caught and named."""

from __future__ import annotations

import unittest

import numpy as np
import pytest
import torch

import hae


def visible(queries, keys, lengths):
    """[items, kv_heads, slots]: below the length."""
    slots = torch.arange(keys.shape[2])
    if lengths is None:
        return torch.ones(keys.shape[:3], dtype=torch.bool)
    return slots < lengths[..., None]


OUTPUTS = ["output", "probabilities"]


def attend(queries, keys, values, lengths, scale):
    """Attention in float32: a masked row gives zeros, a NaN in use stays one."""
    group = queries.shape[1] // keys.shape[1]
    mask = visible(queries, keys, lengths).repeat_interleave(group, 1)
    k = keys.repeat_interleave(group, 1).float()
    v = torch.where(mask[..., None], values.repeat_interleave(group, 1).float(), 0)
    logits = torch.einsum("ihd,ihsd->ihs", queries.float(), k) * scale
    p = torch.softmax(torch.where(mask, logits, -torch.inf), -1)
    p = torch.where(mask.any(-1, keepdim=True), p, 0)
    return {"probabilities": p, "output": torch.einsum("ihs,ihsd->ihd", p, v)}


def test_torch_attention_is_right():
    hae.validate("attend", attend, framework="torch", outputs=OUTPUTS).check()


def tiled(queries, keys, values, lengths, scale):
    def repeat(t, group):
        return t.repeat(1, group, *[1] * (t.dim() - 2))

    group = queries.shape[1] // keys.shape[1]
    lengths = None if lengths is None else repeat(lengths, group)
    return attend(queries, repeat(keys, group), repeat(values, group), lengths, scale)


def test_tiled_heads_are_named_and_shown_on_two_heads():
    report = hae.validate("attend", tiled, framework="torch", outputs=OUTPUTS)
    assert not report
    assert "tiled over KV heads" in report.fault
    # Tiling is not interleaving from 2 KV heads of 2 query heads on; probabilities, from 2 slots.
    assert "lanes 2, group 2, slots 2, head_dim 1" in report.smallest["problem"]
    with pytest.raises(AssertionError, match="tiled over KV heads"):
        report.check()


def test_a_softmax_without_its_maximum_overflows():
    def naive(queries, keys, values, lengths, scale):
        group = queries.shape[1] // keys.shape[1]
        mask = visible(queries, keys, lengths).repeat_interleave(group, 1)
        k = keys.repeat_interleave(group, 1).float()
        v = torch.where(mask[..., None], values.repeat_interleave(group, 1).float(), 0)
        w = torch.exp(torch.einsum("ihd,ihsd->ihs", queries.float(), k) * scale)
        w = torch.where(mask, w, 0)
        p = torch.where(mask.any(-1, keepdim=True), w / w.sum(-1, keepdim=True), 0)
        return {"probabilities": p, "output": torch.einsum("ihs,ihsd->ihd", p, v)}

    report = hae.validate("attend", naive, framework="torch", outputs=OUTPUTS)
    assert "maximum is not subtracted" in report.fault


def lowest(scores, lengths, counts, most, order):
    """The first counts of each lane's order; -1 fills the rest."""
    chosen = np.full((scores.shape[0], most), -1)
    for lane in range(scores.shape[0]):
        n = scores.shape[1] if lengths is None else lengths[lane]
        ranked = order(scores[lane, :n])[: counts[lane]]
        chosen[lane, : len(ranked)] = ranked
    return chosen


def test_numpy_stable_argsort_ranks_nan_last_and_is_told_so():
    def argsort(scores, lengths, counts, most):
        return lowest(scores, lengths, counts, most, lambda s: np.argsort(s, kind="stable"))

    report = hae.validate("select_lowest", argsort, outputs=["chosen"])
    assert not report
    assert report.passed > 50
    assert "a NaN ranks above everything" in report.fault


def test_numpy_selection_by_nan_score_position_is_right():
    def right(scores, lengths, counts, most):
        def order(s):
            return np.lexsort(
                (np.nan_to_num(s, nan=0.0, posinf=np.inf, neginf=-np.inf), ~np.isnan(s))
            )

        return lowest(scores, lengths, counts, most, order)

    hae.validate("select_lowest", right, outputs=["chosen"]).check()


def test_sums_in_half_precision_are_told_from_float32():
    def half(probabilities, scores):
        lanes = scores.shape[1]
        items, heads, rows, slots = probabilities.shape
        p = probabilities.reshape(items, lanes, heads // lanes, rows, slots)
        return scores + p.astype(np.float16).mean(2, dtype=np.float16).sum(2, dtype=np.float16)

    report = hae.validate("add_scores", half)
    assert "fewer bits than stated" in report.fault


def test_what_a_function_raises_is_a_counterexample_and_its_cause():
    def fragile(sums, largest, scope, r, alpha, sinks):
        if sums.shape[1] > 32:
            raise IndexError("33 tokens are too many")
        total = [[np.sum(s[v == k]) for k in v] for s, v in zip(sums, scope, strict=True)]
        goes = (sums < r * np.array(total).reshape(sums.shape)) & (largest < alpha) & (scope >= 0)
        return goes & (np.arange(sums.shape[1]) >= sinks)

    report = hae.validate("prune", fragile)
    assert "slots 33" in report.smallest["problem"]
    assert isinstance(report.error, IndexError)
    assert "IndexError: 33 tokens are too many" in str(report)


def test_a_function_that_serves_no_case_is_not_right():
    def none(probabilities):
        raise NotImplementedError

    report = hae.validate("add_scores", none)
    assert report.passed == 0 and report.failed == 0 and report.unsupported > 0
    assert not report


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"operation": "attention"}, "operation 'attention' is unknown"),
        ({"framework": "jax"}, "framework 'jax' is unknown"),
        ({"accumulation": "float16"}, "accumulation 'float16' is unknown"),
        ({"case": "prune/none"}, "case 'prune/none' is unknown"),
    ],
)
def test_unknown_words_are_refused(arguments, message):
    words = {"operation": "prune", "function": lambda sums: sums} | arguments
    with pytest.raises(hae.ConfigError, match=message):
        hae.validate(words.pop("operation"), words.pop("function"), **words)


def test_arrays_are_copied_to_a_device_with_their_strides():
    """The CPU as a device like any other: what lies there is a copy."""
    strides = set()

    def on_device(queries, keys, values, lengths, scale):
        strides.add(keys.is_contiguous())
        return attend(queries, keys, values, lengths, scale)

    hae.validate("attend", on_device, framework="torch", device="cpu", outputs=OUTPUTS).check()
    assert strides == {True, False}


def test_an_input_changed_on_a_device_is_found():
    def scales_in_place(queries, keys, values, lengths, scale):
        queries *= scale
        return attend(queries, keys, values, lengths, 1.0)

    report = hae.validate(
        "attend", scales_in_place, framework="torch", device="cpu", outputs=OUTPUTS
    )
    assert "an input is changed" in report.fault


class Foreign:
    """An array of another library: DLPack and a shape."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.shape = tensor.shape

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def test_arrays_of_other_libraries_come_back_by_dlpack():
    def foreign(*arguments, **named):
        return {name: Foreign(array) for name, array in attend(*arguments, **named).items()}

    def attend_foreign(queries, keys, values, lengths, scale):
        return foreign(queries, keys, values, lengths, scale)

    case = "attend/plain/ordinary/float32/slots-33/heads-1x1/dim-128"
    hae.testing.check_kernel(case, attend_foreign, framework="torch")


def test_numpy_arrays_have_no_device():
    with pytest.raises(hae.ConfigError, match="needs framework='torch'"):
        hae.validate("attend", attend, device="cuda")


def test_a_case_is_a_test():
    cases = hae.testing.kernel_cases("attend")
    assert len(cases) == len(set(cases)) > 100
    plain = next(case for case in cases if "/plain/" in case and "slots-33" in case)
    paged = next(case for case in cases if "/paged/" in case)
    hae.testing.check_kernel(plain, attend, framework="torch")
    with pytest.raises(unittest.SkipTest, match="not supported"):
        hae.testing.check_kernel(paged, attend, framework="torch")
    with pytest.raises(AssertionError, match="smallest"):
        hae.testing.check_kernel(
            plain,
            lambda queries, keys, values, scale: {
                name: -array for name, array in attend(queries, keys, values, None, scale).items()
            },
            framework="torch",
        )
