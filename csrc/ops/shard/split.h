// Distributes rows to parts by an index per row, keeping the input order within a part.
//
// Both passes cut the rows into the same pieces: `histogram` is [split_pieces(n), parts]; split_count() writes to it
// how many earlier rows of each part there are before each piece.
#pragma once
#include <cstdint>
#include <vector>

namespace shoal::ops {

int64_t split_pieces(int64_t n, int64_t parts);
// Fills histogram and counts[parts]; throws for an index outside [0, parts).
void split_count(const int64_t* indices, int64_t n, int64_t parts, int64_t* histogram, int64_t* counts);
// outs[s] gets the rows of part s.
void split_rows(const int64_t* indices, int64_t n, int64_t parts, const int64_t* histogram, const char* rows,
                int64_t row_bytes, const std::vector<uintptr_t>& outs);
// The inverse: row i comes from its place in part indices[i].
void unsplit_rows(const int64_t* indices, int64_t n, int64_t parts, const int64_t* histogram,
                  const std::vector<uintptr_t>& ins, int64_t row_bytes, char* rows);
// Writes the values and flat positions of each part, and the splits of the same rows in each part.
void split_ragged(const int64_t* indices, int64_t n, int64_t parts, const int64_t* histogram, const int64_t* values,
                  const int64_t* splits, int64_t rows, const std::vector<uintptr_t>& out_values,
                  const std::vector<uintptr_t>& out_pos, const std::vector<uintptr_t>& out_splits);

}  // namespace shoal::ops
