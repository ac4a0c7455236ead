// SPDX-License-Identifier: Apache-2.0
#pragma once

// Variants as benchmarks: their calls, and their comparison with the reference.

#include "measure.hpp"

#include <heed/check/op_problem.hpp>
#include <heed/compiled.hpp>
#include <heed/mask/block_mask.hpp>
#include <heed/mask/visible.hpp>
#include <heed/measure/select.hpp>

namespace heed_bench {

// Largest difference of a from b, relative to b's largest number; infinite if one of them is NaN.
template <class T, class Wanted>
[[nodiscard]] double deviation(const std::vector<T>& a, const std::vector<Wanted>& b) {
  double error = 0, top = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    top = std::max(top, std::abs(double(b[i])));
    const double e = std::abs(double(a[i]) - double(b[i]));
    error = std::isnan(e) ? heed::kInfinity<double> : std::max(error, e);
    if (std::isinf(error)) return error;
  }
  return error / top;
}

// The mask of a case and the numbers that it reads; a boolean mask hides every eighth pair.
template <class T>
struct CaseMask {
  std::vector<T> numbers;
  std::unique_ptr<bool[]> allowed;
  heed::Mask<T> mask;

  CaseMask(MaskKind kind, const heed::Geometry& g) {
    const heed::Shape pairs{1, 1, g.len_q, g.len_kv};
    const auto count = std::size_t(g.len_q * g.len_kv);
    const heed::CounterRandom random(7, kind == MaskKind::bias ? 6 : 99);
    if (kind == MaskKind::causal) mask = heed::causal<T>();
    if (kind == MaskKind::blocks || kind == MaskKind::function)
      mask =
          heed::visible<T>([](auto, auto, auto i, auto j) { return (i / 128 + j / 128) % 4 == 0; });
    if (kind == MaskKind::blocks) mask = heed::BlockMask<T>(mask, g).mask();
    if (kind == MaskKind::bias) {
      for (std::size_t i = 0; i < count; ++i) numbers.push_back(T(random.normal(i)));
      mask = heed::bias<T>(heed::TensorView<const T>(numbers.data(), pairs));
    }
    if (has_lists(kind))
      mask = heed::causal<T>() & heed::block_lists<T>(lists(g, list_block(kind), list_count(kind)));
    if (kind != MaskKind::boolean) return;
    allowed.reset(new bool[count]);
    for (std::size_t i = 0; i < count; ++i) allowed[i] = random.uniform(i) > 0.125;
    mask = heed::boolean<T>({allowed.get(), pairs});
  }

 private:
  // The block of each query, and earlier ones by chance.
  [[nodiscard]] static heed::BlockLists lists(const heed::Geometry& g, Index block, Index count) {
    const heed::CounterRandom random(7, 5);
    const Index blocks = (g.len_kv + block - 1) / block;
    return heed::select_largest<float>(
        {1, 1, g.len_q, blocks, count, 1, block}, [&](Index, Index, Index i, float* s) {
          const Index own = std::min(i / block, blocks - 1);
          for (Index k = 0; k < own; ++k)
            s[k] = float(random.uniform(std::uint64_t(i * blocks + k)));
          s[own] = 2;
        });
  }
};

// Tensors of a call that are stored as Stored, 16 bits wide.
template <class Op, class Stored>
struct StoredTensors {
  heed::Geometry geometry;
  Index extra_dim;
  std::vector<Stored> query, key, value, extra, grad_out, query_inputs, key_inputs;
  std::vector<Stored> out, grad_query, grad_key, grad_value;

  StoredTensors(const Op& op, const heed::Geometry& g) : geometry(g), extra_dim(op.extra_dim(g)) {
    const auto numbers = heed::normal_numbers(op, g);
    const auto store = [](const auto& from, std::vector<Stored>& to) {
      to.resize(from.size());
      heed::convert(from.data(), Index(from.size()), to.data());
    };
    store(numbers.query, query);
    store(numbers.key, key);
    store(numbers.value, value);
    store(numbers.extra, extra);
    store(numbers.grad_out, grad_out);
    store(numbers.query_inputs, query_inputs);
    store(numbers.key_inputs, key_inputs);
    out = grad_out;
    grad_query = query;
    grad_key = key;
    grad_value = value;
  }
  [[nodiscard]] heed::CallViews<typename Op::Scalar> views() {
    const auto view = [](std::vector<Stored>& numbers, const heed::Shape& shape) {
      return heed::TensorView<Stored>(numbers.data(), shape);
    };
    const heed::Geometry& g = geometry;
    heed::CallViews<typename Op::Scalar> views{
        {view(query, g.query_shape()), view(key, g.key_shape()), view(value, g.value_shape())},
        view(out, g.out_shape()),
        view(grad_out, g.out_shape()),
        {view(grad_query, g.query_shape()), view(grad_key, g.key_shape()),
         view(grad_value, g.value_shape())}};
    if (extra_dim > 0) views.inputs.extra = view(extra, g.extra_shape(extra_dim));
    if (constexpr Index count = heed::InputColumns<Op>::query; count > 0)
      views.inputs.query_inputs = view(query_inputs, {g.batch, g.heads, g.len_q, count});
    if (constexpr Index count = heed::InputColumns<Op>::key; count > 0)
      views.inputs.key_inputs = view(key_inputs, {g.batch, g.heads, g.len_kv, count});
    return views;
  }
};
// Tensors of the op's own type lie in the OpCall.
template <class Op>
struct StoredTensors<Op, typename Op::Scalar> {};

// A call of a case, and the fraction of the case's pairs that a variant's own mask leaves.
template <class Op, class Stored = typename Op::Scalar>
struct CaseCall {
  CaseMask<typename Op::Scalar> mask;
  StoredTensors<Op, Stored> tensors;
  heed::OpCall<Op> call;
  heed::Mask<typename Op::Scalar> shown;  // the mask in front of the variant's choice of keys
  heed::KeyChoice<typename Op::Scalar> choose;
  double share = 1;

  CaseCall(const Op& op, const heed::Geometry& g, MaskKind kind, const heed::Options& options)
      : mask(kind, g), tensors(tensors_of(op, g)), call(call_of(op, g, options)) {}
  CaseCall(const heed::Variant<Op>& variant, const heed::Geometry& g, MaskKind kind,
           const heed::Options& options)
      : CaseCall(variant.op, g, kind, options) {
    if (variant.mask == nullptr && !variant.choose) return;
    const double before = visible_pairs(call.mask, g);
    shown = heed::BlockMask(variant.mask_with(call.mask, g), g).mask();
    choose = variant.choose;
    call.mask = chosen();
    share = visible_pairs(call.mask, g) / before;
  }
  CaseCall(const CaseCall&) = delete;  // the call refers to the rest
  void forward() {
    if (choose) call.mask = chosen();
    call.forward();
  }

 private:
  [[nodiscard]] heed::Mask<typename Op::Scalar> chosen() const {
    return heed::with_chosen(choose, call.inputs(), shown, call.options);
  }
  [[nodiscard]] static double visible_pairs(const heed::Mask<typename Op::Scalar>& mask,
                                            const heed::Geometry& g) {
    const heed::BoundMask<typename Op::Scalar> bound(mask, g, "heed_bench");
    double pairs = 0;
    for (Index h = 0; h < g.heads; ++h)
      for (Index i = 0; i < g.len_q; ++i) pairs += double(bound.count_visible(0, h, i));
    return pairs;
  }

  static constexpr bool own = std::is_same_v<Stored, typename Op::Scalar>;
  [[nodiscard]] static StoredTensors<Op, Stored> tensors_of(const Op& op, const heed::Geometry& g) {
    if constexpr (own)
      return {};
    else
      return {op, g};
  }
  [[nodiscard]] heed::OpCall<Op> call_of(const Op& op, const heed::Geometry& g,
                                         const heed::Options& options) {
    if constexpr (own)
      return {op, g, mask.mask, options};
    else
      return {op, tensors.views(), mask.mask, options};
  }
};

// Largest difference from the reference, relative to the largest number: over out, or dq, dk, dv.
template <class Op>
[[nodiscard]] double deviation_from_twin(heed::OpCall<Op>& call, Pass pass) {
  const auto problem = heed::problem_of<typename Op::Scalar>(call);
  call.forward();
  if (pass == Pass::forward)
    return deviation(heed::dense_numbers<double>(call.out_view()),
                     heed::reference::forward(call.op, problem).out);
  call.backward();
  const auto slow = heed::reference::gradients(
      call.op, problem, heed::dense_numbers<typename Op::Scalar>(call.grad_out_view()));
  double error = 0;
  for (const heed::NamedTensor& gradient : call.gradients()) {
    const auto* wanted = gradient.name == "query"   ? &slow.dquery
                         : gradient.name == "key"   ? &slow.dkey
                         : gradient.name == "value" ? &slow.dvalue
                                                    : nullptr;
    if (wanted) error = std::max(error, deviation(gradient.values, *wanted));
  }
  return error;
}

template <class Stored, class Op>
[[nodiscard]] Contender contender(const heed::Variant<Op>& variant, MaskKind mask,
                                  const heed::Options& options) {
  const auto at = std::make_shared<CaseCall<Op, Stored>>(variant, variant.geometry, mask, options);
  return {[at] { at->forward(); }, [at] { at->call.backward(); }, at->share};
}

// The call with which others are compared: plain attention, without a mask unless the mask hides later keys.
template <class Stored>
[[nodiscard]] Contender baseline(const Case& c, const heed::Options& options) {
  const heed::Variant<heed::ScaledDot<heed::ArithmeticOf<Stored>>> plain{
      heed::kBaseline, "", c.geometry(), {}};
  return contender<Stored>(plain, c.is_causal() ? MaskKind::causal : MaskKind::full, options);
}

// Compares the op on a few rows and one key-value head with the reference.
template <class Stored, class Op>
[[nodiscard]] double small_deviation(const heed::Variant<Op>& variant, const Case& c, Pass pass,
                                     const heed::Options& options) {
  heed::Geometry small = variant.geometry;
  small.len_q = std::min<Index>(small.len_q, 70);
  small.len_kv = 70;
  CaseCall<Op, Stored> at(variant, small, c.mask, options);
  return deviation_from_twin(at.call, pass);
}

// Deviations that rounding explains: for 16-bit tensors 4 units of their results, and 4 more for
// operands that are rounded on the way.
template <class Stored>
[[nodiscard]] constexpr double allowed_deviation(heed::Precision precision) {
  if (heed::NarrowNumber<Stored>) return (precision.mixes() ? 8 : 4) * 0x1p-8;
  return sizeof(Stored) == 4 ? 1e-3 : 1e-10;
}

// Compares the variant with the reference, then times it.
template <class Stored, class Op>
void run(benchmark::State& state, const heed::Variant<Op>& variant, const Case& c, Pass pass,
         heed::Precision precision, bool& compared) {
  heed::Options options;
  options.threads = c.threads;
  options.precision = precision;
  if (!compared) {
    const double error = small_deviation<Stored>(variant, c, pass, options);
    if (!(error < allowed_deviation<Stored>(precision))) {
      state.SkipWithError(("differs from the slow twin by " + std::to_string(error)).c_str());
      return;
    }
    compared = true;
  }
  const Contender mine = contender<Stored>(variant, c.mask, options);
  const bool is_baseline = variant.name == std::string(heed::kBaseline) &&
                           c.mask != MaskKind::boolean && c.mask != MaskKind::bias &&
                           !has_lists(c.mask);
  std::optional<Contender> other;
  if (!is_baseline) other = baseline<Stored>(c, options);
  measure<Stored>(state, c, pass, mine, other ? &*other : nullptr);
}

// Variants that read the key at a query's own position need that key; variants that read later keys need a mask that
// shows them.
template <class Op>
[[nodiscard]] bool fits(const heed::Variant<Op>& variant, const Case& c) {
  if (variant.traits.reads_later_keys && c.is_causal()) return false;
  const heed::Geometry& g = variant.geometry;
  if (Op::ReadoutType::uses_own_rows && g.query_position(g.len_q) > g.len_kv) return false;
  try {
    variant.op.validate(variant.geometry, "heed_bench");
    (void)variant.mask_with({}, variant.geometry);
    return true;
  } catch (const std::invalid_argument&) {
    return false;
  }
}

// Both passes of a variant in one case.
template <class Stored, class Op>
void add_variant(const heed::Variant<Op>& variant, const Case& c, const char* dtype,
                 heed::Precision precision = {}) {
  if (!fits(variant, c)) return;
  const auto shared = std::make_shared<heed::Variant<Op>>(variant);
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    if (c.decodes() && pass == Pass::backward) continue;
    add_benchmark(variant.name, pass, dtype, c,
                  [=, compared = std::make_shared<bool>(false)](benchmark::State& state) {
                    run<Stored>(state, *shared, c, pass, precision, *compared);
                  });
  }
}

template <class Stored>
void add_variants(const char* dtype, heed::Precision precision = {}) {
  using T = heed::ArithmeticOf<Stored>;
  for (const Case& c : cases()) {
    const auto add = [&](const auto& variant) {
      add_variant<Stored>(variant, c, dtype, precision);
    };
    heed::for_each_variant<T>(c.geometry(), add);
    heed::ResonantOde<T> eight;
    eight.normaliser.steps = 8;
    add(heed::Variant<heed::ResonantOde<T>>{"ode-8", "8 steps", c.geometry(), eight});
  }
}

}  // namespace heed_bench
