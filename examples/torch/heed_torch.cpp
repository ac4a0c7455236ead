// SPDX-License-Identifier: Apache-2.0

// heed inside of PyTorch: a library for torch.ops.load_library that registers every variant of libheed (heed/c.h) as an
// operator torch.ops.heed.NAME, hyphens as underscores, with autograd and shapes for Meta tensors.
//
//   torch.ops.load_library("build/libheed_torch.so")
//   out = torch.ops.heed.dar(query, key, value, strength=strength, causal=True)
//
// Operators  names, arguments and defaults follow from what libheed says of a variant (heed_describe), so that nothing
//            here knows one. print(torch.ops.heed.dar.default._schema) shows them.
// Tensors    of the CPU, (batch, heads, len, dim), with any strides whose last is 1: x.transpose(1, 2) of a tensor (batch, len,
//            heads, dim) is read where it lies, and the output then lies in memory like the query.
// Gradients  of query, key, value, extra, bias and of all learnt parameters. They have no gradients of their own.
// Errors     the sentences of heed, as RuntimeError.

#include <heed/c.h>

#include <torch/library.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using c10::IValue;
using Stack = torch::jit::Stack;

void require(int status) { TORCH_CHECK(status == heed_ok, heed_last_error()); }

// ---------------------------------------------------------------- tensors

DLDataType type_of(const Tensor& x, const char* name) {
  switch (x.scalar_type()) {
    case at::kFloat: return {kDLFloat, 32, 1};
    case at::kDouble: return {kDLFloat, 64, 1};
    case at::kHalf: return {kDLFloat, 16, 1};
    case at::kBFloat16: return {kDLBfloat, 16, 1};
    case at::kBool: return {kDLUInt, 8, 1};
    case at::kByte: return {kDLUInt, 8, 1};
    case at::kLong: return {kDLInt, 64, 1};
    case at::kInt: return {kDLInt, 32, 1};
    default: TORCH_CHECK(false, "heed: ", name, " holds ", x.scalar_type(), ", which is not read");
  }
}

// The tensor's memory as DLPack describes it, valid as long as `x`. Of a Meta tensor shape and type count.
DLTensor described(const Tensor& x, const char* name) {
  TORCH_CHECK(x.is_cpu() || x.is_meta(), "heed: ", name, " is on ", x.device(),
              ", it must be on the CPU");
  DLTensor to{};
  to.data = x.is_meta() ? nullptr : x.data_ptr();
  to.device = {kDLCPU, 0};
  to.ndim = static_cast<std::int32_t>(x.dim());
  to.dtype = type_of(x, name);
  to.shape = const_cast<std::int64_t*>(x.sizes().data());
  to.strides = const_cast<std::int64_t*>(x.strides().data());
  return to;
}

// ---------------------------------------------------------------- operators

enum class Kind { query, key, value, extra, learnt, constant, number, word, setting };

// One argument of an operator.
struct Argument {
  std::string name;  // in Python
  std::string type;  // and default, as torch's schemas spell them
  Kind kind;
  std::string parameter = {};  // of the parameter that it sets: its name in heed
  // Has the operator a gradient for it?
  [[nodiscard]] bool differentiable() const { return kind <= Kind::learnt || name == "bias"; }
};

// Settings that every operator has. c.h says what they are; `left` and `right` are a window's, which -1 leaves open.
const Argument kSettings[] = {
    {"causal", "bool causal=False", Kind::setting},
    {"bottom_right", "bool bottom_right=False", Kind::setting},
    {"left", "int left=-1", Kind::setting},
    {"right", "int right=-1", Kind::setting},
    {"key_lengths", "Tensor? key_lengths=None", Kind::setting},
    {"allowed", "Tensor? allowed=None", Kind::setting},
    {"bias", "Tensor? bias=None", Kind::setting},
    {"query_documents", "Tensor? query_documents=None", Kind::setting},
    {"key_documents", "Tensor? key_documents=None", Kind::setting},
    {"slopes", "Tensor? slopes=None", Kind::setting},
    {"soft_cap", "float soft_cap=0.0", Kind::setting},
    {"scale", "float? scale=None", Kind::setting},
    {"dropout", "float dropout=0.0", Kind::setting},
    {"dropout_seed", "int dropout_seed=0", Kind::setting},
    {"mixed", "bool mixed=False", Kind::setting},
    {"queries_at_end", "bool queries_at_end=False", Kind::setting},
};

// A name that Python takes for an argument: "lambda" is one of its words.
std::string python_name(std::string name) {
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c == '.' || c == '-'; }, '_');
  return name == "lambda" ? "lambda_" : name;
}

struct Operator {
  std::string variant;
  std::vector<Argument> arguments;

  [[nodiscard]] std::string name() const { return python_name(variant); }
  [[nodiscard]] std::string schema() const {
    std::string text = name() + "(";
    bool options = false;
    for (const Argument& argument : arguments) {
      const bool input = argument.kind <= Kind::extra;
      if (!input && !options) text += ", *";
      options = !input;
      text += (text.back() == '(' ? "" : ", ") + argument.type;
    }
    return text + ") -> Tensor";
  }
};

// What libheed says of a variant, asked with sizes that every variant takes.
Operator operator_of(const char* variant) {
  std::int64_t query_shape[] = {1, 2, 1, 4}, key_shape[] = {1, 1, 1, 4};
  DLTensor query{}, key{};
  query.device = key.device = {kDLCPU, 0};
  query.ndim = key.ndim = 4;
  query.dtype = key.dtype = {kDLFloat, 32, 1};
  query.shape = query_shape;
  key.shape = key_shape;
  heed_call call{};
  call.size = sizeof call;
  call.variant = variant;
  call.query = &query;
  call.key = call.value = &key;

  Operator op{variant,
              {{"query", "Tensor query", Kind::query},
               {"key", "Tensor key", Kind::key},
               {"value", "Tensor value", Kind::value}}};
  heed_shapes shapes{};
  shapes.size = sizeof shapes;
  require(heed_shapes_of(&call, &shapes));
  if (shapes.extra[3] > 0) op.arguments.push_back({"extra", "Tensor extra", Kind::extra});

  std::size_t count = 0;
  require(heed_describe(&call, nullptr, nullptr, &count));
  std::vector<heed_parameter_info> infos(count);
  for (heed_parameter_info& info : infos) info.size = sizeof info;
  require(heed_describe(&call, nullptr, infos.data(), &count));
  for (const heed_parameter_info& info : infos) {
    const std::string name = python_name(info.name);
    if (info.kind == heed_per_head || info.kind == heed_tensor)
      op.arguments.push_back({name, "Tensor? " + name + "=None", Kind::learnt, info.name});
    else if (info.kind == heed_fixed || info.kind == heed_list)
      op.arguments.push_back({name, "Tensor? " + name + "=None", Kind::constant, info.name});
    else if (info.kind == heed_choice)
      op.arguments.push_back({name, "str? " + name + "=None", Kind::word, info.name});
    else
      op.arguments.push_back({name, "float? " + name + "=None", Kind::number, info.name});
  }
  op.arguments.insert(op.arguments.end(), std::begin(kSettings), std::end(kSettings));
  return op;
}

// By their names in torch, with the namespace. Filled when the library is loaded, before any call.
std::map<std::string, Operator>& operators() {
  static std::map<std::string, Operator> all;
  return all;
}

const Operator& operator_of(const c10::OperatorHandle& handle) {
  return operators().at(handle.schema().name());
}

// ---------------------------------------------------------------- calls

// A call of heed, put together of an operator's arguments. It points into itself and into their tensors.
class Call {
 public:
  Call(const Operator& op, const std::vector<IValue>& arguments) : op_(op), arguments_(arguments) {
    call_.size = sizeof call_;
    mask_.size = sizeof mask_;
    call_.variant = op.variant.c_str();
    call_.mask = &mask_;
    mask_.windows = &window_;
    window_ = {-1, -1, 0, heed_top_left};
    // Of a Meta call the shapes of its inputs are all that is asked for.
    for (std::size_t n = 0; n < op.arguments.size(); ++n)
      if (!arguments[n].isNone() && (!meta() || op.arguments[n].kind <= Kind::extra))
        take(op.arguments[n], arguments[n]);
    call_.parameters = parameters_.data();
    call_.parameter_count = parameters_.size();
    mask_.window_count = window_.left >= 0 || window_.right >= 0 ? 1 : 0;
    window_.align = align_;
    if (mask_.causal != 0) mask_.causal_align = align_;
    if (mask_.alibi != nullptr) mask_.alibi_align = align_;
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  [[nodiscard]] const heed_call& call() const { return call_; }
  [[nodiscard]] bool meta() const { return arguments_[0].toTensor().is_meta(); }

  // An uninitialised tensor for the output. It lies in memory as the query does: (batch, heads, len, dim), or (batch, len, heads,
  // dim) read with its axes swapped.
  [[nodiscard]] Tensor make_output() const {
    heed_shapes shapes{};
    shapes.size = sizeof shapes;
    require(heed_shapes_of(&call_, &shapes));
    const Tensor& query = arguments_[0].toTensor();
    const auto* out = shapes.out;
    const bool by_token = query.dim() == 4 && query.stride(2) > query.stride(1);
    if (!by_token) return at::empty({out[0], out[1], out[2], out[3]}, query.options());
    return at::empty({out[0], out[2], out[1], out[3]}, query.options()).transpose(1, 2);
  }

  // The DLPack description of a tensor of the call's caller, kept as long as the call.
  const DLTensor* keep(const Tensor& x, const std::string& name) {
    return &tensors_.emplace_back(described(x, name.c_str()));
  }

 private:
  void take(const Argument& argument, const IValue& value) {
    const auto tensor = [&] { return keep(value.toTensor(), argument.name); };
    switch (argument.kind) {
      case Kind::query: call_.query = tensor(); return;
      case Kind::key: call_.key = tensor(); return;
      case Kind::value: call_.value = tensor(); return;
      case Kind::extra: call_.extra = tensor(); return;
      case Kind::learnt:
      case Kind::constant:
        parameters_.push_back({argument.parameter.c_str(), tensor(), nullptr, 0});
        return;
      case Kind::number:
        parameters_.push_back({argument.parameter.c_str(), nullptr, nullptr, value.toDouble()});
        return;
      case Kind::word:
        parameters_.push_back(
            {argument.parameter.c_str(), nullptr, value.toStringRef().c_str(), 0});
        return;
      case Kind::setting: set(argument.name, value); return;
    }
  }

  void set(const std::string& name, const IValue& value) {
    if (name == "causal") mask_.causal = value.toBool();
    if (name == "bottom_right") align_ = value.toBool() ? heed_bottom_right : heed_top_left;
    if (name == "left") window_.left = value.toInt();
    if (name == "right") window_.right = value.toInt();
    if (name == "key_lengths")
      whole_numbers(name, value, mask_.key_lengths, mask_.key_length_count);
    if (name == "allowed") mask_.allowed = keep(value.toTensor(), name);
    if (name == "bias") mask_.bias = keep(value.toTensor(), name);
    if (name == "query_documents")
      whole_numbers(name, value, mask_.query_documents, mask_.query_document_count);
    if (name == "key_documents")
      whole_numbers(name, value, mask_.key_documents, mask_.key_document_count);
    if (name == "slopes") {
      const Tensor slopes = copies_.emplace_back(value.toTensor().to(at::kDouble).contiguous());
      mask_.alibi = slopes.data_ptr<double>();
      mask_.alibi_count = static_cast<std::size_t>(slopes.numel());
    }
    if (name == "soft_cap") mask_.soft_cap = value.toDouble();
    if (name == "scale") {
      scale_ = value.toDouble();
      call_.scale = &scale_;
    }
    if (name == "dropout") call_.dropout = value.toDouble();
    if (name == "dropout_seed") call_.dropout_seed = static_cast<std::uint64_t>(value.toInt());
    if (name == "mixed") call_.precision = value.toBool() ? heed_mixed : heed_storage;
    if (name == "queries_at_end") call_.queries_at_end = value.toBool();
  }

  void whole_numbers(const std::string& name, const IValue& value, const std::int64_t*& numbers,
                     std::size_t& count) {
    const Tensor& given = value.toTensor();
    TORCH_CHECK(at::isIntegralType(given.scalar_type(), false), "heed: ", name, " holds ",
                given.scalar_type(), ", it must hold whole numbers");
    const Tensor copy = copies_.emplace_back(given.to(at::kLong).contiguous());
    numbers = copy.data_ptr<std::int64_t>();
    count = static_cast<std::size_t>(copy.numel());
  }

  const Operator& op_;
  const std::vector<IValue>& arguments_;
  std::deque<DLTensor> tensors_;  // whose addresses last
  std::vector<Tensor> copies_;
  std::vector<heed_parameter> parameters_;
  heed_call call_{};
  heed_mask mask_{};
  heed_window window_{};
  int align_ = heed_top_left;
  double scale_ = 0;
};

// What forward leaves for backward.
struct Kept : torch::CustomClassHolder {
  heed_saved* saved = nullptr;
  std::vector<IValue> arguments;            // None where autograd keeps the tensor
  std::vector<std::size_t> differentiable;  // places of the tensors that it keeps, in order
  Kept() = default;
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  ~Kept() override { heed_saved_free(saved); }
};

Tensor forward(const Operator& op, const std::vector<IValue>& arguments, heed_saved** saved) {
  Call call(op, arguments);
  const Tensor out = call.make_output();
  if (call.meta()) return out;
  heed_outputs outputs{};
  outputs.size = sizeof outputs;
  outputs.out = call.keep(out, "out");
  require(heed_forward(&call.call(), &outputs, saved));
  return out;
}

// Memory for the gradient of x that heed may write: of the same layout where the rows of x do not overlap.
Tensor gradient_like(const Tensor& x) {
  return at::empty_like(x, x.is_non_overlapping_and_dense() ? at::MemoryFormat::Preserve
                                                            : at::MemoryFormat::Contiguous);
}

// The gradients of what kept.differentiable names, undefined where `wanted` is false.
std::vector<Tensor> backward(const Operator& op, const Kept& kept,
                             const std::vector<IValue>& arguments, const Tensor& out,
                             const Tensor& grad_out, const std::vector<bool>& wanted) {
  Call call(op, arguments);
  heed_gradients to{};
  to.size = sizeof to;
  std::vector<heed_parameter> parameters;
  std::vector<Tensor> grads(kept.differentiable.size());
  for (std::size_t n = 0; n < grads.size(); ++n) {
    if (!wanted[n]) continue;
    const Argument& argument = op.arguments[kept.differentiable[n]];
    grads[n] = gradient_like(arguments[kept.differentiable[n]].toTensor());
    const DLTensor* tensor = call.keep(grads[n], "the gradient of " + argument.name);
    if (argument.kind == Kind::query) to.query = tensor;
    if (argument.kind == Kind::key) to.key = tensor;
    if (argument.kind == Kind::value) to.value = tensor;
    if (argument.kind == Kind::extra) to.extra = tensor;
    if (argument.name == "bias") to.bias = tensor;
    if (argument.kind == Kind::learnt)
      parameters.push_back({argument.parameter.c_str(), tensor, nullptr, 0});
  }
  if (call.meta()) return grads;
  to.parameters = parameters.data();
  to.parameter_count = parameters.size();
  const Tensor rows = grad_out.stride(-1) == 1 ? grad_out : grad_out.contiguous();
  heed_outputs from{};
  from.size = sizeof from;
  from.out = call.keep(rows, "the gradient of the output");
  require(heed_backward(&call.call(), kept.saved, call.keep(out, "out"), &from, &to));
  return grads;
}

// ---------------------------------------------------------------- autograd

struct Attention : torch::autograd::Function<Attention> {
  using Context = torch::autograd::AutogradContext;

  // `inputs`: the tensors at the places kept->differentiable.
  static Tensor forward(Context* context, const Operator* op, c10::intrusive_ptr<Kept> kept,
                        at::TensorList inputs) {
    std::vector<IValue> arguments = kept->arguments;
    for (std::size_t n = 0; n < inputs.size(); ++n) arguments[kept->differentiable[n]] = inputs[n];
    const Tensor out = ::forward(*op, arguments, &kept->saved);
    std::vector<Tensor> remembered(inputs.begin(), inputs.end());
    remembered.push_back(out);
    context->save_for_backward(remembered);
    context->saved_data["kept"] = IValue::make_capsule(kept);
    context->saved_data["op"] = "heed::" + op->name();
    return out;
  }

  static torch::autograd::variable_list backward(Context* context,
                                                 torch::autograd::variable_list grads) {
    std::vector<Tensor> remembered = context->get_saved_variables();
    const Tensor out = remembered.back();
    const auto capsule = context->saved_data["kept"].toCapsule();
    const auto& kept = static_cast<const Kept&>(*capsule);
    const Operator& op = operators().at(context->saved_data["op"].toStringRef());
    std::vector<IValue> arguments = kept.arguments;
    std::vector<bool> wanted;
    for (std::size_t n = 0; n < kept.differentiable.size(); ++n) {
      arguments[kept.differentiable[n]] = remembered[n];
      wanted.push_back(remembered[n].requires_grad());
    }
    // The first two arguments of forward() are no tensors.
    torch::autograd::variable_list result(2);
    for (Tensor& grad : ::backward(op, kept, arguments, out, grads[0], wanted))
      result.push_back(std::move(grad));
    return result;
  }
};

// ---------------------------------------------------------------- torch's dispatcher

std::vector<IValue> take_arguments(const Operator& op, Stack* stack) {
  return torch::jit::pop(*stack, op.arguments.size());
}

void run(const c10::OperatorHandle& handle, Stack* stack) {
  const Operator& op = operator_of(handle);
  const std::vector<IValue> arguments = take_arguments(op, stack);
  torch::jit::push(*stack, forward(op, arguments, nullptr));
}

void run_with_autograd(const c10::OperatorHandle& handle, Stack* stack) {
  const Operator& op = operator_of(handle);
  const auto kept = c10::make_intrusive<Kept>();
  kept->arguments = take_arguments(op, stack);
  std::vector<Tensor> inputs;
  bool learns = false;
  for (std::size_t n = 0; n < op.arguments.size(); ++n) {
    IValue& value = kept->arguments[n];
    if (!op.arguments[n].differentiable() || value.isNone()) continue;
    inputs.push_back(value.toTensor());
    learns |= inputs.back().requires_grad();
    kept->differentiable.push_back(n);
  }
  if (!learns || !at::GradMode::is_enabled()) {
    torch::jit::push(*stack, forward(op, kept->arguments, nullptr));
    return;
  }
  for (const std::size_t n : kept->differentiable) kept->arguments[n] = IValue();
  torch::jit::push(*stack, Attention::apply(&op, kept, at::TensorList(inputs)));
}

}  // namespace

// A fragment: libraries of own scores (own.cmake) add their operators beside these.
TORCH_LIBRARY_FRAGMENT(heed, library) {
  using torch::CppFunction;
  for (std::size_t n = 0; const char* variant = heed_variant_name(n); ++n) {
    Operator op = operator_of(variant);
    const std::string name = op.name();
    library.def(op.schema().c_str());
    operators().emplace("heed::" + name, std::move(op));
    for (const auto key : {c10::DispatchKey::CPU, c10::DispatchKey::Meta})
      library.impl(name.c_str(), torch::dispatch(key, CppFunction::makeFromBoxedFunction<&run>()));
    library.impl(name.c_str(),
                 torch::dispatch(c10::DispatchKey::Autograd,
                                 CppFunction::makeFromBoxedFunction<&run_with_autograd>()));
  }
}
