// SPDX-License-Identifier: Apache-2.0

// Every variant of the zoo's list: its name, its plain loops, its gradients.

#include "catch.hpp"

#include <heed/check/op_check.hpp>
#include <zoo/mla_absorbed.hpp>
#include <zoo/zoo.hpp>

#include <set>

using namespace heed;

namespace {

// Every scalar parameter with numbers of its own in each head.
template <class Op>
void spread_over_heads(Op& op, Index heads) {
  op.visit([&](const char*, auto& param) {
    if (param.shape() != std::vector<Index>{1}) return;
    using Real = typename Op::Scalar;
    const double all = double(param[0]);
    param = Param<Real>(std::vector<Index>{heads});
    for (Index h = 0; h < heads; ++h) param[h] = Real(all + (0.1 * all + 0.03) * double(h));
  });
}

[[nodiscard]] zoo::Numbers row_of(const std::vector<double>& tensor, Index row, Index width) {
  const auto begin = tensor.begin() + row * width;
  return {begin, begin + width};
}

// The rows of one token in all heads, under a mask that tells what they see.
template <class Op>
[[nodiscard]] std::vector<zoo::PlainRow> plain_rows(const OpCall<Op>& call,
                                                    const BoundMask<double>& mask, Index b,
                                                    Index i) {
  const Geometry& g = call.geometry();
  std::vector<zoo::PlainRow> rows;
  for (Index h = 0; h < g.query_heads; ++h) {
    zoo::PlainRow row;
    row.head = h;
    row.position = i;
    row.scale = 1 / std::sqrt(double(g.dim_qk));
    row.query = row_of(call.query, (b * g.query_heads + h) * g.len_q + i, g.dim_qk);
    const Index kv = h / (g.query_heads / g.kv_heads), first = (b * g.kv_heads + kv) * g.len_kv;
    for (Index j = 0; j < g.len_kv; ++j) {
      if (!mask.visible(b, h, i, j)) continue;
      row.keys.push_back(row_of(call.key, first + j, g.dim_qk));
      row.values.push_back(row_of(call.value, first + j, g.dim_v));
      row.positions.push_back(j);
    }
    row.own_value = row_of(call.value, first + i, g.dim_v);
    const Index width = call.op.extra_dim(g);
    if (width > 0) row.extra = row_of(call.extra, g.row_index(b, h, i), width);
    using Score = typename Op::ScoreType;
    if (h < g.heads) {
      if (query_inputs_of < Score >> 0)
        row.query_inputs = row_of(call.query_inputs, g.row_index(b, h, i), query_inputs_of<Score>);
      for (Index t = 0; t < g.len_kv && key_inputs_of < Score >> 0; ++t)
        row.key_inputs.push_back(
            row_of(call.key_inputs, (b * g.heads + h) * g.len_kv + t, key_inputs_of<Score>));
    }
    rows.push_back(std::move(row));
  }
  for (zoo::PlainRow& row : rows) row.heads = rows.data();
  return rows;
}

// The largest difference of an output from the variant's plain loops.
template <class Op, class Plain>
[[nodiscard]] double largest_difference(OpCall<Op>& call, const Plain& plain) {
  const Geometry& g = call.geometry();
  const BoundMask<double> mask(call.mask, g, "zoo_test");
  call.forward();
  double largest = 0;
  for (Index b = 0; b < g.batch; ++b)
    for (Index i = 0; i < g.len_q; ++i) {
      const auto rows = plain_rows(call, mask, b, i);
      for (Index h = 0; h < g.heads; ++h) {
        const zoo::Numbers wanted = plain(call.op, rows[std::size_t(h)]);
        REQUIRE(Index(wanted.size()) == g.dim_v);
        for (Index c = 0; c < g.dim_v; ++c) {
          const double error = std::abs(call.out[std::size_t(g.row_index(b, h, i) * g.dim_v + c)] -
                                        wanted[std::size_t(c)]);
          largest = std::isnan(error) ? kInfinity<double> : std::max(largest, error);
        }
      }
    }
  return largest;
}

constexpr Geometry kSizes{2, 4, 4, 2, 11, 11, 6, 6};

}  // namespace

TEST_CASE("every variant of the zoo is what its plain loops say") {
  zoo::for_each_entry<double>(kSizes, [&](auto variant, const auto& plain) {
    INFO(variant.name);
    const Geometry& g = variant.geometry;
    heed::detail::fill_tensors(variant.op, 3);
    spread_over_heads(variant.op, g.heads);
    for (const Mask<double>& mask :
         {Mask<double>(), causal<double>(), window<double>(3, 1) & key_lengths<double>({11, 5})}) {
      OpCall call(variant.op, g, mask);
      CHECK(largest_difference(call, plain) < 1e-12);
    }
  });
}

TEST_CASE("every variant of the zoo passes check_op") {
  zoo::for_each_zoo_variant<float>(kSizes, [&](auto variant) {
    spread_over_heads(variant.op, variant.geometry.heads);
    const OpReport report = check_op(variant.op, variant.geometry);
    INFO(variant.name << "\n" << report.text());
    CHECK(report.passed());
    CHECK(report.cases.size() > 6);
  });
}

TEST_CASE("every variant of the zoo has a name of its own in the zoo's form") {
  const std::vector<std::string> names = zoo::variant_names();
  CHECK(std::set<std::string>(names.begin(), names.end()).size() == names.size());
  for (const std::string& name : names) {
    INFO(name);
    CHECK(name.rfind("zoo:", 0) == 0);
    CHECK(name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-", 4) == std::string::npos);
    CHECK(name.size() > 4);
  }
}

TEST_CASE("absorbed latent attention reads its values from the memory of its keys") {
  const auto variant = zoo::mla_absorbed::variant<double>(kSizes);
  const Geometry& g = variant.geometry;
  CHECK(g.kv_heads == 1);
  REQUIRE(g.dim_qk > g.dim_v);
  OpCall apart(variant.op, g, causal<double>());
  for (Index row = 0; row < g.batch * g.len_kv; ++row)
    std::copy_n(apart.key.begin() + row * g.dim_qk, g.dim_v, apart.value.begin() + row * g.dim_v);
  apart.forward();

  const Strides strides = dense_strides(g.key_shape());
  const TensorView<const double> shared(apart.key.data(), g.value_shape(), strides);
  std::vector<double> out(apart.out.size());
  forward(variant.op, {apart.inputs().query, apart.inputs().key, shared}, causal<double>(),
          TensorView<double>(out.data(), g.out_shape()));
  CHECK(out == apart.out);
}
