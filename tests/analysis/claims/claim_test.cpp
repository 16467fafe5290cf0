#include "analysis/claims/claim.hpp"

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "sim/errors.hpp"

namespace hae::analysis {
namespace {

using ::testing::HasSubstr;

const std::filesystem::path kRoot = HAE_SOURCE_DIR;

std::string text_of(const std::filesystem::path& path) {
  std::ifstream file(path);
  EXPECT_TRUE(file) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

/// A statement as a cell of a Markdown table shows it.
std::string cell_of(std::string_view statement) {
  std::string cell;
  for (const char c : statement) {
    cell += c == '|' ? "\\|" : std::string(1, c);
  }
  return cell;
}

/// A claim's line of analysis/README.md.
std::string line_of(const Claim& claim) {
  std::string proofs;
  for (const std::string_view proof : claim.proofs) {
    proofs += (proofs.empty() ? "`" : ", `") + std::string(proof) + "`";
  }
  const std::filesystem::path document(claim.document);
  const std::string stem = document.stem().string();
  return "| `" + std::string(claim.id) + "` | " + std::string(claim.title) + ": `" +
         cell_of(claim.statement) + "` | " + std::string(name(claim.status)) + " | " + proofs + " | [" +
         stem + "](claims/" + stem + ".md) | [test](../tests/analysis/claims/" + stem + "_test.cpp) |";
}

TEST(Claims, HaveIdsOfTheirOwn) {
  std::set<std::string_view> ids;
  for (const Claim& c : claims()) {
    EXPECT_TRUE(ids.insert(c.id).second) << c.id;
    EXPECT_EQ(&claim(c.id), &c);
  }
  EXPECT_THROW(claim("T2.2"), ContractViolation);
}

TEST(Claims, SayWhatAndUnderWhichAssumptions) {
  for (const Claim& c : claims()) {
    EXPECT_FALSE(c.statement.empty()) << c.id;
    EXPECT_FALSE(c.assumptions.empty()) << c.id;
    for (const std::string_view assumption : c.assumptions) {
      EXPECT_EQ(assumption.back(), '.') << c.id << ": a sentence: " << assumption;
    }
  }
}

TEST(Claims, AreExplainedInTheirDocumentsUnderTheirIds) {
  for (const Claim& c : claims()) {
    EXPECT_THAT(text_of(kRoot / c.document), HasSubstr("`" + std::string(c.id) + "`")) << c.id;
  }
}

// The lines of the index, in order, are those of the table.
TEST(Claims, AreIndexedInTheReadme) {
  std::istringstream readme(text_of(kRoot / "analysis/README.md"));
  std::vector<std::string> found;
  for (std::string line; std::getline(readme, line);) {
    if (line.ends_with("_test.cpp) |")) {
      found.push_back(line);
    }
  }
  std::vector<std::string> expected;
  for (const Claim& c : claims()) {
    expected.push_back(line_of(c));
    const std::string stem = std::filesystem::path(c.document).stem().string();
    EXPECT_TRUE(std::filesystem::exists(kRoot / "tests/analysis/claims" / (stem + "_test.cpp")));
  }
  EXPECT_EQ(found, expected);
}

// A proved claim names theorems, and a theorem that is named is there.
TEST(Claims, NameTheoremsThatExist) {
  const std::filesystem::path proofs = kRoot / "analysis/proofs";
  std::string text;
  for (const auto& entry : std::filesystem::directory_iterator(proofs)) {
    text += entry.path().extension() == ".v" ? text_of(entry.path()) : "";
  }
  for (const Claim& c : claims()) {
    EXPECT_EQ(c.proofs.empty(), c.status == Status::cited || c.status == Status::checked) << c.id;
    for (const std::string_view proof : c.proofs) {
      EXPECT_THAT(text, HasSubstr("\nTheorem " + std::string(proof) + " ")) << c.id;
    }
  }
}

}  // namespace
}  // namespace hae::analysis
