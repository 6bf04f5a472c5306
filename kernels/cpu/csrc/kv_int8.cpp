// Converts blocks of KV to one byte per value, and back. The arithmetic is that of kernels/kv_int8.py, to the last bit.

#include "kv_int8.h"

#include <limits>

#include "ops.h"

namespace {

constexpr float kNumSteps = 255.0f, kLeastSpan = 0x1p-100f;
// adding it leaves the nearest integer, ties to even, in the low bits of the mantissa
constexpr float kShift = 0x1.8p23f;
// groups of sixteen channels processed at once: as many as there are registers for
constexpr int kTogether = 4;

ALWAYS_INLINE f32x16 min(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_min_ps((__m512)a, (__m512)b);
#else
  return choose(a < b, a, b);
#endif
}

// All sixteen lanes, or the first n; the other lanes are zero.
template <bool kIsWhole, class T>
ALWAYS_INLINE f32x16 load_values(const T* p, int64_t n) {
  return kIsWhole ? load(p) : load_some(p, n);
}

template <bool kIsWhole, class T>
ALWAYS_INLINE void store_values(T* p, f32x16 v, int64_t n) {
  if (kIsWhole)
    store(p, v);
  else
    store_some(p, v, n);
}

template <bool kIsWhole>
ALWAYS_INLINE u8x16 load_codes(const uint8_t* p, int64_t n) {
  u8x16 codes = {};
  std::memcpy(&codes, p, kIsWhole ? kLanes : n);
  return codes;
}

template <bool kIsWhole>
ALWAYS_INLINE void store_codes(uint8_t* p, u8x16 codes, int64_t n) {
  std::memcpy(p, &codes, kIsWhole ? kLanes : n);
}

// kNum times sixteen channels, or the `n` that are left. The channels of a slot are contiguous and read together.
template <int kNum, bool kIsWhole, class T>
ALWAYS_INLINE void quantise_channels(const T* values, T* bounds, uint8_t* codes, const KvBlocks& of, int64_t num_filled,
                                     int64_t n) {
  const f32x16 infinity = splat(std::numeric_limits<float>::infinity());
  f32x16 low[kNum], high[kNum], nothing[kNum], scale[kNum];
  for (int i = 0; i < kNum; ++i) {
    low[i] = infinity;
    high[i] = -infinity;
    nothing[i] = f32x16{};
  }
  for (int64_t slot = 0; slot < num_filled; ++slot)
    for (int i = 0; i < kNum; ++i) {
      const f32x16 x = load_values<kIsWhole>(values + slot * of.head_dim + i * kLanes, n);
      low[i] = min(low[i], x);
      high[i] = max(high[i], x);
      // NaN from the first x on that is NaN or infinite
      nothing[i] = fma(x, f32x16{}, nothing[i]);
    }
  for (int i = 0; i < kNum; ++i) {
    // turns a negative zero into zero
    low[i] += 0.0f;
    high[i] += 0.0f;
    const f32x16 span = high[i] - low[i] + nothing[i];
    const i32x16 is_finite = span < infinity, is_wide = is_finite & (span >= splat(kLeastSpan));
    const f32x16 nan = splat(std::numeric_limits<float>::quiet_NaN());
    store_values<kIsWhole>(bounds + i * kLanes, choose(is_finite, low[i], nan), n);
    store_values<kIsWhole>(bounds + of.head_dim + i * kLanes, choose(is_finite, choose(is_wide, high[i], low[i]), nan), n);
    scale[i] = choose(is_wide, kNumSteps / span, f32x16{});
  }
  for (int64_t slot = 0; slot < num_filled; ++slot)
    for (int i = 0; i < kNum; ++i) {
      const f32x16 x = load_values<kIsWhole>(values + slot * of.head_dim + i * kLanes, n);
      const i32x16 is_wide = scale[i] > f32x16{};
      const u32x16 bits = (u32x16)((x - low[i]) * scale[i] + kShift) & (u32x16)is_wide;
      store_codes<kIsWhole>(codes + slot * of.head_dim + i * kLanes, low_bytes(bits), n);
    }
  for (int64_t slot = num_filled; slot < of.num_slots; ++slot)
    for (int i = 0; i < kNum; ++i) store_codes<kIsWhole>(codes + slot * of.head_dim + i * kLanes, u8x16{}, n);
}

template <int kNum, bool kIsWhole, class T>
ALWAYS_INLINE void dequantise_channels(T* values, const T* bounds, const uint8_t* codes, const KvBlocks& of, int64_t n) {
  f32x16 low[kNum], high[kNum], scale[kNum];
  for (int i = 0; i < kNum; ++i) {
    low[i] = load_values<kIsWhole>(bounds + i * kLanes, n);
    high[i] = load_values<kIsWhole>(bounds + of.head_dim + i * kLanes, n);
    scale[i] = (high[i] - low[i]) / kNumSteps;
  }
  for (int64_t slot = 0; slot < of.num_slots; ++slot)
    for (int i = 0; i < kNum; ++i) {
      const int64_t at = slot * of.head_dim + i * kLanes;
      const f32x16 code = to_float((i32x16)widen(load_codes<kIsWhole>(codes + at, n)));
      const f32x16 value = code * scale[i] + low[i];
      store_values<kIsWhole>(values + at, choose(code == splat(kNumSteps), high[i], value), n);
    }
}

template <bool kIsSave, int kNum, bool kIsWhole, class T>
ALWAYS_INLINE void channels(T* values, T* bounds, uint8_t* codes, const KvBlocks& of, int64_t num_filled, int64_t n) {
  if (kIsSave)
    quantise_channels<kNum, kIsWhole>(values, bounds, codes, of, num_filled, n);
  else
    dequantise_channels<kNum, kIsWhole>(values, bounds, codes, of, n);
}

template <class T, bool kIsSave>
void each_group(const KvBlocks& of) {
  const int64_t num_values = of.num_slots * of.head_dim, num_bounds = 2 * of.head_dim;
  const int64_t all_bounds = of.num_groups * num_bounds * int64_t(sizeof(T));
  const int64_t stored_bytes = all_bounds + of.num_groups * num_values;
  for (int64_t block = 0; block < of.num_blocks; ++block) {
    const int64_t num_filled = block == of.num_blocks - 1 ? of.num_last_slots : of.num_slots;
    uint8_t* stored = of.stored + block * stored_bytes;
    for (int64_t group = 0; group < of.num_groups; ++group) {
      T* values = static_cast<T*>(of.values) + (block * of.num_groups + group) * num_values;
      T* bounds = reinterpret_cast<T*>(stored) + group * num_bounds;
      uint8_t* codes = stored + all_bounds + group * num_values;
      int64_t i = 0;
      for (; i + kTogether * kLanes <= of.head_dim; i += kTogether * kLanes)
        channels<kIsSave, kTogether, true>(values + i, bounds + i, codes + i, of, num_filled, kLanes);
      for (; i + kLanes <= of.head_dim; i += kLanes)
        channels<kIsSave, 1, true>(values + i, bounds + i, codes + i, of, num_filled, kLanes);
      if (i < of.head_dim)
        channels<kIsSave, 1, false>(values + i, bounds + i, codes + i, of, num_filled, of.head_dim - i);
    }
  }
}

template <bool kIsSave>
int32_t each_block(const KvBlocks& of) {
  switch (static_cast<Dtype>(of.dtype)) {
    case Dtype::Float32:
      each_group<float, kIsSave>(of);
      return 0;
    case Dtype::Bfloat16:
      each_group<bf16, kIsSave>(of);
      return 0;
  }
  return -1;
}

}  // namespace

int32_t quantise_kv(const KvBlocks* blocks) { return each_block<true>(*blocks); }

int32_t dequantise_kv(const KvBlocks* blocks) { return each_block<false>(*blocks); }

int64_t size_of_kv_blocks() { return sizeof(KvBlocks); }
