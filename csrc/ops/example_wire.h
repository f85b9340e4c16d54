// Reading fids out of serialized Example, ExampleBatch and Instance messages.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace shoal::ops {

enum class WireKind : int { example = 0, instance = 1, example_batch = 2 };

// Ids of the wanted features, v1 ids already converted to v2. In an example batch a feature may be shared.
struct WireBatch {
  int64_t batch = 0;
  struct Column {
    std::vector<int64_t> ids, splits;
    bool shared = false;
  };
  std::vector<Column> columns;  // per wanted feature
};

// Throws std::invalid_argument for a message that is cut off, or whose lists of a feature do not match its batch size.
WireBatch read_wire(WireKind kind, const std::vector<std::string_view>& messages,
                    const std::vector<std::string>& features);

}  // namespace shoal::ops
