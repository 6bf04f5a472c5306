// Adapters (LoRA) of linear layers: (x @ a) @ b * scale is added to a row with an adapter, before the activation.
//
//   shrink  row -> x @ a, a few values for each part of the layer
//   linear  the same op as without adapters; adds (x @ a) @ b to the sums of rows with an adapter, one tile at a time
//
// Rows are computed one by one, or with neighbours that have the same adapter. The result is the same: see tile.h. If
// no row of a step has an adapter, Shrink has no chunks, and linear layers run as without adapters.

#include <algorithm>

#include "ops.h"
#include "rows.h"
#include "tile.h"

namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The columns of a vector, and the values that Shrink computed for a row.
template <class T>
struct Expansion {
  // row r of b begins at b + r * stride
  const T* b;
  int64_t stride, rank;
  const float* shrunk;

  f32x16 of_part(int32_t part) const {
    f32x16 sum = {};
    for (int64_t r = 0; r < rank; ++r) sum = fma(splat(shrunk[part * rank + r]), load(b + r * stride), sum);
    return sum;
  }
};

// `parts`: the parts of the vector's columns, ascending.
template <class T>
f32x16 expanded(const Expansion<T>& expansion, const int32_t* parts) {
  f32x16 sum = expansion.of_part(parts[0]);
  for (int32_t part = parts[0] + 1; part <= parts[kLanes - 1]; ++part) {
    sum = choose(load_lanes<i32x16>(parts) == part, expansion.of_part(part), sum);
  }
  return sum;
}

template <class T>
void add_of(const LinearOp& op, int64_t row, int rows, int64_t tile, f32x16* sums, int64_t stride) {
  const Adapters& adapters = op.adapters;
  for (int r = 0; r < rows; ++r) {
    const int32_t number = op.adapter_of_row[row + r];
    if (number == 0) continue;
    const T* b = static_cast<const T*>(adapters.expand) + (number - 1) * adapters.rank * adapters.num_columns;
    const float* shrunk = adapters.shrunk + (row + r) * adapters.shrunk_stride;
    for (int v = 0; v < kTileVectors; ++v) {
      const int64_t column = tile * kTileColumns + v * kLanes;
      const Expansion<T> expansion{b + column, adapters.num_columns, adapters.rank, shrunk};
      const f32x16 sum = expanded(expansion, adapters.parts + column);
      sums[r * stride + v] = fma(sum, splat(adapters.scales[number - 1]), sums[r * stride + v]);
    }
  }
}

int64_t num_tiles(const LinearOp& op) { return ceil_div(op.out_features, kTileColumns); }

}  // namespace

void add_adapters(const LinearOp& op, Dtype dtype, int64_t row, int rows, int64_t tile, f32x16* sums, int64_t stride) {
  dtype == Dtype::Float32 ? add_of<float>(op, row, rows, tile, sums, stride)
                          : add_of<bf16>(op, row, rows, tile, sums, stride);
}

int64_t shrink_chunks(const ShrinkOp& op, const Step& step) {
  return step.adapters ? row_chunks(step.num_rows) * num_tiles(op.linear) : 0;
}

void shrink(const ShrinkOp& op, Dtype dtype, const Step& step, int64_t chunk) {
  const int64_t tiles = num_tiles(op.linear), tile = chunk % tiles;
  const RowRange rows = rows_of_chunk(step.num_rows, chunk / tiles);
  for (int64_t row = rows.begin, end; row < rows.end; row = end) {
    const int32_t number = step.adapters[row];
    for (end = row + 1; end < rows.end && step.adapters[end] == number;) ++end;
    if (number == 0) continue;
    LinearOp linear = op.linear;
    linear.weight = static_cast<const char*>(linear.weight) + (number - 1) * op.adapter_bytes;
    linear_span(linear, dtype, {row, end - row, tile, tile + 1});
  }
}
