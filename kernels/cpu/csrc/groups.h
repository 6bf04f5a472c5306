// Weights whose inputs are in groups, each with a scale for each output: four bits, eight bits, FP8 (e4m3), or MXFP4
// (e2m1). A tile of 32 columns is a sequence of groups:
//
//   scales  [column] bfloat16 or float32
//   zeros   [column] int16, where each group of an output has a zero of its own
//   codes   Int4: [step][column][4 bytes], eight values a step: the low half of byte i is value i, the high half 4 + i
//           Int8Groups: [word][column][4 bytes]
//           Fp8: [word][column][values of a word of the rows]: two where rows are bfloat16, one where they are float32
//           Mxfp4: [two values][column], a byte, whose low half is the first of the two
//
// A value is (code - zero) * scale, and zero is 8 or 128 where there are no zeros; one of Fp8 and Mxfp4 is code * scale.
// Groups are whole blocks of values, and the last one ends with the last block of the inputs.
//
// Rows of Int4 and Int8Groups come in eight bits (QuantiseOp). Codes are the unsigned side of their product, so what zeros
// add to a sum is taken away by a number for each group of a row, times the zero. Sums of a group are exact integers.
// Rows of Fp8 and Mxfp4 are as they are: codes become values of the rows' dtype, which has all of them, in registers.
// Sums of groups are scaled and added in float32, in the order of groups, whichever rows and tiles are computed beside.
#pragma once

#include <algorithm>

#include "ops.h"
#include "tile.h"

constexpr int kBlock = 32;
constexpr int kStepValues = 8;
constexpr int kFp8Block = 2;

// As many as fit the registers: two accumulators for each of a row's vectors.
#if defined(__AVX512F__)
constexpr int kMaxGroupRows = 6;
#else
constexpr int kMaxGroupRows = 2;
#endif

constexpr int64_t whole_blocks(int64_t values) { return (values + kBlock - 1) / kBlock * kBlock; }

// A row of Quantise: codes, the scale, and the groups' sums.
constexpr int64_t row_scale_at(int64_t values) { return whole_blocks(values); }
constexpr int64_t row_sums_at(int64_t values) { return row_scale_at(values) + 4; }

// How the groups of a layer lie in a tile. `values` of all groups but the last, and `num_values` of all of them.
struct GroupForm {
  int64_t values, num_values, count, header_bytes, value_bits;
  bool has_float_scales, has_zeros;

  explicit GroupForm(const LinearOp& op)
      : values(op.group),
        num_values(op.weight_kind == Weight::Fp8 ? (op.in_features + kFp8Block - 1) / kFp8Block * kFp8Block
                                                 : whole_blocks(op.in_features)),
        count((num_values + values - 1) / values),
        header_bytes(kTileColumns * ((op.float_scales ? 4 : 2) + (op.has_zeros ? 2 : 0))),
        value_bits(op.weight_kind == Weight::Int4 || op.weight_kind == Weight::Mxfp4 ? 4 : 8),
        has_float_scales(op.float_scales),
        has_zeros(op.has_zeros) {}

  int64_t tile_bytes() const { return count * header_bytes + code_bytes(num_values); }
  int64_t code_bytes(int64_t n) const { return n * kTileColumns * value_bits / 8; }
  int64_t values_of(int64_t g) const { return std::min(values, num_values - g * values); }
  int64_t bytes_of(int64_t g) const { return header_bytes + code_bytes(values_of(g)); }

  // The scales and zeros of 16 columns of a group that begins at `group`.
  ALWAYS_INLINE f32x16 scales(const char* group, int vector) const {
    return has_float_scales ? load(reinterpret_cast<const float*>(group) + vector * kLanes)
                            : load(reinterpret_cast<const bf16*>(group) + vector * kLanes);
  }
  ALWAYS_INLINE i32x16 zeros(const char* group, int vector) const {
    typedef int16_t i16x16 __attribute__((vector_size(32)));
    i16x16 narrow;
    std::memcpy(&narrow, group + header_bytes - kTileColumns * 2 + vector * sizeof narrow, sizeof narrow);
    return __builtin_convertvector(narrow, i32x16);
  }
};

// sums[r][v] += acc[r][v] * the scale of its column.
template <int ROWS, int TILES, class Acc>
static ALWAYS_INLINE void add_group(const GroupForm& form, const char* group, int64_t tile_bytes,
                                    const Acc (&acc)[ROWS][TILES * kTileVectors],
                                    f32x16 (&sums)[ROWS][TILES * kTileVectors]) {
#pragma GCC unroll 8
  for (int v = 0; v < TILES * kTileVectors; ++v) {
    const f32x16 scale = form.scales(group + (v / kTileVectors) * tile_bytes, v % kTileVectors);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
      sums[r][v] = fma(__builtin_convertvector(acc[r][v], f32x16), scale, sums[r][v]);
  }
}

// The groups that we make of other weights: of one block, with scales in bfloat16 and one zero for all. That a compiler
// knows it saves a sixth of the time of one row.
struct OurGroups {
  static bool are(const GroupForm& form) {
    return form.values == kBlock && !form.has_float_scales && !form.has_zeros;
  }
  static void assume(GroupForm& form) {
    form.values = kBlock;
    form.header_bytes = kTileColumns * 2;
    form.has_float_scales = form.has_zeros = false;
  }
};

// sums[r][v] = the row's codes times 16 columns of consecutive tiles, without the row's scale.
template <int BITS, bool IS_OURS, int ROWS, int TILES>
static ALWAYS_INLINE void dot_groups(const char* x, int64_t x_stride, const char* tile, GroupForm form,
                                     f32x16 (&sums)[ROWS][TILES * kTileVectors]) {
  constexpr int kVectors = TILES * kTileVectors, kStepCodes = kStepValues * BITS / 8 * kTileColumns;
  const int64_t tile_bytes = form.tile_bytes();
  const char* const end_of_tile = tile + tile_bytes;
  if constexpr (IS_OURS) OurGroups::assume(form);
  const int64_t group_bytes = form.header_bytes + form.values * kTileColumns * BITS / 8;
  const char* group_sums = x + row_sums_at(form.num_values);
  for (; tile < end_of_tile; group_sums += 4) {
    i32x16 acc[ROWS][kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const i32x16 times =
          form.has_zeros ? form.zeros(tile + (v / kTileVectors) * tile_bytes, v % kTileVectors) : i32x16{} + 1;
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        const i32x16 start = (i32x16)splat_word(group_sums + r * x_stride);
        acc[r][v] = form.has_zeros ? start * times : start;
      }
    }
    const char* codes = tile + form.header_bytes;
    const char* end = IS_OURS ? tile + group_bytes : std::min(tile + group_bytes, end_of_tile);
    for (; codes < end; codes += kBlock / kStepValues * kStepCodes, x += kBlock) {
#pragma GCC unroll 4
      for (int s = 0; s < kBlock / kStepValues; ++s) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          const char* at = codes + s * kStepCodes + (v / kTileVectors) * tile_bytes + (v % kTileVectors) * 64;
          u32x16 low = load_words(at), high;
          if constexpr (BITS == 4) {
            high = (low >> 4) & 0x0f0f0f0fu;
            low &= 0x0f0f0f0fu;
          } else {
            high = load_words(at + kStepBytes);
          }
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; ++r) {
            const char* of_row = x + r * x_stride + s * kStepValues;
            acc[r][v] = multiply_add<int8>(low, splat_word(of_row), acc[r][v]);
            acc[r][v] = multiply_add<int8>(high, splat_word(of_row + kWordBytes), acc[r][v]);
          }
        }
      }
    }
    add_group<ROWS, TILES>(form, tile, tile_bytes, acc, sums);
    tile = end;
  }
}

// The float32 of each lane's lowest byte, of which no other bits may be set.
static ALWAYS_INLINE u32x16 fp8_to_float(u32x16 code) {
  const u32x16 magnitude = code & 0x7f;
  // Below 8 there is no exponent: the value is so many times 2^-9.
  const u32x16 small = (u32x16)(__builtin_convertvector((i32x16)magnitude, f32x16) * splat(0x1p-9f));
  const u32x16 is_small = (u32x16)(magnitude < 8);
  return (code & 0x80) << 24 | (is_small & small) | (~is_small & ((magnitude << 20) + (120u << 23)));
}

// A word of T for each of 16 columns.
template <class T>
static ALWAYS_INLINE u32x16 decode_fp8(const char* codes);

template <>
ALWAYS_INLINE u32x16 decode_fp8<float>(const char* codes) {
  u8x16 bytes;
  std::memcpy(&bytes, codes, sizeof bytes);
  return fp8_to_float(__builtin_convertvector(bytes, u32x16));
}

template <>
ALWAYS_INLINE u32x16 decode_fp8<bf16>(const char* codes) {
#if defined(__AVX512BW__)
  // The multiples of 2^-9, from 0 to 7, in bfloat16.
  const __m512i small = _mm512_set4_epi64(0, 0, 0x3c603c403c203c00, 0x3bc03b803b000000);
  __m256i bytes;
  std::memcpy(&bytes, codes, sizeof bytes);
  const __m512i wide = _mm512_cvtepu8_epi16(bytes), magnitude = _mm512_and_si512(wide, _mm512_set1_epi16(0x7f));
  const __m512i large = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
  const __mmask32 is_small = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
  const __m512i value = _mm512_mask_permutexvar_epi16(large, is_small, magnitude, small);
  // value | (code << 8 & sign)
  return (u32x16)_mm512_ternarylogic_epi32(value, _mm512_slli_epi16(wide, 8), _mm512_set1_epi16(-0x8000), 0xf8);
#else
  u16x16 pairs;
  std::memcpy(&pairs, codes, sizeof pairs);
  const u32x16 both = __builtin_convertvector(pairs, u32x16);
  return fp8_to_float(both & 0xff) >> 16 | fp8_to_float(both >> 8);
#endif
}

// The float32 of each lane's lowest four bits, of which no other bits may be set.
static ALWAYS_INLINE u32x16 e2m1_to_float(u32x16 code) {
  const u32x16 magnitude = code & 7;
  // Below 2 there is no exponent: the value is 0 or 0.5.
  const u32x16 is_small = (u32x16)(magnitude < 2);
  return (code & 8) << 28 | (is_small & (magnitude * (126u << 23))) | (~is_small & ((magnitude << 22) + (126u << 23)));
}

// A word of T for each of 16 columns, whose bytes are at `codes`: with float the first or the second of two values.
template <class T>
static ALWAYS_INLINE u32x16 decode_mxfp4(const char* codes, int which);

template <>
ALWAYS_INLINE u32x16 decode_mxfp4<float>(const char* codes, int which) {
  u8x16 bytes;
  std::memcpy(&bytes, codes, sizeof bytes);
  const u32x16 code = __builtin_convertvector(bytes, u32x16) >> (4 * which);
#if defined(__AVX512F__)
  const __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f,
                                       -3.0f, -4.0f, -6.0f);
  // The instruction looks at four bits.
  return (u32x16)_mm512_permutexvar_ps((__m512i)code, values);
#else
  return e2m1_to_float(code & 15);
#endif
}

template <>
ALWAYS_INLINE u32x16 decode_mxfp4<bf16>(const char* codes, int) {
  u8x16 bytes;
  std::memcpy(&bytes, codes, sizeof bytes);
  const u32x16 both = __builtin_convertvector(bytes, u32x16);
#if defined(__AVX512BW__)
  // Of 6, 4, 3, 2 and of 1.5, 1, 0.5, 0, and of their negatives. The instruction looks at five bits of each half of a
  // word, of which the lower half has one too many: the table is there twice.
  const int64_t large = 0x40c0408040404000, small = 0x3fc03f803f000000, sign = 0x8000800080008000;
  const __m512i values =
      _mm512_setr_epi64(small, large, small | sign, large | sign, small, large, small | sign, large | sign);
  return (u32x16)_mm512_permutexvar_epi16((__m512i)(both | both << 12), values);
#else
  return e2m1_to_float(both & 15) >> 16 | e2m1_to_float(both >> 4);
#endif
}

// Codes are decoded two values of each column at a time, which are one word of bfloat16 and two of float32.
constexpr int kPair = 2;

template <class T>
constexpr int kPairWords = kPair / int(kWordValues<T>);

template <Weight KIND>
constexpr int64_t kPairBytes = kTileColumns * (KIND == Weight::Mxfp4 ? 1 : kPair);

// Of the two values at `pair`: word number `word` of 16 columns.
template <Weight KIND, class T>
static ALWAYS_INLINE u32x16 decode(const char* pair, int word, int vector) {
  if constexpr (KIND == Weight::Mxfp4) return decode_mxfp4<T>(pair + vector * kLanes, word);
  return decode_fp8<T>(pair + (word * kTileColumns + vector * kLanes) * kWordValues<T>);
}

// How many bytes of codes are fetched before they are decoded, where nothing else hides what memory takes.
constexpr int64_t kFetchedAhead = 4096;

// Writes a tile's words where a tile as rows has them.
template <Weight KIND, class T>
static void decode_tile(const char* tile, const GroupForm& form, char* words) {
  for (int64_t g = 0; g < form.count; ++g) {
    const char* end = tile + form.bytes_of(g);
    for (tile += form.header_bytes; tile < end; tile += kPairBytes<KIND>) {
      __builtin_prefetch(tile + kFetchedAhead);
      for (int w = 0; w < kPairWords<T>; ++w)
        for (int v = 0; v < kTileVectors; ++v, words += sizeof(u32x16)) {
          const u32x16 decoded = decode<KIND, T>(tile, w, v);
          std::memcpy(words, &decoded, sizeof decoded);
        }
    }
  }
}

// acc[r][v] = the row times 16 columns of consecutive tiles, whose codes begin at `codes`: what `dot` does with words.
template <Weight KIND, class T, int ROWS, int TILES>
static ALWAYS_INLINE void dot_codes(const char* x, int64_t x_stride, const char* codes, int64_t tile_bytes,
                                    int64_t pairs, f32x16 (&acc)[ROWS][TILES * kTileVectors]) {
  for (int64_t p = 0; p < pairs; ++p, codes += kPairBytes<KIND>, x += kPairWords<T> * kWordBytes) {
#pragma GCC unroll 8
    for (int v = 0; v < TILES * kTileVectors; ++v) {
      const char* pair = codes + (v / kTileVectors) * tile_bytes;
#pragma GCC unroll 2
      for (int w = 0; w < kPairWords<T>; ++w) {
        const u32x16 word = decode<KIND, T>(pair, w, v % kTileVectors);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
          acc[r][v] = multiply_add<T>(splat_word(x + r * x_stride + w * kWordBytes), word, acc[r][v]);
      }
    }
  }
}

// sums[r][v] = the row times 16 columns of consecutive tiles. Where IS_DECODED, the words of the one tile are at `words`.
template <Weight KIND, class T, bool IS_DECODED, int ROWS, int TILES>
static ALWAYS_INLINE void dot_floats(const char* x, int64_t x_stride, const char* tile, const char* words,
                                     const GroupForm& form, f32x16 (&sums)[ROWS][TILES * kTileVectors]) {
  static_assert(TILES == 1 || !IS_DECODED);
  const int64_t tile_bytes = form.tile_bytes();
  for (int64_t g = 0; g < form.count; ++g) {
    f32x16 acc[ROWS][TILES * kTileVectors] = {};
    const int64_t pairs = form.values_of(g) / kPair, steps = pairs * kPairWords<T>;
    if constexpr (IS_DECODED) {
      dot<T, ROWS, TILES>(x, x_stride, words, 0, steps, acc);
      words += steps * kStepBytes;
    } else {
      dot_codes<KIND, T, ROWS, TILES>(x, x_stride, tile + form.header_bytes, tile_bytes, pairs, acc);
    }
    add_group<ROWS, TILES>(form, tile, tile_bytes, acc, sums);
    x += steps * kWordBytes;
    tile += form.bytes_of(g);
  }
}
