// Sum of partial sums + bias + residual, and its root-mean-square norm, a row at a time.
//
// Rounding points, each to T: the sum u, u + bias, residual + u, the normed value, its product with the weight.
// Statistics are float32: the mean of squares is summed in the lanes of a register, an order of its own.
#pragma once

#include <cmath>
#include <cstdint>
#include <utility>

#include "lanes.h"
#include "rank_order_sum.h"

namespace tp {

// A sum of squares in two registers, used in turn, so that one add need not wait for the one before.
class SquareSum {
 public:
  template <typename T>
  void add(const Lanes<T>& x) {
    totals_[0] += x.squares();
    std::swap(totals_[0], totals_[1]);
  }
  float mean(int64_t size) const { return sum(totals_[0] + totals_[1]) / static_cast<float>(size); }

 private:
  Floats totals_[2] = {};
};

template <typename T>
void write_normed(const T* x, const T* weight, float mean_of_squares, float eps, int64_t size, T* normed) {
  const float reciprocal = 1.0f / std::sqrt(mean_of_squares + eps);
  for_each_lanes<T>(size, [&](int64_t place, const auto& load, const auto& store) {
    const Lanes<T> value = (load(x + place) * reciprocal).rounded();
    store((value * load(weight + place)).rounded(), normed + place);
  });
}

template <typename T>
void rms_norm_row(const T* x, const T* weight, float eps, int64_t size, T* normed) {
  SquareSum squares;
  for_each_lanes<T>(size, [&](int64_t place, const auto& load, const auto&) { squares.add(load(x + place)); });
  write_normed(x, weight, squares.mean(size), eps, size, normed);
}

// What is done with rows of partial sums; rows of residual, new_residual and normed lie side by side.
template <typename T>
struct AddRmsNorm {
  int64_t columns;
  const T* bias;      // [columns] or null
  const T* residual;  // [rows, columns] or null
  const T* weight;    // [columns]
  float eps;
  T* new_residual;  // [rows, columns]
  T* normed;        // [rows, columns]

  // Row `row` of the outputs, from this row of each addend.
  void one_row(const T* const* addends, int count, int64_t row) const {
    const T* base = residual ? residual + row * columns : nullptr;
    T* kept = new_residual + row * columns;
    SquareSum squares;
    for_each_lanes<T>(columns, [&](int64_t place, const auto& load, const auto& store) {
      Lanes<T> value = lanes_sum(addends, count, place, load).rounded();
      if (bias) value = (value + load(bias + place)).rounded();
      if (base) value = (value + load(base + place)).rounded();
      squares.add(value);
      store(value, kept + place);
    });
    write_normed(kept, weight, squares.mean(columns), eps, columns, normed + row * columns);
  }
};

}  // namespace tp
