// `call LIBRARY` calls functions of the kernels' library in the memory of the process that asks, which lies in a file:
// each line of the input names one. It is mapped where its pointers point to, and holds afterwards what the function wrote
// and returned. "done" is the answer.

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <iostream>
#include <string>

// Of emulated.py, at the beginning of the file. Arguments are integers and pointers.
struct Call {
  uint64_t address;
  char function[64];
  int64_t args[9];
  int64_t result;
};

// Returns what was wrong, or null.
const char* run(void* library, const char* path) {
  const int file = open(path, O_RDWR);
  Call there;
  struct stat status;
  if (read(file, &there, sizeof there) != sizeof there || fstat(file, &status) != 0) return "read";
  void* wanted = reinterpret_cast<void*>(there.address);
  void* memory = mmap(wanted, status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE, file, 0);
  close(file);
  if (memory != wanted) return "mmap";
  Call& call = *static_cast<Call*>(memory);
  void* found = dlsym(library, call.function);
  if (!found) return dlerror();
  const int64_t* a = call.args;
  const auto function = reinterpret_cast<int64_t (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                                                     int64_t, int64_t)>(found);
  call.result = function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8]);
  return munmap(memory, status.st_size) == 0 ? nullptr : "munmap";
}

int main(int, char** argv) {
  void* library = dlopen(argv[1], RTLD_NOW);
  if (!library) return std::fprintf(stderr, "%s\n", dlerror()), 1;
  for (std::string path; std::getline(std::cin, path); std::cout << "done" << std::endl)
    if (const char* wrong = run(library, path.c_str())) return std::fprintf(stderr, "%s: %s\n", path.c_str(), wrong), 1;
  // Threads of the pool live on, and would be waited for.
  _exit(0);
}
