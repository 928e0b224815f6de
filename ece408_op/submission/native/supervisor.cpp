// Process 1 of a sandbox: runs one program with limits, as its first child, and reports how that ended.
//
//   supervisor CONTROL TMPFS UID FILTER LIMIT... -- PROGRAM ARGUMENT...
//
// CONTROL is a socket for reports: "started" by the child just before PROGRAM, so that the harness learns the child's
// process id from the kernel; "exit N" or "signal N" at its end; or "failed TEXT". The tmpfs mounted on /tmp and /dev/shm get
// the options TMPFS. UID is the user and group that PROGRAM runs as, 0 for the caller's, FILTER a descriptor of its seccomp
// program, -1 for none, and LIMIT is NUMBER:VALUE of setrlimit.
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

// Takes the limits and the user in the child.
[[noreturn]] void run_program(long uid, int filter, char** words, bool in_sandbox) {
  setsid();
  for (; strcmp(*words, "--") != 0; ++words) {
    int number = 0;
    unsigned long long value = 0;
    sscanf(*words, "%d:%llu", &number, &value);
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
    char bytes[1 << 16];
    ssize_t size = pread(filter, bytes, sizeof bytes, 0);
    sock_fprog program = {(unsigned short)(size / sizeof(sock_filter)), reinterpret_cast<sock_filter*>(bytes)};
    fcntl(filter, F_SETFD, FD_CLOEXEC);
    if (size <= 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) fail("installing the seccomp filter");
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
  control = atoi(words[1]);
  for (const char* path : {"/tmp", "/dev/shm"})
    if (in_sandbox && mount(nullptr, path, nullptr, MS_REMOUNT | MS_NOSUID | MS_NODEV, words[2]) != 0 && errno != ENOENT)
      fail(path);
  pid_t program = fork();
  if (program < 0) fail("fork");
  if (program == 0) run_program(atol(words[3]), atoi(words[4]), words + 5, in_sandbox);
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
