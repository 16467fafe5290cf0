#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "python/engine/arrays.hpp"
#include "sim/trace.hpp"
#include "traces/details.hpp"
#include "traces/float16.hpp"

namespace hae::python {

/// One array a layer.
using LayerArrays = std::vector<FloatArray>;

/// A sequence as arrays: queries and keys with or without values, or attention with or without values.
struct Arrays {
  LayerArrays queries;    ///< [layers][query_heads, T, head_dim]
  LayerArrays keys;       ///< [layers][kv_heads, T, head_dim]
  LayerArrays values;     ///< [layers][kv_heads, T, head_dim]
  LayerArrays attention;  ///< [layers][query_heads, T, T]
};

/// What the arrays do not say about themselves. What is absent has a default, or follows from them.
struct ArraysInfo {
  std::string name;
  std::optional<std::string> group;
  Index prompt = 0;
  std::optional<double> scale;
  std::optional<Index> kv_heads;
  std::optional<Index> head_dim;
  Index element_bytes = 4;
  traces::FloatType stored = traces::FloatType::float32;  ///< what the numbers were before they were float32
  std::optional<std::vector<Index>> window;               ///< [layers]
  std::optional<std::vector<Index>> image;                ///< [T]
  std::vector<std::string> token;                         ///< [T], or empty
};

/// A trace of one sequence whose arrays Python made. They are viewed, and live as long as this does.
class ArrayTrace final : public TraceSource {
 public:
  /// throws  TraceError when the parts do not fit together
  ArrayTrace(Arrays arrays, const ArraysInfo& more);

  [[nodiscard]] Index sequences() const override { return 1; }
  [[nodiscard]] std::unique_ptr<Sequence> open(Index index) override;
  [[nodiscard]] std::string name() const override { return "arrays"; }
  [[nodiscard]] const traces::SequenceDetails& details() const { return details_; }

 private:
  struct Content;
  class ArraySequence;
  class ArrayLayer;

  std::shared_ptr<const Content> content_;
  traces::SequenceDetails details_;
};

}  // namespace hae::python
