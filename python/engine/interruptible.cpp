#include "python/engine/interruptible.hpp"

#include <nanobind/nanobind.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <future>

namespace hae::python {

namespace nb = nanobind;

void interruptible(const std::function<void(const std::function<void()>& keep_going)>& work) {
  struct Stopped {};
  std::atomic<bool> stop = false;
  std::exception_ptr raised;
  const nb::gil_scoped_release released;
  std::future<void> done = std::async(std::launch::async, work, [&stop] {
    if (stop) {
      throw Stopped();
    }
  });
  while (done.wait_for(std::chrono::milliseconds(50)) != std::future_status::ready) {
    const nb::gil_scoped_acquire gil;
    if (!raised && PyErr_CheckSignals() != 0) {
      raised = std::make_exception_ptr(nb::python_error());
      stop = true;
    }
  }
  if (raised) {
    std::rethrow_exception(raised);
  }
  done.get();
}

}  // namespace hae::python
