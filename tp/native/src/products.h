// How the CPU multiplies and adds: float32 by float32, or pairs of bfloat16 where it has an instruction for them.
#pragma once

#include "vectors.h"

namespace tp {

// total + a b, rounded once where the CPU can. Left to themselves, compilers do so in one loop and not in another.
inline Floats add_product(Floats total, Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)total);
#elif defined(__FMA__) && defined(__AVX2__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)total);
#else
  return total + a * b;
#endif
}

// What vectors of T are packed into for products: an element holds kTerms terms of a dot product.
template <typename T>
struct Operand {
  using Element = float;
  static constexpr int64_t kTerms = 1;
  // The terms at from, from + stride, …, of which `left` are there; zeros for the others.
  static Element join(const T* from, int64_t, int64_t) { return to_float(*from); }
  static void store(Element* to, Floats terms) { tp::store(to, terms); }
};

#if defined(__AVX512BF16__)
// total + a₀ b₀ + a₁ b₁ in each lane, of pairs of bfloat16.
inline Floats add_product(Floats total, Words a, Words b) {
  return (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)a, (__m512bh)b);
}

template <>
struct Operand<BFloat16> {
  using Element = uint32_t;
  static constexpr int64_t kTerms = 2;
  static Element join(const BFloat16* from, int64_t stride, int64_t left) {
    return from[0].bits | (left > 1 ? static_cast<uint32_t>(from[stride].bits) << 16 : 0);
  }
  static void store(Element* to, Floats terms) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)terms));
  }
};
#endif

}  // namespace tp
