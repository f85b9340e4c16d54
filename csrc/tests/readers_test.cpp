// Readers that announce themselves, with writers that lock: no row is torn, and neither side starves.
#include "table/readers.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "core/thread_pool.h"
#include "table/table.h"
#include "tests/check.h"

using namespace shoal;

namespace {

constexpr uint64_t kAll = ~uint64_t{0};

TEST(stripes_that_a_writer_closed_need_locks_until_a_reader_opens_them) {
  Readers readers;
  readers.exclude(4);
  CHECK(!readers.enter(kAll));
  CHECK(!readers.enter(6));
  Readers::Place* place = readers.enter(3);
  CHECK(place);
  readers.exclude(8);  // which nobody reads
  Readers::leave(place);
  readers.admit(12);
  place = readers.enter(kAll);
  CHECK(place);
  Readers::leave(place);
}

TEST(a_writer_waits_for_announced_readers) {
  Readers readers;
  Readers::Place* place = readers.enter(kAll);
  CHECK(place);
  std::atomic<bool> alone{false};
  std::thread writer([&] {
    readers.exclude(1);
    alone = true;
  });
  for (int naps = 0; naps < 20; ++naps) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    CHECK(!alone);
  }
  Readers::leave(place);
  writer.join();
  CHECK(alone);
}

TEST(more_readers_than_places_take_the_locks) {
  Readers readers;
  std::vector<Readers::Place*> places;
  while (Readers::Place* place = readers.enter(kAll)) places.push_back(place);
  CHECK(!places.empty());
  for (Readers::Place* place : places) Readers::leave(place);
  Readers::Place* place = readers.enter(kAll);
  CHECK(place);
  Readers::leave(place);
}

// Writers keep two numbers equal, under one lock that both sides use as a table does.
TEST(readers_and_writers_exclude_each_other) {
  RwLock lock;
  Readers readers;
  int64_t one = 0, other = 0;
  std::atomic<int64_t> torn{0}, reads{0}, writes{0};
  std::vector<std::thread> threads;
  for (int r = 0; r < 3; ++r) {
    threads.emplace_back([&] {
      for (int k = 0; k < 20000; ++k) {
        Readers::Place* place = readers.enter(1);
        if (!place) {
          lock.lock_shared();
          readers.admit(1);
        }
        torn += one != other;
        ++reads;
        place ? Readers::leave(place) : lock.unlock_shared();
      }
    });
  }
  for (int w = 0; w < 2; ++w) {
    threads.emplace_back([&] {
      for (int k = 0; k < 2000; ++k) {
        lock.lock();
        readers.exclude(1);
        ++one;
        ++other;
        ++writes;
        lock.unlock();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(torn == 0);
  CHECK(reads == 60000 && writes == 4000 && one == 4000);
}

TEST(no_row_is_torn_with_writers_of_all_kinds) {
  set_num_threads(2);
  Segment segment;
  segment.dim = 8;
  Table table(Layout({segment}, false, false), 1);
  constexpr int64_t kRows = 3000;
  std::vector<int64_t> ids(kRows);
  for (int64_t i = 0; i < kRows; ++i) ids[i] = i;
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (float value = 1; !stop; ++value) {
      const std::vector<float> values(kRows * 8, value);
      table.assign(ids.data(), kRows, values.data(), 1);
      table.erase(ids.data(), 10);
      table.assign(ids.data(), 3, values.data(), 1);
      if (static_cast<int>(value) % 16 == 0) table.clear();
    }
  });
  std::atomic<int64_t> torn{0};
  std::vector<std::thread> readers;
  for (int64_t batch : {int64_t{1}, int64_t{40}, kRows}) {
    readers.emplace_back([&, batch] {
      std::vector<float> out(static_cast<size_t>(batch) * 8);
      for (int64_t k = 0; k < 300; ++k) {
        table.lookup(ids.data() + (k * 37) % (kRows - batch + 1), batch, out.data());
        for (int64_t i = 0; i < batch; ++i)
          for (int c = 1; c < 8; ++c) torn += out[i * 8 + c] != out[i * 8];
      }
    });
  }
  for (auto& reader : readers) reader.join();
  stop = true;
  writer.join();
  CHECK(torn == 0);
}

}  // namespace
