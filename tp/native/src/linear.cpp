// y = x Wᵀ + b for a few rows of x: the weights are read from memory once, in their plain [out, in] order.
//
// Products are accumulated in float32 and rounded once, after the bias. int8 weights have a scale for each output.

#include <algorithm>
#include <vector>

#include "spread.h"
#include "tape.h"
#include "threads.h"
#include "vectors.h"

namespace tp {
namespace {

constexpr int64_t kPrefetchBytes = 4096;
constexpr int64_t kRowsPerTask = 8;

inline void prefetch(const void* address) { __builtin_prefetch(static_cast<const char*>(address) + kPrefetchBytes); }

// How weights of a type are multiplied with x: in what form x lies, and what a group of elements adds to a total.
template <typename Weight>
struct Product;

template <>
struct Product<float> {
  using Activation = float;
  using Group = Floats;
  static constexpr int64_t kGroup = kLanes;
  static void prepare(const float* x, int64_t size, float* to) { spread(x, size, to); }
  static Group group(const float* from) { return load(from); }
  static void add(Floats& total, Group w, const float* x) { total += w * load(x); }
};

template <>
struct Product<int8_t> {
  using Activation = float;
  using Group = Floats;
  static constexpr int64_t kGroup = kLanes;
  template <typename T>
  static void prepare(const T* x, int64_t size, float* to) {
    for (int64_t i = 0; i < size; ++i) to[i] = to_float(x[i]);
  }
  static Group group(const int8_t* from) { return load(from); }
  static void add(Floats& total, Group w, const float* x) { total += w * load(x); }
};

#if defined(__AVX512BF16__)
template <>
struct Product<BFloat16> {
  using Activation = BFloat16;
  using Group = __m512bh;
  static constexpr int64_t kGroup = 2 * kLanes;
  static void prepare(const BFloat16* x, int64_t size, BFloat16* to) { std::copy_n(x, size, to); }
  static Group group(const BFloat16* from) { return (__m512bh)load_words(from); }
  static void add(Floats& total, Group w, const BFloat16* x) {
    total = (Floats)_mm512_dpbf16_ps((__m512)total, w, (__m512bh)load_words(x));
  }
};
#else
template <>
struct Product<BFloat16> {
  using Activation = float;
  struct Group {
    Floats evens, odds;
  };
  static constexpr int64_t kGroup = 2 * kLanes;
  static void prepare(const BFloat16* x, int64_t size, float* to) { spread(x, size, to); }
  static Group group(const BFloat16* from) {
    const Words pairs = load_words(from);
    return {even(pairs), odd(pairs)};
  }
  static void add(Floats& total, const Group& w, const float* x) {
    total += w.evens * load(x);
    total += w.odds * load(x + kLanes);
  }
};
#endif

template <typename T, typename Weight>
struct Problem {
  const typename Product<Weight>::Activation* x;  // [rows, columns], prepared
  const Weight* weight;                           // [out, columns]
  const float* scales;                            // [out] or null: 1
  const T* bias;                                  // [out] or null: 0
  T* y;                                           // [rows, out]
  int64_t columns, whole, out;                    // whole: the columns that fill groups
};

template <typename T, typename Weight>
void finish(const Problem<T, Weight>& p, int64_t row, int64_t n, Floats total) {
  float result = sum(total);
  for (int64_t k = p.whole; k < p.columns; ++k)
    result += to_float(p.weight[n * p.columns + k]) * to_float(p.x[row * p.columns + k]);
  if (p.scales) result *= p.scales[n];
  store(p.y + row * p.out + n, p.bias ? result + to_float(p.bias[n]) : result);
}

// One weight row after the other, so that memory is read as one stream; several accumulators hide the latency of adds.
template <typename T, typename Weight>
void one_row(const Problem<T, Weight>& p, int64_t first, int64_t last) {
  using P = Product<Weight>;
  constexpr int kTotals = 4;
  for (int64_t n = first; n < last; ++n) {
    const Weight* w = p.weight + n * p.columns;
    Floats totals[kTotals] = {};
    int64_t k = 0;
    for (; k + kTotals * P::kGroup <= p.whole; k += kTotals * P::kGroup)
      for (int i = 0; i < kTotals; ++i) {
        prefetch(w + k + i * P::kGroup);
        P::add(totals[i], P::group(w + k + i * P::kGroup), p.x + k + i * P::kGroup);
      }
    for (; k < p.whole; k += P::kGroup) P::add(totals[0], P::group(w + k), p.x + k);
    finish(p, 0, n, (totals[0] + totals[1]) + (totals[2] + totals[3]));
  }
}

// A tile of weight rows times rows of x: each load of either serves several products.
template <int kWeightRows, int kRows, typename T, typename Weight>
void tile(const Problem<T, Weight>& p, int64_t row, int64_t n) {
  using P = Product<Weight>;
  const Weight* w = p.weight + n * p.columns;
  const auto* x = p.x + row * p.columns;
  Floats totals[kWeightRows][kRows] = {};
  for (int64_t k = 0; k < p.whole; k += P::kGroup) {
    typename P::Group groups[kWeightRows];
    for (int i = 0; i < kWeightRows; ++i) {
      prefetch(w + i * p.columns + k);
      groups[i] = P::group(w + i * p.columns + k);
    }
    for (int m = 0; m < kRows; ++m)
      for (int i = 0; i < kWeightRows; ++i) P::add(totals[i][m], groups[i], x + m * p.columns + k);
  }
  for (int i = 0; i < kWeightRows; ++i)
    for (int m = 0; m < kRows; ++m) finish(p, row + m, n + i, totals[i][m]);
}

template <int kRows, typename T, typename Weight>
void tiles(const Problem<T, Weight>& p, int64_t row, int64_t first, int64_t last) {
  int64_t n = first;
  for (; n + 2 <= last; n += 2) tile<2, kRows>(p, row, n);
  for (; n < last; ++n) tile<1, kRows>(p, row, n);
}

template <typename T, typename Weight>
void some_rows(const Problem<T, Weight>& p, int64_t rows, int64_t first, int64_t last) {
  for (int64_t n = first; n < last; n += kRowsPerTask) {  // few weight rows at a time, so that they stay in the cache
    const int64_t end = std::min(last, n + kRowsPerTask);
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) tiles<4>(p, row, n, end);
    switch (rows - row) {
      case 3: tiles<3>(p, row, n, end); break;
      case 2: tiles<2>(p, row, n, end); break;
      case 1: tiles<1>(p, row, n, end); break;
    }
  }
}

template <typename T, typename Weight>
void linear(const T* x, int64_t x_stride, const Weight* weight, const float* scales, const T* bias, T* y,
            int64_t rows, int64_t columns, int64_t out, int threads) {
  using P = Product<Weight>;
  thread_local std::vector<typename P::Activation> prepared;
  prepared.resize(rows * columns);
  for (int64_t row = 0; row < rows; ++row) P::prepare(x + row * x_stride, columns, prepared.data() + row * columns);
  const int64_t whole = columns / P::kGroup * P::kGroup;
  const Problem<T, Weight> problem{prepared.data(), weight, scales, bias, y, columns, whole, out};
  in_parallel(out, threads, [&](int64_t first, int64_t last) {
    if (rows == 1)
      one_row(problem, first, last);
    else
      some_rows(problem, rows, first, last);
  });
}

}  // namespace
}  // namespace tp

// x: [rows, columns] with a stride between rows; weight: [out, columns]; scales, bias: [out] or null; y: [rows, out].
#define TP_LINEAR(NAME, T, WEIGHT)                                                                                    \
  int NAME(const T* x, int64_t x_stride, const WEIGHT* weight, const float* scales, const T* bias, T* y, int64_t rows, \
           int64_t columns, int64_t out, int threads) {                                                               \
    return tp::perform(                                                                                               \
        [=] { return tp::linear(x, x_stride, weight, scales, bias, y, rows, columns, out, threads), 0; });            \
  }

extern "C" {
TP_LINEAR(tp_linear_bfloat16, tp::BFloat16, tp::BFloat16)
TP_LINEAR(tp_linear_float32, float, float)
TP_LINEAR(tp_linear_bfloat16_int8, tp::BFloat16, int8_t)
TP_LINEAR(tp_linear_float32_int8, float, int8_t)
}
