// SPDX-License-Identifier: Apache-2.0
#pragma once

// The tape of a row normaliser's formula (plug/row_formula.hpp): rows of scores in, weights and gradients of scores out.

#include <heed/plug/row_tape.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

template <class Real>
class KeyTape : public RowTape<Real> {
  using Base = RowTape<Real>;

 public:
  using Base::largest, Base::W;
  using typename Base::Column, typename Base::Number, typename Base::P;

  // A tape for the rows of a block; without one it counts columns.
  KeyTape(const RowBlock<Real>* block, bool recording)
      : Base(recording, block ? block->work.data : nullptr,
             block && block->keys() > 0 ? block->work.rows * block->work.lanes / (block->keys() * W)
                                        : 0,
             block ? block->keys() : 0),
        block_(block),
        keys_(block ? block->keys() : 0) {}

  // Goes on with vector v of the block.
  void begin(int v) {
    TileColumn<const Real> shown{};
    if (block_) shown = {block_->scores[0].data + v * W, block_->scores[0].lanes};
    Base::begin(v, block_ ? std::clamp<Index>(block_->valid_lanes - v * W, 0, W) : 0, keys_, shown);
    score_adjoints_ = {};
  }

  [[nodiscard]] const RowBlock<Real>* block() const { return block_; }
  [[nodiscard]] Index keys() const { return keys_; }

  [[nodiscard]] Column scores(int map) {
    Real*& adjoints = score_adjoints_[std::size_t(map)];
    if (this->recording() && !adjoints) adjoints = this->zeros(keys_);
    if (!block_) return {{{this, nullptr, 0, 0, nullptr}, map}};
    const LaneTile<Real>& tile = block_->scores[std::size_t(map)];
    return {{{this, tile.data + this->vector() * W, tile.lanes, keys_, adjoints}, map}};
  }
  // Number c of each key's token: dt_j += sum over queries that see key j of dy_j, y_j = t_j for each of them.
  [[nodiscard]] auto token_input(Index c) {
    const TokenRows<const Real> of = block_ ? block_->key_inputs : TokenRows<const Real>{};
    return this->tokens(of.data + (block_ ? c : 0), of.stride, keys_,
                        [this, c, valid = this->valid_lanes()](Index j, P g) {
                          g = zero_where(this->hidden(j), g);
                          block_->dkey_inputs(j, c) +=
                              valid == W ? sum_lanes(g) : Real(sum_valid_lanes(g, 0, valid));
                        });
  }
  [[nodiscard]] P count_visible() const {
    return keys_ > 0 ? heed::count_visible(column_of(block_->scores[0], this->vector()), keys_)
                     : P(Real(0));
  }
  [[nodiscard]] Number largest(const ColumnNode<Real>& x) {
    if (x.map < 0 || keys_ == 0) return Base::largest(x);
    return this->independent(row_top(*block_, std::size_t(x.map), this->vector()));
  }

  // Writes the result of a formula, the weights, over the scores.
  template <class X>
  [[gnu::noinline, gnu::flatten]] void write_weights(const X& x) const {
    X e = x;
    this->for_runs(
        e, keys_, [&](Index j) __attribute__((always_inline)) {
          block_->scores[0].store(j, this->vector(), zero_where(this->hidden(j), e.value(j)));
        });
  }
  // Backward: takes dw_j = dweights_j, runs all loops from the last to the first, and writes the gradients of the scores.
  template <class X>
  void write_gradients(const X& x) {
    reverse_weights(x);
    this->run_back();
    for (std::size_t m = 0; m < score_adjoints_.size(); ++m) {
      const LaneTile<Real>& to = block_->dscores[m];
      if (!to.data) continue;
      for (Index j = 0; j < keys_; ++j)
        to.store(j, this->vector(),
                 score_adjoints_[m] ? P::load(score_adjoints_[m] + j * W) : P(Real(0)));
    }
  }

 private:
  template <class X>
  [[gnu::noinline, gnu::flatten]] void reverse_weights(const X& x) const {
    X e = x;
    const int vector = this->vector();
    const LaneTile<Real> weights = block_->weights, dweights = block_->dweights;
    this->for_runs(
        e, keys_, [&](Index j) __attribute__((always_inline)) {
          const auto mask = this->hidden(j);
          const P g = zero_where(mask, dweights.load(j, vector));
          weights.store(j, vector, zero_where(mask, e.value(j)));
          e.push(j, g);
        });
  }

  const RowBlock<Real>* block_;
  Index keys_;
  std::array<Real*, std::tuple_size_v<decltype(RowBlock<Real>::scores)>> score_adjoints_{};
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
