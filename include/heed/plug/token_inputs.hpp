// SPDX-License-Identifier: Apache-2.0
#pragma once

// Numbers of tokens that the parts of an op read beside rows of query, key and value: tensors of the call, (batch, heads,
// len_q, n) on the query side and (batch, heads, len_kv, n) on the key side. A tensor of 1 or kv_heads heads is shared by
// query heads. The gradients are exact, and sums over the heads that share a tensor.
//
//   template <class T>
//   struct Scored {
//     using Features = heed::TokenInputs<0, 1>;            // no number per query, one per key
//     template <class S>
//     S score(const auto& pair, const auto&) const { return pair.logit + pair.key[0]; }
//   };
//   heed::Inputs<float> in{query, key, value};
//   in.key_inputs = numbers;                               // grads.key_inputs in backward
//
//   TokenInputs<Q, K>            pair.query[c], pair.key[c]: the numbers themselves
//   CumulativeInputs<K, Term>    pair.key[c] = sum over t <= j of Term(x_tc), x the key side's tensor, and pair.query[c] the
//                                same up to the query's own token, the key at its position (Inputs::first_query).
//                                dL/dx_tc = Term'(x_tc) (sum over j >= t of dL/dpair.key[c] + likewise of queries)
//
// Features of one's own declare query_inputs or key_inputs, the numbers per token; their functions read row.input(c), and
// their vjp adds to add.add_input(c, g). With sums_inputs key_inputs are added up over tokens, each as summand(x), before
// rows of keys and of queries read them. query_inputs_name and key_inputs_name stand in error texts.
//
// Normalisers and readouts declare them by static members of the same two names, and read them so:
//
//   row normaliser        row.query_input(c), row.key_input(c) in a formula (plug/row_formula.hpp); by hand block.query_inputs
//                         and block.key_inputs, with gradients to block.dquery_inputs and block.dkey_inputs
//   streaming normaliser  queries.input(c) in begin(), with gradients to queries.add_input(c, g) in vjp(); none of keys
//   readout               panel.query_inputs, with gradients to panel.dquery_inputs; none of keys
//
// The first columns of query_inputs belong to the score, the next to the normaliser, the last to
// the readout; the same holds for key_inputs (InputColumns). Each part counts its own from 0.
//
// Accuracy  sums are added in double and rounded once: |error| <= eps/2 |sum|, besides that of Term. A difference of two
//           sums is then off by up to eps times the larger one. The same holds for sums of gradients.
// Bounds    sums run over all tokens, hidden or not: a NaN reaches those behind it. TokenInputs of a hidden key may hold
//           anything. first_query + len_q <= len_kv. Parts of keys (engine/partial.hpp) by key ranges of the whole tensors.
// Cost      sums are computed by each call anew, O(len_kv) terms per head: a decoder of long sequences keeps sums of its own,
//           and reads them through TokenInputs.
// Errors    std::invalid_argument where a tensor is missing, of another shape, or given to an op that reads none.

#include <heed/core/functions.hpp>
#include <heed/plug/score.hpp>

#include <array>
#include <string>

namespace heed {
inline namespace HEED_ABI {

// True if a part of an op declares numbers of this name.
template <class Part>
inline constexpr int query_inputs_of = 0;
template <class Part>
requires requires { Part::query_inputs; }
inline constexpr int query_inputs_of<Part> = Part::query_inputs;

template <class Part>
inline constexpr int key_inputs_of = 0;
template <class Part>
requires requires { Part::key_inputs; }
inline constexpr int key_inputs_of<Part> = Part::key_inputs;

template <class Score>
inline constexpr bool sums_inputs = false;
template <class Score>
requires requires { Score::sums_inputs; }
inline constexpr bool sums_inputs<Score> = Score::sums_inputs;

template <class Part>
inline constexpr bool reads_inputs = query_inputs_of<Part> > 0 || key_inputs_of<Part> > 0;

// Number of inputs that a query row has.
template <class Score>
inline constexpr int query_row_inputs =
    sums_inputs<Score> ? key_inputs_of<Score> : query_inputs_of<Score>;

template <class Part>
[[nodiscard]] constexpr const char* query_inputs_name() {
  if constexpr (requires { Part::query_inputs_name; })
    return Part::query_inputs_name;
  else
    return "query_inputs";
}
template <class Part>
[[nodiscard]] constexpr const char* key_inputs_name() {
  if constexpr (requires { Part::key_inputs_name; })
    return Part::key_inputs_name;
  else
    return "key_inputs";
}

// Columns [first, first + count) of a tensor of numbers of tokens.
struct ColumnRange {
  int first = 0, count = 0;
  [[nodiscard]] constexpr int end() const { return first + count; }
};

// The columns of query_inputs and of key_inputs that each part of an op reads.
template <class Op>
struct InputColumns {
  using Score = typename Op::ScoreType;
  using Normaliser = typename Op::NormaliserType;
  using Readout = typename Op::ReadoutType;

  static constexpr ColumnRange score_query{0, query_inputs_of<Score>},
      normaliser_query{score_query.end(), query_inputs_of<Normaliser>},
      readout_query{normaliser_query.end(), query_inputs_of<Readout>};
  static constexpr ColumnRange score_key{0, key_inputs_of<Score>},
      normaliser_key{score_key.end(), key_inputs_of<Normaliser>};
  // Numbers of all columns.
  static constexpr int query = readout_query.end(), key = normaliser_key.end();
  static constexpr bool any = query > 0 || key > 0;

  // The names of query_inputs for error texts: each name that a part gives them, once.
  [[nodiscard]] static std::string query_names() {
    return joined({score_query.count > 0 ? query_inputs_name<Score>() : "",
                   normaliser_query.count > 0 ? query_inputs_name<Normaliser>() : "",
                   readout_query.count > 0 ? query_inputs_name<Readout>() : ""});
  }
  [[nodiscard]] static std::string key_names() {
    return joined({score_key.count > 0 ? key_inputs_name<Score>() : "",
                   normaliser_key.count > 0 ? key_inputs_name<Normaliser>() : "", ""});
  }

 private:
  [[nodiscard]] static std::string joined(const std::array<std::string, 3>& names) {
    std::string all;
    for (std::size_t i = 0; i < names.size(); ++i) {
      bool is_new = !names[i].empty();
      for (std::size_t k = 0; k < i; ++k) is_new = is_new && names[k] != names[i];
      if (!is_new) continue;
      if (!all.empty()) all += ", ";
      all += names[i];
    }
    return all;
  }
};

template <int Query, int Key>
struct TokenInputs : NothingDerived {
  static constexpr int query_inputs = Query, key_inputs = Key;
  static constexpr int query_features = Query, key_features = Key;
  template <class Row, class S>
  void query_features_of(const Row& row, S* f) const {
    for (int c = 0; c < Query; ++c) f[c] = row.input(c);
  }
  template <class Row, class S>
  void key_features_of(const Row& row, S* f) const {
    for (int c = 0; c < Key; ++c) f[c] = row.input(c);
  }
  template <class Row, class S, class Add>
  void query_features_vjp(const Row&, const S*, const S* df, const Add& add) const {
    for (int c = 0; c < Query; ++c) add.add_input(c, df[c]);
  }
  template <class Row, class S, class Add>
  void key_features_vjp(const Row&, const S*, const S* df, const Add& add) const {
    for (int c = 0; c < Key; ++c) add.add_input(c, df[c]);
  }
};

// The summand itself, unless a Term is given.
struct Unchanged {
  template <class S>
  [[nodiscard]] static S of(const S& x) {
    return x;
  }
};
struct LogSigmoid {
  template <class S>
  [[nodiscard]] static S of(const S& x) {
    return -math::softplus(S(-x));
  }
};

template <int Count = 1, class Term = Unchanged>
struct CumulativeInputs : TokenInputs<Count, Count> {
  static constexpr int query_inputs = 0;
  static constexpr bool sums_inputs = true;
  template <class S>
  [[nodiscard]] static S summand(const S& x) {
    return Term::of(x);
  }
};

}  // namespace HEED_ABI
}  // namespace heed
