// Queues of requests that can run in one batch: each lane is for one model spec and set of wanted outputs, as the
// requests spell them.
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
  int64_t max_group = 256;      // requests per batch
  int64_t max_lanes = 256;      // requests that would need another lane go to Python
  int64_t max_bytes = 4 << 20;  // larger requests go to Python
  int64_t max_waiting = 1024;   // requests of one model that may wait; more are refused
  int64_t window_ns = 950'000;  // how long the first request of a batch waits for others, if others are likely
  int max_python = 4;           // batches that Python runs at a time
  int cores = 1;                // for native batches
};

// How a lane is answered without Python, while `generation` is current.
struct Binding {
  std::shared_ptr<const Predictor> predictor;
  std::string spec;             // the model spec in answers
  std::vector<size_t> outputs;  // the numbers of the wanted outputs; empty: all
  int64_t generation = 0;
};

// Requests answered without Python, counted by the time they took, and their batches, counted by size.
struct LaneCounts {
  static constexpr int kTimes = 160, kSizes = 24;
  std::array<int64_t, kTimes> times{};             // bin i begins at about 2^(i/4) ns
  std::array<int64_t, kSizes> requests{}, rows{};  // bin i begins at 2^i
  static int time_of(int64_t ns);
  void add(const LaneCounts& other);
};

// The waiting requests in all lanes of a model.
struct LaneModel {
  int64_t limit = -1;  // -1: LaneLimits::max_waiting
  int64_t waiting = 0;
};

// Sends answers, and returns requests that a batch cannot answer.
class LaneOwner {
 public:
  virtual ~LaneOwner() = default;
  virtual void bounce(const std::vector<CallPtr>& calls) = 0;  // lets Python answer them one by one
  virtual void send(std::vector<std::pair<Loop*, Reply>> replies) = 0;
  virtual void note(std::vector<Note>) {}  // requests that are logged or traced one by one
};

class Lanes;

// Requests of one lane that run together. The destructor gives requests without an answer to Python.
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

  // Answers all requests of a bound lane, or gives them to Python. Never throws.
  void predict();

  // The inputs of a model with raw features. Gives malformed requests to Python.
  RawBatch read(const RequestReader& reader);

  // The inputs of any other model, joined by name. plan() returns false if the requests cannot be joined.
  struct Input {
    std::string alias;
    int64_t dtype;
    std::vector<int64_t> shape;
  };
  bool plan();
  const std::vector<Input>& inputs() const { return inputs_; }
  void join_into(const std::vector<uint8_t*>& out) const;

  // (first request, number of requests, first row, number of rows) of parts with at most max_rows rows, or one request.
  std::vector<std::array<int64_t, 4>> parts(int64_t max_rows) const;
  // Answers `count` requests from `first` on; `outputs` begin with the rows of the first.
  void answer(size_t first, size_t count, std::string_view spec, const std::vector<Output>& outputs);
  // Gives them to Python.
  void bounce(size_t first, size_t count);
  // For each answered request: the seconds from its arrival to its answer.
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
  // `generation` is incremented whenever another version begins to answer; bindings of other generations are not used.
  Lanes(LaneOwner* owner, LaneLimits limits, std::shared_ptr<const std::atomic<int64_t>> generation)
      : owner_(owner), limits_(limits), generation_(std::move(generation)) {}

  // The key of a request: the bytes of its model spec and output filters. Empty for unusual or malformed requests.
  static std::string key_of(std::string_view message);

  // The lane of requests with this key, created if it is new; -1 if there are too many. Lanes of a model share a limit.
  int64_t add(const std::string& key, const std::string& model);
  void remove(int64_t lane);  // gives its waiting requests to Python
  // For Python's batches: while a batch of a lane runs, another begins when `enough` requests wait; a batch has at most
  // `bytes` (a single request may have more), and at most `running` batches run at a time.
  void set_python(int64_t enough, int64_t bytes, int running);
  void set_limit(const std::string& model, int64_t max_waiting);  // of one model

  // Answers the requests of a lane without Python from now on. False if the binding's generation is not current.
  bool bind(int64_t lane, Binding binding);

  // Puts requests into their lanes. Returns those without a lane, those that are refused, and batches that the caller
  // must run at once, since they take less time than passing them to another thread.
  void offer(std::vector<CallPtr>& calls, std::vector<CallPtr>* others, std::vector<CallPtr>* refused,
             std::vector<std::unique_ptr<Batch>>* now);

  // Whether requests of bound lanes wait for a thread.
  bool has_left() const { return left_.load(std::memory_order_relaxed) > 0; }
  // Some of them, as many as `offer` would have returned; null if there are none.
  std::unique_ptr<Batch> take_left();

  // The next batch for Python, or null after `timeout_ns` or stop(). Runs batches of bound lanes itself.
  std::unique_ptr<Batch> next(int64_t timeout_ns);
  void stop();  // next() returns null from now on; gives waiting requests to Python
  int64_t waiting();
  int64_t refused() const { return refused_.load(); }
  LaneOwner* owner() { return owner_; }
  void finished(const Batch& batch, int64_t took_ns);
  // (lane, counts) since the last call, for lanes with any.
  std::vector<std::pair<int64_t, LaneCounts>> take_counts();

 private:
  struct Lane {
    int64_t id;
    std::string key;
    LaneModel* model;
    std::deque<CallPtr> queue;
    int running = 0;
    int64_t ready_ns = 0;      // when the first request of the next batch has waited long enough
    int64_t gap_ns = 1 << 30;  // recent average between requests
    int64_t arrived_ns = 0;
    double company = 1;  // recent average of requests in batches that waited
    int since_probe = 0;
    bool waited = false;
    double pace_ns = 0;  // recent average per request
    std::shared_ptr<const Binding> binding;
    int unfit = 0;  // batches in a row that the binding could not answer
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
  std::atomic<int64_t> left_{0};  // requests in the queues of bound lanes
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
