// SPDX-License-Identifier: Apache-2.0
#pragma once

// The one place where a call is opened: its door's name, options, share, sizes and other inputs are checked, in this order,
// before what the door writes.

#include <heed/engine/checks.hpp>
#include <heed/engine/queries.hpp>

#include <numeric>
#include <string>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// Where a share of the queries of a call may begin: at multiples of this number.
template <class Real>
[[nodiscard]] Index step_of_shares(const OpTiles<Real>& op, Geometry g, const Options& options) {
  g.share = {};
  const Mask<Real> none;
  const BoundMask<Real> bound(none, g, "heed::share_step");
  const Plan forward = plan_call<Real>(op, g, bound, options, 0, false),
             backward = plan_call<Real>(op, g, bound, options, 0, true);
  return std::lcm(forward.lanes, backward.lanes * backward.group);
}

// Throws where an op cannot be computed in shares, or a share cuts through what is computed together.
template <class Real>
void require_share(const OpTiles<Real>& op, const Geometry& g, const Options& options,
                   const std::string& where) {
  if (g.share == Share{}) return;
  require(!op.readout.needs_rehearsal(), where,
          ": the op's rows depend on all rows of the call, a share of it has ", g.held_queries(),
          " of ", g.len_q);
  require(op.normaliser.traits.mergeable || g.held_keys() == g.len_kv, where,
          ": the op reads all keys of a row at once, a share of the call has ", g.held_keys(),
          " of ", g.len_kv);
  if (g.held_queries() == g.len_q) return;
  const Index step = step_of_shares(op, g, options);
  const auto fits = [&](Index at) { return at % step == 0 || at == g.len_q; };
  require(fits(g.share.queries_before) && fits(g.held_queries_end()), where,
          ": a share has queries [", g.share.queries_before, ", ", g.held_queries_end(), ") of ",
          g.len_q, "; it must begin and end at multiples of ", step,
          " (share_step()), or at the end");
}

// What a door takes.
struct DoorRules {
  const char* name;                 // in errors
  bool shares = false;              // Inputs::share
  bool pages = false;               // of keys and values
  const char* as_stored = nullptr;  // numbers that Precision::mixed does not reach
};
inline constexpr DoorRules kForwardDoor{"heed::forward", true, true};
inline constexpr DoorRules kBackwardDoor{"heed::backward", true};

// A call of an op that is being opened; arguments must outlive it.
template <class Real>
struct OpenCall {
  const OpTiles<Real>& op;
  const Inputs<Real>& in;
  const Mask<Real>& mask;
  const Options& options;
  std::string where;  // the beginning of its errors
  Geometry geometry = {};

  OpenCall(const OpTiles<Real>& of, const CallArguments<Real>& given, std::string begin)
      : op(of), in(given.in), mask(given.mask), options(given.options), where(std::move(begin)) {}
  // Checks what does not depend on the sizes.
  OpenCall(const OpTiles<Real>& of, const CallArguments<Real>& given, const DoorRules& door)
      : OpenCall(of, given, door_name(door.name, given.options.name)) {
    require_options<Real>(options, where);
    require(!door.as_stored || !options.precision.mixes(), where,
            ": precision is mixed, it must be storage; ", door.as_stored ? door.as_stored : "",
            " are computed as they are stored");
    if (!door.shares) refuse_share(in, where);
  }

  // Checks the inputs, and takes the sizes from them.
  void measure(const DoorRules& door) {
    geometry = geometry_of(op, in, where);
    if (!door.pages) {
      require_one_piece(in.key, "key", where);
      require_one_piece(in.value, "value", where);
    }
    require_share(op, geometry, options, where);
  }
  [[nodiscard]] int threads() const { return resolve_threads(options.threads); }
  [[nodiscard]] BoundMask<Real> bound_mask(int threads) const {
    return BoundMask<Real>(mask, geometry, where.c_str(), threads);
  }
  [[nodiscard]] CallStamp stamp() const {
    CallStamp stamp =
        CallStamp::of(op.type, geometry, mask, scale_of(op, geometry, options), options);
    if (in.packed) stamp.sequences = in.packed->sequences();
    return stamp;
  }
  // Checks what doors write, and what they read of forward().
  void check(const Outputs<Real>& out) const { check_outputs(op, out, geometry, in, mask, where); }
  void check(const BackwardArguments<Real>& given) const {
    check_backward(op, geometry, in, mask, given.out, given.grad_out, given.grads, where);
  }
  void check(const Saved<Real>& saved) const { check_saved(op, saved, stamp(), where); }
};

template <class Real>
[[nodiscard]] OpenCall<Real> open_call(const DoorRules& door, const OpTiles<Real>& op,
                                       const CallArguments<Real>& given) {
  OpenCall<Real> call(op, given, door);
  call.measure(door);
  return call;
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
