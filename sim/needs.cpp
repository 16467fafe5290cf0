#include "sim/needs.hpp"

namespace hae {
namespace {

template <typename Lacks>
void check_prompt_rows(const SequenceInfo& info, const Needs& needs, const Lacks& lacks) {
  auto stored = info.prompt_rows.begin();
  for (Index row = 0; row < info.prompt; ++row) {
    const bool has = stored != info.prompt_rows.end() && *stored == row;
    stored += has ? 1 : 0;
    const std::string what = "prompt row " + std::to_string(row);
    if (!has && needs.prompt_rows == PromptRows::all) {
      lacks(what, "all prompt rows");
    }
    if (!has && needs.prompt_rows == PromptRows::text && !info.is_visual(row)) {
      lacks(what, "all rows of prompt text");
    }
    if (!has && row >= info.prompt - needs.newest_prompt_rows) {
      lacks(what, "the last " + std::to_string(needs.newest_prompt_rows) + " prompt rows");
    }
  }
}

}  // namespace

void check_needs(const SequenceInfo& info, const Policy& policy, bool prompt_rows, const std::string& where) {
  for (Index layer = 0; layer < info.layers; ++layer) {
    const Needs needs = policy.needs(info, layer);
    const auto lacks = [&](const std::string& what, const std::string& all) {
      throw NeedsError(where + " lacks " + what + ", which policy '" + policy.spec() + "' needs in layer " +
                       std::to_string(layer) + " (it needs " + all +
                       "); record them, or choose a policy that does without");
    };
    if (needs.keys && info.payload != Payload::qkv) {
      lacks("keys", "the keys of all tokens");
    }
    if (needs.values && !info.has_values) {
      lacks("values", "the values of all tokens");
    }
    HAE_EXPECTS(!policy.merges() || (needs.keys && needs.values));
    if (needs.unrotated_queries && !info.rotary) {
      lacks("q_unrotated", "queries before rotary embedding; hae record --unrotated stores them");
    }
    if (needs.embedding_similarity && !info.has_embedding_similarity) {
      lacks("embedding_similarity", "the inner products of the prompt's input embeddings");
    }
    if (needs.prompt_rows != PromptRows::none || needs.newest_prompt_rows > 0) {
      HAE_EXPECTS(prompt_rows);
      check_prompt_rows(info, needs, lacks);
    }
  }
}

}  // namespace hae
