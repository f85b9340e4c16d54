#include "nn/bag.h"

#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/hash.h"
#include "table/rows/optimizers.h"

namespace shoal {

void check_offsets(const int64_t* offsets, int64_t bags, int64_t rows) {
  auto refuse = [](const std::string& what) { throw std::invalid_argument(what); };
  if (bags < 0) refuse("offsets must have at least one element, got none");
  if (offsets[0] != 0) refuse("offsets must start at 0, got " + std::to_string(offsets[0]));
  if (offsets[bags] != rows)
    refuse("offsets must end at the number of ids, " + std::to_string(rows) + ", got " + std::to_string(offsets[bags]));
  for (int64_t b = 0; b < bags; ++b)
    if (offsets[b + 1] < offsets[b])
      refuse("offsets must never fall, but entry " + std::to_string(b + 1) + " is " + std::to_string(offsets[b + 1]) +
             " after " + std::to_string(offsets[b]));
}

int64_t sum_by_id(const int64_t* ids, int64_t n, const float* rows, int64_t dim, int64_t* out_ids, float* out_rows) {
  if (n >= int64_t{1} << 31)
    throw std::invalid_argument("sum_by_id: there must be at most 2147483647 ids, got " + std::to_string(n));
  const size_t mask = std::bit_ceil(static_cast<size_t>(2 * n + 1)) - 1;
  std::vector<uint32_t> slots(mask + 1, 0);  // number of a distinct id + 1
  int64_t distinct = 0;
  for (int64_t i = 0; i < n; ++i) {
    size_t slot = hash_id(static_cast<uint64_t>(ids[i])) & mask;
    while (slots[slot] && out_ids[slots[slot] - 1] != ids[i]) slot = (slot + 1) & mask;
    if (slots[slot]) {
      SHOAL_DISPATCH(add)(rows + i * dim, dim, out_rows + (slots[slot] - 1) * dim);
    } else {
      out_ids[distinct] = ids[i];
      std::memcpy(out_rows + distinct * dim, rows + i * dim, sizeof(float) * static_cast<size_t>(dim));
      slots[slot] = static_cast<uint32_t>(++distinct);
    }
  }
  return distinct;
}

}  // namespace shoal
