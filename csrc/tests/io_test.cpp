// Checksums, Snappy blocks, records and EntryDump messages; no table.
#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "io/crc32c.h"
#include "io/entry_dump.h"
#include "io/error.h"
#include "io/out_file.h"
#include "io/record.h"
#include "io/snappy.h"
#include "tests/check.h"

using namespace shoal;

namespace {

std::string random_bytes(std::mt19937& random, size_t n, int alphabet) {
  std::string out(n, 0);
  for (char& c : out) c = static_cast<char>(random() % alphabet);
  return out;
}

std::string pack(const std::string& data) {
  std::string out(snappy_bound(data.size()), 0);
  out.resize(snappy_compress(data.data(), data.size(), out.data()));
  return out;
}

std::string unpack(const std::string& packed) {
  std::string out(snappy_length(packed.data(), packed.size()), 0);
  snappy_decompress(packed.data(), packed.size(), out.data(), out.size());
  return out;
}

Segment segment(Opt opt, int32_t dim) {
  Segment s;
  s.opt = opt;
  s.dim = dim;
  return s;
}

std::string temporary_path() {
  char path[] = "/tmp/shoal-io-test-XXXXXX";
  const int fd = ::mkstemp(path);
  ::close(fd);
  ::unlink(path);
  return path;
}

std::vector<std::string> read_records(const std::string& path, bool snappy) {
  ChunkReader reader(path, snappy);
  std::vector<std::string> out;
  for (Chunk chunk; reader.next(&chunk);) {
    CHECK(chunk.first == static_cast<int64_t>(out.size()));
    for (size_t i = 0; i < chunk.starts.size(); ++i) {
      const auto payload = chunk.payload(i, path);
      out.emplace_back(payload.data, payload.size);
    }
  }
  return out;
}

void write_file(const std::string& path, const std::string& bytes) {
  std::FILE* file = std::fopen(path.c_str(), "wb");
  CHECK(file && std::fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size());
  std::fclose(file);
}

std::string read_file(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "rb");
  CHECK(file);
  std::string out(1 << 22, 0);
  out.resize(std::fread(out.data(), 1, out.size(), file));
  std::fclose(file);
  return out;
}

}  // namespace

TEST(crc_has_the_published_check_value_either_way) {
  CHECK(crc32c("123456789", 9) == 0xE3069283u);
  CHECK(crc32c_portable("123456789", 9) == 0xE3069283u);
  std::mt19937 random(1);
  std::vector<size_t> sizes(420);  // beyond that, around multiples of its blocks
  std::iota(sizes.begin(), sizes.end(), size_t{0});
  sizes.insert(sizes.end(), {767, 768, 3071, 3072, 3073, 3456, 3463, 6144, 10007});
  for (const size_t n : sizes) {
    const std::string data = random_bytes(random, n, 256);
    CHECK(crc32c(data.data(), n) == crc32c_portable(data.data(), n));
    CHECK(crc32c_extend(crc32c(data.data(), n / 3), data.data() + n / 3, n - n / 3) == crc32c(data.data(), n));
  }
}

TEST(snappy_gives_back_what_it_was_given) {
  std::mt19937 random(2);
  for (int alphabet : {1, 2, 4, 256}) {
    for (size_t n : {0, 1, 3, 4, 15, 16, 17, 60, 61, 64, 68, 257, 5000, 65535, 65536, 65537, 300000}) {
      const std::string data = random_bytes(random, n, alphabet);
      const std::string packed = pack(data);
      CHECK(packed.size() <= snappy_bound(n));
      CHECK(unpack(packed) == data);
    }
  }
  CHECK(pack(std::string(100000, 'x')).size() < 6000);
}

TEST(snappy_refuses_malformed_blocks) {
  std::mt19937 random(3);
  const std::string packed = pack(random_bytes(random, 3000, 3));
  for (size_t n = 0; n < packed.size(); ++n) CHECK_THROWS(unpack(packed.substr(0, n)));
  for (int i = 0; i < 20000; ++i) {  // a changed byte gives other bytes or an error, never a read or write outside
    std::string bad = packed;
    bad[random() % bad.size()] = static_cast<char>(random());
    try {
      unpack(bad);
    } catch (const DataError&) {
    }
  }
  CHECK_THROWS(unpack(std::string("\xFF\xFF\xFF\xFF\x0F\x00", 6)));  // 4 GB claimed by one byte
}

TEST(records_survive_a_file_and_a_damaged_one_is_refused) {
  std::mt19937 random(4);
  for (bool snappy : {false, true}) {
    std::vector<std::string> records;
    for (int i = 0; i < 200; ++i) records.push_back(random_bytes(random, random() % 3000, 5));
    records.push_back(random_bytes(random, 700000, 256));  // longer than a Snappy block
    const std::string path = temporary_path();
    {
      OutFile file(path + "-tmp", snappy);
      for (const auto& record : records) {
        char* out = file.room(kRecordHeader + record.size() + kRecordFooter);
        std::memcpy(out + kRecordHeader, record.data(), record.size());
        frame_record(out, record.size());
        file.used(kRecordHeader + record.size() + kRecordFooter);
      }
      file.sync();
      file.rename_to(path);
    }
    CHECK(read_records(path, snappy) == records);
    const std::string whole = read_file(path);
    for (int i = 0; i < 60; ++i) {
      write_file(path, whole.substr(0, 1 + random() % (whole.size() - 1)));
      bool clean = false;
      std::vector<std::string> got;
      try {
        got = read_records(path, snappy);
        clean = true;
      } catch (const DataError&) {
      }
      if (clean) CHECK(got.size() < records.size());  // cut exactly between two records
    }
    for (int i = 0; i < 60; ++i) {
      std::string bad = whole;
      bad[random() % bad.size()] ^= static_cast<char>(1 << random() % 8);
      write_file(path, bad);
      if (!snappy) {
        CHECK_THROWS(read_records(path, snappy));
      } else {
        try {
          CHECK(read_records(path, snappy) == records);  // two encodings of the same bytes
        } catch (const DataError&) {
        }
      }
    }
    ::unlink(path.c_str());
  }
  CHECK_THROWS(ByteReader("/nonexistent/file", false));
}

TEST(an_abandoned_file_leaves_nothing_behind) {
  const std::string path = temporary_path();
  {
    OutFile file(path, false);
    std::memset(file.room(10), 0, 10);
    file.used(10);
  }
  CHECK(::access(path.c_str(), F_OK) != 0);
}

TEST(every_optimizer_is_read_back_as_it_was_written) {
  std::mt19937 random(5);
  for (int opt = 0; opt < static_cast<int>(std::size(kOptKinds)); ++opt) {
    const int32_t dim = static_cast<Opt>(opt) == Opt::batch_softmax ? 1 : 5;
    const Layout layout({segment(static_cast<Opt>(opt), dim), segment(Opt::moving_average, 2), segment(Opt::ftrl, 3)},
                        false, false);
    const EntryEncoder encoder(layout);
    EntryDecoder decoder(layout, true);
    for (int round = 0; round < 200; ++round) {
      const std::string row = random_bytes(random, layout.row_bytes, 256);
      const int64_t id = static_cast<int64_t>(random()) << 32 | random();
      std::string message(encoder.max_bytes(), 0);
      message.resize(encoder.encode(row.data(), random(), &id, 0, message.data()) - message.data());
      std::string back(layout.row_bytes, 1);
      const EntryHead head = decoder.decode(message.data(), message.size(), back.data());
      CHECK(head.id == id && back == row && head.keep);
      for (int i = 0; i < 50; ++i) {  // damaged messages: an error or another row, never more
        std::string bad = message.substr(0, i % 2 ? message.size() : random() % message.size());
        if (!bad.empty()) bad[random() % bad.size()] = static_cast<char>(random());
        try {
          decoder.decode(bad.data(), bad.size(), back.data());
        } catch (const DataError&) {
        }
      }
    }
  }
}

TEST(a_record_without_state_has_only_the_weights) {
  const Layout adam({segment(Opt::adam, 2)}, false, false);
  const Layout serving({segment(Opt::adam, 2)}, true, false);
  const float row[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  const EntryEncoder encoder(adam, false);
  std::string message(encoder.max_bytes(), 0);
  const int64_t id = 42;
  message.resize(encoder.encode(reinterpret_cast<const char*>(row), 7, &id, 0, message.data()) - message.data());
  CHECK(message.size() == 9 + 2 * 5 + 2);
  std::vector<char> out(serving.row_bytes);
  const EntryHead head = EntryDecoder(serving, true).decode(message.data(), message.size(), out.data());
  float weights[2];
  std::memcpy(weights, out.data(), 8);
  CHECK(head.id == 42 && head.time == 7 && weights[0] == 1 && weights[1] == 2);
}

TEST(a_record_of_another_table_is_refused_or_starts_fresh) {
  const Layout adagrad({segment(Opt::adagrad, 2)}, false, false);
  const Layout adam({segment(Opt::adam, 2)}, false, false);
  const Layout wide({segment(Opt::adagrad, 2), segment(Opt::adagrad, 1)}, false, false);
  const Layout two({segment(Opt::adagrad, 1), segment(Opt::adagrad, 1)}, false, false);
  const float row[4] = {1, 2, 3, 4};
  const EntryEncoder encoder(adagrad);
  std::string message(encoder.max_bytes(), 0);
  const int64_t id = 42;
  message.resize(encoder.encode(reinterpret_cast<const char*>(row), 7, &id, 0, message.data()) - message.data());

  const auto error = [&](const Layout& layout, bool strict) -> std::string {
    std::vector<char> out(layout.row_bytes);
    EntryDecoder decoder(layout, strict);
    try {
      decoder.decode(message.data(), message.size(), out.data());
    } catch (const DataError& e) {
      return e.what();
    }
    float weights[2];
    std::memcpy(weights, out.data(), 8);
    CHECK(weights[0] == 1 && weights[1] == 2);
    return "";
  };
  CHECK(error(adagrad, true).empty());
  CHECK(error(adam, true).find("id 42: segment 0 (adam)") == 0);
  CHECK(error(adam, false).empty());
  CHECK(error(wide, true).find("id 42: segment 1") == 0);
  CHECK(error(wide, false).find("id 42: segment 1") == 0);
  CHECK(error(two, true).find("id 42: segment 1") == 0);
  CHECK(error(two, false).empty());
}
