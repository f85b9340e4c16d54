#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <system_error>

#include "bind/bind.h"
#include "bind/checks.h"
#include "bind/digest.h"
#include "io/checkpoint.h"
#include "io/crc32c.h"
#include "io/entry_dump.h"
#include "io/entry_scan.h"
#include "io/error.h"
#include "io/filter_dump.h"
#include "io/out_file.h"
#include "io/record.h"

namespace shoal::bind {

namespace {

// Translates errors: a damaged file to shoal.errors.DataError, a system error to an OSError with number and path.
void translate(const std::exception_ptr& error, void*) {
  try {
    std::rethrow_exception(error);
  } catch (const DataError& e) {
    PyErr_SetString(nb::module_::import_("shoal.errors").attr("DataError").ptr(), e.what());
  } catch (const Cancelled& e) {
    PyErr_SetString(nb::module_::import_("shoal.errors").attr("CancelledError").ptr(), e.what());
  } catch (const std::system_error& e) {
    const std::string what = e.what();  // "<path>: <message>"
    const std::string suffix = ": " + e.code().message();
    const std::string path =
        what.size() > suffix.size() && what.ends_with(suffix) ? what.substr(0, what.size() - suffix.size()) : what;
    const nb::object arguments = nb::make_tuple(e.code().value(), e.code().message(), path);
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
  }
}

// Rows as serialized EntryDumps.
std::vector<nb::bytes> encode(const Table& table, const Rows& rows, bool with_id) {
  const EntryEncoder encoder(table.layout());
  std::vector<char> buffer(encoder.max_bytes());
  std::vector<nb::bytes> out;
  out.reserve(rows.size());
  for (int64_t i = 0; i < rows.size(); ++i) {
    const char* row = rows.rows.data() + i * table.layout().stride;
    const uint64_t score = with_id && !rows.scores.empty() ? rows.scores[i] : 0;
    const char* end = encoder.encode(row, rows.times[i], with_id ? &rows.ids[i] : nullptr, score, buffer.data());
    out.emplace_back(buffer.data(), end - buffer.data());
  }
  return out;
}

std::vector<nb::bytes> lookup_entry(const Table& table, const std::vector<int64_t>& ids) {
  Rows rows;
  std::vector<uint8_t> found(ids.size());
  {
    const nb::gil_scoped_release release;
    table.fetch(ids.data(), static_cast<int64_t>(ids.size()), &rows, found.data());
  }
  std::vector<nb::bytes> present = encode(table, rows, false);
  std::vector<nb::bytes> out;
  out.reserve(ids.size());
  size_t next = 0;
  for (uint8_t f : found) out.push_back(f ? std::move(present[next++]) : nb::bytes("", 0));
  return out;
}

// (table, expiry or None, epoch), and for a table whose rows are elsewhere also (take, parts): `take(part)` returns the
// addresses of ids, times (int64), rows without gaps and their policy's scores (or 0), valid until the next call, and
// the number of rows.
SaveSource save_source(const nb::tuple& given) {
  if (given.size() != 3 && given.size() != 5)
    throw std::invalid_argument("a source of a save must have 3 or 5 elements, got " + std::to_string(given.size()));
  SaveSource source{.table = nb::cast<const Table*>(given[0]),
                    .expiry = given[1].is_none() ? nullptr : nb::cast<const Expiry*>(given[1]),
                    .changed_since = nb::cast<uint32_t>(given[2])};
  if (given.size() == 3) return source;
  source.parts = nb::cast<int>(given[4]);
  source.take = [take = nb::object(given[3]), layout = &source.table->layout()](int part, Rows* out) {
    const nb::gil_scoped_acquire acquire;
    const auto [ids, times, rows, scores, n] =
        nb::cast<std::tuple<uintptr_t, uintptr_t, uintptr_t, uintptr_t, int64_t>>(take(part));
    const nb::gil_scoped_release release;
    out->ids.assign(ptr<int64_t>(ids), ptr<int64_t>(ids) + n);
    out->times.assign(ptr<int64_t>(times), ptr<int64_t>(times) + n);
    if (scores) out->scores.assign(ptr<uint64_t>(scores), ptr<uint64_t>(scores) + n);
    out->rows.resize(static_cast<size_t>(n) * layout->stride);
    for (int64_t i = 0; i < n; ++i)
      std::memcpy(out->rows.data() + i * layout->stride, ptr<char>(rows) + i * layout->row_bytes,
                  static_cast<size_t>(layout->row_bytes));
  };
  return source;
}

void check_trains(const Table& table) {
  if (table.layout().serving) throw std::invalid_argument("entries are not supported by serving tables");
}

std::vector<nb::bytes> read_records(const std::string& path, bool snappy) {
  ChunkReader reader(path, snappy);
  std::vector<nb::bytes> out;
  for (Chunk chunk; reader.next(&chunk);) {
    for (size_t i = 0; i < chunk.starts.size(); ++i) {
      const Chunk::Payload payload = chunk.payload(i, path);
      out.emplace_back(payload.data, payload.size);
    }
  }
  return out;
}

Digest write_records(const std::string& temporary, const std::string& path, const std::vector<nb::bytes>& records,
                     bool snappy) {
  OutFile file(temporary, snappy);
  for (const nb::bytes& record : records) {
    char* out = file.room(kRecordHeader + record.size() + kRecordFooter);
    std::memcpy(out + kRecordHeader, record.c_str(), record.size());
    frame_record(out, record.size());
    file.used(kRecordHeader + record.size() + kRecordFooter);
  }
  const nb::gil_scoped_release release;
  file.sync();
  file.rename_to(path);
  return as_pair(file.digest());
}

}  // namespace

void io(nb::module_& m) {
  nb::register_exception_translator(translate, nullptr);

  m.def("crc32c", [](nb::bytes data) { return crc32c(data.c_str(), data.size()); }, nb::arg("data"));
  m.def(
      "digest_file", [](const std::string& path) { return as_pair(digest_file(path)); }, nb::arg("path"), NoGil(),
      "The bytes of a file and their CRC-32C.");
  m.def("read_records", &read_records, nb::arg("path"), nb::arg("snappy") = false);
  m.def("write_records", &write_records, nb::arg("temporary"), nb::arg("path"), nb::arg("records"),
        nb::arg("snappy") = false);

  m.def(
      "write_filter_block",
      [](const std::string& temporary, const std::string& path, nb::bytes meta, uintptr_t cells, int64_t n) {
        const std::string copy(meta.c_str(), meta.size());
        const nb::gil_scoped_release release;
        return as_pair(write_filter_block(temporary, path, copy, ptr<const uint16_t>(cells), n));
      },
      nb::arg("temporary"), nb::arg("path"), nb::arg("meta"), nb::arg("cells"), nb::arg("n"));
  m.def(
      "read_filter_meta",
      [](const std::string& path) {
        const std::string meta = read_filter_meta(path);
        return nb::bytes(meta.data(), meta.size());
      },
      nb::arg("path"));
  m.def(
      "read_filter_cells",
      [](const std::string& path, uintptr_t cells, int64_t n) {
        return as_pair(read_filter_cells(path, ptr<uint16_t>(cells), n));
      },
      nb::arg("path"), nb::arg("cells"), nb::arg("n"), NoGil());

  nb::class_<Progress>(m, "Progress")
      .def(nb::init<>())
      .def_prop_ro("rows", [](const Progress& p) { return p.rows.load(); })
      .def_prop_ro("bytes", [](const Progress& p) { return p.bytes.load(); })
      .def_prop_ro("cancelled", [](const Progress& p) { return p.cancelled.load(); })
      .def("cancel", [](Progress& p) { p.cancelled = true; });

  m.def(
      "save",
      [](const std::vector<nb::tuple>& tables, const std::vector<std::string>& temporary,
         const std::vector<std::string>& paths, bool snappy, int64_t random_sleep_ms, Progress* progress, bool state) {
        std::vector<SaveSource> sources;
        for (const nb::tuple& table : tables) sources.push_back(save_source(table));
        const nb::gil_scoped_release release;
        return as_pairs(save(sources, {temporary, paths, snappy, random_sleep_ms, state}, progress));
      },
      nb::arg("tables"), nb::arg("temporary"), nb::arg("paths"), nb::arg("snappy"), nb::arg("random_sleep_ms"),
      nb::arg("progress").none(), nb::arg("state") = true);

  nb::class_<Load>(m, "Load")
      .def(
          "__init__",
          [](Load* self, Table& table, bool strict, int64_t modulus, int64_t residue, uint32_t unstamped) {
            if (modulus < 1)
              throw std::invalid_argument("the modulus of a shard must be at least 1, got " + std::to_string(modulus));
            new (self) Load(table, strict, {modulus, residue}, unstamped);
          },
          nb::arg("table"), nb::arg("strict") = true, nb::arg("modulus") = 1, nb::arg("residue") = 0,
          nb::arg("unstamped") = 0, nb::keep_alive<1, 2>())
      .def(
          "read",
          [](Load& self, const std::vector<std::string>& paths, Progress* progress) {
            const Load::Taken taken = self.read(paths, progress);
            std::vector<Digest> files;
            for (const FileDigest& digest : taken.files) files.push_back(as_pair(digest));
            return std::make_pair(taken.records, files);
          },
          nb::arg("paths"), nb::arg("progress").none(), NoGil(),
          "Reads whole files; returns the number of records taken and the digest of each file.")
      .def("erase", raw<&Load::erase>, nb::arg("ids"), nb::arg("n"), NoGil())
      .def("evict", &Load::evict, nb::arg("expiry"), nb::arg("now"), NoGil())
      .def("rows", &Load::rows)
      .def("commit", &Load::commit, NoGil());
  m.def(
      "load_multi",
      [](const std::string& path, const std::vector<Load*>& loads, const std::vector<int64_t>& counts,
         Progress* progress) {
        const nb::gil_scoped_release release;
        return as_pair(load_multi(path, loads, counts, progress));
      },
      nb::arg("path"), nb::arg("loads"), nb::arg("counts"), nb::arg("progress").none());

  nb::class_<EntryScan>(m, "EntryScan")
      .def(nb::init<std::string, bool>(), nb::arg("path"), nb::arg("snappy") = false)
      .def(
          "next",
          [](EntryScan& self) {
            const nb::gil_scoped_release release;
            self.next();
            return std::make_pair(self.columns().size(), static_cast<int64_t>(self.columns().weights.size()));
          },
          "Reads the next records; returns their number and that of their weights, (0, 0) at the end.")
      .def("digest", [](const EntryScan& self) { return as_pair(self.digest()); })
      .def(
          "columns",
          [](const EntryScan& self, uintptr_t numbers, int64_t n, uintptr_t weights, int64_t floats) {
            const EntryColumns& c = self.columns();
            check_equal("the number of records", n, c.size());
            check_equal("the number of weights", floats, static_cast<int64_t>(c.weights.size()));
            if (n == 0) return;
            auto* out = ptr<int64_t>(numbers);
            for (const auto* column : {&c.ids, &c.times, &c.offsets, &c.dims, &c.shapes, &c.states}) {
              std::memcpy(out, column->data(), 8 * n);
              out += n;
            }
            std::memcpy(ptr<float>(weights), c.weights.data(), 4 * floats);
          },
          nb::arg("numbers"), nb::arg("n"), nb::arg("weights"), nb::arg("floats"), NoGil(),
          "Copies ids, times, offsets, dims, shapes and states to numbers[6, n] and the weights to weights[floats].")
      .def(
          "state",
          [](const EntryScan& self, int64_t i) {
            const Chunk::Payload state = self.state(i);
            return nb::bytes(state.data, state.size);
          },
          nb::arg("i"));
  nb::class_<EntrySink>(m, "EntrySink")
      .def(nb::init<std::string, bool>(), nb::arg("temporary"), nb::arg("snappy") = false)
      .def("copy", raw<&EntrySink::copy>, nb::arg("scan"), nb::arg("indices"), nb::arg("n"), NoGil())
      .def(
          "rows",
          [](EntrySink& self, uintptr_t ids, uintptr_t times, uintptr_t weights, int64_t n, int64_t dim,
             nb::bytes states, uintptr_t ends) {
            const char* data = states.c_str();
            const auto size = static_cast<int64_t>(states.size());
            const nb::gil_scoped_release release;
            self.rows(ptr<const int64_t>(ids), ptr<const int64_t>(times), ptr<const float>(weights), n, dim, data, size,
                      ptr<const int64_t>(ends));
          },
          nb::arg("ids"), nb::arg("times"), nb::arg("weights"), nb::arg("n"), nb::arg("dim"), nb::arg("states"),
          nb::arg("ends"))
      .def("sync", &EntrySink::sync, NoGil())
      .def("rename_to", &EntrySink::rename_to, nb::arg("path"), NoGil())
      .def("bytes", &EntrySink::bytes)
      .def("digest", [](const EntrySink& self) { return as_pair(self.digest()); });

  m.def(
      "walk_entries",
      [](const Table& table, int stripe, int64_t offset, int64_t limit) {
        in_range("the stripe of a place in a table", stripe, 0, Table::kStripes - 1);
        if (offset < 0 || limit < 0)
          throw std::invalid_argument("offset and limit must be >= 0, got " + std::to_string(offset) + " and " +
                                      std::to_string(limit));
        check_trains(table);
        Rows rows;
        int64_t next = -1;
        {
          const nb::gil_scoped_release release;
          next = table.walk(stripe, offset, limit, &rows);
        }
        return std::make_pair(encode(table, rows, true), next);
      },
      nb::arg("table"), nb::arg("stripe"), nb::arg("offset"), nb::arg("limit"));
  m.def(
      "lookup_entry",
      [](const Table& table, const std::vector<int64_t>& ids) {
        check_trains(table);
        return lookup_entry(table, ids);
      },
      nb::arg("table"), nb::arg("ids"));
}

}  // namespace shoal::bind
