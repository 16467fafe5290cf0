#include "analysis/least_loss.hpp"

#define LEMON_ONLY_TEMPLATES  // its headers are enough: nothing to link, here or where this library is used
#include <lemon/network_simplex.h>
#include <lemon/smart_graph.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <tuple>
#include <utility>

namespace hae::analysis {
namespace {

/// Attention as a whole number of units.
using Cost = std::int64_t;

constexpr int finest_unit_bits = 40;

/// (slots + 1) · (largest cost) stays below 2 to this power. The potentials of LEMON's simplex are sums along
/// a path that meets each slot once, plus an artificial cost of 2^62: differences of two stay below 2^63.
constexpr int path_bits = 60;

/// How many choices are added at once, at most, for each eviction that a slot is due.
constexpr std::size_t choices_per_eviction = 16;

/// Greedy evictions are a good start up to so many slots. Above, slots are first merged in groups.
constexpr std::size_t most_slots_from_greedy = 64;
constexpr std::size_t slots_per_group = 8;

/// A moment at which tokens leave.
struct Slot {
  Index step = 0;
  Index evictions = 0;               ///< how many leave, > 0
  std::span<const Cost> costs = {};  ///< of evicting each token that has joined
};

/// One possible eviction, as indices of its slot and its token.
struct Choice {
  std::size_t slot = 0;
  std::size_t token = 0;
};

/// Dual variables: none negative, 0 for each token that stays. They prove evictions to be the best there are
/// if each choice made costs its slot's price less its token's, and no choice costs less than that.
struct Prices {
  std::vector<Cost> slot;
  std::vector<Cost> token;
};

struct Solution {
  std::vector<Choice> choices;
  Prices prices;
};

/// The slots that a lane's numbers of residents imply, without costs.
std::vector<Slot> slots_of(Index prompt, std::span<const Index> residents) {
  std::vector<Slot> slots;
  Index step = 0;
  Index most = prompt + 1;  // residents at the next step if none left
  for (const Index count : residents) {
    HAE_EXPECTS(count >= 1);
    HAE_EXPECTS(count <= most);
    if (count < most) {
      slots.push_back({.step = step, .evictions = most - count});
    }
    most = count + 1;
    ++step;
  }
  return slots;
}

/// Calls visit(slot, sums), the last slot first, with the attention that each token that has joined still
/// receives after the slot's step.
template <typename Visit>
void for_each_slot(View<const double, 2> mass, std::span<const Slot> slots, const Visit& visit) {
  const Index steps = mass.extent(0);
  const Index prompt = mass.extent(1) - steps;
  std::vector<double> sums(static_cast<std::size_t>(mass.extent(1)));
  std::size_t slot = slots.size();
  for (Index step = steps - 1; step >= 0; --step) {
    const auto joined = static_cast<std::size_t>(prompt + step);
    const double* row = mass[step].data();  // decode step `step` + 1, which has one token more
    for (std::size_t token = 0; token <= joined; ++token) {
      HAE_EXPECTS(std::isfinite(row[token]) && row[token] >= 0.0);
      sums[token] += row[token];
    }
    if (slot > 0 && slots[slot - 1].step == step) {
      --slot;
      visit(slot, std::span<const double>(sums).first(joined));
    }
  }
}

/// What each choice costs: [slot][token that has joined].
std::vector<std::vector<Cost>> costs_of(View<const double, 2> mass, std::span<const Slot> slots) {
  double largest = 0.0;
  for_each_slot(mass, slots, [&](std::size_t, std::span<const double> sums) {
    largest = std::max(largest, std::ranges::max(sums));
  });
  const double path = static_cast<double>(slots.size() + 1) * largest;
  HAE_EXPECTS(std::isfinite(path));
  const int unit_bits =
      path > 0.0 ? std::min(finest_unit_bits, path_bits - 1 - std::ilogb(path)) : finest_unit_bits;
  const double units = std::ldexp(1.0, unit_bits);
  std::vector<std::vector<Cost>> costs(slots.size());
  for_each_slot(mass, slots, [&](std::size_t slot, std::span<const double> sums) {
    costs[slot].resize(sums.size());
    std::ranges::transform(sums, costs[slot].begin(), [&](double sum) { return std::llrint(sum * units); });
  });
  return costs;
}

/// In each slot the cheapest tokens that are left, the lower of two equal ones.
std::vector<Choice> greedy_choices(std::span<const Slot> slots, std::size_t tokens) {
  std::vector<Choice> choices;
  std::vector<bool> gone(tokens);
  std::vector<std::pair<Cost, std::size_t>> left;
  for (std::size_t slot = 0; slot < slots.size(); ++slot) {
    left.clear();
    for (std::size_t token = 0; token < slots[slot].costs.size(); ++token) {
      if (!gone[token]) {
        left.emplace_back(slots[slot].costs[token], token);
      }
    }
    const auto end = left.begin() + slots[slot].evictions;
    std::ranges::nth_element(left, end - 1);
    for (auto it = left.begin(); it != end; ++it) {
      gone[it->second] = true;
      choices.push_back({slot, it->second});
    }
  }
  return choices;
}

/// Prices that choices would have if there were no others.
Prices prices_of(std::span<const Choice> choices, std::span<const Slot> slots, std::size_t tokens) {
  Prices prices{std::vector<Cost>(slots.size()), std::vector<Cost>(tokens)};
  for (const auto [slot, token] : choices) {
    prices.slot[slot] = std::max(prices.slot[slot], slots[slot].costs[token]);
  }
  for (const auto [slot, token] : choices) {
    prices.token[token] = prices.slot[slot] - slots[slot].costs[token];
  }
  return prices;
}

/// The choices of each slot whose reduced cost (cost + price of the token - price of the slot) is below
/// `limit`: the lowest ones, of two equal ones the lower token, at most `choices_per_eviction` for each
/// eviction.
std::vector<Choice> choices_below(Cost limit, const Prices& prices, std::span<const Slot> slots) {
  std::vector<Choice> choices;
  std::vector<std::pair<Cost, std::size_t>> found;
  for (std::size_t slot = 0; slot < slots.size(); ++slot) {
    const std::span<const Cost> costs = slots[slot].costs;
    found.clear();
    for (std::size_t token = 0; token < costs.size(); ++token) {
      const Cost reduced = costs[token] + prices.token[token] - prices.slot[slot];
      if (reduced < limit) {
        found.emplace_back(reduced, token);
      }
    }
    const std::size_t most = choices_per_eviction * static_cast<std::size_t>(slots[slot].evictions);
    const auto end = found.begin() + static_cast<std::ptrdiff_t>(std::min(found.size(), most));
    std::ranges::partial_sort(found, end);
    for (auto it = found.begin(); it != end; ++it) {
      choices.push_back({slot, it->second});
    }
  }
  return choices;
}

/// The transportation problem over the choices added so far: a token leaves once or stays, a slot is filled.
class SparseProblem {
 public:
  SparseProblem(std::span<const Slot> slots, std::size_t tokens) : slots_(slots) {
    for (std::size_t token = 0; token < tokens; ++token) {
      token_nodes_.push_back(graph_.addNode());
      supply_[token_nodes_.back()] = 1;
    }
    for (const Slot& slot : slots) {
      slot_nodes_.push_back(graph_.addNode());
      supply_[slot_nodes_.back()] = -static_cast<int>(slot.evictions);
    }
  }

  void add(std::span<const Choice> choices) {
    for (const Choice choice : choices) {
      const Graph::Arc arc = graph_.addArc(token_nodes_[choice.token], slot_nodes_[choice.slot]);
      cost_[arc] = slots_[choice.slot].costs[choice.token];
      choices_.push_back(choice);
    }
  }

  /// Expects that the choices added can fill every slot.
  [[nodiscard]] Solution solve() const {
    using Simplex = lemon::NetworkSimplex<Graph, int, Cost>;
    Simplex simplex(graph_);
    simplex.supplyMap(supply_).costMap(cost_).supplyType(Simplex::LEQ);  // at most its supply leaves a node
    HAE_EXPECTS(simplex.run() == Simplex::OPTIMAL);
    Solution solution;
    for (std::size_t i = 0; i < choices_.size(); ++i) {
      if (simplex.flow(Graph::arcFromId(static_cast<int>(i))) > 0) {
        solution.choices.push_back(choices_[i]);
      }
    }
    for (const Graph::Node node : slot_nodes_) {
      solution.prices.slot.push_back(simplex.potential(node));
    }
    for (const Graph::Node node : token_nodes_) {
      solution.prices.token.push_back(simplex.potential(node));
    }
    return solution;
  }

 private:
  using Graph = lemon::SmartDigraph;

  std::span<const Slot> slots_;
  Graph graph_;
  Graph::NodeMap<int> supply_{graph_};
  Graph::ArcMap<Cost> cost_{graph_};
  std::vector<Graph::Node> token_nodes_;
  std::vector<Graph::Node> slot_nodes_;
  std::vector<Choice> choices_;  ///< by the id of their arc
};

/// Each group of slots as one, at the group's last, when all the tokens that may go have joined.
std::vector<Slot> merged(std::span<const Slot> slots) {
  std::vector<Slot> groups;
  for (std::size_t begin = 0; begin < slots.size(); begin += slots_per_group) {
    const auto group = slots.subspan(begin, std::min(slots_per_group, slots.size() - begin));
    groups.push_back(group.back());
    for (const Slot& slot : group.first(group.size() - 1)) {
      groups.back().evictions += slot.evictions;
    }
  }
  return groups;
}

Solution solve(std::span<const Slot> slots, std::size_t tokens);

/// Prices near the best ones, from a coarser problem where there are many slots. A guess decides which
/// choices are looked at first, not what comes out.
Prices guessed_prices(std::span<const Choice> greedy, std::span<const Slot> slots, std::size_t tokens) {
  if (slots.size() <= most_slots_from_greedy) {
    return prices_of(greedy, slots, tokens);
  }
  const Prices coarse = solve(merged(slots), tokens).prices;
  Prices prices{{}, coarse.token};
  for (std::size_t slot = 0; slot < slots.size(); ++slot) {
    prices.slot.push_back(coarse.slot[slot / slots_per_group]);
  }
  return prices;
}

/// Column generation: solves with few choices and adds those with a negative reduced cost. When there are
/// none, the prices prove that no choice left out could lower the loss.
Solution solve(std::span<const Slot> slots, std::size_t tokens) {
  SparseProblem problem(slots, tokens);
  const std::vector<Choice> greedy = greedy_choices(slots, tokens);
  problem.add(greedy);  // fills every slot
  problem.add(choices_below(std::numeric_limits<Cost>::max(), guessed_prices(greedy, slots, tokens), slots));
  while (true) {
    Solution solution = problem.solve();
    const std::vector<Choice> better = choices_below(0, solution.prices, slots);
    if (better.empty()) {
      return solution;
    }
    problem.add(better);
  }
}

}  // namespace

std::vector<TimedEviction> least_loss_evictions(View<const double, 2> mass, Index prompt,
                                                std::span<const Index> residents) {
  HAE_EXPECTS(prompt >= 1);
  HAE_EXPECTS(!residents.empty());
  HAE_EXPECTS(mass.extent(0) == static_cast<Index>(residents.size()));
  HAE_EXPECTS(mass.extent(1) == prompt + mass.extent(0));
  std::vector<Slot> slots = slots_of(prompt, residents);
  const std::vector<std::vector<Cost>> costs = costs_of(mass, slots);
  for (std::size_t slot = 0; slot < slots.size(); ++slot) {
    slots[slot].costs = costs[slot];
  }
  const Solution solution = solve(slots, static_cast<std::size_t>(mass.extent(1)));
  std::vector<TimedEviction> evictions;
  for (const auto [slot, token] : solution.choices) {
    evictions.push_back({.token = static_cast<Index>(token), .step = slots[slot].step});
  }
  std::ranges::sort(evictions, {}, [](const TimedEviction& e) { return std::tuple(e.step, e.token); });
  return evictions;
}

}  // namespace hae::analysis
