// Run-time choice between the instruction sets that a *.isa.cpp file was compiled for.
//
// In such a file:      namespace shoal::SHOAL_ISA { void scale(float* x, int64_t n) { ... } }
// In its header:       SHOAL_PER_ISA(void scale(float* x, int64_t n);)
// At the call:         SHOAL_DISPATCH(scale)(x, n);
#pragma once

namespace shoal {

enum class Isa { base, avx2, avx512 };

// The best set that this CPU has; the environment variable SHOAL_ISA (base, avx2, avx512) can only lower it.
Isa isa();

}  // namespace shoal

#if defined(__x86_64__)
#define SHOAL_PER_ISA(...) \
  namespace base {         \
  __VA_ARGS__              \
  }                        \
  namespace avx2 {         \
  __VA_ARGS__              \
  }                        \
  namespace avx512 {       \
  __VA_ARGS__              \
  }
#define SHOAL_DISPATCH(fn) \
  (::shoal::isa() == ::shoal::Isa::avx512 ? avx512::fn : ::shoal::isa() == ::shoal::Isa::avx2 ? avx2::fn : base::fn)
#else
#define SHOAL_PER_ISA(...) \
  namespace base {         \
  __VA_ARGS__              \
  }
#define SHOAL_DISPATCH(fn) base::fn
#endif
