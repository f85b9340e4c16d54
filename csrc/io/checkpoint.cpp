#include "io/checkpoint.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <random>
#include <thread>

#include "core/thread_pool.h"
#include "io/entry_dump.h"
#include "io/error.h"
#include "io/out_file.h"
#include "io/record.h"
#include "table/budget/eviction.h"

#if defined(__linux__)
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace shoal {

namespace {

[[maybe_unused]] constexpr int kNicer = 5;  // gets a third of the time of a thread of normal priority

void check_cancelled(const Progress* progress) {
  if (progress && progress->cancelled.load(std::memory_order_relaxed))
    throw Cancelled("the save or load was cancelled");
}

// Lowers the priority of a save's thread. A thread cannot raise its priority again, so these are not the pool's.
void lower_priority() {
#if defined(__linux__)
  const auto self = static_cast<id_t>(::syscall(SYS_gettid));
  ::setpriority(PRIO_PROCESS, self, std::min(19, ::getpriority(PRIO_PROCESS, self) + kNicer));
#endif
}

// Passes copies of stripes from the one thread that makes them to the writers, a few at a time.
class StripeQueue {
 public:
  struct Job {
    int source;
    int shard;
    Rows rows;
  };

  StripeQueue(int writers, int room) : jobs_(writers), room_(room) {}

  // Blocks until there is room. False if a writer failed.
  bool push(int writer, Job job) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return failed_ || in_flight_ < room_; });
    if (failed_) return false;
    ++in_flight_;
    jobs_[writer].push_back(std::move(job));
    changed_.notify_all();
    return true;
  }
  // False at the end.
  bool pop(int writer, Job* job) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return failed_ || closed_ || !jobs_[writer].empty(); });
    if (failed_ || jobs_[writer].empty()) return false;
    *job = std::move(jobs_[writer].front());
    jobs_[writer].pop_front();
    return true;
  }
  // Keeps the memory of a finished job for a later one.
  void finished(Rows rows) {
    rows.clear();
    const std::lock_guard lock(mutex_);
    --in_flight_;
    spare_.push_back(std::move(rows));
    changed_.notify_all();
  }
  Rows spare() {
    const std::lock_guard lock(mutex_);
    if (spare_.empty()) return {};
    Rows rows = std::move(spare_.back());
    spare_.pop_back();
    return rows;
  }
  void close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }
  void fail(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (!failed_) failed_ = error;
    changed_.notify_all();
  }
  void rethrow() const {
    if (failed_) std::rethrow_exception(failed_);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::deque<Job>> jobs_;
  std::vector<Rows> spare_;
  const int room_;
  int in_flight_ = 0;
  bool closed_ = false;
  std::exception_ptr failed_;
};

int64_t write_rows(const EntryEncoder& encoder, const Rows& rows, int32_t stride, const Expiry* expiry, int64_t now,
                   OutFile* file) {
  const size_t room = kRecordHeader + encoder.max_bytes() + kRecordFooter;
  int64_t written = 0;
  for (int64_t i = 0; i < rows.size(); ++i) {
    if (expiry && expiry->stale(rows.ids[i], rows.times[i], now)) continue;
    char* record = file->room(room);
    char* payload = record + kRecordHeader;
    const uint64_t score = rows.scores.empty() ? 0 : rows.scores[i];
    char* end = encoder.encode(rows.rows.data() + i * stride, rows.times[i], &rows.ids[i], score, payload);
    frame_record(record, end - payload);
    file->used(end - record + kRecordFooter);
    ++written;
  }
  return written;
}

}  // namespace

std::vector<SavedShard> save(const std::vector<SaveSource>& sources, const SaveTarget& target, Progress* progress) {
  const int shards = static_cast<int>(target.path.size());
  if (shards < 1 || target.temporary.size() != target.path.size()) {
    throw std::invalid_argument("a save must have one temporary and one final path per shard, got " +
                                std::to_string(target.temporary.size()) + " and " + std::to_string(shards));
  }
  std::vector<EntryEncoder> encoders;
  std::vector<int64_t> now;  // of each table: the time by which the entire save decides which rows are stale
  for (const SaveSource& source : sources) {
    if (source.table->layout().serving) throw std::invalid_argument("save is not supported by serving entries");
    encoders.emplace_back(source.table->layout(), target.state);
    now.push_back(source.table->max_update_time());
  }
  const int writers = std::min(shards, num_threads());
  std::vector<std::unique_ptr<OutFile>> files(shards);
  std::vector<SavedShard> saved(shards, {.rows = std::vector<int64_t>(sources.size(), 0), .digest = {}});
  StripeQueue queue(writers, writers + 1);

  const auto write = [&](int writer) {
    try {
      lower_priority();
      for (int shard = writer; shard < shards; shard += writers) {
        if (target.random_sleep_ms > 0) {
          std::random_device random;
          std::this_thread::sleep_for(std::chrono::milliseconds(random() % target.random_sleep_ms));
        }
        files[shard] = std::make_unique<OutFile>(target.temporary[shard], target.snappy);
      }
      StripeQueue::Job job;
      while (queue.pop(writer, &job)) {
        check_cancelled(progress);
        OutFile& file = *files[job.shard];
        const int64_t before = file.bytes();
        const int64_t n = write_rows(encoders[job.source], job.rows, sources[job.source].table->layout().stride,
                                     sources[job.source].expiry, now[job.source], &file);
        saved[job.shard].rows[job.source] += n;
        if (progress) {
          progress->rows += n;
          progress->bytes += file.bytes() - before;
        }
        queue.finished(std::move(job.rows));
      }
      for (int shard = writer; shard < shards; shard += writers) files[shard]->sync();
    } catch (...) {
      queue.fail(std::current_exception());
    }
  };
  std::vector<std::thread> threads;
  try {
    for (int w = 0; w < writers; ++w) threads.emplace_back(write, w);
    bool going = true;
    for (size_t s = 0; s < sources.size() && going; ++s) {
      for (int part = 0; part < sources[s].parts && going; ++part) {
        check_cancelled(progress);
        const int shard = part % shards;
        Rows rows = queue.spare();
        if (sources[s].take) {
          sources[s].take(part, &rows);
        } else {
          sources[s].table->snapshot(part, sources[s].changed_since, &rows);
        }
        going = queue.push(shard % writers, {static_cast<int>(s), shard, std::move(rows)});
      }
    }
    queue.close();
  } catch (...) {
    queue.fail(std::current_exception());
  }
  for (std::thread& thread : threads) thread.join();
  queue.rethrow();
  for (int shard = 0; shard < shards; ++shard) {
    saved[shard].digest = files[shard]->digest();
    files[shard]->rename_to(target.path[shard]);
  }
  return saved;
}

// One thread's part of a load: decodes records, collects their rows by stripe and adds many rows of a stripe at a time,
// which keeps a batch within a small part of the index. It does not wait for a stripe that another thread is adding to.
class Load::Worker {
 public:
  Worker(Load& load, const std::string& path)
      : load_(load),
        path_(path),
        layout_(load.fresh().layout()),
        decoder_(layout_, load.strict_),
        row_(layout_.stride),
        batch_(std::clamp<int64_t>((int64_t{256} << 10) / std::max(1, layout_.stride), 1, 1000)) {}

  // Records [begin, end) of the chunk. Returns how many were taken.
  int64_t take(const Chunk& chunk, size_t begin, size_t end) {
    int64_t taken = 0;
    for (size_t i = begin; i < end; ++i) {
      const Chunk::Payload payload = chunk.payload(i, path_);
      EntryHead head;
      try {
        head = decoder_.decode(payload.data, payload.size, row_.data());
      } catch (const DataError& error) {
        throw DataError(path_ + ": record " + std::to_string(chunk.first + static_cast<int64_t>(i)) + ": " +
                        error.what());
      }
      if (!load_.shard_.owns(head.id)) continue;
      latest_ = std::max<int64_t>(latest_, head.time);
      if (!head.keep) continue;
      ++taken;
      const auto stripe = static_cast<size_t>(Table::stripe_of_id(head.id));
      Rows& rows = rows_[stripe];
      rows.add(head.id, head.time, head.score, row_.data(), layout_.stride);
      if (rows.size() < batch_) continue;
      std::unique_lock lock(load_.stripes_[stripe], std::try_to_lock);
      if (!lock && rows.size() >= 4 * batch_) lock.lock();
      if (lock) flush(&rows);
    }
    return taken;
  }

  // After the last record.
  void finish() {
    for (size_t stripe = 0; stripe < rows_.size(); ++stripe) {
      const std::lock_guard lock(load_.stripes_[stripe]);
      flush(&rows_[stripe]);
    }
    load_.fresh().raise_max_update_time(latest_);
  }

 private:
  void flush(Rows* rows) {
    load_.fresh().load(*rows);
    rows->clear();
  }

  Load& load_;
  const std::string& path_;
  const Layout& layout_;
  EntryDecoder decoder_;
  std::vector<char> row_;
  const int64_t batch_;
  std::array<Rows, Table::kStripes> rows_;
  int64_t latest_ = 0;
};

Load::Load(Table& table, bool strict, ShardRule shard, uint32_t unstamped)
    : table_(table), strict_(strict), shard_(shard), unstamped_(unstamped), fresh_(table.empty_twin()) {}

Load::~Load() = default;

Table& Load::fresh() const {
  if (!fresh_) throw std::invalid_argument("this load was committed and cannot be used again");
  return *fresh_;
}

Load::Taken Load::read(const std::vector<std::string>& paths, Progress* progress) {
  std::vector<std::unique_ptr<ChunkReader>> files;
  for (const std::string& path : paths) files.push_back(std::make_unique<ChunkReader>(path, false));
  const int64_t n = static_cast<int64_t>(files.size());
  std::atomic<int64_t> taken{0};
  std::atomic<bool> failed{false};
  // Each thread begins with a different file and then helps with the others.
  parallel_parts(num_threads(), [&](int64_t part) {
    Chunk chunk;
    try {
      for (int64_t i = 0; i < n; ++i) {
        ChunkReader& file = *files[(part + i) % n];
        Worker worker(*this, file.path());
        while (!failed && file.next(&chunk)) {
          check_cancelled(progress);
          taken += worker.take(chunk, 0, chunk.starts.size());
          if (progress) progress->rows += static_cast<int64_t>(chunk.starts.size());
        }
        worker.finish();
      }
    } catch (...) {
      failed = true;
      throw;
    }
  });
  Taken result{.records = taken, .files = {}};
  for (const auto& file : files) result.files.push_back(file->digest());
  return result;
}

int64_t Load::erase(const int64_t* ids, int64_t n) { return fresh().erase(ids, n); }

int64_t Load::evict(const Expiry& expiry, int64_t now) { return fresh().evict(expiry, now); }

int64_t Load::rows() const {
  const Eviction* eviction = fresh().eviction();
  return fresh().size() + (eviction ? eviction->evicted + eviction->refused : 0);
}

void Load::commit() {
  if (unstamped_ > 0 && fresh().max_update_time() == 0) {
    for (int stripe = 0; stripe < Table::kStripes; ++stripe) {
      Rows rows;
      fresh().snapshot(stripe, 0, &rows);
      std::fill(rows.times.begin(), rows.times.end(), unstamped_);
      if (rows.size() > 0) fresh().load(rows);
    }
    fresh().raise_max_update_time(unstamped_);
  }
  const int64_t latest = fresh().max_update_time();
  if (const Eviction* eviction = fresh().eviction(); eviction && table_.eviction()) {
    table_.eviction()->refused += eviction->evicted + eviction->refused;
    table_.eviction()->raise_clocks(*eviction);
  }
  table_.swap_contents(*fresh_);
  table_.raise_max_update_time(latest);
  fresh_.reset();
}

FileDigest load_multi(const std::string& path, const std::vector<Load*>& loads, const std::vector<int64_t>& counts,
                      Progress* progress) {
  if (loads.size() != counts.size())
    throw std::invalid_argument("there must be one count per table, " + std::to_string(loads.size()) + ", got " +
                                std::to_string(counts.size()));
  ChunkReader file(path, true);
  std::vector<int64_t> ends;  // records before and in each table
  for (int64_t count : counts) {
    if (count < 0 || __builtin_add_overflow(count, ends.empty() ? 0 : ends.back(), &ends.emplace_back())) {
      throw DataError(path + ": the numbers of records in the meta file must be 0..2^63 - 1 in all, got " +
                      std::to_string(count));
    }
  }
  const int64_t total = ends.empty() ? 0 : ends.back();
  std::atomic<int64_t> seen{0};
  std::atomic<bool> failed{false};
  parallel_parts(num_threads(), [&](int64_t) {
    std::vector<std::unique_ptr<Load::Worker>> workers(loads.size());
    Chunk chunk;
    try {
      while (!failed && file.next(&chunk)) {
        check_cancelled(progress);
        const int64_t n = static_cast<int64_t>(chunk.starts.size());
        seen += n;
        if (chunk.first + n > total) {
          throw DataError(path + ": there must be " + std::to_string(total) +
                          " records, as the meta file says, got more");
        }
        size_t table = std::upper_bound(ends.begin(), ends.end(), chunk.first) - ends.begin();
        for (int64_t i = 0; i < n; ++table) {
          const int64_t end = std::min(n, ends[table] - chunk.first);
          if (loads[table] && end > i) {
            if (!workers[table]) workers[table] = std::make_unique<Load::Worker>(*loads[table], file.path());
            workers[table]->take(chunk, i, end);
          } else {
            for (int64_t r = i; r < end; ++r) chunk.payload(r, file.path());
          }
          i = std::max(i, end);
        }
        if (progress) progress->rows += n;
      }
      for (auto& worker : workers) {
        if (worker) worker->finish();
      }
    } catch (...) {
      failed = true;
      throw;
    }
  });
  if (seen != total) {
    throw DataError(path + ": there must be " + std::to_string(total) + " records, as the meta file says, got " +
                    std::to_string(seen));
  }
  return file.digest();
}

}  // namespace shoal
