#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>

#include "bind/bind.h"
#include "bind/checks.h"

#ifdef SHOAL_HTTP2
#include "bind/predict.h"
#include "net/client/caller.h"
#include "net/client/load.h"
#include "net/client/remote_rows.h"
#include "net/front.h"

namespace shoal::bind {
namespace {

using net::Batch;
using net::Call;
using net::Front;

nb::str text(const std::string& value) {  // headers are bytes, not always ASCII
  PyObject* made = PyUnicode_DecodeLatin1(value.data(), static_cast<Py_ssize_t>(value.size()), "strict");
  if (!made) throw nb::python_error();
  return nb::steal<nb::str>(made);
}

nb::str utf8(const std::string& value) {
  PyObject* made = PyUnicode_DecodeUTF8(value.data(), static_cast<Py_ssize_t>(value.size()), "replace");
  if (!made) throw nb::python_error();
  return nb::steal<nb::str>(made);
}

nb::bytes bytes(const std::string& value) { return nb::bytes(value.data(), value.size()); }

std::string string_of(const nb::bytes& value) { return {static_cast<const char*>(value.data()), value.size()}; }

nb::list pairs_of(const net::Metadata& metadata) {
  nb::list all;
  for (const auto& [key, value] : metadata) all.append(nb::make_tuple(text(key), text(value)));
  return all;
}

nb::list metadata_of(const Call& call) { return pairs_of(call.metadata); }

nb::list take(Front& front) {
  nb::list all;
  for (net::Event& event : front.take_events()) {
    const bool unary = event.kind == net::EventKind::call && !event.call->method->streams;
    nb::object payload = nb::none();
    if (unary) payload = bytes(event.call->message);
    if (event.kind == net::EventKind::message) payload = bytes(event.message);
    const bool compressed = unary ? event.call->compressed : event.compressed;
    all.append(nb::make_tuple(static_cast<int>(event.kind), event.call, std::move(payload), compressed));
  }
  return all;
}

// ([(lane, why, rows, bytes, seconds since it arrived, seconds that it took, peer, common name, metadata), ...],
// number of notes dropped)
nb::tuple take_notes(Front& front) {
  auto [notes, dropped] = front.notes().take();
  nb::list all;
  const int64_t now = net::now_ns();
  for (const net::Note& each : notes)
    all.append(nb::make_tuple(each.lane, each.noted, each.rows, each.bytes,
                              static_cast<double>(now - each.arrived_ns) * 1e-9,
                              static_cast<double>(each.done_ns - each.arrived_ns) * 1e-9, text(each.peer->address),
                              text(each.peer->common_name), pairs_of(each.metadata)));
  return nb::make_tuple(std::move(all), dropped);
}

using Pairs = std::vector<std::pair<std::string, std::string>>;

void reply(Front& front, const std::shared_ptr<Call>& call, nb::object data, bool last, int code, std::string details,
           Pairs initial, Pairs trailing) {
  net::Reply made;
  if (!data.is_none()) {
    const auto message = nb::cast<nb::bytes>(data);
    made.data = net::framed(message.size());
    std::copy_n(static_cast<const char*>(message.data()), message.size(), made.data.data() + net::kPrefix);
  }
  made.last = last;
  made.code = code;
  made.details = std::move(details);
  made.initial = std::move(initial);
  made.trailing = std::move(trailing);
  const nb::gil_scoped_release release;
  front.reply(*call, std::move(made));
}

// Python's handle to a call, which it shares with the caller's thread.
struct OutgoingHandle {
  net::OutgoingPtr call;
};

void answer(Batch& batch, size_t first, size_t count, const nb::bytes& spec_bytes, const nb::list& given) {
  const std::string spec = string_of(spec_bytes);
  std::vector<std::string> aliases;
  std::vector<Output> outputs;
  aliases.reserve(given.size());
  for (nb::handle each : given) {
    auto [alias, dtype, tail, values] =
        nb::cast<std::tuple<std::string, int64_t, std::vector<int64_t>, uintptr_t>>(each);
    aliases.push_back(std::move(alias));
    outputs.push_back({aliases.back(), &checked_kind(dtype), std::move(tail), ptr<const uint8_t>(values)});
  }
  const nb::gil_scoped_release release;
  batch.answer(first, count, spec, outputs);
}

// [(lane, [(nanoseconds, requests)], [(requests of a batch, batches)], [(rows of a batch, batches)])]
nb::list counts_of(Front& front) {
  nb::list all;
  for (const auto& [lane, counts] : front.lanes().take_counts()) {
    nb::list times, requests, rows;
    for (int i = 0; i < net::LaneCounts::kTimes; ++i)
      if (const int64_t n = counts.times[static_cast<size_t>(i)])
        times.append(nb::make_tuple((4 + i % 4 + 0.5) * std::ldexp(0.25, i / 4), n));
    for (int i = 0; i < net::LaneCounts::kSizes; ++i) {
      const auto at = static_cast<size_t>(i);
      if (counts.requests[at]) requests.append(nb::make_tuple(int64_t{1} << i, counts.requests[at]));
      if (counts.rows[at]) rows.append(nb::make_tuple(int64_t{1} << i, counts.rows[at]));
    }
    all.append(nb::make_tuple(lane, times, requests, rows));
  }
  return all;
}

nb::list inputs_of(const Batch& batch) {
  nb::list all;
  for (const Batch::Input& each : batch.inputs()) all.append(nb::make_tuple(bytes(each.alias), each.dtype, each.shape));
  return all;
}

}  // namespace

void front(nb::module_& m) {
  m.def("front_available", [] { return true; });
  m.def("front_tls_missing", [] {
    std::string why;
    net::tls_available(&why);
    return why;
  });
  nb::class_<Call>(m, "FrontCall")
      .def_prop_ro("path", [](const Call& call) { return text(call.method->path); })
      .def_prop_ro("metadata", metadata_of)
      .def_prop_ro("sampled", [](const Call& call) { return (call.noted & net::kSampled) != 0; })
      .def_prop_ro("encoding", [](const Call& call) { return text(call.encoding); })
      .def_prop_ro("peer", [](const Call& call) { return text(call.peer->address); })
      .def_prop_ro("common_name", [](const Call& call) { return text(call.peer->common_name); })
      .def_prop_ro("ended", [](const Call& call) { return call.ended.load(); })
      .def_prop_ro("has_deadline", [](const Call& call) { return call.deadline_ns != 0; })
      .def_prop_ro("seconds_left",
                   [](const Call& call) { return static_cast<double>(call.deadline_ns - net::now_ns()) * 1e-9; });
  nb::class_<Batch>(m, "FrontBatch")
      .def_prop_ro("lane", &Batch::lane)
      .def("__len__", &Batch::size)
      .def("read", &Batch::read, NoGil())
      .def("plan", &Batch::plan, NoGil())
      .def_prop_ro("inputs", inputs_of)
      .def(
          "join_into",
          [](const Batch& batch, const std::vector<uintptr_t>& addresses) {
            std::vector<uint8_t*> out;
            for (uintptr_t each : addresses) out.push_back(ptr<uint8_t>(each));
            batch.join_into(out);
          },
          NoGil())
      .def("parts", &Batch::parts)
      .def("answer", answer)
      .def("bounce", &Batch::bounce, NoGil())
      .def_prop_ro("seconds", &Batch::seconds);
  nb::class_<Front>(m, "Front")
      .def(
          "__init__",
          [](Front* self, int threads, int64_t max_message, int64_t max_waiting, const std::string& certificate,
             const std::string& key, const std::string& client_ca, bool wants_identity,
             std::vector<std::string> bearers, std::vector<std::string> names, std::shared_ptr<Rates> rates,
             const Generation& generation) {
            Front::Options options;
            options.threads = threads;
            options.limits.max_message = max_message;
            options.limits.max_arriving = std::max(options.limits.max_arriving, 4 * max_message);
            options.lanes.max_waiting = max_waiting;
            options.lanes.cores = threads;
            options.lanes.max_bytes = max_message / 8;
            options.tls = {certificate, key, client_ca};
            options.wants_identity = wants_identity;
            options.bearers = std::move(bearers);
            options.names = std::move(names);
            options.rates = std::move(rates);
            options.generation = generation.number;
            new (self) Front(std::move(options));
          },
          nb::arg("threads"), nb::arg("max_message"), nb::arg("max_waiting"), nb::arg("certificate"), nb::arg("key"),
          nb::arg("client_ca"), nb::arg("wants_identity"), nb::arg("bearers"), nb::arg("names"),
          nb::arg("rates").none(), nb::arg("generation"))
      .def("add_method", &Front::add_method)
      .def("listen", &Front::listen)
      .def("start", &Front::start)
      .def("drain", &Front::drain, NoGil())
      .def("close", &Front::close, NoGil())
      .def_prop_ro("calls", &Front::calls)
      .def_prop_ro("event_fd", &Front::event_fd)
      .def("take", take)
      .def("reply", reply, nb::arg("call"), nb::arg("data").none(), nb::arg("last"), nb::arg("code"),
           nb::arg("details"), nb::arg("initial"), nb::arg("trailing"))
      .def("add_lane", [](Front& front, const nb::bytes& key,
                          const std::string& model) { return front.lanes().add(string_of(key), model); })
      .def(
          "remove_lane", [](Front& front, int64_t lane) { front.lanes().remove(lane); }, NoGil())
      .def("bind_lane",
           [](Front& front, int64_t lane, const PredictorHandle& predictor, const nb::bytes& spec,
              std::vector<size_t> outputs, int64_t generation) {
             const auto last = static_cast<int64_t>(predictor.predictor->parts().outputs.size()) - 1;
             for (size_t each : outputs) in_range("the number of an output", static_cast<int64_t>(each), 0, last);
             return front.lanes().bind(lane, {predictor.predictor, string_of(spec), std::move(outputs), generation});
           })
      .def("take_counts", counts_of)
      .def("set_limit",
           [](Front& front, const std::string& model, int64_t limit) { front.lanes().set_limit(model, limit); })
      .def("set_python", [](Front& front, int64_t enough, int64_t bytes,
                            int running) { front.lanes().set_python(enough, bytes, running); })
      .def(
          "next", [](Front& front, double seconds) { return front.lanes().next(static_cast<int64_t>(seconds * 1e9)); },
          NoGil(), nb::keep_alive<0, 1>())
      .def("note_calls",
           [](Front& front, int64_t log_every, int64_t trace_every) { front.notes().wants(log_every, trace_every); })
      .def("take_notes", take_notes)
      .def_prop_ro("waiting", [](Front& front) { return front.lanes().waiting(); })
      .def_prop_ro("refused", [](Front& front) { return front.lanes().refused(); });
  nb::class_<OutgoingHandle>(m, "Outgoing")
      .def(
          "wait", [](const OutgoingHandle& self) { self.call->wait(); }, NoGil())
      .def_prop_ro("status", [](const OutgoingHandle& self) { return self.call->status; })
      .def_prop_ro("details", [](const OutgoingHandle& self) { return utf8(self.call->details); })
      .def_prop_ro("message", [](const OutgoingHandle& self) { return bytes(self.call->message); })
      .def_prop_ro("metadata", [](const OutgoingHandle& self) { return pairs_of(self.call->metadata); });
  nb::class_<net::Caller>(m, "Caller")
      .def(nb::init<int64_t>())
      .def("start",
           [](net::Caller& caller, const std::string& address, std::string path, const nb::bytes& message,
              Pairs metadata, double timeout_s) {
             net::Caller::Request request{address, std::move(path), string_of(message), std::move(metadata)};
             const nb::gil_scoped_release release;
             return OutgoingHandle{caller.start(std::move(request), timeout_s)};
           })
      .def(
          "cancel", [](net::Caller& caller, const OutgoingHandle& self) { caller.cancel(self.call); }, NoGil())
      .def("keep", &net::Caller::keep, NoGil());
  nb::class_<net::RemoteRows>(m, "RemoteRows")
      .def("__init__",
           [](net::RemoteRows* self, const std::vector<std::pair<std::string, int64_t>>& given) {
             std::vector<net::RemoteRows::Slot> slots;
             for (const auto& [name, dim] : given) slots.push_back({name, dim});
             new (self) net::RemoteRows(std::move(slots));
           })
      // shards: (address, model spec); wanted: (ids, how many, rows) of each slot
      .def("lookup", [](const net::RemoteRows& rows, net::Caller& caller, const std::string& method,
                        const std::vector<std::pair<std::string, nb::bytes>>& given, const Pairs& metadata,
                        double timeout_s, const std::vector<std::tuple<uintptr_t, int64_t, uintptr_t>>& addresses) {
        std::vector<net::RemoteRows::Shard> shards;
        for (const auto& [address, spec] : given) shards.push_back({address, string_of(spec)});
        std::vector<net::RemoteRows::Wanted> wanted;
        for (const auto& [ids, n, out] : addresses) wanted.push_back({ptr<int64_t>(ids, n), n, ptr<float>(out, n)});
        net::RemoteRows::Outcome outcome;
        {
          const nb::gil_scoped_release release;
          outcome = rows.lookup(caller, method, shards, metadata, timeout_s, wanted);
        }
        return nb::make_tuple(outcome.status, utf8(outcome.why));
      });
  // Load on a server: (sorted seconds of the successful calls, {status: calls}, skipped calls, seconds).
  m.def("http2_load", [](const std::string& host, int port, const std::string& path, const nb::bytes& message,
                         int connections, int calls, double seconds, double rate, int64_t timeout_ms) {
    const net::LoadOptions options{host, port, path, string_of(message), connections, calls, seconds, rate, timeout_ms};
    net::LoadResult result;
    {
      const nb::gil_scoped_release release;
      result = net::make_load(options);
    }
    nb::dict statuses;
    for (const auto& [status, count] : result.statuses) statuses[nb::int_(status)] = count;
    return nb::make_tuple(result.seconds, statuses, result.skipped, result.took);
  });
  m.def("lane_key", [](const nb::bytes& message) {
    const std::string_view view(static_cast<const char*>(message.data()), message.size());
    return bytes(net::Lanes::key_of(view));
  });
}

}  // namespace shoal::bind

#else

namespace shoal::bind {

void front(nb::module_& m) {
  m.def("front_available", [] { return false; });
}

}  // namespace shoal::bind

#endif
