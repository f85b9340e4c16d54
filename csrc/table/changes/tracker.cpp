#include "table/changes/tracker.h"

#include <unordered_set>

namespace shoal {

Tracker::Taken Tracker::take() {
  Taken taken;
  std::vector<int64_t> removed;
  std::vector<int32_t> tables;
  taken.all = all_.exchange(false);
  written_.steal(&taken.ids, &tables);
  removed_.steal(&removed, &tables);
  // Counted after stealing, so that keys lost in between are reported now; the ids that displaced them are in the next
  // take.
  const int64_t written_lost = written_.dropped(), removed_lost = removed_.dropped();
  taken.all |= written_lost > written_lost_.exchange(written_lost);
  taken.lost = removed_lost - removed_lost_.exchange(removed_lost);
  if (removed.empty()) return taken;
  const std::unordered_set<int64_t> known(taken.ids.begin(), taken.ids.end());
  for (int64_t id : removed)
    if (!known.contains(id)) taken.ids.push_back(id);
  return taken;
}

}  // namespace shoal
