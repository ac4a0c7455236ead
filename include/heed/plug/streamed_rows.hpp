// SPDX-License-Identifier: Apache-2.0
#pragma once

// The types of streaming normalisers. Whoever writes one includes plug/streaming.hpp, which says how.

#include <heed/plug/normaliser.hpp>

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
