// SPDX-License-Identifier: Apache-2.0
#pragma once

// Every variant behind one type, so that a conformance test is written once and compiled once.
//
//   for (const Runner<float>& runner : runners<float>(geometry)) {
//     const auto call = random_call<float>(runner.geometry, runner.extra_dim);
//     const Outcome<float> result = forward(runner, call);
//     const Named gradients = backward(runner, call, result);
//   }

#include <heed/check/op_gradcheck.hpp>
#include <heed/check/op_problem.hpp>
#include <heed/compiled.hpp>
#include <heed/variants.hpp>

#include "moving_dialectical.hpp"
#include "random_call.hpp"

namespace heed_test {

using Named = std::vector<heed::NamedTensor>;

// The results of the reference.
struct Twin {
  std::vector<double> out, mixed;
  std::vector<std::vector<double>> lse;
  std::vector<double> s_row,
      weighted_abs_value;  // for forward's tolerance; s_row covers the scores too
};

// The functions of a variant that a test needs; others are not compiled.
struct Needs {
  bool backward = false;
  bool twin = false;         // reference in double
  bool naive = false;        // reference in T
  bool tape = false;         // the reference's gradients in double
  bool naive_tape = false;   // the reference's gradients in T
  bool differences = false;  // central differences
};

template <class T>
struct Runner {
  std::string name, settings;
  Geometry geometry;
  Index extra_dim = 0;
  int maps = 1;
  bool plain_rows = false;  // readout is the identity: out is the mixed rows
  bool weights_sum_to_1 = false;
  bool lse_of_scores = true;    // false: lse of the flow's last softmax
  bool linear_rows = false;     // all keys have gradients of one size, whatever their weights
  bool reads_own_rows = false;  // reads keys and values at the queries' positions past the mask

  std::function<void(const heed::Inputs<T>&, const heed::Mask<T>&, const heed::StoredView<T>&,
                     heed::Saved<T>*, const heed::Options&)>
      forward;
  // Returns the parameters' gradients.
  std::function<Named(const heed::Inputs<T>&, const heed::Mask<T>&, const heed::Saved<T>&,
                      const heed::StoredView<const T>&, const heed::StoredView<const T>&,
                      const heed::Gradients<T>&, const heed::Options&)>
      backward;
  std::function<Twin(const Call<T>&)> twin, naive;
  std::function<Named(const Call<T>&)> tape, naive_tape;
  std::function<heed::GradientReport(const Call<T>&, const Named&, Index)> differences;
};

namespace detail {

template <class S, class T>
[[nodiscard]] heed::reference::Problem<S> problem_of(const Call<T>& call) {
  return heed::problem_of<S>(call.geometry, call.inputs(), call.mask.mask, call.options);
}

template <class S, class Op, class T>
[[nodiscard]] Twin run_twin(const Op& op, const Call<T>& call) {
  const auto cast = heed::reference::cast_whole_op<S>(op);
  const auto result = heed::reference::forward(cast, problem_of<S>(call), {false, true, true});
  const auto widen = [](const std::vector<S>& x) {
    return std::vector<double>(x.begin(), x.end());
  };
  Twin twin{widen(result.out),
            widen(result.mixed),
            {},
            result.error_scale.s_row,
            result.error_scale.weighted_abs_value};
  const Index keys = call.geometry.len_kv;
  for (const auto& lse : result.lse) twin.lse.push_back(widen(lse));
  for (const auto& scores : result.scores)
    for (std::size_t n = 0; n < scores.size(); ++n)
      if (std::isfinite(scores[n])) {
        double& s = twin.s_row[n / std::size_t(keys)];
        s = std::max(s, std::abs(double(scores[n])));
      }
  return twin;
}

template <class S, class Op, class T>
[[nodiscard]] Named run_tape(const Op& op, const Call<T>& call) {
  return heed::named_gradients(heed::reference::gradients(heed::reference::cast_whole_op<S>(op),
                                                          problem_of<S>(call),
                                                          call.grad_out.template dense<S>()));
}

// As heed::check_op_gradient, but by central differences alone, which compile faster.
template <class Op, class T>
[[nodiscard]] heed::GradientReport run_differences(const Op& op, const Call<T>& call,
                                                   const Named& analytic, Index entries) {
  const auto cast = heed::reference::cast_whole_op<double>(op);
  const auto problem = problem_of<double>(call);
  const auto grad_out = call.grad_out.template dense<double>();
  const Named tensors = heed::detail::op_tensors(cast, problem);
  heed::detail::OpLoss<std::remove_const_t<decltype(cast)>> loss{cast, problem, grad_out, {}};
  for (const heed::NamedTensor& tensor : tensors) loss.names.push_back(tensor.name);
  heed::GradcheckOptions options;
  options.max_entries_per_tensor = entries;
  return heed::check_gradient_on<double>(loss, tensors, analytic, options);
}

// Moves every parameter off its default and, where the op takes it, gives each head its own.
template <class Op>
void shake(Op& op, const Geometry& g, bool per_head) {
  using T = typename Op::Scalar;
  std::uint64_t stream = 900;
  op.visit([&](const char*, heed::Param<T>& param) {
    if (!param.given() || param.shape().size() > 1) return;
    const heed::CounterRandom random(kSeed, ++stream);
    const bool scalar = param.size() == 1;
    for (Index i = 0; i < param.size(); ++i) {
      const double u = 2 * random.uniform(std::uint64_t(i)) - 1;
      param[i] = scalar && param[i] != T(0) ? T(double(param[i]) * (1 + 0.1 * u))
                                            : T(double(param[i]) + 0.4 * u);
    }
    if (!scalar || !per_head || g.heads < 2) return;
    const heed::Param<T> before = param;
    std::vector<T> values;
    for (Index h = 0; h < g.heads; ++h) values.push_back(before[0] * T(1 - 0.05 * double(h)));
    param = heed::Param<T>({g.heads}, values);
    try {
      op.validate(g, "shake");
    } catch (const std::invalid_argument&) {
      param = before;
    }
  });
}

template <class Op>
inline constexpr bool sums_to_one = Op::NormaliserType::maps == 1 && Op::ReadoutType::identity;

template <class T, Needs needs, class Op>
void attach(Runner<T>& runner, std::shared_ptr<const Op> op) {
  runner.forward = [op](const auto& in, const auto& mask, const auto& out, auto* saved,
                        const auto& options) { heed::forward(*op, in, mask, out, saved, options); };
  if constexpr (needs.backward)
    runner.backward = [op](const auto& in, const auto& mask, const auto& saved, const auto& out,
                           const auto& grad_out, const auto& grads, const auto& options) {
      Op grad;
      heed::backward(*op, in, mask, saved, out, grad_out, grads, &grad, options);
      return heed::named_params(grad);
    };
  if constexpr (needs.twin)
    runner.twin = [op](const auto& call) { return run_twin<double>(*op, call); };
  if constexpr (needs.naive)
    runner.naive = [op](const auto& call) { return run_twin<T>(*op, call); };
  if constexpr (needs.tape)
    runner.tape = [op](const auto& call) { return run_tape<double>(*op, call); };
  if constexpr (needs.naive_tape)
    runner.naive_tape = [op](const auto& call) { return run_tape<T>(*op, call); };
  if constexpr (needs.differences)
    runner.differences = [op](const auto& call, const Named& analytic, Index entries) {
      return run_differences(*op, call, analytic, entries);
    };
}

}  // namespace detail

// One variant. The op's parameters are moved off their defaults.
template <class T, Needs needs, class Op>
[[nodiscard]] Runner<T> make_runner(const heed::Variant<Op>& variant, bool per_head = true) {
  using Readout = typename Op::ReadoutType;
  Runner<T> runner;
  runner.name = variant.name;
  runner.settings = variant.settings;
  runner.geometry = variant.geometry;
  runner.maps = Op::NormaliserType::maps;
  runner.plain_rows = Readout::identity;
  runner.weights_sum_to_1 = detail::sums_to_one<Op>;
  runner.lse_of_scores = variant.traits.lse_of_scores;
  runner.reads_own_rows = Readout::uses_own_rows;
  auto op = std::make_shared<Op>(variant.op);
  detail::shake(*op, variant.geometry, per_head);
  runner.extra_dim = op->extra_dim(variant.geometry);
  detail::attach<T, needs, Op>(runner, std::move(op));
  return runner;
}

// The runners whose names stand in the environment's HEED_VARIANTS, "sdpa,dar"; all of them where it is not set. An
// emulated processor takes a hundred times as long.
template <class T>
[[nodiscard]] std::vector<Runner<T>> asked_for(std::vector<Runner<T>> all) {
  if (const char* const names = std::getenv("HEED_VARIANTS"))
    std::erase_if(all, [list = "," + std::string(names) + ","](const Runner<T>& runner) {
      return list.find("," + std::string(runner.name) + ",") == std::string::npos;
    });
  return all;
}

// All variants that can run on `g`. Only variants that their papers exclude are missing
// (VariantTraits): an odd width for halves of heads; dim_v unlike dim_qk for values of two halves,
// a recursion or a pull on the query; a query without a key at its position for a gate on the own row.
template <class T, Needs needs = Needs{}>
[[nodiscard]] std::vector<Runner<T>> runners(const Geometry& g, bool per_head = true) {
  std::vector<Runner<T>> all;
  const auto add = [&]<class Op>(const heed::Variant<Op>& variant) {
    if (variant.traits.even_dim_qk && g.dim_qk % 2 != 0) return;
    if (variant.traits.equal_widths && g.dim_qk != g.dim_v) return;
    if (Op::ReadoutType::uses_own_rows && g.query_position(g.len_q) > g.len_kv) return;
    all.push_back(make_runner<T, needs>(variant, per_head));
  };
  heed::for_each_variant<T>(g, add, {.prototypes = 3});
  return asked_for(std::move(all));
}

namespace detail {

// (dim, rank) with orthonormal columns: the first ones of a reflection, 1 - 2 u u^T / (u^T u).
template <class T>
[[nodiscard]] heed::Param<T> reflected_basis(Index dim, Index rank) {
  const auto u = [](Index i) { return 1.0 + 0.5 * double(i % 3); };
  double square = 0;
  for (Index i = 0; i < dim; ++i) square += u(i) * u(i);
  std::vector<T> columns;
  for (Index i = 0; i < dim; ++i)
    for (Index r = 0; r < rank; ++r)
      columns.push_back(T((i == r ? 1.0 : 0.0) - 2 * u(i) * u(r) / square));
  return heed::Param<T>(std::vector<Index>{dim, rank}, columns);
}

}  // namespace detail

// The variants, and modes of them that the list leaves at their defaults. Parameters have a value per head, or
// one for all: heads that differ in nothing may be computed as rows of one.
template <class T, Needs needs = Needs{}>
[[nodiscard]] std::vector<Runner<T>> all_runners(const Geometry& g, bool per_head = true) {
  std::vector<Runner<T>> all = runners<T, needs>(g, per_head);
  const auto add = [&]<class Op>(const char* name, Op op) -> Runner<T>& {
    return all.emplace_back(
        make_runner<T, needs>(heed::Variant<Op>{name, "", g, std::move(op)}, per_head));
  };
  for (const auto& [name, pairing] :
       {std::pair{"differential-apart", heed::HeadPairing::halves_apart},
        {"differential-repeated", heed::HeadPairing::halves_repeated_keys}}) {
    heed::Differential<T> op;
    op.normaliser.pairing = pairing;
    if (g.dim_qk % 2 == 0) add(name, op);
  }
  heed::Dar<T> low_rank;
  low_rank.score.basis = detail::reflected_basis<T>(g.dim_qk, (g.dim_qk + 1) / 2);
  add("dar-low-rank", low_rank);
  for (const auto& [name, mode] :
       {std::pair{"ode-lagrange", heed::FlowMode::lagrange},
        {"ode-lagrange-equilibrium", heed::FlowMode::lagrange_equilibrium}}) {
    heed::ResonantOde<T> ode;
    ode.normaliser.mode = mode;
    Runner<T>& runner = add(name, ode);
    runner.lse_of_scores = false;
    runner.linear_rows = true;
  }
  if (g.dim_qk != g.dim_v) return asked_for(std::move(all));
  // Most rows would halt at once, some not before the last step.
  add("dialectical-batch",
      moving_dialectical<T>(g, {.max_steps = 4, .halt_eps = 0.1, .halting = heed::Halting::batch}));
  add("dialectical-adaptive",
      moving_dialectical<T>(g, {.max_steps = 4, .halting = heed::Halting::adaptive}));
  return asked_for(std::move(all));
}

template <class T>
struct Outcome {
  Tensor<T> out;
  heed::Saved<T> saved;
};

// Runs forward; the output has the layout of the call's grad_out when `like_inputs`, else it is dense.
template <class T>
[[nodiscard]] Outcome<T> forward(const Runner<T>& runner, const Call<T>& call,
                                 Layout layout = Layout::dense) {
  Outcome<T> result{Tensor<T>(call.grad_out.shape(), layout), {}};
  result.out.fill(T(7));  // must be overwritten
  runner.forward(call.inputs(), call.mask.mask, result.out.view(), &result.saved, call.options);
  return result;
}

// The gradients of inputs, bias and parameters by name. The memory for them held 7 before.
template <class T>
[[nodiscard]] Named backward(const Runner<T>& runner, const Call<T>& call, const Outcome<T>& result,
                             Layout layout = Layout::dense) {
  struct Part {
    const char* name;
    Tensor<T> grad;
  };
  const auto like = [layout](const Tensor<T>& x) {
    return x.given() ? Tensor<T>(x.shape(), layout) : Tensor<T>();
  };
  Part parts[] = {{"query", like(call.query)},
                  {"key", like(call.key)},
                  {"value", like(call.value)},
                  {"extra", like(call.extra)},
                  {"bias", call.mask.bias ? like(*call.mask.bias) : Tensor<T>()}};
  for (Part& part : parts) part.grad.fill(T(7));
  const Named params = runner.backward(
      call.inputs(), call.mask.mask, result.saved, result.out.view(), call.grad_out.view(),
      {parts[0].grad.view(), parts[1].grad.view(), parts[2].grad.view(), parts[3].grad.view(),
       parts[4].grad.view()},
      call.options);
  Named named;
  for (const Part& part : parts) {
    const bool always = &part < parts + 3;
    if (always || part.grad.size() > 0)
      named.push_back({part.name, part.grad.template dense<double>()});
    heed::require(!part.grad.given() || part.grad.untouched(), "backward wrote beside grad_",
                  part.name);
  }
  named.insert(named.end(), params.begin(), params.end());
  return named;
}

[[nodiscard]] inline std::string describe(const Geometry& g) {
  std::ostringstream text;
  text << "batch " << g.batch << ", heads " << g.heads << ", query heads " << g.query_heads
       << ", kv heads " << g.kv_heads << ", len_q " << g.len_q << ", len_kv " << g.len_kv
       << ", dim_qk " << g.dim_qk << ", dim_v " << g.dim_v;
  return text.str();
}

// heads = query_heads; the list gives V2 its own.
[[nodiscard]] inline Geometry geometry(Index batch, Index heads, Index kv_heads, Index len_q,
                                       Index len_kv, Index dim_qk, Index dim_v) {
  return {batch, heads, heads, kv_heads, len_q, len_kv, dim_qk, dim_v};
}
[[nodiscard]] inline Geometry geometry(Index len_q, Index len_kv, Index dim) {
  return geometry(2, 4, 2, len_q, len_kv, dim, dim);
}

// The largest distance between two lists of numbers as a multiple of the allowed one; infinite if
// one is NaN and the other not, or infinities differ.
struct Distance {
  double ratio = 0;
  double error = 0;  // largest absolute one
  std::size_t at = 0;
  double got = 0, wanted = 0;

  void note(std::size_t i, double fast, double slow, double allowed) {
    if (std::isnan(fast) && std::isnan(slow)) return;
    if (fast == slow) return;
    const double e = std::abs(fast - slow);
    const double r = e <= allowed                      ? e / allowed
                     : std::isfinite(e) && allowed > 0 ? e / allowed
                                                       : HUGE_VAL;
    if (std::isfinite(e)) error = std::max(error, e);
    if (r > ratio) {
      ratio = r;
      at = i;
      got = fast;
      wanted = slow;
    }
  }
  [[nodiscard]] bool within() const { return ratio <= 1; }
  [[nodiscard]] std::string text() const {
    std::ostringstream line;
    line.precision(17);
    line << "entry " << at << " is " << got << ", the twin has " << wanted << " (" << ratio
         << " times what is allowed)";
    return line.str();
  }
};

[[nodiscard]] inline double largest(const std::vector<double>& x) {
  double top = 0;
  for (const double v : x)
    if (std::isfinite(v)) top = std::max(top, std::abs(v));
  return top;
}

}  // namespace heed_test
