"""The float32 arithmetic of the replay, bit for bit (docs/arithmetic.md).

Every function works on whole arrays. Vectorising happens across keys and never across a sum, so
the order of the additions is the documented one.
"""

import math
from decimal import Decimal, localcontext

import numpy as np

PARTIAL_SUMS = 32
LN2 = Decimal("0.693147180559945309417232121458176568075500134360255254120680")


def fma32(x, y, z):
    """x*y + z in float32 with a single rounding, to nearest even.

    The product of two float32 numbers is exact in double. The sum is taken in double and rounded
    *to odd*, which a second rounding to float32 cannot turn into a wrong result: double has more
    than two digits more than float32 needs, also where the float32 result is subnormal. NaN and
    infinities are those of the double arithmetic.
    """
    product = np.asarray(x, np.float32).astype(np.float64) * np.asarray(y, np.float32).astype(
        np.float64
    )
    addend = np.asarray(z, np.float32).astype(np.float64)
    product, addend = np.broadcast_arrays(product, addend)
    total = product + addend
    # Knuth's two-sum: total + error is the exact sum.
    shadow = total - product
    error = (product - (total - shadow)) + (addend - shadow)
    bits = np.atleast_1d(total).view(np.int64)
    inexact_even = np.isfinite(total) & (error != 0) & ((bits & 1) == 0)
    toward_error = np.where((error > 0) == (total > 0), 1, -1)
    odd = (bits + np.where(inexact_even, toward_error, 0)).view(np.float64)
    return odd.astype(np.float32).reshape(total.shape)


def _float32_constants():
    """log2(e), the two parts of ln 2 and the coefficients 1/k!, each the nearest float32."""
    with localcontext() as context:
        context.prec = 60
        log2_e = np.float32(float(1 / LN2))
        ln2_high = np.float32(float(LN2))
        ln2_low = np.float32(float(LN2 - Decimal(float(ln2_high))))
    coefficients = [np.float32(1.0 / math.factorial(k)) for k in range(8)]
    return log2_e, ln2_high, ln2_low, coefficients


LOG2_E, LN2_HIGH, LN2_LOW, EXP_COEFFICIENTS = _float32_constants()
ROUND_TO_INTEGER = np.float32(
    12582912.0
)  # 1.5 * 2**23: adding it rounds a small float32 to an integer.


def exp32(x):
    """The portable exponential for x <= 0, float32 in and out, with gradual underflow and exp32(0)
    = 1.
    """
    x = np.asarray(x, np.float32)
    vanishes = x < np.float32(-104)
    safe = np.where(vanishes, np.float32(0), x)
    n = fma32(safe, LOG2_E, ROUND_TO_INTEGER) - ROUND_TO_INTEGER
    rest = fma32(n, -LN2_HIGH, safe)
    rest = fma32(n, -LN2_LOW, rest)
    p = np.full(x.shape, EXP_COEFFICIENTS[7], np.float32)
    for coefficient in reversed(EXP_COEFFICIENTS[:7]):
        p = fma32(p, rest, coefficient)
    exponent = n.astype(np.int32)
    half = exponent // 2  # rounds down, also for negative numbers
    one = np.float32(1)
    result = (p * np.ldexp(one, half)) * np.ldexp(one, exponent - half)
    return np.where(vanishes, np.float32(0), result)


def row_sum(values):
    """Sum over the last axis, the keys: 32 partial sums by position, ascending, then a tree.
    float32.

    A key that is left out of a sum is passed as +0.
    """
    values = np.asarray(values, np.float32)
    keys = values.shape[-1]
    blocks = -(-keys // PARTIAL_SUMS)
    padded = np.zeros(values.shape[:-1] + (blocks * PARTIAL_SUMS,), np.float32)
    padded[..., :keys] = values
    partial = np.zeros(values.shape[:-1] + (PARTIAL_SUMS,), np.float32)
    for block in range(blocks):
        partial = partial + padded[..., block * PARTIAL_SUMS : (block + 1) * PARTIAL_SUMS]
    width = PARTIAL_SUMS // 2
    while width:
        partial = partial[..., :width] + partial[..., width : 2 * width]
        width //= 2
    return partial[..., 0]


def divide_or_zero(numerator, denominator):
    """numerator / denominator in float32; 0 where the denominator is 0."""
    denominator = np.broadcast_to(np.asarray(denominator, np.float32), np.shape(numerator))
    result = np.zeros(np.shape(numerator), np.float32)
    np.divide(numerator, denominator, out=result, where=denominator != 0)
    return result
