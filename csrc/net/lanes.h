// Requests that ask alike wait together: each lane is one spelling of a model, its signature and the outputs wanted.
#pragma once
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "net/call.h"
#include "net/notes.h"
#include "serving/batch.h"
#include "serving/predictor.h"

namespace shoal::net {

struct LaneLimits {
  int64_t max_group = 256;      // requests of a batch
  int64_t max_lanes = 256;      // spellings; requests of others are Python's
  int64_t max_bytes = 4 << 20;  // larger requests are Python's
  int64_t max_waiting = 1024;   // requests of one lane that may wait; more are refused
  int64_t window_ns = 950'000;  // that the first of a batch waits for others, when others are likely to come
  int max_python = 4;           // batches that Python runs at a time
  int cores = 1;                // that there are for batches
};

// How a lane is answered without Python, for as long as nothing changes which version its requests get.
struct Binding {
  std::shared_ptr<const Predictor> predictor;
  std::string spec;             // of answers
  std::vector<size_t> outputs;  // that are wanted, by their number; all where there is none
  int64_t generation = 0;
};

// What was answered without Python: counts of requests by the time they took, and of batches by their size.
struct LaneCounts {
  static constexpr int kTimes = 160, kSizes = 24;
  std::array<int64_t, kTimes> times{};             // from 2^(i/4) ns on
  std::array<int64_t, kSizes> requests{}, rows{};  // from 2^i on
  static int time_of(int64_t ns);
  void add(const LaneCounts& other);
};

// The requests of a model that wait, in all of its lanes.
struct LaneModel {
  int64_t limit = -1;  // -1: as all
  int64_t waiting = 0;
};

// Answers for those who wait, and the way back for those that a batch cannot answer.
class LaneOwner {
 public:
  virtual ~LaneOwner() = default;
  virtual void bounce(const std::vector<CallPtr>& calls) = 0;  // Python answers them one by one
  virtual void send(std::vector<std::pair<Loop*, Reply>> replies) = 0;
  virtual void note(std::vector<Note>) {}  // answers that are told of one by one
};

class Lanes;

// Requests of one lane that run together. Whatever has no answer when it goes is given back to Python.
class Batch {
 public:
  // With a `holder` the requests still count as waiting.
  Batch(Lanes* lanes, int64_t lane, std::vector<CallPtr> calls, std::shared_ptr<const Binding> binding = nullptr,
        LaneModel* holder = nullptr);
  ~Batch();
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  int64_t lane() const { return lane_; }
  size_t size() const { return calls_.size(); }
  bool bound() const { return binding_ != nullptr; }

  // Answers all requests of a lane that is bound, or gives them back to Python. Never throws.
  void predict();

  // The inputs of a model of features. Requests that are not as they should be are given back.
  RawBatch read(const RequestReader& reader);

  // The inputs of any other model, joined by their names: false where the requests do not go together.
  struct Input {
    std::string alias;
    int64_t dtype;
    std::vector<int64_t> shape;
  };
  bool plan();
  const std::vector<Input>& inputs() const { return inputs_; }
  void join_into(const std::vector<uint8_t*>& out) const;

  const std::vector<int64_t>& rows() const { return rows_; }  // of each request, once they were read or planned
  // (first request, number of them, first row, number of rows) of parts with at most so many rows, or of one request
  std::vector<std::array<int64_t, 4>> parts(int64_t max_rows) const;
  // Answers `count` requests from `first` on; `outputs` begin with the first's rows.
  void answer(size_t first, size_t count, std::string_view spec, const std::vector<Output>& outputs);
  // Gives them to Python.
  void bounce(size_t first, size_t count);
  // Seconds from the arrival of each request to its answer, of all that were answered.
  const std::vector<double>& seconds() const { return seconds_; }

 private:
  friend class Lanes;
  bool try_predict();
  bool join_for(const Predictor& predictor, std::vector<std::vector<uint8_t>>* values,
                std::vector<std::vector<int64_t>>* shapes);

  Lanes* const lanes_;
  const int64_t lane_, begin_ns_;
  const size_t taken_;
  const std::shared_ptr<const Binding> binding_;
  LaneModel* const holder_;
  bool fits_ = true;
  std::vector<CallPtr> calls_;
  std::vector<uint8_t> done_;
  std::vector<int64_t> rows_;
  std::vector<Input> inputs_;
  std::vector<std::vector<Part>> parts_;  // of each input
  std::vector<Joined> joined_;
  std::vector<double> seconds_;
};

class Lanes {
 public:
  // `generation` is counted up by whoever changes which version requests get; bindings of others are not used.
  Lanes(LaneOwner* owner, LaneLimits limits, std::shared_ptr<const std::atomic<int64_t>> generation)
      : owner_(owner), limits_(limits), generation_(std::move(generation)) {}

  // The key of a request: its model spec and the names of the outputs it wants, as they were written. Empty for
  // requests that are unusual or broken.
  static std::string key_of(std::string_view message);

  // The lane of requests with a key; made where it is new. `model`: whose limit it shares; -1 where there are too many.
  int64_t add(const std::string& key, const std::string& model);
  void remove(int64_t lane);  // who waits there is given to Python
  // For batches of Python: while one of a lane runs, another one begins when so many requests wait; the requests of one
  // take so many bytes at most (one request may take more), and so many batches run at a time.
  void set_python(int64_t enough, int64_t bytes, int running);
  void set_limit(const std::string& model, int64_t max_waiting);  // of one model

  // Answers the requests of a lane without Python from now on. False where the binding is of a former generation.
  bool bind(int64_t lane, Binding binding);

  // Puts requests into their lanes. What is left: those without one, those that are refused, and batches for the caller
  // to run, at once: they take less time than to hand them over.
  void offer(std::vector<CallPtr>& calls, std::vector<CallPtr>* others, std::vector<CallPtr>* refused,
             std::vector<std::unique_ptr<Batch>>* now);

  // Requests that are waiting to be answered without Python: somebody has left them for others.
  bool has_left() const { return left_.load(std::memory_order_relaxed) > 0; }
  // Some of them, as many as `offer` would have given; null where there are none.
  std::unique_ptr<Batch> take_left();

  // The next batch for Python, or null after `timeout_ns` or when stopped. Runs those that are not for Python itself.
  std::unique_ptr<Batch> next(int64_t timeout_ns);
  void stop();  // next() returns null from now on; who waits is given to Python
  int64_t waiting();
  int64_t refused() const { return refused_.load(); }
  LaneOwner* owner() { return owner_; }
  void finished(const Batch& batch, int64_t took_ns);
  // (lane, counts) since the last call, of those that have any.
  std::vector<std::pair<int64_t, LaneCounts>> take_counts();

 private:
  struct Lane {
    int64_t id;
    std::string key;
    LaneModel* model;
    std::deque<CallPtr> queue;
    int running = 0;
    int64_t ready_ns = 0;      // when the first of the next batch has waited enough
    int64_t gap_ns = 1 << 30;  // between requests, lately
    int64_t arrived_ns = 0;
    double company = 1;  // requests that a batch which waited had, lately
    int since_probe = 0;
    bool waited = false;
    double pace_ns = 0;  // of one request, lately
    std::shared_ptr<const Binding> binding;
    int unfit = 0;  // batches in a row that could not be answered by the binding
    LaneCounts counts;
    bool counted = false;
  };
  const std::shared_ptr<const Binding>& binding_of(Lane* lane);
  void unbind(Lane* lane);
  void put(Lane* lane, const CallPtr& call, int64_t now, int* wanted);
  std::unique_ptr<Batch> next_of_any(int64_t end);
  std::unique_ptr<Batch> take(Lane* lane, double most_ns);
  bool is_ready(const Lane& lane, int64_t now, int64_t* until) const;
  void schedule(Lane* lane, int64_t now);
  bool has_time(const Lane& lane, const Call& call, int64_t now) const;

  LaneOwner* const owner_;
  const LaneLimits limits_;
  const std::shared_ptr<const std::atomic<int64_t>> generation_;
  int python_running_ = 0, native_running_ = 0;
  int64_t enough_ = 64, python_bytes_ = 64 << 20;
  int max_python_ = limits_.max_python;
  std::atomic<int64_t> left_{0};  // in the queues of lanes that are bound
  std::mutex mutex_;
  std::condition_variable ready_;
  std::unordered_map<std::string, std::unique_ptr<Lane>> lanes_;
  std::unordered_map<int64_t, Lane*> by_id_;
  std::unordered_map<std::string, std::unique_ptr<LaneModel>> models_;
  int64_t next_id_ = 1;
  bool stopped_ = false;
  std::atomic<int64_t> refused_{0};
};

}  // namespace shoal::net
