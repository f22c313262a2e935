// Prefill attention: the last T of a sequence's S tokens, over this rank's heads.
//
// softmax(q kᵀ · scale) v with float32 scores and sums, a block of queries at a time, for each a block of keys
// after the other (Dao et al. 2022, "FlashAttention", arXiv:2205.14135). Keys are packed once a call: registers then
// hold one column of as many keys as they have lanes, so that no score needs a sum over lanes. With instructions for
// bfloat16, both products take pairs: of columns in q kᵀ, of keys in the weighted sum, whose weights are rounded to
// bfloat16.

#include <algorithm>
#include <limits>

#include "exponential.h"
#include "products.h"
#include "scratch.h"
#include "softmax.h"
#include "tape.h"
#include "threads.h"
#include "vectors.h"

namespace tp {
namespace {

constexpr int64_t kKeys = 64;     // of a block
constexpr int64_t kQueries = 48;  // of a block
constexpr int kRows = 6;          // queries, and
constexpr int kVectors = TP_VECTOR_BYTES == 64 ? 4 : 2;  // registers of keys, whose products fit the other registers
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Elements that hold `count` terms.
template <typename T>
constexpr int64_t elements(int64_t count) {
  return (count + Operand<T>::kTerms - 1) / Operand<T>::kTerms;
}

template <typename T>
struct Prefill {
  const T *q, *k, *v;  // [heads, tokens, head_dim], with strides between heads and between tokens
  int64_t q_head, q_token, k_head, k_token, v_head, v_token;
  const int32_t* bounds;  // [kv_heads + 1]: the query heads of each KV head
  int64_t window;         // 0: all
  float scale;
  T* out;  // [queries, heads, head_dim]
  int64_t heads, kv_heads, queries, keys, head_dim;

  // Of all blocks of keys, those that some query sees: a window may hide the first ones.
  int64_t first_block() const { return window ? std::max<int64_t>(0, keys - queries - window + 1) / kKeys : 0; }
  int64_t blocks() const { return (keys + kKeys - 1) / kKeys - first_block(); }
  int64_t columns() const { return elements<T>(head_dim); }  // of a query or key, packed
  int64_t width() const { return (head_dim + kLanes - 1) / kLanes * kLanes; }  // of a value in whole registers
};

// The keys and values of all KV heads, zeros after the last key.
template <typename T>
struct Packed {
  using Element = typename Operand<T>::Element;
  static constexpr int64_t kValues = elements<T>(kKeys);
  Scratch<Element> keys;    // [kv_heads, blocks, columns, kKeys]
  Scratch<Element> values;  // [kv_heads, blocks, kValues, width]

  Packed(const Prefill<T>& p, int threads)
      : keys(p.kv_heads * p.blocks() * p.columns() * kKeys), values(p.kv_heads * p.blocks() * kValues * p.width()) {
    in_parallel(p.kv_heads * p.blocks(), threads, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) fill_block(p, i / p.blocks(), p.first_block() + i % p.blocks());
    });
  }

  const Element* keys_of(const Prefill<T>& p, int64_t head, int64_t block) const {
    return keys.data() + place_of_keys(p, head, block);
  }
  const Element* values_of(const Prefill<T>& p, int64_t head, int64_t block) const {
    return values.data() + place_of_values(p, head, block);
  }

 private:
  static int64_t place_of_keys(const Prefill<T>& p, int64_t head, int64_t block) {
    return (head * p.blocks() + block - p.first_block()) * p.columns() * kKeys;
  }
  static int64_t place_of_values(const Prefill<T>& p, int64_t head, int64_t block) {
    return (head * p.blocks() + block - p.first_block()) * kValues * p.width();
  }

  void fill_block(const Prefill<T>& p, int64_t head, int64_t block) {
    constexpr int64_t kTerms = Operand<T>::kTerms;
    Element* columns = keys.data() + place_of_keys(p, head, block);
    Element* rows = values.data() + place_of_values(p, head, block);
    const int64_t count = std::min(kKeys, p.keys - block * kKeys);
    const T* key = p.k + head * p.k_head + block * kKeys * p.k_token;
    const T* value = p.v + head * p.v_head + block * kKeys * p.v_token;
    std::fill_n(columns, p.columns() * kKeys, Element{});
    std::fill_n(rows, kValues * p.width(), Element{});
    for (int64_t i = 0; i < count; ++i)
      for (int64_t c = 0; c < p.columns(); ++c)
        columns[c * kKeys + i] = Operand<T>::join(key + i * p.k_token + c * kTerms, 1, p.head_dim - c * kTerms);
    for (int64_t i = 0; i < count; i += kTerms)
      for (int64_t d = 0; d < p.head_dim; ++d)
        rows[i / kTerms * p.width() + d] = Operand<T>::join(value + i * p.v_token + d, p.v_token, count - i);
  }
};

// A block of queries of one head on its way through the keys.
template <typename T>
struct Block {
  using Element = typename Operand<T>::Element;
  Scratch<Element> queries;  // [kQueries, columns], zeros after the last
  Scratch<float> output;     // [kQueries, width]: Σ p v so far
  alignas(kCacheLine) float scores[kRows * kKeys];                  // of kRows queries
  alignas(kCacheLine) Element weights[kRows * Packed<T>::kValues];  // p of the same
  float row_max[kQueries], row_sum[kQueries], rescale[kQueries];
  // Of queries after the last, weights and rescale are what was there before; nobody reads their output.

  void begin(const Prefill<T>& p, int64_t head, int64_t first, int64_t count) {
    constexpr int64_t kTerms = Operand<T>::kTerms;
    queries.assign(kQueries * p.columns(), 0);
    output.assign(kQueries * p.width(), 0.0f);
    std::fill_n(row_max, kQueries, std::numeric_limits<float>::lowest());  // scores may be -inf
    std::fill_n(row_sum, kQueries, 0.0f);
    for (int64_t i = 0; i < count; ++i) {
      const T* query = p.q + head * p.q_head + (first + i) * p.q_token;
      for (int64_t c = 0; c < p.columns(); ++c)
        queries[i * p.columns() + c] = Operand<T>::join(query + c * kTerms, 1, p.head_dim - c * kTerms);
    }
  }

  // Weights of query i, whose scores are row r, for the keys [low, high) of a block; those of other keys are 0.
  void online_softmax(int64_t i, int64_t r, int64_t low, int64_t high, float scale) {
    float* of_keys = scores + r * kKeys;
    std::fill_n(of_keys, low, -kInfinity);
    std::fill(of_keys + high, of_keys + kKeys, -kInfinity);
    const float before = row_max[i];
    const Floats added = exponentials<kKeys>(of_keys, scale, &row_max[i]);
    rescale[i] = exponential(broadcast(before - row_max[i]))[0];
    row_sum[i] = row_sum[i] * rescale[i] + sum(added);
    Element* to = weights + r * Packed<T>::kValues;
    for (int64_t j = 0; j < kKeys; j += kLanes) Operand<T>::store(to + j / Operand<T>::kTerms, load(of_keys + j));
  }
};

// scores[r, j] = q_r · k_j of kRows queries and all keys of a block.
template <typename T>
void score(const typename Operand<T>::Element* queries, const typename Operand<T>::Element* keys, int64_t columns,
           float* scores) {
  for (int64_t j = 0; j < kKeys; j += kVectors * kLanes) {
    Floats totals[kRows][kVectors] = {};
    for (int64_t c = 0; c < columns; ++c)
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i)
          totals[r][i] = add_product(totals[r][i], load(keys + c * kKeys + j + i * kLanes),
                                     broadcast(queries[r * columns + c]));
    for (int r = 0; r < kRows; ++r)
      for (int i = 0; i < kVectors; ++i) store(scores + r * kKeys + j + i * kLanes, totals[r][i]);
  }
}

// output[r, j] = rescale[r] · output[r, j] + Σ_i p[r, i] v[i, j] of kRows queries and kCount registers of columns.
// Unrolled, so that the totals stay in registers.
template <int kCount, typename T>
void accumulate_values(const typename Operand<T>::Element* p, const float* rescale,
                       const typename Operand<T>::Element* values, int64_t count, int64_t width, float* output) {
  Floats totals[kRows][kCount];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < kCount; ++j) totals[r][j] = load(output + r * width + j * kLanes) * rescale[r];
  for (int64_t i = 0; i < count; ++i)
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < kCount; ++j)
        totals[r][j] = add_product(totals[r][j], load(values + i * width + j * kLanes),
                                   broadcast(p[r * Packed<T>::kValues + i]));
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < kCount; ++j) store(output + r * width + j * kLanes, totals[r][j]);
}

// The same of a block's queries from r on, and of all columns.
template <typename T>
void accumulate_values(Block<T>& block, int64_t r, const typename Operand<T>::Element* values, int64_t count,
                       int64_t width) {
  const float* rescale = block.rescale + r;
  float* output = block.output.data() + r * width;
  int64_t j = 0;
  for (; j + kVectors * kLanes <= width; j += kVectors * kLanes)
    accumulate_values<kVectors, T>(block.weights, rescale, values + j, count, width, output + j);
  for (; j < width; j += kLanes)
    accumulate_values<1, T>(block.weights, rescale, values + j, count, width, output + j);
}

template <typename T>
void attend(const Prefill<T>& p, const Packed<T>& packed, int64_t kv_head, int64_t head, int64_t first) {
  thread_local Block<T> block;
  const int64_t count = std::min(kQueries, p.queries - first), width = p.width();
  const int64_t position = p.keys - p.queries + first;  // of the block's first query
  const int64_t oldest = p.window ? std::max<int64_t>(0, position - p.window + 1) : 0;
  block.begin(p, head, first, count);
  for (int64_t b = oldest / kKeys; b * kKeys < position + count; ++b) {
    const int64_t start = b * kKeys, held = std::min(kKeys, p.keys - start);
    const auto* keys = packed.keys_of(p, kv_head, b);
    const auto* values = packed.values_of(p, kv_head, b);
    for (int64_t r = 0; r < count; r += kRows) {
      score<T>(block.queries.data() + r * p.columns(), keys, p.columns(), block.scores);
      for (int64_t i = r; i < std::min(r + kRows, count); ++i) {
        const int64_t low = p.window ? position + i - p.window + 1 - start : 0, high = position + i + 1 - start;
        block.online_softmax(i, i - r, std::clamp<int64_t>(low, 0, kKeys), std::clamp<int64_t>(high, 0, kKeys),
                             p.scale);
      }
      accumulate_values(block, r, values, elements<T>(held), width);
    }
  }
  for (int64_t i = 0; i < count; ++i)
    for (int64_t d = 0; d < p.head_dim; ++d)
      store(p.out + ((first + i) * p.heads + head) * p.head_dim + d, block.output[i * width + d] / block.row_sum[i]);
}

template <typename T>
void prefill_attention(const Prefill<T>& p, int threads) {
  const Packed<T> packed(p, threads);
  const int64_t blocks = (p.queries + kQueries - 1) / kQueries;
  in_parallel(p.heads * blocks, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i / blocks;
      const int64_t kv_head = std::upper_bound(p.bounds, p.bounds + p.kv_heads, head) - p.bounds - 1;
      attend(p, packed, kv_head, head, i % blocks * kQueries);
    }
  });
}

}  // namespace
}  // namespace tp

#define TP_PREFILL_ATTENTION(NAME, T)                                                                               \
  int NAME(const T* q, int64_t q_head, int64_t q_token, const T* k, int64_t k_head, int64_t k_token, const T* v,    \
           int64_t v_head, int64_t v_token, const int32_t* bounds, int64_t window, float scale, T* out,             \
           int64_t heads, int64_t kv_heads, int64_t queries, int64_t keys, int64_t head_dim, int threads) {         \
    const tp::Prefill<T> prefill{q,      k,      v,     q_head, q_token, k_head,   k_token, v_head,  v_token,       \
                                 bounds, window, scale, out,    heads,   kv_heads, queries, keys,    head_dim};     \
    return tp::perform([=] { return tp::prefill_attention(prefill, threads), 0; });                                 \
  }

extern "C" {
TP_PREFILL_ATTENTION(tp_prefill_attention_bfloat16, tp::BFloat16)
TP_PREFILL_ATTENTION(tp_prefill_attention_float32, float)
}
