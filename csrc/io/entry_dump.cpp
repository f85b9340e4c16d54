#include "io/entry_dump.h"

#include <algorithm>
#include <cstring>

#include "io/error.h"
#include "table/rows/codec.h"
#include "table/rows/optimizers.h"

namespace shoal {

namespace {

using wire::Reader;
using wire::tag;

using enum StateField::Type;

const OptKind* find_kind(uint32_t number) {
  for (const OptKind& kind : kOptKinds) {
    if (kind.number == number && number != 0) return &kind;
  }
  return nullptr;
}

// Every value is stored as tag + 4 bytes. A word of 8 bytes is written; the next value overwrites its last 3.
inline char* put_float(uint32_t field_tag, const char* from, char* out) {
  uint32_t bits;
  std::memcpy(&bits, from, 4);
  const uint64_t word = static_cast<uint64_t>(bits) << 8 | field_tag;
  std::memcpy(out, &word, 8);
  return out + 5;
}

inline char* put_floats(uint32_t field_tag, const char* from, int32_t n, char* out) {
  for (int32_t i = 0; i < n; ++i) out = put_float(field_tag, from + 4 * i, out);
  return out;
}

// Appends to `out` while there is room and counts all values; the caller compares the count with the expected one.
bool read_floats(Reader* in, uint32_t field_tag, char* out, int64_t room, int64_t* count) {
  const auto take = [&](const uint8_t* from) {
    if (*count < room) std::memcpy(out + 4 * *count, from, 4);
    ++*count;
  };
  if ((field_tag & 7) == wire::bytes) {  // packed
    Reader packed{};
    if (!in->span(&packed) || packed.left() % 4 != 0) return false;
    for (; !packed.done(); packed.p += 4) take(packed.p);
    return true;
  }
  const uint8_t* p = in->p;
  if (in->left() < 4) return false;
  take(p);
  p += 4;
  int64_t n = *count;                                    // locals: `out` might alias anything
  for (; in->end - p >= 5 && *p == field_tag; p += 5) {  // field numbers here are below 16: the tag is one byte
    if (n < room) std::memcpy(out + 4 * n, p + 1, 4);
    ++n;
  }
  *count = n;
  in->p = p;
  return true;
}

bool is_floats(uint32_t field_tag, uint32_t number) {
  return field_tag == tag(number, wire::fixed32) || field_tag == tag(number, wire::bytes);
}

DataError no_message() { return DataError("a record is not an EntryDump message"); }

std::string count_of(int64_t n, const char* what) { return std::to_string(n) + " " + what; }

}  // namespace

EntryEncoder::EntryEncoder(const Layout& layout, bool state) : layout_(layout), state_(state) {
  max_bytes_ = 80 + 5 * static_cast<size_t>(layout.dim);
  for (const Segment& segment : layout.segments) {
    uint32_t floats = 0;
    int32_t step_at = -1;
    for (const StateField& field : kind_of(segment.opt).state) {
      if (field.type == step) {
        step_at = segment.state + field.offset(segment.dim);
      } else {
        floats += 5 * (field.type == vector ? segment.dim : 1);
      }
    }
    float_bytes_.push_back(floats);
    step_.push_back(step_at);
    max_bytes_ += 32 + floats;
  }
}

char* EntryEncoder::encode(const char* row, uint32_t time, const int64_t* id, uint64_t score, char* out) const {
  const auto end = [&](char* at) {
    *at++ = static_cast<char>(tag(4, wire::varint));
    at = wire::put_varint(time, at);
    if (!score) return at;
    *at++ = static_cast<char>(tag(15, wire::varint));
    return wire::put_varint(score, at);
  };
  if (id) {
    *out++ = static_cast<char>(tag(1, wire::fixed64));
    std::memcpy(out, id, 8);
    out += 8;
  }
  out = put_floats(tag(2, wire::fixed32), row, layout_.dim, out);

  if (!state_) return end(out);
  const size_t n = layout_.segments.size();
  const auto message_bytes = [&](size_t i) -> size_t {
    if (step_[i] < 0) return float_bytes_[i];
    int64_t value;
    std::memcpy(&value, row + step_[i], 8);
    return float_bytes_[i] + 1 + wire::varint_bytes(static_cast<uint64_t>(value));
  };
  const auto element_bytes = [&](size_t i) {
    const size_t message = message_bytes(i);
    return wire::varint_bytes(tag(kind_of(layout_.segments[i].opt).number, wire::bytes)) + wire::varint_bytes(message) +
           message;
  };
  size_t opt_bytes = 0;
  for (size_t i = 0; i < n; ++i) {
    if (kind_of(layout_.segments[i].opt).number == 0) continue;
    const size_t element = element_bytes(i);
    opt_bytes += 1 + wire::varint_bytes(element) + element;
  }
  *out++ = static_cast<char>(tag(3, wire::bytes));
  out = wire::put_varint(opt_bytes, out);
  for (size_t i = 0; i < n; ++i) {
    const Segment& segment = layout_.segments[i];
    const OptKind& kind = kind_of(segment.opt);
    if (kind.number == 0) continue;
    *out++ = static_cast<char>(tag(1, wire::bytes));
    out = wire::put_varint(element_bytes(i), out);
    out = wire::put_varint(tag(kind.number, wire::bytes), out);
    out = wire::put_varint(message_bytes(i), out);
    for (const StateField& field : kind.state) {
      const char* from = row + segment.state + field.offset(segment.dim);
      if (field.type == step) {
        int64_t value;
        std::memcpy(&value, from, 8);
        *out++ = static_cast<char>(tag(field.number, wire::varint));
        out = wire::put_varint(static_cast<uint64_t>(value), out);
      } else {
        out = put_floats(tag(field.number, wire::fixed32), from, field.type == vector ? segment.dim : 1, out);
      }
    }
  }
  return end(out);
}

EntryDecoder::EntryDecoder(const Layout& layout, bool strict) : layout_(layout), strict_(strict) {
  for (size_t i = 0; i < layout.segments.size(); ++i) {
    const Segment& segment = layout.segments[i];
    if (kind_of(segment.opt).number == 0) continue;
    dumped_.push_back(static_cast<int>(i));
    stateless_ = stateless_ && state_bytes(segment.opt, segment.dim) == 0;
  }
  weights_.resize(layout.dim);
}

EntryHead EntryDecoder::decode(const char* data, size_t n, char* row) {
  Reader in{reinterpret_cast<const uint8_t*>(data), reinterpret_cast<const uint8_t*>(data) + n};
  EntryHead head;
  int64_t time = 0;
  int64_t weights = 0;
  char* const weights_out = layout_.serving ? reinterpret_cast<char*>(weights_.data()) : row;
  opts_.clear();
  while (!in.done()) {
    uint32_t field;
    bool good = in.field(&field);
    if (!good) throw no_message();
    if (field == tag(1, wire::fixed64)) {
      good = in.fixed(&head.id);
    } else if (is_floats(field, 2)) {
      good = read_floats(&in, field, weights_out, layout_.dim, &weights);
    } else if (field == tag(3, wire::bytes)) {
      opts_.emplace_back();
      good = in.span(&opts_.back());
    } else if (field == tag(4, wire::varint)) {
      uint64_t value;
      good = in.number(&value);
      time = static_cast<int64_t>(value);
    } else if (field == tag(15, wire::varint)) {
      good = in.number(&head.score);
    } else {
      good = in.skip(field);
    }
    if (!good) throw no_message();
  }

  const auto who = [&] { return "id " + std::to_string(head.id) + ": "; };
  if (weights != layout_.dim) {
    size_t i = 0;  // the segment in which they end, or the last one if there are too many
    while (i + 1 < layout_.segments.size() && weights >= layout_.segments[i + 1].weight) ++i;
    throw DataError(who() + "segment " + std::to_string(i) + ": the record has " + count_of(weights, "weights") +
                    ", the table has dim " + std::to_string(layout_.dim));
  }
  if (time < 0 || time > 0xFFFFFFFFll) {
    throw DataError(who() + "last_update_ts_sec must be 0..4294967295, got " + std::to_string(time));
  }
  head.time = static_cast<uint32_t>(time);
  if (layout_.serving) {
    head.keep = !(layout_.skip_zero && is_zero(weights_.data(), layout_.dim));
    if (head.keep) encode_row(layout_, weights_.data(), row);
  } else {
    decode_states(head.id, row);
  }
  return head;
}

void EntryDecoder::decode_states(int64_t id, char* row) {
  elements_.clear();
  for (Reader opt : opts_) {
    while (!opt.done()) {
      uint32_t field;
      Reader element{};
      if (!opt.field(&field)) throw no_message();
      if (field == tag(1, wire::bytes) ? !opt.span(&element) : !opt.skip(field)) throw no_message();
      if (field == tag(1, wire::bytes)) elements_.push_back(element);
    }
  }
  const auto fresh = [&](int i) { init_state(layout_.segments[i], row + layout_.segments[i].state); };
  if (elements_.size() != dumped_.size()) {
    if (elements_.empty() && stateless_) return;  // the writer left out empty messages
    if (strict_) {
      const size_t common = std::min(elements_.size(), dumped_.size());
      const size_t i = common < dumped_.size() ? dumped_[common] : layout_.segments.size() - 1;
      throw DataError("id " + std::to_string(id) + ": segment " + std::to_string(i) + ": the record has " +
                      count_of(static_cast<int64_t>(elements_.size()), "optimizer states") +
                      ", the table's segments (except moving_average) have " + std::to_string(dumped_.size()));
    }
    for (int i : dumped_) fresh(i);
    return;
  }
  for (size_t e = 0; e < elements_.size(); ++e) {
    const int i = dumped_[e];
    const Segment& segment = layout_.segments[i];
    const std::string problem = decode_state(segment, elements_[e], row + segment.state);
    if (problem.empty()) continue;
    if (strict_) {
      throw DataError("id " + std::to_string(id) + ": segment " + std::to_string(i) + " (" + kind_of(segment.opt).name +
                      "): " + problem);
    }
    fresh(i);
  }
}

std::string EntryDecoder::decode_state(const Segment& segment, Reader element, char* state) {
  // A oneof: a member of another kind replaces the previous one; one of the same kind is merged with it.
  const OptKind* found = nullptr;
  parts_.clear();
  while (!element.done()) {
    uint32_t field;
    if (!element.field(&field)) throw no_message();
    const OptKind* kind = (field & 7) == wire::bytes ? find_kind(field >> 3) : nullptr;
    if (!kind) {
      if (!element.skip(field)) throw no_message();
      continue;
    }
    Reader part{};
    if (!element.span(&part)) throw no_message();
    if (kind != found) parts_.clear();
    found = kind;
    parts_.push_back(part);
  }
  const OptKind& wanted = kind_of(segment.opt);
  if (found != &wanted) return std::string("the record has the state of ") + (found ? found->name : "no optimizer");

  int64_t counts[8] = {};
  for (Reader part : parts_) {
    while (!part.done()) {
      uint32_t field_tag;
      if (!part.field(&field_tag)) throw no_message();
      size_t f = 0;
      for (; f < wanted.state.size(); ++f) {
        const StateField& field = wanted.state[f];
        if (field.type == vector ? is_floats(field_tag, field.number)
                                 : field_tag == tag(field.number, field.type == step ? wire::varint : wire::fixed32)) {
          break;
        }
      }
      if (f == wanted.state.size()) {
        if (!part.skip(field_tag)) throw no_message();
        continue;
      }
      const StateField& field = wanted.state[f];
      char* out = state + field.offset(segment.dim);
      if (field.type == vector) {
        if (!read_floats(&part, field_tag, out, segment.dim, &counts[f])) throw no_message();
        continue;
      }
      counts[f] = 1;  // the last one counts
      uint64_t value = 0;
      uint32_t bits = 0;
      if (field.type == step ? !part.number(&value) : !part.fixed(&bits)) throw no_message();
      if (field.type == step) {
        std::memcpy(out, &value, 8);
      } else {
        std::memcpy(out, &bits, 4);
      }
    }
  }
  for (size_t f = 0; f < wanted.state.size(); ++f) {
    const StateField& field = wanted.state[f];
    const int64_t expected = field.type == vector ? segment.dim : 1;
    if (counts[f] == expected) continue;
    if (field.type == step) {  // absent: the message's default
      std::memset(state + field.offset(segment.dim), 0, 8);
      continue;
    }
    return std::string("its ") + field.name + " has " + count_of(counts[f], "values") + ", the table needs " +
           std::to_string(expected);
  }
  return {};
}

}  // namespace shoal
