// Rows as columns: they are read back as written, and damage is found without reading past the end of anything.
#include <unistd.h>

#include <cstdio>
#include <random>
#include <string>

#include "io/entry_scan.h"
#include "tests/check.h"

using namespace shoal;

namespace {

std::string temporary(const char* name) { return "/tmp/shoal-scan-" + std::to_string(::getpid()) + name; }

std::string read_file(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "rb");
  CHECK(file);
  std::string bytes;
  char buffer[4096];
  for (size_t n; (n = std::fread(buffer, 1, sizeof buffer, file)) > 0;) bytes.append(buffer, n);
  std::fclose(file);
  return bytes;
}

void write_file(const std::string& path, const std::string& bytes) {
  std::FILE* file = std::fopen(path.c_str(), "wb");
  CHECK(file && std::fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size());
  std::fclose(file);
}

// Adagrad of `dim` values in one segment.
std::string state_of(int dim) {
  std::string norm;
  for (int i = 0; i < dim; ++i) norm += std::string("\x0D\x00\x00\x80\x3F", 5);
  const auto wrap = [](const std::string& inner) {
    return "\x0A" + std::string(1, static_cast<char>(inner.size())) + inner;
  };
  return wrap(wrap(norm));
}

void write_rows(const std::string& path, bool snappy, int64_t n, int64_t dim) {
  std::vector<int64_t> ids(n), times(n);
  std::vector<float> weights(n * dim);
  for (int64_t i = 0; i < n; ++i) {
    ids[i] = i * 7919 - 5;
    times[i] = 1000 + i;
    for (int64_t d = 0; d < dim; ++d) weights[i * dim + d] = static_cast<float>(i) + 0.5f * static_cast<float>(d);
  }
  const std::string state = state_of(static_cast<int>(dim));
  EntrySink sink(path + "-tmp", snappy);
  sink.rows(ids.data(), times.data(), weights.data(), n, dim, state.data(), static_cast<int64_t>(state.size()),
            nullptr);
  sink.sync();
  sink.rename_to(path);
}

int64_t scan_all(const std::string& path, bool snappy) {
  EntryScan scan(path, snappy);
  int64_t rows = 0;
  while (scan.next()) {
    for (int64_t i = 0; i < scan.columns().size(); ++i) rows += scan.frame(i).size >= scan.state(i).size;
  }
  return rows;
}

}  // namespace

TEST(rows_are_read_back_as_columns) {
  for (const bool snappy : {false, true}) {
    const std::string path = temporary(snappy ? "-s" : "-p");
    write_rows(path, snappy, 5000, 3);
    EntryScan scan(path, snappy);
    int64_t seen = 0, shape = 0;
    while (scan.next()) {
      const EntryColumns& c = scan.columns();
      for (int64_t i = 0; i < c.size(); ++i, ++seen) {
        CHECK(c.ids[i] == seen * 7919 - 5 && c.times[i] == 1000 + seen && c.dims[i] == 3);
        CHECK(c.weights[i * 3 + 2] == static_cast<float>(seen) + 1.0f);
        CHECK(std::string(scan.state(i).data, scan.state(i).size) == state_of(3));
        if (seen > 0) CHECK(c.shapes[i] == shape);
        shape = c.shapes[i];
      }
      CHECK_THROWS(scan.frame(c.size()));
      CHECK_THROWS(scan.state(-1));
    }
    CHECK(seen == 5000);
    ::unlink(path.c_str());
  }
}

TEST(records_are_copied_byte_for_byte) {
  const std::string path = temporary("-a"), other = temporary("-b");
  write_rows(path, false, 100, 2);
  EntrySink sink(other + "-tmp", false);
  EntryScan scan(path, false);
  CHECK(scan.next());
  std::vector<int64_t> all(100);
  for (int64_t i = 0; i < 100; ++i) all[i] = i;
  sink.copy(scan, all.data(), 100);
  const int64_t beyond = 100;
  CHECK_THROWS(sink.copy(scan, &beyond, 1));
  sink.sync();
  sink.rename_to(other);
  CHECK(read_file(path) == read_file(other));
  ::unlink(path.c_str());
  ::unlink(other.c_str());
}

TEST(a_damaged_file_is_refused_wherever_the_damage_is) {
  const std::string path = temporary("-d");
  write_rows(path, false, 20, 2);
  const std::string good = read_file(path);
  for (size_t place = 0; place < good.size(); ++place) {
    std::string bad = good;
    bad[place] = static_cast<char>(bad[place] ^ (1 << place % 8));
    write_file(path, bad);
    CHECK_THROWS(scan_all(path, false));
  }
  for (size_t n = 1; n < good.size(); ++n) {
    write_file(path, good.substr(0, n));
    if (n % (good.size() / 20) == 0) {
      CHECK(scan_all(path, false) == static_cast<int64_t>(n / (good.size() / 20)));
    } else {
      CHECK_THROWS(scan_all(path, false));
    }
  }
  ::unlink(path.c_str());
}

TEST(any_bytes_in_a_good_frame_never_crash) {
  const std::string path = temporary("-f");
  std::mt19937 random(1);
  for (int round = 0; round < 3000; ++round) {
    std::string record(kRecordHeader, '\0');
    const std::string state = state_of(4);
    std::string payload = "\x09" + std::string(8, '\1') + std::string("\x15\0\0\0\0\x1A", 6) +
                          std::string(1, static_cast<char>(state.size())) + state + "\x20\x05";
    for (int i = 0; i < 3; ++i) payload[random() % payload.size()] = static_cast<char>(random());
    record += payload + std::string(kRecordFooter, '\0');
    frame_record(record.data(), payload.size());
    write_file(path, record);
    try {
      scan_all(path, false);
    } catch (const std::exception&) {  // it may be refused
    }
  }
  ::unlink(path.c_str());
}
