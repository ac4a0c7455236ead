// SPDX-License-Identifier: Apache-2.0

// Every variant of the zoo's list: its name, its plain loops, its gradients.

#include "catch.hpp"
#include "message_of.hpp"
#include "misnamed_parameters.hpp"
#include "nn_case.hpp"

#include <heed/check/op_check.hpp>
#include <heed/mask/block_mask.hpp>
#include <heed/nn/projected_attention.hpp>
#include <zoo/layers.hpp>
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

// The rows of one token in all heads, with the keys that the caller's mask shows.
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
    row.all_keys = g.len_kv;
    row.own_value = row_of(call.value, first + i, g.dim_v);
    const Index width = call.op.extra_dim(g);
    if (width > 0) row.extra = row_of(call.extra, g.row_index(b, h, i), width);
    using Columns = InputColumns<Op>;
    if (h < g.heads) {
      if (Columns::query > 0)
        row.query_inputs = row_of(call.query_inputs, g.row_index(b, h, i), Columns::query);
      for (Index t = 0; t < g.len_kv && Columns::key > 0; ++t)
        row.key_inputs.push_back(
            row_of(call.key_inputs, (b * g.heads + h) * g.len_kv + t, Columns::key));
    }
    rows.push_back(std::move(row));
  }
  for (zoo::PlainRow& row : rows) row.heads = rows.data();
  return rows;
}

// The largest difference of an output from the variant's plain loops, under a caller's mask.
template <class Op, class Plain>
[[nodiscard]] double largest_difference(const heed::Variant<Op>& variant,
                                        const Mask<double>& callers, const Plain& plain) {
  const Geometry& g = variant.geometry;
  OpCall call(variant.op, g, variant.mask_with(callers, g));
  call.mask = with_chosen(variant.choose, call.inputs(), call.mask, call.options);
  const BoundMask<double> mask(callers, g, "zoo_test");
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
// Sizes at which every mask of a variant hides and shows.
constexpr Geometry kLong{1, 2, 2, 1, 600, 600, 4, 4};

}  // namespace

TEST_CASE("every variant of the zoo is what its plain loops say") {
  zoo::for_each_entry<double>(kSizes, [&](auto variant, const auto& plain) {
    INFO(variant.name);
    const Geometry& g = variant.geometry;
    heed::detail::fill_tensors(variant.op, 3);
    spread_over_heads(variant.op, g.heads);
    for (const Mask<double>& mask :
         {Mask<double>(), causal<double>(), window<double>(3, 1) & key_lengths<double>({11, 5})})
      CHECK(largest_difference(variant, mask, plain) < 1e-12);
  });
}

TEST_CASE("variants of the zoo that hide pairs hide what their plain loops leave out") {
  Index masked = 0;
  zoo::for_each_entry<double>(kLong, [&](const auto& variant, const auto& plain) {
    if (variant.mask == nullptr && !variant.choose) return;
    INFO(variant.name);
    ++masked;
    const Geometry& g = variant.geometry;
    for (const Mask<double>& callers : {Mask<double>(), causal<double>()})
      CHECK(largest_difference(variant, callers, plain) < 1e-12);
    if (variant.choose) return;
    const BlockMask<double> blocks(variant.mask(g), g);
    CHECK(blocks.count(TileKind::empty) > 0);
  });
  CHECK((masked >= 5 || zoo::variant_names().empty()));
}

TEST_CASE("of variants that read later keys there is no layer, layers of others do not see them") {
  if (zoo::variant_names().empty()) return;
  CHECK(zoo::reads_later_keys("zoo:prefix-lm"));
  CHECK(zoo::reads_later_keys("zoo:natten-2d"));
  CHECK_FALSE(zoo::reads_later_keys("zoo:block-sparse"));
  const std::vector<std::string> names = zoo::layer_names();
  CHECK(std::count(names.begin(), names.end(), "zoo:prefix-lm") == 0);
  CHECK(std::count(names.begin(), names.end(), "zoo:block-sparse") == 1);
  const auto layer_of = [](const char* name) { return zoo::attention_by_name(name, 8, 2, 0, 1); };
  CHECK(heed_test::message_of([&] { (void)layer_of("zoo:prefix-lm"); }) ==
        "attention_of: zoo:prefix-lm reads later keys, there is no causal layer of it");

  // Rows behind a span of 256 keys differ from plain attention, in steps, too.
  constexpr Index len = 300, width = 8, span = 256;
  nn::Context<float> c;
  c.threads = 1;
  const auto x = heed_test::normals<float>(len, width, 1);
  const auto rows_of = [&](nn::AttentionLayer<float>& layer) {
    nn::Matrix<float> y(len, width);
    layer.forward(c, 1, x.view(), y.view());
    return heed_test::numbers(y.view());
  };
  const auto sparse = layer_of("zoo:block-sparse");
  nn::ProjectedAttention<ScaledDot<float>> plain(nn::AttentionOptions::even(width, 2), {},
                                                 causal<float>());
  heed_test::shake<float>(*sparse);
  heed_test::shake<float>(plain);
  const std::vector<float> whole = rows_of(*sparse), others = rows_of(plain);
  const auto differ_in = [&](Index first, Index end) {
    const auto part = [&](const std::vector<float>& rows) {
      return std::vector<float>(rows.begin() + first * width, rows.begin() + end * width);
    };
    return heed_test::largest_difference(part(whole), part(others));
  };
  CHECK(differ_in(0, span) < 1e-5);
  CHECK(differ_in(span, len) > 1e-3);
  REQUIRE(sparse->can_step());
  KvCache<float> cache = sparse->new_cache(1);
  nn::Matrix<float> y(len, width);
  for (Index t = 0; t < len; ++t)
    sparse->step(c, 1, x.view().row_range(t, 1), y.view().row_range(t, 1), cache);
  CHECK(heed_test::largest_difference(heed_test::numbers(y.view()), whole) < 1e-5);
}

TEST_CASE("layers of the zoo take tokens in steps to the rows of the whole sequence") {
  // Far enough for T5's shared buckets and Shaw's last rows.
  constexpr Index len = 40, width = 8;
  nn::Context<float> c;
  c.threads = 1;
  const auto x = heed_test::normals<float>(len, width, 1);
  std::set<std::string> stepped;
  for (const std::string& name : zoo::layer_names()) {
    INFO(name);
    const auto layer = zoo::attention_by_name(name, width, 2, 0, 1);
    if (!layer->can_step()) continue;
    stepped.insert(name);
    int n = 0;
    layer->visit([&](const std::string& weight, Param<float>& numbers, Param<float>&) {
      for (Index i = 0; i < numbers.size() && weight.rfind("c_", 0) == 0; ++i)
        numbers[i] = float(std::sin(double(++n)));
    });
    nn::Matrix<float> whole(len, width), y(len, width);
    layer->forward(c, 1, x.view(), whole.view());
    for (const Index prompt : {1, 30}) {  // tokens one by one behind it
      KvCache<float> cache = layer->new_cache(1);
      for (Index t = 0, count = prompt; t < len; t += count, count = 1)
        layer->step(c, 1, x.view().row_range(t, count), y.view().row_range(t, count), cache);
      const std::vector<float> rows = heed_test::numbers(whole.view());
      const double size = heed_test::largest_difference(rows, std::vector<float>(rows.size()));
      CHECK(heed_test::largest_difference(heed_test::numbers(y.view()), rows) < 1e-5 * size);
    }
  }
  for (const char* name :
       {"zoo:alibi", "zoo:fire", "zoo:kerple", "zoo:rope-learnt-base", "zoo:shaw", "zoo:t5"})
    CHECK((stepped.count(name) == 1 || zoo::variant_names().empty()));
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

TEST_CASE("a parameter of the zoo with numbers for other heads is named by what refuses it") {
  zoo::for_each_zoo_variant<double>(kSizes, [](const auto& variant) {
    INFO(variant.name);
    CHECK(heed_test::misnamed_parameters(variant.op, variant.geometry) ==
          std::vector<std::string>{});
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
