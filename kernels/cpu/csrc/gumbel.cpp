// Sampling without state: the noise of a column is a hash of (key, column), so a token does not depend on its batch.

#include <limits>

#include "math.h"
#include "pool.h"
#include "sampling.h"

namespace {

struct Rows {
  const float* logits;
  int64_t width, stride;
  const int64_t* keys;
  int64_t* index;
};

// "lowbias32"
ALWAYS_INLINE u32x16 mix(u32x16 x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  return x;
}

ALWAYS_INLINE f32x16 gumbel(u32x16 column, uint32_t key_low, uint32_t key_high) {
  const u32x16 hash = mix(mix(column ^ key_low) ^ key_high);
  const f32x16 rounded_u = (to_float(hash) + 0.5f) * 0x1p-32f;
  // the last 128 hashes round to 1, and their noise would be -inf
  const f32x16 below_one = splat(1.0f - 0x1p-24f);
  const f32x16 u = choose(rounded_u < below_one, rounded_u, below_one);
  // log1p(-u), exact to rounding for small u, too: log(w), corrected by the rounding error of w = 1 - u
  const f32x16 w = 1.0f - u;
  const f32x16 rounded = log_lanes(w) * u / (1.0f - w);
  const f32x16 exponential = choose(w == splat(1.0f), u, -rounded);
  return -log_lanes(exponential);
}

void sample_row(const void* context, int, int64_t row) {
  const Rows& rows = *static_cast<const Rows*>(context);
  const float* logits = rows.logits + row * rows.stride;
  const uint32_t key_low = uint32_t(uint64_t(rows.keys[row])), key_high = uint32_t(uint64_t(rows.keys[row]) >> 32);
  f32x16 best = splat(-std::numeric_limits<float>::infinity());
  u32x16 best_column = {};
  const u32x16 lane = (u32x16)iota_i32();
  for (int64_t i = 0; i < rows.width; i += kLanes) {
    const int64_t left = rows.width - i;
    f32x16 x = load_up_to(logits + i, left);
    if (left < kLanes) x = choose(iota() < float(left), x, splat(-std::numeric_limits<float>::infinity()));
    const u32x16 column = lane + uint32_t(i);
    const f32x16 value = x + gumbel(column, key_low, key_high);
    const i32x16 better = value > best;
    best = choose(better, value, best);
    best_column = choose(better, column, best_column);
  }
  int winner = 0;
  for (int i = 1; i < kLanes; ++i)
    if (best[i] > best[winner] || (best[i] == best[winner] && best_column[i] < best_column[winner])) winner = i;
  rows.index[row] = best_column[winner];
}

}  // namespace

void gumbel_argmax_rows(const float* logits, int64_t num_rows, int64_t width, int64_t stride, const int64_t* keys,
                        int64_t* index, int32_t num_threads) {
  const Rows rows{logits, width, stride, keys, index};
  const PhaseSpec phase{num_rows, Order::Queue};
  run_phases(num_rows > 1 ? num_threads : 1, 1, &phase, sample_row, &rows);
}
