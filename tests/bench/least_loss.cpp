#include "analysis/least_loss.hpp"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

// Time and peak memory of the least loss of one lane, by size, by how evictions are spread over steps and by
// kind of attention. Each case runs in a process of its own, so that its peak is its own. It judges nothing.

namespace {

using hae::Index;

/// How many tokens leave when.
enum class Sizes { every_step, in_flushes };

/// uniform: every mass alike at random. decaying: heavy hitters, and more for recent tokens.
enum class Attention { uniform, decaying };

struct Case {
  const char* name;
  Index steps;
  Index tokens;
  Index budget;  ///< residents after the prefill
  Sizes sizes;
  Attention attention;
};

constexpr Index query_heads = 8;
constexpr Index flush = 40;  ///< evictions at once, and steps between two

/// Attention of `query_heads` heads: each row sums to their number.
std::vector<double> mass_of(const Case& c) {
  std::mt19937_64 bits(1);
  const auto uniform = [&] { return (static_cast<double>(bits() >> 11) + 0.5) * 0x1p-53; };
  std::vector<double> weight(static_cast<std::size_t>(c.tokens), 1.0);
  if (c.attention == Attention::decaying) {
    for (double& w : weight) {
      w = 1.0 / (uniform() + 1e-3);
    }
  }
  std::vector<double> mass(static_cast<std::size_t>(c.steps * c.tokens));
  for (Index row = 0; row < c.steps; ++row) {
    const Index joined = c.tokens - c.steps + row + 1;
    double* masses = mass.data() + row * c.tokens;
    double sum = 0.0;
    for (Index j = 0; j < joined; ++j) {
      const double age = c.attention == Attention::decaying ? static_cast<double>(joined - 1 - j) : 0.0;
      const double noise = c.attention == Attention::decaying ? 1.0 - std::log(uniform()) : uniform();
      masses[j] = weight[static_cast<std::size_t>(j)] * noise / (1.0 + age / 50.0);
      sum += masses[j];
    }
    for (Index j = 0; j < joined; ++j) {
      masses[j] *= static_cast<double>(query_heads) / sum;
    }
  }
  return mass;
}

std::vector<Index> residents_of(const Case& c) {
  std::vector<Index> residents;
  Index count = c.budget;
  for (Index step = 1; step <= c.steps; ++step) {
    residents.push_back(++count);
    if (c.sizes == Sizes::every_step) {
      --count;
    } else if (step % flush == 0) {
      count -= flush;
    }
  }
  return residents;
}

void run(const Case& c) {
  const std::vector<double> mass = mass_of(c);
  const std::vector<Index> residents = residents_of(c);
  const auto begin = std::chrono::steady_clock::now();
  const auto evictions =
      hae::analysis::least_loss_evictions({mass.data(), {c.steps, c.tokens}}, c.tokens - c.steps, residents);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  double loss = 0.0;
  for (const auto& [token, step] : evictions) {
    for (Index row = step; row < c.steps; ++row) {
      loss += mass[static_cast<std::size_t>(row * c.tokens + token)];
    }
  }
  std::printf("%-44s %9td %8.4f %8.2f s %5.0f MiB", c.name, evictions.size(),
              loss / static_cast<double>(c.steps * query_heads), seconds.count(),
              static_cast<double>(mass.size() * sizeof(double)) / (1 << 20));
  std::fflush(stdout);
}

}  // namespace

int main() {
  constexpr auto every_step = Sizes::every_step;
  constexpr auto in_flushes = Sizes::in_flushes;
  constexpr auto uniform = Attention::uniform;
  constexpr auto decaying = Attention::decaying;
  const Case cases[] = {
      {"512 x 2012, one a step, uniform", 512, 2012, 1500, every_step, uniform},
      {"512 x 2012, one a step, decaying", 512, 2012, 1500, every_step, decaying},
      {"512 x 2012, 800 and one a step, decaying", 512, 2012, 700, every_step, decaying},
      {"512 x 2012, 40 every 40 steps, uniform", 512, 2012, 1500, in_flushes, uniform},
      {"512 x 2012, 40 every 40 steps, decaying", 512, 2012, 1500, in_flushes, decaying},
      {"2048 x 4096, one a step, uniform", 2048, 4096, 2048, every_step, uniform},
      {"2048 x 4096, one a step, decaying", 2048, 4096, 2048, every_step, decaying},
      {"2048 x 4096, 1348 and one a step, decaying", 2048, 4096, 700, every_step, decaying},
      {"2048 x 4096, 40 every 40 steps, uniform", 2048, 4096, 2048, in_flushes, uniform},
      {"2048 x 4096, 40 every 40 steps, decaying", 2048, 4096, 2048, in_flushes, decaying},
  };
  std::printf("%-44s %9s %8s %10s %9s %9s\n", "steps x tokens, evictions, attention", "evictions", "missed",
              "time", "mass", "peak");
  for (const Case& c : cases) {
    std::fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
      run(c);
      _exit(EXIT_SUCCESS);
    }
    int status = 0;
    rusage usage{};
    if (child < 0 || wait4(child, &status, 0, &usage) < 0 || status != 0) {
      std::fprintf(stderr, "%s did not finish\n", c.name);
      return EXIT_FAILURE;
    }
    std::printf(" %5ld MiB\n", usage.ru_maxrss / 1024);
  }
}
