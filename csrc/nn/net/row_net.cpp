#include "nn/net/row_net.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/thread_pool.h"

namespace shoal {
namespace {

constexpr int64_t kBlock = 64;                 // rows that pass all steps together
constexpr int64_t kShared = int64_t{1} << 23;  // multiplications that are worth another thread
constexpr int64_t kMost = int64_t{1} << 28;    // values of one row, in a buffer, a view or a constant

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("row net: " + what); }

// The number of values with these sizes, which are >= 0; kMost + 1 if there are more than kMost.
int64_t count_of(const std::vector<int64_t>& sizes) {
  int64_t all = 1;
  for (int64_t size : sizes) {
    if (size == 0) return 0;
    all = std::min(all, kMost + 1) * std::min(size, kMost + 1);
  }
  return std::min(all, kMost + 1);
}

bool is_count(int64_t number) { return number >= 0 && number <= kMost; }

std::string text_of(const std::vector<int64_t>& sizes) {
  std::string out = "[";
  for (int64_t size : sizes) out += (out.size() > 1 ? ", " : "") + std::to_string(size);
  return out + "]";
}

// Memory that a thread keeps for its next batch.
float* scratch_of_thread(size_t floats) {
  thread_local std::unique_ptr<float[], decltype(&std::free)> kept{nullptr, &std::free};
  thread_local size_t size = 0;
  if (size < floats) {
    const size_t bytes = (floats * sizeof(float) + 63) / 64 * 64;
    kept.reset(static_cast<float*>(std::aligned_alloc(64, bytes)));
    size = kept ? bytes / sizeof(float) : 0;
    if (!kept) throw std::bad_alloc();
  }
  return kept.get();
}

}  // namespace

RowPlan::RowPlan(std::vector<int64_t> floats, int64_t inputs, int64_t outputs, std::vector<int64_t> constants,
                 std::vector<RowStep> steps)
    : floats_(std::move(floats)),
      inputs_(inputs),
      outputs_(outputs),
      constants_(std::move(constants)),
      steps_(std::move(steps)) {
  if (!is_count(inputs_) || !is_count(outputs_) || inputs_ + outputs_ > static_cast<int64_t>(floats_.size()))
    refuse("there must be at least as many buffers as inputs and outputs, got " + std::to_string(floats_.size()) +
           " buffers, " + std::to_string(inputs_) + " inputs and " + std::to_string(outputs_) + " outputs");
  for (const auto* sizes : {&floats_, &constants_})
    for (int64_t size : *sizes)
      if (!is_count(size)) refuse("buffers and constants must have 0..268435456 values, got " + std::to_string(size));
  for (size_t i = static_cast<size_t>(inputs_ + outputs_); i < floats_.size(); ++i) {
    begin_.push_back(scratch_);
    scratch_ += (floats_[i] + 15) / 16 * 16;
  }
  for (const RowStep& step : steps_) {
    check(step.out);
    check(step.a);
    if (step.has_b) check(step.b);
    if (step.out.buffer < inputs_)
      refuse("a step must write to an output or an intermediate buffer, from " + std::to_string(inputs_) +
             " on, got buffer " + std::to_string(step.out.buffer));
    loops_.push_back(step.kind == RowStep::Kind::map ? loops_of(step) : Loops{});
    const auto& a = step.a;
    if (step.kind == RowStep::Kind::matrix) {
      if (step.constant < 0 || step.constant >= static_cast<int64_t>(constants_.size()))
        refuse("the constant of a matrix must be 0.." + std::to_string(static_cast<int64_t>(constants_.size()) - 1) +
               ", got " + std::to_string(step.constant));
      const int64_t values = constants_[static_cast<size_t>(step.constant)];
      const auto outside = [&] {
        refuse("a matrix must be within its constant of " + std::to_string(values) + " values, got [" +
               std::to_string(step.k) + ", " + std::to_string(step.n) + "] with strides " + std::to_string(step.row) +
               " and " + std::to_string(step.column));
      };
      for (int64_t each : {step.k, step.n, step.row, step.column})
        if (!is_count(each)) outside();
      const int64_t last = (step.k - 1) * step.row + (step.n - 1) * step.column;
      if (step.k < 1 || step.n < 1 || count_of({step.k, step.n}) > kMost || last >= values) outside();
      const int64_t rows = matrix_rows(a, step.k);
      if (rows < 0 || matrix_rows(step.out, step.n) != rows)
        refuse("the operand and the output of a matrix must have equally many rows, evenly spaced");
      if (step.has_b && (step.b.sizes != step.out.sizes || !may_be_added(step.b, rows, step.n)))
        refuse("the operand added to a product must have the product's sizes, got " + text_of(step.b.sizes) + " for " +
               text_of(step.out.sizes));
      count_work(rows * step.k * step.n);
    } else if (step.kind == RowStep::Kind::product) {
      if (a.sizes.size() != 2 || step.b.sizes.size() != 2 || step.out.sizes.size() != 2 || !step.has_b ||
          a.sizes[1] != step.b.sizes[0] || step.out.sizes[0] != a.sizes[0] || step.out.sizes[1] != step.b.sizes[1] ||
          a.strides[1] != 1 || step.out.strides[1] != 1)
        refuse("the operands and the output of a product must be [n, k], [k, m] and [n, m], got " + text_of(a.sizes) +
               ", " + text_of(step.b.sizes) + " and " + text_of(step.out.sizes));
      count_work(a.sizes[0] * a.sizes[1] * step.b.sizes[1]);
    } else if (step.kind == RowStep::Kind::select) {
      const int64_t chosen = static_cast<int64_t>(step.chosen.size());
      const auto differ = [&] {
        refuse("a selection must be from " + text_of({step.before, step.size, step.after}) + " to " +
               text_of({step.before, chosen, step.after}) + " values, got " + text_of(a.sizes) + " and " +
               text_of(step.out.sizes));
      };
      for (int64_t each : {step.before, step.size, step.after})
        if (!is_count(each)) differ();
      if (count_of(a.sizes) != count_of({step.before, step.size, step.after}) ||
          count_of(step.out.sizes) != count_of({step.before, chosen, step.after}))
        differ();
      for (const RowView* view : {&a, &step.out}) {
        int64_t stride = 1;
        for (size_t i = view->sizes.size(); i-- > 0; stride *= view->sizes[i])
          if (view->sizes[i] > 1 && view->strides[i] != stride) refuse("the values of a selection must be contiguous");
      }
      for (int64_t each : step.chosen)
        if (each < 0 || each >= step.size)
          refuse("a selection must name elements 0.." + std::to_string(step.size - 1) + ", got " +
                 std::to_string(each));
    }
  }
}

void RowPlan::count_work(int64_t more) { multiplications_ = std::min(multiplications_ + more, int64_t{1} << 36); }

void RowPlan::check(const RowView& view) const {
  const bool constant = view.buffer < 0;
  const auto& all = constant ? constants_ : floats_;
  const auto number = static_cast<size_t>(constant ? ~view.buffer : view.buffer);
  if (number >= all.size())
    refuse("the " + std::string(constant ? "constant" : "buffer") + " of a view must be 0.." +
           std::to_string(static_cast<int64_t>(all.size()) - 1) + ", got " + std::to_string(number));
  if (view.sizes.size() != view.strides.size())
    refuse("a view must have one stride per size, got " + std::to_string(view.strides.size()) + " strides and " +
           std::to_string(view.sizes.size()) + " sizes");
  const auto outside = [&] {
    refuse("a view must be within its " + std::string(constant ? "constant" : "buffer") + " of " +
           std::to_string(all[number]) + " values, got " + text_of(view.sizes) + " with strides " +
           text_of(view.strides) + " from " + std::to_string(view.at));
  };
  if (!is_count(view.at)) outside();
  for (size_t i = 0; i < view.sizes.size(); ++i)
    if (!is_count(view.sizes[i]) || !is_count(view.strides[i])) outside();
  const int64_t count = count_of(view.sizes);
  if (count == 0) return;
  if (count > kMost) outside();
  int64_t last = view.at;
  for (size_t i = 0; i < view.sizes.size() && last <= kMost; ++i) last += (view.sizes[i] - 1) * view.strides[i];
  if (last >= all[number]) outside();
}

int64_t RowPlan::row_stride(const RowView& view) const {
  return view.buffer < 0 ? 0 : floats_[static_cast<size_t>(view.buffer)];
}

int64_t RowPlan::matrix_rows(const RowView& view, int64_t inner) const {
  if (view.sizes.empty() || view.sizes.back() != inner || (inner > 1 && view.strides.back() != 1)) return -1;
  int64_t rows = 1, stride = 0;
  for (size_t i = view.sizes.size() - 1; i-- > 0;) {
    if (view.sizes[i] == 1) continue;
    if (rows == 1) {
      stride = view.strides[i];
    } else if (view.strides[i] != stride * rows) {
      return -1;
    }
    rows *= view.sizes[i];
  }
  // The next batch row's rows must follow at the same distance.
  if (rows > 1 && row_stride(view) != stride * rows) return -1;
  return rows;
}

bool RowPlan::may_be_added(const RowView& view, int64_t rows, int64_t n) const {
  if (view.buffer >= 0) return matrix_rows(view, n) == rows;
  for (size_t i = 0; i + 1 < view.sizes.size(); ++i)  // one row of numbers, added to all
    if (view.sizes[i] > 1 && view.strides[i] != 0) return false;
  return n == 1 || view.strides.back() == 1;
}

RowPlan::Loops RowPlan::loops_of(const RowStep& step) const {
  const RowView &a = step.a, &b = step.has_b ? step.b : step.a, &out = step.out;
  if (a.sizes != out.sizes || b.sizes != out.sizes)
    refuse("the operands of a map must have the sizes of its output, " + text_of(out.sizes) + ", got " +
           text_of(a.sizes) + " and " + text_of(b.sizes));
  Loops loops{{1, row_stride(a), row_stride(b), row_stride(out)}};
  for (size_t i = 0; i < out.sizes.size(); ++i) {
    if (out.sizes[i] == 1) continue;
    const Loop next{out.sizes[i], a.strides[i], b.strides[i], out.strides[i]};
    Loop& last = loops.back();
    if (last.a == next.a * next.size && last.b == next.b * next.size && last.out == next.out * next.size) {
      last = {last.size * next.size, next.a, next.b, next.out};
    } else {
      loops.push_back(next);
    }
  }
  return loops;
}

// --- a net: a plan with weights --------------------------------------------------------------------------------------

RowNet::RowNet(std::shared_ptr<const RowPlan> plan, const std::vector<std::pair<const float*, int64_t>>& constants)
    : plan_(std::move(plan)) {
  if (constants.size() != plan_->constants_.size())
    refuse("there must be " + std::to_string(plan_->constants_.size()) + " constants, got " +
           std::to_string(constants.size()));
  for (size_t i = 0; i < constants.size(); ++i) {
    if (constants[i].second != plan_->constants_[i])
      refuse("constant " + std::to_string(i) + " must have " + std::to_string(plan_->constants_[i]) + " values, got " +
             std::to_string(constants[i].second));
    constants_.emplace_back(constants[i].first, constants[i].first + constants[i].second);
  }
  std::vector<uint8_t> viewed(constants_.size(), 0);
  auto note = [&](const RowView& view) {
    if (view.buffer < 0) viewed[static_cast<size_t>(~view.buffer)] = 1;
  };
  for (const RowStep& step : plan_->steps_) {
    note(step.a);
    if (step.has_b) note(step.b);
    if (step.kind != RowStep::Kind::matrix) continue;
    const float* values = constants_[static_cast<size_t>(step.constant)].data();
    matrices_.push_back(PackedMatrix::empty(step.k, step.n));
    matrices_.back().pack(values, step.row, step.column);
  }
  for (size_t i = 0; i < constants_.size(); ++i)
    if (!viewed[i]) std::vector<float>().swap(constants_[i]);  // only its packed form is used
}

const float* RowNet::at(const RowView& view, float* const* buffers) const {
  const float* base = view.buffer < 0 ? constants_[static_cast<size_t>(~view.buffer)].data() : buffers[view.buffer];
  return base + view.at;
}

void RowNet::run(const std::vector<const float*>& inputs, int64_t rows, const std::vector<float*>& outputs,
                 bool parallel) const {
  const auto ins = static_cast<size_t>(plan_->inputs_), outs = static_cast<size_t>(plan_->outputs_);
  if (inputs.size() != ins || outputs.size() != outs)
    refuse("run must get " + std::to_string(ins) + " inputs and " + std::to_string(outs) + " outputs, got " +
           std::to_string(inputs.size()) + " and " + std::to_string(outputs.size()));
  const std::vector<int64_t>& floats = plan_->floats_;
  auto some = [&](int64_t first, int64_t last) {
    float* scratch = scratch_of_thread(static_cast<size_t>(plan_->scratch_ * std::min(kBlock, last - first)));
    std::vector<float*> buffers(floats.size());
    for (int64_t begin = first; begin < last; begin += kBlock) {
      const int64_t n = std::min(kBlock, last - begin);
      for (size_t i = 0; i < ins; ++i) buffers[i] = const_cast<float*>(inputs[i]) + begin * floats[i];
      for (size_t i = 0; i < outs; ++i) buffers[ins + i] = outputs[i] + begin * floats[ins + i];
      for (size_t i = ins + outs; i < floats.size(); ++i) buffers[i] = scratch + plan_->begin_[i - ins - outs] * n;
      run_block(buffers.data(), n);
    }
  };
  const int64_t work = rows * std::max<int64_t>(1, plan_->multiplications_);
  if (parallel && rows > kBlock && work >= 2 * kShared) {
    const int64_t grain = std::max(kBlock, kShared / std::max<int64_t>(1, plan_->multiplications_));
    parallel_for(rows, (grain + kBlock - 1) / kBlock * kBlock, some);
  } else {
    some(0, rows);
  }
}

void RowNet::run_block(float* const* buffers, int64_t rows) const {
  size_t matrix = 0;
  for (size_t i = 0; i < plan_->steps_.size(); ++i) {
    const RowStep& step = plan_->steps_[i];
    float* out = const_cast<float*>(at(step.out, buffers));
    switch (step.kind) {
      case RowStep::Kind::map:
        run_map(step, plan_->loops_[i], buffers, rows);
        break;
      case RowStep::Kind::matrix: {
        const PackedMatrix& packed = matrices_[matrix++];
        const int64_t each = plan_->matrix_rows(step.a, step.k);
        if (each == 0) break;
        auto stride = [&](const RowView& view) { return plan_->row_stride(view) / each; };
        multiply({at(step.a, buffers), stride(step.a), rows * each, step.has_b ? at(step.b, buffers) : nullptr,
                  step.has_b ? stride(step.b) : 0, out, stride(step.out)},
                 packed);
        break;
      }
      case RowStep::Kind::product:
        run_product(step, buffers, rows);
        break;
      case RowStep::Kind::select: {
        const float* from = at(step.a, buffers);
        for (int64_t r = 0; r < rows; ++r, from += plan_->row_stride(step.a), out += plan_->row_stride(step.out)) {
          float* to = out;
          for (int64_t b = 0; b < step.before; ++b)
            for (int64_t each : step.chosen) {
              const float* values = from + (b * step.size + each) * step.after;
              for (int64_t k = 0; k < step.after; ++k) *to++ = values[k];
            }
        }
        break;
      }
    }
  }
}

void RowNet::run_map(const RowStep& step, const RowPlan::Loops& loops, float* const* buffers, int64_t rows) const {
  struct Level {
    int64_t size, a, b, out, done = 0;
  };
  std::vector<Level> outer;
  Inner inner{{1, 1}, {0, 0}, {0, 0}, {0, 0}, step.number, step.other};
  const size_t inside = std::min<size_t>(2, loops.size());
  for (size_t i = 0; i < loops.size(); ++i) {
    const int64_t size = i ? loops[i].size : loops[i].size * rows;
    if (size == 0) return;
    const size_t depth = loops.size() - 1 - i;
    if (depth < inside) {
      inner.count[depth] = size;
      inner.a[depth] = loops[i].a, inner.b[depth] = loops[i].b, inner.out[depth] = loops[i].out;
    } else {
      outer.push_back({size, loops[i].a, loops[i].b, loops[i].out});
    }
  }
  const float* a = at(step.a, buffers);
  const float* b = step.has_b ? at(step.b, buffers) : a;
  float* out = const_cast<float*>(at(step.out, buffers));
  for (;;) {
    SHOAL_DISPATCH(apply_op)(step.op, inner, a, b, out);
    size_t level = outer.size();
    for (; level-- > 0;) {
      Level& one = outer[level];
      a += one.a, b += one.b, out += one.out;
      if (++one.done < one.size) break;
      a -= one.a * one.size, b -= one.b * one.size, out -= one.out * one.size;
      one.done = 0;
    }
    if (level == static_cast<size_t>(-1)) return;
  }
}

void RowNet::run_product(const RowStep& step, float* const* buffers, int64_t rows) const {
  const int64_t n = step.a.sizes[0], k = step.a.sizes[1], m = step.b.sizes[1];
  const float *a = at(step.a, buffers), *b = at(step.b, buffers);
  float* out = const_cast<float*>(at(step.out, buffers));
  const int64_t row_a = plan_->row_stride(step.a), row_b = plan_->row_stride(step.b),
                row_out = plan_->row_stride(step.out);
  PackedMatrix matrix = PackedMatrix::empty(k, m);
  for (int64_t r = 0; r < rows; ++r, a += row_a, b += row_b, out += row_out) {
    if (r == 0 || row_b) matrix.pack(b, step.b.strides[0], step.b.strides[1]);
    multiply({a, step.a.strides[0], n, nullptr, 0, out, step.out.strides[0]}, matrix);
  }
}

}  // namespace shoal
