// Blocks of KV to a byte for each value, and back: the same arithmetic as kernels/kv_int8.py, to the last bit.

#include "kv_int8.h"

#include <limits>

#include "ops.h"

namespace {

typedef uint8_t u8x16 __attribute__((vector_size(16)));

constexpr float kNumSteps = 255.0f, kLeastSpan = 0x1p-100f;
// adding it leaves the nearest integer, ties to even, in the low bits of the mantissa
constexpr float kShift = 0x1.8p23f;

ALWAYS_INLINE f32x16 min(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_min_ps((__m512)a, (__m512)b);
#else
  return a < b ? a : b;
#endif
}

ALWAYS_INLINE u8x16 load_codes(const uint8_t* p, int64_t n) {
  u8x16 codes = {};
  if (n >= kLanes)
    std::memcpy(&codes, p, kLanes);
  else
    std::memcpy(&codes, p, n);
  return codes;
}

ALWAYS_INLINE void store_codes(uint8_t* p, u8x16 codes, int64_t n) {
  if (n >= kLanes)
    std::memcpy(p, &codes, kLanes);
  else
    std::memcpy(p, &codes, n);
}

// Sixteen channels, or the `n` that are left.
template <class T>
ALWAYS_INLINE void quantise_channels(const T* values, T* bounds, uint8_t* codes, const KvBlocks& of, int64_t num_filled,
                                     int64_t n) {
  const f32x16 infinity = splat(std::numeric_limits<float>::infinity());
  f32x16 low = infinity, high = -infinity, nothing = {};
  for (int64_t slot = 0; slot < num_filled; ++slot) {
    const f32x16 x = load_up_to(values + slot * of.head_dim, n);
    low = min(low, x);
    high = max(high, x);
    // NaN if x is one, or an infinity
    nothing += x * 0.0f;
  }
  // a negative zero becomes a zero
  low += 0.0f;
  high += 0.0f;
  const f32x16 span = high - low + nothing;
  const i32x16 is_wide = (span >= splat(kLeastSpan)) & (span < infinity);
  const i32x16 is_finite = span < infinity;
  const f32x16 nan = splat(std::numeric_limits<float>::quiet_NaN());
  const f32x16 scale = is_wide ? kNumSteps / span : f32x16{};
  store_up_to(bounds, is_finite ? low : nan, n);
  store_up_to(bounds + of.head_dim, is_finite ? (is_wide ? high : low) : nan, n);
  for (int64_t slot = 0; slot < num_filled; ++slot) {
    const f32x16 x = load_up_to(values + slot * of.head_dim, n);
    const u32x16 bits = (u32x16)((x - low) * scale + kShift) & (u32x16)is_wide;
    store_codes(codes + slot * of.head_dim, __builtin_convertvector(bits & 255u, u8x16), n);
  }
  for (int64_t slot = num_filled; slot < of.num_slots; ++slot) store_codes(codes + slot * of.head_dim, u8x16{}, n);
}

template <class T>
ALWAYS_INLINE void dequantise_channels(T* values, const T* bounds, const uint8_t* codes, const KvBlocks& of, int64_t n) {
  const f32x16 low = load_up_to(bounds, n), high = load_up_to(bounds + of.head_dim, n);
  const f32x16 scale = (high - low) / kNumSteps;
  for (int64_t slot = 0; slot < of.num_slots; ++slot) {
    const i32x16 code = __builtin_convertvector(load_codes(codes + slot * of.head_dim, n), i32x16);
    const f32x16 value = __builtin_convertvector(code, f32x16) * scale + low;
    store_up_to(values + slot * of.head_dim, code == 255 ? high : value, n);
  }
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
      for (int64_t i = 0; i < of.head_dim; i += kLanes) {
        const int64_t n = of.head_dim - i;
        if (kIsSave)
          quantise_channels(values + i, bounds + i, codes + i, of, num_filled, n);
        else
          dequantise_channels(values + i, bounds + i, codes + i, of, n);
      }
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
