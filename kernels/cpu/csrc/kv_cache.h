// Where a token's K and V lie: [block, layer, k|v, kv_head, slot, head_dim].
#pragma once

#include "ops.h"
#include "rotary.h"

template <class T>
inline T* key_of(const AttentionOp& op, int64_t block, int64_t slot, int64_t head) {
  return static_cast<T*>(op.cache) + block * op.block_stride + (head * op.block_size + slot) * op.head_dim;
}

template <class T>
inline void write_tokens(const AttentionOp& op, const Step& step, const TokenBlock& tokens) {
  for (int64_t token = tokens.first_token; token < tokens.first_token + tokens.num_tokens; ++token) {
    const T* k = static_cast<const T*>(op.qkv) + token * op.qkv_stride +
                 (op.num_heads + tokens.first_head) * op.head_dim;
    const int64_t slot = step.slots[token];
    T* key = key_of<T>(op, slot / op.block_size, slot % op.block_size, tokens.first_head);
    const float* rope = op.rope ? op.rope + int64_t(step.positions[token]) * op.rotary_dim : nullptr;
    for (int64_t head = 0; head < tokens.num_heads; ++head, k += op.head_dim, key += op.block_size * op.head_dim) {
      norm_and_rotate(k, key, op.head_dim, rope, op.rotary_dim, op.k_norm, op.eps);
      std::memcpy(key + op.value_offset, k + op.num_kv_heads * op.head_dim, op.head_dim * sizeof(T));
    }
  }
}
