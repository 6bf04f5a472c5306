// One head of one token: RMS norm (Qwen3) and rotary embedding of its first rotary_dim values, in float32, rounded
// once.
#pragma once

#include <cmath>

#include "vec.h"

constexpr int kMaxHeadDim = 256;

template <class T>
inline void norm_and_rotate(const T* x, T* out, int head_dim, const float* rope, int rotary_dim, const float* weight,
                            float eps) {
  if (!rope && !weight) {
    std::memcpy(out, x, head_dim * sizeof(T));
    return;
  }
  alignas(64) float v[kMaxHeadDim];
  for (int i = 0; i < head_dim; i += kLanes) store(v + i, load_up_to(x + i, head_dim - i));
  if (weight) {
    f32x16 squares = {};
    for (int i = 0; i < head_dim; i += kLanes) {
      const f32x16 lanes = load_up_to(x + i, head_dim - i);
      squares += lanes * lanes;
    }
    const float scale = 1.0f / std::sqrt(horizontal_sum(squares) / float(head_dim) + eps);
    for (int i = 0; i < head_dim; ++i) v[i] = v[i] * scale * weight[i];
  }
  if (rope) {
    const int half = rotary_dim / 2;
    for (int i = 0; i < half; ++i) {
      const float low = v[i], high = v[i + half], cos = rope[i], sin = rope[i + half];
      v[i] = low * cos - high * sin;
      v[i + half] = high * cos + low * sin;
    }
  }
  for (int i = 0; i < head_dim; i += kLanes) store_up_to(out + i, load(v + i), head_dim - i);
}
