// 16 x 16 transposition of four-byte words.
#pragma once

#include "vec.h"

#if defined(__AVX512F__)
// columns[j][i] = rows[i][offset + j] for j < count (<= 16); only `count` words of a row are read.
static ALWAYS_INLINE void transpose16(const uint32_t* const* rows, int64_t offset, int count, __m512i (&columns)[16]) {
  const __mmask16 valid = __mmask16((1u << count) - 1);
  __m512i a[16];
  __m512i(&b)[16] = columns;
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = _mm512_maskz_loadu_epi32(valid, rows[i] + offset);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
  }
  // a[4g + c]: column c of each of the four 128-bit lanes, of rows 4g .. 4g + 3
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    a[4 * g + 0] = _mm512_unpacklo_epi64(b[4 * g], b[4 * g + 2]);
    a[4 * g + 1] = _mm512_unpackhi_epi64(b[4 * g], b[4 * g + 2]);
    a[4 * g + 2] = _mm512_unpacklo_epi64(b[4 * g + 1], b[4 * g + 3]);
    a[4 * g + 3] = _mm512_unpackhi_epi64(b[4 * g + 1], b[4 * g + 3]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i even_low = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
    const __m512i even_high = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
    const __m512i odd_high = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
    b[c] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
    b[8 + c] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
    b[4 + c] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    b[12 + c] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
  }
}
#endif

#if !defined(__AVX512F__)
typedef uint32_t u32x4 __attribute__((vector_size(16)));

// Transposes 4 x 4 words: out[j * out_stride + i] = rows[i][offset + j].
static ALWAYS_INLINE void transpose4(const uint32_t* const* rows, int64_t offset, uint32_t* out, int64_t out_stride) {
  u32x4 a[4];
  for (int i = 0; i < 4; ++i) std::memcpy(&a[i], rows[i] + offset, sizeof a[i]);
  const u32x4 low02 = __builtin_shufflevector(a[0], a[2], 0, 4, 1, 5);
  const u32x4 high02 = __builtin_shufflevector(a[0], a[2], 2, 6, 3, 7);
  const u32x4 low13 = __builtin_shufflevector(a[1], a[3], 0, 4, 1, 5);
  const u32x4 high13 = __builtin_shufflevector(a[1], a[3], 2, 6, 3, 7);
  const u32x4 columns[4] = {
      __builtin_shufflevector(low02, low13, 0, 4, 1, 5), __builtin_shufflevector(low02, low13, 2, 6, 3, 7),
      __builtin_shufflevector(high02, high13, 0, 4, 1, 5), __builtin_shufflevector(high02, high13, 2, 6, 3, 7)};
  for (int j = 0; j < 4; ++j) std::memcpy(out + j * out_stride, &columns[j], sizeof columns[j]);
}
#endif

// out[j * out_stride + i] = rows[i][offset + j] for i < 16, j < count (<= 16); only `count` words of a row are read.
static ALWAYS_INLINE void transpose16(const uint32_t* const* rows, int64_t offset, int count, uint32_t* out,
                                      int64_t out_stride) {
#if defined(__AVX512F__)
  __m512i columns[16];
  transpose16(rows, offset, count, columns);
#pragma GCC unroll 16
  for (int j = 0; j < 16; ++j)
    if (j < count) _mm512_storeu_si512(out + j * out_stride, columns[j]);
#else
  int j = 0;
  for (; j + 4 <= count; j += 4)
    for (int i = 0; i < 16; i += 4) transpose4(rows + i, offset + j, out + j * out_stride + i, out_stride);
  for (; j < count; ++j)
    for (int i = 0; i < 16; ++i) out[j * out_stride + i] = rows[i][offset + j];
#endif
}
