// The harness's program in a sandbox, the supervisor, and the worker that it runs.
//
//   worker supervise CONTROL OPTIONS TMPFS UID FILTER LIMIT... -- PROGRAM ARGUMENT...
//
// Process 1 of a sandbox, which bubblewrap has built; with --unsafe an ordinary process. It runs one program with limits, as
// its first child, and reports on the socket CONTROL: "started" by the child just before PROGRAM, so that the harness learns
// the child's process id from the kernel; "exit N" or "signal N" at its end; or "lost TEXT". The sandbox's tmpfs, on /tmp
// and on the path TMPFS, get these options. UID is the user and group that PROGRAM runs as, 0 for the caller's, FILTER a
// descriptor of its seccomp program, -1 for none, and LIMIT is NUMBER:VALUE of setrlimit.
//
//   worker LIBRARY SOCKET DEVICE GUARD {B C H W M K X W Y}...
//
// Maps the harness's buffers, loads one submission, and calls its forward when told to.
//
// DEVICE is cpu or gpu. Nine words per layer; X, W and Y are DESCRIPTOR:BYTES of a file, or of memory of the CUDA driver's
// virtual memory API, and GUARD is the number of bytes around each. python_worker.py loads this file as a library and calls
// ece408_serve with its own load and forward. Of CUDA the worker needs the driver alone, so it is compiled without nvcc.
//
// Commands and replies are packets of a socket. A command is a word, a nonce and a layer: "load" loads the submission, "run"
// calls its forward, "zero" fills y with zeros, and "empty" does nothing. The answer is "done NONCE NANOSECONDS NOTE", where
// NOTE is the CUDA error that forward left unread, or "-"; else "unloadable TEXT", "failed TEXT" (forward threw),
// "refused TEXT" (it does not take the layer) or "cuda TEXT" (a CUDA error). The harness believes nothing of this, since a
// submission can write to any memory of this process: it has its own clock.
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <exception>
#include <fcntl.h>
#include <grp.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <string>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>
#include <vector>

struct ece408_grade_call {
  float *y, *x, *w;
  unsigned y_shape[4], x_shape[4], w_shape[4];
  void* stream;
  const char* note;
};

namespace {

// The answers of load and forward are at most this long; an empty one means that all went well.
constexpr size_t text_bytes = 1024;
typedef void (*Load)(char* text);
typedef void (*Forward)(ece408_grade_call* call, unsigned layer, char* text);

int harness = -1;  // the socket of this process
char spare_stack[1 << 16];
const char* stack_begin = nullptr;

void reply(const std::string& text) {
  if (write(harness, text.data(), text.size()) != (ssize_t)text.size()) _exit(3);
}

[[noreturn]] void lost(const std::string& doing, const char* why = strerror(errno)) {
  reply("lost " + doing + ": " + why);
  _exit(4);
}

struct Region { char name; char* begin; size_t bytes; };
std::vector<Region> regions;  // the buffers in the host's memory

void *cuda = nullptr, *stream = nullptr;  // CUDA's driver and a stream, where the submission is for a GPU

// Calls a function of CUDA's driver, by the types of the arguments; returns its error.
template <typename... Arguments>
int driver(const char* name, Arguments... arguments) {
  void* function = dlsym(cuda, name);
  if (!function) lost("looking for a function of CUDA's driver", dlerror());
  return reinterpret_cast<int (*)(Arguments...)>(function)(arguments...);
}

template <typename... Arguments>
void require(const char* name, Arguments... arguments) {
  int error = driver(name, arguments...);
  if (error) lost(name, ("CUDA's driver reports error " + std::to_string(error)).c_str());
}

// Makes the context current that CUDA's runtime uses, and a stream.
void start_gpu() {
  void* context = nullptr;
  cuda = dlopen("libcuda.so.1", RTLD_NOW);
  if (!cuda) lost("opening CUDA's driver", dlerror());
  require("cuInit", 0u);
  require("cuDevicePrimaryCtxRetain", &context, 0);
  require("cuCtxSetCurrent", context);
  require("cuStreamCreate", &stream, 0u);
}

// Maps memory of the harness's; x and w read-only if the driver can.
float* open_on_gpu(char name, int fd, size_t size, size_t guard) {
  unsigned long long memory = 0, at = 0;
  require("cuMemImportFromShareableHandle", &memory, reinterpret_cast<void*>((intptr_t)fd), 1);
  require("cuMemAddressReserve", &at, size, (size_t)0, 0ull, 0ull);
  require("cuMemMap", at, size, (size_t)0, memory, 0ull);
  int read_only[] = {1, 0, 1}, writable[] = {1, 0, 3};  // CUmemAccessDesc: a device, number 0, access
  if (name == 'y' || driver("cuMemSetAccess", at, size, read_only, (size_t)1))
    require("cuMemSetAccess", at, size, writable, (size_t)1);
  return reinterpret_cast<float*>(at + guard);
}

// Waits for the GPU; the first error of a call as an answer, empty without one.
std::string cuda_error() {
  if (!cuda) return "";
  int error = driver("cuCtxSynchronize");
  if (!error) error = driver("cuStreamQuery", stream);  // a reset of the device takes the worker's stream away
  if (!error) return "";
  const char *name = "", *text = "";
  driver("cuGetErrorName", error, &name);
  driver("cuGetErrorString", error, &text);
  return std::string("cuda ") + name + " " + text;
}

// The pages around the data cannot be touched; the data ends where they begin, within 64 bytes.
float* open_on_cpu(char name, int fd, size_t size, size_t bytes, size_t guard) {
  char* base = static_cast<char*>(
      mmap(nullptr, size + 2 * guard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  int access = name == 'y' ? PROT_READ | PROT_WRITE : PROT_READ;
  if (base == MAP_FAILED || mmap(base + guard, size, access, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
    lost("mapping the harness's buffer");
  regions.push_back({name, base + guard + size - (bytes + 63) / 64 * 64, bytes});
  return reinterpret_cast<float*>(regions.back().begin);
}

float* open_buffer(char name, const char* handle, size_t bytes, size_t guard) {
  int fd = -1;
  size_t size = 0;
  if (sscanf(handle, "%d:%zu", &fd, &size) != 2) lost("opening the harness's buffer", "expected DESCRIPTOR:BYTES");
  float* at = cuda ? open_on_gpu(name, fd, size, guard) : open_on_cpu(name, fd, size, bytes, guard);
  close(fd);
  return at;
}

// Is it memory of the stack that is not there? All memory between the stack pointer and the stack's beginning is, as long
// as the stack lasts; a function without room for its variables moves the pointer out of it.
bool of_the_stack(const char* at, void* context) {
  const char* pointer = at + (1 << 30);
#if defined(__x86_64__)
  pointer = reinterpret_cast<const char*>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RSP]);
#elif defined(__aarch64__)
  pointer = reinterpret_cast<const char*>(static_cast<ucontext_t*>(context)->uc_mcontext.sp);
#endif
  const ptrdiff_t slack = 1 << 16;
  // The stacks of other threads lie among other memory.
  return at - pointer > -slack && (at - pointer < slack || (getpid() == gettid() && at < stack_begin));
}

// Reports where a fault lies, relative to a buffer that is near, and lets the signal end the process.
void fault(int number, siginfo_t* info, void* context) {
  const char* at = static_cast<const char*>(info->si_addr);
  char text[128];
  int n = snprintf(text, sizeof text, "fault %d %s 0 0", number, of_the_stack(at, context) ? "stack" : "elsewhere");
  for (const Region& r : regions) {
    const ptrdiff_t slack = 1 << 24, offset = at - r.begin;
    if (offset > -slack && offset < (ptrdiff_t)r.bytes + slack)
      n = snprintf(text, sizeof text, "fault %d %c %td %zu", number, r.name, offset / 4, r.bytes / 4);
  }
  (void)!write(harness, text, n);
  signal(number, SIG_DFL);
}

void put(char* text, const std::string& line) { text[line.copy(text, text_bytes - 1)] = 0; }

const char* library_path = nullptr;
void (*library_forward)(ece408_grade_call*) = nullptr;

void load_library(char* text) {
  void* library = dlopen(library_path, RTLD_NOW | RTLD_LOCAL);
  if (!library) return put(text, std::string("unloadable ") + dlerror());
  library_forward = reinterpret_cast<void (*)(ece408_grade_call*)>(dlsym(library, "ece408_grade_forward"));
  if (!library_forward) put(text, "unloadable it lacks ece408_grade_forward");
}

void call_library(ece408_grade_call* call, unsigned, char* text) {
  try {
    library_forward(call);
  } catch (const std::exception& error) {
    put(text, std::string("failed ") + error.what());
  } catch (...) {
    put(text, "failed an exception that is no std::exception");
  }
}

// Takes the limits and the user in the supervisor's child.
[[noreturn]] void run_program(long uid, int filter, char** words, bool in_sandbox) {
  setsid();
  for (; strcmp(*words, "--") != 0; ++words) {
    int number = 0;
    unsigned long long value = 0;
    sscanf(*words, "%d:%llu", &number, &value);
    rlimit both = {};
    getrlimit((__rlimit_resource_t)number, &both);
    if (value < both.rlim_max) both.rlim_max = value;  // the caller may have a lower limit
    both.rlim_cur = both.rlim_max;
    if (setrlimit((__rlimit_resource_t)number, &both) != 0) lost(*words);
  }
  if (uid > 0 && (setgroups(0, nullptr) != 0 || setresgid(uid, uid, uid) != 0 || setresuid(uid, uid, uid) != 0))
    lost("changing the user");
  if (!in_sandbox) prctl(PR_SET_PDEATHSIG, SIGKILL);  // a change of the user takes it back
  prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) lost("no new privileges");
  fcntl(harness, F_SETFD, FD_CLOEXEC);
  if (filter >= 0) {
    char bytes[1 << 16];
    ssize_t size = pread(filter, bytes, sizeof bytes, 0);
    sock_fprog program = {(unsigned short)(size / sizeof(sock_filter)), reinterpret_cast<sock_filter*>(bytes)};
    fcntl(filter, F_SETFD, FD_CLOEXEC);
    if (size <= 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) lost("the seccomp filter");
  }
  reply("started");
  execv(words[1], words + 1);
  lost(words[1]);
}

[[noreturn]] void supervise(char** words) {
  bool in_sandbox = getpid() == 1;
  prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);  // the program may have this process's user: it must not write to its memory
  if (!in_sandbox) prctl(PR_SET_PDEATHSIG, SIGKILL);
  harness = atoi(words[0]);
  for (const char* path : {"/tmp", static_cast<const char*>(words[2])})
    if (in_sandbox && mount(nullptr, path, nullptr, MS_REMOUNT | MS_NOSUID | MS_NODEV, words[1]) != 0) lost(path);
  pid_t program = fork();
  if (program < 0) lost("fork");
  if (program == 0) run_program(atol(words[3]), atoi(words[4]), words + 5, in_sandbox);
  // Only the program may use the other descriptors: its socket must end when it does.
  for (int fd = 0; fd < 4096; ++fd)
    if (fd != harness) close(fd);
  int status = 0;
  for (pid_t ended = 0; ended != program && (ended >= 0 || errno == EINTR);) ended = waitpid(-1, &status, 0);
  // Process 1 reaches every process inside; elsewhere the program's session has to do.
  kill(in_sandbox ? -1 : -program, SIGKILL);
  reply(WIFSIGNALED(status) ? "signal " + std::to_string(WTERMSIG(status)) : "exit " + std::to_string(WEXITSTATUS(status)));
  _exit(0);
}

}  // namespace

// Serves the commands until the harness closes the socket; words are SOCKET DEVICE GUARD and the layers.
extern "C" int ece408_serve(char** words, Load load, Forward forward) {
  constexpr int first = 3, per_layer = 9;
  harness = atoi(words[0]);
  size_t guard = strtoull(words[2], nullptr, 10);
  signal(SIGXFSZ, SIG_IGN);  // output beyond the limit is lost, and that is all
  setvbuf(stdout, nullptr, _IONBF, 0);  // what is printed outlives a crash
  if (strcmp(words[1], "gpu") == 0) start_gpu();
  std::vector<ece408_grade_call> calls;
  for (char** at = words + first; *at; at += per_layer) {
    unsigned B = atoi(at[0]), C = atoi(at[1]), H = atoi(at[2]), W = atoi(at[3]), M = atoi(at[4]), K = atoi(at[5]);
    unsigned OH = H - K + 1, OW = W - K + 1;
    ece408_grade_call call = {nullptr, nullptr, nullptr, {B, M, OH, OW}, {B, C, H, W}, {M, C, K, K}, stream, nullptr};
    call.x = open_buffer('x', at[6], 4ull * B * C * H * W, guard);
    call.w = open_buffer('w', at[7], 4ull * M * C * K * K, guard);
    call.y = open_buffer('y', at[8], 4ull * B * M * OH * OW, guard);
    calls.push_back(call);
  }
  const stack_t stack = {spare_stack, 0, sizeof spare_stack};
  sigaltstack(&stack, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int number : {SIGSEGV, SIGBUS}) sigaction(number, &action, nullptr);

  // The harness measures an empty call, and how soon its own work on a GPU follows an honest answer, before the
  // submission can slow either down.
  char line[80], word[8], nonce[40], text[text_bytes];
  unsigned layer = 0;
  for (ssize_t size; (size = TEMP_FAILURE_RETRY(read(harness, line, sizeof line - 1))) > 0;) {
    line[size] = 0;
    if (sscanf(line, "%7s %39s %u", word, nonce, &layer) != 3 || layer >= calls.size()) break;
    const std::string command = word;
    ece408_grade_call& call = calls[layer];
    call.note = nullptr;
    *text = 0;
    const auto start = std::chrono::steady_clock::now();
    if (command == "load") load(text);
    if (command == "run") forward(&call, layer, text);
    if (command == "zero") {
      const unsigned* n = call.y_shape;
      require("cuMemsetD32_v2", (unsigned long long)call.y, 0u, (size_t)n[0] * n[1] * n[2] * n[3]);
    }
    if (!*text) put(text, cuda_error());
    const long long took = std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count();
    const char* note = call.note ? call.note : "-";
    reply(*text ? text : std::string("done ") + nonce + " " + std::to_string(took) + " " + note);
  }
  return 0;
}

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  if (strcmp(argv[1], "supervise") == 0) supervise(argv + 2);
  stack_begin = reinterpret_cast<const char*>(argv);
  library_path = argv[1];
  // Nothing that a submission left for the exit runs.
  _exit(ece408_serve(argv + 2, load_library, call_library));
}
