// SPDX-License-Identifier: Apache-2.0
#pragma once

// The arguments of PyTorch's operators. Names, types and defaults follow from libheed's description of a variant
// (heed_describe), and from the settings of any call, which are listed here; they have their Python names.

#include <heed/c.h>

#include <torch/library.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

namespace heed_torch {

using at::Tensor;
using c10::IValue;
using Places = std::vector<std::int64_t>;  // places in the list of an operator's arguments
using Tensors = std::vector<Tensor>;

inline void require(int status) { TORCH_CHECK(status == heed_ok, heed_last_error()); }

enum class Kind { input, learnt, constant, number, word, setting };

// One argument of an operator.
struct Argument {
  std::string name;  // in Python
  std::string type;  // type and default, as torch's schemas spell them
  Kind kind;
  bool differentiable = false;
  std::string parameter = {};  // heed's name of the parameter that it sets
  double start = 0;            // initial value of learnt numbers
};

// Settings that every operator has. c.h explains them; README.md lists them beside the names of C++, C and Python.
inline const Argument kSettings[] = {
    {"causal", "bool causal=False", Kind::setting},
    {"window", "int[]? window=None", Kind::setting},
    {"align", "str? align=None", Kind::setting},
    {"offset", "int? offset=None", Kind::setting},
    {"key_range", "int[]? key_range=None", Kind::setting},
    {"key_lengths", "Tensor? key_lengths=None", Kind::setting},
    {"allowed", "Tensor? allowed=None", Kind::setting},
    {"bias", "Tensor? bias=None", Kind::setting, true},
    {"documents", "Tensor? documents=None", Kind::setting},
    {"key_documents", "Tensor? key_documents=None", Kind::setting},
    {"alibi", "Tensor? alibi=None", Kind::setting},
    {"soft_cap", "float? soft_cap=None", Kind::setting},
    {"scale", "float? scale=None", Kind::setting},
    {"dropout", "float dropout=0.0", Kind::setting},
    {"dropout_seed", "int? dropout_seed=None", Kind::setting},
    {"precision", "str precision=\"storage\"", Kind::setting},
    {"first_query", "int first_query=0", Kind::setting},
    {"queries_at_end", "bool queries_at_end=False", Kind::setting},
    {"query_inputs", "Tensor? query_inputs=None", Kind::setting, true},
    {"key_inputs", "Tensor? key_inputs=None", Kind::setting, true},
    {"threads", "int threads=0", Kind::setting},
};

// The Python name of an argument: "lambda" is a word of the language.
inline std::string python_name(std::string name) {
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c == '.' || c == '-'; }, '_');
  return name == "lambda" ? "lambda_" : name;
}

struct Operator {
  std::string variant;
  std::vector<Argument> arguments;

  [[nodiscard]] std::string name() const { return python_name(variant); }
  // The arguments as a schema lists them.
  [[nodiscard]] std::string listed() const {
    std::string text;
    bool options = false;
    for (const Argument& argument : arguments) {
      if (!text.empty()) text += ", ";
      if (argument.kind != Kind::input && !options) text += "*, ";
      options = argument.kind != Kind::input;
      text += argument.type;
    }
    return text;
  }
  [[nodiscard]] Places differentiable() const {
    Places places;
    for (std::size_t n = 0; n < arguments.size(); ++n)
      if (arguments[n].differentiable) places.push_back(static_cast<std::int64_t>(n));
    return places;
  }
  [[nodiscard]] std::size_t place(const std::string& argument) const {
    std::size_t n = 0;
    while (arguments[n].name != argument) ++n;
    return n;
  }
};

inline Argument argument_of(const heed_parameter_info& info) {
  const std::string name = python_name(info.name);
  const std::string tensor = "Tensor? " + name + "=None";
  switch (info.kind) {
    case heed_per_head:
    case heed_tensor: return {name, tensor, Kind::learnt, true, info.name, info.number};
    case heed_fixed:
    case heed_list: return {name, tensor, Kind::constant, false, info.name};
    case heed_choice: return {name, "str? " + name + "=None", Kind::word, false, info.name};
    default: return {name, "float? " + name + "=None", Kind::number, false, info.name};
  }
}

// libheed's description of a variant, at sizes that every variant takes.
inline Operator operator_of(const char* variant) {
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
              {{"query", "Tensor query", Kind::input, true},
               {"key", "Tensor key", Kind::input, true},
               {"value", "Tensor value", Kind::input, true}}};
  heed_shapes shapes{};
  shapes.size = sizeof shapes;
  require(heed_shapes_of(&call, &shapes));
  if (shapes.extra[3] > 0) op.arguments.push_back({"extra", "Tensor extra", Kind::input, true});

  std::size_t count = 0;
  require(heed_describe(&call, nullptr, nullptr, &count));
  std::vector<heed_parameter_info> infos(count);
  for (heed_parameter_info& info : infos) info.size = sizeof info;
  require(heed_describe(&call, nullptr, infos.data(), &count));
  for (const heed_parameter_info& info : infos) op.arguments.push_back(argument_of(info));
  op.arguments.insert(op.arguments.end(), std::begin(kSettings), std::end(kSettings));
  return op;
}

}  // namespace heed_torch
