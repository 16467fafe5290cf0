#include "traces/problem_file.hpp"

#include <array>
#include <optional>

#include "traces/hdf5_output.hpp"
#include "traces/layout.hpp"
#include "traces/message.hpp"

namespace hae::traces {
namespace {

using hdf5::Axis;
using hdf5::Content;
using hdf5::Dataset;
using hdf5::Group;
using hdf5::Guard;
using hdf5::Handle;
using hdf5::OutputFile;
using hdf5::write_attribute;

constexpr const char* kFormat = "hae-problem";
constexpr Index kVersion = 1;

/// Names and values of one table, as two datasets.
template <typename Number>
void write_pairs(const OutputFile& file, const std::string& name,
                 const std::vector<std::pair<std::string, Number>>& pairs) {
  std::vector<std::string> keys;
  std::vector<Number> values;
  for (const auto& [key, value] : pairs) {
    keys.push_back(key);
    values.push_back(value);
  }
  file.write_strings(file.root().get(), name + "_name", keys);
  if constexpr (std::is_same_v<Number, Index>) {
    file.write_integers(file.root().get(), name + "_value", values);
  } else {
    file.write_reals(file.root().get(), name + "_value", values);
  }
}

void write_tensors(const OutputFile& file, const char* name, const std::vector<StoredTensor>& tensors) {
  const Handle group = file.create_group(file.root().get(), name);
  for (Index i = 0; i < std::ssize(tensors); ++i) {
    const StoredTensor& tensor = tensors[at(i)];
    const Handle member = file.create_group(group.get(), six_digits(i));
    write_attribute(member.get(), "name", tensor.name);
    write_attribute(member.get(), "type", tensor.type);
    write_attribute(member.get(), "counts", tensor.counts);
    file.write_strings(member.get(), "axes", tensor.axes);
    file.write_reals(member.get(), "values", tensor.values);
  }
}

std::vector<std::string> read_list(const Group& group, const std::string& name) {
  const Dataset list = group.dataset(name, Content::strings);
  list.expect_shape(std::array<Axis, 1>{{{"entries", std::nullopt}}});
  return list.read_strings();
}

template <typename Number>
std::vector<std::pair<std::string, Number>> read_pairs(const Group& root, const std::string& name) {
  const std::vector<std::string> keys = read_list(root, name + "_name");
  constexpr bool kIsIndex = std::is_same_v<Number, Index>;
  const Dataset values = root.dataset(name + "_value", kIsIndex ? Content::integers : Content::reals);
  values.expect_shape(std::array<Axis, 1>{{{"entries", std::ssize(keys)}}});
  std::vector<Number> numbers;
  if constexpr (kIsIndex) {
    numbers = values.read_integers();
  } else {
    numbers = values.read_reals();
  }
  std::vector<std::pair<std::string, Number>> pairs;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    pairs.emplace_back(keys[i], numbers[i]);
  }
  return pairs;
}

std::vector<StoredTensor> read_tensors(const Group& group) {
  std::vector<StoredTensor> tensors;
  for (Index i = 0; i < group.members(); ++i) {
    const Group member = group.group(six_digits(i));
    const Dataset values = member.dataset("values", Content::reals);
    values.expect_shape(std::array<Axis, 1>{{{"elements", std::nullopt}}});
    tensors.push_back({member.string("name"), member.string("type"), read_list(member, "axes"),
                       member.string("counts"), values.read_reals()});
  }
  return tensors;
}

void check_root(const Group& root, const std::string& file) {
  if (!root.has_attribute("format") || root.string("format") != kFormat) {
    refuse(file,
           ": not a problem file (root attribute 'format' is not 'hae-problem'); `hae validate --save` "
           "writes one");
  }
  if (root.integer("version") != kVersion) {
    refuse(file, ": problem format version ", root.integer("version"), ", expected ", kVersion,
           "; read it with the hae that wrote it");
  }
  if (!root.has_attribute("complete") || root.integer("complete") != 1) {
    refuse(file, ": unfinished (root attribute 'complete' is not 1); let hae validate write it again");
  }
}

}  // namespace

void write_problem(const std::filesystem::path& path, const StoredProblem& problem) {
  const Guard guard;
  OutputFile file(path, kFormat, kVersion);
  write_attribute(file.root().get(), "operation", problem.operation);
  write_attribute(file.root().get(), "case", problem.case_name);
  write_pairs(file, "extent", problem.extents);
  write_pairs(file, "layout", problem.layout);
  write_pairs(file, "number", problem.numbers);
  write_tensors(file, "inputs", problem.inputs);
  write_tensors(file, "outputs", problem.outputs);
  file.finish();
}

StoredProblem read_problem(const std::filesystem::path& path) {
  const hdf5::File file(path, true, false);
  return file.walk([&](const Group& root) {
    check_root(root, file.name());
    StoredProblem problem;
    problem.operation = root.string("operation");
    problem.case_name = root.string("case");
    problem.extents = read_pairs<Index>(root, "extent");
    problem.layout = read_pairs<Index>(root, "layout");
    problem.numbers = read_pairs<double>(root, "number");
    problem.inputs = read_tensors(root.group("inputs"));
    problem.outputs = read_tensors(root.group("outputs"));
    return problem;
  });
}

}  // namespace hae::traces
