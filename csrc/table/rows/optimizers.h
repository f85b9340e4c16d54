// One optimizer step over one segment of a row. src/shoal/table/reference has the formulas in a readable form.
#pragma once
#include <cstdint>

#include "core/isa.h"
#include "table/rows/layout.h"

namespace shoal {

// Changes w[dim] and the state in place; lr is the segment's learning rate at this step.
using StepFn = void (*)(const Segment& s, float* w, char* state, const float* g, float lr, int64_t global_step);

SHOAL_PER_ISA(
    StepFn step_function(Opt opt);
    // Quantization-aware lookups of training rows, in place.
    void fake_quantize(float* w, int64_t n, float r); void hash_net(float* w, int64_t n, float amplitude, float scale);
    // The gradient that reaches the optimizer of a hash-net segment: out = g * amplitude * scale * (1 - tanh^2).
    void hash_net_gradient(const float* w, const float* g, int64_t n, float amplitude, float scale, float* out);
    // Rounds every weight to one of its two float16 neighbours, the nearer with the higher probability.
    void round_to_half(float* w, int64_t n, uint64_t noise);
    // Serving rows.
    void encode_segment(const Segment& s, const float* w, char* code);
    void decode_segment(const Segment& s, const char* code, float* out);
    // Writes the initial weights of segment number `index` for n ids; rows[k] is the complete embedding of ids[k].
    void init_weights(const Segment& s, int32_t index, uint64_t seed, const int64_t* ids, int64_t n,
                      float* const* rows);
    bool all_finite(const float* x, int64_t n); void add(const float* x, int64_t n, float* sum);)

// The state of a fresh row.
void init_state(const Segment& s, char* state);

StepFn step_function(Opt opt);

}  // namespace shoal
