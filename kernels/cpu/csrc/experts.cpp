// Mixtures of experts. Each row chooses a few experts. Choices are ordered by expert, and each expert's linear layers
// process its choices like any linear layer processes its rows.
//
//   route         row -> its experts and their weights
//   group         choices -> their places in the order of experts
//   spread        rows -> a copy per choice, in that order
//   expert_linear gate and up, then down, of every chosen expert
//   mix           a row's choices -> their weighted sum, in the order of the row's choices
//
// The number of rows of an expert changes how its work is cut, never a row's result: see tile.h.

#include <algorithm>

#include "math.h"
#include "ops.h"
#include "rows.h"
#include "tile.h"

namespace {

constexpr int64_t kWeightBytesPerChunk = 192 << 10;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

float exp_lane(float x) { return exp_negative(splat(-x))[0]; }

// The softmax over all experts uses logits minus the largest, summed from the first expert to the last.
template <class T>
void route_row(const RouteOp& op, int64_t row) {
  const Routing& routing = op.routing;
  const T* logits = static_cast<const T*>(op.logits) + row * op.logits_stride;
  int32_t* chosen = routing.chosen + row * routing.top_k;
  float* weights = routing.weights + row * routing.top_k;
  for (int64_t k = 0; k < routing.top_k; ++k) {
    // For any logits, NaN included, the chosen experts are distinct and exist.
    int32_t best = -1;
    for (int32_t expert = 0; expert < routing.num_experts; ++expert)
      if ((best < 0 || to_float(logits[expert]) > to_float(logits[best])) &&
          std::find(chosen, chosen + k, expert) == chosen + k)
        best = expert;
    chosen[k] = best;
  }
  const float largest = to_float(logits[chosen[0]]);
  float sum = 0.0f;
  for (int64_t i = 0; i < routing.num_experts && !op.normalises; i += kLanes) {
    const int64_t left = std::min<int64_t>(routing.num_experts - i, kLanes);
    const f32x16 each = exp_negative(largest - load_up_to(logits + i, left));
    for (int64_t lane = 0; lane < left; ++lane) sum += each[lane];
  }
  for (int64_t k = 0; k < routing.top_k; ++k) {
    weights[k] = exp_lane(to_float(logits[chosen[k]]) - largest);
    if (op.normalises) sum += weights[k];
  }
  for (int64_t k = 0; k < routing.top_k; ++k) weights[k] /= sum;
}

template <class T>
void mix_row(const SpreadOp& op, int64_t row) {
  const Routing& routing = op.routing;
  const float* weights = routing.weights + row * routing.top_k;
  const int32_t* places = routing.places + row * routing.top_k;
  const T* residual = static_cast<const T*>(op.residual) + row * op.residual_stride;
  T* out = static_cast<T*>(op.out) + row * op.out_stride;
  for (int64_t i = 0; i < op.width; i += kLanes) {
    const int64_t left = op.width - i;
    f32x16 sum = {};
    for (int64_t k = 0; k < routing.top_k; ++k) {
      const float* of_expert = static_cast<const float*>(op.x) + places[k] * op.x_stride;
      sum = fma(splat(weights[k]), load_up_to(of_expert + i, left), sum);
    }
    if (op.residual) sum = load_up_to(residual + i, left) + sum;
    store_up_to(out + i, sum, left);
  }
}

// How the layers of all experts are cut: one after another in `hit`, each into spans of tiles. The number of chunks is
// the most that the step could need, because it is fixed before rows have chosen.
struct ExpertCut {
  int64_t num_tiles, tiles_per_chunk, tile_chunks, rows_at_once;

  ExpertCut(const LinearOp& op, Dtype dtype) {
    num_tiles = ceil_div(op.out_features * (is_gated(op.activation) ? 2 : 1), kTileColumns);
    tiles_per_chunk = std::max<int64_t>(1, kWeightBytesPerChunk / linear_tile_bytes(op, dtype));
    tile_chunks = ceil_div(num_tiles, tiles_per_chunk);
    rows_at_once = linear_rows_at_once(op, dtype);
  }
};

}  // namespace

int64_t route_chunks(const RouteOp&, const Step& step) { return row_chunks(step.num_rows); }

void route(const RouteOp& op, Dtype dtype, const Step& step, int64_t chunk) {
  const RowRange rows = rows_of_chunk(step.num_rows, chunk);
  for (int64_t row = rows.begin; row < rows.end; ++row)
    dtype == Dtype::Float32 ? route_row<float>(op, row) : route_row<bf16>(op, row);
}

void group(const RouteOp& op, const Step& step) {
  const Routing& routing = op.routing;
  const int64_t num_choices = step.num_rows * routing.top_k;
  // Counts, then the next place of each expert.
  static thread_local std::vector<int32_t> next;
  next.assign(routing.num_experts, 0);
  for (int64_t i = 0; i < num_choices; ++i) ++next[routing.chosen[i]];
  int32_t num_hit = 0, place = 0;
  for (int32_t expert = 0; expert < routing.num_experts; ++expert) {
    const int32_t count = next[expert];
    next[expert] = place;
    if (count == 0) continue;
    routing.starts[num_hit] = place;
    routing.hit[++num_hit] = expert;
    place += count;
  }
  routing.starts[num_hit] = place;
  routing.hit[0] = num_hit;
  for (int64_t i = 0; i < num_choices; ++i) routing.places[i] = next[routing.chosen[i]]++;
}

int64_t spread_chunks(const SpreadOp&, const Step& step) { return row_chunks(step.num_rows); }

void spread(const SpreadOp& op, Dtype dtype, const Step& step, int64_t chunk) {
  const int64_t size = dtype == Dtype::Float32 ? sizeof(float) : sizeof(bf16);
  const RowRange rows = rows_of_chunk(step.num_rows, chunk);
  for (int64_t row = rows.begin; row < rows.end; ++row)
    for (int64_t k = 0; k < op.routing.top_k; ++k)
      std::memcpy(static_cast<char*>(op.out) + op.routing.places[row * op.routing.top_k + k] * op.out_stride * size,
                  static_cast<const char*>(op.x) + row * op.x_stride * size, op.width * size);
}

int64_t expert_linear_chunks(const ExpertLinearOp& op, Dtype dtype, const Step& step) {
  const int64_t most_hit = std::min(op.routing.num_experts, step.num_rows * op.routing.top_k);
  return most_hit * ExpertCut(op.linear, dtype).tile_chunks;
}

void expert_linear(const ExpertLinearOp& op, Dtype dtype, const Step&, int64_t chunk) {
  const ExpertCut cut(op.linear, dtype);
  const int64_t number = chunk / cut.tile_chunks;
  if (number >= op.routing.hit[0]) return;
  LinearOp linear = op.linear;
  const int64_t expert = op.routing.hit[1 + number];
  linear.weight = static_cast<const char*>(linear.weight) + expert * op.expert_bytes;
  if (linear.bias) linear.bias += expert * op.expert_columns;
  if (linear.scales) {
    linear.scales += expert * op.expert_columns;
    linear.starts += expert * op.expert_columns;
  }
  const int64_t first_tile = chunk % cut.tile_chunks * cut.tiles_per_chunk;
  const int64_t end_tile = std::min(cut.num_tiles, first_tile + cut.tiles_per_chunk);
  const int64_t end = op.routing.starts[number + 1];
  for (int64_t row = op.routing.starts[number]; row < end; row += cut.rows_at_once)
    linear_span(linear, dtype, {row, std::min(cut.rows_at_once, end - row), first_tile, end_tile});
}

void mix(const SpreadOp& op, Dtype dtype, const Step& step, int64_t chunk) {
  const RowRange rows = rows_of_chunk(step.num_rows, chunk);
  for (int64_t row = rows.begin; row < rows.end; ++row)
    dtype == Dtype::Float32 ? mix_row<float>(op, row) : mix_row<bf16>(op, row);
}
