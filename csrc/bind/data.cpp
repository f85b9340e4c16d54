#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>

#include "bind/bind.h"
#include "bind/checks.h"
#include "core/thread_pool.h"
#include "data/block.h"
#include "data/feature.h"
#include "data/json_lines.h"
#include "data/raw_columns.h"
#include "data/text.h"
#include "data/text_hash.h"
#include "data/tf_example.h"

namespace shoal::bind {
namespace {

template <class T>
void copy_out(const std::vector<T>& from, uintptr_t to, int64_t size) {
  check_equal("Block.copy: the size of a tensor", size, static_cast<int64_t>(from.size()));
  if (size > 0) std::memcpy(ptr<T>(to), from.data(), from.size() * sizeof(T));
}

Vocabulary words_of(const std::vector<std::string>& words) {
  Vocabulary out;
  for (const std::string& word : words) {
    if (!out.emplace(word, static_cast<int64_t>(out.size())).second)
      throw std::invalid_argument("the words of a vocabulary must be unique, got '" + word + "' twice");
  }
  return out;
}

// (kind, address of values, count, address of text, its bytes, address of lengths or 0, address of valid or 0)
using ColumnTuple = std::tuple<int, uintptr_t, int64_t, uintptr_t, int64_t, uintptr_t, uintptr_t>;

RawColumn column_of(const ColumnTuple& given) {
  const auto [kind, values, count, text, bytes, lengths, valid] = given;
  return {choice("the kind of a column", kind, RawKind::ready),
          ptr<const char>(values),
          count,
          ptr<const char>(text),
          bytes,
          ptr<const int64_t>(lengths),
          ptr<const uint8_t>(valid)};
}

}  // namespace

void data(nb::module_& m) {
  nb::class_<Block>(m, "Block")
      .def_ro("rows", &Block::rows)
      .def_ro("lines", &Block::lines)
      .def_ro("consumed", &Block::consumed)
      .def_prop_ro("ids", [](const Block& b) { return b.ids.size(); })
      .def_prop_ro("bad",
                   [](const Block& b) {
                     nb::list out;
                     for (const auto& bad : b.bad) {
                       nb::object why = nb::steal(PyUnicode_DecodeUTF8(bad.why.data(), bad.why.size(), "replace"));
                       out.append(nb::make_tuple(bad.line, bad.offset, why));
                     }
                     return out;
                   })
      .def(
          "copy",
          [](const Block& b, uintptr_t label, uintptr_t dense, int64_t dense_size, uintptr_t ids, int64_t ids_size,
             uintptr_t lengths, int64_t lengths_size, uintptr_t time, int64_t time_size) {
            copy_out(b.label, label, b.rows);
            copy_out(b.dense, dense, dense_size);
            copy_out(b.ids, ids, ids_size);
            copy_out(b.lengths, lengths, lengths_size);
            copy_out(b.time, time, time_size);
          },
          NoGil());
  nb::class_<FeatureSet>(m, "FeatureSet")
      .def(nb::init<>())
      .def(
          "add_feature",
          [](FeatureSet& self, int rule, uint64_t slot, bool listed, int separator, int64_t limit,
             std::optional<nb::bytes> missing, std::vector<double> edges, double steps,
             const std::vector<std::string>& words, int unknown, std::vector<int64_t> of) {
            FeatureRule feature;
            feature.rule = choice("the rule of a feature", rule, Rule::cross);
            feature.slot = slot;
            feature.listed = listed;
            feature.separator = static_cast<char>(separator);
            feature.limit = limit;
            if (missing) feature.missing = std::string(missing->c_str(), missing->size());
            feature.edges = std::move(edges);
            feature.steps = steps;
            if (feature.rule == Rule::vocabulary) feature.words = std::make_shared<Vocabulary>(words_of(words));
            feature.unknown = choice("unknown", unknown, Unknown::drop);
            feature.of = std::move(of);
            self.features.push_back(std::move(feature));
            self.check();
          },
          nb::arg("rule"), nb::arg("slot"), nb::arg("listed"), nb::arg("separator"), nb::arg("limit"),
          nb::arg("missing").none(), nb::arg("edges"), nb::arg("steps"), nb::arg("words"), nb::arg("unknown"),
          nb::arg("of"))
      .def("add_number", [](FeatureSet& self, float missing, float low, float high, bool log, float mean,
                            float scale) { self.numbers.push_back({missing, low, high, log, mean, scale}); })
      .def_prop_ro("listed", &FeatureSet::listed)
      .def(
          "apply",
          [](const FeatureSet& self, int64_t n, const std::vector<std::optional<ColumnTuple>>& given) {
            std::vector<std::optional<RawColumn>> columns(given.size());
            for (size_t i = 0; i < given.size(); ++i)
              if (given[i]) columns[i] = column_of(*given[i]);
            return apply_columns(self, n, columns);
          },
          NoGil())
      // Numbers [n, D] in place.
      .def(
          "apply_numbers",
          [](const FeatureSet& self, uintptr_t address, int64_t n) {
            self.apply_numbers(ptr<float>(address, n * static_cast<int64_t>(self.numbers.size())), n);
          },
          NoGil());
  nb::class_<TextParser>(m, "TextParser")
      .def("__init__",
           [](TextParser* self, const std::vector<std::vector<std::pair<int, int64_t>>>& uses, const FeatureSet& set,
              int delimiter, int quote, int64_t max_line) {
             std::vector<std::vector<TextUse>> columns(uses.size());
             for (size_t c = 0; c < columns.size(); ++c) {
               for (auto [role, index] : uses[c]) {
                 columns[c].push_back({choice("the role of a column", role, Role::time), index});
               }
             }
             new (self)
                 TextParser(std::move(columns), set, static_cast<char>(delimiter), static_cast<char>(quote), max_line);
           })
      .def(
          "parse",
          [](const TextParser& self, nb::bytes text, int64_t begin, bool final, int64_t max_rows, int64_t limit,
             bool threads) {
            const std::string_view view(text.c_str(), text.size());
            in_range("begin", begin, 0, static_cast<int64_t>(view.size()));
            const nb::gil_scoped_release release;
            return self.parse(view.substr(begin), final, max_rows, limit, threads);
          },
          nb::arg("text"), nb::arg("begin"), nb::arg("final"), nb::arg("max_rows"), nb::arg("limit"),
          nb::arg("threads") = false);
  m.def(
      "parse_tf_examples",
      [](nb::list messages, const std::string& label, const std::string& time, const std::vector<std::string>& dense,
         const std::vector<std::string>& sparse, const FeatureSet& set) {
        const std::vector<std::string_view> views = views_of(messages);
        const nb::gil_scoped_release release;
        return parse_tf_examples({label, time, dense, sparse, set}, views);
      },
      nb::arg("messages"), nb::arg("label"), nb::arg("time"), nb::arg("dense"), nb::arg("sparse"), nb::arg("set"));
  m.def(
      "parse_json_objects",
      [](nb::list messages, const std::string& label, const std::string& time, const std::vector<std::string>& dense,
         const std::vector<std::string>& sparse, const FeatureSet& set, bool threads) {
        const std::vector<std::string_view> views = views_of(messages);
        const nb::gil_scoped_release release;
        return parse_json_objects({label, time, dense, sparse, set}, views, threads);
      },
      nb::arg("messages"), nb::arg("label"), nb::arg("time"), nb::arg("dense"), nb::arg("sparse"), nb::arg("set"),
      nb::arg("threads") = false);
  // Returns (payloads, start of each frame, bytes read); a corrupt payload is None.
  m.def(
      "read_frames",
      [](nb::bytes text, int64_t begin, int64_t max_records) {
        std::string_view view(text.c_str(), text.size());
        in_range("begin", begin, 0, static_cast<int64_t>(view.size()));
        view = view.substr(begin);
        int64_t consumed = 0;
        std::vector<Frame> frames;
        {
          const nb::gil_scoped_release release;
          frames = read_frames(view, max_records, &consumed);
        }
        nb::list payloads, offsets;
        for (const Frame& frame : frames) {
          payloads.append(frame.good ? nb::object(nb::bytes(view.data() + frame.begin, frame.size)) : nb::none());
          offsets.append(frame.offset);
        }
        return nb::make_tuple(payloads, offsets, consumed);
      },
      nb::arg("text"), nb::arg("begin"), nb::arg("max_records"));
  m.def("text_fid", [](nb::bytes text, uint64_t slot) { return text_fid({text.c_str(), text.size()}, slot); });
  m.def("cross_fid",
        [](const std::vector<int64_t>& ids, uint64_t slot) { return cross_fid(ids.data(), ids.size(), slot); });
}

}  // namespace shoal::bind
