// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "runner.hpp"
#include "tensor_pool.hpp"

#include <heed/compiled.hpp>
#include <heed/engine/doors.hpp>
#include <heed/variants.hpp>

#include <algorithm>
#include <sstream>

namespace compare {

template <class Op>
class OpRunner final : public Runner {
 public:
  using T = typename Op::Scalar;

  OpRunner(const heed::Variant<Op>& variant, const RunnerSetup& setup,
           std::shared_ptr<TensorPool<T>> pool)
      : name_(variant.name),
        variant_settings_(variant.settings),
        geometry_(variant.geometry),
        op_(variant.op),
        grad_op_(heed::zeros_like(variant.op)),
        seed_(setup.seed),
        pool_(std::move(pool)) {
    if (setup.causal) mask_ = heed::causal<T>();
    options_.threads = setup.threads;
    options_.name = name_.c_str();
    bind_tensors();
  }

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
    heed::for_each_param(op_, [&](const char* name, const auto& param) {
      item() << name << " ";
      if (param.size() == 1)
        text << double(param[0]);
      else
        write_extents(text, param.shape());
    });
    describe_inputs(item());
    return text.str();
  }

  void forward() override { heed::forward(op_, inputs_, mask_, out_, &saved_, options_); }

  void backward() override {
    heed::backward(op_, inputs_, mask_, saved_, heed::TensorView<const T>(out_),
                   heed::TensorView<const T>(grad_out_), grads_, &grad_op_, options_);
  }

  [[nodiscard]] GradientPoint gradient_point() override {
    move_tensors();
    forward();
    backward();
    GradientPoint point;
    add_view(point.tensors, "query", inputs_.query);
    add_view(point.tensors, "key", inputs_.key);
    add_view(point.tensors, "value", inputs_.value);
    if (inputs_.extra.given()) add_view(point.tensors, "extra", inputs_.extra);
    add_params(point.tensors, op_, op_);
    add_view(point.gradients, "query", grads_.query);
    add_view(point.gradients, "key", grads_.key);
    add_view(point.gradients, "value", grads_.value);
    if (inputs_.extra.given()) add_view(point.gradients, "extra", grads_.extra);
    add_params(point.gradients, grad_op_, op_);
    return point;
  }

  [[nodiscard]] double loss(const std::vector<std::vector<double>>& tensors) override {
    std::size_t next = 0;
    std::vector<T> memory[4];
    const auto read = [&](const heed::TensorView<const T>& like, std::vector<T>& numbers) {
      if (!like.given()) return like;
      const std::vector<double>& given = tensors.at(next++);
      numbers.assign(given.begin(), given.end());
      return heed::TensorView<const T>(numbers.data(), like.shape());
    };
    heed::Inputs<T> in;
    in.query = read(inputs_.query, memory[0]);
    in.key = read(inputs_.key, memory[1]);
    in.value = read(inputs_.value, memory[2]);
    in.extra = read(inputs_.extra, memory[3]);
    Op op = op_;
    op.visit([&](const char*, auto& param) {
      if (!param.given()) return;
      const std::vector<double>& given = tensors.at(next++);
      for (Index i = 0; i < param.size(); ++i) param[i] = T(given[std::size_t(i)]);
    });
    heed::forward(op, in, mask_, out_, nullptr, options_);
    const Index count = heed::element_count(out_.shape(), "heed_compare");
    double sum = 0;
    for (Index i = 0; i < count; ++i) sum += double(out_.data()[i]) * double(grad_out_.data()[i]);
    return sum;
  }

 private:
  void bind_tensors() {
    const heed::Geometry& g = geometry_;
    inputs_ = {pool_->view(Role::query, g.query_heads, g.dim_qk),
               pool_->view(Role::key, g.kv_heads, g.dim_qk),
               pool_->view(Role::value, g.kv_heads, g.dim_v),
               {}};
    grads_ = {pool_->view(Role::grad_query, g.query_heads, g.dim_qk),
              pool_->view(Role::grad_key, g.kv_heads, g.dim_qk),
              pool_->view(Role::grad_value, g.kv_heads, g.dim_v),
              {},
              {}};
    if (const Index extra = op_.extra_dim(g); extra > 0) {
      inputs_.extra = pool_->view(Role::extra, g.heads, extra);
      grads_.extra = pool_->view(Role::grad_extra, g.heads, extra);
    }
    out_ = pool_->view(Role::out, g.heads, g.dim_v);
    grad_out_ = pool_->view(Role::grad_out, g.heads, g.dim_v);
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

  // Writes the shapes that the variant reads. They show how V1 and V2 keep the baseline's number of products.
  void describe_inputs(std::ostream& text) const {
    const int maps = Op::NormaliserType::maps;
    text << "query " << inputs_.query.shape().text() << ", key " << inputs_.key.shape().text()
         << ", value " << inputs_.value.shape().text();
    if (inputs_.extra.given())
      text << ", " << Op::ReadoutType::extra_name() << " " << inputs_.extra.shape().text();
    if (maps > 1)
      text << ", " << maps << " maps of width " << op_.normaliser.source(geometry_, 0, 0).width;
  }

  // Moves parameters of several values by normal numbers of standard deviation 0.1. These are rounded to float, so that
  // float and double runners check gradients at nearly the same point.
  void move_tensors() {
    std::uint64_t stream = 1000;
    op_.visit([&](const char*, auto& param) {
      const heed::CounterRandom random(seed_, ++stream);
      for (Index i = 0; i < param.size() && param.size() > 1; ++i)
        param[i] += T(float(0.1 * random.normal(std::uint64_t(i))));
    });
  }

  static void add_view(std::vector<heed::NamedTensor>& tensors, const char* name,
                       const heed::TensorView<const T>& view) {
    const Index count = heed::element_count(view.shape(), "heed_compare");
    tensors.push_back({name, std::vector<double>(view.data(), view.data() + count)});
  }

  // Appends the parameters of `op` that are in use in `used`. Their names are numbered, since two parts may share one.
  static void add_params(std::vector<heed::NamedTensor>& tensors, Op& op, Op& used) {
    std::vector<bool> given;
    used.visit([&](const char*, auto& param) { given.push_back(param.given()); });
    std::size_t next = 0;
    op.visit([&](const char* name, auto& param) {
      const std::size_t at = next++;
      if (!given[at]) return;
      tensors.push_back({std::to_string(at) + "." + name,
                         std::vector<double>(param.data(), param.data() + param.size())});
    });
  }

  std::string name_, variant_settings_;
  heed::Geometry geometry_;
  Op op_, grad_op_;
  std::uint64_t seed_;
  std::shared_ptr<TensorPool<T>> pool_;
  heed::Mask<T> mask_;
  heed::Options options_;
  heed::Inputs<T> inputs_;
  heed::Gradients<T> grads_;
  heed::TensorView<T> out_, grad_out_;
  heed::Saved<T> saved_;
};

template <class T>
[[nodiscard]] Runners make_runners(const RunnerSetup& setup, const TextInput& text) {
  const auto pool = std::make_shared<TensorPool<T>>(text);
  Runners runners;
  const auto add = [&]<class Op>(const heed::Variant<Op>& variant) {
    const auto asked = std::find(setup.names.begin(), setup.names.end(), variant.name);
    if (asked == setup.names.end()) return;
    runners.push_back(std::make_unique<OpRunner<Op>>(variant, setup, pool));
  };
  heed::for_each_variant<T>(setup.geometry, add, 16, setup.seed);
  return runners;
}

}  // namespace compare
