#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>

#include "net/lanes.h"
#include "serving/messages.h"

namespace shoal::net {
namespace {

constexpr int64_t kMaxBytes = (int64_t{1} << 31) - 1;

const uint8_t* bytes_of(std::string_view text) { return reinterpret_cast<const uint8_t*>(text.data()); }

// The named tensors of a request.
struct Named {
  std::string_view alias;
  Part part;
};

std::vector<Named> tensors_of(std::string_view message) {
  const PredictParts parts = predict_parts(bytes_of(message), static_cast<int64_t>(message.size()));
  std::vector<Named> named;
  named.reserve(parts.tensors.size());
  for (const MapEntry& entry : parts.tensors)
    named.push_back({message.substr(static_cast<size_t>(entry.key.begin), static_cast<size_t>(entry.key.size)),
                     {bytes_of(message), entry.value}});
  return named;
}

}  // namespace

Batch::Batch(Lanes* lanes, int64_t lane, std::vector<CallPtr> calls, std::shared_ptr<const Binding> binding,
             LaneModel* holder)
    : lanes_(lanes),
      lane_(lane),
      begin_ns_(now_ns()),
      taken_(calls.size()),
      binding_(std::move(binding)),
      holder_(holder),
      calls_(std::move(calls)) {
  done_.assign(calls_.size(), 0);
}

Batch::~Batch() {
  bounce(0, calls_.size());
  lanes_->finished(*this, now_ns() - begin_ns_);
}

RawBatch Batch::read(const RequestReader& reader) {
  std::vector<std::string_view> messages;
  messages.reserve(calls_.size());
  for (const CallPtr& call : calls_) messages.push_back(call->message);
  RawBatch batch = reader.read(messages);
  std::vector<CallPtr> good, bad;
  rows_.clear();
  for (size_t i = 0; i < calls_.size(); ++i) {
    if (batch.rows[i] >= 0) rows_.push_back(batch.rows[i]);
    (batch.rows[i] < 0 ? bad : good).push_back(std::move(calls_[i]));
  }
  calls_ = std::move(good);
  done_.assign(calls_.size(), 0);
  lanes_->owner()->bounce(bad);
  return batch;
}

bool Batch::plan() {
  inputs_.clear();
  parts_.clear();
  joined_.clear();
  for (const CallPtr& call : calls_) {
    const std::vector<Named> named = tensors_of(call->message);
    if (inputs_.empty()) {
      for (const Named& each : named) {
        for (const Input& known : inputs_)
          if (known.alias == each.alias) return false;
        inputs_.push_back({std::string(each.alias), tensor_parts(each.part.data, each.part.span).dtype, {}});
      }
      parts_.resize(inputs_.size());
    }
    if (named.size() != inputs_.size()) return false;
    for (size_t i = 0; i < inputs_.size(); ++i) {
      auto own = named[i].alias == inputs_[i].alias ? named.begin() + static_cast<std::ptrdiff_t>(i)
                                                    : std::find_if(named.begin(), named.end(), [&](const Named& each) {
                                                        return each.alias == inputs_[i].alias;
                                                      });
      if (own == named.end()) return false;
      parts_[i].push_back(own->part);
    }
  }
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const ValueKind* kind = value_kind(inputs_[i].dtype);
    Joined joined;
    if (!kind || !plan_join(parts_[i], *kind, &joined) || (i && joined.rows != joined_[0].rows)) return false;
    int64_t total = 0, extent = kind->width;
    for (int64_t count : joined.rows) total += count;
    for (int64_t length : joined.tail)  // an empty tensor may still be too large for strides
      if (__builtin_mul_overflow(extent, std::max<int64_t>(1, length), &extent) || extent > kMaxBytes) return false;
    inputs_[i].shape = {total};
    inputs_[i].shape.insert(inputs_[i].shape.end(), joined.tail.begin(), joined.tail.end());
    joined_.push_back(std::move(joined));
  }
  if (joined_.empty()) return false;
  rows_ = joined_[0].rows;
  return true;
}

void Batch::join_into(const std::vector<uint8_t*>& out) const {
  if (out.size() != inputs_.size())
    throw std::invalid_argument("there must be one address per input, " + std::to_string(inputs_.size()) + ", got " +
                                std::to_string(out.size()));
  for (size_t i = 0; i < out.size(); ++i) join(parts_[i], *value_kind(inputs_[i].dtype), joined_[i], out[i]);
}

void Batch::predict() {
  try {
    fits_ = try_predict();
  } catch (const std::exception&) {  // Python reports the error for each request
    fits_ = false;
  }
}

bool Batch::try_predict() {
  const Predictor& predictor = *binding_->predictor;
  const Predictor::Use use(predictor);
  if (!use) return false;
  thread_local Predictor::Results results;
  if (const RequestReader* reader = predictor.parts().reader) {
    const RawBatch made = read(*reader);
    if (!made.total) return calls_.empty();  // all were given back, or have no rows
    predictor.run(use, made, &results);
  } else {
    thread_local std::vector<std::vector<uint8_t>> values;
    std::vector<std::vector<int64_t>> shapes;
    if (!plan() || !join_for(predictor, &values, &shapes)) return false;
    std::vector<const uint8_t*> tensors;
    for (const auto& each : values) tensors.push_back(each.data());
    predictor.run(use, tensors, shapes, inputs_[0].shape[0], &results);
  }
  answer(0, calls_.size(), binding_->spec, predictor.outputs_of(results, binding_->outputs));
  return true;
}

bool Batch::join_for(const Predictor& predictor, std::vector<std::vector<uint8_t>>* values,
                     std::vector<std::vector<int64_t>>* shapes) {
  const std::vector<NamedInput>& wanted = predictor.parts().inputs;
  if (wanted.size() != inputs_.size()) return false;
  values->resize(wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    size_t at = 0;
    while (at < inputs_.size() && inputs_[at].alias != wanted[i].alias) ++at;
    if (at == inputs_.size()) return false;
    const Input& given = inputs_[at];
    if (given.dtype != wanted[i].dtype || given.shape.size() != wanted[i].shape.size() + 1) return false;
    for (size_t k = 0; k < wanted[i].shape.size(); ++k)
      if (wanted[i].shape[k] >= 0 && wanted[i].shape[k] != given.shape[k + 1]) return false;
    (*values)[i].resize(static_cast<size_t>(joined_[at].bytes));
    join(parts_[at], *value_kind(given.dtype), joined_[at], (*values)[i].data());
    shapes->push_back(given.shape);
  }
  return true;
}

std::vector<std::array<int64_t, 4>> Batch::parts(int64_t max_rows) const {
  std::vector<std::array<int64_t, 4>> cuts;
  for (size_t i = 0; i < rows_.size(); ++i) {
    if (!cuts.empty() && cuts.back()[3] + rows_[i] <= max_rows) {
      ++cuts.back()[1];
      cuts.back()[3] += rows_[i];
    } else {
      const int64_t begin = cuts.empty() ? 0 : cuts.back()[2] + cuts.back()[3];
      cuts.push_back({static_cast<int64_t>(i), 1, begin, rows_[i]});
    }
  }
  return cuts;
}

void Batch::answer(size_t first, size_t count, std::string_view spec, const std::vector<Output>& outputs) {
  if (first + count > rows_.size() || rows_.size() != calls_.size())
    throw std::invalid_argument("the requests to answer must be within the " + std::to_string(rows_.size()) +
                                " that were read, got " + std::to_string(count) + " from request " +
                                std::to_string(first));
  std::vector<std::pair<Loop*, Reply>> replies;
  std::vector<Note> notes;
  replies.reserve(count);
  int64_t begin = 0;
  const int64_t now = now_ns();
  for (size_t i = first; i < first + count; ++i) {
    const int64_t rows = rows_[i];
    Reply reply;
    reply.connection = calls_[i]->connection;
    reply.stream = calls_[i]->stream;
    reply.data = framed(static_cast<size_t>(response_size(spec, outputs, begin, rows)));
    write_response(spec, outputs, begin, rows, reinterpret_cast<uint8_t*>(reply.data.data()) + kPrefix);
    begin += rows;
    seconds_.push_back(static_cast<double>(now - calls_[i]->arrived_ns) * 1e-9);
    if (calls_[i]->noted) notes.emplace_back(*calls_[i], lane_, rows, now);
    replies.emplace_back(calls_[i]->loop, std::move(reply));
  }
  for (size_t i = first; i < first + count; ++i) done_[i] = 1;
  lanes_->owner()->send(std::move(replies));
  if (!notes.empty()) lanes_->owner()->note(std::move(notes));
}

void Batch::bounce(size_t first, size_t count) {
  std::vector<CallPtr> left;
  for (size_t i = first; i < std::min(first + count, calls_.size()); ++i) {
    if (!done_[i]) left.push_back(calls_[i]);
    done_[i] = 1;
  }
  if (!left.empty()) lanes_->owner()->bounce(left);
}

}  // namespace shoal::net
