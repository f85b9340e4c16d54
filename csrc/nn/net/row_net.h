// A net whose rows do not depend on each other, run without Python and libtorch: all steps are run on one block of
// rows, which stays in the cache, then on the next.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "nn/net/gemm.h"
#include "nn/net/loops.h"

namespace shoal {

// Values of each row: in a buffer, or in a constant, which all rows share. Sizes and strides are those of one row.
struct RowView {
  int32_t buffer;  // or ~number of a constant
  int64_t at = 0;
  std::vector<int64_t> sizes, strides;
};

struct RowStep {
  enum class Kind : int32_t {
    map,      // out = op(a, b) of each value; sum and largest add to what out has
    matrix,   // out [.., n] = a [.., k] * constant [k, n] (+ b)
    product,  // out [n, m] = a [n, k] * b [k, m], of each row
    select    // out [before, chosen, after] = some elements of a [before, size, after] along its middle dimension
  };
  Kind kind;
  Op op = Op::copy;
  RowView out, a, b;
  bool has_b = false;
  float number = 0, other = 0;
  int32_t constant = -1;        // of a matrix
  int64_t k = 0, n = 0;         // of a matrix
  int64_t row = 0, column = 0;  // its strides
  std::vector<int64_t> chosen;  // of select
  int64_t before = 1, after = 1, size = 1;
};

// The steps, which do not depend on the weights. Buffers are the inputs, the outputs, then the intermediate ones.
class RowPlan {
 public:
  // `floats`: floats per row of each buffer; `constants`: floats of each constant. Throws std::invalid_argument if a
  // step reaches outside of them, or if the sizes of its views do not match.
  RowPlan(std::vector<int64_t> floats, int64_t inputs, int64_t outputs, std::vector<int64_t> constants,
          std::vector<RowStep> steps);

  int64_t inputs() const { return inputs_; }
  int64_t outputs() const { return outputs_; }
  const std::vector<int64_t>& floats() const { return floats_; }
  int64_t multiplications() const { return multiplications_; }  // of one row, in matrices and products

 private:
  friend class RowNet;
  // A map as loops, the one over rows outermost; evenly spaced neighbours are merged.
  struct Loop {
    int64_t size;  // of the first loop: per row
    int64_t a, b, out;
  };
  using Loops = std::vector<Loop>;
  void check(const RowView& view) const;
  void count_work(int64_t more);
  Loops loops_of(const RowStep& step) const;
  int64_t row_stride(const RowView& view) const;
  // Rows of a matrix in one row of the batch; -1 unless all rows of a block are evenly spaced, as one matrix.
  int64_t matrix_rows(const RowView& view, int64_t inner) const;
  bool may_be_added(const RowView& view, int64_t rows, int64_t n) const;

  std::vector<int64_t> floats_;
  int64_t inputs_, outputs_;
  std::vector<int64_t> constants_;
  std::vector<RowStep> steps_;
  std::vector<Loops> loops_;    // of each map; empty for other kinds
  std::vector<int64_t> begin_;  // where each intermediate buffer begins in the scratch memory, in floats per row
  int64_t scratch_ = 0;
  int64_t multiplications_ = 0;
};

class RowNet {
 public:
  // Copies `constants`. Throws std::invalid_argument if their sizes are not those of the plan.
  RowNet(std::shared_ptr<const RowPlan> plan, const std::vector<std::pair<const float*, int64_t>>& constants);

  RowNet(const RowNet&) = delete;
  RowNet& operator=(const RowNet&) = delete;

  const RowPlan& plan() const { return *plan_; }
  // Runs `rows` rows, which are contiguous in each input and output; with `parallel` on several threads if it pays.
  void run(const std::vector<const float*>& inputs, int64_t rows, const std::vector<float*>& outputs,
           bool parallel = false) const;

 private:
  void run_block(float* const* buffers, int64_t rows) const;
  void run_map(const RowStep& step, const RowPlan::Loops& loops, float* const* buffers, int64_t rows) const;
  void run_product(const RowStep& step, float* const* buffers, int64_t rows) const;
  const float* at(const RowView& view, float* const* buffers) const;

  std::shared_ptr<const RowPlan> plan_;
  std::vector<std::vector<float>> constants_;
  std::vector<PackedMatrix> matrices_;  // of each matrix step
};

}  // namespace shoal
