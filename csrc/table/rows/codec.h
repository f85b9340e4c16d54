// Serving rows: the encoded weights of all segments.
#pragma once
#include "table/rows/layout.h"

namespace shoal {

void encode_row(const Layout& layout, const float* weights, char* row);
void decode_row(const Layout& layout, const char* row, float* out);
// Whether skip_zero_embedding applies: the float32 sum of squares is below the smallest normal float.
bool is_zero(const float* weights, int32_t dim);

}  // namespace shoal
