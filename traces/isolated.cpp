#include "traces/isolated.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <new>
#include <thread>

#include "sim/errors.hpp"
#include "traces/message.hpp"

namespace hae::traces {
namespace {

using std::chrono::steady_clock;

/// How `work` ended in the child. `died` stands until the child says otherwise.
enum class Ending { died, done, refused, out_of_memory, other_exception };

/// Memory that the child shares with its parent, to say how it ended. A pipe could be held open by processes
/// that other threads start.
struct Answer {
  Ending ending;
  std::array<char, 8000> message;
};

class SharedAnswer {
 public:
  explicit SharedAnswer(const std::string& file)
      : memory_(::mmap(nullptr, sizeof(Answer), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {
    if (memory_ == MAP_FAILED) {
      refuse(file, ": cannot be checked in a process of its own (", std::strerror(errno),
             "); free some memory");
    }
  }
  ~SharedAnswer() { ::munmap(memory_, sizeof(Answer)); }
  SharedAnswer(const SharedAnswer&) = delete;
  SharedAnswer& operator=(const SharedAnswer&) = delete;

  Answer* operator->() const { return static_cast<Answer*>(memory_); }

 private:
  void* memory_;
};

/// Blocks all signals while it lives: none may reach the handlers of this process inside the child.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockedSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

Index seconds_for(Index file_bytes) {
  return 2 + std::min<Index>(file_bytes >> 20, 600);
}

/// Sets the soft limit, at most the hard one.
void limit(__rlimit_resource resource, rlim_t most) {
  rlimit limits{};
  ::getrlimit(resource, &limits);
  limits.rlim_cur = std::min(most, limits.rlim_max);
  ::setrlimit(resource, &limits);
}

/// Lets this process map `more` bytes beyond what it has. How much it has is found by trying, in 35 steps:
/// `/proc` need not be there.
void limit_growth(Index more) {
  const auto page = static_cast<rlim_t>(::sysconf(_SC_PAGESIZE));
  rlim_t too_little = 0;
  rlim_t enough = rlim_t{1} << 47;
  while (enough - too_little > page) {
    const rlim_t most = (too_little + enough) / 2 / page * page;
    limit(RLIMIT_AS, most);
    void* memory = ::mmap(nullptr, page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    (memory == MAP_FAILED ? too_little : enough) = most;
    if (memory != MAP_FAILED) {
      ::munmap(memory, page);
    }
  }
  limit(RLIMIT_AS, enough + static_cast<rlim_t>(more));
}

bool is_fault(int signal_number) {
  return signal_number == SIGSEGV || signal_number == SIGBUS || signal_number == SIGFPE ||
         signal_number == SIGILL;
}

/// What makes the child harmless: no output, no core file, no handler of the host's, and limits.
void confine(Index file_bytes) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  ::prctl(PR_SET_DUMPABLE, 0);
  const int nowhere = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (const int descriptor : {STDOUT_FILENO, STDERR_FILENO}) {
    nowhere < 0 ? ::close(descriptor) : ::dup2(nowhere, descriptor);
  }
  for (int signal_number = 1; signal_number < SIGRTMIN; ++signal_number) {
    // The address sanitizer reports faults from its own handlers.
    if (kMemoryIsBounded || !is_fault(signal_number)) {
      std::signal(signal_number, SIG_DFL);
    }
  }
  sigset_t none;
  sigemptyset(&none);
  ::pthread_sigmask(SIG_SETMASK, &none, nullptr);
  limit(RLIMIT_CORE, 0);
  limit(RLIMIT_CPU, static_cast<rlim_t>(seconds_for(file_bytes)));
  if (kMemoryIsBounded) {
    limit_growth(kMetadataBytes);
  }
}

/// The whole life of the child.
[[noreturn]] void run_and_exit(Index file_bytes, const std::function<void()>& work, Answer& answer) {
  confine(file_bytes);
  try {
    work();
    answer.ending = Ending::done;
  } catch (const TraceError& error) {
    std::strncpy(answer.message.data(), error.what(), answer.message.size() - 1);
    answer.ending = Ending::refused;
  } catch (const std::bad_alloc&) {
    answer.ending = Ending::out_of_memory;
  } catch (...) {
    answer.ending = Ending::other_exception;
  }
  ::_exit(0);
}

/// Waits for the child, but not past the deadline; its status, 0 where the host reaps its children itself.
int wait_for(pid_t child, steady_clock::time_point deadline) {
  int status = 0;
  auto pause = std::chrono::microseconds(50);
  while (::waitpid(child, &status, WNOHANG) == 0) {
    if (steady_clock::now() > deadline) {
      ::kill(child, SIGKILL);
      while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
      }
      return status;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, std::chrono::microseconds(5000));
  }
  return status;
}

[[noreturn]] void report_death(const std::string& file, int status, Index seconds) {
  const int signal_number = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  if (signal_number == SIGXCPU || signal_number == SIGKILL) {
    refuse(file, ": HDF5 does not get through its metadata in ", seconds,
           " s; it is damaged: copy or record it again");
  }
  refuse(
      file, ": HDF5 crashes on its metadata (",
      signal_number != 0 ? message("signal ", signal_number, ", ", ::strsignal(signal_number)) : "no signal",
      "); it is damaged: copy or record it again");
}

}  // namespace

void rehearse(const std::string& file, Index file_bytes, const std::function<void()>& work) {
  const SharedAnswer answer(file);
  const Index seconds = seconds_for(file_bytes);
  // Processor time bounds the work; this bounds waiting, also on a busy machine with a slow disk.
  const auto deadline = steady_clock::now() + std::chrono::seconds(60 + 2 * seconds);
  pid_t child = -1;
  {
    const BlockedSignals blocked;
    child = ::fork();
    if (child == 0) {
      run_and_exit(file_bytes, work, *answer.operator->());
    }
  }
  if (child < 0) {
    refuse(file, ": cannot be checked in a process of its own (", std::strerror(errno),
           "); allow more processes or free some memory");
  }
  const int status = wait_for(child, deadline);
  switch (answer->ending) {
    case Ending::done:
    case Ending::other_exception:  // is a fault of ours, to be seen where it can be caught
      return;
    case Ending::refused:
      throw TraceError(answer->message.data());
    case Ending::out_of_memory:
      refuse(file, ": its metadata asks for more than ", kMetadataBytes,
             " bytes of memory; it is damaged: copy or record it again");
    case Ending::died:
      report_death(file, status, seconds);
  }
}

}  // namespace hae::traces
