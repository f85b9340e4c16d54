// The native table: compared with a std::unordered_map, at its limits, and on many threads (for ThreadSanitizer).
#include "table/table.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <random>
#include <stdexcept>
#include <thread>
#include <unordered_map>

#include "core/thread_pool.h"
#include "table/rows/codec.h"
#include "tests/check.h"

using namespace shoal;

namespace {

Layout layout(int dim, Opt opt = Opt::sgd) {
  Segment s;
  s.dim = dim;
  s.opt = opt;
  return Layout({s}, false, false);
}

std::vector<float> lookup(const Table& table, const std::vector<int64_t>& ids) {
  std::vector<float> out(ids.size() * table.layout().dim, NAN);
  table.lookup(ids.data(), static_cast<int64_t>(ids.size()), out.data());
  return out;
}

void assign(Table& table, const std::vector<int64_t>& ids, const std::vector<float>& values, uint32_t time = 0) {
  table.assign(ids.data(), static_cast<int64_t>(ids.size()), values.data(), time);
}

}  // namespace

TEST(every_id_is_legal_and_has_its_own_row) {
  Table table(layout(1), 1);
  std::vector<int64_t> ids{0,  1,  -1, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max(),
                           42, -2, 2};
  std::vector<float> values{1, 2, 3, 4, 5, 6, 7, 8};
  CHECK(lookup(table, ids) == std::vector<float>(8, 0.0f));
  assign(table, ids, values);
  CHECK(lookup(table, ids) == values);
  CHECK(table.size() == 8);
}

TEST(a_table_takes_settings_from_a_layout_with_the_same_segments) {
  Table table(layout(2, Opt::adagrad), 1);
  assign(table, {7}, {1, 2});
  Layout other = layout(2, Opt::adagrad);
  other.segments[0].initial_accumulator = 9;
  table.set_layout(other);
  CHECK(table.layout().segments[0].initial_accumulator == 9);
  CHECK(lookup(table, {7}) == (std::vector<float>{1, 2}));
  for (const Layout& wrong : {layout(3, Opt::adagrad), layout(2, Opt::adam)}) {
    bool refused = false;
    try {
      table.set_layout(wrong);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    CHECK(refused);
  }
}

TEST(a_table_that_knows_its_size_wastes_less_and_still_holds_any_number) {
  std::mt19937_64 random(3);
  for (int64_t expected : {1LL, 3000LL, 60000LL, 300000LL}) {
    Table table(layout(1), 1, expected);
    std::vector<int64_t> ids(static_cast<size_t>(std::max<int64_t>(expected, 1000)));
    std::vector<float> values(ids.size());
    for (size_t i = 0; i < ids.size(); ++i) {
      ids[i] = static_cast<int64_t>(random());
      values[i] = static_cast<float>(i % 8191);
    }
    assign(table, ids, values);
    CHECK(lookup(table, ids) == values);
    if (expected >= 300000) CHECK(table.bytes() < 28 * expected);  // 4 for the row, 20 for a slot if 80 % are used
    std::vector<int64_t> more(150000);
    for (int64_t& id : more) id = static_cast<int64_t>(random());
    assign(table, more, std::vector<float>(more.size(), 7.0f));
    CHECK(table.size() == static_cast<int64_t>(ids.size() + more.size()));
    CHECK(lookup(table, ids) == values);
    CHECK(lookup(table, more) == std::vector<float>(more.size(), 7.0f));
    CHECK(table.erase(ids.data(), static_cast<int64_t>(ids.size())) == static_cast<int64_t>(ids.size()));
    CHECK(lookup(table, ids) == std::vector<float>(ids.size(), 0.0f));
    table.clear();
    assign(table, ids, values);
    CHECK(lookup(table, ids) == values);
  }
  Table huge(layout(1), 1, std::numeric_limits<int64_t>::max());
  assign(huge, {5}, {1.0f});
  CHECK(huge.bytes() < (4 << 20));
}

TEST(a_random_history_matches_a_map) {
  std::mt19937_64 random(7);
  for (int threads : {1, 3}) {
    set_num_threads(threads);
    Table table(layout(3), 1);
    std::unordered_map<int64_t, float> model;
    for (int round = 0; round < 60; ++round) {
      const int64_t n = static_cast<int64_t>(random() % 9000);
      std::vector<int64_t> ids(n);
      std::vector<float> values(3 * n);
      for (int64_t i = 0; i < n; ++i) {
        ids[i] = static_cast<int64_t>(random() % 20000) - 10000;
        for (int j = 0; j < 3; ++j) values[3 * i + j] = static_cast<float>(random() % 100);
      }
      switch (random() % 3) {
        case 0:
          assign(table, ids, values);
          for (int64_t i = 0; i < n; ++i) model[ids[i]] = values[3 * i];
          break;
        case 1:
          table.assign_add(ids.data(), n, values.data(), 0);
          for (int64_t i = 0; i < n; ++i) model[ids[i]] += values[3 * i];
          break;
        default: {
          int64_t gone = 0;
          ids.resize(n / 4);
          for (int64_t id : ids) gone += static_cast<int64_t>(model.erase(id));
          CHECK(table.erase(ids.data(), n / 4) == gone);
        }
      }
      CHECK(table.size() == static_cast<int64_t>(model.size()));
    }
    std::vector<int64_t> all;
    for (int64_t id = -10000; id < 10000; ++id) all.push_back(id);
    auto found = lookup(table, all);
    for (size_t i = 0; i < all.size(); ++i) {
      auto it = model.find(all[i]);
      CHECK(found[3 * i] == (it == model.end() ? 0.0f : it->second));
    }
  }
}

TEST(growth_keeps_every_row_and_evicted_memory_is_reused) {
  set_num_threads(2);
  Table table(layout(4), 1);
  const int64_t n = 300000;
  std::vector<int64_t> ids(n);
  std::vector<float> values(4 * n);
  for (int64_t i = 0; i < n; ++i) {
    ids[i] = i * 7919;
    values[4 * i] = static_cast<float>(i);
  }
  assign(table, ids, values, 100);
  auto found = lookup(table, ids);
  for (int64_t i = 0; i < n; ++i) CHECK(found[4 * i] == static_cast<float>(i));
  const int64_t bytes = table.bytes();
  Expiry expiry{1, {}};
  for (int round = 1; round <= 3; ++round) {
    CHECK(table.evict(expiry, round * 200000) == n);
    CHECK(table.size() == 0);
    for (auto& id : ids) id += 1;
    assign(table, ids, values, static_cast<uint32_t>(round * 200000 + 100));
    CHECK(table.size() == n);
  }
  CHECK(table.bytes() < bytes * 11 / 10 + (8 << 20));
  table.clear();
  CHECK(table.size() == 0 && table.bytes() < bytes / 10);
}

TEST(walks_and_snapshots_see_every_row_once) {
  Table table(layout(2), 1);
  std::vector<int64_t> ids(5000);
  std::vector<float> values(10000);
  for (int64_t i = 0; i < 5000; ++i) {
    ids[i] = i * i - 999;
    values[2 * i] = static_cast<float>(i);
  }
  assign(table, ids, values, 9);
  std::unordered_map<int64_t, int> seen;
  for (int stripe = 0; stripe < Table::kStripes; ++stripe) {
    for (int64_t place = 0; place >= 0;) {
      Rows rows;
      place = table.walk(stripe, place, 7, &rows);
      CHECK(rows.size() <= 7);
      for (int64_t id : rows.ids) ++seen[id];
    }
    Rows all;
    table.snapshot(stripe, 0, &all);
    for (int64_t id : all.ids) CHECK(seen[id] == 1);
  }
  CHECK(seen.size() == 5000);
}

TEST(changes_since_an_epoch_are_exactly_the_written_rows) {
  Table table(layout(1), 1);
  assign(table, {1, 2, 3, 4}, {1, 2, 3, 4}, 5);
  CHECK(table.oldest_epoch() == 0);
  uint32_t epoch = table.begin_epoch();
  assign(table, {2, 5}, {20, 50}, 5);
  int64_t gone[] = {3, 5, 77};
  CHECK(table.erase(gone, 3) == 2);
  Rows changed;
  for (int s = 0; s < Table::kStripes; ++s) table.snapshot(s, epoch, &changed);
  CHECK(changed.size() == 1 && changed.ids[0] == 2);
  CHECK((table.removed_since(epoch) == std::vector<int64_t>{3}));  // no save can hold 5, which came and went since
  assign(table, {3}, {1}, 5);
  CHECK(table.removed_since(epoch).empty());
  assign(table, {5}, {1}, 5);
  for (int s = 0; s < Table::kStripes; ++s) table.snapshot(s, epoch, &changed);  // a save
  epoch = table.begin_epoch();
  CHECK(table.erase(gone, 2) == 2);
  CHECK((table.removed_since(epoch) == std::vector<int64_t>{3, 5}));
}

TEST(a_bad_gradient_changes_nothing) {
  Table table(layout(2), 1);
  assign(table, {1, 2}, {1, 1, 2, 2});
  int64_t ids[] = {1, 2};
  float grads[] = {1, 1, NAN, 1}, rate[] = {1};
  bool threw = false;
  try {
    table.apply_gradients(ids, 2, grads, rate, 0, 99, false, BadGradient::raise);
  } catch (const NonFinite& bad) {
    threw = bad.position == 1 && bad.id == 2;
  }
  CHECK(threw && table.max_update_time() == 0);
  CHECK((lookup(table, {1, 2}) == std::vector<float>{1, 1, 2, 2}));
  CHECK(table.apply_gradients(ids, 2, grads, rate, 0, 0, false, BadGradient::skip) == 1);
  CHECK((lookup(table, {1, 2}) == std::vector<float>{0, 0, 2, 2}));
}

TEST(serving_rows_round_trip_through_their_codec) {
  Segment a, b;
  a.dim = 3;
  a.codec = Codec::fp16;
  b.dim = 5;
  b.codec = Codec::fixed_r8;
  Table table(Layout({a, b}, true, true), 1);
  assign(table, {1, 2}, {1, 2, 3, .5f, -.5f, .25f, -1, 1, 0, 0, 0, 0, 0, 0, 0, 0});
  CHECK(table.size() == 1);  // a zero vector is not kept
  auto out = lookup(table, {1});
  CHECK(out[0] == 1 && out[2] == 3 && out[3] == .5f && out[4] == -.5f && out[6] == -1);
  assign(table, {1}, std::vector<float>(8, 0.0f));
  CHECK(table.size() == 0);
}

// Every row has equal numbers; no reader may see a mix, whatever is read, written, evicted or saved meanwhile.
TEST(no_row_is_ever_torn) {
  set_num_threads(2);
  constexpr int kDim = 8;
  Table table(layout(kDim), 1);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int w = 0; w < 3; ++w) {
    threads.emplace_back([&, w] {
      std::mt19937_64 random(w);
      for (int round = 0; round < 60; ++round) {
        std::vector<int64_t> ids(700);
        std::vector<float> values(700 * kDim);
        for (int i = 0; i < 700; ++i) {
          ids[i] = static_cast<int64_t>(random() % 6000);
          for (int j = 0; j < kDim; ++j) values[i * kDim + j] = static_cast<float>(round * 3 + w);
        }
        assign(table, ids, values, static_cast<uint32_t>(round * 86400));
        if (round % 20 == 19) table.evict(Expiry{5, {}}, round * 86400);
      }
      stop = true;
    });
  }
  std::atomic<int64_t> torn{0};
  auto check = [&](const float* row) {
    for (int j = 1; j < kDim; ++j) torn += row[j] != row[0];
  };
  threads.emplace_back([&] {
    std::vector<int64_t> ids(6000);
    for (int i = 0; i < 6000; ++i) ids[i] = i;
    while (!stop) {
      auto out = lookup(table, ids);
      for (int i = 0; i < 6000; ++i) check(&out[i * kDim]);
    }
  });
  threads.emplace_back([&] {
    while (!stop) {
      for (int s = 0; s < Table::kStripes; ++s) {
        Rows rows;
        table.snapshot(s, 0, &rows);
        for (int64_t i = 0; i < rows.size(); ++i)
          check(reinterpret_cast<const float*>(rows.rows.data() + i * table.layout().stride));
      }
      table.begin_epoch();
    }
  });
  for (auto& thread : threads) thread.join();
  CHECK(torn == 0);
}

TEST(results_do_not_depend_on_the_number_of_threads) {
  std::vector<std::vector<float>> results;
  for (int threads : {1, 2, 7}) {
    set_num_threads(threads);
    for (bool dedup : {false, true}) {
      Segment s;
      s.dim = 5;
      s.opt = Opt::adam;
      s.epsilon = 0.01f;
      s.init = Init::random_uniform;
      s.init_low = -1;
      s.init_high = 1;
      s.stochastic_rounding = true;
      Table table(Layout({s}, false, false), 3);
      std::mt19937_64 random(1);
      std::vector<int64_t> ids(20000), all;
      std::vector<float> grads(100000);
      float rate[] = {0.1f};
      for (int step = 0; step < 3; ++step) {
        for (auto& id : ids) id = static_cast<int64_t>(random() % 3000);
        for (auto& g : grads) g = static_cast<float>(random() % 1000) / 500 - 1;
        table.apply_gradients(ids.data(), 20000, grads.data(), rate, step, 0, dedup, BadGradient::raise);
      }
      for (int64_t id = 0; id < 3000; ++id) all.push_back(id);
      results.push_back(lookup(table, all));
    }
  }
  for (size_t i = 2; i < results.size(); ++i) CHECK(results[i] == results[i % 2]);
}

TEST(a_stamp_that_is_at_least_never_moves_a_time_back) {
  Table table(layout(1), 1);
  const int64_t ids[] = {1, 2};
  const float values[] = {0, 0};
  table.assign(ids, 1, values, 100);
  table.assign(ids, 2, values, Stamp(50, true));
  Rows rows;
  uint8_t found[2];
  table.fetch(ids, 2, &rows, found);
  CHECK(rows.times[0] == 100 && rows.times[1] == 50);
  table.assign(ids, 1, values, 60);
  table.assign(ids, 2, values, Stamp(80, true));
  Rows later;
  table.fetch(ids, 2, &later, found);
  CHECK(later.times[0] == 80 && later.times[1] == 80);
}

TEST(an_update_creates_the_rows_that_a_forward_reads) {
  Segment s;
  s.dim = 4;
  s.opt = Opt::adagrad;
  s.init = Init::random_uniform;
  s.init_low = -0.5f;
  s.init_high = 0.5f;
  std::mt19937_64 random(1);
  for (int64_t batch : {1, 63, 4096, 50000}) {  // from one part to several threads; the index grows and splits
    Table table(Layout({s}, false, false), 3);
    std::unordered_map<int64_t, bool> known;
    const float rate[] = {0.0f};  // so that an update changes only the state
    for (int step = 0; step < 6; ++step) {
      std::vector<int64_t> ids(static_cast<size_t>(batch));
      for (auto& id : ids) id = static_cast<int64_t>(random() % 200000);
      std::vector<float> shown(ids.size() * 4, NAN), grads(ids.size() * 4, 1.0f);
      table.read(ids.data(), batch, Missing::initial, nullptr, [&](int64_t first, int64_t n, const float* const* rows) {
        for (int64_t i = 0; i < n; ++i) std::copy_n(rows[i], 4, &shown[static_cast<size_t>(4 * (first + i))]);
      });
      CHECK(table.size() == static_cast<int64_t>(known.size()));
      table.apply_gradients(ids.data(), batch, grads.data(), rate, step, Stamp(7), true, BadGradient::raise);
      for (int64_t id : ids) known[id] = true;
      CHECK(table.size() == static_cast<int64_t>(known.size()));
      CHECK(lookup(table, ids) == shown);
      std::vector<int64_t> gone(ids.begin(), ids.begin() + batch / 3);  // slots and rows that are free again
      table.erase(gone.data(), static_cast<int64_t>(gone.size()));
      for (int64_t id : gone) known.erase(id);
      CHECK(table.size() == static_cast<int64_t>(known.size()));
    }
    std::vector<int64_t> all;
    for (auto [id, there] : known) all.push_back(id);
    std::vector<uint8_t> found(all.size());
    table.contains(all.data(), static_cast<int64_t>(all.size()), found.data());
    CHECK(std::count(found.begin(), found.end(), 1) == static_cast<int64_t>(all.size()));
  }
}
