#pragma once

#include <cstdint>

// The layout of KV blocks in the cache (values) and in the pool (see kernels/kv_int8.py).
struct KvBlocks {
  // contiguous, [num_blocks, num_groups, num_slots, head_dim]; a group is a head of a layer's k or v
  void* values;
  // [num_blocks, num_groups * head_dim * (2 * size of a value + num_slots)] bytes, unaligned
  uint8_t* stored;
  int64_t num_blocks, num_groups, num_slots, head_dim;
  // the number of filled slots in the last block, from its first slot on
  int64_t num_last_slots;
  // the dtype of values, see Dtype in ops.h
  int32_t dtype;
};

#pragma GCC visibility push(default)
extern "C" {

// Runs on the calling thread only. Returns 0, or -1 for a dtype other than float32 and bfloat16.
int32_t quantise_kv(const KvBlocks* blocks);
int32_t dequantise_kv(const KvBlocks* blocks);

int64_t size_of_kv_blocks();
}
#pragma GCC visibility pop
