// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "runner.hpp"
#include "tensor_pool.hpp"

#include <heed/check/op_call.hpp>
#include <heed/mask/block_mask.hpp>
#include <zoo/zoo.hpp>

#include <algorithm>
#include <sstream>

namespace compare {

// What a runner does that knows no op; compiled once for all ops. Stored is what tensors of the pool hold: T, the scalar of
// the ops, or bfloat16.
template <class T, class Stored>
class RunnerOfAnyOp : public Runner {
 public:
  RunnerOfAnyOp(const char* name, const char* settings, std::uint64_t seed,
                std::shared_ptr<TensorPool<Stored>> pool)
      : name_(name), variant_settings_(settings), seed_(seed), pool_(std::move(pool)) {}
  RunnerOfAnyOp(const RunnerOfAnyOp&) = delete;  // options.name points into it

  [[nodiscard]] const std::string& name() const override { return name_; }

  [[nodiscard]] double visible_pairs() const override {
    const heed::Geometry& g = call().geometry();
    const heed::BoundMask<T> mask(call().mask, g, "heed_compare");
    double pairs = 0;
    for (Index b = 0; b < g.batch; ++b)
      for (Index h = 0; h < g.heads; ++h)
        for (Index i = 0; i < g.len_q; ++i) pairs += double(mask.count_visible(b, h, i));
    return pairs;
  }

 protected:
  using Call = heed::CallOfAnyOp<T>;
  using Params = std::vector<std::pair<const char*, heed::Param<T>*>>;
  // The op's parameters, in its order.
  template <class Op>
  [[nodiscard]] static Params params_of(Op& op) {
    Params params;
    op.visit([&](const char* name, heed::Param<T>& param) { params.emplace_back(name, &param); });
    return params;
  }

  [[nodiscard]] virtual const Call& call() const = 0;

  // The settings() of a runner whose op has these parameters and names of inputs.
  struct InputNames {
    std::string extra, query_inputs, key_inputs;
  };
  [[nodiscard]] std::string settings_of(const Params& params, const InputNames& names, int maps,
                                        Index map_width) const {
    std::ostringstream text;
    const char* separator = "";
    const auto item = [&]() -> std::ostream& {
      text << separator;
      separator = "; ";
      return text;
    };
    if (!variant_settings_.empty()) item() << variant_settings_;
    for (const auto& [name, param] : params) {
      if (!param->given()) continue;
      item() << name << " ";
      if (param->size() == 1)
        text << double((*param)[0]);
      else
        write_extents(text, param->shape());
    }
    // The shapes that the variant reads show how V1 and V2 have the baseline's number of products.
    const heed::Inputs<T> in = call().inputs();
    item() << "query " << in.query.shape().text() << ", key " << in.key.shape().text() << ", value "
           << in.value.shape().text();
    if (in.extra.given()) text << ", " << names.extra << " " << in.extra.shape().text();
    if (in.query_inputs.given())
      text << ", " << names.query_inputs << " " << in.query_inputs.shape().text();
    if (in.key_inputs.given())
      text << ", " << names.key_inputs << " " << in.key_inputs.shape().text();
    if (maps > 1) text << ", " << maps << " maps of width " << map_width;
    return text.str();
  }

  // The numbers of a loss at other tensors, whose parameters go to `params`.
  [[nodiscard]] heed::CallNumbers<T> numbers_at(const std::vector<std::vector<double>>& tensors,
                                                const std::vector<double>& grad_out,
                                                const heed::CallColumns& columns,
                                                const Params& params) const {
    std::size_t next = 0;
    const auto take = [&](auto& numbers) {
      const std::vector<double>& given = tensors.at(next++);
      numbers.assign(given.begin(), given.end());
    };
    heed::CallNumbers<T> numbers;
    take(numbers.query);
    take(numbers.key);
    take(numbers.value);
    if (call().inputs().extra.given()) take(numbers.extra);
    if (columns.query_inputs > 0) take(numbers.query_inputs);
    if (columns.key_inputs > 0) take(numbers.key_inputs);
    for (const auto& [name, param] : params) {
      if (!param->given()) continue;
      const std::vector<double>& given = tensors.at(next++);
      for (Index i = 0; i < param->size(); ++i) (*param)[i] = T(given[std::size_t(i)]);
    }
    numbers.grad_out.assign(grad_out.begin(), grad_out.end());
    return numbers;
  }
  [[nodiscard]] static double loss_of(const Call& at) {
    double sum = 0;
    for (std::size_t i = 0; i < at.out.size(); ++i)
      sum += double(at.out[i]) * double(at.grad_out[i]);
    return sum;
  }

  // The mask of a call with its blocks kept: all calls have the same sizes.
  [[nodiscard]] static heed::Mask<T> callers_mask(const RunnerSetup& setup) {
    return setup.causal ? heed::causal<T>() : heed::Mask<T>();
  }
  [[nodiscard]] static heed::Mask<T> kept_mask(const heed::Mask<T>& mask, const heed::Geometry& g,
                                               int threads) {
    return heed::BlockMask<T>(mask, g, threads).mask();
  }

  [[nodiscard]] static heed::CallViews<T> tensors_of(const heed::Geometry& g,
                                                     const heed::CallColumns& columns,
                                                     TensorPool<Stored>& pool) {
    heed::CallViews<T> tensors{{pool.view(Role::query, g.query_heads, g.dim_qk),
                                pool.view(Role::key, g.kv_heads, g.dim_qk),
                                pool.view(Role::value, g.kv_heads, g.dim_v),
                                {}},
                               pool.view(Role::out, g.heads, g.dim_v),
                               pool.view(Role::grad_out, g.heads, g.dim_v),
                               {pool.view(Role::grad_query, g.query_heads, g.dim_qk),
                                pool.view(Role::grad_key, g.kv_heads, g.dim_qk),
                                pool.view(Role::grad_value, g.kv_heads, g.dim_v),
                                {},
                                {}}};
    if (const Index extra = columns.extra; extra > 0) {
      tensors.inputs.extra = pool.view(Role::extra, g.heads, extra);
      tensors.grads.extra = pool.view(Role::grad_extra, g.heads, extra);
    }
    if (const Index count = columns.query_inputs; count > 0) {
      tensors.inputs.query_inputs = pool.view(Role::query_inputs, g.heads, count);
      tensors.grads.query_inputs = pool.view(Role::grad_query_inputs, g.heads, count);
    }
    if (const Index count = columns.key_inputs; count > 0) {
      tensors.inputs.key_inputs = pool.view(Role::key_inputs, g.heads, count);
      tensors.grads.key_inputs = pool.view(Role::grad_key_inputs, g.heads, count);
    }
    return tensors;
  }

  // Moves parameters with several values by normal numbers of standard deviation 0.1. These are
  // rounded to float, so that float and double runners check gradients at nearly the same point.
  void move(const Params& params) const {
    std::uint64_t stream = 1000;
    for (const auto& [name, param] : params) {
      const heed::CounterRandom random(seed_, ++stream);
      for (Index i = 0; i < param->size() && param->size() > 1; ++i)
        (*param)[i] += T(float(0.1 * random.normal(std::uint64_t(i))));
    }
  }

  std::string name_, variant_settings_;
  std::uint64_t seed_;
  std::shared_ptr<TensorPool<Stored>> pool_;

 private:
  template <class Extents>
  static void write_extents(std::ostream& text, const Extents& extents) {
    const char* separator = "(";
    for (const Index extent : extents) {
      text << separator << extent;
      separator = ",";
    }
    text << ")";
  }
};

// One variant on tensors of the pool.
template <class Op, class Stored>
class OpRunner final : public RunnerOfAnyOp<typename Op::Scalar, Stored> {
 public:
  using T = typename Op::Scalar;
  using Base = RunnerOfAnyOp<T, Stored>;

  OpRunner(const heed::Variant<Op>& variant, const RunnerSetup& setup,
           std::shared_ptr<TensorPool<Stored>> pool)
      : Base(variant.name, variant.settings, setup.seed, std::move(pool)),
        call_(variant.op,
              Base::tensors_of(variant.geometry, heed::call_columns(variant.op, variant.geometry),
                               *this->pool_),
              Base::kept_mask(variant.mask_with(Base::callers_mask(setup), variant.geometry),
                              variant.geometry, setup.threads),
              {.threads = setup.threads}),
        callers_(call_.mask),
        choose_(variant.choose) {
    call_.options.name = this->name_.c_str();
    call_.options.precision = setup.precision;
  }

  [[nodiscard]] std::string settings() const override {
    using Columns = heed::InputColumns<Op>;
    constexpr int maps = Op::NormaliserType::maps;
    Op op = call_.op;
    typename Base::InputNames names;
    if (call_.inputs().extra.given()) names.extra = Op::ReadoutType::extra_name();
    if constexpr (Columns::query > 0) names.query_inputs = Columns::query_names();
    if constexpr (Columns::key > 0) names.key_inputs = Columns::key_names();
    return this->settings_of(Base::params_of(op), names, maps,
                             maps > 1 ? op.normaliser.source(call_.geometry(), 0, 0).width : 0);
  }

  void forward() override {
    if (choose_) call_.mask = heed::with_chosen(choose_, call_.inputs(), callers_, call_.options);
    call_.forward();
  }
  void backward() override { call_.backward(); }

  [[nodiscard]] GradientPoint gradient_point() override {
    move_tensors();
    forward();
    call_.backward();
    return {call_.tensors(), call_.gradients(), heed::dense_numbers<double>(call_.grad_out_view())};
  }

  [[nodiscard]] double loss(const std::vector<std::vector<double>>& tensors,
                            const std::vector<double>& grad_out) override {
    Op op = call_.op;
    heed::CallNumbers<T> numbers = this->numbers_at(
        tensors, grad_out, heed::call_columns(op, call_.geometry()), Base::params_of(op));
    heed::OpCall<Op> at(std::move(op), call_.geometry(), call_.mask, call_.options,
                        std::move(numbers));
    at.infer();
    return Base::loss_of(at);
  }

 private:
  [[nodiscard]] const typename Base::Call& call() const override { return call_; }

  void move_tensors() {
    this->move(Base::params_of(call_.op));
    call_.op.keep_in_range();
  }

  heed::OpCall<Op> call_;
  heed::Mask<T> callers_;  // without the keys that the variant chooses
  heed::KeyChoice<T> choose_;
};

template <class Stored>
[[nodiscard]] Runners make_runners(const RunnerSetup& setup, const TextInput& text) {
  using T = heed::ArithmeticOf<Stored>;
  const auto pool = std::make_shared<TensorPool<Stored>>(text);
  Runners runners;
  const auto add = [&]<class Op>(const heed::Variant<Op>& variant) {
    const auto asked = std::find(setup.names.begin(), setup.names.end(), variant.name);
    if (asked == setup.names.end()) return;
    runners.push_back(std::make_unique<OpRunner<Op, Stored>>(variant, setup, pool));
  };
  zoo::for_each_known_variant<T>(setup.geometry, add, {.seed = setup.seed});
  return runners;
}

}  // namespace compare
