// SPDX-License-Identifier: Apache-2.0
// Calls from other languages: tensors of DLPack, the C interface, command lines.

#include "bytes/bytes.hpp"
#include "heed_compare/settings.hpp"

#include <heed/c.h>
#include <heed/io/dlpack.hpp>

#include <array>
#include <limits>
#include <string>
#include <vector>

namespace heed_bytes {
namespace {

// A tensor whose fields may be anything, over memory that ends where it says.
struct AnyTensor {
  std::array<std::int64_t, 4> shape{}, strides{};
  std::vector<std::byte> memory;
  DLTensor tensor{};

  // Bytes from the first element to the end of the last one; none where this is no number below `most`.
  [[nodiscard]] std::size_t span(std::int64_t most) const {
    long double last = 0;
    long double dense = 1;
    for (int a = tensor.ndim; a-- > 0;) {
      const auto at = std::size_t(a);
      if (shape[at] <= 0) return 0;
      last += (tensor.strides ? (long double)(strides[at]) : dense) * (long double)(shape[at] - 1);
      dense *= (long double)(shape[at]);
      if (last > most || last < -most || dense > most) return 0;
    }
    return last < 0 ? 0 : std::size_t(last + 1) * std::size_t((tensor.dtype.bits + 7) / 8);
  }
};

constexpr DLDataType kTypes[] = {{kDLFloat, 32, 1},  {kDLFloat, 64, 1}, {kDLFloat, 16, 1},
                                 {kDLBfloat, 16, 1}, {6, 8, 1},         {kDLInt, 64, 1},
                                 {kDLUInt, 8, 1}};

// The tensor keeps pointers to itself.
void draw(Draws& draws, AnyTensor& any, std::array<int, 4> expected) {
  DLTensor& t = any.tensor;
  t.ndim = draws.below(16) ? 4 : draws.below(7);
  t.dtype = kTypes[draws.below(64) ? 0 : std::size_t(draws.below(7))];
  t.device = {draws.below(32) ? kDLCPU : DLDeviceType(draws.byte()), 0};
  for (std::size_t a = 0; a < 4; ++a)
    any.shape[a] = draws.below(16) ? expected[a] : draws.number(10);
  std::int64_t dense = 1;
  for (std::size_t a = 4; a-- > 0;) {
    any.strides[a] = draws.below(16) ? dense : draws.number(40);
    dense *= expected[a] > 0 ? expected[a] : 1;
  }
  t.shape = draws.below(64) ? any.shape.data() : nullptr;
  t.strides = draws.below(2) ? any.strides.data() : nullptr;
  if (t.ndim > 4) t.shape = nullptr;  // there are four numbers
  const std::size_t bytes = t.shape ? any.span(1 << 16) : 0;
  any.memory.resize(bytes + 8);
  for (std::size_t i = 0; i < bytes; ++i) any.memory[i] = std::byte((i * 37 + 11) % 64);
  t.byte_offset = 0;
  t.data = any.memory.data();
}

template <class Real>
[[nodiscard]] bool view(const DLTensor& tensor, std::size_t bytes) {
  return taken<std::invalid_argument>("heed::view_dlpack: tensor", [&] {
    const auto seen = heed::view_dlpack<Real>(tensor);
    const heed::Shape s = seen.shape();
    if (!seen.has_elements() || bytes == 0) return;
    const auto* last =
        reinterpret_cast<const std::byte*>(seen.row(s.batch - 1, s.heads - 1, s.len - 1) + s.dim);
    const auto* first = static_cast<const std::byte*>(tensor.data) + tensor.byte_offset;
    demand(last - first == std::ptrdiff_t(bytes), "a view ends elsewhere than its tensor");
  });
}

[[nodiscard]] bool good(int status) {
  const std::string text = heed_last_error();
  if (status == heed_ok) return true;
  demand(status == heed_invalid, "status " + std::to_string(status) + ": " + text);
  demand(text.starts_with("heed") && text.find('\n') == text.npos && text.size() < kSentence,
         "a refusal of more than a sentence: " + text);
  return false;
}

// Tensors for what the call's variant learns, in the shapes that heed_describe() gives.
class Learnt {
 public:
  Learnt(const heed_call& call, Draws& draws) {
    // What is learnt has the size of rows: of huge ones there is no memory for it, which a sanitizer takes for a fault.
    for (const DLTensor* rows : {call.query, call.value})
      for (int a = 0; rows->shape != nullptr && a < rows->ndim; ++a)
        if (rows->shape[a] > 4096) return;
    infos_.resize(64, {});
    for (heed_parameter_info& info : infos_) info.size = sizeof info;
    std::size_t count = infos_.size();
    if (!good(heed_describe(&call, nullptr, infos_.data(), &count))) return;
    for (heed_parameter_info& info : std::span(infos_).first(count)) {
      std::int64_t size = 1;
      for (const std::int64_t extent : std::span(info.shape).first(std::size_t(info.ndim)))
        size *= extent;
      if (info.ndim == 0 || size > 4096 || !draws.below(16)) continue;
      numbers_[used_].assign(std::size_t(size), 0.125f);
      tensors_[used_] = {
          numbers_[used_].data(), {kDLCPU, 0}, info.ndim, kTypes[0], info.shape, nullptr, 0};
      parameters_[used_] = {info.name, &tensors_[used_], nullptr, 0};
      ++used_;
    }
  }
  [[nodiscard]] std::span<const heed_parameter> parameters() const {
    return std::span(parameters_).first(used_);
  }

 private:
  std::vector<heed_parameter_info> infos_;
  std::array<std::vector<float>, 64> numbers_;
  std::array<DLTensor, 64> tensors_{};
  std::array<heed_parameter, 64> parameters_{};
  std::size_t used_ = 0;
};

}  // namespace

bool dlpack(Bytes bytes) {
  Draws draws(bytes);
  AnyTensor any;
  draw(draws, any, {2, 3, 4, 5});
  any.tensor.dtype = {std::uint8_t(draws.below(8)), std::uint8_t(1 << draws.below(8)),
                      std::uint16_t(draws.below(16) ? 1 : draws.byte())};
  if (!draws.below(8)) any.tensor.byte_offset = std::uint64_t(draws.number(16));
  const std::size_t span = any.tensor.shape ? any.span(1 << 16) : 0;
  bool seen = view<float>(any.tensor, span);
  seen |= view<const float>(any.tensor, span);
  seen |= view<const double>(any.tensor, span);
  seen |= view<const heed::bfloat16>(any.tensor, span);
  seen |= view<heed::half>(any.tensor, span);
  return seen | view<const bool>(any.tensor, span);
}

// Forward and backward of any variant. Each tensor owns the memory that its fields claim, so that a sanitizer sees a step
// beyond it.
bool c_call(Bytes bytes) {
  Draws draws(bytes);
  std::size_t variants = 0;
  while (heed_variant_name(variants) != nullptr) ++variants;
  const int batch = draws.below(3), groups = draws.below(3), kv_heads = draws.below(3),
            len_q = draws.below(6), len_kv = draws.below(6), dim = draws.below(6),
            dim_v = draws.below(6);
  enum { kQuery, kKey, kValue, kExtra, kOut, kLse, kBias, kTensors };
  std::array<AnyTensor, kTensors> t, gradients;
  const int heads = kv_heads * groups;
  const std::array<int, 4> shapes[kTensors] = {
      {batch, heads, len_q, dim},       {batch, kv_heads, len_kv, dim},
      {batch, kv_heads, len_kv, dim_v}, {batch, heads, len_q, dim_v},
      {batch, heads, len_q, dim_v},     {batch, heads, len_q, 1},
      {batch, heads, len_q, len_kv}};
  const bool extra = !draws.below(4), lse = draws.below(2), bias = draws.below(4) == 0;
  for (int i = 0; i < kTensors; ++i) draw(draws, t[std::size_t(i)], shapes[i]);
  for (int i = 0; i < kTensors; ++i) draw(draws, gradients[std::size_t(i)], shapes[i]);
  const std::int64_t lengths[] = {draws.number(7), draws.number(7), draws.number(7)};
  const heed_window windows[] = {
      {draws.number(4) - 1, draws.number(4) - 1, draws.number(3), draws.below(3)}};
  const heed_key_range ranges[] = {{draws.number(4), draws.number(6)}};
  const std::int64_t start[] = {0, draws.number(3), draws.number(4), draws.number(4),
                                draws.number(5)},
                     indices[] = {draws.number(3), draws.number(3), draws.number(3),
                                  draws.number(3)};
  heed_mask mask{};
  mask.size = sizeof mask;
  mask.causal = draws.below(2);
  mask.causal_align = draws.below(16) ? draws.below(2) : draws.byte();
  if (!draws.below(4)) mask.windows = windows, mask.window_count = std::size_t(draws.number(2));
  if (!draws.below(4)) mask.key_ranges = ranges, mask.key_range_count = 1;
  if (!draws.below(4))
    mask.key_lengths = lengths, mask.key_length_count = std::size_t(draws.below(4));
  if (!draws.below(4)) {
    mask.list_start = start, mask.list_start_count = std::size_t(draws.below(6));
    mask.list_indices = indices, mask.list_index_count = std::size_t(draws.below(5));
    mask.list_query_block = draws.number(4), mask.list_key_block = draws.number(4);
    mask.list_batch = draws.number(3), mask.list_heads = draws.number(3);
  }
  if (bias) mask.bias = &t[kBias].tensor;
  // A size may be that of a later library, whose fields are read.
  struct {
    heed_call call;
    std::array<std::uint64_t, 640> later;
  } room{};
  heed_call& call = room.call;
  call.size = draws.below(64) ? sizeof call : std::size_t(draws.number(200));
  call.variant =
      draws.below(64) ? heed_variant_name(std::size_t(draws.byte()) % variants) : "no such name";
  call.query = &t[kQuery].tensor, call.key = &t[kKey].tensor, call.value = &t[kValue].tensor;
  if (draws.below(2)) call.mask = &mask;
  if (extra) call.extra = &t[kExtra].tensor;
  const Learnt learnt(call, draws);
  call.parameters = learnt.parameters().data(), call.parameter_count = learnt.parameters().size();
  call.threads = int(draws.number(3));
  call.precision = draws.below(16) ? 0 : draws.below(4);
  call.first_query = draws.below(8) ? 0 : draws.number(9);
  call.dropout = draws.below(8) ? 0 : draws.below(5) / 4.0;
  heed_outputs outputs{};
  outputs.size = sizeof outputs;
  outputs.out = &t[kOut].tensor;
  if (lse) outputs.lse = &t[kLse].tensor;
  heed_saved* saved = nullptr;
  if (!good(heed_forward(&call, &outputs, &saved))) {
    demand(saved == nullptr, "a call that failed left something saved");
    return false;
  }
  heed_outputs from = outputs;
  from.lse = nullptr;
  heed_gradients to{};
  to.size = sizeof to;
  to.query = &gradients[kQuery].tensor, to.key = &gradients[kKey].tensor,
  to.value = &gradients[kValue].tensor;
  const bool both = good(heed_backward(&call, saved, outputs.out, &from, &to));
  heed_saved_free(saved);
  return both;
}

// Words end with a byte 0.
bool command_line(Bytes bytes) {
  std::vector<std::string> words = {"heed_compare", ""};
  for (const std::uint8_t byte : bytes)
    if (byte != 0)
      words.back() += char(byte);
    else
      words.emplace_back();
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  return taken<compare::UsageError>(
      "", [&] { (void)compare::parse_command_line(int(words.size()), arguments.data()); });
}

}  // namespace heed_bytes
