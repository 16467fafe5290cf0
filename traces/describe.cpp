#include "traces/describe.hpp"

#include <algorithm>
#include <map>

#include "traces/message.hpp"

namespace hae::traces {
namespace {

constexpr Index kSmallestChunkBytes = Index{64} << 10;
constexpr Index kLargestChunkBytes = Index{4} << 20;

std::vector<ImageSummary> summarise_images(const SequenceInfo& info, const std::vector<Index>& pictures) {
  std::map<Index, ImageSummary> images;
  for (Index token = 0; token < info.tokens; ++token) {
    const Index id = info.image[static_cast<std::size_t>(token)];
    if (id < 0) {
      continue;
    }
    ImageSummary& image = images[id];
    image.image = id;
    ++image.tokens;
    if (!image.spans.empty() && image.spans.back().end == token) {
      ++image.spans.back().end;
    } else {
      image.spans.push_back({token, token + 1});
    }
  }
  std::vector<ImageSummary> summary;
  for (auto& [id, image] : images) {
    image.has_picture = std::binary_search(pictures.begin(), pictures.end(), id);
    summary.push_back(std::move(image));
  }
  return summary;
}

bool is_payload(const StoredDataset& dataset) {
  return dataset.path.starts_with("layers/");
}

Index chunk_bytes(const StoredDataset& dataset) {
  Index elements = 1;
  for (const Index extent : dataset.shape) {
    elements *= extent;
  }
  Index bytes = elements == 0 ? 0 : dataset.declared_bytes / elements;
  for (const Index extent : dataset.chunk) {
    bytes *= extent;
  }
  return bytes;
}

/// `layers/000003/q` -> `q`: lint speaks of an array once, not once a layer.
std::string array_of(const StoredDataset& dataset) {
  return dataset.path.substr(dataset.path.rfind('/') + 1);
}

void lint_storage(const SequenceSummary& summary, std::vector<std::string>& lint) {
  std::map<std::string, std::string> found;
  for (const StoredDataset& dataset : summary.datasets) {
    if (!is_payload(dataset) || dataset.chunk.empty() || dataset.declared_bytes == 0) {
      continue;
    }
    const Index bytes = chunk_bytes(dataset);
    std::string words =
        message(array_of(dataset), " is chunked: contiguous would be mapped and read at memory speed");
    if (bytes < kSmallestChunkBytes && dataset.declared_bytes > kSmallestChunkBytes) {
      words = message(array_of(dataset), " has chunks of ", bytes, " bytes: reading is slow below 64 KiB");
    } else if (bytes > kLargestChunkBytes) {
      words = message(array_of(dataset), " has chunks of ", bytes,
                      " bytes: reading needs much memory above 4 MiB");
    } else if (!dataset.filters.empty()) {
      words = message(array_of(dataset), " is compressed: it is unpacked each time it is read");
    }
    found.try_emplace(array_of(dataset), words);
  }
  for (const auto& [array, words] : found) {
    lint.push_back(words);
  }
}

void lint_content(const SequenceSummary& summary, std::vector<std::string>& lint) {
  const SequenceInfo& info = summary.info;
  if (!info.has_values) {
    lint.emplace_back("v is missing: output errors and policies that read values are not available");
  }
  if (!info.head_dim) {
    lint.emplace_back("head_dim is missing: nothing is known in bytes");
  }
  if (!info.has_all_prompt_rows()) {
    lint.push_back(
        message("only ", info.prompt_rows.size(), " of ", info.prompt,
                " prompt rows are stored: policies that score the whole prompt are not available"));
  }
  if (info.steps() == 0) {
    lint.emplace_back("there are no decode steps: decode figures will be empty");
  }
  if (info.generated != info.steps() + 1) {
    lint.push_back(
        message("generated is ", info.generated, ", as a rule it is decode steps + 1 = ", info.steps() + 1));
  }
  for (const ImageSummary& image : summary.images) {
    if (!image.has_picture) {
      lint.push_back(message("the picture of image ", image.image, " is missing: a report cannot show it"));
    }
  }
}

SequenceSummary describe_sequence(TraceFile& trace, Index index) {
  SequenceSummary summary;
  summary.info = trace.open(index)->info();
  const SequenceInfo& info = summary.info;
  const SequenceDetails details = trace.details(index);
  summary.model = details.model;
  summary.attention_implementation = details.attention_implementation;
  summary.images = summarise_images(info, trace.pictures(index));
  for (const ImageSummary& image : summary.images) {
    summary.visual_tokens += image.tokens;
  }
  summary.text_tokens = info.tokens - summary.visual_tokens;
  summary.datasets = trace.datasets(index);
  for (const StoredDataset& dataset : summary.datasets) {
    summary.payload_bytes += is_payload(dataset) ? dataset.stored_bytes : 0;
  }
  if (info.head_dim && info.element_bytes) {
    summary.cache_bytes =
        2 * info.layers * info.kv_heads * info.tokens * *info.head_dim * *info.element_bytes;
  }
  lint_storage(summary, summary.lint);
  lint_content(summary, summary.lint);
  return summary;
}

}  // namespace

TraceSummary describe(TraceFile& trace) {
  TraceSummary summary{trace.name(), trace.origin(), trace.bytes(), {}};
  for (Index index = 0; index < trace.sequences(); ++index) {
    summary.sequences.push_back(describe_sequence(trace, index));
  }
  return summary;
}

}  // namespace hae::traces
