#include "cuda/draws.hpp"

#include "cuda/for_each_index.hpp"

namespace hae::device {
namespace {

HAE_HOST_DEVICE std::uint64_t mixed(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

struct Draw {
  const std::uint64_t* prefixes;
  Index stride;
  std::uint64_t* priorities;

  HAE_HOST_DEVICE void operator()(Index index) const {
    const Index place = index;
    const auto token = static_cast<std::uint64_t>(take_axis(index, stride));
    priorities[place] = mixed(prefixes[index] ^ token);
  }
};

}  // namespace

std::uint64_t mix(std::uint64_t x) {
  return mixed(x);
}

void draw_priorities(const std::uint64_t* prefixes, Index lanes, Index stride, std::uint64_t* priorities,
                     Stream stream) {
  for_each_index("drawing priorities", stream, lanes * stride, Draw{prefixes, stride, priorities});
}

}  // namespace hae::device
