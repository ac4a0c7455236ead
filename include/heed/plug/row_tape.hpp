// SPDX-License-Identifier: Apache-2.0
#pragma once

// Records the loops over keys that the formula of a row normaliser runs (plug/row_terms.hpp), so
// that write_gradients() can run them backwards.

#include <heed/core/error.hpp>
#include <heed/plug/row_terms.hpp>

#include <algorithm>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// Memory for small trivial objects, which stay where they are until clear().
class RowArena {
 public:
  static constexpr std::size_t kAlign = 64;

  template <class X>
  [[nodiscard]] X* make(const X& x) {
    static_assert(std::is_trivially_destructible_v<X> && alignof(X) <= kAlign);
    return new (take(sizeof(X))) X(x);
  }
  // `count` zeros.
  template <class Real>
  [[nodiscard]] Real* numbers(Index count) {
    Real* first = static_cast<Real*>(take(std::size_t(count) * sizeof(Real)));
    std::fill_n(first, count, Real(0));
    return first;
  }
  void clear() { chunk_ = used_ = 0; }

 private:
  struct alignas(kAlign) Line {
    std::byte bytes[kAlign];
  };
  static constexpr std::size_t kChunk = 128;  // lines: 8 KiB

  [[nodiscard]] void* take(std::size_t bytes) {
    const std::size_t lines = bytes / kAlign + 1;
    if (chunk_ < chunks_.size() && used_ + lines > chunks_[chunk_].size()) {
      ++chunk_;
      used_ = 0;
    }
    if (chunk_ == chunks_.size() || lines > chunks_[chunk_].size()) {
      chunks_.insert(chunks_.begin() + std::ptrdiff_t(chunk_),
                     std::vector<Line>(std::max(lines, kChunk)));
      used_ = 0;
    }
    used_ += lines;
    return chunks_[chunk_].data() + (used_ - lines);
  }
  std::vector<std::vector<Line>> chunks_;
  std::size_t chunk_ = 0, used_ = 0;
};

template <class Real>
class RowTape {
 public:
  using P = Pack<Real>;
  using Column = RowTerm<ColumnNode<Real>>;
  using Number = RowTerm<NumberNode<Real>>;
  static constexpr Index W = kLanes<Real>;
  // Number of keys in a partial sum; sums add up partial sums (fold_over_keys).
  static constexpr Index kRun = 128;

  // A tape for one pass over the rows of a block. recording: write_gradients() will be called.
  // Without a block nothing is computed, but columns() tells how many columns the formula keeps.
  RowTape(const RowBlock<Real>* block, bool recording)
      : block_(block),
        recording_(recording),
        keys_(block ? block->keys() : 0),
        room_(block && keys_ > 0 ? block->work.rows * block->work.lanes / (keys_ * W) : 0) {
    records_.reserve(32);
  }
  RowTape(const RowTape&) = delete;  // terms point at their tape
  RowTape& operator=(const RowTape&) = delete;

  // Forgets all terms and goes on with vector v of the block.
  void begin(int v) {
    vector_ = v;
    columns_ = 0;
    arena_.clear();
    records_.clear();
    score_adjoints_ = {};
  }

  [[nodiscard]] const RowBlock<Real>* block() const { return block_; }
  [[nodiscard]] bool recording() const { return recording_; }
  [[nodiscard]] int vector() const { return vector_; }
  [[nodiscard]] Index keys() const { return keys_; }
  [[nodiscard]] Index columns() const { return columns_; }
  // Number of lanes of the vector that are queries.
  [[nodiscard]] Index valid_lanes() const {
    return block_ ? std::clamp<Index>(block_->valid_lanes - vector_ * W, 0, W) : 0;
  }
  [[nodiscard]] RowArena& arena() { return arena_; }

  [[nodiscard]] Column scores(int map) {
    Real*& adjoints = score_adjoints_[std::size_t(map)];
    if (recording_ && !adjoints) {
      adjoints = new_column();
      std::fill_n(adjoints, keys_ * W, Real(0));
    }
    if (!block_) return {{{this, nullptr, 0, nullptr}, map}};
    const LaneTile<Real>& tile = block_->scores[std::size_t(map)];
    return {{{this, tile.data + vector_ * W, tile.lanes, adjoints}, map}};
  }
  // Number c of each key's token.
  [[nodiscard]] RowTerm<TokenNode<Real>> token_input(Index c) {
    Real* adjoints = recording_ ? new_column() : nullptr;
    if (!block_) return {{{this, nullptr, 0, nullptr}}};
    std::fill_n(adjoints, recording_ ? keys_ * W : 0, Real(0));
    then([this, adjoints, c] { reverse_tokens(adjoints, c); });
    return {{{this, block_->key_inputs.data + c, block_->key_inputs.stride, adjoints}}};
  }
  // A number that depends on no other number.
  [[nodiscard]] Number independent(P value) {
    return {{arena_.make(RowNumber<Real>{this, value, P(Real(0))})}};
  }
  // The same; `back(adjoint)` gets its gradient.
  template <class Back>
  [[nodiscard]] Number variable(P value, const Back& back) {
    const Number number = independent(value);
    then([of = number.e.of, back] { back(of->adjoint); });
    return number;
  }
  // Adds back() to the loops that write_gradients() runs.
  template <class Back>
  void then(const Back& back) {
    if (recording_) note(BackPass<Back>{back});
  }
  // The value of an expression of numbers.
  template <class X>
  [[nodiscard]] Number number(const X& x) {
    X e = x;
    e.begin();
    const Number number = independent(e.value(0));
    if (recording_) note(NumberPass<X>{x, number.e.of});
    return number;
  }
  // A column with the values of an expression, which is computed once.
  template <class X>
  [[nodiscard]] Column keep(const X& x) {
    const Column column = kept_column();
    keep_values(x, column.e);
    if (recording_) note(KeepPass<X>{x, column.e});
    return column;
  }
  // The sum over the keys that a query sees.
  template <class X>
  [[nodiscard]] Number sum(const X& x) {
    const Number number = independent(sum_of(x));
    if (recording_) note(SumPass<X>{x, number.e.of});
    return number;
  }
  // Running sums. back: over the keys from each key on; else up to it. Both include the key itself.
  template <bool back, class X>
  [[nodiscard]] Column running_sum(const X& x) {
    const Column column = kept_column();
    add_up<back>(x, column.e);
    if (recording_) note(RunningPass<X, back>{x, column.e});
    return column;
  }
  // The products over the keys behind each key.
  template <class X>
  [[nodiscard]] Column product_behind(const X& x) {
    const Column column = kept_column();
    multiply_up(x, column.e);
    if (recording_) note(ProductPass<X>{x, column.e});
    return column;
  }
  // The largest over the keys that a query sees, 0 if it sees none. The number has no gradient.
  template <class X>
  [[nodiscard]] Number largest(const X& x) {
    return independent(largest_of(x));
  }
  [[nodiscard]] P count_visible() const {
    return keys_ > 0 ? heed::count_visible(column_of(block_->scores[0], vector_), keys_)
                     : P(Real(0));
  }
  // A column that fill(column) fills; back(column) takes its gradients.
  template <class Fill, class Back>
  [[nodiscard]] Column column(const Fill& fill, const Back& back) {
    const Column column = kept_column();
    fill(column.e);
    then([of = column.e, back] { back(of); });
    return column;
  }

  [[nodiscard, gnu::always_inline]] auto hidden(Index j) const {
    return is_hidden(block_->scores[0].load(j, vector_));
  }

  // The loops below take an expression by reference and copy it: an argument on the stack may lie where clang 14 aligns it less
  // than its packs need.

  // Writes the result of a formula, the weights, over the scores.
  template <class X>
  [[gnu::noinline, gnu::flatten]] void write_weights(const X& x) const {
    X e = x;
    for_runs(
        e, keys_, [&](Index j) __attribute__((always_inline)) {
          block_->scores[0].store(j, vector_, zero_where(hidden(j), e.value(j)));
        });
  }
  // Backward: takes dw_j = dweights_j, runs all loops from the last to the first, and writes the gradients of the scores.
  template <class X>
  void write_gradients(const X& x) {
    reverse_weights(x);
    while (!records_.empty()) {
      const Record record = records_.back();
      records_.pop_back();
      record.back(*this, record.pass);
    }
    for (std::size_t m = 0; m < score_adjoints_.size(); ++m) {
      const LaneTile<Real>& to = block_->dscores[m];
      if (!to.data) continue;
      for (Index j = 0; j < keys_; ++j)
        to.store(j, vector_, score_adjoints_[m] ? P::load(score_adjoints_[m] + j * W) : P(Real(0)));
    }
  }

  // Stores the value of key j in a kept column.
  [[gnu::always_inline]] static void store(const ColumnNode<Real>& column, Index j, P x) {
    x.store(const_cast<Real*>(column.values) + j * W);
    if (column.adjoints) P(Real(0)).store(column.adjoints + j * W);
  }

  // Calls body(j) for all keys, with e.begin() and e.finish() around every run of them.
  template <class X, class Body>
  [[gnu::always_inline]] static void for_runs(X& e, Index keys, const Body& body) {
    for (Index first = 0; first < keys; first += kRun) {
      e.begin();
      for (Index j = first, end = std::min(keys, first + kRun); j < end; ++j) body(j);
      e.finish();
    }
  }

 private:
  struct Record {
    void (*back)(RowTape&, void*);
    void* pass;
  };
  template <class Pass>
  void note(const Pass& pass) {
    records_.push_back(
        {[](RowTape& tape, void* at) { static_cast<Pass*>(at)->back(tape); }, arena_.make(pass)});
  }

  template <class Back>
  struct BackPass {
    Back call;
    void back(RowTape&) { call(); }
  };
  template <class X>
  struct NumberPass {
    X x;
    RowNumber<Real>* number;
    void back(RowTape&) {
      x.begin();
      (void)x.value(0);
      x.push(0, number->adjoint);
      x.finish();
    }
  };
  template <class X>
  struct KeepPass {
    X x;
    ColumnNode<Real> column;
    void back(RowTape& tape) { tape.reverse_kept(x, column); }
  };
  template <class X>
  struct SumPass {
    X x;
    RowNumber<Real>* number;
    void back(RowTape& tape) { tape.reverse_sum(x, number->adjoint); }
  };
  template <class X, bool from>
  struct RunningPass {
    X x;
    ColumnNode<Real> column;
    void back(RowTape& tape) { tape.template reverse_running<from>(x, column); }
  };
  template <class X>
  struct ProductPass {
    X x;
    ColumnNode<Real> column;
    void back(RowTape& tape) { tape.reverse_products(x, column); }
  };

  [[nodiscard]] Real* new_column() {
    const Index n = columns_++;
    if (!block_) return nullptr;
    require(n < room_ || keys_ == 0,
            "heed: forward(row) of a normaliser keeps more columns than the ", room_,
            " that it keeps in head 0");
    return block_->work.data + n * keys_ * W;
  }
  [[nodiscard]] Column kept_column() {
    Real* values = new_column();
    return {{{this, values, W, recording_ ? new_column() : nullptr}, -1}};
  }
  template <class X>
  [[gnu::noinline, gnu::flatten]] void keep_values(const X& x, ColumnNode<Real> column) const {
    X e = x;
    for_runs(
        e, keys_, [&](Index j) __attribute__((always_inline)) { store(column, j, e.value(j)); });
  }
  // d e_j += dy_j. The last operation of the expression reads its own value from memory.
  template <class X>
  [[gnu::noinline, gnu::flatten]] void reverse_kept(const X& x, ColumnNode<Real> column) const {
    X e = x;
    for_runs(
        e, keys_, [&](Index j) __attribute__((always_inline)) {
          const P g = P::load(column.adjoints + j * W);
          if constexpr (
              requires {
                e.y;
                e.a.value(j);
              } &&
              !requires { e.b; }) {
            (void)e.a.value(j);
            e.y = column.last(j);
          } else {
            (void)e.value(j);
          }
          e.push(j, g);
        });
  }
  template <class X>
  [[gnu::noinline, gnu::flatten]] P sum_of(const X& x) const {
    X e = x;
    P total = Real(0);
    for (Index first = 0; first < keys_; first += kRun) {
      e.begin();
      P part = Real(0);
      for (Index j = first, end = std::min(keys_, first + kRun); j < end; ++j)
        part += zero_where(hidden(j), e.value(j));
      total += part;
    }
    return total;
  }
  // d e_j += dr where the pair is visible.
  template <class X>
  [[gnu::noinline, gnu::flatten]] void reverse_sum(const X& x, P g) const {
    X e = x;
    for_runs(
        e, keys_, [&](Index j) __attribute__((always_inline)) {
          (void)e.value(j);
          e.push(j, zero_where(hidden(j), g));
        });
  }
  // Calls f(j) for all keys in the order of a running sum, which starts again every kRun keys:
  // `total` holds the sum of the keys before them.
  template <bool back, class F>
  [[gnu::always_inline]] void in_order(const F& f) const {
    P total = Real(0);
    for (Index done = 0; done < keys_; done += kRun) {
      const Index end = std::min(keys_, done + kRun);
      P part = Real(0);
      for (Index n = done; n < end; ++n) f(back ? keys_ - 1 - n : n, total, part);
      total += part;
    }
  }
  template <bool back, class X>
  [[gnu::noinline, gnu::flatten]] void add_up(const X& x, ColumnNode<Real> column) const {
    X e = x;
    e.begin();
    in_order<back>([&](Index j, P total, P & part) __attribute__((always_inline)) {
      part += zero_where(hidden(j), e.value(j));
      store(column, j, total + part);
    });
  }
  // y_j = sum over k behind (before) j of e_k: d e_k += sum over j before (behind) k of dy_j
  template <bool back, class X>
  [[gnu::noinline, gnu::flatten]] void reverse_running(const X& x, ColumnNode<Real> column) const {
    X e = x;
    e.begin();
    in_order<!back>([&](Index j, P total, P & part) __attribute__((always_inline)) {
      part += P::load(column.adjoints + j * W);
      (void)e.value(j);
      e.push(j, zero_where(hidden(j), total + part));
    });
    e.finish();
  }
  template <class X>
  [[gnu::noinline, gnu::flatten]] void multiply_up(const X& x, ColumnNode<Real> column) const {
    X e = x;
    P product = Real(1);
    e.begin();
    for (Index j = keys_; j-- > 0;) {
      store(column, j, product);
      product = select(hidden(j), product, product * e.value(j));
    }
  }
  // y_j = prod over k behind j of e_k: d e_k += y_k a_k,   a_k = sum over j before k of dy_j prod over i between of e_i
  template <class X>
  [[gnu::noinline, gnu::flatten]] void reverse_products(const X& x, ColumnNode<Real> column) const {
    X e = x;
    P a = Real(0);
    for_runs(
        e, keys_, [&](Index j) __attribute__((always_inline)) {
          const auto mask = hidden(j);
          const P factor = e.value(j);
          e.push(j, zero_where(mask, along(a, column.last(j))));
          a = select(mask, a, along(a, factor) + P::load(column.adjoints + j * W));
        });
  }
  // dt_j += sum over queries that see key j of dy_j, y_j = t_j for each of them
  void reverse_tokens(const Real* adjoints, Index c) const {
    const Index valid = valid_lanes();
    for (Index j = 0; j < keys_; ++j) {
      const P g = zero_where(hidden(j), P::load(adjoints + j * W));
      block_->dkey_inputs(j, c) += valid == W ? sum_lanes(g) : Real(sum_valid_lanes(g, 0, valid));
    }
  }
  template <class X>
  [[gnu::noinline, gnu::flatten]] P largest_of(const X& x) const {
    X e = x;
    if (keys_ == 0) return Real(0);
    if constexpr (std::is_same_v<X, ColumnNode<Real>>)
      if (e.map >= 0) return row_top(*block_, std::size_t(e.map), vector_);
    P top = -kInfinity<Real>;
    e.begin();
    for (Index j = 0; j < keys_; ++j)
      top = max(top, select(hidden(j), P(-kInfinity<Real>), e.value(j)));
    return zero_where(is_hidden(top), top);
  }
  template <class X>
  [[gnu::noinline, gnu::flatten]] void reverse_weights(const X& x) const {
    X e = x;
    const LaneTile<Real> weights = block_->weights, dweights = block_->dweights;
    for_runs(
        e, keys_, [&](Index j) __attribute__((always_inline)) {
          const auto mask = hidden(j);
          const P g = zero_where(mask, dweights.load(j, vector_));
          weights.store(j, vector_, zero_where(mask, e.value(j)));
          e.push(j, g);
        });
  }

  const RowBlock<Real>* block_;
  bool recording_;
  int vector_ = 0;
  Index keys_, room_, columns_ = 0;
  RowArena arena_;
  std::vector<Record> records_;
  std::array<Real*, std::tuple_size_v<decltype(RowBlock<Real>::scores)>> score_adjoints_{};
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
