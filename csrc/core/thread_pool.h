// One pool of threads for all native work. The caller works too; several callers may be inside at once.
#pragma once
#include <cstdint>

#include "core/function_ref.h"

namespace shoal {

// Threads that one native call may use, counting the caller. At first the CPUs this process may run on.
int num_threads();
void set_num_threads(int n);  // throws std::invalid_argument unless 1 <= n <= 1024

// body(part) for every part in [0, parts), in any order, on any thread. Returns when all are done; the first
// exception that a body throws is thrown here, after the parts already begun have ended.
void parallel_parts(int64_t parts, FunctionRef<void(int64_t)> body);

// body(begin, end) over disjoint pieces of [0, n), none shorter than `grain` but the last. Runs inline when n <= grain.
void parallel_for(int64_t n, int64_t grain, FunctionRef<void(int64_t, int64_t)> body);

}  // namespace shoal
