#pragma once

#include <filesystem>
#include <optional>

#include "sim/view.hpp"
#include "traces/sequence_arguments.hpp"

namespace hae::traces {

/// What the importer is told.
struct KvpOptions {
  SequenceArguments sequence;
  std::optional<double> scale;  ///< logit = scale * q.k; none: 1/sqrt(head_dim)
  Index window = 0;             ///< of every layer; 0: none
};

/// Makes a `qkv` trace of one sequence from a directory with one safetensors file a KV head,
/// `layer_%06d/kv_head_%03d/attention_tensors.safetensors`, that holds
///
///   q_group  [g, T, d]  queries after rotary embedding; the query heads kv_head * g ... kv_head * g + g - 1
///   k, v     [T, d]     keys after rotary embedding, and values
///
/// in float32, float16 or bfloat16, one type for all. Every layer and KV head must be there; other names in
/// the directory are left alone. The files are streamed: one head is held. Every number is checked on the
/// way.
///
/// throws TraceError   `FILE:/tensor: what was found, what was expected; what to do`; nothing is written
/// throws ConfigError  an option that does not fit the recording
void import_kvp(const std::filesystem::path& from, const std::filesystem::path& to,
                const KvpOptions& options);

}  // namespace hae::traces
