// Weights in four bits: a tile of 32 columns is a sequence of groups, each of 32 values along k:
//
//   scales  [column] bfloat16
//   codes   [step][column][4 bytes], four steps of eight values: the low half of byte i is value i, the high half 4 + i
//
// A value is (code - 8) * scale. Rows come in eight bits (QuantiseOp), and what 8 in place of 0 adds to a sum is taken
// away by a number for each group of a row. Sums of a group are exact integers; they are scaled and added in float32, in
// the order of groups, whichever rows and tiles are computed beside.
#pragma once

#include "tile.h"

constexpr int kGroup = 32;
constexpr int kInt4Zero = 8;
constexpr int kScaleBytes = kTileColumns * 2;
constexpr int kStepValues = 8;
constexpr int kGroupBytes = kScaleBytes + kGroup / kStepValues * kStepBytes;

// As many as fit the registers: two accumulators for each of a row's vectors.
#if defined(__AVX512F__)
constexpr int kMaxInt4Rows = 6;
#else
constexpr int kMaxInt4Rows = 2;
#endif

constexpr int64_t groups(int64_t values) { return (values + kGroup - 1) / kGroup; }

// A row of Quantise: codes, the scale, and the groups' sums.
constexpr int64_t row_scale_at(int64_t values) { return groups(values) * kGroup; }
constexpr int64_t row_sums_at(int64_t values) { return row_scale_at(values) + 4; }

// sums[r][v] = the row's codes times 16 columns of consecutive tiles, without the row's scale.
template <int ROWS, int TILES>
static ALWAYS_INLINE void dot_int4(const char* x, int64_t x_stride, const char* tile, int64_t tile_bytes,
                                   int64_t in_features, f32x16 (&sums)[ROWS][TILES * kTileVectors]) {
  constexpr int kVectors = TILES * kTileVectors;
  const int64_t num_groups = groups(in_features), sums_at = row_sums_at(in_features);
  for (int64_t g = 0; g < num_groups; ++g, tile += kGroupBytes) {
    i32x16 acc[ROWS][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const i32x16 start = (i32x16)splat_word(x + r * x_stride + sums_at + g * 4);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) acc[r][v] = start;
    }
#pragma GCC unroll 4
    for (int s = 0; s < kGroup / kStepValues; ++s) {
      const char* codes = tile + kScaleBytes + s * kStepBytes;
      const char* values = x + g * kGroup + s * kStepValues;
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const u32x16 both = load_words(codes + (v / kTileVectors) * tile_bytes + (v % kTileVectors) * 64);
        const u32x16 low = both & 0x0f0f0f0fu, high = (both >> 4) & 0x0f0f0f0fu;
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
          acc[r][v] = multiply_add<int8>(low, splat_word(values + r * x_stride), acc[r][v]);
          acc[r][v] = multiply_add<int8>(high, splat_word(values + r * x_stride + kWordBytes), acc[r][v]);
        }
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const f32x16 scale = load(reinterpret_cast<const bf16*>(tile + (v / kTileVectors) * tile_bytes) +
                                (v % kTileVectors) * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r)
        sums[r][v] = fma(__builtin_convertvector(acc[r][v], f32x16), scale, sums[r][v]);
    }
  }
}
