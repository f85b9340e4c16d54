// One pool of threads for all native work. The caller works too; several threads may call at once.
#pragma once
#include <cstdint>

#include "core/function_ref.h"

namespace shoal {

// Threads that one native call may use, including the caller's. Default: the CPUs that this process may run on.
int num_threads();
void set_num_threads(int n);  // throws std::invalid_argument unless 1 <= n <= 1024

// Calls body(part) for every part in [0, parts), in any order, on any thread. Returns when all are done; rethrows the
// first exception of a body after the parts already begun have ended.
void parallel_parts(int64_t parts, FunctionRef<void(int64_t)> body);

// Calls body(begin, end) for disjoint pieces of [0, n), each at least grain / 2 long. Runs inline if n <= grain.
void parallel_for(int64_t n, int64_t grain, FunctionRef<void(int64_t, int64_t)> body);

}  // namespace shoal
