#include "ops/layouts/layout.h"

#include <algorithm>

#include "ops/common.h"
#include "ops/layouts/layout_kernels.h"
#include "ops/ragged/sum.h"

namespace shoal::ops {
namespace {

constexpr int64_t kRowMask = 0x7fffffff;
constexpr const char* kOp = "fused_embedding_to_layout: ";

std::string str(int64_t value) { return std::to_string(value); }

// A feature that some layout uses and that this request has.
struct ActiveFeature {
  int64_t feature, first_row;
  bool shared;
  int64_t task_begin, task_end;
  int64_t reach;  // the largest `end` of its slices
};

std::vector<ActiveFeature> check_request(const LayoutRequest& q) {
  if (q.batch < 0) fail(std::string(kOp) + "batch_size must be >= 0, got " + str(q.batch));
  if (q.nfl_count < q.features) {
    fail(std::string(kOp) + "nfl_offset must have one entry per feature, " + str(q.features) + ", got " +
         str(q.nfl_count));
  }
  for (int64_t i = 0; i < q.nfl_count; ++i) {
    const int64_t at = q.nfl[i] & kRowMask, before = i ? q.nfl[i - 1] & kRowMask : 0;
    if (at < before)
      fail(std::string(kOp) + "nfl_offset falls at entry " + str(i) + ", to " + str(at) + " after " + str(before));
    // The last entry also counts feature_offset's last entry, so it equals its length.
    if (at > q.row_count) {
      fail(std::string(kOp) + "nfl_offset[" + str(i) + "] is " + str(at) + ", past the " + str(q.row_count) +
           " entries of feature_offset");
    }
  }
  for (int64_t r = 0; r < q.row_count; ++r) {
    const int64_t before = r ? q.rows[r - 1] : 0;
    if (q.rows[r] < before) {
      fail(std::string(kOp) + "feature_offset falls at entry " + str(r) + ", to " + str(q.rows[r]) + " after " +
           str(before));
    }
    if (q.rows[r] > q.fid_count) {
      fail(std::string(kOp) + "feature_offset[" + str(r) + "] is " + str(q.rows[r]) + ", past the " + str(q.fid_count) +
           " entries of fid_offset");
    }
  }
  std::vector<ActiveFeature> active;
  for (int64_t t = 0; t < q.task_count;) {
    int64_t e = t;
    const int64_t f = q.tasks[t].feature;
    int64_t reach = 0;
    for (; e < q.task_count && q.tasks[e].feature == f; ++e)
      reach = std::max(reach, q.tasks[e].start + q.tasks[e].width);
    const int64_t first = q.nfl[f] & kRowMask, end = f + 1 < q.nfl_count ? q.nfl[f + 1] & kRowMask : q.row_count;
    const bool shared = (q.nfl[f] >> 31) & 1;
    const int64_t count = end - first, needed = shared ? 1 : q.batch;
    if (count < 0)
      fail(std::string(kOp) + "nfl_offset[" + str(f) + "] is " + str(first) + ", past feature_offset's end");
    if (count > 0 && q.batch > 0) {
      if (count < needed) {
        fail(std::string(kOp) + "feature " + str(f) + " (in sorted order) has " + str(count) + " rows for a batch of " +
             str(q.batch) + "; it needs one per sample, or the shared bit");
      }
      if (first + needed > q.row_count) {
        fail(std::string(kOp) + "the rows of feature " + str(f) + " reach past the " + str(q.row_count) +
             " entries of feature_offset");
      }
      active.push_back({f, first, shared, t, e, reach});
    }
    t = e;
  }
  return active;
}

// Addresses of the vectors of rows [begin, end) of a feature.
template <class T>
struct Vectors {
  std::vector<T*> at;
  std::vector<int64_t> starts;

  void load(const LayoutRequest& q, const ActiveFeature& f, int64_t begin, int64_t end) {
    at.clear();
    starts.assign(1, 0);
    const auto blocks = static_cast<uint64_t>(q.blocks.size());
    for (int64_t row = f.first_row + begin; row < f.first_row + end; ++row) {
      const int64_t stop = row + 1 < q.row_count ? q.rows[row + 1] : q.fid_count;
      for (int64_t k = q.rows[row]; k < stop; ++k) {
        const uint64_t index1 = q.fids[k] >> 32, index2 = q.fids[k] & 0xffffffff;
        if (index1 >= blocks) {
          fail(std::string(kOp) + "fid_offset[" + str(k) + "] names block " + std::to_string(index1) + " of " +
               std::to_string(blocks));
        }
        const int64_t stride = q.block_strides[index1];
        const int64_t address = static_cast<int64_t>(index2) * stride;
        if (address > q.block_sizes[index1] - f.reach || (!q.flat && f.reach > stride)) {
          fail(std::string(kOp) + "fid_offset[" + str(k) + "] = (" + std::to_string(index1) + ", " +
               std::to_string(index2) + ") with " + str(f.reach) + " columns reaches past its block of " +
               str(q.block_sizes[index1]) + " floats");
        }
        at.push_back(reinterpret_cast<T*>(q.blocks[index1]) + address);
      }
      starts.push_back(static_cast<int64_t>(at.size()));
    }
  }
};

template <class T>
void forward_samples(const LayoutRequest& q, const std::vector<ActiveFeature>& active,
                     const std::vector<uintptr_t>& outputs, int64_t begin, int64_t end) {
  Vectors<T> vectors;
  std::vector<T> pooled;
  for (const ActiveFeature& f : active) {
    if (f.shared) {
      vectors.load(q, f, 0, 1);
      if (vectors.at.empty()) continue;
    } else {
      vectors.load(q, f, begin, end);
    }
    for (int64_t t = f.task_begin; t < f.task_end; ++t) {
      const LayoutTask& task = q.tasks[t];
      T* out = reinterpret_cast<T*>(outputs[task.output]) + (q.first_row + begin) * task.sample_stride + task.place;
      const bool mean = task.pooling == static_cast<int64_t>(Pooling::mean);
      if (task.pooling == static_cast<int64_t>(Pooling::firstn)) {
        for (int64_t b = 0; b < end - begin; ++b, out += task.sample_stride) {
          const int64_t row = f.shared ? 0 : b, from = vectors.starts[row];
          const int64_t kept = std::min(task.max_length, vectors.starts[row + 1] - from);
          for (int64_t k = 0; k < kept; ++k) {
            std::copy_n(vectors.at[from + k] + task.start, task.width, out + k * task.sequence_stride);
          }
        }
      } else if (f.shared) {
        pooled.resize(task.width);
        SHOAL_CALL(pool_rows, vectors.at.data(), vectors.starts.data(), int64_t{1}, task.start, task.width, mean, false,
                   pooled.data(), int64_t{0});
        for (int64_t b = begin; b < end; ++b, out += task.sample_stride) {
          if (task.adds) {
            for (int64_t c = 0; c < task.width; ++c) out[c] += pooled[c];
          } else {
            std::copy_n(pooled.data(), task.width, out);
          }
        }
      } else {
        SHOAL_CALL(pool_rows, vectors.at.data(), vectors.starts.data(), end - begin, task.start, task.width, mean,
                   task.adds != 0, out, task.sample_stride);
      }
    }
  }
}

template <class T>
void backward_feature(const LayoutRequest& q, const ActiveFeature& f, const std::vector<uintptr_t>& grads, T scale) {
  constexpr int64_t kBlock = 256;
  Vectors<T> vectors;
  std::vector<T> summed;
  const int64_t rows = f.shared ? 1 : q.batch;
  for (int64_t begin = 0; begin < rows; begin += kBlock) {
    const int64_t end = std::min(rows, begin + kBlock);
    vectors.load(q, f, begin, end);
    for (int64_t t = f.task_begin; t < f.task_end; ++t) {
      const LayoutTask& task = q.tasks[t];
      const T* grad =
          reinterpret_cast<const T*>(grads[task.output]) + (q.first_row + begin) * task.sample_stride + task.place;
      const bool mean = task.pooling == static_cast<int64_t>(Pooling::mean);
      const bool firstn = task.pooling == static_cast<int64_t>(Pooling::firstn);
      int64_t sample_stride = task.sample_stride, sequence_stride = task.sequence_stride;
      if (f.shared) {
        // All samples share the row: sum the upstream gradients first.
        const int64_t kept = firstn ? std::min<int64_t>(task.max_length, static_cast<int64_t>(vectors.at.size())) : 1;
        summed.assign(static_cast<size_t>(kept * task.width), T(0));
        for (int64_t b = 0; b < q.batch; ++b) {
          for (int64_t k = 0; k < kept; ++k) {
            const T* from = grad + b * task.sample_stride + k * task.sequence_stride;
            for (int64_t c = 0; c < task.width; ++c) summed[k * task.width + c] += from[c];
          }
        }
        grad = summed.data();
        sample_stride = 0;
        sequence_stride = task.width;
      }
      if (!firstn) {
        SHOAL_CALL(spread_rows, vectors.at.data(), vectors.starts.data(), end - begin, task.start, task.width, mean,
                   scale, grad, sample_stride);
        continue;
      }
      for (int64_t b = 0; b < end - begin; ++b, grad += sample_stride) {
        const int64_t from = vectors.starts[b], kept = std::min(task.max_length, vectors.starts[b + 1] - from);
        for (int64_t k = 0; k < kept; ++k) {
          T* to = vectors.at[from + k] + task.start;
          const T* g = grad + k * sequence_stride;
          for (int64_t c = 0; c < task.width; ++c) to[c] += g[c] * scale;
        }
      }
    }
  }
}

// Whether no two features touch the same element, so that features can run in parallel.
template <class T>
bool features_are_apart(const LayoutRequest& q, const std::vector<ActiveFeature>& active) {
  struct Range {
    uintptr_t begin, end;
  };
  const int64_t blocks = static_cast<int64_t>(q.blocks.size()), count = static_cast<int64_t>(active.size());
  auto ranges = scratch<Range>(count * blocks);
  parallel_for(count, 4, [&](int64_t begin, int64_t end) {
    for (int64_t a = begin; a < end; ++a) {
      Range* mine = ranges.get() + a * blocks;
      std::fill_n(mine, blocks, Range{UINTPTR_MAX, 0});
      const ActiveFeature& f = active[a];
      const int64_t last = f.first_row + (f.shared ? 1 : q.batch);
      const int64_t stop = last < q.row_count ? q.rows[last] : q.fid_count;
      for (int64_t k = q.rows[f.first_row]; k < stop; ++k) {
        const uint64_t index1 = q.fids[k] >> 32;
        if (index1 >= static_cast<uint64_t>(blocks)) continue;  // Vectors::load() reports it
        const uintptr_t at = q.blocks[index1] + (q.fids[k] & 0xffffffff) * q.block_strides[index1] * sizeof(T);
        mine[index1].begin = std::min(mine[index1].begin, at);
        mine[index1].end = std::max(mine[index1].end, at + f.reach * sizeof(T));
      }
    }
  });
  std::vector<Range> touched;
  for (int64_t i = 0; i < count * blocks; ++i) {
    if (ranges[i].end > ranges[i].begin) touched.push_back(ranges[i]);
  }
  std::sort(touched.begin(), touched.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < touched.size(); ++i) {
    if (touched[i].begin < touched[i - 1].end) return false;
  }
  return true;
}

}  // namespace

template <class T>
void embedding_to_layout(const LayoutRequest& q, const std::vector<uintptr_t>& outputs) {
  const auto active = check_request(q);
  const int64_t work = q.fid_count * 16 + q.batch * q.task_count * 8;
  const int64_t grain = work < 1 << 15 ? q.batch : std::max<int64_t>(1, q.batch / (4 * num_threads()));
  parallel_for(q.batch, std::max<int64_t>(1, grain), [&](int64_t begin, int64_t end) {
    // Small parts, so that the addresses of their vectors stay in the cache.
    for (int64_t b = begin; b < end; b += 256) forward_samples<T>(q, active, outputs, b, std::min(end, b + 256));
  });
}

template <class T>
void embedding_to_layout_gradient(const LayoutRequest& q, const std::vector<uintptr_t>& grads, T scale) {
  const auto active = check_request(q);
  const int64_t work = q.fid_count * 16 + q.batch * q.task_count * 8;
  auto one = [&](int64_t a) { backward_feature<T>(q, active[a], grads, scale); };
  if (work >= 1 << 15 && num_threads() > 1 && active.size() > 1 && features_are_apart<T>(q, active)) {
    parallel_parts(static_cast<int64_t>(active.size()), one);
  } else {
    for (size_t a = 0; a < active.size(); ++a) one(static_cast<int64_t>(a));
  }
}

template void embedding_to_layout<float>(const LayoutRequest&, const std::vector<uintptr_t>&);
template void embedding_to_layout<double>(const LayoutRequest&, const std::vector<uintptr_t>&);
template void embedding_to_layout_gradient<float>(const LayoutRequest&, const std::vector<uintptr_t>&, float);
template void embedding_to_layout_gradient<double>(const LayoutRequest&, const std::vector<uintptr_t>&, double);

}  // namespace shoal::ops
