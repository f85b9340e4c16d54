// The embedding of each id, from lists of ids and their embeddings.
#pragma once
#include <cstdint>
#include <vector>

namespace shoal::ops {

// out[j] = the row of embeddings[k] at the place of input[j] in ids[k]; place[j] = that row's number counted over all
// lists. Either may be null. Throws std::invalid_argument for an id that is in no list.
void map_id_to_embedding(const std::vector<uintptr_t>& ids, const std::vector<int64_t>& lengths,
                         const std::vector<uintptr_t>& embeddings, int64_t row_bytes, const int64_t* input, int64_t n,
                         char* out, int64_t* place, bool parallel);

}  // namespace shoal::ops
