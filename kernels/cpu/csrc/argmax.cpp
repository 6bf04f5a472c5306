// Greedy sampling: the first maximum of each row, and whether the row can be sampled from.

#include <cmath>
#include <limits>

#include "pool.h"
#include "sampling.h"
#include "vec.h"

namespace {

struct Rows {
  const float* logits;
  int64_t width, stride;
  int64_t* index;
  uint8_t* is_bad;
};

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct RowMaximum {
  float value;
  bool has_nan;
};

RowMaximum maximum_of(const float* row, int64_t width) {
  f32x16 best[4] = {splat(-kInfinity), splat(-kInfinity), splat(-kInfinity), splat(-kInfinity)};
  i32x16 nan = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes)
    for (int v = 0; v < 4; ++v) {
      const f32x16 x = load(row + i + v * kLanes);
      nan |= x != x;
      best[v] = max(x, best[v]);
    }
  float value = horizontal_max(max(max(best[0], best[1]), max(best[2], best[3])));
  bool has_nan = false;
  for (int lane = 0; lane < kLanes; ++lane) has_nan |= nan[lane] != 0;
  for (; i < width; ++i) {
    has_nan |= std::isnan(row[i]);
    value = row[i] > value ? row[i] : value;
  }
  return {value, has_nan};
}

int64_t find(const float* row, int64_t width, float value) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const i32x16 equal = load(row + i) == value;
    int32_t any = 0;
    for (int lane = 0; lane < kLanes; ++lane) any |= equal[lane];
    if (any) break;
  }
  while (i < width && row[i] != value) ++i;
  return i < width ? i : 0;
}

void argmax_row(const void* context, int, int64_t row) {
  const Rows& rows = *static_cast<const Rows*>(context);
  const float* logits = rows.logits + row * rows.stride;
  const RowMaximum maximum = maximum_of(logits, rows.width);
  rows.index[row] = find(logits, rows.width, maximum.value);
  rows.is_bad[row] = maximum.has_nan || !std::isfinite(maximum.value);
}

}  // namespace

void argmax_rows(const float* logits, int64_t num_rows, int64_t width, int64_t stride, int64_t* index, uint8_t* is_bad,
                 int32_t num_threads) {
  const Rows rows{logits, width, stride, index, is_bad};
  const PhaseSpec phase{num_rows, Order::Queue};
  run_phases(num_rows > 1 ? num_threads : 1, 1, &phase, argmax_row, &rows);
}
