// SPDX-License-Identifier: Apache-2.0
#pragma once

// A row normaliser given by its formula alone: forward(row) returns the weights, and heed derives
// both passes and the reference from it. Whoever writes one includes this header.
//
//   template <class T>
//   struct Sink : heed::PlainRows {                               // softmax with a further place, of learnt height
//     heed::Param<T> height = T(0);                               // one value, or one per head
//     static constexpr auto parameters = std::tuple{heed::named("height", &Sink::height)};
//
//     auto forward(const auto& row) const {
//       const auto s = row.score();
//       const auto top = row.largest(s);
//       const auto e = heed::math::exp(s - top);
//       return e / (row.sum(e) + heed::math::exp(row.learnt(height) - top));
//     }
//   };
//   heed::Attention<float, heed::DotScore<float>, Sink<float>, heed::Identity<float>> op;
//
// It inherits PlainRows, and has neither vjp() nor reference(). Each term of a formula is a number per query or a number
// per pair; a formula combines them by + - * /, plain numbers and the words of heed::math that scores have
// (plug/own_score.hpp), select(a < b, x, y) among them, and branches on none of them. The row has
//
//   score(map = 0)            per pair: the score of a map
//   key_index()               per pair: the position of the key, from 0
//   query_index(), visible()  per query: its position (Inputs::first_query); how many keys it sees
//   learnt(parameter)         a parameter of the normaliser, its value for the current head
//   learnt(parameter, n)      its entry n
//   head()                    the output head, a plain number
//   extra()                   per query: the op's extra input (uses_extra)
//   query(c), dim_qk()        per query: column c of its row, without the scale (uses_query)
//   query_input(c)            per query: number c of its token (query_inputs in plug/token_inputs.hpp)
//   key_input(c)              per pair: number c of the key's token (key_inputs)
//   products(parameter)       the products of the query's row with the rows of a learnt (n, dim_qk): a table (uses_query)
//   interpolate(table, x)     per pair: the entry of the table at place x, cut to [0, n - 1], on a line between two entries
//   sum(x)                    per query: over the keys that it sees
//   sum_from(x), sum_up_to(x) per pair: over the keys from this one on, or up to it, this one included
//   product_behind(x)         per pair: the product over the keys behind this one, without it
//   largest(x)                per query: the largest number, 0 for a query that sees no key. It has no gradient, so the
//                             weights must not change with it
//   softmax(x)                per pair: exp(x) / sum(exp(x))
//   keep(x)                   x, computed once; without keep() a sum or product that is read twice is computed twice
//   report(d, x)              diagnostic d of the normaliser
//
// A parameter has a gradient only where learnt() or products() reads it.
//
// Bounds  Hidden pairs have weight 0 and no effect, whatever they hold; a query that sees no key has weights of 0. A NaN
//         stays in its own row. lse is 0, or -infinity for a query that sees no key. Sums add up partial sums of 128 keys.
// Cost    columns of scratch [keys]: one for each word over pairs, sum_from, softmax and keep; backward twice these, and
//         one for each map and key_input(c). Backward takes at most 4 times forward of the normaliser (bench/NOTES.md has
//         examples). An iterative formula, such as entmax, would keep each step: write its vjp() by hand.
// Errors  std::invalid_argument where learnt() reads a parameter that `parameters` does not name, or an entry that does not
//         exist, and where query_input() or key_input() reads a number that does not exist.

#include <heed/plug/key_tape.hpp>
#include <heed/plug/row_calls.hpp>
#include <heed/plug/taped_words.hpp>
#include <heed/plug/token_inputs.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// A table with a number per query in each entry.
template <class Real>
struct RowTable {
  Index rows;
  Real *values, *adjoints;  // [rows][W]
};

// The row that forward(row) gets in the engine: vector v of a block, on a tape. With `grad`, the tape records.
template <class Normaliser, class Real>
class TapedRow : public TapedWords<TapedRow<Normaliser, Real>, Normaliser, KeyTape<Real>, Real> {
  using Words = TapedWords<TapedRow, Normaliser, KeyTape<Real>, Real>;
  using Words::tape_, Words::gradient_of;
  using P = Pack<Real>;
  static constexpr Index W = kLanes<Real>;

 public:
  using Words::Words, Words::sum, Words::largest;

  [[nodiscard]] auto score(int map = 0) const {
    require(map >= 0 && map < Normaliser::maps, "heed: forward(row) of a normaliser asks for map ",
            map, " of ", Normaliser::maps);
    return tape_.scores(map);
  }
  [[nodiscard]] auto key_index() const {
    return RowTerm<PositionNode<Real>>{{&tape_, dry() ? 0 : block().first_key, tape_.keys()}};
  }
  [[nodiscard]] auto query_index() const {
    const Index first = dry() ? 0 : block().first_query + tape_.vector() * W;
    return tape_.independent(P::iota() + Real(first));
  }
  [[nodiscard]] auto visible() const { return tape_.independent(tape_.count_visible()); }
  [[nodiscard]] Index head() const { return dry() ? 0 : block().head; }

  [[nodiscard]] auto extra() const {
    static_assert(
        Normaliser::uses_extra,
        "heed: row.extra() needs `static constexpr bool uses_extra = true` (plug/normaliser.hpp)");
    const Index at = tape_.vector() * W;
    Real* to = dry() || !tape_.recording() ? nullptr : block().dextra + at;
    return tape_.variable(dry() ? P(Real(0)) : P::load(block().extra + at),
                          [to](P adjoint) { (P::load(to) + adjoint).store(to); });
  }
  [[nodiscard]] Index dim_qk() const { return dry() ? 0 : block().query.rows; }
  [[nodiscard]] auto query(Index c) const {
    require_query();
    const LaneTile<Real> to = dry() ? LaneTile<Real>{} : block().dquery;
    const int v = tape_.vector();
    return tape_.variable(dry() ? P(Real(0)) : block().query.load(c, v),
                          [=](P adjoint) { to.add(c, v, adjoint); });
  }
  [[nodiscard]] auto query_input(Index c) const {
    static_assert(query_inputs_of<Normaliser> > 0,
                  "heed: row.query_input(c) needs `static constexpr int query_inputs`, how many "
                  "numbers of each query's token there are (plug/token_inputs.hpp)");
    checked_input(c, query_inputs_of<Normaliser>, "query");
    const LaneTile<Real> to = dry() ? LaneTile<Real>{} : block().dquery_inputs;
    const int v = tape_.vector();
    return tape_.variable(dry() ? P(Real(0)) : block().query_inputs.load(c, v),
                          [=](P adjoint) { to.add(c, v, adjoint); });
  }
  [[nodiscard]] auto key_input(Index c) const {
    static_assert(
        key_inputs_of<Normaliser> > 0,
        "heed: row.key_input(c) needs `static constexpr int key_inputs`, how many numbers "
        "of each key's token there are (plug/token_inputs.hpp)");
    return tape_.token_input(checked_input(c, key_inputs_of<Normaliser>, "key"));
  }
  [[nodiscard]] RowTable<Real> products(const Param<Real>& parameter) const {
    require_query();
    const Index rows = checked_rows(parameter, dry() ? -1 : dim_qk());
    Real* to = gradient_of(parameter);
    const RowTable<Real> table{rows, tape_.arena().template numbers<Real>(rows * W),
                               tape_.arena().template numbers<Real>(rows * W)};
    if (dry()) return table;
    const int v = tape_.vector();
    const LaneTile<const Real> query = block().query;
    for (Index p = 0; p < rows; ++p)
      math::dot_product(
          query.rows, [&](Index c) { return P(parameter[p * query.rows + c]); },
          [&](Index c) { return query.load(c, v); })
          .store(table.values + p * W);
    const Real* entries = parameter.data();
    tape_.then([=, of = &tape_] { reverse_products(table, entries, *of, to); });
    return table;
  }
  template <class E>
  [[nodiscard]] auto interpolate(const RowTable<Real>& table, const RowTerm<E>& place) const {
    KeyTape<Real>& tape = tape_;
    const E e = place.e;
    return tape.column(
        [&](const ColumnNode<Real>& to) { read_table(tape, table, e, to); },
        [&tape, table, e](const ColumnNode<Real>& of) { reverse_table(tape, table, e, of); });
  }

  template <class X>
  [[nodiscard]] auto sum_from(const X& x) const {
    return tape_.template running_sum<true>(node_of<ColumnNode<Real>>(x));
  }
  template <class X>
  [[nodiscard]] auto sum_up_to(const X& x) const {
    return tape_.template running_sum<false>(node_of<ColumnNode<Real>>(x));
  }
  template <class X>
  [[nodiscard]] auto product_behind(const X& x) const {
    return tape_.product_behind(node_of<ColumnNode<Real>>(x));
  }
  template <class E>
  [[nodiscard]] auto softmax(const RowTerm<E>& x) const {
    const auto e = math::exp(x - largest(x));
    return e * (1 / sum(e));
  }
  template <class E>
  void report(int d, const RowTerm<E>& x) const {
    static_assert(is_number<E>,
                  "heed: row.report(d, x) takes a number per query (plug/row_formula.hpp)");
    if (!dry() && block().diagnostics)
      x.e.of->value.store(block().diagnostics + d * block().lanes() + tape_.vector() * W);
  }

 private:
  [[nodiscard]] bool dry() const { return !tape_.block(); }
  [[nodiscard]] const RowBlock<Real>& block() const { return *tape_.block(); }
  static void require_query() {
    static_assert(Normaliser::uses_query,
                  "heed: row.query(c) and row.products(parameter) need `static constexpr bool "
                  "uses_query = true` "
                  "(plug/normaliser.hpp)");
  }

  // z_p = q . e_p:   dq += sum_p dz_p e_p     de_p += sum over queries of dz_p q
  static void reverse_products(const RowTable<Real>& table, const Real* entries,
                               KeyTape<Real>& tape, Real* to) {
    const RowBlock<Real>& block = *tape.block();
    const int v = tape.vector();
    const Index dim = block.query.rows, padded = whole_vectors<Real>(dim),
                valid = tape.valid_lanes();
    const auto dz = [&](Index p) { return P::load(table.adjoints + p * W); };
    for (Index c = 0; c < dim; ++c)
      block.dquery.add(c, v,
                       math::dot_product(
                           table.rows, [&](Index p) { return P(entries[p * dim + c]); }, dz));
    Real* rows = tape.arena().template numbers<Real>(W * padded);  // rows of the queries
    for (Index c = 0; c < dim; ++c)
      for (Index i = 0; i < W; ++i) rows[i * padded + c] = block.query.row(c)[v * W + i];
    for (Index p = 0; p < table.rows; ++p)
      for (Index i = 0; i < valid; ++i) {
        const Real g = table.adjoints[p * W + i];
        if (g == Real(0)) continue;
        Real* sums = to + p * dim;
        const Real* row = rows + i * padded;
        Index c = 0;
        for (; c + W <= dim; c += W)
          mul_add(P(g), P::load(row + c), P::load(sums + c)).store(sums + c);
        for (; c < dim; ++c) sums[c] += g * row[c];
      }
  }
  // y = (1 - part) z_entry + part z_(entry + 1), lane by lane
  template <class E>
  [[gnu::noinline, gnu::flatten]] static void read_table(const KeyTape<Real>& tape,
                                                         const RowTable<Real>& table, E e,
                                                         const ColumnNode<Real>& to) {
    KeyTape<Real>::for_runs(e, tape.keys(), [&](Index j) {
      Real place[std::size_t(W)], y[std::size_t(W)];
      e.value(j).store(place);
      for (Index i = 0; i < W; ++i) {
        const TablePlace<Real> at(place[i], table.rows);
        const Real* z = table.values + at.entry * W + i;
        y[i] = z[0] + at.part * (z[W] - z[0]);
      }
      tape.store(to, j, P::load(y));
    });
  }
  // dz_entry += (1 - part) dy     dz_(entry + 1) += part dy     dplace = (z_(entry + 1) - z_entry) dy where it is not cut
  template <class E>
  [[gnu::noinline, gnu::flatten]] static void reverse_table(const KeyTape<Real>& tape,
                                                            const RowTable<Real>& table, E e,
                                                            const ColumnNode<Real>& of) {
    KeyTape<Real>::for_runs(e, tape.keys(), [&](Index j) {
      Real place[std::size_t(W)], g[std::size_t(W)];
      e.value(j).store(place);
      P::load(of.adjoints + j * W).store(g);
      for (Index i = 0; i < W; ++i) {
        if (g[i] == Real(0)) continue;
        const TablePlace<Real> at(place[i], table.rows);
        const Real* z = table.values + at.entry * W + i;
        Real* dz = table.adjoints + at.entry * W + i;
        dz[0] += (Real(1) - at.part) * g[i];
        dz[W] += at.part * g[i];
        g[i] = at.inside ? (z[W] - z[0]) * g[i] : Real(0);
      }
      e.push(j, P::load(g));
    });
  }
};

// Sets lse of vector v: 0, or -infinity where no key is seen.
template <class Normaliser, class Real>
void write_no_lse(const RowBlock<Real>& block, int v) {
  for (std::size_t m = 0; m < std::size_t(Normaliser::maps); ++m) {
    const auto top = Pack<Real>::load(block.score_max[m] + v * kLanes<Real>);
    select(is_hidden(top), top, Pack<Real>(Real(0))).store(block.lse[m] + v * kLanes<Real>);
  }
}

// A formula's passes and reference. Real, or S, is the scalar of its parameters.
template <class Normaliser, class Real>
struct RowFormula {
  static void forward(const Normaliser& normaliser, RowBlock<Real>& block) {
    KeyTape<Real> tape(&block, false);
    const TapedRow<Normaliser, Real> row(tape, normaliser, nullptr);
    for (int v = 0; v < block.vectors; ++v) {
      tape.begin(v);
      write_no_lse<Normaliser>(block, v);
      tape.write_weights(normaliser.forward(row).e);
    }
  }
  static void vjp(const Normaliser& normaliser, RowBlock<Real>& block, Normaliser& grad) {
    KeyTape<Real> tape(&block, true);
    const TapedRow<Normaliser, Real> row(tape, normaliser, &grad);
    for (int v = 0; v < block.vectors; ++v) {
      tape.begin(v);
      if constexpr (Normaliser::uses_extra)
        Pack<Real>(Real(0)).store(block.dextra + v * kLanes<Real>);
      tape.write_gradients(normaliser.forward(row).e);
    }
  }
  // Runs the formula without rows to count columns. With `grad` parameters count as learnt, so that the columns of their
  // adjoints count, too.
  [[nodiscard]] static Index work_tiles(const Normaliser& normaliser, bool backward) {
    Normaliser grad = normaliser;
    KeyTape<Real> tape(nullptr, backward);
    tape.begin(0);
    (void)normaliser.forward(
        TapedRow<Normaliser, Real>(tape, normaliser, backward ? &grad : nullptr));
    return tape.columns();
  }
  [[nodiscard]] static std::vector<Real> reference(const Normaliser& normaliser,
                                                   const LongHandRow<Real>& row) {
    const LongHandFormulaRow<Normaliser, Real> formula(normaliser, row);
    return formula.keep(normaliser.forward(formula)).e.x;
  }

  // Has the formula a reference?
  [[nodiscard]] static consteval bool has_reference() {
    return requires(const Normaliser& n, const LongHandFormulaRow<Normaliser, Real>& row) {
      row.keep(n.forward(row));
    };
  }
  // The check of plug/check.hpp.
  static consteval bool check() {
    using Row = TapedRow<Normaliser, Real>;
    static_assert(
        requires(const Normaliser n, const Row& row) { n.forward(row); },
        "heed: a row normaliser needs vjp(RowBlock&, grad) const beside forward(RowBlock&) const, "
        "or else `auto forward(const auto& row) const` alone, which heed differentiates "
        "(plug/row_formula.hpp)");
    static_assert(
        requires(const Normaliser n, const Row& row) {
          requires is_row_term<std::remove_cvref_t<decltype(n.forward(row))>>;
        },
        "heed: forward(row) of a normaliser without vjp() cannot be differentiated: it returns "
        "no number per pair that is made of row.score() by + - * / and the words of heed::math; "
        "std::exp and its like lose the derivative (plug/row_formula.hpp)");
    return true;
  }
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
