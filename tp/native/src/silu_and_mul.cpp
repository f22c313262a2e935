// y = SiLU(gate) · up, SiLU rounded before the product; gate and up are the halves of each row.

#include "exponential.h"
#include "lanes.h"
#include "tape.h"
#include "threads.h"

namespace tp {
namespace {

inline Floats silu(Floats x) { return x / (1.0f + exponential(-x)); }

template <typename T>
void silu_and_mul(const T* gate_up, int64_t stride, T* y, int64_t rows, int64_t columns, int threads) {
  in_parallel(rows, threads, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const T* gate = gate_up + row * stride;
      for_each_lanes<T>(columns, [&](int64_t place, const auto& load, const auto& store) {
        const Lanes<T> activated = load(gate + place).map(silu).rounded();
        store((activated * load(gate + columns + place)).rounded(), y + row * columns + place);
      });
    }
  });
}

}  // namespace
}  // namespace tp

#define TP_SILU_AND_MUL(NAME, T)                                                                                 \
  int NAME(const T* gate_up, int64_t stride, T* y, int64_t rows, int64_t columns, int threads) {                 \
    return tp::perform([=] { return tp::silu_and_mul(gate_up, stride, y, rows, columns, threads), 0; });         \
  }

extern "C" {
TP_SILU_AND_MUL(tp_silu_and_mul_bfloat16, tp::BFloat16)
TP_SILU_AND_MUL(tp_silu_and_mul_float32, float)
}
