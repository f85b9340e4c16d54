#include <algorithm>
#include <span>
#include <vector>

#include "bind/bind.h"
#include "core/thread_pool.h"
#include "gather/codec.h"
#include "gather/inspect.h"
#include "gather/overlap.h"
#include "gather/reduce.h"
#include "gather/topk.h"

namespace shoal::bind {
namespace {

using gather::ChunkGrid;
using gather::Codec;
using gather::Encoded;
using gather::Values;

constexpr int64_t kGrain = 1 << 19;  // values; for fewer, waking another thread takes longer than the work

void unpack(uintptr_t packed, int64_t n, uintptr_t out) {
  parallel_for(n / 2, kGrain / 2, [&](int64_t begin, int64_t end) {
    SHOAL_DISPATCH(unpack12_wide)(ptr<uint8_t>(packed) + begin * 3, (end - begin) * 2, ptr<int64_t>(out) + begin * 2);
  });
}

bool pack(uintptr_t indices, int64_t n, uintptr_t out) {
  return SHOAL_DISPATCH(pack12)(ptr<int64_t>(indices), n, ptr<uint8_t>(out));
}

void dequantize(uintptr_t q, int64_t n, uintptr_t table, int bins, uintptr_t out) {
  parallel_for(n, kGrain, [&](int64_t begin, int64_t end) {
    SHOAL_DISPATCH(look_up)(ptr<uint8_t>(q) + begin, end - begin, ptr<float>(table), bins, ptr<float>(out) + begin);
  });
}

// Adds up sums and counts per block, in index order, so that results do not depend on the number of threads.
void quantize(uintptr_t z, int64_t n, float scale, float offset, int bins, uintptr_t q, uintptr_t sums,
              uintptr_t counts) {
  constexpr int64_t kBlock = 16384;
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  std::vector<double> block_sums(static_cast<size_t>(blocks) * 256);
  std::vector<int64_t> block_counts(static_cast<size_t>(blocks) * 256);
  parallel_for(blocks, 2, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t start = b * kBlock;
      SHOAL_DISPATCH(quantize)(ptr<float>(z) + start, std::min(kBlock, n - start), scale, offset, bins,
                               ptr<uint8_t>(q) + start, &block_sums[b * 256], &block_counts[b * 256]);
    }
  });
  for (int64_t b = 0; b < blocks; ++b)
    for (int i = 0; i < bins; ++i) {
      ptr<double>(sums)[i] += block_sums[b * 256 + i];
      ptr<int64_t>(counts)[i] += block_counts[b * 256 + i];
    }
}

// (value over bins, index out of range, duplicate index, nonfinite, too large, sum of squares)
auto inspect(uintptr_t indices, uintptr_t values, uintptr_t table, int kind, int codec, int64_t chunks, int64_t k,
             int64_t totalk, int64_t bins, double max_abs) {
  Encoded param{ptr<uint8_t>(indices), ptr<uint8_t>(values), ptr<float>(table), static_cast<Values>(kind)};
  return gather::inspect(param, static_cast<Codec>(codec), chunks, k, totalk, bins, max_abs);
}

// `peers`: int64 [P, 4] of (indices, values, table, kind); `factors`: float32 [P].
void reduce(uintptr_t peers, uintptr_t factors, int64_t n_peers, uintptr_t chunks, int64_t n, int64_t k, int64_t totalk,
            int codec, uintptr_t sum, uintptr_t count, bool first, bool last, int reduction, int64_t all_peers,
            int64_t across, int64_t height, int64_t width, int64_t row0, int64_t row1, int64_t column0, int64_t column1,
            uintptr_t dense, int64_t stride) {
  const int64_t* rows = ptr<int64_t>(peers);
  std::vector<Encoded> encoded(static_cast<size_t>(n_peers));
  for (int64_t p = 0; p < n_peers; ++p) {
    const int64_t* row = rows + 4 * p;
    encoded[p] = {ptr<uint8_t>(row[0]), ptr<uint8_t>(row[1]), ptr<float>(row[2]), static_cast<Values>(row[3])};
  }
  gather::Tile tile{ptr<int64_t>(chunks),
                    n,
                    k,
                    totalk,
                    static_cast<Codec>(codec),
                    ptr<float>(sum),
                    ptr<int32_t>(count),
                    first,
                    last,
                    static_cast<gather::Reduction>(reduction),
                    all_peers};
  gather::Grid grid{across, height, width, row0, row1, column0, column1, ptr<float>(dense), stride};
  gather::reduce(tile, grid, encoded, std::span(ptr<float>(factors), static_cast<size_t>(n_peers)));
}

void topk(uintptr_t gradient, uintptr_t memory, float decay, int64_t rows, int64_t across, int64_t height,
          int64_t width, int64_t k, uintptr_t indices, uintptr_t values) {
  gather::topk_chunks(ptr<float>(gradient), ptr<float>(memory), decay, ChunkGrid{rows, across, height, width}, k,
                      ptr<int32_t>(indices), ptr<float>(values));
}

void subtract_sent(uintptr_t memory, int64_t rows, int64_t across, int64_t height, int64_t width, int64_t k,
                   uintptr_t indices, uintptr_t sent) {
  gather::subtract_sent(ptr<float>(memory), ChunkGrid{rows, across, height, width}, k, ptr<int32_t>(indices),
                        ptr<float>(sent));
}

void scatter_chunks(uintptr_t dense, int64_t rows, int64_t across, int64_t height, int64_t width, int64_t k,
                    uintptr_t indices, uintptr_t values) {
  gather::scatter_chunks(ptr<float>(dense), ChunkGrid{rows, across, height, width}, k, ptr<int64_t>(indices),
                         ptr<float>(values));
}

void overlap(uintptr_t peers, int64_t n_peers, int codec, int64_t chunks, int64_t k, int64_t totalk, uintptr_t counts) {
  const int64_t* addresses = ptr<int64_t>(peers);
  std::vector<const uint8_t*> pointers(static_cast<size_t>(n_peers));
  for (int64_t p = 0; p < n_peers; ++p) pointers[p] = ptr<uint8_t>(addresses[p]);
  gather::overlap(pointers, static_cast<Codec>(codec), chunks, k, totalk, ptr<int64_t>(counts));
}

}  // namespace

void gather(nb::module_& m) {
  nb::class_<gather::Findings>(m, "GatherFindings")
      .def_ro("value_over_bins", &gather::Findings::value_over_bins)
      .def_ro("index_out_of_range", &gather::Findings::index_out_of_range)
      .def_ro("duplicate_index", &gather::Findings::duplicate_index)
      .def_ro("nonfinite", &gather::Findings::nonfinite)
      .def_ro("too_large", &gather::Findings::too_large)
      .def_ro("sum_of_squares", &gather::Findings::sum_of_squares);
  nb::class_<gather::Sums>(m, "GatherSums")
      .def_ro("squares", &gather::Sums::squares)
      .def_ro("values", &gather::Sums::values);
  m.def("gather_unpack12", &unpack, NoGil());
  m.def("gather_pack12", &pack, NoGil());
  m.def("gather_dequantize", &dequantize, NoGil());
  m.def("gather_quantize", &quantize, NoGil());
  m.def("gather_inspect", &inspect, NoGil());
  m.def("gather_block_sums", raw<&gather::block_sums>, NoGil());
  m.def("gather_reduce", &reduce, NoGil());
  m.def("gather_topk", &topk, NoGil());
  m.def("gather_subtract_sent", &subtract_sent, NoGil());
  m.def("gather_scatter_chunks", &scatter_chunks, NoGil());
  m.def("gather_overlap", &overlap, NoGil());
}

}  // namespace shoal::bind
