// Weights with inputs in groups. Each group of an output has a scale: four bits, eight bits, FP8 (e4m3), or MXFP4
// (e2m1). A tile of 32 columns is a sequence of groups:
//
//   scales  [column] bfloat16 or float32
//   zeros   [column] int16, if each group of an output has its own zero
//   codes   Int4: [step][column][4 bytes], eight values a step: the low half of byte i is value i, the high half 4 + i
//           Int8Groups: [word][column][4 bytes]
//           Fp8: [word][column][values of a word of the rows]: two for bfloat16 rows, one for float32 rows
//           Mxfp4: [two values][column], a byte, with the first of the two in its low half
//
// A value is (code - zero) * scale, with a default zero of 8 or 128. For Fp8 and Mxfp4 it is code * scale. Groups are
// whole blocks of values, and the last one ends with the last block of the inputs.
//
// For Int4 and Int8Groups, rows are quantised to eight bits (QuantiseOp). Codes are the unsigned factor of the product.
// The contribution of zeros is subtracted: a number for each group of a row, times the zero. Sums of a group are exact
// integers. For Fp8 and Mxfp4, rows stay as they are, and codes are decoded in registers to the rows' dtype, which
// represents all of them (fp8.h, mxfp4.h). With several blocks of rows, the first block stores the decoded values for
// the others. Sums of groups are scaled and added in float32, in the order of groups, independently of other rows and
// tiles.
#pragma once

#include <algorithm>

#include "fp8.h"
#include "mxfp4.h"
#include "ops.h"
#include "tile.h"

constexpr int kBlock = 32;
constexpr int kStepValues = 8;
constexpr int kFp8Block = 2;

// As many rows as fit the registers, with two accumulators for each of a row's vectors, or for a part of them.
constexpr int kMaxGroupRows = 6;

constexpr int64_t whole_blocks(int64_t values) { return (values + kBlock - 1) / kBlock * kBlock; }

// A row written by Quantise: codes, the scale, and the groups' sums.
constexpr int64_t row_scale_at(int64_t values) { return whole_blocks(values); }
constexpr int64_t row_sums_at(int64_t values) { return row_scale_at(values) + 4; }

// The layout of a layer's groups in a tile. `values`: of all groups but the last. `num_values`: of all groups together.
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

  // For the columns of a part, in a group that begins at `group`.
  ALWAYS_INLINE FloatPart scales(const char* group, int part) const {
    return has_float_scales ? (FloatPart)load_part(group + part * kRegisterBytes)
                            : (FloatPart)(halves_part(group, part) << 16);
  }
  ALWAYS_INLINE IntPart zeros(const char* group, int part) const {
    typedef int16_t Narrow __attribute__((vector_size(kRegisterBytes / 2)));
    Narrow narrow;
    std::memcpy(&narrow, group + header_bytes - kTileColumns * 2 + part * sizeof narrow, sizeof narrow);
    return __builtin_convertvector(narrow, IntPart);
  }
};

// Groups that we make of other weights: one block each, with bfloat16 scales and one zero for all. Telling the compiler
// saves a sixth of the time of one row.
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

// The following structs yield words like Words does, group by group. `enter` sets the start of a group's codes.
struct GroupWords : Words {
  ALWAYS_INLINE void enter(const char* codes) { at = codes; }
};

// For Int4. A word of codes is two words of rows.
struct GroupNibbles : GroupWords {
  ALWAYS_INLINE WordPart part(int step, int p) const {
    const WordPart word = Words::part(step / 2, p);
    return (step % 2 ? word >> 4 : word) & 0x0f0f0f0fu;
  }
  ALWAYS_INLINE void advance(int steps) { at += steps / 2 * kStepBytes; }
};

template <Weight KIND, class T>
constexpr int64_t kCodedStepBytes = KIND == Weight::Mxfp4 ? kMxfp4StepBytes<T> : kFp8StepBytes<T>;

// For Fp8 and Mxfp4. With float32 rows, it advances by even numbers of steps.
template <Weight KIND, class T>
struct GroupFloats : GroupWords {
  ALWAYS_INLINE WordPart part(int step, int p) const {
    const char* of_tile = at + p / kPartsOfTile * tile_bytes;
    if constexpr (KIND == Weight::Fp8) return decode_fp8<T>(of_tile + step * kFp8StepBytes<T>, p % kPartsOfTile);
    constexpr int kStepsOfByte = 2 / kWordValues<T>;
    const char* bytes = of_tile + step / kStepsOfByte * kTileColumns;
    return decode_mxfp4<T>(bytes, p % kPartsOfTile, step % kStepsOfByte);
  }
  ALWAYS_INLINE void advance(int steps) { at += steps * kCodedStepBytes<KIND, T>; }
};

// The same for one tile. It also writes the decoded words to `kept`, one group after the other.
template <Weight KIND, class T>
struct KeptFloats : GroupFloats<KIND, T> {
  char* kept;

  ALWAYS_INLINE WordPart part(int step, int p) const {
    const WordPart decoded = GroupFloats<KIND, T>::part(step, p);
    std::memcpy(kept + step * kStepBytes + p * kRegisterBytes, &decoded, sizeof decoded);
    return decoded;
  }
  ALWAYS_INLINE void advance(int steps) {
    GroupFloats<KIND, T>::advance(steps);
    kept += steps * kStepBytes;
  }
};

// The words stored by KeptFloats.
struct KeptWords : Words {
  ALWAYS_INLINE void enter(const char*) {}
};

// Bytes of codes in four steps that are decoded and kept; 0 if nothing is kept.
template <class Columns>
constexpr int64_t kKeptBytes = 0;
template <Weight KIND, class T>
constexpr int64_t kKeptBytes<KeptFloats<KIND, T>> = 4 * kCodedStepBytes<KIND, T>;

// The initial sums of a group.
template <class T, int ROWS, int PARTS>
static ALWAYS_INLINE void start_group(const GroupForm& form, const char* group, int64_t tile_bytes, int first,
                                      const char* group_sums, int64_t x_stride, SumPart<T> (&acc)[ROWS][PARTS]) {
#pragma GCC unroll 16
  for (int p = 0; p < PARTS; ++p) {
    const char* of_tile = group + (first + p) / kPartsOfTile * tile_bytes;
    IntPart zeros = {};
    if (sizeof(T) == 1 && form.has_zeros) zeros = form.zeros(of_tile, (first + p) % kPartsOfTile);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      if constexpr (sizeof(T) > 1) {
        acc[r][p] = FloatPart{};
      } else {
        const IntPart start = (IntPart)splat_part(group_sums + r * x_stride);
        acc[r][p] = form.has_zeros ? start * zeros : start;
      }
    }
  }
}

// sums[r][p] += acc[r][p] * the scale of its column.
template <int ROWS, int PARTS, class Acc>
static ALWAYS_INLINE void add_group(const GroupForm& form, const char* group, int64_t tile_bytes, int first,
                                    const Acc (&acc)[ROWS][PARTS], FloatPart (&sums)[ROWS][PARTS]) {
#pragma GCC unroll 16
  for (int p = 0; p < PARTS; ++p) {
    const char* of_tile = group + (first + p) / kPartsOfTile * tile_bytes;
    const WordPart scale = (WordPart)form.scales(of_tile, (first + p) % kPartsOfTile);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
      sums[r][p] = fma_part((WordPart)__builtin_convertvector(acc[r][p], FloatPart), scale, sums[r][p]);
  }
}

// Prefetch distance in bytes for codes that are kept: nothing else hides the latency of memory.
constexpr int64_t kFetchedAhead = 4096;

// sums[r][v] = the row, without its scale, times 16 columns of consecutive tiles. The first tile is at `tile`.
template <class T, class Columns, bool IS_OURS, int ROWS, int TILES>
static ALWAYS_INLINE void dot_groups(const char* x, int64_t x_stride, const char* tile, const Columns& columns,
                                     GroupForm form, f32x16 (&sums)[ROWS][TILES * kTileVectors]) {
  constexpr int kAll = TILES * kPartsOfTile, kAtOnce = parts_at_once(ROWS, kAll);
  const int64_t tile_bytes = form.tile_bytes(), num_groups = form.count, sums_at = row_sums_at(form.num_values);
  if constexpr (IS_OURS) OurGroups::assume(form);
  for (int first = 0; first < kAll; first += kAtOnce) {
    FloatPart of_parts[ROWS][kAtOnce] = {};
    const char *row = x, *group = tile;
    Columns of_group = columns;
    for (int64_t g = 0; g < num_groups; ++g) {
      SumPart<T> acc[ROWS][kAtOnce];
      start_group<T, ROWS, kAtOnce>(form, group, tile_bytes, first, x + sums_at + g * 4, x_stride, acc);
      const int64_t values = IS_OURS ? kBlock : form.values_of(g), steps = values / kWordValues<T>;
      const char* codes = group + form.header_bytes;
      of_group.enter(codes);
      const Prefetch ahead{codes + kFetchedAhead, int(kKeptBytes<Columns> / kLineBytes)};
      dot_parts<T, Columns, ROWS, kAtOnce>(row, x_stride, of_group, steps, first, acc, ahead);
      add_group<ROWS, kAtOnce>(form, group, tile_bytes, first, acc, of_parts);
      row += steps * kWordBytes;
      group = codes + form.code_bytes(values);
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
      std::memcpy(reinterpret_cast<char*>(sums[r]) + first * kRegisterBytes, of_parts[r], sizeof of_parts[r]);
  }
}
