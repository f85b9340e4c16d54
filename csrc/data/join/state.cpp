// Saving the joiner's memory to segments and restoring it.
#include <algorithm>
#include <stdexcept>
#include <unordered_set>

#include "data/join/joiner.h"
#include "io/error.h"

namespace shoal::join {

void Joiner::seal() {
  reap();
  if (marks_until_ <= closed_) marks_ = {}, marks_until_ = kNever;  // the marked records are due anyway
  std::vector<Due> order;
  order.reserve(in_block_.size());
  int64_t keep_until = marks_until_;
  for (const Due& one : in_block_) {
    const Record record(block_.get() + one.where);
    const Location* entry =
        index_.find(hash_of(record.key()), Location::of(record.is_action(), Location::kActive, one.where));
    if (entry == nullptr) continue;  // an action that was joined
    order.push_back(one);
    keep_until = std::max(keep_until, one.due);
    const uint16_t emitted = entry->emitted();
    std::memcpy(block_.get() + one.where + offsetof(Header, emitted), &emitted, sizeof emitted);
  }
  if (!order.empty() || !marks_.empty()) {
    std::sort(order.begin(), order.end(), [](const Due& a, const Due& b) { return b > a; });
    std::vector<const char*> records;
    records.reserve(order.size());
    for (const Due& one : order) records.push_back(block_.get() + one.where);
    std::vector<int64_t> places;
    places.reserve(order.size());
    next_segment_ += (next_segment_ & Location::kActive) == Location::kActive;
    auto made = std::make_unique<Segment>(files_.write(next_segment_, keep_until, marks_, records, &places));
    for (size_t i = 0; i < order.size(); ++i) {
      const Record record(records[i]);
      Location* entry =
          index_.find(hash_of(record.key()), Location::of(record.is_action(), Location::kActive, order[i].where));
      const bool emitted = entry->emitted();
      *entry = Location::of(record.is_action(), made->number, static_cast<uint64_t>(places[i]));
      if (emitted) *entry = entry->with_emitted();
      spilled_ += !emitted;
    }
    if (!order.empty()) {
      on_disk_.push_back({order[0].due, order[0].order, made->number});
      std::push_heap(on_disk_.begin(), on_disk_.end(), std::greater<>());
    }
    ++next_segment_;
    segments_.push_back(std::move(made));
  }
  in_block_.clear();
  if (in_block_.capacity() > (size_t{1} << 20)) in_block_.shrink_to_fit();
  marks_ = {};
  marks_until_ = kNever;
  block_used_ = 0;
}

// Forgets segments without open records. The checkpoint removes their files.
void Joiner::reap() {
  std::erase_if(segments_, [&](const std::unique_ptr<Segment>& one) {
    if (one->ended() && !one->buffer.empty()) {
      cursor_bytes_ -= static_cast<int64_t>(one->buffer.size());
      one->buffer = {};
      one->buffered = 0;
    }
    if (!one->ended() || closed_ < one->keep_until) return false;
    files_.forget(*one);
    return true;
  });
}

std::vector<const Segment*> Joiner::live() const {
  std::vector<const Segment*> out;
  for (const auto& one : segments_) out.push_back(one.get());
  return out;
}

std::map<std::string, int64_t> Joiner::state() const {
  if (pending_at_ < pending_.size() || !in_block_.empty() || !marks_.empty() || !out_.ends.empty())
    throw std::logic_error("Joiner.state: run(), take() and seal() must come first");
  std::map<std::string, int64_t> out;
  for (int c = 0; c < kCounters; ++c) out[counter_name(c)] = counters_[c];
  out["next_segment"] = static_cast<int64_t>(next_segment_);
  out["emitted"] = emitted_;
  out["closed"] = closed_;
  for (int side = 0; side < 2; ++side) {
    const std::string prefix = side == kImpressions ? "impression_" : "action_";
    out[prefix + "watermark"] = watermarks_[side];
    out[prefix + "newest"] = newest_[side];
    out[prefix + "number"] = static_cast<int64_t>(numbers_[side]);
  }
  return out;
}

void Joiner::restore(const std::map<std::string, int64_t>& state, const std::vector<uint64_t>& segments,
                     const std::array<std::string, 2>& positions) {
  if (next_segment_ != 0 || !in_block_.empty())
    throw std::logic_error("Joiner.restore: only a new joiner can be restored");
  const auto get = [&](const std::string& name) {
    const auto found = state.find(name);
    if (found == state.end()) throw DataError("the state of a joiner has no " + name);
    return found->second;
  };
  for (int c = 0; c < kCounters; ++c) counters_[c] = get(counter_name(c));
  next_segment_ = static_cast<uint64_t>(get("next_segment"));
  emitted_ = get("emitted");
  closed_ = get("closed");
  for (int side = 0; side < 2; ++side) {
    const std::string prefix = side == kImpressions ? "impression_" : "action_";
    watermarks_[side] = get(prefix + "watermark");
    newest_[side] = get(prefix + "newest");
    numbers_[side] = static_cast<uint64_t>(get(prefix + "number"));
    positions_[side] = positions[side];
  }
  std::unordered_set<uint64_t> marked;
  std::vector<uint64_t> marks;
  for (uint64_t number : segments) {
    segments_.push_back(std::make_unique<Segment>(files_.open(number, &marks)));
    marked.insert(marks.begin(), marks.end());
  }
  for (const auto& one : segments_) {
    Segment scan;
    scan.number = one->number;
    scan.path = one->path;
    scan.digest.bytes = one->digest.bytes;
    scan.next = one->begin;
    bool first = true;
    one->next = one->digest.bytes;
    while (!scan.ended()) {
      const Record record = files_.head(scan, 1 << 18);
      const int64_t at = scan.next;
      scan.next += record.header().size;
      if (record.header().due <= closed_) continue;
      if (first) {
        one->next = at;
        on_disk_.push_back({record.header().due, record.header().order, one->number});
        std::push_heap(on_disk_.begin(), on_disk_.end(), std::greater<>());
        first = false;
      }
      const Location where = Location::of(record.is_action(), one->number, static_cast<uint64_t>(at));
      const bool left = marked.contains(where.bits);
      if (record.is_action() && left) continue;
      const bool emitted = left || record.header().emitted;
      index_.insert(hash_of(record.key()), emitted && !record.is_action() ? where.with_emitted() : where);
      if (record.is_action() || !emitted) {
        ++open_[record.is_action() ? kActions : kImpressions];
        ++spilled_;
      }
      check_budget();
    }
  }
  reap();
}

int64_t Joiner::drop_segment(uint64_t number) {
  Segment& lost = segment(number);
  const uint64_t low = number & Location::kActive;
  int64_t impressions = 0, actions = 0;
  index_.erase_if([&](Location at) {
    if (at.segment() != low) return false;
    if (!at.emitted()) ++(at.action() ? actions : impressions);
    return true;
  });
  open_[kImpressions] -= impressions;
  open_[kActions] -= actions;
  spilled_ -= impressions + actions;
  counters_[kLostRecords] += impressions + actions;
  std::erase_if(on_disk_, [&](const Due& one) { return one.where == lost.number; });
  std::make_heap(on_disk_.begin(), on_disk_.end(), std::greater<>());
  lost.next = lost.digest.bytes;
  reap();
  return impressions + actions;
}

int64_t Joiner::memory() const {
  return index_.bytes() + static_cast<int64_t>(block_touched_) + cursor_bytes_ +
         static_cast<int64_t>((in_block_.capacity() + on_disk_.capacity()) * sizeof(Due)) +
         static_cast<int64_t>(marks_.capacity() * 8 + pending_.capacity() + read_.capacity() + out_.bytes.capacity()) +
         static_cast<int64_t>(segments_.size() * (sizeof(Segment) + 64));
}

void Joiner::check_budget() {
  if (index_.bytes() <= settings_.budget / 10 * 7) return;
  throw std::length_error("the keys of " + std::to_string(index_.size()) + " open records need " +
                          std::to_string(index_.bytes() >> 20) + " MiB, more than 70 % of the memory budget of " +
                          std::to_string(settings_.budget >> 20) +
                          " MiB; raise the budget or shorten the window and run it again. Nothing is lost");
}

}  // namespace shoal::join
