// JSON objects, one per message or line, into blocks of samples.
#pragma once
#include <string_view>
#include <vector>

#include "data/block.h"
#include "data/tf_example.h"

namespace shoal {

// Samples in order. A listed feature has any number of ids, any other exactly one. The value of a feature is a text, a
// number, true or false, or a list of them; null is a missing value. Numbers may also be texts. The value of a name
// that the layout does not have is skipped. An object that cannot be read is bad and gives no sample. `threads` spreads
// the work over the pool.
Block parse_json_objects(const ExampleLayout& layout, const std::vector<std::string_view>& messages, bool threads);

}  // namespace shoal
