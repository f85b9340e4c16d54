// Budgets of tables, eviction and its counters.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "bind/bind.h"
#include "bind/checks.h"
#include "table/budget/eviction.h"
#include "table/table.h"

namespace shoal::bind {
namespace {

Eviction& eviction_of(const Table& table) {
  if (!table.eviction()) throw std::invalid_argument("this table has no budget; create it with max_rows or max_bytes");
  return *table.eviction();
}

nb::tuple tuple_of(const Curve::Points& points) { return nb::make_tuple(points.rows, points.misses, points.sampled); }

}  // namespace

void budget(nb::module_& m) {
  nb::class_<Budget>(m, "Budget")
      .def(nb::init<int64_t>(), nb::arg("limit"))
      .def("take", &Budget::take, nb::arg("bytes"))
      .def("give", &Budget::give, nb::arg("bytes"))
      .def("used", &Budget::used)
      .def("limit", &Budget::limit);

  nb::class_<EvictOptions>(m, "EvictOptions")
      .def(
          "__init__",
          [](EvictOptions* self, int policy, int64_t max_rows, std::shared_ptr<Budget> bytes, uint32_t min_age_s,
             uint32_t epoch_s, bool if_better) {
            new (self) EvictOptions{choice("the eviction policy", policy, Policy::slru),
                                    max_rows > 0 ? max_rows : Budget::kUnlimited,
                                    std::move(bytes),
                                    min_age_s,
                                    epoch_s,
                                    if_better};
          },
          nb::arg("policy"), nb::arg("max_rows"), nb::arg("bytes").none(), nb::arg("min_age_s"), nb::arg("epoch_s"),
          nb::arg("if_better"));

  nb::class_<EvictedRows>(m, "EvictedRows")
      .def(nb::init<int64_t>(), nb::arg("limit"))
      .def("__len__",
           [](EvictedRows& self) {
             std::lock_guard lock(self.mutex);
             return self.rows.size();
           })
      // (ids, times, rows) as bytes, and the number of rows dropped beyond the limit; empties the sink.
      .def("take", [](EvictedRows& self) {
        Rows rows;
        int64_t lost;
        {
          std::lock_guard lock(self.mutex);
          std::swap(rows, self.rows);
          lost = std::exchange(self.lost, 0);
        }
        return nb::make_tuple(nb::bytes(rows.ids.data(), rows.ids.size() * sizeof(int64_t)),
                              nb::bytes(rows.times.data(), rows.times.size() * sizeof(uint32_t)),
                              nb::bytes(rows.rows.data(), rows.rows.size()), lost);
      });

  m.def("pin", [](Table& t, uintptr_t ids, int64_t n) { eviction_of(t).pin(ptr<int64_t>(ids, n), n); }, NoGil());
  m.def("unpin", [](Table& t, uintptr_t ids, int64_t n) { eviction_of(t).unpin(ptr<int64_t>(ids, n), n); }, NoGil());
  m.def("pinned", [](const Table& t) { return eviction_of(t).pinned(); });
  m.def("next_eviction_epoch", [](Table& t) { return eviction_of(t).next_epoch(); });
  m.def("eviction_epoch", [](const Table& t) { return eviction_of(t).epoch(); });
  m.def("set_eviction_epoch", [](Table& t, uint32_t epoch) { eviction_of(t).set_epoch(epoch); });
  m.def("set_eviction_score", [](Table& t, float score, bool every) { eviction_of(t).set_score(score, every); });
  m.def(
      "set_evicted_sink", [](Table& t, std::shared_ptr<EvictedRows> sink) { eviction_of(t).set_sink(std::move(sink)); },
      nb::arg("table"), nb::arg("sink").none());
  m.def(
      "policy_keys",
      [](const Table& t, uintptr_t ids, int64_t n, uintptr_t out, bool lasting) {
        t.policy_keys(ptr<int64_t>(ids, n), n, lasting, ptr<int64_t>(out, n));
      },
      nb::arg("table"), nb::arg("ids"), nb::arg("n"), nb::arg("out"), nb::arg("lasting") = false, NoGil());
  // Ids whose rows left and ids that were refused since the last call, as bytes; kept from `record_outcomes` on.
  m.def("record_outcomes", [](Table& t, bool on) { eviction_of(t).record(on); });
  m.def("take_outcome", [](Table& t) {
    const Eviction::Outcome outcome = eviction_of(t).take_outcome();
    return nb::make_tuple(nb::bytes(outcome.gone.data(), outcome.gone.size() * sizeof(int64_t)),
                          nb::bytes(outcome.refused.data(), outcome.refused.size() * sizeof(int64_t)));
  });
  m.def("let_go", [](Table& t, uintptr_t ids, int64_t n) { t.let_go(ptr<int64_t>(ids, n), n); }, NoGil());
  m.def("follow_evictions", [](Table& t, bool other) { t.follow(other); }, NoGil());
  m.def("count_refused", [](Table& t, int64_t n) { eviction_of(t).refused += n; });
  m.def("empty_twin", [](const Table& t) { return t.empty_twin(); }, NoGil());
  // Called when this table takes over another one's rows: advances its clocks and counts rows that did not fit as
  // refused.
  m.def("adopt_eviction", [](Table& t, const Table& other) {
    if (!t.eviction() || !other.eviction()) return;
    t.eviction()->raise_clocks(*other.eviction());
    t.eviction()->refused += other.eviction()->evicted + other.eviction()->refused;
  });
  // created, hits, evicted, refused, sum of ages, youngest and oldest of the evicted (-1: none)
  m.def("eviction_counters", [](const Table& t) {
    const Eviction& e = eviction_of(t);
    return nb::make_tuple(e.created.load(), e.hits.load(), e.evicted.load(), e.refused.load(), e.age_sum.load(),
                          e.youngest.load(), e.oldest.load());
  });
  m.def("set_eviction_counters", [](Table& t, const std::vector<int64_t>& counters) {
    Eviction& e = eviction_of(t);
    std::atomic<int64_t>* all[] = {&e.created, &e.hits, &e.evicted, &e.refused, &e.age_sum, &e.youngest, &e.oldest};
    check_equal("the number of counters", static_cast<int64_t>(counters.size()), std::size(all));
    for (size_t i = 0; i < counters.size(); ++i) all[i]->store(counters[i]);
  });
  // Sizes of LRU tables, the share of writes whose row each would not have, and the number of sampled writes.
  m.def("miss_ratio_curve", [](const Table& t) { return tuple_of(eviction_of(t).curve.points()); });
  // The same for a table elsewhere, which passes the ids whose hash is below `threshold`.
  nb::class_<Curve>(m, "Curve")
      .def(nb::init<uint64_t>(), nb::arg("threshold"))
      .def("sampled",
           [](Curve& c, uintptr_t ids, int64_t n, int64_t writes) { c.sampled(ptr<int64_t>(ids, n), n, writes); })
      .def_prop_ro("threshold", &Curve::threshold)
      .def("points", [](const Curve& c) { return tuple_of(c.points()); });
}

}  // namespace shoal::bind
