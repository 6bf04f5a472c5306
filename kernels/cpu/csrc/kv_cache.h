// The place of a token's K and V: [block, layer, k|v, kv_head, slot, row].
#pragma once

#include "kv_rows.h"
#include "ops.h"
#include "rotary.h"

inline char* key_of(const AttentionOp& op, int64_t block, int64_t slot, int64_t head) {
  return static_cast<char*>(op.cache) + block * op.block_stride + (head * op.block_size + slot) * op.row_bytes;
}

template <class T>
inline void write_tokens(const AttentionOp& op, const Step& step, const TokenBlock& tokens) {
  alignas(64) T buffer[kMaxHeadDim];
  for (int64_t token = tokens.first_token; token < tokens.first_token + tokens.num_tokens; ++token) {
    const T* k = static_cast<const T*>(op.qkv) + token * op.qkv_stride +
                 (op.num_heads + tokens.first_head) * op.head_dim;
    const int64_t slot = step.slots[token];
    char* key = key_of(op, slot / op.block_size, slot % op.block_size, tokens.first_head);
    const float* rope = op.rope ? op.rope + int64_t(step.positions[token]) * op.rotary_dim : nullptr;
    for (int64_t head = 0; head < tokens.num_heads; ++head, k += op.head_dim, key += op.block_size * op.row_bytes) {
      T* rotated = op.coding == KvCoding::Values ? reinterpret_cast<T*>(key) : buffer;
      norm_and_rotate(k, rotated, op.head_dim, rope, op.rotary_dim, op.k_norm, op.eps);
      if (rotated == buffer) write_row(op.coding, rotated, op.head_dim, key);
      write_row(op.coding, k + op.num_kv_heads * op.head_dim, op.head_dim, key + op.value_offset);
    }
  }
}
