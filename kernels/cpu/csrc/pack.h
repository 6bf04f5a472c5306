#pragma once

#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

// Copies `part` ([num_columns, in_features], contiguous, elements of `size` bytes) into a weight's tiles (see tile.h).
// Column c of the part becomes column first_column + c / run * stride + c % run of the weight: runs of columns, so that
// gate and up columns can be neighbours in one tile. The destination must be zero before the first call.
void pack_weight(const void* part, int64_t num_columns, int64_t in_features, int64_t size, int64_t first_column,
                 int64_t run, int64_t stride, void* tiles, int32_t num_threads);
}
#pragma GCC visibility pop
