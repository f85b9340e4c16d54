#include "core/buffers.h"

#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>

#include "core/at_fork.h"
#include "core/pages.h"

namespace shoal {
namespace {

size_t initial_limit() {
  const char* text = std::getenv("SHOAL_BUFFER_CACHE_MB");
  return (text ? std::strtoull(text, nullptr, 10) : 512) << 20;
}

class Cache {
 public:
  Block take(size_t bytes) {
    // Size classes are at most an eighth apart: little waste, and batches of nearly equal size share blocks.
    size_t step = kHuge;
    while (step * 16 < bytes) step *= 2;
    bytes = (bytes + step - 1) / step * step;
    {
      std::lock_guard lock(mutex_);
      auto found = idle_.find(bytes);
      if (found != idle_.end()) {
        Block block{found->second, found->first};
        idle_.erase(found);
        idle_bytes_ -= bytes;
        return block;
      }
    }
    return {map_pages(bytes, true), bytes};
  }

  void give(Block block) {
    std::lock_guard lock(mutex_);
    idle_.emplace(block.bytes, block.data);
    idle_bytes_ += block.bytes;
    trim();
  }

  void set_limit(size_t bytes) {
    std::lock_guard lock(mutex_);
    limit_ = bytes;
    trim();
  }

  size_t limit() {
    std::lock_guard lock(mutex_);
    return limit_;
  }
  size_t idle() {
    std::lock_guard lock(mutex_);
    return idle_bytes_;
  }

 private:
  void trim() {
    while (idle_bytes_ > limit_) {
      auto largest = std::prev(idle_.end());
      unmap_pages(largest->second, largest->first);
      idle_bytes_ -= largest->first;
      idle_.erase(largest);
    }
  }

  static constexpr size_t kHuge = size_t{2} << 20;
  std::mutex mutex_;
  AtFork at_fork_{&mutex_};
  std::multimap<size_t, void*> idle_;
  size_t idle_bytes_ = 0;
  size_t limit_ = initial_limit();
};

Cache& cache() {
  static auto* one = new Cache;  // never destroyed: a tensor may be freed during interpreter exit
  return *one;
}

}  // namespace

Block take_block(size_t bytes) { return cache().take(bytes); }
void give_block(Block block) { cache().give(block); }
void set_buffer_cache_bytes(size_t bytes) { cache().set_limit(bytes); }
size_t buffer_cache_bytes() { return cache().limit(); }
size_t idle_buffer_bytes() { return cache().idle(); }

}  // namespace shoal
