// Cuts a step into attention tasks.

#include <algorithm>

#include "ops.h"

namespace {

// Query heads times tokens of a task: five full row blocks; its scores and sums stay in L1.
constexpr int64_t kRowsPerTask = 60;
constexpr int64_t kTokensPerWrite = 32;

void cut(const QueryBlock& whole, int64_t size, std::vector<QueryBlock>& out) {
  for (int64_t done = 0; done < whole.num_tokens; done += size)
    out.push_back({whole.seq, whole.first_token + done, std::min(size, whole.num_tokens - done)});
}

}  // namespace

void make_attention_plan(const Step& step, int64_t group, AttentionPlan& plan) {
  const int64_t tokens_per_task = std::max<int64_t>(1, kRowsPerTask / group);
  plan.group = group;
  plan.queries.clear();
  plan.writes.clear();
  for (int64_t seq = 0; seq < step.num_seqs; ++seq) {
    const int64_t begin = step.query_start[seq];
    const QueryBlock whole{seq, begin, step.query_start[seq + 1] - begin};
    cut(whole, tokens_per_task, plan.queries);
    if (whole.num_tokens > tokens_per_task) cut(whole, kTokensPerWrite, plan.writes);
  }
  const auto cost = [&](const QueryBlock& q) {
    return q.num_tokens * int64_t(step.positions[q.first_token + q.num_tokens - 1] + 1);
  };
  std::stable_sort(plan.queries.begin(), plan.queries.end(),
                   [&](const QueryBlock& a, const QueryBlock& b) { return cost(a) > cost(b); });
}
