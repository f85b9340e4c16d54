#include "nn/bag.h"

#include <algorithm>
#include <vector>

#include "core/thread_pool.h"
#include "nn/pooling.h"
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

// The mean of the rows of each bag, in the order of the rows.
std::vector<float> means(const std::vector<float>& rows, const std::vector<int64_t>& offsets, int dim) {
  std::vector<float> out((offsets.size() - 1) * dim);
  for (size_t b = 0; b + 1 < offsets.size(); ++b) {
    const int64_t n = offsets[b + 1] - offsets[b];
    for (int c = 0; c < dim; ++c) {
      float sum = 0;
      for (int64_t i = offsets[b]; i < offsets[b + 1]; ++i) sum += rows[i * dim + c];
      out[b * dim + c] = n > 1 ? sum * (1.0f / static_cast<float>(n)) : sum;
    }
  }
  return out;
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
      std::vector<float> made(n * dim), rows(n * dim), pooled(2000 * 2 * dim);
      const Wiring wiring({{&other, Pool::mean, dim}, {&one, Pool::mean, 0}}, 2 * dim, {});
      wiring.rows(ids.data(), n, counts, Missing::initial, rows.data());
      wiring.pooled(ids.data(), n, offsets.data(), 2000, nullptr, Missing::initial, pooled.data());
      CHECK(one.size() == 0 && other.size() == 0);
      other.lookup_or_insert(ids.data(), counts[0], 1, made.data());
      one.lookup_or_insert(ids.data() + counts[0], counts[1], 1, made.data() + counts[0] * dim);
      CHECK(rows == made);
      const std::vector<float> apart = means(rows, offsets, dim);
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

// Pooling a table's rows gives the same results and marks as pooling the same rows in a flat buffer. Long bags come in
// several parts, and rows have few distinct values, so that many share a maximum.
TEST(largest_and_first_rows_and_their_gradients) {
  for (int threads : {1, 4}) {
    set_num_threads(threads);
    for (int64_t dim : {1, 8, 21}) {
      Table table(uniform(static_cast<int>(dim)), 1);
      const int64_t known = 300, bags = 90, bytes = mark_bytes(dim), width = 4 * dim;
      std::vector<int64_t> every(known), ids, offsets{0};
      std::vector<float> rows(known * dim);
      for (int64_t i = 0; i < known; ++i) every[i] = i;
      for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i * 7919 % 5) - 2;
      table.assign(every.data(), known, rows.data(), 1);
      for (int64_t b = 0; b < 2 * bags; ++b) {
        for (int64_t i = 0; i < (b % 50 == 7 ? 700 : b % 6); ++i) ids.push_back((b * 31 + i * 7) % known);
        offsets.push_back(static_cast<int64_t>(ids.size()));
      }
      const auto n = static_cast<int64_t>(ids.size());
      std::vector<float> out(bags * width, 9), flat_out(bags * width, 9);
      std::vector<uint8_t> marks(n * bytes), flat_marks(n * bytes);
      std::vector<int32_t> at(n);
      for (int64_t i = 0; i < n; ++i) at[i] = ids[i] == 5 ? -1 : static_cast<int32_t>(ids[i] * dim);
      Wiring({{&table, Pool::max, 3 * dim}, {&table, Pool::firstn, 0, 3}}, width, 5)
          .pooled(ids.data(), n, offsets.data(), bags, nullptr, Missing::zeros, out.data(), marks.data());
      const BagsAt given{.at = at.data(),
                         .offsets = offsets.data(),
                         .ids = n,
                         .features = 2,
                         .bags = bags,
                         .dim = dim,
                         .width = width,
                         .floats = known * dim,
                         .combiners = {Pool::max, Pool::firstn},
                         .columns = {3 * dim, 0},
                         .lengths = {1, 3},
                         .marks = flat_marks.data()};
      pool_at(given, rows.data(), flat_out.data());
      CHECK(out == flat_out);
      std::vector<float> grad(bags * width), sums(known * dim, 0), want(known * dim, 0);
      for (size_t i = 0; i < grad.size(); ++i) grad[i] = static_cast<float>(i % 11) - 5;
      add_pooled_at(given, grad.data(), sums.data());
      for (int64_t bag = 0; bag < 2 * bags; ++bag) {
        int64_t put = 0;
        for (int64_t i = offsets[bag]; i < offsets[bag + 1]; ++i) {
          if (at[i] < 0) continue;
          for (int64_t c = 0; c < dim; ++c) {
            const float* row = rows.data();
            if (bag >= bags) {  // firstn
              if (put >= 3) continue;
              CHECK(out[(bag - bags) * width + put * dim + c] == row[at[i] + c]);
              want[at[i] + c] += grad[(bag - bags) * width + put * dim + c];
              continue;
            }
            int64_t equal = 0;
            float largest = -9;
            for (int64_t j = offsets[bag]; j < offsets[bag + 1]; ++j)
              if (at[j] >= 0) largest = std::max(largest, row[at[j] + c]);
            for (int64_t j = offsets[bag]; j < offsets[bag + 1]; ++j) equal += at[j] >= 0 && row[at[j] + c] == largest;
            CHECK(out[bag * width + 3 * dim + c] == largest);
            CHECK(is_marked(&marks[i * bytes], c) == (row[at[i] + c] == largest));
            CHECK(is_marked(&flat_marks[i * bytes], c) == (row[at[i] + c] == largest));
            if (row[at[i] + c] == largest)
              want[at[i] + c] += grad[bag * width + 3 * dim + c] / static_cast<float>(equal);
          }
          ++put;
        }
      }
      CHECK(sums == want);
    }
  }
}

TEST(bad_offsets_are_refused) {
  for (std::vector<int64_t> offsets : {std::vector<int64_t>{1, 2}, {0, 3}, {0, 5, 2}, {0, -1, 2}}) {
    CHECK_THROWS(check_offsets(offsets.data(), static_cast<int64_t>(offsets.size()) - 1, 2));
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
