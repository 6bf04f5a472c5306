// Threads that work through a list of phases together. See pool.cpp.
#pragma once

#include <cstdint>

constexpr int64_t kMaxChunks = (1 << 20) - 1;

using Work = void (*)(const void* context, int phase, int64_t chunk);

// Calls work(context, p, c) once for each phase p < num_phases and each c < chunks[p] (<= kMaxChunks), on up to
// num_threads threads, the caller's included. A phase begins when the one before has ended. Returns when all have.
// If `ended_ns` is given, it receives the clock at the end of each phase.
void run_phases(int num_threads, int num_phases, const int64_t* chunks, Work work, const void* context,
                int64_t* ended_ns = nullptr);
