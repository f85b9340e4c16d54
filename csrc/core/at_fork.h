// Locks across fork(): a child process has one thread, so a lock that another thread held at that moment stays locked
// there for ever. What has such locks takes them all before the fork and gives them back after it, on both sides.
#pragma once
#include <mutex>

namespace shoal {

enum class Fork { prepare, parent, child };

// While it lives, its owner hears of forks: `prepare` in the parent before, then `parent` there and `child` in the
// child, always in the thread that forks. A member declared after the locks.
//
// Nobody who holds the locks of one owner may wait for those of another, or two owners would wait for each other.
class AtFork {
 public:
  // Calls owner->at_fork(phase).
  template <class Owner>
  explicit AtFork(Owner* owner)
      : AtFork(owner, [](void* given, Fork phase) { static_cast<Owner*>(given)->at_fork(phase); }) {}
  // Holds the mutex across the fork.
  explicit AtFork(std::mutex* mutex) : AtFork(mutex, hold) {}
  // Calls hook(owner, phase).
  using Hook = void (*)(void* owner, Fork phase);
  AtFork(void* owner, Hook hook);
  ~AtFork();
  AtFork(const AtFork&) = delete;
  AtFork& operator=(const AtFork&) = delete;

 private:
  static void hold(void* mutex, Fork phase);
  static void tell(Fork phase);

  void* const owner_;
  const Hook hook_;
  AtFork *previous_ = nullptr, *next_ = nullptr;  // a list of all, since tables come and go
};

}  // namespace shoal
