// Writing: a batch is cut into parts that own disjoint stripes, and each part does its rows in input order.
#include "table/write.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>

#include "core/hash.h"
#include "core/thread_pool.h"
#include "table/codec.h"
#include "table/contents.h"
#include "table/rounds.h"

namespace shoal {
namespace {

constexpr int64_t kWriteChunk = 2048;  // ids between two chances for a reader

}  // namespace

void Table::fresh_row(int64_t id, char* row) const {
  if (layout_.serving) {
    std::vector<float> zeros(static_cast<size_t>(layout_.dim), 0.0f);
    return encode_row(layout_, zeros.data(), row);
  }
  auto* w = reinterpret_cast<float*>(row);
  const uint64_t noise = seed_ ^ hash_id(static_cast<uint64_t>(id));
  for (size_t i = 0; i < layout_.segments.size(); ++i) {
    const Segment& s = layout_.segments[i];
    SHOAL_DISPATCH(init_weights)(s, static_cast<int32_t>(i), noise, w + s.weight);
    init_state(s, row + s.state);
  }
}

void Table::step_row(const Write& write, char* row, const float* grads, uint64_t noise, float* scratch) const {
  auto* w = reinterpret_cast<float*>(row);
  for (size_t i = 0; i < layout_.segments.size(); ++i) {
    const Segment& s = layout_.segments[i];
    const float* g = grads + s.weight;
    if (s.codec == Codec::one_bit) {
      const float scale = scales_[i].load(std::memory_order_relaxed);
      SHOAL_DISPATCH(hash_net_gradient)(w + s.weight, g, s.dim, s.amplitude, scale, scratch);
      g = scratch;
    }
    steps_[i](s, w + s.weight, row + s.state, g, write.rates[i], write.global_step);
    if (s.stochastic_rounding) SHOAL_DISPATCH(round_to_half)(w + s.weight, s.dim, hash_id(noise + i));
  }
}

// Marks a row as written now.
void Table::stamp(Slot slot, Stamp time) {
  const uint32_t last = slot.time();
  // A line that did not change need not be written back.
  if (time.at_least ? last < time.seconds : last != time.seconds) slot.time() = time.seconds;
  if (uint32_t epoch = epoch_.load(std::memory_order_relaxed)) contents_->rows.set_epoch(slot.row(), epoch);
}

Resolved Table::find_or_insert(uint64_t hash, int64_t id, Stamp time) {
  Contents& contents = *contents_;
  Stripe& stripe = contents.stripes[stripe_of(hash)];
  if (stripe.rows_left == 0 && stripe.spare.empty()) contents.reserve_rows(stripe);  // may throw; nothing has changed
  bool created;
  Slot slot = stripe.index.find_or_insert(hash, static_cast<uint64_t>(id), &created);
  if (created) slot.row() = contents.take_row(stripe);
  stamp(slot, created ? Stamp(time.seconds) : time);
  return {contents.rows.row(slot.row()), created};
}

template <Table::Kind kKind>
void Table::write_row(const Write& write, int64_t position, char* row, bool created, float* scratch) const {
  const int32_t dim = layout_.dim;
  const float* value = write.values ? write.values + position * dim : nullptr;
  if constexpr (kKind == Kind::load) {
    std::memcpy(row, write.rows->rows.data() + position * layout_.stride, static_cast<size_t>(layout_.row_bytes));
    return;
  }
  if (layout_.serving) {
    if constexpr (kKind == Kind::assign) encode_row(layout_, value, row);
    if constexpr (kKind == Kind::reinitialize) fresh_row(write.ids[position], row);
    if constexpr (kKind == Kind::assign_add) {
      if (created) return encode_row(layout_, value, row);
      decode_row(layout_, row, scratch);
      SHOAL_DISPATCH(add)(value, dim, scratch);
      encode_row(layout_, scratch, row);
    }
    return;
  }
  if constexpr (kKind == Kind::assign) {
    if (created)
      for (const Segment& s : layout_.segments)
        if (s.state_bytes) init_state(s, row + s.state);
  } else if (created || kKind == Kind::reinitialize) {
    fresh_row(write.ids[position], row);
  }
  auto* w = reinterpret_cast<float*>(row);
  if constexpr (kKind == Kind::assign) std::memcpy(w, value, 4 * static_cast<size_t>(dim));
  if constexpr (kKind == Kind::assign_add) SHOAL_DISPATCH(add)(value, dim, w);
  if constexpr (kKind == Kind::gradients)
    step_row(write, row, value, write.noise ^ hash_id(static_cast<uint64_t>(position)), scratch);
  if constexpr (kKind == Kind::insert) read_row(row, write.out + position * dim);
}

// The positions (all, if null) are handled in order; their ids are in `owned` stripes, which no other part writes to.
template <Table::Kind kKind>
void Table::write_part(const Write& write, const uint32_t* positions, int64_t n, uint64_t owned) {
  const bool erase_zeros = kKind == Kind::assign && layout_.skip_zero;
  std::vector<float> scratch(static_cast<size_t>(layout_.dim));
  for (int64_t chunk = 0; chunk < n; chunk += kWriteChunk) {
    const int64_t size = std::min(n - chunk, kWriteChunk);
    auto position = [&](int64_t i) { return positions ? int64_t{positions[chunk + i]} : chunk + i; };
    auto time = [&](int64_t at) { return kKind == Kind::load ? Stamp(write.rows->times[at]) : write.time; };
    auto probed = [&](int64_t i, Slot slot, bool there) {
      const int64_t at = position(i);
      if (write.values) prefetch(write.values + at * layout_.dim, 4 * layout_.dim);
      if (erase_zeros || (write.drop && write.drop[at])) return false;
      if (there) stamp(slot, time(at));
      if constexpr (kKind == Kind::reinitialize) write.existed[at] = 1;
      return true;
    };
    auto resolve = [&](int64_t i, uint64_t hash) -> Resolved {
      const int64_t at = position(i);
      const int64_t id = write.ids[at];
      if (write.drop && write.drop[at]) return {nullptr, false};
      if (erase_zeros && is_zero(write.values + at * layout_.dim, layout_.dim)) {
        erase_row(stripe_of(hash), hash, id);
        return {nullptr, false};
      }
      const Resolved found = find_or_insert(hash, id, time(at));
      if constexpr (kKind == Kind::reinitialize) write.existed[at] = !found.created;
      return found;
    };
    Locks<true> lock(*this, stripes_of(positions ? write.ids : write.ids + chunk,
                                       positions ? positions + chunk : nullptr, size, owned));
    in_rounds(
        *contents_, size, layout_.row_bytes, [&](int64_t i) { return write.ids[position(i)]; }, probed, resolve,
        [&](int64_t i, char* row, bool created) {
          if (row) write_row<kKind>(write, position(i), row, created, scratch.data());
        });
  }
}

// Gradients with dedup: those of equal ids are summed in input order and stepped once.
void Table::write_groups(const Write& write, const uint32_t* positions, int64_t n, uint64_t owned) {
  const int32_t dim = layout_.dim;
  // group_of[k] is the group of the k-th position that is not dropped; groups are numbered by first occurrence.
  std::vector<uint32_t> kept, group_of, first, count;
  kept.reserve(static_cast<size_t>(n));
  group_of.reserve(static_cast<size_t>(n));
  size_t mask = std::bit_ceil(static_cast<size_t>(2 * n + 1)) - 1;
  std::vector<uint32_t> table(mask + 1, 0);  // group number + 1
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t position = positions ? positions[i] : static_cast<uint32_t>(i);
    if (write.drop && write.drop[position]) continue;
    const int64_t id = write.ids[position];
    size_t slot = hash_of(id) & mask;
    while (table[slot] && write.ids[first[table[slot] - 1]] != id) slot = (slot + 1) & mask;
    if (!table[slot]) {
      first.push_back(position);
      count.push_back(0);
      table[slot] = static_cast<uint32_t>(first.size());
    }
    kept.push_back(position);
    group_of.push_back(table[slot] - 1);
    ++count[table[slot] - 1];
  }
  const int64_t groups = static_cast<int64_t>(first.size());
  std::vector<uint32_t> start(static_cast<size_t>(groups) + 1, 0);
  for (int64_t g = 0; g < groups; ++g) start[g + 1] = start[g] + count[g];
  std::vector<uint32_t> members(kept.size()), fill(start.begin(), start.end() - 1);
  for (size_t k = 0; k < kept.size(); ++k) members[fill[group_of[k]]++] = kept[k];

  std::vector<float> scratch(static_cast<size_t>(dim)), sum(static_cast<size_t>(dim));
  for (int64_t chunk = 0; chunk < groups; chunk += kWriteChunk) {
    const int64_t size = std::min(groups - chunk, kWriteChunk);
    auto id = [&](int64_t i) { return write.ids[first[chunk + i]]; };
    Locks<true> lock(*this, stripes_of(write.ids, first.data() + chunk, size, owned));
    in_rounds(
        *contents_, size, layout_.row_bytes, id,
        [&](int64_t i, Slot slot, bool there) {
          prefetch(write.values + int64_t{first[chunk + i]} * dim, 4 * dim);
          if (there) stamp(slot, write.time);
          return true;
        },
        [&](int64_t i, uint64_t hash) { return find_or_insert(hash, id(i), write.time); },
        [&](int64_t i, char* row, bool created) {
          const int64_t g = chunk + i;
          const float* grads = write.values + int64_t{first[g]} * dim;
          if (count[g] > 1) {
            std::memcpy(sum.data(), grads, 4 * static_cast<size_t>(dim));
            for (uint32_t k = start[g] + 1; k < start[g + 1]; ++k)
              SHOAL_DISPATCH(add)(write.values + int64_t{members[k]} * dim, dim, sum.data());
            grads = sum.data();
          }
          if (created) fresh_row(id(i), row);
          step_row(write, row, grads, write.noise ^ hash_id(first[g]), scratch.data());
        });
  }
}

void Table::write(const Write& write) {
  if (write.n > (int64_t{1} << 31)) throw std::invalid_argument("one call takes at most 2147483648 ids");
  auto part = [&](const uint32_t* positions, int64_t n, uint64_t owned) {
    switch (write.kind) {
      case Kind::assign:
        return write_part<Kind::assign>(write, positions, n, owned);
      case Kind::assign_add:
        return write_part<Kind::assign_add>(write, positions, n, owned);
      case Kind::gradients:
        return write.dedup ? write_groups(write, positions, n, owned)
                           : write_part<Kind::gradients>(write, positions, n, owned);
      case Kind::reinitialize:
        return write_part<Kind::reinitialize>(write, positions, n, owned);
      case Kind::load:
        return write_part<Kind::load>(write, positions, n, owned);
      case Kind::insert:
        return write_part<Kind::insert>(write, positions, n, owned);
    }
  };
  const int threads = num_threads();
  if (threads == 1 || write.n < 4096) return part(nullptr, write.n, kAllStripes);

  // Stable partition of the positions by stripe: blocks of the input count first, then write where they know they may.
  const int parts = std::min(threads, kStripes);
  // Neighbouring stripes with about equal shares of the ids.
  uint8_t part_of_cell[Stripes::kCells];
  std::vector<uint64_t> owned(static_cast<size_t>(parts), 0);
  for (int cell = 0; cell < Stripes::kCells; ++cell) {
    part_of_cell[cell] = static_cast<uint8_t>(kStripesOfCells.part(cell, parts));
    owned[part_of_cell[cell]] |= uint64_t{1} << kStripesOfCells.of_cell[cell];
  }
  auto part_of = [&](int64_t i) { return part_of_cell[hash_of(write.ids[i]) >> (64 - Index::kStripeBits)]; };
  const int64_t blocks = std::min<int64_t>(4 * threads, (write.n + 4095) / 4096);
  std::vector<int64_t> offsets(static_cast<size_t>(blocks * parts));
  auto range = [&](int64_t block) { return write.n / blocks * block + std::min(block, write.n % blocks); };
  parallel_parts(blocks, [&](int64_t block) {
    int64_t* counts = &offsets[block * parts];
    for (int64_t i = range(block); i < range(block + 1); ++i) ++counts[part_of(i)];
  });
  std::vector<int64_t> begins(static_cast<size_t>(parts) + 1, 0);
  for (int p = 0; p < parts; ++p) {
    int64_t at = begins[p];
    for (int64_t block = 0; block < blocks; ++block) at += std::exchange(offsets[block * parts + p], at);
    begins[p + 1] = at;
  }
  std::unique_ptr<uint32_t[]> positions(new uint32_t[static_cast<size_t>(write.n)]);
  parallel_parts(blocks, [&](int64_t block) {
    int64_t* next = &offsets[block * parts];
    for (int64_t i = range(block); i < range(block + 1); ++i) positions[next[part_of(i)]++] = static_cast<uint32_t>(i);
  });
  parallel_parts(parts, [&](int64_t p) { part(positions.get() + begins[p], begins[p + 1] - begins[p], owned[p]); });
}

}  // namespace shoal
