// SPDX-License-Identifier: Apache-2.0
#pragma once

// The last step of forward over backward: what panels have added up for keys, and its tangents, become tangents of the
// gradients of the keys as they are stored, of the numbers of their tokens, and of the parameters that features and the
// transform read. As KeySide::chain() does in backward:
//
//   df -> df . df/dk,   then   dK -> dK . dt/dk           both on dual numbers (op_hvps.hpp)
//
// Heads run in parallel; what they add to parameters is kept per head, and added up in their order.

#include <heed/engine/hvp_shared.hpp>
#include <heed/engine/hvps.hpp>
#include <heed/engine/tangents.hpp>

#include <memory>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

template <class Real>
class MovingKeyChain {
 public:
  MovingKeyChain(const CallContext<Real>& c, const ScoreHvps<Real>& hvps,
                 const TangentOperands<Real>& d, const KeyTangents<Real>& tangents,
                 HvpShared<Real>& shared)
      : c_(c), traits_(c.op.score.traits), hvps_(hvps), d_(d), tangents_(tangents), s_(shared) {}

  // Adds to the result for keys and, if it is given, to the gradient of the score's parameters.
  void run(PartGradient<Real>* parameters, int threads) {
    if (traits_.key_features == 0 && !traits_.has_transform) return;
    const Geometry& g = c_.geometry;
    std::vector<ParameterSums> sums(std::size_t(g.batch * g.heads));
    parallel_for(g.batch * g.kv_heads, threads, [&](Index unit) {
      const Index b = unit / g.kv_heads, kv = unit % g.kv_heads;
      for (Index h = 0; h < g.heads; ++h)
        if (c_.op.normaliser.source(g, h, 0).kv_head == kv && is_reader(h))
          chain_head(b, h, sums[std::size_t(b * g.heads + h)]);
    });
    if (parameters) add_in_order(sums, *parameters);
  }

 private:
  static constexpr Index kWidth = kPanelLanes<Real>;
  // What the keys of one head add to parameters: to p[0], p[1], ..., and to those that the transform reads.
  struct ParameterSums {
    std::vector<double> scalars;
    std::unique_ptr<MovingGradient<Real>> transform;
  };

  // Heads that read the same side values are chained once.
  [[nodiscard]] bool is_reader(Index h) const { return h == 0 || !c_.keys.shares(h, h - 1); }

  void chain_head(Index b, Index h, ParameterSums& sums) const {
    const Geometry& g = c_.geometry;
    const Source source = c_.op.normaliser.source(g, h, 0);
    const Index inputs = traits_.key_inputs;
    const auto take_sides = [&](Scratch<Real>& s) {
      return MovingSides<Real>::take(s, source.width, c_.keys.needs().key_table_rows(), inputs,
                                     kWidth);
    };
    const auto take_rows = [&](Scratch<Real>& s) {
      return MovingLanes<Real>::take(s, traits_.has_transform ? source.width : 0, kWidth);
    };
    const auto take_features = [&](Scratch<Real>& s) {
      return MovingLanes<Real>::take(s, traits_.key_features, kWidth);
    };
    const auto take_scalars = [&](Scratch<Real>& s) {
      return LaneTile<Real>{s.take(traits_.scalars * kWidth), traits_.scalars, kWidth};
    };
    Scratch<Real> scratch(
        2 * (scratch_elements<Real>(take_sides) + scratch_elements<Real>(take_rows)) +
        scratch_elements<Real>(take_features) + scratch_elements<Real>(take_scalars));
    const MovingSides<Real> rows = take_sides(scratch), grads = take_sides(scratch);
    const MovingLanes<Real> before = take_rows(scratch), work = take_rows(scratch);
    const Features features{take_features(scratch), take_scalars(scratch)};
    sums.scalars.assign(std::size_t(traits_.scalars), 0.0);
    sums.transform = hvps_.transform_gradient();
    // Invariant: the rows of keys before j have all that this head gives them.
    for (Index j = 0; j < g.len_kv; j += kWidth) {
      const Index count = std::min(kWidth, g.len_kv - j), at = c_.keys.row(b, h, 0, j);
      tangents_.load(rows.value, rows.tangent, b, h, source, j, count);
      grads.fill(Real(0));
      if (traits_.key_features > 0)
        chain_features(rows, grads, features, h, j, count, at, sums.scalars);
      if (traits_.has_transform) {
        const Index numbers = c_.keys.needs().row_numbers();
        const auto add = [&](const std::vector<Real>& from, const LaneTile<Real>& to) {
          pack_lanes(from.data() + at * numbers, numbers, count, source.width, work.value.data,
                     kWidth);
          for (int v = 0; v < kPanelVectors; ++v)
            for (Index col = 0; col < source.width; ++col) to.add(col, v, work.value.load(col, v));
        };
        add(s_.drows, grads.value.x);
        add(s_.drow_tangents, grads.tangent.x);
        tangents_.load_rows(c_.key, b, source, j, count, before.value);
        tangents_.load_rows(d_.key, b, source, j, count, before.tangent);
        hvps_.transform_vjp(RowSide::key, h, j, count, before, work, grads.x(), *sums.transform);
      }
      if (s_.grads.key.given())
        add_unpacked_lanes(grads.tangent.x.data, kWidth, count, source.width,
                           s_.grads.key.row(b, source.kv_head, j) + source.key_column,
                           s_.grads.key.strides().row);
      if (inputs > 0) {
        const auto write = [&](const LaneTile<Real>& from, std::vector<Real>& to) {
          unpack_lanes(from.data, kWidth, count, inputs, to.data() + at * inputs, inputs);
        };
        write(grads.value.input, s_.dkey_inputs);
        write(grads.tangent.input, s_.dkey_input_tangents);
      }
    }
  }

  // Work memory of chain_features().
  struct Features {
    MovingLanes<Real> gradients;     // [key_features][keys]
    LaneTile<Real> scalar_tangents;  // [scalars][keys]
  };
  // Features of `count` keys from `key` on, whose first has its side values at row `at`.
  void chain_features(const MovingSides<Real>& rows, const MovingSides<Real>& grads,
                      const Features& of, Index h, Index key, Index count, Index at,
                      std::vector<double>& sums) const {
    const Index features = traits_.key_features;
    const auto load = [&](const std::vector<Real>& from, const LaneTile<Real>& to) {
      to.fill(Real(0));
      for (Index n = 0; n < count; ++n)
        for (Index i = 0; i < features; ++i)
          to.row(i)[n] = from[std::size_t((at + n) * features + i)];
    };
    load(s_.dfeatures, of.gradients.value);
    load(s_.dfeature_tangents, of.gradients.tangent);
    of.scalar_tangents.fill(Real(0));
    hvps_.features_vjp(RowSide::key, rows, h, key, nullptr, kPanelVectors, of.gradients, grads,
                       of.scalar_tangents);
    for (int v = 0; v < kPanelVectors; ++v)
      for (int i = 0; i < traits_.scalars; ++i)
        sums[std::size_t(i)] += sum_valid_lanes(of.scalar_tangents.load(i, v), v, count);
  }

  void add_in_order(const std::vector<ParameterSums>& sums, PartGradient<Real>& to) const {
    const Geometry& g = c_.geometry;
    std::vector<double> of_transform(std::size_t(to.numbers()), 0.0);
    for (Index h = 0; h < g.heads; ++h) {
      std::vector<double> scalars(std::size_t(traits_.scalars), 0.0);
      for (Index b = 0; b < g.batch; ++b) {
        const ParameterSums& own = sums[std::size_t(b * g.heads + h)];
        for (std::size_t i = 0; i < own.scalars.size(); ++i) scalars[i] += own.scalars[i];
        if (own.transform) own.transform->add_tangents_to(of_transform.data());
      }
      s_.vjps.score.add_scalars(h, scalars.data(), to);
    }
    to.add_from(of_transform.data());
  }

  const CallContext<Real>& c_;
  const ScoreTraits& traits_;
  const ScoreHvps<Real>& hvps_;
  TangentOperands<Real> d_;
  const KeyTangents<Real>& tangents_;
  HvpShared<Real>& s_;
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
