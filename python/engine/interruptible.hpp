#pragma once

#include <functional>

namespace hae::python {

/// Runs `work` without the interpreter's lock, on a thread of its own, while this one asks the interpreter
/// for signals: only Python's main thread is told of Ctrl-C, and the engine's threads are others.
///
/// work    calls what it is given now and then; that throws once a signal's handler raised
/// throws  what the handler raised (KeyboardInterrupt), else what `work` threw
void interruptible(const std::function<void(const std::function<void()>& keep_going)>& work);

}  // namespace hae::python
