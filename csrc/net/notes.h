// Requests that are logged or traced one by one although they are answered in batches.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "net/call.h"

namespace shoal::net {

struct Note {
  int64_t lane = 0, rows = 0, bytes = 0, arrived_ns = 0, done_ns = 0;
  uint8_t noted = 0;
  std::shared_ptr<const Peer> peer;
  Metadata metadata;
  Note(const Call& call, int64_t lane, int64_t rows, int64_t done_ns)
      : lane(lane),
        rows(rows),
        bytes(static_cast<int64_t>(call.message.size())),
        arrived_ns(call.arrived_ns),
        done_ns(done_ns),
        noted(call.noted),
        peer(call.peer),
        metadata(call.metadata) {}
};

class Notes {
 public:
  // Sets which calls are noted from now on: one in `log_every` for the access log (0: none); for traces, one in
  // `trace_every` and all with a trace context (0: none; -1: only those with a context).
  void wants(int64_t log_every, int64_t trace_every) {
    log_every_ = log_every;
    trace_every_ = trace_every;
  }
  bool any() const { return log_every_ > 0 || trace_every_; }

  // Decides about a call that has arrived.
  void mark(Call* call) {
    const int64_t number = count_.fetch_add(1, std::memory_order_relaxed), log = log_every_, trace = trace_every_;
    if (log > 0 && number % log == 0) call->noted |= kSampled;
    if (trace > 0 && number % trace == 0) call->noted |= kTraced;
    if (!trace) return;
    for (const auto& [key, value] : call->metadata)
      if (key == "traceparent") call->noted |= kTraced;
  }

  void add(std::vector<Note> notes) {
    const std::lock_guard lock(mutex_);
    for (Note& each : notes) {
      if (notes_.size() >= kMaxNotes) {
        ++dropped_;
        continue;
      }
      notes_.push_back(std::move(each));
    }
  }
  // The notes since the last call, and the number of notes that were dropped.
  std::pair<std::vector<Note>, int64_t> take() {
    const std::lock_guard lock(mutex_);
    std::pair<std::vector<Note>, int64_t> taken{std::move(notes_), dropped_};
    notes_.clear();
    dropped_ = 0;
    return taken;
  }

 private:
  static constexpr size_t kMaxNotes = 16384;  // between two calls of take()
  std::atomic<int64_t> log_every_{0}, trace_every_{0}, count_{0};
  std::mutex mutex_;
  std::vector<Note> notes_;
  int64_t dropped_ = 0;
};

}  // namespace shoal::net
