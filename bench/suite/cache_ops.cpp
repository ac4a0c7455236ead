// SPDX-License-Identifier: Apache-2.0

// Steps of decoding from a KvCache, of each type of numbers that it holds.

#include "ops.hpp"
#include "suite.hpp"

#include <heed/kv_cache.hpp>

namespace heed_bench {

namespace {

// A cache of the tokens of a case, and the call for the last one.
template <class Op, class Stored>
struct CacheStep {
  using T = typename Op::Scalar;
  Op op;
  heed::Geometry geometry;
  heed::Options options;
  heed::CallNumbers<T> numbers;
  heed::KvCache<Stored> cache;
  std::vector<T> out;

  CacheStep(const Op& of, const heed::Geometry& g, const heed::Options& with)
      : op(of),
        geometry(g),
        options(with),
        numbers(heed::normal_numbers(of, g)),
        cache(g.batch, g.kv_heads, g.dim_qk, g.dim_v),
        out(numbers.grad_out.size()) {
    append(0, g.len_kv);
  }
  // Appends the last token, which attends to all.
  void run() {
    cache.truncate(geometry.len_kv - 1);
    append(geometry.len_kv - 1, 1);
    heed::forward(op, inputs(), {}, out_view(), nullptr, options);
  }
  [[nodiscard]] double deviation_of_twin() {
    heed::OpCall<Op> call(op, heed::CallViews<T>{inputs(), out_view()}, {}, options);
    return deviation_from_twin(call, Pass::forward);
  }

 private:
  void append(Index first, Index count) {
    const auto tokens = [&](const std::vector<T>& from, const heed::Shape& all) {
      return heed::TensorView<const T>(from.data() + first * all.dim,
                                       {all.batch, all.heads, count, all.dim},
                                       heed::dense_strides(all));
    };
    cache.append(tokens(numbers.key, geometry.key_shape()),
                 tokens(numbers.value, geometry.value_shape()));
  }
  [[nodiscard]] heed::Inputs<T> inputs() {
    heed::StoredView<const T> extra;
    const Index width = op.extra_dim(geometry);
    if (width > 0) extra = {numbers.extra.data(), geometry.extra_shape(width)};
    return cache.inputs({numbers.query.data(), geometry.query_shape()}, extra);
  }
  [[nodiscard]] heed::StoredView<T> out_view() { return {out.data(), geometry.out_shape()}; }
};

template <class Stored, class Op>
[[nodiscard]] Contender decoder(const Op& op, const heed::Geometry& g,
                                const heed::Options& options) {
  const auto at = std::make_shared<CacheStep<Op, Stored>>(op, g, options);
  return {[at] { at->run(); }, {}};
}

template <class Stored, class Op>
void run_on_cache(benchmark::State& state, const heed::Variant<Op>& variant, const Case& c) {
  heed::Options options;
  options.threads = c.threads;
  heed::Geometry small = variant.geometry;
  small.len_kv = 70;
  const double error = CacheStep<Op, Stored>(variant.op, small, options).deviation_of_twin();
  if (!(error < allowed_deviation<heed::ArithmeticOf<Stored>>({}))) {
    state.SkipWithError(("differs from the slow twin by " + std::to_string(error)).c_str());
    return;
  }
  const Contender mine = decoder<Stored>(variant.op, variant.geometry, options);
  std::optional<Contender> other;
  if (variant.name != std::string(heed::kBaseline))
    other = decoder<Stored>(heed::ScaledDot<heed::ArithmeticOf<Stored>>{}, c.geometry(), options);
  measure<Stored>(state, c, Pass::forward, mine, other ? &*other : nullptr);
}

template <class Stored>
void add_decoding(const char* dtype) {
  using T = heed::ArithmeticOf<Stored>;
  for (const Case& c : cases()) {
    if (!c.decodes()) continue;
    heed::for_each_variant<T>(c.geometry(), [&]<class Op>(const heed::Variant<Op>& variant) {
      if (!fits(variant, c)) return;
      const auto shared = std::make_shared<heed::Variant<Op>>(variant);
      add_benchmark(variant.name, Pass::forward, dtype, c,
                    [=](benchmark::State& state) { run_on_cache<Stored>(state, *shared, c); });
    });
  }
}

}  // namespace

void add_caches() {
  add_decoding<float>("float-cache");
  add_decoding<heed::bfloat16>("bf16-cache");
  add_decoding<std::int8_t>("int8-cache");
}

}  // namespace heed_bench
