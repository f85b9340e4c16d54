#include "sharded/snapshot.h"

#include <cstring>
#include <stdexcept>

namespace shoal {
namespace {

void append_row(const Rows& from, int64_t i, int32_t stride, Rows* to) {
  to->ids.push_back(from.ids[i]);
  to->times.push_back(from.times[i]);
  if (!from.scores.empty()) to->scores.push_back(from.scores[i]);
  const char* row = from.rows.data() + i * stride;
  to->rows.insert(to->rows.end(), row, row + stride);
}

void move_row(Rows* rows, int64_t from, int64_t to, int32_t stride) {
  rows->ids[to] = rows->ids[from];
  rows->times[to] = rows->times[from];
  if (!rows->scores.empty()) rows->scores[to] = rows->scores[from];
  std::memcpy(rows->rows.data() + to * stride, rows->rows.data() + from * stride, static_cast<size_t>(stride));
}

}  // namespace

Snapshot::Snapshot(Table& table) : table_(table) {
  if (table_.eviction()) table_.set_keeper(this);
}

Snapshot::~Snapshot() {
  if (table_.eviction()) table_.drop_keeper(this);
}

void Snapshot::before_write(const int64_t* ids, int64_t n) {
  const std::lock_guard lock(mutex_);
  std::vector<int64_t> fresh;
  for (int64_t i = 0; i < n; ++i) {
    Kept& kept = kept_[Table::stripe_of_id(ids[i])];
    const std::lock_guard of_stripe(kept.mutex);
    if (!kept.taken && kept.ids.try_emplace(ids[i], false).second) fresh.push_back(ids[i]);
  }
  if (fresh.empty()) return;
  Rows rows;
  std::vector<uint8_t> found(fresh.size());
  table_.fetch(fresh.data(), static_cast<int64_t>(fresh.size()), &rows, found.data());
  for (int64_t i = 0; i < rows.size(); ++i) {
    Kept& kept = kept_[Table::stripe_of_id(rows.ids[i])];
    const std::lock_guard of_stripe(kept.mutex);
    kept.ids[rows.ids[i]] = true;
    append_row(rows, i, table_.layout().stride, &kept.rows);
  }
}

// An id that is known here is kept already, or had no row at the moment of this snapshot.
void Snapshot::leaving(int stripe, int64_t id, uint32_t time, uint64_t score, const char* row) {
  Kept& kept = kept_[stripe];
  const std::lock_guard lock(kept.mutex);
  if (kept.taken || !kept.ids.try_emplace(id, true).second) return;
  kept.rows.add(id, time, score, row, table_.layout().stride);
}

void Snapshot::take(int stripe, Rows* out) {
  std::unordered_map<int64_t, bool> ids;
  Rows rows;
  {
    const std::lock_guard lock(mutex_);  // between two writes, so that exactly the changed rows are kept
    table_.snapshot(stripe, 0, out);
    Kept& kept = kept_[stripe];
    const std::lock_guard of_stripe(kept.mutex);
    std::swap(ids, kept.ids);
    std::swap(rows, kept.rows);
    kept.taken = true;
  }
  if (ids.empty()) return;
  const int32_t stride = table_.layout().stride;
  int64_t left = 0;
  for (int64_t i = 0; i < out->size(); ++i) {
    if (ids.contains(out->ids[i])) continue;
    if (left != i) move_row(out, i, left, stride);
    ++left;
  }
  out->ids.resize(left);
  out->times.resize(left);
  if (!out->scores.empty()) out->scores.resize(left);
  out->rows.resize(left * static_cast<size_t>(stride));
  for (int64_t i = 0; i < rows.size(); ++i) append_row(rows, i, stride, out);
}

std::vector<SavedShard> Snapshot::save(const SaveTarget& target, Progress* progress) {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(begun_, true)) throw std::invalid_argument("a snapshot must be saved only once");
  }
  const auto take_stripe = [this](int stripe, Rows* out) { take(stripe, out); };
  return shoal::save({{&table_, nullptr, 0, take_stripe}}, target, progress);
}

int64_t Snapshot::kept() const {
  int64_t rows = 0;
  for (const Kept& kept : kept_) {
    const std::lock_guard lock(kept.mutex);
    rows += kept.rows.size();
  }
  return rows;
}

}  // namespace shoal
