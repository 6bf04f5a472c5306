// Causal attention over the paged cache, for prefill chunks and decodes alike.
//
// A task is a run of query tokens of one sequence and some KV heads. Its rows are, for each KV head, those tokens times
// the query heads that share it. Keys are read in tiles of kTileKeys, at multiples of kTileKeys for any block size and
// any start of the task, with the usual running maximum and sum. A tile that is masked for a row leaves the row's
// maximum, sum and output unchanged, bit for bit: the maximum starts at a finite value, so exp2 of the difference is
// exactly 1, and masked weights are exactly 0. A row's result therefore depends only on its own position and keys. K
// tiles are transposed and V tiles interleaved into the layout of tile.h.
//
// Alternatively, a task is one token from each of several sequences that begin with the same blocks. A tile that some
// of them share is read and packed once for all of their rows. Each row keeps its own maximum, sum and output, so its
// result is bit-identical to computing it alone.
//
// The next tile of all of the task's heads is fetched meanwhile (key_tile.h). Measured on Zen 4, head_dim 64, 4 KV heads,
// decodes of 4,000 tokens, in GB/s of K and V per core: 15 (reading alone 25, all from the caches 43). With half a tile of
// one head fetched ahead: 9. Prefetching KV during the preceding linear layers costs them as much as it gains.

#include <algorithm>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "amx.h"
#include "coded_tile.h"
#include "key_tile.h"
#include "math.h"
#include "ops.h"
#include "scratch.h"
#include "tile.h"

namespace {

constexpr int kKeyTiles = kTileKeys / kTileColumns;
constexpr int kKeyVectors = kTileKeys / kLanes;
// The most rows that a block of a task has.
constexpr int kBlockRows = std::max(kMaxRows, kMaxAmxRows);
constexpr float kLowest = -1e30f;

template <class T>
struct Task {
  const AttentionOp& op;
  const Step& step;
  // the first of its queries, unless it is made by `of`
  TokenBlock queries;
  int64_t num_rows, first_position;

  const int64_t group = op.num_heads / op.num_kv_heads;
  const int64_t head_words = words<T>(op.head_dim);
  const int64_t value_tiles = (op.head_dim + kTileColumns - 1) / kTileColumns;
  const int64_t padded_dim = value_tiles * kTileColumns;
  // a vector of them may be read or written at the last row
  const int64_t rows_held = num_rows + kLanes;

  // for one head and tile at a time: [32 keys][word][key], [32 values][word along keys][value], [row of a block][key]
  char* keys;
  char* values;
  T* weights;
  // for rows in 8 bits: the tile's scales, if rows have one, and memory for its decoded codes
  float* key_scales = nullptr;
  float* value_scales = nullptr;
  T* numbers = nullptr;
  // for all KV heads: [row][head_dim], [row][padded_dim], [row][lane] (sums of weights in 16 parts), [row]
  T* q;
  float* out;
  float* sums;
  float* maxima;

  Task(const AttentionOp& op, const Step& step, const TokenBlock& first, int64_t num_queries)
      : op(op),
        step(step),
        queries(first),
        num_rows(num_queries * first.num_tokens * (op.num_heads / op.num_kv_heads)),
        first_position(step.positions[first.first_token]) {
    const size_t key_bytes = head_words * kKeyTiles * kStepBytes;
    const size_t value_bytes = words<T>(kTileKeys) * value_tiles * kStepBytes;
    const int64_t rows = queries.num_heads * rows_held;
    const int64_t num_scales = op.coding == KvCoding::Int8 ? kTileKeys : 0;
    const int64_t num_numbers = op.coding == KvCoding::Values ? 0 : kTileKeys * op.head_dim;
    Scratch scratch(key_bytes + value_bytes + Scratch::padded<T>(kBlockRows * kTileKeys) +
                    2 * Scratch::padded<float>(num_scales) + Scratch::padded<T>(num_numbers) +
                    Scratch::padded<T>(rows * op.head_dim) + Scratch::padded<float>(rows * padded_dim) +
                    Scratch::padded<float>(rows * kLanes) + Scratch::padded<float>(rows));
    keys = scratch.take<char>(key_bytes);
    values = scratch.take<char>(value_bytes);
    weights = scratch.take<T>(kBlockRows * kTileKeys);
    if (num_scales) {
      key_scales = scratch.take<float>(num_scales);
      value_scales = scratch.take<float>(num_scales);
    }
    numbers = scratch.take<T>(num_numbers);
    q = scratch.take<T>(rows * op.head_dim);
    out = scratch.take<float>(rows * padded_dim);
    sums = scratch.take<float>(rows * kLanes);
    maxima = scratch.take<float>(rows);
  }

  // The same task, with this row as row 0.
  Task from(int64_t row) const {
    Task task = *this;
    task.q += row * op.head_dim;
    task.out += row * padded_dim;
    task.sums += row * kLanes;
    task.maxima += row;
    return task;
  }

  Task of_head(int64_t head) const { return from(head * rows_held); }

  // The rows of one of its queries.
  Task of(const TokenBlock& query, int64_t number) const {
    Task task = from(number * group);
    task.queries = query;
    task.num_rows = query.num_tokens * group;
    task.first_position = step.positions[query.first_token];
    return task;
  }

  // The rows of the segment's queries. Those of several queries see all of its keys.
  Task of(const Segment& segment, const TokenBlock* all) const {
    if (segment.num_queries == 1) return of(all[segment.first_query], segment.first_query);
    Task task = from(segment.first_query * group);
    task.num_rows = segment.num_queries * group;
    task.first_position = segment.end;
    return task;
  }
};

template <class T>
void load_queries(const Task<T>& task, int64_t kv_head) {
  const AttentionOp& op = task.op;
  for (int64_t t = 0; t < task.queries.num_tokens; ++t) {
    const int64_t token = task.queries.first_token + t;
    const T* x = static_cast<const T*>(op.qkv) + token * op.qkv_stride + kv_head * task.group * op.head_dim;
    const float* rope = op.rope ? op.rope + int64_t(task.step.positions[token]) * op.rotary_dim : nullptr;
    for (int64_t h = 0; h < task.group; ++h)
      norm_and_rotate(x + h * op.head_dim, task.q + (t * task.group + h) * op.head_dim, op.head_dim, rope,
                      op.rotary_dim, op.q_norm, op.eps);
  }
}

// A sink is a key without a value: a row starts as if it had already read that key.
template <class T>
void reset(const Task<T>& task, int64_t kv_head) {
  std::fill_n(task.out, task.num_rows * task.padded_dim, 0.0f);
  std::fill_n(task.sums, task.num_rows * kLanes, 0.0f);
  std::fill_n(task.maxima, task.num_rows + kLanes, kLowest);
  if (!task.op.sinks) return;
  for (int64_t row = 0; row < task.num_rows; ++row) {
    task.maxima[row] = task.op.sinks[kv_head * task.group + row % task.group] * kLog2E;
    task.sums[row * kLanes] = 1.0f;
  }
}

// Rows whose weights are computed together.
constexpr int kSoftmaxRows = kLanes;
static_assert(kMaxRows <= kSoftmaxRows);
// A row's products with a tile's keys. They are scaled when they become weights.
using Products = f32x16[kKeyVectors];

template <class T>
__attribute__((noinline)) void mask(const Task<T>& task, int64_t row, int rows, int64_t first_key, Products* products) {
  const int64_t window = task.op.window ? task.op.window : std::numeric_limits<int32_t>::max();
  for (int r = 0; r < rows; ++r) {
    const int32_t position = int32_t(task.first_position + (row + r) / task.group);
    const int32_t earliest = int32_t(position - window);
    for (int v = 0; v < kKeyVectors; ++v) {
      const i32x16 key = iota_i32() + int32_t(first_key + v * kLanes);
      const i32x16 visible = (key <= position) & (key > earliest);
      products[r][v] = choose(visible, products[r][v], splat(-std::numeric_limits<float>::infinity()));
    }
  }
}

// Weights in bfloat16 are computed no more exactly than they are kept: products wait for them.
template <class T>
ALWAYS_INLINE f32x16 exp2_for(f32x16 x) {
  return std::is_same_v<T, float> ? exp2_lanes(x) : rough_exp2_lanes(x);
}

// Turns products into weights, and updates maxima and sums. Returns the factors that scale the earlier output down.
template <class T>
__attribute__((noinline)) f32x16 softmax(const Task<T>& task, int64_t row, int rows, const Products* products,
                                         T* weights) {
  const f32x16 scale = splat(task.op.scale * kLog2E), before = load(task.maxima + row);
  f32x16 best[kSoftmaxRows];
  for (int r = 0; r < rows; ++r) {
    best[r] = products[r][0];
    for (int v = 1; v < kKeyVectors; ++v) best[r] = max(best[r], products[r][v]);
  }
  for (int r = rows; r < kSoftmaxRows; ++r) best[r] = splat(kLowest);
  const f32x16 maxima = horizontal_maxima(best, rows) * scale, highest = choose(maxima > before, maxima, before);
  const f32x16 shrink = exp2_lanes(before - highest);
  store_up_to(task.maxima + row, highest, rows);
  alignas(64) float below[kLanes], factors[kLanes];
  store(below, -highest);
  store(factors, shrink);
  for (int r = 0; r < rows; ++r) {
    f32x16 sum = load(task.sums + (row + r) * kLanes) * factors[r];
    for (int v = 0; v < kKeyVectors; ++v) {
      const f32x16 weight = exp2_for<T>(fma(products[r][v], scale, splat(below[r])));
      sum += weight;
      store(weights + r * kTileKeys + v * kLanes,
            task.value_scales ? weight * load(task.value_scales + v * kLanes) : weight);
    }
    store(task.sums + (row + r) * kLanes, sum);
  }
  return shrink;
}

// Which of a tile's keys a block of rows sees.
struct Visible {
  // Later keys are masked for all rows. Skipping them changes nothing.
  int64_t num_keys;
  bool are_all;

  template <class T>
  Visible(const Task<T>& task, int64_t row, int rows, int64_t first_key) {
    const int64_t earliest = task.first_position + row / task.group;
    const int64_t latest = task.first_position + (row + rows - 1) / task.group;
    num_keys = std::min<int64_t>(kTileKeys, latest + 1 - first_key);
    are_all = first_key + kTileKeys - 1 <= earliest && (!task.op.window || first_key > latest - task.op.window);
  }
};

// Applies the keys' scales and the mask, then the softmax.
template <class T>
ALWAYS_INLINE f32x16 weigh(const Task<T>& task, int64_t row, int rows, int64_t first_key, const Visible& visible,
                           Products* products, T* weights) {
  if (task.key_scales)
    for (int r = 0; r < rows; ++r)
      for (int v = 0; v < kKeyVectors; ++v) products[r][v] *= load(task.key_scales + v * kLanes);
  if (!visible.are_all) mask(task, row, rows, first_key, products);
  return softmax(task, row, rows, products, weights);
}

template <class T, int ROWS>
struct RowBlock {
  // Few rows: two tiles at a time, to have more accumulators than the multiplier's latency.
  static constexpr int kAtOnce = ROWS <= kMaxRows / 2 ? 2 : 1;

  template <int TILES>
  static ALWAYS_INLINE void score_tiles(const Task<T>& task, int64_t row, int first, Products* products) {
    const int64_t stride = task.op.head_dim * sizeof(T), tile_bytes = task.head_words * kStepBytes;
    f32x16 acc[ROWS][TILES * kTileVectors] = {};
    dot<T, ROWS, TILES>(reinterpret_cast<const char*>(task.q) + row * stride, stride, task.keys + first * tile_bytes,
                        tile_bytes, task.head_words, acc);
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < TILES * kTileVectors; ++v) products[r][first * kTileVectors + v] = acc[r][v];
  }

  template <int TILES>
  static ALWAYS_INLINE void add_tiles(const Task<T>& task, int64_t row, int64_t first, int64_t steps, f32x16 shrink) {
    const int64_t tile_bytes = words<T>(kTileKeys) * kStepBytes;
    float* out = task.out + row * task.padded_dim + first * kTileColumns;
    f32x16 acc[ROWS][TILES * kTileVectors];
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < TILES * kTileVectors; ++v)
        acc[r][v] = load(out + r * task.padded_dim + v * kLanes) * shrink[r];
    dot<T, ROWS, TILES>(reinterpret_cast<const char*>(task.weights), kTileKeys * sizeof(T),
                        task.values + first * tile_bytes, tile_bytes, steps, acc);
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < TILES * kTileVectors; ++v) store(out + r * task.padded_dim + v * kLanes, acc[r][v]);
  }

  static void attend(const Task<T>& task, int64_t row, int64_t first_key) {
    const Visible visible(task, row, ROWS, first_key);
    if (visible.num_keys <= 0) return;
    Products products[ROWS];
    for (int tile = 0; tile < kKeyTiles; tile += kAtOnce)
      if (tile * kTileColumns < visible.num_keys)
        score_tiles<kAtOnce>(task, row, tile, products);
      else
        for (int r = 0; r < ROWS; ++r)
          for (int v = 0; v < kTileVectors; ++v) products[r][tile * kTileVectors + v] = f32x16{};
    const f32x16 shrink = weigh(task, row, ROWS, first_key, visible, products, task.weights);
    int64_t tile = 0;
    for (; tile + kAtOnce <= task.value_tiles; tile += kAtOnce)
      add_tiles<kAtOnce>(task, row, tile, words<T>(visible.num_keys), shrink);
    for (; tile < task.value_tiles; ++tile) add_tiles<1>(task, row, tile, words<T>(visible.num_keys), shrink);
  }
};

// What RowBlock::attend does, for up to 32 rows.
template <class T>
void attend_by_amx(AmxShape& shape, const Task<T>& task, int64_t row, int rows, int64_t first_key, Pace& pace) {
  const Visible visible(task, row, rows, first_key);
  if (visible.num_keys <= 0) return;
  const int64_t stride = task.op.head_dim * sizeof(T), tile_bytes = task.head_words * kStepBytes;
  Products products[kMaxAmxRows];
  for (int tile = 0; tile < kKeyTiles; ++tile) {
    pace.step();
    if (tile * kTileColumns < visible.num_keys)
      amx_dot<T>(shape, reinterpret_cast<const char*>(task.q) + row * stride, stride, rows,
                 task.keys + tile * tile_bytes, task.head_words,
                 {&products[0][tile * kTileVectors], sizeof(Products)});
    else
      for (int r = 0; r < rows; ++r)
        for (int v = 0; v < kTileVectors; ++v) products[r][tile * kTileVectors + v] = f32x16{};
  }
  for (int first = 0; first < rows; first += kSoftmaxRows) {
    const int count = std::min(rows - first, kSoftmaxRows);
    pace.step();
    alignas(64) float shrink[kSoftmaxRows];
    store(shrink, weigh(task, row + first, count, first_key, visible, products + first,
                        task.weights + first * kTileKeys));
    for (int r = 0; r < count; ++r) {
      // Most maxima stay.
      if (shrink[r] == 1.0f) continue;
      float* out = task.out + (row + first + r) * task.padded_dim;
      for (int64_t i = 0; i < task.padded_dim; i += kLanes) store(out + i, load(out + i) * shrink[r]);
    }
  }
  const int64_t steps = words<T>(packed_keys<T>(int(visible.num_keys))), value_bytes = words<T>(kTileKeys) * kStepBytes;
  const int64_t out_stride = task.padded_dim * sizeof(float);
  for (int64_t tile = 0; tile < task.value_tiles; ++tile) {
    pace.step();
    amx_dot<T>(shape, reinterpret_cast<const char*>(task.weights), kTileKeys * sizeof(T), rows,
               task.values + tile * value_bytes, steps,
               {task.out + row * task.padded_dim + tile * kTileColumns, out_stride, true});
  }
}

// The steps of `Pace` in attend_rows.
template <class T>
int64_t num_steps(const Task<T>& task) {
  if (!kMayUseAmx<T> || !has_amx()) return 1;
  const int64_t num_blocks = (task.num_rows + kMaxAmxRows - 1) / kMaxAmxRows;
  return num_blocks * (kKeyTiles + kMaxAmxRows / kSoftmaxRows + task.value_tiles);
}

template <class T, int... ROWS>
void attend_rows(AmxShape& shape, const Task<T>& task, int64_t first_key, Pace& pace,
                 std::integer_sequence<int, ROWS...>) {
  if constexpr (kMayUseAmx<T>)
    if (has_amx()) {
      for (int64_t row = 0; row < task.num_rows; row += kMaxAmxRows)
        attend_by_amx(shape, task, row, int(std::min<int64_t>(kMaxAmxRows, task.num_rows - row)), first_key,
                      pace);
      return;
    }
  using Attend = void (*)(const Task<T>&, int64_t, int64_t);
  constexpr Attend attend[] = {RowBlock<T, ROWS + 1>::attend...};
  const RowBlocks blocks{task.num_rows};
  for (int64_t b = 0; b < blocks.count; ++b) attend[blocks.height(b) - 1](task, blocks.begin(b), first_key);
}

template <class T>
void write_result(const Task<T>& task, int64_t kv_head) {
  const AttentionOp& op = task.op;
  for (int64_t row = 0; row < task.num_rows; ++row) {
    const float sum = horizontal_sum(load(task.sums + row * kLanes));
    const int64_t out_row = task.queries.first_row + row / task.group;
    T* out = static_cast<T*>(op.out) + out_row * op.out_stride +
             (kv_head * task.group + row % task.group) * op.head_dim;
    for (int64_t i = 0; i < op.head_dim; i += kLanes)
      store_up_to(out + i, load(task.out + row * task.padded_dim + i) / sum, op.head_dim - i);
  }
}

int64_t first_tile(const AttentionOp& op, int64_t first_position) {
  const int64_t first_visible = op.window ? std::max<int64_t>(0, first_position - op.window + 1) : 0;
  return first_visible / kTileKeys * kTileKeys;
}

// Writes the tile's keys to task.keys, in the layout of tile.h.
template <class T>
void pack_keys(const Task<T>& task, const KeyRows& rows) {
  const AttentionOp& op = task.op;
  if (op.coding == KvCoding::Values) return pack_keys(rows, task.head_words, task.keys);
  if (task.key_scales) read_scales(rows.keys, rows.count, op.head_dim, task.key_scales);
  if (kLooksUpCodes<T>) return pack_coded_keys(op.coding, rows, op.head_dim, task.keys);
  KeyRows numbers = rows;
  read_rows(op.coding, rows.count, op.head_dim, numbers.keys, task.numbers);
  pack_keys(numbers, task.head_words, task.keys);
}

// Does the same for its values in task.values.
template <class T>
void pack_values(const Task<T>& task, const KeyRows& rows) {
  const AttentionOp& op = task.op;
  if (op.coding == KvCoding::Values) return pack_values<T>(rows, op.head_dim, task.values);
  if (task.value_scales) read_scales(rows.values, rows.count, op.head_dim, task.value_scales);
  if (kLooksUpCodes<T>) return pack_coded_values(op.coding, rows, op.head_dim, task.values);
  KeyRows numbers = rows;
  read_rows(op.coding, rows.count, op.head_dim, numbers.values, task.numbers);
  pack_values<T>(numbers, op.head_dim, task.values);
}

// The keys of a task that is a part of a sequence's tokens.
Segment alone(const AttentionOp& op, const Step& step, const TokenBlock& queries) {
  const int64_t first = step.positions[queries.first_token];
  return {first_tile(op, first), first + queries.num_tokens, 0, 1};
}

struct Keys {
  const TokenBlock* queries;
  const Segment* segments;
  int64_t num_segments;
};

// The keys of one of the task's KV heads.
KeySpan span_of(const Keys& all, const Segment& segment, int64_t head) {
  const TokenBlock& first = all.queries[segment.first_query];
  return {first.seq, first.first_head + head, segment.end};
}

// `next`: the keys of the likely next task of this thread. The first ones are fetched.
template <class T>
void run_task(const Task<T>& task, int64_t num_queries, const Keys& all, const Keys& next) {
  const AttentionOp& op = task.op;
  const Step& step = task.step;
  const int64_t first_head = task.queries.first_head, num_heads = task.queries.num_heads;
  const int64_t num_next_heads = next.queries[next.segments[0].first_query].num_heads;
  const auto for_each_head = [&](auto work) {
    const auto of_each = [&](const Task<T>& rows) {
      for (int64_t head = 0; head < num_heads; ++head) work(rows.of_head(head), first_head + head);
    };
    if (num_queries == 1) return of_each(task);
    for (int64_t i = 0; i < num_queries; ++i) of_each(task.of(all.queries[i], i));
  };
  for_each_head([](const Task<T>& rows, int64_t head) {
    load_queries(rows, head);
    reset(rows, head);
  });
  const int64_t lines_of_head = 2 * kTileKeys * op.row_bytes / kLineBytes;
  KeyRows rows;
  Fetch fetch;
  [[maybe_unused]] AmxShape shape;
  // kept by the thread: the rows of each head
  static thread_local std::vector<Task<T>> of_heads;
  const auto attend = [&](const Task<T>& part, int64_t s) {
    const Segment& segment = all.segments[s];
    of_heads.clear();
    for (int64_t head = 0; head < num_heads; ++head) of_heads.push_back(part.of_head(head));
    for (int64_t key = segment.begin; key < segment.end; key += kTileKeys) {
      if (key + kTileKeys < segment.end)
        fetch.begin(op, step, span_of(all, segment, 0), num_heads, key + kTileKeys);
      else if (s + 1 < all.num_segments)
        fetch.begin(op, step, span_of(all, all.segments[s + 1], 0), num_heads, all.segments[s + 1].begin);
      else
        fetch.begin(op, step, span_of(next, next.segments[0], 0), num_next_heads, next.segments[0].begin);
      for (int64_t head = 0; head < num_heads; ++head) {
        find_rows(op, step, span_of(all, segment, head), key, rows);
        const Task<T>& of_head = of_heads[head];
        Pace pace(fetch, lines_of_head * head, lines_of_head, 3 + num_steps(of_head));
        pace.step();
        pack_keys(task, rows);
        pace.step();
        pack_values(task, rows);
        pace.step();
        attend_rows(shape, of_head, key, pace, std::make_integer_sequence<int, kMaxRows>{});
        pace.finish();
      }
    }
  };
  if (num_queries == 1)
    attend(task, 0);
  else
    for (int64_t s = 0; s < all.num_segments; ++s) attend(task.of(all.segments[s], all.queries), s);
  for_each_head([](const Task<T>& rows, int64_t head) { write_result(rows, head); });
}

template <class T>
void attention_chunk(const AttentionOp& op, const Step& step, const AttentionPlan& plan, int64_t chunk) {
  const int64_t last = int64_t(plan.tasks.size()) - 1;
  const AttentionTask &task = plan.tasks[chunk], &after = plan.tasks[std::min(last, chunk + step.num_threads)];
  const TokenBlock *queries = &plan.queries[task.first_query], *later = &plan.queries[after.first_query];
  for (int64_t i = 0; i < task.num_queries; ++i) {
    const TokenBlock& each = queries[i];
    // the only task of its sequence and KV heads: no other one needs this K and V in this step
    if (each.num_tokens == step.query_start[each.seq + 1] - step.query_start[each.seq])
      write_tokens<T>(op, step, each);
  }
  const Segment own = alone(op, step, *queries), next = alone(op, step, *later);
  const auto keys_of = [&](const AttentionTask& of, const TokenBlock* its, const Segment* otherwise) {
    return of.num_segments ? Keys{its, &plan.segments[of.first_segment], of.num_segments} : Keys{its, otherwise, 1};
  };
  run_task(Task<T>(op, step, *queries, task.num_queries), task.num_queries, keys_of(task, queries, &own),
           keys_of(after, later, &next));
}

}  // namespace

void attention(const AttentionOp& op, Dtype dtype, const Step& step, const AttentionPlan& plan, int64_t chunk) {
  if (dtype == Dtype::Float32)
    attention_chunk<float>(op, step, plan, chunk);
  else
    attention_chunk<bf16>(op, step, plan, chunk);
}
