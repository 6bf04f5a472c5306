// A tile of keys and values from 8-bit rows (kv_rows.h), in the layout of key_tile.h, with decoded codes as values.
// Scales are not applied here: they multiply scores and weights.
//
// Every code is a bfloat16 number. With VBMI, 64 of them are looked up at once: their low bytes and their high bytes,
// each in a table for the 128 magnitudes. K's codes are transposed before that, four to a word, which is half the work
// of transposing numbers.
#pragma once

#include <type_traits>

#include "key_tile.h"

#if defined(__AVX512VBMI__)
struct CodeTable {
  // By magnitude, in two vectors of 64.
  alignas(64) uint8_t low[128], high[128];
};

inline CodeTable make_code_table(KvCoding coding) {
  CodeTable table;
  for (int first = 0; first < 128; first += kLanes) {
    u8x16 codes;
    for (int i = 0; i < kLanes; ++i) codes[i] = uint8_t(first + i);
    const u16x16 bits = round_to_bf16(coding == KvCoding::Int8 ? from_int8(codes) : from_fp8(codes));
    for (int i = 0; i < kLanes; ++i) {
      table.low[first + i] = uint8_t(bits[i] & 0xff);
      table.high[first + i] = uint8_t(bits[i] >> 8);
    }
  }
  return table;
}

inline const CodeTable& code_table(KvCoding coding) {
  static const CodeTable int8 = make_code_table(KvCoding::Int8), fp8 = make_code_table(KvCoding::Fp8);
  return coding == KvCoding::Int8 ? int8 : fp8;
}

// For each byte of the result, the index of its source among 64 low bytes (0 .. 63) and 64 high bytes (64 .. 127).
struct ByteOrder {
  alignas(64) uint8_t at[64];
};

// From each word of four codes, the numbers of two: the one at `first` and the next one.
constexpr ByteOrder pairs_of_words(int first) {
  ByteOrder order{};
  for (int word = 0; word < 16; ++word)
    for (int i = 0; i < 4; ++i) order.at[4 * word + i] = uint8_t(4 * word + first + i / 2 + 64 * (i % 2));
  return order;
}

// From 32 codes and 32 others, the numbers of 16 from `first` on and of their counterparts, alternating.
constexpr ByteOrder pairs_of_rows(int first) {
  ByteOrder order{};
  for (int word = 0; word < 16; ++word)
    for (int i = 0; i < 4; ++i) order.at[4 * word + i] = uint8_t(first + word + 32 * (i / 2) + 64 * (i % 2));
  return order;
}

constexpr ByteOrder kWordPairs[2] = {pairs_of_words(0), pairs_of_words(2)};
constexpr ByteOrder kRowPairs[2] = {pairs_of_rows(0), pairs_of_rows(16)};

// Looks up 64 codes, and stores their numbers in these orders, `stride` bytes apart.
template <KvCoding kCoding>
static ALWAYS_INLINE void store_numbers(__m512i codes, const CodeTable& table, const ByteOrder (&orders)[2], char* to,
                                        int64_t stride) {
  const __m512i size = kCoding == KvCoding::Int8 ? _mm512_abs_epi8(codes) : codes;
  const auto half = [](const uint8_t* bytes) { return _mm512_load_si512(bytes); };
  const __m512i low = _mm512_permutex2var_epi8(half(table.low), size, half(table.low + 64));
  const __m512i unsigned_high = _mm512_permutex2var_epi8(half(table.high), size, half(table.high + 64));
  // high | (codes & sign bits)
  const __m512i high = _mm512_ternarylogic_epi32(unsigned_high, codes, _mm512_set1_epi8(char(0x80)), 0xf8);
  for (int i = 0; i < 2; ++i)
    _mm512_storeu_si512(to + i * stride, _mm512_permutex2var_epi8(low, half(orders[i].at), high));
}

// Like pack_keys.
template <KvCoding kCoding>
inline void pack_coded_keys(const KeyRows& rows, int64_t head_dim, char* tiles) {
  const CodeTable& table = code_table(kCoding);
  const auto* keys = reinterpret_cast<const uint32_t* const*>(rows.keys);
  const int64_t code_words = head_dim / kWordBytes, tile_bytes = words<bf16>(head_dim) * kStepBytes;
  for (int first = 0; first < rows.count; first += kLanes) {
    char* tile = tiles + first / kTileColumns * tile_bytes + first % kTileColumns * kWordBytes;
    for (int64_t word = 0; word < code_words; word += kLanes) {
      const int count = int(std::min<int64_t>(kLanes, code_words - word));
      __m512i columns[kLanes];
      transpose16(keys + first, word, count, columns);
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j)
        if (j < count)
          store_numbers<kCoding>(columns[j], table, kWordPairs, tile + 2 * (word + j) * kStepBytes, kStepBytes);
    }
  }
}

// Like pack_values.
template <KvCoding kCoding>
inline void pack_coded_values(const KeyRows& rows, int64_t head_dim, char* tiles) {
  const CodeTable& table = code_table(kCoding);
  const int num_keys = packed_keys<bf16>(rows.count);
  for (int64_t column = 0; column < head_dim; column += kTileColumns, tiles += words<bf16>(kTileKeys) * kStepBytes) {
    const int64_t count = std::min<int64_t>(kTileColumns, head_dim - column);
    const __mmask32 valid = count == kTileColumns ? ~0u : (1u << count) - 1;
    char* to = tiles;
    for (int key = 0; key < num_keys; key += 2, to += kStepBytes) {
      const __m256i even = _mm256_maskz_loadu_epi8(valid, rows.values[key] + column);
      const __m256i odd = _mm256_maskz_loadu_epi8(valid, rows.values[key + 1] + column);
      const __m512i codes = _mm512_inserti64x4(_mm512_castsi256_si512(even), odd, 1);
      store_numbers<kCoding>(codes, table, kRowPairs, to, kLineBytes);
    }
  }
}

template <class T>
constexpr bool kLooksUpCodes = std::is_same_v<T, bf16>;
#else
template <class T>
constexpr bool kLooksUpCodes = false;
#endif

inline void pack_coded_keys([[maybe_unused]] KvCoding coding, [[maybe_unused]] const KeyRows& rows,
                            [[maybe_unused]] int64_t head_dim, [[maybe_unused]] char* tiles) {
#if defined(__AVX512VBMI__)
  if (coding == KvCoding::Int8)
    pack_coded_keys<KvCoding::Int8>(rows, head_dim, tiles);
  else
    pack_coded_keys<KvCoding::Fp8>(rows, head_dim, tiles);
#endif
}

inline void pack_coded_values([[maybe_unused]] KvCoding coding, [[maybe_unused]] const KeyRows& rows,
                              [[maybe_unused]] int64_t head_dim, [[maybe_unused]] char* tiles) {
#if defined(__AVX512VBMI__)
  if (coding == KvCoding::Int8)
    pack_coded_values<KvCoding::Int8>(rows, head_dim, tiles);
  else
    pack_coded_values<KvCoding::Fp8>(rows, head_dim, tiles);
#endif
}

// Decodes the rows into `numbers`, one key after the other, and makes `rows` point there.
template <class T>
inline void read_rows(KvCoding coding, int count, int64_t head_dim, const char** rows, T* numbers) {
  for (int i = 0; i < count; ++i, numbers += head_dim) {
    read_codes(coding, rows[i], head_dim, numbers);
    rows[i] = reinterpret_cast<const char*>(numbers);
  }
}

// The scales of a tile's rows, and zeros for keys from `count` on.
inline void read_scales(const char* const* rows, int count, int64_t head_dim, float* scales) {
  for (int i = 0; i < count; ++i) scales[i] = scale_of(rows[i], head_dim);
  std::fill(scales + count, scales + kTileKeys, 0.0f);
}
