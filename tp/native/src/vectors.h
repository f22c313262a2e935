// Vectors of floats as wide as the machine's registers, and loads of bfloat16 into them.
//
// GCC's and Clang's vector extensions: the same source becomes AVX-512, AVX2, NEON or SSE.
#pragma once

#include <cstdint>
#include <cstring>

#include "elements.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define TP_VECTOR_BYTES 64
#elif defined(__AVX__)
#define TP_VECTOR_BYTES 32
#else
#define TP_VECTOR_BYTES 16
#endif

namespace tp {

typedef float Floats __attribute__((vector_size(TP_VECTOR_BYTES)));
typedef uint32_t Words __attribute__((vector_size(TP_VECTOR_BYTES)));

constexpr int64_t kLanes = TP_VECTOR_BYTES / 4;

inline Floats load(const float* from) {
  Floats value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// x in every lane. (0 + x would be an addition: -0 + 0 is 0.)
inline Floats broadcast(float x) { return x - Floats{}; }
inline Words broadcast(uint32_t x) { return x + Words{}; }

// Compilers do not find the instruction that widens bytes by themselves.
inline Floats load(const int8_t* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  Floats value;
  for (int64_t lane = 0; lane < kLanes; ++lane) value[lane] = from[lane];
  return value;
#endif
}

inline Words load_words(const void* from) {
  Words value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline Words load(const uint32_t* from) { return load_words(from); }

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }
inline void store(uint32_t* to, Words x) { std::memcpy(to, &x, sizeof x); }

// Of 2 * kLanes consecutive bfloat16: those at even places, and those at odd ones (little endian).
inline Floats even(Words pairs) { return reinterpret_cast<Floats>(pairs << 16); }
inline Floats odd(Words pairs) { return reinterpret_cast<Floats>(pairs & 0xffff0000u); }

#if defined(__AVX2__)
// Four sums in one register, of which the lanes of x are added up in pairs.
inline __m128 quarter(Floats x) {
#if defined(__AVX512F__)
  const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)x), 1));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)x), upper);
#else
  const __m256 half = (__m256)x;
#endif
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

inline __m128 sums_of_four(__m128 a, __m128 b, __m128 c, __m128 d) {
  return _mm_hadd_ps(_mm_hadd_ps(a, b), _mm_hadd_ps(c, d));
}

inline float sum(Floats x) {
  const __m128 part = quarter(x);
  return _mm_cvtss_f32(sums_of_four(part, part, part, part));
}

// The same of kCount registers, in few instructions.
template <int kCount>
inline void sums(const Floats* x, float* to) {
#pragma GCC unroll 4
  for (int i = 0; i < kCount / 4; ++i) {
    const Floats* four = x + 4 * i;
    _mm_storeu_ps(to + 4 * i, sums_of_four(quarter(four[0]), quarter(four[1]), quarter(four[2]), quarter(four[3])));
  }
#pragma GCC unroll 4
  for (int i = kCount / 4 * 4; i < kCount; ++i) to[i] = sum(x[i]);
}
#else
inline float sum(Floats x) {
  float total = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) total += x[lane];
  return total;
}

template <int kCount>
inline void sums(const Floats* x, float* to) {
  for (int i = 0; i < kCount; ++i) to[i] = sum(x[i]);
}
#endif

// Of lanes that are no NaN.
inline float maximum(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float most = x[0];
  for (int64_t lane = 1; lane < kLanes; ++lane) most = most > x[lane] ? most : x[lane];
  return most;
#endif
}

}  // namespace tp
