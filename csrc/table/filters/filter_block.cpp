#include "table/filters/filter_block.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

namespace shoal {

namespace {
constexpr int64_t kMaxTotal = int64_t{1} << 40;

int64_t home_positions(int64_t capacity, double fill_rate) {
  if (capacity < 1)
    throw std::invalid_argument("a filter's capacity must be at least 1, got " + std::to_string(capacity));
  const double total = static_cast<double>(capacity) * fill_rate;
  if (!(total >= 1 && total < static_cast<double>(kMaxTotal)))
    throw std::invalid_argument("a filter's capacity * fill_rate must be 1..2^40, got capacity " +
                                std::to_string(capacity) + " and fill_rate " + std::to_string(fill_rate));
  return static_cast<int64_t>(total);
}
}  // namespace

FilterBlock::FilterBlock(int64_t capacity, double fill_rate)
    : capacity_(capacity), fill_rate_(fill_rate), total_(home_positions(capacity, fill_rate)) {}

void FilterBlock::allocate() {
  map_.reset(static_cast<uint16_t*>(std::calloc(static_cast<size_t>(cells()), sizeof(uint16_t))));
  if (!map_) throw std::bad_alloc();
}

FilterBlock::Place FilterBlock::find(int64_t id, int max_step) const {
  int64_t i = static_cast<int64_t>(hash_id(static_cast<uint64_t>(id)) % static_cast<uint64_t>(total_));
  if (!map_) return {i, 0, false};
  const uint16_t wanted = signature(id);
  const int64_t end = cells();
  for (int step = 0; step < max_step; ++step) {
    uint16_t cell = map_[i];
    if (cell == 0) return {i, 0, false};
    if ((cell >> 4) == wanted) return {i, cell & kMaxCount, true};
    if (++i == end) i = 0;
  }
  return {-1, kMaxCount, false};
}

void FilterBlock::store(const Place& place, int64_t id, uint32_t count) {
  if (!map_) allocate();
  map_[place.index] = static_cast<uint16_t>(signature(id) << 4 | std::min(count, kMaxCount));
  if (!place.occupied) elements_ = std::min(elements_ + 1, capacity_);
}

uint32_t FilterBlock::add(int64_t id, uint32_t count, int max_step) {
  Place place = find(id, max_step);
  if (place.index < 0) {
    ++failures_;
    return kMaxCount;
  }
  store(place, id, place.count + std::min(count, kMaxCount));
  return place.count;
}

uint32_t FilterBlock::get(int64_t id, int max_step) const { return find(id, max_step).count; }

void FilterBlock::clear() {
  map_.reset();
  elements_ = 0;
  failures_ = 0;
}

void FilterBlock::read(int64_t offset, int64_t n, uint16_t* out) const {
  if (offset < 0 || n < 0 || offset > cells() - n)
    throw std::invalid_argument("the cells must be within the block's 0.." + std::to_string(cells()) + ", got " +
                                std::to_string(n) + " cells from " + std::to_string(offset));
  if (map_)
    std::memcpy(out, map_.get() + offset, static_cast<size_t>(n) * sizeof(uint16_t));
  else
    std::fill(out, out + n, uint16_t{0});
}

void FilterBlock::set(int64_t total, double fill_rate, int64_t elements, int64_t failures, const uint16_t* cells) {
  if (total < 1 || total >= kMaxTotal || !(fill_rate >= 1) || elements < 0 || failures < 0)
    throw std::invalid_argument(
        "a filter block must have 1..2^40 - 1 home positions, fill rate >= 1, elements >= 0 and failures >= 0, got " +
        std::to_string(total) + ", " + std::to_string(fill_rate) + ", " + std::to_string(elements) + " and " +
        std::to_string(failures));
  if (total != total_ || fill_rate != fill_rate_)
    capacity_ = std::max<int64_t>(1, std::llround(static_cast<double>(total) / fill_rate));
  total_ = total;
  fill_rate_ = fill_rate;
  clear();
  elements_ = std::min(elements, capacity_);
  failures_ = failures;
  const int64_t n = total + kSpare;
  if (std::all_of(cells, cells + n, [](uint16_t cell) { return cell == 0; })) return;
  allocate();
  std::memcpy(map_.get(), cells, static_cast<size_t>(n) * sizeof(uint16_t));
}

}  // namespace shoal
