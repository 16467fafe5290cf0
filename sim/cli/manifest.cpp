#include "sim/cli/manifest.hpp"

#include <fmt/format.h>
#include <sys/utsname.h>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <string_view>
#include <thread>

#include "sim/cli/sha256.hpp"

namespace hae::cli {
namespace {

std::string& command_storage() {
  static std::string command;
  return command;
}

/// A word as a shell would read it back.
std::string quoted(std::string_view word) {
  const bool plain = !word.empty() && std::ranges::all_of(word, [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 ||
           std::string_view("_-./:=,%@+").find(c) != std::string_view::npos;
  });
  if (plain) {
    return std::string(word);
  }
  std::string text = "'";
  for (const char c : word) {
    if (c == '\'') {
      text += "'\\'";
    }
    text += c;
  }
  text += '\'';
  return text;
}

/// A word of a manifest, which is one of a few.
std::string one_of(const nlohmann::ordered_json& word, std::initializer_list<const char*> allowed,
                   const std::string& where) {
  if (std::ranges::find(allowed, word) == allowed.end()) {
    throw TraceError(
        fmt::format("{}: its manifest says {}, expected {}", where, word.dump(), fmt::join(allowed, " or ")));
  }
  return word.get<std::string>();
}

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) {
      return line.substr(std::min(line.size(), line.find(':') + 2));
    }
  }
  return "unknown";
}

}  // namespace

void set_command(int argc, char** argv) {
  command_storage() = "hae";
  for (int i = 1; i < argc; ++i) {
    command_storage() += ' ';
    command_storage() += quoted(argv[i]);
  }
}

const std::string& command() {
  return command_storage();
}

std::string version_text() {
  const std::string system = device_system();
  return fmt::format("hae {} ({}, {}), backends: reference{}", HAE_VERSION, HAE_COMPILER, HAE_BUILD_TYPE,
                     system.empty() ? "" : fmt::format(", device (Thrust {})", system));
}

nlohmann::ordered_json manifest(const ComparisonOptions& options, const std::vector<PolicySource>& policies) {
  utsname system{};
  uname(&system);
  const auto hashed = [](const std::string& path) {
    return nlohmann::ordered_json{{"path", path}, {"sha256", sha256_of_file(path)}};
  };
  nlohmann::ordered_json json;
  json["command"] = command();
  json["version"] = HAE_VERSION;
  json["compiler"] = HAE_COMPILER;
  json["machine"] = {{"system", fmt::format("{} {}", system.sysname, system.release)},
                     {"architecture", system.machine},
                     {"processor", processor()},
                     {"threads", std::thread::hardware_concurrency()}};
  json["traces"] = nlohmann::ordered_json::array();
  for (const std::string& path : options.traces) {
    json["traces"].push_back(hashed(path));
  }
  json["logs"] = nlohmann::ordered_json::array();
  for (const PolicySource& policy : policies) {
    if (policy.log_path()) {
      json["logs"].push_back(hashed(*policy.log_path()));
    }
  }
  json["policies"] = options.policies;
  json["sequence"] = options.sequence ? nlohmann::ordered_json(*options.sequence) : nullptr;
  json["match"] = !options.match                        ? nlohmann::ordered_json(nullptr)
                  : *options.match == MatchTarget::mean ? "mean"
                                                        : "peak";
  json["optimal"] = options.optimal;
  json["seed"] = nullptr;  // Nothing but a policy's own option is random.
  json["backend"] = options.backend;
  json["device_system"] = options.backend == kReferenceBackend ? nlohmann::ordered_json(nullptr)
                                                               : nlohmann::ordered_json(device_system());
  json["tie_rule"] = "older token first";
  json["positions"] = "original";
  json["accumulation"] = "weights float32 in 32 partial sums, scores float64";
  json["nan"] = options.nan == NanRule::error ? "error" : "lowest";
  return json;
}

ComparisonOptions options_of(const nlohmann::ordered_json& manifest, const std::string& where) {
  try {
    ComparisonOptions options;
    for (const auto& trace : manifest.at("traces")) {
      options.traces.push_back(trace.at("path").get<std::string>());
      (void)trace.at("sha256").get<std::string>();
    }
    options.policies = manifest.at("policies").get<std::vector<std::string>>();
    if (options.traces.empty() || options.policies.empty()) {
      throw TraceError(where +
                       ": its manifest names no trace or no policy; expected one of hae 0.1 or newer");
    }
    if (!manifest.at("sequence").is_null()) {
      options.sequence = manifest["sequence"].get<std::string>();
    }
    if (!manifest.at("match").is_null()) {
      const bool peak = one_of(manifest["match"], {"mean", "peak"}, where) == "peak";
      options.match = peak ? MatchTarget::peak : MatchTarget::mean;
    }
    options.backend =
        one_of(manifest.at("backend"), {kReferenceBackend, kDeviceBackend, kCudaBackend}, where);
    options.optimal = manifest.at("optimal").get<bool>();
    const bool lowest = one_of(manifest.at("nan"), {"error", "lowest"}, where) == "lowest";
    options.nan = lowest ? NanRule::lowest : NanRule::error;
    return options;
  } catch (const nlohmann::json::exception& error) {
    throw TraceError(where + ": its manifest cannot be repeated (" + error.what() +
                     "); expected one of hae 0.1 or newer");
  }
}

}  // namespace hae::cli
