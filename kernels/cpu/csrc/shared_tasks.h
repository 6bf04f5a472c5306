// The tasks of attention to keys that decoding sequences have in common, for kernels on another device.

#pragma once

#include "ops.h"

struct SharedLimits {
  // keys per block, and per tile of the other device, which is a part of kTileKeys
  int32_t block_size, tile;
  // the sliding window, or 0; sequences that are longer share nothing
  int32_t window;
  int32_t max_rows;
  // keys that a task must save for each of its rows on average, and that all tasks must save together
  int64_t min_saved_per_row, min_saved;
};

struct SharedTask {
  int32_t first_row, num_rows;
  // tiles of the tasks before it, and its own
  int32_t tiles_before, num_tiles;
  int32_t first_segment, end_segment;
  int32_t unused[2];
};

// Tiles that some adjacent rows of a task have in common.
struct SharedSegment {
  int32_t first_tile, num_tiles, first_row, num_rows;
  // tiles of the task's segments before it
  int32_t tiles_before;
  int32_t unused[3];
};

// A sequence's first key that it reads alone; its task, or -1; its row there.
struct SharedRow {
  int32_t first_own_key, task, row, unused;
};

#pragma GCC visibility push(default)
extern "C" {

// Fills in the tasks, their segments, the sequences of all rows in the order of tasks, and an entry for each sequence.
// Returns the number of tasks. There are fewer tasks, and fewer segments, than sequences.
int32_t shared_tasks(const Step* step, const SharedLimits* limits, SharedTask* tasks, SharedSegment* segments,
                     int32_t* rows, SharedRow* row_of_seq);
}
#pragma GCC visibility pop
