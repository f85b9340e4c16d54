// Pages straight from the kernel.
#pragma once
#include <cstddef>

namespace shoal {

// Zeroed, aligned to 2 MiB when at least that large, advised to huge pages if asked. Throws std::bad_alloc.
void* map_pages(size_t bytes, bool huge);
// Advises pages that were not touched yet, aligned to 2 MiB, to be huge ones.
void advise_huge(void* pages, size_t bytes);
void unmap_pages(void* pages, size_t bytes);

}  // namespace shoal
