// SPDX-License-Identifier: Apache-2.0
#pragma once

// The reference's row for a formula of weights (plug/row_formula.hpp): plain loops over the visible keys, on any scalar.

#include <heed/plug/row_words.hpp>

#include <cmath>
#include <limits>
#include <string>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// Calls f(entry) for the entry of the list that names a learnt parameter of the part.
template <class Part, class Parameter, class F>
void find_parameter(const Part& part, const Parameter& parameter, const F& f) {
  bool found = false;
  for_each_entry<Part>([&]<class Entry>(const Entry& entry) {
    if constexpr (Entry::learnt)
      if (&(part.*entry.member) == &parameter) {
        found = true;
        f(entry);
      }
  });
  require(found,
          "heed: forward(row) asks for a learnt parameter that `parameters` does not name "
          "(plug/row_formula.hpp)");
}
template <class Parameter>
[[nodiscard]] Index checked_entry(const Parameter& parameter, Index n) {
  require(n >= 0 && n < parameter.size(), "heed: forward(row) asks for entry ", n,
          " of a learnt parameter with ", parameter.size(), " entries");
  return n;
}
// Checks that a query's or key's token has more than c numbers; returns c.
inline Index checked_input(Index c, Index count, const char* side) {
  require(c >= 0 && c < count, "heed: forward(row) asks for number ", c, " of a ", side,
          "'s token, it declares ", side, "_inputs = ", count);
  return c;
}
// Checks that a table has at least two rows, since a place lies between two.
template <class Parameter>
[[nodiscard]] Index checked_rows(const Parameter& parameter, Index dim) {
  require(parameter.shape().size() == 2 && parameter.extent(0) >= 2 &&
              (dim < 0 || parameter.extent(1) == dim),
          "heed: forward(row) of a normaliser asks for the products of a query with the rows of a "
          "parameter of shape ",
          extents_text(parameter.shape()), ", it must be (2 or more, ",
          dim < 0 ? "dim_qk" : std::to_string(dim), ")");
  return parameter.extent(0);
}

// A table with a number per entry.
template <class S>
struct LongHandTable {
  std::vector<S> values;
};

// The entry below a place in a table, and the distance from it to the place, from 0 to 1. Both are
// of the nearest place within the table.
template <class Real>
struct TablePlace {
  Index entry = 0;
  Real part = Real(0);
  bool inside = false;  // false: the place was cut

  TablePlace(Real place, Index rows) {
    if (std::isnan(place)) {
      part = place;
    } else if (place >= Real(rows - 1)) {
      entry = rows - 2;
      part = Real(1);
    } else if (place > Real(0)) {
      entry = Index(place);
      part = place - Real(entry);
      inside = true;
    }
  }
};

// The row that forward(row) gets in the reference: the visible keys, over any scalar.
template <class Normaliser, class S>
class LongHandFormulaRow {
  using Node = LongHandNode<S>;
  using Term = RowTerm<Node>;

 public:
  LongHandFormulaRow(const Normaliser& normaliser, const LongHandRow<S>& row)
      : normaliser_(normaliser), row_(row) {}

  [[nodiscard]] Term score(int map = 0) const {
    return {{row_.scores.at(std::size_t(map)), false}};
  }
  [[nodiscard]] Term key_index() const {
    Node node;
    for (const Index j : row_.keys) node.x.push_back(math::constant<S>(double(j)));
    return {node};
  }
  [[nodiscard]] Term query_index() const { return number(math::constant<S>(double(row_.query))); }
  [[nodiscard]] Term visible() const { return number(math::constant<S>(double(row_.keys.size()))); }
  [[nodiscard]] Index head() const { return row_.head; }
  [[nodiscard]] Term learnt(const Param<S>& parameter) const {
    return learnt(parameter, parameter.size() == 1 ? 0 : row_.head);
  }
  [[nodiscard]] Term learnt(const Param<S>& parameter, Index n) const {
    find_parameter(normaliser_, parameter, [](const auto&) {});
    return number(parameter[checked_entry(parameter, n)]);
  }
  [[nodiscard]] Term extra() const { return number(row_.extra); }
  [[nodiscard]] Index dim_qk() const { return Index(row_.query_row.size()); }
  [[nodiscard]] Term query(Index c) const { return number(row_.query_row.at(std::size_t(c))); }
  [[nodiscard]] Term query_input(Index c) const {
    return number(
        row_.query_inputs[std::size_t(checked_input(c, Index(row_.query_inputs.size()), "query"))]);
  }
  [[nodiscard]] Term key_input(Index c) const {
    Node node;
    for (const std::vector<S>& of_key : row_.key_inputs)
      node.x.push_back(of_key[std::size_t(checked_input(c, Index(of_key.size()), "key"))]);
    return {node};
  }
  [[nodiscard]] LongHandTable<S> products(const Param<S>& parameter) const {
    LongHandTable<S> table;
    const Index rows = checked_rows(parameter, dim_qk());
    for (Index p = 0; p < rows; ++p)
      table.values.push_back(math::dot_product(
          dim_qk(), [&](Index c) { return row_.query_row[std::size_t(c)]; },
          [&](Index c) { return parameter[p * dim_qk() + c]; }));
    return table;
  }
  [[nodiscard]] Term interpolate(const LongHandTable<S>& table, const Term& place) const {
    return in_long_hand<S>(
        [&](const S& x) {
          const TablePlace<double> at(double(math::value_of(x)), Index(table.values.size()));
          const S& low = table.values[std::size_t(at.entry)];
          const S& high = table.values[std::size_t(at.entry) + 1];
          const S part =
              at.inside ? S(x - math::constant<S>(double(at.entry))) : math::constant<S>(at.part);
          return S(low + part * (high - low));
        },
        place.e);
  }

  template <class X>
  [[nodiscard]] Term sum(const X& x) const {
    const Node node = node_of<Node>(x);
    S total = math::constant<S>(0);
    for (std::size_t n = 0; n < row_.keys.size(); ++n) total += node.at(n);
    return number(total);
  }
  template <class X>
  [[nodiscard]] Term sum_from(const X& x) const {
    Node node = keep(x).e;
    for (std::size_t n = node.x.size(); n-- > 1;) node.x[n - 1] += node.x[n];
    return {node};
  }
  template <class X>
  [[nodiscard]] Term sum_up_to(const X& x) const {
    Node node = keep(x).e;
    for (std::size_t n = 1; n < node.x.size(); ++n) node.x[n] += node.x[n - 1];
    return {node};
  }
  template <class X>
  [[nodiscard]] Term product_behind(const X& x) const {
    Node node = keep(x).e;
    S product = math::constant<S>(1);
    for (std::size_t n = node.x.size(); n-- > 0;) {
      const S own = node.x[n];
      node.x[n] = product;
      product = product * own;
    }
    return {node};
  }
  template <class X>
  [[nodiscard]] Term largest(const X& x) const {
    const Node node = node_of<Node>(x);
    double top = row_.keys.empty() ? 0 : -std::numeric_limits<double>::infinity();
    for (std::size_t n = 0; n < row_.keys.size(); ++n)
      top = std::max(top, double(math::value_of(node.at(n))));
    return number(math::constant<S>(top));
  }
  template <class X>
  [[nodiscard]] Term keep(const X& x) const {
    const Node node = node_of<Node>(x);
    Node column;
    for (std::size_t n = 0; n < row_.keys.size(); ++n) column.x.push_back(node.at(n));
    return {column};
  }
  [[nodiscard]] Term softmax(const Term& x) const {
    return {{long_hand_softmax(keep(x).e.x), false}};
  }
  void report(int, const Term&) const {}

 private:
  [[nodiscard]] static Term number(const S& x) { return {{{x}, true}}; }
  const Normaliser& normaliser_;
  const LongHandRow<S>& row_;
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
