// 16 rows of 32-bit words become columns, for CPUs with registers of 16 words.
#pragma once

#if defined(__AVX512F__)

#include <immintrin.h>

#include <cstdint>

namespace tp {

// to[j · stride + i] = row i's word j, for the first `count` rows and `words` words of each (at most 16 both); rows
// beyond are zeros, up to the sixteenth.
inline void transpose_words(const void* from, int64_t row_bytes, int64_t count, int64_t words, uint32_t* to,
                            int64_t stride) {
  const __mmask16 some = static_cast<__mmask16>((1u << words) - 1);
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i)
    a[i] = i < count ? _mm512_maskz_loadu_epi32(some, static_cast<const char*>(from) + i * row_bytes)
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
    if (j < words) _mm512_storeu_si512(to + j * stride, a[j]);
}

}  // namespace tp

#endif
