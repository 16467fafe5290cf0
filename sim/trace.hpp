#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sim/view.hpp"

namespace hae {

/// How the attention of a trace was stored: as queries, keys and values to recompute it from, or as
/// probabilities.
enum class Payload { qkv, attention };

/// What one layer's mask allows besides causality.
struct MaskRule {
  /// 0: none. W > 0: query i sees key j only when i - j < W (its own key included).
  Index window = 0;

  /// Whether prompt tokens of one image also see each other, and whether the window bounds that too.
  enum class Bidirectional { none, image, image_in_window };
  Bidirectional bidirectional = Bidirectional::none;

  bool operator==(const MaskRule&) const = default;
};

/// Positions [begin, end).
struct Range {
  Index begin = 0;
  Index end = 0;

  [[nodiscard]] Index size() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

/// How the rotary embedding turns the pairs of a head's dimensions.
struct Rotary {
  std::vector<double> inverse_frequency;  ///< [head_dim / 2] radians a position
  bool interleaved = false;               ///< neighbours make a pair; else i and i + head_dim / 2
};

/// What is known of one recorded sequence before any payload is read (traces/FORMAT.md).
struct SequenceInfo {
  std::string name;
  std::string group;  ///< sequences that share it are not independent
  Payload payload = Payload::qkv;
  Index layers = 0;
  Index query_heads = 0;
  Index kv_heads = 0;
  std::optional<Index> head_dim;          ///< absent: nothing is known in bytes
  std::optional<Index> element_bytes;     ///< bytes of one cached number
  Index tokens = 0;                       ///< T
  Index prompt = 0;                       ///< P, 1 <= P <= T
  Index generated = 0;                    ///< tokens the model produced
  double scale = 1.0;                     ///< logit = scale * q.k
  bool has_values = false;                ///< whether every layer carries V
  bool has_embedding_similarity = false;  ///< inner products of the prompt's input embeddings
  double row_sum_tolerance = 1e-4;        ///< attention: a stored row sums to 1 within this (by stored type)
  std::optional<Rotary> rotary;           ///< of a trace that has queries before rotary embedding
  std::vector<MaskRule> masks;            ///< [layers]
  std::vector<Index> image;               ///< [T] picture of the token, -1 for text
  std::vector<Index> prompt_rows;         ///< stored prompt rows, ascending; all of them in a qkv payload

  [[nodiscard]] Index steps() const { return tokens - prompt; }
  [[nodiscard]] Index group_heads() const { return query_heads / kv_heads; }
  [[nodiscard]] bool is_visual(Index position) const {
    return image[static_cast<std::size_t>(position)] >= 0;
  }
  [[nodiscard]] bool has_all_prompt_rows() const { return static_cast<Index>(prompt_rows.size()) == prompt; }
};

/// One layer of one sequence, opened for reading. Views stay valid while the object lives.
class LayerPayload {
 public:
  virtual ~LayerPayload() = default;

  /// qkv: K after rotary embedding [kv_heads, T, head_dim].
  [[nodiscard]] virtual View<const float, 3> keys() = 0;

  /// V [kv_heads, T, head_dim]; empty when the trace has none.
  [[nodiscard]] virtual View<const float, 3> values() = 0;

  /// Of layer 0: inner products of its inputs, the prompt's embeddings,
  /// [visual prompt tokens, text prompt tokens], both in order of position; empty when the trace has none.
  [[nodiscard]] virtual View<const double, 2> embedding_similarity() { return {}; }

  /// qkv: Q after rotary embedding of the positions `rows`, written to out [query_heads, rows, head_dim].
  virtual void read_queries(Range rows, View<float, 3> out) = 0;

  /// With SequenceInfo::rotary: the same queries before rotary embedding.
  virtual void read_unrotated_queries(Range /*rows*/, View<float, 3> /*out*/) { HAE_EXPECTS(false); }

  /// attention: stored prompt rows with indices `rows` into SequenceInfo::prompt_rows,
  /// written to out [query_heads, rows, P].
  virtual void read_prompt_attention(Range rows, View<float, 3> out) = 0;

  /// attention: the row of decode step `step` >= 1, written to out [query_heads, P + step].
  virtual void read_decode_attention(Index step, View<float, 2> out) = 0;
};

/// One sequence, opened for reading. Layers may be opened, and each layer's payload read, on several threads
/// at once.
class Sequence {
 public:
  virtual ~Sequence() = default;
  [[nodiscard]] virtual const SequenceInfo& info() const = 0;
  [[nodiscard]] virtual std::unique_ptr<LayerPayload> layer(Index layer) = 0;
};

/// A source of sequences: a trace file, or arrays in memory.
class TraceSource {
 public:
  virtual ~TraceSource() = default;
  [[nodiscard]] virtual Index sequences() const = 0;
  [[nodiscard]] virtual std::unique_ptr<Sequence> open(Index index) = 0;

  /// Where it came from, as messages name it.
  [[nodiscard]] virtual std::string name() const = 0;
};

/// Throws TraceError when an info contradicts itself: `where` begins the message.
void check_info(const SequenceInfo& info, const std::string& where);

}  // namespace hae
