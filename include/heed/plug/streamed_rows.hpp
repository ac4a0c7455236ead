// SPDX-License-Identifier: Apache-2.0
#pragma once

// The types of streaming normalisers. Whoever writes one includes plug/streaming.hpp, which says how.

#include <heed/core/error.hpp>
#include <heed/plug/normaliser.hpp>

#include <algorithm>
#include <array>

namespace heed {
inline namespace HEED_ABI {

// The numbers of a pack of rows: the sum of their weights, which the engine adds up, and the normaliser's own.
template <class Real, int own_numbers>
struct StreamState {
  static constexpr int numbers = 1 + own_numbers;
  Pack<Real> sum = Real(0);
  std::array<Pack<Real>, std::size_t(own_numbers)> own{};
};

// Learnt keys of one head, row after row, and their values; null where these are zeros.
template <class Real>
struct LearntRows {
  Real *keys = nullptr, *values = nullptr;
};
// An op's learnt keys (heads or 1, count, dim_qk) and their values (heads or 1, count, dim_v), if it has some.
template <class Real>
struct LearntOfOp {
  LearntRows<const Real> first;
  Index heads = 1, count = 0, dim_qk = 0, dim_v = 0;
  Index key_step = 0, value_step = 0;  // from head to head
  [[nodiscard]] LearntRows<const Real> of_head(Index h) const {
    return {first.keys + h * key_step, first.values ? first.values + h * value_step : nullptr};
  }
};

template <class Normaliser>
inline constexpr bool has_learnt_keys = requires {
  Normaliser::learnt_keys;
};
template <class Normaliser>
inline constexpr bool has_learnt_values = requires {
  Normaliser::learnt_values;
};

namespace detail {

// Calls f(part, its learnt keys, its learnt values or null).
template <class Normaliser, class F>
void with_learnt(Normaliser& of, const F& f) {
  auto* values = &(of.*Normaliser::learnt_keys);
  values = nullptr;
  if constexpr (has_learnt_values<Normaliser>) values = &(of.*Normaliser::learnt_values);
  f(of.*Normaliser::learnt_keys, values);
}
template <class Real, class Normaliser>
[[nodiscard]] LearntOfOp<Real> learnt_of(const Normaliser& normaliser) {
  LearntOfOp<Real> of;
  with_learnt(normaliser, [&](const auto& keys, const auto* values) {
    if (!keys.given()) return;
    of.heads = keys.extent(0);
    of.count = keys.extent(1);
    of.dim_qk = keys.extent(2);
    of.key_step = keys.extent(0) == 1 ? 0 : of.count * of.dim_qk;
    of.first.keys = keys.data();
    if (!values || !values->given()) return;
    require(values->extent(1) == of.count, "heed: there are ", of.count, " learnt keys and ",
            values->extent(1), " values of them");
    of.heads = std::max(of.heads, values->extent(0));
    of.dim_v = values->extent(2);
    of.value_step = values->extent(0) == 1 ? 0 : of.count * of.dim_v;
    of.first.values = values->data();
  });
  return of;
}

}  // namespace detail

// A pack of queries of one head.
template <class Real>
struct StreamQueries {
  Index head = 0;
  Index valid = 0;                   // lanes from here on are padding and add to no parameter
  Pack<Real> index;                  // position of each query (Inputs::first_query)
  Pack<Real> visible;                // keys that each query sees (counts_visible)
  LaneTile<const Real> inputs = {};  // [query_inputs][lanes]
  LaneTile<Real> dinputs = {};       // vjp() adds to it, [query_inputs][lanes]
  int vector = 0;                    // index of this vector of queries in these tiles

  // Number c of each query's token.
  [[nodiscard]] Pack<Real> input(Index c) const { return inputs.load(c, vector); }
  void add_input(Index c, Pack<Real> g) const { dinputs.add(c, vector, g); }
};

// Base of a streaming normaliser; plug/streaming.hpp has the list of its members.
template <class Real, int own_numbers = 0>
struct StreamedRows : NormaliserDefaults {
  static constexpr bool streams = true, needs_weight = false;
  using P = Pack<Real>;
  using State = StreamState<Real, own_numbers>;
  using Queries = StreamQueries<Real>;

  [[nodiscard]] State begin(const Queries&) const { return {}; }
  [[nodiscard]] P move(State&, P, bool&) const { return Real(1); }
  template <class Normaliser, class F>
  static void with_weight(const Normaliser& normaliser, const State& state, F&& f) {
    f([&](P score) __attribute__((always_inline)) { return normaliser.weight(state, score); });
  }
  [[nodiscard]] P finish(const State&) const { return Real(1); }
  [[nodiscard]] P lse(const State&) const { return Real(0); }
  void vjp(const Queries&, const State&, P, auto&) const {}
};

}  // namespace HEED_ABI
}  // namespace heed
