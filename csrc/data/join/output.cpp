// Closing windows and writing samples.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <tuple>

#include "core/hash.h"
#include "data/join/joiner.h"
#include "data/text_hash.h"

namespace shoal::join {

namespace {

void append_number(double value, std::string* out) {
  char text[32];
  const bool whole = std::abs(value) < 1e15 && value == std::floor(value);
  const auto end = whole ? std::to_chars(text, text + sizeof text, static_cast<int64_t>(value)).ptr
                         : std::to_chars(text, text + sizeof text, value).ptr;
  out->append(text, end);
}

}  // namespace

bool keeps_negative(std::string_view key, uint64_t seed, double rate) {
  const uint64_t hash = hash_id(hash_text(key) ^ hash_id(seed + 0x9e3779b97f4a7c15ULL));
  return static_cast<double>(hash >> 11) * 0x1p-53 < rate;
}

bool Joiner::close_due(int64_t bytes) {
  while (true) {
    const bool disk = !on_disk_.empty() && (in_block_.empty() || in_block_.front() > on_disk_.front());
    std::vector<Due>& heap = disk ? on_disk_ : in_block_;
    if (heap.empty() || heap.front().due > closed_) return false;
    if (static_cast<int64_t>(out_.bytes.size()) >= bytes) return true;
    const Due first = heap.front();
    if (!disk) {
      const Record record(block_.get() + first.where);
      leave(record, Location::of(record.is_action(), Location::kActive, first.where));
      std::pop_heap(heap.begin(), heap.end(), std::greater<>());
      heap.pop_back();
      if (heap.empty()) block_used_ = 0;
      continue;
    }
    Segment& from = segment(first.where);
    const Record record = head(from);
    leave(record, Location::of(record.is_action(), from.number, static_cast<uint64_t>(from.next)));
    from.next += record.header().size;
    Due next{};
    if (!from.ended()) {
      const Record second = head(from);
      next = {second.header().due, second.header().order, from.number};
    }
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    if (from.ended()) {
      heap.pop_back();
      reap();
    } else {
      heap.back() = next;
      std::push_heap(heap.begin(), heap.end(), std::greater<>());
    }
  }
}

Record Joiner::head(Segment& from) {
  const int64_t before = static_cast<int64_t>(from.buffer.size());
  const int64_t each = settings_.budget / 16 / std::max<int64_t>(1, segments());
  const Record record = files_.head(from, std::clamp<int64_t>(each, 4096, 1 << 18));
  cursor_bytes_ += static_cast<int64_t>(from.buffer.size()) - before;
  return record;
}

void Joiner::leave(const Record& record, Location at) {
  const uint64_t hash = hash_of(record.key());
  const Location* entry = index_.find(hash, at);
  if (entry == nullptr) return;  // an action that was joined
  const bool spilled = at.segment() != Location::kActive;
  if (record.is_action()) {
    index_.erase(hash, at);
    --open_[kActions];
    spilled_ -= spilled;
    ++counters_[time_of(record) <= record.action().watermark ? kLateActions : kUnmatchedActions];
    return;
  }
  if (entry->emitted()) {
    index_.erase(hash, at);
    return;
  }
  std::vector<Waiting> actions = eligible(record, hash);
  index_.erase(hash, at);
  --open_[kImpressions];
  spilled_ -= spilled;
  for (const Waiting& one : actions) consume(hash, one.at, one.due);
  if (actions.size() > 1) {
    // Duplicate actions count once; the first is kept.
    const auto same = [](const Waiting& w) { return std::tie(w.time, w.kind, w.value); };
    std::sort(actions.begin(), actions.end(), [&](const Waiting& a, const Waiting& b) {
      return same(a) != same(b) ? same(a) < same(b) : a.number < b.number;
    });
    const auto end = std::unique(actions.begin(), actions.end(),
                                 [&](const Waiting& a, const Waiting& b) { return same(a) == same(b); });
    counters_[kDuplicateActions] += actions.end() - end;
    actions.erase(end, actions.end());
    std::sort(actions.begin(), actions.end(), [](const Waiting& a, const Waiting& b) {
      return a.time != b.time ? a.time < b.time : a.number < b.number;
    });
  }
  emit(record, actions);
}

double Joiner::label_value(const Label& label, uint64_t bit, const std::vector<Waiting>& actions) const {
  double value = 0;
  bool any = false;
  for (const Waiting& one : actions) {
    if ((one.mask & bit) == 0) continue;
    switch (label.rule) {
      case Rule::any:
        value = 1;
        break;
      case Rule::count:
        value += 1;
        break;
      case Rule::sum:
        value += one.value;
        break;
      case Rule::max:
        value = any ? std::max(value, one.value) : one.value;
        break;
      case Rule::first:
        value = any ? value : one.value;
        break;
      case Rule::last:
        value = one.value;
        break;
    }
    any = true;
  }
  return value;
}

void Joiner::emit(const Record& impression, const std::vector<Waiting>& actions) {
  const bool positive = std::any_of(actions.begin(), actions.end(), [](const Waiting& w) { return w.mask & 1; });
  counters_[kJoinedActions] += static_cast<int64_t>(actions.size());
  if (!positive && !keeps_negative(impression.key(), settings_.seed, settings_.keep_negatives)) {
    ++counters_[kNegativesDropped];
    return;
  }
  ++counters_[positive ? kPositives : kNegatives];
  std::string_view payload = impression.body();
  const bool json = settings_.fields[kImpressions].coding == Coding::json;
  bool comma = true;
  if (json) {
    payload.remove_suffix(1);
    while (std::string_view(" \n\r\t").find(payload.back()) != std::string_view::npos) payload.remove_suffix(1);
    comma = payload.size() > 1;
  }
  std::string& out = out_.bytes;
  out.append(payload);
  for (size_t l = 0; l < settings_.labels.size(); ++l) {
    const Label& label = settings_.labels[l];
    if (json) {
      out.append(comma ? ",\"" : "\"").append(label.name).append("\":");
      comma = true;
    } else {
      out.push_back(settings_.fields[kImpressions].delimiter);
    }
    append_number(label_value(label, uint64_t{1} << l, actions), &out);
  }
  if (json) out.push_back('}');
  out_.ends.push_back(out.size());
  ++emitted_;
}

Joiner::Samples Joiner::take() {
  Samples out = std::move(out_);
  out_ = {};
  out.first = emitted_ - static_cast<int64_t>(out.ends.size());
  return out;
}

}  // namespace shoal::join
