// Calls one function of the kernels' library in the memory of the process that asks, which lies in a file: `call LIBRARY
// FILE`. The file is mapped where its pointers point to, and holds afterwards what the function wrote and returned.

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>

// Of emulated.py, at the beginning of the file. Arguments are integers and pointers.
struct Call {
  uint64_t address;
  char function[64];
  int64_t args[9];
  int64_t result;
};

int main(int, char** argv) {
  void* library = dlopen(argv[1], RTLD_NOW);
  if (!library) return std::fprintf(stderr, "%s\n", dlerror()), 1;
  const int file = open(argv[2], O_RDWR);
  Call there;
  struct stat status;
  if (read(file, &there, sizeof there) != sizeof there || fstat(file, &status) != 0) return std::perror(argv[2]), 1;
  void* wanted = reinterpret_cast<void*>(there.address);
  void* memory = mmap(wanted, status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE, file, 0);
  if (memory != wanted) return std::perror("mmap"), 1;

  Call& call = *static_cast<Call*>(memory);
  void* found = dlsym(library, call.function);
  if (!found) return std::fprintf(stderr, "%s\n", dlerror()), 1;
  const int64_t* a = call.args;
  const auto function = reinterpret_cast<int64_t (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                                                     int64_t, int64_t)>(found);
  call.result = function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8]);
  // Threads of the pool live on, and would be waited for.
  std::fflush(nullptr);
  _exit(0);
}
