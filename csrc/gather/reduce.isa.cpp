#include "gather/reduce.h"

#include <cstring>

namespace shoal::SHOAL_ISA {
namespace {

template <class Value>
bool add(const uint8_t* indices, int codec, int64_t k, int64_t totalk, float* sum, int32_t* count, uint16_t* scratch,
         Value value) {
  if (codec == 0) {
    unpack12(indices, k, scratch);
    unsigned most = 0;
    for (int64_t i = 0; i < k; ++i) most = scratch[i] > most ? scratch[i] : most;
    if (most >= totalk) return false;
    for (int64_t i = 0; i < k; ++i) {
      sum[scratch[i]] += value(i);
      ++count[scratch[i]];
    }
    return true;
  }
  for (int64_t i = 0; i < k; ++i) {
    int32_t index;
    std::memcpy(&index, indices + i * 4, 4);
    if (index < 0 || index >= totalk) return false;
    sum[index] += value(i);
    ++count[index];
  }
  return true;
}

}  // namespace

bool add_chunk(const uint8_t* indices, int codec, int64_t k, int64_t totalk, const float* values, float* sum,
               int32_t* count, uint16_t* scratch) {
  return add(indices, codec, k, totalk, sum, count, scratch, [&](int64_t i) { return values[i]; });
}

bool add_chunk_u8(const uint8_t* indices, int codec, int64_t k, int64_t totalk, const uint8_t* q, const float* table,
                  float* sum, int32_t* count, uint16_t* scratch) {
  return add(indices, codec, k, totalk, sum, count, scratch, [&](int64_t i) { return table[q[i]]; });
}

// Separate from the additions, so that the compiler cannot fuse them.
void scale(float* values, int64_t n, float factor) {
  for (int64_t i = 0; i < n; ++i) values[i] *= factor;
}

void divide(float* sum, const int32_t* count, int64_t n, int reduction, float peers) {
  if (reduction == 0) {
    for (int64_t i = 0; i < n; ++i) {
      float divisor = static_cast<float>(count[i] > 0 ? count[i] : 1);
      sum[i] = count[i] > 0 ? sum[i] / divisor : 0.0f;
    }
  } else if (reduction == 1) {
    for (int64_t i = 0; i < n; ++i) sum[i] /= peers;
  }
}

}  // namespace shoal::SHOAL_ISA
