#include "tests/validate/gallery_device.hpp"

#include <array>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>

#include "tests/validate/gallery.hpp"

namespace hae::gallery {
namespace {

using Queue = std::deque<std::function<void()>>;

std::array<Queue, 3> queues;  // the default stream, and two more
int allocations = 0;
bool uses_default_stream = false;
bool has_one_scratch = false;
hae_prune_arguments scratch{};

Queue& queue_of(void* stream) {
  return stream == nullptr ? queues[0] : *static_cast<Queue*>(stream);
}

bool run_one(Queue& queue) {
  if (queue.empty()) {
    return false;
  }
  queue.front()();
  queue.pop_front();
  return true;
}

std::int32_t synchronize(void* stream) {
  while (!queue_of(stream).empty()) {
    run_one(queues[1]);
    run_one(queues[2]);
  }
  return 0;
}

std::int32_t copy(void* to, const void* from, std::int64_t bytes, void* stream) {
  queue_of(stream).push_back([=] { std::memcpy(to, from, static_cast<std::size_t>(bytes)); });
  return 0;
}

/// Two tasks, as of a kernel that copies its arguments to the device before it runs.
std::int32_t prune(const hae_prune_arguments* a, const hae_context* c) {
  Queue& queue = uses_default_stream ? queues[0] : queue_of(c->stream);
  const hae_prune_arguments own = *a;
  const hae_context context = *c;
  queue.push_back([own] { scratch = own; });
  queue.push_back([own, context] { table_with("")->prune(has_one_scratch ? &scratch : &own, &context); });
  return HAE_DONE;
}

}  // namespace

const hae_kernels* device_table_with(const std::string& fault) {
  uses_default_stream = fault == "default-stream";
  has_one_scratch = fault == "one-scratch";
  queues = {};
  allocations = 0;
  static hae_kernels table{};
  table.abi = HAE_KERNELS_ABI;
  table.accumulation = HAE_FLOAT32;
  table.name = "gallery on a device";
  table.memory.allocate = [](std::int64_t bytes) -> void* {
    if (bytes > std::int64_t{1} << 30) {
      return nullptr;
    }
    ++allocations;
    return std::aligned_alloc(256, static_cast<std::size_t>(bytes));
  };
  table.memory.release = [](void* memory) {
    --allocations;
    std::free(memory);
  };
  table.memory.copy_in = copy;
  table.memory.copy_out = copy;
  table.memory.synchronize = synchronize;
  table.memory.stream = &queues[1];
  table.memory.other_stream = &queues[2];
  table.prune = prune;
  return &table;
}

int device_allocations() {
  return allocations;
}

}  // namespace hae::gallery
