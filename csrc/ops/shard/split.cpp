#include "ops/shard/split.h"

#include <algorithm>

#include "ops/common.h"

namespace shoal::ops {
namespace {

// Depends only on the input, so that both passes agree with any number of threads.
int64_t piece_rows(int64_t n, int64_t parts) { return std::max<int64_t>({16384, 8 * parts, n / 256 + 1}); }

// Calls body(begin, end, next) for each piece; next[s] is the number of earlier rows of part s, which body counts up.
template <class F>
void each_piece(int64_t n, int64_t parts, const int64_t* histogram, F&& body) {
  int64_t step = piece_rows(n, parts);
  parallel_parts(split_pieces(n, parts), [&](int64_t piece) {
    auto next = scratch<int64_t>(parts);
    std::copy_n(histogram + piece * parts, parts, next.get());
    body(piece * step, std::min(n, (piece + 1) * step), next.get());
  });
}

void check_index(const int64_t* indices, int64_t i, int64_t parts) {
  if (outside(indices[i], parts)) fail_range("split_by_indices: an index", indices[i], i, parts);
}

}  // namespace

int64_t split_pieces(int64_t n, int64_t parts) { return (n + piece_rows(n, parts) - 1) / piece_rows(n, parts); }

void split_count(const int64_t* indices, int64_t n, int64_t parts, int64_t* histogram, int64_t* counts) {
  int64_t pieces = split_pieces(n, parts), step = piece_rows(n, parts);
  parallel_parts(pieces, [&](int64_t piece) {
    int64_t* count = histogram + piece * parts;
    std::fill_n(count, parts, 0);
    for (int64_t i = piece * step, end = std::min(n, i + step); i < end; ++i) {
      check_index(indices, i, parts);
      ++count[indices[i]];
    }
  });
  std::fill_n(counts, parts, 0);
  for (int64_t piece = 0; piece < pieces; ++piece) {
    for (int64_t s = 0; s < parts; ++s) {
      int64_t here = histogram[piece * parts + s];
      histogram[piece * parts + s] = counts[s];
      counts[s] += here;
    }
  }
}

void split_rows(const int64_t* indices, int64_t n, int64_t parts, const int64_t* histogram, const char* rows,
                int64_t row_bytes, const std::vector<uintptr_t>& outs) {
  with_row_copy(row_bytes, [&](auto copy) {
    each_piece(n, parts, histogram, [&](int64_t begin, int64_t end, int64_t* next) {
      for (int64_t i = begin; i < end; ++i) {
        int64_t s = indices[i];
        copy(reinterpret_cast<char*>(outs[s]) + next[s]++ * row_bytes, rows + i * row_bytes);
      }
    });
  });
}

void unsplit_rows(const int64_t* indices, int64_t n, int64_t parts, const int64_t* histogram,
                  const std::vector<uintptr_t>& ins, int64_t row_bytes, char* rows) {
  advise_huge(rows, n * row_bytes);
  with_row_copy(row_bytes, [&](auto copy) {
    each_piece(n, parts, histogram, [&](int64_t begin, int64_t end, int64_t* next) {
      for (int64_t i = begin; i < end; ++i) {
        int64_t s = indices[i];
        copy(rows + i * row_bytes, reinterpret_cast<const char*>(ins[s]) + next[s]++ * row_bytes);
      }
    });
  });
}

void split_ragged(const int64_t* indices, int64_t n, int64_t parts, const int64_t* histogram, const int64_t* values,
                  const int64_t* splits, int64_t rows, const std::vector<uintptr_t>& out_values,
                  const std::vector<uintptr_t>& out_pos, const std::vector<uintptr_t>& out_splits) {
  auto write_splits = [&](int64_t row, const int64_t* next) {
    for (int64_t s = 0; s < parts; ++s) reinterpret_cast<int64_t*>(out_splits[s])[row] = next[s];
  };
  each_piece(n, parts, histogram, [&](int64_t begin, int64_t end, int64_t* next) {
    int64_t row = std::lower_bound(splits, splits + rows + 1, begin) - splits;  // first row that starts here or later
    for (int64_t i = begin; i < end; ++i) {
      for (; row <= rows && splits[row] == i; ++row) write_splits(row, next);
      int64_t s = indices[i], at = next[s]++;
      reinterpret_cast<int64_t*>(out_values[s])[at] = values[i];
      reinterpret_cast<int64_t*>(out_pos[s])[at] = i;
    }
    if (end == n) {
      for (; row <= rows; ++row) write_splits(row, next);
    }
  });
  if (n == 0) {
    for (int64_t s = 0; s < parts; ++s) std::fill_n(reinterpret_cast<int64_t*>(out_splits[s]), rows + 1, 0);
  }
}

}  // namespace shoal::ops
