// Rows of bfloat16 or float32 against float32 vectors that lie "spread": as the halves of registers come out.
//
// A register of bfloat16 pairs splits into its even and its odd elements. A float32 vector that meets such rows again
// and again is put in that order once: of each 2 * kLanes elements the even ones, then the odd ones; the rest as it is.
#pragma once

#include "vectors.h"

namespace tp {

inline void spread(const float* x, int64_t size, float* to) { std::memcpy(to, x, size * sizeof(float)); }

inline void spread(const BFloat16* x, int64_t size, float* to) {
  int64_t i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      to[i + lane] = to_float(x[i + 2 * lane]);
      to[i + kLanes + lane] = to_float(x[i + 2 * lane + 1]);
    }
  for (; i < size; ++i) to[i] = to_float(x[i]);
}

// The inverse of `spread`, rounded to the row's type.
inline void gather_spread(const float* x, int64_t size, float* to) { std::memcpy(to, x, size * sizeof(float)); }

inline void gather_spread(const float* x, int64_t size, BFloat16* to) {
  int64_t i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      to[i + 2 * lane] = to_bfloat16(x[i + lane]);
      to[i + 2 * lane + 1] = to_bfloat16(x[i + kLanes + lane]);
    }
  for (; i < size; ++i) to[i] = to_bfloat16(x[i]);
}

// Σ_i x_i row_i
inline float dot_spread(const float* x, const float* row, int64_t size) {
  Floats total = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) total += load(x + i) * load(row + i);
  float result = sum(total);
  for (; i < size; ++i) result += x[i] * row[i];
  return result;
}

inline float dot_spread(const float* x, const BFloat16* row, int64_t size) {
  Floats evens = {}, odds = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
    const Words pairs = load_words(row + i);
    evens += load(x + i) * even(pairs);
    odds += load(x + i + kLanes) * odd(pairs);
  }
  float result = sum(evens + odds);
  for (; i < size; ++i) result += x[i] * to_float(row[i]);
  return result;
}

// x += factor · row
inline void add_spread(float* x, float factor, const float* row, int64_t size) {
  for (int64_t i = 0; i < size; ++i) x[i] += factor * row[i];
}

inline void add_spread(float* x, float factor, const BFloat16* row, int64_t size) {
  int64_t i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
    const Words pairs = load_words(row + i);
    const Floats evens = load(x + i) + factor * even(pairs), odds = load(x + i + kLanes) + factor * odd(pairs);
    std::memcpy(x + i, &evens, sizeof evens);
    std::memcpy(x + i + kLanes, &odds, sizeof odds);
  }
  for (; i < size; ++i) x[i] += factor * to_float(row[i]);
}

}  // namespace tp
