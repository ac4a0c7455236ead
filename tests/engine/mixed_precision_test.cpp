// SPDX-License-Identifier: Apache-2.0
// Precision::mixed: every variant within the bounds that the headers derive, under every kind of mask, with the same
// bits for any number of threads and whatever hidden pairs hold.

#include "conformance/compare.hpp"

#include <heed/check/mixed_bounds.hpp>
#include <heed/explain.hpp>

#include "message_of.hpp"

using namespace heed_test;

namespace {

constexpr Needs kForward{.twin = true};
constexpr Needs kBackward{.backward = true};

[[nodiscard]] heed::Options mixed(heed::Options options) {
  options.precision = heed::Precision::mixed;
  return options;
}

// Panels of all widths, with tiles that a row crosses.
[[nodiscard]] std::vector<heed::Options> option_cases() {
  heed::Options one;
  one.threads = 1;
  // Two vectors: panels of one may be of few queries, which stay in float.
  heed::Options small = small_tiles();
  small.panel_vectors = 2;
  return {mixed(one), mixed(small)};
}

// Largest error of a score of a row whose largest |scale| sum |q_c k_c| is `s`, by the bounds in the ops' headers, for the
// parameters of the list after runners() has moved them by a tenth at most.
[[nodiscard]] double score_error(const std::string& name, double s, double scale) {
  constexpr double dot = heed::kMixedDotError;
  constexpr double lambda = 0.33, alpha = 8.8, beta = 0.55, rho = 0.55, eta_low = 0.45, eta = 0.55;
  const double plain = dot * s;
  const auto gate = [&](double slope) { return plain + lambda * std::min(1.0, slope * dot); };
  if (name == "dar") return gate(alpha / 4);
  if (name == "dar-unrolled") return gate(alpha / 4 * (1 + beta * alpha / 4));
  if (name == "dar-converged") return gate(alpha / 4 / (1 - 0.44 * alpha / 4));
  if (name.starts_with("ode")) {
    const double drive = plain * (1 + 2 * rho / scale);
    if (name.find("lagrange") != std::string::npos) return drive;
    return eta * drive / (1 - (1 - eta_low) / 2);
  }
  return plain;
}

// The error of float in both, and the reference's own.
[[nodiscard]] double float_error(double s, double weighted) {
  return 2 * tolerance::forward<float>(s, weighted);
}

// Largest error of a variant's gradients, in roundings of bfloat16 relative to a tensor's largest gradient. The numbers are
// measured on the calls of these tests (4.5, 3.3 and at most 2.3), and doubled.
[[nodiscard]] double gradient_roundings(const std::string& name) {
  if (name == "dar-converged") return 10;
  return name == "differential-v1" ? 7 : 5;
}

// The bounds of dQ, dK and dV of plain attention in plain loops (check/mixed_bounds.hpp), without a mask.
struct PlainSizes {
  std::array<std::vector<double>, 3> bounds;  // query, key, value

  explicit PlainSizes(const Call<float>& call) {
    const Geometry& g = call.geometry;
    bounds[0].assign(std::size_t(call.query.size()), 0);
    bounds[1].assign(std::size_t(call.key.size()), 0);
    bounds[2].assign(std::size_t(call.value.size()), 0);
    for (Index b = 0; b < g.batch; ++b)
      for (Index h = 0; h < g.heads; ++h)
        for (Index i = 0; i < g.len_q; ++i) add_row(call, b, h, i);
  }

 private:
  void add_row(const Call<float>& call, Index b, Index h, Index i) {
    const Geometry& g = call.geometry;
    const Index kv = g.kv_head(h);
    const double scale = 1 / std::sqrt(double(g.dim_qk));
    const auto keys = std::size_t(g.len_kv);
    std::vector<double> p(keys), a(keys);
    double s = 0, sum = 0, own = 0;
    for (Index j = 0; j < g.len_kv; ++j) {
      double logit = 0, size = 0;
      for (Index c = 0; c < g.dim_qk; ++c) {
        const double term = scale * double(call.query(b, h, i, c)) * double(call.key(b, kv, j, c));
        logit += term;
        size += std::abs(term);
      }
      for (Index c = 0; c < g.dim_v; ++c)
        a[std::size_t(j)] +=
            std::abs(double(call.value(b, kv, j, c)) * double(call.grad_out(b, h, i, c)));
      p[std::size_t(j)] = std::exp(logit);
      sum += p[std::size_t(j)];
      s = std::max(s, size);
    }
    for (std::size_t j = 0; j < keys; ++j) own += (p[j] /= sum) * a[j];
    const double e = heed::kMixedDotError * s;
    for (Index j = 0; j < g.len_kv; ++j) {
      const double weight = p[std::size_t(j)];
      const double dscore =
          heed::mixed_gradient_error(e) * scale * weight * (a[std::size_t(j)] + own);
      for (Index c = 0; c < g.dim_qk; ++c) {
        bounds[0][at(g.heads, g.len_q, g.dim_qk, b, h, i, c)] +=
            dscore * std::abs(double(call.key(b, kv, j, c)));
        bounds[1][at(g.kv_heads, g.len_kv, g.dim_qk, b, kv, j, c)] +=
            dscore * std::abs(double(call.query(b, h, i, c)));
      }
      for (Index c = 0; c < g.dim_v; ++c)
        bounds[2][at(g.kv_heads, g.len_kv, g.dim_v, b, kv, j, c)] +=
            heed::mixed_out_error(e) * weight * std::abs(double(call.grad_out(b, h, i, c)));
    }
  }
  [[nodiscard]] static std::size_t at(Index heads, Index len, Index dim, Index b, Index h, Index t,
                                      Index c) {
    return std::size_t(((b * heads + h) * len + t) * dim + c);
  }
};

// Compares forward of `call` in mixed precision with the reference.
void check_mixed_forward(const Runner<float>& runner, const Call<float>& call, double& largest) {
  const Twin twin = runner.twin(call);
  const Outcome<float> result = forward(runner, call);
  const bool saved = !result.saved.mixed.empty();
  const std::vector<float> fast = saved ? result.saved.mixed : result.out.dense();
  // A gate multiplies the mixed rows by at most 1.
  const std::vector<double>& slow = saved ? twin.mixed : twin.out;
  const Index dim = call.geometry.dim_v, width = call.geometry.dim_qk;
  const double scale =
      1 / std::sqrt(double(runner.maps == 2 && call.geometry.query_heads == call.geometry.heads
                               ? width / 2
                               : width));
  double largest_value = 0;
  for (const float v : call.value.dense())
    largest_value = std::max(largest_value, std::abs(double(v)));
  Distance distance;
  for (std::size_t n = 0; n < fast.size(); ++n) {
    const double s = twin.s_row[n / std::size_t(dim)], weighted = twin.weighted_abs_value[n];
    const double e = score_error(runner.name, s, scale);
    double bound = heed::mixed_out_error(e) * weighted;
    // Weights of the Lagrange flow are linear in the drive, with a factor of at most 1: see ops/resonant_ode.hpp.
    if (runner.linear_rows)
      bound = heed::kMixedDotError * weighted +
              2 * e * (1 + heed::kMixedDotError) * largest_value * double(call.geometry.len_kv);
    distance.note(n, double(fast[n]), slow[n], bound + float_error(s, weighted));
    if (weighted > 0) largest = std::max(largest, std::abs(double(fast[n]) - slow[n]) / weighted);
  }
  INFO(runner.name << ", " << describe(call.geometry) << ", key_tile " << call.options.key_tile
                   << ": " << distance.text());
  CHECK(distance.within());
}

}  // namespace

TEST_CASE("forward of every variant keeps its bound in mixed precision", "[mixed]") {
  for (const Geometry& g : {geometry(1, 2, 1, 45, 45, 8, 8), geometry(2, 4, 2, 33, 33, 15, 15),
                            geometry(1, 2, 2, 21, 70, 12, 9), geometry(1, 2, 1, 70, 70, 64, 64)})
    for (const Runner<float>& runner : all_runners<float, kForward>(g))
      for (const heed::Options& options : option_cases()) {
        Call<float> call = random_call<float>(runner.geometry, runner.extra_dim);
        call.options = options;
        double largest = 0;
        check_mixed_forward(runner, call, largest);
        INFO(runner.name);
        CHECK(largest > 0x1p-13);  // the products are those of bfloat16
      }
}

TEST_CASE("mixed precision keeps its bounds under every mask", "[mixed]") {
  for (const MaskCase<float>& mask : mask_cases<float>())
    for (const Runner<float>& runner : runners<float, kForward>(geometry(2, 4, 2, 37, 37, 10, 10)))
      for (const heed::Options& options : option_cases()) {
        INFO("mask: " << mask.name);
        Call<float> call = random_call<float>(runner.geometry, runner.extra_dim);
        call.options = options;
        call.mask = mask.make(call.geometry);
        double largest = 0;
        check_mixed_forward(runner, call, largest);
      }
}

TEST_CASE("backward of plain attention keeps its bounds in mixed precision", "[mixed]") {
  for (const Geometry& g : {geometry(1, 2, 1, 45, 45, 8, 8), geometry(1, 2, 2, 21, 70, 12, 9),
                            geometry(1, 2, 1, 70, 70, 33, 64)})
    for (const heed::Options& options : option_cases()) {
      const Runner<float> sdpa = runners<float, kBackward>(g).front();
      Call<float> call = random_call<float>(g, 0);
      call.options = options;
      const Outcome<float> result = forward(sdpa, call);
      const Named fast = backward(sdpa, call, result);
      call.options.precision = heed::Precision::storage;
      const Named slow = backward(sdpa, call, forward(sdpa, call));
      const PlainSizes sizes(call);
      REQUIRE(slow.size() == 3);
      for (std::size_t t = 0; t < 3; ++t) {
        REQUIRE(fast[t].values.size() == sizes.bounds[t].size());
        Distance distance;
        for (std::size_t n = 0; n < slow[t].values.size(); ++n)
          // The error of float is a few thousandths of the bound.
          distance.note(n, fast[t].values[n], slow[t].values[n], sizes.bounds[t][n] * 1.001 + 1e-6);
        INFO(slow[t].name << ", " << describe(g) << ": " << distance.text());
        CHECK(distance.within());
        CHECK(distance.error > 0x1p-13 * largest(slow[t].values));  // products of bfloat16
      }
    }
}

TEST_CASE("gradients of every variant in mixed precision are those of float within some roundings",
          "[mixed]") {
  for (const Geometry& g : {geometry(1, 2, 1, 45, 45, 8, 8), geometry(2, 4, 2, 33, 33, 15, 15),
                            geometry(1, 2, 1, 70, 70, 64, 64)})
    for (const Runner<float>& runner : all_runners<float, kBackward>(g))
      for (const heed::Options& options : option_cases()) {
        Call<float> call = random_call<float>(runner.geometry, runner.extra_dim);
        call.options = options;
        const Named fast = backward(runner, call, forward(runner, call));
        call.options.precision = heed::Precision::storage;
        const Named slow = backward(runner, call, forward(runner, call));
        REQUIRE(fast.size() == slow.size());
        for (std::size_t t = 0; t < slow.size(); ++t) {
          const bool parameter = slow[t].values.size() <= std::size_t(g.heads);
          const double size = parameter
                                  ? std::max(largest(slow[t].values), size_of_terms(runner, call))
                                  : largest(slow[t].values);
          Distance distance;
          for (std::size_t n = 0; n < slow[t].values.size(); ++n)
            distance.note(n, fast[t].values[n], slow[t].values[n],
                          gradient_roundings(runner.name) * heed::kBfloatRoundoff * size + 1e-6);
          INFO(runner.name << ", " << slow[t].name << ", " << describe(g) << ", key_tile "
                           << options.key_tile << ": " << distance.text());
          CHECK(distance.within());
        }
      }
}

TEST_CASE("mixed precision has the same bits for any number of threads", "[mixed]") {
  for (const Geometry& g : {geometry(2, 4, 2, 70, 70, 8, 8), geometry(1, 2, 1, 150, 150, 12, 12)})
    for (const Runner<float>& runner : runners<float, kBackward>(g))
      for (heed::Options options : option_cases()) {
        Call<float> call = random_call<float>(runner.geometry, runner.extra_dim);
        call.mask = owned(heed::causal<float>());
        call.options = options;
        const Outcome<float> one = forward(runner, call);
        const Named gradients = backward(runner, call, one);
        for (const int threads : {2, 3, 7}) {
          call.options.threads = threads;
          const Outcome<float> several = forward(runner, call);
          INFO(runner.name << ", " << threads << " threads, key_tile " << options.key_tile);
          CHECK(same_bits(several.out.dense(), one.out.dense()));
          CHECK(same_bits(several.saved.lse, one.saved.lse));
          const Named others = backward(runner, call, several);
          for (std::size_t t = 0; t < gradients.size(); ++t)
            CHECK(same_bits(others[t].values, gradients[t].values));
        }
      }
}

TEST_CASE("what hidden pairs hold changes no bit in mixed precision", "[mixed]") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Geometry g = geometry(1, 2, 1, 45, 45, 10, 10);
  const auto unseen_row = [](Index i) { return i % 3 == 1; };
  const auto unseen_key = [](Index j) { return j % 5 == 2; };
  const auto mask = boolean_mask<float>(
      {1, 1, g.len_q, g.len_kv},
      [&](Index, Index, Index i, Index j) { return !unseen_row(i) && !unseen_key(j); });
  for (const float hidden : {nan, heed::kInfinity<float>, std::numeric_limits<float>::max()})
    for (const Runner<float>& runner : runners<float, kBackward>(g))
      for (const heed::Options& options : option_cases()) {
        if (runner.reads_own_rows) continue;
        const auto run = [&](float x) {
          Call<float> call = random_call<float>(runner.geometry, runner.extra_dim);
          call.options = options;
          call.mask = mask;
          const auto put = [&](Tensor<float>& tensor, const auto& here) {
            const Shape& s = tensor.shape();
            for (Index h = 0; h < s.heads; ++h)
              for (Index t = 0; t < s.len; ++t)
                for (Index c = t % 2; here(t) && c < s.dim; c += 3) tensor(0, h, t, c) = x;
          };
          put(call.key, unseen_key);
          put(call.value, unseen_key);
          if (runner.plain_rows) put(call.query, unseen_row);
          if (runner.plain_rows) put(call.grad_out, unseen_row);
          const Outcome<float> result = forward(runner, call);
          return std::pair{result.out.dense(), backward(runner, call, result)};
        };
        const auto [out, gradients] = run(0.5F);
        const auto [hidden_out, hidden_gradients] = run(hidden);
        INFO(runner.name << ", " << hidden << " hidden, key_tile " << options.key_tile);
        CHECK(same_bits(out, hidden_out));
        for (std::size_t t = 0; t < gradients.size(); ++t) {
          INFO(gradients[t].name);
          CHECK(same_bits(gradients[t].values, hidden_gradients[t].values));
        }
      }
}

TEST_CASE("a NaN shows in mixed precision where it shows in float", "[mixed]") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Geometry g = geometry(1, 2, 1, 45, 45, 10, 10);
  for (const Runner<float>& runner : runners<float, kBackward>(g))
    for (const heed::Options& options : option_cases())
      for (int where = 0; where < 4; ++where) {
        Call<float> call = random_call<float>(runner.geometry, runner.extra_dim);
        call.mask = owned(heed::causal<float>());
        Tensor<float>* tensors[] = {&call.query, &call.key, &call.value, &call.grad_out};
        (*tensors[where])(0, 0, 21, 3) = nan;
        call.options = options;
        const Outcome<float> fast = forward(runner, call);
        const Named fast_gradients = backward(runner, call, fast);
        call.options.precision = heed::Precision::storage;
        const Outcome<float> slow = forward(runner, call);
        const Named slow_gradients = backward(runner, call, slow);
        const auto differ = [](const auto& a, const auto& b) {
          Index count = 0;
          for (std::size_t n = 0; n < a.size(); ++n) count += std::isnan(a[n]) != std::isnan(b[n]);
          return count;
        };
        INFO(runner.name << ", NaN in tensor " << where << ", key_tile " << options.key_tile);
        CHECK(differ(fast.out.dense(), slow.out.dense()) == 0);
        for (std::size_t t = 0; t < slow_gradients.size(); ++t) {
          INFO(slow_gradients[t].name);
          CHECK(differ(fast_gradients[t].values, slow_gradients[t].values) == 0);
        }
      }
}

TEST_CASE("mixed precision drops the weights that float drops", "[mixed]") {
  const Geometry g = geometry(1, 2, 1, 45, 45, 16, 16);
  for (const Runner<float>& runner : runners<float, kBackward>(g)) {
    Call<float> call = random_call<float>(runner.geometry, runner.extra_dim);
    call.options.dropout = {0.5, 7};
    const Outcome<float> slow = forward(runner, call);
    const Named slow_gradients = backward(runner, call, slow);
    call.options = mixed(call.options);
    const Outcome<float> fast = forward(runner, call);
    const Named fast_gradients = backward(runner, call, fast);
    // A weight that only one of them drops would show as a difference of its own size.
    const auto close = [&](const auto& a, const auto& b) {
      std::vector<double> x(a.begin(), a.end()), y(b.begin(), b.end());
      Distance distance;
      for (std::size_t n = 0; n < x.size(); ++n)
        distance.note(n, x[n], y[n],
                      gradient_roundings(runner.name) * heed::kBfloatRoundoff * largest(y) + 1e-6);
      return distance;
    };
    INFO(runner.name);
    CHECK(close(fast.out.dense(), slow.out.dense()).within());
    for (std::size_t t = 0; t < 3; ++t) {
      const Distance distance = close(fast_gradients[t].values, slow_gradients[t].values);
      INFO(slow_gradients[t].name << ": " << distance.text());
      CHECK(distance.within());
    }
  }
}

TEST_CASE("tensors of 16 bits have the same products in mixed precision as their floats",
          "[mixed]") {
  const Geometry g = geometry(2, 4, 2, 37, 37, 8, 8);
  for (const Runner<float>& runner : runners<float, kBackward>(g))
    for (const heed::Options& options : option_cases()) {
      Call<float> call = random_call<float>(runner.geometry, runner.extra_dim);
      call.options = options;
      call.mask = owned(heed::causal<float>());
      Tensor<heed::bfloat16> key(call.key.shape(), Layout::padded),
          value(call.value.shape(), Layout::bthd);
      const auto store = [](Tensor<float>& from, Tensor<heed::bfloat16>& to) {
        const Shape& s = from.shape();
        for (Index b = 0; b < s.batch; ++b)
          for (Index h = 0; h < s.heads; ++h)
            for (Index t = 0; t < s.len; ++t)
              for (Index c = 0; c < s.dim; ++c) {
                to(b, h, t, c) = heed::bfloat16(from(b, h, t, c));
                from(b, h, t, c) = to(b, h, t, c);
              }
      };
      store(call.key, key);
      store(call.value, value);
      const Outcome<float> wide = forward(runner, call);
      heed::Inputs<float> in = call.inputs();
      in.key = std::as_const(key).view();
      in.value = std::as_const(value).view();
      Tensor<float> out(wide.out.shape());
      heed::Saved<float> saved;
      runner.forward(in, call.mask.mask, out.view(), &saved, options);
      INFO(runner.name << ", key_tile " << options.key_tile);
      CHECK(same_bits(out.dense(), wide.out.dense()));
      CHECK(same_bits(saved.lse, wide.saved.lse));
    }
}

TEST_CASE("few queries and the folded heads of one have the bits of Precision::storage",
          "[mixed]") {
  for (const Geometry& g :
       {geometry(2, 16, 1, 1, 50, 8, 8), geometry(1, 2, 1, heed::kFewRows<float>, 50, 8, 8)})
    for (const Runner<float>& runner : runners<float, kBackward>(g, false)) {
      Call<float> call = random_call<float>(runner.geometry, runner.extra_dim);
      const Outcome<float> stored = forward(runner, call);
      const Named gradients = backward(runner, call, stored);
      call.options = mixed(call.options);
      const Outcome<float> result = forward(runner, call);
      INFO(runner.name << ", " << describe(g));
      CHECK(same_bits(result.out.dense(), stored.out.dense()));
      const Named others = backward(runner, call, result);
      for (std::size_t t = 0; t < gradients.size(); ++t)
        CHECK(same_bits(others[t].values, gradients[t].values));
    }
}

TEST_CASE("mixed precision is refused for double, and by backward after another forward",
          "[mixed]") {
  const Geometry g = geometry(1, 2, 1, 20, 20, 8, 8);
  const Runner<double> wide = runners<double, kBackward>(g).front();
  Call<double> call = random_call<double>(g, 0);
  call.options = mixed(call.options);
  const std::string refusal =
      ": Options: precision is mixed, it must be storage for an op of double; an op of float has "
      "both";
  CHECK(message_of([&] { (void)forward(wide, call); }) == "heed::forward" + refusal);
  CHECK(message_of([&] {
          (void)heed::explain(heed::ScaledDot<double>{}, g, {}, heed::Pass::forward, call.options);
        }) == "heed::explain" + refusal);

  const Runner<float> sdpa = runners<float, kBackward>(g).front();
  for (const auto first : {heed::Precision::storage, heed::Precision::mixed}) {
    Call<float> own = random_call<float>(g, 0);
    own.options.precision = first;
    const Outcome<float> result = forward(sdpa, own);
    const bool was_mixed = first == heed::Precision::mixed;
    own.options.precision = was_mixed ? heed::Precision::storage : heed::Precision::mixed;
    CHECK(message_of([&] { (void)backward(sdpa, own, result); }) ==
          std::string("heed::backward: saved is of a call with precision ") +
              (was_mixed ? "mixed, this one has storage" : "storage, this one has mixed"));
  }
}

TEST_CASE("explain() tells what mixed precision does here", "[mixed]") {
  const auto remarks = [](Index len_q) {
    heed::Options options;
    options.precision = heed::Precision::mixed;
    std::string all;
    for (const std::string& remark :
         heed::explain(heed::ScaledDot<float>{}, geometry(1, 2, 2, len_q, 50, 8, 8), {},
                       heed::Pass::forward, options)
             .remarks)
      all += remark + "\n";
    return all;
  };
  CHECK((remarks(40).find("slower than float") != std::string::npos) == !heed::kHasPairProducts);
  CHECK(remarks(1).find("so few queries") != std::string::npos);
}
