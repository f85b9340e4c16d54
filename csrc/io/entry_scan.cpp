#include "io/entry_scan.h"

#include <stdexcept>

#include "core/wire.h"
#include "io/error.h"

namespace shoal {

namespace {

using wire::Reader;
using wire::tag;

// Not for hash tables: it only distinguishes equal from unequal inputs.
uint64_t mix(uint64_t h, uint64_t v) {
  h = (h ^ v) * 0x9E3779B97F4A7C15ull;
  return h ^ h >> 29;
}

// Hashes the kinds, the fields and the numbers of values of an OptimizerDump, without the values. False: not a message.
bool shape_of(Reader in, int depth, uint64_t* shape) {
  uint32_t last = 0;
  uint64_t count = 0;
  const auto close = [&] {
    if (count > 0) *shape = mix(*shape, static_cast<uint64_t>(last) << 32 | count);
    count = 0;
  };
  while (!in.done()) {
    uint32_t field;
    if (!in.field(&field)) return false;
    const uint32_t number = field >> 3;
    if (number != last) close();
    last = number;
    if ((field & 7) != wire::bytes) {
      if (!in.skip(field)) return false;
      ++count;
      continue;
    }
    Reader inner{};
    if (!in.span(&inner)) return false;
    if (depth < 2) {  // OptimizerDump, SingleOptimizerDump
      close();
      *shape = mix(*shape, number);
      if (!shape_of(inner, depth + 1, shape)) return false;
    } else {
      count += inner.left() / 4;  // packed floats
    }
  }
  close();
  return true;
}

Chunk::Payload as_payload(const Reader& reader) { return {reinterpret_cast<const char*>(reader.p), reader.left()}; }

void check_record(int64_t i, int64_t n) {
  if (i < 0 || i >= n)
    throw std::out_of_range("a record must be one of the " + std::to_string(n) + " read last, got " +
                            std::to_string(i));
}

}  // namespace

void EntryColumns::clear() {
  for (auto* column : {&ids, &times, &offsets, &dims, &shapes, &states}) column->clear();
  weights.clear();
}

bool EntryScan::next() {
  columns_.clear();
  states_.clear();
  if (!reader_.next(&chunk_)) {
    chunk_.starts.clear();
    return false;
  }
  for (size_t i = 0; i < chunk_.starts.size(); ++i) {
    const auto fail = [&](const std::string& what) {
      throw DataError(reader_.path() + ": record " + std::to_string(chunk_.first + static_cast<int64_t>(i)) + ": " +
                      what + chunk_.place(i));
    };
    const Chunk::Payload payload = chunk_.payload(i, reader_.path());
    const auto* data = reinterpret_cast<const uint8_t*>(payload.data);
    Reader in{data, data + payload.size};
    int64_t id = 0, time = 0;
    bool has_id = false, good = true;
    const size_t before = columns_.weights.size();
    Chunk::Payload state{payload.data, 0};
    uint64_t shape = 0;
    uint32_t state_crc = 0;
    while (good && !in.done()) {
      uint32_t field;
      if (!(good = in.field(&field))) break;
      if (field == tag(1, wire::fixed64)) {
        good = in.fixed(&id);
        has_id = true;
      } else if (field == tag(2, wire::fixed32)) {
        float value;
        if ((good = in.fixed(&value))) columns_.weights.push_back(value);
      } else if (field == tag(2, wire::bytes)) {
        Reader packed{};
        good = in.span(&packed) && packed.left() % 4 == 0;
        for (float value; good && packed.fixed(&value);) columns_.weights.push_back(value);
      } else if (field == tag(3, wire::bytes)) {
        Reader opt{};
        good = in.span(&opt) && shape_of(opt, 0, &shape);
        if (good) state = as_payload(opt);
        if (good) state_crc = crc32c(state.data, state.size);
      } else if (field == tag(4, wire::varint)) {
        uint64_t value;
        good = in.number(&value);
        time = static_cast<int64_t>(value);
      } else {
        good = in.skip(field);
      }
    }
    if (!good) fail("it is not an EntryDump message");
    if (!has_id || columns_.weights.size() == before) {
      fail(std::string("it has no ") + (has_id ? "weights" : "id") + ", so it is not a row of a table");
    }
    if (time < 0 || time > 0xFFFFFFFFll) fail("last_update_ts_sec must be 0..4294967295, got " + std::to_string(time));
    columns_.ids.push_back(id);
    columns_.times.push_back(time);
    columns_.offsets.push_back(chunk_.offset + static_cast<int64_t>(chunk_.starts[i]));
    columns_.dims.push_back(static_cast<int64_t>(columns_.weights.size() - before));
    columns_.shapes.push_back(static_cast<int64_t>(shape >> 1));
    columns_.states.push_back(state_crc);
    states_.push_back(state);
  }
  return true;
}

Chunk::Payload EntryScan::state(int64_t i) const {
  check_record(i, columns_.size());
  return states_[i];
}

Chunk::Payload EntryScan::frame(int64_t i) const {
  check_record(i, columns_.size());
  const char* header = chunk_.bytes.data() + chunk_.starts[i];
  uint64_t n;
  std::memcpy(&n, header, 8);
  return {header, kRecordHeader + n + kRecordFooter};
}

void EntrySink::copy(const EntryScan& scan, const int64_t* indices, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const Chunk::Payload frame = scan.frame(indices[i]);
    std::memcpy(file_.room(frame.size), frame.data, frame.size);
    file_.used(frame.size);
  }
}

void EntrySink::rows(const int64_t* ids, const int64_t* times, const float* weights, int64_t n, int64_t dim,
                     const char* states, int64_t state_bytes, const int64_t* ends) {
  if (n < 0 || dim < 1 || state_bytes < 0)
    throw std::invalid_argument("rows must have n >= 0, dim >= 1 and state_bytes >= 0, got " + std::to_string(n) +
                                ", " + std::to_string(dim) + " and " + std::to_string(state_bytes));
  int64_t begin = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t end = ends ? ends[i] : state_bytes;
    if (begin > end || end > state_bytes)
      throw std::invalid_argument("the ends of states must never fall and be at most " + std::to_string(state_bytes) +
                                  ", got " + std::to_string(end) + " after " + std::to_string(begin));
    const size_t state = end - begin;
    char* const record = file_.room(kRecordHeader + 40 + 5 * dim + state + kRecordFooter);
    char* out = record + kRecordHeader;
    *out++ = static_cast<char>(tag(1, wire::fixed64));
    std::memcpy(out, ids + i, 8);
    out += 8;
    for (int64_t d = 0; d < dim; ++d, out += 5) {
      *out = static_cast<char>(tag(2, wire::fixed32));
      std::memcpy(out + 1, weights + i * dim + d, 4);
    }
    if (state > 0) {
      *out++ = static_cast<char>(tag(3, wire::bytes));
      out = wire::put_varint(state, out);
      std::memcpy(out, states + begin, state);
      out += state;
    }
    *out++ = static_cast<char>(tag(4, wire::varint));
    out = wire::put_varint(static_cast<uint64_t>(times[i]), out);
    frame_record(record, out - record - kRecordHeader);
    file_.used(out - record + kRecordFooter);
    if (ends) begin = end;
  }
}

}  // namespace shoal
