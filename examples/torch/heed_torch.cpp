// SPDX-License-Identifier: Apache-2.0

// heed inside of PyTorch: a library for torch.ops.load_library that registers every variant of libheed (heed/c.h) as an
// operator torch.ops.heed.NAME, hyphens as underscores, with autograd and shapes for Meta tensors.
//
//   torch.ops.load_library("build/libheed_torch.so")
//   out = torch.ops.heed.dar(query, key, value, strength=strength, causal=True)
//
// Operators  names, arguments and defaults: arguments.hpp. print(torch.ops.heed.dar.default._schema) shows them. Behind each
//            stand four that autograd calls, whose tensors torch's transforms may wrap as they like:
//              _NAME_forward   out, and a tensor of one byte that holds the numbers saved by
//              forward (heed_saved) _NAME_backward  the gradients of sum(out o g)
//              _NAME_jvp       the tangent of out along a direction d
//              _NAME_hvp       the tangents of the results of _NAME_backward
// Tensors    of the CPU, (batch, heads, len, dim) or (len, dim), with any strides whose last is 1: x.transpose(1, 2) of a tensor (batch, len,
//            heads, dim) is read where it lies, and the output then lies in memory like the query. Others are copied.
// Gradients  of query, key, value, extra, bias and of all learnt parameters, in reverse and in forward mode:
//              backward(x, g)        by x: hvp(x, g; d, 0) of its cotangents d    by g: jvp(x; d)
//              jvp(x; d)             by x: hvp(x, u; d, 0) of its cotangent u     by d: backward(x, u)
//              hvp(x, g; d, e)       by d: hvp(x, g; c, 0) of its cotangents c    by e: jvp(x; c)
//            There are no third derivatives, and no tangents of tangents.
// Errors     the sentences of heed, as RuntimeError.

#include "call.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <map>

namespace {

using namespace heed_torch;
using Stack = torch::jit::Stack;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The operators by their names in torch, with the namespace. Filled when the library is loaded, before any call.
std::map<std::string, Operator>& operators() {
  static std::map<std::string, Operator> all;
  return all;
}
const Operator& operator_of(const c10::OperatorHandle& handle) {
  return operators().at(handle.schema().name());
}

// ---------------------------------------------------------------- what forward saves

void free_saved(void* saved) { heed_saved_free(static_cast<heed_saved*>(saved)); }

Tensor hold(heed_saved* saved) {
  return at::for_blob(saved, {1}).context(saved, &free_saved).options(at::kByte).make_tensor();
}
// The saved numbers; null if the tensor was copied, as vmap does.
const heed_saved* saved_of(const Tensor& held) {
  return held.storage().data_ptr().cast_context<heed_saved>(&free_saved);
}

// out, and the saved numbers if they are wanted.
std::pair<Tensor, Tensor> run_forward(const Operator& op, const std::vector<IValue>& arguments,
                                      bool saves) {
  Call call(op, arguments);
  if (call.meta()) require(heed_check(&call.call()));
  const Tensor out = call.make_output();
  if (call.meta()) return {out, at::empty({1}, out.options().dtype(at::kByte))};
  heed_outputs outputs{};
  outputs.size = sizeof outputs;
  outputs.out = call.keep(out, "out");
  heed_saved* saved = nullptr;
  require(heed_forward(&call.call(), &outputs, saves ? &saved : nullptr));
  return {out, saves ? hold(saved) : Tensor()};
}

// ---------------------------------------------------------------- derivatives

enum class Order { backward, jvp, hvp };
constexpr const char* kOrders[] = {"backward", "jvp", "hvp"};
std::string name_of(const Operator& op, const char* part) { return "_" + op.name() + "_" + part; }

// A list with the tensors of `some` places, for `all` places.
Tensors spread(const Tensors& tensors, const Places& some, const Places& all) {
  Tensors list;
  std::size_t next = 0;
  for (const std::int64_t place : all)
    list.push_back(next < some.size() && some[next] == place ? tensors[next++] : Tensor());
  return list;
}

// True if one of them is defined.
bool any(const Tensors& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const Tensor& x) { return x.defined(); });
}

// An undefined tensor.
const Tensor& nothing() {
  static const Tensor none = at::detail::empty_cpu({0}, at::TensorOptions());
  return none;
}

// The arguments of an operator behind NAME. `moving` are the places of the tangents, `wanted` those of the results.
struct Question : torch::CustomClassHolder {
  const Operator* op = nullptr;
  Tensor grad_out, grad_out_tangent;
  Tensors tangents;
  Places moving, wanted;
  Tensor out, saved;
  std::vector<IValue> arguments;
  bool graded = at::GradMode::is_enabled();  // gradient mode where the operator was called

  static std::string schema(const Operator& op, Order order) {
    std::string text =
        "(Tensor? grad_out, Tensor? grad_out_tangent, int[] moving, int[] wanted, "
        "Tensor out, Tensor saved, ";
    std::string results;
    for (const std::int64_t place : op.differentiable()) {
      text += "Tensor? " + op.arguments[std::size_t(place)].name + "_tangent, ";
      results += results.empty() ? "Tensor" : ", Tensor";
    }
    if (order == Order::jvp) results = "Tensor";
    return text + op.listed() + ") -> (" + results + ")";
  }
  [[nodiscard]] static Question pop(const Operator& op, Stack* stack) {
    Question q;
    q.op = &op;
    q.arguments = torch::jit::pop(*stack, op.arguments.size());
    const std::vector<IValue> given = torch::jit::pop(*stack, op.differentiable().size());
    const std::vector<IValue> own = torch::jit::pop(*stack, 6);
    for (const IValue& x : given)
      if (!x.isNone()) q.tangents.push_back(x.toTensor());
    if (!own[0].isNone()) q.grad_out = own[0].toTensor();
    if (!own[1].isNone()) q.grad_out_tangent = own[1].toTensor();
    q.moving = own[2].toIntVector();
    q.wanted = own[3].toIntVector();
    q.out = own[4].toTensor();
    q.saved = own[5].toTensor();
    return q;
  }
  [[nodiscard]] Stack stack() const {
    const auto optional = [](const Tensor& x) { return x.defined() ? IValue(x) : IValue(); };
    Stack all{optional(grad_out), optional(grad_out_tangent), moving, wanted, out, saved};
    const Tensors spread_tangents = spread(tangents, moving, op->differentiable());
    for (const Tensor& x : spread_tangents) all.push_back(optional(x));
    all.insert(all.end(), arguments.begin(), arguments.end());
    return all;
  }

  // Places of inputs that are given and have derivatives.
  [[nodiscard]] Places inputs() const {
    Places places;
    for (std::size_t n = 0; n < arguments.size(); ++n)
      if (op->arguments[n].differentiable && !arguments[n].isNone())
        places.push_back(static_cast<std::int64_t>(n));
    return places;
  }
  [[nodiscard]] const Tensor& input(std::int64_t place) const {
    return arguments[std::size_t(place)].toTensor();
  }
  // All tensors that autograd follows: grad_out and its tangent if they are given, tangents, inputs.
  [[nodiscard]] Tensors variables() const {
    Tensors all;
    for (const Tensor& x : {grad_out, grad_out_tangent})
      if (x.defined()) all.push_back(x);
    all.insert(all.end(), tangents.begin(), tangents.end());
    for (const std::int64_t place : inputs()) all.push_back(input(place));
    return all;
  }
  // Replaces the tangents: the defined tensors of a list, which belong to `places`.
  void move(const Tensors& list, const Places& places) {
    tangents.clear();
    moving.clear();
    grad_out_tangent = Tensor();
    for (std::size_t n = 0; n < list.size(); ++n)
      if (list[n].defined()) {
        tangents.push_back(list[n]);
        moving.push_back(places[n]);
      }
  }
  [[nodiscard]] Question held_still() const {
    Question q = *this;
    q.move({}, {});
    return q;
  }
  // Replaces the variables by others in the same order.
  void set_variables(const Tensors& all) {
    auto next = all.begin();
    for (Tensor* x : {&grad_out, &grad_out_tangent})
      if (x->defined()) *x = *next++;
    for (Tensor& x : tangents) x = *next++;
    for (const std::int64_t place : inputs()) arguments[std::size_t(place)] = *next++;
  }
};

// Results of an operator: a tensor for each argument that may have a gradient, without elements unless it is wanted.
void push_results(const Question& q, Order order, const Tensors& results, Stack* stack) {
  if (order == Order::jvp) return torch::jit::push(*stack, results[0]);
  for (const Tensor& x : spread(results, q.wanted, q.op->differentiable()))
    torch::jit::push(*stack, x.defined() ? x : nothing());
}
Tensors ask(const Question& q, Order order) {
  const std::string name = "heed::" + name_of(*q.op, kOrders[int(order)]);
  Stack stack = q.stack();
  c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "").callBoxed(&stack);
  if (order == Order::jvp) return {stack[0].toTensor()};
  Tensors results;
  const Places places = q.op->differentiable();
  for (std::size_t n = 0; n < places.size(); ++n)
    if (std::find(q.wanted.begin(), q.wanted.end(), places[n]) != q.wanted.end())
      results.push_back(stack[n].toTensor());
  return results;
}

// Memory for the gradient of x that heed may write: in the layout of x if x is dense and the numbers
// of its rows are neighbours.
Tensor gradient_like(const Tensor& x) {
  const bool rows = x.is_non_overlapping_and_dense() && (x.dim() == 0 || x.stride(-1) == 1);
  return at::empty_like(x, rows ? at::MemoryFormat::Preserve : at::MemoryFormat::Contiguous);
}

Tensors answer(const Question& q, Order order) {
  Call call(*q.op, q.arguments);
  Tensors results;
  heed_gradients to{};
  heed_tangents along{};
  heed_outputs outputs{};
  to.size = sizeof to;
  along.size = sizeof along;
  outputs.size = sizeof outputs;
  std::vector<heed_parameter> gradients, directions;
  for (const std::int64_t place : q.wanted) {
    results.push_back(gradient_like(q.input(place)));
    call.put(to, gradients, place, results.back(), "the gradient of ");
  }
  if (order == Order::jvp) results.push_back(call.make_output());
  if (call.meta()) return results;
  for (std::size_t n = 0; n < q.tangents.size(); ++n) {
    const bool learnt = q.op->arguments[std::size_t(q.moving[n])].kind == Kind::learnt;
    const Tensor& x = q.tangents[n];
    const bool any_strides = learnt || x.dim() == 0 || x.stride(-1) == 1;
    call.put(along, directions, q.moving[n], any_strides ? x : x.contiguous(), "the tangent of ");
  }
  Tensor again;
  const heed_saved* saved = saved_of(q.saved);
  if (saved == nullptr) {
    again = run_forward(*q.op, q.arguments, true).second;
    saved = saved_of(again);
  }
  const DLTensor* out = call.read(q.out, "out");
  const auto given = [&](const Tensor& x, const char* name) {
    return x.defined() ? call.read(x, name) : nullptr;
  };
  const DLTensor* grad_out = given(q.grad_out, "the gradient of out");
  if (order == Order::backward) {
    outputs.out = grad_out;
    require(heed_backward(&call.call(), saved, out, &outputs, &to));
  } else if (order == Order::jvp) {
    outputs.out = call.keep(results[0], "the tangent of out");
    require(heed_jvp(&call.call(), saved, out, &along, &outputs));
  } else {
    require(heed_hvp(&call.call(), saved, out, grad_out, &along,
                     given(q.grad_out_tangent, "the tangent of the gradient of out"), &to));
  }
  return results;
}

// ---------------------------------------------------------------- autograd

using Kept = c10::intrusive_ptr<Question>;

// Keeps a question in a node of autograd without its tensors, which autograd keeps, and restores it.
void remember(AutogradContext* context, const Kept& kept, Tensors variables, Tensor out) {
  kept->set_variables(Tensors(variables.size(), nothing()));
  kept->out = Tensor();
  variables.push_back(std::move(out));
  context->save_for_backward(variables);
  context->saved_data["question"] = IValue::make_capsule(kept);
  context->set_materialize_grads(false);
}
Question recall(AutogradContext* context) {
  const Tensors variables = context->get_saved_variables();
  const auto capsule = context->saved_data["question"].toCapsule();
  Question q = static_cast<const Question&>(*capsule);
  q.set_variables(variables);
  q.out = variables.back();
  return q;
}

// The places of variables n, n + 1, ... that need gradients.
Places needed(const AutogradContext* context, std::size_t n, const Places& places) {
  Places needed;
  for (const std::int64_t place : places)
    if (context->needs_input_grad(n++)) needed.push_back(place);
  return needed;
}
// Adds the results for those of `places` that need gradients; they belong to variables n, n + 1, ...
void answer_needed(AutogradContext* context, Question q, Order order, std::size_t n,
                   const Places& places, variable_list& to) {
  q.wanted = needed(context, n, places);
  const Tensors results = q.wanted.empty() ? Tensors() : ask(q, order);
  for (const Tensor& x : spread(results, q.wanted, places)) to.push_back(x);
}

// Kernels below autograd. Nested transforms have autograd of their own there, which this object turns off.
struct Below {
  explicit Below(const Question& q) : mode(q.graded) {}
  at::AutoDispatchBelowADInplaceOrView keys;
  at::AutoGradMode mode;
};

// Gradients and tangents as functions of their arguments; `out` is no variable of its own.
struct Derivative : torch::autograd::Function<Derivative> {
  static variable_list forward(AutogradContext* context, Order order, const Kept& kept,
                               at::TensorList /*primal variables*/) {
    const Below below(*kept);
    Tensors results = ask(*kept, order);
    remember(context, kept, kept->variables(), kept->out);
    context->saved_data["order"] = int(order);
    return results;
  }

  static variable_list backward(AutogradContext* context, const variable_list& cotangents) {
    const auto order = Order(context->saved_data["order"].toInt());
    const Question from = recall(context);
    const Places places = from.inputs();
    if (!any(cotangents)) return variable_list(2 + from.variables().size());
    variable_list result(2);  // the first two arguments are no tensors
    Question pulled = from;   // back through out
    if (order == Order::jvp) {
      pulled.grad_out = cotangents[0];
      answer_needed(context, pulled.held_still(), Order::backward, 0, from.moving, result);
      answer_needed(context, pulled, Order::hvp, from.moving.size(), places, result);
      return result;
    }
    Question along = from;  // along the cotangents of results
    along.move(cotangents, from.wanted);
    pulled = along;
    pulled.grad_out = Tensor();
    pulled.wanted.clear();
    const auto add_of_out = [&](std::size_t n) {
      result.push_back(context->needs_input_grad(n) ? ask(pulled, Order::jvp)[0] : Tensor());
    };
    if (order == Order::backward) {
      add_of_out(0);
      answer_needed(context, along, Order::hvp, 1, places, result);
      return result;
    }
    // H d + J^T e is linear in d and in e.
    const bool moves = from.grad_out_tangent.defined();
    const std::size_t first = moves ? 2 : 1;
    TORCH_CHECK(!context->needs_input_grad(0) &&
                    needed(context, first + from.moving.size(), places).empty(),
                "heed: third derivatives of ", from.op->name(),
                " were asked for, it has first and second ones");
    result.emplace_back();
    if (moves) add_of_out(1);
    answer_needed(context, along, Order::hvp, first, from.moving, result);
    result.resize(result.size() + places.size());
    return result;
  }
};

// out as a function of the inputs. Sets `saved` to the numbers that forward saves.
struct Attention : torch::autograd::Function<Attention> {
  static Tensor forward(AutogradContext* context, const Kept& kept, Tensor* saved,
                        at::TensorList /*primal inputs*/) {
    const Below below(*kept);
    Stack stack = kept->arguments;
    const std::string name = "heed::" + name_of(*kept->op, "forward");
    c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "").callBoxed(&stack);
    const Tensor out = stack[0].toTensor();
    *saved = kept->saved = stack[1].toTensor();
    remember(context, kept, kept->variables(), out);
    return out;
  }

  static variable_list backward(AutogradContext* context, const variable_list& cotangents) {
    variable_list result(2);  // the first two arguments are no tensors
    Question q = recall(context);
    const Places places = q.inputs();
    q.grad_out = cotangents[0];
    if (!q.grad_out.defined())
      result.resize(2 + places.size());
    else
      answer_needed(context, std::move(q), Order::backward, 0, places, result);
    return result;
  }
};

bool moves(const Tensor& x) { return x.defined() && x._fw_grad(0).defined(); }
// Takes the tangents of forward mode from these tensors; undefined for a tensor that does not move.
Tensors take_tangents(Tensors& from) {
  Tensors tangents;
  for (Tensor& x : from) {
    tangents.push_back(moves(x) ? x._fw_grad(0) : Tensor());
    if (moves(x)) x = x._fw_primal(0);
  }
  return tangents;
}
bool learn(const Tensors& variables) {
  return at::GradMode::is_enabled() &&
         std::any_of(variables.begin(), variables.end(),
                     [](const Tensor& x) { return x.requires_grad(); });
}

// ---------------------------------------------------------------- torch's dispatcher

// Throws for tensors for which no kernel would be found, and draws the seed of a call that drops
// weights, by torch's generator.
void prepare(const Operator& op, std::vector<IValue>& arguments) {
  for (std::size_t n = 0; n < arguments.size(); ++n)
    if (arguments[n].isTensor()) require_readable(arguments[n].toTensor(), op.arguments[n].name);
  IValue& seed = arguments[op.place("dropout_seed")];
  const bool drops = arguments[op.place("dropout")].toDouble() > 0;
  if (!drops || !seed.isNone() || arguments[0].toTensor().is_meta()) return;
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  const std::uint64_t bits = at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
  seed = static_cast<std::int64_t>(bits >> 1U);  // a given seed is not negative either
}

void run(const c10::OperatorHandle& handle, Stack* stack) {
  const Operator& op = operator_of(handle);
  std::vector<IValue> arguments = torch::jit::pop(*stack, op.arguments.size());
  prepare(op, arguments);
  torch::jit::push(*stack, run_forward(op, arguments, false).first);
}
void run_saving(const c10::OperatorHandle& handle, Stack* stack) {
  const Operator& op = operator_of(handle);
  const std::vector<IValue> arguments = torch::jit::pop(*stack, op.arguments.size());
  const auto [out, saved] = run_forward(op, arguments, true);
  torch::jit::push(*stack, out, saved);
}
template <Order order>
void run_derivative(const c10::OperatorHandle& handle, Stack* stack) {
  const Question q = Question::pop(operator_of(handle), stack);
  push_results(q, order, answer(q, order), stack);
}

template <bool saves>
void run_with_autograd(const c10::OperatorHandle& handle, Stack* stack) {
  const auto kept = c10::make_intrusive<Question>();
  Question& q = *kept;
  q.op = &operator_of(handle);
  q.arguments = torch::jit::pop(*stack, q.op->arguments.size());
  prepare(*q.op, q.arguments);
  Tensors inputs = q.variables();
  const Tensors tangents = take_tangents(inputs);
  if (!any(tangents) && !learn(inputs)) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    stack->insert(stack->end(), q.arguments.begin(), q.arguments.end());
    return handle.callBoxed(stack);
  }
  Question along = q;
  const Tensor out = Attention::apply(kept, &along.saved, at::TensorList(inputs));
  if (any(tangents)) {
    along.set_variables(inputs);
    along.out = out;
    along.move(tangents, along.inputs());
    out._set_fw_grad(ask(along, Order::jvp)[0], 0, false);
  }
  torch::jit::push(*stack, out);
  if (saves) torch::jit::push(*stack, along.saved);
}

template <Order order>
void run_derivative_with_autograd(const c10::OperatorHandle& handle, Stack* stack) {
  const auto kept = c10::make_intrusive<Question>(Question::pop(operator_of(handle), stack));
  Tensors variables = kept->variables();
  const Tensors tangents = take_tangents(variables);
  TORCH_CHECK(!any(tangents) || order == Order::backward, "heed: the tangent of ",
              order == Order::jvp ? "a tangent" : "a second derivative",
              " was asked for; forward mode goes over reverse mode, as in jacfwd(jacrev(f)), "
              "and no further");
  kept->out = kept->out.detach();
  Question along = *kept;
  Tensors results;
  if (learn(variables)) {
    results = Derivative::apply(order, kept, at::TensorList(variables));
  } else {
    const at::AutoDispatchBelowADInplaceOrView guard;
    results = ask(*kept, order);
  }
  if (any(tangents)) {
    along.set_variables(variables);
    along.move({tangents.begin() + 1, tangents.end()}, along.inputs());
    along.grad_out_tangent = tangents[0];
    const Tensors moved = ask(along, Order::hvp);
    for (std::size_t n = 0; n < results.size(); ++n) results[n]._set_fw_grad(moved[n], 0, false);
  }
  push_results(along, order, results, stack);
}

using Kernel = torch::CppFunction (*)();
template <void (*below)(const c10::OperatorHandle&, Stack*)>
torch::CppFunction kernel() {
  return torch::CppFunction::makeFromBoxedFunction<below>();
}
// Registers an operator by its kernels.
void define(torch::Library& library, const std::string& name, const std::string& rest,
            const Operator& op, Kernel below, Kernel with_autograd) {
  library.def((name + rest).c_str());
  operators().emplace("heed::" + name, op);
  for (const auto key : {c10::DispatchKey::CPU, c10::DispatchKey::Meta})
    library.impl(name.c_str(), torch::dispatch(key, below()));
  library.impl(name.c_str(), torch::dispatch(c10::DispatchKey::Autograd, with_autograd()));
}
template <Order order>
void define_derivative(torch::Library& library, const Operator& op) {
  define(library, name_of(op, kOrders[int(order)]), Question::schema(op, order), op,
         &kernel<&run_derivative<order>>, &kernel<&run_derivative_with_autograd<order>>);
}

}  // namespace

// A fragment: libraries of own scores (own.cmake) add their operators beside these.
TORCH_LIBRARY_FRAGMENT(heed, library) {
  for (std::size_t n = 0; const char* variant = heed_variant_name(n); ++n) {
    const Operator op = heed_torch::operator_of(variant);
    define(library, op.name(), "(" + op.listed() + ") -> Tensor", op, &kernel<&run>,
           &kernel<&run_with_autograd<false>>);
    define(library, name_of(op, "forward"), "(" + op.listed() + ") -> (Tensor, Tensor)", op,
           &kernel<&run_saving>, &kernel<&run_with_autograd<true>>);
    define_derivative<Order::backward>(library, op);
    define_derivative<Order::jvp>(library, op);
    define_derivative<Order::hvp>(library, op);
  }
}
