// Finds the rows of many ids, with several memory accesses in progress at a time.
//
// Ids are taken in rounds. A round passes four stages, interleaved with those of other rounds:
//   start    hashes the ids and prefetches their home buckets
//   probe    looks into the home buckets, without a branch that depends on an id's lane, and prefetches the rows. A
//            writer inserts unknown ids there, except those for which the index must grow
//   resolve  continues the probes for the few ids that are not at home
//   finish   uses the rows, in the order of the ids
// Prefetched memory arrives while the other rounds are worked on. Buckets are read in the step after they were
// addressed, before a resolve can move them.
#pragma once
#include <algorithm>
#include <cstdint>

#include "table/contents.h"

namespace shoal {

// Prefetches every cache line of the range, of any alignment, into the second-level cache: it can have more requests
// pending than the first, which saves a third of a lookup's time.
inline void prefetch(const void* address, int32_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  for (uintptr_t line = begin & ~uintptr_t{63}; line < begin + static_cast<uintptr_t>(bytes); line += 64)
    __builtin_prefetch(reinterpret_cast<const void*>(line), 0, 2);
}

// The same for a row that will be written: it is removed from other cores' caches at once.
inline void prefetch_row(char* row, int32_t bytes) {
#if defined(__x86_64__)
  const auto begin = reinterpret_cast<uintptr_t>(row);
  for (uintptr_t line = begin & ~uintptr_t{63}; line < begin + static_cast<uintptr_t>(bytes); line += 64)
    asm volatile("prefetchw (%0)" ::"r"(line));
#else
  prefetch(row, bytes);
#endif
}

struct Resolved {
  char* row;  // null: there is none
  bool created;
  uint32_t number = 0;  // of the row
};

// For every i in [0, n):
//   id(i)                      returns the id
//   probed(i, slot, there)     is called after the home bucket was read: whether the id is there, and in which slot.
//                              Returns whether the slot may be used
//   settle(i, hash, home)      returns the Resolved row of an id that was not found so, if the home bucket is enough
//                              for it. It must not move buckets, throw, or insert an id that occurs twice, since rows
//                              of the round before are resolved later
//   resolve(i, hash)           returns the Resolved row of any other id
//   finish(i, found)           is called in order; the row is null if there is none
// If resolve throws, all rows that are known by then are finished first.
template <class Contents, class Id, class Probed, class Settle, class Resolve, class Finish>
void in_rounds(const Contents& contents, int64_t n, int32_t row_bytes, Id id, Probed probed, Settle settle,
               Resolve resolve, Finish finish) {
  constexpr int kRound = 32, kRing = 4 * kRound;  // four rounds are in progress
  const int64_t size = std::clamp(16384 / (row_bytes + 1), 4, kRound);
  struct {
    uint64_t hash;
    Bucket* home;
    Resolved found;
  } ring[kRing];
  uint8_t open[4][kRound];  // of each round: the ids to resolve
  int opens[4];

  auto start_round = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      auto& entry = ring[i % kRing];
      entry.hash = hash_of(id(i));
      entry.home = contents.stripes[stripe_of(entry.hash)].index.home(entry.hash);
      __builtin_prefetch(entry.home, 0, 2);
    }
  };
  auto probe_round = [&](int64_t begin, int64_t end, uint8_t* list) {
    int listed = 0;
    for (int64_t i = begin; i < end; ++i) {
      auto& entry = ring[i % kRing];
      const uint32_t lane = Index::lane_at_home(*entry.home, static_cast<uint64_t>(id(i)));
      const Slot slot{entry.home, std::countr_zero(lane | 8)};
      const uint32_t there = slot.row(), row = probed(i, slot, lane != 0) && lane ? there : kFreeRow;
      char* memory = contents.rows.row(row);
      prefetch(memory, row_bytes);
      entry.found = {row == kFreeRow ? nullptr : memory, false, row};
      list[listed] = static_cast<uint8_t>(i - begin);
      listed += row == kFreeRow;
    }
    for (int k = 0; k < listed; ++k) {
      const auto& entry = ring[(begin + list[k]) % kRing];
      contents.stripes[stripe_of(entry.hash)].index.ask_for_count(entry.hash, entry.home);
    }
    int left = 0;
    for (int k = 0; k < listed; ++k) {
      auto& entry = ring[(begin + list[k]) % kRing];
      entry.found = settle(begin + list[k], entry.hash, entry.home);
      if (entry.found.row) {
        prefetch_row(entry.found.row, row_bytes);
      } else {
        contents.stripes[stripe_of(entry.hash)].index.ask_beyond(entry.hash, entry.home);
        list[left++] = list[k];
      }
    }
    return left;
  };
  auto finish_round = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      finish(i, ring[i % kRing].found);
    }
  };
  auto resolve_round = [&](int64_t begin, int64_t probed, const uint8_t* list, int listed) {
    try {
      for (int k = 0; k < listed; ++k) {
        auto& entry = ring[(begin + list[k]) % kRing];
        entry.found = resolve(begin + list[k], entry.hash);
        if (entry.found.row) prefetch_row(entry.found.row, row_bytes);
      }
    } catch (...) {
      for (int64_t i = begin; i < probed; ++i)
        if (ring[i % kRing].found.row) finish(i, ring[i % kRing].found);
      throw;
    }
  };

  const int64_t rounds = (n + size - 1) / size;
  auto begin_of = [&](int64_t round) { return std::min(round * size, n); };
  for (int64_t step = 0; step < rounds + 3; ++step) {
    if (step >= 3) finish_round(begin_of(step - 3), begin_of(step - 2));
    if (step >= 1 && step - 1 < rounds)
      opens[(step - 1) % 4] = probe_round(begin_of(step - 1), begin_of(step), open[(step - 1) % 4]);
    if (step >= 2 && step - 2 < rounds)
      resolve_round(begin_of(step - 2), begin_of(step), open[(step - 2) % 4], opens[(step - 2) % 4]);
    if (step < rounds) start_round(begin_of(step), begin_of(step + 1));
  }
}

}  // namespace shoal
