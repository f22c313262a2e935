// ((a_0 + a_1) + a_2) + ... over ranks, in the precision of tp.parallel.communicator.sum_in_rank_order.
#pragma once

#include <algorithm>
#include <cstdint>

#include "elements.h"
#include "lanes.h"

namespace tp {

struct Boolean {
  uint8_t value;
};

inline double widened(double x) { return x; }
inline float widened(Float16 x) { return to_float(x); }
inline uint32_t widened(Boolean x) { return x.value; }
// Integers wrap around as torch's do; unsigned, since C++ leaves signed overflow undefined.
inline uint8_t widened(uint8_t x) { return x; }
inline uint16_t widened(uint16_t x) { return x; }
inline uint32_t widened(uint32_t x) { return x; }
inline uint64_t widened(uint64_t x) { return x; }

inline void store(double* to, double x) { *to = x; }
inline void store(Boolean* to, uint32_t x) { to->value = x != 0; }
inline void store(uint8_t* to, uint8_t x) { *to = x; }
inline void store(uint16_t* to, uint16_t x) { *to = x; }
inline void store(uint32_t* to, uint32_t x) { *to = x; }
inline void store(uint64_t* to, uint64_t x) { *to = x; }

// Of elements for which there are no `Lanes`: totals are of the type that `widened` gives.
template <typename T>
void sum_in_rank_order(const T* const* addends, int count, int64_t size, T* __restrict to) {
  constexpr int64_t kBlock = 1024;  // totals stay in the first-level cache
  decltype(widened(T{})) total[kBlock];
  for (int64_t start = 0; start < size; start += kBlock) {
    const int64_t length = std::min(kBlock, size - start);
    for (int64_t i = 0; i < length; ++i) total[i] = widened(addends[0][start + i]);
    for (int rank = 1; rank < count; ++rank) {
      const T* addend = addends[rank] + start;
      for (int64_t i = 0; i < length; ++i) total[i] += widened(addend[i]);
    }
    for (int64_t i = 0; i < length; ++i) store(to + start + i, total[i]);
  }
}

// The sum of what lies at one place of each addend, not rounded yet.
template <typename T, typename Load>
inline Lanes<T> lanes_sum(const T* const* addends, int count, int64_t place, const Load& load) {
  Lanes<T> total = load(addends[0] + place);
  for (int rank = 1; rank < count; ++rank) total = total + load(addends[rank] + place);
  return total;
}

template <typename T>
void sum_of_lanes(const T* const* addends, int count, int64_t size, T* to) {
  for_each_lanes<T>(size, [&](int64_t place, const auto& load, const auto& store) {
    store(lanes_sum(addends, count, place, load).rounded(), to + place);
  });
}

inline void sum_in_rank_order(const float* const* addends, int count, int64_t size, float* to) {
  sum_of_lanes(addends, count, size, to);
}

inline void sum_in_rank_order(const BFloat16* const* addends, int count, int64_t size, BFloat16* to) {
  sum_of_lanes(addends, count, size, to);
}

}  // namespace tp
