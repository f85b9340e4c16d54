// Pages straight from the kernel.
#pragma once
#include <cstddef>

namespace shoal {

// Returns zeroed memory, aligned to 2 MiB if it is at least that large; `huge` asks for huge pages. Throws
// std::bad_alloc.
void* map_pages(size_t bytes, bool huge);
// Asks for huge pages in memory that is aligned to 2 MiB and has not been touched yet.
void advise_huge(void* pages, size_t bytes);
void unmap_pages(void* pages, size_t bytes);

}  // namespace shoal
