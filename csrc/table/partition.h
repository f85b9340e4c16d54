// The positions of a batch, grouped by the part that owns their stripe and in input order within a part.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/scratch.h"
#include "table/contents.h"

namespace shoal {

class Partition {
 public:
  Partition(const int64_t* ids, int64_t n, int parts)
      : ids_(ids),
        n_(n),
        owned(static_cast<size_t>(parts), 0),
        begins(static_cast<size_t>(parts) + 1, 0),
        positions_(static_cast<size_t>(n) * sizeof(uint32_t)) {
    // Neighbouring stripes with about equal shares of the ids.
    for (int cell = 0; cell < Stripes::kCells; ++cell) {
      part_of_cell_[cell] = static_cast<uint8_t>(kStripesOfCells.part(cell, parts));
      owned[part_of_cell_[cell]] |= uint64_t{1} << kStripesOfCells.of_cell[cell];
    }
    offsets_.resize(static_cast<size_t>(blocks() * parts));
  }

  // Blocks of the input are counted first; then each knows where it may write.
  int64_t blocks() const { return (n_ + kBlock - 1) / kBlock; }
  void count(int64_t block) {
    int64_t* counts = &offsets_[static_cast<size_t>(block) * owned.size()];
    for (int64_t i = block * kBlock; i < std::min(n_, (block + 1) * kBlock); ++i) ++counts[part_of(i)];
  }
  void place() {
    for (size_t p = 0; p < owned.size(); ++p) {
      int64_t at = begins[p];
      for (int64_t block = 0; block < blocks(); ++block)
        at += std::exchange(offsets_[static_cast<size_t>(block) * owned.size() + p], at);
      begins[p + 1] = at;
    }
  }
  void fill(int64_t block) {
    int64_t* next = &offsets_[static_cast<size_t>(block) * owned.size()];
    uint32_t* positions = positions_.as<uint32_t>();
    for (int64_t i = block * kBlock; i < std::min(n_, (block + 1) * kBlock); ++i)
      positions[next[part_of(i)]++] = static_cast<uint32_t>(i);
  }

  const uint32_t* positions(size_t part) const { return positions_.as<uint32_t>() + begins[part]; }

 private:
  static constexpr int64_t kBlock = 16384;
  int part_of(int64_t i) const { return part_of_cell_[hash_of(ids_[i]) >> (64 - Index::kStripeBits)]; }

  const int64_t* ids_;
  int64_t n_;
  uint8_t part_of_cell_[Stripes::kCells];
  std::vector<int64_t> offsets_;

 public:
  std::vector<uint64_t> owned;  // the stripes of each part
  std::vector<int64_t> begins;  // where its positions begin

 private:
  Scratch positions_;
};

}  // namespace shoal
