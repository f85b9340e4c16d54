// The cells of an admission filter's block as records of HashFilterSplitDataDump { 1 offset; 2 repeated uint32 data }.
#pragma once
#include <cstdint>
#include <string>

#include "io/digest.h"

namespace shoal {

// Writes a file of one block: the serialized meta message, then the cells, 10000 per record.
FileDigest write_filter_block(const std::string& temporary, const std::string& path, const std::string& meta,
                              const uint16_t* cells, int64_t n);

// The first record: the meta message.
std::string read_filter_meta(const std::string& path);
// The other records: reads the block's n cells; those that no record has become 0. Throws DataError for a cell that is
// not in the block.
FileDigest read_filter_cells(const std::string& path, uint16_t* cells, int64_t n);

}  // namespace shoal
