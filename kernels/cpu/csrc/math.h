// exp2, log and the activations built on them, on sixteen lanes. The polynomials were fitted for this file; tests
// measure their errors.
#pragma once

#include "vec.h"

// 2^r for r in [-0.5, 0.5]
static ALWAYS_INLINE f32x16 exp2_fraction(f32x16 r) {
  f32x16 p = splat(0x1.5bba14p-10f);
  p = fma(p, r, splat(0x1.3cea88p-7f));
  p = fma(p, r, splat(0x1.c6b752p-5f));
  p = fma(p, r, splat(0x1.ebf9bcp-3f));
  p = fma(p, r, splat(0x1.62e42ap-1f));
  return fma(p, r, splat(1.0f));
}

// The same with a relative error below 1.1e-4, a twentieth of bfloat16's.
static ALWAYS_INLINE f32x16 rough_exp2_fraction(f32x16 r) {
  f32x16 p = splat(0x1.c2a218p-5f);
  p = fma(p, r, splat(0x1.f00c4ep-3f));
  p = fma(p, r, splat(0x1.62f5fap-1f));
  return fma(p, r, splat(1.0f));
}

template <f32x16 (*FRACTION)(f32x16)>
static ALWAYS_INLINE f32x16 exp2_by(f32x16 x) {
#if defined(__AVX512DQ__)
  // x minus the nearest integer (0 for an infinity), and the nearest integer
  const f32x16 r = (f32x16)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
  const __m512 n = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
  return (f32x16)_mm512_scalef_ps((__m512)FRACTION(r), n);
#else
  const f32x16 clamped = max(splat(-126.0f), x);
  // adding 1.5 * 2^23 leaves the nearest integer in the low bits of the mantissa
  const f32x16 shifted = clamped + 0x1.8p23f;
  const f32x16 p = FRACTION(clamped - (shifted - 0x1.8p23f));
  const f32x16 scaled = (f32x16)((u32x16)p + ((u32x16)shifted << 23));
  return choose(x < splat(-125.0f), f32x16{}, scaled);
#endif
}

// 2^x with a relative error below 2e-7 for x from -125 to 127; exactly 1 at 0, and 0 at -inf. NaN stays NaN.
static ALWAYS_INLINE f32x16 exp2_lanes(f32x16 x) { return exp2_by<exp2_fraction>(x); }

// The same, with an error that a number in bfloat16 does not show.
static ALWAYS_INLINE f32x16 rough_exp2_lanes(f32x16 x) { return exp2_by<rough_exp2_fraction>(x); }

constexpr float kLog2E = 0x1.715476p+0f;

// e^-x, with x clamped so that the result is finite
static ALWAYS_INLINE f32x16 exp_negative(f32x16 x) {
  const f32x16 y = x * -kLog2E;
  return exp2_lanes(choose(y > splat(126.0f), splat(126.0f), y));
}

// log of a positive finite normal number, relative error below 2e-7
static ALWAYS_INLINE f32x16 log_lanes(f32x16 x) {
  const i32x16 bits = (i32x16)x;
  // an exponent with the mantissa in [sqrt(1/2), sqrt(2))
  const i32x16 exponent = (bits - 0x3f3504f3) >> 23;
  const f32x16 f = (f32x16)(bits - (exponent << 23)) - 1.0f;
  f32x16 p = splat(0x1.14582ep-4f);
  p = fma(p, f, splat(-0x1.de3d38p-4f));
  p = fma(p, f, splat(0x1.e6f0d0p-4f));
  p = fma(p, f, splat(-0x1.fc21e4p-4f));
  p = fma(p, f, splat(0x1.233760p-3f));
  p = fma(p, f, splat(-0x1.555c4ep-3f));
  p = fma(p, f, splat(0x1.99a4b6p-3f));
  p = fma(p, f, splat(-0x1.000006p-2f));
  p = fma(p, f, splat(0x1.555548p-2f));
  const f32x16 square = f * f;
  const f32x16 tail = fma(square * f, p, square * -0.5f);
  const f32x16 e = to_float(exponent);
  return fma(e, splat(0x1.62e430p-1f), f + tail);
}

static ALWAYS_INLINE f32x16 silu(f32x16 x) { return x / (exp_negative(x) + 1.0f); }

// (up + 1) * gate / (1 + e^(-alpha * gate)), with gate at most `limit` and up from -limit to limit. NaN stays NaN.
static ALWAYS_INLINE f32x16 clamped_swiglu(f32x16 gate, f32x16 up, float alpha, float limit) {
  const f32x16 lowest = splat(-limit);
  gate = -max(lowest, -gate);
  up = max(lowest, -max(lowest, -up));
  return (up + 1.0f) * (gate / (exp_negative(gate * alpha) + 1.0f));
}

static ALWAYS_INLINE f32x16 relu(f32x16 x) { return max(splat(0.0f), x); }

// Abramowitz and Stegun 7.1.26, absolute error below 2e-7
static ALWAYS_INLINE f32x16 erf_lanes(f32x16 x) {
  const f32x16 a = max(-x, x);
  const f32x16 t = 1.0f / fma(splat(0.3275911f), a, splat(1.0f));
  f32x16 p = splat(1.061405429f);
  p = fma(p, t, splat(-1.453152027f));
  p = fma(p, t, splat(1.421413741f));
  p = fma(p, t, splat(-0.284496736f));
  p = fma(p, t, splat(0.254829592f));
  const f32x16 y = 1.0f - p * t * exp_negative(a * a);
  return choose(x < f32x16{}, -y, y);
}

static ALWAYS_INLINE f32x16 gelu(f32x16 x) { return x * 0.5f * (erf_lanes(x * 0x1.6a09e6p-1f) + 1.0f); }

static ALWAYS_INLINE f32x16 gelu_tanh(f32x16 x) {
  // x/2 (1 + tanh u) = x / (1 + e^-2u)
  const f32x16 u = x * fma(x * x, splat(0.7978845608f * 0.044715f), splat(0.7978845608f));
  return x / (exp_negative(u * 2.0f) + 1.0f);
}
