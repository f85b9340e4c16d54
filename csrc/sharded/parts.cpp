#include "sharded/parts.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "core/thread_pool.h"

namespace shoal {
namespace {

constexpr int64_t kAhead = 16;  // rows to prefetch

template <int kWidth>
void gather_piece(const std::vector<const float*>& parts, const std::vector<int64_t>& edges, const int32_t* offsets,
                  int64_t begin, int64_t end, int64_t width, float* rows) {
  const int64_t w = kWidth ? kWidth : width;
  auto part_of = [&](int64_t offset) {
    return static_cast<size_t>(std::upper_bound(edges.begin(), edges.end(), offset) - edges.begin()) - 1;
  };
  auto check = [&](int64_t j) {
    const int64_t offset = offsets[j];
    if (offset < 0 || offset >= edges.back() || offset + w > edges[part_of(offset) + 1])
      throw std::invalid_argument("offset " + std::to_string(offset) + " (row " + std::to_string(j) + ") + width " +
                                  std::to_string(w) + " must be within one part of the buffer of " +
                                  std::to_string(edges.back()) + " floats");
  };
  for (int64_t j = begin; j < end; ++j) check(j);
  auto address = [&](int64_t j) {
    const size_t p = part_of(offsets[j]);
    return parts[p] + (offsets[j] - edges[p]);
  };
  for (int64_t j = begin; j < end; ++j) {
    if (j + kAhead < end) __builtin_prefetch(address(j + kAhead));
    std::memcpy(rows + j * w, address(j), sizeof(float) * static_cast<size_t>(w));
  }
}

}  // namespace

void gather_from_parts(const std::vector<const float*>& parts, const std::vector<int64_t>& edges,
                       const int32_t* offsets, int64_t n, int64_t width, float* rows) {
  if (parts.empty() || edges.size() != parts.size() + 1 || edges[0] != 0 || !std::is_sorted(edges.begin(), edges.end()))
    throw std::invalid_argument("edges must rise from 0 and be one more than the parts, got " +
                                std::to_string(edges.size()) + " edges of " + std::to_string(parts.size()) + " parts");
  if (width < 1) throw std::invalid_argument("width must be at least 1, got " + std::to_string(width));
  const int64_t grain = std::max<int64_t>(64, (int64_t{128} << 10) / (width * 4));
  parallel_for(n, grain, [&](int64_t begin, int64_t end) {
    switch (width) {
      case 8:
        return gather_piece<8>(parts, edges, offsets, begin, end, width, rows);
      case 16:
        return gather_piece<16>(parts, edges, offsets, begin, end, width, rows);
      case 32:
        return gather_piece<32>(parts, edges, offsets, begin, end, width, rows);
      default:
        return gather_piece<0>(parts, edges, offsets, begin, end, width, rows);
    }
  });
}

}  // namespace shoal
