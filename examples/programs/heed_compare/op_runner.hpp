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

// One variant on tensors of the pool, which hold Stored: the op's own type or bfloat16.
template <class Op, class Stored>
class OpRunner final : public Runner {
 public:
  using T = typename Op::Scalar;

  OpRunner(const heed::Variant<Op>& variant, const RunnerSetup& setup,
           std::shared_ptr<TensorPool<Stored>> pool)
      : name_(variant.name),
        variant_settings_(variant.settings),
        seed_(setup.seed),
        pool_(std::move(pool)),
        call_(variant.op, tensors_of(variant, *pool_), mask_of(variant, setup),
              {.threads = setup.threads}) {
    call_.options.name = name_.c_str();
    call_.options.precision = setup.precision;
  }
  OpRunner(const OpRunner&) = delete;  // options.name points into it

  [[nodiscard]] const std::string& name() const override { return name_; }

  [[nodiscard]] std::string settings() const override {
    std::ostringstream text;
    const char* separator = "";
    const auto item = [&]() -> std::ostream& {
      text << separator;
      separator = "; ";
      return text;
    };
    if (!variant_settings_.empty()) item() << variant_settings_;
    heed::for_each_param(call_.op, [&](const char* name, const auto& param) {
      item() << name << " ";
      if (param.size() == 1)
        text << double(param[0]);
      else
        write_extents(text, param.shape());
    });
    describe_inputs(item());
    return text.str();
  }

  [[nodiscard]] double visible_pairs() const override {
    const heed::Geometry& g = call_.geometry();
    const heed::BoundMask<T> mask(call_.mask, g, "heed_compare");
    double pairs = 0;
    for (Index b = 0; b < g.batch; ++b)
      for (Index h = 0; h < g.heads; ++h)
        for (Index i = 0; i < g.len_q; ++i) pairs += double(mask.count_visible(b, h, i));
    return pairs;
  }

  void forward() override { call_.forward(); }
  void backward() override { call_.backward(); }

  [[nodiscard]] GradientPoint gradient_point() override {
    move_tensors();
    call_.forward();
    call_.backward();
    return {call_.tensors(), call_.gradients(), heed::dense_numbers<double>(call_.grad_out_view())};
  }

  [[nodiscard]] double loss(const std::vector<std::vector<double>>& tensors,
                            const std::vector<double>& grad_out) override {
    std::size_t next = 0;
    const auto take = [&](auto& numbers) {
      const std::vector<double>& given = tensors.at(next++);
      numbers.assign(given.begin(), given.end());
    };
    heed::CallNumbers<T> numbers;
    take(numbers.query);
    take(numbers.key);
    take(numbers.value);
    if (call_.inputs().extra.given()) take(numbers.extra);
    if (Columns::query > 0) take(numbers.query_inputs);
    if (Columns::key > 0) take(numbers.key_inputs);
    Op op = call_.op;
    op.visit([&](const char*, auto& param) {
      if (!param.given()) return;
      const std::vector<double>& given = tensors.at(next++);
      for (Index i = 0; i < param.size(); ++i) param[i] = T(given[std::size_t(i)]);
    });
    numbers.grad_out.assign(grad_out.begin(), grad_out.end());
    heed::OpCall<Op> at(std::move(op), call_.geometry(), call_.mask, call_.options,
                        std::move(numbers));
    at.infer();
    double sum = 0;
    for (std::size_t i = 0; i < at.out.size(); ++i)
      sum += double(at.out[i]) * double(at.grad_out[i]);
    return sum;
  }

 private:
  using Columns = heed::InputColumns<Op>;
  // The variant's own mask with its blocks kept: all calls have the same sizes.
  [[nodiscard]] static heed::Mask<T> mask_of(const heed::Variant<Op>& variant,
                                             const RunnerSetup& setup) {
    const heed::Mask<T> callers = setup.causal ? heed::causal<T>() : heed::Mask<T>();
    const heed::Geometry& g = variant.geometry;
    return heed::BlockMask<T>(variant.mask_with(callers, g), g, setup.threads).mask();
  }

  [[nodiscard]] static heed::CallViews<T> tensors_of(const heed::Variant<Op>& variant,
                                                     TensorPool<Stored>& pool) {
    const heed::Geometry& g = variant.geometry;
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
    if (const Index extra = variant.op.extra_dim(g); extra > 0) {
      tensors.inputs.extra = pool.view(Role::extra, g.heads, extra);
      tensors.grads.extra = pool.view(Role::grad_extra, g.heads, extra);
    }
    if (constexpr Index count = Columns::query; count > 0) {
      tensors.inputs.query_inputs = pool.view(Role::query_inputs, g.heads, count);
      tensors.grads.query_inputs = pool.view(Role::grad_query_inputs, g.heads, count);
    }
    if (constexpr Index count = Columns::key; count > 0) {
      tensors.inputs.key_inputs = pool.view(Role::key_inputs, g.heads, count);
      tensors.grads.key_inputs = pool.view(Role::grad_key_inputs, g.heads, count);
    }
    return tensors;
  }

  template <class Extents>
  static void write_extents(std::ostream& text, const Extents& extents) {
    const char* separator = "(";
    for (const Index extent : extents) {
      text << separator << extent;
      separator = ",";
    }
    text << ")";
  }

  // Writes the shapes that the variant reads. They show how V1 and V2 have the baseline's number of products.
  void describe_inputs(std::ostream& text) const {
    const int maps = Op::NormaliserType::maps;
    const heed::Inputs<T> in = call_.inputs();
    text << "query " << in.query.shape().text() << ", key " << in.key.shape().text() << ", value "
         << in.value.shape().text();
    if (in.extra.given())
      text << ", " << Op::ReadoutType::extra_name() << " " << in.extra.shape().text();
    if (in.query_inputs.given())
      text << ", " << Columns::query_names() << " " << in.query_inputs.shape().text();
    if (in.key_inputs.given())
      text << ", " << Columns::key_names() << " " << in.key_inputs.shape().text();
    if (maps > 1)
      text << ", " << maps << " maps of width "
           << call_.op.normaliser.source(call_.geometry(), 0, 0).width;
  }

  // Moves parameters with several values by normal numbers of standard deviation 0.1. These are
  // rounded to float, so that float and double runners check gradients at nearly the same point.
  void move_tensors() {
    std::uint64_t stream = 1000;
    call_.op.visit([&](const char*, auto& param) {
      const heed::CounterRandom random(seed_, ++stream);
      for (Index i = 0; i < param.size() && param.size() > 1; ++i)
        param[i] += T(float(0.1 * random.normal(std::uint64_t(i))));
    });
    call_.op.keep_in_range();
  }

  std::string name_, variant_settings_;
  std::uint64_t seed_;
  std::shared_ptr<TensorPool<Stored>> pool_;
  heed::OpCall<Op> call_;
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
