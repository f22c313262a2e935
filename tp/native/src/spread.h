// float32 vectors that lie "spread", to meet rows of bfloat16 or float32: as the halves of registers come out.
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

}  // namespace tp
