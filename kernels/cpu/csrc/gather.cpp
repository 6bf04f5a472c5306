// Gathers the rows of the hidden states that need logits.

#include "ops.h"
#include "rows.h"

int64_t gather_chunks(const GatherOp&, const Step& step) { return row_chunks(step.num_rows); }

void gather(const GatherOp& op, Dtype dtype, const Step& step, int64_t chunk) {
  const int64_t size = dtype == Dtype::Float32 ? sizeof(float) : sizeof(bf16);
  const RowRange rows = rows_of_chunk(step.num_rows, chunk);
  for (int64_t row = rows.begin; row < rows.end; ++row)
    std::memcpy(static_cast<char*>(op.out) + row * op.out_stride * size,
                static_cast<const char*>(op.x) + step.rows[row] * op.x_stride * size, op.width * size);
}
