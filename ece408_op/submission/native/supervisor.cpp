// Process 1 of a sandbox: runs one program with limits, as its first child, and reports how that ended.
//
//   supervisor KEY=VALUE... -- PROGRAM ARGUMENT...
//
//   control=FD         a socket for reports: "started" by the child just before PROGRAM, so that the harness learns the
//                      child's process id from the kernel; "exit N" or "signal N" at its end; or "failed TEXT"
//   limit=NUMBER:VALUE setrlimit(NUMBER, VALUE); any number of times
//   tmpfs=PATH         the tmpfs mounted there gets the options of mount=OPTIONS; any number of times
//   uid=NUMBER         the user and group that PROGRAM runs as
//   filter=FD          a seccomp program for PROGRAM
//
// bubblewrap has built the namespaces and the file system; with --unsafe there are none, and this is an ordinary process.
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <grp.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <string>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

namespace {

int control = -1;

void report(const std::string& text) {
  ssize_t written = write(control, text.data(), text.size());
  (void)written;
}

[[noreturn]] void fail(const std::string& step) {
  report("failed " + step + ": " + strerror(errno));
  _exit(125);
}

void install_filter(int descriptor) {
  char bytes[1 << 16];
  ssize_t size = pread(descriptor, bytes, sizeof bytes, 0);
  sock_fprog program = {(unsigned short)(size / sizeof(sock_filter)), reinterpret_cast<sock_filter*>(bytes)};
  if (size <= 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) fail("installing the seccomp filter");
}

// Takes the limits and the user in the child; the words that come first are for it, too.
[[noreturn]] void run_program(char** words, bool in_sandbox) {
  setsid();
  int filter = -1;
  long uid = 0;
  for (; strcmp(*words, "--") != 0; ++words) {
    int number = 0;
    unsigned long long value = 0;
    sscanf(*words, "uid=%ld", &uid);
    sscanf(*words, "filter=%d", &filter);
    if (sscanf(*words, "limit=%d:%llu", &number, &value) != 2) continue;
    rlimit both = {value, value};
    if (setrlimit((__rlimit_resource_t)number, &both) != 0) fail(*words);
  }
  if (uid > 0 && (setgroups(0, nullptr) != 0 || setresgid(uid, uid, uid) != 0 || setresuid(uid, uid, uid) != 0))
    fail("changing the user");
  if (!in_sandbox) prctl(PR_SET_PDEATHSIG, SIGKILL);  // a change of the user takes it back
  prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) fail("no new privileges");
  fcntl(control, F_SETFD, FD_CLOEXEC);
  if (filter >= 0) {
    fcntl(filter, F_SETFD, FD_CLOEXEC);
    install_filter(filter);
  }
  report("started");
  execv(words[1], words + 1);
  fprintf(stderr, "supervisor: %s: %s\n", words[1], strerror(errno));
  _exit(126);
}

}  // namespace

int main(int, char** words) {
  bool in_sandbox = getpid() == 1;
  prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);  // the program may have this process's user: it must not write to its memory
  if (!in_sandbox) prctl(PR_SET_PDEATHSIG, SIGKILL);
  const char* options = "";
  for (char** word = ++words; strcmp(*word, "--") != 0; ++word) {
    sscanf(*word, "control=%d", &control);
    if (strncmp(*word, "mount=", 6) == 0) options = *word + 6;
    if (strncmp(*word, "tmpfs=", 6) == 0 &&
        mount(nullptr, *word + 6, nullptr, MS_REMOUNT | MS_NOSUID | MS_NODEV, options) != 0)
      fail(*word);
  }
  pid_t program = fork();
  if (program < 0) fail("fork");
  if (program == 0) run_program(words, in_sandbox);
  // Only the program may use the other descriptors: its socket must end when it does.
  for (int fd = 0; fd < 4096; ++fd)
    if (fd != control) close(fd);
  int status = 0;
  for (pid_t ended = 0; ended != program && (ended >= 0 || errno == EINTR);) ended = waitpid(-1, &status, 0);
  // Process 1 reaches every process inside; elsewhere the program's session has to do.
  kill(in_sandbox ? -1 : -program, SIGKILL);
  report(WIFSIGNALED(status) ? "signal " + std::to_string(WTERMSIG(status)) : "exit " + std::to_string(WEXITSTATUS(status)));
  return 0;
}
