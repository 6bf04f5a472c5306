// Exchange between several processes, each with a part of the model, through shared memory.
//
// Each rank has a counter of the meetings that it has arrived at, and two slots for rows of float32, used in turn. A
// rank that arrives at meeting n has read everything that it needs from meeting n - 1. So no rank reads a slot of n - 1
// any more when another one has left meeting n and writes to that slot for n + 1. All ranks run the same programs, and
// so have the same meetings. Sums are added in the order of ranks, so that all ranks get the same result to the last
// bit.

#include <sched.h>
#include <time.h>

#include <atomic>

#include "program.h"
#include "rows.h"

namespace {

constexpr int64_t kLine = 64, kPage = 4096;
constexpr int kSpinsBeforeYield = 4096, kYieldsBeforeSleep = 4096;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// The cost of waiting for a late rank: a core for some milliseconds, then a check every 50 microseconds.
struct Patience {
  int num_looks = 0;

  void wait() {
    ++num_looks;
    if (num_looks < kSpinsBeforeYield) return pause();
    if (num_looks < kSpinsBeforeYield + kYieldsBeforeSleep) {
      sched_yield();
      return;
    }
    const timespec time = {0, 50000};
    nanosleep(&time, nullptr);
  }
};

std::atomic<int64_t>& counter(const Ranks& ranks, int64_t index) {
  return *reinterpret_cast<std::atomic<int64_t>*>(ranks.shared + index * kLine);
}

std::atomic<int64_t>& arrived(const Ranks& ranks, int64_t rank) { return counter(ranks, rank); }

bool is_broken(const Ranks& ranks) { return counter(ranks, ranks.size).load(std::memory_order_relaxed) != 0; }

float* slot(const Ranks& ranks, int64_t meeting, int64_t rank) {
  const int64_t first = ((ranks.size + 1) * kLine + kPage - 1) / kPage * kPage;
  return reinterpret_cast<float*>(ranks.shared + first + ((meeting & 1) * ranks.size + rank) * ranks.slot_bytes);
}

// Rows in a slot are contiguous, padded to whole vectors.
int64_t slot_stride(int64_t width) { return (width + kLanes - 1) / kLanes * kLanes; }

template <class T>
void share_rows(const ShareOp& op, RowRange rows) {
  float* to = slot(*op.ranks, op.ranks->num_meetings + 1, op.ranks->rank);
  for (int64_t row = rows.begin; row < rows.end; ++row)
    for (int64_t i = 0; i < op.width; i += kLanes)
      store(to + row * slot_stride(op.width) + i,
            load_up_to(static_cast<const T*>(op.x) + row * op.x_stride + i, op.width - i));
}

template <class T>
void sum_rows(const SumRanksOp& op, RowRange rows) {
  const Ranks& ranks = *op.ranks;
  for (int64_t row = rows.begin; row < rows.end; ++row)
    for (int64_t i = 0; i < op.width; i += kLanes) {
      const int64_t left = op.width - i;
      f32x16 sum = load(slot(ranks, ranks.num_meetings, 0) + row * slot_stride(op.width) + i);
      for (int64_t rank = 1; rank < ranks.size; ++rank)
        sum += load(slot(ranks, ranks.num_meetings, rank) + row * slot_stride(op.width) + i);
      if (op.residual)
        sum += load_up_to(static_cast<const T*>(op.residual) + row * op.residual_stride + i, left);
      store_up_to(static_cast<T*>(op.out) + row * op.out_stride + i, sum, left);
    }
}

}  // namespace

int64_t rank_rows_chunks(const Step& step) { return row_chunks(step.num_rows); }

void share(const ShareOp& op, Dtype dtype, const Step& step, int64_t chunk) {
  const RowRange rows = rows_of_chunk(step.num_rows, chunk);
  if (dtype == Dtype::Float32 || op.is_float32)
    share_rows<float>(op, rows);
  else
    share_rows<bf16>(op, rows);
}

void meet(const ShareOp& op) {
  Ranks& ranks = *op.ranks;
  const int64_t meeting = ++ranks.num_meetings;
  arrived(ranks, ranks.rank).store(meeting, std::memory_order_release);
  for (int64_t rank = 0; rank < ranks.size; ++rank)
    for (Patience patience; arrived(ranks, rank).load(std::memory_order_acquire) < meeting; patience.wait())
      if (is_broken(ranks)) return;
}

void sum_ranks(const SumRanksOp& op, Dtype dtype, const Step& step, int64_t chunk) {
  const RowRange rows = rows_of_chunk(step.num_rows, chunk);
  if (dtype == Dtype::Float32)
    sum_rows<float>(op, rows);
  else
    sum_rows<bf16>(op, rows);
}

void join_ranks(const JoinRanksOp& op, const Step& step, int64_t chunk) {
  const Ranks& ranks = *op.ranks;
  if (ranks.rank != 0) return;
  const RowRange rows = rows_of_chunk(step.num_rows, chunk);
  const int64_t most = (op.width + ranks.size - 1) / ranks.size;
  for (int64_t row = rows.begin; row < rows.end; ++row)
    for (int64_t rank = 0; rank * most < op.width; ++rank) {
      const int64_t width = std::min(most, op.width - rank * most);
      std::memcpy(op.out + row * op.out_stride + rank * most,
                  slot(ranks, ranks.num_meetings, rank) + row * slot_stride(most), width * sizeof(float));
    }
}

int64_t size_of_ranks() { return sizeof(Ranks); }
