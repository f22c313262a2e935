// y = x Wᵀ + b for many rows of x (GEMM), in bfloat16, on CPUs with instructions for it.
//
// A panel of weights is packed for each call: registers then hold a pair of columns of as many outputs as they have
// lanes, and every row of x meets the panel in the cache. Products are accumulated in float32, over columns in their
// order, whatever the number of rows, and rounded once, after the bias. int8 weights, exact in bfloat16, have a scale
// for each output.

#include <algorithm>
#include <vector>

#include "tape.h"
#include "threads.h"
#include "transpose.h"
#include "vectors.h"

#if defined(__AVX512BF16__)

namespace tp {
namespace {

constexpr int kRows = 6, kVectors = 4;  // of a tile: 24 registers of totals, 4 of weights
constexpr int64_t kWidth = kVectors * kLanes;  // outputs of a panel
constexpr int64_t kColumns = 2048;             // of a panel: 256 KiB
constexpr int64_t kMostRows = 2048;            // that meet a packed panel: their totals are 512 KiB

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

// `pairs` columns by two, at most kLanes, of `count` rows of weights as to[pair · stride + row].
void pack_square(const BFloat16* weight, int64_t columns, int64_t count, int64_t pairs, uint32_t* to, int64_t stride) {
  transpose_words(weight, 2 * columns, count, pairs, to, stride);
}

void pack_square(const int8_t* weight, int64_t columns, int64_t count, int64_t pairs, uint32_t* to, int64_t stride) {
  BFloat16 wide[kLanes][2 * kLanes];
  for (int64_t i = 0; i < count; ++i)
    for (int64_t j = 0; j < 2 * pairs; ++j) store(&wide[i][j], to_float(weight[i * columns + j]));
  transpose_words(wide, sizeof wide[0], count, pairs, to, stride);
}

// Outputs [n, n + count) and columns [k, k + size) as panel[pair, output], zeros for outputs beyond.
template <typename Weight>
void pack(const Gemm<Weight>& p, int64_t n, int64_t count, int64_t k, int64_t size, int64_t width, uint32_t* panel) {
  for (int64_t i = 0; i < width; i += kLanes)
    for (int64_t j = 0; j < size; j += 2 * kLanes)
      pack_square(p.weight + (n + i) * p.columns + k + j, p.columns, std::min(kLanes, count - i),
                  std::min(kLanes, (size - j) / 2), panel + j / 2 * width + i, width);
}

// totals[m, n] += Σ_k x[m, k] panel[k, n] of kTileRows rows and kTileVectors registers of outputs.
template <int kTileRows, int kTileVectors>
void tile(const BFloat16* x, int64_t x_stride, const uint32_t* panel, int64_t pairs, float* totals) {
  constexpr int64_t kStride = kTileVectors * kLanes;
  Floats sums[kTileRows][kTileVectors];
#pragma GCC unroll 6
  for (int m = 0; m < kTileRows; ++m)
#pragma GCC unroll 4
    for (int i = 0; i < kTileVectors; ++i) sums[m][i] = load(totals + m * kStride + i * kLanes);
  for (int64_t k = 0; k < pairs; ++k) {
    Words weights[kTileVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kTileVectors; ++i) weights[i] = load_words(panel + k * kStride + i * kLanes);
#pragma GCC unroll 6
    for (int m = 0; m < kTileRows; ++m) {
      uint32_t pair;
      std::memcpy(&pair, x + m * x_stride + 2 * k, sizeof pair);
#pragma GCC unroll 4
      for (int i = 0; i < kTileVectors; ++i) sums[m][i] = dot_pairs(sums[m][i], weights[i], Words{} + pair);
    }
  }
#pragma GCC unroll 6
  for (int m = 0; m < kTileRows; ++m)
#pragma GCC unroll 4
    for (int i = 0; i < kTileVectors; ++i)
      std::memcpy(totals + m * kStride + i * kLanes, &sums[m][i], sizeof(Floats));
}

// The same of `rows` rows, at most kTileRows.
template <int kTileRows, int kTileVectors>
void tile_of(int64_t rows, const BFloat16* x, int64_t x_stride, const uint32_t* panel, int64_t pairs, float* totals) {
  if (rows == kTileRows) return tile<kTileRows, kTileVectors>(x, x_stride, panel, pairs, totals);
  if constexpr (kTileRows > 1) tile_of<kTileRows - 1, kTileVectors>(rows, x, x_stride, panel, pairs, totals);
}

// y[row, n … n + count) from the totals.
template <typename Weight>
void finish(const Gemm<Weight>& p, int64_t row, int64_t n, int64_t count, const float* totals) {
  BFloat16* y = p.y + row * p.out + n;
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t lanes = std::min(kLanes, count - i);
    const __mmask16 some = static_cast<__mmask16>((1u << lanes) - 1);
    Floats sums = load(totals + i);
    if (p.scales) sums *= (Floats)_mm512_maskz_loadu_ps(some, p.scales + n + i);
    if (p.bias) {
      const __m512i bias = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, p.bias + n + i));
      sums += (Floats)_mm512_slli_epi32(bias, 16);
    }
    _mm256_mask_storeu_epi16(y + i, some, (__m256i)_mm512_cvtneps_pbh((__m512)sums));
  }
}

// Outputs [n, n + count) of all rows, at most kPanelVectors registers of them.
template <int kPanelVectors, typename Weight>
void panel(const Gemm<Weight>& p, int64_t n, int64_t count, uint32_t* packed, float* totals) {
  constexpr int64_t kStride = kPanelVectors * kLanes;
  std::fill_n(totals, p.rows * kStride, 0.0f);
  for (int64_t k = 0; k < p.columns; k += kColumns) {
    const int64_t size = std::min(kColumns, p.columns - k);
    pack(p, n, count, k, size, kStride, packed);
    for (int64_t row = 0; row < p.rows; row += kRows) {
      const int64_t rows = std::min<int64_t>(kRows, p.rows - row);
      float* of_rows = totals + row * kStride;
      tile_of<kRows, kPanelVectors>(rows, p.x + row * p.x_stride + k, p.x_stride, packed, size / 2, of_rows);
      if (k + size == p.columns)
        for (int64_t m = 0; m < rows; ++m) finish(p, row + m, n, count, of_rows + m * kStride);
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
    thread_local std::vector<uint32_t> packed;
    thread_local std::vector<float> totals;
    packed.resize(kColumns / 2 * kWidth);
    totals.resize(p.rows * kWidth);
    int64_t n = first * kLanes;
    const int64_t end = std::min(last * kLanes, p.out);
    for (; n + kWidth <= end; n += kWidth) panel<kVectors>(p, n, kWidth, packed.data(), totals.data());
    for (; n < end; n += kLanes) panel<1>(p, n, std::min(kLanes, end - n), packed.data(), totals.data());
  });
}

}  // namespace
}  // namespace tp

// x: [rows, columns] with a stride between rows; weight: [out, columns]; scales, bias: [out] or null; y: [rows, out].
#define TP_GEMM(NAME, WEIGHT)                                                                             \
  int NAME(const tp::BFloat16* x, int64_t x_stride, const WEIGHT* weight, const float* scales,                      \
           const tp::BFloat16* bias, tp::BFloat16* y, int64_t rows, int64_t columns, int64_t out, int threads) {    \
    const tp::Gemm<WEIGHT> gemm{x, x_stride, weight, scales, bias, y, rows, columns, out};                    \
    return tp::perform([=] { return tp::gemm(gemm, threads), 0; });                                    \
  }

extern "C" {
TP_GEMM(tp_gemm_bfloat16, tp::BFloat16)
TP_GEMM(tp_gemm_int8_bfloat16, int8_t)
}

#endif
