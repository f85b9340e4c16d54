// Saving and loading tables, also while other threads read and write.
#include "io/checkpoint.h"

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <thread>

#include "core/thread_pool.h"
#include "io/error.h"
#include "tests/check.h"

using namespace shoal;

namespace {

struct Folder {
  std::string path;
  Folder() {
    char name[] = "/tmp/shoal-checkpoint-test-XXXXXX";
    CHECK(::mkdtemp(name));
    path = name;
  }
  ~Folder() { std::filesystem::remove_all(path); }
};

Layout layout(int32_t dim) {
  Segment adagrad;
  adagrad.dim = dim;
  adagrad.opt = Opt::adagrad;
  Segment softmax;
  softmax.dim = 1;
  softmax.opt = Opt::batch_softmax;
  return Layout({adagrad, softmax}, false, false);
}

void assign(Table& table, int64_t first, int64_t n, float value, uint32_t time) {
  std::vector<int64_t> ids(n);
  for (int64_t i = 0; i < n; ++i) ids[i] = first + i;
  const std::vector<float> values(n * table.layout().dim, value);
  table.assign(ids.data(), n, values.data(), time);
}

std::map<int64_t, std::pair<uint32_t, std::string>> contents(const Table& table) {
  std::map<int64_t, std::pair<uint32_t, std::string>> out;
  Rows rows;
  for (int s = 0; s < Table::kStripes; ++s) table.snapshot(s, 0, &rows);
  for (int64_t i = 0; i < rows.size(); ++i) {
    const char* row = rows.rows.data() + i * table.layout().stride;
    out[rows.ids[i]] = {rows.times[i], std::string(row, table.layout().row_bytes)};
  }
  return out;
}

SaveTarget target(const std::string& base, int shards, bool snappy = false) {
  SaveTarget out;
  out.snappy = snappy;
  for (int i = 0; i < shards; ++i) {
    out.path.push_back(base + "-" + std::to_string(i));
    out.temporary.push_back(out.path.back() + "-tmp");
  }
  return out;
}

int64_t files_in(const std::string& folder) {
  int64_t n = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) n += entry.is_regular_file();
  return n;
}

}  // namespace

TEST(a_table_survives_any_number_of_shards_and_threads) {
  for (int threads : {1, 3}) {
    set_num_threads(threads);
    for (int shards : {1, 2, 7, 70}) {
      Folder folder;
      Table table(layout(5), 1);
      assign(table, -500, 3000, 1.5f, 7);
      Progress progress;
      const auto where = target(folder.path + "/t", shards);
      const auto counts = save({{&table, nullptr, 0}}, where, &progress);
      int64_t rows = 0;
      for (const SavedShard& shard : counts) rows += shard.rows[0];
      CHECK(rows == 3000 && progress.rows == 3000 && files_in(folder.path) == shards);
      Table other(layout(5), 2);
      assign(other, 1 << 20, 10, 1, 1);
      Load load(other, true, {});
      const Load::Taken taken = load.read(where.path, nullptr);
      CHECK(taken.records == 3000 && load.rows() == 3000);
      for (int i = 0; i < shards; ++i) {
        const FileDigest again = digest_file(where.path[i]);
        CHECK(again.bytes == counts[i].digest.bytes && again.crc == counts[i].digest.crc);
        CHECK(again.bytes == taken.files[i].bytes && again.crc == taken.files[i].crc);
      }
      load.commit();
      CHECK_THROWS(load.rows());
      CHECK(contents(other) == contents(table) && other.max_update_time() == 7);
    }
  }
}

TEST(several_tables_share_a_file) {
  set_num_threads(2);
  Folder folder;
  Table a(layout(3), 1), b(layout(9), 1), c(layout(1), 1);
  assign(a, 0, 5000, 1, 1);
  assign(c, 0, 10, 3, 3);
  const auto where = target(folder.path + "/m", 2, true);
  const auto counts = save({{&a, nullptr, 0}, {&b, nullptr, 0}, {&c, nullptr, 0}}, where, nullptr);
  Table a2(layout(3), 1), c2(layout(1), 1);
  Load la(a2, true, {}), lc(c2, true, {});
  for (int i = 0; i < 2; ++i) load_multi(where.path[i], {&la, nullptr, &lc}, counts[i].rows, nullptr);
  la.commit();
  lc.commit();
  CHECK(contents(a2) == contents(a) && contents(c2) == contents(c));
  Load again(a2, true, {});
  CHECK_THROWS(load_multi(where.path[0], {&again, nullptr, nullptr}, {counts[0].rows[0] - 1, 0, 0}, nullptr));
  CHECK_THROWS(load_multi(where.path[0], {&again, nullptr, nullptr}, {counts[0].rows[0] + 99, 0, 0}, nullptr));
  CHECK_THROWS(load_multi(where.path[0], {&again}, {INT64_MAX, 1}, nullptr));
}

TEST(a_shard_rule_rounds_down) {
  Folder folder;
  Table table(layout(1), 1);
  assign(table, -10, 20, 1, 1);
  const auto where = target(folder.path + "/t", 1);
  save({{&table, nullptr, 0}}, where, nullptr);
  int64_t total = 0;
  for (int64_t residue = 0; residue < 3; ++residue) {
    Table part(layout(1), 1);
    Load load(part, true, {3, residue});
    total += load.read(where.path, nullptr).records;
    load.commit();
    for (const auto& [id, row] : contents(part)) CHECK(((id % 3) + 3) % 3 == residue);
  }
  CHECK(total == 20);
}

TEST(a_failure_leaves_no_file_and_no_change) {
  set_num_threads(3);
  Folder folder;
  Table table(layout(4), 1);
  assign(table, 0, 20000, 1, 1);
  auto where = target(folder.path + "/t", 3);
  where.temporary[1] = folder.path + "/missing/t";
  CHECK_THROWS(save({{&table, nullptr, 0}}, where, nullptr));
  CHECK(files_in(folder.path) == 0);
  Progress cancelled;
  cancelled.cancelled = true;
  CHECK_THROWS(save({{&table, nullptr, 0}}, target(folder.path + "/t", 3), &cancelled));
  CHECK(files_in(folder.path) == 0);

  const auto good = target(folder.path + "/t", 3);
  save({{&table, nullptr, 0}}, good, nullptr);
  std::filesystem::resize_file(good.path[2], std::filesystem::file_size(good.path[2]) - 1);
  const auto before = contents(table);
  {
    Load load(table, true, {});
    CHECK_THROWS(load.read(good.path, nullptr));
  }
  CHECK(contents(table) == before);
}

TEST(saves_and_loads_next_to_readers_and_writers) {
  set_num_threads(3);
  Folder folder;
  constexpr int64_t kIds = 3000;
  Table table(layout(6), 1);
  assign(table, 0, kIds, 1, 1);
  std::atomic<bool> stop{false};
  std::vector<std::thread> others;
  for (int t = 0; t < 2; ++t) {
    others.emplace_back([&, t] {
      for (float value = 2; !stop; ++value) {
        assign(table, t * 1000, 1500, value, static_cast<uint32_t>(value));
        const int64_t gone = t;
        table.erase(&gone, 1);
      }
    });
  }
  others.emplace_back([&] {
    std::vector<int64_t> ids(kIds);
    for (int64_t i = 0; i < kIds; ++i) ids[i] = i;
    std::vector<float> out(kIds * 7);
    while (!stop) {
      table.lookup(ids.data(), kIds, out.data());
      for (int64_t i = 0; i < kIds; ++i) CHECK(out[7 * i] == out[7 * i + 6]);
    }
  });
  for (int round = 0; round < 6; ++round) {
    const auto where = target(folder.path + "/t" + std::to_string(round), 2);
    table.begin_epoch();
    save({{&table, nullptr, 0}}, where, nullptr);
    Table copy(layout(6), 1);
    Load load(copy, true, {});
    load.read(where.path, nullptr);
    load.commit();
    CHECK(copy.size() >= kIds - 2);
    for (const auto& [id, row] : contents(copy)) {
      float first, last;
      std::memcpy(&first, row.second.data(), 4);
      std::memcpy(&last, row.second.data() + 24, 4);
      CHECK(first == last);
    }
    Load back(table, true, {});
    back.read(where.path, nullptr);
    back.commit();
  }
  stop = true;
  for (auto& thread : others) thread.join();
}
