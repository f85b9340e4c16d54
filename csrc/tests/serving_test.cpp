#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "check.h"
#include "serving/batch.h"
#include "serving/messages.h"
#include "serving/push_codes.h"
#include "serving/varint.h"

using namespace shoal;

namespace {

using Bytes = std::vector<uint8_t>;

void put_varint(Bytes* out, uint64_t value) {
  while (value >= 0x80) {
    out->push_back(static_cast<uint8_t>(value) | 0x80);
    value >>= 7;
  }
  out->push_back(static_cast<uint8_t>(value));
}
void put_field(Bytes* out, int number, const Bytes& payload) {
  put_varint(out, static_cast<uint64_t>(number) << 3 | 2);
  put_varint(out, payload.size());
  out->insert(out->end(), payload.begin(), payload.end());
}
Bytes text(const std::string& value) { return {value.begin(), value.end()}; }

Bytes tensor(int dtype, const std::vector<int64_t>& shape, int field, const Bytes& values) {
  Bytes out, dims;
  put_varint(&out, 8);
  put_varint(&out, static_cast<uint64_t>(dtype));
  for (int64_t length : shape) {
    Bytes dim;
    if (length) {
      put_varint(&dim, 8);
      put_varint(&dim, static_cast<uint64_t>(length));
    }
    put_field(&dims, 2, dim);
  }
  put_field(&out, 2, dims);
  if (!values.empty()) put_field(&out, field, values);
  return out;
}
template <class T>
Bytes raw(const std::vector<T>& values) {
  Bytes out(values.size() * sizeof(T));
  if (!out.empty()) std::memcpy(out.data(), values.data(), out.size());
  return out;
}
Bytes packed(const std::vector<int64_t>& values) {
  Bytes out;
  for (int64_t value : values) put_varint(&out, static_cast<uint64_t>(value));
  return out;
}
Bytes request() {
  Bytes spec, entry, out;
  put_field(&spec, 1, text("m"));
  put_field(&out, 1, spec);
  put_field(&entry, 1, text("user"));
  put_field(&entry, 2, tensor(9, {2, 2}, 10, packed({1, -2, 3, 1LL << 40})));
  put_field(&out, 2, entry);
  put_field(&out, 3, text("score"));
  return out;
}
// Memory of exactly this size, so that a sanitizer detects a read past its end.
struct Exact {
  explicit Exact(const Bytes& bytes) : size(static_cast<int64_t>(bytes.size())), data(new uint8_t[bytes.size()]) {
    if (size) std::memcpy(data, bytes.data(), bytes.size());
  }
  ~Exact() { delete[] data; }
  Exact(const Exact&) = delete;
  int64_t size;
  uint8_t* data;
};

// Whether reading succeeds; it may only throw the exception that the binding expects.
template <class F>
bool reads(F read) {
  try {
    read();
    return true;
  } catch (const std::invalid_argument&) {
    return false;
  }
}

Bytes broken(Bytes bytes, std::mt19937* rng) {
  const int edits = 1 + static_cast<int>((*rng)() % 4);
  for (int i = 0; i < edits && !bytes.empty(); ++i) {
    const size_t at = (*rng)() % bytes.size();
    switch ((*rng)() % 4) {
      case 0:
        bytes.resize(at);
        break;
      case 1:
        bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at), static_cast<uint8_t>((*rng)()));
        break;
      case 2:
        bytes[at] = 0xff;
        break;
      default:
        bytes[at] = static_cast<uint8_t>((*rng)());
    }
  }
  return bytes;
}

void inside(Span span, int64_t size) { CHECK(span.begin >= 0 && span.size >= 0 && span.begin + span.size <= size); }

}  // namespace

TEST(an_id_keeps_the_code_of_the_highest_rank_and_else_the_last_one) {
  std::mt19937_64 random(5);
  PushCodes codes;
  std::unordered_map<int64_t, int32_t> model;
  const std::vector<int32_t> ranks = {2, 0, 1, 1};
  int32_t unknown = 0;
  const int64_t seven = 7;
  codes.find(&seven, 1, &unknown);
  CHECK(unknown == -1);
  for (int round = 0; round < 200; ++round) {
    std::vector<int64_t> ids(random() % 300);
    std::vector<int32_t> given(ids.size() + 1);
    for (auto& id : ids) id = static_cast<int64_t>(random() % 5000) - 2500;
    for (auto& code : given) code = static_cast<int32_t>(random() % 8);
    const int64_t step = round % 2;
    const bool ranked = round % 3 != 0;
    codes.set(ids.data(), static_cast<int64_t>(ids.size()), given.data(), step, ranked ? ranks.data() : nullptr);
    for (size_t i = 0; i < ids.size(); ++i) {
      const int32_t code = given[step ? i : 0];
      const auto known = model.find(ids[i]);
      if (known == model.end() || !ranked || ranks[known->second >> 1] <= ranks[code >> 1]) model[ids[i]] = code;
    }
  }
  CHECK(codes.size() == static_cast<int64_t>(model.size()));
  std::vector<int64_t> ids(model.size());
  std::vector<int32_t> all(model.size()), found(model.size());
  codes.copy(ids.data(), all.data());
  codes.find(ids.data(), codes.size(), found.data());
  for (size_t i = 0; i < ids.size(); ++i) CHECK(model.at(ids[i]) == all[i] && all[i] == found[i]);
  std::vector<uint8_t> used(4);
  codes.mark_used(used.data());
  CHECK((used == std::vector<uint8_t>{1, 1, 1, 1}));
  const std::vector<int32_t> numbers = {3, 2, 1, 0};
  codes.renumber(numbers.data());
  codes.find(ids.data(), codes.size(), found.data());
  for (size_t i = 0; i < ids.size(); ++i) CHECK(found[i] == 2 * (3 - (all[i] >> 1)) + (all[i] & 1));
}

TEST(varints_round_trip) {
  const std::vector<int64_t> values = {0,
                                       1,
                                       127,
                                       128,
                                       300,
                                       -1,
                                       (1LL << 35) - 1,
                                       std::numeric_limits<int64_t>::min(),
                                       std::numeric_limits<int64_t>::max()};
  const auto n = static_cast<int64_t>(values.size());
  Bytes out(static_cast<size_t>(varint_size(values.data(), n)));
  CHECK(varint_encode(values.data(), n, out.data()) == static_cast<int64_t>(out.size()));
  CHECK(out == packed(values));
  CHECK(varint_count(out.data(), static_cast<int64_t>(out.size())) == n);
  std::vector<int64_t> back(values.size());
  varint_decode(out.data(), static_cast<int64_t>(out.size()), back.data(), n);
  CHECK(back == values);
  CHECK(varint_count(nullptr, 0) == 0);
  CHECK(varint_count(out.data(), static_cast<int64_t>(out.size()) - 1) == -1);
  Bytes endless(11, 0xff);
  endless.push_back(1);
  CHECK(varint_count(endless.data(), 12) == 1);
  CHECK_THROWS(varint_decode(endless.data(), 12, back.data(), 1));
}

TEST(the_parts_of_a_request_are_found) {
  const Exact message(request());
  const PredictParts parts = predict_parts(message.data, message.size);
  CHECK(parts.specs.size() == 1 && parts.tensors.size() == 1 && parts.filters.size() == 1);
  CHECK(parts.tensors[0].key.size == 4 && !std::memcmp(message.data + parts.tensors[0].key.begin, "user", 4));
  const TensorParts found = tensor_parts(message.data, parts.tensors[0].value);
  CHECK(found.dtype == 9 && found.shape == (std::vector<int64_t>{2, 2}) && !found.unpacked && !found.unknown_rank);
  CHECK(found.lists.size() == 1 && found.list_fields[0] == 10);
}

TEST(a_message_that_is_cut_anywhere_is_refused_or_read_within_its_bounds) {
  const Bytes whole = request();
  for (size_t length = 0; length < whole.size(); ++length) {
    const Exact part(Bytes(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(length)));
    reads([&] { predict_parts(part.data, part.size); });
  }
  Bytes huge;  // a field that claims 2^64 - 1 bytes
  put_varint(&huge, 2 << 3 | 2);
  put_varint(&huge, ~uint64_t{0});
  CHECK(!reads([&] { predict_parts(huge.data(), static_cast<int64_t>(huge.size())); }));
  Bytes dims, over;  // more dimensions than a tensor has
  for (int i = 0; i < 65; ++i) put_field(&dims, 2, {});
  put_field(&over, 2, dims);
  CHECK(!reads([&] { tensor_parts(over.data(), {0, static_cast<int64_t>(over.size())}); }));
}

TEST(values_are_gathered_from_lists_and_single_elements) {
  Bytes tensor;
  put_varint(&tensor, 10 << 3);  // int64_val alone
  put_varint(&tensor, 7);
  put_field(&tensor, 10, packed({-1, 300}));
  for (int i = 0; i < 40; ++i) put_field(&tensor, 10, packed({i}));
  put_field(&tensor, 8, {'a'});
  put_field(&tensor, 8, {});
  const Exact message(tensor);
  const Span all{0, message.size};
  const TensorParts parts = tensor_parts(message.data, all);
  CHECK(parts.unpacked && parts.lists.size() <= 16);
  const Bytes bytes = tensor_values(message.data, all, 10, 0, 43);
  std::vector<int64_t> values(bytes.size() / 8);
  std::memcpy(values.data(), bytes.data(), bytes.size());
  CHECK(values.size() == 43 && values[0] == 7 && values[1] == -1 && values[2] == 300 && values[42] == 39);
  CHECK_THROWS(tensor_values(message.data, all, 10, 0, 42));
  CHECK_THROWS(tensor_values(message.data, all, 10, 4, 100));  // an integer where floats are wanted
  CHECK(tensor_values(message.data, all, 5, 4, 0).empty());
  CHECK(tensor_strings(message.data, all, 8, 2).size() == 2);
  CHECK_THROWS(tensor_strings(message.data, all, 8, 1));
  Bytes many;  // of empty inputs
  for (int i = 0; i < (1 << 17) + 1; ++i) put_field(&many, 2, {});
  CHECK_THROWS(predict_parts(many.data(), static_cast<int64_t>(many.size())));
}

TEST(fuzzed_messages_stay_within_their_bounds) {
  std::mt19937 rng(11);
  const Bytes good = request();
  int read = 0;
  for (int round = 0; round < 40000; ++round) {
    Bytes bytes = broken(good, &rng);
    if (round % 8 == 0) {
      bytes.resize(rng() % 64);
      for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(rng());
    }
    const Exact message(bytes);
    read += reads([&] {
      const PredictParts parts = predict_parts(message.data, message.size);
      for (Span span : parts.specs) inside(span, message.size);
      for (Span span : parts.filters) inside(span, message.size);
      for (const MapEntry& entry : parts.tensors) {
        inside(entry.key, message.size);
        inside(entry.value, message.size);
        const TensorParts tensor = tensor_parts(message.data, entry.value);
        inside(tensor.content, message.size);
        for (Span span : tensor.lists) inside(span, message.size);
        CHECK(tensor.lists.size() == tensor.list_fields.size() && tensor.shape.size() <= 64);
        for (Span span : tensor_strings(message.data, entry.value, 8, 1000)) inside(span, message.size);
        CHECK(tensor_values(message.data, entry.value, 10, 0, 1000).size() % 8 == 0);
        CHECK(tensor_values(message.data, entry.value, 5, 4, 1000).size() % 4 == 0);
      }
    });
  }
  CHECK(read > 1000 && read < 39000);
}

TEST(tensors_of_every_joined_dtype_are_joined) {
  struct Case {
    int dtype;
    Bytes one, two, want;
  };
  const std::vector<int64_t> ids = {5, -6, 7, 1LL << 50, 0, -1};
  const std::vector<int32_t> small = {5, -6, 7, 1 << 30, 0, -1};
  const std::vector<Case> cases = {
      {1, tensor(1, {1, 2}, 5, raw<float>({1, 2})), tensor(1, {2, 2}, 4, raw<float>({3, 4, 5, 6})),
       raw<float>({1, 2, 3, 4, 5, 6})},
      {2, tensor(2, {1, 2}, 6, raw<double>({1, 2})), tensor(2, {2, 2}, 6, raw<double>({3, 4, 5, 6})),
       raw<double>({1, 2, 3, 4, 5, 6})},
      {9, tensor(9, {1, 2}, 10, packed({5, -6})), tensor(9, {2, 2}, 4, raw<int64_t>({7, 1LL << 50, 0, -1})), raw(ids)},
      {3, tensor(3, {1, 2}, 7, packed({5, -6})), tensor(3, {2, 2}, 7, packed({7, 1 << 30, 0, -1})), raw(small)},
      {10, tensor(10, {1, 2}, 11, {1, 0}), tensor(10, {2, 2}, 4, {1, 2, 0, 0}), {1, 0, 1, 1, 0, 0}},
  };
  for (const Case& each : cases) {
    const Exact one(each.one), two(each.two);
    const std::vector<Part> parts = {{one.data, {0, one.size}}, {two.data, {0, two.size}}};
    Joined joined;
    const ValueKind* kind = value_kind(each.dtype);
    CHECK(kind && plan_join(parts, *kind, &joined));
    CHECK(joined.rows == (std::vector<int64_t>{1, 2}) && joined.tail == std::vector<int64_t>{2});
    CHECK(joined.bytes == static_cast<int64_t>(each.want.size()));
    Bytes out(each.want.size());
    join(parts, *kind, joined, out.data());
    CHECK(out == each.want);
  }
  CHECK(!value_kind(7) && !value_kind(19) && !value_kind(-1));
}

TEST(tensors_that_are_not_plain_or_not_alike_are_not_joined) {
  const Bytes plain = tensor(1, {1, 2}, 5, raw<float>({1, 2}));
  const auto joins = [&](const Bytes& other) {
    const Exact one(plain), two(other);
    Joined joined;
    return plan_join({{one.data, {0, one.size}}, {two.data, {0, two.size}}}, *value_kind(1), &joined);
  };
  CHECK(joins(plain));
  CHECK(!joins(tensor(2, {1, 2}, 6, raw<double>({1, 2}))));
  CHECK(!joins(tensor(1, {1, 3}, 5, raw<float>({1, 2, 3}))));
  CHECK(!joins(tensor(1, {2}, 5, raw<float>({1, 2}))));
  CHECK(!joins(tensor(1, {}, 5, raw<float>({1}))));
  CHECK(!joins(tensor(1, {2, 2}, 5, raw<float>({1, 2}))));          // a value for several
  CHECK(!joins(tensor(1, {1, 2}, 5, {0, 0, 0, 0, 0, 0, 0})));       // half a float
  CHECK(!joins(tensor(1, {1, 2}, 10, packed({1, 2}))));             // a list of another dtype
  CHECK(!joins(tensor(1, {1LL << 62, 4}, 5, raw<float>({1, 2}))));  // more than there can be
  CHECK(!joins(tensor(1, {-1, -2}, 5, raw<float>({1, 2}))));
  Bytes twice = plain;
  put_field(&twice, 5, raw<float>({1, 2}));
  CHECK(!joins(twice));
  Joined none;
  CHECK(!plan_join({}, *value_kind(1), &none));
}

TEST(fuzzed_tensors_join_within_their_bounds) {
  std::mt19937 rng(12);
  const std::vector<std::pair<int, Bytes>> good = {
      {9, tensor(9, {3, 2}, 10, packed({1, -2, 300, 1LL << 60, 0, 9}))},
      {9, tensor(9, {1, 2}, 4, raw<int64_t>({1, -2}))},
      {1, tensor(1, {2, 2}, 5, raw<float>({1, 2, 3, 4}))},
      {3, tensor(3, {4}, 7, packed({1, 2, 3, -4}))},
      {10, tensor(10, {2, 1}, 11, {1, 0})},
  };
  int joined_count = 0;
  for (int round = 0; round < 40000; ++round) {
    const auto& [dtype, whole] = good[rng() % good.size()];
    const Exact one(broken(whole, &rng)), two(whole);
    const std::vector<Part> parts = {{one.data, {0, one.size}}, {two.data, {0, two.size}}};
    reads([&] {
      Joined joined;
      const ValueKind* kind = value_kind(dtype);
      if (!plan_join(parts, *kind, &joined)) return;
      CHECK(joined.bytes <= 8 * (one.size + two.size));  // memory follows what was sent, not what a shape claims
      const Exact room{Bytes(static_cast<size_t>(joined.bytes))};
      join(parts, *kind, joined, room.data);
      ++joined_count;
    });
  }
  CHECK(joined_count > 1000);
}

TEST(responses_are_written_to_their_size_and_can_be_read) {
  const std::vector<float> scores = {1, 2, 3, 4, 5, 6};
  const std::vector<int64_t> counts = {-1, 300, 7};
  const std::vector<Output> outputs = {
      {"score", value_kind(1), {2}, reinterpret_cast<const uint8_t*>(scores.data())},
      {"count", value_kind(9), {}, reinterpret_cast<const uint8_t*>(counts.data())},
  };
  for (const auto& [begin, rows] : {std::pair<int64_t, int64_t>{0, 3}, {1, 2}, {2, 0}, {2, 1}}) {
    const int64_t size = response_size("spec", outputs, begin, rows);
    const Exact room{Bytes(static_cast<size_t>(size))};
    write_response("spec", outputs, begin, rows, room.data);
    Bytes want, entry;
    const std::vector<float> own(scores.begin() + 2 * begin, scores.begin() + 2 * (begin + rows));
    put_field(&entry, 1, text("score"));
    put_field(&entry, 2, tensor(1, {rows, 2}, 5, raw(own)));
    put_field(&want, 1, entry);
    entry.clear();
    put_field(&entry, 1, text("count"));
    put_field(&entry, 2, tensor(9, {rows}, 10, packed({counts.begin() + begin, counts.begin() + begin + rows})));
    put_field(&want, 1, entry);
    put_field(&want, 2, text("spec"));
    CHECK(Bytes(room.data, room.data + size) == want);
  }
}
