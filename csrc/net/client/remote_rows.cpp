#include "net/client/remote_rows.h"

#include <algorithm>
#include <bit>
#include <stdexcept>

#include "core/hash.h"
#include "serving/batch.h"
#include "serving/messages.h"

namespace shoal::net {
namespace {

constexpr int64_t kFloat = 1, kInt64 = 9;  // TensorFlow's DataType

// The distinct ids of each shard, and where each id of the input is among them.
struct Split {
  std::vector<std::vector<int64_t>> ids;
  std::vector<std::pair<int32_t, int32_t>> places;  // shard, number there

  Split(const int64_t* given, int64_t n, int64_t shards) : ids(static_cast<size_t>(shards)) {
    if (n >= int64_t{1} << 31)
      throw std::invalid_argument("a lookup must have at most 2147483647 ids, got " + std::to_string(n));
    std::vector<int32_t> first(std::bit_ceil(static_cast<size_t>(2 * n + 1)), -1);  // an id's first position
    const size_t mask = first.size() - 1;
    places.resize(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) {
      size_t at = hash_id(static_cast<uint64_t>(given[i])) & mask;
      while (first[at] >= 0 && given[first[at]] != given[i]) at = (at + 1) & mask;
      if (first[at] < 0) {
        first[at] = static_cast<int32_t>(i);
        const int64_t remainder = given[i] % shards;
        auto& own = ids[static_cast<size_t>(remainder < 0 ? remainder + shards : remainder)];
        places[static_cast<size_t>(i)] = {static_cast<int32_t>(&own - ids.data()), static_cast<int32_t>(own.size())};
        own.push_back(given[i]);
      } else {
        places[static_cast<size_t>(i)] = places[static_cast<size_t>(first[at])];
      }
    }
  }
};

}  // namespace

RemoteRows::RemoteRows(std::vector<Slot> slots) : slots_(std::move(slots)) {
  for (const Slot& slot : slots_) {
    if (slot.name.size() > 16'383 || slot.dim < 1)
      throw std::invalid_argument("a slot must have a name of at most 16383 bytes and a dim of at least 1, got " +
                                  std::to_string(slot.name.size()) + " bytes and dim " + std::to_string(slot.dim));
    filters_ += '\x1a';  // field 3, as bytes
    if (slot.name.size() > 127) filters_ += static_cast<char>(slot.name.size() % 128 + 128);
    filters_ += static_cast<char>(slot.name.size() > 127 ? slot.name.size() / 128 : slot.name.size());
    filters_ += slot.name;
  }
}

RemoteRows::Outcome RemoteRows::lookup(Caller& caller, const std::string& method, const std::vector<Shard>& shards,
                                       const Metadata& metadata, double timeout_s,
                                       const std::vector<Wanted>& wanted) const {
  if (wanted.size() != slots_.size() || shards.empty())
    throw std::invalid_argument("a lookup must have ids for " + std::to_string(slots_.size()) +
                                " slots and at least one shard, got " + std::to_string(wanted.size()) + " and " +
                                std::to_string(shards.size()));
  const size_t slots = slots_.size();
  std::vector<Split> splits;
  for (const Wanted& each : wanted) splits.emplace_back(each.ids, each.n, static_cast<int64_t>(shards.size()));
  std::vector<OutgoingPtr> calls(shards.size());
  std::vector<Caller::Request> requests;
  std::vector<size_t> asked;
  for (size_t shard = 0; shard < shards.size(); ++shard) {
    std::vector<Output> tensors;
    std::vector<int64_t> rows;
    int64_t all = 0;
    for (size_t slot = 0; slot < slots; ++slot) {
      const std::vector<int64_t>& own = splits[slot].ids[shard];
      tensors.push_back({slots_[slot].name, value_kind(kInt64), {}, reinterpret_cast<const uint8_t*>(own.data())});
      rows.push_back(static_cast<int64_t>(own.size()));
      all += rows.back();
    }
    if (!all) continue;
    asked.push_back(shard);
    requests.push_back(
        {shards[shard].address, method, write_request(shards[shard].spec, tensors, rows, filters_), metadata});
  }
  const std::vector<OutgoingPtr> started = caller.start_all(std::move(requests), timeout_s);
  Outcome failed;
  for (const OutgoingPtr& call : started) {
    if (failed.status) {
      caller.cancel(call);
      continue;
    }
    call->wait();
    if (call->status) failed = {call->status, call->details};
  }
  if (failed.status) return failed;
  std::vector<std::vector<std::vector<float>>> found(slots, std::vector<std::vector<float>>(shards.size()));
  for (size_t i = 0; i < started.size(); ++i) {
    const std::string& message = started[i]->message;
    const auto* data = reinterpret_cast<const uint8_t*>(message.data());
    const std::vector<MapEntry> tensors = response_tensors(data, static_cast<int64_t>(message.size()));
    for (size_t slot = 0; slot < slots; ++slot) {
      const auto own = std::find_if(tensors.begin(), tensors.end(), [&](const MapEntry& entry) {
        return std::string_view(message).substr(static_cast<size_t>(entry.key.begin),
                                                static_cast<size_t>(entry.key.size)) == slots_[slot].name;
      });
      const auto rows = static_cast<int64_t>(splits[slot].ids[asked[i]].size());
      if (own == tensors.end()) return {kInternal, "the answer of a shard has no rows of slot " + slots_[slot].name};
      const std::vector<Part> parts{{data, own->value}};
      Joined joined;
      if (tensor_parts(data, own->value).dtype != kFloat || !plan_join(parts, *value_kind(kFloat), &joined) ||
          joined.rows != std::vector<int64_t>{rows} || (rows && joined.tail != std::vector<int64_t>{slots_[slot].dim}))
        return {kInternal, "the answer of a shard must have float [" + std::to_string(rows) + ", " +
                               std::to_string(slots_[slot].dim) + "] for slot " + slots_[slot].name +
                               ", got another dtype, shape or number of values"};
      std::vector<float>& into = found[slot][asked[i]];
      into.resize(static_cast<size_t>(rows * slots_[slot].dim));
      if (rows) join(parts, *value_kind(kFloat), joined, reinterpret_cast<uint8_t*>(into.data()));
    }
  }
  for (size_t slot = 0; slot < slots; ++slot) {
    const int64_t dim = slots_[slot].dim;
    for (int64_t i = 0; i < wanted[slot].n; ++i) {
      const auto [shard, number] = splits[slot].places[static_cast<size_t>(i)];
      std::copy_n(found[slot][static_cast<size_t>(shard)].data() + number * dim, dim, wanted[slot].out + i * dim);
    }
  }
  return {};
}

}  // namespace shoal::net
