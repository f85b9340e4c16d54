#include "nn/bag.h"

#include <vector>

#include "core/thread_pool.h"
#include "tests/check.h"

using namespace shoal;

namespace {

Layout uniform(int dim) {
  Segment segment;
  segment.dim = dim;
  segment.init = Init::random_uniform;
  segment.init_low = -1;
  segment.init_high = 1;
  return Layout({segment}, false, false);
}

TEST(pooled_lookups_equal_pooled_rows) {
  for (int threads : {1, 4}) {
    set_num_threads(threads);
    for (int dim : {1, 7, 64}) {
      Table table(uniform(dim), 1);
      std::vector<int64_t> ids, offsets{0};
      for (int b = 0; b < 3000; ++b) {
        for (int i = 0; i < (b == 7 ? 5000 : b % 5); ++i) ids.push_back((b * 31 + i * 7) % 997);
        offsets.push_back(static_cast<int64_t>(ids.size()));
      }
      const int64_t n = static_cast<int64_t>(ids.size());
      for (Pool how : {Pool::sum, Pool::mean, Pool::firstn}) {
        Bags bags{offsets.data(), 3000, dim, how, 2, nullptr};
        bags.check(n);
        std::vector<float> fused(3000 * bags.width(), 9), apart(fused), rows(n * dim);
        lookup_pool(table, ids.data(), bags, true, 5, fused.data());
        table.lookup(ids.data(), n, rows.data());
        pool(bags, rows.data(), apart.data());
        CHECK(fused == apart);
      }
      CHECK(table.size() == 997);
      CHECK(table.max_update_time() == 5);
    }
  }
}

TEST(unknown_ids_are_zeros_without_create) {
  Table table(uniform(3), 1);
  std::vector<int64_t> ids{1, 2}, offsets{0, 2};
  std::vector<float> out(3, 9);
  lookup_pool(table, ids.data(), {offsets.data(), 1, 3, Pool::sum, 0, nullptr}, false, 0, out.data());
  CHECK(out == std::vector<float>(3, 0));
  CHECK(table.size() == 0);
}

TEST(bad_offsets_are_refused) {
  for (std::vector<int64_t> offsets : {std::vector<int64_t>{1, 2}, {0, 3}, {0, 5, 2}, {0, -1, 2}}) {
    Bags bags{offsets.data(), static_cast<int64_t>(offsets.size()) - 1, 1, Pool::sum, 0, nullptr};
    CHECK_THROWS(bags.check(2));
  }
}

TEST(sums_by_id) {
  std::vector<int64_t> ids{5, -5, 5}, out_ids(3);
  std::vector<float> rows{1, 2, 3}, out(3);
  CHECK(sum_by_id(ids.data(), 3, rows.data(), 1, out_ids.data(), out.data()) == 2);
  CHECK(out_ids[0] == 5 && out[0] == 4 && out_ids[1] == -5 && out[1] == 2);
  CHECK(sum_by_id(ids.data(), 0, rows.data(), 1, out_ids.data(), out.data()) == 0);
}

}  // namespace
