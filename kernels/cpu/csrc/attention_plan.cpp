// Cuts a step into attention tasks.

#include <algorithm>

#include "ops.h"

namespace {

// Query heads times tokens of a task: five full row blocks; its scores and sums stay in L1.
constexpr int64_t kRowsPerTask = 60;
constexpr int64_t kTokensPerWrite = 32;
constexpr int64_t kTasksPerThread = 4;

void cut(const TokenBlock& whole, int64_t size, std::vector<TokenBlock>& out) {
  for (int64_t done = 0; done < whole.num_tokens; done += size) {
    TokenBlock part = whole;
    part.first_token += done;
    part.num_tokens = std::min(size, whole.num_tokens - done);
    out.push_back(part);
  }
}

}  // namespace

void make_attention_plan(const Step& step, int64_t num_heads, int64_t num_kv_heads, AttentionPlan& plan) {
  const int64_t group = num_heads / num_kv_heads;
  const int64_t tokens_per_task = std::max<int64_t>(1, kRowsPerTask / group);
  const bool many = step.num_seqs >= step.num_threads * kTasksPerThread;
  plan.num_heads = num_heads;
  plan.num_kv_heads = num_kv_heads;
  plan.queries.clear();
  plan.writes.clear();
  for (int64_t seq = 0; seq < step.num_seqs; ++seq) {
    const int64_t begin = step.query_start[seq], num_tokens = step.query_start[seq + 1] - begin;
    if (num_tokens == 0) continue;
    // A token's KV heads lie side by side in memory, so a task takes as many as keep its rows few; unless that would
    // leave threads without tasks.
    const int64_t heads = many ? std::clamp<int64_t>(kRowsPerTask / (group * num_tokens), 1, num_kv_heads) : 1;
    for (int64_t head = 0; head < num_kv_heads; head += heads)
      cut({seq, begin, num_tokens, head, std::min(heads, num_kv_heads - head)}, tokens_per_task, plan.queries);
    if (num_tokens > tokens_per_task) cut({seq, begin, num_tokens, 0, num_kv_heads}, kTokensPerWrite, plan.writes);
  }
  const auto cost = [&](const TokenBlock& q) {
    return q.num_heads * q.num_tokens * int64_t(step.positions[q.first_token + q.num_tokens - 1] + 1);
  };
  std::stable_sort(plan.queries.begin(), plan.queries.end(),
                   [&](const TokenBlock& a, const TokenBlock& b) { return cost(a) > cost(b); });
}
