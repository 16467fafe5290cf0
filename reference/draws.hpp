#pragma once

#include <cstdint>

namespace hae::reference {

/// ln x in double, from additions, multiplications and divisions alone: libm's bits differ between machines,
/// and a draw decides evictions. Within 4 ulp.
///
/// x  positive, finite and normal
double natural_log(double x);

/// A standard Gumbel number, -ln(-ln u), of the uniform number u = (⌊bits / 2^12⌋ + 1/2) / 2^52 in (0, 1).
///
/// The m largest of `logit_j + gumbel_j` are m draws without replacement with probability softmax(logit).
double gumbel(std::uint64_t bits);

}  // namespace hae::reference
