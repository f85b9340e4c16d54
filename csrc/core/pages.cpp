#include "core/pages.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

namespace shoal {

static constexpr size_t kHuge = size_t{2} << 20;

void advise_huge(void* pages, size_t bytes) { madvise(pages, bytes, MADV_HUGEPAGE); }

void* map_pages(size_t bytes, bool huge) {
  size_t extra = bytes >= kHuge ? kHuge : 0;  // mmap aligns to 4 KiB only: map more, then unmap both ends
  void* raw = mmap(nullptr, bytes + extra, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) throw std::bad_alloc();
  auto begin = reinterpret_cast<uintptr_t>(raw);
  auto aligned = extra ? (begin + kHuge - 1) & ~(kHuge - 1) : begin;
  if (aligned > begin) munmap(raw, aligned - begin);
  if (begin + extra > aligned) {
    uintptr_t tail = (aligned + bytes + 4095) & ~uintptr_t{4095};
    if (tail < begin + bytes + extra) munmap(reinterpret_cast<void*>(tail), begin + bytes + extra - tail);
  }
  if (huge) advise_huge(reinterpret_cast<void*>(aligned), bytes);
  return reinterpret_cast<void*>(aligned);
}

void unmap_pages(void* pages, size_t bytes) { munmap(pages, bytes); }

}  // namespace shoal
