// Norms and rotates K, and writes K and V into the paged cache.

#include "kv_cache.h"
#include "ops.h"

void write_kv(const AttentionOp& op, Dtype dtype, const Step& step, const AttentionPlan& plan, int64_t chunk) {
  if (dtype == Dtype::Float32)
    write_tokens<float>(op, step, plan.writes[chunk]);
  else
    write_tokens<bf16>(op, step, plan.writes[chunk]);
}
