// exp of a register of floats: 2^n · e^r with x = n ln 2 + r, |r| ≤ ln 2 / 2, and a polynomial for e^r.
//
// Coefficients are those of Cephes' expf (Moshier 1989); within 2 units in the last place of the exact value.
#pragma once

#include "vectors.h"

namespace tp {

inline Floats exponential(Floats x) {
  constexpr float kSmallest = -88.0f, kLargest = 89.0f;  // their results, and those beyond, are 0 and infinity
  constexpr float kLog2E = 1.44269504088896341f, kRounder = 12582912.0f;  // 1.5 · 2^23: adding it rounds to integers
  const Floats smallest = Floats{} + kSmallest, largest = Floats{} + kLargest;
  x = x < smallest ? smallest : x > largest ? largest : x;  // NaN stays
  const Floats shifted = x * kLog2E + kRounder;
  const Floats n = shifted - kRounder;
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const Floats exponent = reinterpret_cast<Floats>((reinterpret_cast<Words>(shifted) + 127u) << 23);
  return (p * (r * r) + r + 1.0f) * exponent;
}

}  // namespace tp
