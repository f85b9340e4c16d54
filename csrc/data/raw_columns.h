// Features of many samples, given column by column as in Parquet files and requests.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "data/block.h"
#include "data/feature.h"

namespace shoal {

enum class RawKind : int { text32 = 0, text64 = 1, integer = 2, number = 3, ready = 4, text = 5 };

// A view of a text.
struct Text {
  const char* data;
  int64_t size;
};

// The values of one column, one after another. Texts are text[offsets[i], offsets[i + 1]), with offsets of 32 or 64
// bits, or are given as `Text`; `ready` values are ids.
struct RawColumn {
  RawKind kind;
  const void* values;  // offsets of texts, Text, int64 or double
  int64_t count;
  const char* text = nullptr;
  int64_t text_bytes = 0;
  const int64_t* lengths = nullptr;  // values of each sample; null: one each
  const uint8_t* valid = nullptr;    // 0: the value is missing; null: no value is missing
};

// Ids and lengths of n samples; a column per feature, none for crosses. A bad sample is reported but still gets
// ids (0, or none), so that labels and numbers stay aligned. Throws std::invalid_argument for columns that do not match
// the samples.
Block apply_columns(const FeatureSet& set, int64_t n, const std::vector<std::optional<RawColumn>>& columns);

}  // namespace shoal
