#include "io/filter_dump.h"

#include <algorithm>
#include <cstring>

#include "core/wire.h"
#include "io/error.h"
#include "io/out_file.h"
#include "io/record.h"

namespace shoal {

namespace {

constexpr int64_t kCellsPerRecord = 10000;

void read_cells(wire::Reader in, uint16_t* cells, int64_t n, const std::string& where) {
  // A first pass finds the offset, which may come after the data.
  const auto bad = [&] { return DataError(where + "not a HashFilterSplitDataDump message"); };
  uint64_t offset = 0;
  for (wire::Reader first = in; !first.done();) {
    uint32_t field;
    if (!first.field(&field)) throw bad();
    if (field == wire::tag(1, wire::varint) ? !first.number(&offset) : !first.skip(field)) throw bad();
  }
  const auto put = [&](uint64_t value) {
    if (offset >= static_cast<uint64_t>(n)) {
      throw DataError(where + "a cell's number must be below " + std::to_string(n) + ", got " + std::to_string(offset));
    }
    if (value > 0xFFFF) throw DataError(where + "a cell must be 0..65535, got " + std::to_string(value));
    cells[offset++] = static_cast<uint16_t>(value);
  };
  while (!in.done()) {
    uint32_t field;
    uint64_t value;
    if (!in.field(&field)) throw bad();
    if (field == wire::tag(2, wire::varint)) {
      if (!in.number(&value)) throw bad();
      put(value);
    } else if (field == wire::tag(2, wire::bytes)) {  // packed
      wire::Reader packed{};
      if (!in.span(&packed)) throw bad();
      while (!packed.done()) {
        if (!packed.number(&value)) throw bad();
        put(value);
      }
    } else if (!in.skip(field)) {
      throw bad();
    }
  }
}

}  // namespace

FileDigest write_filter_block(const std::string& temporary, const std::string& path, const std::string& meta,
                              const uint16_t* cells, int64_t n) {
  OutFile file(temporary, false);
  char* record = file.room(kRecordHeader + meta.size() + kRecordFooter);
  std::memcpy(record + kRecordHeader, meta.data(), meta.size());
  frame_record(record, meta.size());
  file.used(kRecordHeader + meta.size() + kRecordFooter);
  for (int64_t offset = 0; offset < n; offset += kCellsPerRecord) {
    const int64_t end = std::min(n, offset + kCellsPerRecord);
    record = file.room(kRecordHeader + 16 + 4 * kCellsPerRecord + kRecordFooter);
    char* out = record + kRecordHeader;
    *out++ = static_cast<char>(wire::tag(1, wire::varint));
    out = wire::put_varint(static_cast<uint64_t>(offset), out);
    for (int64_t i = offset; i < end; ++i) {
      *out++ = static_cast<char>(wire::tag(2, wire::varint));
      out = wire::put_varint(cells[i], out);
    }
    frame_record(record, out - record - kRecordHeader);
    file.used(out - record + kRecordFooter);
  }
  file.sync();
  file.rename_to(path);
  return file.digest();
}

std::string read_filter_meta(const std::string& path) {
  ChunkReader reader(path, false);
  Chunk chunk;
  if (!reader.next(&chunk)) throw DataError(path + ": the file is empty");
  const Chunk::Payload payload = chunk.payload(0, path);
  return {payload.data, payload.size};
}

FileDigest read_filter_cells(const std::string& path, uint16_t* cells, int64_t n) {
  std::fill(cells, cells + n, 0);
  ChunkReader reader(path, false);
  for (Chunk chunk; reader.next(&chunk);) {
    for (size_t i = 0; i < chunk.starts.size(); ++i) {
      const Chunk::Payload payload = chunk.payload(i, path);
      const int64_t number = chunk.first + static_cast<int64_t>(i);
      if (number == 0) continue;  // the meta message
      const uint8_t* data = reinterpret_cast<const uint8_t*>(payload.data);
      read_cells({data, data + payload.size}, cells, n, path + ": record " + std::to_string(number) + ": ");
    }
  }
  return reader.digest();
}

}  // namespace shoal
