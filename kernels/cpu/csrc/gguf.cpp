#include "gguf.h"

#include <algorithm>

#include "scratch.h"

namespace {

constexpr int kMost = 6;
constexpr int64_t kScaleBytes = kTileColumns * sizeof(float);
// Bytes prefetched ahead of those that are decoded.
constexpr int64_t kAhead = 4096;

// The values of the two types with a table, and 128.
alignas(16) constexpr uint8_t kTable[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

// Float16 to float32, without infinities: packing refuses them.
ALWAYS_INLINE FloatPart floats_part(const char* halves, int part) {
#if defined(__AVX512F__)
  return (FloatPart)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves) + part));
#elif defined(__AVX2__)
  return (FloatPart)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves) + part));
#elif defined(__aarch64__)
  return (FloatPart)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(reinterpret_cast<const uint8_t*>(halves) + part * 8)));
#else
  const WordPart half = halves_part(halves, part), magnitude = (half & 0x7fff) << 13;
  return (FloatPart)((WordPart)((FloatPart)magnitude * 0x1p112f) | (half & 0x8000) << 16);
#endif
}

ALWAYS_INLINE WordPart looked_up(WordPart codes) {
#if defined(__AVX512BW__)
  const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(kTable));
  return (WordPart)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)codes);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return (WordPart)look_up(kTable, (__m256i)codes);
#elif defined(__aarch64__)
  return (WordPart)vqtbl1q_u8(vld1q_u8(kTable), (uint8x16_t)codes);
#else
  uint8_t bytes[kRegisterBytes];
  std::memcpy(bytes, &codes, sizeof bytes);
  for (uint8_t& byte : bytes) byte = kTable[byte];
  return load_part(reinterpret_cast<const char*>(bytes));
#endif
}

// A piece of a tile in the form that is multiplied.
struct Piece {
  const char* codes;
  const char *scales, *minima;
};

// Memory for the decoded values of a tile, or of one piece of it.
struct Decoded {
  char *codes, *scales, *minima;
};

// Reads the scales and minima of a piece.
void decode_scales(const GgufForm& form, const char* piece, int64_t values, const Decoded& to) {
  const int64_t num_blocks = values / form.block, num_groups = values / form.group;
  const char* minima = piece + num_blocks * kTileColumns * 2;
  const char* integers = minima + (form.has_min ? num_blocks * kTileColumns * 2 : 0);
  const bool halves = form.has_min && form.scale_bytes == 1;
  for (int64_t g = 0; g < num_groups; ++g) {
    const int64_t block = g * form.group / form.block * kTileColumns * 2;
    const char* of_group = integers + g * kTileColumns;
    for (int p = 0; p < kPartsOfTile; ++p) {
      const int64_t at = g * kScaleBytes + p * kRegisterBytes;
      FloatPart scale = floats_part(piece + block, p);
      WordPart byte = {};
      if (form.scale_bytes) {
        byte = bytes_part(of_group, p);
        const IntPart integer = halves ? (IntPart)(byte & 15) : (IntPart)(byte << 24) >> 24;
        scale *= __builtin_convertvector(integer, FloatPart);
      }
      std::memcpy(to.scales + at, &scale, sizeof scale);
      if (!form.has_min) continue;
      FloatPart minimum = floats_part(minima + block, p);
      if (form.scale_bytes) {
        if (!halves) byte = bytes_part(of_group + num_groups * kTileColumns, p);
        minimum *= __builtin_convertvector((IntPart)(halves ? byte >> 4 : byte), FloatPart);
      }
      std::memcpy(to.minima + at, &minimum, sizeof minimum);
    }
  }
}

// Bits of `step`'s codes, from a plane of BITS a code.
template <int BITS>
ALWAYS_INLINE WordPart plane_part(const char* plane, int step, int p) {
  constexpr int kSteps = 8 / BITS;
  constexpr uint32_t kMask = ((1u << BITS) - 1) * 0x01010101u;
  return load_part(plane + step / kSteps * kStepBytes + p * kRegisterBytes) >> (step % kSteps * BITS) & kMask;
}

template <int LOW, int HIGH, bool HAS_TABLE>
void decode_codes(const char* low, const char* high, int64_t values, char* to) {
  // as many as a word of high bits has
  constexpr int kSteps = 8;
  for (int64_t done = 0; done < values; done += kSteps * kWordValues<uint8>) {
    for (int line = 0; line < kSteps * kStepBytes * LOW / 8; line += kLineBytes) __builtin_prefetch(low + kAhead + line);
    for (int p = 0; p < kPartsOfTile; ++p) {
#pragma GCC unroll 8
      for (int step = 0; step < kSteps; ++step) {
        WordPart word = plane_part<LOW>(low, step, p);
        if constexpr (HIGH > 0) word |= plane_part<HIGH>(high, step, p) << LOW;
        if constexpr (HAS_TABLE) word = looked_up(word);
        std::memcpy(to + step * kStepBytes + p * kRegisterBytes, &word, sizeof word);
      }
    }
    to += kSteps * kStepBytes;
    low += kStepBytes * LOW;
    high += kStepBytes * HIGH;
  }
}

Piece decode(const GgufForm& form, const char* piece, int64_t values, const Decoded& to) {
  decode_scales(form, piece, values, to);
  const char *low = piece + form.header_bytes(values), *high = low + form.low_bytes(values);
  switch (form.low_bits * 10 + form.high_bits) {
    case 20:
      decode_codes<2, 0, false>(low, high, values, to.codes);
      break;
    case 21:
      decode_codes<2, 1, false>(low, high, values, to.codes);
      break;
    case 40:
      form.has_table ? decode_codes<4, 0, true>(low, high, values, to.codes)
                     : decode_codes<4, 0, false>(low, high, values, to.codes);
      break;
    case 41:
      decode_codes<4, 1, false>(low, high, values, to.codes);
      break;
    case 42:
      decode_codes<4, 2, false>(low, high, values, to.codes);
      break;
    default:
      return {low, to.scales, to.minima};
  }
  return {to.codes, to.scales, to.minima};
}

// Some rows, from a piece on.
struct PieceRows {
  const char *codes, *scales, *sums;
  int64_t stride;
};

// The sum of the codes of a row's group, in all lanes.
template <int GROUP>
ALWAYS_INLINE IntPart sum_of_group(const char* sums, int64_t g) {
  if constexpr (GROUP == kSumValues) return (IntPart)splat_part(sums + g * 4);
  int32_t halves[2];
  std::memcpy(halves, sums + g * 8, sizeof halves);
  return IntPart{} + (halves[0] + halves[1]);
}

// Adds a piece's groups to sums[r][v].
template <class T, int GROUP, bool HAS_MIN, int ROWS>
void dot_piece(const PieceRows& x, const Piece& piece, int zero, int64_t values, f32x16 (*sums)[kTileVectors]) {
  constexpr int kAtOnce = parts_at_once(ROWS, kPartsOfTile);
  for (int first = 0; first < kPartsOfTile; first += kAtOnce) {
    FloatPart of_parts[ROWS][kAtOnce];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
      std::memcpy(of_parts[r], reinterpret_cast<char*>(sums[r]) + first * kRegisterBytes, sizeof of_parts[r]);
    Words columns{piece.codes, 0};
    const char* row = x.codes;
    const char *scales = piece.scales + first * kRegisterBytes, *minima = piece.minima + first * kRegisterBytes;
    for (int64_t g = 0; g < values / GROUP; ++g, row += GROUP, scales += kScaleBytes, minima += kScaleBytes) {
      IntPart acc[ROWS][kAtOnce];
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
        const IntPart start = HAS_MIN ? IntPart{} : sum_of_group<GROUP>(x.sums + r * x.stride, g) * -zero;
#pragma GCC unroll 16
        for (int p = 0; p < kAtOnce; ++p) acc[r][p] = start;
      }
      dot_parts<T, Words, ROWS, kAtOnce>(row, x.stride, columns, GROUP / 4, first, acc, {nullptr, 0});
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
        const FloatPart of_row = (FloatPart)splat_part(x.scales + r * x.stride + g * GROUP / kRowGroup * 4);
        FloatPart of_codes = {};
        if constexpr (HAS_MIN)
          of_codes = __builtin_convertvector(sum_of_group<GROUP>(x.sums + r * x.stride, g), FloatPart) * of_row;
#pragma GCC unroll 16
        for (int p = 0; p < kAtOnce; ++p) {
          const WordPart sum = (WordPart)(__builtin_convertvector(acc[r][p], FloatPart) * of_row);
          of_parts[r][p] = fma_part(sum, load_part(scales + p * kRegisterBytes), of_parts[r][p]);
          if constexpr (HAS_MIN)
            of_parts[r][p] = fma_part((WordPart)of_codes, load_part(minima + p * kRegisterBytes), of_parts[r][p]);
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
      std::memcpy(reinterpret_cast<char*>(sums[r]) + first * kRegisterBytes, of_parts[r], sizeof of_parts[r]);
  }
}

using Dot = void (*)(const PieceRows&, const Piece&, int zero, int64_t values, f32x16 (*)[kTileVectors]);

template <class T, int GROUP, bool HAS_MIN>
constexpr Dot dot_of(int rows) {
  constexpr Dot dots[kMost] = {dot_piece<T, GROUP, HAS_MIN, 1>, dot_piece<T, GROUP, HAS_MIN, 2>,
                               dot_piece<T, GROUP, HAS_MIN, 3>, dot_piece<T, GROUP, HAS_MIN, 4>,
                               dot_piece<T, GROUP, HAS_MIN, 5>, dot_piece<T, GROUP, HAS_MIN, 6>};
  return dots[rows - 1];
}

Dot dot_of(const GgufForm& form, int rows) {
  if (form.low_bits == 8 || form.has_table) return dot_of<uint8, 32, false>(rows);
  if (form.group == 16) return form.has_min ? dot_of<uint6, 16, true>(rows) : dot_of<uint6, 16, false>(rows);
  return form.has_min ? dot_of<uint6, 32, true>(rows) : dot_of<uint6, 32, false>(rows);
}

}  // namespace

void multiply_gguf(const LinearOp& op, const LinearSpan& span) {
  const GgufForm form = gguf_form(op.weight_kind);
  const int64_t values = op.in_features, num_pieces = (values + kPieceValues - 1) / kPieceValues;
  const RowBlocks blocks{span.num_rows, kMost};
  const bool keeps = blocks.count > 1;
  const int64_t kept = keeps ? values : std::min<int64_t>(values, kPieceValues);
  const int64_t code_bytes = form.low_bits == 8 ? 0 : kept * kTileColumns, scale_bytes = kept / form.group * kScaleBytes;
  Scratch scratch(code_bytes + 2 * scale_bytes + num_pieces * sizeof(Piece) + 256);
  const Decoded memory{scratch.take<char>(code_bytes), scratch.take<char>(scale_bytes), scratch.take<char>(scale_bytes)};
  Piece* pieces = scratch.take<Piece>(num_pieces);
  for (int64_t tile = span.first_tile; tile < span.end_tile; ++tile) {
    const char* of_tile = static_cast<const char*>(op.weight) + tile * form.bytes(values);
    for (int64_t b = 0; b < blocks.count; ++b) {
      const int64_t row = span.first_row + blocks.begin(b);
      const int rows = blocks.height(b);
      const Dot dot = dot_of(form, rows);
      const char* x = static_cast<const char*>(op.x) + row * op.x_stride;
      f32x16 sums[kMost][kTileVectors] = {};
      for (int64_t number = 0; number < num_pieces; ++number) {
        const int64_t first = number * kPieceValues, count = std::min<int64_t>(kPieceValues, values - first);
        if (b == 0) {
          const int64_t at = keeps ? first : 0, of_scales = at / form.group * kScaleBytes;
          const Decoded to{memory.codes + at * kTileColumns, memory.scales + of_scales, memory.minima + of_scales};
          pieces[number] = decode(form, of_tile + form.bytes(first), count, to);
        }
        const PieceRows of_piece{x + first, x + gguf_scales_at(values) + first / kRowGroup * 4,
                                 x + gguf_sums_at(values) + first / kSumValues * 4, op.x_stride};
        dot(of_piece, pieces[number], form.zero, count, sums);
      }
      finish_linear(op, row, rows, tile, sums[0], kTileVectors);
    }
  }
}

void gguf_column(const char* tiles, Weight kind, int64_t column, int64_t width, float* out) {
  const GgufForm form = gguf_form(kind);
  const char* tile = tiles + column / kTileColumns * form.bytes(width);
  const int64_t c = column % kTileColumns;
  const auto bits = [c](const char* plane, int count, int64_t i) {
    if (count == 0) return 0;
    const int64_t word = i / 4, per_word = 8 / count;
    const uint8_t byte = uint8_t(plane[word / per_word * kStepBytes + c * kWordBytes + i % 4]);
    return byte >> word % per_word * count & ((1 << count) - 1);
  };
  for (int64_t first = 0; first < width; first += kPieceValues) {
    const char* piece = tile + form.bytes(first);
    const int64_t count = std::min<int64_t>(kPieceValues, width - first);
    alignas(64) char scales[kPieceValues / 16 * kScaleBytes], minima[sizeof scales];
    decode_scales(form, piece, count, {nullptr, scales, minima});
    const char *low = piece + form.header_bytes(count), *high = low + form.low_bytes(count);
    for (int64_t i = 0; i < count; ++i) {
      const int code = bits(low, form.low_bits, i) | bits(high, form.high_bits, i) << form.low_bits;
      const int64_t at = i / form.group * kScaleBytes + c * sizeof(float);
      float scale, minimum = 0.0f;
      std::memcpy(&scale, scales + at, sizeof scale);
      if (form.has_min) std::memcpy(&minimum, minima + at, sizeof minimum);
      out[first + i] = float((form.has_table ? kTable[code] : code) - form.zero) * scale + minimum;
    }
  }
}
