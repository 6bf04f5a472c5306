// Causal attention over the paged cache, for prefill chunks and decodes alike.
//
// A task is a run of query tokens of one sequence and one KV head; its rows are those tokens times the query heads
// that share the KV head. Keys are walked in tiles of kTileKeys at multiples of kTileKeys, whatever the block size
// and wherever the task begins, with the usual running maximum and sum. A tile that is masked for a row leaves its
// maximum, sum and output bit for bit as they were (the maximum starts at a finite value, so that exp2 of the
// difference is exactly 1, and masked weights are exactly 0). So a row's result depends on its own position and keys
// only. K tiles are transposed and V tiles interleaved into the layout of tile.h.

#include <algorithm>
#include <limits>
#include <utility>

#include "kv_cache.h"
#include "math.h"
#include "ops.h"
#include "scratch.h"
#include "tile.h"
#include "transpose.h"

namespace {

constexpr int kTileKeys = 64;
constexpr int kKeyTiles = kTileKeys / kTileColumns;
constexpr int kKeyVectors = kTileKeys / kLanes;
constexpr float kLowest = -1e30f;

template <class T>
struct Task {
  const AttentionOp& op;
  const Step& step;
  const QueryBlock& queries;
  const int64_t kv_head;

  const int64_t group = op.num_heads / op.num_kv_heads;
  const int64_t num_rows = queries.num_tokens * group;
  const int64_t first_position = step.positions[queries.first_token];
  const int64_t end_position = first_position + queries.num_tokens;
  const int64_t head_words = words<T>(op.head_dim);
  const int64_t value_tiles = (op.head_dim + kTileColumns - 1) / kTileColumns;
  const int64_t padded_dim = value_tiles * kTileColumns;

  // [row][head_dim]
  T* q;
  // [32 keys at a time][word][key]
  char* keys;
  // [32 values at a time][word along keys][value]
  char* values;
  // of one row block: [row][key]
  T* weights;
  // [row][padded_dim]
  float* out;
  // [row][lane]: partial sums of the weights
  float* sums;
  // [row]
  float* maxima;

  Task(const AttentionOp& op, const Step& step, const QueryBlock& queries, int64_t kv_head)
      : op(op), step(step), queries(queries), kv_head(kv_head) {
    const size_t key_bytes = head_words * kKeyTiles * kStepBytes;
    const size_t value_bytes = words<T>(kTileKeys) * value_tiles * kStepBytes;
    const int64_t rows = num_rows + kLanes;
    Scratch scratch(Scratch::padded<T>(rows * op.head_dim) + key_bytes + value_bytes +
                    Scratch::padded<T>(kMaxRows * kTileKeys) + Scratch::padded<float>(rows * padded_dim) +
                    Scratch::padded<float>(rows * kLanes) + Scratch::padded<float>(rows));
    q = scratch.take<T>(rows * op.head_dim);
    keys = scratch.take<char>(key_bytes);
    values = scratch.take<char>(value_bytes);
    weights = scratch.take<T>(kMaxRows * kTileKeys);
    out = scratch.take<float>(rows * padded_dim);
    sums = scratch.take<float>(rows * kLanes);
    maxima = scratch.take<float>(rows);
  }
};

template <class T>
void load_queries(const Task<T>& task) {
  const AttentionOp& op = task.op;
  for (int64_t t = 0; t < task.queries.num_tokens; ++t) {
    const int64_t token = task.queries.first_token + t;
    const T* x = static_cast<const T*>(op.qkv) + token * op.qkv_stride + task.kv_head * task.group * op.head_dim;
    const float* rope = op.rope ? op.rope + int64_t(task.step.positions[token]) * op.head_dim : nullptr;
    for (int64_t h = 0; h < task.group; ++h)
      norm_and_rotate(x + h * op.head_dim, task.q + (t * task.group + h) * op.head_dim, op.head_dim, rope,
                      static_cast<const T*>(op.q_norm), op.eps);
  }
}

template <class T>
void reset(const Task<T>& task) {
  std::fill_n(task.out, task.num_rows * task.padded_dim, 0.0f);
  std::fill_n(task.sums, task.num_rows * kLanes, 0.0f);
  std::fill_n(task.maxima, task.num_rows + kLanes, kLowest);
}

template <class T>
struct KeyRows {
  const T* keys[kTileKeys];
  const T* values[kTileKeys];
};

// The K and V rows of a tile. Those that no query may see yet are zeros: their memory may hold anything.
template <class T>
void find_rows(const Task<T>& task, int64_t first_key, KeyRows<T>& rows) {
  alignas(64) static const T zeros[kMaxHeadDim] = {};
  const AttentionOp& op = task.op;
  const int32_t* table = task.step.block_table + task.queries.seq * task.step.block_table_stride;
  const int64_t valid = std::min<int64_t>(kTileKeys, task.end_position - first_key);
  int64_t block = first_key / op.block_size, slot = first_key % op.block_size;
  for (int64_t i = 0; i < valid; ++i) {
    rows.keys[i] = key_of<T>(op, table[block], slot, task.kv_head);
    rows.values[i] = rows.keys[i] + op.value_offset;
    if (++slot == op.block_size) ++block, slot = 0;
  }
  for (int64_t i = valid; i < kTileKeys; ++i) rows.keys[i] = rows.values[i] = zeros;
}

template <class T>
void pack_keys(const Task<T>& task, const T* const (&rows)[kTileKeys]) {
  const auto* words = reinterpret_cast<const uint32_t* const*>(rows);
  for (int first = 0; first < kTileKeys; first += kLanes) {
    char* tile = task.keys + first / kTileColumns * task.head_words * kStepBytes + first % kTileColumns * kWordBytes;
    for (int64_t word = 0; word < task.head_words; word += kLanes)
      transpose16(words + first, word, int(std::min<int64_t>(kLanes, task.head_words - word)),
                  reinterpret_cast<uint32_t*>(tile + word * kStepBytes), kTileColumns);
  }
}

ALWAYS_INLINE void pack_value_word(const float* const* rows, int64_t offset, int64_t count, char* to) {
  store_up_to(reinterpret_cast<float*>(to), load_up_to(rows[0] + offset, count), kLanes);
}

// Two keys' values, interleaved.
ALWAYS_INLINE void pack_value_word(const bf16* const* rows, int64_t offset, int64_t count, char* to) {
  u16x16 even = {}, odd = {};
  const size_t bytes = std::min<int64_t>(kLanes, count) * sizeof(bf16);
  if (count >= kLanes) {
    std::memcpy(&even, rows[0] + offset, sizeof even);
    std::memcpy(&odd, rows[1] + offset, sizeof odd);
  } else {
    std::memcpy(&even, rows[0] + offset, bytes);
    std::memcpy(&odd, rows[1] + offset, bytes);
  }
  const u32x16 pairs = __builtin_convertvector(even, u32x16) | (__builtin_convertvector(odd, u32x16) << 16);
  std::memcpy(to, &pairs, sizeof pairs);
}

template <class T>
void pack_values(const Task<T>& task, const T* const (&rows)[kTileKeys]) {
  const int64_t tile_bytes = words<T>(kTileKeys) * kStepBytes;
  for (int64_t word = 0; word < words<T>(kTileKeys); ++word)
    for (int64_t column = 0; column < task.padded_dim; column += kLanes) {
      char* to = task.values + column / kTileColumns * tile_bytes + word * kStepBytes +
                 column % kTileColumns * kWordBytes;
      const int64_t count = task.op.head_dim - column;
      if (count > 0)
        pack_value_word(rows + word * kWordValues<T>, column, count, to);
      else
        std::memset(to, 0, kLanes * kWordBytes);
    }
}

template <class T, int ROWS>
struct RowBlock {
  using Scores = f32x16[ROWS][kKeyVectors];

  static void mask(const Task<T>& task, int64_t row, int64_t first_key, Scores& scores) {
    const int64_t window = task.op.window ? task.op.window : std::numeric_limits<int32_t>::max();
    for (int r = 0; r < ROWS; ++r) {
      const int32_t position = int32_t(task.first_position + (row + r) / task.group);
      const int32_t earliest = int32_t(position - window);
      for (int v = 0; v < kKeyVectors; ++v) {
        const i32x16 key = iota_i32() + int32_t(first_key + v * kLanes);
        const i32x16 visible = (key <= position) & (key > earliest);
        scores[r][v] = visible ? scores[r][v] : splat(-std::numeric_limits<float>::infinity());
      }
    }
  }

  // Turns scores into weights, updates maxima and sums; returns by what factor the earlier output shrinks.
  static ALWAYS_INLINE f32x16 softmax(const Task<T>& task, int64_t row, Scores& scores) {
    alignas(64) float highest[kLanes];
    const f32x16 before = load(task.maxima + row);
    store(highest, before);
    for (int r = 0; r < ROWS; ++r) {
      f32x16 best = scores[r][0];
      for (int v = 1; v < kKeyVectors; ++v) best = max(best, scores[r][v]);
      const float maximum = horizontal_max(best);
      highest[r] = maximum > highest[r] ? maximum : highest[r];
    }
    const f32x16 shrink = exp2_lanes(before - load(highest));
    for (int r = 0; r < ROWS; ++r) {
      task.maxima[row + r] = highest[r];
      f32x16 sum = load(task.sums + (row + r) * kLanes) * shrink[r];
      for (int v = 0; v < kKeyVectors; ++v) {
        const f32x16 weight = exp2_lanes(scores[r][v] - highest[r]);
        sum += weight;
        store(task.weights + r * kTileKeys + v * kLanes, weight);
      }
      store(task.sums + (row + r) * kLanes, sum);
    }
    return shrink;
  }

  static void add_values(const Task<T>& task, int64_t row, f32x16 shrink) {
    const int64_t steps = words<T>(kTileKeys);
    for (int64_t tile = 0; tile < task.value_tiles; ++tile) {
      f32x16 acc[ROWS][kTileVectors];
      float* out = task.out + row * task.padded_dim + tile * kTileColumns;
      for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < kTileVectors; ++v) acc[r][v] = load(out + r * task.padded_dim + v * kLanes) * shrink[r];
      dot<T, ROWS, 1>(reinterpret_cast<const char*>(task.weights), kTileKeys * sizeof(T),
                      task.values + tile * steps * kStepBytes, 0, steps, acc);
      for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < kTileVectors; ++v) store(out + r * task.padded_dim + v * kLanes, acc[r][v]);
    }
  }

  static void attend(const Task<T>& task, int64_t row, int64_t first_key) {
    const int64_t earliest = task.first_position + row / task.group;
    const int64_t latest = task.first_position + (row + ROWS - 1) / task.group;
    if (latest < first_key) return;
    const int64_t stride = task.op.head_dim * sizeof(T);
    const char* q = reinterpret_cast<const char*>(task.q) + row * stride;
    const float scale = task.op.scale * kLog2E;
    Scores scores;
    for (int tile = 0; tile < kKeyTiles; ++tile) {
      f32x16 acc[ROWS][kTileVectors] = {};
      dot<T, ROWS, 1>(q, stride, task.keys + tile * task.head_words * kStepBytes, 0, task.head_words, acc);
      for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < kTileVectors; ++v) scores[r][tile * kTileVectors + v] = acc[r][v] * scale;
    }
    const bool all_visible =
        first_key + kTileKeys - 1 <= earliest && (!task.op.window || first_key > latest - task.op.window);
    if (!all_visible) mask(task, row, first_key, scores);
    add_values(task, row, softmax(task, row, scores));
  }
};

template <class T, int... ROWS>
void attend_rows(const Task<T>& task, const RowBlocks& blocks, int64_t first_key,
                 std::integer_sequence<int, ROWS...>) {
  using Attend = void (*)(const Task<T>&, int64_t, int64_t);
  constexpr Attend attend[] = {RowBlock<T, ROWS + 1>::attend...};
  for (int64_t b = 0; b < blocks.count; ++b) attend[blocks.height(b) - 1](task, blocks.begin(b), first_key);
}

template <class T>
void write_result(const Task<T>& task) {
  const AttentionOp& op = task.op;
  for (int64_t row = 0; row < task.num_rows; ++row) {
    const float sum = horizontal_sum(load(task.sums + row * kLanes));
    const int64_t token = task.queries.first_token + row / task.group;
    T* out = static_cast<T*>(op.out) + token * op.out_stride +
             (task.kv_head * task.group + row % task.group) * op.head_dim;
    for (int64_t i = 0; i < op.head_dim; i += kLanes)
      store_up_to(out + i, load(task.out + row * task.padded_dim + i) / sum, op.head_dim - i);
  }
}

template <class T>
void run_task(const Task<T>& task) {
  load_queries(task);
  reset(task);
  const RowBlocks blocks{task.num_rows};
  const int64_t first_visible = task.op.window ? std::max<int64_t>(0, task.first_position - task.op.window + 1) : 0;
  for (int64_t key = first_visible / kTileKeys * kTileKeys; key < task.end_position; key += kTileKeys) {
    KeyRows<T> rows;
    find_rows(task, key, rows);
    pack_keys(task, rows.keys);
    pack_values(task, rows.values);
    attend_rows(task, blocks, key, std::make_integer_sequence<int, kMaxRows>{});
  }
  write_result(task);
}

template <class T>
void attention_chunk(const AttentionOp& op, const Step& step, const QueryBlock& queries, int64_t kv_head) {
  const int64_t query_len = step.query_start[queries.seq + 1] - step.query_start[queries.seq];
  // the only task of its sequence and KV head: nobody else needs this K and V in this step
  if (queries.num_tokens == query_len) write_kv_head<T>(op, step, queries, kv_head);
  run_task(Task<T>(op, step, queries, kv_head));
}

}  // namespace

void attention(const AttentionOp& op, Dtype dtype, const Step& step, const AttentionPlan& plan, int64_t chunk) {
  const QueryBlock& queries = plan.queries[chunk / op.num_kv_heads];
  const int64_t kv_head = chunk % op.num_kv_heads;
  if (dtype == Dtype::Float32)
    attention_chunk<float>(op, step, queries, kv_head);
  else
    attention_chunk<bf16>(op, step, queries, kv_head);
}
