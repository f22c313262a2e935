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

// Weight rows n, n + apart, … times kRows rows of x from `row` on. The rows are far from each other, so that memory is
// read as several streams at once: one alone does not keep it busy.
template <int kStreams, int kRows, typename T, typename Weight>
void tile(const Problem<T, Weight>& p, int64_t row, int64_t n, int64_t apart) {
  using P = Product<Weight>;
  constexpr int kGroups = kRows == 1 ? 2 : 1;  // accumulators enough to hide the latency of adds
  const Weight* weight = p.weight + n * p.columns;
  const auto* x = p.x + row * p.columns;
  const int64_t stride = apart * p.columns;
  Floats totals[kStreams][kRows][kGroups] = {};
  int64_t k = 0;
  for (; k + kGroups * P::kGroup <= p.whole; k += kGroups * P::kGroup) {
#pragma GCC unroll 4
    for (int i = 0; i < kStreams; ++i)
#pragma GCC unroll 2
      for (int group = 0; group < kGroups; ++group) {
        const int64_t place = k + group * P::kGroup;
        const auto weights = P::group(weight + i * stride + place);
#pragma GCC unroll 4
        for (int m = 0; m < kRows; ++m) P::add(totals[i][m][group], weights, x + m * p.columns + place);
      }
  }
  for (; k < p.whole; k += P::kGroup)
    for (int i = 0; i < kStreams; ++i)
      for (int m = 0; m < kRows; ++m) P::add(totals[i][m][0], P::group(weight + i * stride + k), x + m * p.columns + k);
  for (int i = 0; i < kStreams; ++i)
    for (int m = 0; m < kRows; ++m) {
      Floats total = totals[i][m][0];
      for (int group = 1; group < kGroups; ++group) total += totals[i][m][group];
      finish(p, row + m, n + i * apart, total);
    }
}

// The same for all rows of x, a few at a time: the weight rows are in the cache after the first.
template <int kStreams, typename T, typename Weight>
void tiles(const Problem<T, Weight>& p, int64_t rows, int64_t n, int64_t apart) {
  constexpr int kMost = kStreams == 4 ? 2 : 4;  // more would not fit the registers
  int64_t row = 0;
  for (; row + kMost <= rows; row += kMost) tile<kStreams, kMost>(p, row, n, apart);
  switch (rows - row) {
    case 3: tile<kStreams, 3>(p, row, n, apart); break;
    case 2: tile<kStreams, 2>(p, row, n, apart); break;
    case 1: tile<kStreams, 1>(p, row, n, apart); break;
  }
}

// Weight rows [first, last): `kStreams` parts of them side by side, and what is left over one by one.
template <int kStreams, typename T, typename Weight>
void streams(const Problem<T, Weight>& p, int64_t rows, int64_t first, int64_t last) {
  const int64_t apart = (last - first) / kStreams;
  for (int64_t n = first; n < first + apart; ++n) tiles<kStreams>(p, rows, n, apart);
  for (int64_t n = first + kStreams * apart; n < last; ++n) tiles<1>(p, rows, n, 1);
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
    if (rows <= 2)
      streams<4>(problem, rows, first, last);
    else
      streams<2>(problem, rows, first, last);
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
