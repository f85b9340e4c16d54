#include "serving/predictor.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>

namespace shoal {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("predictor: " + what); }

int64_t rows_of(const ServedFeature& feature) {
  return feature.apart || feature.rule.pool == Pool::firstn ? feature.rule.length : 1;
}

// The offsets of bags with `each` ids each.
void even_offsets(int64_t bags, int64_t each, std::vector<int64_t>* offsets) {
  offsets->resize(static_cast<size_t>(bags + 1));
  for (int64_t b = 0; b <= bags; ++b) (*offsets)[static_cast<size_t>(b)] = b * each;
}

}  // namespace

Predictor::Predictor(Parts parts, std::shared_ptr<const RowNet> net) : parts_(std::move(parts)) {
  const std::vector<int64_t>& floats = net->plan().floats();
  const auto inputs = static_cast<size_t>(net->plan().inputs());
  if (static_cast<size_t>(net->plan().outputs()) != parts_.outputs.size())
    refuse("there must be one name per output of the net, " + std::to_string(net->plan().outputs()) + ", got " +
           std::to_string(parts_.outputs.size()));
  for (size_t i = 0; i < parts_.outputs.size(); ++i) {
    int64_t count = 1;
    for (int64_t size : parts_.outputs[i].shape) count *= size;
    if (count != floats[inputs + i])
      refuse("output " + parts_.outputs[i].alias + " must have " + std::to_string(floats[inputs + i]) +
             " values per row, as in the net, got " + std::to_string(count));
  }
  for (const RowSource& source : parts_.sources) {
    if (source.tables.empty()) refuse("a source must have at least one table, got none");
    for (const Table* table : source.tables)
      if (table->layout().dim != source.dim())
        refuse("the tables of a source must have the same dim, got " + std::to_string(source.dim()) + " and " +
               std::to_string(table->layout().dim));
  }
  std::vector<int64_t> filled(inputs, 0);
  for (const ServedFeature& feature : parts_.features) {
    if (feature.source >= parts_.sources.size() || feature.input >= inputs || feature.rule.length < 1)
      refuse("a feature must have a source below " + std::to_string(parts_.sources.size()) + ", an input below " +
             std::to_string(inputs) + " and a length >= 1, got " + std::to_string(feature.source) + ", " +
             std::to_string(feature.input) + " and " + std::to_string(feature.rule.length));
    const int64_t width = rows_of(feature) * parts_.sources[feature.source].dim();
    if (feature.column < 0 || feature.column + width > floats[feature.input])
      refuse("the columns of a feature must be within 0.." + std::to_string(floats[feature.input]) + ", got " +
             std::to_string(width) + " columns from " + std::to_string(feature.column));
    filled[feature.input] += width;
  }
  if (parts_.reader) {
    if (parts_.numbers >= inputs || parts_.reader->numbers() != floats[parts_.numbers])
      refuse("the input with the numbers of requests must be below " + std::to_string(inputs) + " and have " +
             std::to_string(parts_.reader->numbers()) + " values per row, got input " + std::to_string(parts_.numbers));
    filled[parts_.numbers] += floats[parts_.numbers];
    uniform_ = !parts_.features.empty();
    int64_t column = 0;
    for (const ServedFeature& each : parts_.features) {
      const ServedFeature& first = parts_.features[0];
      uniform_ &= each.source == first.source && each.rule.pool == first.rule.pool && rows_of(each) == 1 &&
                  each.input == first.input && each.column == column && !each.apart;
      column += parts_.sources[each.source].dim();
    }
  }
  for (const NamedInput& each : parts_.inputs) {
    if (each.feature >= static_cast<int64_t>(parts_.features.size()) || each.input >= inputs)
      refuse("input " + each.alias + " must have a feature below " + std::to_string(parts_.features.size()) +
             " and an input of the net below " + std::to_string(inputs) + ", got " + std::to_string(each.feature) +
             " and " + std::to_string(each.input));
    if (each.feature < 0) filled[each.input] += floats[each.input];
    checked_kind(each.dtype);
  }
  for (size_t i = 0; i < inputs; ++i)
    if (filled[i] != floats[i])
      refuse("input " + std::to_string(i) + " of the net must get " + std::to_string(floats[i]) +
             " values per row, got " + std::to_string(filled[i]));
  now_ = std::make_shared<const Moment>(Moment{std::move(net), {}});
}

std::shared_ptr<const Predictor::Moment> Predictor::enter() const {
  const std::lock_guard lock(mutex_);
  return now_;
}

namespace {

bool wait_for(const std::weak_ptr<const PredictorMoment>& moment, double timeout_s) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  while (!moment.expired()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

}  // namespace

bool Predictor::switch_to(std::shared_ptr<const RowNet> net, Fresh fresh, double timeout_s) {
  std::weak_ptr<const Moment> before;
  {
    const std::lock_guard lock(mutex_);
    if (!now_) return true;
    if (net && net->plan().floats() != now_->net->plan().floats())
      refuse("the new net must have the same inputs, outputs and buffers as the old one");
    auto next = std::make_shared<const Moment>(Moment{net ? std::move(net) : now_->net, std::move(fresh)});
    before = now_;
    now_ = std::move(next);
  }
  return wait_for(before, timeout_s);
}

bool Predictor::close(double timeout_s) {
  std::weak_ptr<const Moment> before;
  {
    const std::lock_guard lock(mutex_);
    before = now_;
    now_ = nullptr;
  }
  return wait_for(before, timeout_s);
}

void Predictor::finish(const Moment& moment, const std::vector<const float*>& inputs, int64_t rows,
                       Results* results) const {
  const std::vector<int64_t>& floats = moment.net->plan().floats();
  results->values.resize(parts_.outputs.size());
  std::vector<float*> outputs;
  for (size_t i = 0; i < results->values.size(); ++i) {
    results->values[i].resize(static_cast<size_t>(rows * floats[inputs.size() + i]));
    outputs.push_back(results->values[i].data());
  }
  moment.net->run(inputs, rows, outputs);
}

std::vector<Output> Predictor::outputs_of(const Results& results, const std::vector<size_t>& chosen) const {
  static constexpr int64_t kFloat = 1;  // TensorFlow's DataType
  std::vector<Output> outputs;
  auto add = [&](size_t i) {
    const NamedOutput& each = parts_.outputs[i];
    outputs.push_back(
        {each.alias, value_kind(kFloat), each.shape, reinterpret_cast<const uint8_t*>(results.values[i].data())});
  };
  for (size_t i : chosen) add(i);
  for (size_t i = 0; chosen.empty() && i < parts_.outputs.size(); ++i) add(i);
  return outputs;
}

// --- requests of features --------------------------------------------------------------------------------------------

void Predictor::read_samples(const Moment& moment, const RawBatch& made,
                             std::vector<std::vector<float>>* inputs) const {
  const std::vector<int64_t>& floats = moment.net->plan().floats();
  const auto count = static_cast<int64_t>(parts_.features.size());
  const int64_t rows = made.total, bags = rows * count;
  thread_local std::vector<int64_t> starts, ids, offsets;
  if (made.lengths.empty()) {
    even_offsets(bags, 1, &starts);
  } else {
    starts.resize(static_cast<size_t>(bags + 1));
    starts[0] = 0;
    for (int64_t b = 0; b < bags; ++b)
      starts[static_cast<size_t>(b + 1)] = starts[static_cast<size_t>(b)] + made.lengths[static_cast<size_t>(b)];
  }
  if (uniform_) {
    const ServedFeature& first = parts_.features[0];
    const RowSource& source = parts_.sources[first.source];
    read_bags(source, moment.fresh, first.rule, made.ids.data(), starts.data(), bags, (*inputs)[first.input].data(),
              source.dim());
    return;
  }
  for (int64_t f = 0; f < count; ++f) {
    const ServedFeature& feature = parts_.features[static_cast<size_t>(f)];
    ids.clear();
    offsets.assign(1, 0);
    for (int64_t row = 0; row < rows; ++row) {
      const auto bag = static_cast<size_t>(row * count + f);
      ids.insert(ids.end(), made.ids.begin() + starts[bag], made.ids.begin() + starts[bag + 1]);
      offsets.push_back(static_cast<int64_t>(ids.size()));
    }
    read_bags(parts_.sources[feature.source], moment.fresh, feature.rule, ids.data(), offsets.data(), rows,
              (*inputs)[feature.input].data() + feature.column, floats[feature.input]);
  }
}

void Predictor::run(const Use& use, const RawBatch& made, Results* results) const {
  const Moment* moment = use.moment_.get();
  const RowPlan& plan = moment->net->plan();
  thread_local std::vector<std::vector<float>> inputs;
  inputs.resize(std::max(inputs.size(), static_cast<size_t>(plan.inputs())));
  std::vector<const float*> given;
  for (size_t i = 0; i < static_cast<size_t>(plan.inputs()); ++i) {
    if (i != parts_.numbers) inputs[i].resize(static_cast<size_t>(made.total * plan.floats()[i]));
    given.push_back(i == parts_.numbers ? made.dense.data() : inputs[i].data());
  }
  read_samples(*moment, made, &inputs);
  finish(*moment, given, made.total, results);
}

// --- requests of joined tensors --------------------------------------------------------------------------------------

void Predictor::run(const Use& use, const std::vector<const uint8_t*>& tensors,
                    const std::vector<std::vector<int64_t>>& shapes, int64_t rows, Results* results) const {
  const Moment* moment = use.moment_.get();
  const RowPlan& plan = moment->net->plan();
  thread_local std::vector<std::vector<float>> inputs;
  thread_local std::vector<int64_t> offsets;
  inputs.resize(std::max(inputs.size(), static_cast<size_t>(plan.inputs())));
  std::vector<const float*> given(static_cast<size_t>(plan.inputs()));
  for (size_t i = 0; i < parts_.inputs.size(); ++i) {
    const NamedInput& each = parts_.inputs[i];
    if (each.feature < 0) {
      given[each.input] = reinterpret_cast<const float*>(tensors[i]);
      continue;
    }
    const ServedFeature& feature = parts_.features[static_cast<size_t>(each.feature)];
    const int64_t floats = plan.floats()[feature.input], ids = shapes[i].size() > 1 ? shapes[i][1] : 1;
    std::vector<float>& into = inputs[feature.input];
    into.resize(static_cast<size_t>(rows * floats));
    const RowSource& source = parts_.sources[feature.source];
    const int64_t bags = feature.apart ? rows * ids : rows;
    even_offsets(bags, feature.apart ? 1 : ids, &offsets);
    read_bags(source, moment->fresh, feature.rule, reinterpret_cast<const int64_t*>(tensors[i]), offsets.data(), bags,
              into.data() + feature.column, feature.apart ? source.dim() : floats);
    given[feature.input] = into.data();
  }
  finish(*moment, given, rows, results);
}

}  // namespace shoal
