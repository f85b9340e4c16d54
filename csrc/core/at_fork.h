// Locks across fork(): the child has only the forking thread, so a lock that another thread held stays locked in it for
// ever. An owner of such locks takes them all before the fork and releases them after it, in both processes.
#pragma once
#include <mutex>

namespace shoal {

enum class Fork { prepare, parent, child };

// Calls its owner at each fork, in the thread that forks: `prepare` before the fork, then `parent` in the parent and
// `child` in the child. Declare it after the locks.
//
// A thread that holds one owner's locks must not wait for those of another owner, or a fork could deadlock.
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
  static void call_all(Fork phase);

  void* const owner_;
  const Hook hook_;
  AtFork *previous_ = nullptr, *next_ = nullptr;  // the list of all owners
};

}  // namespace shoal
