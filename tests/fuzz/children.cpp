#include "tests/fuzz/children.hpp"

#ifdef __has_feature
#define HAE_FUZZ_WATCHES __has_feature(address_sanitizer)
#elif defined(__SANITIZE_ADDRESS__)
#define HAE_FUZZ_WATCHES 1
#else
#define HAE_FUZZ_WATCHES 0
#endif

#if !HAE_FUZZ_WATCHES

namespace hae::traces::fuzz {
void watch_children() {}
std::string report_of_child() {
  return "";
}
}  // namespace hae::traces::fuzz

#else

#include <pthread.h>
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <utility>

// The counters of libFuzzer's coverage, if the program has any.
extern "C" __attribute__((weak)) unsigned char __start___sancov_cntrs[];
extern "C" __attribute__((weak)) unsigned char __stop___sancov_cntrs[];

namespace hae::traces::fuzz {
namespace {

enum class Verdict { nothing, library, ours };

/// Memory that children share with this process.
struct Shared {
  Verdict verdict;
  char report[16000];
};

Shared* shared = nullptr;

/// Whether the first stack of a report, where it happened, goes through HDF5, or memory was refused: ours
/// throws bad_alloc then where there is no sanitizer.
bool is_of_library(std::string_view report) {
  const std::string_view first = report.substr(0, report.find("\n\n"));
  return first.find("libhdf5") != std::string_view::npos ||
         first.find("allocation-size-too-big") != std::string_view::npos ||
         first.find("out-of-memory") != std::string_view::npos;
}

void on_report(const char* report) {
  shared->verdict = is_of_library(report) ? Verdict::library : Verdict::ours;
  std::strncpy(shared->report, report, sizeof shared->report - 1);
}

/// The undefined-behaviour sanitizer says nothing to on_report(), and HDF5 is not compiled with it.
void on_death() {
  if (shared->verdict == Verdict::nothing) {
    shared->verdict = Verdict::ours;
    std::strncpy(shared->report, "undefined behaviour; run this input with UBSAN_OPTIONS=log_path=FILE",
                 sizeof shared->report - 1);
  }
}

void in_child() {
  __asan_set_error_report_callback(on_report);
  __sanitizer_set_death_callback(on_death);
}

/// Lets children count into the memory of this process: the whole pages of the counters become shared.
void share_counters() {
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const std::uintptr_t begin =
      (reinterpret_cast<std::uintptr_t>(__start___sancov_cntrs) + page - 1) / page * page;
  const std::uintptr_t end = reinterpret_cast<std::uintptr_t>(__stop___sancov_cntrs) / page * page;
  if (begin >= end) {
    return;
  }
  void* start = reinterpret_cast<void*>(begin);
  const std::string values(static_cast<const char*>(start), end - begin);
  if (::mmap(start, end - begin, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0) !=
      start) {
    std::abort();
  }
  std::memcpy(start, values.data(), values.size());
}

}  // namespace

void watch_children() {
  shared = static_cast<Shared*>(
      ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ::pthread_atfork(nullptr, nullptr, in_child);
  share_counters();
}

std::string report_of_child() {
  const Verdict verdict = std::exchange(shared->verdict, Verdict::nothing);
  return verdict == Verdict::ours ? shared->report : "";
}

}  // namespace hae::traces::fuzz

#endif

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  hae::traces::fuzz::watch_children();
  return 0;
}
