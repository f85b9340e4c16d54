// Admission filters, touched keys and fused operations, on one and on several threads.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "table/changes/touched.h"
#include "table/filters/filter_block.h"
#include "table/filters/filter_probabilistic.h"
#include "table/filters/filter_sliding.h"
#include "table/fused.h"

using namespace shoal;

namespace {

void on_threads(int n, const auto& work) {
  std::vector<std::thread> threads;
  for (int i = 0; i < n; ++i) threads.emplace_back([&work, i] { work(i); });
  for (auto& thread : threads) thread.join();
}

std::unique_ptr<Table> sgd_table(int32_t dim) {
  Segment segment;
  segment.dim = dim;
  return std::make_unique<Table>(Layout({segment}, false, false), 1);
}

}  // namespace

TEST(thresholds_depend_on_the_slot) {
  Thresholds thresholds(2, {{32767, 5}});
  CHECK(thresholds.of(-1) == 5);
  CHECK(thresholds.of(1) == 2);
  CHECK(thresholds.largest() == 5);
  CHECK_THROWS(Thresholds(0, {{32768, 1}}));
}

TEST(a_block_counts_saturates_and_fails_without_room) {
  FilterBlock block(1, 1.0);  // one home position
  CHECK(block.get(7, 64) == 0);
  CHECK(block.add(7, 20, 64) == 0);
  CHECK(block.get(7, 64) == 15);
  CHECK(block.add(7, 1, 64) == 15);
  for (int64_t i = 1; i < 64; ++i) CHECK(block.add(i << 17, 1, 64) == 0);
  CHECK(block.add(int64_t{100} << 17, 1, 64) == 15);
  CHECK(block.failures() == 1);
  CHECK(block.elements() == 1);  // never above the capacity
  block.clear();
  CHECK(block.get(7, 64) == 0);
  CHECK_THROWS(FilterBlock(0, 1.0));
  CHECK_THROWS(FilterBlock(1, std::nan("")));
}

TEST(the_sliding_filter_admits_after_the_threshold_and_forgets) {
  SlidingFilter filter(300, 5, Thresholds(2, {}));
  CHECK(filter.should_be_filtered(9, 1));
  CHECK(filter.should_be_filtered(9, 1));
  CHECK(!filter.should_be_filtered(9, 1));
  for (int64_t i = 0; i < 5000; ++i) filter.add(i << 17, 1);
  CHECK(filter.get(9) == 0);
  CHECK(filter.meta().head_increment > 5);
  CHECK_THROWS(SlidingFilter(300, 5, Thresholds(16, {})));
}

TEST(blocks_move_between_filters) {
  SlidingFilter one(300, 5), two(900, 5);
  for (int64_t i = 0; i < 200; ++i) one.add(i * 131072 + 5, 3);
  for (int b = 0; b < one.split_num(); ++b) {
    auto meta = one.block_meta(b);
    std::vector<uint16_t> cells(static_cast<size_t>(meta.total + FilterBlock::kSpare));
    one.read_block(b, 0, static_cast<int64_t>(cells.size()), cells.data());
    two.set_block(b, meta, cells.data(), static_cast<int64_t>(cells.size()));
    CHECK_THROWS(two.set_block(b, meta, cells.data(), static_cast<int64_t>(cells.size()) - 1));
    CHECK_THROWS(one.read_block(b, 1, static_cast<int64_t>(cells.size()), cells.data()));
  }
  two.set_meta(one.meta());
  for (int64_t i = 0; i < 200; ++i) CHECK(two.get(i * 131072 + 5) == one.get(i * 131072 + 5));
  CHECK_THROWS(two.set_meta({5, 0, 0}));
  CHECK_THROWS(one.block_meta(5));
}

TEST(random_admission_has_its_rate) {
  ProbabilisticFilter filter(false, Thresholds(4, {}), 7);
  int admitted = 0;
  for (int i = 0; i < 40000; ++i) admitted += !filter.should_be_filtered(1, 1);
  CHECK(std::abs(admitted - 10000) < 400);
  CHECK(!filter.should_be_filtered(1, 4));
}

TEST(counting_from_many_threads_loses_nothing) {
  SlidingFilter filter(100000, 7);
  ProbabilisticFilter random(true, Thresholds(3, {}));
  TouchedKeys keys(1 << 20);
  on_threads(6, [&](int part) {
    for (int64_t i = 0; i < 500; ++i) {
      filter.add(i << 17, 1);
      random.should_be_filtered(i, 1);
      int64_t id = part * 250 + i;
      keys.insert(&id, 1, 0);
    }
  });
  for (int64_t i = 0; i < 500; ++i) CHECK(filter.get(i << 17) == 6);
  std::vector<int64_t> ids;
  std::vector<int32_t> tables;
  keys.steal(&ids, &tables);
  std::sort(ids.begin(), ids.end());
  CHECK(ids.size() == 5 * 250 + 500);
  CHECK(ids.front() == 0 && ids.back() == 5 * 250 + 499);
}

TEST(touched_keys_drop_all_when_there_are_too_many) {
  TouchedKeys keys(3);
  std::vector<int64_t> six{1, 2, 3, 4, 5, 6};
  CHECK(keys.insert(six.data(), 6) == 4);
  CHECK(keys.size() == 2);
  CHECK(keys.dropped() == 4);
  CHECK_THROWS(TouchedKeys(-1));
}

TEST(fused_calls_go_block_by_block) {
  auto a = sgd_table(1), b = sgd_table(2);
  std::vector<Table*> tables{a.get(), b.get()};
  std::vector<int64_t> sizes{1, 2, 1, 0}, ids{5, 6, 5, 5};
  Blocks blocks(tables, sizes.data(), 2);
  CHECK(blocks.ids == (std::vector<int64_t>{0, 1, 3, 4, 4}));
  CHECK(blocks.floats == (std::vector<int64_t>{0, 1, 5, 6, 6}));
  std::vector<float> grads{1, 2, 3, 4, 5, 6}, out(6);
  std::vector<BadGradient> raise(2, BadGradient::raise);
  fused_apply_gradients(blocks, ids.data(), grads.data(), {1, 2}, 0, 9, false, raise);
  fused_lookup(blocks, ids.data(), out.data());
  CHECK(out == (std::vector<float>{-7, -4, -6, -8, -10, -7}));
  CHECK(a->max_update_time() == 9);
  grads[4] = std::numeric_limits<float>::infinity();
  bool thrown = false;
  try {
    fused_apply_gradients(blocks, ids.data(), grads.data(), {1, 2}, 0, 9, false, raise);
  } catch (const NonFinite& e) {
    thrown = e.position == 2 && e.id == 5;
  }
  CHECK(thrown);
  std::vector<float> again(6);
  fused_lookup(blocks, ids.data(), again.data());
  CHECK(again == out);
  CHECK_THROWS(fused_apply_gradients(blocks, ids.data(), grads.data(), {1}, 0, 9, false, raise));
  sizes[0] = -1;
  CHECK_THROWS(Blocks(tables, sizes.data(), 2));
}
