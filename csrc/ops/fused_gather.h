// Gathers vectors of several tables from one flat buffer by float offsets, and sums gradients back into it.
#pragma once
#include <cstdint>
#include <vector>

namespace shoal::ops {

struct OffsetTable {
  uintptr_t offsets;  // int32 or int64
  uintptr_t rows;     // [n, width]
  int64_t n, width;
  bool wide;  // offsets are int64
};

// rows[j] = buffer[offsets[j] : + width] in every table.
void fused_gather(const char* buffer, int64_t size, int64_t element_bytes, const std::vector<OffsetTable>& tables);
// out = 0, then out[offsets[j] : + width] += scale * rows[j], tables in order; tables may overlap.
template <class T>
void fused_gather_gradient(T* out, int64_t size, T scale, const std::vector<OffsetTable>& tables);

}  // namespace shoal::ops
