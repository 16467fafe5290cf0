#include "traces/check.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "sim/mask.hpp"
#include "sim/row_rule.hpp"
#include "traces/message.hpp"

namespace hae::traces {
namespace {

/// A block of rows takes about this much memory.
constexpr Index kBlockFloats = Index{1} << 23;

Index rows_per_block(Index floats_per_row) {
  return std::max<Index>(1, kBlockFloats / std::max<Index>(1, floats_per_row));
}

/// Checks one sequence and adds to the report.
class SequenceCheck {
 public:
  SequenceCheck(Sequence& sequence, std::string where, Index most_messages, CheckReport& report)
      : sequence_(sequence),
        info_(sequence.info()),
        where_(std::move(where)),
        most_(most_messages),
        report_(report) {}

  void run(const std::function<void()>& keep_going) {
    for (Index layer = 0; layer < info_.layers; ++layer) {
      if (keep_going) {
        keep_going();
      }
      const std::unique_ptr<LayerPayload> payload = sequence_.layer(layer);
      if (info_.payload == Payload::qkv) {
        check_finite("k", layer, 0, payload->keys());
        check_queries(layer, *payload);
      } else {
        check_prompt(layer, *payload);
        check_decode(layer, *payload);
      }
      if (info_.has_values) {
        check_finite("v", layer, 0, payload->values());
      }
    }
  }

 private:
  template <typename... Parts>
  void add(const Parts&... parts) {
    if (report_.total++ < most_) {
      report_.violations.push_back(message(where_, parts...));
    }
  }

  /// array [heads, tokens, head_dim]; its first token is at position `first`.
  void check_finite(const char* name, Index layer, Index first, View<const float, 3> array) {
    for (Index head = 0; head < array.extent(0); ++head) {
      for (Index token = 0; token < array.extent(1); ++token) {
        const std::span<const float> row = array[head][token].span();
        if (const std::optional<Index> place = first_not_finite(row)) {
          add(", layer ", layer, ", ", *name == 'q' ? "query head " : "KV head ", head, ", position ",
              first + token, ": ", name, "[", *place, "] is ", row[static_cast<std::size_t>(*place)],
              ", expected a finite number");
        }
      }
    }
  }

  void check_queries(Index layer, LayerPayload& payload) {
    const Index head_dim = *info_.head_dim;
    const Index block = rows_per_block(info_.query_heads * head_dim);
    std::vector<float> memory;
    for (Index begin = 0; begin < info_.tokens; begin += block) {
      const Range rows{begin, std::min(info_.tokens, begin + block)};
      const View<float, 3> queries = view(memory, info_.query_heads, rows.size(), head_dim);
      payload.read_queries(rows, queries);
      check_finite("q", layer, begin, queries);
    }
  }

  void check_prompt(Index layer, LayerPayload& payload) {
    const Mask mask(info_, layer);
    const auto stored = static_cast<Index>(info_.prompt_rows.size());
    const Index block = rows_per_block(info_.query_heads * info_.prompt);
    std::vector<float> memory;
    for (Index begin = 0; begin < stored; begin += block) {
      const Range rows{begin, std::min(stored, begin + block)};
      const View<float, 3> attention = view(memory, info_.query_heads, rows.size(), info_.prompt);
      payload.read_prompt_attention(rows, attention);
      for (Index row = 0; row < rows.size(); ++row) {
        const Index query = info_.prompt_rows[static_cast<std::size_t>(begin + row)];
        mask.visible(query, visible_);
        for (Index head = 0; head < info_.query_heads; ++head) {
          check_row(layer, head, query, attention[head][row].span());
        }
      }
    }
  }

  void check_decode(Index layer, LayerPayload& payload) {
    const Mask mask(info_, layer);
    std::vector<float> memory(static_cast<std::size_t>(info_.query_heads * info_.tokens));
    for (Index step = 1; step <= info_.steps(); ++step) {
      const Index query = info_.prompt + step - 1;
      const View<float, 2> rows(memory.data(), {info_.query_heads, query + 1});
      payload.read_decode_attention(step, rows);
      mask.visible(query, visible_);
      for (Index head = 0; head < info_.query_heads; ++head) {
        check_row(layer, head, query, rows[head].span());
      }
    }
  }

  void check_row(Index layer, Index head, Index query, std::span<const float> row) {
    ++report_.rows;
    if (const std::optional<std::string> wrong = row_violation(row, visible_, info_.row_sum_tolerance)) {
      add(", layer ", layer, ", query head ", head, ", row ", query, ": ", *wrong);
    } else if (is_masked_row(row)) {
      ++report_.masked_rows;
    }
  }

  static View<float, 3> view(std::vector<float>& memory, Index heads, Index rows, Index width) {
    memory.resize(std::max(memory.size(), static_cast<std::size_t>(heads * rows * width)));
    return {memory.data(), {heads, rows, width}};
  }

  Sequence& sequence_;
  const SequenceInfo& info_;
  std::string where_;
  Index most_;
  CheckReport& report_;
  std::vector<Range> visible_;
};

}  // namespace

std::optional<Index> first_not_finite(std::span<const float> values) {
  const auto place =
      std::find_if(values.begin(), values.end(), [](float value) { return !std::isfinite(value); });
  return place == values.end() ? std::nullopt : std::optional<Index>(place - values.begin());
}

bool is_masked_row(std::span<const float> row) {
  return std::all_of(row.begin(), row.end(), [](float value) { return value == 0; });
}

std::optional<std::string> row_violation(std::span<const float> row, std::span<const Range> visible,
                                         double tolerance) {
  const std::optional<RowViolation> violation = find_row_violation(row, visible, tolerance);
  if (!violation) {
    return std::nullopt;
  }
  if (violation->kind == RowViolation::Kind::sum) {
    return message("sums to ", text(violation->sum), ", expected 1 within ", text(tolerance),
                   ", or a row of zeros");
  }
  const bool forbidden = violation->kind == RowViolation::Kind::forbidden;
  return message("key ", violation->key, " has weight ", row[static_cast<std::size_t>(violation->key)],
                 forbidden ? ", expected 0 because the mask forbids it" : ", expected a finite number >= 0");
}

CheckReport check_trace(TraceSource& source, Index most_messages, const std::function<void()>& keep_going) {
  CheckReport report;
  for (Index index = 0; index < source.sequences(); ++index) {
    try {
      const std::unique_ptr<Sequence> sequence = source.open(index);
      const std::string where =
          message(source.name(), ": sequence ", index, " ", in_quotes(sequence->info().name));
      SequenceCheck(*sequence, where, most_messages, report).run(keep_going);
    } catch (const TraceError& error) {
      if (report.total++ < most_messages) {
        report.violations.emplace_back(error.what());
      }
    }
  }
  return report;
}

CheckReport check_file(TraceFile& file, Index most_messages, const std::function<void()>& keep_going) {
  CheckReport report = check_trace(file, most_messages, keep_going);
  const bool opens = report.total == 0;  // What cannot be opened is a violation already.
  for (Index index = 0; opens && index < file.sequences(); ++index) {
    for (const std::string& violation : file.optional_violations(index)) {
      if (report.total++ < most_messages) {
        report.violations.push_back(violation);
      }
    }
  }
  return report;
}

}  // namespace hae::traces
