// SPDX-License-Identifier: Apache-2.0
// The statements of explain() agree with the calls.

#include "catch.hpp"
#include "conformance/counting_new.hpp"

#include <heed/attention.hpp>
#include <heed/compiled.hpp>
#include <heed/explain.hpp>

#include <algorithm>

using heed::Explanation;
using heed::Geometry;
using heed::Index;
using heed::Pass;
using heed_test::Allocations;

namespace {

[[nodiscard]] bool mentions(const Explanation& e, const std::string& words) {
  return std::any_of(e.remarks.begin(), e.remarks.end(),
                     [&](const std::string& r) { return r.find(words) != std::string::npos; });
}

// Numbers and views of one call on `g`, all ones.
template <class T>
struct Ones {
  Geometry g;
  std::vector<T> q, k, v, extra, out, dq, dk, dv, dextra;
  heed::Inputs<T> in;
  heed::Gradients<T> grads;

  Ones(const Geometry& geometry, Index extra_dim) : g(geometry) {
    in.query = view(q, {g.batch, g.query_heads, g.len_q, g.dim_qk});
    in.key = view(k, {g.batch, g.kv_heads, g.len_kv, g.dim_qk});
    in.value = view(v, {g.batch, g.kv_heads, g.len_kv, g.dim_v});
    grads.query = view(dq, in.query.shape());
    grads.key = view(dk, in.key.shape());
    grads.value = view(dv, in.value.shape());
    if (extra_dim > 0) in.extra = view(extra, {g.batch, g.heads, g.len_q, extra_dim});
    if (extra_dim > 0) grads.extra = view(dextra, in.extra.shape());
  }
  [[nodiscard]] heed::TensorView<T> out_view() {
    return view(out, {g.batch, g.heads, g.len_q, g.dim_v});
  }

 private:
  [[nodiscard]] static heed::TensorView<T> view(std::vector<T>& numbers, const heed::Shape& s) {
    numbers.assign(std::size_t(s.batch * s.heads * s.len * s.dim), T(1));
    return {numbers.data(), s};
  }
};

}  // namespace

TEST_CASE("scratch is what a call allocates, for every variant and both passes") {
  const Geometry g{1, 4, 4, 2, 700, 700, 32, 32};
  heed::Options options;
  options.threads = 2;
  heed::for_each_variant<float>(g, [&]<class Op>(const heed::Variant<Op>& variant) {
    CAPTURE(variant.name);
    Ones<float> data(variant.geometry, variant.op.extra_dim(variant.geometry));
    heed::Saved<float> saved;
    const auto out = data.out_view();
    // The saved rows stand outside of scratch; a second call finds them allocated.
    heed::forward(variant.op, data.in, heed::Mask<float>{}, out, &saved, options);
    const auto allocated = [](auto&& call) {
      const long before = Allocations::bytes;
      call();
      return double(Allocations::bytes - before);
    };
    const double forward = allocated(
        [&] { heed::forward(variant.op, data.in, heed::Mask<float>{}, out, nullptr, options); });
    const double backward = allocated([&] {
      heed::backward(variant.op, data.in, heed::Mask<float>{}, saved,
                     heed::TensorView<const float>(out), heed::TensorView<const float>(out),
                     data.grads, nullptr, options);
    });
    const auto said = [&](Pass pass) {
      return double(heed::explain(variant.op, variant.geometry, heed::Mask<float>{}, pass, options)
                        .scratch_bytes);
    };
    // Beside scratch: copies of parameters, turnstiles, sentences.
    const double parameters = 400e3;
    CHECK(forward >= said(Pass::forward));
    CHECK(forward <= said(Pass::forward) + parameters);
    CHECK(backward >= said(Pass::backward));
    CHECK(backward <= said(Pass::backward) + 2 * parameters);
  });
}

TEST_CASE("tiles are counted by what the mask does to them") {
  const heed::ScaledDot<float> op;
  const Geometry g{2, 3, 3, 3, 640, 640, 16, 16};
  const Explanation full = heed::explain(op, g);
  const Index tiles = 640 / full.lanes * ((640 + full.key_tile - 1) / full.key_tile) * 6;
  CHECK(full.full_tiles == tiles);
  CHECK(full.partial_tiles == 0);
  CHECK(full.skipped_tiles == 0);
  CHECK(full.visible_flops == 4.0 * 6 * 640 * 640 * 16);
  CHECK(full.computed_flops == full.visible_flops);
  CHECK(heed::explain(op, g, {}, Pass::backward).visible_flops == 10.0 * 6 * 640 * 640 * 16);

  const Explanation causal = heed::explain(op, g, heed::causal<float>());
  CHECK(causal.full_tiles + causal.partial_tiles + causal.skipped_tiles == tiles);
  CHECK(causal.skipped_tiles > 0);
  CHECK(causal.visible_flops < 0.75 * full.visible_flops);
  CHECK(causal.visible_flops > 0.5 * full.visible_flops);
}

TEST_CASE("remarks name what stands in the way of more speed") {
  const heed::ScaledDot<float> op;
  const auto explain = [&](Index len_q, Index len_kv, const heed::Mask<float>& mask = {},
                           const heed::Options& options = {}) {
    return heed::explain(op, Geometry{1, 1, 1, 1, len_q, len_kv, 64, 64}, mask, Pass::forward,
                         options);
  };
  CHECK(mentions(explain(1, 512), "holds 1 query: products along the columns"));
  CHECK(
      mentions(explain(heed::kPanelLanes<float> + heed::kPanelLanes<float> / 2 + 1, 64), "lanes"));
  CHECK_FALSE(mentions(explain(1024, 1024), "lanes"));
  CHECK(mentions(explain(0, 64), "nothing to compute"));
  heed::Options many;
  many.threads = 64;
  // Without OpenMP there is one thread.
  const bool has_threads = heed::resolve_threads(64) == 64;
  CHECK(mentions(explain(128, 512, {}, many), "fewer units of work than threads") == has_threads);
  CHECK(mentions(explain(64, 64, heed::soft_cap<float>(2.0F)), "soft cap"));
  heed::adapt_threads(false);  // two questions for the default have one answer
  const heed::ResonantOde<float> ode;
  const Explanation rows = heed::explain(ode, Geometry{1, 1, 1, 1, 256, 4096, 64, 64});
  CHECK(mentions(rows, "whole rows"));
  many.threads = 1;
  CHECK(explain(128, 512, {}, many)
            .text()
            .find("units on 1 worker of 1 thread (" + std::string(heed::thread_count(1).source) +
                  "), ") != std::string::npos);
  CHECK(rows.threads == heed::resolve_threads(0));
  CHECK(rows.threads_from == heed::thread_count(0).source);
  CHECK(rows.text().find("- the normaliser needs whole rows") != std::string::npos);
}

TEST_CASE("backward keeps 64 threads busy, with few heads as with many") {
  heed::Options many;
  many.threads = 64;
  const heed::ScaledDot<float> op;
  const heed::Dar<float> dar;
  const heed::Differential<float> differential;  // of whole rows and two maps
  for (const Index heads : {1, 8, 64})
    for (const auto& mask : {heed::Mask<float>{}, heed::causal<float>()}) {
      INFO("heads " << heads << (mask.bands.empty() ? "" : ", causal"));
      const Geometry g{1, heads, heads, heads, 8192, 8192, 64, 64};
      CHECK(heed::explain(op, g, mask, Pass::backward, many).busy > 0.9);
      CHECK(heed::explain(dar, g, mask, Pass::backward, many).busy > 0.9);
      CHECK(heed::explain(differential, g, mask, Pass::backward, many).busy > 0.9);
    }
  // Two workers and two heads, and one worker: nobody waits.
  many.threads = 2;
  CHECK(
      heed::explain(op, Geometry{1, 2, 2, 2, 1024, 1024, 64, 64}, {}, Pass::backward, many).busy ==
      1);
  many.threads = 1;
  CHECK(
      heed::explain(op, Geometry{1, 1, 1, 1, 1024, 1024, 64, 64}, {}, Pass::backward, many).busy ==
      1);
  if (heed::resolve_threads(2) == 1) return;  // without OpenMP
  // Three of four: one worker has nothing to do while the other ends the third head.
  many.threads = 2;
  CHECK(heed::explain(op, Geometry{1, 3, 3, 3, 64, 64, 64, 64}, {}, Pass::backward, many).busy ==
        0.75);
  CHECK(mentions(heed::explain(op, Geometry{1, 3, 3, 3, 64, 64, 64, 64}, {}, Pass::backward, many),
                 "workers wait 25 % of the time"));
}
