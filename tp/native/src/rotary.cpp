// cos and sin of every position's angles, in float32, scaled, and rounded to the stream's type; both halves alike.

#include <cmath>

#include "elements.h"
#include "tape.h"

namespace tp {
namespace {

template <typename T>
void cos_and_sin(const int64_t* positions, int64_t count, const float* frequencies, int64_t half, float scaling,
                 T* cosine, T* sine) {
  for (int64_t i = 0; i < count; ++i) {
    const float position = static_cast<float>(positions[i]);
    for (int64_t k = 0; k < half; ++k) {
      const float angle = position * frequencies[k];
      T* c = cosine + i * 2 * half + k;
      T* s = sine + i * 2 * half + k;
      store(c, std::cos(angle) * scaling);
      store(s, std::sin(angle) * scaling);
      c[half] = *c;
      s[half] = *s;
    }
  }
}

}  // namespace
}  // namespace tp

#define TP_COS_AND_SIN(NAME, T)                                                                                      \
  int NAME(const int64_t* positions, int64_t count, const float* frequencies, int64_t half, float scaling,           \
           T* cosine, T* sine) {                                                                                     \
    return tp::perform(                                                                                              \
        [=] { return tp::cos_and_sin(positions, count, frequencies, half, scaling, cosine, sine), 0; });             \
  }

extern "C" {
TP_COS_AND_SIN(tp_cos_and_sin_bfloat16, tp::BFloat16)
TP_COS_AND_SIN(tp_cos_and_sin_float32, float)
}
