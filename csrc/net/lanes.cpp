#include "net/lanes.h"

#include <algorithm>
#include <bit>
#include <stdexcept>

#include "serving/messages.h"

namespace shoal::net {
namespace {

constexpr int kProbe = 200;           // one batch in this many waits for others even if that did not pay recently
constexpr int64_t kSlow = 5'000'000;  // ns that a request waits for a running batch before another one begins
constexpr double kQuick = 1'000'000;  // ns of work that an HTTP/2 thread does itself
constexpr double kTurn = 4'000'000;   // ns of work in a batch of another thread, at most
constexpr int64_t kMaxGroupBytes = 64 << 20;
constexpr int kUnfit = 8;  // failed batches in a row after which a lane is unbound

const uint8_t* bytes_of(std::string_view text) { return reinterpret_cast<const uint8_t*>(text.data()); }

std::string_view view(std::string_view message, Span span) {
  return message.substr(static_cast<size_t>(span.begin), static_cast<size_t>(span.size));
}

}  // namespace

std::string Lanes::key_of(std::string_view message) {
  try {
    const PredictParts parts = predict_parts(bytes_of(message), static_cast<int64_t>(message.size()));
    if (parts.specs.size() != 1 || parts.tensors.empty()) return {};
    std::string key(view(message, parts.specs[0]));
    for (const Span& each : parts.filters) {
      key += '\0';
      key += std::to_string(each.size);
      key += ':';
      key += view(message, each);
    }
    return key.empty() ? std::string(1, '\0') : key;
  } catch (const std::invalid_argument&) {
    return {};
  }
}

int64_t Lanes::add(const std::string& key, const std::string& model) {
  const std::lock_guard lock(mutex_);
  const auto found = lanes_.find(key);
  if (found != lanes_.end()) return found->second->id;
  if (static_cast<int64_t>(lanes_.size()) >= limits_.max_lanes || stopped_) return -1;
  auto& owner = models_[model];
  if (!owner) owner = std::make_unique<LaneModel>();
  auto made = std::make_unique<Lane>();
  made->id = next_id_++;
  made->key = key;
  made->model = owner.get();
  by_id_[made->id] = made.get();
  return (lanes_[key] = std::move(made))->id;
}

void Lanes::remove(int64_t id) {
  std::vector<CallPtr> left;
  {
    const std::lock_guard lock(mutex_);
    const auto found = by_id_.find(id);
    if (found == by_id_.end()) return;
    Lane* lane = found->second;
    lane->model->waiting -= static_cast<int64_t>(lane->queue.size());
    if (lane->binding) left_ -= static_cast<int64_t>(lane->queue.size());
    left.assign(lane->queue.begin(), lane->queue.end());
    by_id_.erase(found);
    lanes_.erase(std::string(lane->key));
  }
  owner_->bounce(left);
}

void Lanes::set_limit(const std::string& model, int64_t max_waiting) {
  const std::lock_guard lock(mutex_);
  auto& one = models_[model];
  if (!one) one = std::make_unique<LaneModel>();
  one->limit = max_waiting;
}

void Lanes::set_python(int64_t enough, int64_t bytes, int running) {
  const std::lock_guard lock(mutex_);
  enough_ = std::max<int64_t>(1, enough);
  python_bytes_ = std::max<int64_t>(1, bytes);
  max_python_ = std::max(1, running);
}

// Whether a request will probably be answered before its deadline.
bool Lanes::has_time(const Lane& lane, const Call& call, int64_t now) const {
  if (!call.deadline_ns) return true;
  const double before = lane.pace_ns * static_cast<double>(lane.queue.size() + 1) / std::max(1, lane.running);
  return static_cast<double>(now) + before < static_cast<double>(call.deadline_ns);
}

void Lanes::schedule(Lane* lane, int64_t now) {
  lane->waited = false;
  if (lane->gap_ns < 2 * limits_.window_ns && static_cast<int64_t>(lane->queue.size()) < limits_.max_group) {
    ++lane->since_probe;
    lane->waited = lane->company > 1.2 || lane->since_probe >= kProbe;
  }
  if (lane->waited) lane->since_probe = 0;
  lane->ready_ns = lane->waited ? now + limits_.window_ns : now;
}

int LaneCounts::time_of(int64_t ns) {
  if (ns < 1) return 0;
  const int power = 63 - std::countl_zero(static_cast<uint64_t>(ns));
  const auto quarter = power >= 2 ? static_cast<int>((ns >> (power - 2)) & 3) : 0;
  return std::min(kTimes - 1, 4 * power + quarter);
}

void LaneCounts::add(const LaneCounts& other) {
  for (size_t i = 0; i < times.size(); ++i) times[i] += other.times[i];
  for (size_t i = 0; i < requests.size(); ++i) requests[i] += other.requests[i], rows[i] += other.rows[i];
}

bool Lanes::bind(int64_t id, Binding binding) {
  const std::lock_guard lock(mutex_);
  const auto found = by_id_.find(id);
  if (found == by_id_.end() || binding.generation != generation_->load()) return false;
  if (!found->second->binding) left_ += static_cast<int64_t>(found->second->queue.size());
  found->second->binding = std::make_shared<const Binding>(std::move(binding));
  found->second->unfit = 0;
  found->second->pace_ns = 0;
  return true;
}

const std::shared_ptr<const Binding>& Lanes::binding_of(Lane* lane) {
  if (lane->binding && lane->binding->generation != generation_->load(std::memory_order_relaxed)) unbind(lane);
  return lane->binding;
}

// Lets Python answer the lane's requests from now on.
void Lanes::unbind(Lane* lane) {
  lane->binding = nullptr;
  left_ -= static_cast<int64_t>(lane->queue.size());
  if (!lane->queue.empty() && !lane->running) schedule(lane, now_ns());
}

void Lanes::put(Lane* lane, const CallPtr& call, int64_t now, int* wanted) {
  lane->queue.push_back(call);
  if (lane->binding) {
    ++left_;
  } else if (lane->queue.size() == 1 && !lane->running) {
    schedule(lane, now);
    ++*wanted;
  } else if (static_cast<int64_t>(lane->queue.size()) == enough_ ||
             static_cast<int64_t>(lane->queue.size()) == limits_.max_group) {
    ++*wanted;
  }
}

void Lanes::offer(std::vector<CallPtr>& calls, std::vector<CallPtr>* others, std::vector<CallPtr>* refused,
                  std::vector<std::unique_ptr<Batch>>* batches) {
  std::vector<std::string> keys;
  keys.reserve(calls.size());
  for (const CallPtr& call : calls) keys.push_back(key_of(call->message));
  const int64_t now = now_ns();
  int wanted = 0;
  std::vector<std::pair<Lane*, std::vector<CallPtr>>> bound;  // few lanes: found by looking at all
  {
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < calls.size(); ++i) {
      const auto found = keys[i].empty() ? lanes_.end() : lanes_.find(keys[i]);
      if (found == lanes_.end() || stopped_) {
        others->push_back(calls[i]);
        continue;
      }
      Lane& lane = *found->second;
      const int64_t limit = lane.model->limit >= 0 ? lane.model->limit : limits_.max_waiting;
      if (lane.model->waiting >= limit || !has_time(lane, *calls[i], now)) {
        ++refused_;
        refused->push_back(calls[i]);
        continue;
      }
      ++lane.model->waiting;
      if (binding_of(&lane)) {
        auto own = std::find_if(bound.begin(), bound.end(), [&](const auto& each) { return each.first == &lane; });
        if (own == bound.end()) own = bound.insert(bound.end(), {&lane, {}});
        own->second.push_back(calls[i]);
        continue;
      }
      lane.gap_ns += (std::min<int64_t>(now - lane.arrived_ns, 1'000'000'000) - lane.gap_ns) / 10;
      lane.arrived_ns = now;
      put(&lane, calls[i], now, &wanted);
    }
    for (auto& [lane, own] : bound) {
      // The caller runs as many requests as are quick; the first free thread takes the others.
      const double most = lane->pace_ns > 0 ? kQuick / lane->pace_ns : static_cast<double>(own.size());
      const auto count = std::min(own.size(), static_cast<size_t>(most));
      for (size_t i = count; i < own.size(); ++i) put(lane, own[i], now, &wanted);
      own.resize(count);
      if (own.empty()) continue;
      ++lane->running;
      ++native_running_;
      batches->push_back(std::make_unique<Batch>(this, lane->id, std::move(own), lane->binding, lane->model));
    }
    if (left_ > 0) wanted += std::max(0, limits_.cores - native_running_);
  }
  for (; wanted > 0; --wanted) ready_.notify_one();
}

bool Lanes::is_ready(const Lane& lane, int64_t now, int64_t* until) const {
  if (lane.queue.empty()) return false;
  if (lane.binding) return true;
  if (python_running_ >= max_python_) return false;
  // While one batch runs, another begins when enough requests wait, or when the first one is slow.
  const int64_t late = lane.queue.front()->arrived_ns + kSlow;
  const bool ready = lane.running
                         ? static_cast<int64_t>(lane.queue.size()) >= enough_ || now >= late
                         : now >= lane.ready_ns || static_cast<int64_t>(lane.queue.size()) >= limits_.max_group;
  if (!ready) *until = std::min(*until, lane.running ? late : lane.ready_ns);
  return ready;
}

std::unique_ptr<Batch> Lanes::next(int64_t timeout_ns) {
  const int64_t end = now_ns() + timeout_ns;
  for (;;) {
    std::unique_ptr<Batch> batch = next_of_any(end);
    if (!batch || !batch->bound()) return batch;
    batch->predict();
  }
}

std::unique_ptr<Batch> Lanes::next_of_any(int64_t end) {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (stopped_) return nullptr;
    const int64_t now = now_ns();
    int64_t until = end;
    Lane* chosen = nullptr;
    for (auto& [key, lane] : lanes_) {
      binding_of(lane.get());
      // Choose the lane whose first request has waited longest.
      if (is_ready(*lane, now, &until) &&
          (!chosen || lane->queue.front()->arrived_ns < chosen->queue.front()->arrived_ns))
        chosen = lane.get();
    }
    if (chosen) {
      std::unique_ptr<Batch> batch = take(chosen, kTurn);
      if (!batch) continue;
      if (!chosen->queue.empty()) ready_.notify_one();  // another thread may take the rest
      return batch;
    }
    if (now >= end) return nullptr;
    ready_.wait_until(lock, std::chrono::steady_clock::time_point(std::chrono::nanoseconds(until)));
  }
}

// Takes the first requests of a lane; of a bound lane, as many as are answered in most_ns.
std::unique_ptr<Batch> Lanes::take(Lane* lane, double most_ns) {
  int64_t most = limits_.max_group;
  if (lane->binding && lane->pace_ns > 0)
    most = std::clamp<int64_t>(static_cast<int64_t>(most_ns / lane->pace_ns), 1, most);
  std::vector<CallPtr> taken;
  int64_t bytes = 0;
  const int64_t most_bytes = lane->binding ? kMaxGroupBytes : python_bytes_;
  while (!lane->queue.empty() && static_cast<int64_t>(taken.size()) < most && bytes < most_bytes) {
    CallPtr call = std::move(lane->queue.front());
    lane->queue.pop_front();
    --lane->model->waiting;
    if (lane->binding) --left_;
    bytes += static_cast<int64_t>(call->message.size());
    if (!call->ended) taken.push_back(std::move(call));
  }
  if (lane->waited) lane->company += 0.5 * (static_cast<double>(taken.size()) - lane->company);
  lane->waited = false;
  if (taken.empty()) return nullptr;
  ++lane->running;
  ++(lane->binding ? native_running_ : python_running_);
  return std::make_unique<Batch>(this, lane->id, std::move(taken), lane->binding);
}

std::unique_ptr<Batch> Lanes::take_left() {
  const std::lock_guard lock(mutex_);
  Lane* chosen = nullptr;
  for (auto& [key, lane] : lanes_)
    if (binding_of(lane.get()) && !lane->queue.empty() && lane->pace_ns <= kQuick &&
        (!chosen || lane->queue.front()->arrived_ns < chosen->queue.front()->arrived_ns))
      chosen = lane.get();
  return chosen ? take(chosen, kQuick) : nullptr;
}

void Lanes::finished(const Batch& batch, int64_t took_ns) {
  LaneCounts counts;
  if (batch.bound() && !batch.seconds_.empty()) {
    for (double each : batch.seconds_)
      ++counts.times[static_cast<size_t>(LaneCounts::time_of(static_cast<int64_t>(each * 1e9)))];
    int64_t rows = 0;
    for (int64_t each : batch.rows_) rows += each;
    auto size_of = [](int64_t n) {
      return static_cast<size_t>(
          std::min(LaneCounts::kSizes - 1, 63 - std::countl_zero(static_cast<uint64_t>(std::max<int64_t>(1, n)))));
    };
    ++counts.requests[size_of(static_cast<int64_t>(batch.seconds_.size()))];
    ++counts.rows[size_of(rows)];
  }
  bool more = false;
  {
    const std::lock_guard lock(mutex_);
    --(batch.bound() ? native_running_ : python_running_);
    more = !batch.bound();  // another lane may have waited for Python
    if (batch.holder_) batch.holder_->waiting -= static_cast<int64_t>(batch.taken_);
    const auto found = by_id_.find(batch.lane());
    if (found == by_id_.end()) return;
    Lane& lane = *found->second;
    --lane.running;
    const double each = static_cast<double>(took_ns) / static_cast<double>(std::max<size_t>(1, batch.taken_));
    lane.pace_ns = lane.pace_ns == 0 ? each : 0.8 * lane.pace_ns + 0.2 * each;
    if (batch.bound()) {
      lane.unfit = batch.fits_ ? 0 : lane.unfit + 1;
      if (lane.unfit >= kUnfit && lane.binding == batch.binding_) unbind(&lane);
      if (!batch.seconds_.empty()) {
        lane.counts.add(counts);
        lane.counted = true;
      }
    }
    if (!lane.queue.empty() && !lane.running && !lane.binding) {
      schedule(&lane, now_ns());
      more = true;
    }
  }
  if (more) ready_.notify_one();
}

std::vector<std::pair<int64_t, LaneCounts>> Lanes::take_counts() {
  std::vector<std::pair<int64_t, LaneCounts>> all;
  const std::lock_guard lock(mutex_);
  for (auto& [id, lane] : by_id_) {
    if (!lane->counted) continue;
    all.emplace_back(id, lane->counts);
    lane->counts = {};
    lane->counted = false;
  }
  return all;
}

void Lanes::stop() {
  std::vector<CallPtr> left;
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    for (auto& [key, lane] : lanes_) {
      left.insert(left.end(), lane->queue.begin(), lane->queue.end());
      lane->model->waiting -= static_cast<int64_t>(lane->queue.size());
      if (lane->binding) left_ -= static_cast<int64_t>(lane->queue.size());
      lane->queue.clear();
    }
  }
  ready_.notify_all();
  owner_->bounce(left);
}

int64_t Lanes::waiting() {
  const std::lock_guard lock(mutex_);
  int64_t all = 0;
  for (const auto& [name, model] : models_) all += model->waiting;
  return all;
}

}  // namespace shoal::net
