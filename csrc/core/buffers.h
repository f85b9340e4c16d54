// Memory for large results, kept warm between calls.
//
// A fresh result of some megabytes costs more in page faults than the work that fills it. Blocks that a tensor gave
// back are handed out again, on huge pages, up to a limit of idle bytes.
#pragma once
#include <cstddef>

namespace shoal {

struct Block {
  void* data;
  size_t bytes;  // at least what was asked for
};

// Not zeroed. Throws std::bad_alloc.
Block take_block(size_t bytes);
void give_block(Block block);

// Idle bytes that are kept; 0 keeps none. At first 512 MiB, or what SHOAL_BUFFER_CACHE_MB says.
void set_buffer_cache_bytes(size_t bytes);
size_t buffer_cache_bytes();
size_t idle_buffer_bytes();

}  // namespace shoal
