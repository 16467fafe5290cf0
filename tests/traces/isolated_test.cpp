#include "traces/isolated.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "sim/errors.hpp"
#include "tests/traces/fixtures.hpp"

namespace hae::traces::test {
namespace {

/// The message with which a rehearsal is refused, if it is.
std::optional<std::string> refusal_of(const std::function<void()>& work) {
  try {
    rehearse("FILE", 0, work);
  } catch (const TraceError& error) {
    return error.what();
  }
  return std::nullopt;
}

/// Takes memory and returns it.
void take(std::size_t bytes) {
  void* volatile memory = ::operator new(bytes);
  ::operator delete(memory);
}

TEST(Rehearse, ReturnsWhenTheWorkEndsAndLeavesNoTraceOfIt) {
  int changed = 0;
  EXPECT_EQ(refusal_of([&] { changed = 1; }), std::nullopt);
  EXPECT_EQ(changed, 0);
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);  // no child is left over
  EXPECT_EQ(errno, ECHILD);
}

TEST(Rehearse, ThrowsTheErrorOfTheWork) {
  EXPECT_EQ(refusal_of([] { throw TraceError("FILE:/q: is missing"); }), "FILE:/q: is missing");
}

TEST(Rehearse, LeavesOtherExceptionsToTheCaller) {
  EXPECT_EQ(refusal_of([] { throw ContractViolation("ours"); }), std::nullopt);
}

TEST(Rehearse, TurnsADeathIntoAnErrorThatNamesTheSignal) {
  EXPECT_EQ(refusal_of([] { ::raise(SIGKILL); }).value_or("").find("FILE: HDF5 does not get through"), 0u);
  EXPECT_EQ(refusal_of([] { std::abort(); }),
            "FILE: HDF5 crashes on its metadata (signal 6, Aborted); it is damaged: copy or record it again");
  if (kMemoryIsBounded) {  // else a fault is a sanitizer's report and an exit
    EXPECT_EQ(refusal_of([] { ::raise(SIGSEGV); }),
              "FILE: HDF5 crashes on its metadata (signal 11, Segmentation fault); it is damaged: copy or "
              "record it again");
  }
}

TEST(Rehearse, EndsWorkThatDoesNotEnd) {
  EXPECT_EQ(refusal_of([] {
              volatile bool forever = true;
              while (forever) {
              }
            }),
            "FILE: HDF5 does not get through its metadata in 2 s; it is damaged: copy or record it again");
}

TEST(Rehearse, BoundsMemory) {
  if (!kMemoryIsBounded) {
    GTEST_SKIP() << "the address sanitizer needs terabytes of addresses";
  }
  EXPECT_EQ(refusal_of([] { take(kMetadataBytes - (Index{1} << 24)); }), std::nullopt);
  EXPECT_EQ(
      refusal_of([] { take(kMetadataBytes + (Index{1} << 20)); }),
      "FILE: its metadata asks for more than 1073741824 bytes of memory; it is damaged: copy or record it "
      "again");
}

TEST(Rehearse, PrintsNothing) {
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(refusal_of([] {
              std::puts("out");
              std::fputs("error\n", stderr);
              std::fflush(nullptr);
            }),
            std::nullopt);
  EXPECT_EQ(::testing::internal::GetCapturedStdout(), "");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

TEST(Rehearse, RunsNoHandlerOfItsHostInTheChild) {
  static volatile std::sig_atomic_t calls = 0;
  const auto before = std::signal(SIGTERM, [](int) { calls = calls + 1; });
  EXPECT_NE(refusal_of([] {
              ::raise(SIGTERM);
              if (calls != 0) {
                ::_exit(0);
              }
            })
                .value_or("")
                .find("signal 15"),
            std::string::npos);
  std::signal(SIGTERM, before);
}

TEST(Rehearse, WorksInAHostThatDoesNotWaitForItsChildren) {
  const auto before = std::signal(SIGCHLD, SIG_IGN);
  EXPECT_EQ(refusal_of([] {}), std::nullopt);
  EXPECT_NE(refusal_of([] { std::abort(); }), std::nullopt);
  std::signal(SIGCHLD, before);
}

TEST(Rehearse, WorksWhileOtherThreadsRead) {
  const Scratch scratch;
  write_small(scratch / "trace.h5", small_qkv());
  std::vector<std::thread> threads;
  std::vector<std::optional<std::string>> refusals(4);
  for (std::size_t i = 0; i < refusals.size(); ++i) {
    threads.emplace_back([&, i] {
      for (int repeat = 0; repeat < 25 && !refusals[i]; ++repeat) {
        refusals[i] = refusal(scratch / "trace.h5");
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const std::optional<std::string>& message : refusals) {
    EXPECT_EQ(message, std::nullopt);
  }
}

}  // namespace
}  // namespace hae::traces::test
