// RMSNorm of rows, alone or after adding them to the residual: what one rank does by itself.

#include "rms_norm.h"

#include "tape.h"
#include "threads.h"

namespace tp {
namespace {

// Rows come in groups of `parts` that lie side by side (the heads of a token), with a stride between groups.
template <typename T>
void rms_norm(const T* x, int64_t stride, int64_t parts, const T* weight, float eps, T* y, int64_t rows,
              int64_t columns, int threads) {
  in_parallel(rows, threads, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row)
      rms_norm_row(x + row / parts * stride + row % parts * columns, weight, eps, columns, y + row * columns);
  });
}

template <typename T>
void add_rms_norm(const T* update, int64_t update_stride, const AddRmsNorm<T>& add, int64_t rows, int threads) {
  in_parallel(rows, threads, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const T* addend = update + row * update_stride;
      add.one_row(&addend, 1, row);
    }
  });
}

}  // namespace
}  // namespace tp

#define TP_NORMS(T, NAME)                                                                                          \
  int tp_rms_norm_##NAME(const T* x, int64_t stride, int64_t parts, const T* weight, float eps, T* y, int64_t rows, \
                         int64_t columns, int threads) {                                                           \
    return tp::perform(                                                                                            \
        [=] { return tp::rms_norm(x, stride, parts, weight, eps, y, rows, columns, threads), 0; });                \
  }                                                                                                                \
  int tp_add_rms_norm_##NAME(const T* update, int64_t update_stride, const T* bias, const T* residual,             \
                             const T* weight, float eps, T* new_residual, T* normed, int64_t rows,                 \
                             int64_t columns, int threads) {                                                       \
    const tp::AddRmsNorm<T> add{columns, bias, residual, weight, eps, new_residual, normed};                       \
    return tp::perform([=] { return tp::add_rms_norm(update, update_stride, add, rows, threads), 0; });            \
  }

extern "C" {
TP_NORMS(tp::BFloat16, bfloat16)
TP_NORMS(float, float32)
}
