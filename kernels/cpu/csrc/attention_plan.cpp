// Cuts a step into attention tasks.

#include <algorithm>

#include "ops.h"

namespace {

// Query heads times tokens of a task. Many rows share the cost of packing keys and values (measured at 2048 tokens: 115
// ms with 60 rows, 105 with 120, 103 with 240). Few give all threads work.
constexpr int64_t kMinRowsPerTask = 60, kMaxRowsPerTask = 240;
constexpr int64_t kTokensPerWrite = 32;
constexpr int64_t kTasksPerThread = 4;

void cut(const TokenBlock& whole, int64_t size, std::vector<TokenBlock>& out) {
  for (int64_t done = 0; done < whole.num_tokens; done += size) {
    TokenBlock part = whole;
    part.first_token += done;
    part.first_row += done;
    part.num_tokens = std::min(size, whole.num_tokens - done);
    out.push_back(part);
  }
}

TokenBlock tokens_of(const Step& step, int64_t seq, int64_t num_kv_heads) {
  const int64_t first = step.query_start[seq];
  return {seq, first, first, step.query_start[seq + 1] - first, 0, num_kv_heads};
}

// The tokens of a sequence that are in step.rows, from its entry `row` on.
TokenBlock rows_of(const Step& step, const TokenBlock& all, int64_t row) {
  const int32_t* begin = step.rows + row;
  const int32_t* end = std::lower_bound(begin, step.rows + step.num_rows, int32_t(all.first_token + all.num_tokens));
  return {all.seq, begin < end ? *begin : all.first_token, row, end - begin, 0, all.num_heads};
}

}  // namespace

void make_attention_plan(const Step& step, AttentionPlan& plan) {
  const int64_t num_kv_heads = plan.num_kv_heads, group = plan.num_heads / num_kv_heads;
  const int64_t fair = plan.num_heads * step.num_rows / (step.num_threads * kTasksPerThread);
  const int64_t rows_per_task = std::clamp(fair, kMinRowsPerTask, kMaxRowsPerTask);
  const int64_t tokens_per_task = std::max<int64_t>(1, rows_per_task / group);
  const bool many = step.num_seqs >= step.num_threads * kTasksPerThread;
  plan.queries.clear();
  plan.writes.clear();
  int64_t row = 0;
  for (int64_t seq = 0; seq < step.num_seqs; ++seq) {
    const TokenBlock all = tokens_of(step, seq, num_kv_heads);
    const TokenBlock wanted = plan.of_rows ? rows_of(step, all, row) : all;
    row += wanted.num_tokens;
    if (plan.of_kept != (step.is_kept && step.is_kept[seq])) continue;
    // A token's KV heads are adjacent in memory, so a task takes as many heads as its limit of rows allows, unless
    // threads would be left without tasks.
    const int64_t rows = std::max<int64_t>(1, group * wanted.num_tokens);
    const int64_t heads = many ? std::clamp<int64_t>(rows_per_task / rows, 1, num_kv_heads) : 1;
    for (int64_t head = 0; head < num_kv_heads; head += heads) {
      TokenBlock of_heads = wanted;
      of_heads.first_head = head;
      of_heads.num_heads = std::min(heads, num_kv_heads - head);
      cut(of_heads, tokens_per_task, plan.queries);
    }
    const bool one_task_writes = wanted.num_tokens == all.num_tokens && all.num_tokens <= tokens_per_task;
    if (!one_task_writes) cut(all, kTokensPerWrite, plan.writes);
  }
  const auto cost = [&](const TokenBlock& q) {
    return q.num_heads * q.num_tokens * int64_t(step.positions[q.first_token + q.num_tokens - 1] + 1);
  };
  std::stable_sort(plan.queries.begin(), plan.queries.end(),
                   [&](const TokenBlock& a, const TokenBlock& b) { return cost(a) > cost(b); });
}
