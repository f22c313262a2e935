// Elements of a type in registers, as float32: loads, sums, and the rounding back.
//
// bfloat16 pairs are split into even and odd places, and put together again, without any shuffling.
#pragma once

#include <cstdint>
#include <cstring>

#include "products.h"
#include "vectors.h"

namespace tp {

template <typename T>
struct Lanes;

template <>
struct Lanes<float> {
  static constexpr int64_t kCount = kLanes;
  Floats all;

  static Lanes load(const float* from) { return {tp::load(from)}; }
  void store(float* to) const { tp::store(to, all); }
  Lanes rounded() const { return *this; }
  Lanes operator+(const Lanes& other) const { return {all + other.all}; }
  Lanes operator*(const Lanes& other) const { return {all * other.all}; }
  Lanes operator*(float factor) const { return {all * factor}; }
  template <typename Function>
  Lanes map(const Function& function) const {
    return {function(all)};
  }
  Floats squares() const { return all * all; }
  Floats add_products(Floats total, const Lanes& other) const { return tp::add_product(total, all, other.all); }
  void add_product(float factor, const Lanes& other) { all = tp::add_product(all, broadcast(factor), other.all); }
};

template <>
struct Lanes<BFloat16> {
  static constexpr int64_t kCount = 2 * kLanes;
  Floats even, odd;

  static Lanes load(const BFloat16* from) {
    const Words pairs = load_words(from);
    return {tp::even(pairs), tp::odd(pairs)};
  }
  // Of values that are rounded.
  void store(BFloat16* to) const {
    const Words pairs = reinterpret_cast<Words>(even) >> 16 | reinterpret_cast<Words>(odd);
    std::memcpy(to, &pairs, sizeof pairs);
  }
  // As float32, the even elements before the odd ones.
  static Lanes load(const float* from) { return {tp::load(from), tp::load(from + kLanes)}; }
  void store(float* to) const {
    tp::store(to, even);
    tp::store(to + kLanes, odd);
  }
  Lanes rounded() const { return {nearest(even), nearest(odd)}; }
  Lanes operator+(const Lanes& other) const { return {even + other.even, odd + other.odd}; }
  Lanes operator*(const Lanes& other) const { return {even * other.even, odd * other.odd}; }
  Lanes operator*(float factor) const { return {even * factor, odd * factor}; }
  template <typename Function>
  Lanes map(const Function& function) const {
    return {function(even), function(odd)};
  }
  Floats squares() const { return even * even + odd * odd; }
  Floats add_products(Floats total, const Lanes& other) const {
    return tp::add_product(tp::add_product(total, even, other.even), odd, other.odd);
  }
  void add_product(float factor, const Lanes& other) {
    const Floats lanes = broadcast(factor);
    even = tp::add_product(even, lanes, other.even);
    odd = tp::add_product(odd, lanes, other.odd);
  }

 private:
  // As `store` of an element, for each lane; the result is still a float. A NaN needs no care: it comes from a bfloat16 or
  // from the CPU, so that its lower half is zero and nothing is carried into the upper one.
  static Floats nearest(Floats x) {
    const Words word = reinterpret_cast<Words>(x);
    return reinterpret_cast<Floats>((word + 0x7fffu + (word >> 16 & 1u)) & 0xffff0000u);
  }
};

// The first `count` elements, followed by zeros.
template <typename T>
Lanes<T> load_first(const T* from, int64_t count) {
  T padded[Lanes<T>::kCount] = {};
  std::memcpy(padded, from, count * sizeof(T));
  return Lanes<T>::load(padded);
}

template <typename T>
void store_first(const Lanes<T>& lanes, T* to, int64_t count) {
  T padded[Lanes<T>::kCount];
  lanes.store(padded);
  std::memcpy(to, padded, count * sizeof(T));
}

// Calls work(place, load, store) for all of [0, size), a register's worth at a time. At the end, where less is left,
// load and store are those that touch no more than that.
template <typename T, typename Work>
inline void for_each_lanes(int64_t size, const Work& work) {
  int64_t place = 0;
  for (; place + Lanes<T>::kCount <= size; place += Lanes<T>::kCount)
    work(place, [](const T* from) { return Lanes<T>::load(from); },
         [](const Lanes<T>& lanes, T* to) { lanes.store(to); });
  if (const int64_t rest = size - place)
    work(place, [rest](const T* from) { return load_first(from, rest); },
         [rest](const Lanes<T>& lanes, T* to) { store_first(lanes, to, rest); });
}

}  // namespace tp
