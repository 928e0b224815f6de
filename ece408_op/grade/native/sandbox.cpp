// Starts one program with as little of this machine in sight as the system allows, and keeps watch over it.
//
//   jail KEY=VALUE... -- PROGRAM ARGUMENT...
//
//   root=DIR     an empty folder: the program's file system is built there
//   bind=PATH    shown read-only at the same place      write=PATH  the same, writable
//   hide=PATH    an empty folder in its place           tmp=BYTES   the size of /tmp
//   cwd=PATH  uid=N  as=BYTES  data=BYTES  fsize=BYTES  nproc=N  cpu=SECONDS  (limits; 0 or absent: none)
//   cgroup=PATH  a folder of cgroup v2 to enter         filter=1    forbid processes and sockets (seccomp)
//   soft=1       forbidden calls are refused, not fatal     gpu=1  what CUDA needs: the IPC namespace, /dev/shm
//   spin=MS      so long after a command the keeper looks for the next one without going to sleep
//   control=FD   commands in and reports out, one line each, over a socket
//
// The keeper, process 1 of the new process namespace, alone holds the control socket. It reports "had NAME" and
// "lacks NAME: why" for each means of containment, then "started"; it answers "stop" with "stopped" once every
// process inside is stopped, "go" starts them again, "kill" ends them; at the end it reports "exit N" or
// "signal N". A program that runs on by itself while it should stand still is ended, and "woke" reported. When its parent dies, it and everything inside die.
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <grp.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <linux/securebits.h>
#include <poll.h>
#include <sched.h>
#include <string>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

namespace {

int control = -1;

void say(const std::string& line) {
  std::string text = line + "\n";
  ssize_t done = write(control, text.data(), text.size());
  (void)done;
}
void had(const char* name) { say(std::string("had ") + name); }
void lacks(const char* name, const char* what = nullptr) {
  say(std::string("lacks ") + name + ": " + (what ? what : strerror(errno)));
}

struct Settings {
  std::string root, cwd, cgroup;
  std::vector<std::string> binds, writes, hides;
  long uid = 0, filter = 0, soft = 0, gpu = 0, spin = 0;
  long long as = 0, data = 0, fsize = 0, nproc = 0, cpu = 0, tmp = 64 << 20;
  char** program = nullptr;
};

Settings parse(char** at) {
  Settings s;
  for (; *at && std::string(*at) != "--"; ++at) {
    std::string word = *at;
    size_t equals = word.find('=');
    std::string key = word.substr(0, equals), value = word.substr(equals + 1);
    if (key == "root") s.root = value;
    else if (key == "cwd") s.cwd = value;
    else if (key == "cgroup") s.cgroup = value;
    else if (key == "bind") s.binds.push_back(value);
    else if (key == "write") s.writes.push_back(value);
    else if (key == "hide") s.hides.push_back(value);
    else if (key == "uid") s.uid = atol(value.c_str());
    else if (key == "filter") s.filter = atol(value.c_str());
    else if (key == "soft") s.soft = atol(value.c_str());
    else if (key == "spin") s.spin = atol(value.c_str());
    else if (key == "gpu") s.gpu = atol(value.c_str());
    else if (key == "as") s.as = atoll(value.c_str());
    else if (key == "data") s.data = atoll(value.c_str());
    else if (key == "fsize") s.fsize = atoll(value.c_str());
    else if (key == "nproc") s.nproc = atoll(value.c_str());
    else if (key == "cpu") s.cpu = atoll(value.c_str());
    else if (key == "tmp") s.tmp = atoll(value.c_str());
    else if (key == "control") control = atoi(value.c_str());
  }
  s.program = at + 1;
  return s;
}

bool put(const char* path, const std::string& text) {
  int fd = open(path, O_WRONLY);
  if (fd < 0) return false;
  bool done = write(fd, text.data(), text.size()) == (ssize_t)text.size();
  close(fd);
  return done;
}

// Makes the folder, or the empty file, that something is mounted on.
void make_place(const std::string& path, bool folder) {
  for (size_t i = 1; i < path.size(); ++i)
    if (path[i] == '/') mkdir(path.substr(0, i).c_str(), 0755);
  if (folder) mkdir(path.c_str(), 0755);
  else close(open(path.c_str(), O_CREAT | O_WRONLY, 0644));
}

bool bind(const std::string& root, const std::string& path, bool writable) {
  struct stat info;
  if (lstat(path.c_str(), &info) != 0) return true;
  std::string to = root + path;
  if (S_ISLNK(info.st_mode)) {
    char target[4096];
    ssize_t n = readlink(path.c_str(), target, sizeof target - 1);
    if (n < 0) return false;
    target[n] = 0;
    make_place(to.substr(0, to.rfind('/')), true);
    return symlink(target, to.c_str()) == 0 || errno == EEXIST;
  }
  make_place(to, S_ISDIR(info.st_mode));
  if (mount(path.c_str(), to.c_str(), nullptr, MS_BIND | MS_REC, nullptr) != 0) return false;
  if (writable) return true;
  unsigned long flags = MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID;
  // In a user namespace a remount must keep the flags that the mount was locked with.
  return mount(nullptr, to.c_str(), nullptr, flags, nullptr) == 0 ||
         mount(nullptr, to.c_str(), nullptr, flags | MS_NODEV, nullptr) == 0 ||
         mount(nullptr, to.c_str(), nullptr, flags | MS_NODEV | MS_RELATIME, nullptr) == 0 || S_ISCHR(info.st_mode);
}

bool build_root(const Settings& s) {
  if (mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return false;
  if (mount("tmpfs", s.root.c_str(), "tmpfs", MS_NOSUID, "size=1m,mode=755") != 0) return false;
  std::string tmp = s.root + "/tmp", proc = s.root + "/proc";
  mkdir(tmp.c_str(), 01777);
  std::string size = "size=" + std::to_string(s.tmp) + ",mode=1777";
  if (mount("tmpfs", tmp.c_str(), "tmpfs", MS_NOSUID | MS_NODEV, size.c_str()) != 0) return false;
  // After /tmp, since what is to be seen may lie there.
  for (const auto& path : s.binds)
    if (!bind(s.root, path, path.compare(0, 5, "/dev/") == 0)) return false;
  for (const auto& path : s.hides) {
    struct stat info;
    if (stat((s.root + path).c_str(), &info) == 0 && S_ISDIR(info.st_mode) &&
        mount("tmpfs", (s.root + path).c_str(), "tmpfs", MS_RDONLY | MS_NOSUID, "size=4k,mode=755") != 0)
      return false;
  }
  for (const auto& path : s.writes)
    if (!bind(s.root, path, true)) return false;
  if (s.gpu) {
    std::string shm = s.root + "/dev/shm";
    make_place(shm, true);
    if (mount("tmpfs", shm.c_str(), "tmpfs", MS_NOSUID | MS_NODEV, size.c_str()) != 0) return false;
  }
  mkdir(proc.c_str(), 0755);
  if (mount("proc", proc.c_str(), "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, nullptr) != 0) return false;
  return chroot(s.root.c_str()) == 0 && chdir("/") == 0;
}

void limit(int which, long long value) {
  if (value <= 0) return;
  struct rlimit both = {(rlim_t)value, (rlim_t)value};
  setrlimit((__rlimit_resource_t)which, &both);
}

#if defined(__x86_64__)
#define JAIL_ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define JAIL_ARCH AUDIT_ARCH_AARCH64
#endif

// No new process (threads are let through), no sockets but local ones, no look into other processes, and none of
// the memory and queues that processes of one IPC namespace share by number or name. CUDA's driver and Python's
// libraries try some of these calls and do without: for them they are refused and not fatal.
bool filter_calls(bool soft) {
#ifdef JAIL_ARCH
  std::vector<sock_filter> code;
  auto add = [&](sock_filter f) { code.push_back(f); };
  auto on = [&](long call, unsigned action) {
    add(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)call, 0, 1));
    add(BPF_STMT(BPF_RET | BPF_K, action));
  };
  const unsigned deny = SECCOMP_RET_ERRNO | EPERM, kill = soft ? deny : SECCOMP_RET_KILL_PROCESS;
  add(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, arch)));
  add(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, JAIL_ARCH, 1, 0));
  add(BPF_STMT(BPF_RET | BPF_K, kill));
  add(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)));
#ifdef __x86_64__
  // The calls of the x32 interface bear the same architecture and other numbers.
  add(BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, 0x40000000u, 0, 1));
  add(BPF_STMT(BPF_RET | BPF_K, kill));
#endif
#ifdef __NR_fork
  on(__NR_fork, kill);
  on(__NR_vfork, kill);
#endif
  on(__NR_clone3, SECCOMP_RET_ERRNO | ENOSYS);  // glibc then uses clone, whose flags can be read here
  on(__NR_ptrace, kill);
  on(__NR_process_vm_readv, kill);
  on(__NR_process_vm_writev, kill);
  on(__NR_kill, deny);
  on(__NR_timer_create, deny);  // its signal may be SIGCONT, which lets a stopped process run
#ifdef __NR_pidfd_getfd
  on(__NR_pidfd_getfd, deny);
#endif
  on(__NR_setsid, deny);
  on(__NR_bpf, deny);
  on(__NR_unshare, deny);
  on(__NR_setns, deny);
  on(__NR_mount, deny);
  on(__NR_perf_event_open, deny);
  on(__NR_shmget, deny);
  on(__NR_shmat, deny);
  on(__NR_semget, deny);
  on(__NR_msgget, deny);
  on(__NR_mq_open, deny);
#ifdef __NR_io_uring_setup
  on(__NR_io_uring_setup, SECCOMP_RET_ERRNO | ENOSYS);
#endif
  // CUDA opens a local socket; in a network namespace of its own that leads nowhere.
  add(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_socket, 0, 4));
  add(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[0])));
  add(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AF_UNIX, 1, 0));
  add(BPF_STMT(BPF_RET | BPF_K, deny));
  add(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  add(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_fcntl, 0, 4));  // F_SETSIG: as with a timer
  add(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[1])));
  add(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, F_SETSIG, 0, 1));
  add(BPF_STMT(BPF_RET | BPF_K, deny));
  add(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  add(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_clone, 0, 4));
  add(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[0])));
  add(BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, CLONE_THREAD, 1, 0));
  add(BPF_STMT(BPF_RET | BPF_K, kill));
  add(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  add(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  sock_fprog program = {(unsigned short)code.size(), code.data()};
  return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
#else
  errno = ENOSYS;
  return false;
#endif
}

[[noreturn]] void become(const Settings& s, bool alone) {
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  if (!alone) prctl(PR_SET_PDEATHSIG, SIGKILL);
  limit(RLIMIT_CORE, 0);
  struct rlimit no_core = {0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  limit(RLIMIT_FSIZE, s.fsize);
  limit(RLIMIT_CPU, s.cpu);
  if (s.uid > 0 && (setgroups(0, nullptr) != 0 || setresgid(s.uid, s.uid, s.uid) != 0 ||
                    setresuid(s.uid, s.uid, s.uid) != 0)) {
    lacks("user");
    _exit(125);
  }
  limit(RLIMIT_NPROC, s.nproc);
  limit(RLIMIT_DATA, s.data);
  limit(RLIMIT_AS, s.as);
  // Where the harness is no root, the worker is user 0 of a namespace: that name shall give it no power there.
  if (s.uid == 0) prctl(PR_SET_SECUREBITS, SECBIT_NOROOT | SECBIT_NOROOT_LOCKED, 0, 0, 0);
  prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
  if (!s.cwd.empty() && chdir(s.cwd.c_str()) != 0) {
    lacks("folder");
    _exit(125);
  }
  if (s.filter) {
    if (filter_calls(s.soft)) had("filter");
    else lacks("filter");
  }
  say("started");
  close(control);
  execv(s.program[0], s.program);
  fprintf(stderr, "jail: %s: %s\n", s.program[0], strerror(errno));
  _exit(126);
}

// Everything inside but the keeper: by process namespace, or the worker's session where there is none.
void signal_all(pid_t worker, bool alone, int number) {
  if (alone) kill(-1, number);
  else kill(-worker, number);
}

long long milliseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

int keep(pid_t worker, bool alone, int signals, long spin) {
  int ended = -1;
  bool stopped = false;
  long long awake_until = 0;
  char line[64];
  pollfd wait_for[2] = {{control, POLLIN, 0}, {signals, POLLIN, 0}};
  while (ended < 0) {
    int ready = poll(wait_for, 2, milliseconds() < awake_until ? 0 : -1);
    if (ready <= 0) continue;
    if (wait_for[1].revents) {
      signalfd_siginfo info;
      ssize_t got = read(signals, &info, sizeof info);
      (void)got;
    }
    int status = 0;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG | WCONTINUED)) > 0;) {
      if (WIFCONTINUED(status)) {
        // A stop wipes out the news of the start before it: this one nobody here ordered.
        if (pid == worker && stopped) {
          say("woke");
          signal_all(worker, alone, SIGKILL);
        }
      } else if (pid == worker) {
        ended = status;
      }
    }
    if (ended >= 0) break;
    if (wait_for[0].revents) {
      ssize_t n = read(control, line, sizeof line - 1);
      if (spin > 0) awake_until = milliseconds() + spin;
      if (n <= 0) {
        signal_all(worker, alone, SIGKILL);
        wait_for[0].fd = -1;
        continue;
      }
      for (ssize_t i = 0; i < n; ++i) {
        if (line[i] == 's') {
          signal_all(worker, alone, SIGSTOP);
          if (waitpid(worker, &status, WUNTRACED) == worker && !WIFSTOPPED(status)) {
            ended = status;
            break;
          }
          stopped = true;
          say("stopped");
        } else if (line[i] == 'g') {
          stopped = false;
          signal_all(worker, alone, SIGCONT);
        } else if (line[i] == 'k') {
          signal_all(worker, alone, SIGKILL);
        }
      }
    }
  }
  signal_all(worker, alone, SIGKILL);
  say(WIFSIGNALED(ended) ? "signal " + std::to_string(WTERMSIG(ended)) : "exit " + std::to_string(WEXITSTATUS(ended)));
  return 0;
}

int guard(const Settings& s, bool mounts, bool alone) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (mounts && !s.root.empty()) {
    if (build_root(s)) had("files");
    else lacks("files");
  }
  sigset_t child;
  sigemptyset(&child);
  sigaddset(&child, SIGCHLD);
  sigprocmask(SIG_BLOCK, &child, nullptr);
  int signals = signalfd(-1, &child, SFD_CLOEXEC);
  pid_t worker = fork();
  if (worker == 0) {
    setsid();
    become(s, alone);
  }
  if (worker < 0) {
    say("lacks process: fork failed");
    return 125;
  }
  // Only this process keeps the control socket's end and sees no data of the worker.
  long most = sysconf(_SC_OPEN_MAX);
  for (int fd = 0; fd < (most > 0 && most < 65536 ? most : 65536); ++fd)
    if (fd != control && fd != signals) close(fd);
  return keep(worker, alone, signals, s.spin);
}

}  // namespace

int main(int, char** argv) {
  Settings s = parse(argv + 1);
  fcntl(control, F_SETFD, FD_CLOEXEC);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (!s.cgroup.empty()) {
    if (put((s.cgroup + "/cgroup.procs").c_str(), "0")) had("cgroup");
    else lacks("cgroup");
  }
  bool root = geteuid() == 0;
  int uid = geteuid(), gid = getegid();
  const int wanted = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWUTS | (s.gpu ? 0 : CLONE_NEWIPC);
  bool all = unshare(wanted | (root ? 0 : CLONE_NEWUSER)) == 0;
  bool alone = all;
  if (all) {
    if (!root) {
      put("/proc/self/setgroups", "deny");
      put("/proc/self/uid_map", "0 " + std::to_string(uid) + " 1");
      put("/proc/self/gid_map", "0 " + std::to_string(gid) + " 1");
    }
    had("network");
    had("processes");
  } else {
    lacks("namespaces");
    if (unshare(CLONE_NEWNET) == 0) had("network");
    else lacks("network");
  }
  if (root && s.uid > 0) had("user");
  else s.uid = 0, lacks("user", "not started as root");
  pid_t child = fork();
  if (child == 0) _exit(guard(s, all, alone));
  close(control);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {}
  return WIFEXITED(status) ? WEXITSTATUS(status) : 125;
}
