// The one inner loop of linear layers and of attention: a few rows times a tile of 32 columns.
//
// Both operands are walked in words of four bytes along k: one float32, two bfloat16, or four eight-bit integers: signed
// ones in tiles, and unsigned ones in rows, as processors multiply them. A tile of the right-hand side is [word][column][values of a word], 128 bytes per step, zero-padded in both directions. Rows of the left-hand
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

// Of a tile; rows beside it hold unsigned values.
struct int8 {
  int8_t value;
};

template <class T>
struct SumOf {
  typedef f32x16 type;
};

template <>
struct SumOf<int8> {
  typedef i32x16 type;
};

template <class T>
using Sum = typename SumOf<T>::type;

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
static ALWAYS_INLINE Sum<T> multiply_add(u32x16 a, u32x16 b, Sum<T> acc);

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

#if !defined(__AVX512VNNI__)
// acc + the sum of two products of 16-bit integers in each lane.
static ALWAYS_INLINE i32x16 multiply_add_pairs(u32x16 a, u32x16 b, i32x16 acc) {
#if defined(__AVX512BW__)
  return acc + (i32x16)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  union Halves {
    u32x16 whole;
    __m256i half[2];
  } x{a}, y{b};
  for (int i = 0; i < 2; ++i) x.half[i] = _mm256_madd_epi16(x.half[i], y.half[i]);
  return acc + (i32x16)x.whole;
#else
  const i32x16 low = ((i32x16)(a << 16) >> 16) * ((i32x16)(b << 16) >> 16);
  return acc + low + ((i32x16)a >> 16) * ((i32x16)b >> 16);
#endif
}
#endif

template <>
ALWAYS_INLINE i32x16 multiply_add<int8>(u32x16 a, u32x16 b, i32x16 acc) {
#if defined(__AVX512VNNI__)
  return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#else
  // Bytes 0 and 2, and bytes 1 and 3, as pairs of 16 bits. (One instruction of AVX2 would do all, and saturates.)
  const u32x16 even = (u32x16)((i16x32)(b << 8) >> 8), odd = (u32x16)((i16x32)b >> 8);
  const i32x16 sum = multiply_add_pairs(a & 0x00ff00ffu, even, acc);
  return multiply_add_pairs((a >> 8) & 0x00ff00ffu, odd, sum);
#endif
}

// Lines of memory to fetch while computing: `lines` of them per four steps.
struct Prefetch {
  const char* next;
  int lines;
};

template <class T, int ROWS, int TILES>
static ALWAYS_INLINE void dot_step(const char* const (&a)[(ROWS + 2) / 3], int64_t a_stride, int64_t offset,
                                   const char* tile, int64_t tile_bytes, Sum<T> (&acc)[ROWS][TILES * kTileVectors]) {
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
                              Sum<T> (&acc)[ROWS][TILES * kTileVectors], Prefetch prefetch = {nullptr, 0}) {
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

// n rows in as few blocks of at most `most` as possible, all of nearly the same height.
struct RowBlocks {
  int64_t num_rows;
  int64_t most = kMaxRows;
  int64_t count = (num_rows + most - 1) / most;
  int64_t begin(int64_t block) const { return num_rows * block / count; }
  int height(int64_t block) const { return int(begin(block + 1) - begin(block)); }
};
