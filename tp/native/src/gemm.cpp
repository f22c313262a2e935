// y = x Wᵀ + b for many rows of bfloat16 (GEMM).
//
// A panel of weights is packed for each call: a register then holds a column, or a pair of columns, of as many outputs as
// it has lanes, and every row of x meets the panel in the cache. Products are accumulated in float32, over columns in
// their order, whatever the number of rows, and rounded once, after the bias. int8 weights, exact in bfloat16, have a
// scale for each output.

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "products.h"
#include "scratch.h"
#include "tape.h"
#include "threads.h"
#include "transpose.h"
#include "vectors.h"

#if defined(__AVX2__)

namespace tp {
namespace {

#if TP_VECTOR_BYTES == 64
constexpr int kRows = 6, kVectors = 4;  // of a tile: 24 registers of totals, 4 of weights
#else
constexpr int kRows = 6, kVectors = 2;  // of a tile: 12 registers of totals, 2 of weights
#endif
constexpr int64_t kTileWidth = kVectors * kLanes;  // outputs of a tile
constexpr int64_t kWidth = 64;                     // outputs of a panel: whole tiles
constexpr int64_t kMostRows = 2048;                // that meet a packed panel: their totals are 512 KiB

using Element = Operand<BFloat16>::Element;            // of a panel
constexpr int64_t kTerms = Operand<BFloat16>::kTerms;  // columns of weights in an element

// How a pair of columns is put into a panel, and the elements of at most kRows rows of x that meet it.
#if defined(__AVX512BF16__)
constexpr int64_t kColumns = 2048;  // of a panel: 256 KiB

void put(Words pairs, int64_t pair, Element* panel, int64_t stride) {
  store(panel + pair * stride, pairs);
}

struct Rows {  // read where they are
  const BFloat16* x;
  int64_t stride;

  Rows(const BFloat16* x, int64_t stride, int64_t, int64_t) : x(x), stride(stride) {}
  Element operator()(int64_t row, int64_t pair) const {
    Element both;
    std::memcpy(&both, x + row * stride + 2 * pair, sizeof both);
    return both;
  }
};
#else
constexpr int64_t kColumns = 256;  // of a panel: 64 KiB

void put(Words pairs, int64_t pair, Element* panel, int64_t stride) {
  store(panel + 2 * pair * stride, even(pairs));
  store(panel + (2 * pair + 1) * stride, odd(pairs));
}

struct Rows {  // widened once for all tiles
  float x[kRows][kColumns];

  Rows(const BFloat16* from, int64_t stride, int64_t rows, int64_t columns) {
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t k = 0; k < columns; ++k) x[row][k] = to_float(from[row * stride + k]);
  }
  Element operator()(int64_t row, int64_t column) const { return x[row][column]; }
};
#endif

template <typename Weight>
struct Gemm {
  const BFloat16* x;     // [rows, columns], with a stride between rows
  int64_t x_stride;
  const Weight* weight;  // [out, columns]; columns is even
  const float* scales;   // [out] or null: what 1 in the weights stands for
  const BFloat16* bias;  // [out] or null: 0
  BFloat16* y;           // [rows, out]
  int64_t rows, columns, out;
};

// Packs `pairs` pairs of columns, at most kLanes, of `count` rows of weights as panel[column, row].
void pack_square(const BFloat16* weight, int64_t columns, int64_t count, int64_t pairs, Element* panel,
                 int64_t stride) {
  transpose_words(weight, 2 * columns, count, pairs,
                  [=](int64_t pair, Words words) { put(words, pair, panel, stride); });
}

void pack_square(const int8_t* weight, int64_t columns, int64_t count, int64_t pairs, Element* panel, int64_t stride) {
  BFloat16 wide[kLanes][2 * kLanes];
  for (int64_t i = 0; i < count; ++i)
    for (int64_t j = 0; j < 2 * pairs; ++j) store(&wide[i][j], to_float(weight[i * columns + j]));
  pack_square(wide[0], 2 * kLanes, count, pairs, panel, stride);
}

// A panel holds outputs [n, n + count) of columns [k, k + size): whole tiles, then tiles of one register, whose outputs
// beyond are zeros. visit(first output, place in the panel, registers of the tile) for each of them.
template <typename Visit>
void for_each_tile(int64_t count, int64_t size, const Visit& visit) {
  const int64_t depth = size / kTerms;
  int64_t n = 0;
  for (; n + kTileWidth <= count; n += kTileWidth) visit(n, n * depth, std::integral_constant<int, kVectors>());
  for (; n < count; n += kLanes) visit(n, n * depth, std::integral_constant<int, 1>());
}

template <typename Weight>
void pack(const Gemm<Weight>& p, int64_t n, int64_t count, int64_t k, int64_t size, Element* panel) {
  for_each_tile(count, size, [&](int64_t first, int64_t place, auto vectors) {
    constexpr int64_t kStride = vectors * kLanes;
    for (int64_t i = 0; i < kStride; i += kLanes)
      for (int64_t j = 0; j < size; j += 2 * kLanes)
        pack_square(p.weight + (n + first + i) * p.columns + k + j, p.columns, std::min(kLanes, count - first - i),
                    std::min(kLanes, (size - j) / 2), panel + place + j / kTerms * kStride + i, kStride);
  });
}

// totals[m, n] += Σ_k x[m, k] panel[k, n] of kTileRows rows and kTileVectors registers of outputs.
template <int kTileRows, int kTileVectors>
void tile(const Rows& x, const Element* panel, int64_t depth, float* totals) {
  constexpr int64_t kStride = kTileVectors * kLanes;
  Floats sums[kTileRows][kTileVectors];
#pragma GCC unroll 6
  for (int m = 0; m < kTileRows; ++m)
#pragma GCC unroll 4
    for (int i = 0; i < kTileVectors; ++i) sums[m][i] = load(totals + m * kWidth + i * kLanes);
#pragma GCC unroll 2
  for (int64_t k = 0; k < depth; ++k) {
    decltype(load(panel)) weights[kTileVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kTileVectors; ++i) weights[i] = load(panel + k * kStride + i * kLanes);
#pragma GCC unroll 6
    for (int m = 0; m < kTileRows; ++m)
#pragma GCC unroll 4
      for (int i = 0; i < kTileVectors; ++i) sums[m][i] = add_product(sums[m][i], weights[i], broadcast(x(m, k)));
  }
#pragma GCC unroll 6
  for (int m = 0; m < kTileRows; ++m)
#pragma GCC unroll 4
    for (int i = 0; i < kTileVectors; ++i) store(totals + m * kWidth + i * kLanes, sums[m][i]);
}

// The same of `rows` rows, at most kTileRows.
template <int kTileRows, int kTileVectors>
void tile_of(int64_t rows, const Rows& x, const Element* panel, int64_t depth, float* totals) {
  if (rows == kTileRows) return tile<kTileRows, kTileVectors>(x, panel, depth, totals);
  if constexpr (kTileRows > 1) tile_of<kTileRows - 1, kTileVectors>(rows, x, panel, depth, totals);
}

// y[row, n … n + count) from the totals.
template <typename Weight>
void finish(const Gemm<Weight>& p, int64_t row, int64_t n, int64_t count, float* totals) {
  if (p.scales)
    for (int64_t j = 0; j < count; ++j) totals[j] *= p.scales[n + j];
  if (p.bias)
    for (int64_t j = 0; j < count; ++j) totals[j] += to_float(p.bias[n + j]);
  for (int64_t j = 0; j < count; ++j) store(p.y + row * p.out + n + j, totals[j]);
}

// Outputs [n, n + count), at most kWidth, of all rows.
template <typename Weight>
void multiply_panel(const Gemm<Weight>& p, int64_t n, int64_t count, Element* packed, float* totals) {
  std::fill_n(totals, p.rows * kWidth, 0.0f);
  for (int64_t k = 0; k < p.columns; k += kColumns) {
    const int64_t size = std::min(kColumns, p.columns - k);
    pack(p, n, count, k, size, packed);
    for (int64_t row = 0; row < p.rows; row += kRows) {
      const int64_t rows = std::min<int64_t>(kRows, p.rows - row);
      const Rows x(p.x + row * p.x_stride + k, p.x_stride, rows, size);
      float* of_rows = totals + row * kWidth;
      for_each_tile(count, size, [&](int64_t first, int64_t place, auto vectors) {
        tile_of<kRows, vectors>(rows, x, packed + place, size / kTerms, of_rows + first);
      });
      if (k + size == p.columns)
        for (int64_t m = 0; m < rows; ++m) finish(p, row + m, n, count, of_rows + m * kWidth);
    }
  }
}

template <typename Weight>
void gemm(const Gemm<Weight>& p, int threads) {
  if (p.rows > kMostRows) {
    Gemm<Weight> first = p, others = p;
    first.rows = kMostRows;
    others.rows -= kMostRows;
    others.x += kMostRows * p.x_stride;
    others.y += kMostRows * p.out;
    gemm(first, threads);
    return gemm(others, threads);
  }
  in_parallel((p.out + kLanes - 1) / kLanes, threads, [&](int64_t first, int64_t last) {
    thread_local Scratch<Element> packed;
    thread_local Scratch<float> totals;
    packed.resize(kColumns / kTerms * kWidth);
    totals.resize(p.rows * kWidth);
    const int64_t end = std::min(last * kLanes, p.out);
    for (int64_t n = first * kLanes; n < end; n += kWidth)
      multiply_panel(p, n, std::min(kWidth, end - n), packed.data(), totals.data());
  });
}

}  // namespace
}  // namespace tp

// x: [rows, columns] with a stride between rows; weight: [out, columns]; scales, bias: [out] or null; y: [rows, out].
#define TP_GEMM(NAME, WEIGHT)                                                                                       \
  int NAME(const tp::BFloat16* x, int64_t x_stride, const WEIGHT* weight, const float* scales,                      \
           const tp::BFloat16* bias, tp::BFloat16* y, int64_t rows, int64_t columns, int64_t out, int threads) {    \
    const tp::Gemm<WEIGHT> gemm{x, x_stride, weight, scales, bias, y, rows, columns, out};                          \
    return tp::perform([=] { return tp::gemm(gemm, threads), 0; });                                                 \
  }

extern "C" {
#if !defined(__AMX_BF16__)  // torch multiplies squares of bfloat16 with it
TP_GEMM(tp_gemm_bfloat16, tp::BFloat16)
#endif
TP_GEMM(tp_gemm_int8_bfloat16, int8_t)
}

#endif
