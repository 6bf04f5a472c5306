// A tile of keys and values of one KV head, from the paged cache, in the layout of tile.h.
#pragma once

#include <algorithm>

#include "amx.h"
#include "kv_cache.h"
#include "tile.h"
#include "transpose.h"

constexpr int kTileKeys = 64;

// The keys 0 .. end of a sequence and KV head.
struct KeySpan {
  int64_t seq, kv_head, end;
};

// The places of the K and V of a tile's keys. Keys past the span's end point to zeros, because their memory is
// undefined.
struct KeyRows {
  int count;
  const char* keys[kTileKeys];
  const char* values[kTileKeys];
};

alignas(64) inline const char kZeroRow[kMaxHeadDim * sizeof(float)] = {};

inline void find_rows(const AttentionOp& op, const Step& step, const KeySpan& span, int64_t first_key, KeyRows& rows) {
  const int32_t* table = step.block_table + span.seq * step.block_table_stride;
  const int count = int(std::clamp<int64_t>(span.end - first_key, 0, kTileKeys));
  int64_t block = first_key / op.block_size, slot = first_key % op.block_size;
  const bool is_reversed = step.is_reversed[span.seq];
  const int64_t next_key = is_reversed ? -op.row_bytes : op.row_bytes;
  for (int i = 0; i < count; ++block, slot = 0) {
    const char* key = key_of(op, table[block], is_reversed ? op.block_size - 1 - slot : slot, span.kv_head);
    const int run_end = int(std::min<int64_t>(count, i + op.block_size - slot));
    for (; i < run_end; ++i, key += next_key) {
      rows.keys[i] = key;
      rows.values[i] = key + op.value_offset;
    }
  }
  for (int i = count; i < kTileKeys; ++i) rows.keys[i] = rows.values[i] = kZeroRow;
  rows.count = count;
}

// Fetches a tile's K and V of several KV heads into the second level of the caches, in the order of their addresses.
// Reading them in the order of use gets little more than half of the memory's bandwidth, because that jumps from block to
// block for each head.
class Fetch {
 public:
  // The tile that begins at `first_key`, of the span's KV head and `num_heads - 1` after it.
  void begin(const AttentionOp& op, const Step& step, const KeySpan& span, int64_t num_heads, int64_t first_key) {
    op_ = &op;
    const int64_t count = std::clamp<int64_t>(span.end - first_key, 0, kTileKeys);
    block_ = step.block_table + span.seq * step.block_table_stride + first_key / op.block_size;
    slot_ = first_key % op.block_size;
    num_left_ = count;
    first_head_ = span.kv_head;
    num_heads_ = num_heads;
    is_reversed_ = step.is_reversed[span.seq];
    part_ = num_lines_ = 0;
    next_stretch();
  }

  // Fetches the first `count` lines of the tile, as far as they are not yet fetched.
  void lines(int64_t count) {
    for (; num_lines_ < count; ++num_lines_) {
      __builtin_prefetch(at_, 0, 2);
      at_ += kLineBytes;
      if (at_ >= end_) next_stretch();
    }
  }

 private:
  // Of a block, first the keys of all heads, then the values.
  void next_stretch() {
    if (num_left_ <= 0) {
      at_ = kZeroRow;
      end_ = at_ + kLineBytes;
      return;
    }
    const int64_t count = std::min(num_left_, op_->block_size - slot_);
    const int64_t slot = is_reversed_ ? op_->block_size - slot_ - count : slot_;
    const bool is_whole = count == op_->block_size;
    const int64_t num_parts = is_whole ? 2 : 2 * num_heads_;
    const int64_t head = is_whole ? 0 : part_ % num_heads_;
    const bool is_value = part_ >= num_parts / 2;
    at_ = key_of(*op_, *block_, slot, first_head_ + head) + (is_value ? op_->value_offset : 0);
    end_ = at_ + (is_whole ? num_heads_ : 1) * count * op_->row_bytes;
    if (++part_ == num_parts) {
      part_ = 0;
      ++block_;
      slot_ = 0;
      num_left_ -= count;
    }
  }

  const char *at_ = kZeroRow, *end_ = kZeroRow + kLineBytes;
  const AttentionOp* op_ = nullptr;
  const int32_t* block_ = nullptr;
  int64_t slot_ = 0, num_left_ = 0, first_head_ = 0, num_heads_ = 0, part_ = 0, num_lines_ = 0;
  bool is_reversed_ = false;
};

// Spreads a head's share of a fetch over its computation. A core has few fetches under way, and one more stalls it.
class Pace {
 public:
  Pace(Fetch& fetch, int64_t first_line, int64_t num_lines, int64_t num_steps)
      : fetch_(fetch), first_line_(first_line), num_lines_(num_lines), num_steps_(num_steps) {}

  void step() { fetch_.lines(first_line_ + num_lines_ * std::min(++num_done_, num_steps_) / num_steps_); }

  void finish() { fetch_.lines(first_line_ + num_lines_); }

 private:
  Fetch& fetch_;
  const int64_t first_line_, num_lines_, num_steps_;
  int64_t num_done_ = 0;
};

// [32 keys at a time][word][key]; keys from rows.count on, up to a whole vector of them, are zeros.
inline void pack_keys(const KeyRows& rows, int64_t head_words, char* tiles) {
  const auto* keys = reinterpret_cast<const uint32_t* const*>(rows.keys);
  for (int first = 0; first < rows.count; first += kLanes) {
    char* tile = tiles + first / kTileColumns * head_words * kStepBytes + first % kTileColumns * kWordBytes;
    for (int64_t word = 0; word < head_words; word += kLanes) {
      uint32_t* to = reinterpret_cast<uint32_t*>(tile + word * kStepBytes);
      if (word + kLanes <= head_words)
        transpose16(keys + first, word, kLanes, to, kTileColumns);
      else
        transpose16(keys + first, word, int(head_words - word), to, kTileColumns);
    }
  }
}

// The first `count`, at most 32, values of each key in a word.
struct ValueColumns {
  int64_t first, count;
};

// For one key.
static ALWAYS_INLINE void pack_value_word(const float* const* keys, ValueColumns columns, char* to) {
  for (int v = 0; v < kTileVectors; ++v) {
    const int64_t left = columns.count - v * kLanes;
    const f32x16 values = left > 0 ? load_up_to(keys[0] + columns.first + v * kLanes, left) : f32x16{};
    store(reinterpret_cast<float*>(to) + v * kLanes, values);
  }
}

// For two keys, interleaved.
static ALWAYS_INLINE void pack_value_word(const bf16* const* keys, ValueColumns columns, char* to) {
#if defined(__AVX512BW__)
  alignas(64) static const uint16_t kLow[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(kLow), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  const __mmask32 valid = columns.count == kTileColumns ? ~0u : (1u << columns.count) - 1;
  const __m512i even = _mm512_maskz_loadu_epi16(valid, keys[0] + columns.first);
  const __m512i odd = _mm512_maskz_loadu_epi16(valid, keys[1] + columns.first);
  _mm512_storeu_si512(to, _mm512_permutex2var_epi16(even, low, odd));
  _mm512_storeu_si512(to + 64, _mm512_permutex2var_epi16(even, high, odd));
#else
  typedef uint16_t Eight __attribute__((vector_size(16)));
  for (int64_t i = 0; i < kTileColumns; i += 8) {
    const int64_t left = columns.count - i;
    Eight even = {}, odd = {};
    for (auto [row, values] : {std::pair{&even, keys[0]}, {&odd, keys[1]}})
      left >= 8 ? std::memcpy(row, values + columns.first + i, sizeof *row)
                : std::memcpy(row, values + columns.first + i, std::max<int64_t>(left, 0) * sizeof(bf16));
    const Eight low = __builtin_shufflevector(even, odd, 0, 8, 1, 9, 2, 10, 3, 11);
    const Eight high = __builtin_shufflevector(even, odd, 4, 12, 5, 13, 6, 14, 7, 15);
    std::memcpy(to + i * kWordBytes, &low, sizeof low);
    std::memcpy(to + (i + 4) * kWordBytes, &high, sizeof high);
  }
#endif
}

// How many keys of a tile are packed for `count` of them. The others have zeros, with which AMX multiplies.
template <class T>
inline int packed_keys(int count) {
  constexpr int kAtOnce = kAmxWords * kWordValues<T>;
  return kMayUseAmx<T> && has_amx() ? (count + kAtOnce - 1) / kAtOnce * kAtOnce : count;
}

// [32 values at a time][word along keys][value]; keys from rows.count on, up to a whole word or `packed_keys`, are zeros.
template <class T>
inline void pack_values(const KeyRows& rows, int64_t head_dim, char* tiles) {
  const auto* values = reinterpret_cast<const T* const*>(rows.values);
  const int num_keys = packed_keys<T>(rows.count);
  for (int64_t column = 0; column < head_dim; column += kTileColumns, tiles += words<T>(kTileKeys) * kStepBytes) {
    const ValueColumns columns{column, std::min<int64_t>(kTileColumns, head_dim - column)};
    char* to = tiles;
    for (int key = 0; key < num_keys; key += kWordValues<T>, to += kStepBytes)
      pack_value_word(values + key, columns, to);
  }
}
