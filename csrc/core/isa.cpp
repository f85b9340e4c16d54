#include "core/isa.h"

#include <cstdlib>
#include <cstring>

namespace shoal {

static Isa detect() {
#if defined(__x86_64__)
  Isa best = Isa::base;
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) {
    best = Isa::avx2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd")) {
      best = Isa::avx512;
    }
  }
  const char* wish = std::getenv("SHOAL_ISA");
  if (wish && !std::strcmp(wish, "base")) best = Isa::base;
  if (wish && !std::strcmp(wish, "avx2") && best == Isa::avx512) best = Isa::avx2;
  return best;
#else
  return Isa::base;
#endif
}

static const Isa kIsa = detect();

Isa isa() { return kIsa; }

}  // namespace shoal
