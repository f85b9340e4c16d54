#include "table/rows/optimizers.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "core/half.h"
#include "core/hash.h"

namespace shoal::SHOAL_ISA {
namespace {

float* floats(char* state) { return reinterpret_cast<float*>(state); }

// Coupled Adagrad; where norm is 0 the gradient is 0 too and the weight stays.
void adagrad(const Segment& s, float* __restrict w, char* state, const float* __restrict g, float lr, int64_t) {
  float* __restrict norm = floats(state);
  const float wd = s.weight_decay, eps = s.epsilon;
  for (int i = 0; i < s.dim; ++i) {
    float d = g[i] + wd * w[i];
    float n = norm[i] + d * d;
    float rate = lr / (std::sqrt(n) + eps);
    norm[i] = n;
    w[i] -= n > 0 ? rate * d : 0.0f;
  }
}

void dynamic_wd_adagrad(const Segment& s, float* __restrict w, char* state, const float* __restrict g, float lr,
                        int64_t step) {
  if (!s.decoupled) {
    adagrad(s, w, state, g, lr, step);
  } else {
    float* __restrict norm = floats(state);
    const float decay = lr * s.weight_decay;
    for (int i = 0; i < s.dim; ++i) {
      float n = norm[i] + g[i] * g[i];
      float rate = lr / std::sqrt(n);
      norm[i] = n;
      w[i] -= (n > 0 ? rate * g[i] : 0.0f) + decay * w[i];
    }
  }
  std::memcpy(state + 4 * s.dim, &step, sizeof step);
}

void sgd(const Segment& s, float* __restrict w, char*, const float* __restrict g, float lr, int64_t) {
  for (int i = 0; i < s.dim; ++i) w[i] -= lr * g[i];
}

void adadelta(const Segment& s, float* __restrict w, char* state, const float* __restrict g, float lr, int64_t) {
  float* __restrict accum = floats(state);
  float* __restrict update = accum + s.dim;
  const float rho = s.beta1, keep = 1 - rho, eps = s.epsilon, wd = s.weight_decay;
  for (int i = 0; i < s.dim; ++i) {
    float d = g[i] + wd * w[i];
    float a = accum[i] * rho + d * d * keep;
    float u = std::sqrt(update[i] + eps) / std::sqrt(a + eps) * d;
    w[i] -= u * lr;
    update[i] = update[i] * rho + u * u * keep;
    accum[i] = a;
  }
}

// Adam, AMSGrad and AdamW differ in the second moment they divide by and in where the decay enters.
template <bool kAmsgrad, bool kDecoupled>
void adam_like(const Segment& s, float* __restrict w, char* state, const float* __restrict g, float lr, int64_t) {
  const int d = s.dim;
  float* __restrict m = floats(state);
  float* __restrict v = m + d;
  float* __restrict vhat = v + d;
  float* power = kAmsgrad ? vhat + d : vhat;
  const float correction = std::sqrt(1 - power[1]);
  const float rate = lr * correction / (1 - power[0]);
  const float b1 = s.beta1, k1 = 1 - s.beta1, k2 = 1 - s.beta2;
  const float eps = s.corrected_epsilon ? s.epsilon * correction : s.epsilon;
  const float coupled = kDecoupled ? 0.0f : s.weight_decay, decay = kDecoupled ? lr * s.weight_decay : 0.0f;
  const float own = s.nesterov ? k1 : 0.0f, old = s.nesterov ? b1 : 1.0f;
  for (int i = 0; i < d; ++i) {
    float x = g[i] + coupled * w[i];
    float mi = m[i] + (x - m[i]) * k1;
    float vi = v[i] + (x * x - v[i]) * k2;
    m[i] = mi;
    v[i] = vi;
    float second = vi;
    if constexpr (kAmsgrad) {
      second = std::max(vhat[i], vi);
      vhat[i] = second;
    }
    w[i] -= rate * (x * own + old * mi) / (std::sqrt(second) + eps) + decay * w[i];
  }
  power[0] *= s.beta1;
  power[1] *= s.beta2;
}

void lamb(const Segment& s, float* __restrict w, char* state, const float* __restrict g, float lr, int64_t) {
  const int d = s.dim;
  float* __restrict m = floats(state);
  float* __restrict v = m + d;
  float* power = v + d;
  const float c1 = 1 / (1 - power[0]), c2 = 1 / (1 - power[1]), k1 = 1 - s.beta1, k2 = 1 - s.beta2;
  auto direction = [&](int i) { return m[i] * c1 / (std::sqrt(v[i] * c2) + s.epsilon) + s.weight_decay * w[i]; };
  double weights = 0, updates = 0;
  for (int i = 0; i < d; ++i) {
    m[i] += (g[i] - m[i]) * k1;
    v[i] += (g[i] * g[i] - v[i]) * k2;
  }
  for (int i = 0; i < d; ++i) {
    float u = direction(i);
    weights += double{w[i]} * w[i];
    updates += double{u} * u;
  }
  float trust = weights > 0 && updates > 0 ? static_cast<float>(std::sqrt(weights / updates)) : 1.0f;
  for (int i = 0; i < d; ++i) w[i] -= lr * trust * direction(i);
  power[0] *= s.beta1;
  power[1] *= s.beta2;
}

void momentum(const Segment& s, float* __restrict w, char* state, const float* __restrict g, float lr, int64_t) {
  float* __restrict n = floats(state);
  const float mu = s.beta1, wd = s.weight_decay;
  // plain: w += next; nesterov: w += (1 + mu) * next - mu * last
  const float forward = s.nesterov ? 1 + mu : 1.0f, back = s.nesterov ? mu : 0.0f;
  for (int i = 0; i < s.dim; ++i) {
    float last = n[i];
    float next = mu * last - lr * (g[i] + wd * w[i]);
    n[i] = next;
    w[i] += forward * next - back * last;
  }
}

void moving_average(const Segment& s, float* __restrict w, char*, const float* __restrict g, float, int64_t) {
  const float mu = s.beta1;
  for (int i = 0; i < s.dim; ++i) w[i] = mu * w[i] + (1 - mu) * g[i];
}

template <bool kV2>
void rmsprop(const Segment& s, float* __restrict w, char* state, const float* __restrict g, float lr, int64_t) {
  float* __restrict n = floats(state);
  const double mu = s.beta1, fresh = kV2 ? 1.0 : 1.0 - mu, wd = s.weight_decay, rate = lr;
  const double eps = s.epsilon;
  for (int i = 0; i < s.dim; ++i) {
    double dx = g[i] + wd * w[i];
    double next = mu * n[i] + fresh * dx * dx;
    n[i] = static_cast<float>(next);
    w[i] = static_cast<float>(w[i] - rate / (std::sqrt(next) + eps) * dx);
  }
}

// FTRL divides a difference of roots by the rate, which magnifies rounding errors: so it must round as written, without
// fused multiply-adds.
#if defined(__GNUC__) && !defined(__clang__)
#define SHOAL_AS_WRITTEN __attribute__((optimize("fp-contract=off")))
#else
#define SHOAL_AS_WRITTEN
#endif

// The accumulators of FTRL: norm += g^2, zero += g - sigma * w.
SHOAL_AS_WRITTEN void ftrl_accumulate(const Segment& s, const float* __restrict w, float* __restrict norm,
                                      float* __restrict zero, const float* __restrict g, float lr) {
  for (int i = 0; i < s.dim; ++i) {
    float next = norm[i] + g[i] * g[i];
    float sigma = (std::sqrt(next) - std::sqrt(norm[i])) / lr;
    zero[i] += g[i] - sigma * w[i];
    norm[i] = next;
  }
}

SHOAL_AS_WRITTEN void ftrl(const Segment& s, float* __restrict w, char* state, const float* __restrict g, float lr,
                           int64_t) {
  if (lr == 0) return;  // the formula divides by it
  float* __restrict norm = floats(state);
  float* __restrict zero = norm + s.dim;
  const float l1 = s.l1, beta = s.beta, l2 = s.l2 * lr;
  for (int i = 0; i < s.dim; ++i) {
    float next = norm[i] + g[i] * g[i];
    float root = std::sqrt(next);
    float sigma = (root - std::sqrt(norm[i])) / lr;
    float z = zero[i] + (g[i] - sigma * w[i]);
    norm[i] = next;
    zero[i] = z;
    float shrunk = lr * (std::copysign(l1, z) - z) / (root + beta + l2);
    w[i] = std::fabs(z) <= l1 ? 0.0f : shrunk;
  }
}

SHOAL_AS_WRITTEN void group_ftrl(const Segment& s, float* __restrict w, char* state, const float* __restrict g,
                                 float lr, int64_t) {
  if (lr == 0) return;
  float* __restrict norm = floats(state);
  float* __restrict zero = norm + s.dim;
  ftrl_accumulate(s, w, norm, zero, g, lr);
  double squares = 0;
  for (int i = 0; i < s.dim; ++i) squares += double{zero[i]} * zero[i];
  const float length = static_cast<float>(std::sqrt(squares));
  const float shrink = length < s.l1 || length == 0 ? 0.0f : (s.l1 - length) / length;
  // A lane that never saw a gradient may have nothing to divide by.
  for (int i = 0; i < s.dim; ++i)
    w[i] = shrink == 0 || zero[i] == 0 ? 0.0f : lr * zero[i] * shrink / (s.beta + std::sqrt(norm[i]) + s.l2 * lr);
}

void group_adagrad(const Segment& s, float* __restrict w, char* state, const float* __restrict g, float lr, int64_t) {
  const float wd = s.weight_decay;
  float largest = 0;
  for (int i = 0; i < s.dim; ++i) {
    float d = g[i] + wd * w[i];
    largest = std::max(largest, d * d);
  }
  float sum;
  std::memcpy(&sum, state, sizeof sum);
  sum += largest;
  std::memcpy(state, &sum, sizeof sum);
  const float denominator = s.beta + std::sqrt(sum);
  if (denominator == 0 || lr == 0) return;
  const float e = lr / denominator;
  double squares = 0;
  for (int i = 0; i < s.dim; ++i) {
    float z = g[i] + wd * w[i] - w[i] / e;
    squares += double{z} * z;
  }
  const float length = static_cast<float>(std::sqrt(squares));
  const float shrink = length < s.l2 || length == 0 ? 0.0f : e * (length - s.l2) / length;
  for (int i = 0; i < s.dim; ++i) w[i] = -shrink * (g[i] + wd * w[i] - w[i] / e);
}

void batch_softmax(const Segment&, float* w, char* state, const float*, float lr, int64_t step) {
  int64_t last;
  std::memcpy(&last, state, sizeof last);
  w[0] = (1 - lr) * w[0] + lr * static_cast<float>(step - last);
  std::memcpy(state, &step, sizeof step);
}

void rowwise_adagrad(const Segment& s, float* __restrict w, char* state, const float* __restrict g, float lr, int64_t) {
  const float wd = s.weight_decay;
  float squares = 0;
  for (int i = 0; i < s.dim; ++i) {
    float d = g[i] + wd * w[i];
    squares += d * d;
  }
  float norm;
  std::memcpy(&norm, state, sizeof norm);
  norm += squares / static_cast<float>(s.dim);
  std::memcpy(state, &norm, sizeof norm);
  const float denominator = std::sqrt(norm) + s.epsilon;
  if (denominator == 0) return;
  const float rate = lr / denominator;
  for (int i = 0; i < s.dim; ++i) w[i] -= rate * (g[i] + wd * w[i]);
}

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ULL;

// Uniform in [0, 1) with 24 bits.
float uniform(uint64_t noise, uint32_t i) { return static_cast<float>(hash_id(noise + i * kGolden) >> 40) * 0x1p-24f; }

#if defined(__AVX2__) && !defined(__AVX512F__)
// a * b of unsigned 64-bit numbers, without the bits that overflow; b_high is b >> 32.
inline __m256i product(__m256i a, __m256i b, __m256i b_high) {
  const __m256i cross = _mm256_add_epi64(_mm256_mul_epu32(_mm256_srli_epi64(a, 32), b), _mm256_mul_epu32(a, b_high));
  return _mm256_add_epi64(_mm256_mul_epu32(a, b), _mm256_slli_epi64(cross, 32));
}

// The 24 bits that uniform() uses, for four numbers: bits of hash_id() that its last step does not change.
inline __m256i uniform_bits(__m256i x) {
  const __m256i factor = _mm256_set1_epi64x(static_cast<int64_t>(0xd6e8feb86659fd93ULL));
  const __m256i high = _mm256_srli_epi64(factor, 32);
  x = product(_mm256_xor_si256(x, _mm256_srli_epi64(x, 32)), factor, high);
  x = product(_mm256_xor_si256(x, _mm256_srli_epi64(x, 32)), factor, high);
  return _mm256_srli_epi64(x, 40);
}

// uniform(noise, i) for eight consecutive i: GCC does not vectorise the loop without a 64-bit product instruction.
inline __m256 eight_uniforms(uint64_t noise, uint32_t i) {
  const __m256i first =
      _mm256_add_epi64(_mm256_set1_epi64x(static_cast<int64_t>(noise + i * kGolden)),
                       _mm256_setr_epi64x(0, static_cast<int64_t>(kGolden), static_cast<int64_t>(2 * kGolden),
                                          static_cast<int64_t>(3 * kGolden)));
  const __m256i low = uniform_bits(first);
  const __m256i high = uniform_bits(_mm256_add_epi64(first, _mm256_set1_epi64x(static_cast<int64_t>(4 * kGolden))));
  const __m256 pairs = _mm256_shuffle_ps(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high), 0x88);
  const __m256i ordered = _mm256_permute4x64_epi64(_mm256_castps_si256(pairs), 0xD8);
  return _mm256_mul_ps(_mm256_cvtepi32_ps(ordered), _mm256_set1_ps(0x1p-24f));
}
#endif

// The largest float that is smaller than a finite x.
float below(float x) {
  if (x == 0) return -std::numeric_limits<float>::denorm_min();
  const auto bits = std::bit_cast<uint32_t>(x);
  return std::bit_cast<float>(x > 0 ? bits - 1 : bits + 1);
}

// Clamped before it becomes an integer, so that infinities are safe.
float quantum(float x, float step) {
  float q = std::trunc((x + std::copysign(step * 0.5f, x)) / step);
  q = std::min(std::max(q, -128.0f), 127.0f);
  return x != x ? 0.0f : q;
}

}  // namespace

StepFn step_function(Opt opt) {
  switch (opt) {
    case Opt::sgd:
      return sgd;
    case Opt::adagrad:
      return adagrad;
    case Opt::dynamic_wd_adagrad:
      return dynamic_wd_adagrad;
    case Opt::adadelta:
      return adadelta;
    case Opt::adam:
      return adam_like<false, false>;
    case Opt::amsgrad:
      return adam_like<true, false>;
    case Opt::adamw:
      return adam_like<false, true>;
    case Opt::lamb:
      return lamb;
    case Opt::momentum:
      return momentum;
    case Opt::moving_average:
      return moving_average;
    case Opt::rmsprop:
      return rmsprop<false>;
    case Opt::rmspropv2:
      return rmsprop<true>;
    case Opt::ftrl:
      return ftrl;
    case Opt::group_ftrl:
      return group_ftrl;
    case Opt::group_adagrad:
      return group_adagrad;
    case Opt::batch_softmax:
      return batch_softmax;
    case Opt::rowwise_adagrad:
      return rowwise_adagrad;
  }
  return nullptr;
}

void fake_quantize(float* w, int64_t n, float r) {
  const float step = r / 128;
  for (int64_t i = 0; i < n; ++i) w[i] = quantum(w[i], step) * step;
}

void hash_net(float* w, int64_t n, float amplitude, float scale) {
  for (int64_t i = 0; i < n; ++i) w[i] = amplitude * std::tanh(scale * w[i]);
}

void hash_net_gradient(const float* w, const float* g, int64_t n, float amplitude, float scale, float* out) {
  for (int64_t i = 0; i < n; ++i) {
    float t = std::tanh(scale * w[i]);
    out[i] = g[i] * amplitude * scale * (1 - t * t);
  }
}

void round_to_half(float* w, int64_t n, uint64_t noise) {
  constexpr float kLargest = 65504.0f;
  for (int64_t i = 0; i < n; ++i) {
    float x = std::min(std::max(w[i], -kLargest), kLargest);
    if (w[i] != w[i]) continue;
    uint16_t nearest = to_half(x);
    float a = from_half(nearest);
    if (a != x) {
      // The neighbour on the other side of x: one step away from zero or towards it.
      bool away = std::fabs(x) > std::fabs(a);
      float b = from_half(static_cast<uint16_t>(away ? nearest + 1 : nearest - 1));
      float low = std::min(a, b), high = std::max(a, b);
      x = uniform(noise, static_cast<uint32_t>(i)) < (x - low) / (high - low) ? high : low;
    }
    w[i] = x;
  }
}

void encode_segment(const Segment& s, const float* w, char* code) {
  switch (s.codec) {
    case Codec::fp32:
      std::memcpy(code, w, 4 * static_cast<size_t>(s.dim));
      break;
    case Codec::fp16:
      for (int i = 0; i < s.dim; ++i) {
        uint16_t h = to_half(w[i]);
        std::memcpy(code + 2 * i, &h, sizeof h);
      }
      break;
    case Codec::fixed_r8:
      for (int i = 0; i < s.dim; ++i) code[i] = static_cast<char>(static_cast<int8_t>(quantum(w[i], s.r / 128)));
      break;
    case Codec::one_bit:
      for (int i = 0; i < s.dim; ++i) code[i] = static_cast<char>(w[i] > 0 ? 1 : -1);
      break;
  }
}

void decode_segment(const Segment& s, const char* code, float* out) {
  switch (s.codec) {
    case Codec::fp32:
      std::memcpy(out, code, 4 * static_cast<size_t>(s.dim));
      break;
    case Codec::fp16: {
      int i = 0;
#if defined(__AVX2__)
      for (; i + 8 <= s.dim; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(code + 2 * i))));
#endif
      for (; i < s.dim; ++i) {
        uint16_t h;
        std::memcpy(&h, code + 2 * i, sizeof h);
        out[i] = from_half(h);
      }
      break;
    }
    case Codec::fixed_r8: {
      const float step = s.r / 128;
      const auto* q = reinterpret_cast<const int8_t*>(code);
      for (int i = 0; i < s.dim; ++i) out[i] = static_cast<float>(q[i]) * step;
      break;
    }
    case Codec::one_bit: {
      const auto* q = reinterpret_cast<const int8_t*>(code);
      const float amplitude = s.amplitude;  // a copy: `out` might alias the segment; codes are 1 and -1
      for (int i = 0; i < s.dim; ++i) out[i] = static_cast<float>(q[i]) * amplitude;
      break;
    }
  }
}

void init_weights(const Segment& s, int32_t index, uint64_t seed, const int64_t* ids, int64_t n, float* const* rows) {
  if (s.init != Init::random_uniform) {
    const float value = s.init == Init::zeros ? 0.0f : s.init == Init::ones ? 1.0f : s.init_low;
    for (int64_t k = 0; k < n; ++k) std::fill_n(rows[k] + s.weight, s.dim, value);
    return;
  }
  const float low = s.init_low, width = s.init_high - s.init_low;
  const float last = width > 0 ? below(s.init_high) : low;
  const auto first = static_cast<uint32_t>(s.init_column);
  const int32_t dim = s.dim, weight = s.weight;
  for (int64_t k = 0; k < n; ++k) {
    const uint64_t stream = hash_id((seed ^ hash_id(static_cast<uint64_t>(ids[k]))) + static_cast<uint64_t>(index) + 1);
    float* w = rows[k] + weight;
    int i = 0;
#if defined(__AVX2__) && !defined(__AVX512F__)
    for (; i + 8 <= dim; i += 8) {
      const __m256 between = _mm256_fmadd_ps(eight_uniforms(stream, first + static_cast<uint32_t>(i)),
                                             _mm256_set1_ps(width), _mm256_set1_ps(low));
      _mm256_storeu_ps(w + i, _mm256_min_ps(_mm256_set1_ps(last), between));
    }
#endif
    for (; i < dim; ++i) w[i] = std::min(low + uniform(stream, first + static_cast<uint32_t>(i)) * width, last);
  }
}

bool all_finite(const float* x, int64_t n) {
  constexpr uint32_t kExponent = 0x7F800000;
  while (n > 0) {
    int64_t m = std::min<int64_t>(n, 4096);
    uint32_t bad = 0;
    for (int64_t i = 0; i < m; ++i) {
      uint32_t bits;
      std::memcpy(&bits, x + i, sizeof bits);
      bad |= (bits & kExponent) == kExponent;
    }
    if (bad) return false;
    x += m;
    n -= m;
  }
  return true;
}

void add(const float* __restrict x, int64_t n, float* __restrict sum) {
  for (int64_t i = 0; i < n; ++i) sum[i] += x[i];
}

}  // namespace shoal::SHOAL_ISA
