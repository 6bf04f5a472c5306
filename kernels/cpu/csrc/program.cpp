// Executes a program: prepares the step (chunks of every op, attention tasks), then one parallel region for all ops.

#include "program.h"

#include <deque>

#include "pool.h"

namespace {

struct Run {
  const Op* ops;
  const Step* step;
  std::vector<PhaseSpec> phases;
  // by number of heads; a deque, because ops hold on to its elements
  std::deque<AttentionPlan> plans;
  size_t num_plans = 0;
  std::vector<const AttentionPlan*> plan_of_op;

  const AttentionPlan& plan(const AttentionOp& op) {
    for (size_t i = 0; i < num_plans; ++i)
      if (plans[i].num_heads == op.num_heads && plans[i].num_kv_heads == op.num_kv_heads) return plans[i];
    if (num_plans == plans.size()) plans.emplace_back();
    AttentionPlan& made = plans[num_plans++];
    make_attention_plan(*step, op.num_heads, op.num_kv_heads, made);
    return made;
  }

  // The number of chunks of an op.
  int64_t prepare(int i) {
    const Op& op = ops[i];
    switch (op.kind) {
      case OpKind::Embed:
        return embed_chunks(op.embed, *step);
      case OpKind::Norm:
        return norm_chunks(op.norm, *step);
      case OpKind::Linear:
        return linear_chunks(op.linear, op.dtype, *step);
      case OpKind::Gather:
        return gather_chunks(op.gather, *step);
      case OpKind::WriteKv:
        plan_of_op[i] = &plan(op.attention);
        return int64_t(plan_of_op[i]->writes.size());
      case OpKind::Attention:
        plan_of_op[i] = &plan(op.attention);
        return int64_t(plan_of_op[i]->queries.size());
    }
    return -1;
  }
};

void run_chunk(const void* context, int i, int64_t chunk) {
  const Run& run = *static_cast<const Run*>(context);
  const Op& op = run.ops[i];
  switch (op.kind) {
    case OpKind::Embed:
      return embed(op.embed, op.dtype, *run.step, chunk);
    case OpKind::Norm:
      return norm(op.norm, op.dtype, *run.step, chunk);
    case OpKind::Linear:
      return linear(op.linear, op.dtype, *run.step, chunk);
    case OpKind::Gather:
      return gather(op.gather, op.dtype, *run.step, chunk);
    case OpKind::WriteKv:
      return write_kv(op.attention, op.dtype, *run.step, *run.plan_of_op[i], chunk);
    case OpKind::Attention:
      return attention(op.attention, op.dtype, *run.step, *run.plan_of_op[i], chunk);
  }
}

}  // namespace

int32_t run_program(const Op* ops, int32_t num_ops, const Step* step) {
  // kept by the calling thread, so that a step allocates nothing
  static thread_local Run run;
  run.ops = ops;
  run.step = step;
  run.num_plans = 0;
  run.phases.resize(num_ops);
  run.plan_of_op.resize(num_ops);
  for (int i = 0; i < num_ops; ++i) {
    // linear layers stream their weights; attention's tasks are sorted, the biggest first
    run.phases[i] = {run.prepare(i), ops[i].kind == OpKind::Linear ? Order::Ranges : Order::Queue};
    if (run.phases[i].num_chunks < 0 || run.phases[i].num_chunks > kMaxChunks) return -1;
  }
  run_phases(step->num_threads, num_ops, run.phases.data(), run_chunk, &run, step->ended_ns);
  return 0;
}

int64_t size_of_op() { return sizeof(Op); }
int64_t size_of_step() { return sizeof(Step); }
