#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>

#include "bind/bind.h"
#include "core/thread_pool.h"
#include "data/block.h"
#include "data/text.h"
#include "data/text_hash.h"
#include "data/tf_example.h"

namespace shoal::bind {
namespace {

constexpr int64_t kGrain = 8192;

template <class T>
void copy_out(const std::vector<T>& from, uintptr_t to, int64_t size) {
  if (static_cast<int64_t>(from.size()) != size) throw std::invalid_argument("Block.copy: a tensor has another size");
  if (size > 0) std::memcpy(ptr<T>(to), from.data(), from.size() * sizeof(T));
}

// out[i * stride] = the id of text i, which lies at data[offsets[i], offsets[i + 1]).
template <class Offset>
void hash_texts(uintptr_t data, int64_t size, uintptr_t offsets, int64_t n, uint64_t slot, uintptr_t out,
                int64_t stride) {
  const char* text = ptr<const char>(data);
  const Offset* at = ptr<const Offset>(offsets);
  int64_t* to = ptr<int64_t>(out);
  parallel_for(n, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (at[i] < 0 || at[i] > at[i + 1] || at[i + 1] > size) throw std::invalid_argument("offsets leave the text");
      to[i * stride] = text_fid({text + at[i], static_cast<size_t>(at[i + 1] - at[i])}, slot);
    }
  });
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
  nb::class_<TextParser>(m, "TextParser")
      .def("__init__",
           [](TextParser* self, const std::vector<int>& roles, const std::vector<int64_t>& indices,
              const std::vector<uint64_t>& slots, int delimiter, int quote, int separator, int64_t max_line) {
             if (roles.size() != indices.size() || roles.size() != slots.size()) {
               throw std::invalid_argument("roles, indices and slots are equally many");
             }
             std::vector<TextColumn> columns(roles.size());
             for (size_t i = 0; i < columns.size(); ++i) {
               if (roles[i] < 0 || roles[i] > 5) throw std::invalid_argument("a role is 0..5");
               columns[i] = {static_cast<Role>(roles[i]), indices[i], slots[i]};
             }
             new (self) TextParser(std::move(columns), static_cast<char>(delimiter), static_cast<char>(quote),
                                   static_cast<char>(separator), max_line);
           })
      .def(
          "parse",
          [](const TextParser& self, nb::bytes text, int64_t begin, bool final, int64_t max_rows, int64_t limit,
             bool threads) {
            const std::string_view view(text.c_str(), text.size());
            if (begin < 0 || begin > static_cast<int64_t>(view.size())) throw std::invalid_argument("begin is outside");
            const nb::gil_scoped_release release;
            return self.parse(view.substr(begin), final, max_rows, limit, threads);
          },
          nb::arg("text"), nb::arg("begin"), nb::arg("final"), nb::arg("max_rows"), nb::arg("limit"),
          nb::arg("threads") = false);
  m.def(
      "parse_tf_examples",
      [](nb::list messages, const std::string& label, const std::string& time, const std::vector<std::string>& dense,
         const std::vector<std::string>& sparse, const std::vector<uint64_t>& slots, bool raw) {
        std::vector<std::string_view> views;
        for (nb::handle message : messages) {
          auto bytes = nb::cast<nb::bytes>(message);
          views.emplace_back(bytes.c_str(), bytes.size());  // the list keeps them alive
        }
        const nb::gil_scoped_release release;
        return parse_tf_examples({label, time, dense, sparse, slots, raw}, views);
      },
      nb::arg("messages"), nb::arg("label"), nb::arg("time"), nb::arg("dense"), nb::arg("sparse"), nb::arg("slots"),
      nb::arg("raw"));
  // (payloads, where each frame begins, bytes read); a payload that is corrupt is None.
  m.def(
      "read_frames",
      [](nb::bytes text, int64_t begin, int64_t max_records) {
        std::string_view view(text.c_str(), text.size());
        if (begin < 0 || begin > static_cast<int64_t>(view.size())) throw std::invalid_argument("begin is outside");
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
  m.def("hash_texts_32", &hash_texts<int32_t>, NoGil());
  m.def("hash_texts_64", &hash_texts<int64_t>, NoGil());
  m.def(
      "hash_numbers",
      [](uintptr_t values, int64_t n, uint64_t slot, uintptr_t out, int64_t stride) {
        parallel_for(n, kGrain, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            ptr<int64_t>(out)[i * stride] = number_fid(ptr<const int64_t>(values)[i], slot);
          }
        });
      },
      NoGil());
}

}  // namespace shoal::bind
