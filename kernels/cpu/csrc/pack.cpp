// Rearranges a weight, once, into the tiles that the inner loop reads.

#include "pack.h"

#include <algorithm>

#include "pool.h"
#include "tile.h"

namespace {

struct Packing {
  const char* part;
  int64_t num_columns, in_features, size, first_column, run, stride;
  char* tiles;
  int64_t columns_per_chunk;
};

void pack_columns(const void* context, int, int64_t chunk) {
  const Packing& p = *static_cast<const Packing*>(context);
  const int64_t bytes = p.in_features * p.size;
  const int64_t tile_bytes = (bytes + kWordBytes - 1) / kWordBytes * kStepBytes;
  const int64_t end = std::min(p.num_columns, (chunk + 1) * p.columns_per_chunk);
  for (int64_t c = chunk * p.columns_per_chunk; c < end; ++c) {
    const int64_t column = p.first_column + c / p.run * p.stride + c % p.run;
    const char* from = p.part + c * bytes;
    char* to = p.tiles + column / kTileColumns * tile_bytes + column % kTileColumns * kWordBytes;
    int64_t i = 0;
    for (; i + kWordBytes <= bytes; i += kWordBytes, to += kStepBytes) std::memcpy(to, from + i, kWordBytes);
    if (i < bytes) std::memcpy(to, from + i, bytes - i);
  }
}

}  // namespace

void pack_weight(const void* part, int64_t num_columns, int64_t in_features, int64_t size, int64_t first_column,
                 int64_t run, int64_t stride, void* tiles, int32_t num_threads) {
  const int64_t columns_per_chunk = std::max<int64_t>(64, num_columns / kMaxChunks + 1);
  const Packing packing{static_cast<const char*>(part), num_columns, in_features, size, first_column, run, stride,
                        static_cast<char*>(tiles), columns_per_chunk};
  const int64_t chunks = (num_columns + columns_per_chunk - 1) / columns_per_chunk;
  const PhaseSpec phase{chunks, Order::Queue};
  run_phases(num_threads, 1, &phase, pack_columns, &packing);
}
