// The worker: maps the parent's buffers, loads one submission, and calls its forward when told to.
//
//   runner LIBRARY IN OUT GUARD {B C H W M K X W Y}...
//
// Nine words for each layer. X, W and Y are descriptors on the CPU, CUDA IPC handles in hexadecimal on the GPU;
// GUARD is the bytes around each.
//
// Commands and replies are lines over two pipes. "load" loads the submission, "run NONCE LAYER" calls forward and is
// answered "done NONCE NANOSECONDS NOTE", or "failed TEXT" where forward threw; "empty NONCE" is answered at once, before
// "load" too, and "touch NONCE LAYER", before "load" alone, when y is full of zeros. NOTE is the CUDA error that forward left unread, or "-". Nothing here is believed by the parent, since a submission can write to any
// memory of this process: the parent has its own clock and checks the output.
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
#include <ucontext.h>
#include <unistd.h>
#include <vector>

#ifdef ECE408_GRADE_GPU
#include <cuda_runtime.h>
#endif

struct ece408_grade_call {
  float *y, *x, *w;
  unsigned y_shape[4], x_shape[4], w_shape[4];
  void* stream;
  const char* note;
};

namespace {

int out = -1;
char spare_stack[1 << 16];
const char* stack_begin = nullptr;

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

#ifdef ECE408_GRADE_GPU
// On a GPU the buffers are no memory of the host's.
void fault(int number, siginfo_t*, void*) {
  char text[64];
  int n = snprintf(text, sizeof text, "fault %d elsewhere 0 0\n", number);
  ssize_t done = write(out, text, n);
  (void)done;
  signal(number, SIG_DFL);
}

float* open_buffer(char name, const char* handle, size_t bytes, size_t guard) {
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
  return reinterpret_cast<float*>(static_cast<char*>(base) + guard);
}
#else
struct Region {
  char name;
  char* begin;
  size_t bytes;
};
std::vector<Region> regions;

// Was it memory of the stack's that is not there? Between the stack's pointer and its beginning all is, while it lasts;
// a function that it has no room for moves the pointer out of it.
bool of_the_stack(const char* at, void* context) {
  const char* pointer = at + (1 << 30);
#if defined(__x86_64__)
  pointer = reinterpret_cast<const char*>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RSP]);
#elif defined(__aarch64__)
  pointer = reinterpret_cast<const char*>(static_cast<ucontext_t*>(context)->uc_mcontext.sp);
#endif
  const ptrdiff_t slack = 1 << 16;
  // Other threads have stacks that lie among other memory.
  return at - pointer > -slack && (at - pointer < slack || (getpid() == gettid() && at < stack_begin));
}

// A fault is reported as a place in one of the buffers, where it is near one, and then taken as it came.
void fault(int number, siginfo_t* info, void* context) {
  const char* at = static_cast<const char*>(info->si_addr);
  char text[128];
  int n = snprintf(text, sizeof text, "fault %d %s 0 0\n", number, of_the_stack(at, context) ? "stack" : "elsewhere");
  for (const Region& r : regions) {
    const ptrdiff_t slack = 1 << 24;
    ptrdiff_t offset = at - r.begin;
    if (offset > -slack && offset < (ptrdiff_t)r.bytes + slack)
      n = snprintf(text, sizeof text, "fault %d %c %td %zu\n", number, r.name, offset / 4, r.bytes / 4);
  }
  ssize_t done = write(out, text, n);
  (void)done;
  signal(number, SIG_DFL);
}

// Where the pages around the data cannot be touched; the data ends where they begin, within 64 bytes.
float* open_buffer(char name, const char* fd_text, size_t bytes, size_t guard) {
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
  regions.push_back({name, base + guard + mapped - (bytes + 63) / 64 * 64, bytes});
  return reinterpret_cast<float*>(regions.back().begin);
}
#endif

long long nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

void answer_empty(const char* nonce) {
#ifdef ECE408_GRADE_GPU
  cudaDeviceSynchronize();
#endif
  reply(std::string("done ") + nonce + " 0");
}

std::string one_line(std::string text) {
  for (char& c : text)
    if (c == '\n' || c == '\r') c = ' ';
  return text.substr(0, 1000);
}

}  // namespace

int main(int argc, char** argv) {
  const int first = 5, words = 9;
  stack_begin = reinterpret_cast<const char*>(argv);
  if (argc <= first || (argc - first) % words) return 2;
  const char* library = argv[1];
  FILE* commands = fdopen(atoi(argv[2]), "r");
  out = atoi(argv[3]);
  size_t guard = strtoull(argv[4], nullptr, 10);
  signal(SIGXFSZ, SIG_IGN);  // what is printed beyond the limit is lost, and that is all
  void* used = nullptr;
#ifdef ECE408_GRADE_GPU
  cudaStream_t stream;
  cudaError_t error = cudaStreamCreate(&stream);
  if (error != cudaSuccess) {
    reply(std::string("lost starting the GPU: ") + cudaGetErrorString(error));
    return 4;
  }
  used = stream;
#endif
  std::vector<ece408_grade_call> calls;
  for (char** at = argv + first; *at; at += words) {
    unsigned B = atoi(at[0]), C = atoi(at[1]), H = atoi(at[2]), W = atoi(at[3]), M = atoi(at[4]), K = atoi(at[5]);
    unsigned OH = H - K + 1, OW = W - K + 1;
    ece408_grade_call call = {nullptr, nullptr, nullptr, {B, M, OH, OW}, {B, C, H, W}, {M, C, K, K}, used, nullptr};
    call.x = open_buffer('x', at[6], 4ull * B * C * H * W, guard);
    call.w = open_buffer('w', at[7], 4ull * M * C * K * K, guard);
    call.y = open_buffer('y', at[8], 4ull * B * M * OH * OW, guard);
    calls.push_back(call);
  }

  stack_t stack = {};
  stack.ss_sp = spare_stack;
  stack.ss_size = sizeof spare_stack;
  sigaltstack(&stack, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);
  reply("open");
  // What an empty call takes is measured before there is anybody who could make it slow.
  // And how soon the parent's own work follows an answer that is honest.
  char line[80], nonce[40];
  unsigned layer = 0;
  while (fgets(line, sizeof line, commands)) {
    if (sscanf(line, "touch %39s %u", nonce, &layer) == 2 && layer < calls.size()) {
#ifdef ECE408_GRADE_GPU
      const unsigned* n = calls[layer].y_shape;
      cudaMemset(calls[layer].y, 0, 4ull * n[0] * n[1] * n[2] * n[3]);
#endif
    } else if (sscanf(line, "empty %39s", nonce) != 1) {
      break;
    }
    answer_empty(nonce);
  }

  void* loaded = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!loaded) {
    reply("unloadable " + one_line(dlerror()));
    return 4;
  }
  auto forward = reinterpret_cast<void (*)(ece408_grade_call*)>(dlsym(loaded, "ece408_grade_forward"));
  if (!forward) {
    reply("unloadable it lacks ece408_grade_forward");
    return 4;
  }
  reply("ready");

  while (fgets(line, sizeof line, commands)) {
    if (sscanf(line, "empty %39s", nonce) == 1) {
      answer_empty(nonce);
    } else if (sscanf(line, "run %39s %u", nonce, &layer) == 2 && layer < calls.size()) {
      calls[layer].note = nullptr;
      try {
        long long start = nanoseconds();
        forward(&calls[layer]);
#ifdef ECE408_GRADE_GPU
        cudaError_t late = cudaDeviceSynchronize();
        if (late == cudaSuccess) late = cudaGetLastError();
        // Whoever resets the device takes the buffers away too.
        cudaPointerAttributes mapped;
        if (late == cudaSuccess && (cudaPointerGetAttributes(&mapped, calls[layer].y) != cudaSuccess ||
                                    mapped.type != cudaMemoryTypeDevice))
          late = cudaErrorContextIsDestroyed;
        if (late != cudaSuccess) {
          reply(std::string("cuda ") + cudaGetErrorName(late) + " " + cudaGetErrorString(late));
          continue;
        }
#endif
        long long took = nanoseconds() - start;
        reply(std::string("done ") + nonce + " " + std::to_string(took) + " " +
              (calls[layer].note ? calls[layer].note : "-"));
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
