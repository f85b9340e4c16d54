// Snapshots of a table during writes, and rings between threads in the role of processes.
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <random>
#include <string>
#include <thread>

#include "core/thread_pool.h"
#include "nn/pooling.h"
#include "sharded/rings.h"
#include "sharded/snapshot.h"
#include "tests/check.h"

using namespace shoal;

namespace {

Layout layout() {
  Segment adagrad;
  adagrad.dim = 3;
  adagrad.opt = Opt::adagrad;
  return Layout({adagrad}, false, false);
}

using Contents = std::map<int64_t, std::pair<uint32_t, std::string>>;

Contents contents(const Table& table) {
  Contents out;
  Rows rows;
  for (int s = 0; s < Table::kStripes; ++s) table.snapshot(s, 0, &rows);
  for (int64_t i = 0; i < rows.size(); ++i)
    out[rows.ids[i]] = {rows.times[i],
                        std::string(rows.rows.data() + i * table.layout().stride, table.layout().row_bytes)};
  return out;
}

// Writes random ids, after announcing them to the snapshot if there is one.
void change(Table& table, Snapshot* snapshot, std::mt19937& rng, uint32_t time) {
  std::vector<int64_t> ids(50);
  for (int64_t& id : ids) id = static_cast<int64_t>(rng() % 3000) - 500;
  const std::vector<float> values(ids.size() * 3, static_cast<float>(time));
  if (snapshot) snapshot->before_write(ids.data(), static_cast<int64_t>(ids.size()));
  if (time % 4 == 0) {
    table.erase(ids.data(), static_cast<int64_t>(ids.size()));
  } else {
    table.assign_add(ids.data(), static_cast<int64_t>(ids.size()), values.data(), time);
  }
}

}  // namespace

TEST(a_snapshot_has_the_rows_of_its_moment_whatever_is_written_meanwhile) {
  for (int round = 0; round < 6; ++round) {
    set_num_threads(1 + round % 3);
    char name[] = "/tmp/shoal-snapshot-test-XXXXXX";
    CHECK(::mkdtemp(name));
    const std::string folder = name;
    std::mt19937 rng(round);
    Table table(layout(), 1);
    for (uint32_t t = 1; t < 60; ++t) change(table, nullptr, rng, t);
    const Contents then = contents(table);
    Snapshot snapshot(table);
    SaveTarget where;
    for (int i = 0; i < 3; ++i) {
      where.path.push_back(folder + "/" + std::to_string(i));
      where.temporary.push_back(where.path.back() + "-tmp");
    }
    for (uint32_t t = 60; t < 70; ++t) change(table, &snapshot, rng, t);
    CHECK(snapshot.kept() > 0);
    int64_t written = 0;
    std::thread saver([&] {
      for (const SavedShard& shard : snapshot.save(where, nullptr)) written += shard.rows[0];
    });
    for (uint32_t t = 70; t < 200; ++t) change(table, &snapshot, rng, t);
    saver.join();
    CHECK(written == static_cast<int64_t>(then.size()) && snapshot.kept() == 0);
    Table other(layout(), 2);
    Load load(other, true, {});
    CHECK(load.read(where.path, nullptr).records == written);
    load.commit();
    CHECK(contents(other) == then);
    CHECK_THROWS(snapshot.save(where, nullptr));
    std::filesystem::remove_all(folder);
  }
}

TEST(rings_carry_messages_of_any_length_between_ranks) {
  for (int ranks : {1, 2, 4}) {
    for (int64_t ring_bytes : {64, 1024}) {
      std::vector<char> memory(Rings::bytes(ranks, ring_bytes) + 64, 0);
      char* start = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
      std::vector<std::thread> threads;
      for (int rank = 0; rank < ranks; ++rank) {
        threads.emplace_back([=] {
          Rings rings(start, rank, ranks, ring_bytes);
          for (int round = 0; round < 50; ++round) {
            auto length = [&](int from, int to) { return int64_t{(from * 7 + to * 13 + round * 31) % 300}; };
            std::vector<int64_t> send, recv;
            std::string data, expected;
            for (int p = 0; p < ranks; ++p) {
              send.push_back(length(rank, p));
              recv.push_back(length(p, rank));
              data += std::string(send.back(), static_cast<char>('a' + (rank * ranks + p + round) % 26));
              expected += std::string(recv.back(), static_cast<char>('a' + (p * ranks + rank + round) % 26));
            }
            std::string out(expected.size(), '?');
            rings.start(data.data(), send, out.data(), recv);
            CHECK(rings.run(60.0));
            CHECK(out == expected);
          }
        });
      }
      for (std::thread& thread : threads) thread.join();
    }
  }
}

TEST(ranks_that_disagree_can_report_it_and_continue) {
  constexpr int64_t kRing = 128;
  std::vector<char> memory(Rings::bytes(2, kRing) + 64, 0);
  char* start = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
  auto work = [=](int rank) {
    Rings rings(start, rank, 2, kRing);
    for (int round = 0; round < 20; ++round) {
      const bool differ = round % 2;
      const int64_t mine = rank ? 1000 : 30, theirs = differ ? 7 : rank ? 30 : 1000;
      std::vector<int64_t> send(2, 0), recv(2, 0);
      send[1 - rank] = mine;
      recv[1 - rank] = theirs;
      std::string data(mine, static_cast<char>('a' + rank)), out(theirs, '?'), head(Rings::kHeadBytes, 'h');
      head[0] = static_cast<char>('0' + rank);
      rings.start(data.data(), send, out.data(), recv, head.data());
      CHECK(rings.run(60.0));
      CHECK(out == std::string(theirs, differ ? '?' : static_cast<char>('b' - rank)));
      CHECK(rings.differences().size() == (differ ? 1u : 0u));
      if (differ) CHECK(rings.differences()[0].sent == (rank ? 30 : 1000) && rings.differences()[0].awaited == 7);
      std::string heads(2 * Rings::kHeadBytes, '?');
      rings.heads(heads.data());
      CHECK(heads[0] == '0' && heads[Rings::kHeadBytes] == '1' && heads.back() == 'h');
    }
  };
  std::thread other(work, 1);
  work(0);
  other.join();
}

TEST(bags_are_pooled_from_a_flat_buffer_and_their_gradients_added_to_it) {
  for (int64_t dim : {1, 7, 96}) {
    const int64_t rows = 9, bags = 50, ids = 2 * bags * 3;
    std::mt19937 random(5);
    std::vector<float> flat(rows * dim), weights(ids), grad(bags * (2 * dim + 1));
    for (float& x : flat) x = static_cast<float>(random() % 7);
    for (float& x : weights) x = static_cast<float>(random() % 3);
    for (float& x : grad) x = static_cast<float>(random() % 5);
    std::vector<int32_t> at(ids);
    for (int32_t& a : at) a = random() % 5 ? static_cast<int32_t>(random() % rows * dim) : -1;
    std::vector<int64_t> offsets(2 * bags + 1, 0);
    for (int64_t b = 0; b < 2 * bags; ++b) offsets[b + 1] = b + 1 == 2 * bags ? ids : offsets[b] + random() % 4;
    for (const bool weighted : {false, true}) {
      BagsAt given{.at = at.data(),
                   .offsets = offsets.data(),
                   .ids = ids,
                   .features = 2,
                   .bags = bags,
                   .dim = dim,
                   .width = 2 * dim + 1,
                   .floats = rows * dim,
                   .combiners = {Pool::mean, Pool::sqrtn},
                   .columns = {dim + 1, 0},
                   .weights = weighted ? weights.data() : nullptr};
      std::vector<float> out(bags * given.width, 9), sums(rows * dim, 0), want(rows * dim, 0);
      pool_at(given, flat.data(), out.data());
      add_pooled_at(given, grad.data(), sums.data());
      for (int64_t bag = 0; bag < 2 * bags; ++bag) {
        int64_t kept = 0;
        for (int64_t i = offsets[bag]; i < offsets[bag + 1]; ++i) kept += at[i] >= 0;
        const float count = static_cast<float>(std::max<int64_t>(1, kept));
        const float scale = 1 / (bag < bags ? count : std::sqrt(count));
        const int64_t where = bag % bags * given.width + given.columns[bag / bags];
        for (int64_t c = 0; c < dim; ++c) {
          float sum = 0;
          for (int64_t i = offsets[bag]; i < offsets[bag + 1]; ++i) {
            if (at[i] < 0) continue;
            const float w = weighted ? weights[i] : 1;
            sum += w * flat[at[i] + c];
            want[at[i] + c] += scale * w * grad[where + c];
          }
          CHECK(std::abs(out[where + c] - sum * scale) < 1e-3f);
        }
      }
      for (int64_t i = 0; i < rows * dim; ++i) CHECK(std::abs(sums[i] - want[i]) < 1e-2f);
      for (int64_t b = 0; b < bags; ++b) CHECK(out[b * given.width + dim] == 9);
      given.columns[0] = dim + 2;
      CHECK_THROWS(pool_at(given, flat.data(), out.data()));
    }
  }
}
