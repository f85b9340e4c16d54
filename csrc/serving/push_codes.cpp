#include "serving/push_codes.h"

#include <algorithm>

#include "table/index.h"

namespace shoal {
namespace {

constexpr int64_t kAhead = 16;

}  // namespace

size_t PushCodes::home(int64_t id) const {
  const unsigned __int128 scaled =
      static_cast<unsigned __int128>(index_hash(static_cast<uint64_t>(id))) * slots_.size();
  return static_cast<size_t>(scaled >> 64);
}

size_t PushCodes::place(int64_t id) const {
  size_t at = home(id);
  while (slots_[at].code >= 0 && slots_[at].id != id)
    if (++at == slots_.size()) at = 0;
  return at;
}

void PushCodes::grow() {
  std::vector<Slot> old(std::max<size_t>(64, slots_.size() / 5 * 8), Slot{0, -1});
  old.swap(slots_);
  for (const Slot& slot : old)
    if (slot.code >= 0) slots_[place(slot.id)] = slot;
}

void PushCodes::set(const int64_t* ids, int64_t n, const int32_t* codes, int64_t step, const int32_t* ranks) {
  for (int64_t i = 0; i < n; ++i) {
    if (size_ * 5 >= static_cast<int64_t>(slots_.size()) * 4) grow();
    if (i + kAhead < n) __builtin_prefetch(&slots_[home(ids[i + kAhead])], 1);
    Slot& slot = slots_[place(ids[i])];
    const int32_t code = codes[i * step];
    if (slot.code >= 0 && ranks && ranks[slot.code >> 1] > ranks[code >> 1]) continue;
    size_ += slot.code < 0;
    slot = {ids[i], code};
  }
}

void PushCodes::find(const int64_t* ids, int64_t n, int32_t* codes) const {
  for (int64_t i = 0; i < n; ++i) {
    if (size_ && i + kAhead < n) __builtin_prefetch(&slots_[home(ids[i + kAhead])]);
    codes[i] = size_ ? slots_[place(ids[i])].code : -1;
  }
}

void PushCodes::copy(int64_t* ids, int32_t* codes) const {
  for (const Slot& slot : slots_) {
    if (slot.code < 0) continue;
    *ids++ = slot.id;
    *codes++ = slot.code;
  }
}

void PushCodes::mark_used(uint8_t* used) const {
  for (const Slot& slot : slots_)
    if (slot.code >= 0) used[slot.code >> 1] = 1;
}

void PushCodes::renumber(const int32_t* numbers) {
  for (Slot& slot : slots_)
    if (slot.code >= 0) slot.code = 2 * numbers[slot.code >> 1] + (slot.code & 1);
}

}  // namespace shoal
