// Embedding lookup: rows of the table, optionally scaled and added to another value (learned positions).
//
// A table that is also the output layer's weight is stored once, in that layer's tiles: a row is a column there. It may be
// in a type of GGUF.

#include <algorithm>

#include "gguf.h"
#include "ops.h"
#include "rows.h"
#include "scratch.h"
#include "tile.h"

int64_t embed_chunks(const EmbedOp&, const Step& step) { return row_chunks(step.num_rows); }

static void copy_column(const char* tiles, int64_t tile_bytes, int64_t column, int64_t num_bytes, char* to) {
  const char* from = tiles + column / kTileColumns * tile_bytes + column % kTileColumns * kWordBytes;
  for (int64_t i = 0; i < num_bytes; i += kWordBytes, from += kStepBytes)
    std::memcpy(to + i, from, std::min<int64_t>(kWordBytes, num_bytes - i));
}

template <class T>
static void decode_column(const EmbedOp& op, int64_t column, T* to) {
  float* values = Scratch(op.width * sizeof(float)).take<float>(op.width);
  gguf_column(static_cast<const char*>(op.table), op.weight_kind, column, op.width, values);
  for (int64_t i = 0; i < op.width; i += kLanes) store_up_to(to + i, load_up_to(values + i, op.width - i), op.width - i);
}

template <class T>
static void embed_rows(const EmbedOp& op, RowRange rows) {
  const char* table = static_cast<const char*>(op.table);
  const int64_t row_bytes = op.width * sizeof(T);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const int64_t id = op.ids[row] + op.offset;
    T* to = static_cast<T*>(op.out) + row * op.out_stride;
    if (is_gguf(op.weight_kind))
      decode_column(op, id, to);
    else if (op.tile_bytes)
      copy_column(table, op.tile_bytes, id, row_bytes, reinterpret_cast<char*>(to));
    else
      std::memcpy(to, table + id * row_bytes, row_bytes);
    if (!op.add_to && op.scale == 1.0f) continue;
    const T* add = op.add_to ? static_cast<const T*>(op.add_to) + row * op.add_stride : nullptr;
    for (int64_t i = 0; i < op.width; i += kLanes) {
      const int64_t left = op.width - i;
      f32x16 v = load_up_to(to + i, left) * op.scale;
      if (add) v += load_up_to(add + i, left);
      store_up_to(to + i, v, left);
    }
  }
}

void embed(const EmbedOp& op, Dtype dtype, const Step& step, int64_t chunk) {
  const RowRange rows = rows_of_chunk(step.num_rows, chunk);
  if (dtype == Dtype::Float32)
    embed_rows<float>(op, rows);
  else
    embed_rows<bf16>(op, rows);
}
