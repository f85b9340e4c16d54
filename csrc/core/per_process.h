// One object per process that owns threads, created on first use.
#pragma once
#include <atomic>

#include "core/at_fork.h"

namespace shoal {

// Create it with `new` and never destroy it: the object's threads may still run while the interpreter exits.
// After fork() the child has only the forking thread, so it creates a new object.
template <class T>
class PerProcess {
 public:
  T& get() {
    T* current = object_.load(std::memory_order_acquire);
    if (!current) {
      auto* fresh = new T;
      if (object_.compare_exchange_strong(current, fresh)) return *fresh;
      delete fresh;
    }
    return *current;
  }

  void at_fork(Fork phase) {
    if (phase == Fork::child) object_.store(nullptr);
  }

 private:
  std::atomic<T*> object_{nullptr};
  AtFork fork_{this};
};

}  // namespace shoal
