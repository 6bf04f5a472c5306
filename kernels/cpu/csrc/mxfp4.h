// Decodes MXFP4 (e2m1) into the rows' dtype, float32 or bfloat16. Both represent all of its values.
//
// A byte has two consecutive values of a column, the first in its low half: one word of bfloat16, or two of float32.
#pragma once

#include "tile.h"

// A step has as many codes per column as a word has values. With float32, every second step begins in the middle of a
// byte.
template <class T>
constexpr int64_t kMxfp4StepBytes = kTileColumns * kWordValues<T> / 2;

// The float32 value of each lane's lowest four bits. No other bits may be set.
static ALWAYS_INLINE WordPart e2m1_to_float(WordPart code) {
  const WordPart magnitude = code & 7;
  // Codes below 2 have no exponent: the value is 0 or 0.5.
  const WordPart is_small = (WordPart)((IntPart)magnitude < 2);
  return (code & 8) << 28 | (is_small & (magnitude * (126u << 23))) |
         (~is_small & ((magnitude << 22) + (126u << 23)));
}

// Returns the words of a part of a tile's columns, with bytes at `codes`. With float32, `which` chooses the first or
// the second value.
template <class T>
static ALWAYS_INLINE WordPart decode_mxfp4(const char* codes, int part, int which);

template <>
ALWAYS_INLINE WordPart decode_mxfp4<float>(const char* codes, int part, int which) {
  const WordPart code = bytes_part(codes, part) >> (4 * which);
#if defined(__AVX512F__)
  const __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f,
                                       -3.0f, -4.0f, -6.0f);
  // the instruction reads four bits
  return (WordPart)_mm512_permutexvar_ps((__m512i)code, values);
#elif defined(__AVX2__)
  const __m256 magnitudes = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
  // the instruction reads three bits
  return (WordPart)_mm256_permutevar8x32_ps(magnitudes, (__m256i)code) | (code & 8) << 28;
#else
  return e2m1_to_float(code & 15);
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// The bytes of each code's bfloat16.
alignas(16) constexpr uint8_t kMxfp4Low[16] = {0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0,
                                               0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0};
alignas(16) constexpr uint8_t kMxfp4High[16] = {0,    0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40,
                                                0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0};
#endif

template <>
ALWAYS_INLINE WordPart decode_mxfp4<bf16>(const char* codes, int part, int) {
#if defined(__AVX512BW__)
  const WordPart both = bytes_part(codes, part);
  // 6, 4, 3, 2; 1.5, 1, 0.5, 0; and their negatives. The instruction reads five bits of each half of a word, and the
  // lower half has one bit too many, so the table is repeated.
  const int64_t large = 0x40c0408040404000, small = 0x3fc03f803f000000, sign = 0x8000800080008000;
  const __m512i values =
      _mm512_setr_epi64(small, large, small | sign, large | sign, small, large, small | sign, large | sign);
  return (WordPart)_mm512_permutexvar_epi16((__m512i)(both | both << 12), values);
#elif defined(__AVX2__)
  // All bytes of a step are looked up at once, for all parts. They are permuted so that interleaving restores the
  // order: the first four of every eight are in the first half of the register.
  const __m256i in_order = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
  const __m256i all = _mm256_permutevar8x32_epi32(in_order, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
  const __m256i first = _mm256_and_si256(all, _mm256_set1_epi8(15));
  const __m256i second = _mm256_and_si256(_mm256_srli_epi16(all, 4), _mm256_set1_epi8(15));
  const auto halves = [part](__m256i low, __m256i high) {
    return part / 2 ? _mm256_unpackhi_epi8(low, high) : _mm256_unpacklo_epi8(low, high);
  };
  const __m256i of_first = halves(look_up(kMxfp4Low, first), look_up(kMxfp4High, first));
  const __m256i of_second = halves(look_up(kMxfp4Low, second), look_up(kMxfp4High, second));
  return (WordPart)(part % 2 ? _mm256_unpackhi_epi16(of_first, of_second) : _mm256_unpacklo_epi16(of_first, of_second));
#else
  const WordPart both = bytes_part(codes, part);
  return e2m1_to_float(both & 15) >> 16 | e2m1_to_float(both >> 4);
#endif
}
