// A square of 32-bit words, as many as a register has lanes each way, whose rows become columns.
#pragma once

#include <cstdint>

#include "vectors.h"

namespace tp {

// Calls put(j, words) for j in [0, columns): word j of each of the first `rows` rows, and zeros up to the last lane.
// Rows lie row_bytes apart; at most kLanes rows and columns.
//
// Words of two rows are interleaved, then pairs of words, then whole 128-bit parts: each step doubles how many words of
// a column lie side by side.
#if defined(__AVX512F__)
template <typename Put>
inline void transpose_words(const void* from, int64_t row_bytes, int64_t rows, int64_t columns, const Put& put) {
  const __mmask16 some = static_cast<__mmask16>((1u << columns) - 1);
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i)
    a[i] = i < rows ? _mm512_maskz_loadu_epi32(some, static_cast<const char*>(from) + i * row_bytes)
                    : _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
    }
#pragma GCC unroll 2
  for (int i = 0; i < 16; i += 8)
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {  // quarters of registers from here on
      b[i + j] = _mm512_shuffle_i32x4(a[i + j], a[i + j + 4], 0x88);
      b[i + j + 4] = _mm512_shuffle_i32x4(a[i + j], a[i + j + 4], 0xdd);
    }
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) {
    a[j] = _mm512_shuffle_i32x4(b[j], b[j + 8], 0x88);
    a[j + 8] = _mm512_shuffle_i32x4(b[j], b[j + 8], 0xdd);
  }
#pragma GCC unroll 16
  for (int j = 0; j < 16; ++j)
    if (j < columns) put(j, (Words)a[j]);
}
#elif defined(__AVX2__)
template <typename Put>
inline void transpose_words(const void* from, int64_t row_bytes, int64_t rows, int64_t columns, const Put& put) {
  const __m256i some = _mm256_cmpgt_epi32(_mm256_set1_epi32(columns), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  __m256i a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    a[i] = i < rows ? _mm256_maskload_epi32(
                          reinterpret_cast<const int*>(static_cast<const char*>(from) + i * row_bytes), some)
                    : _mm256_setzero_si256();
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm256_unpacklo_epi64(b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = _mm256_unpackhi_epi64(b[i + j], b[i + j + 2]);
    }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {  // halves of registers from here on
    b[j] = _mm256_permute2x128_si256(a[j], a[j + 4], 0x20);
    b[j + 4] = _mm256_permute2x128_si256(a[j], a[j + 4], 0x31);
  }
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j)
    if (j < columns) put(j, (Words)b[j]);
}
#endif

}  // namespace tp
