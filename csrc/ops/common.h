// Helpers of the distribution kernels: scratch memory, row copies of known width, errors with the given value.
#pragma once
#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "core/thread_pool.h"

namespace shoal::ops {

// Asks for huge pages for memory that is about to be written for the first time: a page fault per 4 KiB takes longer
// than the copy itself. Affects only complete huge pages within the range; a failure is harmless.
inline void advise_huge(void* address, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHuge = 2 << 20;
  if (bytes < int64_t{4} << 20) return;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(address) + kHuge - 1) & ~(kHuge - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(address) + static_cast<uintptr_t>(bytes)) & ~(kHuge - 1);
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)address, (void)bytes;
#endif
}

template <class T>
std::unique_ptr<T[]> scratch(int64_t n) {
  auto memory = std::make_unique_for_overwrite<T[]>(static_cast<size_t>(n > 0 ? n : 0));
  advise_huge(memory.get(), n * static_cast<int64_t>(sizeof(T)));
  return memory;
}

[[noreturn]] inline void fail(const std::string& message) { throw std::invalid_argument(message); }

[[noreturn]] inline void fail_range(const char* what, int64_t value, int64_t at, int64_t limit) {
  fail(std::string(what) + " must be in [0, " + std::to_string(limit) + "), got " + std::to_string(value) +
       " at position " + std::to_string(at));
}

inline bool outside(int64_t value, int64_t limit) {
  return static_cast<uint64_t>(value) >= static_cast<uint64_t>(limit);
}

// Calls f(copy), where copy(dst, src) copies `bytes` bytes; common widths become plain vector moves.
template <class F>
void with_row_copy(int64_t bytes, F&& f) {
#define SHOAL_WIDTH(n) \
  case n:              \
    return f([](void* dst, const void* src) { std::memcpy(dst, src, n); });
  switch (bytes) {
    SHOAL_WIDTH(4)
    SHOAL_WIDTH(8)
    SHOAL_WIDTH(12)
    SHOAL_WIDTH(16)
    SHOAL_WIDTH(20)
    SHOAL_WIDTH(24)
    SHOAL_WIDTH(32)
    SHOAL_WIDTH(48)
    SHOAL_WIDTH(64)
    SHOAL_WIDTH(96)
    SHOAL_WIDTH(128)
    default:
      break;
  }
#undef SHOAL_WIDTH
  f([bytes](void* dst, const void* src) { std::memcpy(dst, src, static_cast<size_t>(bytes)); });
}

// Calls body(i) for i in [0, n), on several threads if `ids`, the ids of all of them, are enough.
template <class F>
void each_of(int64_t n, int64_t ids, F&& body) {
  if (ids >= 8192) return parallel_parts(n, body);
  for (int64_t i = 0; i < n; ++i) body(i);
}

// Rows per piece so that a piece moves about 256 KiB.
inline int64_t rows_per_piece(int64_t row_bytes) {
  constexpr int64_t kPieceBytes = 256 << 10;
  int64_t rows = kPieceBytes / (row_bytes > 0 ? row_bytes : 1);
  return rows < 256 ? 256 : rows > 16384 ? 16384 : rows;
}

}  // namespace shoal::ops
