// Embedding lookup. Rows of the table, optionally added to another value (learned positions).

#include "ops.h"
#include "rows.h"

int64_t embed_chunks(const EmbedOp&, const Step& step) { return row_chunks(step.num_rows); }

template <class T>
static void embed_rows(const EmbedOp& op, RowRange rows) {
  const T* table = static_cast<const T*>(op.table);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const T* from = table + (op.ids[row] + op.offset) * op.width;
    T* to = static_cast<T*>(op.out) + row * op.out_stride;
    if (!op.add_to) {
      std::memcpy(to, from, op.width * sizeof(T));
      continue;
    }
    const T* add = static_cast<const T*>(op.add_to) + row * op.add_stride;
    for (int64_t i = 0; i < op.width; i += kLanes) {
      const int64_t left = op.width - i;
      store_up_to(to + i, load_up_to(from + i, left) + load_up_to(add + i, left), left);
    }
  }
}

void embed(const EmbedOp& op, Dtype dtype, const Step& step, int64_t chunk) {
  const RowRange rows = rows_of_chunk(step.num_rows, chunk);
  if (dtype == Dtype::Float32)
    embed_rows<float>(op, rows);
  else
    embed_rows<bf16>(op, rows);
}
