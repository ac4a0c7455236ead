// SPDX-License-Identifier: Apache-2.0
#pragma once

// A call on ranks, compared with the same call in one process, which every rank computes, too.

#include "share_call.hpp"

#include <heed/mask/patterns.hpp>
#include <heed/mpi/attention.hpp>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace heed_test {

// The faults that a rank has found; empty if there are none.
using Findings = std::vector<std::string>;

// Rows of a rank, its pieces one behind the other.
template <class T>
[[nodiscard]] std::vector<T> rank_rows(const std::vector<T>& x, Index batch_heads, Index len,
                                       const heed::mpi::Shards& shards, int rank) {
  const Index dim = batch_heads * len > 0 ? Index(x.size()) / (batch_heads * len) : 0;
  return heed::mpi::own_rows(shards, rank,
                             heed::TensorView<const T>(x.data(), {1, batch_heads, len, dim}));
}

template <class Op>
struct RankTensors : RowTensors<Op> {
  using Rows = RowTensors<Op>;
  using Rows::g, Rows::out, Rows::lse, Rows::steps, Rows::dq, Rows::dk, Rows::dv, Rows::dextra,
      Rows::dquery_inputs, Rows::dkey_inputs, Rows::dbias, Rows::grad_op;
  using typename Rows::T;
  const heed::OpCall<Op>& whole;
  const heed::mpi::Sharding& sharding;
  int rank;
  heed::mpi::Saved<T> saved = {};

  RankTensors(const heed::OpCall<Op>& call, const heed::mpi::Sharding& shards, int of_rank)
      : Rows(
            call, shards.queries.held(of_rank), heed::mpi::detail::keys_of(shards).held(of_rank),
            [&, sizes = call.geometry()](const std::vector<T>& x, Index heads) {
              return rank_rows(x, sizes.batch * heads, sizes.len_q, shards.queries, of_rank);
            },
            [&, sizes = call.geometry()](const std::vector<T>& x, Index heads) {
              return rank_rows(x, sizes.batch * heads, sizes.len_kv,
                               heed::mpi::detail::keys_of(shards), of_rank);
            }),
        whole(call),
        sharding(shards),
        rank(of_rank) {}

  [[nodiscard]] std::vector<T> queries(const std::vector<T>& x, Index heads) const {
    return rank_rows(x, g.batch * heads, g.len_q, sharding.queries, rank);
  }
  [[nodiscard]] std::vector<T> of_keys(const std::vector<T>& x, Index heads) const {
    return rank_rows(x, g.batch * heads, g.len_kv, heed::mpi::detail::keys_of(sharding), rank);
  }

  template <class Comm>
  void run(const Comm& comm, bool in_order = false) {
    const heed::Inputs<T> in = this->inputs();
    heed::mpi::forward(comm, whole.op, in, whole.mask, sharding, this->outputs(), &saved,
                       whole.options);
    const heed::OutputGradients<T> of = this->output_gradients();
    const heed::Gradients<T> grads = this->gradients(whole.mask.bias.shape());
    const heed::StoredView<const T> known(out.data(), this->rows_of(g.dim_v));
    if constexpr (!heed::InputColumns<Op>::any)
      if (in_order)
        return heed::mpi::backward_in_order(comm, whole.op, in, whole.mask, sharding, saved, known,
                                            of, grads, &grad_op, whole.options);
    heed::mpi::backward(comm, whole.op, in, whole.mask, sharding, saved, known, of, grads, &grad_op,
                        whole.options);
  }

  // Compares with one process: rows of queries bit by bit, or within `bound`; all_bits: all gradients bit by bit.
  [[nodiscard]] Findings compare(bool bits, double bound, bool all_bits = false) const {
    Findings found;
    const auto same = [&](const char* name, const auto& a, const auto& b) {
      if (!same_bits(a, b)) found.push_back(std::string(name) + " has other bits");
    };
    const auto near = [&](const char* name, const auto& a, const auto& b) {
      const double worst = worst_difference(a, b);
      if (!(worst <= bound))
        found.push_back(std::string(name) + " is off by " + std::to_string(worst / bound) +
                        " times the bound");
    };
    const auto of_queries = [&](const char* name, const std::vector<T>& a,
                                const std::vector<T>& of_whole, Index heads) {
      const std::vector<T> b = queries(of_whole, heads);
      bits ? same(name, a, b) : near(name, a, b);
    };
    of_queries("out", out, whole.out, g.heads);
    if (bits)
      same("lse", lse, queries(whole.lse, g.heads));
    else
      near("lse", finite(lse), finite(queries(whole.lse, g.heads)));
    of_queries("steps", steps, whole.steps, g.heads);
    of_queries("dquery", dq, whole.grad_query, g.query_heads);
    of_queries("dextra", dextra, whole.grad_extra, g.heads);
    if (all_bits) {
      same("dkey", dk, of_keys(whole.grad_key, g.kv_heads));
      same("dvalue", dv, of_keys(whole.grad_value, g.kv_heads));
      same("dbias", dbias, whole.grad_bias);
      same("dparameters", numbers_of(grad_op), numbers_of(whole.grad_op));
    }
    of_queries("dquery_inputs", dquery_inputs, whole.grad_query_inputs, this->query_input_heads);
    near("dkey", dk, of_keys(whole.grad_key, g.kv_heads));
    near("dvalue", dv, of_keys(whole.grad_value, g.kv_heads));
    near("dkey_inputs", dkey_inputs, of_keys(whole.grad_key_inputs, this->key_input_heads));
    near("dbias", dbias, whole.grad_bias);
    near("dparameters", numbers_of(grad_op), numbers_of(whole.grad_op));
    return found;
  }
  // -infinity, of rows that see no key, as a number.
  [[nodiscard]] static std::vector<T> finite(std::vector<T> x) {
    for (T& one : x)
      if (one == -std::numeric_limits<T>::infinity()) one = T(-1e4);
    return x;
  }
};

// Calls f(name, geometry, mask, options) for masks that depend on places in the whole call: for g, which has 4 heads, 150
// queries and as many keys in each of two sequences, and for fewer keys with queries that begin behind the first one.
template <class F>
void for_each_placed_mask(const heed::Geometry& g, F&& f) {
  heed::Geometry cross = g;
  cross.len_kv = 97;
  cross.first_query = 3;
  std::vector<double> numbers(std::size_t(4 * 150 * 150));
  for (std::size_t i = 0; i < numbers.size(); ++i)
    numbers[i] = i % 9 == 0 ? -std::numeric_limits<double>::infinity() : std::sin(double(i));
  std::vector<Index> ids;
  for (Index i = 0; i < 300; ++i) ids.push_back(i / 37);
  const heed::Options options{.key_tile = 32, .panel_vectors = 2};
  f("bias", g, heed::bias<double>({numbers.data(), {1, 4, 150, 150}}), options);
  f("documents", g, heed::documents<double>(ids, ids) & heed::causal<double>(), options);
  f("function", g, heed::neighbourhood<double>(150, 21), options);
  f("bottom right", cross,
    heed::causal<double>(heed::Align::bottom_right) & heed::alibi<double>({0.1, 0.2, 0.3, 0.4}),
    options);
}

}  // namespace heed_test
