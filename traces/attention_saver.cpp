#include "traces/attention_saver.hpp"

#include <algorithm>
#include <array>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "sim/trace.hpp"
#include "traces/hdf5.hpp"
#include "traces/import_steps.hpp"
#include "traces/layout.hpp"
#include "traces/message.hpp"
#include "traces/trace_writer.hpp"

namespace hae::traces {
namespace {

constexpr Numbering kLayers{.prefix = "layer_", .most = kMostNumbered};
constexpr Numbering kBatches{.prefix = "batch_", .most = kMostNumbered};
constexpr Numbering kHeads{.prefix = "head_", .most = kMostHeads};

/// Rows are read this many numbers at a time, or more where a chunk is higher.
constexpr Index kBandFloats = Index{1} << 18;

/// Hands out the rows of a square dataset in turn. It reads bands of whole chunks, so that each chunk is
/// unpacked once whatever its shape.
class RowReader {
 public:
  explicit RowReader(const hdf5::Dataset& dataset) : dataset_(dataset), tokens_(dataset.shape()[0]) {
    const Index chunk_rows = dataset.chunk().empty() ? 1 : dataset.chunk()[0];
    const Index chunks = std::max<Index>(1, kBandFloats / tokens_ / chunk_rows);
    band_rows_ = std::min(tokens_, chunks * chunk_rows);
    band_.resize(static_cast<std::size_t>(band_rows_ * tokens_));
  }

  std::span<const float> next() {
    const Index in_band = next_ % band_rows_;
    if (in_band == 0) {
      const Index rows = std::min(band_rows_, tokens_ - next_);
      dataset_.read(std::array<Index, 2>{next_, 0}, std::array<Index, 2>{rows, tokens_},
                    std::span(band_).first(static_cast<std::size_t>(rows * tokens_)));
    }
    ++next_;
    return std::span(band_).subspan(static_cast<std::size_t>(in_band * tokens_),
                                    static_cast<std::size_t>(tokens_));
  }

 private:
  const hdf5::Dataset& dataset_;
  Index tokens_;
  Index band_rows_ = 0;
  std::vector<float> band_;
  Index next_ = 0;
};

class Importer {
 public:
  Importer(const std::filesystem::path& from, const AttentionSaverOptions& options)
      : file_(from, options.lock, true), options_(options), own_name_(from.stem().string()) {}

  void run(const std::filesystem::path& to) {
    file_.walk([this](const hdf5::Group& root) { read_structure(root); });
    apply_options();
    TraceWriter writer(to, options_.sequence.origin);
    writer.begin_sequence(info_, {}, type_);
    for (Index layer = 0; layer < info_.layers; ++layer) {
      for (Index head = 0; head < info_.query_heads; ++head) {
        copy_head(writer, layer, head);
      }
    }
    writer.finish();
  }

 private:
  [[nodiscard]] hdf5::Group batch_group(Index layer) const {
    return file_.root().group(kLayers.name(layer)).group(kBatches.name(batch_));
  }

  [[nodiscard]] hdf5::Dataset open_head(const hdf5::Group& batch, Index head) const {
    return batch.dataset(kHeads.name(head), hdf5::Content::payload);
  }

  /// Opens every dataset once: what is missing or of another shape is found before anything is written.
  void read_structure(const hdf5::Group& root) {
    info_.payload = Payload::attention;
    info_.layers =
        count_numbered(kLayers, numbers_of(kLayers, root.names(), file_.name()), file_.name() + ":");
    batch_ = find_batch();
    for (Index layer = 0; layer < info_.layers; ++layer) {
      const hdf5::Group batch = batch_group(layer);
      const std::vector<Index> heads = numbers_of(kHeads, batch.names(), batch.where());
      if (layer == 0) {
        info_.query_heads = count_numbered(kHeads, heads, batch.where());
        read_shape(open_head(batch, 0));
      }
      expect_numbered(kHeads, heads, info_.query_heads, batch.where());
      for (Index head = 0; head < info_.query_heads; ++head) {
        check_alike(open_head(batch, head));
      }
    }
  }

  /// The batch that was asked for, or the only one; it must be in every layer.
  [[nodiscard]] Index find_batch() const {
    std::vector<std::vector<Index>> of_layers;
    std::set<Index> all;
    for (Index layer = 0; layer < info_.layers; ++layer) {
      const hdf5::Group group = file_.root().group(kLayers.name(layer));
      of_layers.push_back(numbers_of(kBatches, group.names(), group.where()));
      all.insert(of_layers.back().begin(), of_layers.back().end());
    }
    if (all.empty()) {
      refuse(file_.name(), ":/layer_0: holds nothing, expected batch_0; record it again");
    }
    if (!options_.batch && all.size() > 1) {
      throw ConfigError(message("batch is missing, expected one of the ", all.size(), " in ", file_.name(),
                                ", such as ", *all.begin(), "; each is a sequence of its own"));
    }
    const Index batch = options_.batch.value_or(*all.begin());
    if (!all.contains(batch)) {
      throw ConfigError(message("batch is ", batch, ", expected one of those in ", file_.name(), ", such as ",
                                *all.begin()));
    }
    for (std::size_t layer = 0; layer < of_layers.size(); ++layer) {
      if (!std::binary_search(of_layers[layer].begin(), of_layers[layer].end(), batch)) {
        refuse(file_.name(), ":/layer_", layer, "/batch_", batch,
               ": missing, expected it in every layer; record every layer");
      }
    }
    return batch;
  }

  void read_shape(const hdf5::Dataset& first) {
    if (first.shape().size() != 2 || first.shape()[0] != first.shape()[1] || first.shape()[0] < 1) {
      refuse(first.where(), ": found shape ", first.shape(),
             ", expected a square [tokens, tokens]; record it again with save_statistic_only=False");
    }
    info_.tokens = first.shape()[0];
    type_ = first.float_type();
    info_.row_sum_tolerance = row_sum_tolerance(type_);
  }

  void check_alike(const hdf5::Dataset& head) const {
    const std::vector<Index> square{info_.tokens, info_.tokens};
    if (head.shape() != square) {
      refuse(head.where(), ": found shape ", head.shape(), ", expected ", square,
             " like /layer_0's head_0; record all heads at once");
    }
    if (head.float_type() != type_) {
      refuse(head.where(), ": found ", head.type_name(), ", expected ", name_of(type_),
             " like /layer_0's head_0; record all heads at once");
    }
  }

  void apply_options() {
    info_.kv_heads = options_.kv_heads.value_or(info_.query_heads);
    if (info_.kv_heads < 1 || info_.query_heads % info_.kv_heads != 0) {
      throw ConfigError(message("kv_heads is ", info_.kv_heads, ", expected a divisor of the ",
                                info_.query_heads, " query heads in ", file_.name()));
    }
    if (options_.head_dim) {
      if (*options_.head_dim < 1 || *options_.head_dim > kMostDimensions) {
        throw ConfigError(message("head_dim is ", *options_.head_dim, ", expected 1 .. ", kMostDimensions));
      }
      info_.head_dim = options_.head_dim;
      info_.element_bytes = bytes_of(type_);
    }
    info_.scale = default_scale(info_);
    apply(options_.sequence, own_name_, info_);
    check_limits(info_, file_.name());
    info_.masks.resize(static_cast<std::size_t>(info_.layers));
    check_info(info_, file_.name());
  }

  void copy_head(TraceWriter& writer, Index layer, Index head) const {
    const hdf5::Dataset dataset = open_head(batch_group(layer), head);
    check_alike(dataset);
    RowReader rows(dataset);
    write_attention_head(writer, info_, layer, head,
                         {[&] { return rows.next(); }, dataset.where() + "[",
                          "record it again with compute_softmax=True, and in float32 if its rows are long"});
  }

  hdf5::File file_;
  const AttentionSaverOptions& options_;
  std::string own_name_;
  SequenceInfo info_;
  FloatType type_ = FloatType::float16;
  Index batch_ = 0;
};

}  // namespace

void import_attention_saver(const std::filesystem::path& from, const std::filesystem::path& to,
                            const AttentionSaverOptions& options) {
  Importer(from, options).run(to);
}

}  // namespace hae::traces
