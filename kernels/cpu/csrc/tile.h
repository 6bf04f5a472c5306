// The one inner loop of linear layers and of attention: a few rows times a tile of 32 columns.
//
// Both operands are walked in words of four bytes along k: one float32, or two bfloat16. A tile of the right-hand
// side is [word][column][values of a word], 128 bytes per step, zero-padded in both directions. Rows of the left-hand
// side are plain, but must be readable (and not NaN) up to a whole word.
//
// Every output has one accumulator, and k runs upwards from 0, in all variants: a row's result does not depend on
// which rows are computed beside it.
#pragma once

#include "vec.h"

constexpr int kTileColumns = 32;
constexpr int kTileVectors = kTileColumns / kLanes;
constexpr int kWordBytes = 4;
constexpr int kStepBytes = kTileColumns * kWordBytes;
constexpr int kLineBytes = 64;

// 12 rows of 2 accumulators, 2 columns and a broadcast fill 27 of 32 registers; with 16 registers of half the width
// little can be held.
#if defined(__AVX512F__)
constexpr int kMaxRows = 12;
#else
constexpr int kMaxRows = 3;
#endif

template <class T>
constexpr int64_t kWordValues = kWordBytes / sizeof(T);

template <class T>
constexpr int64_t words(int64_t values) {
  return (values + kWordValues<T> - 1) / kWordValues<T>;
}

static ALWAYS_INLINE u32x16 load_words(const char* p) {
  u32x16 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

static ALWAYS_INLINE u32x16 splat_word(const char* p) {
  uint32_t word;
  std::memcpy(&word, p, sizeof word);
  return u32x16{} + word;
}

template <class T>
static ALWAYS_INLINE f32x16 multiply_add(u32x16 a, u32x16 b, f32x16 acc);

template <>
ALWAYS_INLINE f32x16 multiply_add<float>(u32x16 a, u32x16 b, f32x16 acc) {
  return fma((f32x16)a, (f32x16)b, acc);
}

template <>
ALWAYS_INLINE f32x16 multiply_add<bf16>(u32x16 a, u32x16 b, f32x16 acc) {
#if defined(__AVX512BF16__)
  return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
  const f32x16 low = fma((f32x16)(a << 16), (f32x16)(b << 16), acc);
  return fma((f32x16)(a & 0xffff0000u), (f32x16)(b & 0xffff0000u), low);
#endif
}

// Lines of memory to fetch while computing: `lines` of them per four steps.
struct Prefetch {
  const char* next;
  int lines;
};

template <class T, int ROWS, int TILES>
static ALWAYS_INLINE void dot_step(const char* const (&a)[(ROWS + 2) / 3], int64_t a_stride, int64_t offset,
                                   const char* tile, int64_t tile_bytes, f32x16 (&acc)[ROWS][TILES * kTileVectors]) {
  u32x16 columns[TILES * kTileVectors];
#pragma GCC unroll 16
  for (int v = 0; v < TILES * kTileVectors; ++v)
    columns[v] = load_words(tile + (v / kTileVectors) * tile_bytes + (v % kTileVectors) * 64);
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
    const u32x16 row = splat_word(a[r / 3] + (r % 3) * a_stride + offset);
#pragma GCC unroll 16
    for (int v = 0; v < TILES * kTileVectors; ++v) acc[r][v] = multiply_add<T>(row, columns[v], acc[r][v]);
  }
}

// acc[r][v] += the words of row r times 16 columns of consecutive tiles. Strides are in bytes.
template <class T, int ROWS, int TILES>
static ALWAYS_INLINE void dot(const char* a, int64_t a_stride, const char* tile, int64_t tile_bytes, int64_t steps,
                              f32x16 (&acc)[ROWS][TILES * kTileVectors], Prefetch prefetch = {nullptr, 0}) {
  constexpr int kUnroll = 4;
  // every third row has a pointer, the two after it are reached through the addressing mode
  const char* rows[(ROWS + 2) / 3];
#pragma GCC unroll 4
  for (int g = 0; g < (ROWS + 2) / 3; ++g) rows[g] = a + 3 * g * a_stride;
  int64_t k = 0;
  for (; k + kUnroll <= steps; k += kUnroll) {
    for (int line = 0; line < prefetch.lines; ++line) __builtin_prefetch(prefetch.next + line * kLineBytes);
    prefetch.next += prefetch.lines * kLineBytes;
#pragma GCC unroll 4
    for (int u = 0; u < kUnroll; ++u)
      dot_step<T, ROWS, TILES>(rows, a_stride, u * kWordBytes, tile + u * kStepBytes, tile_bytes, acc);
#pragma GCC unroll 4
    for (int g = 0; g < (ROWS + 2) / 3; ++g) rows[g] += kUnroll * kWordBytes;
    tile += kUnroll * kStepBytes;
  }
  for (; k < steps; ++k, tile += kStepBytes) {
    dot_step<T, ROWS, TILES>(rows, a_stride, 0, tile, tile_bytes, acc);
    for (const char*& row : rows) row += kWordBytes;
  }
}

// n rows in as few blocks of at most kMaxRows as possible, all of nearly the same height.
struct RowBlocks {
  int64_t num_rows;
  int64_t count = (num_rows + kMaxRows - 1) / kMaxRows;
  int64_t begin(int64_t block) const { return num_rows * block / count; }
  int height(int64_t block) const { return int(begin(block + 1) - begin(block)); }
};
