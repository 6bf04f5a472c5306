// Sixteen float32 lanes, on whatever instruction set there is.
//
// Everything is inline and written with explicit fused multiply-adds; the build passes -ffp-contract=off, so that
// a value's rounding never depends on the function the compiler happened to inline it into.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int16_t i16x32 __attribute__((vector_size(64)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));

constexpr int kLanes = 16;

struct bf16 {
  uint16_t bits;
};

static ALWAYS_INLINE f32x16 splat(float value) { return f32x16{} + value; }

static ALWAYS_INLINE f32x16 iota() { return f32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

static ALWAYS_INLINE i32x16 iota_i32() { return i32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

static ALWAYS_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  union Halves {
    f32x16 whole;
    __m256 half[2];
  } x{a}, y{b}, z{c};
  for (int i = 0; i < 2; ++i) z.half[i] = _mm256_fmadd_ps(x.half[i], y.half[i], z.half[i]);
  return z.whole;
#elif defined(__aarch64__)
  union Quarters {
    f32x16 whole;
    float32x4_t quarter[4];
  } x{a}, y{b}, z{c};
  for (int i = 0; i < 4; ++i) z.quarter[i] = vfmaq_f32(z.quarter[i], x.quarter[i], y.quarter[i]);
  return z.whole;
#else
  return a * b + c;
#endif
}

// A NaN in `b` stays, one in `a` does not (as maxps has it).
static ALWAYS_INLINE f32x16 max(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

static ALWAYS_INLINE float horizontal_max(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float best = v[0];
  for (int i = 1; i < kLanes; ++i) best = v[i] > best ? v[i] : best;
  return best;
#endif
}

static ALWAYS_INLINE float horizontal_sum(f32x16 v) {
  float lane[kLanes];
  std::memcpy(lane, &v, sizeof lane);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  return lane[0];
}

static ALWAYS_INLINE f32x16 load(const float* p) {
  f32x16 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

static ALWAYS_INLINE void store(float* p, f32x16 v) { std::memcpy(p, &v, sizeof v); }

static ALWAYS_INLINE f32x16 load(const bf16* p) {
  u16x16 bits;
  std::memcpy(&bits, p, sizeof bits);
#if defined(__AVX512F__)
  return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)bits), 16);
#else
  return (f32x16)(__builtin_convertvector(bits, u32x16) << 16);
#endif
}

// To nearest, ties to even.
static ALWAYS_INLINE u16x16 round_to_bf16(f32x16 v) {
#if defined(__AVX512BF16__)
  __m256bh rounded = _mm512_cvtneps_pbh((__m512)v);
  u16x16 out;
  std::memcpy(&out, &rounded, sizeof out);
  return out;
#else
  u32x16 bits = (u32x16)v;
  u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  u32x16 is_nan = (u32x16)(v != v);
  return __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & rounded), u16x16);
#endif
}

static ALWAYS_INLINE void store(bf16* p, f32x16 v) {
  u16x16 bits = round_to_bf16(v);
  std::memcpy(p, &bits, sizeof bits);
}

// The first n (< 16) elements; the other lanes are zero.
template <class T>
static ALWAYS_INLINE f32x16 load_some(const T* p, int64_t n) {
  T lanes[kLanes] = {};
  std::memcpy(lanes, p, n * sizeof(T));
  return load(lanes);
}

template <class T>
static ALWAYS_INLINE void store_some(T* p, f32x16 v, int64_t n) {
  T lanes[kLanes];
  store(lanes, v);
  std::memcpy(p, lanes, n * sizeof(T));
}

template <class T>
static ALWAYS_INLINE f32x16 load_up_to(const T* p, int64_t n) {
  return n >= kLanes ? load(p) : load_some(p, n);
}

template <class T>
static ALWAYS_INLINE void store_up_to(T* p, f32x16 v, int64_t n) {
  if (n >= kLanes)
    store(p, v);
  else
    store_some(p, v, n);
}

static ALWAYS_INLINE float to_float(float v) { return v; }

static ALWAYS_INLINE float to_float(bf16 v) {
  uint32_t bits = uint32_t(v.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}
