#include "traces/synth.hpp"

#include <algorithm>
#include <cmath>

#include "tests/traces/fixtures.hpp"
#include "traces/check.hpp"

namespace hae::traces::test {
namespace {

SynthOptions small(SynthKind kind) {
  SynthOptions options;
  options.kind = kind;
  options.layers = 2;
  options.query_heads = 4;
  options.kv_heads = 2;
  options.head_dim = 16;
  options.prompt = 192;
  options.tokens = 256;
  options.images = 2;
  options.image_tokens = 48;
  return options;
}

/// A synthetic trace, and its attention in plain double arithmetic.
class Synthetic {
 public:
  explicit Synthetic(const SynthOptions& options) {
    write_synthetic_trace(scratch_ / "trace.h5", options);
    trace_.emplace(scratch_ / "trace.h5");
    sequence_ = trace_->open(0);
    for (Index layer = 0; layer < info().layers; ++layer) {
      layers_.push_back(sequence_->layer(layer));
    }
  }

  [[nodiscard]] const SequenceInfo& info() const { return sequence_->info(); }
  [[nodiscard]] TraceFile& trace() { return *trace_; }
  [[nodiscard]] std::string bytes() const { return read_bytes(scratch_ / "trace.h5"); }

  /// Weights of the keys up to `query`; they sum to 1.
  [[nodiscard]] std::vector<double> row(Index layer, Index head, Index query) {
    LayerPayload& payload = *layers_[static_cast<std::size_t>(layer)];
    const Index head_dim = *info().head_dim;
    std::vector<float> q(static_cast<std::size_t>(info().query_heads * head_dim));
    payload.read_queries({query, query + 1}, {q.data(), {info().query_heads, 1, head_dim}});
    const View<const float, 2> keys = payload.keys()[head / info().group_heads()];
    std::vector<double> weights;
    for (Index key = 0; key <= query; ++key) {
      double product = 0;
      for (Index d = 0; d < head_dim; ++d) {
        product += static_cast<double>(q[static_cast<std::size_t>(head * head_dim + d)]) *
                   static_cast<double>(keys[key][d]);
      }
      weights.push_back(info().scale * product);
    }
    const double most = *std::max_element(weights.begin(), weights.end());
    double sum = 0;
    for (double& weight : weights) {
      weight = std::exp(weight - most);
      sum += weight;
    }
    for (double& weight : weights) {
      weight /= sum;
    }
    return weights;
  }

  /// The key dimension that carries ln(weight).
  [[nodiscard]] double log_weight(Index layer, Index kv_head, Index token) {
    return static_cast<double>(layers_[static_cast<std::size_t>(layer)]->keys()[kv_head][token][0]);
  }

  template <typename Visit>
  void for_each_row(Index first, const Visit& visit) {
    for (Index layer = 0; layer < info().layers; ++layer) {
      for (Index head = 0; head < info().query_heads; ++head) {
        for (Index query = first; query < info().tokens; query += 7) {
          visit(row(layer, head, query));
        }
      }
    }
  }

 private:
  Scratch scratch_;
  std::optional<TraceFile> trace_;
  std::unique_ptr<Sequence> sequence_;
  std::vector<std::unique_ptr<LayerPayload>> layers_;
};

TEST(Synth, SinksTakeTwoThirdsOfEveryRow) {
  Synthetic synthetic(small(SynthKind::sinks));
  synthetic.for_each_row(
      3, [](const std::vector<double>& row) { EXPECT_GT(row[0] + row[1] + row[2] + row[3], 2.0 / 3); });
}

TEST(Synth, OneTokenIn64IsAHeavyHitterOf256TimesTheWeight) {
  SynthOptions options = small(SynthKind::heavy_hitters);
  options.tokens = options.prompt = 4096;
  options.head_dim = 8;
  Synthetic synthetic(options);
  Index hitters = 0;
  double mass = 0;
  const std::vector<double> last = synthetic.row(0, 0, options.tokens - 1);
  for (Index token = 0; token < options.tokens; ++token) {
    const double log_weight = synthetic.log_weight(0, 0, token);
    if (log_weight != 0) {
      EXPECT_NEAR(log_weight, std::log(256), 1e-6);
      ++hitters;
      mass += last[static_cast<std::size_t>(token)];
    }
  }
  // Binomial(4096, 1/64): mean 64, standard deviation 7.9; four of them either way.
  EXPECT_NEAR(static_cast<double>(hitters), 64, 32);
  // Expected share: 64 * 256 / (64 * 256 + 4032) = 0.80 at the mean count, 0.67 at half of it.
  EXPECT_GT(mass, 0.6);
}

TEST(Synth, HeavyHittersDifferBetweenLayersAndHeads) {
  SynthOptions options = small(SynthKind::heavy_hitters);
  options.tokens = options.prompt = 1024;
  Synthetic synthetic(options);
  const auto hitters = [&](Index layer, Index head) {
    std::vector<bool> is_hitter;
    for (Index token = 0; token < options.tokens; ++token) {
      is_hitter.push_back(synthetic.log_weight(layer, head, token) != 0);
    }
    return is_hitter;
  };
  EXPECT_NE(hitters(0, 0), hitters(0, 1));
  EXPECT_NE(hitters(0, 0), hitters(1, 0));
}

TEST(Synth, OneVisualTokenIn16WeighsAsMuchAsTextAndTheRestNearlyNothing) {
  SynthOptions options = small(SynthKind::image_sparse);
  options.prompt = options.tokens = 1400;
  options.images = 2;
  options.image_tokens = 512;
  Synthetic synthetic(options);
  Index salient = 0;
  for (Index token = 0; token < options.tokens; ++token) {
    const double log_weight = synthetic.log_weight(0, 0, token);
    EXPECT_EQ(log_weight, synthetic.log_weight(1, 1, token));  // the same tokens in every layer and head
    if (!synthetic.info().is_visual(token)) {
      EXPECT_EQ(log_weight, 0);
    } else if (log_weight == 0) {
      ++salient;
    } else {
      EXPECT_NEAR(log_weight, -std::log(512), 1e-6);
    }
  }
  // Binomial(1024, 1/16): mean 64, standard deviation 7.7; four of them either way.
  EXPECT_NEAR(static_cast<double>(salient), 64, 31);
}

TEST(Synth, UniformGivesEveryKeyTheSameWithinATenth) {
  Synthetic synthetic(small(SynthKind::uniform));
  bool differs = false;
  synthetic.for_each_row(0, [&](const std::vector<double>& row) {
    for (const double weight : row) {
      EXPECT_NEAR(weight * static_cast<double>(row.size()), 1, 0.1);
      differs = differs || weight != row[0];
    }
  });
  EXPECT_TRUE(differs);
}

TEST(Synth, AllTiesGivesEveryKeyExactlyTheSame) {
  Synthetic synthetic(small(SynthKind::all_ties));
  synthetic.for_each_row(0, [](const std::vector<double>& row) {
    EXPECT_EQ(std::count(row.begin(), row.end(), row[0]), static_cast<std::ptrdiff_t>(row.size()));
  });
}

TEST(Synth, DecayingFallsByFivePerCentAToken) {
  Synthetic synthetic(small(SynthKind::decaying));
  double slope = 0;
  Index rows = 0;
  synthetic.for_each_row(200, [&](const std::vector<double>& row) {
    // The mean of ln(newer / older) over neighbours telescopes to the two ends of the row.
    slope += std::log(row.back() / row.front()) / static_cast<double>(row.size() - 1);
    ++rows;
  });
  // Noise of one row: sqrt(2) * 0.5 / 200 = 0.0035; of the mean over 64 rows a tenth of that.
  EXPECT_NEAR(slope / static_cast<double>(rows), 0.05, 0.003);
}

TEST(Synth, PutsTextBeforeBetweenAndAfterPictures) {
  Synthetic synthetic(small(SynthKind::sinks));
  std::vector<Index> expected;
  // 192 prompt tokens less 2 * 48 leave 96: three pieces of 32.
  for (const Index image : {-1, 0, -1, 1, -1}) {
    expected.insert(expected.end(), image < 0 ? 32u : 48u, image);
  }
  expected.resize(256, -1);
  EXPECT_EQ(synthetic.info().image, expected);
  SynthOptions only_image = small(SynthKind::sinks);
  only_image.images = 1;
  only_image.image_tokens = only_image.prompt;
  EXPECT_TRUE(Synthetic(only_image).info().is_visual(0));
  SynthOptions only_text = small(SynthKind::sinks);
  only_text.images = 0;
  EXPECT_EQ(Synthetic(only_text).info().image, std::vector<Index>(256, -1));
}

TEST(Synth, EqualOptionsGiveEqualBytes) {
  for (const std::string& name : synth_kind_names()) {
    const SynthOptions options = small(parse_synth_kind(name));
    EXPECT_EQ(Synthetic(options).bytes(), Synthetic(options).bytes()) << name;
  }
}

TEST(Synth, AnotherSeedGivesOtherNumbers) {
  const auto first_value = [](std::uint64_t seed) {
    SynthOptions options = small(SynthKind::uniform);
    options.seed = seed;
    Synthetic synthetic(options);
    return synthetic.trace().open(0)->layer(0)->values()[0][0][0];
  };
  EXPECT_NE(first_value(0), first_value(1));
}

TEST(Synth, EveryKindInEveryTypeIsSound) {
  for (const std::string& name : synth_kind_names()) {
    for (const FloatType type : {FloatType::float32, FloatType::float16, FloatType::bfloat16}) {
      SynthOptions options = small(parse_synth_kind(name));
      options.type = type;
      options.sequences = 2;
      Synthetic synthetic(options);
      EXPECT_EQ(synthetic.trace().sequences(), 2);
      EXPECT_EQ(check_trace(synthetic.trace()).total, 0);
      EXPECT_EQ(synthetic.info().element_bytes, bytes_of(type));
      const auto first = synthetic.trace().open(0)->layer(0);
      const auto second = synthetic.trace().open(1)->layer(0);
      EXPECT_NE(first->values()[0][0][0], second->values()[0][0][0]);
    }
  }
}

TEST(Synth, RefusesOptionsThatContradictThemselves) {
  const Scratch scratch;
  const auto refuses = [&](auto change) {
    SynthOptions options = small(SynthKind::sinks);
    change(options);
    EXPECT_THROW(write_synthetic_trace(scratch / "trace.h5", options), ConfigError);
    EXPECT_FALSE(std::filesystem::exists(scratch / "trace.h5"));
  };
  refuses([](SynthOptions& o) { o.layers = 0; });
  refuses([](SynthOptions& o) { o.kv_heads = 3; });
  refuses([](SynthOptions& o) { o.head_dim = 0; });
  refuses([](SynthOptions& o) { o.prompt = 0; });
  refuses([](SynthOptions& o) { o.tokens = o.prompt - 1; });
  refuses([](SynthOptions& o) { o.images = -1; });
  refuses([](SynthOptions& o) { o.image_tokens = 0; });
  refuses([](SynthOptions& o) { o.images = 5; });
  refuses([](SynthOptions& o) { o.images = Index{1} << 62; });
  refuses([](SynthOptions& o) { o.sequences = 0; });
  EXPECT_THROW((void)parse_synth_kind("sink"), ConfigError);
}

}  // namespace
}  // namespace hae::traces::test
