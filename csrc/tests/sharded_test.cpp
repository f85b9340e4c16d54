// Snapshots of a table that goes on, and rings between threads that stand for processes.
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <random>
#include <string>
#include <thread>

#include "core/thread_pool.h"
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

// One write of random ids, told to the snapshot first if there is one.
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

TEST(a_snapshot_is_the_moment_it_was_made_whatever_is_written_meanwhile) {
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
