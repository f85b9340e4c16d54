#include <random>
#include <string>

#include "core/thread_pool.h"
#include "data/text.h"
#include "data/text_hash.h"
#include "data/tf_example.h"
#include "io/record.h"
#include "nn/fm.h"
#include "tests/check.h"

using namespace shoal;

namespace {

constexpr int64_t kAll = int64_t{1} << 40;

FeatureSet one_feature(uint64_t slot, char separator) {
  FeatureRule feature;
  feature.slot = slot, feature.separator = separator, feature.listed = separator != 0;
  return {{feature}, {NumberRule{}}};
}

TextParser parser(char quote, char separator, int64_t max_line = 1000) {
  return TextParser({{{Role::label, 0}}, {{Role::dense, 0}}, {}, {{Role::sparse, 0}}, {{Role::time, 0}}},
                    one_feature(3, separator), ',', quote, max_line);
}

TEST(lines_become_samples_and_bad_ones_are_reported) {
  const std::string text = "1,2.5,x,a,10\n\n0,,y,,11\r\nz,1,1,1,1\n1,1,1,b,-1\n1,7,x,b,12";
  for (bool threads : {false, true}) {
    Block block = parser(0, 0).parse(text, true, 100, kAll, threads);
    CHECK(block.rows == 3 && block.lines == 6 && block.bad.size() == 2);
    CHECK((block.label == std::vector<float>{1, 0, 1}));
    CHECK((block.dense == std::vector<float>{2.5, 0, 7}));
    CHECK((block.ids == std::vector<int64_t>{text_fid("a", 3), text_fid("", 3), text_fid("b", 3)}));
    CHECK((block.time == std::vector<int64_t>{10, 11, 12}));
    CHECK(block.bad[0].line == 3 && text.substr(block.bad[0].offset, 2) == "z,");
    CHECK(block.consumed == static_cast<int64_t>(text.size()));
  }
  CHECK(parser(0, 0).parse(text, false, 100, kAll, false).lines == 5);  // the last line may be incomplete
  CHECK(parser(0, 0).parse(text, true, 1, kAll, false).consumed == 13);
  CHECK(parser(0, 0).parse(text, true, 100, 14, false).lines == 2);
}

TEST(any_bytes_are_read_without_harm) {
  std::mt19937 random(1);
  const std::string letters = "01.,-|\"\n\r\txe\xff";
  for (int round = 0; round < 3000; ++round) {
    std::string text(random() % 200, 'x');
    for (char& c : text) c = letters[random() % letters.size()];
    const TextParser one = parser(round % 2 ? '"' : 0, round % 3 ? '|' : 0, 1 + random() % 80);
    Block block = one.parse(text, true, 1000, kAll, false);
    CHECK(block.consumed == static_cast<int64_t>(text.size()));
    CHECK(block.rows + static_cast<int64_t>(block.bad.size()) <= block.lines);
    CHECK(static_cast<int64_t>(block.label.size()) == block.rows);
    CHECK(static_cast<int64_t>(block.lengths.size()) == (one.ragged() ? block.rows : 0));
    int64_t consumed = 0;
    try {
      read_frames(text, 100, &consumed);
    } catch (const std::invalid_argument&) {
    }
    parse_tf_examples({"y", "t", {"a"}, {"u"}, one_feature(1, '|')},
                      {text, std::string_view(text).substr(text.size() / 2)});
  }
}

TEST(frames_are_cut_where_they_end) {
  std::string text(kRecordHeader + 5 + kRecordFooter, 'a');
  frame_record(text.data(), 5);
  const std::string two = text + text + text.substr(0, 9);
  int64_t consumed = 0;
  CHECK(read_frames(two, 10, &consumed).size() == 2 && consumed == static_cast<int64_t>(2 * text.size()));
  std::string broken = two;
  broken[text.size() + 14] ^= 1;
  CHECK(!read_frames(broken, 10, &consumed)[1].good);
  broken[0] ^= 1;
  CHECK_THROWS(read_frames(broken, 10, &consumed));
}

TEST(inconsistent_layouts_are_refused) {
  const FeatureSet set = one_feature(1, 0);
  CHECK_THROWS(TextParser({{{Role::dense, 0}}, {{Role::sparse, 0}}}, set, ',', 0, 10));
  CHECK_THROWS(TextParser({{{Role::label, 0}}, {{Role::dense, 1}}, {{Role::sparse, 0}}}, set, ',', 0, 10));
  CHECK_THROWS(TextParser({{{Role::label, 0}}, {{Role::sparse, 0}}}, one_feature(40000, 0), ',', 0, 10));
  CHECK_THROWS(TextParser({{{Role::label, 0}}, {{Role::dense, 0}}, {{Role::sparse, 0}}}, set, '\n', 0, 10));
}

TEST(crosses_are_every_combination_up_to_a_limit) {
  FeatureSet set;
  set.features.resize(3);
  for (size_t f = 0; f < 3; ++f) set.features[f].slot = f + 1, set.features[f].listed = true;
  set.features[2].rule = Rule::cross;
  set.features[2].of = {0, 1};
  std::vector<std::vector<int64_t>> lists{{1, 2}, {7, 8, 9}, {}};
  std::string why;
  CHECK(set.cross(&lists, &why) && lists[2].size() == 6);
  const int64_t pair[] = {2, 8};
  CHECK(lists[2][4] == cross_fid(pair, 2, 3));
  set.features[2].limit = 4;
  CHECK(set.cross(&lists, &why) && lists[2].size() == 4);
  lists[0].clear();
  CHECK(set.cross(&lists, &why) && lists[2].empty());
  set.features[2].of = {2};
  CHECK_THROWS(set.check());
}

TEST(fm_is_the_sum_over_pairs) {
  for (int64_t dim : {1, 3, 16, 21}) {
    const int64_t n = 9, features = 5;
    std::vector<float> rows(n * features * dim), sums(n * dim), out(n);
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i * 37 % 11) / 8;
    fm(rows.data(), n, features, dim, sums.data(), out.data());
    for (int64_t i = 0; i < n; ++i) {
      const float* row = rows.data() + i * features * dim;
      double expected = 0;
      for (int64_t a = 0; a < features; ++a) {
        expected += row[a * dim];
        for (int64_t b = 0; b < a; ++b)
          for (int64_t c = 1; c < dim; ++c) expected += row[a * dim + c] * row[b * dim + c];
      }
      CHECK(expected - out[i] < 1e-3 && out[i] - expected < 1e-3);
    }
  }
}

}  // namespace
