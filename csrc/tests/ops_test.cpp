// The distribution kernels, at sizes around the borders of partitions, pieces and threads.
#include <random>
#include <unordered_map>
#include <vector>

#include "check.h"
#include "core/thread_pool.h"
#include "ops/example_wire.h"
#include "ops/fused_gather.h"
#include "ops/id_index.h"
#include "ops/layouts/layout.h"
#include "ops/lookup.h"
#include "ops/ragged/ragged.h"
#include "ops/ragged/reduce.h"
#include "ops/shard/reorder.h"
#include "ops/shard/shard.h"
#include "ops/shard/split.h"

using namespace shoal;
using namespace shoal::ops;

static uintptr_t address(const void* p) { return reinterpret_cast<uintptr_t>(p); }

TEST(floor_mod_is_pythons_remainder) {
  std::mt19937_64 random(0);
  std::vector<int64_t> ids = {0, 1, -1, INT64_MIN, INT64_MAX, INT64_MIN + 1};
  for (int i = 0; i < 2000; ++i) ids.push_back(static_cast<int64_t>(random()));
  for (int64_t n :
       {int64_t{1}, int64_t{2}, int64_t{3}, int64_t{7}, int64_t{255}, int64_t{256}, int64_t{1000003}, INT64_MAX}) {
    const FloorMod mod(n);
    for (int64_t id : ids) CHECK(mod(id) == static_cast<int64_t>((__int128{id % n} + n) % n));
  }
}

TEST(dedup_ranks_by_first_occurrence_at_any_size) {
  std::mt19937_64 random(1);
  for (int64_t n :
       {int64_t{0}, int64_t{1}, int64_t{17}, int64_t{5000}, int64_t{131071}, int64_t{131072}, int64_t{400000}}) {
    for (uint64_t range : {uint64_t{1}, uint64_t{100}, ~uint64_t{0}}) {
      std::vector<int64_t> ids(n);
      for (auto& id : ids) id = static_cast<int64_t>(random() % range);
      std::vector<uint32_t> rank(n);
      std::vector<int64_t> first(n);
      const Distinct got = dedup(ids.data(), n, rank.data(), first.data(), true);
      std::unordered_map<int64_t, uint32_t> seen;
      for (int64_t i = 0; i < n; ++i) {
        auto [it, fresh] = seen.try_emplace(ids[i], static_cast<uint32_t>(seen.size()));
        CHECK(rank[i] == it->second);
        if (fresh) {
          CHECK(first[it->second] == i);
          CHECK(got.ids[it->second] == ids[i]);
        }
      }
      CHECK(got.count == static_cast<int64_t>(seen.size()));
    }
  }
}

TEST(map_finds_the_first_place_and_nothing_else) {
  std::mt19937_64 random(2);
  for (uint64_t spread : {uint64_t{1}, uint64_t{1} << 40}) {
    std::vector<int64_t> a(70000), b(90000);
    for (auto* list : {&a, &b}) {
      for (auto& id : *list) id = static_cast<int64_t>(random() % 100000 * spread) - 5;
    }
    const IdMap map({address(a.data()), address(b.data())}, {70000, 90000}, true);
    std::unordered_map<int64_t, int64_t> want;
    for (int64_t i = 0; i < 70000; ++i) want.try_emplace(a[i], i);
    for (int64_t i = 0; i < 90000; ++i) want.try_emplace(b[i], int64_t{1} << IdMap::kPositionBits | i);
    std::vector<int64_t> ask = {INT64_MIN, INT64_MAX, -6, 123456789012345};
    ask.insert(ask.end(), b.begin(), b.end());
    std::vector<int64_t> place(ask.size());
    map.find(ask.data(), static_cast<int64_t>(ask.size()), place.data());
    for (size_t j = 0; j < ask.size(); ++j) {
      auto it = want.find(ask[j]);
      CHECK(place[j] == (it == want.end() ? -1 : it->second));
    }
  }
}

TEST(sums_are_bit_identical_for_any_thread_count) {
  std::mt19937_64 random(3);
  const int64_t n = 30000, rows = 1000;
  for (int64_t d : {1, 8, 33, 200}) {
    std::vector<float> values(n * d), one(rows * d), other(rows * d);
    std::vector<int64_t> index(n);
    for (auto& v : values) v = static_cast<float>(random() % 1000) / 7;
    for (auto& i : index) i = static_cast<int64_t>(random() % rows);
    for (Reduce how : {Reduce::sum, Reduce::mean, Reduce::sqrtn}) {
      set_num_threads(1);
      reduce_by_index(values.data(), index.data(), 1, n, d, rows, how, one.data());
      set_num_threads(4);
      reduce_by_index(values.data(), index.data(), 1, n, d, rows, how, other.data());
      CHECK(one == other);
    }
    index[n / 2] = rows;
    CHECK_THROWS(reduce_by_index(values.data(), index.data(), 1, n, d, rows, Reduce::sum, one.data()));
  }
}

TEST(scattered_floats_may_overlap_and_cross_borders) {
  const int64_t size = 4096, n = 20000, width = 37;
  std::vector<int32_t> offsets(n);
  std::vector<double> rows(n * width, 1.0), out(size), want(size, 0.0);
  for (int64_t j = 0; j < n; ++j) {
    offsets[j] = static_cast<int32_t>(j * 7919 % (size - width + 1));
    for (int64_t c = 0; c < width; ++c) want[offsets[j] + c] += 0.5;
  }
  set_num_threads(4);
  fused_gather_gradient(out.data(), size, 0.5, {{address(offsets.data()), address(rows.data()), n, width, false}});
  CHECK(out == want);
  offsets[5] = static_cast<int32_t>(size - width + 1);
  CHECK_THROWS(
      fused_gather_gradient(out.data(), size, 0.5, {{address(offsets.data()), address(rows.data()), n, width, false}}));
}

TEST(row_splits_that_fall_are_refused_before_a_row_is_read) {
  std::vector<float> rows(8, 1.f), out(4);
  std::vector<int64_t> splits = {0, 1000000, -4, 8};
  CHECK_THROWS(check_row_splits(splits.data(), 3, 8));
  CHECK_THROWS(
      reduce_and_split<float>({{address(rows.data()), address(splits.data()), 8, 1, {1}}}, 3, {address(out.data())}));
}

TEST(garbage_messages_throw_or_parse_but_stay_inside) {
  std::mt19937_64 random(4);
  for (int i = 0; i < 20000; ++i) {
    std::string bytes(random() % 40, '\0');
    for (auto& byte : bytes) byte = static_cast<char>(random() % 4 ? random() % 24 : random());
    for (WireKind kind : {WireKind::example, WireKind::instance, WireKind::example_batch}) {
      try {
        read_wire(kind, {std::string_view(bytes)}, {"a", "slot_1"});
      } catch (const std::invalid_argument&) {
      }
    }
  }
}
