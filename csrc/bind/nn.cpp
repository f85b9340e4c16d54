#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>

#include "bind/bind.h"
#include "bind/checks.h"
#include "nn/bag.h"
#include "nn/fm.h"
#include "nn/wiring.h"
#include "table/table.h"

namespace shoal::bind {
namespace {

// Rows copied out of a table, to be copied to Python's tensors.
struct RowsCopy {
  Rows rows;
  int64_t stride, head_bytes, row_bytes;  // head: the weights, or all of a serving row
};

// Bytes of a row that are its weights.
int64_t head_bytes(const Layout& layout) { return layout.serving ? layout.row_bytes : 4 * int64_t{layout.dim}; }

}  // namespace

void nn(nb::module_& m) {
  m.def("fm", raw<&fm>, NoGil());
  m.def("fm_gradient", raw<&fm_gradient>, NoGil());
  m.def("check_offsets", [](uintptr_t offsets, int64_t bags, int64_t rows) {
    check_offsets(ptr<int64_t>(offsets, bags + 1), bags, rows);
  });
  m.def("sum_by_id", raw<&sum_by_id>, NoGil());

  nb::class_<Wiring>(m, "Wiring")
      .def(
          "__init__",
          [](Wiring* self, const std::vector<Table*>& tables, const std::vector<int32_t>& pools,
             const std::vector<int64_t>& columns, int64_t width, std::optional<int64_t> padding,
             const std::vector<int64_t>& lengths) {
            std::vector<Feature> features;
            for (size_t f = 0; f < tables.size(); ++f) {
              Feature feature{tables[f]};
              if (!pools.empty()) feature.pool = static_cast<Pool>(pools.at(f));
              if (!columns.empty()) feature.column = columns.at(f);
              if (!lengths.empty()) feature.length = lengths.at(f);
              features.push_back(feature);
            }
            new (self) Wiring(std::move(features), width, padding);
          },
          nb::arg("tables"), nb::arg("pools"), nb::arg("columns"), nb::arg("width"), nb::arg("padding").none(),
          nb::arg("lengths") = std::vector<int64_t>())
      .def(
          "rows",
          [](const Wiring& w, uintptr_t ids, int64_t n, uintptr_t counts, bool initial, uintptr_t out) {
            w.rows(ptr<int64_t>(ids, n), n, ptr<int64_t>(counts, 1), initial ? Missing::initial : Missing::zeros,
                   ptr<float>(out, n));
          },
          NoGil())
      .def(
          "pooled",
          [](const Wiring& w, uintptr_t ids, int64_t n, uintptr_t offsets, int64_t bags, uintptr_t weights,
             bool initial, uintptr_t out, uintptr_t marks) {
            w.pooled(ptr<int64_t>(ids, n), n, ptr<int64_t>(offsets, 1), bags, ptr<float>(weights),
                     initial ? Missing::initial : Missing::zeros, ptr<float>(out, bags), ptr<uint8_t>(marks));
          },
          NoGil());

  nb::class_<RowsCopy>(m, "RowsCopy")
      .def("__len__", [](const RowsCopy& c) { return c.rows.size(); })
      .def_ro("head_bytes", &RowsCopy::head_bytes)
      .def_ro("row_bytes", &RowsCopy::row_bytes)
      .def(
          "copy_to",
          [](const RowsCopy& c, uintptr_t ids, uintptr_t times, uintptr_t heads, uintptr_t states, uintptr_t scores) {
            const int64_t n = c.rows.size(), state = c.row_bytes - c.head_bytes;
            for (int64_t i = 0; i < n; ++i) {
              const char* row = c.rows.rows.data() + i * c.stride;
              ptr<int64_t>(ids)[i] = c.rows.ids[i];
              ptr<int64_t>(times)[i] = c.rows.times[i];
              if (scores) ptr<uint64_t>(scores)[i] = c.rows.scores.empty() ? 0 : c.rows.scores[i];
              std::memcpy(ptr<char>(heads) + i * c.head_bytes, row, static_cast<size_t>(c.head_bytes));
              if (state) std::memcpy(ptr<char>(states) + i * state, row + c.head_bytes, static_cast<size_t>(state));
            }
          },
          nb::arg("ids"), nb::arg("times"), nb::arg("heads"), nb::arg("states"), nb::arg("scores") = 0, NoGil());
  m.def(
      "copy_rows",
      [](const Table& t, int stripe) {
        RowsCopy copy{{}, t.layout().stride, head_bytes(t.layout()), t.layout().row_bytes};
        in_range("stripe", stripe, -1, Table::kStripes - 1);
        const int end = stripe < 0 ? Table::kStripes : stripe + 1;
        for (int s = std::max(stripe, 0); s < end; ++s) t.snapshot(s, 0, &copy.rows);
        return copy;
      },
      nb::arg("table"), nb::arg("stripe") = -1, NoGil());
  // Copies the rows of the ids that are in the table, one after another; found[i] says which are. Returns their number.
  m.def(
      "fetch_rows",
      [](const Table& t, uintptr_t ids, int64_t n, uintptr_t found, uintptr_t times, uintptr_t heads,
         uintptr_t states) {
        const int64_t head = head_bytes(t.layout()), state = t.layout().row_bytes - head, stride = t.layout().stride;
        Rows rows;
        t.fetch(ptr<int64_t>(ids), n, &rows, ptr<uint8_t>(found));
        for (int64_t i = 0; i < rows.size(); ++i) {
          const char* row = rows.rows.data() + i * stride;
          ptr<int64_t>(times)[i] = rows.times[i];
          std::memcpy(ptr<char>(heads) + i * head, row, static_cast<size_t>(head));
          if (state) std::memcpy(ptr<char>(states) + i * state, row + head, static_cast<size_t>(state));
        }
        return rows.size();
      },
      NoGil());
  // Copies some bytes of each id's row, and the times of the rows. Returns how many ids have a row.
  m.def(
      "fetch_bytes",
      [](const Table& t, uintptr_t ids, int64_t n, int64_t first, int64_t size, uintptr_t out, uintptr_t times) {
        return t.fetch_bytes(ptr<int64_t>(ids, n), n, first, size, ptr<char>(out, n * size), ptr<int64_t>(times));
      },
      NoGil());
  m.def(
      "import_rows",
      [](Table& t, uintptr_t ids, uintptr_t times, uintptr_t heads, uintptr_t states, int64_t n, uintptr_t scores,
         bool written) {
        const int64_t head = head_bytes(t.layout()), state = t.layout().row_bytes - head, stride = t.layout().stride;
        constexpr int64_t kChunk = 1 << 16;
        for (int64_t begin = 0; begin < n; begin += kChunk) {
          const int64_t size = std::min(kChunk, n - begin);
          Rows rows;
          rows.ids.assign(ptr<int64_t>(ids) + begin, ptr<int64_t>(ids) + begin + size);
          rows.rows.resize(static_cast<size_t>(size * stride));
          if (scores) rows.scores.assign(ptr<uint64_t>(scores) + begin, ptr<uint64_t>(scores) + begin + size);
          for (int64_t i = 0; i < size; ++i) {
            rows.times.push_back(static_cast<uint32_t>(ptr<int64_t>(times)[begin + i]));
            char* row = rows.rows.data() + i * stride;
            std::memcpy(row, ptr<char>(heads) + (begin + i) * head, static_cast<size_t>(head));
            if (state) std::memcpy(row + head, ptr<char>(states) + (begin + i) * state, static_cast<size_t>(state));
          }
          t.load(rows, written);
        }
      },
      nb::arg("table"), nb::arg("ids"), nb::arg("times"), nb::arg("heads"), nb::arg("states"), nb::arg("n"),
      nb::arg("scores") = 0, nb::arg("written") = false, NoGil());
}

}  // namespace shoal::bind
