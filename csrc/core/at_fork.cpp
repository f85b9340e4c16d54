#include "core/at_fork.h"

#include <pthread.h>

namespace shoal {
namespace {

// Also held during a fork, so that no owner is added or removed meanwhile.
std::mutex& registry() {
  static auto* mutex = new std::mutex;  // never destroyed: tables may be freed during interpreter exit
  return *mutex;
}
AtFork* g_first = nullptr;

}  // namespace

AtFork::AtFork(void* owner, Hook hook) : owner_(owner), hook_(hook) {
  const std::lock_guard lock(registry());
  static const int registered [[maybe_unused]] =
      pthread_atfork([] { call_all(Fork::prepare); }, [] { call_all(Fork::parent); }, [] { call_all(Fork::child); });
  next_ = g_first;
  if (next_) next_->previous_ = this;
  g_first = this;
}

AtFork::~AtFork() {
  const std::lock_guard lock(registry());
  (previous_ ? previous_->next_ : g_first) = next_;
  if (next_) next_->previous_ = previous_;
}

void AtFork::call_all(Fork phase) {
  if (phase == Fork::prepare) registry().lock();
  for (AtFork* each = g_first; each; each = each->next_) each->hook_(each->owner_, phase);
  if (phase != Fork::prepare) registry().unlock();
}

void AtFork::hold(void* mutex, Fork phase) {
  auto& held = *static_cast<std::mutex*>(mutex);
  phase == Fork::prepare ? held.lock() : held.unlock();
}

}  // namespace shoal
