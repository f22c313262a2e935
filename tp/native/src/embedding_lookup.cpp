// Rows of a table by their indices, such as the embedding's. Rows that are not there are zero.

#include <cstring>

#include "elements.h"
#include "tape.h"

namespace tp {
namespace {

template <typename Copy, typename Clear>
void for_each_row(const int64_t* indices, int64_t count, int64_t first, int64_t rows, const Copy& copy,
                  const Clear& clear) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = indices[i] - first;
    if (row >= 0 && row < rows)
      copy(row, i);
    else
      clear(i);
  }
}

template <typename T>
void embedding_lookup_int8(const int8_t* values, const float* scales, int64_t columns, int64_t rows,
                           const int64_t* indices, int64_t first, int64_t count, T* to) {
  for_each_row(
      indices, count, first, rows,
      [&](int64_t row, int64_t i) {
        for (int64_t k = 0; k < columns; ++k)
          store(to + i * columns + k, to_float(values[row * columns + k]) * scales[row]);
      },
      [&](int64_t i) { std::memset(to + i * columns, 0, columns * sizeof(T)); });
}

}  // namespace
}  // namespace tp

// Row i of `to` is row indices[i] - first of the table, which has `rows` rows.
#define TP_EMBEDDING_LOOKUP_INT8(NAME, T)                                                                        \
  int NAME(const int8_t* values, const float* scales, int64_t columns, int64_t rows, const int64_t* indices,     \
           int64_t first, int64_t count, T* to) {                                                                \
    return tp::perform(                                                                                          \
        [=] { return tp::embedding_lookup_int8(values, scales, columns, rows, indices, first, count, to), 0; }); \
  }

extern "C" {

int tp_embedding_lookup(const char* table, int64_t row_bytes, int64_t rows, const int64_t* indices, int64_t first,
                        int64_t count, char* to) {
  return tp::perform([=] {
    tp::for_each_row(
        indices, count, first, rows,
        [&](int64_t row, int64_t i) { std::memcpy(to + i * row_bytes, table + row * row_bytes, row_bytes); },
        [&](int64_t i) { std::memset(to + i * row_bytes, 0, row_bytes); });
    return 0;
  });
}

TP_EMBEDDING_LOOKUP_INT8(tp_embedding_lookup_int8_bfloat16, tp::BFloat16)
TP_EMBEDDING_LOOKUP_INT8(tp_embedding_lookup_int8_float32, float)

}  // extern "C"
