// SPDX-License-Identifier: Apache-2.0
#pragma once

// Variants behind one virtual call each, so that everything else is compiled once per scalar. A type lists the variants:
//
//   struct List {
//     // f(Variant<Op>) for each of them, in the form of for_each_variant() (variants.hpp).
//     template <class Real, class F>
//     static void for_each(const Geometry& g, F&& f, const VariantOptions& options);
//   };

#include <heed/c/mask.hpp>
#include <heed/c/parameters.hpp>
#include <heed/engine/checks.hpp>
#include <heed/engine/door.hpp>
#include <heed/engine/hvp.hpp>
#include <heed/engine/packed_doors.hpp>
#include <heed/variants.hpp>

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace c {

// A call of the caller, in C++ types.
template <class Real>
struct Request {
  Inputs<Real> in;
  Mask<Real> mask;
  Options options;
  const heed_parameter* parameters;
  std::size_t parameter_count;
  std::string where;                                     // begins error texts
  std::unique_ptr<const Packed<Real>> packed = nullptr;  // the lengths to which `in` points
};

// The further arguments of backward.
template <class Real>
struct BackwardRequest {
  const Saved<Real>& saved;
  StoredView<const Real> out;
  OutputGradients<Real> grad_outputs;
  Gradients<Real> gradients;
  const heed_parameter* parameters;
  std::size_t parameter_count;
};

// A direction of inputs and parameters.
template <class Real>
struct Direction {
  Tangents<Real> inputs;
  const heed_parameter* parameters;
  std::size_t parameter_count;
};
// The further arguments of jvp() and hvp().
template <class Real>
struct JvpRequest {
  const Saved<Real>& saved;
  StoredView<const Real> out;
  Direction<Real> along;
  Outputs<Real> to;
};
template <class Real>
struct HvpRequest {
  const Saved<Real>& saved;
  StoredView<const Real> out, grad_out;
  Direction<Real> along;
  StoredView<const Real> grad_out_tangent;
  Gradients<Real> to;
  const heed_parameter* parameters;
  std::size_t parameter_count;
};

// Throws if an output overlaps a tensor of a parameter, or if the gradient of a parameter overlaps
// anything else. The C++ calls check the rest, and own their parameters.
template <class Real>
void check_apart(const Request<Real>& request, const Outputs<Real>& outputs) {
  require_apart(request.parameters, request.parameter_count, "", detail::memory_of("", outputs),
                request.where);
}
template <class Real>
void check_apart(const Request<Real>& request, const BackwardRequest<Real>& from) {
  const auto written = detail::memory_of("grad_", from.gradients, from.gradients.bias);
  const std::string& where = request.where;
  require_apart(request.parameters, request.parameter_count, "", written, where);
  const char* what = "the gradient of ";
  const auto apart_from = [&](std::span<const detail::NamedMemory> read) {
    require_apart(from.parameters, from.parameter_count, what, read, where);
  };
  apart_from(written);
  apart_from(std::array{detail::named_memory("out", from.out)});
  apart_from(detail::memory_of("grad_", from.grad_outputs));
  apart_from(detail::memory_of(request.in, request.mask));
}
template <class Real>
void check_apart(const Request<Real>& request, const JvpRequest<Real>& from) {
  const auto written = detail::memory_of("", from.to);
  require_apart(request.parameters, request.parameter_count, "", written, request.where);
  require_apart(from.along.parameters, from.along.parameter_count, "the tangent of ", written,
                request.where);
}
template <class Real>
void check_apart(const Request<Real>& request, const HvpRequest<Real>& from) {
  const std::string& where = request.where;
  check_apart(request, BackwardRequest<Real>{from.saved, from.out, from.grad_out, from.to,
                                             from.parameters, from.parameter_count});
  require_apart(from.along.parameters, from.along.parameter_count, "the tangent of ",
                detail::memory_of("grad_", from.to, from.to.bias), where);
  const char* words = "the tangent of ";
  const auto apart_from = [&](std::span<const detail::NamedMemory> tangents) {
    require_apart(from.parameters, from.parameter_count, "the gradient of ", tangents, where);
  };
  apart_from(detail::memory_of(words, from.along.inputs, from.along.inputs.bias));
  apart_from(std::array{detail::named_memory({words, "grad_out"}, from.grad_out_tangent)});
  for (std::size_t n = 0; n < from.along.parameter_count; ++n)
    if (const heed_parameter& one = from.along.parameters[n]; one.tensor != nullptr)
      apart_from(std::array{detail::NamedMemory{
          {words, one.name}, true, SmallTensor(*one.tensor, where).memory(), {}}});
}

// One variant of the list.
template <class Real>
class VariantCalls {
 public:
  explicit VariantCalls(const char* name) : name_(name) {}
  virtual ~VariantCalls() = default;
  [[nodiscard]] const char* name() const { return name_; }

  virtual void forward(const Request<Real>& request, const Outputs<Real>& outputs,
                       Saved<Real>* saved) const = 0;
  virtual void backward(const Request<Real>& request, const BackwardRequest<Real>& from) const = 0;
  virtual void jvp(const Request<Real>& request, const JvpRequest<Real>& from) const = 0;
  virtual void hvp(const Request<Real>& request, const HvpRequest<Real>& from) const = 0;
  // Throws where forward() would, except for its outputs.
  virtual void check(const Request<Real>& request) const = 0;
  // The entries of the variant's own op.
  [[nodiscard]] virtual Entries<Real> entries() = 0;
  // Query heads per head, and number of score maps.
  [[nodiscard]] virtual Index query_heads() const = 0;
  [[nodiscard]] virtual Index maps() const = 0;
  // Widths with these parameters: of the extra input, and of the steps of a row; 0 for none.
  struct Widths {
    Index extra, steps;
  };
  [[nodiscard]] virtual Widths widths(const heed_parameter* parameters, std::size_t count,
                                      const Geometry& g, const std::string& where) const = 0;

 private:
  const char* name_;
};

template <class Op>
class CallsOf final : public VariantCalls<typename Op::Scalar> {
 public:
  using Real = typename Op::Scalar;
  explicit CallsOf(Variant<Op> variant)
      : VariantCalls<Real>(variant.name), variant_(std::move(variant)) {}

  void forward(const Request<Real>& request, const Outputs<Real>& outputs,
               Saved<Real>* saved) const override {
    const Op op = op_of(request);
    check_apart(request, outputs);
    heed::forward(op, PackedInputs<Real>(request.in), mask_of_call(request), outputs, saved,
                  request.options);
  }
  void backward(const Request<Real>& request, const BackwardRequest<Real>& from) const override {
    Op op = op_of(request), grad_op;
    Entries<Real> entries = entries_of(op);
    check_targets(entries, from.parameters, from.parameter_count, request.parameters,
                  request.parameter_count, "gradient", request.where);
    check_apart(request, from);
    const bool learns = from.parameter_count > 0;
    heed::backward(op, PackedInputs<Real>(request.in), mask_of_call(request), from.saved, from.out,
                   from.grad_outputs, from.gradients, learns ? &grad_op : nullptr, request.options);
    if (!learns) return;
    Entries<Real> gradients = entries_of(grad_op);
    write_entries(gradients, from.parameters, from.parameter_count, request.where);
  }
  void jvp(const Request<Real>& request, const JvpRequest<Real>& from) const override {
    if constexpr (detail::jvp_parts<Op>().all()) {
      const Op op = op_of(request), direction = direction_of(op, request, from.along);
      check_apart(request, from);
      heed::jvp(op, request.in, mask_of_call(request), from.saved, from.out, from.along.inputs,
                from.to, &direction, request.options);
    } else {
      fail(request.where, ": the variant has no tangents, a part of it takes no dual numbers");
    }
  }
  void hvp(const Request<Real>& request, const HvpRequest<Real>& from) const override {
    if constexpr (detail::jvp_parts<Op>().all() && detail::hvp_parts<Op>().all()) {
      Op op = op_of(request), to_op;
      const Op direction = direction_of(op, request, from.along);
      const bool learns = from.parameter_count > 0;
      Entries<Real> entries = entries_of(op);
      check_targets(entries, from.parameters, from.parameter_count, request.parameters,
                    request.parameter_count, "gradient", request.where);
      check_apart(request, from);
      heed::hvp(op, request.in, mask_of_call(request), from.saved, from.out, from.grad_out,
                from.along.inputs, from.grad_out_tangent, from.to, learns ? &to_op : nullptr,
                &direction, request.options);
      if (!learns) return;
      Entries<Real> gradients = entries_of(to_op);
      write_entries(gradients, from.parameters, from.parameter_count, request.where);
    } else {
      fail(request.where,
           ": the variant has no products with its Hessian; those of one softmax whose rows are "
           "not read out further have them, such as sdpa and dar");
    }
  }
  void check(const Request<Real>& request) const override {
    const Op op = op_of(request);
    require_options<Real>(request.options, request.where);
    const Mask<Real> mask = mask_of_call(request);
    detail::Door<Op>::with_tiles(op, [&](const OpTiles<Real>& tiles) {
      if (request.packed != nullptr) {
        const detail::OpenCall<Real> call(tiles, {request.in, mask, request.options},
                                          request.where);
        (void)detail::PackedCalls<Real>(call).plan(Outputs<Real>(StoredView<Real>()));
        return;
      }
      const Geometry g = geometry_of(tiles, request.in, request.where);
      (void)BoundMask<Real>(mask, g, request.where.c_str(), request.options.threads);
    });
  }
  [[nodiscard]] Entries<Real> entries() override { return entries_of(variant_.op); }
  [[nodiscard]] Index query_heads() const override { return variant_.op.normaliser.query_heads(1); }
  [[nodiscard]] Index maps() const override { return Op::NormaliserType::maps; }
  [[nodiscard]] typename VariantCalls<Real>::Widths widths(
      const heed_parameter* parameters, std::size_t count, const Geometry& g,
      const std::string& where) const override {
    Op op = variant_.op;
    Entries<Real> entries = entries_of(op);
    set_entries(entries, parameters, count, true, where);
    return {op.extra_dim(g),
            op.readout.without_steps() == nullptr ? op.readout.step_columns(g) : 0};
  }

 private:
  // The op with the call's parameters.
  [[nodiscard]] Op op_of(const Request<Real>& request) const {
    Op op = variant_.op;
    Entries<Real> entries = entries_of(op);
    set_entries(entries, request.parameters, request.parameter_count, false, request.where);
    return op;
  }
  // The direction of the parameters: zeros unless given.
  [[nodiscard]] static Op direction_of(const Op& op, const Request<Real>& request,
                                       const Direction<Real>& along) {
    Op direction = zeros_like(op);
    Entries<Real> entries = entries_of(direction);
    set_tangents(entries, along.parameters, along.parameter_count, request.where);
    return direction;
  }
  // The caller's mask, joined with the variant's own if it has one.
  [[nodiscard]] Mask<Real> mask_of_call(const Request<Real>& request) const {
    if (variant_.mask == nullptr) return request.mask;
    require(request.packed == nullptr || !variant_.traits.reads_later_keys, request.where,
            ": packed sequences were given, the variant's own mask is one of a whole call");
    const Shape &q = request.in.query.shape(), &k = request.in.key.shape(),
                &v = request.in.value.shape();
    return variant_.mask_with(request.mask, {q.batch, q.heads / query_heads(), q.heads, k.heads,
                                             q.len, k.len, q.dim, v.dim, request.in.first_query});
  }

  Variant<Op> variant_;
};

template <class Real>
using VariantList = std::vector<std::unique_ptr<VariantCalls<Real>>>;

// heed's own variants.
struct BuiltInVariants {
  template <class Real, class F>
  static void for_each(const Geometry& g, F&& f, const VariantOptions& options) {
    for_each_variant<Real>(g, f, options);
  }
};

// The variants of List for a geometry of the baseline.
template <class List, class Real>
[[nodiscard]] VariantList<Real> make_variants(const Geometry& g, const VariantOptions& options) {
  VariantList<Real> list;
  List::template for_each<Real>(
      g,
      [&]<class Op>(Variant<Op> variant) {
        list.push_back(std::make_unique<CallsOf<Op>>(std::move(variant)));
      },
      options);
  return list;
}

// The variants with the ops that calls begin with. Tensors in them are too small for any call: a call gives its own.
template <class List, class Real>
[[nodiscard]] const VariantList<Real>& variants() {
  static const VariantList<Real> list = make_variants<List, Real>(kSmallSizes, {});
  return list;
}

template <class Real>
[[nodiscard]] VariantCalls<Real>& find_variant(const VariantList<Real>& list, const char* name,
                                               const char* where) {
  require(name != nullptr, where, ": variant is a null pointer, it must be a name");
  std::string known;
  for (const auto& variant : list) {
    if (std::string_view(variant->name()) == name) return *variant;
    known += (known.empty() ? "" : ", ") + std::string(variant->name());
  }
  fail(where, ": there is no variant ", name, ", it must be one of ", known);
}

}  // namespace c
}  // namespace HEED_ABI
}  // namespace heed
