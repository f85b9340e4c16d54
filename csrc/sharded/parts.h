// Rows of one flat buffer that arrived in parts.
#pragma once
#include <cstdint>
#include <vector>

namespace shoal {

// rows[j] = buffer[offsets[j] : + width], where the buffer's floats [edges[p], edges[p + 1]) are at parts[p]. Throws
// std::invalid_argument for a row that is not within one part.
void gather_from_parts(const std::vector<const float*>& parts, const std::vector<int64_t>& edges,
                       const int32_t* offsets, int64_t n, int64_t width, float* rows);

}  // namespace shoal
