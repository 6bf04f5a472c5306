// The operations of a program: plain structs that Python fills in (kernels/cpu/structs.py mirrors them).
//
// Strides and widths count elements. Every pointer stays valid and unchanged for the life of the program.
#pragma once

#include <cstdint>
#include <vector>

#include "vec.h"

enum class Dtype : int32_t { Float32 = 0, Bfloat16 = 1 };

enum class Activation : int32_t {
  None = 0,
  Relu = 1,
  Gelu = 2,
  GeluTanh = 3,
  SiluGated = 4,
  GeluTanhGated = 5,
  ClampedSwiglu = 6,
};

// Whether two of the weight's columns, gate and up, yield one column of the output. All from SiluGated on do.
constexpr bool is_gated(Activation activation) {
  return activation >= Activation::SiluGated;
}

// The format of a linear layer's weight: see tile.h, groups.h, and gguf.h for those from Q4_0 on.
enum class Weight : int32_t {
  AsRows = 0,
  Int8 = 1,
  Int4 = 2,
  Int8Groups = 3,
  Fp8 = 4,
  Mxfp4 = 5,
  Q4_0 = 6,
  Q4_1 = 7,
  Q5_0 = 8,
  Q5_1 = 9,
  Q8_0 = 10,
  Q2_K = 11,
  Q3_K = 12,
  Q4_K = 13,
  Q5_K = 14,
  Q6_K = 15,
  IQ4_NL = 16,
  IQ4_XS = 17,
};

constexpr bool is_gguf(Weight kind) { return kind >= Weight::Q4_0; }

// Whether rows are in eight bits, written by Quantise.
constexpr bool takes_codes(Weight kind) {
  return kind == Weight::Int8 || kind == Weight::Int4 || kind == Weight::Int8Groups || is_gguf(kind);
}

enum class OpKind : int32_t {
  Embed = 0,
  Norm = 1,
  Linear = 2,
  WriteKv = 3,
  Attention = 4,
  Gather = 5,
  WriteInputs = 6,
  ReadInputs = 7,
  RestoreKv = 8,
  Route = 9,
  Group = 10,
  Spread = 11,
  ExpertLinear = 12,
  Mix = 13,
  Quantise = 14,
  Share = 15,
  Meet = 16,
  SumRanks = 17,
  JoinRanks = 18,
  Shrink = 19,
};

// out = table[ids + offset] * scale (+ add_to)
struct EmbedOp {
  const void* table;
  const int32_t* ids;
  const void* add_to;
  void* out;
  int64_t width, offset, add_stride, out_stride;
  // 0: the table's rows are contiguous. Else the table is a linear layer's weight, and this is the bytes of its tiles.
  int64_t tile_bytes;
  float scale;
  // AsRows, or a type of GGUF
  Weight weight_kind;
};

// out = norm(x) (* weight) (+ bias) (+ residual)
struct NormOp {
  const void* x;
  const float* weight;
  const float* bias;
  const void* residual;
  void* out;
  int64_t width, x_stride, residual_stride, out_stride;
  float eps;
  // 1: layer norm, 0: RMS norm
  int32_t centred;
};

// Quantises rows to eight bits, for linear layers with weights in eight or four. Each value x becomes a code, round(x /
// scale); the row's scale is its largest absolute value over 127. Codes are padded with zeros to whole blocks of
// values, and the scale follows. For Int8, 128 is added to codes. For Int4 and Int8Groups, the scale is followed by an
// int32 for each group: the sum of its codes times -zero. For types of GGUF, each 32 values have a scale: codes are
// followed by all scales, and then by the int32 sum of each 16 codes.
struct QuantiseOp {
  const void* x;
  uint8_t* out;
  int64_t width, x_stride, out_stride;
  // values of a group
  int64_t group;
  // rows per row of the step: 1, or the number of experts per row
  int64_t rows_each;
  Weight weight_kind;
  // the zero of all groups; 1 if each has its own
  int32_t zero;
};

// The adapters of a linear layer: see adapters.cpp. Adapter number i, from 1 on, is at index i - 1.
struct Adapters {
  // [row][part * rank + r], written by Shrink; null: the layer has no adapters
  const float* shrunk;
  // [adapter][r][column], in the columns of the layer's tiles, in the dtype
  const void* expand;
  // one per adapter
  const float* scales;
  // the layer's part that each column of the tiles belongs to
  const int32_t* parts;
  int64_t shrunk_stride, rank, num_columns;
};

// out = activation(x @ weight + bias + adapters) (+ residual); the weight is in tiles, see tile.h
struct LinearOp {
  const void* x;
  const void* weight;
  const float* bias;
  // For Int8: the scale of each column, and the initial value of its sum. That value cancels the 128 that represents 0
  // in x.
  const float* scales;
  const int32_t* starts;
  const void* residual;
  void* out;
  int64_t in_features, out_features, x_stride, residual_stride, out_stride;
  // For Int4, Int8Groups, Fp8 and Mxfp4: the values of a group, 1 if its scales are float32, and 1 if it has zeros.
  int64_t group;
  int32_t float_scales, has_zeros;
  Activation activation;
  // 1: out is float32 for any dtype of x
  int32_t float32_out;
  Weight weight_kind;
  // for ClampedSwiglu
  float swiglu_alpha, swiglu_limit;
  Adapters adapters;
  // the adapter of each row, or null if no row has one; set for each step
  const int32_t* adapter_of_row;
};

// shrunk = x @ (the a of the row's adapter), as float32, for rows with an adapter. The adapters' a are stored one after
// another, each like a linear layer's weight with columns [part][r].
struct ShrinkOp {
  LinearOp linear;
  int64_t adapter_bytes;
};

// The contents of a row of the cache: see kv_rows.h.
enum class KvCoding : int32_t { Values, Fp8, Int8 };

struct AttentionOp {
  const void* qkv;
  void* out;
  // for this layer; block b's K begins at cache + b * block_stride, its V value_offset after that, in bytes
  void* cache;
  const float* rope;
  const float* q_norm;
  const float* k_norm;
  // one logit per head that takes part in the softmax without a value; null: none
  const float* sinks;
  int64_t qkv_stride, out_stride, block_stride, value_offset, row_bytes;
  int32_t num_heads, num_kv_heads, head_dim, block_size;
  KvCoding coding;
  // 0: all tokens
  int32_t window;
  // 1: only sequences with kept inputs, and the cache is restored KV; 0: all other sequences
  int32_t of_kept;
  // the number of a head's first values that are rotated, and the width of rope
  int32_t rotary_dim;
  // the layer group of these slots and this block table
  int32_t group;
  // of scores, above 0; of norms
  float scale, eps;
};

// Inputs of tokens, and the cache's blocks of this layer as rows of inputs. Row r of all blocks begins at cache + r /
// rows_per_block * block_stride + r % rows_per_block * width.
struct KeptInputsOp {
  const void* x;
  void* out;
  void* cache;
  // the stride of x or out
  int64_t x_stride;
  int64_t block_stride, rows_per_block, width;
};

// out[i] = x[step.rows[i]]
struct GatherOp {
  const void* x;
  void* out;
  int64_t width, x_stride, out_stride;
};

// The experts of each row: see experts.cpp. One set of buffers serves all layers, one after the other.
struct Routing {
  int64_t num_experts, top_k;
  // per row: its experts, the first choice first, and their weights
  int32_t* chosen;
  float* weights;
  // per choice: its place when choices are ordered by expert
  int32_t* places;
  // [0]: the number of experts chosen by any row; from [1] on, these experts, ascending
  int32_t* hit;
  // per expert in `hit`: the start of its choices; after the last one, their end
  int32_t* starts;
};

// Chooses experts by logits (Route), and orders all choices by expert (Group).
struct RouteOp {
  Routing routing;
  const void* logits;
  int64_t logits_stride;
  // 1: a row's weights are scaled to sum to one
  int32_t normalises;
};

// Spread: out[places[choice]] = x[row of the choice].
//
// Mix: out[row] = (residual[row] +) sum of weight * x[places[choice]] over the row's choices, with x in float32.
struct SpreadOp {
  Routing routing;
  const void* x;
  const void* residual;
  void* out;
  int64_t width, x_stride, residual_stride, out_stride;
};

// A linear layer of each expert, over the rows of its choices. Weights are stored one after another, and so are biases
// and, for Int8, the scales and starts of columns.
struct ExpertLinearOp {
  Routing routing;
  LinearOp linear;
  int64_t expert_bytes, expert_columns;
};

// One rank's view of the memory that ranks share: see ranks.cpp.
struct Ranks {
  char* shared;
  int64_t rank, size;
  // Bytes of a slot, a multiple of 64.
  int64_t slot_bytes;
  // Meetings that this rank has joined.
  int64_t num_meetings;
};

// Share: writes x to where other ranks can read it after the next meeting. Meet: waits until all ranks have arrived.
struct ShareOp {
  Ranks* ranks;
  const void* x;
  int64_t width, x_stride;
  // 1: x is float32, for any dtype
  int32_t is_float32;
};

// out = sum of the rows shared by all ranks (+ residual)
struct SumRanksOp {
  Ranks* ranks;
  const void* residual;
  void* out;
  int64_t width, residual_stride, out_stride;
};

// out = the first columns of the ranks' rows, side by side, on rank 0. All ranks share equally many columns.
struct JoinRanksOp {
  Ranks* ranks;
  float* out;
  int64_t width, out_stride;
};

struct Op {
  OpKind kind;
  Dtype dtype;
  // the rows of its result: 0: one per token, 1: one per entry of step.rows, 2: one per restored token
  int32_t of_rows;
  union {
    EmbedOp embed;
    NormOp norm;
    LinearOp linear;
    AttentionOp attention;
    GatherOp gather;
    KeptInputsOp inputs;
    RouteOp route;
    SpreadOp spread;
    ExpertLinearOp expert_linear;
    QuantiseOp quantise;
    ShareOp share;
    SumRanksOp sum_ranks;
    JoinRanksOp join_ranks;
    ShrinkOp shrink;
  };
};

// One run of a program: the buffers of StepInputs, and the numbers of entries in use.
struct Step {
  int64_t num_tokens;
  int64_t num_rows;
  int64_t num_seqs;
  // from a sequence's blocks to the next one's, and from a layer group's blocks to the next one's
  int64_t block_table_stride, group_table_stride;
  // from a group's slots to the next one's
  int64_t slots_stride;
  int64_t num_restored;
  const int32_t* positions;
  const int32_t* slots;
  const int32_t* query_start;
  const int32_t* context_len;
  // 1: the sequence fills its blocks from the last slot down
  const int32_t* is_reversed;
  const int32_t* block_table;
  // the rows that gather reads; in the forward program: tokens, ascending, and a run of each sequence's
  const int32_t* rows;
  // per sequence: 1 if its inputs are kept; null: no inputs are kept
  const int32_t* is_kept;
  // per token: the cache's row for its inputs, or -1. For a restored token: the row with its inputs.
  const int32_t* input_rows;
  const int32_t* restored_rows;
  const int32_t* restored_slots;
  const int32_t* restored_positions;
  // the adapter of each token, and of each of `rows`; 0: none. Null: no row has one.
  const int32_t* adapters;
  const int32_t* row_adapters;
  // if not null: receives the clock at the end of each op
  int64_t* ended_ns;
  int32_t num_threads;
};

// Some tokens of a sequence, and some of the KV heads. Results are written to rows from first_row on.
struct TokenBlock {
  int64_t seq, first_token, first_row, num_tokens, first_head, num_heads;
};

// Keys from begin up to end: one query's own, up to its position, or those that several queries share.
struct Segment {
  int64_t begin, end, first_query, num_queries;
};

// A run of plan.queries with equal heads. If there are several, each is a token of another sequence, and the segments
// say which keys they share.
struct AttentionTask {
  int64_t first_query, num_queries, first_segment, num_segments;
};

// The tasks of attention in this step. They are the same for all layers with equally many heads and rows, and with the
// same blocks in common.
struct AttentionPlan {
  int64_t num_heads, num_kv_heads;
  bool of_rows, of_kept;
  // the group of layers with the blocks that sequences share; -1: each sequence reads all of its keys
  int64_t shared_group;
  std::vector<TokenBlock> queries;
  std::vector<Segment> segments;
  std::vector<AttentionTask> tasks;
  // tokens with K and V written before any attention begins; for other sequences, their only task writes K and V
  std::vector<TokenBlock> writes;
};

// Fills in the plan's blocks.
void make_attention_plan(const Step& step, int64_t block_size, AttentionPlan& plan);

int64_t embed_chunks(const EmbedOp& op, const Step& step);
int64_t norm_chunks(const NormOp& op, const Step& step);
int64_t linear_chunks(const LinearOp& op, Dtype dtype, const Step& step);
int64_t gather_chunks(const GatherOp& op, const Step& step);

void embed(const EmbedOp& op, Dtype dtype, const Step& step, int64_t chunk);
void norm(const NormOp& op, Dtype dtype, const Step& step, int64_t chunk);
void linear(const LinearOp& op, Dtype dtype, const Step& step, int64_t chunk);
void write_kv(const AttentionOp& op, Dtype dtype, const Step& step, const AttentionPlan& plan, int64_t chunk);
void attention(const AttentionOp& op, Dtype dtype, const Step& step, const AttentionPlan& plan, int64_t chunk);
void gather(const GatherOp& op, Dtype dtype, const Step& step, int64_t chunk);

int64_t write_inputs_chunks(const KeptInputsOp& op, const Step& step);
int64_t read_inputs_chunks(const KeptInputsOp& op, const Step& step);
int64_t restore_kv_chunks(const AttentionOp& op, const Step& step);

void write_inputs(const KeptInputsOp& op, Dtype dtype, const Step& step, int64_t chunk);
void read_inputs(const KeptInputsOp& op, Dtype dtype, const Step& step, int64_t chunk);
void restore_kv(const AttentionOp& op, Dtype dtype, const Step& step, int64_t chunk);

// Multiplies some rows with some tiles of a linear layer's weight.
struct LinearSpan {
  int64_t first_row, num_rows, first_tile, end_tile;
};

void linear_span(const LinearOp& op, Dtype dtype, const LinearSpan& span);

// How many rows stay in the caches while a chunk goes through its tiles.
int64_t linear_rows_at_once(const LinearOp& op, Dtype dtype);

int64_t linear_tile_bytes(const LinearOp& op, Dtype dtype);

// Writes the results of a block of rows and a tile: adapters and all that follows. Row r's sums begin at
// sums[r * stride]. Rows are bfloat16.
void finish_linear(const LinearOp& op, int64_t row, int rows, int64_t tile, f32x16* sums, int64_t stride);

// Adds the result of these rows' adapters to the sums of a tile. Row r's vectors begin at sums[r * stride].
void add_adapters(const LinearOp& op, Dtype dtype, int64_t row, int rows, int64_t tile, f32x16* sums, int64_t stride);

int64_t shrink_chunks(const ShrinkOp& op, const Step& step);

void shrink(const ShrinkOp& op, Dtype dtype, const Step& step, int64_t chunk);

int64_t quantise_chunks(const QuantiseOp& op, const Step& step);

void quantise(const QuantiseOp& op, Dtype dtype, const Step& step, int64_t chunk);

int64_t route_chunks(const RouteOp& op, const Step& step);
int64_t spread_chunks(const SpreadOp& op, const Step& step);
int64_t expert_linear_chunks(const ExpertLinearOp& op, Dtype dtype, const Step& step);

void route(const RouteOp& op, Dtype dtype, const Step& step, int64_t chunk);
void group(const RouteOp& op, const Step& step);
void spread(const SpreadOp& op, Dtype dtype, const Step& step, int64_t chunk);
void expert_linear(const ExpertLinearOp& op, Dtype dtype, const Step& step, int64_t chunk);
void mix(const SpreadOp& op, Dtype dtype, const Step& step, int64_t chunk);

int64_t rank_rows_chunks(const Step& step);

void share(const ShareOp& op, Dtype dtype, const Step& step, int64_t chunk);
void meet(const ShareOp& op);
void sum_ranks(const SumRanksOp& op, Dtype dtype, const Step& step, int64_t chunk);
void join_ranks(const JoinRanksOp& op, const Step& step, int64_t chunk);
