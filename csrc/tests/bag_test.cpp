#include "nn/bag.h"

#include <vector>

#include "core/thread_pool.h"
#include "nn/wiring.h"
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
      for (Pool how : {Pool::sum, Pool::mean, Pool::firstn, Pool::sqrtn, Pool::max}) {
        Bags bags{offsets.data(), 3000, dim, how, 2, nullptr};
        bags.check(n);
        std::vector<float> fused(3000 * bags.width(), 9), apart(fused), rows(n * dim);
        lookup_pool(table, ids.data(), bags, true, 5, fused.data());
        table.lookup(ids.data(), n, rows.data());
        pool(bags, rows.data(), apart.data());
        CHECK(fused == apart);
        lookup_pool(table, ids.data(), bags, false, 0, fused.data());
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

TEST(a_wiring_reads_what_its_tables_read) {
  for (int threads : {1, 4}) {
    set_num_threads(threads);
    for (int dim : {3, 16}) {
      Table one(uniform(dim), 1), other(uniform(dim), 2);
      std::vector<int64_t> ids, offsets{0};
      for (int b = 0; b < 4000; ++b) {
        for (int i = 0; i < b % 6; ++i) ids.push_back((b * 31 + i * 7) % 997);
        offsets.push_back(static_cast<int64_t>(ids.size()));
      }
      const int64_t n = static_cast<int64_t>(ids.size());
      const int64_t counts[] = {offsets[2000], n - offsets[2000]};
      std::vector<float> made(n * dim), rows(n * dim), pooled(2000 * 2 * dim), apart(4000 * dim);
      const Wiring wiring({{&other, Pool::mean, dim}, {&one, Pool::mean, 0}}, 2 * dim, {});
      wiring.rows(ids.data(), n, counts, Missing::initial, rows.data());
      wiring.pooled(ids.data(), n, offsets.data(), 2000, nullptr, Missing::initial, pooled.data());
      CHECK(one.size() == 0 && other.size() == 0);
      other.lookup_or_insert(ids.data(), counts[0], 1, made.data());
      one.lookup_or_insert(ids.data() + counts[0], counts[1], 1, made.data() + counts[0] * dim);
      CHECK(rows == made);
      pool({offsets.data(), 4000, dim, Pool::mean, 0, nullptr}, rows.data(), apart.data());
      for (int64_t b = 0; b < 2000; ++b)
        for (int c = 0; c < dim; ++c) {
          CHECK(pooled[b * 2 * dim + dim + c] == apart[b * dim + c]);
          CHECK(pooled[b * 2 * dim + c] == apart[(2000 + b) * dim + c]);
        }
    }
  }
}

TEST(padding_is_not_read_and_not_counted) {
  Table table(uniform(2), 1);
  std::vector<int64_t> ids{5, 9, 5, 5, 9, 9}, offsets{0, 3, 5, 6, 6};
  std::vector<float> values{1, 2, 7, 7}, out(8, 9);
  const int64_t known[] = {5, 9};
  table.assign(known, 2, values.data(), 1);
  Wiring({{&table, Pool::mean, 0}}, 2, 9).pooled(ids.data(), 6, offsets.data(), 4, nullptr, Missing::zeros, out.data());
  CHECK(out == (std::vector<float>{1, 2, 1, 2, 0, 0, 0, 0}));
}

TEST(gradients_of_a_maximum_go_to_its_first_row) {
  const std::vector<int64_t> offsets{0, 3, 3};
  const std::vector<float> rows{1, 5, 3, 5, 3, 2}, weights{1, 1, 2}, grad{10, 20, 30, 40};
  std::vector<float> out(4, 9), of_rows(6, 9), of_weights(3, 9);
  const Bags bags{offsets.data(), 2, 2, Pool::max, 0, weights.data()};
  pool(bags, rows.data(), out.data());
  CHECK(out == (std::vector<float>{6, 5, 0, 0}));
  pool_gradient(bags, grad.data(), rows.data(), of_rows.data(), of_weights.data());
  CHECK(of_rows == (std::vector<float>{0, 20, 0, 0, 20, 0}));
  CHECK(of_weights == (std::vector<float>{100, 0, 30}));
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
