#include "table/table.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "bind/bind.h"
#include "bind/checks.h"
#include "table/budget/eviction.h"

namespace shoal::bind {
namespace {

template <class Enum, Enum Segment::* field>
void def_enum(nb::class_<Segment>& segment, const char* name, int last) {
  segment.def_prop_rw(
      name, [](const Segment& s) { return static_cast<int>(s.*field); },
      [name, last](Segment& s, int value) { s.*field = choice(name, value, static_cast<Enum>(last)); });
}

void assign(Table& table, void (Table::*write)(const int64_t*, int64_t, const float*, Stamp, bool, const float*),
            const int64_t* ids, int64_t n, const float* values, Stamp time, bool finite, const float* scores) {
  try {
    (table.*write)(ids, n, values, time, finite, scores);
  } catch (const NonFinite& e) {
    throw std::invalid_argument("the value of id " + std::to_string(e.id) + " (row " + std::to_string(e.position) +
                                ") holds NaN or infinity");
  }
}

}  // namespace

void table(nb::module_& m) {
  nb::list optimizers;  // in the order of Opt: (name, [(type, start) of every field of the state])
  for (const OptKind& kind : kOptKinds) {
    nb::list fields;
    for (const StateField& field : kind.state) {
      fields.append(nb::make_tuple(static_cast<int>(field.type), static_cast<int>(field.start)));
    }
    optimizers.append(nb::make_tuple(kind.name, fields));
  }
  m.attr("OPTIMIZERS") = optimizers;

  nb::class_<Segment> segment(m, "Segment");
  segment.def(nb::init<>())
      .def_rw("dim", &Segment::dim)
      .def_rw("initial_accumulator", &Segment::initial_accumulator)
      .def_rw("weight_decay", &Segment::weight_decay)
      .def_rw("beta1", &Segment::beta1)
      .def_rw("beta2", &Segment::beta2)
      .def_rw("epsilon", &Segment::epsilon)
      .def_rw("corrected_epsilon", &Segment::corrected_epsilon)
      .def_rw("beta", &Segment::beta)
      .def_rw("l1", &Segment::l1)
      .def_rw("l2", &Segment::l2)
      .def_rw("nesterov", &Segment::nesterov)
      .def_rw("decoupled", &Segment::decoupled)
      .def_rw("stochastic_rounding", &Segment::stochastic_rounding)
      .def_rw("init_low", &Segment::init_low)
      .def_rw("init_high", &Segment::init_high)
      .def_rw("init_column", &Segment::init_column)
      .def_rw("r", &Segment::r)
      .def_rw("step_size", &Segment::step_size)
      .def_rw("init_scale", &Segment::init_scale)
      .def_rw("max_scale", &Segment::max_scale)
      .def_rw("amplitude", &Segment::amplitude);
  def_enum<Opt, &Segment::opt>(segment, "opt", static_cast<int>(std::size(kOptKinds)) - 1);
  def_enum<Init, &Segment::init>(segment, "init", static_cast<int>(Init::random_uniform));
  def_enum<Codec, &Segment::codec>(segment, "codec", static_cast<int>(Codec::one_bit));

  nb::class_<Layout>(m, "Layout")
      .def(nb::init<std::vector<Segment>, bool, bool>(), nb::arg("segments"), nb::arg("serving"), nb::arg("skip_zero"))
      .def_ro("dim", &Layout::dim)
      .def_ro("row_bytes", &Layout::row_bytes)
      .def_ro("stride", &Layout::stride)
      .def_ro("serving", &Layout::serving);

  nb::class_<Expiry>(m, "Expiry")
      .def(
          "__init__",
          [](Expiry* self, int64_t default_s, const std::vector<std::pair<uint32_t, int64_t>>& overrides) {
            new (self) Expiry{default_s, {}};
            if (!overrides.empty()) self->of_slot.assign(32768, default_s);
            for (auto [slot, seconds] : overrides) {
              if (slot > 32767) throw std::invalid_argument("a slot must be 0..32767, got " + std::to_string(slot));
              self->of_slot[slot] = seconds;
            }
          },
          nb::arg("default_s"), nb::arg("overrides"));

  nb::class_<Table>(m, "Table")
      .def(nb::init<Layout, uint64_t, int64_t, const EvictOptions*>(), nb::arg("layout"), nb::arg("seed"),
           nb::arg("expected") = 1, nb::arg("evict").none() = nb::none())
      .def_prop_ro("layout", &Table::layout, nb::rv_policy::reference_internal)
      .def("set_layout", &Table::set_layout, NoGil())
      .def("size", &Table::size, NoGil())
      .def("bytes", &Table::bytes, NoGil())
      .def("max_update_time", &Table::max_update_time)
      .def("raise_max_update_time", &Table::raise_max_update_time)
      .def("calls", &Table::calls)
      .def("set_calls", &Table::set_calls)
      .def(
          "lookup",
          [](const Table& t, uintptr_t ids, int64_t n, uintptr_t out, uintptr_t found) {
            t.lookup(ptr<int64_t>(ids, n), n, ptr<float>(out, n), ptr<uint8_t>(found));
          },
          NoGil())
      .def(
          "lookup_or_insert",
          [](Table& t, uintptr_t ids, int64_t n, uint32_t time, uintptr_t out, bool at_least) {
            t.lookup_or_insert(ptr<int64_t>(ids, n), n, Stamp(time, at_least), ptr<float>(out, n));
          },
          nb::arg("ids"), nb::arg("n"), nb::arg("time"), nb::arg("out"), nb::arg("at_least") = false, NoGil())
      .def(
          "contains",
          [](const Table& t, uintptr_t ids, int64_t n, uintptr_t out) {
            t.contains(ptr<int64_t>(ids, n), n, ptr<uint8_t>(out, n));
          },
          NoGil())
      .def(
          "assign",
          [](Table& t, uintptr_t ids, int64_t n, uintptr_t values, uint32_t time, bool at_least, bool finite,
             uintptr_t scores) {
            assign(t, &Table::assign, ptr<int64_t>(ids, n), n, ptr<float>(values, n), Stamp(time, at_least), finite,
                   ptr<float>(scores));
          },
          nb::arg("ids"), nb::arg("n"), nb::arg("values"), nb::arg("time"), nb::arg("at_least") = false,
          nb::arg("finite") = false, nb::arg("scores") = 0, NoGil())
      .def(
          "assign_add",
          [](Table& t, uintptr_t ids, int64_t n, uintptr_t values, uint32_t time, bool at_least, bool finite,
             uintptr_t scores) {
            assign(t, &Table::assign_add, ptr<int64_t>(ids, n), n, ptr<float>(values, n), Stamp(time, at_least), finite,
                   ptr<float>(scores));
          },
          nb::arg("ids"), nb::arg("n"), nb::arg("values"), nb::arg("time"), nb::arg("at_least") = false,
          nb::arg("finite") = false, nb::arg("scores") = 0, NoGil())
      .def(
          "apply_gradients",
          [](Table& t, uintptr_t ids, int64_t n, uintptr_t grads, const std::vector<float>& rates, int64_t step,
             uint32_t time, bool dedup, int bad, bool at_least, uintptr_t scores) {
            check_equal("the number of learning rates, one per segment,", static_cast<int64_t>(rates.size()),
                        static_cast<int64_t>(t.layout().segments.size()));
            try {
              return t.apply_gradients(ptr<int64_t>(ids, n), n, ptr<float>(grads, n), rates.data(), step,
                                       Stamp(time, at_least), dedup, static_cast<BadGradient>(bad), ptr<float>(scores));
            } catch (const NonFinite& e) {
              throw std::invalid_argument("the gradient of id " + std::to_string(e.id) + " (row " +
                                          std::to_string(e.position) + ") holds NaN or infinity");
            }
          },
          nb::arg("ids"), nb::arg("n"), nb::arg("grads"), nb::arg("rates"), nb::arg("step"), nb::arg("time"),
          nb::arg("dedup"), nb::arg("bad"), nb::arg("at_least") = false, nb::arg("scores") = 0, NoGil())
      .def(
          "reinitialize",
          [](Table& t, uintptr_t ids, int64_t n, uint32_t now, uintptr_t existed, bool at_least) {
            t.reinitialize(ptr<int64_t>(ids, n), n, Stamp(now, at_least), ptr<int32_t>(existed, n));
          },
          nb::arg("ids"), nb::arg("n"), nb::arg("now"), nb::arg("existed"), nb::arg("at_least") = false, NoGil())
      .def(
          "filtered",
          [](Table& t, uintptr_t ids, int64_t n, bool dedup, bool remember, uintptr_t drop) {
            const auto dropped = t.filtered(ptr<int64_t>(ids, n), n, dedup, remember);
            std::copy(dropped.begin(), dropped.end(), ptr<uint8_t>(drop));
            return !dropped.empty();
          },
          NoGil())
      .def("has_filter", &Table::has_filter)
      .def("evict", &Table::evict, NoGil())
      .def(
          "erase", [](Table& t, uintptr_t ids, int64_t n) { return t.erase(ptr<int64_t>(ids, n), n); }, NoGil())
      .def("clear", &Table::clear, NoGil())
      .def("swap_contents", &Table::swap_contents, NoGil())
      .def("set_filter", &Table::set_filter, nb::arg("filter").none())
      .def("set_touched", &Table::set_touched)
      .def("track", &Table::track, nb::arg("tracker"), nb::arg("writes") = true)
      .def("untrack", &Table::untrack)
      .def("ids",
           [](const Table& t, int stripe) {
             std::vector<int64_t> ids;
             {
               nb::gil_scoped_release release;
               ids = t.ids(stripe);
             }
             return nb::bytes(ids.data(), ids.size() * sizeof(int64_t));
           })
      .def("begin_epoch", &Table::begin_epoch, NoGil())
      .def("oldest_epoch", &Table::oldest_epoch)
      .def("removed_since", &Table::removed_since, NoGil())
      .def("forget_before", &Table::forget_before, NoGil())
      .def("scales", &Table::scales)
      .def("set_scales", &Table::set_scales)
      .def_prop_ro_static("num_stripes", [](nb::handle) { return Table::kStripes; });
}

}  // namespace shoal::bind
