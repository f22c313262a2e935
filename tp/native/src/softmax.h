// Softmax of scores that come in blocks, of which only the largest and the sum so far are kept (Milakov and Gimelshein
// 2018, "Online normalizer calculation for softmax", arXiv:1805.02867).
#pragma once

#include <algorithm>

#include "exponential.h"
#include "vectors.h"

namespace tp {

// A block's scores ← exp(scores · scale − largest), -inf ← 0, after *largest was raised to the highest scores · scale;
// gives their sum, still in lanes. What was made with the *largest before must be multiplied by exp(before − *largest).
template <int64_t kCount>
inline Floats exponentials(float* scores, float scale, float* largest) {
  Floats most = load(scores);
  for (int64_t i = kLanes; i < kCount; i += kLanes) {
    const Floats other = load(scores + i);
    most = most > other ? most : other;
  }
  *largest = std::max(*largest, maximum(most) * scale);
  Floats total = {};
  for (int64_t i = 0; i < kCount; i += kLanes) {
    const Floats value = exponential(load(scores + i) * scale - *largest);
    store(scores + i, value);
    total += value;
  }
  return total;
}

}  // namespace tp
