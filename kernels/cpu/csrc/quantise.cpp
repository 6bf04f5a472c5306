// Quantises rows to eight bits, for linear layers with weights in eight bits or four.

#include "gguf.h"
#include "groups.h"
#include "ops.h"
#include "rows.h"

namespace {

constexpr float kLargest = 127.0f;
constexpr int kZero = 128;

// Returns the largest absolute value. A NaN or infinity is returned if there is one, because its bits are the largest.
template <class T>
float largest_of(const T* x, int64_t width) {
  i32x16 largest = {};
  for (int64_t i = 0; i < width; i += kLanes) {
    const i32x16 bits = (i32x16)load_up_to(x + i, width - i) & 0x7fffffff;
    largest = choose(bits > largest, bits, largest);
  }
  int32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits = largest[lane] > bits ? largest[lane] : bits;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Rounds to the nearest integer, ties to even: after adding this, no bits are left for a fraction.
ALWAYS_INLINE i32x16 rounded(f32x16 x) {
  const f32x16 shift = splat(12582912.0f);
  return (i32x16)(x + shift) - (i32x16)shift;
}

template <class T>
void quantise_row(const QuantiseOp& op, const T* x, uint8_t* out) {
  const float largest = largest_of(x, op.width);
  const float scale = largest / kLargest, inverse = largest > 0.0f ? kLargest / largest : 0.0f;
  const bool has_groups = op.weight_kind != Weight::Int8;
  const int64_t scale_at = row_scale_at(op.width);
  const int32_t zero = has_groups ? 0 : kZero;
  for (int64_t i = 0; i < scale_at; i += kLanes) {
    // Values beyond the width are zeros.
    const i32x16 codes = i < op.width ? rounded(load_up_to(x + i, op.width - i) * inverse) : i32x16{};
    const u8x16 bytes = low_bytes((u32x16)(codes + zero));
    std::memcpy(out + i, &bytes, sizeof bytes);
  }
  std::memcpy(out + scale_at, &scale, sizeof scale);
  uint8_t* to = out + row_sums_at(op.width);
  for (int64_t begin = 0; has_groups && begin < scale_at; begin += op.group, to += sizeof(int32_t)) {
    const int8_t* codes = reinterpret_cast<const int8_t*>(out);
    int32_t sum = 0;
    for (int64_t i = begin; i < std::min(begin + op.group, scale_at); ++i) sum += codes[i];
    sum *= -op.zero;
    std::memcpy(to, &sum, sizeof sum);
  }
}

// The width is whole groups.
template <class T>
void quantise_groups(const QuantiseOp& op, const T* x, uint8_t* out) {
  for (int64_t i = 0; i < op.width; i += kRowGroup) {
    const float largest = largest_of(x + i, kRowGroup);
    const float scale = largest / kLargest, inverse = largest > 0.0f ? kLargest / largest : 0.0f;
    std::memcpy(out + gguf_scales_at(op.width) + i / kRowGroup * sizeof scale, &scale, sizeof scale);
    for (int64_t j = i; j < i + kRowGroup; j += kSumValues) {
      const i32x16 codes = rounded(load(x + j) * inverse);
      const u8x16 bytes = low_bytes((u32x16)codes);
      std::memcpy(out + j, &bytes, sizeof bytes);
      int32_t sum = 0;
      for (int lane = 0; lane < kLanes; ++lane) sum += int8_t(bytes[lane]);
      std::memcpy(out + gguf_sums_at(op.width) + j / kSumValues * sizeof sum, &sum, sizeof sum);
    }
  }
}

template <class T>
void quantise_any(const QuantiseOp& op, const T* x, uint8_t* out) {
  is_gguf(op.weight_kind) ? quantise_groups(op, x, out) : quantise_row(op, x, out);
}

}  // namespace

int64_t quantise_chunks(const QuantiseOp& op, const Step& step) { return row_chunks(step.num_rows * op.rows_each); }

void quantise(const QuantiseOp& op, Dtype dtype, const Step& step, int64_t chunk) {
  const RowRange rows = rows_of_chunk(step.num_rows * op.rows_each, chunk);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    uint8_t* out = op.out + row * op.out_stride;
    if (dtype == Dtype::Float32)
      quantise_any(op, static_cast<const float*>(op.x) + row * op.x_stride, out);
    else
      quantise_any(op, static_cast<const bf16*>(op.x) + row * op.x_stride, out);
  }
}
