// Copying rows by index.
#pragma once
#include <cstdint>

namespace shoal::ops {

// dst[i] = src[index[i]]; throws for an index outside [0, src_rows), with a message that starts with `what`.
void gather_rows(const char* src, int64_t src_rows, int64_t row_bytes, const int64_t* index, int64_t n, char* dst,
                 const char* what);

}  // namespace shoal::ops
