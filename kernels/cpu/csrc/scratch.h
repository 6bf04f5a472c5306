// Memory of one thread that outlives the call and grows as needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

class Scratch {
 public:
  // Hands out the thread's memory from its start. Memory from an earlier Scratch of this thread is overwritten.
  explicit Scratch(size_t bytes) {
    if (bytes > memory_.size) {
      std::free(memory_.begin);
      memory_.size = (bytes + 4095) / 4096 * 4096;
      memory_.begin = static_cast<char*>(std::aligned_alloc(4096, memory_.size));
      if (!memory_.begin) throw std::bad_alloc();
    }
    next_ = memory_.begin;
  }

  template <class T>
  T* take(int64_t count) {
    T* taken = reinterpret_cast<T*>(next_);
    next_ += padded<T>(count);
    return taken;
  }

  template <class T>
  static size_t padded(int64_t count) {
    return (count * sizeof(T) + 63) / 64 * 64;
  }

 private:
  struct Memory {
    char* begin = nullptr;
    size_t size = 0;
    ~Memory() { std::free(begin); }
  };
  static thread_local Memory memory_;
  char* next_;
};

inline thread_local Scratch::Memory Scratch::memory_;
