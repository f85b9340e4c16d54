#include "ops/ragged/reduce.h"

#include <algorithm>
#include <atomic>

#include "ops/common.h"
#include "ops/ragged/ragged.h"

namespace shoal::ops {
namespace {

constexpr int64_t kSmall = 1 << 14;  // elements; for fewer, a second thread does not pay

// Throws for an index outside [0, rows). Returns whether the indices never fall.
bool check_index(const int64_t* index, int64_t stride, int64_t n, int64_t rows) {
  std::atomic<bool> sorted{true};
  parallel_for(n, 1 << 16, [&](int64_t begin, int64_t end) {
    int64_t before = begin > 0 ? index[(begin - 1) * stride] : index[begin * stride];
    bool rising = true;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t at = index[i * stride];
      if (outside(at, rows)) fail_range("a segment index", at, i, rows);
      rising &= at >= before;
      before = at;
    }
    if (!rising) sorted.store(false, std::memory_order_relaxed);
  });
  return sorted.load();
}

std::unique_ptr<int64_t[]> count_index(const int64_t* index, int64_t stride, int64_t n, int64_t rows) {
  auto counts = std::make_unique<int64_t[]>(static_cast<size_t>(rows));
  for (int64_t i = 0; i < n; ++i) ++counts[index[i * stride]];
  return counts;
}

// Borders of `parts` ranges of rows with about equal numbers of elements, estimated from a sample.
std::vector<int64_t> row_bounds(const int64_t* index, int64_t stride, int64_t n, int64_t rows, int64_t parts) {
  std::vector<int64_t> sample;
  if (parts > 1) {
    constexpr int64_t kSample = 1024;
    for (int64_t k = 0; k < kSample; ++k) sample.push_back(index[n / kSample * k * stride]);
    std::sort(sample.begin(), sample.end());
  }
  std::vector<int64_t> bounds(parts + 1, 0);
  for (int64_t p = 1; p < parts; ++p) {
    bounds[p] = std::max(bounds[p - 1], sample[static_cast<int64_t>(sample.size()) * p / parts]);
  }
  bounds[parts] = rows;
  return bounds;
}

}  // namespace

template <class T>
void reduce_by_index(const T* values, const int64_t* index, int64_t stride, int64_t n, int64_t d, int64_t rows,
                     Reduce how, T* out) {
  if (rows == 0 && n == 0) return;
  advise_huge(out, rows * d * static_cast<int64_t>(sizeof(T)));
  if (n == 0) {
    std::fill_n(out, rows * d, T(0));
    return;
  }
  const bool sorted = check_index(index, stride, n, rows);
  const bool parallel = num_threads() > 1 && (n + rows) * std::max<int64_t>(d, 1) > kSmall;
  if (sorted) {
    // Pieces of the input begin at a change of row, so that a row belongs to one piece.
    const int64_t pieces = parallel ? std::min<int64_t>(4 * num_threads(), n) : 1;
    std::vector<int64_t> starts(pieces + 1);
    starts[0] = 0;
    starts[pieces] = n;
    for (int64_t p = 1; p < pieces; ++p) {
      int64_t i = std::max(starts[p - 1], n / pieces * p);
      if (i > 0 && i < n) {
        // First position whose row is larger than that of i - 1.
        const int64_t row = index[(i - 1) * stride];
        int64_t low = i, high = n;
        while (low < high) {
          const int64_t mid = low + (high - low) / 2;
          if (index[mid * stride] > row) {
            high = mid;
          } else {
            low = mid + 1;
          }
        }
        i = low;
      }
      starts[p] = i;
    }
    auto row_at = [&](int64_t i) { return i == 0 ? 0 : i == n ? rows : index[i * stride]; };
    auto body = [&](int64_t p) {
      if (starts[p] == starts[p + 1]) return;
      SHOAL_CALL(sorted_reduce, values, index, stride, starts[p], starts[p + 1], d, how, row_at(starts[p]),
                 row_at(starts[p + 1]), out);
    };
    parallel_parts(pieces, body);
    return;
  }
  const bool squares = how == Reduce::sqrtn;
  const int64_t row_bytes = d * static_cast<int64_t>(sizeof(T));
  // Every part owns a range of rows, reads all indices and adds its own elements, in input order.
  const int64_t parts = parallel ? std::min<int64_t>(num_threads(), 8) : 1;
  const std::vector<int64_t> bounds = row_bounds(index, stride, n, rows, parts);
  parallel_parts(parts, [&](int64_t part) {
    const int64_t begin = bounds[part], end = bounds[part + 1];
    std::fill(out + begin * d, out + end * d, T(0));
    SHOAL_CALL(scatter_rows, values, index, stride, n, d, begin, end, squares, out);
  });
  if (how == Reduce::sum) return;
  const auto counts = how == Reduce::mean ? count_index(index, stride, n, rows) : nullptr;
  parallel_for(rows, rows_per_piece(row_bytes),
               [&](int64_t begin, int64_t end) { SHOAL_CALL(finish_reduce, out, counts.get(), begin, end, d, how); });
}

template <class T>
void reduce_by_index_gradient(const T* grad, const int64_t* index, int64_t stride, int64_t n, int64_t d, int64_t rows,
                              Reduce how, const T* values, const T* norm, T* out) {
  check_index(index, stride, n, rows);
  advise_huge(out, n * d * static_cast<int64_t>(sizeof(T)));
  std::unique_ptr<T[]> scale;
  if (how == Reduce::mean) {
    auto counts = count_index(index, stride, n, rows);
    scale = scratch<T>(rows);
    for (int64_t r = 0; r < rows; ++r) scale[r] = counts[r] ? T(1) / static_cast<T>(counts[r]) : T(0);
  }
  parallel_for(n, rows_per_piece(d * static_cast<int64_t>(sizeof(T))), [&](int64_t begin, int64_t end) {
    SHOAL_CALL(reduce_gradient, grad, index, stride, scale.get(), values, norm, begin, end, d, how, out);
  });
}

namespace {

// The segments of all tables, cut into units of about 64 KiB of rows.
struct Unit {
  int64_t table, begin, end;
};

std::vector<Unit> split_units(const std::vector<SplitTable>& tables, int64_t segments, int64_t element_bytes) {
  std::vector<Unit> units;
  for (size_t t = 0; t < tables.size(); ++t) {
    const auto* splits = reinterpret_cast<const int64_t*>(tables[t].splits);
    check_row_ends(splits, segments, tables[t].n);
    const int64_t budget = (1 << 16) / std::max<int64_t>(1, tables[t].d * element_bytes) + 1;
    for (int64_t b = 0; b < segments;) {
      // As many segments as the budget of rows holds, at least one.
      const int64_t last = std::min(segments, b + budget);
      const int64_t e =
          std::max(b + 1, std::upper_bound(splits + b, splits + last + 1, splits[b] + budget) - splits - 1);
      units.push_back({static_cast<int64_t>(t), b, e});
      b = e;
    }
  }
  return units;
}

template <class F>
void run_units(const std::vector<Unit>& units, F&& body) {
  if (units.size() <= 2) {
    for (const Unit& unit : units) body(unit);
    return;
  }
  parallel_for(static_cast<int64_t>(units.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t u = begin; u < end; ++u) body(units[u]);
  });
}

std::vector<int64_t> first_slices(const std::vector<SplitTable>& tables) {
  std::vector<int64_t> first(tables.size() + 1, 0);
  for (size_t t = 0; t < tables.size(); ++t) first[t + 1] = first[t] + static_cast<int64_t>(tables[t].slices.size());
  return first;
}

}  // namespace

template <class T>
void reduce_and_split(const std::vector<SplitTable>& tables, int64_t segments, const std::vector<uintptr_t>& outs) {
  const auto first = first_slices(tables);
  run_units(split_units(tables, segments, sizeof(T)), [&](const Unit& unit) {
    const SplitTable& table = tables[unit.table];
    const auto* splits = reinterpret_cast<const int64_t*>(table.splits);
    check_rising(splits, unit.begin, unit.end, table.n);
    const auto* rows = reinterpret_cast<const T*>(table.rows);
    const uintptr_t* out = outs.data() + first[unit.table];
    if (table.slices.size() == 1) {
      SHOAL_CALL(segment_sum, rows, splits, unit.begin, unit.end, table.d, reinterpret_cast<T*>(out[0]));
      return;
    }
    auto sums = scratch<T>(table.d);
    for (int64_t b = unit.begin; b < unit.end; ++b) {
      SHOAL_CALL(segment_sum, rows, splits + b, int64_t{0}, int64_t{1}, table.d, sums.get());
      const T* from = sums.get();
      for (size_t j = 0; j < table.slices.size(); ++j) {
        std::copy_n(from, table.slices[j], reinterpret_cast<T*>(out[j]) + b * table.slices[j]);
        from += table.slices[j];
      }
    }
  });
}

template <class T>
void reduce_and_split_gradient(const std::vector<SplitTable>& tables, int64_t segments,
                               const std::vector<uintptr_t>& ins) {
  const auto first = first_slices(tables);
  run_units(split_units(tables, segments, sizeof(T)), [&](const Unit& unit) {
    const SplitTable& table = tables[unit.table];
    const auto* splits = reinterpret_cast<const int64_t*>(table.splits);
    check_rising(splits, unit.begin, unit.end, table.n);
    auto* rows = reinterpret_cast<T*>(table.rows);
    auto row = scratch<T>(table.d);
    for (int64_t b = unit.begin; b < unit.end; ++b) {
      T* to = row.get();
      for (size_t j = 0; j < table.slices.size(); ++j) {
        std::copy_n(reinterpret_cast<const T*>(ins[first[unit.table] + j]) + b * table.slices[j], table.slices[j], to);
        to += table.slices[j];
      }
      for (int64_t r = splits[b]; r < splits[b + 1]; ++r) std::copy_n(row.get(), table.d, rows + r * table.d);
    }
  });
}

template <class T>
void first_n(const T* values, const int64_t* splits, int64_t rows, int64_t n, int64_t d, int64_t limit, T* out) {
  check_row_splits(splits, rows, n);
  parallel_for(rows, rows_per_piece(limit * d * static_cast<int64_t>(sizeof(T))), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t kept = std::min(limit, splits[b + 1] - splits[b]);
      T* to = out + b * limit * d;
      std::copy_n(values + splits[b] * d, kept * d, to);
      std::fill(to + kept * d, to + limit * d, T(0));
    }
  });
}

template <class T>
void first_n_gradient(const T* grad, const int64_t* splits, int64_t rows, int64_t n, int64_t d, int64_t limit, T* out) {
  check_row_splits(splits, rows, n);
  parallel_for(rows, rows_per_piece(limit * d * static_cast<int64_t>(sizeof(T))), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t kept = std::min(limit, splits[b + 1] - splits[b]);
      T* to = out + splits[b] * d;
      std::copy_n(grad + b * limit * d, kept * d, to);
      std::fill(to + kept * d, out + splits[b + 1] * d, T(0));
    }
  });
}

#define SHOAL_INSTANCE(T)                                                                                             \
  template void reduce_by_index(const T*, const int64_t*, int64_t, int64_t, int64_t, int64_t, Reduce, T*);            \
  template void reduce_by_index_gradient(const T*, const int64_t*, int64_t, int64_t, int64_t, int64_t, Reduce,        \
                                         const T*, const T*, T*);                                                     \
  template void reduce_and_split<T>(const std::vector<SplitTable>&, int64_t, const std::vector<uintptr_t>&);          \
  template void reduce_and_split_gradient<T>(const std::vector<SplitTable>&, int64_t, const std::vector<uintptr_t>&); \
  template void first_n(const T*, const int64_t*, int64_t, int64_t, int64_t, int64_t, T*);                            \
  template void first_n_gradient(const T*, const int64_t*, int64_t, int64_t, int64_t, int64_t, T*);
SHOAL_INSTANCE(float)
SHOAL_INSTANCE(double)

}  // namespace shoal::ops
