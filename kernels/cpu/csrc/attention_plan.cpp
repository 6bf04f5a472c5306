// Cuts a step into attention tasks.
//
// Sequences that decode a token and begin with the same blocks become one task, or a few. A task reads the tiles that
// its sequences have in common once for all of their rows. Some of them may share more than all do, so common
// beginnings form a tree. Once sorted by their blocks, the sequences under a node are adjacent.

#include <algorithm>
#include <cstring>
#include <numeric>

#include "key_tile.h"
#include "ops.h"
#include "program.h"
#include "shared_tasks.h"

namespace {

// Query heads times tokens of a task. Many rows share the cost of packing keys and values (measured at 2048 tokens: 115
// ms with 60 rows, 105 with 120, 103 with 240). Few give all threads work.
constexpr int64_t kMinRowsPerTask = 60, kMaxRowsPerTask = 240;
// Packing a tile, and reading it from memory, takes as long as the products of about this many rows.
constexpr int64_t kPackingRows = 16;
constexpr int64_t kTokensPerWrite = 32;
constexpr int64_t kTasksPerThread = 4;
// The keys of a token's heads lie side by side. A task of n heads takes 1 + this / n times as long for reading a tile
// (measured with 3 rows: one head at a time 1.28 times as long as four).
constexpr double kOneHeadAlone = 0.5;

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

// Whether a sequence may share keys: it decodes a token, and its full blocks hold a tile.
bool may_share(const Step& step, const TokenBlock& all) {
  return all.num_tokens == 1 && !step.is_reversed[all.seq] && end_of(step, all) > kTileKeys;
}

TokenBlock of_heads(TokenBlock queries, int64_t first, int64_t count) {
  queries.first_head = first;
  queries.num_heads = count;
  return queries;
}

// Sequences that decode a token, sorted by their blocks.
struct Decodes {
  const Step& step;
  int64_t block_size, rows_of_query;
  std::vector<TokenBlock>& queries;
  // [i]: the number of leading keys that queries i - 1 and i share, rounded down to whole tiles
  std::vector<int64_t>& common;

  const int32_t* blocks(const TokenBlock& query) const {
    return step.block_table + query.seq * step.block_table_stride;
  }

  // The number of blocks that were full before the query's token.
  int64_t full_blocks(const TokenBlock& query) const { return (end_of(step, query) - 1) / block_size; }

  void sort() const {
    std::sort(queries.begin(), queries.end(), [&](const TokenBlock& a, const TokenBlock& b) {
      const int64_t left = full_blocks(a), right = full_blocks(b);
      // In any order, as long as equal beginnings are adjacent.
      const int order = std::memcmp(blocks(a), blocks(b), std::min(left, right) * sizeof(int32_t));
      return order ? order < 0 : left < right;
    });
    common.assign(queries.size() + 1, 0);
    for (size_t i = 1; i < queries.size(); ++i) {
      const int32_t *left = blocks(queries[i - 1]), *right = blocks(queries[i]);
      const int64_t most = std::min(full_blocks(queries[i - 1]), full_blocks(queries[i]));
      const int64_t same = std::mismatch(left, left + most, right).first - left;
      common[i] = same * block_size / kTileKeys * kTileKeys;
    }
  }

  // Returns the end of the queries from `begin` on of which each shares a tile with the one before.
  size_t end_of_tree(size_t begin) const {
    size_t end = begin + 1;
    while (end < queries.size() && common[end]) ++end;
    return end;
  }

  // Appends the segments of the queries begin .. end, with all keys from `key` on. Query `first` has number 0 there.
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

  // What a query adds to a task, in keys times rows of one KV head: it reads and packs what it shares with no query
  // before it. `is_first`: there are none in the task.
  int64_t cost_of(size_t i, bool is_first) const {
    const int64_t end = end_of(step, queries[i]);
    return (end - (is_first ? 0 : common[i])) * kPackingRows + end * rows_of_query;
  }

  int64_t cost_of(size_t begin, size_t end) const {
    int64_t cost = 0;
    for (size_t i = begin; i < end; ++i) cost += cost_of(i, i == begin);
    return cost;
  }
};

// How a tree is cut: into so many parts, and tasks of so many heads.
struct Cut {
  int64_t parts, heads;
};

// Each part reads again what all have in common. So there are as few as the rows of a task and the threads allow.
Cut cut_of(const Decodes& decodes, size_t begin, size_t end, int64_t num_kv_heads, int64_t num_threads, int64_t fair) {
  const int64_t count = end - begin, rows = count * decodes.rows_of_query, whole = decodes.cost_of(begin, end);
  const int64_t least = (rows + kMaxRowsPerTask - 1) / kMaxRowsPerTask;
  const auto most_heads = [&](int64_t parts) {
    return std::clamp<int64_t>(2 * kMaxRowsPerTask * parts / rows, 1, num_kv_heads);
  };
  // Small beside the other tasks: these keep all threads busy.
  if (least == 1 && num_kv_heads * whole <= fair) return {1, most_heads(1)};
  const int64_t again = *std::min_element(decodes.common.begin() + begin + 1, decodes.common.begin() + end);
  int64_t products = 0;
  for (size_t i = begin; i < end; ++i) products += end_of(decodes.step, decodes.queries[i]) * decodes.rows_of_query;
  const int64_t apart = whole - products - again * kPackingRows;
  // One thread may lose its core during a task, and the others then wait for it.
  const double lost = num_threads > 1 ? 1.0 / kTasksPerThread : 0.0;
  Cut best{least, 1};
  double least_cost = 0;
  for (int64_t heads = num_kv_heads; heads >= 1; --heads)
    for (int64_t parts = least; parts <= std::min(count, std::max(least, kTasksPerThread * num_threads)); ++parts) {
      if (heads > most_heads(parts)) continue;
      const int64_t num_tasks = parts * ((num_kv_heads + heads - 1) / heads);
      const int64_t turns = (num_tasks + num_threads - 1) / num_threads;
      const double reading = 1 + kOneHeadAlone / heads;
      const double part = reading * again * kPackingRows + (reading * apart + products) / parts;
      const double cost = (turns + lost) * heads * part;
      if (least_cost == 0 || cost < least_cost) {
        best = {parts, heads};
        least_cost = cost;
      }
    }
  return best;
}

// Where a task that begins at `from` ends, if it has at most `most` queries. The next one reads again what queries on
// both sides of the cut share. So it is cut where that is least, but not before half of the queries.
size_t end_of_task(const std::vector<int64_t>& common, size_t from, size_t end, size_t most) {
  if (end - from <= most) return end;
  size_t cut = from + most;
  for (size_t i = cut; i > from + most / 2; --i)
    if (common[i] < common[cut]) cut = i;
  return cut;
}

// Returns the number of keys that rows would read again without these segments.
int64_t saved_by(const std::vector<Segment>& segments) {
  int64_t saved = 0;
  for (const Segment& segment : segments) saved += (segment.num_queries - 1) * (segment.end - segment.begin);
  return saved;
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
    if (plan.shared_group >= 0 && wanted.num_tokens == 1 && may_share(step, all))
      decodes.push_back(wanted);
    else
      add_alone(wanted);
  }
  const Decodes sorted{step, block_size, group, decodes, common};
  sorted.sort();
  for (size_t begin = 0, end; begin < decodes.size(); begin = end) {
    end = sorted.end_of_tree(begin);
    if (end == begin + 1) add_alone(decodes[begin]);
  }
  // All so far are tasks of their own.
  int64_t total = 0;
  for (size_t i = 0; i < plan.queries.size(); ++i) {
    const TokenBlock& queries = plan.queries[i];
    plan.tasks.push_back({int64_t(i), 1, 0, 0});
    costs.push_back(queries.num_heads * end_of(step, queries) * (kPackingRows + queries.num_tokens * group));
    total += costs.back();
  }
  for (size_t begin = 0, end; begin < decodes.size(); begin = end) {
    end = sorted.end_of_tree(begin);
    if (end > begin + 1) total += num_kv_heads * sorted.cost_of(begin, end);
  }
  const auto add_part = [&](size_t from, size_t to, int64_t heads) {
    const int64_t first_segment = plan.segments.size();
    sorted.append(from, from, to, 0, plan.segments);
    const int64_t num_segments = plan.segments.size() - first_segment, cost = sorted.cost_of(from, to);
    for (int64_t head = 0; head < num_kv_heads; head += heads) {
      const int64_t num_heads = std::min(heads, num_kv_heads - head);
      plan.tasks.push_back({int64_t(plan.queries.size()), int64_t(to - from), first_segment, num_segments});
      costs.push_back(num_heads * cost);
      for (size_t i = from; i < to; ++i) plan.queries.push_back(of_heads(decodes[i], head, num_heads));
    }
  };
  const int64_t fair = total / (step.num_threads * kTasksPerThread);
  for (size_t begin = 0, end; begin < decodes.size(); begin = end) {
    end = sorted.end_of_tree(begin);
    if (end == begin + 1) continue;
    const Cut made = cut_of(sorted, begin, end, num_kv_heads, step.num_threads, fair);
    const int64_t whole = sorted.cost_of(begin, end), most = std::max<int64_t>(1, kMaxRowsPerTask / group);
    int64_t done = 0, part = 1;
    size_t from = begin;
    for (size_t i = begin; i < end; ++i) {
      done += sorted.cost_of(i, i == begin);
      const bool is_whole = done >= whole * part / made.parts || int64_t(i + 1 - from) >= most;
      if (i + 1 < end && !is_whole) continue;
      add_part(from, i + 1, made.heads);
      from = i + 1;
      part = std::max(part + 1, done * made.parts / std::max<int64_t>(1, whole) + 1);
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

int32_t shared_tasks(const Step* step, const SharedLimits* limits, SharedTask* tasks, SharedSegment* segments,
                     int32_t* rows, SharedRow* row_of_seq) {
  static thread_local std::vector<TokenBlock> decodes;
  static thread_local std::vector<int64_t> common;
  static thread_local std::vector<Segment> found;
  decodes.clear();
  for (int64_t seq = 0; seq < step->num_seqs; ++seq) {
    row_of_seq[seq] = {0, -1, 0, 0};
    const TokenBlock all = tokens_of(*step, seq, 1);
    const bool is_cut_off = limits->window && all.num_tokens && end_of(*step, all) > limits->window;
    if (!is_cut_off && may_share(*step, all)) decodes.push_back(all);
  }
  const Decodes sorted{*step, limits->block_size, 0, decodes, common};
  sorted.sort();
  int64_t saved = 0;
  int32_t num_tasks = 0, num_segments = 0, num_rows = 0, num_tiles = 0;
  for (size_t from = 0, to, end = 0; from < decodes.size(); from = to) {
    if (from == end) end = sorted.end_of_tree(from);
    to = end_of_task(common, from, end, limits->max_rows);
    const int32_t count = to - from;
    found.clear();
    sorted.append(from, from, to, 0, found);
    const int64_t saved_here = saved_by(found);
    if (saved_here < std::max<int64_t>(1, count * limits->min_saved_per_row)) continue;
    saved += saved_here;
    SharedTask& task = tasks[num_tasks];
    task = {num_rows, count, num_tiles, 0, num_segments, 0, {}};
    for (const Segment& segment : found) {
      const int32_t row = segment.first_query;
      if (segment.num_queries == 1) {
        row_of_seq[decodes[from + row].seq] = {int32_t(segment.begin), num_tasks, row, 0};
        continue;
      }
      const int32_t first = segment.begin / limits->tile, tiles = segment.end / limits->tile - first;
      segments[num_segments++] = {first, tiles, row, int32_t(segment.num_queries), task.num_tiles, {}};
      task.num_tiles += tiles;
    }
    task.end_segment = num_segments;
    for (size_t i = from; i < to; ++i) rows[num_rows++] = decodes[i].seq;
    num_tiles += task.num_tiles;
    ++num_tasks;
  }
  if (saved >= limits->min_saved) return num_tasks;
  for (const TokenBlock& decode : decodes) row_of_seq[decode.seq] = {0, -1, 0, 0};
  return 0;
}

int64_t keys_read(const Step* step, int32_t num_heads, int32_t num_kv_heads, int32_t block_size, int64_t* num_tasks) {
  AttentionPlan plan{.num_heads = num_heads, .num_kv_heads = num_kv_heads, .of_rows = false, .of_kept = false,
                     .shared_group = 0, .queries = {}, .segments = {}, .tasks = {}, .writes = {}};
  Step whole = *step;
  whole.num_rows = whole.num_tokens;
  make_attention_plan(whole, block_size, plan);
  *num_tasks = plan.tasks.size();
  int64_t count = 0;
  for (const AttentionTask& task : plan.tasks) {
    const TokenBlock& first = plan.queries[task.first_query];
    if (!task.num_segments) count += first.num_heads * end_of(whole, first);
    for (int64_t s = task.first_segment; s < task.first_segment + task.num_segments; ++s)
      count += first.num_heads * (plan.segments[s].end - plan.segments[s].begin);
  }
  return count;
}
