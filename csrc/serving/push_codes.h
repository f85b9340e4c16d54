// The newest push of each id.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace shoal {

// Ids, each with a code: twice the number of a mark, plus 1 for a deletion. Takes 15 to 24 bytes per id. The caller
// serialises calls.
class PushCodes {
 public:
  // Sets the code of each id to codes[i * step]. With `ranks`, an id keeps its code if that one's mark ranks higher.
  void set(const int64_t* ids, int64_t n, const int32_t* codes, int64_t step, const int32_t* ranks);
  void find(const int64_t* ids, int64_t n, int32_t* codes) const;  // -1 for an unknown id
  void copy(int64_t* ids, int32_t* codes) const;                   // of size() ids, in no particular order
  void mark_used(uint8_t* used) const;                             // used[mark] = 1 for each mark of a code
  void renumber(const int32_t* numbers);                           // mark i becomes numbers[i]
  int64_t size() const { return size_; }

 private:
  struct [[gnu::packed]] Slot {
    int64_t id;
    int32_t code;  // -1: free
  };
  size_t home(int64_t id) const;
  size_t place(int64_t id) const;  // where the id is, or would be
  void grow();

  std::vector<Slot> slots_;  // open addressing, in the order of hashes
  int64_t size_ = 0;
};

}  // namespace shoal
