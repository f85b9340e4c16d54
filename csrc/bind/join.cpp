#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.h"
#include "bind/checks.h"
#include "data/join/joiner.h"

namespace shoal::bind {
namespace {

using join::Fields;
using join::Joiner;
using join::Label;
using join::Settings;

// Names, delimiter (empty: JSON), columns of text (key, time, kind, value), units of time per second, taken names.
Fields fields_of(std::vector<std::string> key, std::string time, std::string kind, std::string value,
                 const std::string& delimiter, std::vector<int64_t> key_columns, std::array<int64_t, 3> columns,
                 double per_second, std::vector<std::string> forbidden) {
  Fields out;
  out.coding = delimiter.empty() ? join::Coding::json : join::Coding::text;
  out.delimiter = delimiter.empty() ? ',' : delimiter[0];
  out.key = std::move(key);
  out.time = std::move(time), out.kind = std::move(kind), out.value = std::move(value);
  out.key_columns = std::move(key_columns);
  out.time_column = columns[0], out.kind_column = columns[1], out.value_column = columns[2];
  out.per_second = per_second;
  out.forbidden = std::move(forbidden);
  if (out.key.empty()) throw std::invalid_argument("a key must have at least one field");
  return out;
}

int side_of(int side) {
  if (side != 0 && side != 1)
    throw std::invalid_argument("side must be 0 (impressions) or 1 (actions), got " + std::to_string(side));
  return side;
}

std::string_view view_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

// (number of the first sample, samples)
nb::tuple taken(Joiner& self) {
  const Joiner::Samples samples = self.take();
  nb::list out;
  size_t begin = 0;
  for (const size_t end : samples.ends) {
    out.append(nb::bytes(samples.bytes.data() + begin, end - begin));
    begin = end;
  }
  return nb::make_tuple(samples.first, out);
}

}  // namespace

void join(nb::module_& m) {
  nb::class_<Fields>(m, "JoinFields");
  m.def("join_fields", &fields_of);
  nb::class_<Joiner>(m, "Joiner")
      .def(
          "__init__",
          [](Joiner* self, const std::string& folder, const Fields& impressions, const Fields& actions,
             const std::vector<std::tuple<std::string, int, std::vector<std::string>>>& labels, int64_t window,
             int64_t before, std::array<int64_t, 2> lateness, bool close_on_action, int64_t max_actions,
             double keep_negatives, uint64_t seed, int64_t budget, int64_t block, uint64_t salt) {
            Settings settings;
            settings.window = window, settings.before = before;
            settings.lateness[0] = lateness[0], settings.lateness[1] = lateness[1];
            settings.close_on_action = close_on_action, settings.max_actions = max_actions;
            settings.keep_negatives = keep_negatives, settings.seed = seed;
            settings.budget = budget, settings.block = block, settings.salt = salt;
            settings.fields[0] = impressions, settings.fields[1] = actions;
            for (const auto& [name, rule, kinds] : labels) {
              settings.labels.push_back({name, choice("the rule of a label", rule, join::Rule::last), kinds});
            }
            new (self) Joiner(std::move(settings), folder);
          },
          nb::arg("folder"), nb::arg("impressions"), nb::arg("actions"), nb::kw_only(), nb::arg("labels"),
          nb::arg("window"), nb::arg("before"), nb::arg("lateness"), nb::arg("close_on_action"), nb::arg("max_actions"),
          nb::arg("keep_negatives"), nb::arg("seed"), nb::arg("budget"), nb::arg("block"), nb::arg("salt"))
      // Returns the (index, why) of messages that could not be read.
      .def("read",
           [](Joiner& self, int side, nb::list messages, int64_t latest) {
             std::vector<std::string_view> views;
             views.reserve(messages.size());
             for (nb::handle message : messages) {
               if (!nb::isinstance<nb::bytes>(message))
                 throw std::invalid_argument("messages must be bytes, got a message of type " +
                                             nb::cast<std::string>(nb::str(message.type())));
               views.push_back(view_of(nb::borrow<nb::bytes>(message)));  // the list keeps them alive
             }
             std::vector<join::Broken> broken;
             {
               const nb::gil_scoped_release release;
               broken = self.read(side_of(side), views, latest);
             }
             nb::list out;
             for (const auto& one : broken) out.append(nb::make_tuple(one.index, one.why));
             return out;
           })
      .def("accept",
           [](Joiner& self, nb::bytes position) {
             const std::string_view at = view_of(position);
             const nb::gil_scoped_release release;
             self.accept(at);
           })
      .def("advance",
           [](Joiner& self, int side, int64_t watermark, nb::bytes position) {
             const std::string_view at = view_of(position);
             const nb::gil_scoped_release release;
             self.advance(side_of(side), watermark, at);
           })
      .def("run", &Joiner::run, nb::arg("bytes"), NoGil())
      .def("take", &taken)
      .def("seal", &Joiner::seal, NoGil())
      // (number, bytes, CRC-32C) of each segment; the CRC of restored segments is 0.
      .def("segments",
           [](const Joiner& self) {
             std::vector<std::tuple<uint64_t, int64_t, uint32_t>> out;
             for (const auto* one : self.live()) out.emplace_back(one->number, one->digest.bytes, one->digest.crc);
             return out;
           })
      .def("state", &Joiner::state)
      .def("position",
           [](const Joiner& self, int side) {
             const std::string& at = self.position(side_of(side));
             return nb::bytes(at.data(), at.size());
           })
      .def("restore",
           [](Joiner& self, const std::map<std::string, int64_t>& state, const std::vector<uint64_t>& segments,
              nb::bytes impressions, nb::bytes actions) {
             const std::array<std::string, 2> positions{std::string(view_of(impressions)),
                                                        std::string(view_of(actions))};
             const nb::gil_scoped_release release;
             self.restore(state, segments, positions);
           })
      // Calls `each()` whenever samples wait. Returns (end of the last frame, bytes after it).
      .def("replay",
           [](Joiner& self, const std::string& path, int64_t bytes, nb::callable each) {
             int64_t torn = 0;
             const int64_t end = self.replay(path, bytes, [&] { each(); }, &torn);
             return nb::make_tuple(end, torn);
           })
      .def("open_tail", &Joiner::open_tail, nb::arg("path"), nb::arg("end"), nb::arg("sync"))
      .def("drop_segment", &Joiner::drop_segment, NoGil())
      .def("counters",
           [](const Joiner& self) {
             nb::dict out;
             for (int c = 0; c < join::kCounters; ++c) out[join::counter_name(c)] = self.counter(c);
             return out;
           })
      .def("watermark", [](const Joiner& self, int side) { return self.watermark(side_of(side)); })
      .def("newest", [](const Joiner& self, int side) { return self.newest(side_of(side)); })
      .def_prop_ro("tail_bytes", &Joiner::tail_bytes)
      .def_prop_ro("open_impressions", &Joiner::open_impressions)
      .def_prop_ro("waiting_actions", &Joiner::waiting_actions)
      .def_prop_ro("spilled", &Joiner::spilled)
      .def_prop_ro("closed", &Joiner::closed)
      .def_prop_ro("emitted", &Joiner::emitted)
      .def_prop_ro("memory", &Joiner::memory);
  m.def("keeps_negative",
        [](nb::bytes key, uint64_t seed, double rate) { return join::keeps_negative(view_of(key), seed, rate); });
}

}  // namespace shoal::bind
