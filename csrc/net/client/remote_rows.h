// Rows from embedding shards on other servers, which are all asked at once, each for the distinct ids of its remainder.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "net/client/caller.h"

namespace shoal::net {

class RemoteRows {
 public:
  struct Slot {
    std::string name;
    int64_t dim;
  };
  struct Shard {
    std::string address;
    std::string spec;  // the serialised model spec
  };
  explicit RemoteRows(std::vector<Slot> slots);

  struct Wanted {  // the rows of a slot
    const int64_t* ids;
    int64_t n;
    float* out;  // [n, dim]
  };
  struct Outcome {
    int status = kOk;
    std::string why;
  };
  // Fills in the rows, or returns why a shard failed or its answer was malformed.
  Outcome lookup(Caller& caller, const std::string& method, const std::vector<Shard>& shards, const Metadata& metadata,
                 double timeout_s, const std::vector<Wanted>& wanted) const;

 private:
  std::vector<Slot> slots_;
  std::string filters_;  // the slots, as output filters of a request
};

}  // namespace shoal::net
