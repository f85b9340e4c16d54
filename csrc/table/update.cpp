// The write operations: the filter's decisions, and the batch of writes that follows from them.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "core/hash.h"
#include "core/thread_pool.h"
#include "table/contents.h"
#include "table/write.h"

namespace shoal {
namespace {

// Numbers the distinct ids among those with wanted[i] by first occurrence; group[i] is the number of ids[i].
struct Groups {
  Groups(const int64_t* ids, int64_t n, const uint8_t* wanted) : group(static_cast<size_t>(n)) {
    const int64_t asked = n - std::count(wanted, wanted + n, 0);
    const size_t mask = std::bit_ceil(static_cast<size_t>(2 * asked + 1)) - 1;
    std::vector<uint32_t> table(mask + 1, 0);  // group number + 1
    for (int64_t i = 0; i < n; ++i) {
      if (!wanted[i]) continue;
      size_t slot = hash_of(ids[i]) & mask;
      while (table[slot] && ids[first[table[slot] - 1]] != ids[i]) slot = (slot + 1) & mask;
      if (!table[slot]) {
        first.push_back(static_cast<uint32_t>(i));
        count.push_back(0);
        table[slot] = static_cast<uint32_t>(first.size());
      }
      group[i] = table[slot] - 1;
      ++count[group[i]];
    }
  }
  std::vector<uint32_t> group, first, count;
};

Gradients rows_of(const int64_t* ids, int64_t n, const float* rows, int64_t dim) {
  return {.ids = ids, .n = n, .rows = rows, .stride = dim};
}

}  // namespace

// Which positions the filter drops. Empty: none. With `dedup` the filter is asked once per id, with the number of its
// occurrences; with `remember_admitted` an admitted id stays admitted for the rest of the call.
std::vector<uint8_t> Table::filtered(const int64_t* ids, int64_t n, bool dedup, bool remember_admitted) {
  if (!filter_ || !filter_->active() || n == 0) return {};
  std::vector<uint8_t> drop(static_cast<size_t>(n));
  contains(ids, n, drop.data());
  for (auto& d : drop) d = !d;
  if (!dedup && !remember_admitted) {
    for (int64_t i = 0; i < n; ++i) drop[i] = drop[i] && filter_->should_be_filtered(ids[i], 1);
    return drop;
  }
  Groups groups(ids, n, drop.data());
  std::vector<uint8_t> out(groups.first.size());  // whether each group is dropped
  if (dedup) {
    for (size_t g = 0; g < out.size(); ++g) out[g] = filter_->should_be_filtered(ids[groups.first[g]], groups.count[g]);
    for (int64_t i = 0; i < n; ++i) drop[i] = drop[i] && out[groups.group[i]];
    return drop;
  }
  std::fill(out.begin(), out.end(), uint8_t{1});
  for (int64_t i = 0; i < n; ++i) {
    if (!drop[i]) continue;
    uint8_t& kept_out = out[groups.group[i]];
    kept_out = kept_out && filter_->should_be_filtered(ids[i], 1);
    drop[i] = kept_out;
  }
  return drop;
}

// Which gradients (or values) hold NaN or infinity. Empty: none.
std::vector<uint8_t> Table::nonfinite(const Gradients& gradients, BadGradient bad) const {
  if (bad == BadGradient::ignore) return {};
  const int64_t dim = layout_.dim, n = gradients.n;
  const bool dense = !gradients.each && !gradients.factors && !gradients.marks && gradients.stride == dim;
  std::atomic<bool> clean{true};
  if (dense) {
    parallel_for(n, std::max<int64_t>(1, 65536 / dim), [&](int64_t begin, int64_t end) {
      if (!SHOAL_DISPATCH(all_finite)(gradients.rows + begin * dim, (end - begin) * dim)) clean = false;
    });
    if (clean) return {};
  }
  std::vector<uint8_t> drop(static_cast<size_t>(n));
  parallel_for(n, std::max<int64_t>(1, 65536 / dim), [&](int64_t begin, int64_t end) {
    std::vector<float> product(static_cast<size_t>(dim));
    for (int64_t i = begin; i < end; ++i) {
      drop[i] = !SHOAL_DISPATCH(all_finite)(gradients.value(i, dim, product.data()), dim);
      if (drop[i]) clean = false;
    }
  });
  if (!dense && clean) return {};
  if (bad == BadGradient::raise) {
    const int64_t first = std::find(drop.begin(), drop.end(), 1) - drop.begin();
    throw NonFinite{first, gradients.ids[first]};
  }
  return drop;
}

void Table::update_scales(int64_t global_step) {
  for (size_t i = 0; i < layout_.segments.size(); ++i) {
    const Segment& s = layout_.segments[i];
    if (s.codec != Codec::one_bit || s.step_size <= 0 || global_step < 0 || global_step % s.step_size != 0) continue;
    double grown = s.init_scale * std::sqrt(1 + 0.005 * static_cast<double>(global_step));
    scales_[i].store(std::min(static_cast<float>(grown), s.max_scale));
  }
}

void Table::assign(const int64_t* ids, int64_t n, const float* values, Stamp time, bool finite, const float* scores) {
  write_values(Kind::assign, ids, n, values, time, finite, scores);
}

void Table::assign_add(const int64_t* ids, int64_t n, const float* values, Stamp time, bool finite,
                       const float* scores) {
  write_values(Kind::assign_add, ids, n, values, time, finite, scores);
}

void Table::write_values(Kind kind, const int64_t* ids, int64_t n, const float* values, Stamp time, bool finite,
                         const float* scores) {
  if (finite) nonfinite(rows_of(ids, n, values, layout_.dim), BadGradient::raise);
  raise_max_update_time(time.seconds);
  auto drop = filtered(ids, n, false, kind == Kind::assign_add);
  write({.kind = kind,
         .ids = ids,
         .n = n,
         .values = values,
         .time = time,
         .drop = drop.empty() ? nullptr : drop.data(),
         .scores = scores});
}

int64_t Table::apply_gradients(const int64_t* ids, int64_t n, const float* grads, const float* rates,
                               int64_t global_step, Stamp time, bool dedup, BadGradient bad, const float* scores) {
  Update update{this, rows_of(ids, n, grads, layout_.dim), rates, global_step, time, dedup, bad};
  update.scores = scores;
  apply({&update, 1});
  return update.skipped;
}

// Which gradients do not reach a row: those to skip, and those of ids that the filter drops. Empty: none.
std::vector<uint8_t> Table::dropped(const Update& update, std::vector<uint8_t> skip) {
  const Gradients& gradients = update.gradients;
  if (!has_filter()) return skip;
  if (skip.empty()) return filtered(gradients.ids, gradients.n, update.dedup, false);
  std::vector<int64_t> good;  // a skipped occurrence does not reach the filter
  for (int64_t i = 0; i < gradients.n; ++i)
    if (!skip[i]) good.push_back(gradients.ids[i]);
  const auto of_good = filtered(good.data(), static_cast<int64_t>(good.size()), update.dedup, false);
  if (!of_good.empty())
    for (int64_t i = 0, k = 0; i < gradients.n; ++i)
      if (!skip[i]) skip[i] = of_good[k++];
  return skip;
}

void Table::note_touched(const Gradients& gradients, const std::vector<uint8_t>& drop) {
  if (!touched_) return;
  if (drop.empty()) {
    touched_->insert(gradients.ids, gradients.n, touched_number_);
    return;
  }
  std::vector<int64_t> passed;
  for (int64_t i = 0; i < gradients.n; ++i)
    if (!drop[i]) passed.push_back(gradients.ids[i]);
  touched_->insert(passed.data(), static_cast<int64_t>(passed.size()), touched_number_);
}

void Table::apply(std::span<Update> updates) {
  for (const Update& u : updates) check_number(u.gradients.n);
  std::vector<std::vector<uint8_t>> drops(updates.size());
  for (size_t k = 0; k < updates.size(); ++k) {
    Update& u = updates[k];
    if (u.clean) continue;
    try {
      drops[k] = u.table->nonfinite(u.gradients, u.bad);
    } catch (NonFinite& e) {
      e.update = static_cast<int64_t>(k);
      throw;
    }
    u.skipped = std::count(drops[k].begin(), drops[k].end(), 1);
  }
  std::vector<Write> writes;
  writes.reserve(updates.size());
  for (size_t k = 0; k < updates.size(); ++k) {
    const Update& u = updates[k];
    Table& table = *u.table;
    table.raise_max_update_time(u.time.seconds);
    drops[k] = table.dropped(u, std::move(drops[k]));
    const int64_t dropped = std::count(drops[k].begin(), drops[k].end(), 1);
    if (dropped == u.gradients.n) continue;
    if (!dropped) drops[k].clear();
    table.update_scales(u.global_step);
    writes.push_back({.kind = Kind::gradients,
                      .ids = u.gradients.ids,
                      .n = u.gradients.n,
                      .time = u.time,
                      .drop = dropped ? drops[k].data() : nullptr,
                      .rates = u.rates,
                      .global_step = u.global_step,
                      .dedup = u.dedup,
                      .noise = hash_id(table.seed_ + table.calls_.fetch_add(1)),
                      .gradients = u.gradients,
                      .table = &table,
                      .scores = u.scores});
    table.begin(writes.back());
  }
  write_all(writes);
  for (size_t k = 0; k < updates.size(); ++k) updates[k].table->note_touched(updates[k].gradients, drops[k]);
}

void Table::reinitialize(const int64_t* ids, int64_t n, Stamp now, int32_t* existed) {
  write({.kind = Kind::reinitialize, .ids = ids, .n = n, .time = now, .existed = existed});
  if (touched_) touched_->insert(ids, n, touched_number_);
}

void Table::lookup_or_insert(const int64_t* ids, int64_t n, Stamp time, float* out) {
  raise_max_update_time(time.seconds);
  std::vector<uint8_t> found(static_cast<size_t>(n));
  lookup(ids, n, out, found.data());
  std::vector<int64_t> missing, where;
  for (int64_t i = 0; i < n; ++i) {
    if (found[i]) continue;
    missing.push_back(ids[i]);
    where.push_back(i);
  }
  if (missing.empty()) return;
  const int64_t m = static_cast<int64_t>(missing.size());
  auto drop = filtered(missing.data(), m, false, true);
  std::vector<float> rows(static_cast<size_t>(m) * layout_.dim, 0.0f);
  write({.kind = Kind::insert,
         .ids = missing.data(),
         .n = m,
         .time = time,
         .drop = drop.empty() ? nullptr : drop.data(),
         .out = rows.data()});
  for (int64_t i = 0; i < m; ++i)
    std::memcpy(out + where[i] * layout_.dim, &rows[static_cast<size_t>(i) * layout_.dim], 4 * size_t(layout_.dim));
}

}  // namespace shoal
