// The gather's kernels: packing at every length, reduction order, top-k ties, overlap counts.
#include <algorithm>
#include <vector>

#include "core/thread_pool.h"
#include "gather/codec.h"
#include "gather/inspect.h"
#include "gather/overlap.h"
#include "gather/reduce.h"
#include "gather/topk.h"
#include "tests/check.h"

using namespace shoal;

namespace {

std::vector<uint8_t> pack(const std::vector<int64_t>& indices) {
  std::vector<uint8_t> out(indices.size() / 2 * 3);
  CHECK(SHOAL_DISPATCH(pack12)(indices.data(), static_cast<int64_t>(indices.size()), out.data()));
  return out;
}

}  // namespace

TEST(few_bins_are_looked_up_and_counted_like_many) {
  std::vector<float> table(256);
  for (int i = 0; i < 256; ++i) table[i] = 0.5f * static_cast<float>(i) - 7;
  for (int bins : {1, 2, 4, 8, 9, 16, 17, 32, 33, 256}) {
    for (int64_t n : {0, 1, 7, 8, 15, 16, 63, 64, 65, 130, 1000}) {
      std::vector<uint8_t> q(static_cast<size_t>(n));
      for (int64_t i = 0; i < n; ++i) q[i] = static_cast<uint8_t>((i * 2654435761u >> 7) % static_cast<unsigned>(bins));
      std::vector<float> out(q.size());
      SHOAL_DISPATCH(look_up)(q.data(), n, table.data(), bins, out.data());
      std::vector<uint32_t> counts(256), wanted(256);
      SHOAL_DISPATCH(count_values)(q.data(), n, bins, counts.data());
      for (int64_t i = 0; i < n; ++i) {
        CHECK(out[i] == table[q[i]]);
        ++wanted[q[i]];
      }
      CHECK(counts == wanted);
      if (n && bins < 256) {  // a value >= bins is counted in some entry >= bins
        q[static_cast<size_t>(n / 2)] = static_cast<uint8_t>(bins);
        std::fill(counts.begin(), counts.end(), 0);
        SHOAL_DISPATCH(count_values)(q.data(), n, bins, counts.data());
        uint32_t over = 0;
        for (int b = bins; b < 256; ++b) over += counts[b];
        CHECK(over == 1);
      }
    }
  }
}

TEST(packing_round_trips_without_reading_past_the_end) {
  for (int64_t n = 0; n <= 130; n += 2) {
    std::vector<int64_t> indices(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) indices[i] = (i * 2654435761u) % 4096;
    auto packed = pack(indices);  // of the exact size, so that AddressSanitizer detects an overrun
    std::vector<int64_t> back(static_cast<size_t>(n));
    SHOAL_DISPATCH(unpack12_wide)(packed.data(), n, back.data());
    CHECK(back == indices);
  }
  std::vector<int64_t> bad{4096, 0};
  std::vector<uint8_t> out(3);
  CHECK(!SHOAL_DISPATCH(pack12)(bad.data(), 2, out.data()));
}

TEST(duplicates_and_indices_out_of_range_are_found) {
  const std::vector<float> table(256, 1.0f);
  auto look = [&](std::vector<int64_t> indices) {
    auto packed = pack(indices);
    std::vector<uint8_t> q(indices.size(), 0);
    return gather::inspect({packed.data(), q.data(), table.data(), gather::Values::u8}, gather::Codec::packed12, 2,
                           static_cast<int64_t>(indices.size()) / 2, 16, 4, 1e4);
  };
  auto fine = look({3, 2, 1, 0, 0, 1, 2, 15});
  CHECK(!fine.index_out_of_range && !fine.duplicate_index && fine.sum_of_squares == 8.0);
  CHECK(look({3, 2, 1, 3, 0, 1, 2, 15}).duplicate_index);
  CHECK(look({3, 2, 1, 0, 0, 1, 2, 16}).index_out_of_range);
}

TEST(waves_and_one_call_give_the_same_bits) {
  constexpr int64_t chunks = 37, k = 6, totalk = 12, peers = 5;
  std::vector<std::vector<uint8_t>> packed;
  std::vector<std::vector<float>> values(peers, std::vector<float>(chunks * k));
  for (int64_t p = 0; p < peers; ++p) {
    std::vector<int64_t> indices;
    for (int64_t c = 0; c < chunks; ++c)
      for (int64_t i = 0; i < k; ++i) indices.push_back((i * 2 + c + p) % totalk);
    packed.push_back(pack(indices));
    for (int64_t i = 0; i < chunks * k; ++i) values[p][i] = 0.1f * static_cast<float>((i * 7 + p * 3) % 11 - 5);
  }
  std::vector<gather::Encoded> encoded;
  for (int64_t p = 0; p < peers; ++p)
    encoded.push_back(
        {packed[p].data(), reinterpret_cast<const uint8_t*>(values[p].data()), nullptr, gather::Values::f32});
  const std::vector<float> factors{1.0f, 0.5f, 0.3f, 1.0f, 0.7f};
  std::vector<int64_t> ids(chunks);
  for (int64_t c = 0; c < chunks; ++c) ids[c] = c;
  auto run = [&](size_t wave, int threads) {
    set_num_threads(threads);
    std::vector<float> dense(chunks * totalk, -1.0f), sum(chunks * totalk);
    std::vector<int32_t> count(chunks * totalk);
    gather::Grid grid{chunks, 1, totalk, 0, 1, 0, chunks * totalk, dense.data(), chunks * totalk};
    for (size_t at = 0; at < encoded.size(); at += wave) {
      size_t n = std::min(wave, encoded.size() - at);
      const bool whole = n == encoded.size();
      gather::Tile tile{ids.data(),
                        chunks,
                        k,
                        totalk,
                        gather::Codec::packed12,
                        whole ? nullptr : sum.data(),
                        whole ? nullptr : count.data(),
                        at == 0,
                        at + n == encoded.size(),
                        gather::Reduction::count_mean,
                        peers};
      gather::reduce(tile, grid, std::span(encoded).subspan(at, n), std::span(factors).subspan(at, n));
    }
    return dense;
  };
  const auto base = run(peers, 1);
  for (size_t wave : {size_t{1}, size_t{2}, size_t{3}, size_t{5}})
    for (int threads : {1, 3}) CHECK(run(wave, threads) == base);
  set_num_threads(2);
}

TEST(topk_keeps_the_lower_position_of_equals) {
  const std::vector<float> gradient{1, -1, 1, 0, 1, -1, 1, 1};
  std::vector<int32_t> indices(4);
  std::vector<float> values(4);
  gather::topk_chunks(gradient.data(), nullptr, 1.0f, {1, 1, 1, 8}, 4, indices.data(), values.data());
  CHECK((indices == std::vector<int32_t>{0, 1, 2, 4}));
  const std::vector<float> zeros(300, 0.0f);
  std::vector<int32_t> first(64);
  std::vector<float> none(64);
  gather::topk_chunks(zeros.data(), nullptr, 1.0f, {1, 1, 1, 300}, 64, first.data(), none.data());
  for (int32_t i = 0; i < 64; ++i) CHECK(first[i] == i);
}

TEST(overlap_counts_every_pair) {
  auto a = pack({0, 1, 2, 3, 4, 5, 6, 7}), b = pack({2, 3, 4, 5, 4, 5, 6, 7});
  std::vector<const uint8_t*> peers{a.data(), b.data(), nullptr};
  std::vector<int64_t> counts(9);
  gather::overlap(peers, gather::Codec::packed12, 2, 4, 12, counts.data());
  CHECK((counts == std::vector<int64_t>{8, 6, 0, 6, 8, 0, 0, 0, 0}));
  auto outside = pack({0, 1, 2, 12, 0, 1, 2, 3});
  peers[1] = outside.data();
  CHECK_THROWS(gather::overlap(peers, gather::Codec::packed12, 2, 4, 12, counts.data()));
}
