// Runs one program as the first child of process 1 of a sandbox, and controls it on behalf of the harness.
//
//   supervisor KEY=VALUE... -- PROGRAM ARGUMENT...
//
//   control=FD         a socket: commands in (one letter each), reports out (one line each)
//   limit=NUMBER:VALUE setrlimit(NUMBER, VALUE) for PROGRAM; any number of times
//   tmpfs=PATH         the tmpfs mounted there gets the options of mount=OPTIONS; any number of times
//   uid=NUMBER         the user and group that PROGRAM runs as
//   filter=FD          a seccomp program for PROGRAM
//   memory=BYTES       PROGRAM is killed when more of its memory is resident
//   spin=MILLISECONDS  after a command, poll for the next one for this long before sleeping
//
// bubblewrap has built the namespaces and the file system; with --unsafe there are none, and this is an ordinary process.
// The supervisor reports "ready" and waits for "b" (begin). It reports "started" when PROGRAM begins, and "exit N" or
// "signal N" at its end. "s" stops all processes inside and is answered "stopped"; "g" continues them; "k" kills them.
// A program that runs while it is stopped is killed, and reported as "woke". "failed TEXT" means that a step failed.
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <grp.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <string>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>
#include <vector>

namespace {

struct Settings {
  int control = -1, filter = -1;
  long uid = 0, spin = 0;
  long long memory = 0;
  std::string mount;
  std::vector<std::pair<int, rlim_t>> limits;
  std::vector<std::string> tmpfs;
  char** program = nullptr;
} settings;

void report(const std::string& line) {
  std::string text = line + "\n";
  ssize_t written = write(settings.control, text.data(), text.size());
  (void)written;
}

[[noreturn]] void fail(const std::string& step) {
  report("failed " + step + ": " + strerror(errno));
  _exit(125);
}

void parse(char** words) {
  for (; *words && std::string(*words) != "--"; ++words) {
    std::string word = *words;
    std::string key = word.substr(0, word.find('=')), value = word.substr(word.find('=') + 1);
    if (key == "control") settings.control = atoi(value.c_str());
    else if (key == "filter") settings.filter = atoi(value.c_str());
    else if (key == "uid") settings.uid = atol(value.c_str());
    else if (key == "memory") settings.memory = atoll(value.c_str());
    else if (key == "spin") settings.spin = atol(value.c_str());
    else if (key == "mount") settings.mount = value;
    else if (key == "tmpfs") settings.tmpfs.push_back(value);
    else if (key == "limit")
      settings.limits.emplace_back(atoi(value.c_str()), strtoull(value.c_str() + value.find(':') + 1, nullptr, 10));
  }
  settings.program = words + 1;
}

void install_filter() {
  std::vector<char> bytes(1 << 16);
  ssize_t size = pread(settings.filter, bytes.data(), bytes.size(), 0);
  sock_fprog program = {(unsigned short)(size / sizeof(sock_filter)), reinterpret_cast<sock_filter*>(bytes.data())};
  if (size <= 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) fail("installing the seccomp filter");
}

// The child's way from the fork to the program.
[[noreturn]] void run_program(bool in_sandbox) {
  setsid();
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  if (!in_sandbox) prctl(PR_SET_PDEATHSIG, SIGKILL);
  for (auto [number, value] : settings.limits) {
    rlimit both = {value, value};
    if (setrlimit((__rlimit_resource_t)number, &both) != 0) fail("limit " + std::to_string(number));
  }
  long uid = settings.uid;
  if (uid > 0 && (setgroups(0, nullptr) != 0 || setresgid(uid, uid, uid) != 0 || setresuid(uid, uid, uid) != 0))
    fail("changing the user");
  prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) fail("no new privileges");
  report("started");
  if (settings.filter >= 0) install_filter();
  execv(settings.program[0], settings.program);
  fprintf(stderr, "supervisor: %s: %s\n", settings.program[0], strerror(errno));
  _exit(126);
}

long long milliseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

bool too_large(pid_t program) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/statm", (int)program);
  FILE* file = fopen(path, "r");
  long long pages = 0;
  if (!file) return false;
  bool read = fscanf(file, "%*s %lld", &pages) == 1;
  fclose(file);
  return read && pages * sysconf(_SC_PAGESIZE) > settings.memory;
}

// Carries out commands until the program ends; returns its wait status.
int supervise(pid_t program, bool in_sandbox, int signals) {
  // Process 1 reaches every process inside; elsewhere the program's session has to do.
  auto signal_all = [&](int number) { kill(in_sandbox ? -1 : -program, number); };
  bool stopped = false;
  long long awake_until = 0, next_look = 0;
  const int memory_period = 50;  // milliseconds
  pollfd sources[2] = {{settings.control, POLLIN, 0}, {signals, POLLIN, 0}};
  while (true) {
    int ready = poll(sources, 2, milliseconds() < awake_until ? 0 : settings.memory > 0 ? memory_period : -1);
    if (settings.memory > 0 && milliseconds() >= next_look) {
      next_look = milliseconds() + memory_period;
      if (too_large(program)) signal_all(SIGKILL);
    }
    if (ready <= 0) continue;
    if (sources[1].revents) {
      signalfd_siginfo info;
      ssize_t got = read(signals, &info, sizeof info);
      (void)got;
    }
    int status = 0;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG | WCONTINUED)) > 0;) {
      if (pid != program) continue;
      if (!WIFCONTINUED(status)) return status;
      // The next stop erases the news of a "g", so this continuation came from inside.
      if (stopped) {
        report("woke");
        signal_all(SIGKILL);
      }
    }
    if (!sources[0].revents) continue;
    char commands[64];
    ssize_t count = read(settings.control, commands, sizeof commands);
    if (settings.spin > 0) awake_until = milliseconds() + settings.spin;
    if (count <= 0) {
      signal_all(SIGKILL);
      sources[0].fd = -1;
    }
    for (ssize_t i = 0; i < count; ++i) {
      if (commands[i] == 's') {
        signal_all(SIGSTOP);
        if (waitpid(program, &status, WUNTRACED) == program && !WIFSTOPPED(status)) return status;
        stopped = true;
        report("stopped");
      } else if (commands[i] == 'g') {
        stopped = false;
        signal_all(SIGCONT);
      } else if (commands[i] == 'k') {
        signal_all(SIGKILL);
      }
    }
  }
}

}  // namespace

int main(int, char** argv) {
  parse(argv + 1);
  bool in_sandbox = getpid() == 1;
  prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);  // the program may have this process's user: it must not write to its memory
  if (!in_sandbox) prctl(PR_SET_PDEATHSIG, SIGKILL);
  fcntl(settings.control, F_SETFD, FD_CLOEXEC);
  if (settings.filter >= 0) fcntl(settings.filter, F_SETFD, FD_CLOEXEC);
  for (const auto& path : settings.tmpfs)
    if (mount(nullptr, path.c_str(), nullptr, MS_REMOUNT | MS_NOSUID | MS_NODEV, settings.mount.c_str()) != 0)
      fail("limiting " + path);
  report("ready");
  char begin = 0;
  if (read(settings.control, &begin, 1) != 1 || begin != 'b') return 125;
  sigset_t child;
  sigemptyset(&child);
  sigaddset(&child, SIGCHLD);
  sigprocmask(SIG_BLOCK, &child, nullptr);
  int signals = signalfd(-1, &child, SFD_CLOEXEC);
  pid_t program = fork();
  if (program < 0) fail("fork");
  if (program == 0) run_program(in_sandbox);
  // Only the program may use the other descriptors: its pipes must end when it does.
  for (int fd = 0; fd < 4096; ++fd)
    if (fd != settings.control && fd != signals) close(fd);
  int status = supervise(program, in_sandbox, signals);
  kill(in_sandbox ? -1 : -program, SIGKILL);
  report(WIFSIGNALED(status) ? "signal " + std::to_string(WTERMSIG(status)) : "exit " + std::to_string(WEXITSTATUS(status)));
  return 0;
}
