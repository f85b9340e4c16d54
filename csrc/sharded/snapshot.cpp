#include "sharded/snapshot.h"

#include <cstring>
#include <stdexcept>

namespace shoal {
namespace {

void append_row(const Rows& from, int64_t i, int32_t stride, Rows* to) {
  to->ids.push_back(from.ids[i]);
  to->times.push_back(from.times[i]);
  const char* row = from.rows.data() + i * stride;
  to->rows.insert(to->rows.end(), row, row + stride);
}

void move_row(Rows* rows, int64_t from, int64_t to, int32_t stride) {
  rows->ids[to] = rows->ids[from];
  rows->times[to] = rows->times[from];
  std::memcpy(rows->rows.data() + to * stride, rows->rows.data() + from * stride, static_cast<size_t>(stride));
}

}  // namespace

void Snapshot::before_write(const int64_t* ids, int64_t n) {
  const std::lock_guard lock(mutex_);
  if (taken_ == ~uint64_t{0}) return;
  std::vector<int64_t> fresh;
  for (int64_t i = 0; i < n; ++i) {
    const int stripe = Table::stripe_of_id(ids[i]);
    if (taken_ >> stripe & 1) continue;
    if (kept_[stripe].ids.try_emplace(ids[i], false).second) fresh.push_back(ids[i]);
  }
  if (fresh.empty()) return;
  Rows rows;
  std::vector<uint8_t> found(fresh.size());
  table_.fetch(fresh.data(), static_cast<int64_t>(fresh.size()), &rows, found.data());
  for (int64_t i = 0; i < rows.size(); ++i) {
    Kept& kept = kept_[Table::stripe_of_id(rows.ids[i])];
    kept.ids[rows.ids[i]] = true;
    append_row(rows, i, table_.layout().stride, &kept.rows);
  }
}

void Snapshot::take(int stripe, Rows* out) {
  Kept kept;
  {
    const std::lock_guard lock(mutex_);  // between two writes, so what was put aside is what has changed
    table_.snapshot(stripe, 0, out);
    std::swap(kept, kept_[stripe]);
    taken_ |= uint64_t{1} << stripe;
  }
  if (kept.ids.empty()) return;
  const int32_t stride = table_.layout().stride;
  int64_t left = 0;
  for (int64_t i = 0; i < out->size(); ++i) {
    if (kept.ids.contains(out->ids[i])) continue;
    if (left != i) move_row(out, i, left, stride);
    ++left;
  }
  out->ids.resize(left);
  out->times.resize(left);
  out->rows.resize(left * static_cast<size_t>(stride));
  for (int64_t i = 0; i < kept.rows.size(); ++i) append_row(kept.rows, i, stride, out);
}

std::vector<SavedShard> Snapshot::save(const SaveTarget& target, Progress* progress) {
  {
    const std::lock_guard lock(mutex_);
    if (taken_) throw std::invalid_argument("a snapshot must be saved only once");
  }
  const auto take_stripe = [this](int stripe, Rows* out) { take(stripe, out); };
  return shoal::save({{&table_, nullptr, 0, take_stripe}}, target, progress);
}

int64_t Snapshot::kept() const {
  const std::lock_guard lock(mutex_);
  int64_t rows = 0;
  for (const Kept& kept : kept_) rows += kept.rows.size();
  return rows;
}

}  // namespace shoal
