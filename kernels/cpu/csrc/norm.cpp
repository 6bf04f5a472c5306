// RMS norm and layer norm of rows, in float32, rounded once.

#include <cmath>

#include "ops.h"
#include "rows.h"

namespace {

// The sum of f(x) over a row, in four interleaved partial sums.
template <class T, class F>
ALWAYS_INLINE float sum_of(const T* x, int64_t width, F f) {
  f32x16 partial[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes)
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) partial[v] += f(load(x + i + v * kLanes));
#pragma GCC unroll 3
  for (int v = 0; v < 3; ++v, i += kLanes) {
    if (i + kLanes > width) break;
    partial[v] += f(load(x + i));
  }
  if (i < width) {
    const f32x16 valid = choose(iota() < float(width - i), splat(1.0f), f32x16{});
    partial[3] += f(load_some(x + i, width - i)) * valid;
  }
  return horizontal_sum((partial[0] + partial[1]) + (partial[2] + partial[3]));
}

template <class T>
void norm_row(const NormOp& op, const T* x, const T* residual, T* out) {
  const float width = float(op.width);
  const float mean = op.centred ? sum_of(x, op.width, [](f32x16 v) { return v; }) / width : 0.0f;
  const float variance = sum_of(x, op.width, [mean](f32x16 v) { return (v - mean) * (v - mean); }) / width;
  const float scale = 1.0f / std::sqrt(variance + op.eps);
  for (int64_t i = 0; i < op.width; i += kLanes) {
    const int64_t left = op.width - i;
    f32x16 v = (load_up_to(x + i, left) - mean) * scale;
    if (op.weight) v *= load_up_to(op.weight + i, left);
    if (op.bias) v += load_up_to(op.bias + i, left);
    if (residual) v += load_up_to(residual + i, left);
    store_up_to(out + i, v, left);
  }
}

template <class T>
void norm_rows(const NormOp& op, RowRange rows) {
  for (int64_t row = rows.begin; row < rows.end; ++row)
    norm_row(op, static_cast<const T*>(op.x) + row * op.x_stride,
             op.residual ? static_cast<const T*>(op.residual) + row * op.residual_stride : nullptr,
             static_cast<T*>(op.out) + row * op.out_stride);
}

}  // namespace

int64_t norm_chunks(const NormOp&, const Step& step) { return row_chunks(step.num_rows); }

void norm(const NormOp& op, Dtype dtype, const Step& step, int64_t chunk) {
  const RowRange rows = rows_of_chunk(step.num_rows, chunk);
  if (dtype == Dtype::Float32)
    norm_rows<float>(op, rows);
  else
    norm_rows<bf16>(op, rows);
}
