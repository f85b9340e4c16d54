// Making room in a full table. Ids that found no room wait until the rest of their chunk is written; then each stripe
// without free rows searches one segment of its index, the next one each time, and evicts the rows with the lowest
// keys. A segment has a few thousand random ids, so these are nearly the rows that a search of the complete table would
// choose. A small table searches all of its rows.
#include <algorithm>
#include <array>
#include <numeric>
#include <stdexcept>
#include <unordered_map>

#include "table/budget/newcomer.h"
#include "table/contents.h"
#include "table/write.h"

namespace shoal {
namespace {

constexpr int kTries = 4;  // segments that are searched for one chunk, at most

// Bins of keys by their distance from the lowest: finer near it, by the 3 bits after the first that is set.
constexpr int kBins = 256;
inline uint32_t bin_of(uint32_t distance) {
  const int width = std::bit_width(distance);
  if (width <= 3) return distance;
  const uint32_t bin = static_cast<uint32_t>(width - 3) << 3 | (distance >> (width - 4) & 7);
  return std::min<uint32_t>(bin, kBins - 1);
}

}  // namespace

bool Table::may_leave(const Moment& moment, Slot slot, int64_t now) const {
  const uint32_t min_age = eviction_->options.min_age_s;
  if (moment.just_written(slot.time())) return false;
  if (min_age && now - contents_->rows.time(slot.row()) < min_age) return false;
  return true;
}

// Whether an id must keep its row: it is pinned, or the write has it.
bool Table::stays(const Write& write, int64_t id) const {
  return eviction_->is_pinned(id) || (write.batch && write.batch->has(id));
}

// Evicts rows of one stripe. The caller must close the holes in its segments.
void Table::push_out(int stripe, const Write& write, std::span<const Slot> slots, int to_stripe) {
  if (slots.empty()) return;
  Contents& contents = *contents_;
  Stripe& from = contents.stripes[stripe];
  const int64_t now = write.now_s;
  const uint32_t epoch = epoch_.load(std::memory_order_relaxed);
  const auto sink = eviction_->sink();
  const bool recording = eviction_->recording();
  std::vector<int64_t> gone;
  int64_t ages = 0, youngest = Budget::kUnlimited, oldest = 0;
  for (size_t i = 0; i < slots.size(); ++i) {
    if (i + 8 < slots.size()) __builtin_prefetch(contents.rows.time_of(slots[i + 8].row()));
    const Slot slot = slots[i];
    const auto id = static_cast<int64_t>(slot.id());
    const uint32_t row = slot.row(), time = contents.rows.time(row);
    const int64_t age = std::max<int64_t>(0, now - time);
    ages += age;
    youngest = std::min(youngest, age);
    oldest = std::max(oldest, age);
    if (keeper_) keeper_->leaving(stripe, id, time, write.moment.lasting(slot.time()), contents.rows.row(row));
    if (recording) eviction_->note_gone(id);
    if (sink) {
      std::lock_guard lock(sink->mutex);
      if (sink->rows.size() < sink->limit) {
        sink->rows.add(id, time, write.moment.lasting(slot.time()), contents.rows.row(row), layout_.stride);
      } else {
        ++sink->lost;
      }
    }
    if (epoch) log_removed(from, epoch, id, row);
    if (write.gone) gone.push_back(id);
    contents.give_row(contents.stripes[to_stripe], row);
    slot.row() = kErasedRow;
  }
  if (write.gone) {
    std::lock_guard lock(gone_mutex_);
    write.gone->insert(write.gone->end(), gone.begin(), gone.end());
  }
  eviction_->count_ages(ages, youngest, oldest);
  eviction_->evicted.fetch_add(static_cast<int64_t>(slots.size()), std::memory_order_relaxed);
}

// Evicts the `wanted` rows of a segment with the lowest keys that are at most `bound`; returns how many it evicted.
int64_t Table::prune(int stripe, Bucket* first, const Write& write, int64_t wanted, uint32_t bound) {
  Index& index = contents_->stripes[stripe].index;
  const Moment& moment = *write.time.moment;
  const Moment::Order order = moment.order();
  const auto slots = static_cast<uint32_t>(4 * index.buckets());
  thread_local std::vector<uint32_t> keys, places;
  keys.resize(slots);
  places.resize(slots);
  const bool ages = eviction_->options.min_age_s > 0;
  uint32_t count = 0, lowest = ~0u;
  for (uint32_t b = 0; b < index.buckets(); ++b) {
    const Bucket& bucket = first[b];
    for (int lane = 0; lane < 4; ++lane) {
      const uint32_t has = bucket.time[lane], key = order.key(has);
      keys[count] = key;
      places[count] = 4 * b + static_cast<uint32_t>(lane);
      const bool may = (bucket.row[lane] >= kFirstRow) & (key <= bound) & !order.just_written(has);
      if (ages && may && !may_leave(moment, {first + b, lane}, write.now_s)) continue;
      lowest = may ? std::min(lowest, key) : lowest;
      count += may;
    }
  }
  std::array<uint32_t, kBins> bins{};
  for (uint32_t i = 0; i < count; ++i) ++bins[bin_of(keys[i] - lowest)];
  uint32_t last = 0;
  int64_t below = 0;  // rows in the bins before `last`
  while (last < kBins - 1 && below + bins[last] < wanted) below += bins[last++];
  std::vector<Slot> leaving;
  leaving.reserve(static_cast<size_t>(std::min<int64_t>(wanted, count)));
  // Takes all rows of the bins before `last` and some of it; then further bins, if some of those rows must stay.
  for (uint32_t from = 0;; from = ++last) {
    int64_t of_last = wanted - static_cast<int64_t>(leaving.size()) - (from ? 0 : below);
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t bin = bin_of(keys[i] - lowest);
      if (bin < from || bin > last || (bin == last && of_last <= 0)) continue;
      const Slot slot{first + places[i] / 4, static_cast<int>(places[i] % 4)};
      if (stays(write, static_cast<int64_t>(slot.id()))) continue;
      of_last -= bin == last;
      leaving.push_back(slot);
    }
    if (static_cast<int64_t>(leaving.size()) >= wanted || last == kBins - 1) break;
  }
  push_out(stripe, write, leaving, stripe);
  if (!leaving.empty()) index.close_holes(first, static_cast<uint32_t>(leaving.size()));
  return static_cast<int64_t>(leaving.size());
}

// Makes room for the newcomers of one stripe of a table with many rows.
void Table::make_room_in(int stripe, const Write& write, std::span<Newcomer> newcomers) {
  Contents& contents = *contents_;
  Stripe& s = contents.stripes[stripe];
  const bool choosy = eviction_->options.if_better || write.restored;
  const int64_t there = static_cast<int64_t>(s.spare.size()) + s.rows_left;
  const int64_t needed = static_cast<int64_t>(newcomers.size()) - there;
  // The highest keys first; among equal keys in the order of the ids.
  if (choosy)
    std::stable_sort(newcomers.begin(), newcomers.end(), [](const auto& a, const auto& b) { return a.key > b.key; });
  int64_t got = 0;
  for (int tries = 0; got < needed && tries < kTries; ++tries) {
    Bucket* first = s.index.segment_at(&s.hand);
    // Evict some more than needed, so that not every chunk must search, but only a small part of the stripe's rows.
    const int64_t reserve = std::min<int64_t>(s.index.ids_in(first) / 8, s.index.size() / 32);
    if (choosy) {
      const int64_t upto = tries == 0 ? needed - 1 : (got + needed - 1) / 2;
      const uint32_t bound = newcomers[static_cast<size_t>(there + upto)].key;
      const bool same = newcomers.front().key == newcomers.back().key;
      got += prune(stripe, first, write, same ? std::max(needed - got, reserve) : upto + 1 - got, bound);
    } else {
      got += prune(stripe, first, write, std::max(needed - got, reserve), ~0u);
    }
  }
  // If a segment has no slots for its newcomers, rows of that segment leave.
  std::unordered_map<Bucket*, std::pair<int64_t, uint32_t>> segments;  // newcomers, and the highest of their keys
  for (const Newcomer& newcomer : newcomers) {
    auto& [count, highest] = segments[s.index.segment(newcomer.hash)];
    ++count;
    highest = std::max(highest, newcomer.key);
  }
  for (const auto& [first, those] : segments) {
    const int64_t over = those.first - s.index.places_in(first);
    if (over <= 0) continue;
    const int64_t reserve = std::min<int64_t>(s.index.ids_in(first) / 8, s.index.size() / 32);
    prune(stripe, first, write, std::max(over, reserve), choosy ? those.second : ~0u);
  }
  if (!choosy) return;
  for (size_t i = static_cast<size_t>(there + got); i < newcomers.size(); ++i) newcomers[i].refused = true;
  std::sort(newcomers.begin(), newcomers.end(), [](const auto& a, const auto& b) { return a.place < b.place; });
}

struct Table::Candidate {
  uint32_t key;
  int stripe;
  Bucket* first;  // of its segment
  Slot slot;
};

// The same for a small table: exactly the rows with the lowest keys leave.
void Table::make_room_exactly(const Write& write, std::vector<Newcomer>& newcomers) {
  Contents& contents = *contents_;
  const Moment& moment = *write.time.moment;
  const bool choosy = eviction_->options.if_better || write.restored;
  std::vector<Candidate> candidates;
  for (int stripe = 0; stripe < kStripes; ++stripe) {
    const Index& index = contents.stripes[stripe].index;
    index.each([&](Slot slot) {
      if (!may_leave(moment, slot, write.now_s) || stays(write, static_cast<int64_t>(slot.id()))) return;
      candidates.push_back(
          {moment.key(slot.time()), stripe, index.segment(hash_of(static_cast<int64_t>(slot.id()))), slot});
    });
  }
  // Equal keys are ordered by id, so that a restored table evicts the same rows.
  std::sort(candidates.begin(), candidates.end(),
            [](const auto& a, const auto& b) { return a.key != b.key ? a.key < b.key : a.slot.id() < b.slot.id(); });
  std::vector<uint8_t> gone(candidates.size());
  std::vector<std::pair<Bucket*, int>> holes;  // the segment and the stripe of each row that leaves
  size_t next = 0;
  // Evicts the first candidate that may leave for the newcomer; false if there is none.
  auto leave = [&](const Newcomer& newcomer, Bucket* within) {
    for (size_t at = within ? 0 : next; at < candidates.size(); ++at) {
      if (!within) next = at;
      const Candidate& candidate = candidates[at];
      if (choosy && candidate.key > newcomer.key) return false;
      if (gone[at] || (within && candidate.first != within)) continue;
      gone[at] = 1;
      push_out(candidate.stripe, write, {&candidate.slot, 1}, newcomer.stripe);
      holes.emplace_back(candidate.first, candidate.stripe);
      return true;
    }
    return false;
  };
  std::vector<size_t> order(newcomers.size());
  std::iota(order.begin(), order.end(), size_t{0});
  if (choosy)
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return newcomers[a].key > newcomers[b].key; });
  std::unordered_map<int64_t, size_t> served;
  std::array<int64_t, kStripes> wanted{};  // rows of each stripe that newcomers will take
  auto spare = [&](int stripe) {
    const Stripe& s = contents.stripes[stripe];
    return static_cast<int64_t>(s.spare.size()) + s.rows_left - wanted[stripe];
  };
  auto with_spare = [&] {
    for (int stripe = 0; stripe < kStripes; ++stripe)
      if (spare(stripe) > 0) return stripe;
    return -1;
  };
  for (size_t at : order) {
    Newcomer& newcomer = newcomers[at];
    const auto [before, first_time] = served.try_emplace(newcomer.id, at);
    if (!first_time) {  // the id occurs more than once
      newcomer.refused = newcomers[before->second].refused;
      continue;
    }
    Stripe& mine = contents.stripes[newcomer.stripe];
    if (spare(newcomer.stripe) > 0) {
    } else if (const int other = with_spare(); other >= 0) {
      contents.give_row(mine, contents.take_row(contents.stripes[other]));
    } else if (!leave(newcomer, nullptr)) {
      newcomer.refused = true;
      continue;
    }
    ++wanted[newcomer.stripe];
    Bucket* first = mine.index.segment(newcomer.hash);
    if (mine.index.is_packed(first) && !contents.budget->unlimited()) leave(newcomer, first);
  }
  std::sort(holes.begin(), holes.end());
  for (size_t i = 0; i < holes.size();) {
    size_t end = i;
    while (end < holes.size() && holes[end].first == holes[i].first) ++end;
    contents.stripes[holes[i].second].index.close_holes(holes[i].first, static_cast<uint32_t>(end - i));
    i = end;
  }
}

void Table::make_room(const Write& write, std::vector<Newcomer>& newcomers) {
  for (Newcomer& newcomer : newcomers) newcomer.stripe = stripe_of(newcomer.hash);
  if (small_) return make_room_exactly(write, newcomers);
  std::stable_sort(newcomers.begin(), newcomers.end(),
                   [](const auto& a, const auto& b) { return a.stripe < b.stripe; });
  for (size_t i = 0; i < newcomers.size();) {
    size_t end = i;
    while (end < newcomers.size() && newcomers[end].stripe == newcomers[i].stripe) ++end;
    make_room_in(newcomers[i].stripe, write, {&newcomers[i], end - i});
    i = end;
  }
}

void Table::let_go(const int64_t* ids, int64_t n) {
  if (!eviction_) throw std::invalid_argument("this table has no budget; create it with max_rows or max_bytes");
  std::vector<int64_t> gone;
  Write write{.kind = Kind::load, .ids = ids, .n = n};
  write.moment = eviction_->moment();
  write.now_s = max_update_time();
  if (trackers()) write.gone = &gone;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t hash = hash_of(ids[i]);
    const int stripe = stripe_of(hash);
    Locks<true> lock(*this, small_ ? kAllStripes : uint64_t{1} << stripe);
    Index& index = contents_->stripes[stripe].index;
    const Slot slot = index.find(hash, static_cast<uint64_t>(ids[i]));
    if (!slot) continue;
    push_out(stripe, write, {&slot, 1}, stripe);
    index.erase(hash, slot);
  }
  note_removed(gone);
}

void Table::follow(bool other) {
  if (!eviction_) return;
  Locks<true> lock(*this, kAllStripes);
  follows_.store(other);
  contents_->share_spare(other);
}

// --- queries -------------------------------------------------------------------------------------------------------

void Table::policy_keys(const int64_t* ids, int64_t n, bool lasting, int64_t* out) const {
  if (!eviction_) throw std::invalid_argument("this table has no budget; create it with max_rows or max_bytes");
  const Moment moment = eviction_->moment();
  Locks<false> lock(*this, kAllStripes);
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t hash = hash_of(ids[i]);
    const Slot slot = contents_->stripes[stripe_of(hash)].index.find(hash, static_cast<uint64_t>(ids[i]));
    if (lasting)
      out[i] = slot ? static_cast<int64_t>(moment.lasting(slot.time())) : 0;
    else
      out[i] = slot ? int64_t{moment.key(slot.time())} : -1;
  }
}

std::unique_ptr<Table> Table::empty_twin() const {
  if (!eviction_) return std::make_unique<Table>(layout_, 0, expected_);
  EvictOptions options = eviction_->options;
  if (options.bytes) {
    Locks<false> lock(*this, kAllStripes);
    const int64_t others = options.bytes->used() - contents_->charged_bytes();
    options.bytes = std::make_shared<Budget>(options.bytes->limit() - others);
  }
  auto twin = std::make_unique<Table>(layout_, 0, expected_, &options);
  twin->eviction_->set_epoch(eviction_->epoch());
  twin->contents_->share_spare(true);
  return twin;
}

void Table::log_removed(Stripe& stripe, uint32_t epoch, int64_t id, uint32_t row) {
  if (contents_->rows.unsaved(row)) return;  // no copy has it
  auto& removed = stripe.removed;
  if (Budget* budget = contents_->budget.get(); budget && removed.size() == removed.capacity()) {
    const size_t more = std::max<size_t>(64, removed.capacity() / 2), bytes = more * sizeof removed[0];
    if (oldest_epoch_.load(std::memory_order_relaxed) > epoch) return;  // given up already
    if (!budget->take(static_cast<int64_t>(bytes))) {
      // The next incremental save is refused, so that a full one replaces it.
      oldest_epoch_.store(epoch + 1);
      return;
    }
    removed.reserve(removed.capacity() + more);
  }
  removed.emplace_back(epoch, id);
}

}  // namespace shoal
