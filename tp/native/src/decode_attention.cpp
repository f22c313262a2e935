// Decode attention: one new token of each of several sequences, over this rank's heads and their cache.
//
// Rotates q and k, appends k and v to the cache, then softmax(q kᵀ · scale) v with float32 statistics, a block of keys
// at a time (Milakov and Gimelshein 2018, arXiv:1805.02867). Where there are more threads than KV heads, the context
// is split between them and the parts are combined (Dao et al. 2023, "Flash-Decoding").

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "exponential.h"
#include "spread.h"
#include "tape.h"
#include "threads.h"
#include "vectors.h"

namespace tp {
namespace {

constexpr int64_t kBlock = 64;               // keys whose scores are kept at a time
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

// scores ← exp(scores − largest); returns their sum.
float exponentials(float* scores, float largest, int64_t count) {
  Floats total = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Floats value = exponential(load(scores + i) - largest);
    std::memcpy(scores + i, &value, sizeof value);
    total += value;
  }
  float result = sum(total);
  for (; i < count; ++i) result += scores[i] = std::exp(scores[i] - largest);
  return result;
}

// The query heads of one KV head, and a part of one sequence's keys: what a thread works on.
struct Part {
  int64_t token, kv_head, first_head, last_head, first_key, last_key;
};

// Of one query head over a part of the keys: largest score, Σ exp(score − largest), Σ exp(score − largest) · v.
struct Softmax {
  float largest = std::numeric_limits<float>::lowest();  // scores may be -inf
  float sum = 0;
  std::vector<float> weighted;
};

template <typename T>
void attend(const Decode<T>& d, const Part& part, Softmax* results) {
  const int64_t heads = part.last_head - part.first_head, size = d.head_dim;
  std::vector<T> turned(size);
  std::vector<float> queries(heads * size), scores(heads * kBlock);
  for (int64_t h = 0; h < heads; ++h) {
    rotate(d.q + part.token * d.q_stride + (part.first_head + h) * size, d.cosine + part.token * size,
           d.sine + part.token * size, size, turned.data());
    spread(turned.data(), size, queries.data() + h * size);
    results[h].weighted.assign(size, 0.0f);
  }
  const int64_t offset = d.slots[part.token] * d.slot_stride + part.kv_head * d.head_stride;
  for (int64_t first = part.first_key; first < part.last_key; first += kBlock) {
    const int64_t count = std::min(kBlock, part.last_key - first);
    for (int64_t key = 0; key < count; ++key) {
      const T* row = d.keys + offset + (first + key) * size;
      for (int64_t h = 0; h < heads; ++h)
        scores[h * kBlock + key] = d.scale * dot_spread(queries.data() + h * size, row, size);
    }
    for (int64_t h = 0; h < heads; ++h) {
      Softmax& result = results[h];
      float* score = scores.data() + h * kBlock;
      const float largest = std::max(result.largest, *std::max_element(score, score + count));
      const float shrink = std::exp(result.largest - largest);
      result.largest = largest;
      result.sum *= shrink;
      for (float& x : result.weighted) x *= shrink;
      result.sum += exponentials(score, largest, count);
    }
    for (int64_t key = 0; key < count; ++key) {
      const T* row = d.values + offset + (first + key) * size;
      for (int64_t h = 0; h < heads; ++h)
        add_spread(results[h].weighted.data(), scores[h * kBlock + key], row, size);
    }
  }
}

template <typename T>
void combine(const Decode<T>& d, int64_t token, int64_t head, const Softmax* const* parts, int64_t count) {
  float largest = -std::numeric_limits<float>::infinity(), sum = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, parts[i]->largest);
  std::vector<float> total(d.head_dim, 0.0f);
  for (int64_t i = 0; i < count; ++i) {
    const float share = std::exp(parts[i]->largest - largest);
    sum += share * parts[i]->sum;
    for (int64_t c = 0; c < d.head_dim; ++c) total[c] += share * parts[i]->weighted[c];
  }
  for (float& x : total) x /= sum;
  gather_spread(total.data(), d.head_dim, d.out + (token * d.heads + head) * d.head_dim);
}

// One task for the query heads of each KV head of each token, or several with a part of the keys each.
template <typename T>
std::vector<Part> parts_of(const Decode<T>& d, int threads) {
  std::vector<Part> parts;
  const int64_t splits = std::max<int64_t>(1, threads / std::max<int64_t>(1, d.tokens * d.kv_heads));
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
  std::vector<std::vector<Softmax>> results(parts.size());
  for (size_t i = 0; i < parts.size(); ++i) results[i].resize(parts[i].last_head - parts[i].first_head);
  in_parallel(parts.size(), threads, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) attend(d, parts[i], results[i].data());
  });
  std::vector<const Softmax*> of_head;
  for (size_t first = 0, last; first < parts.size(); first = last) {  // consecutive parts of the same query heads
    const Part& part = parts[first];
    for (last = first; last < parts.size() && parts[last].token == part.token &&
                       parts[last].first_head == part.first_head;)
      ++last;
    for (int64_t h = 0; h < part.last_head - part.first_head; ++h) {
      of_head.clear();
      for (size_t i = first; i < last; ++i) of_head.push_back(&results[i][h]);
      combine(d, part.token, part.first_head + h, of_head.data(), of_head.size());
    }
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
