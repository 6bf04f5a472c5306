// Executes a program: prepares the step (chunks of every op, attention tasks), then runs all ops in one parallel
// region.

#include "program.h"

#include <algorithm>
#include <deque>

#include "amx.h"
#include "pool.h"

namespace {

struct Run {
  const Op* ops;
  // the most tokens of a sequence
  int64_t longest;
  // the step for ops with these rows: [0]: the step's tokens, [1]: step.rows, [2]: restored tokens
  Step steps[3];
  std::vector<PhaseSpec> phases;
  // a deque, because ops keep pointers to its elements
  std::deque<AttentionPlan> plans;
  size_t num_plans = 0;
  std::vector<const AttentionPlan*> plan_of_op;

  const Step& step(const Op& op) const { return steps[op.of_rows]; }

  // The step for a layer's attention: slots and blocks of the layer's group.
  Step step_of_group(const Op& op) const {
    Step moved = step(op);
    moved.slots += op.attention.group * moved.slots_stride;
    moved.block_table += op.attention.group * moved.group_table_stride;
    return moved;
  }

  const AttentionPlan& plan(const Op& op) {
    const AttentionOp& wanted = op.attention;
    // Rows begin at different keys if a window is shorter than a sequence.
    const int64_t shared_group = wanted.window && wanted.window < longest ? -1 : wanted.group;
    // If every token is an output, both kinds of steps have the same rows.
    const bool of_rows = op.of_rows && steps[1].num_rows < steps[0].num_rows;
    for (size_t i = 0; i < num_plans; ++i)
      if (plans[i].num_heads == wanted.num_heads && plans[i].num_kv_heads == wanted.num_kv_heads &&
          plans[i].of_rows == of_rows && plans[i].of_kept == bool(wanted.of_kept) &&
          plans[i].shared_group == shared_group)
        return plans[i];
    if (num_plans == plans.size()) plans.emplace_back();
    AttentionPlan& made = plans[num_plans++];
    made.num_heads = wanted.num_heads;
    made.num_kv_heads = wanted.num_kv_heads;
    made.of_rows = of_rows;
    made.of_kept = wanted.of_kept;
    made.shared_group = shared_group;
    make_attention_plan(step_of_group(op), wanted.block_size, made);
    return made;
  }

  // Returns the number of chunks of an op.
  int64_t prepare(int i) {
    const Op& op = ops[i];
    switch (op.kind) {
      case OpKind::Embed:
        return embed_chunks(op.embed, step(op));
      case OpKind::Norm:
        return norm_chunks(op.norm, step(op));
      case OpKind::Linear:
        return linear_chunks(op.linear, op.dtype, step(op));
      case OpKind::Gather:
        return gather_chunks(op.gather, step(op));
      case OpKind::WriteInputs:
        return write_inputs_chunks(op.inputs, step(op));
      case OpKind::ReadInputs:
        return read_inputs_chunks(op.inputs, step(op));
      case OpKind::RestoreKv:
        return restore_kv_chunks(op.attention, step(op));
      case OpKind::Route:
        return route_chunks(op.route, step(op));
      case OpKind::Quantise:
        return quantise_chunks(op.quantise, step(op));
      case OpKind::Share:
      case OpKind::SumRanks:
      case OpKind::JoinRanks:
        return rank_rows_chunks(step(op));
      case OpKind::Shrink:
        return shrink_chunks(op.shrink, step(op));
      case OpKind::Meet:
      case OpKind::Group:
        return 1;
      case OpKind::Spread:
      case OpKind::Mix:
        return spread_chunks(op.spread, step(op));
      case OpKind::ExpertLinear:
        return expert_linear_chunks(op.expert_linear, op.dtype, step(op));
      case OpKind::WriteKv:
        plan_of_op[i] = &plan(op);
        return int64_t(plan_of_op[i]->writes.size());
      case OpKind::Attention:
        plan_of_op[i] = &plan(op);
        return int64_t(plan_of_op[i]->tasks.size());
    }
    return -1;
  }
};

void run_chunk(const void* context, int i, int64_t chunk) {
  const Run& run = *static_cast<const Run*>(context);
  const Op& op = run.ops[i];
  const Step& step = run.step(op);
  switch (op.kind) {
    case OpKind::Embed:
      return embed(op.embed, op.dtype, step, chunk);
    case OpKind::Norm:
      return norm(op.norm, op.dtype, step, chunk);
    case OpKind::Linear:
      return linear(op.linear, op.dtype, step, chunk);
    case OpKind::Gather:
      return gather(op.gather, op.dtype, step, chunk);
    case OpKind::WriteInputs:
      return write_inputs(op.inputs, op.dtype, step, chunk);
    case OpKind::ReadInputs:
      return read_inputs(op.inputs, op.dtype, step, chunk);
    case OpKind::RestoreKv:
      return restore_kv(op.attention, op.dtype, step, chunk);
    case OpKind::Quantise:
      return quantise(op.quantise, op.dtype, step, chunk);
    case OpKind::Shrink:
      return shrink(op.shrink, op.dtype, step, chunk);
    case OpKind::Route:
      return route(op.route, op.dtype, step, chunk);
    case OpKind::Group:
      return group(op.route, step);
    case OpKind::Spread:
      return spread(op.spread, op.dtype, step, chunk);
    case OpKind::ExpertLinear:
      return expert_linear(op.expert_linear, op.dtype, step, chunk);
    case OpKind::Mix:
      return mix(op.spread, op.dtype, step, chunk);
    case OpKind::Share:
      return share(op.share, op.dtype, step, chunk);
    case OpKind::Meet:
      return meet(op.share);
    case OpKind::SumRanks:
      return sum_ranks(op.sum_ranks, op.dtype, step, chunk);
    case OpKind::JoinRanks:
      return join_ranks(op.join_ranks, step, chunk);
    case OpKind::WriteKv:
      return write_kv(op.attention, op.dtype, run.step_of_group(op), *run.plan_of_op[i], chunk);
    case OpKind::Attention:
      return attention(op.attention, op.dtype, run.step_of_group(op), *run.plan_of_op[i], chunk);
  }
}

}  // namespace

int32_t run_program(const Op* ops, int32_t num_ops, const Step* step) {
  // kept by the calling thread, so that a step allocates nothing
  static thread_local Run run;
  run.ops = ops;
  run.steps[0] = run.steps[1] = run.steps[2] = *step;
  run.steps[0].num_rows = step->num_tokens;
  run.steps[1].adapters = step->row_adapters;
  Step& restored = run.steps[2];
  restored.num_rows = step->num_restored;
  restored.positions = step->restored_positions;
  restored.slots = step->restored_slots;
  restored.input_rows = step->restored_rows;
  restored.adapters = nullptr;
  run.num_plans = 0;
  run.longest = 0;
  for (int64_t seq = 0; seq < step->num_seqs; ++seq) run.longest = std::max<int64_t>(run.longest, step->context_len[seq]);
  run.phases.resize(num_ops);
  run.plan_of_op.resize(num_ops);
  for (int i = 0; i < num_ops; ++i) {
    // linear layers stream their weights; attention's tasks are sorted, the biggest first
    const bool streams = ops[i].kind == OpKind::Linear || ops[i].kind == OpKind::ExpertLinear;
    run.phases[i] = {run.prepare(i), streams ? Order::Ranges : Order::Queue};
    if (run.phases[i].num_chunks < 0 || run.phases[i].num_chunks > kMaxChunks) return -1;
  }
  run_phases(step->num_threads, num_ops, run.phases.data(), run_chunk, &run, step->ended_ns);
  return 0;
}

int32_t uses_amx() { return has_amx() ? 1 : kMayUseAmx<bf16> ? -1 : 0; }

int64_t size_of_op() { return sizeof(Op); }
int64_t size_of_step() { return sizeof(Step); }
