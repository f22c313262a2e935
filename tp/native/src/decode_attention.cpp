// Decode attention: one new token of each of several sequences, over this rank's heads and their cache.
//
// Rotates q and k, appends k and v to the cache, then softmax(q kᵀ · scale) v with float32 statistics, a block of keys
// at a time (Milakov and Gimelshein 2018, arXiv:1805.02867). Where threads would not have as many KV heads each, the
// context is split between them and the parts are combined (Dao et al. 2023, "Flash-Decoding").

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <type_traits>
#include <vector>

#include "lanes.h"
#include "softmax.h"
#include "tape.h"
#include "threads.h"
#include "vectors.h"

namespace tp {
namespace {

constexpr int64_t kBlock = 64;               // keys whose scores are kept at a time
constexpr int kKeys = 4;                     // keys, and
constexpr int kHeads = 3;                    // query heads, whose products of one register fit the other registers
constexpr int64_t kAhead = 64;               // rows that are asked for before they are read: CPUs look ahead in a page
constexpr int64_t kManyTasks = 4;            // a thread: with more, what an uneven share costs is little
constexpr int64_t kFewestKeysPerPart = 256;  // below this a part costs more than it saves

template <typename T>
struct Decode {
  const T *q, *k, *v;                        // rows of [heads, head_dim], with strides between tokens
  int64_t q_stride, k_stride, v_stride;
  const T *cosine, *sine;                    // [tokens, head_dim]
  T *keys, *values;                          // [slots, kv_heads, capacity, head_dim]
  int64_t slot_stride, head_stride;
  const int64_t *slots, *positions;          // [tokens]
  const int32_t* bounds;                     // [kv_heads + 1]: the query heads of each KV head
  int64_t window;                            // 0: all
  float scale;
  T* out;                                    // [tokens, heads, head_dim]
  int64_t tokens, heads, kv_heads, head_dim;
};

// x · y as an element of T holds it. Volatile: a compiler must not fuse the product with the sum that it goes into.
template <typename T>
float product(T x, T y) {
  volatile float value = rounded<T>(to_float(x) * to_float(y));
  return value;
}

// y = x · cos + rotate_half(x) · sin, each product and the sum rounded to T.
template <typename T>
void rotate(const T* x, const T* cosine, const T* sine, int64_t size, T* y) {
  const int64_t half = size / 2;
  for (int64_t i = 0; i < size; ++i) {
    const float turned = i < half ? -product(x[i + half], sine[i]) : product(x[i - half], sine[i]);
    store(y + i, product(x[i], cosine[i]) + turned);
  }
}

template <typename T>
void append(const Decode<T>& d, int64_t token) {
  const int64_t offset = d.slots[token] * d.slot_stride + d.positions[token] * d.head_dim;
  for (int64_t head = 0; head < d.kv_heads; ++head) {
    T* key = d.keys + offset + head * d.head_stride;
    rotate(d.k + token * d.k_stride + head * d.head_dim, d.cosine + token * d.head_dim, d.sine + token * d.head_dim,
           d.head_dim, key);
    std::copy_n(d.v + token * d.v_stride + head * d.head_dim, d.head_dim, d.values + offset + head * d.head_stride);
  }
}

// Elements in whole registers.
template <typename T>
int64_t registers(int64_t elements) {
  return (elements + Lanes<T>::kCount - 1) / Lanes<T>::kCount;
}

// Some query heads that share a KV head, and a block of its keys.
//
// scores[h, i] = q_h · k_i. Keys are taken in fours, whose sums over lanes are made together; after the last key it is
// taken again.
template <int kCount, typename T>
void score(const Lanes<T>* queries, const T* keys, int64_t count, int64_t size, float* scores) {
  for (int64_t first = 0; first < count; first += kKeys) {
    const T* rows[kKeys];
    for (int i = 0; i < kKeys; ++i) rows[i] = keys + std::min(first + i, count - 1) * size;
    Floats totals[kCount][kKeys] = {};
    for_each_lanes<T>(size, [&](int64_t place, auto load, auto) {
      const Lanes<T>* query = queries + place / Lanes<T>::kCount;
#pragma GCC unroll 4
      for (int i = 0; i < kKeys; ++i) {
        __builtin_prefetch(rows[i] + place + kAhead * size);
        const Lanes<T> key = load(rows[i] + place);
#pragma GCC unroll 3
        for (int h = 0; h < kCount; ++h)
          totals[h][i] = query[h * registers<T>(size)].add_products(totals[h][i], key);
      }
    });
    for (int h = 0; h < kCount; ++h) sums<kKeys>(totals[h], scores + h * kBlock + first);
  }
}

// outputs[h] += Σ_i weights[h, i] v_i
template <int kCount, typename T>
void add_values(const float* weights, const T* values, int64_t count, int64_t size, Lanes<T>* outputs) {
  for_each_lanes<T>(size, [&](int64_t place, auto load, auto) {
    Lanes<T>* output = outputs + place / Lanes<T>::kCount;
    Lanes<T> totals[kCount];
    for (int h = 0; h < kCount; ++h) totals[h] = output[h * registers<T>(size)];
    for (int64_t i = 0; i < count; ++i) {
      __builtin_prefetch(values + (kAhead + i) * size + place);
      const Lanes<T> value = load(values + i * size + place);
#pragma GCC unroll 3
      for (int h = 0; h < kCount; ++h) totals[h].add_product(weights[h * kBlock + i], value);
    }
    for (int h = 0; h < kCount; ++h) output[h * registers<T>(size)] = totals[h];
  });
}

// Calls work(number, first) for all of [0, heads), `number` a constant of at most kHeads.
template <typename Work>
void for_each_heads(int64_t heads, const Work& work) {
  static_assert(kHeads == 3, "what is left over is 1 or 2");
  int64_t first = 0;
  for (; first + kHeads <= heads; first += kHeads) work(std::integral_constant<int, kHeads>{}, first);
  if (heads - first == 2) work(std::integral_constant<int, 2>{}, first);
  if (heads - first == 1) work(std::integral_constant<int, 1>{}, first);
}

// The query heads of one KV head, and a part of one sequence's keys: what a thread works on.
struct Part {
  int64_t token, kv_head, first_head, last_head, first_key, last_key;

  int64_t heads() const { return last_head - first_head; }
};

// Of some query heads over a part of the keys: for each its largest score, Σ exp(score − largest), and
// Σ exp(score − largest) · v.
template <typename T>
struct Softmax {
  std::vector<float> largest, sum;
  std::vector<Lanes<T>> outputs;  // [heads, registers]

  Softmax(int64_t heads, int64_t size)
      : largest(heads, std::numeric_limits<float>::lowest()),  // scores may be -inf
        sum(heads, 0.0f),
        outputs(heads * registers<T>(size), Lanes<T>{}) {}

  // scores ← exp(scores · scale − largest), after what there is was made to fit a new largest one.
  void add(int64_t head, float* scores, float scale) {
    const float before = largest[head];
    const Floats added = exponentials<kBlock>(scores, scale, &largest[head]);
    const float shrink = std::exp(before - largest[head]);
    sum[head] = sum[head] * shrink + tp::sum(added);
    const int64_t width = outputs.size() / largest.size();
    for (int64_t c = 0; c < width; ++c) outputs[head * width + c] = outputs[head * width + c] * shrink;
  }
};

template <typename T>
std::vector<Lanes<T>> rotated_queries(const Decode<T>& d, const Part& part) {
  const int64_t width = registers<T>(d.head_dim);
  std::vector<T> turned(width * Lanes<T>::kCount);
  std::vector<Lanes<T>> queries(part.heads() * width);
  for (int64_t h = 0; h < part.heads(); ++h) {
    rotate(d.q + part.token * d.q_stride + (part.first_head + h) * d.head_dim, d.cosine + part.token * d.head_dim,
           d.sine + part.token * d.head_dim, d.head_dim, turned.data());
    for (int64_t c = 0; c < width; ++c) queries[h * width + c] = Lanes<T>::load(&turned[c * Lanes<T>::kCount]);
  }
  return queries;
}

template <typename T>
void attend(const Decode<T>& d, const Part& part, Softmax<T>& result) {
  const int64_t size = d.head_dim, width = registers<T>(size);
  const std::vector<Lanes<T>> queries = rotated_queries(d, part);
  std::vector<float> scores(part.heads() * kBlock);
  const int64_t offset = d.slots[part.token] * d.slot_stride + part.kv_head * d.head_stride;
  for (int64_t first = part.first_key; first < part.last_key; first += kBlock) {
    const int64_t count = std::min(kBlock, part.last_key - first);
    const T *keys = d.keys + offset + first * size, *values = d.values + offset + first * size;
    for_each_heads(part.heads(), [&](auto number, int64_t h) {
      score<number>(&queries[h * width], keys, count, size, &scores[h * kBlock]);
    });
    for (int64_t h = 0; h < part.heads(); ++h) {
      std::fill_n(&scores[h * kBlock] + count, kBlock - count, -std::numeric_limits<float>::infinity());
      result.add(h, &scores[h * kBlock], d.scale);
    }
    for_each_heads(part.heads(), [&](auto number, int64_t h) {
      add_values<number>(&scores[h * kBlock], values, count, size, &result.outputs[h * width]);
    });
  }
}

// The output of a part's heads from those of all parts with the same heads.
template <typename T>
void combine(const Decode<T>& d, const Part& part, const Softmax<T>* parts, int64_t count) {
  const int64_t size = d.head_dim, width = registers<T>(size);
  for (int64_t h = 0; h < part.heads(); ++h) {
    float largest = -std::numeric_limits<float>::infinity(), sum = 0;
    for (int64_t i = 0; i < count; ++i) largest = std::max(largest, parts[i].largest[h]);
    std::vector<Lanes<T>> total(width);
    for (int64_t i = 0; i < count; ++i) {
      const float share = std::exp(parts[i].largest[h] - largest);
      sum += share * parts[i].sum[h];
      for (int64_t c = 0; c < width; ++c) total[c] = total[c] + parts[i].outputs[h * width + c] * share;
    }
    T* out = d.out + (part.token * d.heads + part.first_head + h) * size;
    for (int64_t c = 0; c < width; ++c) {
      const Lanes<T> quotient = total[c].map([sum](Floats x) { return x / sum; }).rounded();
      store_first(quotient, out + c * Lanes<T>::kCount, std::min(Lanes<T>::kCount, size - c * Lanes<T>::kCount));
    }
  }
}

// One task for the query heads of each KV head of each token; where these are few and would not share out evenly among the
// threads, several with a part of the keys each.
template <typename T>
std::vector<Part> parts_of(const Decode<T>& d, int threads) {
  std::vector<Part> parts;
  const int64_t tasks = d.tokens * d.kv_heads;
  const int64_t splits = tasks < kManyTasks * threads ? threads / std::gcd<int64_t>(threads, tasks) : 1;
  for (int64_t token = 0; token < d.tokens; ++token) {
    const int64_t stop = d.positions[token] + 1;
    const int64_t start = d.window ? std::max<int64_t>(0, stop - d.window) : 0;
    const int64_t pieces = std::clamp<int64_t>((stop - start) / kFewestKeysPerPart, 1, splits);
    for (int64_t head = 0; head < d.kv_heads; ++head)
      for (int64_t i = 0; i < pieces; ++i)
        parts.push_back({token, head, d.bounds[head], d.bounds[head + 1], start + (stop - start) * i / pieces,
                         start + (stop - start) * (i + 1) / pieces});
  }
  return parts;
}

template <typename T>
void decode_attention(const Decode<T>& d, int threads) {
  for (int64_t token = 0; token < d.tokens; ++token) append(d, token);
  const std::vector<Part> parts = parts_of(d, threads);
  std::vector<Softmax<T>> results;
  for (const Part& part : parts) results.emplace_back(part.heads(), d.head_dim);
  in_parallel(parts.size(), threads, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) attend(d, parts[i], results[i]);
  });
  for (size_t first = 0, last; first < parts.size(); first = last) {  // consecutive parts of the same query heads
    const Part& part = parts[first];
    for (last = first; last < parts.size() && parts[last].token == part.token &&
                       parts[last].first_head == part.first_head;)
      ++last;
    combine(d, part, &results[first], last - first);
  }
}

}  // namespace
}  // namespace tp

#define TP_DECODE_ATTENTION(NAME, T)                                                                                \
  int NAME(const T* q, int64_t q_stride, const T* k, int64_t k_stride, const T* v, int64_t v_stride,                \
           const T* cosine, const T* sine, T* keys, T* values, int64_t slot_stride, int64_t head_stride,            \
           const int64_t* slots, const int64_t* positions, const int32_t* bounds, int64_t window, float scale,      \
           T* out, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim, int threads) {                \
    const tp::Decode<T> decode{q,      k,           v,           q_stride, k_stride,  v_stride, cosine,             \
                               sine,   keys,        values,      slot_stride, head_stride, slots, positions,        \
                               bounds, window,      scale,       out,      tokens,    heads,    kv_heads, head_dim}; \
    return tp::perform([=] { return tp::decode_attention(decode, threads), 0; });                                   \
  }

extern "C" {
TP_DECODE_ATTENTION(tp_decode_attention_bfloat16, tp::BFloat16)
TP_DECODE_ATTENTION(tp_decode_attention_float32, float)
}
