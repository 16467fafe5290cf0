#include "python/engine/write_trace.hpp"

#include <set>

#include "sim/errors.hpp"
#include "sim/mask.hpp"
#include "sim/text.hpp"
#include "traces/check.hpp"
#include "traces/trace_writer.hpp"

namespace hae::python {
namespace {

using traces::LayerArray;

/// Before anything is written: what the writer takes for a mistake of its caller.
void check_writable(const std::vector<const SequenceHandle*>& sequences, const std::string& path) {
  std::set<std::string> names;
  for (const SequenceHandle* sequence : sequences) {
    const SequenceInfo& info = sequence->info();
    if (!names.insert(info.name).second) {
      throw TraceError(path + ": two sequences are named '" + info.name + "'; give each a name of its own");
    }
    if (info.payload == Payload::qkv && !info.has_values) {
      throw TraceError(sequence->where() + " has q and k but no v, which a trace file must hold; give v");
    }
  }
  if (sequences.empty()) {
    throw TraceError(path + ": no sequence is given; a trace holds at least one");
  }
}

const char* name_of(LayerArray array) {
  switch (array) {
    case LayerArray::queries:
      return "q";
    case LayerArray::keys:
      return "k";
    case LayerArray::values:
      return "v";
    default:
      return "attention";
  }
}

/// One layer of one sequence, checked as it will be read: after rounding.
class LayerCopy {
 public:
  LayerCopy(traces::TraceWriter& writer, const SequenceHandle& sequence, Index layer, LayerPayload& payload,
            traces::FloatType type)
      : writer_(writer),
        info_(sequence.info()),
        where_(sequence.where() + ", layer " + std::to_string(layer)),
        layer_(layer),
        payload_(payload),
        type_(type),
        mask_(info_, layer) {}

  void write() {
    if (info_.payload == Payload::qkv) {
      write_queries();
      write_heads(LayerArray::keys, payload_.keys());
    } else {
      write_prompt();
      write_decode();
    }
    if (info_.has_values) {
      write_heads(LayerArray::values, payload_.values());
    }
  }

 private:
  void write_queries() {
    std::vector<float> numbers(at(info_.query_heads * info_.tokens * *info_.head_dim));
    const View<float, 3> queries{numbers.data(), {info_.query_heads, info_.tokens, *info_.head_dim}};
    payload_.read_queries({0, info_.tokens}, queries);
    write_heads(LayerArray::queries, queries);
  }

  void write_prompt() {
    const auto rows = static_cast<Index>(info_.prompt_rows.size());
    std::vector<float> numbers(at(info_.query_heads * rows * info_.prompt));
    const View<float, 3> prompt{numbers.data(), {info_.query_heads, rows, info_.prompt}};
    payload_.read_prompt_attention({0, rows}, prompt);
    for (Index h = 0; h < info_.query_heads; ++h) {
      for (Index r = 0; r < rows; ++r) {
        check_row(h, info_.prompt_rows[at(r)], prompt[h][r].span());
      }
    }
    write_heads(LayerArray::prompt, prompt);
  }

  /// Rows of P + 1, P + 2, ... keys, one after another, of each head.
  void write_decode() {
    std::vector<std::vector<float>> heads(at(info_.query_heads));
    for (Index step = 1; step <= info_.steps(); ++step) {
      const Index keys = info_.prompt + step;
      std::vector<float> numbers(at(info_.query_heads * keys));
      const View<float, 2> rows{numbers.data(), {info_.query_heads, keys}};
      payload_.read_decode_attention(step, rows);
      for (Index h = 0; h < info_.query_heads; ++h) {
        check_row(h, keys - 1, rows[h].span());
        heads[at(h)].insert(heads[at(h)].end(), rows[h].data(), rows[h].data() + keys);
      }
    }
    for (Index h = 0; h < info_.query_heads && info_.steps() > 0; ++h) {
      writer_.write_head(layer_, LayerArray::decode, h, heads[at(h)]);
    }
  }

  void write_heads(LayerArray array, const View<const float, 3>& numbers) {
    for (Index h = 0; h < numbers.extent(0); ++h) {
      const std::span<const float> head{numbers[h].data(), at(numbers[h].size())};
      if (const std::optional<Index> place = traces::first_not_finite(rounded(head))) {
        const Index width = numbers.extent(2);
        throw TraceError(where_ + ", " + name_of(array) + "[" + std::to_string(h) + ", " +
                         std::to_string(*place / width) + ", " + std::to_string(*place % width) +
                         "]: found " + shortest(head[at(*place)]) + ", expected a finite number that " +
                         traces::name_of(type_) + " can hold; correct it, or choose another dtype");
      }
      writer_.write_head(layer_, array, h, head);
    }
  }

  void check_row(Index head, Index query, std::span<const float> row) {
    mask_.visible(query, visible_);
    const double tolerance = traces::row_sum_tolerance(type_);
    if (const std::optional<std::string> wrong = traces::row_violation(rounded(row), visible_, tolerance)) {
      throw TraceError(where_ + ", query head " + std::to_string(head) + ", row " + std::to_string(query) +
                       ": " + *wrong + "; correct it, or choose another dtype");
    }
  }

  /// What a reader will find.
  std::span<const float> rounded(std::span<const float> values) {
    if (type_ == traces::FloatType::float32) {
      return values;
    }
    codes_.resize(values.size() * at(traces::bytes_of(type_)));
    rounded_.resize(values.size());
    traces::encode(type_, values, codes_);
    traces::decode(type_, false, codes_, rounded_);
    return rounded_;
  }

  traces::TraceWriter& writer_;
  const SequenceInfo& info_;
  std::string where_;
  Index layer_;
  LayerPayload& payload_;
  traces::FloatType type_;
  Mask mask_;
  std::vector<Range> visible_;
  std::vector<std::byte> codes_;
  std::vector<float> rounded_;
};

}  // namespace

void write_trace(const std::string& path, const std::vector<const SequenceHandle*>& sequences,
                 traces::FloatType type, const traces::TraceOrigin& origin,
                 const std::function<void()>& keep_going) {
  check_writable(sequences, path);
  traces::TraceWriter writer(path, origin);
  for (const SequenceHandle* sequence : sequences) {
    const SequenceInfo& info = sequence->info();
    writer.begin_sequence(info, sequence->details(), type);
    for (Index layer = 0; layer < info.layers; ++layer) {
      keep_going();
      const std::unique_ptr<LayerPayload> payload = sequence->sequence().layer(layer);
      LayerCopy(writer, *sequence, layer, *payload, type).write();
    }
  }
  writer.finish();
}

}  // namespace hae::python
