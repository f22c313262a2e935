// One element at a time: what it is as a float, and the rounding back.
//
// In integer arithmetic, which every CPU has. Half precision is for sums and copies only.
#pragma once

#include <cstdint>
#include <cstring>

namespace tp {

inline uint32_t bits_of(float x) {
  uint32_t word;
  std::memcpy(&word, &x, 4);
  return word;
}

inline float of_bits(uint32_t word) {
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(int8_t x) { return x; }
inline float to_float(int16_t x) { return x; }
inline float to_float(BFloat16 x) { return of_bits(static_cast<uint32_t>(x.bits) << 16); }

inline float to_float(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fffu);
  // Exponent and fraction in float's places, then the exponent's bias (127 - 15) by a product: right for subnormals too.
  const float finite = of_bits(magnitude << 13) * 0x1p112f;
  const uint32_t special = 0x7f800000u | magnitude << 13;
  return of_bits(sign | (magnitude >= 0x7c00u ? special : bits_of(finite)));
}

// Round to nearest, ties to even; too large becomes infinite, NaN stays NaN.
inline void store(float* to, float x) { *to = x; }

inline void store(BFloat16* to, float x) {
  const uint32_t word = bits_of(x);
  const bool nan = (word & 0x7fffffffu) > 0x7f800000u;
  to->bits = static_cast<uint16_t>(nan ? word >> 16 | 0x40u : (word + 0x7fffu + (word >> 16 & 1u)) >> 16);
}

inline void store(Float16* to, float x) {
  const uint32_t word = bits_of(x);
  const uint32_t magnitude = word & 0x7fffffffu;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  // Added to 0.5, whose last bit is worth the smallest half, a value below 2^-14 is rounded by the adder itself.
  const uint32_t subnormal = bits_of(of_bits(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x47800000u ? 0x7c00u : half;
  half = magnitude > 0x7f800000u ? 0x7e00u : half;
  to->bits = static_cast<uint16_t>(half | (word >> 16 & 0x8000u));
}

// The value that an element of T has after `x` was stored in it.
template <typename T>
inline float rounded(float x) {
  T stored;
  store(&stored, x);
  return to_float(stored);
}

}  // namespace tp
