// An object with threads of its own, of which a process has one: made when it is first asked for.
#pragma once
#include <atomic>

#include "core/at_fork.h"

namespace shoal {

// To be made with `new` and never destroyed: the object's threads must not outlive it while the interpreter exits.
// After fork() only the forking thread lives on, so the child starts over with an object of its own.
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
