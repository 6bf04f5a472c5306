// The inner loop of linear layers and of attention: a few rows times a tile of 32 columns. For processors with AMX, amx.h
// has another one, for the same layout.
//
// Both operands are read in words of four bytes along k: one float32, two bfloat16, or four eight-bit integers.
// Integers are signed on one side and unsigned on the other, because processors multiply them in this form. A tile of
// the right-hand side is [word][column][values of a word], 128 bytes per step, zero-padded in both directions; or it is
// decoded to that in registers (see groups.h). Rows of the left-hand side are plain, but must be readable (and not NaN)
// up to a whole word.
//
// Every output has one accumulator, and k runs upwards from 0, in all variants: a row's result does not depend on the
// other rows that are computed with it.
#pragma once

#include <type_traits>

#include "vec.h"

constexpr int kTileColumns = 32;
constexpr int kTileVectors = kTileColumns / kLanes;
constexpr int kWordBytes = 4;
constexpr int kStepBytes = kTileColumns * kWordBytes;
constexpr int kLineBytes = 64;

// Limits by the number of registers: compilers keep sums in registers only if a vector is one register. With 32
// registers, 12 rows of 2 accumulators, 2 columns and a broadcast use 27, and 6 rows of 4 with 4 columns 29. With 16, 6
// rows of 2 use 15.
#if defined(__AVX512F__)
constexpr int kMaxRows = 12, kMaxAccumulators = 24;
#elif defined(__aarch64__)
constexpr int kMaxRows = 6, kMaxAccumulators = 24;
#else
constexpr int kMaxRows = 6, kMaxAccumulators = 12;
#endif

// How many of `parts` registers of columns are processed at once; the others follow in further passes.
constexpr int parts_at_once(int rows, int parts) {
  while (rows * parts > kMaxAccumulators && parts % 2 == 0) parts /= 2;
  return parts;
}

// In a tile. The rows beside it have unsigned values.
struct int8 {
  int8_t value;
};

// In a tile. The rows beside them have signed values from -127 on. Values of uint6 are below 64.
struct uint8 {
  uint8_t value;
};

struct uint6 {
  uint8_t value;
};

template <class T>
using Sum = std::conditional_t<sizeof(T) == 1, i32x16, f32x16>;

template <class T>
constexpr int64_t kWordValues = kWordBytes / sizeof(T);

template <class T>
constexpr int64_t words(int64_t values) {
  return (values + kWordValues<T> - 1) / kWordValues<T>;
}

template <class T>
using SumPart = std::conditional_t<sizeof(T) == 1, IntPart, FloatPart>;

#if defined(__AVX2__) && !defined(__AVX512F__)
// Looks up each byte, which must be less than 16, in the table.
static ALWAYS_INLINE __m256i look_up(const uint8_t (&table)[16], __m256i bytes) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table))), bytes);
}
#endif

static ALWAYS_INLINE WordPart splat_part(const char* p) {
  uint32_t word;
  std::memcpy(&word, p, sizeof word);
  return WordPart{} + word;
}

template <class T>
static ALWAYS_INLINE SumPart<T> multiply_add_part(WordPart a, WordPart b, SumPart<T> acc);

template <>
ALWAYS_INLINE FloatPart multiply_add_part<float>(WordPart a, WordPart b, FloatPart acc) {
  return fma_part(a, b, acc);
}

template <>
ALWAYS_INLINE FloatPart multiply_add_part<bf16>(WordPart a, WordPart b, FloatPart acc) {
#if defined(__AVX512BF16__)
  return (FloatPart)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return (FloatPart)vbfdotq_f32((float32x4_t)acc, vreinterpretq_bf16_u32((uint32x4_t)a),
                                vreinterpretq_bf16_u32((uint32x4_t)b));
#else
  return fma_part(a & 0xffff0000u, b & 0xffff0000u, fma_part(a << 16, b << 16, acc));
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Without this, compilers first add up the products of several steps, for which there are no registers.
static ALWAYS_INLINE IntPart add_product(IntPart acc, __m256i product) {
  acc += (IntPart)product;
  asm("" : "+x"(acc));
  return acc;
}
#endif

#if !defined(__AVX512VNNI__) && !defined(__ARM_FEATURE_MATMUL_INT8)
// acc + the sum of two products of 16-bit integers in each lane.
static ALWAYS_INLINE IntPart multiply_add_pairs(WordPart a, WordPart b, IntPart acc) {
#if defined(__AVX512BW__)
  return acc + (IntPart)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return add_product(acc, _mm256_madd_epi16((__m256i)a, (__m256i)b));
#else
  const IntPart low = ((IntPart)(a << 16) >> 16) * ((IntPart)(b << 16) >> 16);
  return acc + low + ((IntPart)a >> 16) * ((IntPart)b >> 16);
#endif
}
#endif

template <>
ALWAYS_INLINE IntPart multiply_add_part<int8>(WordPart a, WordPart b, IntPart acc) {
#if defined(__AVX512VNNI__)
  return (IntPart)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  return (IntPart)vusdotq_s32((int32x4_t)acc, (uint8x16_t)a, (int8x16_t)b);
#else
  // bytes 0 and 2, and bytes 1 and 3, as pairs of 16 bits; AVX2's single instruction for this saturates
  const WordPart even = (WordPart)((PairPart)(b << 8) >> 8), odd = (WordPart)((PairPart)b >> 8);
  const IntPart sum = multiply_add_pairs(a & 0x00ff00ffu, even, acc);
  return multiply_add_pairs((a >> 8) & 0x00ff00ffu, odd, sum);
#endif
}

template <>
ALWAYS_INLINE IntPart multiply_add_part<uint8>(WordPart a, WordPart b, IntPart acc) {
  return multiply_add_part<int8>(b, a, acc);
}

template <>
ALWAYS_INLINE IntPart multiply_add_part<uint6>(WordPart a, WordPart b, IntPart acc) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  // no sum of two such products saturates
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)b, (__m256i)a);
  return add_product(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#else
  return multiply_add_part<int8>(b, a, acc);
#endif
}

// Lines of memory to prefetch while computing: `lines` of them per four steps.
struct Prefetch {
  const char* next;
  int lines;
};

// The number of register parts that a tile's 32 columns take.
constexpr int kPartsOfTile = kTileVectors * kParts;

// Yields the words of consecutive tiles' columns: part p of them, `step` steps from the current position.
struct Words {
  const char* at;
  int64_t tile_bytes;

  ALWAYS_INLINE WordPart part(int step, int p) const {
    return load_part(at + p / kPartsOfTile * tile_bytes + step * kStepBytes + p % kPartsOfTile * kRegisterBytes);
  }
  ALWAYS_INLINE void advance(int steps) { at += steps * kStepBytes; }
};

template <class T, class Columns, int ROWS, int PARTS>
static ALWAYS_INLINE void dot_step(const char* const (&a)[(ROWS + 2) / 3], int64_t a_stride, const Columns& columns,
                                   int step, int first, SumPart<T> (&acc)[ROWS][PARTS]) {
  WordPart column[PARTS];
#pragma GCC unroll 16
  for (int p = 0; p < PARTS; ++p) column[p] = columns.part(step, first + p);
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
    const WordPart row = splat_part(a[r / 3] + (r % 3) * a_stride + step * kWordBytes);
#pragma GCC unroll 16
    for (int p = 0; p < PARTS; ++p) acc[r][p] = multiply_add_part<T>(row, column[p], acc[r][p]);
  }
}

// acc[r][p] += the words of row r times the columns of part first + p. Advances `columns`.
template <class T, class Columns, int ROWS, int PARTS>
static ALWAYS_INLINE void dot_parts(const char* a, int64_t a_stride, Columns& columns, int64_t steps, int first,
                                    SumPart<T> (&acc)[ROWS][PARTS], Prefetch prefetch) {
  constexpr int kUnroll = 4;
  // every third row has a pointer; the next two are reached through the addressing mode
  const char* rows[(ROWS + 2) / 3];
#pragma GCC unroll 4
  for (int g = 0; g < (ROWS + 2) / 3; ++g) rows[g] = a + 3 * g * a_stride;
  int64_t k = 0;
  for (; k + kUnroll <= steps; k += kUnroll) {
    for (int line = 0; line < prefetch.lines; ++line) __builtin_prefetch(prefetch.next + line * kLineBytes);
    prefetch.next += prefetch.lines * kLineBytes;
#pragma GCC unroll 4
    for (int u = 0; u < kUnroll; ++u) dot_step<T, Columns, ROWS, PARTS>(rows, a_stride, columns, u, first, acc);
#pragma GCC unroll 4
    for (int g = 0; g < (ROWS + 2) / 3; ++g) rows[g] += kUnroll * kWordBytes;
    columns.advance(kUnroll);
  }
  for (; k < steps; ++k, columns.advance(1)) {
    dot_step<T, Columns, ROWS, PARTS>(rows, a_stride, columns, 0, first, acc);
    for (const char*& row : rows) row += kWordBytes;
  }
}

// acc[r][v] += the words of row r times 16 columns of consecutive tiles. Strides are in bytes.
template <class T, int ROWS, int TILES>
static ALWAYS_INLINE void dot(const char* a, int64_t a_stride, const char* tile, int64_t tile_bytes, int64_t steps,
                              Sum<T> (&acc)[ROWS][TILES * kTileVectors], Prefetch prefetch = {nullptr, 0}) {
  constexpr int kAll = TILES * kPartsOfTile, kAtOnce = parts_at_once(ROWS, kAll);
  for (int first = 0; first < kAll; first += kAtOnce) {
    SumPart<T> sums[ROWS][kAtOnce];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
      std::memcpy(sums[r], reinterpret_cast<const char*>(acc[r]) + first * kRegisterBytes, sizeof sums[r]);
    Words columns{tile, tile_bytes};
    dot_parts<T, Words, ROWS, kAtOnce>(a, a_stride, columns, steps, first, sums, first ? Prefetch{nullptr, 0} : prefetch);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
      std::memcpy(reinterpret_cast<char*>(acc[r]) + first * kRegisterBytes, sums[r], sizeof sums[r]);
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
