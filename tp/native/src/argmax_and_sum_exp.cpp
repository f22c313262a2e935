// Of each row of logits, what a greedy choice and its probability need: the first of its highest values, where it is,
// and Σ exp(x − highest).

#include <algorithm>
#include <cmath>
#include <limits>

#include "exponential.h"
#include "lanes.h"
#include "tape.h"
#include "threads.h"

namespace tp {
namespace {

constexpr int64_t kBlock = 4096;  // is added up by itself, so that long rows lose no accuracy

template <typename T>
float highest_of(const T* x, int64_t size) {
  Floats most = Floats{} - std::numeric_limits<float>::infinity();
  int64_t i = 0;
  for (; i + Lanes<T>::kCount <= size; i += Lanes<T>::kCount)
    Lanes<T>::load(x + i).map([&](Floats each) { return most = each > most ? each : most; });
  float highest = maximum(most);
  for (; i < size; ++i) highest = std::max(highest, to_float(x[i]));
  return highest;
}

// NaN where a value is not finite.
template <typename T>
float sum_exp(const T* x, int64_t size, float highest) {
  Floats total = {}, zero_if_finite = {};
  int64_t i = 0;
  for (; i + Lanes<T>::kCount <= size; i += Lanes<T>::kCount)
    Lanes<T>::load(x + i).map([&](Floats each) {
      zero_if_finite += each * 0.0f;
      return total += exponential(each - highest);
    });
  float result = sum(total) + sum(zero_if_finite);
  for (; i < size; ++i) result += std::exp(to_float(x[i]) - highest) + to_float(x[i]) * 0.0f;
  return result;
}

// Of a row that begins with NaN: column 0.
template <typename T>
void one_row(const T* x, int64_t size, int64_t* column, float* highest, float* total) {
  *column = 0;
  *highest = size ? to_float(x[0]) : std::numeric_limits<float>::lowest();
  for (int64_t first = 0; first < size; first += kBlock) {
    const int64_t count = std::min(kBlock, size - first);
    const float most = highest_of(x + first, count);
    if (!(most > *highest)) continue;
    *highest = most;
    *column = first;
  }
  while (*column < size && to_float(x[*column]) != *highest) ++*column;
  if (*column == size) *column = 0;  // nothing equals NaN, nothing is higher
  double sum = 0;
  for (int64_t first = 0; first < size; first += kBlock)
    sum += sum_exp(x + first, std::min(kBlock, size - first), *highest);
  *total = static_cast<float>(sum);
}

template <typename T>
void argmax_and_sum_exp(const T* x, int64_t stride, int64_t rows, int64_t columns, int64_t* column, float* highest,
                        float* total, int threads) {
  in_parallel(rows, threads, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row)
      one_row(x + row * stride, columns, column + row, highest + row, total + row);
  });
}

}  // namespace
}  // namespace tp

#define TP_ARGMAX_AND_SUM_EXP(NAME, T)                                                                              \
  int NAME(const T* x, int64_t stride, int64_t rows, int64_t columns, int64_t* column, float* highest, float* total, \
           int threads) {                                                                                           \
    return tp::perform(                                                                                             \
        [=] { return tp::argmax_and_sum_exp(x, stride, rows, columns, column, highest, total, threads), 0; });      \
  }

extern "C" {
TP_ARGMAX_AND_SUM_EXP(tp_argmax_and_sum_exp_bfloat16, tp::BFloat16)
TP_ARGMAX_AND_SUM_EXP(tp_argmax_and_sum_exp_float32, float)
}
