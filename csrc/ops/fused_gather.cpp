#include "ops/fused_gather.h"

#include <algorithm>

#include "ops/common.h"
#include "ops/sum.h"

namespace shoal::ops {
namespace {

template <class Offset>
void check_offsets(const OffsetTable& table, int64_t begin, int64_t end, int64_t size) {
  const auto* offsets = reinterpret_cast<const Offset*>(table.offsets);
  for (int64_t j = begin; j < end; ++j) {
    if (offsets[j] < 0 || table.width > size - offsets[j]) {
      fail("offset " + std::to_string(offsets[j]) + " (row " + std::to_string(j) + ") + width " +
           std::to_string(table.width) + " lies outside the buffer of " + std::to_string(size) + " floats");
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
    for (int64_t j = begin; j < end; ++j) {
      __builtin_prefetch(buffer + offsets[std::min(j + 8, end - 1)] * element_bytes);
      copy(rows + j * row_bytes, buffer + offsets[j] * element_bytes);
    }
  });
}

}  // namespace

void fused_gather(const char* buffer, int64_t size, int64_t element_bytes, const std::vector<OffsetTable>& tables) {
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
void add_rows(const OffsetTable& table, const int64_t* list, int64_t n, T scale, int64_t lo, int64_t hi, T* out) {
  const auto* rows = reinterpret_cast<const T*>(table.rows);
  if (table.wide) {
    SHOAL_CALL(scatter_floats, rows, reinterpret_cast<const int64_t*>(table.offsets), list, n, table.width, scale, lo,
               hi, out);
  } else {
    SHOAL_CALL(scatter_floats, rows, reinterpret_cast<const int32_t*>(table.offsets), list, n, table.width, scale, lo,
               hi, out);
  }
}

}  // namespace

template <class T>
void fused_gather_gradient(T* out, int64_t size, T scale, const std::vector<OffsetTable>& tables) {
  each_piece(tables, sizeof(T),
             [&](const OffsetTable& table, int64_t begin, int64_t end) { check_offsets_of(table, begin, end, size); });
  int64_t floats = 0, total = 0, widest = 0;
  for (const OffsetTable& table : tables) {
    floats += table.n * table.width;
    total += table.n;
    widest = std::max(widest, table.width);
  }
  const int threads = num_threads();
  if (threads == 1 || floats < 1 << 16 || size < 64 * threads) {
    std::fill_n(out, size, T(0));
    for (const OffsetTable& table : tables) {
      add_rows<T>(table, nullptr, table.n, scale, 0, size, out);
    }
    return;
  }
  // Each bucket owns a range of the buffer. A row that crosses a border is listed in both and clipped, so every float
  // is summed by one thread, tables and rows in order.
  const int64_t wanted = std::clamp<int64_t>(size * static_cast<int64_t>(sizeof(T)) >> 18, 4 * threads, 512);
  int shift = 4;
  while ((size - 1) >> shift >= wanted) ++shift;
  const int64_t buckets = ((size - 1) >> shift) + 1;
  struct Piece {
    size_t table;
    int64_t begin, end;
  };
  std::vector<Piece> pieces;
  for (size_t t = 0; t < tables.size(); ++t) {
    const int64_t step = std::max<int64_t>(1 << 14, total / 256);
    for (int64_t j = 0; j < tables[t].n; j += step) pieces.push_back({t, j, std::min(tables[t].n, j + step)});
  }
  const int64_t count = static_cast<int64_t>(pieces.size());
  auto histogram = std::make_unique<int64_t[]>(static_cast<size_t>(count * buckets));
  auto visit = [&](int64_t p, auto&& f) {
    const OffsetTable& table = tables[pieces[p].table];
    if (table.width == 0) return;
    auto each = [&](const auto* offsets) {
      for (int64_t j = pieces[p].begin; j < pieces[p].end; ++j) {
        const int64_t first = offsets[j] >> shift, last = (offsets[j] + table.width - 1) >> shift;
        for (int64_t b = first; b <= last; ++b) f(b, j);
      }
    };
    if (table.wide) {
      each(reinterpret_cast<const int64_t*>(table.offsets));
    } else {
      each(reinterpret_cast<const int32_t*>(table.offsets));
    }
  };
  parallel_parts(count, [&](int64_t p) { visit(p, [&](int64_t b, int64_t) { ++histogram[p * buckets + b]; }); });
  // Bucket-major, then pieces: pieces of one table are neighbours, so a bucket's list falls into one run per table.
  auto starts = scratch<int64_t>(count * buckets + 1);
  int64_t listed = 0;
  for (int64_t b = 0; b < buckets; ++b) {
    for (int64_t p = 0; p < count; ++p) {
      starts[b * count + p] = listed;
      listed += histogram[p * buckets + b];
      histogram[p * buckets + b] = starts[b * count + p];
    }
  }
  starts[count * buckets] = listed;
  auto list = scratch<int64_t>(listed);
  parallel_parts(count,
                 [&](int64_t p) { visit(p, [&](int64_t b, int64_t j) { list[histogram[p * buckets + b]++] = j; }); });
  parallel_parts(buckets, [&](int64_t b) {
    const int64_t lo = b << shift, hi = std::min(size, (b + 1) << shift);
    std::fill(out + lo, out + hi, T(0));
    for (int64_t p = 0; p < count;) {
      int64_t e = p + 1;
      while (e < count && pieces[e].table == pieces[p].table) ++e;
      const int64_t from = starts[b * count + p], to = e < count ? starts[b * count + e] : starts[(b + 1) * count];
      if (to > from) add_rows<T>(tables[pieces[p].table], list.get() + from, to - from, scale, lo, hi, out);
      p = e;
    }
  });
}

template void fused_gather_gradient(float*, int64_t, float, const std::vector<OffsetTable>&);
template void fused_gather_gradient(double*, int64_t, double, const std::vector<OffsetTable>&);

}  // namespace shoal::ops
