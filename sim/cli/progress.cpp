#include "sim/cli/progress.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <utility>

#include "sim/cli/terminal.hpp"

namespace hae::cli {
namespace {

/// A time in words that stay short: `42 s`, `3 min 07 s`, `2 h 05 min`.
std::string time_text(double seconds) {
  const auto whole = static_cast<long long>(std::min(seconds, 3.6e6) + 0.5);
  if (whole < 60) {
    return fmt::format("{} s", whole);
  }
  if (whole < 3600) {
    return fmt::format("{} min {:02} s", whole / 60, whole % 60);
  }
  return fmt::format("{} h {:02} min", whole / 3600, whole / 60 % 60);
}

}  // namespace

Progress::Progress(std::string label, double total)
    : label_(std::move(label)),
      total_(total),
      terminal_(is_terminal(stderr)),
      start_(std::chrono::steady_clock::now()),
      last_(start_) {}

void Progress::wipe() {
  if (std::exchange(drawn_, false)) {
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
  const double share = total_ > 0.0 ? std::clamp(done / total_, 0.0, 1.0) : 0.0;
  const std::string left = share > 0.0 ? time_text(elapsed / share - elapsed) + " left" : "";
  const std::string text = fmt::format("{:3.0f} % {}", share * 100.0, left);
  // One line, or the next one could not take its place.
  const std::size_t columns = terminal_columns(stderr).value_or(80) - 1;
  constexpr std::size_t kLongest = 30;
  const std::size_t around = label_.size() + text.size() + 4;
  const std::size_t width = std::min(kLongest, columns - std::min(columns, around));
  const auto filled = static_cast<std::size_t>(share * static_cast<double>(width));
  const std::string line =
      fmt::format("{} [{:#<{}}{:.<{}}] {}", label_, "", filled, "", width - filled, text);
  fmt::print(stderr, "\r{}\033[K", line.substr(0, columns));
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
