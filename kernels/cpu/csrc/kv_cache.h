// Where a token's K and V lie: [block, layer, k|v, slot, kv_head, head_dim].
#pragma once

#include "ops.h"
#include "rotary.h"

template <class T>
inline T* key_of(const AttentionOp& op, int64_t block, int64_t slot, int64_t head) {
  return static_cast<T*>(op.cache) + block * op.block_stride + (slot * op.num_kv_heads + head) * op.head_dim;
}

template <class T>
inline void write_kv_head(const AttentionOp& op, const Step& step, const QueryBlock& tokens, int64_t head) {
  for (int64_t token = tokens.first_token; token < tokens.first_token + tokens.num_tokens; ++token) {
    const T* qkv = static_cast<const T*>(op.qkv) + token * op.qkv_stride;
    const T* k = qkv + (op.num_heads + head) * op.head_dim;
    const T* v = k + op.num_kv_heads * op.head_dim;
    const int64_t slot = step.slots[token];
    T* key = key_of<T>(op, slot / op.block_size, slot % op.block_size, head);
    const float* rope = op.rope ? op.rope + int64_t(step.positions[token]) * op.head_dim : nullptr;
    norm_and_rotate(k, key, op.head_dim, rope, static_cast<const T*>(op.k_norm), op.eps);
    std::memcpy(key + op.value_offset, v, op.head_dim * sizeof(T));
  }
}
