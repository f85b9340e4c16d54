#include "table/rows/codec.h"

#include <limits>

#include "table/rows/optimizers.h"

namespace shoal {

void encode_row(const Layout& layout, const float* weights, char* row) {
  for (const Segment& s : layout.segments) SHOAL_DISPATCH(encode_segment)(s, weights + s.weight, row + s.code);
}

void decode_row(const Layout& layout, const char* row, float* out) {
  for (const Segment& s : layout.segments) SHOAL_DISPATCH(decode_segment)(s, row + s.code, out + s.weight);
}

bool is_zero(const float* weights, int32_t dim) {
  float squares = 0;
  for (int32_t i = 0; i < dim; ++i) squares += weights[i] * weights[i];
  return squares < std::numeric_limits<float>::min();
}

}  // namespace shoal
