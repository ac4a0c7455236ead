// SPDX-License-Identifier: Apache-2.0
// Visible NaN and infinity: a score of -infinity has weight 0 beside a larger one; if all scores of
// a row are -infinity, or one is NaN or +infinity, the row is NaN; no bit of another row changes.

#include "conformance/compare.hpp"

using namespace heed_test;

namespace {

constexpr Needs kNeeds{.backward = true};
template <class T>
constexpr T kInf = std::numeric_limits<T>::infinity();

[[nodiscard]] bool all_nan(const std::vector<double>& x) {
  return std::all_of(x.begin(), x.end(), [](double v) { return std::isnan(v); });
}
[[nodiscard]] bool all_finite(const std::vector<double>& x) {
  return std::all_of(x.begin(), x.end(), [](double v) { return std::isfinite(v); });
}

// Row t of head h in batch 0 of dense numbers.
[[nodiscard]] std::vector<double> row_of(const std::vector<double>& dense, const Shape& s, Index h,
                                         Index t) {
  const auto first = dense.begin() + (h * s.len + t) * s.dim;
  return {first, first + s.dim};
}

// Columns c = 0, w, 2w ... of token t of all heads, the first ones of halves of heads of 4 columns, too.
template <class T>
void set_columns(Tensor<T>& x, Index t, T value) {
  for (Index b = 0; b < x.shape().batch; ++b)
    for (Index h = 0; h < x.shape().heads; ++h)
      for (Index c = 0; c < x.shape().dim; c += 2) x(b, h, t, c) = value;
}

// Full tiles, partial ones of every kind, and rows of a bias; every one leaves key 0 to every row, and hides the last
// keys from the first rows.
template <class T>
[[nodiscard]] std::vector<MaskCase<T>> masks() {
  const auto late = [](Index, Index, Index i, Index j) { return j <= i || j == 0; };
  return {{"none", [](const Geometry&) { return OwnedMask<T>{}; }},
          {"causal", [](const Geometry&) { return owned(heed::causal<T>()); }},
          {"boolean",
           [=](const Geometry& g) {
             return boolean_mask<T>({1, 1, g.len_q, g.len_kv}, late);
           }},
          {"bias", [=](const Geometry& g) {
             OwnedMask<T> mask = random_bias<T>({1, 1, g.len_q, g.len_kv}, 5);
             for (Index i = 0; i < g.len_q; ++i)
               for (Index j = 0; j < g.len_kv; ++j)
                 if (!late(0, 0, i, j)) (*mask.bias)(0, 0, i, j) = -kInf<T>;
             return mask;
           }}};
}

// Calls f(runner, call) in double for every variant, mask and size of tile.
template <class F>
void for_calls(const Geometry& g, F&& f) {
  for (const MaskCase<double>& mask : masks<double>())
    for (const bool small : {true, false})
      for (const Runner<double>& runner : all_runners<double, kNeeds>(g)) {
        if (runner.reads_own_rows) continue;
        INFO(runner.name << ", mask: " << mask.name << (small ? ", small tiles" : ""));
        auto call = random_call<double>(runner.geometry, runner.extra_dim);
        call.mask = mask.make(call.geometry);
        if (small) call.options = small_tiles();
        f(runner, call, std::string(mask.name) == "none");
      }
}

// The output head of head h of a query: h itself, or h / 2 if pairs of query heads belong to one.
template <class T>
[[nodiscard]] Index readers(const Runner<T>& runner) {
  return runner.geometry.query_heads / runner.geometry.heads;
}

// Row 20 must be NaN in out, lse and the gradients of its inputs, and no other row may change.
template <class T>
void check_nan_row(const Runner<T>& runner, const Call<T>& call, const Call<T>& clean_call,
                   bool sees_all) {
  const Index at = 20;
  const Geometry& g = call.geometry;
  const auto clean = forward(runner, clean_call), result = forward(runner, call);
  const auto out = result.out.template dense<double>(), before = clean.out.template dense<double>();
  for (Index h = 0; h < g.heads; ++h)
    for (Index i = 0; i < g.len_q; ++i) {
      INFO("head " << h << ", row " << i);
      const auto got = row_of(out, call.grad_out.shape(), h, i);
      if (i == at)
        CHECK(all_nan(got));
      else
        CHECK(same_bits(got, row_of(before, call.grad_out.shape(), h, i)));
      bool any_nan = false;
      for (int m = 0; m < runner.maps; ++m)
        any_nan = any_nan ||
                  std::isnan(result.saved.lse[std::size_t(m * g.query_rows() + h * g.len_q + i)]);
      CHECK(any_nan == (i == at));
    }
  const Named grads = backward(runner, call, result);
  for (const auto& tensor : grads) {
    INFO("gradient of " << tensor.name);
    if (tensor.name == "query")
      for (Index h = 0; h < g.query_heads; ++h)
        for (Index i = 0; i < g.len_q; ++i)
          CHECK((i == at ? all_nan(row_of(tensor.values, call.query.shape(), h, i))
                         : all_finite(row_of(tensor.values, call.query.shape(), h, i))));
    if (tensor.name == "value")
      for (Index h = 0; h < g.kv_heads; ++h)
        for (Index j = 0; j < g.len_kv; ++j) {
          INFO("key " << j);
          const bool seen = sees_all || j <= at;
          CHECK((seen ? all_nan(row_of(tensor.values, call.value.shape(), h, j))
                      : all_finite(row_of(tensor.values, call.value.shape(), h, j))));
        }
  }
}

}  // namespace

TEST_CASE("a row whose visible scores are all -infinity is NaN, like none that sees nothing") {
  for_calls(geometry(1, 2, 1, 33, 33, 4, 4), [](const auto& runner, auto& call, bool sees_all) {
    for (Index j = 0; j < 33; ++j) set_columns(call.key, j, -1.0);
    const auto clean = call;
    set_columns(call.query, 20, kInf<double>);
    check_nan_row(runner, call, clean, sees_all);
  });
}

TEST_CASE("a row that holds NaN or +infinity among its visible scores is NaN") {
  for (const double bad : {kInf<double>, std::nan("")})
    for_calls(geometry(1, 2, 1, 33, 33, 4, 4),
              [bad](const auto& runner, auto& call, bool sees_all) {
                INFO("query " << bad);
                for (Index j = 0; j < 33; ++j) set_columns(call.key, j, 1.0);
                const auto clean = call;
                set_columns(call.query, 20, bad);
                check_nan_row(runner, call, clean, sees_all);
              });
}

TEST_CASE("a visible score of -infinity weighs nothing beside a larger one") {
  // Key 3 gives every row that sees it a score of -infinity: as if it were hidden, where a score reads no cosine.
  for_calls(geometry(1, 2, 1, 33, 33, 4, 4), [](const auto& runner, auto& call, bool) {
    for (const char* name : {"sdpa", "differential", "differential-v1", "differential-v2", "intent",
                             "intent-from-q", "ode", "ode-equilibrium", "dialectical"})
      if (runner.name == name) {
        for (Index i = 0; i < 33; ++i) set_columns(call.query, i, 1.0);
        auto hidden = call;
        set_columns(call.key, 3, -kInf<double>);
        std::vector<Index> queries(33, 1), keys(33, 1);
        keys[3] = 2;
        hidden.mask = hidden.mask & owned(heed::documents<double>(queries, keys));
        const auto a = forward(runner, call), b = forward(runner, hidden);
        const auto x = a.out.template dense<double>(), y = b.out.template dense<double>();
        for (std::size_t n = 0; n < x.size(); ++n) CHECK(x[n] == Approx(y[n]).margin(1e-12));
        for (std::size_t n = 0; n < a.saved.lse.size(); ++n)
          CHECK(a.saved.lse[n] == Approx(b.saved.lse[n]).margin(1e-12));
      }
  });
}

TEST_CASE("one query of grouped heads keeps the rules of infinite scores") {
  for (const bool per_head : {false, true})
    for (const Runner<double>& runner :
         all_runners<double, kNeeds>(geometry(1, 4, 2, 1, 33, 4, 4), per_head)) {
      if (runner.reads_own_rows) continue;
      INFO(runner.name);
      auto call = random_call<double>(runner.geometry, runner.extra_dim);
      for (Index j = 0; j < 33; ++j) set_columns(call.key, j, -1.0);
      const auto clean = forward(runner, call);
      for (Index h = 0; h < readers(runner); ++h)  // head 0
        for (Index c = 0; c < call.query.shape().dim; c += 2) call.query(0, h, 0, c) = kInf<double>;
      const auto result = forward(runner, call);
      const auto out = result.out.template dense<double>(),
                 before = clean.out.template dense<double>();
      CHECK(all_nan(row_of(out, call.grad_out.shape(), 0, 0)));
      const bool reads_one_head = runner.name != "differential-apart";
      for (Index h = 1; reads_one_head && h < 4; ++h)
        CHECK(same_bits(row_of(out, call.grad_out.shape(), h, 0),
                        row_of(before, call.grad_out.shape(), h, 0)));
      const Named grads = backward(runner, call, result);
      CHECK(all_nan(row_of(grads[0].values, call.query.shape(), 0, 0)));
    }
}

TEST_CASE("a row that sees no key stays 0 with lse -infinity, whatever infinity it holds") {
  for_calls(geometry(1, 2, 1, 33, 33, 4, 4), [](const auto& runner, auto& call, bool) {
    if (!runner.plain_rows) return;
    call.mask = owned(heed::causal<double>(heed::Align::top_left, -3));
    set_columns(call.query, 1, kInf<double>);
    const auto result = forward(runner, call);
    for (Index h = 0; h < 2; ++h) {
      CHECK(row_of(result.out.template dense<double>(), call.grad_out.shape(), h, 1) ==
            std::vector<double>(4, 0.0));
      CHECK(result.saved.lse[std::size_t(h * 33 + 1)] == -kInf<double>);
    }
    for (const auto& tensor : backward(runner, call, result)) CHECK(all_finite(tensor.values));
  });
}
