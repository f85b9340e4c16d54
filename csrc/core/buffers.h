// Memory for large results, reused between calls.
//
// A new result of a few megabytes costs more in page faults than the work that fills it. So blocks that tensors have
// given back are kept, on huge pages and up to a limit of idle bytes, and handed out again.
#pragma once
#include <cstddef>

namespace shoal {

struct Block {
  void* data;
  size_t bytes;  // at least as many as requested
};

// Not zeroed. Throws std::bad_alloc.
Block take_block(size_t bytes);
void give_block(Block block);

// The most idle bytes to keep; 0 keeps none. The default is SHOAL_BUFFER_CACHE_MB, or 512 MiB.
void set_buffer_cache_bytes(size_t bytes);
size_t buffer_cache_bytes();
size_t idle_buffer_bytes();

}  // namespace shoal
