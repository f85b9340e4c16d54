#include "serving/slot_rows.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

#include "core/hash.h"
#include "nn/pooling.h"
#include "table/read.h"

namespace shoal {

FreshRows::FreshRows(const int64_t* ids, int64_t n, const float* values, int64_t dim)
    : dim_(dim), ids_(ids, ids + n), values_(values, values + n * dim) {
  if (n >= int64_t{1} << 31)
    throw std::invalid_argument("a push must have at most 2147483647 rows, got " + std::to_string(n));
  slots_.assign(std::bit_ceil(static_cast<size_t>(2 * n + 1)), 0);
  const size_t mask = slots_.size() - 1;
  for (int64_t i = 0; i < n; ++i) {
    size_t slot = hash_id(static_cast<uint64_t>(ids[i])) & mask;
    while (slots_[slot]) slot = (slot + 1) & mask;
    slots_[slot] = static_cast<uint32_t>(i + 1);
  }
}

const float* FreshRows::find(int64_t id) const {
  const size_t mask = slots_.size() - 1;
  for (size_t slot = hash_id(static_cast<uint64_t>(id)) & mask; slots_[slot]; slot = (slot + 1) & mask)
    if (ids_[slots_[slot] - 1] == id) return values_.data() + (slots_[slot] - 1) * dim_;
  return nullptr;
}

namespace {

// Calls `use` with the rows of ids of one table, fresh rows first; padding is null.
template <class Use>
void read_table(const Table& table, const FreshRows* fresh, const int64_t* padding, const int64_t* ids, int64_t n,
                Use use) {
  table.read(ids, n, Missing::zeros, padding, [&](int64_t first, int64_t some, const float* const* rows) {
    if (!fresh) {
      use(first, some, rows);
      return;
    }
    const float* patched[kRound];
    for (int64_t at = 0; at < some; at += kRound) {
      const int64_t count = std::min<int64_t>(kRound, some - at);
      for (int64_t i = 0; i < count; ++i) {
        const float* newer = rows[at + i] ? fresh->find(ids[first + at + i]) : nullptr;
        patched[i] = newer ? newer : rows[at + i];
      }
      use(first + at, count, patched);
    }
  });
}

const FreshRows* of(const Fresh& fresh, size_t number) { return number < fresh.size() ? fresh[number].get() : nullptr; }

// Copies the rows of all ids, one after another, from the tables that have them.
void read_rows(const RowSource& source, const Fresh& fresh, const int64_t* ids, int64_t n, float* out) {
  const int64_t dim = source.dim(), shards = static_cast<int64_t>(source.tables.size());
  if (shards == 1) {
    read_table(*source.tables[0], of(fresh, source.first), nullptr, ids, n,
               [&](int64_t first, int64_t some, const float* const* rows) {
                 SHOAL_DISPATCH(copy_rows)(rows, some, dim, false, out + first * dim);
               });
    return;
  }
  std::vector<int64_t> own, places;
  for (int64_t shard = 0; shard < shards; ++shard) {
    own.clear();
    places.clear();
    for (int64_t i = 0; i < n; ++i) {
      const int64_t remainder = ids[i] % shards;
      if ((remainder < 0 ? remainder + shards : remainder) != shard) continue;  // Python's remainder
      own.push_back(ids[i]);
      places.push_back(i);
    }
    read_table(*source.tables[static_cast<size_t>(shard)], of(fresh, source.first + static_cast<size_t>(shard)),
               nullptr, own.data(), static_cast<int64_t>(own.size()),
               [&](int64_t first, int64_t some, const float* const* rows) {
                 for (int64_t i = 0; i < some; ++i)
                   std::copy_n(rows[i], dim, out + places[static_cast<size_t>(first + i)] * dim);
               });
  }
}

}  // namespace

void read_bags(const RowSource& source, const Fresh& fresh, const BagRule& rule, const int64_t* ids,
               const int64_t* offsets, int64_t bags, float* out, int64_t stride) {
  const int64_t dim = source.dim(), n = offsets[bags];
  const int64_t* padding = rule.padding ? &*rule.padding : nullptr;
  const bool adds = rule.pool == Pool::sum || rule.pool == Pool::mean || rule.pool == Pool::sqrtn;
  if (adds && source.tables.size() == 1) {
    const Bags all{offsets, dim, rule.pool, nullptr, stride, padding != nullptr};
    BagCursor at{0, bags};
    read_table(*source.tables[0], of(fresh, source.first), padding, ids, n,
               [&](int64_t first, int64_t some, const float* const* rows) {
                 SHOAL_DISPATCH(pool_some)(all, at, first, some, rows, out);
               });
    SHOAL_DISPATCH(pool_some)(all, at, n, 0, nullptr, out);  // empty bags at the end
    return;
  }
  std::vector<float> flat(static_cast<size_t>(n * dim));
  read_rows(source, fresh, ids, n, flat.data());
  BagsAt all;
  all.in_order = true;
  all.keys = ids;
  all.padding = padding;
  all.offsets = offsets;
  all.ids = n;
  all.features = 1;
  all.bags = bags;
  all.dim = dim;
  all.width = stride;
  all.floats = n * dim;
  all.combiners = {rule.pool};
  all.columns = {0};
  all.lengths = {rule.length};
  pool_at(all, flat.data(), out);
}

}  // namespace shoal
