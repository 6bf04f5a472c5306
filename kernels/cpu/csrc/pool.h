// Threads that work through a list of phases together. See pool.cpp.
#pragma once

#include <cstdint>

constexpr int64_t kMaxChunks = (1 << 20) - 1;

using Work = void (*)(const void* context, int phase, int64_t chunk);

enum class Order : int32_t {
  // chunks begin in ascending order
  Queue,
  // each thread goes upwards through its own range, then helps others: for work that reads memory as a stream
  Ranges,
};

struct PhaseSpec {
  // at most kMaxChunks
  int64_t num_chunks;
  Order order;
};

// Calls work(context, p, c) once for each phase p < num_phases and each c < phases[p].num_chunks, on up to num_threads
// threads, the caller's included. A phase begins when the previous one has ended. Returns when all have ended. If
// `ended_ns` is given, it receives the clock at the end of each phase.
void run_phases(int num_threads, int num_phases, const PhaseSpec* phases, Work work, const void* context,
                int64_t* ended_ns = nullptr);
