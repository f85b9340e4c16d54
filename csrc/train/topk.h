// The k values of largest magnitude, exactly: ties go to the lower index, NaN ranks above infinity.
#pragma once
#include <cstdint>

namespace shoal {

// Writes the indices of the k largest |x| (1 <= k <= n < 2^32). by_index: ascending index, else magnitude descending
// with ties by index. Returns whether any of the n values is NaN or infinite; with stop_on_nonfinite nothing is
// written in that case.
bool topk_magnitude(const float* x, int64_t n, int64_t k, bool by_index, bool stop_on_nonfinite, int64_t* indices);

}  // namespace shoal
