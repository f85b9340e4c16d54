#include "gather/overlap.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "core/thread_pool.h"

namespace shoal::gather {
namespace {

// Reads the indices of a chunk. False if one of them is outside it.
bool read_indices(const uint8_t* bytes, Codec codec, int64_t k, int64_t totalk, uint32_t* out, uint16_t* scratch) {
  bool inside = true;
  if (codec == Codec::packed12) {
    SHOAL_DISPATCH(unpack12)(bytes, k, scratch);
    for (int64_t i = 0; i < k; ++i) {
      out[i] = scratch[i];
      inside &= scratch[i] < totalk;
    }
  } else {
    std::memcpy(out, bytes, static_cast<size_t>(k) * 4);
    for (int64_t i = 0; i < k; ++i) inside &= out[i] < totalk;  // a negative one is a large unsigned one
  }
  return inside;
}

}  // namespace

void overlap(std::span<const uint8_t* const> peers, Codec codec, int64_t chunks, int64_t k, int64_t totalk,
             int64_t* counts) {
  const int64_t P = static_cast<int64_t>(peers.size()), words = (P + 63) / 64;
  const int64_t chunk_bytes = index_bytes(codec, k);
  const bool narrow = totalk <= 65536;
  std::mutex mutex;
  parallel_for(chunks, 32, [&](int64_t begin, int64_t end) {
    std::vector<uint64_t> masks(static_cast<size_t>(totalk * words));
    std::vector<uint32_t> indices(static_cast<size_t>(P * k));
    std::vector<uint16_t> scratch(static_cast<size_t>(P * k));
    std::vector<uint32_t> local(static_cast<size_t>(P * words * 64));
    std::vector<int64_t> total(static_cast<size_t>(P * words * 64));
    int64_t since_flush = 0;
    auto flush = [&] {
      for (size_t i = 0; i < local.size(); ++i) total[i] += local[i];
      std::fill(local.begin(), local.end(), 0u);
      since_flush = 0;
    };
    for (int64_t c = begin; c < end; ++c) {
      for (int64_t p = 0; p < P; ++p) {
        if (!peers[p]) continue;
        if (!read_indices(peers[p] + c * chunk_bytes, codec, k, totalk, &indices[p * k], &scratch[p * k]))
          throw std::invalid_argument("an index is outside its chunk; the payload changed after its validation");
        if (narrow && codec == Codec::i32)
          for (int64_t i = p * k; i < (p + 1) * k; ++i) scratch[i] = static_cast<uint16_t>(indices[i]);
        for (int64_t i = p * k; i < (p + 1) * k; ++i) masks[indices[i] * words + p / 64] |= uint64_t{1} << (p % 64);
      }
      for (int64_t p = 0; p < P; ++p) {
        if (!peers[p]) continue;
        uint32_t* row = &local[p * words * 64];
        for (int64_t w = 0; w < words; ++w) {
          if (narrow) {
            SHOAL_DISPATCH(count_bits)(masks.data(), words, w, &scratch[p * k], k, row + w * 64);
          } else {
            for (int64_t i = p * k; i < (p + 1) * k; ++i)
              for (uint64_t m = masks[indices[i] * words + w]; m; m &= m - 1) ++row[w * 64 + __builtin_ctzll(m)];
          }
        }
      }
      for (int64_t p = 0; p < P; ++p) {
        if (!peers[p]) continue;
        for (int64_t i = p * k; i < (p + 1) * k; ++i)
          for (int64_t w = 0; w < words; ++w) masks[indices[i] * words + w] = 0;
      }
      if ((since_flush += k) > (int64_t{1} << 31)) flush();
    }
    flush();
    std::lock_guard lock(mutex);
    for (int64_t p = 0; p < P; ++p)
      for (int64_t q = 0; q < P; ++q) counts[p * P + q] += total[p * words * 64 + q];
  });
}

}  // namespace shoal::gather
