#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.h"
#include "ops/example_wire.h"
#include "ops/fused_gather.h"
#include "ops/layouts/layout.h"
#include "ops/lookup.h"
#include "ops/ragged/ragged.h"
#include "ops/ragged/reduce.h"
#include "ops/ragged/rows.h"
#include "ops/shard/reorder.h"
#include "ops/shard/shard_fids.h"
#include "ops/shard/split.h"
#include "ops/unique.h"

namespace shoal::bind {
namespace {

using Addresses = std::vector<uintptr_t>;
using Sizes = std::vector<int64_t>;
using i64 = const int64_t;

void ragged_ops(nb::module_& m) {
  m.def("check_row_splits", raw<&ops::check_row_splits>);
  m.def("row_ids", raw<&ops::row_ids>, NoGil());
  m.def("normalize_merged_split", raw<&ops::normalize_merged_split>, NoGil());
}

void split_ops(nb::module_& m) {
  m.def("split_pieces", &ops::split_pieces);
  m.def("split_count", raw<&ops::split_count>, NoGil());
  m.def("split_rows", raw<&ops::split_rows>, NoGil());
  m.def("unsplit_rows", raw<&ops::unsplit_rows>, NoGil());
  m.def("split_ragged", raw<&ops::split_ragged>, NoGil());
  m.def(
      "gather_rows",
      [](uintptr_t src, int64_t src_rows, int64_t row_bytes, uintptr_t index, int64_t n, uintptr_t dst,
         const std::string& what) {
        ops::gather_rows(ptr<const char>(src), src_rows, row_bytes, ptr<i64>(index), n, ptr<char>(dst), what.c_str());
      },
      NoGil());
}

void reorder_ops(nb::module_& m) {
  m.def("reorder_by_indices", raw<&ops::reorder_by_indices>, NoGil());
  nb::class_<ops::FusedReorder>(m, "FusedReorder")
      .def(nb::init<Addresses, Sizes, int64_t, int64_t, Sizes>(), NoGil())
      .def_prop_ro("size", &ops::FusedReorder::size)
      .def("finish", raw<&ops::FusedReorder::finish>, NoGil());
  nb::class_<ops::UniqueKeys>(m, "UniqueKeys")
      .def(
          "__init__",
          [](ops::UniqueKeys* self, uintptr_t keys, uintptr_t splits, int64_t rows, Sizes dims) {
            new (self) ops::UniqueKeys(ptr<i64>(keys), ptr<i64>(splits), rows, std::move(dims));
          },
          NoGil())
      .def_prop_ro("size", &ops::UniqueKeys::size)
      .def_prop_ro("floats", &ops::UniqueKeys::floats)
      .def("finish", raw<&ops::UniqueKeys::finish>, NoGil());
  // map: pos, pos_splits, rows, offset splits, keys, offsets, offset count
  m.def(
      "fill_with_offset_map",
      [](uintptr_t pos, uintptr_t pos_splits, const Sizes& dims, uintptr_t splits, int64_t keys, uintptr_t offsets,
         int64_t offset_count, uintptr_t value, int64_t value_size, uintptr_t buffer, int64_t floats, bool disjoint) {
        ops::fill_with_offset_map({ptr<i64>(pos), ptr<i64>(pos_splits), dims.data(), static_cast<int64_t>(dims.size()),
                                   ptr<i64>(splits), ptr<i64>(offsets), keys, offset_count},
                                  ptr<const float>(value), value_size, ptr<float>(buffer), floats, disjoint);
      },
      NoGil());
  m.def(
      "fill_with_offset_map_gradient",
      [](uintptr_t pos, uintptr_t pos_splits, const Sizes& dims, uintptr_t splits, int64_t keys, uintptr_t offsets,
         int64_t offset_count, uintptr_t grad, int64_t floats, uintptr_t out, int64_t out_size) {
        ops::fill_with_offset_map_gradient(
            {ptr<i64>(pos), ptr<i64>(pos_splits), dims.data(), static_cast<int64_t>(dims.size()), ptr<i64>(splits),
             ptr<i64>(offsets), keys, offset_count},
            ptr<const float>(grad), floats, ptr<float>(out), out_size);
      },
      NoGil());
}

void lookup_ops(nb::module_& m) {
  m.def("map_id_to_embedding", raw<&ops::map_id_to_embedding>, NoGil());
  auto tables = [](const Addresses& offsets, const std::vector<bool>& wide, const Addresses& rows, const Sizes& lengths,
                   const Sizes& widths) {
    std::vector<ops::OffsetTable> out(offsets.size());
    for (size_t t = 0; t < out.size(); ++t) out[t] = {offsets[t], rows[t], lengths[t], widths[t], wide[t]};
    return out;
  };
  m.def(
      "fused_gather",
      [tables](uintptr_t buffer, int64_t size, int64_t element_bytes, const Addresses& offsets,
               const std::vector<bool>& wide, const Addresses& rows, const Sizes& lengths, const Sizes& widths) {
        ops::fused_gather(ptr<const char>(buffer), size, element_bytes, tables(offsets, wide, rows, lengths, widths));
      },
      NoGil());
  m.def(
      "fused_gather_gradient",
      [tables](uintptr_t out, int64_t size, int64_t element_bytes, double scale, const Addresses& offsets,
               const std::vector<bool>& wide, const Addresses& rows, const Sizes& lengths, const Sizes& widths) {
        auto all = tables(offsets, wide, rows, lengths, widths);
        if (element_bytes == 4) {
          ops::fused_gather_gradient(ptr<float>(out), size, static_cast<float>(scale), all);
        } else {
          ops::fused_gather_gradient(ptr<double>(out), size, scale, all);
        }
      },
      NoGil());
}

template <class T>
void reduce_ops(nb::module_& m, const char* suffix) {
  auto name = [suffix](const char* base) { return std::string(base) + suffix; };
  m.def(name("reduce_by_index").c_str(), raw<&ops::reduce_by_index<T>>, NoGil());
  m.def(name("reduce_by_index_gradient").c_str(), raw<&ops::reduce_by_index_gradient<T>>, NoGil());
  auto tables = [](const Addresses& rows, const Addresses& splits, const Sizes& n, const Sizes& d,
                   const std::vector<Sizes>& slices) {
    std::vector<ops::SplitTable> out(rows.size());
    for (size_t t = 0; t < out.size(); ++t) out[t] = {rows[t], splits[t], n[t], d[t], slices[t]};
    return out;
  };
  m.def(
      name("reduce_and_split").c_str(),
      [tables](const Addresses& rows, const Addresses& splits, const Sizes& n, const Sizes& d,
               const std::vector<Sizes>& slices, int64_t segments,
               const Addresses& outs) { ops::reduce_and_split<T>(tables(rows, splits, n, d, slices), segments, outs); },
      NoGil());
  m.def(
      name("reduce_and_split_gradient").c_str(),
      [tables](const Addresses& rows, const Addresses& splits, const Sizes& n, const Sizes& d,
               const std::vector<Sizes>& slices, int64_t segments, const Addresses& ins) {
        ops::reduce_and_split_gradient<T>(tables(rows, splits, n, d, slices), segments, ins);
      },
      NoGil());
  m.def(name("first_n").c_str(), raw<&ops::first_n<T>>, NoGil());
  m.def(name("first_n_gradient").c_str(), raw<&ops::first_n_gradient<T>>, NoGil());
}

void layout_ops(nb::module_& m) {
  // Offsets arrive as (address, count) pairs of one request.
  auto request = [](uintptr_t tasks, int64_t task_count, int64_t features, uintptr_t nfl, int64_t nfl_count,
                    uintptr_t rows, int64_t row_count, uintptr_t fids, int64_t fid_count, int64_t batch,
                    int64_t first_row, const Addresses& blocks, const Sizes& sizes, const Sizes& strides, bool flat) {
    return ops::LayoutRequest{ptr<const ops::LayoutTask>(tasks),
                              task_count,
                              features,
                              ptr<i64>(nfl),
                              nfl_count,
                              ptr<i64>(rows),
                              row_count,
                              ptr<const uint64_t>(fids),
                              fid_count,
                              batch,
                              first_row,
                              blocks,
                              sizes,
                              strides,
                              flat};
  };
  m.def(
      "embedding_to_layout",
      [request](uintptr_t tasks, int64_t task_count, int64_t features, uintptr_t nfl, int64_t nfl_count, uintptr_t rows,
                int64_t row_count, uintptr_t fids, int64_t fid_count, int64_t batch, int64_t first_row,
                const Addresses& blocks, const Sizes& sizes, const Sizes& strides, bool flat, const Addresses& outputs,
                bool wide) {
        auto q = request(tasks, task_count, features, nfl, nfl_count, rows, row_count, fids, fid_count, batch,
                         first_row, blocks, sizes, strides, flat);
        if (wide) {
          ops::embedding_to_layout<double>(q, outputs);
        } else {
          ops::embedding_to_layout<float>(q, outputs);
        }
      },
      NoGil());
  m.def(
      "embedding_to_layout_gradient",
      [request](uintptr_t tasks, int64_t task_count, int64_t features, uintptr_t nfl, int64_t nfl_count, uintptr_t rows,
                int64_t row_count, uintptr_t fids, int64_t fid_count, int64_t batch, int64_t first_row,
                const Addresses& blocks, const Sizes& sizes, const Sizes& strides, bool flat, const Addresses& grads,
                bool wide, double scale) {
        auto q = request(tasks, task_count, features, nfl, nfl_count, rows, row_count, fids, fid_count, batch,
                         first_row, blocks, sizes, strides, flat);
        if (wide) {
          ops::embedding_to_layout_gradient<double>(q, grads, scale);
        } else {
          ops::embedding_to_layout_gradient<float>(q, grads, static_cast<float>(scale));
        }
      },
      NoGil());
}

void sharding_ops(nb::module_& m) {
  nb::class_<ops::WireBatch>(m, "WireBatch")
      .def("__init__",
           [](ops::WireBatch* self, int kind, nb::list messages, const std::vector<std::string>& features) {
             const std::vector<std::string_view> views = views_of(messages);
             nb::gil_scoped_release release;
             new (self) ops::WireBatch(ops::read_wire(static_cast<ops::WireKind>(kind), views, features));
           })
      .def_prop_ro("batch", [](const ops::WireBatch& self) { return self.batch; })
      // Per feature: address of the ids, address of the splits, rows, shared.
      .def("columns", [](const ops::WireBatch& self) {
        nb::list out;
        for (const auto& column : self.columns) {
          out.append(nb::make_tuple(reinterpret_cast<uintptr_t>(column.ids.data()),
                                    reinterpret_cast<uintptr_t>(column.splits.data()), column.splits.size() - 1,
                                    column.shared));
        }
        return out;
      });
  nb::class_<ops::ShardFids>(m, "ShardFids")
      .def(
          "__init__",
          [](ops::ShardFids* self, const Addresses& ids, const Addresses& splits, const Sizes& rows,
             const std::vector<bool>& shared, const Sizes& table, const Sizes& width, int64_t tables, int64_t shards,
             bool unique) {
            std::vector<ops::FeatureIds> features(ids.size());
            for (size_t f = 0; f < features.size(); ++f) {
              features[f] = {ptr<i64>(ids[f]), ptr<i64>(splits[f]), rows[f], shared[f], table[f], width[f]};
            }
            new (self) ops::ShardFids(std::move(features), tables, shards, unique);
          },
          NoGil())
      .def_prop_ro("fids", &ops::ShardFids::fids)
      .def_prop_ro("rows", &ops::ShardFids::rows)
      .def_prop_ro("list_lengths", &ops::ShardFids::list_lengths)
      .def_prop_ro("list_floats", &ops::ShardFids::list_floats)
      .def("finish", raw<&ops::ShardFids::finish>, NoGil());
}

}  // namespace

void ops(nb::module_& m) {
  sharding_ops(m);
  layout_ops(m);
  ragged_ops(m);
  split_ops(m);
  reorder_ops(m);
  lookup_ops(m);
  reduce_ops<float>(m, "_f32");
  reduce_ops<double>(m, "_f64");
}

}  // namespace shoal::bind
