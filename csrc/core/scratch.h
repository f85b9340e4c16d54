// Memory for the duration of a call: not zeroed, and reused (core/buffers.h) if it is large.
#pragma once
#include <cstddef>
#include <cstdlib>
#include <new>
#include <utility>

#include "core/buffers.h"

namespace shoal {

class Scratch {
 public:
  explicit Scratch(size_t bytes) : block_{nullptr, bytes} {
    if (bytes >= kLarge) {
      block_ = take_block(bytes);
    } else if (!(block_.data = std::malloc(bytes ? bytes : 1))) {
      throw std::bad_alloc();
    }
  }
  Scratch(Scratch&& other) noexcept : block_(std::exchange(other.block_, {nullptr, 0})) {}
  Scratch& operator=(Scratch&&) = delete;
  ~Scratch() {
    if (block_.bytes >= kLarge) {
      give_block(block_);
    } else {
      std::free(block_.data);
    }
  }

  template <class T>
  T* as() const {
    return static_cast<T*>(block_.data);
  }

 private:
  static constexpr size_t kLarge = size_t{1} << 20;
  Block block_;
};

}  // namespace shoal
