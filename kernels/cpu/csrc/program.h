#pragma once

#include "ops.h"

#pragma GCC visibility push(default)
extern "C" {

// Runs the operations one after the other, each on all of step.num_threads threads. Returns 0, or -1 if an operation is
// unknown or too large.
int32_t run_program(const Op* ops, int32_t num_ops, const Step* step);

// Returns the keys that attention with these heads reads in the step, each counted for each KV head and each time. Writes
// the number of its tasks.
int64_t keys_read(const Step* step, int32_t num_heads, int32_t num_kv_heads, int32_t block_size, int64_t* num_tasks);

// Whether products of bfloat16 and of eight-bit integers are computed by AMX (amx.h): 1, 0 if the library has no code for
// it, or -1 if the system refused it to this process.
int32_t uses_amx();

// Lets Python check its mirror of the structs.
int64_t size_of_op();
int64_t size_of_step();
int64_t size_of_ranks();
}
#pragma GCC visibility pop
