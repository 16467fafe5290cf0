#include "tests/validate/gallery.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <stdexcept>

#include "traces/float16.hpp"

namespace hae::gallery {
namespace {

constexpr std::uint64_t hash(const char* text) {  // FNV-1a
  std::uint64_t state = 0xCBF29CE484222325u;
  for (; *text != 0; ++text) {
    state = (state ^ static_cast<unsigned char>(*text)) * 0x100000001B3u;
  }
  return state;
}

/// A fault's name, hashed when this file is compiled: it is asked for at every element.
struct Name {
  consteval Name(const char* text) : code(hash(text)) {}
  std::uint64_t code;
};

std::uint64_t fault = 0;  // of the table in use
int calls = 0;            // since it came into use: what a race depends on
float previous = 0;       // the maximum of the row before, in whatever call it was

std::map<std::array<std::int64_t, 3>, std::int64_t> plans;

bool is(Name name) {
  return fault == name.code;
}

// ---- arrays

bool given(const hae_array& array) {
  return array.data != nullptr;
}

std::int64_t offset(const hae_array& array, std::initializer_list<std::int64_t> index) {
  std::int64_t at = 0;
  std::int64_t dense = 0;
  int axis = 0;
  for (const std::int64_t i : index) {
    at += i * array.strides[axis];
    dense = dense * array.shape[axis] + i;
    ++axis;
  }
  if (is("offsets-in-32-bits")) {
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(at));
  }
  return is("ignores-strides") ? dense : at;
}

double get(const hae_array& array, std::initializer_list<std::int64_t> index) {
  const std::int64_t i = offset(array, index);
  const void* data = array.data;
  if (is("assumes-alignment")) {  // a vector load of 16 bytes, the address rounded down
    data = reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(data) & ~std::uintptr_t{15});
  }
  switch (array.dtype) {
    case HAE_FLOAT32:
      return static_cast<const float*>(data)[i];
    case HAE_FLOAT16:
      return traces::float_from_half(static_cast<const std::uint16_t*>(data)[i]);
    case HAE_BFLOAT16:
      return traces::float_from_bfloat16(static_cast<const std::uint16_t*>(data)[i]);
    case HAE_FLOAT64:
      return static_cast<const double*>(data)[i];
    case HAE_INT32:
      return static_cast<const std::int32_t*>(data)[i];
    case HAE_INT64:
      return static_cast<double>(static_cast<const std::int64_t*>(data)[i]);
    default:
      return static_cast<const std::uint8_t*>(data)[i];
  }
}

std::int64_t get_or(const hae_array& array, std::initializer_list<std::int64_t> index,
                    std::int64_t otherwise) {
  return given(array) ? static_cast<std::int64_t>(get(array, index)) : otherwise;
}

void put(const hae_array& array, std::initializer_list<std::int64_t> index, double value) {
  const std::int64_t i = offset(array, index);
  switch (array.dtype) {
    case HAE_FLOAT32:
      static_cast<float*>(array.data)[i] = static_cast<float>(value);
      break;
    case HAE_FLOAT16:
      static_cast<std::uint16_t*>(array.data)[i] = traces::half_from_float(static_cast<float>(value));
      break;
    case HAE_BFLOAT16:
      static_cast<std::uint16_t*>(array.data)[i] = traces::bfloat16_from_float(static_cast<float>(value));
      break;
    case HAE_FLOAT64:
      static_cast<double*>(array.data)[i] = value;
      break;
    case HAE_INT64:
      static_cast<std::int64_t*>(array.data)[i] = static_cast<std::int64_t>(value);
      break;
    default:
      static_cast<std::uint8_t*>(array.data)[i] = static_cast<std::uint8_t>(value);
  }
}

float half(float value) {
  return traces::float_from_half(traces::half_from_float(value));
}

/// What a length becomes in kernels that get lengths wrong.
std::int64_t cut(std::int64_t length, std::int64_t slots) {
  if (is("length-minus-one")) {
    return std::max(length - 1, std::int64_t{0});
  }
  if (is("length-plus-one")) {
    return std::min(length + 1, slots);
  }
  if (is("lengths-ignored")) {
    return slots;
  }
  return is("last-block-skipped") ? length / 32 * 32 : is("last-tile-skipped") ? length / 16 * 16 : length;
}

// ---- cumulative attention

float row_value(const hae_add_scores_arguments& a, std::int64_t item, std::int64_t lane, std::int64_t row,
                std::int64_t slot) {
  const std::int64_t lanes = a.scores.shape[1];
  const std::int64_t heads = a.probabilities.shape[1];
  const std::int64_t group = is("first-head-only") ? 1 : heads / lanes;
  float value = 0;
  for (std::int64_t g = 0; g < group; ++g) {
    const std::int64_t head = is("heads-tiled") ? g * lanes + lane : lane * (heads / lanes) + g;
    const auto p = static_cast<float>(get(a.probabilities, {item, head, row, slot}));
    value = a.reduction == HAE_MAX ? std::max(value, p) : value + p;
    if (std::isnan(p)) {
      value = p;
    }
  }
  return a.reduction == HAE_MEAN && !is("sum-not-mean") ? value / static_cast<float>(group) : value;
}

std::int32_t add_scores(const hae_add_scores_arguments* arguments, const hae_context*) {
  const hae_add_scores_arguments& a = *arguments;
  const std::int64_t rows = a.probabilities.shape[2];
  const std::int64_t slots = a.scores.shape[2];
  ++calls;
  for (std::int64_t item = 0; item < a.scores.shape[0]; ++item) {
    const std::int64_t length = cut(get_or(a.lengths, {item}, slots), slots);
    for (std::int64_t lane = 0; lane < a.scores.shape[1]; ++lane) {
      for (std::int64_t slot = 0; slot < length; ++slot) {
        double sum = is("overwrites") ? 0 : get(a.scores, {item, lane, slot});
        double largest = given(a.largest) ? get(a.largest, {item, lane, slot}) : 0;
        for (std::int64_t row = 0; row < rows - (is("last-row-skipped") ? 1 : 0); ++row) {
          if (get_or(a.counted, {item, row}, 1) == 0 && !is("counts-padding-rows")) {
            continue;
          }
          if (is("lost-update") && rows > 2 && row == rows / 2 && calls % 2 == 0) {
            continue;  // two threads read, both add, one write is lost
          }
          const float value = row_value(a, item, lane, row, slot);
          sum = is("half-sums")                 ? half(static_cast<float>(sum) + value)
                : a.scores.dtype == HAE_FLOAT64 ? sum + value
                                                : static_cast<float>(sum) + value;
          largest =
              is("maximum-of-sums") ? std::max(largest, sum) : std::max(largest, static_cast<double>(value));
        }
        put(a.scores, {item, lane, slot}, sum);
        if (given(a.largest)) {
          put(a.largest, {item, lane, slot}, largest);
        }
      }
    }
  }
  return HAE_DONE;
}

// ---- selection

struct Candidate {
  double score;
  std::int64_t position;
  std::int64_t slot;
};

bool goes_before(const Candidate& a, const Candidate& b) {
  if (std::isnan(a.score) != std::isnan(b.score)) {
    return is("nan-on-top") ? std::isnan(b.score) : std::isnan(a.score);
  }
  if (a.score != b.score && !std::isnan(a.score)) {
    return is("takes-highest") ? a.score > b.score : a.score < b.score;
  }
  if (is("signed-zeros") && a.score == 0 && std::signbit(a.score) != std::signbit(b.score)) {
    return std::signbit(a.score);
  }
  if (is("ties-in-no-order") && (a.slot * 37 % 101) != (b.slot * 37 % 101)) {
    return a.slot * 37 % 101 < b.slot * 37 % 101;
  }
  return is("ties-by-highest") ? a.position > b.position : a.position < b.position;
}

double compared(double score) {
  if (is("flushes-subnormals") && std::fabs(score) < std::numeric_limits<float>::min()) {
    return 0;
  }
  if (is("compares-in-half")) {
    return half(static_cast<float>(score));
  }
  return is("sign-lost") ? std::fabs(score) : score;
}

void write_choice(const hae_array& chosen, const hae_array& scores, std::int64_t lane, std::int64_t count,
                  const std::vector<Candidate>& order) {
  const std::int64_t most = chosen.shape[1];
  const std::int64_t found =
      std::min(count - (is("one-too-few") ? 1 : 0), static_cast<std::int64_t>(order.size()));
  for (std::int64_t rank = 0; rank < most; ++rank) {
    if (rank >= found) {
      if (!is("rest-not-filled")) {
        put(chosen, {lane, rank}, -1);
      }
      continue;
    }
    const Candidate& candidate = order[static_cast<std::size_t>(rank)];
    std::int64_t slot = candidate.slot;
    if (is("block-offset-lost")) {
      slot %= 64;  // the index inside a block of 64
    }
    if (is("nan-index") && std::isnan(candidate.score)) {
      slot = std::numeric_limits<std::int32_t>::max();  // "no winner"
    }
    put(chosen, {lane, rank}, static_cast<double>(slot));
    if (given(scores)) {
      put(scores, {lane, rank}, is("scores-of-ranks") ? static_cast<double>(rank) : candidate.score);
    }
  }
}

void sort_candidates(std::vector<Candidate>& order, std::int64_t count) {
  std::sort(order.begin(), order.end(), [](Candidate a, Candidate b) {
    a.score = compared(a.score);
    b.score = compared(b.score);
    return goes_before(a, b);
  });
  if (is("sorted-by-slot")) {  // the right set, gathered by a scan
    const std::size_t found = std::min(static_cast<std::size_t>(count), order.size());
    std::sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(found),
              [](const Candidate& a, const Candidate& b) { return a.slot < b.slot; });
  }
}

std::int32_t select_lowest(const hae_select_lowest_arguments* arguments, const hae_context*) {
  const hae_select_lowest_arguments& a = *arguments;
  const std::int64_t slots = a.scores.shape[1];
  for (std::int64_t lane = 0; lane < a.scores.shape[0]; ++lane) {
    std::vector<Candidate> order;
    const std::int64_t length = cut(get_or(a.lengths, {lane}, slots), slots);
    for (std::int64_t slot = 0; slot < length; ++slot) {
      if (get_or(a.eligible, {lane, slot}, 1) != 0 || is("eligible-ignored")) {
        const std::int64_t position =
            is("slot-for-position") ? slot : get_or(a.positions, {lane, slot}, slot);
        order.push_back({get(a.scores, {lane, slot}), position, slot});
      }
    }
    std::int64_t count = get_or(a.counts, {is("count-of-lane-0") ? 0 : lane}, 0);
    if (is("counts-cached-by-shape")) {  // as a launch plan that is made once a shape
      count = plans.try_emplace({lane, slots, a.chosen.shape[1]}, count).first->second;
    }
    if (is("keeps-by-address")) {  // as a plan for a buffer that is always the same
      const auto address = reinterpret_cast<std::intptr_t>(a.chosen.data);
      count = plans.try_emplace({lane, slots * 10000 + a.chosen.shape[1], address}, count).first->second;
    }
    sort_candidates(order, count);
    write_choice(a.chosen, a.chosen_scores, lane, count, order);
  }
  return HAE_DONE;
}

std::int32_t select_from_rows(const hae_select_from_rows_arguments* arguments, const hae_context*) {
  const hae_select_from_rows_arguments& a = *arguments;
  const hae_array& p = a.probabilities;
  for (std::int64_t lane = 0; lane < p.shape[0]; ++lane) {
    std::vector<Candidate> order;
    const std::int64_t length = cut(get_or(a.lengths, {lane}, p.shape[3]), p.shape[3]);
    for (std::int64_t slot = 0; slot < length; ++slot) {
      float sum = 0;
      for (std::int64_t head = 0; head < p.shape[1]; ++head) {
        for (std::int64_t row = is("last-row-only") ? p.shape[2] - 1 : 0; row < p.shape[2]; ++row) {
          sum += static_cast<float>(get(p, {lane, head, row, slot}));
          sum = is("half-sums") ? half(sum) : sum;
        }
      }
      order.push_back({sum / static_cast<float>(p.shape[1]), slot, slot});
    }
    sort_candidates(order, get_or(a.counts, {lane}, 0));
    write_choice(a.chosen, a.chosen_scores, lane, get_or(a.counts, {lane}, 0), order);
  }
  return HAE_DONE;
}

// ---- pruning

std::int32_t prune(const hae_prune_arguments* arguments, const hae_context*) {
  const hae_prune_arguments& a = *arguments;
  if (is("crashes")) {
    std::abort();
  }
  if (is("exits")) {
    std::exit(0);
  }
  const std::int64_t tokens = a.sums.shape[1];
  for (std::int64_t item = 0; item < a.sums.shape[0]; ++item) {
    const auto total_of = [&](std::int64_t scope) {
      double total = 0;
      for (std::int64_t j = 0; j < tokens; ++j) {
        const auto other = static_cast<std::int64_t>(get(a.scope, {item, j}));
        total += other == scope || (is("one-scope") && other >= 0) ? get(a.sums, {item, j}) : 0;
      }
      return total;
    };
    std::vector<double> totals;
    for (std::int64_t scope = 0; scope < 8; ++scope) {
      totals.push_back(total_of(scope));
    }
    for (std::int64_t j = 0; j < tokens; ++j) {
      const auto scope = static_cast<std::int64_t>(get(a.scope, {item, j}));
      const double threshold = scope < 0 ? 0 : a.r * totals[static_cast<std::size_t>(scope)];
      const double sum = get(a.sums, {item, j});
      const double largest = get(a.largest, {item, j});
      const bool below = is("threshold-not-strict") ? sum <= threshold : sum < threshold;
      const bool small =
          is("alpha-not-strict") ? largest <= a.alpha : largest < a.alpha || is("alpha-ignored");
      const bool may_go = scope >= 0 && (j >= a.sinks || is("sinks-evicted"));
      put(a.evicted, {item, j}, may_go && below && small ? 1 : 0);
    }
  }
  return HAE_DONE;
}

// ---- compaction

void move_row(const hae_array& from, const hae_array& to, std::int64_t lane, std::int64_t source,
              std::int64_t target) {
  if (from.rank == 2) {
    put(to, {lane, target}, get(from, {lane, source}));
    return;
  }
  for (std::int64_t i = 0; i < from.shape[2]; ++i) {
    put(to, {lane, target, i}, get(from, {lane, source, i}));
  }
}

std::int32_t compact(const hae_compact_arguments* arguments, const hae_context*) {
  const hae_compact_arguments& a = *arguments;
  const std::int64_t slots = a.keep.shape[1];
  for (std::int64_t lane = 0; lane < a.keep.shape[0]; ++lane) {
    std::vector<std::int64_t> kept;
    for (std::int64_t slot = 0; slot < cut(get_or(a.lengths, {lane}, slots), slots); ++slot) {
      if ((get(a.keep, {lane, slot}) != 0) != is("mask-inverted")) {
        kept.push_back(slot);
      }
    }
    const auto move = [&](const hae_array& from, const hae_array& to) {
      if (!given(to)) {
        return;
      }
      std::vector<std::int64_t> targets;
      for (std::int64_t target = 0; target < static_cast<std::int64_t>(kept.size()); ++target) {
        targets.push_back(target);
      }
      if (is("moves-backwards")) {  // in place, a row is overwritten before it is read
        std::reverse(targets.begin(), targets.end());
      }
      for (const std::int64_t target : targets) {
        move_row(from, to, lane, kept[static_cast<std::size_t>(target)], target);
      }
      if (is("writes-beyond") && lane + 1 == a.keep.shape[0]) {
        move_row(from, to, lane, 0, slots);  // a terminator nobody made room for
      }
    };
    move(is("values-from-keys") && given(a.values) ? a.keys : a.keys, a.keys_out);
    move(is("values-from-keys") ? a.keys : a.values, a.values_out);
    move(a.positions, a.positions_out);
    if (!is("scores-not-moved")) {
      move(a.scores, a.scores_out);
    } else if (given(a.scores_out)) {
      for (std::int64_t slot = 0; slot < slots; ++slot) {
        move_row(a.scores, a.scores_out, lane, slot, slot);
      }
    }
    if (is("positions-renumbered") && given(a.positions_out)) {
      for (std::int64_t slot = 0; slot < static_cast<std::int64_t>(kept.size()); ++slot) {
        put(a.positions_out, {lane, slot}, static_cast<double>(slot));
      }
    }
    put(a.kept, {lane}, static_cast<double>(kept.size()));
  }
  return HAE_DONE;
}

// ---- attention

/// Rows of keys or values, paged or not.
double cached(const hae_attend_arguments& a, const hae_array& array, std::int64_t item, std::int64_t lane,
              std::int64_t slot, std::int64_t i) {
  if (!given(a.block_table)) {
    return get(array, {item, lane, slot, i});
  }
  const std::int64_t page_size = array.shape[2];
  const std::int64_t block = slot / page_size;
  const std::int64_t owner = is("block-table-of-item-0") ? 0 : item;
  const auto page = is("pages-in-order") ? item * a.block_table.shape[1] + block
                                         : static_cast<std::int64_t>(get(a.block_table, {owner, block}));
  return get(array, {page, lane, slot % page_size, i});
}

struct Heads {
  std::int64_t item, head, lane, lanes, slots, dim;
  std::int64_t source;  ///< the lane whose keys and values are read
};

std::int64_t slots_of(const hae_attend_arguments& a) {
  for (const hae_array* array : {&a.probabilities, &a.sums}) {
    if (given(*array)) {
      return array->shape[2];
    }
  }
  return given(a.block_table) ? a.block_table.shape[1] * a.keys.shape[2] : a.keys.shape[2];
}

bool takes_part(const hae_attend_arguments& a, const Heads& h, std::int64_t slot) {
  if (get_or(a.visible, {h.item, is("heads-tiled") ? h.source : h.lane, slot}, 1) == 0 &&
      !is("visible-ignored")) {
    return false;
  }
  const std::int64_t position =
      is("row-for-position")
          ? slot
          : get_or(a.positions, {h.item, is("heads-tiled") ? h.source : h.lane, slot}, slot);
  const std::int64_t item = is("query-position-of-item-0") ? 0 : h.item;
  const std::int64_t back = get_or(a.query_positions, {item}, 0) - position;
  return a.window == 0 || is("window-ignored") || back < a.window + (is("window-too-wide") ? 1 : 0);
}

float logit(const hae_attend_arguments& a, const Heads& h, std::int64_t slot) {
  float dot = 0;
  const std::int64_t dim = is("head-dims-beyond-128") ? std::min<std::int64_t>(h.dim, 128) : h.dim;
  for (std::int64_t i = 0; i < dim; ++i) {
    auto q = static_cast<float>(get(a.queries, {h.item, h.head, i}));
    auto k = static_cast<float>(cached(a, a.keys, h.item, h.source, slot, i));
    if (is("bfloat16-products")) {  // as a matrix unit takes them, when nobody forbids it
      q = traces::float_from_bfloat16(traces::bfloat16_from_float(q));
      k = traces::float_from_bfloat16(traces::bfloat16_from_float(k));
    }
    dot += q * k;
  }
  const float scale = is("own-scale") ? 1 / std::sqrt(static_cast<float>(h.dim)) : a.scale;
  const float scaled = is("no-scale") ? dot : dot * scale;
  return is("scale-twice") ? scaled * a.scale : scaled;
}

/// Weights of one row, their sum, and the maximum that was subtracted.
struct Row {
  std::vector<float> weights;
  float sum = 0;
  float largest = -std::numeric_limits<float>::infinity();
};

Row row_of(const hae_attend_arguments& a, const Heads& h) {
  Row row;
  row.weights.assign(static_cast<std::size_t>(h.slots), -std::numeric_limits<float>::infinity());
  const std::int64_t length =
      cut(get_or(a.lengths, {h.item, is("heads-tiled") ? h.source : h.lane}, h.slots), h.slots);
  bool is_nan = false;
  for (std::int64_t slot = 0; slot < length; ++slot) {
    if (takes_part(a, h, slot)) {
      const float z = logit(a, h, slot);
      row.weights[static_cast<std::size_t>(slot)] = z;
      row.largest = std::max(row.largest, z);
      is_nan = is_nan || std::isnan(z);
    }
  }
  if (is("no-maximum") || is("maximum-from-zero")) {
    row.largest = is("no-maximum") ? 0 : std::max(row.largest, 0.0f);
  }
  if (row.largest == -std::numeric_limits<float>::infinity()) {
    row.largest = is("masked-row-nan") ? row.largest : 0;
  }
  if (is("previous-maximum")) {  // taken from a buffer that this row's maximum reaches too late
    std::swap(previous, row.largest);
  }
  for (float& weight : row.weights) {
    weight = std::exp(weight - row.largest);
    row.sum += weight;
    row.sum = is("half-sums") ? half(row.sum) : row.sum;
  }
  row.sum = is_nan ? std::numeric_limits<float>::quiet_NaN() : row.sum;
  return row;
}

void write_output(const hae_attend_arguments& a, const Heads& h, const Row& row, const void* workspace) {
  for (std::int64_t i = 0; i < h.dim; ++i) {
    // A partial sum that an earlier launch was to clear.
    float sum = is("stale-workspace") ? *static_cast<const float*>(workspace) : 0;
    for (std::int64_t slot = 0; slot < h.slots; ++slot) {
      const float weight = row.weights[static_cast<std::size_t>(slot)];
      if (!(weight == 0) || is("padding-times-zero")) {
        const bool drops = is("lost-partial-sum") && slot >= 32 && calls % 3 == 2;
        sum += drops ? 0 : weight * static_cast<float>(cached(a, a.values, h.item, h.source, slot, i));
        sum = is("half-sums") ? half(sum) : sum;
      }
    }
    const float o = row.sum == 0 && !is("masked-row-nan") ? 0 : sum / row.sum;
    const double before = is("adds-to-output") ? get(a.output, {h.item, h.head, i}) : 0;
    put(a.output, {h.item, h.head, i}, before + o);
  }
}

void write_row(const hae_attend_arguments& a, const Heads& h, const void* workspace) {
  const Row row = row_of(a, h);
  const bool first_of_group = h.head % (a.queries.shape[1] / h.lanes) == 0;
  for (std::int64_t slot = 0; slot < h.slots; ++slot) {
    const float weight = row.weights[static_cast<std::size_t>(slot)];
    const float p = row.sum == 0 && !is("masked-row-nan") ? 0 : weight / row.sum;
    if (given(a.probabilities)) {
      put(a.probabilities, {h.item, h.head, slot}, is("weights-for-probabilities") ? weight : p);
    }
    if (given(a.sums)) {
      const double before =
          first_of_group && !is("sums-not-cleared") ? 0 : get(a.sums, {h.item, h.lane, slot});
      put(a.sums, {h.item, h.lane, slot}, static_cast<float>(before) + p);
    }
  }
  if (given(a.output)) {
    write_output(a, h, row, workspace);
  }
  if (given(a.log_sum_exp)) {
    const float lse = row.largest + std::log(row.sum);
    put(a.log_sum_exp, {h.item, h.head}, is("log2") ? lse * 1.4426950408889634f : lse);
  }
}

std::int32_t attend(const hae_attend_arguments* arguments, const hae_context* context) {
  const hae_attend_arguments& a = *arguments;
  ++calls;
  const std::int64_t heads = a.queries.shape[1];
  const std::int64_t lanes = a.keys.shape[1];
  // A grid's y and z end at 65,535 blocks.
  const std::int64_t items =
      is("grid-limit") ? std::min<std::int64_t>(a.queries.shape[0], 65535) : a.queries.shape[0];
  for (std::int64_t item = 0; item < items; ++item) {
    for (std::int64_t head = 0; head < heads; ++head) {
      const std::int64_t lane = head / (heads / lanes);
      const std::int64_t source = is("heads-tiled") ? head % lanes : is("kv-head-0") ? 0 : lane;
      write_row(a, {item, head, lane, lanes, slots_of(a), a.queries.shape[2], source}, context->workspace);
      if (is("scales-queries-in-place")) {
        put(a.queries, {item, head, 0}, get(a.queries, {item, head, 0}) * a.scale);
      }
    }
  }
  if (is("throws") && a.keys.shape[2] == 33) {
    throw std::runtime_error("cudaErrorInvalidValue");
  }
  return is("returns-an-error") && a.keys.shape[2] == 33 ? 7 : HAE_DONE;
}

}  // namespace

const std::vector<Mutant>& mutants() {
  static const std::vector<Mutant> all{
      {"heads-tiled", "add_scores", "tiled"},
      {"sum-not-mean", "add_scores", "the sum over query heads where their mean"},
      {"first-head-only", "add_scores", "only the first query head"},
      {"overwrites", "add_scores", "overwritten"},
      {"counts-padding-rows", "add_scores", "padding is summed"},
      {"last-row-skipped", "add_scores", "the last row is left out"},
      {"half-sums", "add_scores", "fewer bits"},
      {"lost-update", "add_scores", "a race"},
      {"lengths-ignored", "add_scores", "lengths are ignored"},
      {"ignores-strides", "add_scores", "strides are ignored"},
      {"maximum-of-sums", "add_scores", "maximum is taken of the sums"},
      {"ties-by-highest", "select_lowest", "the highest position goes first"},
      {"ties-in-no-order", "select_lowest", "no fixed order"},
      {"slot-for-position", "select_lowest", "slot numbers stand for positions"},
      {"takes-highest", "select_lowest", "the highest scores are chosen"},
      {"nan-on-top", "select_lowest", "a NaN ranks above"},
      {"nan-index", "select_lowest", "outside the lane"},
      {"signed-zeros", "select_lowest", "-0 ranks below +0"},
      {"flushes-subnormals", "select_lowest", "flushed to zero"},
      {"compares-in-half", "select_lowest", "narrower type"},
      {"sign-lost", "select_lowest", "by magnitude"},
      {"eligible-ignored", "select_lowest", "`eligible` is ignored"},
      {"block-offset-lost", "select_lowest", "offset"},
      {"rest-not-filled", "select_lowest", "not written"},
      {"one-too-few", "select_lowest", "one token fewer"},
      {"count-of-lane-0", "select_lowest", "lane 0's count"},
      {"counts-cached-by-shape", "select_lowest", "state that is kept"},
      {"sorted-by-slot", "select_lowest", "the right set in a wrong order"},
      {"scores-of-ranks", "select_lowest", "scores beside the choice"},
      {"last-block-skipped", "select_lowest", "partial block of 32"},
      {"last-row-only", "select_from_rows", "only the last row"},
      {"half-sums", "select_from_rows", "fewer bits"},
      {"threshold-not-strict", "prune", "equals r A_V"},
      {"alpha-not-strict", "prune", "equals alpha"},
      {"alpha-ignored", "prune", "alpha is ignored"},
      {"sinks-evicted", "prune", "sinks are evicted"},
      {"one-scope", "prune", "one A_V for all scopes"},
      {"positions-renumbered", "compact", "row numbers"},
      {"moves-backwards", "compact", "in place"},
      {"writes-beyond", "compact", "outside an array"},
      {"scores-not-moved", "compact", "scores stay"},
      {"values-from-keys", "compact", "moved from the keys"},
      {"mask-inverted", "compact", "inverted"},
      {"length-minus-one", "compact", "last slot of every lane is left out"},
      {"heads-tiled", "attend", "tiled"},
      {"kv-head-0", "attend", "KV head 0"},
      {"no-maximum", "attend", "maximum is not subtracted"},
      {"maximum-from-zero", "attend", "starts at 0"},
      {"length-minus-one", "attend", "last slot of every lane is left out"},
      {"length-plus-one", "attend", "beyond the length"},
      {"lengths-ignored", "attend", "lengths are ignored"},
      {"padding-times-zero", "attend", "a weight of 0 times NaN"},
      {"last-tile-skipped", "attend", "partial block of 16"},
      {"scale-twice", "attend", "scale is applied twice"},
      {"no-scale", "attend", "scale is not applied"},
      {"own-scale", "attend", "whatever is given"},
      {"query-position-of-item-0", "attend", "item 0's query position"},
      {"head-dims-beyond-128", "attend", "more than 128 head_dim"},
      {"throws", "attend", "it threw"},
      {"keeps-by-address", "select_lowest", "state that is kept"},
      {"half-sums", "attend", "fewer bits"},
      {"bfloat16-products", "attend", "fewer bits"},
      {"masked-row-nan", "attend", "no slot"},
      {"visible-ignored", "attend", "`visible` is ignored"},
      {"row-for-position", "attend", "row number is used as a position"},
      {"window-ignored", "attend", "window is ignored"},
      {"window-too-wide", "attend", "one too wide"},
      {"stale-workspace", "attend", "work space held before"},
      {"previous-maximum", "attend", "an earlier call left"},
      {"lost-partial-sum", "attend", "a race"},
      {"adds-to-output", "attend", "not cleared"},
      {"sums-not-cleared", "attend", "not cleared"},
      {"block-table-of-item-0", "attend", "paged"},
      {"pages-in-order", "attend", "paged"},
      {"log2", "attend", "base 2"},
      {"weights-for-probabilities", "attend", "not divided by their sum"},
      {"scales-queries-in-place", "attend", "an input is changed"},
      {"assumes-alignment", "attend", "misaligned"},
      {"grid-limit", "attend", "65535"},
      {"returns-an-error", "attend", "returned 7"},
      {"offsets-in-32-bits", "add_scores", "32 bits"},
      {"offsets-in-32-bits", "select_lowest", "32 bits"},
      {"offsets-in-32-bits", "prune", "32 bits"},
      {"offsets-in-32-bits", "compact", "32 bits"},
      {"offsets-in-32-bits", "attend", "32 bits"},
  };
  return all;
}

const hae_kernels* table_with(const std::string& name) {
  const bool known = name.empty() || name == "crashes" || name == "exits" ||
                     std::any_of(mutants().begin(), mutants().end(),
                                 [&](const Mutant& mutant) { return mutant.name == name; });
  if (!known) {
    throw std::out_of_range("no mutant is named " + name);
  }
  fault = hash(name.c_str());
  calls = 0;
  previous = 0;
  plans.clear();
  static hae_kernels table{};
  table.abi = HAE_KERNELS_ABI;
  table.accumulation = HAE_FLOAT32;
  table.name = "gallery";
  table.workspace_bytes = [](std::int32_t operation, const void*) -> std::int64_t {
    return operation == HAE_ATTEND ? 64 : 0;
  };
  table.add_scores = add_scores;
  table.select_lowest = select_lowest;
  table.select_from_rows = select_from_rows;
  table.prune = prune;
  table.compact = compact;
  table.attend = attend;
  return &table;
}

}  // namespace hae::gallery
