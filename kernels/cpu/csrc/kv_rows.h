// A row of the cache, one head's K or V of one token: values in the model's dtype, or 8 bits for each. The arithmetic
// is that of kernels/kv_rows.py, to the last bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops.h"
#include "vec.h"

constexpr float kMaxCode = 127.0f, kLeastMagnitude = 0x1p-100f, kMaxFp8 = 448.0f;
// Adding it leaves the nearest integer, ties to even, in the low bits of the mantissa.
constexpr float kRoundToInteger = 0x1.8p23f;
// Adding it leaves the nearest multiple of 2^-9, the spacing of e4m3 below 2^-6.
constexpr float kRoundToSubnormal = 0x1.8p14f, kLeastNormal = 0x1p-6f;

static ALWAYS_INLINE f32x16 magnitude(f32x16 v) { return (f32x16)((u32x16)v & 0x7fffffffu); }

// Rounds to e4m3. Values that are not finite become NaN.
static ALWAYS_INLINE u8x16 to_fp8(f32x16 v) {
  const f32x16 size = magnitude(v), clamped = choose(size > kMaxFp8, splat(kMaxFp8), size);
  const u32x16 bits = (u32x16)clamped;
  // Keep three bits of the mantissa, rounded to nearest, ties to even. The exponent's bias is 7 instead of 127.
  const u32x16 normal = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (120u << 3);
  const u32x16 subnormal = (u32x16)(clamped + kRoundToSubnormal) & 15u;
  const u32x16 code = choose(clamped < kLeastNormal, subnormal, normal);
  const u32x16 is_finite = (u32x16)(size < std::numeric_limits<float>::infinity());
  return low_bytes((is_finite & (code | (u32x16)v >> 31 << 7)) | (~is_finite & 0x7fu));
}

static ALWAYS_INLINE f32x16 from_fp8(u8x16 codes) {
  const u32x16 wide = widen(codes);
  const u32x16 size = wide & 0x7fu;
  // e4m3's exponent and mantissa as float32's lowest bits: exact after multiplication by the bias.
  const f32x16 value = (f32x16)(size << 20) * 0x1p120f;
  const u32x16 is_nan = (u32x16)(size == 0x7fu);
  return (f32x16)(((u32x16)value & ~is_nan) | (is_nan & 0x7fc00000u) | (wide & 0x80u) << 24);
}

static ALWAYS_INLINE f32x16 from_int8(u8x16 codes) {
  return to_float((i32x16)(widen(codes) << 24) >> 24);
}

template <class T>
inline void write_int8(const T* values, int64_t head_dim, char* row) {
  f32x16 largest = {}, nothing = {};
  for (int64_t i = 0; i < head_dim; i += kLanes) {
    const f32x16 x = load_up_to(values + i, head_dim - i);
    largest = max(largest, magnitude(x));
    // NaN from the first x on that is NaN or infinite
    nothing = fma(x, f32x16{}, nothing);
  }
  const float most = horizontal_max(largest) + horizontal_sum(nothing);
  const bool is_finite = most < std::numeric_limits<float>::infinity(), is_wide = is_finite && most >= kLeastMagnitude;
  const float factor = is_wide ? kMaxCode / most : 0.0f;
  for (int64_t i = 0; i < head_dim; i += kLanes) {
    const f32x16 scaled = load_up_to(values + i, head_dim - i) * factor + kRoundToInteger;
    const u8x16 codes = is_wide ? low_bytes((u32x16)scaled) : u8x16{};
    std::memcpy(row + i, &codes, std::min<int64_t>(kLanes, head_dim - i));
  }
  const float scale = !is_finite ? std::numeric_limits<float>::quiet_NaN() : is_wide ? most / kMaxCode : 0.0f;
  std::memcpy(row + head_dim, &scale, sizeof scale);
}

template <class T>
inline void write_fp8(const T* values, int64_t head_dim, char* row) {
  for (int64_t i = 0; i < head_dim; i += kLanes) {
    const u8x16 codes = to_fp8(load_up_to(values + i, head_dim - i));
    std::memcpy(row + i, &codes, std::min<int64_t>(kLanes, head_dim - i));
  }
}

template <class T>
inline void write_row(KvCoding coding, const T* values, int64_t head_dim, char* row) {
  switch (coding) {
    case KvCoding::Values:
      std::memcpy(row, values, head_dim * sizeof(T));
      return;
    case KvCoding::Fp8:
      write_fp8(values, head_dim, row);
      return;
    case KvCoding::Int8:
      write_int8(values, head_dim, row);
  }
}

// The codes of a row as numbers, not yet multiplied by its scale.
template <class T>
inline void read_codes(KvCoding coding, const char* row, int64_t head_dim, T* values) {
  for (int64_t i = 0; i < head_dim; i += kLanes) {
    u8x16 codes = {};
    std::memcpy(&codes, row + i, std::min<int64_t>(kLanes, head_dim - i));
    store_up_to(values + i, coding == KvCoding::Int8 ? from_int8(codes) : from_fp8(codes), head_dim - i);
  }
}

inline float scale_of(const char* row, int64_t head_dim) {
  float scale;
  std::memcpy(&scale, row + head_dim, sizeof scale);
  return scale;
}
