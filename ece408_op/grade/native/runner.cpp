// The worker: maps the parent's buffers, loads one submission, and calls its forward when told to.
//
//   runner LIBRARY IN OUT B C H W M K X W Y GUARD
//
// X, W and Y are descriptors on the CPU, CUDA IPC handles in hexadecimal on the GPU; GUARD is the bytes around each.
//
// Commands and replies are lines over two pipes. "run NONCE" calls forward and is answered "done NONCE NANOSECONDS",
// or "failed TEXT" where forward threw; "empty NONCE" is answered at once. Nothing here is believed by the parent,
// since a submission can write to any memory of this process: the parent has its own clock and checks the output.
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <dlfcn.h>
#include <exception>
#include <fcntl.h>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifdef ECE408_GRADE_GPU
#include <cuda_runtime.h>
#endif

struct ece408_grade_call {
  float *y, *x, *w;
  unsigned y_shape[4], x_shape[4], w_shape[4];
  void* stream;
};

namespace {

int out = -1;
char spare_stack[1 << 16];

struct Region {
  char name;
  char* begin;
  size_t bytes;
} regions[3];

void reply(const std::string& line) {
  std::string text = line + "\n";
  const char* at = text.data();
  for (size_t left = text.size(); left > 0;) {
    ssize_t n = write(out, at, left);
    if (n <= 0) _exit(3);
    at += n;
    left -= n;
  }
}

// A fault is reported as a place in one of the buffers, where it is near one, and then taken as it came.
void fault(int number, siginfo_t* info, void*) {
  const char* at = static_cast<const char*>(info->si_addr);
  char text[128];
  int n = snprintf(text, sizeof text, "fault %d elsewhere 0 0\n", number);
  for (const Region& r : regions) {
    const ptrdiff_t slack = 1 << 24;
    ptrdiff_t offset = at - r.begin;
    if (r.begin && offset > -slack && offset < (ptrdiff_t)r.bytes + slack)
      n = snprintf(text, sizeof text, "fault %d %c %td %zu\n", number, r.name, offset / 4, r.bytes / 4);
  }
  ssize_t done = write(out, text, n);
  (void)done;
  signal(number, SIG_DFL);
}

#ifdef ECE408_GRADE_GPU
float* open_buffer(char name, const char* handle, size_t bytes, int slot, size_t guard) {
  cudaIpcMemHandle_t raw;
  for (size_t i = 0; i < sizeof raw; ++i) {
    unsigned value = 0;
    sscanf(handle + 2 * i, "%2x", &value);
    reinterpret_cast<unsigned char*>(&raw)[i] = (unsigned char)value;
  }
  void* base = nullptr;
  cudaError_t error = cudaIpcOpenMemHandle(&base, raw, cudaIpcMemLazyEnablePeerAccess);
  if (error != cudaSuccess) {
    reply(std::string("lost opening the parent's buffer: ") + cudaGetErrorString(error));
    _exit(4);
  }
  regions[slot] = {name, static_cast<char*>(base) + guard, bytes};
  return reinterpret_cast<float*>(regions[slot].begin);
}
#else
// Where the pages around the data cannot be touched; the data ends where they begin, within 64 bytes.
float* open_buffer(char name, const char* fd_text, size_t bytes, int slot, size_t guard) {
  int fd = atoi(fd_text);
  struct stat info;
  fstat(fd, &info);
  size_t mapped = info.st_size;
  char* base = static_cast<char*>(
      mmap(nullptr, mapped + 2 * guard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  int access = name == 'y' ? PROT_READ | PROT_WRITE : PROT_READ;
  if (base == MAP_FAILED || mmap(base + guard, mapped, access, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    reply(std::string("lost mapping the parent's buffer: ") + strerror(errno));
    _exit(4);
  }
  close(fd);
  regions[slot] = {name, base + guard + mapped - (bytes + 63) / 64 * 64, bytes};
  return reinterpret_cast<float*>(regions[slot].begin);
}
#endif

long long nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

std::string one_line(std::string text) {
  for (char& c : text)
    if (c == '\n' || c == '\r') c = ' ';
  return text.substr(0, 1000);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 14) return 2;
  const char* library = argv[1];
  FILE* commands = fdopen(atoi(argv[2]), "r");
  out = atoi(argv[3]);
  unsigned B = atoi(argv[4]), C = atoi(argv[5]), H = atoi(argv[6]), W = atoi(argv[7]), M = atoi(argv[8]),
           K = atoi(argv[9]);
  size_t guard = strtoull(argv[13], nullptr, 10);
  ece408_grade_call call = {nullptr, nullptr, nullptr, {B, M, H - K + 1, W - K + 1}, {B, C, H, W}, {M, C, K, K}, nullptr};
#ifdef ECE408_GRADE_GPU
  cudaStream_t stream;
  cudaError_t error = cudaStreamCreate(&stream);
  if (error != cudaSuccess) {
    reply(std::string("lost starting the GPU: ") + cudaGetErrorString(error));
    return 4;
  }
  call.stream = stream;
#endif
  call.x = open_buffer('x', argv[10], 4ull * B * C * H * W, 0, guard);
  call.w = open_buffer('w', argv[11], 4ull * M * C * K * K, 1, guard);
  call.y = open_buffer('y', argv[12], 4ull * B * M * (H - K + 1) * (W - K + 1), 2, guard);

  stack_t stack = {};
  stack.ss_sp = spare_stack;
  stack.ss_size = sizeof spare_stack;
  sigaltstack(&stack, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  signal(SIGXFSZ, SIG_IGN);  // what is printed beyond the limit is lost, and that is all
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);
  reply("open");

  void* loaded = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!loaded) {
    reply("unloadable " + one_line(dlerror()));
    return 4;
  }
  auto forward = reinterpret_cast<void (*)(const ece408_grade_call*)>(dlsym(loaded, "ece408_grade_forward"));
  if (!forward) {
    reply("unloadable it lacks ece408_grade_forward");
    return 4;
  }
  reply("ready");

  char line[64], nonce[40];
  while (fgets(line, sizeof line, commands)) {
    if (sscanf(line, "empty %39s", nonce) == 1) {
#ifdef ECE408_GRADE_GPU
      cudaDeviceSynchronize();
#endif
      reply(std::string("done ") + nonce + " 0");
    } else if (sscanf(line, "run %39s", nonce) == 1) {
      try {
        long long start = nanoseconds();
        forward(&call);
#ifdef ECE408_GRADE_GPU
        cudaError_t late = cudaDeviceSynchronize();
        if (late == cudaSuccess) late = cudaGetLastError();
        if (late != cudaSuccess) {
          reply(std::string("cuda ") + cudaGetErrorName(late) + " " + cudaGetErrorString(late));
          continue;
        }
#endif
        long long took = nanoseconds() - start;
        reply(std::string("done ") + nonce + " " + std::to_string(took));
      } catch (const std::exception& error) {
        reply("failed " + one_line(error.what()));
      } catch (...) {
        reply("failed an exception that is no std::exception");
      }
    } else {
      break;
    }
  }
  fflush(stdout);
  _exit(0);
}
