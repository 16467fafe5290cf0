#include "sim/cli/progress.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>

namespace hae::cli {

Progress::Progress(std::string label, double total)
    : label_(std::move(label)),
      total_(total),
      terminal_(isatty(STDERR_FILENO) == 1),
      start_(std::chrono::steady_clock::now()),
      last_(start_) {}

Progress::~Progress() {
  if (drawn_) {
    std::fputs("\r\033[K", stderr);
  }
}

void Progress::show(double done) {
  using Seconds = std::chrono::duration<double>;
  const auto now = std::chrono::steady_clock::now();
  const double elapsed = Seconds(now - start_).count();
  if (!terminal_ || elapsed < 1.0 || Seconds(now - last_).count() < 0.1) {
    return;
  }
  last_ = now;
  drawn_ = true;
  constexpr int kWidth = 30;
  const double share = total_ > 0.0 ? std::clamp(done / total_, 0.0, 1.0) : 0.0;
  const int filled = static_cast<int>(share * kWidth);
  const double left = share > 0.0 ? elapsed / share - elapsed : 0.0;
  fmt::print(stderr, "\r{} [{:#<{}}{:.<{}}] {:3.0f} %, {:.0f} s left\033[K", label_, "", filled, "",
             kWidth - filled, share * 100.0, left);
  std::fflush(stderr);
}

std::function<void(double)> ProgressSum::task() {
  return [this, shown = std::make_shared<double>(0.0)](double share) {
    const std::scoped_lock lock(mutex_);
    done_ += std::max(0.0, share - *shown);
    *shown = std::max(*shown, share);
    show_(done_);
  };
}

}  // namespace hae::cli
