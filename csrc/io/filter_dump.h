// The cells of an admission filter's block as records of HashFilterSplitDataDump { 1 offset; 2 repeated uint32 data }.
#pragma once
#include <cstdint>
#include <string>

#include "io/digest.h"

namespace shoal {

// A file of one block: the serialized meta message, then the cells, 10000 to a record.
FileDigest write_filter_block(const std::string& temporary, const std::string& path, const std::string& meta,
                              const uint16_t* cells, int64_t n);

// The first record: the meta message.
std::string read_filter_meta(const std::string& path);
// Everything behind it into `cells`, those that no record holds being 0. Throws DataError when a record says more than
// a block of `n` cells can hold.
FileDigest read_filter_cells(const std::string& path, uint16_t* cells, int64_t n);

}  // namespace shoal
