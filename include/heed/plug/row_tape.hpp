// SPDX-License-Identifier: Apache-2.0
#pragma once

// Records the loops over a row that a formula runs (plug/row_terms.hpp), so that run_back() can run them backwards: over
// the keys of a query's scores (plug/key_tape.hpp), or over the columns of its rows (plug/readout_formula.hpp).

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
  void clear() { chunk_ = used_ = own_used_ = 0; }

 private:
  struct alignas(kAlign) Line {
    std::byte bytes[kAlign];
  };
  static constexpr std::size_t kOwn = 64, kChunk = 128;  // lines: 4 KiB, 8 KiB

  [[nodiscard]] void* take(std::size_t bytes) {
    const std::size_t lines = bytes / kAlign + 1;
    if (own_used_ + lines <= kOwn) return own_ + std::exchange(own_used_, own_used_ + lines);
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
  Line own_[kOwn];  // most formulas need no more
  std::vector<std::vector<Line>> chunks_;
  std::size_t chunk_ = 0, used_ = 0, own_used_ = 0;
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

  // A tape for one pass over vectors of rows. recording: run_back() will be called. `memory` has room for `room` columns, each
  // of `longest` packs; where `longest` is 0 nothing is computed, but columns() tells how many columns the formula keeps.
  RowTape(bool recording, Real* memory, Index room, Index longest)
      : recording_(recording), memory_(memory), room_(room), longest_(longest) {
    if (recording) records_.reserve(32);
  }
  RowTape(const RowTape&) = delete;  // terms point at their tape

  // Forgets all terms and goes on with vector v of the rows, `valid` lanes of which count. A number stands for `length` equal
  // ones where a formula sums or keeps it. shown: numbers, -infinity where an entry of a row is hidden.
  void begin(int v, Index valid, Index length, const TileColumn<const Real>& shown) {
    vector_ = v;
    valid_ = valid;
    length_ = length;
    shown_ = shown;
    columns_ = 0;
    arena_.clear();
    records_.clear();
  }

  [[nodiscard]] bool recording() const { return recording_; }
  [[nodiscard]] int vector() const { return vector_; }
  [[nodiscard]] Index columns() const { return columns_; }
  // Number of lanes of the vector that are queries.
  [[nodiscard]] Index valid_lanes() const { return valid_; }
  [[nodiscard]] RowArena& arena() { return arena_; }

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
  // A learnt number, whose gradient is added to *to.
  [[nodiscard]] Number learnt(Real value, Real* to) {
    return variable(P(value), [to, valid = valid_](P adjoint) {
      *to += Real(sum_valid_lanes(adjoint, 0, valid));
    });
  }
  // Adds back() to the loops that run_back() runs.
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
    const Column column = kept_column(length_of(x));
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
    const Column column = kept_column(length_of(x));
    add_up<back>(x, column.e);
    if (recording_) note(RunningPass<X, back>{x, column.e});
    return column;
  }
  // The products over the keys behind each key.
  template <class X>
  [[nodiscard]] Column product_behind(const X& x) {
    const Column column = kept_column(length_of(x));
    multiply_up(x, column.e);
    if (recording_) note(ProductPass<X>{x, column.e});
    return column;
  }
  // The largest over the keys that a query sees, 0 if it sees none. The number has no gradient.
  template <class X>
  [[nodiscard]] Number largest(const X& x) {
    return independent(largest_of(x));
  }
  // `count` numbers for all rows, `stride` apart in memory; back(j, adjoint) gets the gradient of number j.
  template <class Back>
  [[nodiscard]] RowTerm<TokenNode<Real>> tokens(const Real* values, Index stride, Index count,
                                                const Back& back) {
    Real* adjoints = recording_ ? zeros(count) : nullptr;
    then([=] {
      for (Index j = 0; j < count; ++j) back(j, P::load(adjoints + j * W));
    });
    return {{{this, values, stride, count, adjoints}}};
  }
  // The vector's numbers in a lane tile, whose gradients are added to another.
  [[nodiscard]] Column rows(const LaneTile<const Real>& tile, const LaneTile<Real>& adjoints) {
    const Index at = vector_ * W;
    Real* const adjoint =
        adjoints.data == nullptr ? nullptr : adjoints.data + at;  // forward has none
    return {{{this, tile.data + at, tile.lanes, tile.rows, adjoint, adjoints.lanes}, -1}};
  }
  // A column that fill(column) fills; back(column) takes its gradients.
  template <class Fill, class Back>
  [[nodiscard]] Column column(const Fill& fill, const Back& back) {
    const Column column = kept_column(length_);
    fill(column.e);
    then([of = column.e, back] { back(of); });
    return column;
  }

  [[nodiscard, gnu::always_inline]] auto hidden(Index j) const {
    return is_hidden(P::load(shown_.data + j * shown_.stride));
  }
  // How many numbers an expression has.
  template <class X>
  [[nodiscard]] Index length_of(const X& x) const {
    const Index own = x.length();
    return own > 0 ? own : length_;
  }
  // Runs all loops backwards, from the last to the first.
  void run_back() {
    while (!records_.empty()) {
      const Record record = records_.back();
      records_.pop_back();
      record.back(*this, record.pass);
    }
  }

  // The loops below take an expression by reference and copy it: an argument on the stack may lie where clang 14 aligns it less
  // than its packs need.

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

 protected:
  [[nodiscard]] Real* new_column() {
    const Index n = columns_++;
    if (longest_ == 0) return nullptr;
    require(n < room_, "heed: forward(row) keeps more columns than the ", room_,
            " that it keeps in head 0");
    return memory_ + n * longest_ * W;
  }
  // A column of zeros.
  [[nodiscard]] Real* zeros(Index length) {
    Real* first = new_column();
    return first ? std::fill_n(first, length * W, Real(0)) - length * W : first;
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

  [[nodiscard]] Column kept_column(Index length) {
    Real* values = new_column();
    return {{{this, values, W, length, recording_ ? new_column() : nullptr}, -1}};
  }
  template <class X>
  [[gnu::noinline, gnu::flatten]] void keep_values(const X& x, ColumnNode<Real> column) const {
    X e = x;
    for_runs(
        e, column.count, [&](Index j) __attribute__((always_inline)) {
          store(column, j, e.value(j));
        });
  }
  // d e_j += dy_j. The last operation of the expression reads its own value from memory.
  template <class X>
  [[gnu::noinline, gnu::flatten]] void reverse_kept(const X& x, ColumnNode<Real> column) const {
    X e = x;
    for_runs(
        e, column.count, [&](Index j) __attribute__((always_inline)) {
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
    const Index count = length_of(x);
    for (Index first = 0; first < count; first += kRun) {
      e.begin();
      P part = Real(0);
      for (Index j = first, end = std::min(count, first + kRun); j < end; ++j)
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
        e, length_of(x), [&](Index j) __attribute__((always_inline)) {
          (void)e.value(j);
          e.push(j, zero_where(hidden(j), g));
        });
  }
  // Calls f(j) for all keys in the order of a running sum, which starts again every kRun keys:
  // `total` holds the sum of the keys before them.
  template <bool back, class F>
  [[gnu::always_inline]] static void in_order(Index keys, const F& f) {
    P total = Real(0);
    for (Index done = 0; done < keys; done += kRun) {
      const Index end = std::min(keys, done + kRun);
      P part = Real(0);
      for (Index n = done; n < end; ++n) f(back ? keys - 1 - n : n, total, part);
      total += part;
    }
  }
  template <bool back, class X>
  [[gnu::noinline, gnu::flatten]] void add_up(const X& x, ColumnNode<Real> column) const {
    X e = x;
    e.begin();
    in_order<back>(
        column.count, [&](Index j, P total, P & part) __attribute__((always_inline)) {
          part += zero_where(hidden(j), e.value(j));
          store(column, j, total + part);
        });
  }
  // y_j = sum over k behind (before) j of e_k: d e_k += sum over j before (behind) k of dy_j
  template <bool back, class X>
  [[gnu::noinline, gnu::flatten]] void reverse_running(const X& x, ColumnNode<Real> column) const {
    X e = x;
    e.begin();
    in_order<!back>(
        column.count, [&](Index j, P total, P & part) __attribute__((always_inline)) {
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
    for (Index j = column.count; j-- > 0;) {
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
        e, column.count, [&](Index j) __attribute__((always_inline)) {
          const auto mask = hidden(j);
          const P factor = e.value(j);
          e.push(j, zero_where(mask, along(a, column.last(j))));
          a = select(mask, a, along(a, factor) + P::load(column.adjoints + j * W));
        });
  }
  template <class X>
  [[gnu::noinline, gnu::flatten]] P largest_of(const X& x) const {
    X e = x;
    const Index count = length_of(x);
    P top = -kInfinity<Real>;
    e.begin();
    for (Index j = 0; j < count; ++j)
      top = max(top, select(hidden(j), P(-kInfinity<Real>), e.value(j)));
    return zero_where(is_hidden(top), top);
  }
  bool recording_;
  int vector_ = 0;
  Real* memory_;
  Index room_, longest_, valid_ = 0, length_ = 0, columns_ = 0;
  TileColumn<const Real> shown_{};
  RowArena arena_;
  std::vector<Record> records_;
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
