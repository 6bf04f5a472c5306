// A pool of threads that share cores with other processes.
//
// Any thread may lose its core to another process at any moment. Work is therefore claimed in small chunks, and the
// gate between two phases counts finished chunks, not arrived threads. A thread without a chunk delays no other thread,
// not even at the end of a run, when it may still be going through phases that others have finished. Such a straggler
// must not touch a later run by mistake. Every ticket therefore carries its run's epoch, and is claimed by
// compare-and-swap. A thread reads everything that it dereferences after it has claimed a chunk, when the run cannot
// end.
//
// An idle thread spins for some tens of microseconds, because the next run is usually near, and then sleeps in the
// kernel.

#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int kMaxPhases = 1024;
constexpr int kMaxRanges = 8;
constexpr int kMaxThreads = 256;
constexpr int kSpinsBeforeYield = 4096;
constexpr int kSpinsBeforeSleep = 4096;

constexpr int kChunkBits = 20;
constexpr uint64_t kEpochMask = 0xffffff;

// epoch (24 bits) | number of chunks (20) | chunks claimed, or finished, so far (20)
struct Count {
  uint64_t word;
  static Count none_of(uint64_t epoch, int64_t total) {
    return {epoch << (2 * kChunkBits) | uint64_t(total) << kChunkBits};
  }
  uint64_t epoch() const { return word >> (2 * kChunkBits); }
  int64_t total() const { return (word >> kChunkBits) & kMaxChunks; }
  int64_t so_far() const { return word & kMaxChunks; }
  bool is_full() const { return so_far() == total(); }
};

struct alignas(64) Range {
  std::atomic<uint64_t> claimed{0};
  std::atomic<int64_t> first{0};
};

struct alignas(64) Phase {
  std::atomic<uint64_t> finished{0};
  std::atomic<int> num_ranges{0};
  Range ranges[kMaxRanges];

  void open(uint64_t epoch, const PhaseSpec& spec, int num_threads) {
    const int count = spec.order == Order::Queue ? 1 : std::min(num_threads, kMaxRanges);
    num_ranges.store(count, std::memory_order_relaxed);
    finished.store(Count::none_of(epoch, spec.num_chunks).word, std::memory_order_relaxed);
    for (int r = 0; r < count; ++r) {
      const int64_t first = spec.num_chunks * r / count, end = spec.num_chunks * (r + 1) / count;
      ranges[r].first.store(first, std::memory_order_relaxed);
      ranges[r].claimed.store(Count::none_of(epoch, end - first).word, std::memory_order_relaxed);
    }
  }
};

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// All threads must round alike, whatever the calling thread's flags are.
struct DefaultFloatMode {
#if defined(__x86_64__)
  unsigned saved = _mm_getcsr();
  DefaultFloatMode() { _mm_setcsr(0x1f80); }
  ~DefaultFloatMode() { _mm_setcsr(saved); }
#else
  ~DefaultFloatMode() {}
#endif
};

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

class Pool {
 public:
  void run(int num_threads, int num_phases, const PhaseSpec* specs, Work work, const void* context, int64_t* ended_ns) {
    const std::lock_guard<std::mutex> only_one_run(mutex_);
    const DefaultFloatMode mode;
    start_threads(num_threads);
    const uint64_t epoch = (epoch_.load(std::memory_order_relaxed) + 1) & kEpochMask;
    for (int p = 0; p < num_phases; ++p) phases_[p].open(epoch, specs[p], num_threads);
    work_.store(work, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    num_phases_.store(num_phases, std::memory_order_relaxed);
    num_threads_.store(num_threads, std::memory_order_relaxed);
    epoch_.store(uint32_t(epoch), std::memory_order_release);
    if (num_threads > 1) epoch_.notify_all();
    take_part(epoch, 0, ended_ns);
  }

 private:
  void start_threads(int num_threads) {
    for (; num_started_ < num_threads - 1 && num_started_ < kMaxThreads; ++num_started_)
      std::thread([this, index = num_started_ + 1, seen = epoch_.load()] { live(index, seen); }).detach();
  }

  void live(int index, uint32_t seen) {
    const DefaultFloatMode mode;
    for (;;) {
      seen = await_epoch_after(seen);
      if (index < num_threads_.load(std::memory_order_relaxed)) take_part(seen, index, nullptr);
    }
  }

  uint32_t await_epoch_after(uint32_t seen) {
    for (int spin = 0; spin < kSpinsBeforeSleep; ++spin) {
      const uint32_t epoch = epoch_.load(std::memory_order_acquire);
      if (epoch != seen) return epoch;
      pause();
    }
    epoch_.wait(seen, std::memory_order_acquire);
    return epoch_.load(std::memory_order_acquire);
  }

  void take_part(uint64_t epoch, int thread, int64_t* ended_ns) {
    const int num_phases = num_phases_.load(std::memory_order_relaxed);
    for (int p = 0; p < num_phases; ++p) {
      work_on(epoch, thread, p);
      if (!await_end(epoch, phases_[p])) return;
      if (ended_ns) ended_ns[p] = now_ns();
    }
  }

  void work_on(uint64_t epoch, int thread, int p) {
    const int num_ranges = phases_[p].num_ranges.load(std::memory_order_relaxed);
    for (int r = 0; r < num_ranges; ++r) empty_range(epoch, p, (thread + r) % num_ranges);
  }

  void empty_range(uint64_t epoch, int p, int r) {
    Range& range = phases_[p].ranges[r];
    Count count{range.claimed.load(std::memory_order_relaxed)};
    while (count.epoch() == epoch && !count.is_full()) {
      if (!range.claimed.compare_exchange_weak(count.word, count.word + 1, std::memory_order_acquire)) continue;
      const Work work = work_.load(std::memory_order_relaxed);
      const int64_t chunk = range.first.load(std::memory_order_relaxed) + count.so_far();
      work(context_.load(std::memory_order_relaxed), p, chunk);
      phases_[p].finished.fetch_add(1, std::memory_order_release);
      count.word = range.claimed.load(std::memory_order_relaxed);
    }
  }

  // False: the run is over, and this thread is late.
  bool await_end(uint64_t epoch, const Phase& phase) {
    for (int spin = 0;; ++spin) {
      const Count count{phase.finished.load(std::memory_order_acquire)};
      if (count.epoch() != epoch) return false;
      if (count.is_full()) return true;
      if (spin < kSpinsBeforeYield)
        pause();
      else
        sched_yield();
    }
  }

  std::mutex mutex_;
  int num_started_ = 0;
  std::atomic<uint32_t> epoch_{0};
  std::atomic<int> num_phases_{0};
  std::atomic<int> num_threads_{0};
  std::atomic<Work> work_{nullptr};
  std::atomic<const void*> context_{nullptr};
  Phase phases_[kMaxPhases];
};

Pool* pool = nullptr;
std::mutex pool_mutex;

// A forked child has none of the threads, and one of them may have held a mutex, so it starts with a new pool.
void forget_pool_in_child() {
  pool = nullptr;
  new (&pool_mutex) std::mutex;
}

Pool& shared_pool() {
  const std::lock_guard<std::mutex> lock(pool_mutex);
  static const int registered = pthread_atfork(nullptr, nullptr, forget_pool_in_child);
  (void)registered;
  // never deleted: its threads live as long as the process
  if (!pool) pool = new Pool;
  return *pool;
}

}  // namespace

void run_phases(int num_threads, int num_phases, const PhaseSpec* phases, Work work, const void* context,
                int64_t* ended_ns) {
  struct Slice {
    Work work;
    const void* context;
    int first;
  };
  Pool& threads = shared_pool();
  for (int first = 0; first < num_phases; first += kMaxPhases) {
    const int count = num_phases - first < kMaxPhases ? num_phases - first : kMaxPhases;
    const Slice slice{work, context, first};
    const Work in_slice = [](const void* s, int phase, int64_t chunk) {
      const Slice& slice = *static_cast<const Slice*>(s);
      slice.work(slice.context, slice.first + phase, chunk);
    };
    threads.run(num_threads, count, phases + first, in_slice, &slice, ended_ns ? ended_ns + first : nullptr);
  }
}
