#include "table/rows/layout.h"

#include <stdexcept>
#include <string>

#include "table/rows/optimizers.h"

namespace shoal {

int32_t state_bytes(Opt opt, int32_t d) {
  int32_t bytes = 0;
  for (const StateField& field : kind_of(opt).state) bytes += field.size(d);
  return bytes;
}

int32_t code_bytes(Codec codec, int32_t d) {
  switch (codec) {
    case Codec::fp32:
      return 4 * d;
    case Codec::fp16:
      return 2 * d;
    case Codec::fixed_r8:
    case Codec::one_bit:
      return d;
  }
  throw std::invalid_argument("unknown codec " + std::to_string(static_cast<int>(codec)));
}

Layout::Layout(std::vector<Segment> list, bool serving, bool skip_zero)
    : segments(std::move(list)), serving(serving), skip_zero(skip_zero) {
  if (segments.empty()) throw std::invalid_argument("a table needs at least one segment");
  constexpr int64_t kMaxRow = int64_t{1} << 28;
  int64_t floats = 0, states = 0, codes = 0;
  for (auto& s : segments) {
    if (s.dim < 1) throw std::invalid_argument("dim_size must be at least 1, got " + std::to_string(s.dim));
    if (s.dim > kMaxRow / 16)
      throw std::invalid_argument("dim_size must be at most " + std::to_string(kMaxRow / 16) + ", got " +
                                  std::to_string(s.dim));
    if (s.opt == Opt::batch_softmax && s.dim != 1)
      throw std::invalid_argument("batch_softmax needs dim_size 1, got " + std::to_string(s.dim));
    s.weight = static_cast<int32_t>(floats);
    s.state = static_cast<int32_t>(states);  // made absolute below
    s.state_bytes = state_bytes(s.opt, s.dim);
    s.code = static_cast<int32_t>(codes);
    s.code_bytes = code_bytes(s.codec, s.dim);
    floats += s.dim;
    states += s.state_bytes;
    codes += s.code_bytes;
    if (4 * floats + states > kMaxRow)
      throw std::invalid_argument("a row must take at most " + std::to_string(kMaxRow) + " bytes, got " +
                                  std::to_string(4 * floats + states));
  }
  for (auto& s : segments) s.state += static_cast<int32_t>(4 * floats);
  dim = static_cast<int32_t>(floats);
  row_bytes = static_cast<int32_t>(serving ? codes : 4 * floats + states);
  stride = (row_bytes + 3) & ~3;
  if (serving) return;
  fresh_state.resize(static_cast<size_t>(states));
  for (const auto& s : segments) init_state(s, fresh_state.data() + (s.state - 4 * floats));
}

}  // namespace shoal
