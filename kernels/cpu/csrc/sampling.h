#pragma once

#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

// Returns, per row, the index of its first maximum, and whether the row contains a NaN or its maximum is not finite.
void argmax_rows(const float* logits, int64_t num_rows, int64_t width, int64_t stride, int64_t* index, uint8_t* is_bad,
                 int32_t num_threads);

// Returns, per row, argmax of logits + Gumbel noise that is a function of (key, column) only. See
// kernels/cpu/sampling.py.
void gumbel_argmax_rows(const float* logits, int64_t num_rows, int64_t width, int64_t stride, const int64_t* keys,
                        int64_t* index, int32_t num_threads);
}
#pragma GCC visibility pop
