#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tests/traces/fixtures.hpp"

// What the tests of all importers need.

namespace hae::traces::test {

/// A trace that an importer made, opened; gone with its folder when the test ends. Arrays are copied: a view
/// ends with its layer.
class ImportedTrace {
 public:
  [[nodiscard]] TraceFile& trace() { return *trace_; }
  [[nodiscard]] const SequenceInfo& info() const { return sequence_->info(); }

  [[nodiscard]] std::vector<float> queries(Index layer = 0) {
    const Index heads = info().query_heads;
    std::vector<float> memory(static_cast<std::size_t>(heads * info().tokens * *info().head_dim));
    sequence_->layer(layer)->read_queries({0, info().tokens},
                                          {memory.data(), {heads, info().tokens, *info().head_dim}});
    return memory;
  }
  [[nodiscard]] std::vector<float> keys(Index layer = 0) { return flat(sequence_->layer(layer)->keys()); }
  [[nodiscard]] std::vector<float> values(Index layer = 0) { return flat(sequence_->layer(layer)->values()); }

  /// [query_heads, P, P], when every prompt row is stored.
  [[nodiscard]] std::vector<float> prompt_rows(Index layer = 0) {
    std::vector<float> rows(static_cast<std::size_t>(info().query_heads * info().prompt * info().prompt));
    sequence_->layer(layer)->read_prompt_attention(
        {0, info().prompt}, {rows.data(), {info().query_heads, info().prompt, info().prompt}});
    return rows;
  }

  /// The row of decode step 1 [query_heads, P + 1].
  [[nodiscard]] std::vector<float> first_step(Index layer = 0) {
    std::vector<float> rows(static_cast<std::size_t>(info().query_heads * (info().prompt + 1)));
    sequence_->layer(layer)->read_decode_attention(1, {rows.data(), {info().query_heads, info().prompt + 1}});
    return rows;
  }

 protected:
  /// What is imported may lie here too.
  [[nodiscard]] const Scratch& scratch() const { return scratch_; }

  /// Where the importer is to write.
  [[nodiscard]] std::filesystem::path to() const { return scratch_ / "out.h5"; }

  void open() {
    trace_.emplace(to());
    sequence_ = trace_->open(0);
  }

 private:
  static std::vector<float> flat(View<const float, 3> view) {
    return {view.data(), view.data() + view.size()};
  }

  Scratch scratch_;
  std::optional<TraceFile> trace_;
  std::unique_ptr<Sequence> sequence_;
};

/// Expects `import(to)` to throw an Error that says these words in one line, and to leave nothing behind.
///
/// start  what the message must begin with
template <typename Error, typename Import>
void expect_import_error(const Import& import, const std::vector<std::string>& words,
                         std::string_view start = "") {
  const Scratch scratch;
  try {
    import(scratch / "out.h5");
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    EXPECT_TRUE(message.starts_with(start)) << message;
    for (const std::string& word : words) {
      EXPECT_NE(message.find(word), std::string::npos) << "'" << word << "' is not in: " << message;
    }
  }
  EXPECT_FALSE(std::filesystem::exists(scratch / "out.h5"));
  EXPECT_FALSE(std::filesystem::exists(scratch / "out.h5.partial"));
}

}  // namespace hae::traces::test
