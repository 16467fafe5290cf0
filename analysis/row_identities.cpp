#include "analysis/row_identities.hpp"

#include <algorithm>
#include <optional>

namespace hae::analysis {
namespace {

/// Whether step s of `steps` is one of kMostRowSteps evenly spaced ones: those at which the share of them
/// that is due grows.
bool is_looked_at(Index step, Index steps) {
  const Index wanted = std::min(steps, kMostRowSteps);
  return step * wanted / steps != (step - 1) * wanted / steps;
}

Finding without_values() {
  return {.unmet = "the trace has no values"};
}

}  // namespace

RowIdentitiesVisitor::RowIdentitiesVisitor(const SequenceInfo& info)
    : info_(info), layers_(at(info.layers)) {}

void RowIdentitiesVisitor::row(const DecodeRow& row) {
  if (!is_looked_at(row.step, info_.steps())) {
    return;
  }
  Layer& layer = layers_[at(row.layer)];
  const bool has_values = row.values.size() > 0;
  if (layer.diameters.empty() && has_values) {
    for (Index h = 0; h < info_.kv_heads; ++h) {
      layer.diameters.push_back(diameter_bound(row.values[h]));
    }
  }
  const Index keys = row.block.queries[at(row.row)] + 1;
  for (Index h = 0; h < info_.query_heads; ++h) {
    const Index kv_head = h / info_.group_heads();
    const Index lane = row.cache.kind() == LaneKind::layer ? 0 : kv_head;
    AttentionRow attention{{row.block.row(h, row.row), at(keys)}, row.cache.keep(lane).first(at(keys)), {}};
    RowFindings found{total_variation(attention), kl_divergence(attention), without_values(),
                      without_values(), without_values()};
    if (has_values) {
      attention.values = row.values[kv_head];
      found[2] = output_identity(attention);
      found[3] = output_within_diameter(attention, layer.diameters[at(kv_head)]);
      found[4] = output_without_one_token(attention);
    }
    if (layer.seen) {
      add(layer.findings, found);
    } else {
      layer.findings = found;
      layer.seen = true;
    }
  }
}

RowFindings RowIdentitiesVisitor::take() const {
  std::optional<RowFindings> worst;
  for (const Layer& layer : layers_) {
    if (layer.seen && worst) {
      add(*worst, layer.findings);
    } else if (layer.seen) {
      worst = layer.findings;
    }
  }
  if (!worst) {
    worst.emplace().fill({.unmet = "there is no decode row"});
  }
  return *worst;
}

void add(RowFindings& worst, const RowFindings& other) {
  for (std::size_t i = 0; i < worst.size(); ++i) {
    worst[i] = worse(worst[i], other[i]);
  }
}

}  // namespace hae::analysis
