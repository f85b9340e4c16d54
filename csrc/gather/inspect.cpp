#include "gather/inspect.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <vector>

#include "core/thread_pool.h"

namespace shoal::gather {
namespace {

constexpr int64_t kChunkGrain = 256;

void check_indices(const Encoded& param, Codec codec, int64_t chunks, int64_t k, int64_t totalk, Findings& findings) {
  std::atomic<int> found{0};
  parallel_for(chunks, kChunkGrain, [&](int64_t begin, int64_t end) {
    std::vector<uint32_t> stamps(static_cast<size_t>(totalk));
    std::vector<uint16_t> scratch(static_cast<size_t>(codec == Codec::packed12 ? k : 0));
    found |= SHOAL_DISPATCH(check_chunks)(param.indices, static_cast<int>(codec), begin, end, k, totalk, stamps.data(),
                                          scratch.data());
  });
  findings.index_out_of_range = found & 1;
  findings.duplicate_index = found & 2;
}

}  // namespace

Findings inspect(const Encoded& param, Codec codec, int64_t chunks, int64_t k, int64_t totalk, int64_t bins,
                 double max_abs) {
  Findings findings;
  const int64_t n = chunks * k, blocks = (n + kNormBlock - 1) / kNormBlock;
  check_indices(param, codec, chunks, k, totalk, findings);
  std::vector<double> sums(static_cast<size_t>(blocks));
  if (param.kind == Values::u8) {
    double squares[256];
    for (int b = 0; b < 256; ++b) squares[b] = static_cast<double>(param.table[b]) * param.table[b];
    const int known = static_cast<int>(std::min<int64_t>(bins, 256));
    std::vector<uint32_t> seen(static_cast<size_t>(blocks) * 256);
    parallel_for(blocks, 4, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        int64_t start = b * kNormBlock;
        uint32_t* counts = seen.data() + b * 256;
        SHOAL_DISPATCH(count_values)(param.values + start, std::min(kNormBlock, n - start), known, counts);
        for (int i = 0; i < known; ++i)
          if (counts[i]) sums[b] += counts[i] * squares[i];  // an unused entry of the table may be infinite
      }
    });
    for (int64_t i = 0; i < blocks * 256; ++i) {
      if (!seen[i]) continue;
      if (i % 256 >= bins) {
        findings.value_over_bins = true;
        continue;
      }
      float value = param.table[i % 256];
      if (!std::isfinite(value)) findings.nonfinite = true;
      if (std::fabs(value) > max_abs) findings.too_large = true;
    }
  } else {
    std::vector<uint32_t> most(static_cast<size_t>(blocks));
    parallel_for(blocks, 4, [&](int64_t begin, int64_t end) {
      std::vector<float> wide(kNormBlock);
      for (int64_t b = begin; b < end; ++b) {
        int64_t start = b * kNormBlock, m = std::min(kNormBlock, n - start);
        SHOAL_DISPATCH(widen)(param.values + start * value_bytes(param.kind), m, static_cast<int>(param.kind),
                              wide.data());
        double sum;
        SHOAL_DISPATCH(sum_block)(wide.data(), m, &sums[b], &sum);
        most[b] = SHOAL_DISPATCH(max_abs_bits)(wide.data(), m);
      }
    });
    for (uint32_t bits : most) {
      if (bits >= 0x7f800000u)
        findings.nonfinite = true;
      else if (std::bit_cast<float>(bits) > max_abs)
        findings.too_large = true;
    }
  }
  for (double sum : sums) findings.sum_of_squares += sum;
  return findings;
}

Sums block_sums(const float* values, int64_t n) {
  const int64_t blocks = (n + kNormBlock - 1) / kNormBlock;
  std::vector<Sums> sums(static_cast<size_t>(blocks));
  parallel_for(blocks, 4, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      int64_t start = b * kNormBlock;
      SHOAL_DISPATCH(sum_block)(values + start, std::min(kNormBlock, n - start), &sums[b].squares, &sums[b].values);
    }
  });
  Sums total;
  for (const Sums& s : sums) {
    total.squares += s.squares;
    total.values += s.values;
  }
  return total;
}

}  // namespace shoal::gather
