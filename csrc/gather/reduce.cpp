#include "gather/reduce.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "core/thread_pool.h"

namespace shoal::gather {
namespace {

constexpr int64_t kGrain = 16;  // chunks

struct Scratch {
  explicit Scratch(const Tile& tile, bool own_sums)
      : indices(static_cast<size_t>(tile.k)),
        values(static_cast<size_t>(tile.k)),
        sum(static_cast<size_t>(own_sums ? tile.totalk : 0)),
        count(static_cast<size_t>(own_sums ? tile.totalk : 0)) {}
  std::vector<uint16_t> indices;
  std::vector<float> values;
  std::vector<float> sum;
  std::vector<int32_t> count;
};

void add_peer(const Tile& tile, const Encoded& peer, float factor, int64_t chunk, float* sum, int32_t* count,
              Scratch& scratch) {
  const int64_t k = tile.k;
  const uint8_t* indices = peer.indices + chunk * index_bytes(tile.codec, k);
  const uint8_t* values = peer.values + chunk * k * value_bytes(peer.kind);
  bool inside;
  if (peer.kind == Values::u8) {
    inside = SHOAL_DISPATCH(add_chunk_u8)(indices, static_cast<int>(tile.codec), k, tile.totalk, values, peer.table,
                                          sum, count, scratch.indices.data());
  } else {
    SHOAL_DISPATCH(widen)(values, k, static_cast<int>(peer.kind), scratch.values.data());
    SHOAL_DISPATCH(scale)(scratch.values.data(), k, factor);
    inside = SHOAL_DISPATCH(add_chunk)(indices, static_cast<int>(tile.codec), k, tile.totalk, scratch.values.data(),
                                       sum, count, scratch.indices.data());
  }
  if (!inside) throw std::invalid_argument("an index is outside its chunk; the payload changed after its validation");
}

void lay_out(const Grid& grid, int64_t chunk, const float* values) {
  const int64_t top = chunk / grid.across * grid.height, left = chunk % grid.across * grid.width;
  const int64_t row_begin = std::max(top, grid.row0), row_end = std::min(top + grid.height, grid.row1);
  const int64_t begin = std::max(left, grid.column0), end = std::min(left + grid.width, grid.column1);
  if (begin >= end) return;
  for (int64_t row = row_begin; row < row_end; ++row) {
    std::memcpy(grid.dense + (row - grid.row0) * grid.stride + (begin - grid.column0),
                values + (row - top) * grid.width + (begin - left), static_cast<size_t>(end - begin) * 4);
  }
}

}  // namespace

void reduce(const Tile& tile, const Grid& grid, std::span<const Encoded> peers, std::span<const float> factors) {
  const bool own_sums = !tile.sum;
  if (own_sums && !(tile.first && tile.last && grid.dense))
    throw std::invalid_argument(
        "a tile without sums must be the first and the last of its parameter and have a dense output");
  // The factor is applied to the tables: a value is rounded the same before the lookup as after it.
  std::vector<float> tables;
  std::vector<Encoded> scaled(peers.begin(), peers.end());
  tables.reserve(peers.size() * 256);
  for (size_t p = 0; p < peers.size(); ++p) {
    if (peers[p].kind != Values::u8) continue;
    scaled[p].table = tables.data() + tables.size();
    for (int b = 0; b < 256; ++b) tables.push_back(factors[p] * peers[p].table[b]);
  }
  parallel_for(tile.n, kGrain, [&](int64_t begin, int64_t end) {
    Scratch scratch(tile, own_sums);
    for (int64_t c = begin; c < end; ++c) {
      float* sum = own_sums ? scratch.sum.data() : tile.sum + c * tile.totalk;
      int32_t* count = own_sums ? scratch.count.data() : tile.count + c * tile.totalk;
      if (tile.first) {
        std::fill_n(sum, tile.totalk, 0.0f);
        std::fill_n(count, tile.totalk, 0);
      }
      for (size_t p = 0; p < peers.size(); ++p) add_peer(tile, scaled[p], factors[p], c, sum, count, scratch);
      if (!tile.last) continue;
      SHOAL_DISPATCH(divide)(sum, count, tile.totalk, static_cast<int>(tile.reduction), static_cast<float>(tile.peers));
      if (grid.dense) lay_out(grid, tile.chunks[c], sum);
    }
  });
}

}  // namespace shoal::gather
