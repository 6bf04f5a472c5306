// Decodes FP8 (e4m3) into the rows' dtype, float32 or bfloat16. Both represent all of its values.
#pragma once

#include "tile.h"

// A step has as many codes per column as a word has values.
template <class T>
constexpr int64_t kFp8StepBytes = kTileColumns * kWordValues<T>;

// Returns the words of a part of a tile's columns, for the step with codes at `codes`.
template <class T>
static ALWAYS_INLINE WordPart decode_fp8(const char* codes, int part);

template <>
ALWAYS_INLINE WordPart decode_fp8<float>(const char* codes, int part) {
  const WordPart code = bytes_part(codes, part), magnitude = code & 0x7f;
  // Codes below 8 have no exponent: the value is the code times 2^-9.
  const WordPart small = (WordPart)(__builtin_convertvector((IntPart)magnitude, FloatPart) * 0x1p-9f);
  const WordPart is_small = (WordPart)((IntPart)magnitude < 8);
  return (code & 0x80) << 24 | (is_small & small) | (~is_small & ((magnitude << 20) + (120u << 23)));
}

#if defined(__AVX512BW__)
// Magnitudes below 8 in bfloat16. From 8 on, a magnitude is its bits with another exponent.
alignas(16) constexpr uint16_t kSmallFp8[8] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
constexpr int kFp8Exponent = 120 << 7;
#endif

#if defined(__AVX512VBMI__)
struct Fp8Tables {
  // The bytes of each magnitude's value.
  alignas(64) uint8_t low[128], high[128];
  // For each byte of a part, the index of its source among 64 low bytes (0 .. 63) and 64 high bytes (64 .. 127).
  alignas(64) uint8_t bytes[2][64];

  constexpr Fp8Tables() : low{}, high{}, bytes{} {
    for (int i = 0; i < 128; ++i) {
      const int value = i < 8 ? kSmallFp8[i] : (i << 4) + kFp8Exponent;
      low[i] = uint8_t(value & 0xff);
      high[i] = uint8_t(value >> 8);
    }
    for (int i = 0; i < 128; ++i) bytes[i / 64][i % 64] = uint8_t(i / 2 + 64 * (i % 2));
  }
};

inline constexpr Fp8Tables kFp8Tables;

template <>
ALWAYS_INLINE WordPart decode_fp8<bf16>(const char* codes, int part) {
  const auto from = [](const uint8_t* bytes) { return _mm512_load_si512(bytes); };
  // All 64 codes of a step are looked up at once, for both parts.
  const __m512i all = _mm512_loadu_si512(codes);
  const __m512i low = _mm512_permutex2var_epi8(from(kFp8Tables.low), all, from(kFp8Tables.low + 64));
  const __m512i magnitude = _mm512_permutex2var_epi8(from(kFp8Tables.high), all, from(kFp8Tables.high + 64));
  // magnitude | (all & sign bits)
  const __m512i high = _mm512_ternarylogic_epi32(magnitude, all, _mm512_set1_epi8(char(0x80)), 0xf8);
  return (WordPart)_mm512_permutex2var_epi8(low, from(kFp8Tables.bytes[part]), high);
}
#elif defined(__AVX512BW__)
template <>
ALWAYS_INLINE WordPart decode_fp8<bf16>(const char* codes, int part) {
  __m256i bytes;
  std::memcpy(&bytes, codes + part * sizeof bytes, sizeof bytes);
  const __m512i small = _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kSmallFp8)));
  const __m512i wide = _mm512_cvtepu8_epi16(bytes), magnitude = _mm512_and_si512(wide, _mm512_set1_epi16(0x7f));
  const __m512i large = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(kFp8Exponent));
  const __mmask32 is_small = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
  const __m512i value = _mm512_mask_permutexvar_epi16(large, is_small, magnitude, small);
  // value | (code << 8 & sign)
  return (WordPart)_mm512_ternarylogic_epi32(value, _mm512_slli_epi16(wide, 8), _mm512_set1_epi16(-0x8000), 0xf8);
}
#elif defined(__AVX2__)
// The bytes of magnitudes below 16. From 16 on, the high byte is 60 more than the magnitude's high four bits, and the
// low byte begins with its low four bits.
alignas(16) constexpr uint8_t kSmallFp8Low[16] = {0,    0,    0x80, 0xc0, 0,    0x20, 0x40, 0x60,
                                                  0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0};
alignas(16) constexpr uint8_t kSmallFp8High[16] = {0,    0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c,
                                                   0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c};

template <>
ALWAYS_INLINE WordPart decode_fp8<bf16>(const char* codes, int part) {
  const auto byte = [](int value) { return _mm256_set1_epi8(char(value)); };
  // The codes of two parts, ordered so that each part is one half of the bytes that are interleaved at the end.
  const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes) + part / 2);
  const __m256i all = _mm256_permute4x64_epi64(both, 0xd8);
  const __m256i first = _mm256_and_si256(_mm256_srli_epi16(all, 4), byte(7)), last = _mm256_and_si256(all, byte(15));
  const __m256i is_small = _mm256_cmpeq_epi8(first, byte(0));
  const __m256i low = _mm256_blendv_epi8(_mm256_slli_epi16(last, 4), look_up(kSmallFp8Low, last), is_small);
  const __m256i magnitude =
      _mm256_blendv_epi8(_mm256_add_epi8(first, byte(60)), look_up(kSmallFp8High, last), is_small);
  const __m256i high = _mm256_or_si256(magnitude, _mm256_and_si256(all, byte(0x80)));
  return (WordPart)(part % 2 ? _mm256_unpackhi_epi8(low, high) : _mm256_unpacklo_epi8(low, high));
}
#else
static ALWAYS_INLINE PairPart least(PairPart a, PairPart b) { return a < b ? a : b; }

template <>
ALWAYS_INLINE WordPart decode_fp8<bf16>(const char* codes, int part) {
  typedef int8_t Codes __attribute__((vector_size(kRegisterBytes / sizeof(bf16))));
  Codes bytes;
  std::memcpy(&bytes, codes + part * sizeof bytes, sizeof bytes);
  const PairPart code = __builtin_convertvector(bytes, PairPart), magnitude = code & 0x7f;
  // The bits of magnitude 1 are on the first of four lines, those of 2 and 3 on the second, those of 4 to 7 on the
  // third, and all others on the last. Each line has half the slope of the one before, so their minimum is the value.
  const auto line = [&](int shift) { return (magnitude << shift) + int16_t((124 - shift) << 7); };
  const PairPart below_4 = least(line(7), line(6)), value = least(below_4, least(line(5), line(4)));
  return (WordPart)((code & int16_t(-0x8000)) | (value & (PairPart)(magnitude != 0)));
}
#endif
