// SPDX-License-Identifier: Apache-2.0
#pragma once

// A readout given by its formula alone: forward(row) returns the output row, and heed derives both passes, the tangent and the
// reference from it. Whoever writes one includes this header.
//
//   template <class T>
//   struct Gated : heed::FormulaReadout {                         // a gate for each head, of the query's row
//     static constexpr bool uses_query = true;
//     heed::Param<T> weight;
//     std::vector<Index> shape(const heed::Geometry& g) const { return {g.heads, g.dim_qk}; }
//     static constexpr auto parameters = std::tuple{heed::tensor("weight", &Gated::weight, &Gated::shape)};
//
//     auto forward(const auto& row) const {
//       return heed::math::sigmoid(row.sum(row.query() * row.learnt_row(weight))) * row.mixed();
//     }
//   };
//   heed::Attention<float, heed::DotScore<float>, heed::Softmax<float>, Gated<float>> op;
//
// It inherits FormulaReadout, and has neither vjp() nor reference(). Each term of a formula is a number per query or a number
// per column of a query's row; a formula combines them as those of normalisers do (plug/row_formula.hpp). A readout declares
// what it reads by the flags of plug/readout.hpp. The row has
//
//   mixed()                   [dim_v]: the mixed values
//   own_value(), own_key()    [dim_v], [dim_qk]: rows of the query's own token, the key at its position (uses_own_rows)
//   query()                   [dim_qk]: the query's row, without the scale (uses_query)
//   extra(), extra(c)         [extra_dim]; its number c: the op's extra input (uses_extra)
//   query_input(c)            number c of the query's token (query_inputs)
//   lse(map = 0)              log-sum-exp of the row's scores, -infinity where the query sees no key (uses_lse)
//   query_index(), head()     the query's position; the output head, a plain number
//   learnt(parameter)         a parameter of the readout, its value for the current head; learnt(parameter, n): its entry n
//   learnt_row(parameter)     [columns]: the current head's row of a learnt (heads or 1, columns)
//   sum(x), largest(x)        over the columns; largest() has no gradient, so the output must not change with it
//   keep(x)                   x, computed once; exp, log and the like are kept without it
//
// A number that is summed or returned counts for each of the dim_v columns. A parameter has a gradient only where a word reads it.
//
// Accuracy sums run over the columns in their order
// Cost     memory for the mixed rows of a call (saves_mixed), and for a few rows of each panel. At most 1.5 times a vjp() written
//          by hand for one pass over the columns, 2.5 times for three (bench/NOTES.md)
// Errors   std::invalid_argument where a word reads what does not exist, or a formula puts columns of different counts together

#include <heed/plug/readout_calls.hpp>
#include <heed/plug/taped_words.hpp>
#include <heed/plug/token_inputs.hpp>

namespace heed {
inline namespace HEED_ABI {

// Base of a readout that is a formula.
struct FormulaReadout : PlainReadout {
  static constexpr bool saves_mixed = true;
};

namespace detail {

// The current head's row of a learnt (heads or 1, columns): its first entry.
template <class Parameter>
[[nodiscard]] Index first_of_head(const Parameter& parameter, Index head) {
  require(parameter.shape().size() == 2 && (parameter.extent(0) == 1 || head < parameter.extent(0)),
          "heed: forward(row) of a readout asks for a row of a parameter of shape ",
          extents_text(parameter.shape()), ", it must be (heads or 1, columns)");
  return parameter.extent(0) == 1 ? 0 : head * parameter.extent(1);
}
[[nodiscard]] inline Index checked_column(Index c, Index count, const char* what) {
  require(c >= 0 && c < count, "heed: forward(row) of a readout asks for number ", c, " of ", what,
          ", which has ", count);
  return c;
}

// The row that forward(row) gets in the engine: vector v of a panel, on a tape. With `grad`, the tape records.
template <class Readout, class Real>
class TapedReadout : public TapedWords<TapedReadout<Readout, Real>, Readout, RowTape<Real>, Real> {
  using Words = TapedWords<TapedReadout, Readout, RowTape<Real>, Real>;
  using Words::tape_, Words::gradient_of;
  using P = Pack<Real>;

 public:
  TapedReadout(RowTape<Real>& tape, const Readout& readout, const ReadoutPanel<Real>& panel,
               const LaneTile<const Real>& mixed, Readout* grad)
      : Words(tape, readout, grad), panel_(panel), mixed_(mixed) {}

  [[nodiscard]] auto mixed() const { return tape_.rows(mixed_, panel_.tile); }
  [[nodiscard]] auto own_value() const {
    require_own_rows();
    return tape_.rows(panel_.own_value, panel_.down_value);
  }
  [[nodiscard]] auto own_key() const {
    require_own_rows();
    return tape_.rows(panel_.own_key, panel_.down_key);
  }
  [[nodiscard]] auto query() const {
    static_assert(Readout::uses_query,
                  "heed: row.query() needs `static constexpr bool uses_query = true` "
                  "(plug/readout.hpp)");
    return tape_.rows(panel_.query, panel_.dquery);
  }
  [[nodiscard]] auto extra() const {
    require_extra();
    return tape_.rows(panel_.extra, panel_.dextra);
  }
  [[nodiscard]] auto extra(Index c) const {
    require_extra();
    return number(panel_.extra, panel_.dextra, c, "the extra input");
  }
  [[nodiscard]] auto query_input(Index c) const {
    static_assert(query_inputs_of<Readout> > 0,
                  "heed: row.query_input(c) needs `static constexpr int query_inputs`, how many "
                  "numbers of each query's token there are (plug/token_inputs.hpp)");
    checked_input(c, query_inputs_of<Readout>, "query");
    return number(panel_.query_inputs, panel_.dquery_inputs, c, "the query's token");
  }
  [[nodiscard]] auto lse(Index map = 0) const {
    static_assert(Readout::uses_lse,
                  "heed: row.lse() needs `static constexpr bool uses_lse = true` "
                  "(plug/readout.hpp)");
    return number(panel_.lse, panel_.dlse, map, "lse");
  }
  [[nodiscard]] auto query_index() const {
    const Index first =
        panel_.geometry.query_position(panel_.first_row) + tape_.vector() * P::width;
    return tape_.independent(P::iota() + Real(first));
  }
  [[nodiscard]] Index head() const { return panel_.head; }

  [[nodiscard]] auto learnt_row(const Param<Real>& parameter) const {
    const Index first = first_of_head(parameter, head());
    Real* to = gradient_of(parameter);
    const Index valid = tape_.valid_lanes();
    return tape_.tokens(
        parameter.data() + first, 1, dry() ? 0 : parameter.extent(1),
        [=](Index c, P adjoint) { to[first + c] += Real(sum_valid_lanes(adjoint, 0, valid)); });
  }

 private:
  [[nodiscard]] bool dry() const { return panel_.vectors == 0; }
  static void require_own_rows() {
    static_assert(Readout::uses_own_rows,
                  "heed: row.own_value() and row.own_key() need `static constexpr bool "
                  "uses_own_rows = true` (plug/readout.hpp)");
  }
  static void require_extra() {
    static_assert(Readout::uses_extra,
                  "heed: row.extra() needs `static constexpr bool uses_extra = true` "
                  "(plug/readout.hpp)");
  }
  // Row c of a lane tile, whose rows are called `what`.
  [[nodiscard]] auto number(const LaneTile<const Real>& from, const LaneTile<Real>& to, Index c,
                            const char* what) const {
    const int v = tape_.vector();
    return tape_.variable(dry() ? P(Real(0)) : from.load(checked_column(c, from.rows, what), v),
                          [=](P adjoint) { to.add(c, v, adjoint); });
  }

  const ReadoutPanel<Real>& panel_;
  LaneTile<const Real> mixed_;
};

// The row that forward(row) gets in the reference: row i of head h of batch b, over any scalar.
template <class Readout, class S>
class LongHandReadout {
  using Node = LongHandNode<S>;
  using Term = RowTerm<Node>;

 public:
  LongHandReadout(const Readout& readout, const ReadoutContext<S>& all, Index b, Index h, Index i)
      : readout_(readout), all_(all), g_(all.geometry), b_(b), h_(h), i_(i) {}

  [[nodiscard]] Term mixed() const {
    return columns(all_.out.data() + g_.row_index(b_, h_, i_) * g_.dim_v, g_.dim_v);
  }
  [[nodiscard]] Term own_value() const { return columns(all_.own_value_row(b_, h_, i_), g_.dim_v); }
  [[nodiscard]] Term own_key() const { return columns(all_.own_key_row(b_, h_, i_), g_.dim_qk); }
  [[nodiscard]] Term query() const { return columns(all_.query_row(b_, h_, i_), g_.dim_qk); }
  [[nodiscard]] Term extra() const {
    const Index dim = readout_.extra_dim(g_);
    return columns(all_.extra_row(b_, h_, i_, dim), dim);
  }
  [[nodiscard]] Term extra(Index c) const {
    return number(
        extra().e.x[std::size_t(checked_column(c, readout_.extra_dim(g_), "the extra input"))]);
  }
  [[nodiscard]] Term query_input(Index c) const {
    constexpr int count = query_inputs_of<Readout>;
    return number(all_.query_input(b_, h_, i_, checked_input(c, count, "query"), count));
  }
  [[nodiscard]] Term lse(Index map = 0) const {
    const Index m = checked_column(map, Index(all_.lse.size()), "lse");
    return number(all_.lse[std::size_t(m)][std::size_t(g_.row_index(b_, h_, i_))]);
  }
  [[nodiscard]] Term query_index() const {
    return number(math::constant<S>(double(g_.query_position(i_))));
  }
  [[nodiscard]] Index head() const { return h_; }
  [[nodiscard]] Term learnt(const Param<S>& parameter) const {
    return learnt(parameter, parameter.size() == 1 ? 0 : h_);
  }
  [[nodiscard]] Term learnt(const Param<S>& parameter, Index n) const {
    find_parameter(readout_, parameter, [](const auto&) {});
    return number(parameter[checked_entry(parameter, n)]);
  }
  [[nodiscard]] Term learnt_row(const Param<S>& parameter) const {
    find_parameter(readout_, parameter, [](const auto&) {});
    return columns(parameter.data() + first_of_head(parameter, h_), parameter.extent(1));
  }
  template <class X>
  [[nodiscard]] Term sum(const X& x) const {
    S total = math::constant<S>(0);
    for (const S& term : keep(x).e.x) total += term;
    return number(total);
  }
  template <class X>
  [[nodiscard]] Term largest(const X& x) const {
    double top = -std::numeric_limits<double>::infinity();
    for (const S& term : keep(x).e.x) top = std::max(top, double(math::value_of(term)));
    return number(math::constant<S>(top));
  }
  template <class X>
  [[nodiscard]] Term keep(const X& x) const {
    const Node node = node_of<Node>(x);
    if (!node.one) return {node};
    return {{std::vector<S>(std::size_t(g_.dim_v), node.x[0]), false}};
  }

 private:
  [[nodiscard]] static Term columns(const S* first, Index count) {
    return {{std::vector<S>(first, first + count), false}};
  }
  [[nodiscard]] static Term number(const S& x) { return {{{x}, true}}; }

  const Readout& readout_;
  const ReadoutContext<S>& all_;
  const Geometry& g_;
  Index b_, h_, i_;
};

// A formula's passes and reference. Real, or S, is the scalar of its parameters.
template <class Readout, class Real>
struct ReadoutFormula {
  using P = Pack<Real>;
  using Tape = RowTape<Real>;
  using Row = TapedReadout<Readout, Real>;

  static void forward(const Readout& readout, const ReadoutPanel<Real>& panel) {
    for_vectors(readout, panel, panel.tile, nullptr,
                [&](Tape&, const auto& out, int v) { write_rows(out, panel.tile, v); });
  }
  static void vjp(const Readout& readout, const ReadoutPanel<Real>& panel, Readout& grad) {
    for_vectors(readout, panel, panel.saved, &grad, [&](Tape& tape, const auto& out, int v) {
      reverse_rows(out, panel.tile, v);
      tape.run_back();
    });
    lane_dot<Real>(panel.tile, panel.saved, panel.vectors, panel.delta);
  }
  // Runs the formula without rows to count columns.
  [[nodiscard]] static Index work_rows(const Readout& readout, const Geometry& g, bool backward) {
    Readout grad = readout;
    ReadoutPanel<Real> none;
    none.geometry = g;
    Tape tape(backward, nullptr, 0, 0);
    tape.begin(0, 0, 0, {});
    (void)readout.forward(Row(tape, readout, none, {}, backward ? &grad : nullptr));
    return tape.columns() * longest(readout, g);
  }
  static void reference(const Readout& readout, ReadoutContext<Real>& all) {
    for_each_row(all.geometry.out_shape(), [&](Index b, Index h, Index i) {
      const LongHandReadout<Readout, Real> row(readout, all, b, h, i);
      const std::vector<Real> out = row.keep(readout.forward(row)).e.x;
      std::copy(out.begin(), out.end(), all.out_row(b, h, i));
    });
  }
  // x[i] = f(x[i]), slope[i] = f'(x[i]) unless slope is null, f the readout's value().
  static void map_values(const Readout& readout, Real* x, Real* slope, Index n) {
    constexpr Index W = P::width;
    for (Index first = 0; first < n; first += W) {
      const Index count = std::min(W, n - first);
      Real value[std::size_t(W)] = {}, rate[std::size_t(W)];
      std::copy_n(x + first, count, value);
      const auto f = readout.value(LaneDual<P, 1>::template variable<0>(P::load(value)));
      f.value.store(value);
      f.grad[0].store(rate);
      std::copy_n(value, count, x + first);
      if (slope) std::copy_n(rate, count, slope + first);
    }
  }
  // The check of plug/check.hpp.
  static consteval bool check() {
    static_assert(
        requires(const Readout r, const Row& row) { r.forward(row); },
        "heed: a readout needs vjp(panel, grad) const beside forward(panel) const, or else "
        "`auto forward(const auto& row) const` alone, which heed differentiates "
        "(plug/readout_formula.hpp)");
    static_assert(
        requires(const Readout r, const Row& row) {
          requires is_row_term<std::remove_cvref_t<decltype(r.forward(row))>>;
        },
        "heed: forward(row) of a readout without vjp() cannot be differentiated: it returns no "
        "number per column that is made of row.mixed() by + - * / and the words of heed::math; "
        "std::exp and its like lose the derivative (plug/readout_formula.hpp)");
    static_assert(Readout::saves_mixed,
                  "heed: a readout without vjp() inherits FormulaReadout, since its derivative "
                  "needs the mixed rows (plug/readout_formula.hpp)");
    return true;
  }

 private:
  // Packs of the longest column.
  [[nodiscard]] static Index longest(const Readout& readout, const Geometry& g) {
    return std::max({g.dim_v, g.dim_qk, readout.extra_dim(g)});
  }
  // Calls body(tape, the formula's output, v) for each vector of rows; a tape with `grad` records.
  template <class Body>
  static void for_vectors(const Readout& readout, const ReadoutPanel<Real>& panel,
                          const LaneTile<const Real>& mixed, Readout* grad, const Body& body) {
    const Real zeros[std::size_t(P::width)] = {};  // hide no column
    const Index columns = longest(readout, panel.geometry);
    Tape tape(grad != nullptr, panel.work.data,
              panel.work.rows * panel.work.lanes / (columns * P::width), columns);
    const Row row(tape, readout, panel, mixed, grad);
    for (int v = 0; v < panel.vectors; ++v) {
      tape.begin(v, std::clamp<Index>(panel.valid_lanes - v * P::width, 0, P::width),
                 panel.tile.rows, {zeros, 0});
      body(tape, readout.forward(row).e, v);
    }
  }
  template <class X>
  [[gnu::noinline, gnu::flatten]] static void write_rows(const X& x, const LaneTile<Real>& to,
                                                         int v) {
    require_columns(x, to.rows);
    X e = x;
    Tape::for_runs(
        e, to.rows, [&](Index c) __attribute__((always_inline)) { to.store(c, v, e.value(c)); });
  }
  // tile: dL/dout becomes the first terms of dL/dmixed; tape.run_back() adds the others.
  template <class X>
  [[gnu::noinline, gnu::flatten]] static void reverse_rows(const X& x, const LaneTile<Real>& tile,
                                                           int v) {
    X e = x;
    Tape::for_runs(
        e, tile.rows, [&](Index c) __attribute__((always_inline)) {
          const P g = tile.load(c, v);
          tile.store(c, v, P(Real(0)));
          (void)e.value(c);
          e.push(c, g);
        });
  }
  static void require_columns(const auto& x, Index dim_v) {
    const Index columns = x.length();
    require(columns == dim_v || columns == 0, "heed: forward(row) of a readout returns ", columns,
            " columns, the output has ", dim_v);
  }
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
