// SPDX-License-Identifier: Apache-2.0
#pragma once

// Builds a call of heed from an operator's arguments.

#include "arguments.hpp"

#include <deque>
#include <limits>
#include <tuple>

namespace heed_torch {

inline DLDataType type_of(const Tensor& x, const std::string& name) {
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

// Throws if heed cannot read a tensor.
inline void require_readable(const Tensor& x, const std::string& name) {
  TORCH_CHECK(x.defined(), "heed: ", name, " is None, it must be a tensor");
  TORCH_CHECK(x.layout() == at::kStrided, "heed: ", name, " has the layout ", x.layout(),
              ", it must be dense, as to_dense() gives it");
  TORCH_CHECK(x.is_cpu() || x.is_meta(), "heed: ", name, " is on ", x.device(),
              ", it must be on the CPU");
}

// A call in heed's form. It points into itself, into the arguments and into the memory of their tensors.
class Call {
 public:
  Call(const Operator& op, const std::vector<IValue>& arguments) : op_(op), arguments_(arguments) {
    call_.size = sizeof call_;
    mask_.size = sizeof mask_;
    call_.variant = op.variant.c_str();
    call_.mask = &mask_;
    for (std::size_t n = 0; n < op.arguments.size(); ++n)
      if (!arguments[n].isNone()) take(op.arguments[n], arguments[n]);
    call_.parameters = parameters_.data();
    call_.parameter_count = parameters_.size();
    apply_to_positions();
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  [[nodiscard]] const heed_call& call() const { return call_; }
  [[nodiscard]] bool meta() const { return arguments_[0].toTensor().is_meta(); }

  // An uninitialised tensor for the output. It has two axes if the query has, and lies in memory as the query does: (batch,
  // heads, len, dim), or (batch, len, heads, dim) read with its axes swapped.
  [[nodiscard]] Tensor make_output() const {
    heed_shapes shapes{};
    shapes.size = sizeof shapes;
    require(heed_shapes_of(&call_, &shapes));
    const Tensor& query = arguments_[0].toTensor();
    const auto* out = shapes.out;
    if (query.dim() == 2) return at::empty({out[2], out[3]}, query.options());
    const bool by_token = query.dim() == 4 && query.stride(2) > query.stride(1);
    if (!by_token) return at::empty({out[0], out[1], out[2], out[3]}, query.options());
    return at::empty({out[0], out[2], out[1], out[3]}, query.options()).transpose(1, 2);
  }

  // The DLPack description of an input, kept as long as the call.
  const DLTensor* read(const Tensor& x, const std::string& name) {
    require_readable(x, name);
    if (x.is_meta()) return keep(stand_in(x, 0), name);
    return keep(x.dim() > 0 && x.stride(-1) != 1 ? x.contiguous() : x, name);
  }
  // The same for an output, or for a tensor of any strides.
  const DLTensor* keep(const Tensor& x, const std::string& name) {
    held_.push_back(x);
    DLTensor& to = described_.emplace_back();
    to.data = x.data_ptr();
    to.device = {kDLCPU, 0};
    to.ndim = static_cast<std::int32_t>(x.dim());
    to.dtype = type_of(x, name);
    to.shape = const_cast<std::int64_t*>(held_.back().sizes().data());
    to.strides = const_cast<std::int64_t*>(held_.back().strides().data());
    return &to;
  }

  // Puts a tensor of an argument, such as its gradient, into its field of a struct heed_gradients or heed_tangents.
  template <class Struct>
  void put(Struct& to, std::vector<heed_parameter>& parameters, std::int64_t place, const Tensor& x,
           const char* what) {
    const Argument& argument = op_.arguments[std::size_t(place)];
    const DLTensor* tensor = keep(x, what + argument.name);
    if (argument.kind == Kind::learnt)
      parameters.push_back({argument.parameter.c_str(), tensor, nullptr, 0});
    if (argument.name == "query") to.query = tensor;
    if (argument.name == "key") to.key = tensor;
    if (argument.name == "value") to.value = tensor;
    if (argument.name == "extra") to.extra = tensor;
    if (argument.name == "bias") to.bias = tensor;
    if (argument.name == "query_inputs") to.query_inputs = tensor;
    if (argument.name == "key_inputs") to.key_inputs = tensor;
    to.parameters = parameters.data();
    to.parameter_count = parameters.size();
  }

 private:
  // A tensor that stands in for one without memory; all its rows are the same.
  static Tensor stand_in(const Tensor& x, double number) {
    const auto row =
        x.dim() > 0 ? std::vector<std::int64_t>{x.size(-1)} : std::vector<std::int64_t>{};
    return at::full(row, number, x.options().device(at::kCPU)).expand(x.sizes());
  }

  void take(const Argument& argument, const IValue& value) {
    switch (argument.kind) {
      case Kind::input: {
        const DLTensor* x = read(value.toTensor(), argument.name);
        (argument.name == "query"   ? call_.query
         : argument.name == "key"   ? call_.key
         : argument.name == "value" ? call_.value
                                    : call_.extra) = x;
        return;
      }
      case Kind::learnt:
      case Kind::constant: {
        const Tensor& x = value.toTensor();
        require_readable(x, argument.name);
        const DLTensor* numbers =
            keep(x.is_meta() ? stand_in(x, argument.start) : x, argument.name);
        parameters_.push_back({argument.parameter.c_str(), numbers, nullptr, 0});
        return;
      }
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
    if (name == "window") {
      std::tie(window_.left, window_.right) = pair(name, value);
      mask_.windows = &window_;
      mask_.window_count = 1;
    }
    if (name == "align") align_ = one_of(name, value, "top_left", "bottom_right");
    if (name == "key_range") {
      std::tie(key_range_.begin, key_range_.end) = pair(name, value);
      mask_.key_ranges = &key_range_;
      mask_.key_range_count = 1;
    }
    if (name == "offset") offset_ = value.toInt();
    if (name == "key_lengths")
      whole_numbers(name, value, mask_.key_lengths, mask_.key_length_count);
    if (name == "allowed") mask_.allowed = read(value.toTensor(), name);
    if (name == "bias") mask_.bias = read(value.toTensor(), name);
    if (name == "documents") {
      whole_numbers(name, value, mask_.query_documents, mask_.query_document_count);
      mask_.key_documents = mask_.query_documents;
      mask_.key_document_count = mask_.query_document_count;
    }
    if (name == "key_documents") {
      TORCH_CHECK(mask_.query_documents != nullptr,
                  "heed: key_documents was given without documents, those of the queries");
      whole_numbers(name, value, mask_.key_documents, mask_.key_document_count);
    }
    if (name == "alibi") {
      const Tensor slopes = memory_of(value.toTensor(), name, at::kDouble);
      mask_.alibi = slopes.data_ptr<double>();
      mask_.alibi_count = static_cast<std::size_t>(slopes.numel());
    }
    if (name == "soft_cap") {
      mask_.soft_cap = value.toDouble();
      TORCH_CHECK(mask_.soft_cap != 0, "heed: soft_cap is 0, it must be positive and finite");
    }
    if (name == "scale") {
      scale_ = value.toDouble();
      call_.scale = &scale_;
    }
    if (name == "dropout") call_.dropout = value.toDouble();
    if (name == "dropout_seed") {
      TORCH_CHECK(value.toInt() >= 0, "heed: dropout_seed is ", value.toInt(),
                  ", it must not be negative");
      call_.dropout_seed = static_cast<std::uint64_t>(value.toInt());
    }
    if (name == "precision") call_.precision = one_of(name, value, "storage", "mixed");
    if (name == "first_query") call_.first_query = value.toInt();
    if (name == "queries_at_end") call_.queries_at_end = value.toBool();
    if (name == "query_inputs") call_.query_inputs = read(value.toTensor(), name);
    if (name == "key_inputs") call_.key_inputs = read(value.toTensor(), name);
    if (name == "threads") {
      const std::int64_t threads = value.toInt();
      TORCH_CHECK(threads >= 0 && threads <= std::numeric_limits<int>::max(), "heed: threads is ",
                  threads, ", it must lie in [0, ", std::numeric_limits<int>::max(), "]");
      call_.threads = static_cast<int>(threads);
    }
  }

  // Sets align and offset of all parts of the mask that read positions.
  void apply_to_positions() {
    const bool any = mask_.causal != 0 || mask_.window_count > 0 || mask_.alibi != nullptr;
    TORCH_CHECK(any || !align_, "heed: align was given, but none of causal, window and alibi");
    TORCH_CHECK(any || !offset_, "heed: offset was given, but none of causal, window and alibi");
    window_.align = align_.value_or(heed_top_left);
    window_.offset = offset_.value_or(0);
    if (mask_.causal != 0) {
      mask_.causal_align = window_.align;
      mask_.causal_offset = window_.offset;
    }
    if (mask_.alibi != nullptr) {
      mask_.alibi_align = window_.align;
      mask_.alibi_offset = window_.offset;
    }
  }

  static std::pair<std::int64_t, std::int64_t> pair(const std::string& name, const IValue& value) {
    const auto numbers = value.toIntVector();
    TORCH_CHECK(numbers.size() == 2, "heed: ", name, " has ", numbers.size(),
                " numbers, it must have two");
    return {numbers[0], numbers[1]};
  }
  // The number in c.h, 0 or 1, of one of two words.
  static int one_of(const std::string& name, const IValue& value, const char* first,
                    const char* second) {
    const std::string& word = value.toStringRef();
    TORCH_CHECK(word == first || word == second, "heed: ", name, " is \"", word,
                "\", it must be \"", first, "\" or \"", second, "\"");
    return word == second ? 1 : 0;
  }

  // A dense copy of this type, kept as long as the call.
  Tensor memory_of(const Tensor& x, const std::string& name, at::ScalarType type) {
    require_readable(x, name);
    return held_.emplace_back((x.is_meta() ? stand_in(x, 0) : x).to(type).contiguous());
  }
  void whole_numbers(const std::string& name, const IValue& value, const std::int64_t*& numbers,
                     std::size_t& count) {
    const Tensor& given = value.toTensor();
    TORCH_CHECK(!given.defined() || at::isIntegralType(given.scalar_type(), false), "heed: ", name,
                " holds ", given.scalar_type(), ", it must hold whole numbers");
    const Tensor copy = memory_of(given, name, at::kLong);
    numbers = copy.data_ptr<std::int64_t>();
    count = static_cast<std::size_t>(copy.numel());
  }

  const Operator& op_;
  const std::vector<IValue>& arguments_;
  std::deque<Tensor> held_;  // a deque, because the addresses of sizes must last
  std::deque<DLTensor> described_;
  std::vector<heed_parameter> parameters_;
  heed_call call_{};
  heed_mask mask_{};
  heed_window window_{};
  heed_key_range key_range_{};
  c10::optional<int> align_;
  c10::optional<std::int64_t> offset_;
  double scale_ = 0;
};

}  // namespace heed_torch
