// Sixteen float32 lanes on any instruction set.
//
// Everything is inline and written with explicit fused multiply-adds. The build passes -ffp-contract=off, so a value's
// rounding never depends on the function that the compiler inlines it into.
#pragma once

#include "lanes.h"

struct bf16 {
  uint16_t bits;
};

static ALWAYS_INLINE f32x16 load(const float* p) { return load_lanes<f32x16>(p); }

static ALWAYS_INLINE void store(float* p, const f32x16& v) { store_lanes(p, v); }

static ALWAYS_INLINE f32x16 splat(float value) { return f32x16{} + value; }

static ALWAYS_INLINE i32x16 iota_i32() {
  alignas(64) static constexpr int32_t kNumbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load_lanes<i32x16>(kNumbers);
}

static ALWAYS_INLINE f32x16 iota() { return to_float(iota_i32()); }

static ALWAYS_INLINE FloatPart fma_part(WordPart a, WordPart b, FloatPart c) {
#if defined(__AVX512F__)
  return (FloatPart)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (FloatPart)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (FloatPart)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return (FloatPart)a * (FloatPart)b + c;
#endif
}

static ALWAYS_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
  return fma_part((WordPart)a, (WordPart)b, c);
#else
  return by_parts<float>([](auto x, auto y, auto z) { return fma_part((WordPart)x, (WordPart)y, z); }, a, b, c);
#endif
}

// A NaN in `b` is kept, one in `a` is not, as in maxps.
static ALWAYS_INLINE f32x16 max(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return by_parts<float>([](auto x, auto y) { return (FloatPart)_mm256_max_ps(x, y); }, a, b);
#else
  return choose(a > b, a, b);
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

#if defined(__AVX512F__)
// Lane i is the larger of the lanes i and i ^ W: of `b` if i has the bit W, and otherwise of `a`.
template <int W>
static ALWAYS_INLINE f32x16 larger_of_pairs(f32x16 a, f32x16 b) {
  const i32x16 is_b = (iota_i32() & W) != 0;
  const i32x16 others = (iota_i32() ^ W) + (is_b & kLanes);
  return max(choose(is_b, b, a), (f32x16)_mm512_permutex2var_ps((__m512)a, (__m512i)others, (__m512)b));
}
#endif

// Returns the largest lane of v[i] in lane i, up to `count`. Overwrites v, all of which must be defined.
static ALWAYS_INLINE f32x16 horizontal_maxima(f32x16 (&v)[kLanes], [[maybe_unused]] int count) {
#if defined(__AVX512F__)
  for (int i = 0; i < 8; ++i) v[i] = larger_of_pairs<8>(v[i], v[i + 8]);
  for (int i = 0; i < 4; ++i) v[i] = larger_of_pairs<4>(v[i], v[i + 4]);
  for (int i = 0; i < 2; ++i) v[i] = larger_of_pairs<2>(v[i], v[i + 2]);
  return larger_of_pairs<1>(v[0], v[1]);
#else
  alignas(64) float best[kLanes] = {};
  for (int i = 0; i < count; ++i) best[i] = horizontal_max(v[i]);
  return load(best);
#endif
}

static ALWAYS_INLINE float horizontal_sum(f32x16 v) {
  float lane[kLanes];
  std::memcpy(lane, &v, sizeof lane);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  return lane[0];
}

static ALWAYS_INLINE f32x16 load(const bf16* p) {
  u16x16 bits;
  std::memcpy(&bits, p, sizeof bits);
  return (f32x16)(widen(bits) << 16);
}

// Rounds to nearest, ties to even.
static ALWAYS_INLINE u16x16 round_to_bf16(f32x16 v) {
#if defined(__AVX512BF16__)
  __m256bh rounded = _mm512_cvtneps_pbh((__m512)v);
  u16x16 out;
  std::memcpy(&out, &rounded, sizeof out);
  return out;
#else
  const u32x16 bits = (u32x16)v;
  const u32x16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return low_halves(choose(v != v, u32x16{} + 0x7fc0u, rounded));
#endif
}

static ALWAYS_INLINE void store(bf16* p, f32x16 v) {
  u16x16 bits = round_to_bf16(v);
  std::memcpy(p, &bits, sizeof bits);
}

// Loads the first n (< 16) elements; the other lanes are zero.
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
