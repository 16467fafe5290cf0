// The project's own device library behind hae/kernels.h: a right example for `hae validate --kernels`, and a
// check of every operation alone on raw pointers. Arrays with strides and numbers of other types are gathered
// into the arrays that the operations take, and what they give is scattered.

#include <exception>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda/compact.hpp"
#include "cuda/decode_attention.hpp"
#include "cuda/dual_attention_pruning.hpp"
#include "cuda/for_each_index.hpp"
#include "cuda/memory.hpp"
#include "cuda/parts.hpp"
#include "cuda/select_lowest.hpp"
#include "cuda/token_scores.hpp"
#include "sim/errors.hpp"
#include "validate/kernels.h"

namespace hae::device {
namespace {

// ---- arrays

bool given(const hae_array& array) {
  return array.data != nullptr;
}

bool is_float(const hae_array& array) {
  return array.dtype == HAE_FLOAT32 || array.dtype == HAE_FLOAT64;
}

Index size_of(const hae_array& array) {
  Index size = 1;
  for (int axis = 0; axis < array.rank; ++axis) {
    size *= array.shape[axis];
  }
  return size;
}

bool is_dense(const hae_array& array) {
  Index stride = 1;
  for (int axis = array.rank; axis-- > 0;) {
    if (array.strides[axis] != stride && array.shape[axis] > 1) {
      return false;
    }
    stride *= array.shape[axis];
  }
  return true;
}

HAE_HOST_DEVICE Index offset_of(const hae_array& array, Index index) {
  Index offset = 0;
  for (int axis = array.rank; axis-- > 0;) {
    offset += take_axis(index, array.shape[axis]) * array.strides[axis];
  }
  return offset;
}

/// A row-major copy of an array's numbers, or one number for all where it is absent.
template <typename T>
struct Gather {
  hae_array from;
  T otherwise;
  T* to;

  HAE_HOST_DEVICE void operator()(Index index) const {
    if (from.data == nullptr) {
      to[index] = otherwise;
      return;
    }
    const Index offset = offset_of(from, index);
    switch (from.dtype) {
      case HAE_FLOAT32:
        to[index] = static_cast<T>(static_cast<const float*>(from.data)[offset]);
        break;
      case HAE_FLOAT64:
        to[index] = static_cast<T>(static_cast<const double*>(from.data)[offset]);
        break;
      case HAE_INT32:
        to[index] = static_cast<T>(static_cast<const std::int32_t*>(from.data)[offset]);
        break;
      case HAE_INT64:
        to[index] = static_cast<T>(static_cast<const std::int64_t*>(from.data)[offset]);
        break;
      default:
        to[index] = static_cast<T>(static_cast<const std::uint8_t*>(from.data)[offset]);
    }
  }
};

template <typename T>
struct Scatter {
  const T* from;
  hae_array to;

  HAE_HOST_DEVICE void operator()(Index index) const {
    const Index offset = offset_of(to, index);
    switch (to.dtype) {
      case HAE_FLOAT32:
        static_cast<float*>(to.data)[offset] = static_cast<float>(from[index]);
        break;
      case HAE_FLOAT64:
        static_cast<double*>(to.data)[offset] = static_cast<double>(from[index]);
        break;
      case HAE_INT64:
        static_cast<std::int64_t*>(to.data)[offset] = static_cast<std::int64_t>(from[index]);
        break;
      default:
        static_cast<std::uint8_t*>(to.data)[offset] = static_cast<std::uint8_t>(from[index]);
    }
  }
};

template <typename T>
void gather(const hae_array& from, Index count, T* to, Stream stream, T otherwise = T{}) {
  for_each_index("gathering", stream, count, Gather<T>{from, otherwise, to});
}

template <typename T>
void scatter(const T* from, const hae_array& to, Stream stream) {
  for_each_index("scattering", stream, size_of(to), Scatter<T>{from, to});
}

// ---- cumulative attention

struct ScoreParts {
  Index items, heads, rows, slots, lanes;
  float *weights, *divisors;
  Index* queries;
  LayerMask* masks;
  std::uint8_t *resident, *seen;
  double *scores, *largest;
  Index bytes;

  ScoreParts(const hae_add_scores_arguments& a, void* memory) {
    items = a.probabilities.shape[0];
    heads = a.probabilities.shape[1];
    rows = a.probabilities.shape[2];
    slots = a.probabilities.shape[3];
    lanes = a.scores.shape[1];
    Parts parts(memory);
    weights = parts.take<float>(items * heads * rows * stride());
    divisors = parts.take<float>(items * heads * rows);
    queries = parts.take<Index>(items * rows);
    masks = parts.take<LayerMask>(items);
    resident = parts.take<std::uint8_t>(items * stride());
    seen = parts.take<std::uint8_t>(items * stride());
    scores = parts.take<double>(items * lanes * stride());
    largest = parts.take<double>(items * stride());
    bytes = parts.bytes();
  }

  /// Keys of a row block are a multiple of 32.
  [[nodiscard]] HAE_HOST_DEVICE Index stride() const { return (slots + 31) / 32 * 32; }
};

/// The rows as a row block has them: weights that are the probabilities, divided by 1; a row that does not
/// count is none; a slot beyond the length is held by nobody.
struct FormRows {
  ScoreParts parts;
  hae_array probabilities, counted, lengths;

  HAE_HOST_DEVICE void operator()(Index index) const {
    const Index place = index;
    const Index slot = take_axis(index, parts.stride());
    const Index row_of_heads = index;
    const Index row = take_axis(index, parts.rows);
    const Index head = take_axis(index, parts.heads);
    const Index item = index;
    const bool is_slot = slot < parts.slots;
    float weight = 0.0f;
    if (is_slot) {
      const Index offset = item * probabilities.strides[0] + head * probabilities.strides[1] +
                           row * probabilities.strides[2] + slot;
      weight = static_cast<const float*>(probabilities.data)[offset];
    }
    parts.weights[place] = weight;
    if (slot == 0) {
      parts.divisors[row_of_heads] = 1.0f;
    }
    if (slot == 0 && head == 0) {
      const bool counts = counted.data == nullptr || static_cast<const std::uint8_t*>(
                                                         counted.data)[item * counted.strides[0] + row] != 0;
      parts.queries[item * parts.rows + row] = counts ? parts.slots : -1;
    }
    if (row == 0 && head == 0) {
      const Index length =
          lengths.data == nullptr ? parts.slots : static_cast<const Index*>(lengths.data)[item];
      parts.resident[item * parts.stride() + slot] = is_slot && slot < length ? 1 : 0;
    }
    if (slot == 0 && row == 0 && head == 0) {
      parts.masks[item] = LayerMask{};  // every slot is older than a query at `slots`
    }
  }
};

/// Scores between the rows of a kernel's array and the longer ones of a row block.
template <typename T>
struct MoveScores {
  hae_array array;
  Index stride;
  double* block;  ///< [items * lanes, stride]
  bool is_in;

  HAE_HOST_DEVICE void operator()(Index index) const {
    const Index offset = offset_of(array, index);
    double& own = block[index / array.shape[2] * stride + index % array.shape[2]];
    T& theirs = static_cast<T*>(array.data)[offset];
    if (is_in) {
      own = static_cast<double>(theirs);
    } else {
      theirs = static_cast<T>(own);
    }
  }
};

void move_scores(const hae_array& array, Index stride, double* block, bool is_in, Stream stream) {
  if (array.dtype == HAE_FLOAT32) {
    for_each_index("scores", stream, size_of(array), MoveScores<float>{array, stride, block, is_in});
  } else {
    for_each_index("scores", stream, size_of(array), MoveScores<double>{array, stride, block, is_in});
  }
}

std::int32_t call_add_scores(const hae_add_scores_arguments& a, const hae_context& c) {
  // DAP's maximum is of all query heads; a lane of its own for each has none.
  if (a.probabilities.dtype != HAE_FLOAT32 || (given(a.largest) && a.scores.shape[1] != 1)) {
    return HAE_UNSUPPORTED;
  }
  const ScoreParts parts(a, c.workspace);
  RowBlock block;
  block.items = parts.items;
  block.query_heads = block.kv_heads = parts.heads;
  block.rows = parts.rows;
  block.active = {0, parts.rows};
  block.keys = parts.stride();
  block.queries = parts.queries;
  block.masks = parts.masks;
  block.weights = parts.weights;
  RowValues values;
  constexpr HeadReduction kReductions[] = {HeadReduction::mean, HeadReduction::sum, HeadReduction::max};
  values.heads = kReductions[a.reduction];
  values.divisors = parts.divisors;
  values.resident = parts.resident;
  values.stride = parts.stride();
  for_each_index("rows", c.stream, parts.items * parts.heads * parts.rows * parts.stride(),
                 FormRows{parts, a.probabilities, a.counted, a.lengths});
  move_scores(a.scores, parts.stride(), parts.scores, true, c.stream);
  if (given(a.largest)) {
    move_scores(a.largest, parts.stride(), parts.largest, true, c.stream);
    add_text_rows(block, values, parts.scores, parts.largest, parts.seen, c.stream);
    move_scores(a.largest, parts.stride(), parts.largest, false, c.stream);
  } else {
    add_rows(block, values, parts.lanes, parts.scores, nullptr, c.stream);
  }
  move_scores(a.scores, parts.stride(), parts.scores, false, c.stream);
  return HAE_DONE;
}

// ---- selection

struct SelectParts {
  Index lanes, slots, most;
  double* scores;
  std::uint8_t* eligible;
  Index *counts, *chosen;
  char* selection;
  Index bytes;

  SelectParts(const hae_select_lowest_arguments& a, void* memory) {
    lanes = a.scores.shape[0];
    slots = a.scores.shape[1];
    most = a.chosen.shape[1];
    Parts parts(memory);
    scores = parts.take<double>(lanes * slots);
    eligible = parts.take<std::uint8_t>(lanes * slots);
    counts = parts.take<Index>(lanes);
    chosen = parts.take<Index>(lanes * most);
    selection = parts.take<char>(select_lowest_bytes(lanes, slots, most));
    bytes = parts.bytes();
  }
};

struct LeaveOutBeyond {
  SelectParts parts;
  hae_array lengths;

  HAE_HOST_DEVICE void operator()(Index index) const {
    const Index place = index;
    const Index slot = take_axis(index, parts.slots);
    if (slot >= static_cast<const Index*>(lengths.data)[index]) {
      parts.eligible[place] = 0;
    }
  }
};

template <typename T>
struct ScoresOfChosen {
  SelectParts parts;
  hae_array to;

  HAE_HOST_DEVICE void operator()(Index index) const {
    const Index chosen = parts.chosen[index];
    const Index lane = index / parts.most;
    static_cast<T*>(to.data)[offset_of(to, index)] =
        chosen < 0 ? T{} : static_cast<T>(parts.scores[lane * parts.slots + chosen]);
  }
};

std::int32_t call_select_lowest(const hae_select_lowest_arguments& a, const hae_context& c) {
  if (!is_float(a.scores) || given(a.positions)) {
    return HAE_UNSUPPORTED;  // the cache is indexed by position
  }
  const SelectParts parts(a, c.workspace);
  if (parts.slots == 0) {
    gather(hae_array{}, parts.lanes * parts.most, parts.chosen, c.stream, Index{-1});
  } else {
    gather(a.scores, parts.lanes * parts.slots, parts.scores, c.stream);
    gather(a.eligible, parts.lanes * parts.slots, parts.eligible, c.stream, std::uint8_t{1});
    gather(a.counts, parts.lanes, parts.counts, c.stream);
    if (given(a.lengths)) {
      for_each_index("lengths", c.stream, parts.lanes * parts.slots, LeaveOutBeyond{parts, a.lengths});
    }
    device::select_lowest(LowestSelection<double>{parts.lanes, parts.slots, parts.scores, parts.eligible,
                                                  parts.counts, parts.most, parts.chosen},
                          parts.selection, c.stream);
  }
  scatter(parts.chosen, a.chosen, c.stream);
  const Index count = parts.lanes * parts.most;
  if (given(a.chosen_scores) && a.chosen_scores.dtype == HAE_FLOAT32) {
    for_each_index("scores", c.stream, count, ScoresOfChosen<float>{parts, a.chosen_scores});
  } else if (given(a.chosen_scores)) {
    for_each_index("scores", c.stream, count, ScoresOfChosen<double>{parts, a.chosen_scores});
  }
  return HAE_DONE;
}

// ---- DAP

constexpr Index kScopes = 64;  // cases have a few

struct PruneParts {
  Index items, tokens;
  double *sums, *largest;
  std::uint8_t *seen, *evicted;
  Index* scope;
  char* decision;
  Index bytes;

  PruneParts(const hae_prune_arguments& a, void* memory) {
    items = a.sums.shape[0];
    tokens = a.sums.shape[1];
    Parts parts(memory);
    sums = parts.take<double>(items * tokens);
    largest = parts.take<double>(items * tokens);
    seen = parts.take<std::uint8_t>(items * tokens);
    evicted = parts.take<std::uint8_t>(items * tokens);
    scope = parts.take<Index>(items * tokens);
    decision = parts.take<char>(pruning_workspace_bytes(items, tokens, kScopes));
    bytes = parts.bytes();
  }
};

std::int32_t call_prune(const hae_prune_arguments& a, const hae_context& c) {
  const PruneParts parts(a, c.workspace);
  const Index count = parts.items * parts.tokens;
  gather(a.sums, count, parts.sums, c.stream);
  gather(a.largest, count, parts.largest, c.stream);
  gather(a.scope, count, parts.scope, c.stream);
  gather(hae_array{}, count, parts.seen, c.stream, std::uint8_t{1});
  PruningRule rule;
  rule.r = a.r;
  rule.alpha = a.alpha;
  rule.sinks = a.sinks;
  choose_pruned(
      PruningSums{parts.items, parts.tokens, kScopes, parts.sums, parts.largest, parts.seen, parts.scope},
      rule, parts.decision, parts.evicted, c.stream);
  scatter(parts.evicted, a.evicted, c.stream);
  return HAE_DONE;
}

// ---- compaction

struct CompactParts {
  std::uint8_t* keep;
  Index *lengths, *kept;
  Index bytes;

  CompactParts(const hae_compact_arguments& a, void* memory) {
    Parts parts(memory);
    keep = parts.take<std::uint8_t>(size_of(a.keep));
    lengths = parts.take<Index>(a.keep.shape[0]);
    kept = parts.take<Index>(a.keep.shape[0]);
    bytes = parts.bytes();
  }
};

Index bytes_of(std::int32_t dtype) {
  return dtype == HAE_FLOAT64 || dtype == HAE_INT64 ? 8 : dtype == HAE_FLOAT32 ? 4 : 2;
}

std::int32_t call_compact(const hae_compact_arguments& a, const hae_context& c) {
  std::vector<CompactedRows> arrays;
  const std::pair<const hae_array*, const hae_array*> pairs[] = {{&a.keys, &a.keys_out},
                                                                 {&a.values, &a.values_out},
                                                                 {&a.positions, &a.positions_out},
                                                                 {&a.scores, &a.scores_out}};
  for (const auto& [from, to] : pairs) {
    if (!given(*from)) {
      continue;
    }
    if (!is_dense(*from) || !is_dense(*to)) {
      return HAE_UNSUPPORTED;  // rows move as bytes
    }
    arrays.push_back({from->data, to->data, (from->rank == 3 ? from->shape[2] : 1) * bytes_of(from->dtype)});
  }
  const CompactParts parts(a, c.workspace);
  const Index lanes = a.keep.shape[0];
  gather(a.keep, size_of(a.keep), parts.keep, c.stream);
  gather(a.lengths, lanes, parts.lengths, c.stream, a.keep.shape[1]);
  device::compact({lanes, a.keep.shape[1], parts.keep, parts.lengths}, arrays, parts.kept, c.stream);
  scatter(parts.kept, a.kept, c.stream);
  return HAE_DONE;
}

// ---- attention

struct AttendParts {
  Index items, query_heads, kv_heads, slots, head_dim;
  float *scales, *queries, *keys, *values, *probabilities;
  Index *positions, *lengths;
  double* outputs;
  char* attention;
  Index bytes;

  AttendParts(const hae_attend_arguments& a, void* memory) {
    items = a.queries.shape[0];
    query_heads = a.queries.shape[1];
    kv_heads = a.keys.shape[1];
    slots = a.keys.shape[2];
    head_dim = a.queries.shape[2];
    Parts parts(memory);
    scales = parts.take<float>(items);
    queries = parts.take<float>(items * query_heads * head_dim);
    keys = parts.take<float>(items * kv_heads * slots * head_dim);
    values = parts.take<float>(items * kv_heads * slots * head_dim);
    positions = parts.take<Index>(items * kv_heads * slots);
    lengths = parts.take<Index>(items * kv_heads);
    probabilities = parts.take<float>(items * query_heads * slots);
    outputs = parts.take<double>(items * query_heads * head_dim);
    attention = parts.take<char>(decode_attention_bytes(items, query_heads));
    bytes = parts.bytes();
  }
};

struct NumberSlots {
  Index slots;
  Index* positions;

  HAE_HOST_DEVICE void operator()(Index index) const { positions[index] = index % slots; }
};

std::int32_t call_attend(const hae_attend_arguments& a, const hae_context& c) {
  // One call serves a cache from which tokens are gone, dense, with probabilities and output.
  if (a.queries.dtype != HAE_FLOAT32 || given(a.block_table) || given(a.visible) || a.window != 0 ||
      given(a.positions) || given(a.log_sum_exp) || given(a.sums)) {
    return HAE_UNSUPPORTED;
  }
  const AttendParts parts(a, c.workspace);
  const Index vectors = parts.items * parts.kv_heads;
  gather(hae_array{}, parts.items, parts.scales, c.stream, a.scale);
  gather(a.queries, size_of(a.queries), parts.queries, c.stream);
  gather(a.keys, size_of(a.keys), parts.keys, c.stream);
  gather(a.values, size_of(a.values), parts.values, c.stream);
  gather(a.lengths, vectors, parts.lengths, c.stream, parts.slots);
  gather(hae_array{}, parts.items * parts.query_heads * parts.slots, parts.probabilities, c.stream, 0.0f);
  for_each_index("positions", c.stream, vectors * parts.slots, NumberSlots{parts.slots, parts.positions});
  device::attend({parts.items, parts.query_heads, parts.kv_heads, parts.head_dim, parts.slots, parts.scales,
                  parts.queries, parts.keys, parts.values, parts.positions, parts.lengths},
                 parts.attention, parts.probabilities, parts.outputs, c.stream);
  if (given(a.probabilities)) {
    scatter(parts.probabilities, a.probabilities, c.stream);
  }
  if (given(a.output)) {
    scatter(parts.outputs, a.output, c.stream);
  }
  return HAE_DONE;
}

// ---- the table

std::int64_t workspace_bytes(std::int32_t operation, const void* arguments) {
  switch (operation) {
    case HAE_ADD_SCORES:
      return ScoreParts(*static_cast<const hae_add_scores_arguments*>(arguments), nullptr).bytes;
    case HAE_SELECT_LOWEST:
      return SelectParts(*static_cast<const hae_select_lowest_arguments*>(arguments), nullptr).bytes;
    case HAE_PRUNE:
      return PruneParts(*static_cast<const hae_prune_arguments*>(arguments), nullptr).bytes;
    case HAE_COMPACT:
      return CompactParts(*static_cast<const hae_compact_arguments*>(arguments), nullptr).bytes;
    default:
      return AttendParts(*static_cast<const hae_attend_arguments*>(arguments), nullptr).bytes;
  }
}

/// A kernel of the table: what an operation throws is a status.
template <typename Arguments, std::int32_t (*kOperation)(const Arguments&, const hae_context&)>
std::int32_t caught(const Arguments* arguments, const hae_context* context) {
  try {
    return kOperation(*arguments, *context);
  } catch (const std::exception&) {
    return -1;
  }
}

#ifdef HAE_ACCELERATOR
std::map<void*, Buffer>& buffers() {
  static std::map<void*, Buffer> all;
  return all;
}

void* allocate(std::int64_t bytes) {
  try {
    Buffer buffer(bytes);
    void* memory = buffer.data();
    buffers()[memory] = std::move(buffer);
    return memory;
  } catch (const DeviceError&) {
    return nullptr;
  }
}

std::int32_t copied(HAE_GPU(Error_t) status) {
  return status == HAE_GPU(Success) ? 0 : static_cast<std::int32_t>(status);
}

hae_memory device_memory() {
  HAE_GPU(Stream_t) streams[2] = {};
  for (auto& stream : streams) {
    static_cast<void>(HAE_GPU(StreamCreateWithFlags)(&stream, HAE_GPU(StreamNonBlocking)));
  }
  hae_memory memory{};
  memory.allocate = allocate;
  memory.release = [](void* block) { buffers().erase(block); };
  memory.copy_in = [](void* to, const void* from, std::int64_t bytes, void* stream) {
    return copied(HAE_GPU(MemcpyAsync)(to, from, static_cast<std::size_t>(bytes), HAE_GPU(MemcpyHostToDevice),
                                       static_cast<HAE_GPU(Stream_t)>(stream)));
  };
  memory.copy_out = [](void* to, const void* from, std::int64_t bytes, void* stream) {
    return copied(HAE_GPU(MemcpyAsync)(to, from, static_cast<std::size_t>(bytes), HAE_GPU(MemcpyDeviceToHost),
                                       static_cast<HAE_GPU(Stream_t)>(stream)));
  };
  memory.synchronize = [](void* stream) {
    return copied(HAE_GPU(StreamSynchronize)(static_cast<HAE_GPU(Stream_t)>(stream)));
  };
  memory.device_type = std::string_view(HAE_ACCELERATOR) == "cuda" ? 2 : 10;
  memory.stream = streams[0];
  memory.other_stream = streams[1];
  return memory;
}
#else
hae_memory device_memory() {
  return {};
}
#endif

}  // namespace
}  // namespace hae::device

const hae_kernels* hae_kernels_table() {
  using namespace hae::device;
  static const hae_kernels table = [] {
    hae_kernels all{};
    all.abi = HAE_KERNELS_ABI;
    all.accumulation = HAE_FLOAT32;
    all.name = "hae device";
    all.memory = device_memory();
    all.workspace_bytes = workspace_bytes;
    all.add_scores = caught<hae_add_scores_arguments, call_add_scores>;
    all.select_lowest = caught<hae_select_lowest_arguments, call_select_lowest>;
    all.prune = caught<hae_prune_arguments, call_prune>;
    all.compact = caught<hae_compact_arguments, call_compact>;
    all.attend = caught<hae_attend_arguments, call_attend>;
    return all;
  }();
  return &table;
}
