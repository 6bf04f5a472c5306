// Linear layers: out = activation(x @ weight + bias) (+ residual), accumulated in float32, rounded once. Adapters add
// to the sums (adapters.cpp). With rows and weight in eight bits, sums are exact integers, and are scaled once. With
// inputs in groups, this holds for each group.
//
// A chunk is a span of rows times a span of tiles. With few rows the time goes into reading the weight from memory:
// long spans of tiles, and several tiles side by side for independent accumulators. With many rows the multipliers must
// be kept busy: the rows of a chunk stay in L2 while it goes through the tiles. In between, the next tile is prefetched
// while this one is multiplied, evenly over the row blocks (measured at 32 rows: 970 GFLOP/s; all in the first block
// 890, none 790).

#include <algorithm>
#include <type_traits>
#include <utility>

#include "amx.h"
#include "gguf.h"
#include "groups.h"
#include "math.h"
#include "ops.h"
#include "scratch.h"

namespace {

constexpr int64_t kRowBytesInL2 = 384 << 10;
// Processors with AMX have 2 MB.
constexpr int64_t kRowBytesForAmx = 1 << 20;
constexpr int64_t kWeightBytesPerChunk = 192 << 10;
constexpr int64_t kChunksPerThread = 4;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool has_groups(Weight kind) { return kind != Weight::AsRows && kind != Weight::Int8 && !is_gguf(kind); }

int64_t num_words(const LinearOp& op, Dtype dtype) {
  if (takes_codes(op.weight_kind)) return words<int8>(op.in_features);
  return dtype == Dtype::Float32 ? words<float>(op.in_features) : words<bf16>(op.in_features);
}

int64_t tile_bytes_of(const LinearOp& op, Dtype dtype) {
  if (is_gguf(op.weight_kind)) return gguf_form(op.weight_kind).bytes(op.in_features);
  if (has_groups(op.weight_kind)) return GroupForm(op).tile_bytes();
  return num_words(op, dtype) * kStepBytes;
}

// How a linear layer is cut into chunks. It has no influence on results.
struct Cut {
  int64_t tile_bytes, num_tiles, rows_per_chunk, tiles_per_chunk, row_chunks, tile_chunks;

  Cut(const LinearOp& op, Dtype dtype, const Step& step) {
    tile_bytes = tile_bytes_of(op, dtype);
    num_tiles = ceil_div(op.out_features * (is_gated(op.activation) ? 2 : 1), kTileColumns);
    rows_per_chunk = linear_rows_at_once(op, dtype);
    row_chunks = ceil_div(step.num_rows, rows_per_chunk);
    const int64_t fair = num_tiles / (step.num_threads * kChunksPerThread);
    const int64_t streamed = step.num_rows > 2 * kMaxRows ? 1 : kWeightBytesPerChunk / tile_bytes;
    tiles_per_chunk = std::max<int64_t>(1, std::min(fair, streamed));
    tile_chunks = ceil_div(num_tiles, tiles_per_chunk);
  }
};

template <Activation ACTIVATION>
ALWAYS_INLINE f32x16 activate(f32x16 x) {
  if constexpr (ACTIVATION == Activation::Relu) return relu(x);
  if constexpr (ACTIVATION == Activation::Gelu) return gelu(x);
  if constexpr (ACTIVATION == Activation::GeluTanh || ACTIVATION == Activation::GeluTanhGated) return gelu_tanh(x);
  if constexpr (ACTIVATION == Activation::SiluGated) return silu(x);
  return x;
}

template <class T, class Out>
ALWAYS_INLINE void write_out(const LinearOp& op, int64_t row, int64_t column, f32x16 value) {
  const int64_t left = op.out_features - column;
  if (left <= 0) return;
  if (op.residual)
    value += load_up_to(static_cast<const T*>(op.residual) + row * op.residual_stride + column, left);
  store_up_to(static_cast<Out*>(op.out) + row * op.out_stride + column, value, left);
}

// The sums of a block of rows and a tile. Row r's vectors begin at sums[r * stride].
struct Sums {
  const f32x16* first;
  int64_t stride;
};

template <class T, class Out, Activation ACTIVATION>
ALWAYS_INLINE void finish_tile(const LinearOp& op, int64_t row, int rows, int64_t tile, Sums sums) {
  f32x16 bias[kTileVectors] = {};
  for (int v = 0; op.bias && v < kTileVectors; ++v) bias[v] = load(op.bias + tile * kTileColumns + v * kLanes);
  for (int r = 0; r < rows; ++r) {
    const f32x16* sum = sums.first + r * sums.stride;
    if constexpr (ACTIVATION == Activation::ClampedSwiglu) {
      const f32x16 value =
          clamped_swiglu(sum[0] + bias[0], sum[1] + bias[1], op.swiglu_alpha, op.swiglu_limit);
      write_out<T, Out>(op, row + r, tile * kLanes, value);
    } else if constexpr (is_gated(ACTIVATION)) {
      write_out<T, Out>(op, row + r, tile * kLanes, activate<ACTIVATION>(sum[0] + bias[0]) * (sum[1] + bias[1]));
    } else {
      for (int v = 0; v < kTileVectors; ++v)
        write_out<T, Out>(op, row + r, tile * kTileColumns + v * kLanes, activate<ACTIVATION>(sum[v] + bias[v]));
    }
  }
}

template <class T, class Out>
__attribute__((noinline)) void finish(const LinearOp& op, int64_t row, int rows, int64_t tile, Sums sums) {
  switch (op.activation) {
    case Activation::None:
      return finish_tile<T, Out, Activation::None>(op, row, rows, tile, sums);
    case Activation::Relu:
      return finish_tile<T, Out, Activation::Relu>(op, row, rows, tile, sums);
    case Activation::Gelu:
      return finish_tile<T, Out, Activation::Gelu>(op, row, rows, tile, sums);
    case Activation::GeluTanh:
      return finish_tile<T, Out, Activation::GeluTanh>(op, row, rows, tile, sums);
    case Activation::SiluGated:
      return finish_tile<T, Out, Activation::SiluGated>(op, row, rows, tile, sums);
    case Activation::GeluTanhGated:
      return finish_tile<T, Out, Activation::GeluTanhGated>(op, row, rows, tile, sums);
    case Activation::ClampedSwiglu:
      return finish_tile<T, Out, Activation::ClampedSwiglu>(op, row, rows, tile, sums);
  }
}

float scale_of_row(const LinearOp& op, const char* row) {
  float scale;
  std::memcpy(&scale, row + row_scale_at(op.in_features), sizeof scale);
  return scale;
}

// Adapters and all that follows, for the sums of a block of rows and a tile.
template <class T>
ALWAYS_INLINE void finish_rows(const LinearOp& op, int64_t row, int rows, int64_t tile, f32x16* sums, int64_t stride) {
  constexpr Dtype dtype = std::is_same_v<T, float> ? Dtype::Float32 : Dtype::Bfloat16;
  if (op.adapter_of_row) add_adapters(op, dtype, row, rows, tile, sums, stride);
  if (op.float32_out)
    finish<T, float>(op, row, rows, tile, {sums, stride});
  else
    finish<T, T>(op, row, rows, tile, {sums, stride});
}

template <class T, int ROWS, int TILES>
ALWAYS_INLINE void finish_tiles(const LinearOp& op, int64_t row, int64_t tile,
                                f32x16 (&sums)[ROWS][TILES * kTileVectors]) {
  for (int t = 0; t < TILES; ++t)
    finish_rows<T>(op, row, ROWS, tile + t, &sums[0][t * kTileVectors], TILES * kTileVectors);
}

// What the integer sums of a row and 16 columns stand for.
ALWAYS_INLINE f32x16 scaled(const LinearOp& op, i32x16 sum, int64_t column, float of_row) {
  return to_float(sum + load_lanes<i32x16>(op.starts + column)) * (load(op.scales + column) * of_row);
}

// W, the type of the words of rows and weight, is T itself or int8.
template <class W, class T, int ROWS, int TILES>
void block(const LinearOp& op, int64_t row, int64_t tile, Prefetch prefetch) {
  const int64_t steps = words<W>(op.in_features), x_stride = op.x_stride * sizeof(W);
  const char* x = static_cast<const char*>(op.x) + row * x_stride;
  const char* weight = static_cast<const char*>(op.weight) + tile * steps * kStepBytes;
  Sum<W> acc[ROWS][TILES * kTileVectors] = {};
  dot<W, ROWS, TILES>(x, x_stride, weight, steps * kStepBytes, steps, acc, prefetch);
  f32x16 sums[ROWS][TILES * kTileVectors];
  if constexpr (std::is_same_v<W, int8>) {
    for (int r = 0; r < ROWS; ++r) {
      const float of_row = scale_of_row(op, x + r * x_stride);
      for (int v = 0; v < TILES * kTileVectors; ++v)
        sums[r][v] = scaled(op, acc[r][v], tile * kTileColumns + v * kLanes, of_row);
    }
  } else {
    std::memcpy(sums, acc, sizeof sums);
  }
  finish_tiles<T, ROWS, TILES>(op, row, tile, sums);
}

// Whether the words of FP8 and MXFP4 are decoded for these rows only, decoded and kept for other rows, or read from
// those kept.
enum class Codes { Once, ToKeep, Kept };

template <class W, class T, bool IS_OURS, class Columns, int ROWS, int TILES>
ALWAYS_INLINE void group_block(const LinearOp& op, int64_t row, int64_t tile, const Columns& columns,
                               const GroupForm& form) {
  const int64_t x_stride = op.x_stride * sizeof(W);
  const char* x = static_cast<const char*>(op.x) + row * x_stride;
  f32x16 sums[ROWS][TILES * kTileVectors];
  const char* of_tile = static_cast<const char*>(op.weight) + tile * form.tile_bytes();
  dot_groups<W, Columns, IS_OURS, ROWS, TILES>(x, x_stride, of_tile, columns, form, sums);
  if constexpr (sizeof(W) == 1)
    for (int r = 0; r < ROWS; ++r)
      for (f32x16& sum : sums[r]) sum *= scale_of_row(op, x + r * x_stride);
  finish_tiles<T, ROWS, TILES>(op, row, tile, sums);
}

template <class T, int ROWS, int TILES>
void int4_block(const LinearOp& op, int64_t row, int64_t tile, char*) {
  const GroupForm form(op);
  const GroupNibbles columns{{{nullptr, form.tile_bytes()}}};
  if (OurGroups::are(form))
    group_block<uint6, T, true, GroupNibbles, ROWS, TILES>(op, row, tile, columns, form);
  else
    group_block<uint6, T, false, GroupNibbles, ROWS, TILES>(op, row, tile, columns, form);
}

template <class T, int ROWS, int TILES>
void int8_groups_block(const LinearOp& op, int64_t row, int64_t tile, char*) {
  const GroupForm form(op);
  const GroupWords columns{{nullptr, form.tile_bytes()}};
  group_block<uint8, T, false, GroupWords, ROWS, TILES>(op, row, tile, columns, form);
}

template <Weight KIND, Codes CODES, class T, int ROWS, int TILES>
void float_block(const LinearOp& op, int64_t row, int64_t tile, char* words) {
  const GroupForm form(op);
  const GroupFloats<KIND, T> codes{{{nullptr, form.tile_bytes()}}};
  if constexpr (CODES == Codes::Once)
    group_block<T, T, false, GroupFloats<KIND, T>, ROWS, TILES>(op, row, tile, codes, form);
  else if constexpr (CODES == Codes::ToKeep)
    group_block<T, T, false, KeptFloats<KIND, T>, ROWS, TILES>(op, row, tile, {codes, words}, form);
  else
    group_block<T, T, false, KeptWords, ROWS, TILES>(op, row, tile, {{words, 0}}, form);
}

using Block = void (*)(const LinearOp&, int64_t row, int64_t tile, Prefetch);

template <class W, class T, int... ROWS>
constexpr Block block_of(int rows, std::integer_sequence<int, ROWS...>) {
  constexpr Block blocks[] = {block<W, T, ROWS + 1, 1>...};
  return blocks[rows - 1];
}

// Few rows: several tiles at a time, to have more accumulators than the multiplier's latency. The tiles are consecutive
// streams, which the hardware prefetches best on its own (measured: 96 GB/s; with prefetches 82).
template <class W, class T>
void stream(const LinearOp& op, int rows, int64_t row, int64_t tile, int64_t end) {
  const Block wide = rows == 1 ? block<W, T, 1, 4> : rows == 2 ? block<W, T, 2, 4> : block<W, T, 3, 4>;
  const Block narrow = rows == 1 ? block<W, T, 1, 1> : rows == 2 ? block<W, T, 2, 1> : block<W, T, 3, 1>;
  for (; tile + 4 <= end; tile += 4) wide(op, row, tile, {nullptr, 0});
  for (; tile < end; ++tile) narrow(op, row, tile, {nullptr, 0});
}

template <class W, class T>
void multiply_by_amx(const LinearOp& op, const LinearSpan& span) {
  constexpr int64_t kLinesOfStep = kAmxWords * kStepBytes / kLineBytes;
  const int64_t steps = words<W>(op.in_features), x_stride = op.x_stride * sizeof(W), tile_bytes = steps * kStepBytes;
  const char* x = static_cast<const char*>(op.x) + span.first_row * x_stride;
  const char* weight = static_cast<const char*>(op.weight) + span.first_tile * tile_bytes;
  const int64_t num_blocks = ceil_div(span.num_rows, kMaxAmxRows), lines = ceil_div(kLinesOfStep, num_blocks);
  const int64_t lines_bytes = steps / kAmxWords * lines * kLineBytes;
  AmxShape shape;
  Sum<W> acc[kMaxAmxRows][kTileVectors];
  for (int64_t tile = span.first_tile; tile < span.end_tile; ++tile, weight += tile_bytes) {
    for (int64_t b = 0; b < num_blocks; ++b) {
      const int64_t first = b * kMaxAmxRows;
      const int rows = int(std::min<int64_t>(kMaxAmxRows, span.num_rows - first));
      const char* of_block = x + first * x_stride;
      const bool fetched = b * lines >= kLinesOfStep;
      amx_dot<W>(shape, of_block, x_stride, rows, weight, steps, {acc},
                 {weight + tile_bytes + b * lines_bytes, fetched ? 0 : int(lines)});
      if constexpr (std::is_same_v<W, int8>) {
        f32x16 sums[kMaxAmxRows][kTileVectors];
        for (int r = 0; r < rows; ++r) {
          const float of_row = scale_of_row(op, of_block + r * x_stride);
          for (int v = 0; v < kTileVectors; ++v)
            sums[r][v] = scaled(op, acc[r][v], tile * kTileColumns + v * kLanes, of_row);
        }
        finish_rows<T>(op, span.first_row + first, rows, tile, sums[0], kTileVectors);
      } else {
        finish_rows<T>(op, span.first_row + first, rows, tile, acc[0], kTileVectors);
      }
    }
  }
}

template <class W, class T>
void multiply(const LinearOp& op, const LinearSpan& span) {
  if constexpr (kMayUseAmx<W>)
    if (has_amx()) return multiply_by_amx<W, T>(op, span);
  if (span.num_rows <= 3) return stream<W, T>(op, int(span.num_rows), span.first_row, span.first_tile, span.end_tile);

  const int64_t tile_bytes = words<W>(op.in_features) * kStepBytes;
  const RowBlocks blocks{span.num_rows};
  const int lines = int(ceil_div(4 * kStepBytes / kLineBytes, blocks.count));
  const int64_t lines_bytes = tile_bytes / (4 * kStepBytes) * lines * kLineBytes;
  for (int64_t tile = span.first_tile; tile < span.end_tile; ++tile) {
    const char* next = static_cast<const char*>(op.weight) + (tile + 1) * tile_bytes;
    for (int64_t b = 0; b < blocks.count; ++b) {
      const Block compute = block_of<W, T>(blocks.height(b), std::make_integer_sequence<int, kMaxRows>{});
      const bool fetched = b * lines * kLineBytes >= 4 * kStepBytes;
      compute(op, span.first_row + blocks.begin(b), tile, {next + b * lines_bytes, fetched ? 0 : lines});
    }
  }
}

// `words`: memory for the tile's decoded words.
using GroupBlock = void (*)(const LinearOp&, int64_t row, int64_t tile, char* words);

template <class T, Weight KIND, Codes CODES, int ROWS, int TILES>
constexpr GroupBlock group_block() {
  if constexpr (!takes_codes(KIND)) return float_block<KIND, CODES, T, ROWS, TILES>;
  if constexpr (KIND == Weight::Int4) return int4_block<T, ROWS, TILES>;
  return int8_groups_block<T, ROWS, TILES>;
}

template <class T, Weight KIND, Codes CODES, int... ROWS>
constexpr GroupBlock group_block_of(int rows, std::integer_sequence<int, ROWS...>) {
  constexpr GroupBlock blocks[] = {group_block<T, KIND, CODES, ROWS + 1, 1>()...};
  return blocks[rows - 1];
}

// Decodes FP8 or MXFP4 codes into words. Returns the codes after them.
template <class T, Weight KIND>
ALWAYS_INLINE const char* decode(const char* codes, int64_t steps, char* to) {
  constexpr int64_t kStepsOfLine = kLineBytes / kCodedStepBytes<KIND, T>;
  GroupFloats<KIND, T> columns{{{codes, 0}}};
  for (int64_t step = 0; step < steps; ++step, to += kStepBytes, columns.advance(1)) {
    if (step % kStepsOfLine == 0) __builtin_prefetch(columns.at + kFetchedAhead);
    for (int p = 0; p < kPartsOfTile; ++p) {
      const WordPart word = columns.part(0, p);
      std::memcpy(to + p * kRegisterBytes, &word, sizeof word);
    }
  }
  return columns.at;
}

// The first block of rows decodes a tile for the others. If there are none, pieces of it are decoded one after the other,
// in the same place.
template <class T, Weight KIND>
void multiply_groups_by_amx(const LinearOp& op, const LinearSpan& span) {
  static_assert(kWordValues<T> == 2, "codes are decoded a word at a time");
  constexpr int64_t kPiece = 4 * kAmxWords;
  const GroupForm form(op);
  const int64_t x_stride = op.x_stride * sizeof(T), end = span.first_row + span.num_rows;
  const bool keeps = span.num_rows > kMaxAmxRows;
  const int64_t num_bytes = (keeps ? form.num_values / kWordValues<T> : kPiece) * kStepBytes;
  char* words = Scratch(num_bytes).take<char>(num_bytes);
  AmxShape shape;
  f32x16 acc[kMaxAmxRows][kTileVectors];
  for (int64_t tile = span.first_tile; tile < span.end_tile; ++tile) {
    for (int64_t first = span.first_row; first < end; first += kMaxAmxRows) {
      const int rows = int(std::min<int64_t>(kMaxAmxRows, end - first));
      const char* x = static_cast<const char*>(op.x) + first * x_stride;
      const char* group = static_cast<const char*>(op.weight) + tile * form.tile_bytes();
      char* of_piece = words;
      f32x16 sums[kMaxAmxRows][kTileVectors] = {};
      for (int64_t g = 0; g < form.count; group += form.bytes_of(g++)) {
        const char* codes = group + form.header_bytes;
        const int64_t steps = form.values_of(g) / kWordValues<T>;
        for (int64_t done = 0, count; done < steps; done += count, x += count * kWordBytes) {
          count = std::min(kPiece, steps - done);
          if (first == span.first_row) codes = decode<T, KIND>(codes, count, of_piece);
          amx_dot<T>(shape, x, x_stride, rows, of_piece, count, {acc, kStepBytes, done > 0});
          if (keeps) of_piece += count * kStepBytes;
        }
        const f32x16 scales[] = {form.scales(group, 0), form.scales(group, 1)};
        for (int r = 0; r < rows; ++r)
          for (int v = 0; v < kTileVectors; ++v) sums[r][v] = fma(acc[r][v], scales[v], sums[r][v]);
      }
      finish_rows<T>(op, first, rows, tile, sums[0], kTileVectors);
    }
  }
}

template <class T, Weight KIND>
void multiply_groups(const LinearOp& op, const LinearSpan& span) {
  if constexpr (kMayUseAmx<T> && !takes_codes(KIND))
    if (has_amx()) return multiply_groups_by_amx<T, KIND>(op, span);
  int64_t tile = span.first_tile;
  // One row: the weight is streamed, several tiles side by side.
  for (; span.num_rows == 1 && tile + 4 <= span.end_tile; tile += 4)
    group_block<T, KIND, Codes::Once, 1, 4>()(op, span.first_row, tile, nullptr);

  constexpr int kMost = takes_codes(KIND) ? kMaxGroupRows : kMaxRows;
  constexpr auto heights = std::make_integer_sequence<int, kMost>{};
  const RowBlocks blocks{span.num_rows, kMost};
  char* words = nullptr;
  if (!takes_codes(KIND) && blocks.count > 1) {
    const int64_t num_bytes = GroupForm(op).num_values / kWordValues<T> * kStepBytes;
    words = Scratch(num_bytes).take<char>(num_bytes);
  }
  for (; tile < span.end_tile; ++tile) {
    for (int64_t b = 0; b < blocks.count; ++b) {
      GroupBlock compute = group_block_of<T, KIND, Codes::Once>(blocks.height(b), heights);
      if constexpr (!takes_codes(KIND)) {
        if (words && b == 0) compute = group_block_of<T, KIND, Codes::ToKeep>(blocks.height(b), heights);
        if (words && b > 0) compute = group_block_of<T, KIND, Codes::Kept>(blocks.height(b), heights);
      }
      compute(op, span.first_row + blocks.begin(b), tile, words);
    }
  }
}

template <class T>
void multiply_any(const LinearOp& op, const LinearSpan& span) {
  if (is_gguf(op.weight_kind)) return multiply_gguf(op, span);
  switch (op.weight_kind) {
    case Weight::AsRows:
      return multiply<T, T>(op, span);
    case Weight::Int8:
      return multiply<int8, T>(op, span);
    case Weight::Int4:
      return multiply_groups<T, Weight::Int4>(op, span);
    case Weight::Int8Groups:
      return multiply_groups<T, Weight::Int8Groups>(op, span);
    case Weight::Fp8:
      return multiply_groups<T, Weight::Fp8>(op, span);
    case Weight::Mxfp4:
      return multiply_groups<T, Weight::Mxfp4>(op, span);
    default:
      return;
  }
}

}  // namespace

int64_t linear_chunks(const LinearOp& op, Dtype dtype, const Step& step) {
  const Cut cut(op, dtype, step);
  return cut.row_chunks * cut.tile_chunks;
}

void linear(const LinearOp& op, Dtype dtype, const Step& step, int64_t chunk) {
  const Cut cut(op, dtype, step);
  const int64_t first_row = chunk / cut.tile_chunks * cut.rows_per_chunk;
  const int64_t first_tile = chunk % cut.tile_chunks * cut.tiles_per_chunk;
  LinearOp of_step = op;
  of_step.adapter_of_row = op.adapters.shrunk ? step.adapters : nullptr;
  linear_span(of_step, dtype,
              {first_row, std::min(cut.rows_per_chunk, step.num_rows - first_row), first_tile,
               std::min(cut.num_tiles, first_tile + cut.tiles_per_chunk)});
}

void linear_span(const LinearOp& op, Dtype dtype, const LinearSpan& span) {
  dtype == Dtype::Float32 ? multiply_any<float>(op, span) : multiply_any<bf16>(op, span);
}

int64_t linear_rows_at_once(const LinearOp& op, Dtype dtype) {
  // The others are multiplied in lower blocks, whichever these are.
  const bool by_amx = has_amx() && (op.weight_kind == Weight::Int8 ||
                                    (dtype == Dtype::Bfloat16 && !takes_codes(op.weight_kind)));
  const int64_t height = by_amx ? kMaxAmxRows : kMaxRows, most = by_amx ? 256 : 240;
  const int64_t fitting = (by_amx ? kRowBytesForAmx : kRowBytesInL2) / (num_words(op, dtype) * kWordBytes);
  return std::max(height, std::min(fitting, most) / height * height);
}

int64_t linear_tile_bytes(const LinearOp& op, Dtype dtype) { return tile_bytes_of(op, dtype); }

void finish_linear(const LinearOp& op, int64_t row, int rows, int64_t tile, f32x16* sums, int64_t stride) {
  finish_rows<bf16>(op, row, rows, tile, sums, stride);
}
