// y = x Wᵀ + b for a few rows of x: the weights are read from memory once, in their plain [out, in] order.
//
// Products are accumulated in float32 and rounded once, after the bias. int8 weights have a scale for each output. A row's
// results do not depend on how many rows there are: every tile adds up alike.

#include <algorithm>
#include <cmath>
#include <limits>

#include "lanes.h"
#include "products.h"
#include "scratch.h"
#include "tape.h"
#include "threads.h"
#include "vectors.h"

namespace tp {
namespace {

using tp::sums;  // beside that of integers below

// How x and the weights are multiplied: the form that x is brought into, and what a group of elements adds to a total.
// Bfloat16 is split into even and odd elements; x, which meets every weight row, is brought into that order once.
template <typename T>
struct Plain {
  using Weight = T;
  using Activation = float;
  using Total = Floats;
  using Group = Lanes<T>;
  static constexpr int64_t kGroup = Group::kCount;
  static float prepare(const T* x, int64_t size, float* to) {
    int64_t k = 0;
    for (; k + kGroup <= size; k += kGroup) Group::load(x + k).store(to + k);
    for (; k < size; ++k) to[k] = to_float(x[k]);
    return 1.0f;
  }
  static Group group(const T* from) { return Group::load(from); }
  static void add(Total& total, const Group& w, const float* x) { total = w.add_products(total, Group::load(x)); }
};

#if defined(__AVX512BF16__)
template <>
struct Plain<BFloat16> {
  using Weight = BFloat16;
  using Activation = BFloat16;
  using Total = Floats;
  using Group = Words;
  static constexpr int64_t kGroup = 2 * kLanes;
  static float prepare(const BFloat16* x, int64_t size, BFloat16* to) { return std::copy_n(x, size, to), 1.0f; }
  static Group group(const BFloat16* from) { return load_words(from); }
  static void add(Total& total, Group w, const BFloat16* x) { total = add_product(total, w, load_words(x)); }
};
#endif

// int8 weights widened to float32.
struct Widened {
  using Weight = int8_t;
  using Activation = float;
  using Total = Floats;
  using Group = Floats;
  static constexpr int64_t kGroup = kLanes;
  template <typename T>
  static float prepare(const T* x, int64_t size, float* to) {
    for (int64_t i = 0; i < size; ++i) to[i] = to_float(x[i]);
    return 1.0f;
  }
  static Group group(const int8_t* from) { return load(from); }
  static void add(Total& total, Group w, const float* x) { total = add_product(total, w, load(x)); }
};

#if defined(__AVX2__)
// int8 weights times x in 16-bit integers, in steps of its largest magnitude / most: half of `Widened`'s instructions.
// Values far below the largest lose digits; a row with a value that is not finite becomes NaN.
//
// Each of a total's 8 lanes adds up size / 8 products of at most 127 · most, which must stay below 2^31: `most` is that
// of 16 bits, 32767, up to 4,000 columns, and less past them.
struct Integers {
  using Weight = int8_t;
  using Activation = int16_t;
  using Group = __m256i;
  struct Total {
    __m256i lanes;
    Total& operator+=(const Total& other) { return lanes = _mm256_add_epi32(lanes, other.lanes), *this; }
  };
  static constexpr int64_t kGroup = 16;
  static float prepare(const BFloat16* x, int64_t size, int16_t* to) {
    float largest = 0;
    bool finite = true;
    for (int64_t i = 0; i < size; ++i) {
      const float magnitude = std::fabs(to_float(x[i]));
      largest = std::max(largest, magnitude);
      finite &= std::isfinite(magnitude);
    }
    const float most = std::min(32767.0f, 2147483647.0f / 127 * 8 / static_cast<float>(size + 16));
    const float factor = finite && largest > 0 ? most / largest : 0.0f;
    for (int64_t i = 0; i < size; ++i) to[i] = finite ? static_cast<int16_t>(std::lrint(to_float(x[i]) * factor)) : 0;
    return finite ? largest / most : std::numeric_limits<float>::quiet_NaN();
  }
  static Group group(const int8_t* from) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static void add(Total& total, Group w, const int16_t* x) {
    const __m256i activations = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    total += {_mm256_madd_epi16(w, activations)};
  }
};

template <int kCount>
inline void sums(const Integers::Total* x, float* to) {
  for (int i = 0; i < kCount; ++i) {
    const __m256 lanes = _mm256_cvtepi32_ps(x[i].lanes);
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    to[i] = _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }
}
#else
using Integers = Widened;
#endif

constexpr int64_t kLine = 16;  // outputs next to each other that are finished together
constexpr int kTotals = TP_VECTOR_BYTES == 64 ? 16 : 8;  // registers of a tile's totals: half of those that there are

template <typename T, typename P>
struct Problem {
  const typename P::Activation* x;    // [rows, columns], prepared
  int64_t stride;                     // of x's rows
  const float* units;                 // [rows]: what 1 in x stands for
  const typename P::Weight* weight;   // [out, columns]
  const float* scales;                // [out] or null: what 1 in the weights stands for
  const T* bias;                      // [out] or null: 0
  T* y;                               // [rows, out]
  int64_t columns, whole, out;        // whole: the columns that fill groups
};

// Weight rows n, n + apart, … times kRows rows of x from `row` on, over whole groups of columns: results[(i · kRows + m) ·
// kLine] for stream i. The streams are far from each other, so that memory is read at several places at once: one alone
// does not keep it busy.
template <int kStreams, int kRows, typename T, typename P>
void tile(const Problem<T, P>& p, int64_t row, int64_t n, int64_t apart, float* results) {
  const typename P::Weight* weight = p.weight + n * p.columns;
  const auto* x = p.x + row * p.stride;
  const int64_t stride = apart * p.columns;
  typename P::Total totals[kStreams * kRows] = {};
  const auto add_group = [&](int64_t k) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int i = 0; i < kStreams; ++i) {
      const auto weights = P::group(weight + i * stride + k);
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) P::add(totals[i * kRows + m], weights, x + m * p.stride + k);
    }
  };
  constexpr int64_t kStep = (kRows <= 2 ? 4 : 1) * P::kGroup;  // few rows give little to do between two branches
  int64_t k = 0;
  for (; k + kStep <= p.whole; k += kStep)
#pragma GCC unroll 4
    for (int64_t place = k; place < k + kStep; place += P::kGroup) add_group(place);
  for (; k < p.whole; k += P::kGroup) add_group(k);
  float summed[kStreams * kRows];
  sums<kStreams * kRows>(totals, summed);
  for (int i = 0; i < kStreams * kRows; ++i) results[i * kLine] = summed[i];
}

// y[row, n … n + count) from the sums over the whole groups.
template <typename T, typename P>
void finish(const Problem<T, P>& p, int64_t row, int64_t n, int64_t count, float* results) {
  if (p.whole < p.columns)
    for (int64_t j = 0; j < count; ++j)
      for (int64_t k = p.whole; k < p.columns; ++k)
        results[j] =
            std::fma(to_float(p.weight[(n + j) * p.columns + k]), to_float(p.x[row * p.stride + k]), results[j]);
  if (p.scales)
    for (int64_t j = 0; j < count; ++j) results[j] *= p.scales[n + j] * p.units[row];
  if (p.bias)
    for (int64_t j = 0; j < count; ++j) results[j] += to_float(p.bias[n + j]);
  for (int64_t j = 0; j < count; ++j) store(p.y + row * p.out + n + j, results[j]);
}

// `count` outputs from n on, at most kLine, of each stream and of kRows rows of x.
template <int kStreams, int kRows, typename T, typename P>
void lines(const Problem<T, P>& p, int64_t row, int64_t n, int64_t count, int64_t apart) {
  float results[kStreams * kRows * kLine];
  for (int64_t j = 0; j < count; ++j) tile<kStreams, kRows>(p, row, n + j, apart, results + j);
  for (int i = 0; i < kStreams; ++i)
    for (int m = 0; m < kRows; ++m) finish(p, row + m, n + i * apart, count, results + (i * kRows + m) * kLine);
}

// The same of `rows` rows, at most kRows.
template <int kStreams, int kRows, typename T, typename P>
void lines_of(int64_t rows, const Problem<T, P>& p, int64_t row, int64_t n, int64_t count, int64_t apart) {
  if (rows == kRows) return lines<kStreams, kRows>(p, row, n, count, apart);
  if constexpr (kRows > 1) lines_of<kStreams, kRows - 1>(rows, p, row, n, count, apart);
}

// Weight rows [first, last): `kStreams` parts of them side by side, and what is left over one by one. All rows of x, at
// most kMost at a time, meet the weights of a line: these are in the cache after the first.
template <int kStreams, int kMost, typename T, typename P>
void streams(const Problem<T, P>& p, int64_t rows, int64_t first, int64_t last) {
  const int64_t apart = (last - first) / kStreams;
  for (int64_t n = first; n < first + apart; n += kLine)
    for (int64_t row = 0; row < rows; row += kMost)
      lines_of<kStreams, kMost>(std::min<int64_t>(kMost, rows - row), p, row, n, std::min(kLine, first + apart - n),
                                apart);
  for (int64_t n = first + kStreams * apart; n < last; ++n)
    for (int64_t row = 0; row < rows; ++row) lines<1, 1>(p, row, n, 1, 1);
}

template <typename P, typename T>
void linear(const T* x, int64_t x_stride, const typename P::Weight* weight, const float* scales, const T* bias, T* y,
            int64_t rows, int64_t columns, int64_t out, int threads) {
  thread_local Scratch<typename P::Activation> prepared;
  thread_local Scratch<float> units;
  const int64_t stride = whole_lines<typename P::Activation>(columns);
  prepared.resize(rows * stride);
  units.resize(rows);
  for (int64_t row = 0; row < rows; ++row)
    units[row] = P::prepare(x + row * x_stride, columns, prepared.data() + row * stride);
  const int64_t whole = columns / P::kGroup * P::kGroup;
  const Problem<T, P> problem{prepared.data(), stride, units.data(), weight, scales, bias, y, columns, whole, out};
  in_parallel(out, threads, [&](int64_t first, int64_t last) {
    if constexpr (kTotals == 16)
      streams<4, 4>(problem, rows, first, last);
    else if (rows <= 2)
      streams<4, 2>(problem, rows, first, last);
    else
      streams<2, 4>(problem, rows, first, last);
  });
}

}  // namespace
}  // namespace tp

// x: [rows, columns] with a stride between rows; weight: [out, columns]; scales, bias: [out] or null; y: [rows, out].
#define TP_LINEAR(NAME, T, PRODUCT)                                                                               \
  int NAME(const T* x, int64_t x_stride, const PRODUCT::Weight* weight, const float* scales, const T* bias, T* y, \
           int64_t rows, int64_t columns, int64_t out, int threads) {                                             \
    return tp::perform([=] {                                                                                      \
      return tp::linear<PRODUCT>(x, x_stride, weight, scales, bias, y, rows, columns, out, threads), 0;           \
    });                                                                                                           \
  }

extern "C" {
TP_LINEAR(tp_linear_bfloat16, tp::BFloat16, tp::Plain<tp::BFloat16>)
TP_LINEAR(tp_linear_float32, float, tp::Plain<float>)
TP_LINEAR(tp_linear_int8_bfloat16, tp::BFloat16, tp::Integers)
TP_LINEAR(tp_linear_int8_float32, float, tp::Widened)
}
