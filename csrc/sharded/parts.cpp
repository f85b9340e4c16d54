#include "sharded/parts.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "core/thread_pool.h"

namespace shoal {
namespace {

constexpr int64_t kAhead = 16;  // rows whose cache lines are on their way

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
      throw std::invalid_argument("offset " + std::to_string(offset) + " (row " + std::to_string(j) + ") with " +
                                  std::to_string(w) + " floats is in no part");
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
    throw std::invalid_argument("edges must rise from 0, and be one more than the parts");
  if (width < 1) throw std::invalid_argument("a row must have at least one float");
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

namespace {

void check(const BagGradients& bags, const int32_t* places, int64_t n, int64_t size) {
  const auto all = static_cast<int64_t>(bags.columns.size()) * bags.bags;
  if (bags.dim < 1 || bags.bags < 0) throw std::invalid_argument("a row must have at least one float");
  for (int64_t column : bags.columns)
    if (column < 0 || column + bags.dim > bags.width)
      throw std::invalid_argument("column " + std::to_string(column) + " with " + std::to_string(bags.dim) +
                                  " floats lies outside a gradient of width " + std::to_string(bags.width));
  if (bags.offsets[0] != 0 || bags.offsets[all] != n || !std::is_sorted(bags.offsets, bags.offsets + all + 1))
    throw std::invalid_argument("offsets must rise from 0 to the number of ids, " + std::to_string(n));
  for (int64_t i = 0; i < n; ++i)
    if (places[i] + bags.dim > size && places[i] >= 0)
      throw std::invalid_argument("place " + std::to_string(places[i]) + " (id number " + std::to_string(i) +
                                  ") lies outside the buffer of " + std::to_string(size) + " floats");
}

// Of the ids whose rows begin in [lo, hi).
template <int kDim>
void add_range(const BagGradients& bags, const int32_t* places, int64_t lo, int64_t hi, float* out) {
  const int64_t dim = kDim ? kDim : bags.dim;
  const int64_t* offset = bags.offsets;
  for (int64_t column : bags.columns) {
    for (int64_t b = 0; b < bags.bags; ++b, ++offset) {
      const float factor = bags.factors ? bags.factors[offset - bags.offsets] : 1.0f;
      const float* __restrict grad = bags.grad + b * bags.width + column;
      for (int64_t i = offset[0]; i < offset[1]; ++i) {
        if (places[i] < lo || places[i] >= hi) continue;
        const float scale = bags.weights ? factor * bags.weights[i] : factor;
        float* __restrict to = out + places[i];
        for (int64_t c = 0; c < dim; ++c) to[c] += grad[c] * scale;
      }
    }
  }
}

}  // namespace

void add_bag_gradients(const BagGradients& bags, const int32_t* places, int64_t n, float* out, int64_t size) {
  check(bags, places, n, size);
  // Each part owns the rows that begin in a range of the buffer, so that every row is summed by one thread in order.
  constexpr int64_t kMost = 8;
  const int64_t parts = n * bags.dim < 1 << 16 ? 1 : std::min<int64_t>(num_threads(), kMost);
  int64_t bounds[kMost + 1] = {0};
  bounds[parts] = size;
  if (parts > 1) {
    std::vector<int32_t> sample;
    for (int64_t i = 0; i < n; i += std::max<int64_t>(1, n / 1024)) sample.push_back(places[i]);
    std::sort(sample.begin(), sample.end());
    for (int64_t p = 1; p < parts; ++p)
      bounds[p] = std::max<int64_t>(0, sample[static_cast<int64_t>(sample.size()) * p / parts]);
  }
  parallel_parts(parts, [&](int64_t p) {
    switch (bags.dim) {
      case 8:
        return add_range<8>(bags, places, bounds[p], bounds[p + 1], out);
      case 16:
        return add_range<16>(bags, places, bounds[p], bounds[p + 1], out);
      case 32:
        return add_range<32>(bags, places, bounds[p], bounds[p + 1], out);
      case 64:
        return add_range<64>(bags, places, bounds[p], bounds[p + 1], out);
      default:
        return add_range<0>(bags, places, bounds[p], bounds[p + 1], out);
    }
  });
}

}  // namespace shoal
