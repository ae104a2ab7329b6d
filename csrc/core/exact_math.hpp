// log and exp that give the same double on every machine: additions, multiplications and one division in a fixed order,
// never contracted (the build says -ffp-contract=off). The C library's differ between versions and processors.
// Errors are below 2 units in the last place. Plain twin: tests/reference/exact_math.py.
#pragma once

#include <bit>
#include <cstdint>

namespace dartspec {

inline constexpr double kLn2High = 0x1.62e42fee00000p-1;  // ln 2 in two parts: the first times any exponent is exact
inline constexpr double kLn2Low = 0x1.a39ef35793c76p-33;

// Natural logarithm of a positive, finite, normal double. 2 atanh(s), s = (m - 1) / (m + 1), m in [sqrt 1/2, sqrt 2).
[[gnu::always_inline]] inline double exact_log(double x) {
  constexpr std::uint64_t kRootHalf = 0x3FE6A09E667F3BCD, kBias = 1024;
  const std::uint64_t shifted = std::bit_cast<std::uint64_t>(x) - kRootHalf + (kBias << 52);
  // an integer below 2^52 to double by its bits: every vector unit can do that
  const double exponent = std::bit_cast<double>(shifted >> 52 | 0x4330000000000000) - (0x1p52 + double(kBias));
  const double m = std::bit_cast<double>((shifted & 0x000FFFFFFFFFFFFF) + kRootHalf);
  const double f = m - 1.0;
  const double s = f / (2.0 + f);
  const double z = s * s;
  // sum of z^n / (2n + 1) for n from 1 to 11; |z| < 0.0295, so the rest is below 2^-60
  const double z2 = z * z;
  const double odd = 1.0 / 3 + z2 * (1.0 / 7 + z2 * (1.0 / 11 + z2 * (1.0 / 15 + z2 * (1.0 / 19 + z2 * (1.0 / 23)))));
  const double even = 1.0 / 5 + z2 * (1.0 / 9 + z2 * (1.0 / 13 + z2 * (1.0 / 17 + z2 * (1.0 / 21))));
  const double tail = z * odd + z2 * even;
  const double low = s * (tail + tail) + exponent * kLn2Low;
  return exponent * kLn2High + ((s + s) + low);
}

// e^x of a double from -700 to 0; smaller ones give 0. Taylor's series of the rest after multiples of ln 2.
inline double exact_exp(double x) {
  if (!(x > -700.0)) return 0.0;
  const double n = (x * 0x1.71547652b82fep+0 + 0x1.8p52) - 0x1.8p52;  // to the nearest whole number
  const double r = (x - n * kLn2High) - n * kLn2Low;
  double p = 1.0 / 6227020800;
  p = 1.0 / 479001600 + r * p;
  p = 1.0 / 39916800 + r * p;
  p = 1.0 / 3628800 + r * p;
  p = 1.0 / 362880 + r * p;
  p = 1.0 / 40320 + r * p;
  p = 1.0 / 5040 + r * p;
  p = 1.0 / 720 + r * p;
  p = 1.0 / 120 + r * p;
  p = 1.0 / 24 + r * p;
  p = 1.0 / 6 + r * p;
  p = 0.5 + r * p;
  p = 1.0 + r * p;
  p = 1.0 + r * p;
  return p * std::bit_cast<double>(static_cast<std::uint64_t>(static_cast<std::int64_t>(n) + 1023) << 52);
}

// x^y for x >= 1 and a small y <= 0.
inline double exact_pow(double x, double y) { return exact_exp(y * exact_log(x)); }

}  // namespace dartspec
