#include "sim/cli/json_input.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>

#include "sim/errors.hpp"

namespace hae::cli {
namespace {

/// What every reader of a result relies on.
void check_result(const Json& result, const std::string& where) {
  const auto expect = [&](bool holds, const char* what) {
    if (!holds) {
      throw TraceError(fmt::format("{}: {}; name a file that `hae compare --json` wrote", where, what));
    }
  };
  expect(result.is_object() && result.value("schema", Json()) == kResultSchema,
         "not a result (`schema` is not hae.compare/1)");
  expect(result.contains("manifest") && result["manifest"].is_object(), "has no manifest");
  expect(result["manifest"].contains("traces") && result["manifest"]["traces"].is_array(), "names no traces");
  for (const Json& trace : result["manifest"]["traces"]) {
    expect(trace.is_object() && trace.contains("path") && trace["path"].is_string() &&
               trace.contains("sha256") && trace["sha256"].is_string(),
           "names a trace without path or sha256");
  }
  for (const char* list : {"runs", "summary"}) {
    expect(result.contains(list) && result[list].is_array() && !result[list].empty(),
           "has no runs or no summary");
    for (const Json& line : result[list]) {
      expect(line.is_object() && line.contains("policy") && line["policy"].is_string(),
             "holds a run without a policy");
    }
  }
}

}  // namespace

Json parse_json(const std::string& text, const std::string& where) {
  constexpr int kDeepest = 64;  // a result has 6 levels; what is compared and printed recurses
  const auto check_depth = [&](int depth, Json::parse_event_t, const Json&) {
    if (depth > kDeepest) {
      throw TraceError(where + ": nested more than 64 deep; name a file that hae wrote");
    }
    return true;
  };
  try {
    return Json::parse(text, check_depth);
  } catch (const Json::exception& error) {
    throw TraceError(where + ": not JSON (" + error.what() + "); copy or make it again");
  }
}

std::filesystem::path result_path(const std::filesystem::path& named) {
  std::error_code unknown;
  return std::filesystem::is_directory(named, unknown) ? named / kResultName : named;
}

Json read_result(const std::filesystem::path& named) {
  const std::filesystem::path path = result_path(named);
  std::error_code unknown;
  const auto bytes =
      std::filesystem::is_regular_file(path, unknown) ? std::filesystem::file_size(path, unknown) : 0;
  std::ifstream file(path, std::ios::binary);
  if (!file || bytes == 0 || bytes > static_cast<std::uintmax_t>(kMostResultBytes)) {
    throw TraceError(
        fmt::format("{}: cannot be read ({}); name a file that `hae compare --json` wrote", path.string(),
                    file ? "it is empty, too large or not a regular file" : std::strerror(errno)));
  }
  const std::string text(std::istreambuf_iterator<char>(file), {});
  Json result = parse_json(text, path.string());
  check_result(result, path.string());
  return result;
}

}  // namespace hae::cli
