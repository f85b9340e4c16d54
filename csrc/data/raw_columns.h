// Features of many samples that come column by column, as Parquet files and requests have them.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "data/block.h"
#include "data/feature.h"

namespace shoal {

enum class RawKind : int { text32 = 0, text64 = 1, integer = 2, number = 3, ready = 4, text = 5 };

// A text where it lies.
struct Text {
  const char* data;
  int64_t size;
};

// The values of one column, one after the other. Texts lie at text[offsets[i], offsets[i + 1]), with offsets of 32 or
// 64 bits, or each at a `Text`; `ready` values are ids already.
struct RawColumn {
  RawKind kind;
  const void* values;  // offsets of texts, Text, int64 or double
  int64_t count;
  const char* text = nullptr;
  int64_t text_bytes = 0;
  const int64_t* lengths = nullptr;  // values of each sample; null: one
  const uint8_t* valid = nullptr;    // 0: the value is missing; null: none is
};

// Ids and lengths of n samples; a column per feature, none for crosses. A bad sample is told of, and has ids all the
// same (0, or none), so that labels and numbers stay in step. Throws std::invalid_argument where columns and samples do
// not fit.
Block apply_columns(const FeatureSet& set, int64_t n, const std::vector<std::optional<RawColumn>>& columns);

}  // namespace shoal
