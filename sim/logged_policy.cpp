#include "sim/logged_policy.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <tuple>

#include "sim/arbiter.hpp"

namespace hae {
namespace {

/// Refuses a log that no eviction of the sequence can have left behind.
class LogCheck {
 public:
  LogCheck(const LoggedRun& run, const SequenceInfo& info) : run_(run), info_(info) {}

  void check() {
    for (std::size_t i = 0; i < run_.log.entries.size(); ++i) {
      const LogEntry& entry = run_.log.entries[i];
      place_ = "entry " + std::to_string(i) + " (step " + std::to_string(entry.step) + ", layer " +
               std::to_string(entry.layer) + ", lane " + std::to_string(entry.lane) + ", token " +
               std::to_string(entry.token) + ")";
      check_entry(entry);
    }
    for (std::size_t i = 0; i < run_.log.pending.size(); ++i) {
      const PendingEntry& entry = run_.log.pending[i];
      place_ = "pending token " + std::to_string(entry.token) + " of layer " + std::to_string(entry.layer) +
               ", lane " + std::to_string(entry.lane);
      check_place(entry.layer, entry.lane, entry.token, info_.steps());
      check_mark(entry.token, entry.since, info_.steps());
    }
    for (std::size_t i = 0; i < run_.log.entries.size(); ++i) {
      const LogEntry& entry = run_.log.entries[i];
      if (entry.merge) {
        place_ = "entry " + std::to_string(i) + " (layer " + std::to_string(entry.layer) + ", token " +
                 std::to_string(entry.token) + ")";
        check_merge(entry);
      }
    }
    const Index lanes = lane_count(info_, run_.lanes);
    for (const auto& [place, count] : within_) {
      place_ = "token " + std::to_string(place.second) + " of layer " + std::to_string(place.first);
      expect(count == lanes, "leaves within the prefill in " + std::to_string(count) + " of " +
                                 std::to_string(lanes) + " lanes, expected all of them");
    }
  }

 private:
  void expect(bool holds, const std::string& complaint) const {
    if (!holds) {
      throw TraceError(run_.where + ": " + place_ + " " + complaint +
                       "; the log is not one of this sequence, or is damaged");
    }
  }

  void check_entry(const LogEntry& entry) {
    expect(entry.step >= 0 && entry.step <= info_.steps(),
           "names a step that does not exist, expected 0 .. " + std::to_string(info_.steps()));
    check_place(entry.layer, entry.lane, entry.token, entry.step);
    if (entry.step == 0) {
      left_in_prefill_.emplace(entry.layer, entry.lane, entry.token);
    }
    if (entry.within) {
      expect(entry.step == 0 && entry.layer > 0, "acts within a prefill, expected step 0 of a layer above 0");
      ++within_[{entry.layer, entry.token}];
    }
    if (entry.pending_since) {
      check_mark(entry.token, *entry.pending_since, entry.step);
    }
  }

  void check_merge(const LogEntry& entry) {
    const Merge& merge = *entry.merge;
    expect(entry.step == 0 && merge.into >= 0 && merge.into < info_.prompt,
           "is merged, expected in step 0 and into a prompt token");
    expect(!left_in_prefill_.contains({entry.layer, entry.lane, merge.into}),
           "is merged into token " + std::to_string(merge.into) + ", which leaves itself");
    expect(std::isfinite(merge.kept_weight) && std::isfinite(merge.weight) && std::isfinite(merge.size) &&
               merge.size > 0.0,
           "is merged with weights that are not finite, or a size that is not above 0");
    const auto [first, is_first] = merges_.try_emplace({entry.layer, entry.lane, merge.into}, merge);
    expect(first->second.kept_weight == merge.kept_weight && first->second.size == merge.size,
           "gives the token that it is merged into another weight or size than an entry before");
  }

  void check_place(Index layer, Index lane, Index token, Index step) {
    expect(layer >= 0 && layer < info_.layers,
           "names a layer that does not exist, expected 0 .. " + std::to_string(info_.layers - 1));
    const Index first_lane = logged_lane(run_.lanes, 0);
    const Index last_lane = first_lane + lane_count(info_, run_.lanes) - 1;
    expect(lane >= first_lane && lane <= last_lane, "names a lane that does not exist, expected " +
                                                        std::to_string(first_lane) + " .. " +
                                                        std::to_string(last_lane));
    expect(token >= 0 && token < info_.prompt + step,
           "has not joined yet, expected 0 .. " + std::to_string(info_.prompt + step - 1));
    expect(gone_.emplace(layer, lane, token).second, "leaves twice");
  }

  void check_mark(Index token, Index since, Index until) const {
    const Index joined = std::max<Index>(1, token - info_.prompt + 1);
    expect(since >= joined && since <= until, "was marked in step " + std::to_string(since) + ", expected " +
                                                  std::to_string(joined) + " .. " + std::to_string(until));
  }

  const LoggedRun& run_;
  const SequenceInfo& info_;
  std::string place_;
  std::set<std::tuple<Index, Index, Index>> gone_;             ///< (layer, lane, token)
  std::set<std::tuple<Index, Index, Index>> left_in_prefill_;  ///< (layer, lane, token)
  std::map<std::tuple<Index, Index, Index>, Merge> merges_;    ///< (layer, lane, token that stays)
  std::map<std::pair<Index, Index>, Index> within_;            ///< (layer, token) -> lanes
};

/// What one layer does in one decode step.
struct StepEvents {
  std::vector<Mark> mark;
  std::vector<Evict> evict;
};

class LoggedDecode final : public LayerDecode {
 public:
  /// events  [steps]
  LoggedDecode(std::vector<StepEvents> events) : events_(std::move(events)) {}

  Decision step(const Rows& /*row*/, const LayerCache& /*cache*/) override {
    StepEvents& now = events_[next_++];
    return {.evict = std::move(now.evict), .mark = std::move(now.mark)};
  }

 private:
  std::vector<StepEvents> events_;
  std::size_t next_ = 0;
};

class LoggedState final : public Run {
 public:
  LoggedState(const LoggedRun& run, const SequenceInfo& info)
      : run_(run),
        lanes_(lane_count(info, run.lanes)),
        fit_(static_cast<std::size_t>(info.layers)),
        decode_(static_cast<std::size_t>(info.layers),
                std::vector<StepEvents>(static_cast<std::size_t>(info.steps()))) {
    for (const LogEntry& entry : run.log.entries) {
      const Index lane = std::max<Index>(0, entry.lane);
      const Evict evict{entry.layer, lane, entry.token, entry.score, entry.merge};
      if (entry.within) {
        if (lane == 0) {  // The other lanes' entries say the same: see LogCheck.
          within_.push_back({entry.layer, Evict::kEveryLane, entry.token, entry.score, entry.merge});
        }
      } else if (entry.step == 0) {
        fit_[at(entry.layer)].push_back(evict);
      } else {
        events(entry.layer, entry.step).evict.push_back(evict);
      }
      if (entry.pending_since) {
        events(entry.layer, *entry.pending_since).mark.push_back({lane, entry.token});
      }
    }
    for (const PendingEntry& entry : run.log.pending) {
      events(entry.layer, entry.since).mark.push_back({std::max<Index>(0, entry.lane), entry.token});
    }
  }

  Decision prune(Index layer, const LayerCache& /*cache*/) override {
    return layer == 0 ? Decision{.evict = within_, .warnings = run_.warnings} : Decision{};
  }

  Decision fit(Index layer, const LayerCache& /*cache*/) override { return {.evict = fit_[at(layer)]}; }

  Decision balance(const std::vector<LayerCache>& /*caches*/) override {
    is_fitted_ = true;
    return {};
  }

  std::unique_ptr<LayerDecode> decode(Index layer) override {
    return std::make_unique<LoggedDecode>(std::move(decode_[at(layer)]));
  }

  /// In the prefill the sinks alone: a log does not say whether a token was pruned, which spares no recent
  /// ones, or evicted by its score.
  [[nodiscard]] Limits limits(Index layer, Index lane) const override {
    if (run_.limits.empty()) {
      return {};
    }
    const Limits& promised = run_.limits[at(layer * lanes_ + lane)];
    return is_fitted_ ? promised : Limits{.sinks = promised.sinks};
  }

 private:
  StepEvents& events(Index layer, Index step) { return decode_[at(layer)][at(step - 1)]; }

  const LoggedRun& run_;
  Index lanes_;
  bool is_fitted_ = false;
  std::vector<Evict> within_;
  std::vector<std::vector<Evict>> fit_;          ///< [layers] what leaves at the end of the prefill
  std::vector<std::vector<StepEvents>> decode_;  ///< [layers][steps]
};

class LoggedPolicy final : public Policy {
 public:
  explicit LoggedPolicy(LoggedRun run) : run_(std::move(run)) {}

  [[nodiscard]] std::string spec() const override { return run_.spec; }
  [[nodiscard]] std::vector<std::pair<std::string, std::string>> options() const override {
    return run_.options;
  }
  [[nodiscard]] LaneKind lanes() const override { return run_.lanes; }
  [[nodiscard]] Needs needs(const SequenceInfo& /*info*/, Index /*layer*/) const override {
    return {.keys = merges(), .values = merges()};
  }
  [[nodiscard]] bool merges() const override {
    return std::ranges::any_of(run_.log.entries, [](const LogEntry& e) { return e.merge.has_value(); });
  }
  [[nodiscard]] std::unique_ptr<Run> begin(const SequenceInfo& info) const override {
    LogCheck(run_, info).check();
    HAE_EXPECTS(run_.limits.empty() || std::ssize(run_.limits) == info.layers * lane_count(info, run_.lanes));
    return std::make_unique<LoggedState>(run_, info);
  }

 private:
  LoggedRun run_;
};

}  // namespace

std::shared_ptr<const Policy> logged_policy(LoggedRun run) {
  return std::make_shared<LoggedPolicy>(std::move(run));
}

}  // namespace hae
