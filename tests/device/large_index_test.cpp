#include <gtest/gtest.h>
#include <sys/mman.h>

#include "cuda/row_weights.hpp"
#include "cuda/token_scores.hpp"

// Counts and offsets beyond 32 bits, with memory that is only touched where it is read.

namespace hae::device {
namespace {

/// Memory for `count` numbers of which few are ever touched. On an accelerator it is real.
class SparseFloats {
 public:
  explicit SparseFloats(Index count) : bytes_(count * Index{sizeof(float)}) {
    if (is_accelerator()) {
      buffer_ = Buffer(bytes_);
      return;
    }
    void* memory =
        mmap(nullptr, at(bytes_), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    data_ = memory == MAP_FAILED ? nullptr : memory;
  }
  ~SparseFloats() {
    if (data_ != nullptr) {
      munmap(data_, at(bytes_));
    }
  }
  SparseFloats(const SparseFloats&) = delete;
  SparseFloats& operator=(const SparseFloats&) = delete;

  [[nodiscard]] float* data() const { return static_cast<float*>(is_accelerator() ? buffer_.data() : data_); }

  void write(const std::vector<float>& numbers, Index first) {
    if (is_accelerator()) {
      buffer_.write(numbers.data(), std::ssize(numbers) * Index{sizeof(float)}, first * Index{sizeof(float)},
                    nullptr);
    } else {
      std::copy(numbers.begin(), numbers.end(), data() + first);
    }
  }

 private:
  Index bytes_;
  void* data_ = nullptr;
  Buffer buffer_;
};

class LongRows : public ::testing::TestWithParam<Index> {};

// n² passes 2^31 at n = 46,341 and is 0 in 32 bits at 65,536: the last rows lie beyond what 32 bits reach.
TEST_P(LongRows, AreSummedAndScored) {
  const Index n = GetParam();
  const Index keys = (n + 31) / 32 * 32;
  if (is_accelerator() && free_bytes() < n * keys * 5) {
    GTEST_SKIP() << "needs " << n * keys * 5 << " bytes";
  }
  SparseFloats weights(n * keys);
  ASSERT_NE(weights.data(), nullptr);
  // Rows n-2 and n-1 hold 0.5 and 2 everywhere but in the padding.
  for (const Index row : {n - 2, n - 1}) {
    std::vector<float> numbers(at(keys), row == n - 2 ? 0.5f : 2.0f);
    std::fill(numbers.begin() + n, numbers.end(), 0.0f);
    weights.write(numbers, row * keys);
  }
  std::vector<Index> queries(at(n));
  for (Index row = 0; row < n; ++row) {
    queries[at(row)] = row;
  }
  const Array<Index> queries_there = copy_of(queries, nullptr);
  const Array<LayerMask> masks = copy_of<LayerMask>({{.prompt = n}}, nullptr);
  Array<float> sums(n);
  sums.clear(nullptr);
  const RowBlock block{.items = 1,
                       .query_heads = 1,
                       .kv_heads = 1,
                       .rows = n,
                       .active = {n - 2, n},
                       .keys = keys,
                       .queries = queries_there.data(),
                       .masks = masks.data(),
                       .weights = weights.data(),
                       .sums = sums.data()};
  const Buffer workspace(row_workspace_bytes(block.active_rows()));
  sum_weights(block, workspace.data(), nullptr);
  const std::vector<float> summed = sums.read(nullptr);
  EXPECT_EQ(summed[at(n - 3)], 0.0f);
  EXPECT_EQ(summed[at(n - 2)], static_cast<float>(n) / 2.0f);  // exact: multiples of 1/2 below 2^24
  EXPECT_EQ(summed[at(n - 1)], static_cast<float>(n) * 2.0f);

  // With divisors 1 every token's score is 0.5 + 2.
  const Array<float> ones = copy_of(std::vector<float>(at(n), 1.0f), nullptr);
  Array<double> scores(keys);
  Array<Index> exposures(keys);
  scores.clear(nullptr);
  exposures.clear(nullptr);
  add_rows(block, {.divisors = ones.data(), .stride = keys}, 1, scores.data(), exposures.data(), nullptr);
  const std::vector<double> scored = scores.read(nullptr);
  const std::vector<Index> exposed = exposures.read(nullptr);
  for (const Index token : {Index{0}, n / 2, n - 2, n - 1}) {
    EXPECT_EQ(scored[at(token)], 2.5) << token;
  }
  EXPECT_EQ(exposed[at(n - 2)], 2);
  EXPECT_EQ(exposed[at(n - 1)], 1);  // row n - 2 does not see it
}

INSTANTIATE_TEST_SUITE_P(Boundaries, LongRows, ::testing::Values(46'340, 46'341, 65'535, 65'536));

// 32 heads of 2048 rows are 65,536 rows: one more than a grid's second axis takes.
TEST(ManyRows, AreAllSummed) {
  const Index heads = 32;
  const Index rows = 2048;
  const Index keys = 32;
  std::vector<float> weights(at(heads * rows * keys), 0.0f);
  for (Index row = 0; row < heads * rows; ++row) {
    weights[at(row * keys + row % keys)] = static_cast<float>(row);  // exact below 2^24
  }
  std::vector<Index> queries(at(rows), keys - 1);
  const Array<float> weights_there = copy_of(weights, nullptr);
  const Array<Index> queries_there = copy_of(queries, nullptr);
  const Array<float> sums(heads * rows);
  const RowBlock block{.items = 1,
                       .query_heads = heads,
                       .kv_heads = heads,
                       .rows = rows,
                       .active = {0, rows},
                       .keys = keys,
                       .queries = queries_there.data(),
                       .weights = weights_there.data(),
                       .sums = sums.data()};
  const Buffer workspace(row_workspace_bytes(block.active_rows()));
  sum_weights(block, workspace.data(), nullptr);
  const std::vector<float> summed = sums.read(nullptr);
  for (Index row = 0; row < heads * rows; ++row) {
    ASSERT_EQ(summed[at(row)], static_cast<float>(row));
  }
}

}  // namespace
}  // namespace hae::device
