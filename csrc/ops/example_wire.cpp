#include "ops/example_wire.h"

#include <unordered_map>

#include "core/wire.h"
#include "ops/common.h"

namespace shoal::ops {
namespace {

struct FailSharding {
  [[noreturn]] void operator()(const std::string& what) const { fail("sharding_sparse_fids: a message " + what); }
};
using Reader = wire::Fields<FailSharding>;

int64_t to_v2(uint64_t v1) { return static_cast<int64_t>((v1 >> 54) << 48 | (v1 & ((uint64_t{1} << 48) - 1))); }

// repeated fixed64, packed or one by one.
template <class F>
void each_fixed64(const Reader& reader, F&& emit) {
  if (reader.type != 1 && reader.type != 2) return;
  if (reader.bytes.size() % 8)
    fail("sharding_sparse_fids: the bytes of a list of ids must be a multiple of 8, got " +
         std::to_string(reader.bytes.size()));
  for (size_t at = 0; at < reader.bytes.size(); at += 8) {
    uint64_t value;
    std::memcpy(&value, reader.bytes.data() + at, 8);
    emit(value);
  }
}

// Appends the ids of a Feature message.
void read_feature(std::string_view bytes, std::vector<int64_t>& ids) {
  for (Reader feature(bytes); feature.next();) {
    if ((feature.field != 1 && feature.field != 2) || feature.type != 2) continue;
    const bool v1 = feature.field == 1;
    for (Reader list(feature.bytes); list.next();) {
      if (list.field != 1) continue;
      each_fixed64(list, [&](uint64_t value) { ids.push_back(v1 ? to_v2(value) : static_cast<int64_t>(value)); });
    }
  }
}

using Names = std::unordered_map<std::string_view, int64_t>;

int64_t find(const Names& names, std::string_view name) {
  auto it = names.find(name);
  return it == names.end() ? -1 : it->second;
}

// Ids of one sample, per wanted feature.
using Sample = std::vector<std::vector<int64_t>>;

void read_example(std::string_view message, const Names& names, Sample& sample) {
  for (Reader example(message); example.next();) {
    if (example.field != 1 || example.type != 2) continue;
    std::string_view name, feature;
    for (Reader named(example.bytes); named.next();) {
      if (named.field == 1 && named.type == 2) name = named.bytes;
      if (named.field == 2 && named.type == 2) feature = named.bytes;
    }
    if (int64_t f = find(names, name); f >= 0) read_feature(feature, sample[f]);
  }
}

void read_instance(std::string_view message, const Names& names, Sample& sample) {
  for (Reader instance(message); instance.next();) {
    if (instance.field == 1) {
      each_fixed64(instance, [&](uint64_t value) {
        const std::string slot = std::to_string(value >> 54);
        for (const char* prefix : {"slot_", "fc_slot_"}) {
          if (int64_t f = find(names, prefix + slot); f >= 0) sample[f].push_back(to_v2(value));
        }
      });
    } else if (instance.field == 9 && instance.type == 2) {
      std::string_view name;
      for (Reader feature(instance.bytes); feature.next();) {
        if (feature.field == 1 && feature.type == 2) name = feature.bytes;
      }
      const int64_t f = find(names, name);
      if (f < 0) continue;
      auto add = [&](uint64_t value) { sample[f].push_back(static_cast<int64_t>(value)); };
      for (Reader feature(instance.bytes); feature.next();) {
        if (feature.field == 2) each_fixed64(feature, add);
      }
      for (Reader feature(instance.bytes); feature.next();) {
        if (feature.field != 6 || feature.type != 2) continue;
        for (Reader list(feature.bytes); list.next();) {
          if (list.field == 1) each_fixed64(list, add);
        }
      }
    }
  }
}

void read_batch(std::string_view message, const Names& names, WireBatch& out) {
  for (auto& column : out.columns) {
    column.shared = true;  // until it is found
    column.splits = {0, 0};
  }
  std::vector<std::string_view> lists;
  bool sized = false;
  for (Reader batch(message); batch.next();) {
    if (batch.field == 1 && batch.type == 2) lists.push_back(batch.bytes);
    if (batch.field == 3 && batch.type == 0) {
      out.batch = static_cast<int32_t>(batch.number);
      sized = true;
    }
  }
  if (out.batch < 0) fail("sharding_sparse_fids: batch_size must be >= 0, got " + std::to_string(out.batch));
  int64_t unnamed = 0;  // samples of the first unwanted feature: the batch size if nothing else says it
  for (std::string_view bytes : lists) {
    std::string_view name;
    bool shared = false;
    int64_t features = 0;
    for (Reader list(bytes); list.next();) {
      if (list.field == 1 && list.type == 2) name = list.bytes;
      if (list.field == 3 && list.type == 0) shared = list.number == 1;
      features += list.field == 2 && list.type == 2;
    }
    const int64_t f = find(names, name);
    if (f < 0) {
      if (!shared && unnamed == 0) unnamed = features;
      continue;
    }
    if (!shared && !sized) {
      out.batch = features;
      sized = true;
    }
    if (!shared && features != out.batch) {
      fail("sharding_sparse_fids: feature '" + std::string(name) + "' must have one list per sample of a batch of " +
           std::to_string(out.batch) + ", got " + std::to_string(features) + " lists");
    }
    if (shared && features > 1) {
      fail("sharding_sparse_fids: shared feature '" + std::string(name) + "' must have at most one list, got " +
           std::to_string(features));
    }
    auto& column = out.columns[f];
    column.shared = shared;
    column.ids.clear();
    column.splits.assign(1, 0);
    for (Reader list(bytes); list.next();) {
      if (list.field != 2 || list.type != 2) continue;
      read_feature(list.bytes, column.ids);
      column.splits.push_back(static_cast<int64_t>(column.ids.size()));
    }
    if (shared && features == 0) column.splits.push_back(0);
  }
  if (!sized) out.batch = unnamed;
}

}  // namespace

WireBatch read_wire(WireKind kind, const std::vector<std::string_view>& messages,
                    const std::vector<std::string>& features) {
  Names names;
  for (size_t f = 0; f < features.size(); ++f) names.emplace(features[f], static_cast<int64_t>(f));
  WireBatch out;
  out.columns.resize(features.size());
  if (kind == WireKind::example_batch) {
    if (messages.size() != 1) {
      fail("sharding_sparse_fids: an example batch must be one message, got " + std::to_string(messages.size()));
    }
    read_batch(messages[0], names, out);
    return out;
  }
  out.batch = static_cast<int64_t>(messages.size());
  std::vector<Sample> samples(messages.size());
  parallel_for(out.batch, 16, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      samples[b].resize(features.size());
      (kind == WireKind::example ? read_example : read_instance)(messages[b], names, samples[b]);
    }
  });
  parallel_for(static_cast<int64_t>(features.size()), 4, [&](int64_t begin, int64_t end) {
    for (int64_t f = begin; f < end; ++f) {
      auto& column = out.columns[f];
      column.splits.resize(out.batch + 1, 0);
      for (int64_t b = 0; b < out.batch; ++b) {
        column.ids.insert(column.ids.end(), samples[b][f].begin(), samples[b][f].end());
        column.splits[b + 1] = static_cast<int64_t>(column.ids.size());
      }
    }
  });
  return out;
}

}  // namespace shoal::ops
