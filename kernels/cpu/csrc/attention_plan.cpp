// Cuts a step into attention tasks.
//
// Sequences that decode a token and begin with the same blocks become one task, or a few: it reads the tiles that they
// have in common once for all of their rows. They may have more in common two by two, so that is a tree. Sorted by
// their blocks, the sequences below each of its nodes are neighbours.

#include <algorithm>
#include <numeric>

#include "key_tile.h"
#include "ops.h"

namespace {

// Query heads times tokens of a task. Many rows share the cost of packing keys and values (measured at 2048 tokens: 115
// ms with 60 rows, 105 with 120, 103 with 240). Few give all threads work.
constexpr int64_t kMinRowsPerTask = 60, kMaxRowsPerTask = 240;
// Packing a tile, and reading it from memory, takes as long as the products of about this many rows.
constexpr int64_t kPackingRows = 16;
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

int64_t end_of(const Step& step, const TokenBlock& queries) {
  return step.positions[queries.first_token + queries.num_tokens - 1] + 1;
}

TokenBlock of_heads(TokenBlock queries, int64_t first, int64_t count) {
  queries.first_head = first;
  queries.num_heads = count;
  return queries;
}

// Sequences that decode a token, sorted by their blocks.
struct Decodes {
  const Step& step;
  int64_t block_size;
  std::vector<TokenBlock>& queries;
  // [i]: the first keys that the queries i - 1 and i have in common, in whole tiles
  std::vector<int64_t>& common;

  const int32_t* blocks(const TokenBlock& query) const {
    return step.block_table + query.seq * step.block_table_stride;
  }

  // Those with all keys before the query's.
  int64_t full_blocks(const TokenBlock& query) const { return (end_of(step, query) - 1) / block_size; }

  void sort() {
    std::sort(queries.begin(), queries.end(), [&](const TokenBlock& a, const TokenBlock& b) {
      const int32_t *left = blocks(a), *right = blocks(b);
      return std::lexicographical_compare(left, left + full_blocks(a), right, right + full_blocks(b));
    });
    common.assign(queries.size() + 1, 0);
    for (size_t i = 1; i < queries.size(); ++i) {
      const int32_t *left = blocks(queries[i - 1]), *right = blocks(queries[i]);
      const int64_t most = std::min(full_blocks(queries[i - 1]), full_blocks(queries[i]));
      const int64_t same = std::mismatch(left, left + most, right).first - left;
      common[i] = same * block_size / kTileKeys * kTileKeys;
    }
  }

  // Returns the end of the queries from `begin` on that have a tile in common.
  size_t end_of_tree(size_t begin) const {
    size_t end = begin + 1;
    while (end < queries.size() && common[end]) ++end;
    return end;
  }

  // Appends the segments of the queries begin .. end, with all keys from `key` on. The first query has number 0 there.
  void append(size_t first, size_t begin, size_t end, int64_t key, std::vector<Segment>& segments) const {
    const int64_t number = begin - first, count = end - begin;
    if (count == 1) {
      segments.push_back({key, end_of(step, queries[begin]), number, 1});
      return;
    }
    const int64_t shared = *std::min_element(common.begin() + begin + 1, common.begin() + end);
    if (shared > key) segments.push_back({key, shared, number, count});
    for (size_t i = begin + 1, from = begin; i <= end; ++i)
      if (i == end || common[i] == shared) {
        append(first, from, i, std::max(key, shared), segments);
        from = i;
      }
  }
};

// In key tiles times rows, for one KV head.
int64_t cost_of(const std::vector<Segment>& segments, size_t first, int64_t rows_of_query) {
  return std::accumulate(segments.begin() + first, segments.end(), int64_t(0), [&](int64_t sum, const Segment& each) {
    return sum + (each.end - each.begin) * (kPackingRows + each.num_queries * rows_of_query);
  });
}

}  // namespace

void make_attention_plan(const Step& step, int64_t block_size, AttentionPlan& plan) {
  const int64_t num_kv_heads = plan.num_kv_heads, group = plan.num_heads / num_kv_heads;
  const int64_t fair_rows = plan.num_heads * step.num_rows / (step.num_threads * kTasksPerThread);
  const int64_t rows_per_task = std::clamp(fair_rows, kMinRowsPerTask, kMaxRowsPerTask);
  const int64_t tokens_per_task = std::max<int64_t>(1, rows_per_task / group);
  const bool many = step.num_seqs >= step.num_threads * kTasksPerThread;
  // kept by the calling thread, so that a step allocates nothing
  static thread_local std::vector<TokenBlock> decodes;
  static thread_local std::vector<int64_t> common;
  static thread_local std::vector<Segment> tree;
  static thread_local std::vector<int64_t> costs;
  plan.queries.clear();
  plan.segments.clear();
  plan.tasks.clear();
  plan.writes.clear();
  decodes.clear();
  costs.clear();
  const auto add_alone = [&](const TokenBlock& wanted) {
    // A token's KV heads are adjacent in memory, so a task takes as many heads as its limit of rows allows, unless
    // threads would be left without tasks.
    const int64_t rows = std::max<int64_t>(1, group * wanted.num_tokens);
    const int64_t heads = many ? std::clamp<int64_t>(rows_per_task / rows, 1, num_kv_heads) : 1;
    for (int64_t head = 0; head < num_kv_heads; head += heads)
      cut(of_heads(wanted, head, std::min(heads, num_kv_heads - head)), tokens_per_task, plan.queries);
  };
  int64_t row = 0;
  for (int64_t seq = 0; seq < step.num_seqs; ++seq) {
    const TokenBlock all = tokens_of(step, seq, num_kv_heads);
    const TokenBlock wanted = plan.of_rows ? rows_of(step, all, row) : all;
    row += wanted.num_tokens;
    if (plan.of_kept != (step.is_kept && step.is_kept[seq])) continue;
    const bool one_task_writes = wanted.num_tokens == all.num_tokens && all.num_tokens <= tokens_per_task;
    if (!one_task_writes) cut(all, kTokensPerWrite, plan.writes);
    const bool may_share = plan.shared_group >= 0 && all.num_tokens == 1 && wanted.num_tokens == 1 &&
                           !step.is_reversed[seq] && end_of(step, all) > kTileKeys;
    if (may_share)
      decodes.push_back(wanted);
    else
      add_alone(wanted);
  }
  const Decodes sorted{step, block_size, decodes, common};
  if (!decodes.empty()) const_cast<Decodes&>(sorted).sort();
  for (size_t begin = 0; begin < decodes.size(); begin = sorted.end_of_tree(begin))
    if (sorted.end_of_tree(begin) == begin + 1) add_alone(decodes[begin]);
  // All so far are tasks of their own.
  int64_t total = 0;
  for (size_t i = 0; i < plan.queries.size(); ++i) {
    const TokenBlock& queries = plan.queries[i];
    plan.tasks.push_back({int64_t(i), 1, 0, 0});
    costs.push_back(queries.num_heads * end_of(step, queries) * (kPackingRows + queries.num_tokens * group));
    total += costs.back();
  }
  const auto tree_cost = [&](size_t begin, size_t end) {
    tree.clear();
    sorted.append(begin, begin, end, 0, tree);
    return cost_of(tree, 0, group);
  };
  for (size_t begin = 0, end; begin < decodes.size(); begin = end) {
    end = sorted.end_of_tree(begin);
    if (end > begin + 1) total += num_kv_heads * tree_cost(begin, end);
  }
  const int64_t fair = std::max<int64_t>(1, total / (step.num_threads * kTasksPerThread));
  for (size_t begin = 0, end; begin < decodes.size(); begin = end) {
    end = sorted.end_of_tree(begin);
    if (end == begin + 1) continue;
    const int64_t count = end - begin, cost = tree_cost(begin, end);
    // Each part reads what all have in common, so there are as few as rows and threads allow.
    const int64_t by_rows = (count * group + kMaxRowsPerTask - 1) / kMaxRowsPerTask;
    const int64_t by_cost = cost * step.num_threads / std::max<int64_t>(1, total);
    const int64_t parts = std::clamp<int64_t>(std::max(by_rows, by_cost), 1, count);
    const int64_t heads = std::clamp<int64_t>(
        std::min(fair * parts / std::max<int64_t>(1, cost), kMaxRowsPerTask * 4 * parts / (count * group)), 1,
        num_kv_heads);
    for (int64_t part = 0; part < parts; ++part) {
      const size_t from = begin + count * part / parts, to = begin + count * (part + 1) / parts;
      const int64_t first_segment = plan.segments.size();
      sorted.append(from, from, to, 0, plan.segments);
      const int64_t num_segments = plan.segments.size() - first_segment;
      for (int64_t head = 0; head < num_kv_heads; head += heads) {
        const int64_t num_heads = std::min(heads, num_kv_heads - head);
        plan.tasks.push_back({int64_t(plan.queries.size()), int64_t(to - from), first_segment, num_segments});
        costs.push_back(num_heads * cost_of(plan.segments, first_segment, group));
        for (size_t i = from; i < to; ++i) plan.queries.push_back(of_heads(decodes[i], head, num_heads));
      }
    }
  }
  static thread_local std::vector<int64_t> order;
  static thread_local std::vector<AttentionTask> tasks;
  order.resize(costs.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return costs[a] > costs[b]; });
  tasks = plan.tasks;
  for (size_t i = 0; i < order.size(); ++i) plan.tasks[i] = tasks[order[i]];
}
