#include "data/join/joiner.h"

#include <algorithm>
#include <stdexcept>

#include "core/hash.h"
#include "data/text_hash.h"
#include "io/error.h"

namespace shoal::join {

namespace {

constexpr uint64_t kActionBit = uint64_t{1} << 63;
constexpr int64_t kLargestBlock = int64_t{64} << 20;
constexpr size_t kMarks = size_t{1} << 20;

const char* const kNames[] = {"impressions",           "actions",           "positives",          "negatives",
                              "negatives_dropped",     "joined_actions",    "late_impressions",   "late_actions",
                              "duplicate_impressions", "duplicate_actions", "unmatched_actions",  "actions_after_close",
                              "excess_actions",        "ignored_actions",   "broken_impressions", "broken_actions",
                              "lost_records"};
static_assert(std::size(kNames) == kCounters);

size_t size_at(const std::vector<char>& records, size_t at) {
  uint32_t size;
  std::memcpy(&size, records.data() + at, 4);
  return size;
}

}  // namespace

const char* counter_name(int counter) { return kNames[counter]; }

Joiner::Joiner(Settings settings, std::string folder) : settings_(std::move(settings)), files_(std::move(folder)) {
  if (settings_.labels.empty() || settings_.labels.size() > 64)
    throw std::invalid_argument("a joiner must have 1..64 labels, got " + std::to_string(settings_.labels.size()));
  block_size_ = static_cast<size_t>(
      settings_.block > 0 ? settings_.block : std::clamp<int64_t>(settings_.budget / 8, 4096, kLargestBlock));
  block_ = std::make_unique_for_overwrite<char[]>(block_size_);
  std::fill_n(watermarks_, 2, kNever);
  std::fill_n(newest_, 2, kNever);
  closed_ = kNever;
}

uint64_t Joiner::hash_of(std::string_view key) const { return hash_id(hash_text(key) ^ settings_.salt); }

// --- input -----------------------------------------------------------------------------------------------------------

std::vector<Broken> Joiner::read(int side, const std::vector<std::string_view>& messages, int64_t latest) {
  std::vector<Broken> broken;
  Message message;
  std::string why;
  Arrival& arrival = read_arrival_ = {};
  arrival.side = side;
  read_.clear();
  const Fields& fields = settings_.fields[side];
  for (size_t i = 0; i < messages.size(); ++i) {
    const bool good = read_message(fields, messages[i], &message, &why);
    if (good && message.time > latest) why = "has a time that is too far in the future";
    Action action{0, message.value, 0};
    Header header{};
    header.due = message.time + settings_.window;
    std::string_view body = message.payload;
    bool needs_value = false;
    if (good && side == kActions) {
      header.due += settings_.before;
      header.order = kActionBit;
      body = message.kind;
      for (size_t l = 0; l < settings_.labels.size(); ++l) {
        const Label& label = settings_.labels[l];
        const bool counts =
            label.kinds.empty() || std::find(label.kinds.begin(), label.kinds.end(), message.kind) != label.kinds.end();
        if (!counts) continue;
        action.mask |= uint64_t{1} << l;
        needs_value = needs_value || label.rule > Rule::count;
      }
      if (needs_value && !message.has_value) why = "has no value, which a label needs";
    }
    const size_t size = Record::bytes(side == kActions, message.key.size(), body.size());
    if (good && size > kMaxRecord) why = "has more than 64 MiB";
    if (!good || !why.empty()) {
      broken.push_back({static_cast<int64_t>(i), why});
      why.clear();
      continue;
    }
    header.size = static_cast<uint32_t>(size);
    header.key = static_cast<uint16_t>(message.key.size());
    header.body = static_cast<uint32_t>(body.size());
    read_.resize(read_.size() + size);
    write_record(read_.data() + read_.size() - size, header, side == kActions ? &action : nullptr, message.key, body);
    if (side == kImpressions && fields.coding == Coding::json) {  // a sample is one line
      char* text = read_.data() + read_.size() - size + sizeof(Header) + header.key;
      if (std::memchr(text, '\n', body.size()) != nullptr || std::memchr(text, '\r', body.size()) != nullptr)
        std::replace_if(text, text + body.size(), [](char c) { return c == '\n' || c == '\r'; }, ' ');
    }
    ++arrival.records;
  }
  arrival.broken = static_cast<uint32_t>(broken.size());
  return broken;
}

void Joiner::accept(std::string_view position) {
  if (pending_at_ < pending_.size()) throw std::logic_error("Joiner.accept: run() must end first");
  tail_.append(read_arrival_, position, {read_.data(), read_.size()});
  pending_.swap(read_);
  begin(read_arrival_, position);
  read_.clear();
  if (read_.capacity() > (size_t{8} << 20)) read_ = {};
  read_arrival_ = {};
}

void Joiner::advance(int side, int64_t watermark, std::string_view position) {
  if (pending_at_ < pending_.size()) throw std::logic_error("Joiner.advance: run() must end first");
  Arrival arrival;
  arrival.side = side;
  arrival.advance = 1;
  arrival.watermark = std::min(watermark, kForever);
  pending_.clear();
  pending_at_ = 0;
  tail_.append(arrival, position, {});
  begin(arrival, position);
}

void Joiner::begin(const Arrival& arrival, std::string_view position) {
  pending_side_ = arrival.side;
  pending_at_ = pending_ahead_ = hashed_ = joined_ = 0;
  positions_[arrival.side] = position;
  counters_[arrival.side == kImpressions ? kBrokenImpressions : kBrokenActions] += arrival.broken;
  if (arrival.advance) {
    watermarks_[arrival.side] = std::max(watermarks_[arrival.side], arrival.watermark);
    closed_ = std::max(closed_, std::min(watermarks_[0], watermarks_[1]));
  }
}

int64_t Joiner::replay(const std::string& path, int64_t bytes, const std::function<void()>& each, int64_t* torn) {
  return read_tail(
      path,
      [&](const Arrival& arrival, std::string_view position, std::string_view records) {
        pending_.assign(records.begin(), records.end());
        for (size_t at = 0, count = 0; at < pending_.size() || count < arrival.records; ++count) {
          const size_t left = pending_.size() - at;
          const bool fits = left >= sizeof(Header) && size_at(pending_, at) <= left && size_at(pending_, at) > 0;
          if (!fits || !Record(pending_.data() + at).consistent())
            throw DataError("tail " + path + " is damaged: the sizes of a record do not match");
          at += size_at(pending_, at);
        }
        begin(arrival, position);
        while (run(bytes)) each();
      },
      torn);
}

// --- joining ---------------------------------------------------------------------------------------------------------

bool Joiner::run(int64_t bytes) {
  check_budget();
  while (true) {
    if (close_due(bytes)) return true;
    if (pending_at_ >= pending_.size()) break;
    if (static_cast<int64_t>(out_.bytes.size()) >= bytes) return true;
    while (hashed_ - joined_ < kAhead && pending_ahead_ < pending_.size()) {
      const Record ahead(pending_.data() + pending_ahead_);
      hashes_[hashed_ % kAhead] = hash_of(ahead.key());
      index_.prefetch(hashes_[hashed_++ % kAhead]);
      pending_ahead_ += ahead.header().size;
    }
    char* record = pending_.data() + pending_at_;
    const size_t size = size_at(pending_, pending_at_);
    const uint64_t hash = hashes_[joined_ % kAhead];
    if (pending_side_ == kImpressions) {
      impression(record, hash);
    } else {
      action(record, hash);
    }
    pending_at_ += size;
    ++joined_;
    closed_ = std::max(closed_, std::min(watermarks_[0], watermarks_[1]));
  }
  pending_.clear();
  pending_at_ = pending_ahead_ = hashed_ = joined_ = 0;
  if (pending_.capacity() > (size_t{8} << 20)) pending_ = {};
  return static_cast<int64_t>(out_.bytes.size()) >= bytes;
}

void Joiner::impression(char* record, uint64_t hash) {
  const Record given(record);
  const int64_t due = given.header().due, time = due - settings_.window;
  if (due <= watermarks_[kImpressions]) {
    ++counters_[kImpressionsRead];
    ++counters_[kLateImpressions];
    return;
  }
  bool twice = false;
  index_.find(hash, [&](Location at) {
    if (twice || at.action()) return;
    const Record other = record_at(at, &scratch_);
    twice = other.header().due > watermarks_[kImpressions] && other.key() == given.key();
  });
  if (!twice) {
    make_room(given.header().size);  // first, since it may move waiting actions
    std::vector<Waiting> waiting;
    if (settings_.close_on_action) waiting = eligible(given, hash);
    const uint64_t order = numbers_[kImpressions];
    std::memcpy(record + offsetof(Header, order), &order, sizeof order);
    const Location at = place(given, hash);
    ++numbers_[kImpressions];
    ++open_[kImpressions];
    const auto first = std::find_if(waiting.begin(), waiting.end(), [](const Waiting& w) { return w.mask & 1; });
    if (first != waiting.end()) {
      consume(hash, first->at, first->due);
      const Waiting chosen = std::move(*first);
      waiting.erase(first);
      emit_now(given, at, hash, chosen, waiting);
    }
  }
  ++counters_[kImpressionsRead];
  counters_[kDuplicateImpressions] += twice;
  raise(kImpressions, time);
}

void Joiner::action(char* record, uint64_t hash) {
  const Record given(record);
  const int64_t due = given.header().due, time = time_of(given), watermark = watermarks_[kActions];
  const uint64_t mask = given.action().mask;
  if (due <= watermark || mask == 0) {
    ++counters_[kActionsRead];
    ++counters_[mask == 0 ? kIgnoredActions : kLateActions];
    if (due > watermark) raise(kActions, time);
    return;
  }
  std::memcpy(record + sizeof(Header) + offsetof(Action, watermark), &watermark, sizeof watermark);
  bool done = false;
  if (settings_.close_on_action) {
    // Of the impressions in whose windows the action is, the one whose window ends first.
    Location found{};
    Header chosen{};
    bool any = false;
    index_.find(hash, [&](Location at) {
      if (at.action()) return;
      const Record other = record_at(at, &scratch_);
      const int64_t shown = time_of(other);
      if (other.header().due <= watermark || time < shown - settings_.before || time > other.header().due ||
          other.key() != given.key())
        return;
      const Header& header = other.header();
      if (any && (header.due > chosen.due || (header.due == chosen.due && header.order > chosen.order))) return;
      any = true, found = at, chosen = header;
    });
    if (any && found.emitted()) {
      ++counters_[kActionsAfter];
      done = true;
    } else if (any && (mask & 1) != 0) {
      const Record impression = record_at(found, &impression_scratch_);
      const std::vector<Waiting> others = eligible(impression, hash);
      const Waiting own{numbers_[kActions], time, given.action().value, mask, {}, due, std::string(given.body())};
      emit_now(impression, found, hash, own, others);
      ++numbers_[kActions];
      done = true;
    }
  }
  if (!done) {
    int64_t held = 0;
    index_.find(hash, [&](Location at) { held += at.action(); });
    if (held >= settings_.max_actions) {
      ++counters_[kExcessActions];
    } else {
      const uint64_t order = kActionBit | numbers_[kActions];
      std::memcpy(record + offsetof(Header, order), &order, sizeof order);
      make_room(given.header().size);
      place(given, hash);
      ++numbers_[kActions];
      ++open_[kActions];
    }
  }
  ++counters_[kActionsRead];
  raise(kActions, time);
}

void Joiner::raise(int side, int64_t time) {
  newest_[side] = std::max(newest_[side], time);
  watermarks_[side] = std::max(watermarks_[side], time - settings_.lateness[side]);
}

void Joiner::make_room(size_t size) {
  if (block_used_ + size > block_size_ || marks_.size() > kMarks) {
    if (!in_block_.empty()) seal();
    block_used_ = 0;
    if (size > block_size_) {
      block_ = std::make_unique_for_overwrite<char[]>(size);
      block_size_ = block_touched_ = size;
    }
  }
}

// Copies a record to the block in memory and to the index.
Location Joiner::place(const Record& record, uint64_t hash) {
  const size_t size = record.header().size;
  const Location at = Location::of(record.is_action(), Location::kActive, block_used_);
  std::memcpy(block_.get() + block_used_, record.data(), size);
  index_.insert(hash, at);
  in_block_.push_back({record.header().due, record.header().order, block_used_});
  std::push_heap(in_block_.begin(), in_block_.end(), std::greater<>());
  block_used_ += size;
  block_touched_ = std::max(block_touched_, block_used_);
  return at;
}

Segment& Joiner::segment(uint64_t number) {
  // A location has only the lower bits of a number; segments that exist at the same time differ in them.
  if (!segments_.empty()) {
    const uint64_t base = segments_.front()->number;
    number = base + ((number - base) & Location::kActive);
    const auto found = std::lower_bound(segments_.begin(), segments_.end(), number,
                                        [](const auto& one, uint64_t n) { return one->number < n; });
    if (found != segments_.end() && (*found)->number == number) return **found;
  }
  throw std::logic_error("the joiner's index refers to segment " + std::to_string(number) + ", which does not exist");
}

Record Joiner::record_at(Location at, std::vector<char>* scratch) {
  if (at.segment() == Location::kActive) return Record(block_.get() + at.offset());
  return files_.read(segment(at.segment()), static_cast<int64_t>(at.offset()), scratch);
}

// The actions that wait for this impression, in order of arrival.
std::vector<Joiner::Waiting> Joiner::eligible(const Record& impression, uint64_t hash) {
  std::vector<Waiting> out;
  const int64_t due = impression.header().due, shown = due - settings_.window;
  index_.find(hash, [&](Location at) {
    if (!at.action()) return;
    const Record record = record_at(at, &scratch_);
    const int64_t time = time_of(record);
    const Action& action = record.action();
    if (time < shown - settings_.before || time > due || action.watermark >= due || record.key() != impression.key())
      return;
    out.push_back(
        {record.number(), time, action.value, action.mask, at, record.header().due, std::string(record.body())});
  });
  std::sort(out.begin(), out.end(), [](const Waiting& a, const Waiting& b) { return a.number < b.number; });
  return out;
}

void Joiner::mark(Location at, int64_t due) {
  if (at.segment() == Location::kActive) return;
  marks_.push_back(at.plain().bits);
  marks_until_ = std::max(marks_until_, due);
  --spilled_;
}

void Joiner::consume(uint64_t hash, Location at, int64_t due) {
  index_.erase(hash, at);
  --open_[kActions];
  mark(at, due);
}

// The window is closed by its first action. Other waiting actions are too late for it.
void Joiner::emit_now(const Record& impression, Location at, uint64_t hash, const Waiting& action,
                      const std::vector<Waiting>& others) {
  emit(impression, {action});
  for (const Waiting& other : others) consume(hash, other.at, other.due);
  counters_[kActionsAfter] += static_cast<int64_t>(others.size());
  Location* entry = index_.find(hash, at);
  *entry = entry->with_emitted();
  mark(at, impression.header().due);
  --open_[kImpressions];
}

}  // namespace shoal::join
