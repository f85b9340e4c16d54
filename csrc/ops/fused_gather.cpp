#include "ops/fused_gather.h"

#include <algorithm>
#include <limits>
#include <type_traits>

#include "ops/common.h"
#include "ops/ragged/sum.h"

namespace shoal::ops {
namespace {

constexpr int64_t kCached = 512 << 10;  // bytes; a smaller buffer stays in the second-level cache

template <class Offset>
void check_offsets(const OffsetTable& table, int64_t begin, int64_t end, int64_t size) {
  const auto* offsets = reinterpret_cast<const Offset*>(table.offsets);
  // One pass that vectorises; a second pass looks for the bad offset only if there is one.
  using Unsigned = std::make_unsigned_t<Offset>;
  if (table.width <= size) {
    const auto last = static_cast<Unsigned>(std::min<int64_t>(size - table.width, std::numeric_limits<Offset>::max()));
    Unsigned bad = 0;
    for (int64_t j = begin; j < end; ++j) bad |= static_cast<Unsigned>(static_cast<Unsigned>(offsets[j]) > last);
    if (!bad) return;
  }
  for (int64_t j = begin; j < end; ++j) {
    if (offsets[j] < 0 || table.width > size - offsets[j]) {
      fail("offset " + std::to_string(offsets[j]) + " (row " + std::to_string(j) + ") + width " +
           std::to_string(table.width) + " is outside the buffer of " + std::to_string(size) + " floats");
    }
  }
}

void check_offsets_of(const OffsetTable& table, int64_t begin, int64_t end, int64_t size) {
  if (table.wide) {
    check_offsets<int64_t>(table, begin, end, size);
  } else {
    check_offsets<int32_t>(table, begin, end, size);
  }
}

// body(table, begin, end) over pieces of all tables' rows.
template <class F>
void each_piece(const std::vector<OffsetTable>& tables, int64_t element_bytes, F&& body) {
  struct Piece {
    size_t table;
    int64_t begin, end;
  };
  std::vector<Piece> pieces;
  int64_t bytes = 0;
  for (size_t t = 0; t < tables.size(); ++t) {
    const int64_t row_bytes = tables[t].width * element_bytes + 8;
    const int64_t step = std::max<int64_t>(1, (int64_t{256} << 10) / row_bytes);
    for (int64_t j = 0; j < tables[t].n; j += step) pieces.push_back({t, j, std::min(tables[t].n, j + step)});
    bytes += tables[t].n * row_bytes;
  }
  auto one = [&](int64_t p) { body(tables[pieces[p].table], pieces[p].begin, pieces[p].end); };
  if (bytes < 128 << 10) {
    for (size_t p = 0; p < pieces.size(); ++p) one(static_cast<int64_t>(p));
  } else {
    parallel_parts(static_cast<int64_t>(pieces.size()), one);
  }
}

template <class Offset>
void gather_piece(const char* buffer, int64_t size, int64_t element_bytes, const OffsetTable& table, int64_t begin,
                  int64_t end) {
  check_offsets<Offset>(table, begin, end, size);
  const auto* offsets = reinterpret_cast<const Offset*>(table.offsets);
  const int64_t row_bytes = table.width * element_bytes;
  char* rows = reinterpret_cast<char*>(table.rows);
  with_row_copy(row_bytes, [&](auto copy) {
    int64_t j = begin;
    if (size * element_bytes > kCached) {
      for (; j + 8 < end; ++j) {
        __builtin_prefetch(buffer + offsets[j + 8] * element_bytes);
        copy(rows + j * row_bytes, buffer + offsets[j] * element_bytes);
      }
    }
    for (; j < end; ++j) copy(rows + j * row_bytes, buffer + offsets[j] * element_bytes);
  });
}

}  // namespace

void fused_gather(const char* buffer, int64_t size, int64_t element_bytes, const std::vector<OffsetTable>& tables) {
  for (const OffsetTable& table : tables) {
    advise_huge(reinterpret_cast<void*>(table.rows), table.n * table.width * element_bytes);
  }
  each_piece(tables, element_bytes, [&](const OffsetTable& table, int64_t begin, int64_t end) {
    if (table.wide) {
      gather_piece<int64_t>(buffer, size, element_bytes, table, begin, end);
    } else {
      gather_piece<int32_t>(buffer, size, element_bytes, table, begin, end);
    }
  });
}

namespace {

template <class T>
void add_rows(const OffsetTable& table, T scale, int64_t lo, int64_t hi, bool whole, T* out) {
  const auto* rows = reinterpret_cast<const T*>(table.rows);
  if (table.wide) {
    SHOAL_CALL(scatter_floats, rows, reinterpret_cast<const int64_t*>(table.offsets), table.n, table.width, scale, lo,
               hi, whole, out);
  } else {
    SHOAL_CALL(scatter_floats, rows, reinterpret_cast<const int32_t*>(table.offsets), table.n, table.width, scale, lo,
               hi, whole, out);
  }
}

}  // namespace

template <class T>
void fused_gather_gradient(T* out, int64_t size, T scale, const std::vector<OffsetTable>& tables) {
  each_piece(tables, sizeof(T),
             [&](const OffsetTable& table, int64_t begin, int64_t end) { check_offsets_of(table, begin, end, size); });
  int64_t floats = 0, total = 0;
  for (const OffsetTable& table : tables) {
    floats += table.n * table.width;
    total += table.n;
  }
  // Each part owns a range of the buffer, scans all offsets and adds the floats in its range: every float is summed by
  // one thread, tables and rows in order.
  const int64_t parts = floats < 1 << 16 || size < 64 ? 1 : std::min<int64_t>(num_threads(), 8);
  std::vector<int64_t> bounds(parts + 1, 0);
  bounds[parts] = size;
  if (parts > 1) {
    std::vector<int64_t> sample;
    for (const OffsetTable& table : tables) {
      const int64_t wanted = table.n * 1024 / total + 1;
      for (int64_t k = 0; k < std::min(wanted, table.n); ++k) {
        const int64_t at = table.n / std::min(wanted, table.n) * k;
        sample.push_back(table.wide ? reinterpret_cast<const int64_t*>(table.offsets)[at]
                                    : reinterpret_cast<const int32_t*>(table.offsets)[at]);
      }
    }
    std::sort(sample.begin(), sample.end());
    for (int64_t p = 1; p < parts; ++p) bounds[p] = sample[static_cast<int64_t>(sample.size()) * p / parts];
  }
  auto body = [&](int64_t p) {
    if (bounds[p] == bounds[p + 1]) return;
    std::fill(out + bounds[p], out + bounds[p + 1], T(0));
    for (const OffsetTable& table : tables) add_rows<T>(table, scale, bounds[p], bounds[p + 1], parts == 1, out);
  };
  parallel_parts(parts, body);
}

template void fused_gather_gradient(float*, int64_t, float, const std::vector<OffsetTable>&);
template void fused_gather_gradient(double*, int64_t, double, const std::vector<OffsetTable>&);

}  // namespace shoal::ops
