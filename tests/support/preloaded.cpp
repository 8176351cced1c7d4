// What preloaded.py does for Python, for programs in C++: LD_PRELOADed into any of them, it waits for
// requests where main() would begin, when the libraries are there and LibTorch has registered its operators
// (0.3 s), and forks a process for each that runs main() with the arguments, environment, folder and output
// of the request.
#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

struct Request {
  std::string
      text;  // strings that end with 0: the folder, how many arguments there are, these, the environment
  int files[2] = {-1, -1};  // for standard output and errors
};

Request receive(int connection) {
  Request request;
  request.text.resize(1 << 20);
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof request.files)] = {};
  iovec part{request.text.data(), request.text.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t bytes = recvmsg(connection, &message, MSG_CMSG_CLOEXEC);
  const cmsghdr* const files = CMSG_FIRSTHDR(&message);
  if (bytes <= 0 || files == nullptr) _exit(1);
  request.text.resize(static_cast<std::size_t>(bytes));
  std::memcpy(request.files, CMSG_DATA(files), sizeof request.files);
  return request;
}

void send_number(int connection, int number) {
  const std::string text = std::to_string(number);
  (void)!send(connection, text.data(), text.size(), MSG_NOSIGNAL);
}

// Sends the pid and the exit code of a child. Kills the child and its group if the other end hangs up before.
[[noreturn]] void attend(pid_t program, int connection) {
  send_number(connection, program);
  const int ended = static_cast<int>(syscall(SYS_pidfd_open, program, 0));
  pollfd events[2] = {{ended, POLLIN, 0}, {connection, 0, 0}};
  while (poll(events, 2, -1) < 0) {
  }
  if (events[0].revents == 0) {
    kill(program, SIGKILL);
    killpg(program, SIGKILL);
  }
  int status = 0;
  waitpid(program, &status, 0);
  send_number(connection, WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status));
  _exit(0);
}

// Forks a process for each request. Returns the request, and only in the forked process.
Request serve(int listening, int life) {
  std::signal(SIGCHLD, SIG_IGN);
  while (true) {
    pollfd events[2] = {{listening, POLLIN, 0}, {life, POLLIN, 0}};
    if (poll(events, 2, -1) < 0) continue;
    if (events[1].revents != 0) _exit(0);
    const int connection = accept4(listening, nullptr, nullptr, SOCK_CLOEXEC);
    if (fork() == 0) {
      std::signal(SIGCHLD, SIG_DFL);
      std::signal(SIGINT, SIG_DFL);  // ignored, if a shell has started us in the background
      close(listening);
      close(life);
      Request request = receive(connection);
      const pid_t program = fork();
      if (program != 0) attend(program, connection);
      close(connection);
      setsid();
      const sched_param none{};
      sched_setscheduler(0, SCHED_BATCH, &none);  // as yield_to_senders() of preloaded.py
      dup2(request.files[0], 1);
      dup2(request.files[1], 2);
      return request;
    }
    close(connection);
  }
}

}  // namespace

// Replaces the C library's function of this name, which initializes the program and calls main().
extern "C" [[gnu::visibility("default")]] int __libc_start_main(int (*main)(int, char**, char**), int argc,
                                                                char** argv, void (*init)(), void (*fini)(),
                                                                void (*rtld_fini)(), void* stack_end) {
  const auto start = reinterpret_cast<decltype(&__libc_start_main)>(dlsym(RTLD_NEXT, "__libc_start_main"));
  const char* const files = std::getenv("REEF_PRELOADED_FILES");
  int listening = -1, life = -1;
  if (files == nullptr || std::sscanf(files, "%d,%d", &listening, &life) != 2)
    return start(main, argc, argv, init, fini, rtld_fini, stack_end);
  static Request request = serve(listening, life);
  std::vector<char*> words;
  for (char* at = request.text.data(); at < request.text.data() + request.text.size();
       at += std::string(at).size() + 1)
    words.push_back(at);
  if (chdir(words.at(0)) != 0) std::perror(words[0]);
  const int count = std::atoi(words.at(1));
  static std::vector<char*> block(words.begin() + 2, words.end());
  block.insert(block.begin() + count, nullptr);
  block.push_back(nullptr);
  environ = block.data() + count + 1;
  return start(main, count, block.data(), init, fini, rtld_fini, stack_end);
}
