#include "sim/cli/certification.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "analysis/claims/claim.hpp"
#include "analysis/decay_envelope.hpp"
#include "analysis/interval.hpp"
#include "sim/cli/evidence.hpp"
#include "sim/cli/parallel.hpp"
#include "sim/cli/progress.hpp"

namespace hae::cli {
namespace {

using analysis::Decay;
using analysis::Finding;
using analysis::ForegoneAttention;

constexpr std::array kRelations = {"at most", "below", "equal"};  // by Finding::Relation

void check_numbers(const CertificateQuestion& question) {
  if (!(question.epsilon > 0.0) || !std::isfinite(question.epsilon)) {
    throw ConfigError(fmt::format("--epsilon is {}, expected a finite number above 0: the loss that may be",
                                  question.epsilon));
  }
  if (!(question.delta > 0.0 && question.delta < 1.0)) {
    throw ConfigError(
        fmt::format("--delta is {}, expected a number between 0 and 1, e.g. 0.1", question.delta));
  }
}

/// JSON has no infinity: a bound that no double reaches is null.
Json finite_or_null(double x) {
  return std::isfinite(x) ? Json(x) : Json(nullptr);
}

Json decay_json(const std::optional<Decay>& decay) {
  if (!decay) {
    return nullptr;
  }
  return {{"initial", decay->initial},
          {"rate", decay->rate},
          {"future_loss_of_one", finite_or_null(analysis::future_loss_bound(*decay, 1, 0))}};
}

/// The groups in the order in which they come.
std::vector<std::string> groups_of(const std::vector<Evidence>& evidence) {
  std::vector<std::string> groups;
  for (const Evidence& sequence : evidence) {
    if (std::ranges::find(groups, sequence.group) == groups.end()) {
      groups.push_back(sequence.group);
    }
  }
  return groups;
}

// The loss.

/// Of each group the largest loss of its sequences, so that a bound on it holds for each of them. Groups
/// without a decode row have none.
std::vector<double> group_losses(const std::vector<Evidence>& evidence) {
  std::vector<double> losses;
  for (const std::string& group : groups_of(evidence)) {
    std::optional<double> largest;
    for (const Evidence& sequence : evidence) {
      if (sequence.group == group && sequence.loss) {
        largest = std::max(largest.value_or(0.0), *sequence.loss);
      }
    }
    if (largest) {
      losses.push_back(*largest);
    }
  }
  return losses;
}

Json loss_json(const std::vector<Evidence>& evidence, const CertificateQuestion& question) {
  Json sequences = Json::array();
  for (const Evidence& sequence : evidence) {
    sequences.push_back({{"index", sequence.sequence_index},
                         {"name", sequence.name},
                         {"group", sequence.group},
                         {"loss", json_or_null(sequence.loss)}});
  }
  const std::vector<double> losses = group_losses(evidence);
  const auto largest = std::ranges::max_element(losses);
  return {{"measured", largest == losses.end() ? Json(nullptr) : Json(*largest)},
          {"sequences", sequences},
          {"conformal",
           {{"bound", json_or_null(analysis::conformal_bound(losses, question.delta))},
            {"delta", question.delta},
            {"groups", losses.size()},
            {"groups_needed", analysis::least_observations(question.delta)}}}};
}

// Decay.

/// Several sequences together: by layer.
std::vector<ForegoneAttention> by_layer(const std::vector<const Evidence*>& evidence) {
  std::vector<ForegoneAttention> layers;
  for (const Evidence* sequence : evidence) {
    layers.resize(std::max(layers.size(), sequence->foregone.size()));
    for (std::size_t layer = 0; layer < sequence->foregone.size(); ++layer) {
      layers[layer] += sequence->foregone[layer];
    }
  }
  return layers;
}

ForegoneAttention over_layers(const std::vector<ForegoneAttention>& layers) {
  ForegoneAttention all;
  for (const ForegoneAttention& layer : layers) {
    all += layer;
  }
  return all;
}

/// Groups whose attention exceeds a decay, and what share of all groups that is.
struct Exceeding {
  Index groups = 0;
  Index exceeding = 0;
  double largest_factor = 0;  ///< by how much the worst age exceeds, 0 where none does
};

/// layer  none: all layers together
Exceeding exceeding(const Decay& decay, const std::vector<const Evidence*>& evidence,
                    std::optional<std::size_t> layer) {
  Exceeding found;
  std::set<std::string> groups;
  std::set<std::string> above;
  for (const Evidence* sequence : evidence) {
    if (layer && *layer >= sequence->foregone.size()) {
      continue;
    }
    const ForegoneAttention observed = layer ? sequence->foregone[*layer] : over_layers(sequence->foregone);
    groups.insert(sequence->group);
    if (const auto excess = analysis::excess_over(decay, observed.largest)) {
      above.insert(sequence->group);
      found.largest_factor = std::max(found.largest_factor, excess->factor);
    }
  }
  found.groups = std::ssize(groups);
  found.exceeding = std::ssize(above);
  return found;
}

Json tested_json(const std::optional<Decay>& fitted, const std::vector<const Evidence*>& held_out,
                 std::optional<std::size_t> layer) {
  if (!fitted || held_out.empty()) {
    return nullptr;
  }
  const Exceeding found = exceeding(*fitted, held_out, layer);
  if (found.groups == 0) {
    return nullptr;
  }
  const analysis::Interval share = analysis::share_interval(found.exceeding, found.groups);
  return {{"groups", found.groups},
          {"exceeding", found.exceeding},
          {"share", share.mean},
          {"interval95", {share.low, share.high}},
          {"largest_factor", found.largest_factor}};
}

Json envelope_json(const ForegoneAttention& all, const ForegoneAttention& first,
                   const std::vector<const Evidence*>& held_out, std::optional<std::size_t> layer) {
  const std::optional<Decay> fitted = analysis::decay_envelope(first.largest);
  Json json = layer ? Json{{"layer", *layer}} : Json::object();
  json["evictions"] = all.evictions;
  json["envelope"] = decay_json(analysis::decay_envelope(all.largest));
  json["fitted"] = decay_json(fitted);
  json["tested"] = tested_json(fitted, held_out, layer);
  return json;
}

/// Envelopes of all sequences; and fitted on every other group, the first one included, and tested on the
/// rest.
Json envelopes_json(const std::vector<Evidence>& evidence) {
  const std::vector<std::string> groups = groups_of(evidence);
  std::vector<const Evidence*> all;
  std::vector<const Evidence*> first;
  std::vector<const Evidence*> held_out;
  for (const Evidence& sequence : evidence) {
    const auto group = std::ranges::find(groups, sequence.group) - groups.begin();
    all.push_back(&sequence);
    (group % 2 == 0 ? first : held_out).push_back(&sequence);
  }
  const std::vector<ForegoneAttention> layers = by_layer(all);
  std::vector<ForegoneAttention> first_layers = by_layer(first);
  first_layers.resize(layers.size());
  Json json;
  json["layers"] = Json::array();
  for (std::size_t layer = 0; layer < layers.size(); ++layer) {
    json["layers"].push_back(envelope_json(layers[layer], first_layers[layer], held_out, layer));
  }
  json["all_layers"] = envelope_json(over_layers(layers), over_layers(first_layers), held_out, std::nullopt);
  return json;
}

// Claims.

/// The largest observed age that meets T2.1's printed premise, where its conclusion fails most; else 1.
Index age_for_printed_theorem(const Decay& decay, double epsilon, Index ages) {
  Index k = 1;
  while (k < ages && analysis::printed_premise(decay, epsilon, k + 1)) {
    ++k;
  }
  return k;
}

/// R1 to R3 and T2.1 against the envelope of everything, so that their premise is met.
void judge_decay(const std::optional<Decay>& decay, const ForegoneAttention& all,
                 const CertificateQuestion& question, Findings& findings) {
  if (!decay) {
    const Finding nothing{.unmet = all.evictions == 0 ? "nothing was evicted"
                                                      : "no evicted token would have received attention"};
    add(findings, {{"T2.1", nothing}, {"R1", nothing}, {"R2", nothing}, {"R3", nothing}});
    return;
  }
  const analysis::DecayFindings found = analysis::decay_findings(*decay, all);
  const Index k = age_for_printed_theorem(*decay, question.epsilon, std::ssize(all.largest));
  add(findings, {{"T2.1", analysis::printed_theorem(*decay, question.epsilon, k)},
                 {"R1", found.summed_loss},
                 {"R2", found.flush_loss},
                 {"R3", found.future_loss}});
}

/// Why a claim was not looked at.
std::string not_looked_at(std::string_view id, const Certified& certified) {
  const bool is_mass = id.starts_with("MASS.");
  if (is_mass || id.starts_with("DAP.")) {
    if (!certified.pruning) {
      return "the policy does not prune";
    }
    if (is_mass != (certified.pruning->is_by_mass())) {
      return is_mass ? "the policy prunes by thresholds" : "the policy prunes by mass";
    }
    return id == "MASS.optimal" && !certified.pruning->is_mass_alone()
               ? "scope=image, alpha or max_evicted spare more tokens"
               : "no sequence has a picture that prompt text sees";
  }
  return certified.pair ? "the lanes' budgets differ, or the bin has no place in a layer"
                        : "the policy does not mark tokens for a recycle bin";
}

Json claims_json(const Findings& findings, const Certified& certified) {
  Json json = Json::array();
  for (const analysis::Claim& claim : analysis::claims()) {
    const auto found = findings.find(claim.id);
    const Finding finding =
        found == findings.end() ? Finding{.unmet = not_looked_at(claim.id, certified)} : found->second;
    const bool was_measured = finding.cases > 0;
    Json proofs = Json::array();
    for (const std::string_view proof : claim.proofs) {
      proofs.push_back(proof);
    }
    json.push_back({{"id", claim.id},
                    {"title", claim.title},
                    {"statement", claim.statement},
                    {"status", analysis::name(claim.status)},
                    {"proofs", proofs},
                    {"document", claim.document},
                    {"applies", finding.applies()},
                    {"unmet", finding.applies() ? Json(nullptr) : Json(finding.unmet)},
                    {"relation", kRelations[static_cast<std::size_t>(finding.relation)]},
                    {"measured", was_measured ? finite_or_null(finding.measured) : Json(nullptr)},
                    {"bound", was_measured ? finite_or_null(finding.bound) : Json(nullptr)},
                    {"rounding", was_measured ? finite_or_null(finding.rounding) : Json(nullptr)},
                    {"slack", was_measured ? finite_or_null(finding.slack()) : Json(nullptr)},
                    {"cases", finding.cases},
                    {"verdict", analysis::name(finding.verdict())}});
  }
  return json;
}

// What the bounds allow.

/// A count; the largest Index stands for any number.
Json count_or_any(std::optional<Index> count) {
  return !count || *count == std::numeric_limits<Index>::max() ? Json("any") : Json(*count);
}

Json largest(const std::map<Index, double>& by_tokens) {
  double most = 0.0;
  for (const auto& [tokens, sum] : by_tokens) {
    most = std::max(most, sum);
  }
  return by_tokens.empty() ? Json(nullptr) : Json(most);
}

Json safe_json(const std::vector<Evidence>& evidence, const std::optional<Decay>& decay,
               const ForegoneAttention& all, const CertificateQuestion& question) {
  Json json;
  Index bin = 0;
  std::optional<PruningLoss> pruning;
  Index candidates = 0;
  for (const Evidence& sequence : evidence) {
    bin = std::max(bin, sequence.largest_bin);
    if (sequence.pruning) {
      candidates = std::max(candidates, sequence.pruning->candidates);
      pruning = pruning && pruning->share >= sequence.pruning->share ? pruning : sequence.pruning;
    }
  }
  json["k"] = nullptr;
  json["wait"] = nullptr;
  json["bin"] = nullptr;
  if (decay) {
    const Index flushed = std::max<Index>(1, bin);
    const std::optional<Index> wait = analysis::least_wait(*decay, flushed, question.epsilon);
    json["k"] = {
        {"largest", count_or_any(analysis::largest_age(*decay, question.epsilon))},
        {"measured", all.largest_sum.empty() ? Json(nullptr) : Json(std::ranges::max(all.largest_sum))}};
    json["wait"] = {{"tokens", flushed}, {"least", wait ? Json(*wait) : Json(nullptr)}};
    json["bin"] = {{"largest", count_or_any(analysis::largest_bin(*decay, question.epsilon, 0))},
                   {"used", bin == 0 ? Json(nullptr) : Json(bin)},
                   {"measured", largest(all.by_future)}};
  }
  json["r"] = pruning ? Json{{"largest", analysis::largest_r(question.epsilon, candidates)},
                             {"candidates", candidates},
                             {"measured", pruning->share},
                             {"pruned", pruning->pruned}}
                      : Json(nullptr);
  return json;
}

/// The measured difference to greedy eviction under the policy's own scores, about which nothing is proved.
Json observed_json(const std::vector<Evidence>& evidence) {
  std::optional<Finding> worst;
  for (const Evidence& sequence : evidence) {
    if (sequence.observed) {
      worst = worst ? analysis::worse(*worst, *sequence.observed) : *sequence.observed;
    }
  }
  return worst ? Json{{"largest_difference", finite_or_null(worst->measured)}, {"rows", worst->cases}}
               : Json(nullptr);
}

}  // namespace

Json certification(const std::vector<SequenceSource>& sources, const PolicySource& policy,
                   const CertificateQuestion& question, const Json& manifest,
                   const ComparisonOptions& options, const std::function<void(double)>& progress) {
  check_numbers(question);
  Certified certified{policy, {}, {}};
  if (!policy.log_path()) {
    const std::shared_ptr<const Policy> configured = reference::make_policy(policy.spec());
    certified.pruning = pruning_of(*configured);
    certified.pair = bin_against_greedy(*configured);
  }
  const Parallel parallel(options.threads);
  ProgressSum sum(progress);
  std::vector<Evidence> evidence(sources.size());
  parallel.in_order(
      static_cast<Index>(sources.size()),
      [&](Index i) {
        ReplayOptions replay_options;
        replay_options.nan = options.nan;
        replay_options.for_each = parallel.for_each();
        replay_options.progress = sum.task();
        evidence[at(i)] = gather_evidence(sources[at(i)], certified, question.epsilon, replay_options);
      },
      [](Index) {});

  std::vector<const Evidence*> all;
  Findings findings;
  for (const Evidence& sequence : evidence) {
    all.push_back(&sequence);
    add(findings, sequence.findings);
  }
  const ForegoneAttention foregone = over_layers(by_layer(all));
  const std::optional<Decay> decay = analysis::decay_envelope(foregone.largest);
  judge_decay(decay, foregone, question, findings);

  Json result;
  result["schema"] = kCertificateSchema;
  result["manifest"] = manifest;
  result["policy"] = policy.spec();
  result["epsilon"] = question.epsilon;
  result["loss"] = loss_json(evidence, question);
  result["claims"] = claims_json(findings, certified);
  result["own_scores"] = observed_json(evidence);
  result["decay"] = envelopes_json(evidence);
  result["safe"] = safe_json(evidence, decay, foregone, question);
  return result;
}

std::vector<Check> certificate_checks(const Json& result) {
  const auto policy = result["policy"].get<std::string>();
  const Json& measured = result["loss"]["measured"];
  const auto epsilon = result["epsilon"].get<double>();
  const bool is_within = measured.is_number() && measured.get<double>() <= epsilon;
  std::vector<Check> checks{{policy, kLossCheck, is_within,
                             measured.is_number()
                                 ? fmt::format("largest mean missed mass of a sequence is {}, epsilon is {}",
                                               measured.get<double>(), epsilon)
                                 : "no sequence has a decode row, so no loss was measured"}};
  for (const Json& claim : result["claims"]) {
    if (claim["status"] != "proved" || !claim["applies"].get<bool>()) {
      continue;
    }
    checks.push_back(
        {policy, "claim " + claim["id"].get<std::string>(), claim["verdict"] != "fails",
         fmt::format("{}: measured {}, {} {}, slack {}, rounding {}, {} cases",
                     claim["statement"].get<std::string>(), claim["measured"].dump(),
                     claim["relation"].get<std::string>(), claim["bound"].dump(), claim["slack"].dump(),
                     claim["rounding"].dump(), claim["cases"].get<Index>())});
  }
  return checks;
}

}  // namespace hae::cli
