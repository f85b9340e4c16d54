#include "nn/net/loops.h"

#include <bit>
#include <cmath>

namespace shoal::SHOAL_ISA {
namespace {

inline float power_of_two(int32_t n) { return std::bit_cast<float>((n + 127) << 23); }

// e^x to about one unit in the last place, in a form that compilers vectorise.
inline float exp_of(float x) {
  constexpr float kLog2e = 1.44269504088896341f, kHigh = 0.693359375f, kLow = -2.12194440e-4f;
  float bounded = x < 89.0f ? x : 89.0f;
  bounded = bounded > -104.0f ? bounded : -104.0f;
  const auto n = static_cast<int32_t>(__builtin_floorf(bounded * kLog2e + 0.5f));
  const auto whole = static_cast<float>(n);
  const float r = bounded - whole * kHigh - whole * kLow;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t half = n >> 1;  // in two factors, since 2^n alone may overflow or underflow
  const float value = p * power_of_two(half) * power_of_two(n - half);
  return x == x ? value : x;
}

inline float sigmoid_of(float x) { return 1.0f / (1.0f + exp_of(-x)); }
inline float tanh_of(float x) {  // from |x|, so that nothing overflows
  const float e = exp_of(-2.0f * __builtin_fabsf(x));
  return __builtin_copysignf((1.0f - e) / (1.0f + e), x);
}

// out = f(a, b) for each value.
template <class F>
inline void each(const Inner& loop, const float* a, const float* b, float* out, F f) {
  const int64_t n = loop.count[0], sa = loop.a[0], sb = loop.b[0], so = loop.out[0];
  for (int64_t i = 0; i < loop.count[1]; ++i, a += loop.a[1], b += loop.b[1], out += loop.out[1]) {
    if (so == 1 && sa == 1 && sb == 1) {
      for (int64_t j = 0; j < n; ++j) out[j] = f(a[j], b[j]);
    } else if (so == 1 && sa == 1 && sb == 0) {
      const float y = *b;
      for (int64_t j = 0; j < n; ++j) out[j] = f(a[j], y);
    } else if (so == 1 && sa == 0 && sb == 1) {
      const float x = *a;
      for (int64_t j = 0; j < n; ++j) out[j] = f(x, b[j]);
    } else {
      for (int64_t j = 0; j < n; ++j) out[j * so] = f(a[j * sa], b[j * sb]);
    }
  }
}
template <class F>
inline void each(const Inner& loop, const float* a, float* out, F f) {
  Inner one = loop;
  one.b[0] = one.b[1] = 0;
  each(one, a, a, out, [f](float x, float) { return f(x); });
}

// out = f(out, a). If all values go to one element of out, sixteen partial results are combined at the end.
template <class F>
inline void gather(const Inner& loop, const float* a, float* out, F f) {
  constexpr int kParts = 16;
  const int64_t n = loop.count[0], sa = loop.a[0], so = loop.out[0];
  for (int64_t i = 0; i < loop.count[1]; ++i, a += loop.a[1], out += loop.out[1]) {
    if (so == 1 && sa == 1) {
      for (int64_t j = 0; j < n; ++j) out[j] = f(out[j], a[j]);
    } else if (so == 0 && sa == 1 && n >= kParts) {
      float part[kParts];
      for (int p = 0; p < kParts; ++p) part[p] = a[p];
      int64_t j = kParts;
      for (; j + kParts <= n; j += kParts)
        for (int p = 0; p < kParts; ++p) part[p] = f(part[p], a[j + p]);
      float whole = *out;
      for (float p : part) whole = f(whole, p);
      for (; j < n; ++j) whole = f(whole, a[j]);
      *out = whole;
    } else {
      for (int64_t j = 0; j < n; ++j) out[j * so] = f(out[j * so], a[j * sa]);
    }
  }
}

}  // namespace

void apply_op(Op op, const Inner& loop, const float* a, const float* b, float* out) {
  const float number = loop.number, other = loop.other;
  switch (op) {
    case Op::copy:
      return each(loop, a, out, [](float x) { return x; });
    case Op::negate:
      return each(loop, a, out, [](float x) { return -x; });
    case Op::absolute:
      return each(loop, a, out, [](float x) { return __builtin_fabsf(x); });
    case Op::relu:
      return each(loop, a, out, [](float x) { return x < 0.0f ? 0.0f : x; });
    case Op::sigmoid:
      return each(loop, a, out, sigmoid_of);
    case Op::tanh:
      return each(loop, a, out, tanh_of);
    case Op::exp:
      return each(loop, a, out, exp_of);
    case Op::log:
      return each(loop, a, out, [](float x) { return std::log(x); });
    case Op::sqrt:
      return each(loop, a, out, [](float x) { return std::sqrt(x); });
    case Op::square:
      return each(loop, a, out, [](float x) { return x * x; });
    case Op::reciprocal:
      return each(loop, a, out, [](float x) { return 1.0f / x; });
    case Op::gelu:
      return each(loop, a, out, [](float x) { return 0.5f * x * (1.0f + std::erf(x * 0.70710678118654752f)); });
    case Op::gelu_tanh:
      return each(loop, a, out, [](float x) {
        return 0.5f * x * (1.0f + tanh_of(0.79788456080286536f * (x + 0.044715f * x * x * x)));
      });
    case Op::silu:
      return each(loop, a, out, [](float x) { return x * sigmoid_of(x); });
    case Op::softplus:
      return each(loop, a, out, [number, other](float x) {
        const float y = x * number;
        return y > other ? x : std::log1p(exp_of(y)) / number;
      });
    case Op::leaky_relu:
      return each(loop, a, out, [number](float x) { return x < 0.0f ? x * number : x; });
    case Op::elu:
      return each(loop, a, out, [number](float x) { return x < 0.0f ? number * std::expm1(x) : x; });
    case Op::clamp:
      return each(loop, a, out, [number, other](float x) {
        const float y = x < number ? number : x;
        return y > other ? other : y;
      });
    case Op::power:
      return each(loop, a, out, [number](float x) { return std::pow(x, number); });
    case Op::add:
      return each(loop, a, b, out, [number](float x, float y) { return x + number * y; });
    case Op::subtract:
      return each(loop, a, b, out, [number](float x, float y) { return x - number * y; });
    case Op::multiply:
      return each(loop, a, b, out, [](float x, float y) { return x * y; });
    case Op::divide:
      return each(loop, a, b, out, [](float x, float y) { return x / y; });
    // NaN if either operand is NaN.
    case Op::maximum:
      return each(loop, a, b, out, [](float x, float y) { return x > y || x != x ? x : y; });
    case Op::minimum:
      return each(loop, a, b, out, [](float x, float y) { return x < y || x != x ? x : y; });
    case Op::sum:
      return gather(loop, a, out, [](float x, float y) { return x + y; });
    case Op::largest:
      return gather(loop, a, out, [](float x, float y) { return x > y || x != x ? x : y; });
  }
}

}  // namespace shoal::SHOAL_ISA
