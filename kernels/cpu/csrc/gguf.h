// Weights in the types of GGUF files, but MXFP4: see kernels/gguf.py. A tile of 32 columns is a sequence of pieces of 256
// inputs, and the last one may have fewer:
//
//   scales    [block][column] float16
//   minima    [block][column] float16, if groups have minima
//   integers  [group][column] a byte: the scale of a group in a block of 256; Q2_K's minimum is in its upper half
//   minima    [group][column] a byte, for Q4_K and Q5_K
//   low bits  [word][column][4 bytes]
//   high bits the same, if there are any
//
// A word of b bits a code has those of 8 / b words of rows, the first word in the lowest bits of each byte.
//
// Rows are quantised to eight bits, with a scale for each 32 inputs (QuantiseOp). A piece of a tile is decoded to words
// of bytes, the unsigned factor of the product, and to scales and minima in float32. If there are several blocks of rows,
// the whole tile is decoded once for all of them. So only decoding differs between types, and a row's result depends on
// neither the type's layout nor the other rows.
#pragma once

#include "ops.h"
#include "tile.h"

constexpr int kPieceValues = 256;
constexpr int kRowGroup = 32;
// A row has the sum of its codes for each of these.
constexpr int kSumValues = 16;

// A row written by Quantise: codes, scales and sums.
constexpr int64_t gguf_scales_at(int64_t values) { return values; }
constexpr int64_t gguf_sums_at(int64_t values) { return values + values / kRowGroup * 4; }

struct GgufForm {
  int low_bits, high_bits, block, group, zero, scale_bytes;
  bool has_min, has_table = false;

  constexpr int64_t header_bytes(int64_t values) const {
    return kTileColumns * (values / block * (has_min ? 4 : 2) + values / group * scale_bytes);
  }
  constexpr int64_t low_bytes(int64_t values) const { return values * kTileColumns * low_bits / 8; }
  constexpr int64_t bytes(int64_t values) const {
    return header_bytes(values) + low_bytes(values) + values * kTileColumns * high_bits / 8;
  }
};

constexpr GgufForm gguf_form(Weight kind) {
  switch (kind) {
    case Weight::Q4_0:
      return {4, 0, 32, 32, 8, 0, false};
    case Weight::Q4_1:
      return {4, 0, 32, 32, 0, 0, true};
    case Weight::Q5_0:
      return {4, 1, 32, 32, 16, 0, false};
    case Weight::Q5_1:
      return {4, 1, 32, 32, 0, 0, true};
    case Weight::Q2_K:
      return {2, 0, 256, 16, 0, 1, true};
    case Weight::Q3_K:
      return {2, 1, 256, 16, 4, 1, false};
    case Weight::Q4_K:
      return {4, 0, 256, 32, 0, 2, true};
    case Weight::Q5_K:
      return {4, 1, 256, 32, 0, 2, true};
    case Weight::Q6_K:
      return {4, 2, 256, 16, 32, 1, false};
    case Weight::IQ4_NL:
      return {4, 0, 32, 32, 128, 0, false, true};
    case Weight::IQ4_XS:
      return {4, 0, 256, 32, 128, 1, false, true};
    default:
      return {8, 0, 32, 32, 128, 0, false};
  }
}

// The values of a column, rounded once.
void gguf_column(const char* tiles, Weight kind, int64_t column, int64_t width, float* out);

void multiply_gguf(const LinearOp& op, const LinearSpan& span);
