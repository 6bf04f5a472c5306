// Row-wise operations process a few rows per chunk.
#pragma once

#include <algorithm>
#include <cstdint>

struct RowRange {
  int64_t begin, end;
};

constexpr int64_t kRowsPerChunk = 8;

inline int64_t row_chunks(int64_t num_rows) { return (num_rows + kRowsPerChunk - 1) / kRowsPerChunk; }

inline RowRange rows_of_chunk(int64_t num_rows, int64_t chunk) {
  return {chunk * kRowsPerChunk, std::min(num_rows, (chunk + 1) * kRowsPerChunk)};
}
