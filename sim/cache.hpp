#pragma once

#include <span>
#include <vector>

#include "sim/view.hpp"

namespace hae {

struct SequenceInfo;

/// What evicts on its own: a whole layer, or each of its KV heads.
enum class LaneKind { layer, kv_head };

/// Lanes of one layer.
Index lane_count(const SequenceInfo& info, LaneKind kind);

/// The cache of one layer of one run: which tokens each lane holds. Everything is indexed by position, and
/// nothing is ever packed, so a token cannot be mistaken for a slot. Policies see it as constant; the engine
/// changes it.
class LayerCache {
 public:
  LayerCache(const SequenceInfo& info, LaneKind kind);

  [[nodiscard]] LaneKind kind() const { return kind_; }
  [[nodiscard]] Index lanes() const { return static_cast<Index>(lanes_.size()); }

  /// Positions [0, joined()) have entered, whether they are still here or not.
  [[nodiscard]] Index joined() const { return joined_; }

  [[nodiscard]] bool is_resident(Index lane, Index token) const { return keep(lane)[offset(token)] != 0.0f; }
  [[nodiscard]] bool is_pending(Index lane, Index token) const { return pending_since(lane, token) >= 0; }

  /// Step in which a pending token was marked; -1 if it is not pending.
  [[nodiscard]] Index pending_since(Index lane, Index token) const {
    return at(lane).pending_since[offset(token)];
  }

  [[nodiscard]] Index residents(Index lane) const { return at(lane).residents; }

  /// Marked tokens that are still resident, in the order of marking.
  [[nodiscard]] std::span<const Index> pending(Index lane) const { return at(lane).pending; }
  [[nodiscard]] Index unmarked(Index lane) const {
    return residents(lane) - static_cast<Index>(at(lane).pending.size());
  }

  /// 1 where a position is resident, 0 elsewhere; padded to a multiple of 32.
  [[nodiscard]] std::span<const float> keep(Index lane) const { return at(lane).keep; }

  /// keep() of every lane.
  [[nodiscard]] std::vector<std::span<const float>> keep_by_lane() const;

  /// First position among the newest `recent` residents, pending ones counted; joined() when recent is 0.
  [[nodiscard]] Index recent_begin(Index lane, Index recent) const;

  /// Whether both hold the same tokens in the same lanes.
  [[nodiscard]] bool same_residents(const LayerCache& other) const;

  // The engine's part.
  void join(Index token);
  void skip(Index token);  ///< the token passes without ever entering a lane
  void evict(Index lane, Index token);
  void mark(Index lane, Index token, Index step);

 private:
  struct Lane {
    std::vector<float> keep;           ///< [padded T]
    std::vector<Index> pending_since;  ///< [T], -1 where not pending
    std::vector<Index> pending;
    Index residents = 0;
  };

  [[nodiscard]] static std::size_t offset(Index token) { return static_cast<std::size_t>(token); }
  [[nodiscard]] const Lane& at(Index lane) const { return lanes_[static_cast<std::size_t>(lane)]; }
  [[nodiscard]] Lane& at(Index lane) { return lanes_[static_cast<std::size_t>(lane)]; }

  LaneKind kind_;
  Index joined_ = 0;
  std::vector<Lane> lanes_;
};

}  // namespace hae
