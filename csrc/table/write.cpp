// Writing: a batch is cut into parts that own disjoint stripes, and each part writes its rows in input order.
#include "table/write.h"

#include <algorithm>
#include <cstring>

#include "core/hash.h"
#include "core/thread_pool.h"
#include "table/budget/newcomer.h"
#include "table/contents.h"
#include "table/occurrences.h"
#include "table/partition.h"
#include "table/rounds.h"
#include "table/rows/codec.h"

namespace shoal {
namespace {

constexpr int64_t kWriteChunk = 2048;  // ids after which a reader may take the lock

}  // namespace

void Table::fresh_row(int64_t id, char* row) const {
  if (layout_.serving) {
    std::vector<float> zeros(static_cast<size_t>(layout_.dim), 0.0f);
    return encode_row(layout_, zeros.data(), row);
  }
  auto* weights = reinterpret_cast<float*>(row);
  fresh_weights(&id, 1, &weights);
  fresh_state(row);
}

void Table::fresh_state(char* row) const {
  std::memcpy(row + 4 * static_cast<size_t>(layout_.dim), layout_.fresh_state.data(), layout_.fresh_state.size());
}

void Table::fresh_weights(const int64_t* ids, int64_t n, float* const* weights) const {
  for (size_t i = 0; i < layout_.segments.size(); ++i)
    SHOAL_DISPATCH(init_weights)(layout_.segments[i], static_cast<int32_t>(i), seed_, ids, n, weights);
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
void Table::stamp(Slot slot, Stamp time, bool created) {
  if (eviction_) {
    stamp_kept(slot, time, created);
  } else {
    const uint32_t last = slot.time();
    // Without a change the cache line need not be written back.
    if (time.at_least && !created ? last < time.seconds : last != time.seconds) slot.time() = time.seconds;
  }
  if (uint32_t epoch = epoch_.load(std::memory_order_relaxed)) contents_->rows.set_epoch(slot.row(), epoch, created);
}

// The same in a table with a budget: the slot has the policy's bits, and the row's time is kept elsewhere.
void Table::stamp_kept(Slot slot, Stamp time, bool created) {
  const Moment& moment = *time.moment;
  uint32_t kept;
  if (time.loaded) {
    kept = time.kept ? moment.loaded(*time.kept, time.seconds) : moment.loaded(time.seconds);
  } else {
    kept = created ? moment.fresh(time.score) : moment.written(slot.time(), time.score);
  }
  if (slot.time() != kept || created) slot.time() = kept;
  __builtin_prefetch(contents_->rows.time_of(slot.row()), 1);
}

// Sets the time of a row in a table with a budget: last, when its prefetched memory has arrived.
void Table::stamp_time(const Resolved& found, const Stamp& time) {
  RowArena& rows = contents_->rows;
  if (found.created || !time.at_least || rows.time(found.number) < time.seconds)
    rows.set_time(found.number, time.seconds);
}

Resolved Table::find_or_insert(uint64_t hash, int64_t id, Stamp time) {
  Contents& contents = *contents_;
  Stripe& stripe = contents.stripes[stripe_of(hash)];
  if (!contents.reserve_rows(stripe, small_)) {  // may throw; nothing has changed
    eviction_->full.store(true, std::memory_order_relaxed);
    const Slot slot = stripe.index.find(hash, static_cast<uint64_t>(id));
    if (!slot) return {nullptr, false};
    stamp(slot, time, false);
    return {contents.rows.row(slot.row()), false, slot.row()};
  }
  bool created;
  // A full table's index does not grow: rows of a full segment leave instead.
  const bool may_grow = !eviction_ || small_ || follows_.load(std::memory_order_relaxed) ||
                        !eviction_->full.load(std::memory_order_relaxed);
  Slot slot = stripe.index.find_or_insert(hash, static_cast<uint64_t>(id), &created, may_grow);
  if (!slot) {
    eviction_->full.store(true, std::memory_order_relaxed);
    return {nullptr, false};
  }
  if (created) slot.row() = contents.take_row(stripe);
  stamp(slot, time, created);
  return {contents.rows.row(slot.row()), created, slot.row()};
}

// The same if the home bucket is enough and nothing must grow; otherwise changes nothing and returns no row.
Resolved Table::find_or_insert_at_home(uint64_t hash, Bucket* home, int64_t id, Stamp time) {
  Contents& contents = *contents_;
  Stripe& stripe = contents.stripes[stripe_of(hash)];
  if (stripe.rows_left == 0 && stripe.spare.empty()) return {nullptr, false};
  bool created;
  Slot slot = stripe.index.find_or_insert_at_home(hash, home, static_cast<uint64_t>(id), &created);
  if (!slot) return {nullptr, false};
  if (created) slot.row() = contents.take_row(stripe);
  stamp(slot, time, created);
  return {contents.rows.row(slot.row()), created, slot.row()};
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
    if (created) fresh_state(row);
  } else if (created || kKind == Kind::reinitialize) {
    fresh_row(write.ids[position], row);
  }
  auto* w = reinterpret_cast<float*>(row);
  if constexpr (kKind == Kind::assign) std::memcpy(w, value, 4 * static_cast<size_t>(dim));
  if constexpr (kKind == Kind::assign_add) SHOAL_DISPATCH(add)(value, dim, w);
  if constexpr (kKind == Kind::gradients) {
    value = write.gradients.value(position, dim, scratch + dim);
    step_row(write, row, value, write.noise ^ hash_id(static_cast<uint64_t>(position)), scratch);
  }
  if constexpr (kKind == Kind::insert) read_row(row, write.out + position * dim);
}

// Writes the positions (null: all) in order; their ids are in `owned` stripes, which no other part writes to.
template <Table::Kind kKind>
void Table::write_part(const Write& write, const uint32_t* positions, int64_t n, uint64_t owned) {
  const bool erase_zeros = kKind == Kind::assign && layout_.skip_zero;
  std::vector<Newcomer> postponed;
  struct {
    int64_t made = 0, written = 0, refused = 0;
  } count;
  std::vector<float> scratch(static_cast<size_t>(2 * layout_.dim));
  for (int64_t chunk = 0; chunk < n; chunk += kWriteChunk) {
    const int64_t size = std::min(n - chunk, kWriteChunk);
    auto position = [&](int64_t i) { return positions ? int64_t{positions[chunk + i]} : chunk + i; };
    auto time = [&](int64_t at) {
      Stamp stamp = write.time;
      if constexpr (kKind == Kind::load) {
        stamp.seconds = write.rows->times[at];
        stamp.kept = write.rows->scores.empty() ? nullptr : &write.rows->scores[at];
      }
      if (write.scores) stamp.score = write.scores + at;
      return stamp;
    };
    auto probed = [&](int64_t i, Slot slot, bool there) {
      const int64_t at = position(i);
      if constexpr (kKind == Kind::gradients) {
        prefetch(write.gradients.at(at), 4 * layout_.dim);
      } else if (write.values) {
        prefetch(write.values + at * layout_.dim, 4 * layout_.dim);
      }
      if (erase_zeros || (write.drop && write.drop[at])) return false;
      if (there) stamp(slot, time(at), false);
      if constexpr (kKind == Kind::reinitialize) write.existed[at] = 1;
      return true;
    };
    // An id may occur twice, and its first occurrence creates the row: so all unknown ids are resolved, in order.
    auto settle = [](int64_t, uint64_t, Bucket*) { return Resolved{nullptr, false}; };
    auto resolve = [&](int64_t i, uint64_t hash) -> Resolved {
      const int64_t at = position(i);
      const int64_t id = write.ids[at];
      if (write.drop && write.drop[at]) return {nullptr, false};
      if (erase_zeros && is_zero(write.values + at * layout_.dim, layout_.dim)) {
        erase_row(stripe_of(hash), hash, id);
        return {nullptr, false};
      }
      const Resolved found = find_or_insert(hash, id, time(at));
      if constexpr (kKind == Kind::reinitialize) write.existed[at] = found.row && !found.created;
      if (!found.row) postponed.push_back({i, hash, id, 0});
      return found;
    };
    auto finish = [&](int64_t i, const Resolved& found) {
      if (!found.row) return;
      count.made += found.created;
      ++count.written;
      if (eviction_) stamp_time(found, time(position(i)));
      write_row<kKind>(write, position(i), found.row, found.created, scratch.data());
    };
    Locks<true> lock(*this, small_ ? kAllStripes
                                   : stripes_of(positions ? write.ids : write.ids + chunk,
                                                positions ? positions + chunk : nullptr, size, owned));
    in_rounds(
        *contents_, size, layout_.row_bytes, [&](int64_t i) { return write.ids[position(i)]; }, probed, settle, resolve,
        finish);
    if (postponed.empty()) continue;
    write_postponed(
        write, postponed, [&](int64_t i) { return time(position(i)); },
        [&](int64_t i, Resolved found) {
          if (found.row) return finish(i, found);
          ++count.refused;
          if constexpr (kKind == Kind::insert) {  // returns the row that it would have got
            std::vector<char> row(static_cast<size_t>(layout_.stride));
            fresh_row(write.ids[position(i)], row.data());
            read_row(row.data(), write.out + position(i) * layout_.dim);
          }
        });
    postponed.clear();
  }
  if (eviction_) eviction_->count(count.made, count.written, count.refused);
}

// Makes room for ids that found none; those that are refused have a null row.
template <class Time, class Finish>
void Table::write_postponed(const Write& write, std::vector<Newcomer>& postponed, Time time, Finish finish) {
  for (Newcomer& newcomer : postponed) {
    const Stamp stamp = time(newcomer.place);
    const Moment& moment = *stamp.moment;
    newcomer.key = moment.key(!stamp.loaded ? moment.fresh(stamp.score)
                              : stamp.kept  ? moment.loaded(*stamp.kept, stamp.seconds)
                                            : moment.loaded(stamp.seconds));
  }
  make_room(write, postponed);
  std::vector<Resolved> found;
  found.reserve(postponed.size());
  for (const Newcomer& newcomer : postponed) {
    found.push_back(newcomer.refused ? Resolved{nullptr, false}
                                     : find_or_insert(newcomer.hash, newcomer.id, time(newcomer.place)));
    if (found.back().row) prefetch_row(found.back().row, layout_.row_bytes);
    if (!found.back().row && eviction_->recording()) eviction_->note_refused(newcomer.id);
  }
  for (size_t i = 0; i < found.size(); ++i) finish(postponed[i].place, found[i]);
}

// Gradients with dedup: those of equal ids are summed in input order, for one optimizer step.
void Table::write_groups(const Write& write, const uint32_t* positions, int64_t n, uint64_t owned) {
  const int32_t dim = layout_.dim;
  const Gradients& gradients = write.gradients;
  auto position = [&](int64_t k) { return positions ? int64_t{positions[k]} : k; };
  thread_local Occurrences distinct;
  distinct.find(write.ids, n, write.drop, position);

  std::vector<float> scratch(static_cast<size_t>(3 * dim));
  float *sum = scratch.data() + dim, *product = sum + dim;
  auto value = [&](uint32_t k, float* out) { return gradients.value(position(k), dim, out); };  // of one occurrence
  std::vector<Newcomer> postponed;
  struct {
    int64_t made = 0, refused = 0;
  } count;
  for (int64_t chunk = 0; chunk < distinct.size(); chunk += kWriteChunk) {
    const int64_t size = std::min(distinct.size() - chunk, kWriteChunk);
    const int64_t* ids = distinct.ids() + chunk;
    auto time = [&](int64_t i) {
      Stamp stamp = write.time;
      if (write.scores) stamp.score = write.scores + position(distinct.first(chunk + i));
      return stamp;
    };
    auto finish = [&](int64_t i, const Resolved& found) {
      if (!found.row) return;
      const auto& [row, created, number] = found;
      if (eviction_) stamp_time(found, write.time);
      count.made += created;
      const uint32_t first = distinct.first(chunk + i);
      const float* grads = value(first, sum);
      if (uint32_t k = distinct.next(first); k != Occurrences::kNone) {
        if (grads != sum) std::memcpy(sum, grads, 4 * static_cast<size_t>(dim));
        for (; k != Occurrences::kNone; k = distinct.next(k)) SHOAL_DISPATCH(add)(value(k, product), dim, sum);
        grads = sum;
      }
      if (created) fresh_row(ids[i], row);
      const auto at = static_cast<uint64_t>(position(first));
      step_row(write, row, grads, write.noise ^ hash_id(at), scratch.data());
    };
    Locks<true> lock(*this, small_ ? kAllStripes : stripes_of(ids, nullptr, size, owned));
    in_rounds(
        *contents_, size, layout_.row_bytes, [&](int64_t i) { return ids[i]; },
        [&](int64_t i, Slot slot, bool there) {
          prefetch(gradients.at(position(distinct.first(chunk + i))), 4 * dim);
          if (there) stamp(slot, time(i), false);
          return true;
        },
        [&](int64_t i, uint64_t hash, Bucket* home) { return find_or_insert_at_home(hash, home, ids[i], time(i)); },
        [&](int64_t i, uint64_t hash) {
          const Resolved found = find_or_insert(hash, ids[i], time(i));
          if (!found.row) postponed.push_back({i, hash, ids[i], 0});
          return found;
        },
        finish);
    if (postponed.empty()) continue;
    write_postponed(write, postponed, time, [&](int64_t i, Resolved found) {
      count.refused += !found.row;
      finish(i, found);
    });
    postponed.clear();
  }
  if (eviction_) eviction_->count(count.made, distinct.size() - count.refused, count.refused);
  distinct.trim();
}

void Table::write_task(const Write& given, const uint32_t* positions, int64_t n, uint64_t owned) {
  Write write = given;
  write.time.moment = &write.moment;
  write.time.loaded = write.restored;
  Batch batch(write.ids, positions, n);
  if (!write.restored) write.batch = &batch;  // of restored rows, those with the highest keys stay
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
}

void Table::write(Write write) {
  check_number(write.n);
  write.table = this;
  begin(write);
  write_all({&write, 1});
}

// Sets what a write needs in a table with a budget.
void Table::begin(Write& write) {
  if (!eviction_) return;
  write.now_s = std::max<int64_t>(write.time.seconds, max_update_time());
  write.moment =
      write.restored ? eviction_->moment() : eviction_->begin_call(static_cast<uint32_t>(write.now_s), expected_);
}

// Threads share the tables, and a large batch of one table is cut into parts that own disjoint stripes.
void Table::write_all(std::span<Write> writes) {
  std::vector<std::vector<int64_t>> gone(writes.size());
  for (size_t k = 0; k < writes.size(); ++k)
    if (writes[k].table->eviction_ && writes[k].table->trackers()) writes[k].gone = &gone[k];
  auto note = [&] {
    note_written(writes);
    for (size_t k = 0; k < writes.size(); ++k) writes[k].table->note_removed(gone[k]);
  };
  try {
    write_rows(writes);
  } catch (...) {  // some rows may have been written
    note();
    throw;
  }
  note();
}

void Table::note_written(std::span<const Write> writes) {
  for (const Write& write : writes) {
    if (write.table->eviction_ && !write.restored) write.table->eviction_->curve.wrote(write.ids, write.n, write.drop);
    const auto trackers = write.table->trackers();
    if (!trackers) continue;
    std::vector<int64_t> passed;
    if (write.drop) {
      for (int64_t i = 0; i < write.n; ++i)
        if (!write.drop[i]) passed.push_back(write.ids[i]);
    }
    for (const auto& [tracker, writes] : *trackers) {
      if (!writes) continue;
      if (write.drop) {
        tracker->wrote(passed.data(), static_cast<int64_t>(passed.size()));
      } else {
        tracker->wrote(write.ids, write.n);
      }
    }
  }
}

void Table::write_rows(std::span<const Write> writes) {
  const int threads = num_threads();
  int64_t total = 0;
  for (const Write& write : writes) total += write.n;
  if (threads == 1 || total < 4096) {
    for (const Write& write : writes) write.table->write_task(write, nullptr, write.n, kAllStripes);
    return;
  }
  struct Task {
    const Write* write;
    const uint32_t* positions;
    int64_t n;
    uint64_t owned;
  };
  std::vector<Task> tasks;
  std::vector<std::unique_ptr<Partition>> partitions;
  std::vector<const Write*> of_partition;
  for (const Write& write : writes) {
    // A table with most of the ids is shared by all threads; one of many tables gets one thread.
    const auto parts = static_cast<int>(std::min<int64_t>(kStripes, (write.n * threads * 2 + total - 1) / total));
    if (write.n < 4096 || parts < 2 || write.table->small_) {
      tasks.push_back({&write, nullptr, write.n, kAllStripes});
    } else {
      partitions.push_back(std::make_unique<Partition>(write.ids, write.n, parts));
      of_partition.push_back(&write);
    }
  }
  if (!partitions.empty()) {
    std::vector<std::pair<Partition*, int64_t>> blocks;
    for (auto& partition : partitions)
      for (int64_t block = 0; block < partition->blocks(); ++block) blocks.emplace_back(partition.get(), block);
    const auto count = static_cast<int64_t>(blocks.size());
    parallel_parts(count, [&](int64_t i) { blocks[i].first->count(blocks[i].second); });
    for (auto& partition : partitions) partition->place();
    parallel_parts(count, [&](int64_t i) { blocks[i].first->fill(blocks[i].second); });
    for (size_t k = 0; k < partitions.size(); ++k) {
      const Partition& partition = *partitions[k];
      for (size_t p = 0; p < partition.owned.size(); ++p)
        tasks.push_back({of_partition[k], partition.positions(p), partition.begins[p + 1] - partition.begins[p],
                         partition.owned[p]});
    }
  }
  std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.n > b.n; });
  parallel_parts(static_cast<int64_t>(tasks.size()), [&](int64_t i) {
    const Task& task = tasks[i];
    task.write->table->write_task(*task.write, task.positions, task.n, task.owned);
  });
}

}  // namespace shoal
