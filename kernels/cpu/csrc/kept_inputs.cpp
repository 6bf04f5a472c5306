// Inputs kept in place of K and V: written into blocks of the cache, read again, and, once projected, written to
// restored KV.
//
// A block holds the inputs of 2 * block_size tokens, one after the other, in place of the K of all heads and then their
// V. In every layer, restored K and V equal those computed with the token: same inputs and weights, in the same order.

#include "kv_cache.h"
#include "ops.h"
#include "rows.h"

namespace {

int64_t size_of(Dtype dtype) { return dtype == Dtype::Float32 ? sizeof(float) : sizeof(bf16); }

// The place of row r among the rows of all blocks.
char* place_of(const KeptInputsOp& op, int64_t row, int64_t size) {
  const int64_t block = row / op.rows_per_block, offset = row % op.rows_per_block;
  return static_cast<char*>(op.cache) + (block * op.block_stride + offset * op.width) * size;
}

}  // namespace

int64_t write_inputs_chunks(const KeptInputsOp&, const Step& step) {
  return step.is_kept ? row_chunks(step.num_rows) : 0;
}

void write_inputs(const KeptInputsOp& op, Dtype dtype, const Step& step, int64_t chunk) {
  const int64_t size = size_of(dtype);
  const RowRange tokens = rows_of_chunk(step.num_rows, chunk);
  for (int64_t token = tokens.begin; token < tokens.end; ++token)
    if (step.input_rows[token] >= 0)
      std::memcpy(place_of(op, step.input_rows[token], size),
                  static_cast<const char*>(op.x) + token * op.x_stride * size, op.width * size);
}

int64_t read_inputs_chunks(const KeptInputsOp&, const Step& step) { return row_chunks(step.num_rows); }

void read_inputs(const KeptInputsOp& op, Dtype dtype, const Step& step, int64_t chunk) {
  const int64_t size = size_of(dtype);
  const RowRange rows = rows_of_chunk(step.num_rows, chunk);
  for (int64_t row = rows.begin; row < rows.end; ++row)
    std::memcpy(static_cast<char*>(op.out) + row * op.x_stride * size, place_of(op, step.input_rows[row], size),
                op.width * size);
}

int64_t restore_kv_chunks(const AttentionOp&, const Step& step) { return row_chunks(step.num_rows); }

void restore_kv(const AttentionOp& op, Dtype dtype, const Step& step, int64_t chunk) {
  const RowRange rows = rows_of_chunk(step.num_rows, chunk);
  const TokenBlock tokens{0, rows.begin, rows.begin, rows.end - rows.begin, 0, op.num_kv_heads};
  if (dtype == Dtype::Float32)
    write_tokens<float>(op, step, tokens);
  else
    write_tokens<bf16>(op, step, tokens);
}
