#include "ops/lookup.h"

#include <algorithm>

#include "ops/common.h"
#include "ops/id_index.h"

namespace shoal::ops {

void map_id_to_embedding(const std::vector<uintptr_t>& ids, const std::vector<int64_t>& lengths,
                         const std::vector<uintptr_t>& embeddings, int64_t row_bytes, const int64_t* input, int64_t n,
                         char* out, int64_t* place, bool parallel) {
  if (n == 0) return;
  if (out) advise_huge(out, n * row_bytes);
  if (place) advise_huge(place, n * 8);
  const IdMap map(ids, lengths, parallel);
  std::vector<int64_t> starts(ids.size() + 1, 0);
  for (size_t k = 0; k < ids.size(); ++k) starts[k + 1] = starts[k] + lengths[k];
  constexpr int64_t kMask = (int64_t{1} << IdMap::kPositionBits) - 1;
  constexpr int64_t kBlock = 256;
  with_row_copy(row_bytes, [&](auto copy) {
    parallel_for(n, parallel ? std::min<int64_t>(rows_per_piece(row_bytes), 4096) : n, [&](int64_t begin, int64_t end) {
      int64_t found[kBlock];
      for (int64_t j = begin; j < end; j += kBlock) {
        const int64_t m = std::min(kBlock, end - j);
        map.find(input + j, m, found);
        for (int64_t k = 0; k < m; ++k) {
          if (found[k] < 0) {
            fail("id " + std::to_string(input[j + k]) + " of input (flat position " + std::to_string(j + k) +
                 ") is not among ids");
          }
          const int64_t list = found[k] >> IdMap::kPositionBits, row = found[k] & kMask;
          if (place) place[j + k] = starts[list] + row;
          if (out) __builtin_prefetch(reinterpret_cast<const char*>(embeddings[list]) + row * row_bytes, 0, 2);
        }
        if (!out) continue;
        for (int64_t k = 0; k < m; ++k) {
          const int64_t list = found[k] >> IdMap::kPositionBits, row = found[k] & kMask;
          copy(out + (j + k) * row_bytes, reinterpret_cast<const char*>(embeddings[list]) + row * row_bytes);
        }
      }
    });
  });
}

}  // namespace shoal::ops
