// SPDX-License-Identifier: Apache-2.0
#pragma once

// The states of a panel's rows, as a streaming normaliser keeps them (plug/streaming.hpp): number by number, a lane per
// query.

#include <heed/plug/streamed_rows.hpp>
#include <heed/simd/scratch.hpp>

#include <algorithm>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// The state of a row normaliser, which keeps none, has one number that nobody reads.
template <class Normaliser, class Real>
struct StateOf {
  using Type = StreamState<Real, 0>;
};
template <class Normaliser, class Real>
requires Normaliser::streams struct StateOf<Normaliser, Real> {
  using Type = typename Normaliser::State;
};

template <class Normaliser, class Real>
class StreamStates {
 public:
  using State = typename StateOf<Normaliser, Real>::Type;
  static constexpr Index kNumbers = State::numbers;

  StreamStates(Scratch<Real>& scratch, Index lanes)
      : numbers_{scratch.take(kNumbers * lanes), kNumbers, lanes} {}
  // The states that stand in data().
  StreamStates(Real* data, Index lanes) : numbers_{data, kNumbers, lanes} {}

  // The state of vector v of the lanes.
  [[nodiscard]] State load(int v) const {
    State state;
    state.sum = numbers_.load(0, v);
    for (std::size_t n = 0; n < state.own.size(); ++n)
      state.own[n] = numbers_.load(Index(n) + 1, v);
    return state;
  }
  void store(int v, const State& state) const {
    numbers_.store(0, v, state.sum);
    for (std::size_t n = 0; n < state.own.size(); ++n)
      numbers_.store(Index(n) + 1, v, state.own[n]);
  }
  // The state of one query, in all lanes.
  [[nodiscard]] State of_lane(Index i) const {
    State state;
    state.sum = numbers_.row(0)[i];
    for (std::size_t n = 0; n < state.own.size(); ++n) state.own[n] = numbers_.row(Index(n) + 1)[i];
    return state;
  }
  // The sum of each query's weights.
  [[nodiscard]] Real* sums() const { return numbers_.row(0); }

  // Copies to an array [number][row], of the first `count` lanes.
  void save(Real* to, Index rows, Index count) const {
    for (Index n = 0; n < kNumbers; ++n)
      std::copy(numbers_.row(n), numbers_.row(n) + count, to + n * rows);
  }

 private:
  LaneTile<Real> numbers_;
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
