#include "cuda/benchmark.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <functional>

#include "cuda/compact.hpp"
#include "cuda/decode_attention.hpp"
#include "cuda/packed_lanes.hpp"
#include "cuda/plain_attention.hpp"
#include "cuda/select_lowest.hpp"
#include "cuda/token_scores.hpp"
#include "sim/row_kernels.hpp"

namespace hae::device {
namespace {

/// Seconds of one call: the mean of as many as take about a fiftieth of a second, after one to warm up.
double time_of(const std::function<void()>& call) {
  const auto timed = [&](Index calls) {
    const auto begin = std::chrono::steady_clock::now();
    for (Index i = 0; i < calls; ++i) {
      call();
    }
    synchronize(nullptr);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() /
           static_cast<double>(calls);
  };
  timed(1);
  return timed(std::clamp<Index>(static_cast<Index>(0.02 / timed(1)), 1, 100));
}

/// Numbers that look like any, in [-1, 1), the same in each run.
Array<float> numbers(Index count) {
  std::vector<float> all(at(count));
  std::uint32_t state = 1;
  for (float& number : all) {
    state = state * 1664525u + 1013904223u;  // Numerical Recipes; nothing depends on how good it is
    number = static_cast<float>(state >> 8) * 0x1p-23f - 1.0f;
  }
  return copy_of(all, nullptr);
}

template <typename T>
Array<T> filled(Index count, T value) {
  return copy_of(std::vector<T>(at(count), value), nullptr);
}

/// Caches with everything that evicting from them needs. A lane is a KV head.
struct Caches {
  explicit Caches(const BenchmarkShape& measured)
      : shape(measured),
        items(shape.sequences * shape.layers),
        lanes(items * shape.kv_heads),
        slots(kernels::padded(shape.tokens + std::ranges::max(shape.bins))),
        keys(numbers(lanes * slots * shape.head_dim)),
        values(numbers(lanes * slots * shape.head_dim)),
        queries(numbers(items * shape.query_heads * shape.head_dim)),
        scales(filled(items, 1.0f)),
        positions(lanes * slots),
        lengths(filled(lanes, shape.tokens)),
        newest(filled(lanes, shape.tokens - 1)),
        kept(lanes),
        probabilities(items * shape.query_heads * slots),
        outputs(items * shape.query_heads * shape.head_dim),
        plain_outputs(items * shape.query_heads * shape.head_dim),
        divisors(filled(items * shape.query_heads, 1.0f)),
        rows(filled(items, Index{0})),
        scores(lanes * slots),
        resident(lanes * slots),
        pending_since(lanes * slots),
        evicted_in(lanes * slots),
        evicted_score(lanes * slots),
        eligible(lanes * slots),
        sinks(filled(lanes, Index{0})),
        recent(filled(lanes, Index{1})),
        recent_begin(lanes),
        counts(filled(lanes, Index{1})),
        chosen(lanes * slots),
        is_full(filled(lanes, std::uint8_t{1})),
        attending(decode_attention_bytes(items, shape.query_heads)),
        selecting(select_lowest_bytes(lanes, slots, slots)) {
    std::vector<Index> slot_of_place(at(lanes * slots));
    for (Index place = 0; place < lanes * slots; ++place) {
      slot_of_place[at(place)] = place % slots;
    }
    positions.write(slot_of_place, nullptr);
    scores.clear(nullptr);
    probabilities.clear(nullptr);
    begin_lanes(packed().cache, nullptr);
    kept.write(std::vector<Index>(at(lanes), shape.tokens), nullptr);
    close_gaps(packed(), kept.data(), nullptr);
  }

  [[nodiscard]] PackedLanes packed() const {
    return {{lanes, slots, resident.data(), pending_since.data(), evicted_in.data(), evicted_score.data()},
            lengths.data(),
            newest.data(),
            positions.data()};
  }

  [[nodiscard]] DecodeAttention attention() const {
    return {.items = items,
            .query_heads = shape.query_heads,
            .kv_heads = shape.kv_heads,
            .head_dim = shape.head_dim,
            .slots = slots,
            .scales = scales.data(),
            .queries = queries.data(),
            .keys = keys.data(),
            .values = values.data(),
            .positions = positions.data(),
            .lengths = lengths.data()};
  }

  void attend() const {
    device::attend(attention(), attending.data(), probabilities.data(), outputs.data(), nullptr);
  }
  void attend_plainly() const { device::attend_plainly(attention(), plain_outputs.data(), nullptr); }

  /// Probabilities are weights whose sum is 1.
  void add_scores() const {
    add_rows({.items = items,
              .query_heads = shape.query_heads,
              .kv_heads = shape.kv_heads,
              .rows = 1,
              .active = {0, 1},
              .keys = slots,
              .queries = rows.data(),
              .weights = probabilities.data()},
             {.divisors = divisors.data(), .stride = slots}, shape.kv_heads, scores.data(), nullptr, nullptr);
  }

  void protect() const {
    find_eligible(packed().cache, {sinks.data(), recent.data(), newest.data()}, recent_begin.data(),
                  eligible.data(), nullptr);
  }

  void select(Index most) const {
    select_lowest(LowestSelection<double>{lanes, slots, scores.data(), eligible.data(), counts.data(), most,
                                          chosen.data()},
                  selecting.data(), nullptr);
  }

  void compact(const std::uint8_t* keep) const {
    const Index row = shape.head_dim * Index{sizeof(float)};
    const std::array arrays{CompactedRows{keys.data(), keys.data(), row},
                            CompactedRows{values.data(), values.data(), row},
                            CompactedRows{positions.data(), positions.data(), sizeof(Index)},
                            CompactedRows{scores.data(), scores.data(), sizeof(double)}};
    device::compact({lanes, slots, keep, lengths.data()}, arrays, kept.data(), nullptr);
  }

  /// The steps of one filling of the bin: D tokens join, D are marked, and leave together.
  void fill_bin(Index bin, bool attends) const {
    for (Index step = 1; step <= bin; ++step) {
      append(packed(), shape.tokens + step, nullptr);
      if (attends) {
        attend();
      }
      add_scores();
      protect();
      select(1);
      mark(packed().cache, {chosen.data(), 1}, step, nullptr);
    }
    empty_bins(packed().cache, is_full.data(), scores.data(), bin, nullptr);
    compact(resident.data());
    close_gaps(packed(), kept.data(), nullptr);
  }

  BenchmarkShape shape;
  Index items, lanes, slots;
  Array<float> keys, values, queries, scales;
  Array<Index> positions, lengths, newest, kept;
  Array<float> probabilities;
  Array<double> outputs;
  Array<float> plain_outputs, divisors;
  Array<Index> rows;
  Array<double> scores;
  Array<std::uint8_t> resident;
  Array<Index> pending_since, evicted_in;
  Array<double> evicted_score;
  Array<std::uint8_t> eligible;
  Array<Index> sinks, recent, recent_begin, counts, chosen;
  Array<std::uint8_t> is_full;
  Buffer attending, selecting;
};

/// Bytes that every array of the caches takes.
Index bytes_of(const Caches& c) {
  const auto bytes = [](const auto&... arrays) {
    return (... + (arrays.size() * Index{sizeof(*arrays.data())}));
  };
  return bytes(c.keys, c.values, c.queries, c.scales, c.positions, c.lengths, c.newest, c.kept,
               c.probabilities, c.outputs, c.plain_outputs, c.divisors, c.rows, c.scores, c.resident,
               c.pending_since, c.evicted_in, c.evicted_score, c.eligible, c.sinks, c.recent, c.recent_begin,
               c.counts, c.chosen, c.is_full) +
         c.attending.bytes() + c.selecting.bytes();
}

double largest_difference(const Caches& caches) {
  const std::vector<double> exact = caches.outputs.read(nullptr);
  const std::vector<float> plain = caches.plain_outputs.read(nullptr);
  double difference = 0.0;
  double largest = 0.0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    difference = std::max(difference, std::abs(exact[i] - static_cast<double>(plain[i])));
    largest = std::max(largest, std::abs(exact[i]));
  }
  return difference / largest;
}

/// Flags of all slots of which `gone` of a lane's tokens, evenly spread, are 0.
Array<std::uint8_t> spread(const Caches& caches, Index gone) {
  std::vector<std::uint8_t> keep(at(caches.lanes * caches.slots), 1);
  for (Index lane = 0; lane < caches.lanes; ++lane) {
    for (Index i = 0; i < gone; ++i) {
      keep[at(lane * caches.slots + i * caches.shape.tokens / gone)] = 0;
    }
  }
  return copy_of(keep, nullptr);
}

std::vector<OperationTime> time_operations(Caches& caches) {
  const auto tokens = static_cast<double>(caches.lanes * caches.shape.tokens);
  const double row = static_cast<double>(caches.shape.head_dim) * sizeof(float);
  const double heads =
      static_cast<double>(caches.shape.query_heads) / static_cast<double>(caches.shape.kv_heads);
  const Index most = std::min(std::ranges::max(caches.shape.bins), caches.shape.tokens - 1);
  std::vector<OperationTime> times;
  const auto add = [&](std::string name, double bytes, const std::function<void()>& call) {
    times.push_back({std::move(name), time_of(call), bytes});
  };
  add("attention", tokens * 2 * row, [&] { caches.attend(); });
  add("scores", tokens * (heads * sizeof(float) + 2 * sizeof(double)), [&] { caches.add_scores(); });
  add("protect", tokens * (2 + sizeof(Index)), [&] { caches.protect(); });
  add("select 1", tokens * (1 + sizeof(double)), [&] { caches.select(1); });
  caches.counts.write(std::vector<Index>(at(caches.lanes), most), nullptr);
  add("select " + std::to_string(most), tokens * (1 + sizeof(double)), [&] { caches.select(most); });
  caches.counts.write(std::vector<Index>(at(caches.lanes), 1), nullptr);
  for (const Index gone : {Index{1}, most}) {
    const Array<std::uint8_t> keep = spread(caches, gone);
    const auto moved = static_cast<double>(caches.lanes * (caches.shape.tokens - gone));
    add("compact " + std::to_string(gone), moved * 2 * (2 * row + sizeof(Index) + sizeof(double)),
        [&] { caches.compact(keep.data()); });
  }
  return times;
}

}  // namespace

double copy_bandwidth(Index bytes) {
  const Array<float> from(bytes / Index{sizeof(float)});
  const Array<float> to(from.size());
  // Out of place and with nothing removed, compaction is a copy.
  constexpr Index kLanes = 1024;
  const Array<Index> lengths = filled(kLanes, Index{1});
  const Array<Index> kept(kLanes);
  const Array<std::uint8_t> keep = filled(kLanes, std::uint8_t{1});
  const Index row = from.size() / kLanes / 4 * 16;
  const std::array arrays{CompactedRows{from.data(), to.data(), row}};
  const double seconds = time_of([&] {
    compact({kLanes, 1, keep.data(), lengths.data()}, arrays, kept.data(), nullptr);
  });
  return 2.0 * static_cast<double>(row * kLanes) / seconds;
}

BenchmarkResult measure(const BenchmarkShape& shape) {
  HAE_EXPECTS(!shape.bins.empty() && shape.tokens > 1);
  Caches caches(shape);
  BenchmarkResult result{.bytes_on_device = bytes_of(caches)};
  result.plain_attention_seconds = time_of([&] { caches.attend_plainly(); });
  result.operations = time_operations(caches);
  for (const Index bin : shape.bins) {
    const auto steps = static_cast<double>(bin);
    result.steps.push_back({bin, time_of([&] { caches.fill_bin(bin, true); }) / steps,
                            time_of([&] { caches.fill_bin(bin, false); }) / steps});
  }
  caches.attend();
  caches.attend_plainly();
  result.largest_difference = largest_difference(caches);
  return result;
}

}  // namespace hae::device
