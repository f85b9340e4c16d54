#include "net/lanes.h"

#include <algorithm>
#include <stdexcept>

#include "serving/messages.h"

namespace shoal::net {
namespace {

constexpr int kProbe = 200;           // a batch in so many waits although waiting did not pay lately
constexpr size_t kEnough = 64;        // requests that are worth a batch while another one runs
constexpr int64_t kSlow = 5'000'000;  // ns that a request waits for a running batch before it gets one of its own

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
  if (!owner) owner = std::make_unique<Model>();
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
    left.assign(lane->queue.begin(), lane->queue.end());
    by_id_.erase(found);
    lanes_.erase(std::string(lane->key));
  }
  owner_->bounce(left);
}

void Lanes::set_limit(const std::string& model, int64_t max_waiting) {
  const std::lock_guard lock(mutex_);
  auto& one = models_[model];
  if (!one) one = std::make_unique<Model>();
  one->limit = max_waiting;
}

// Whether a request that waits its turn is answered before its deadline, as things go.
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

void Lanes::offer(std::vector<CallPtr>& calls, std::vector<CallPtr>* others, std::vector<CallPtr>* refused) {
  std::vector<std::string> keys;
  keys.reserve(calls.size());
  for (const CallPtr& call : calls) keys.push_back(key_of(call->message));
  const int64_t now = now_ns();
  int wanted = 0;
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
      lane.gap_ns += (std::min<int64_t>(now - lane.arrived_ns, 1'000'000'000) - lane.gap_ns) / 10;
      lane.arrived_ns = now;
      lane.queue.push_back(calls[i]);
      ++lane.model->waiting;
      if (lane.queue.size() == 1 && !lane.running) {
        schedule(&lane, now);
        ++wanted;
      } else if (lane.queue.size() == kEnough || static_cast<int64_t>(lane.queue.size()) == limits_.max_group) {
        ++wanted;
      }
    }
  }
  for (; wanted > 0; --wanted) ready_.notify_one();
}

std::unique_ptr<Batch> Lanes::next(int64_t timeout_ns) {
  const int64_t end = now_ns() + timeout_ns;
  std::vector<CallPtr> taken;
  std::vector<std::pair<Loop*, Reply>> late;
  int64_t id = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    if (stopped_) return nullptr;
    const int64_t now = now_ns();
    int64_t until = end;
    Lane* chosen = nullptr;
    for (auto& [key, lane] : lanes_) {
      if (lane->queue.empty()) continue;
      const auto size = static_cast<int64_t>(lane->queue.size());
      // While one batch runs, another begins when it is worth it, or when the first one is slow.
      const int64_t late = lane->queue.front()->arrived_ns + kSlow;
      const bool ready = lane->running ? lane->queue.size() >= kEnough || now >= late
                                       : now >= lane->ready_ns || size >= limits_.max_group;
      if (!ready) until = std::min(until, lane->running ? late : lane->ready_ns);
      // the one whose first request has waited longest
      if (ready && (!chosen || lane->queue.front()->arrived_ns < chosen->queue.front()->arrived_ns))
        chosen = lane.get();
    }
    if (chosen) {
      while (!chosen->queue.empty() && static_cast<int64_t>(taken.size()) < limits_.max_group) {
        CallPtr call = std::move(chosen->queue.front());
        chosen->queue.pop_front();
        --chosen->model->waiting;
        if (!call->ended) taken.push_back(std::move(call));
      }
      if (chosen->waited) chosen->company += 0.5 * (static_cast<double>(taken.size()) - chosen->company);
      chosen->waited = false;
      if (taken.empty()) continue;
      ++chosen->running;
      id = chosen->id;
      break;
    }
    if (now >= end) return nullptr;
    ready_.wait_until(lock, std::chrono::steady_clock::time_point(std::chrono::nanoseconds(until)));
  }
  lock.unlock();
  return std::make_unique<Batch>(this, id, std::move(taken));
}

void Lanes::finished(int64_t id, size_t requests, int64_t took_ns) {
  bool more = false;
  {
    const std::lock_guard lock(mutex_);
    const auto found = by_id_.find(id);
    if (found == by_id_.end()) return;
    Lane& lane = *found->second;
    --lane.running;
    const double each = static_cast<double>(took_ns) / static_cast<double>(std::max<size_t>(1, requests));
    lane.pace_ns = lane.pace_ns == 0 ? each : 0.8 * lane.pace_ns + 0.2 * each;
    if (!lane.queue.empty() && !lane.running) {
      schedule(&lane, now_ns());
      more = true;
    }
  }
  if (more) ready_.notify_one();
}

void Lanes::stop() {
  std::vector<CallPtr> left;
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    for (auto& [key, lane] : lanes_) {
      left.insert(left.end(), lane->queue.begin(), lane->queue.end());
      lane->model->waiting -= static_cast<int64_t>(lane->queue.size());
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
