#include "nn/bag.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

#include "core/hash.h"
#include "core/thread_pool.h"

namespace shoal {

void Bags::check(int64_t rows) const {
  auto refuse = [](const std::string& what) { throw std::invalid_argument(what); };
  if (pool < Pool::sum || pool > Pool::max) refuse("unknown pooling");
  if (pool == Pool::firstn && length < 1) refuse("firstn needs a length of at least 1, got " + std::to_string(length));
  if (bags < 0) refuse("offsets have at least one element");
  if (offsets[0] != 0) refuse("offsets start at 0, got " + std::to_string(offsets[0]));
  if (offsets[bags] != rows)
    refuse("offsets end at the number of ids, " + std::to_string(rows) + ", got " + std::to_string(offsets[bags]));
  for (int64_t b = 0; b < bags; ++b)
    if (offsets[b + 1] < offsets[b])
      refuse("offsets never fall, but entry " + std::to_string(b + 1) + " is " + std::to_string(offsets[b + 1]) +
             " after " + std::to_string(offsets[b]));
}

namespace {

// Bags for one thread's turn: about 32 K floats of input.
int64_t grain(const Bags& bags) {
  const int64_t floats = bags.bags ? bags.offsets[bags.bags] * bags.dim / bags.bags + bags.width() : 1;
  return std::max<int64_t>(1, 32768 / std::max<int64_t>(1, floats));
}

}  // namespace

void pool(const Bags& bags, const float* rows, float* out) {
  parallel_for(bags.bags, grain(bags),
               [&](int64_t begin, int64_t end) { SHOAL_DISPATCH(pool_bags)(bags, begin, end, rows, out); });
}

void lookup_pool(Table& table, const int64_t* ids, const Bags& bags, bool create, Stamp time, float* out) {
  constexpr int64_t kPiece = 2048;  // ids; one such lookup runs on the calling thread
  const bool fused = !create && (bags.pool == Pool::sum || bags.pool == Pool::mean || bags.pool == Pool::sqrtn);
  const int64_t per_bag = bags.bags ? bags.offsets[bags.bags] / bags.bags + 1 : 1;
  parallel_for(bags.bags, std::max<int64_t>(1, kPiece / per_bag), [&](int64_t begin, int64_t end) {
    if (fused) {
      const int64_t before = bags.offsets[begin];
      BagCursor at{begin, end};
      table.read(ids + before, bags.offsets[end] - before, Missing::zeros, nullptr,
                 [&](int64_t first, int64_t n, const float* const* rows) {
                   SHOAL_DISPATCH(pool_some)(bags, at, before + first, n, rows, out);
                 });
      return SHOAL_DISPATCH(pool_some)(bags, at, bags.offsets[end], 0, nullptr, out);  // empty bags at the end
    }
    thread_local std::vector<float> rows;
    for (int64_t next; begin < end; begin = next) {
      const int64_t first = bags.offsets[begin];
      for (next = begin + 1; next < end && bags.offsets[next + 1] - first <= kPiece;) ++next;
      const int64_t n = bags.offsets[next] - first;
      if (rows.size() < static_cast<size_t>(n * bags.dim)) rows.resize(static_cast<size_t>(n * bags.dim));
      if (create) {
        table.lookup_or_insert(ids + first, n, time, rows.data());
      } else {
        table.lookup(ids + first, n, rows.data());
      }
      // Row i of the batch is row i - first of the piece.
      SHOAL_DISPATCH(pool_bags)(bags, begin, next, rows.data() - first * bags.dim, out);
    }
    if (rows.size() > static_cast<size_t>(4 * kPiece * bags.dim)) rows = {};
  });
}

void pool_gradient(const Bags& bags, const float* grad, const float* rows, float* grad_rows, float* grad_weights) {
  parallel_for(bags.bags, grain(bags), [&](int64_t begin, int64_t end) {
    SHOAL_DISPATCH(pool_bags_gradient)(bags, begin, end, grad, rows, grad_rows, grad_weights);
  });
}

int64_t sum_by_id(const int64_t* ids, int64_t n, const float* rows, int64_t dim, int64_t* out_ids, float* out_rows) {
  if (n >= int64_t{1} << 31) throw std::invalid_argument("at most 2147483647 ids can be summed in one call");
  const size_t mask = std::bit_ceil(static_cast<size_t>(2 * n + 1)) - 1;
  std::vector<uint32_t> slots(mask + 1, 0);  // number of a distinct id + 1
  int64_t distinct = 0;
  for (int64_t i = 0; i < n; ++i) {
    size_t slot = hash_id(static_cast<uint64_t>(ids[i])) & mask;
    while (slots[slot] && out_ids[slots[slot] - 1] != ids[i]) slot = (slot + 1) & mask;
    if (slots[slot]) {
      SHOAL_DISPATCH(add_to)(rows + i * dim, dim, out_rows + (slots[slot] - 1) * dim);
    } else {
      out_ids[distinct] = ids[i];
      std::memcpy(out_rows + distinct * dim, rows + i * dim, sizeof(float) * static_cast<size_t>(dim));
      slots[slot] = static_cast<uint32_t>(++distinct);
    }
  }
  return distinct;
}

}  // namespace shoal
