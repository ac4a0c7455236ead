// SPDX-License-Identifier: Apache-2.0
#pragma once

// Weights in safetensors files: heed's own names as visit() and visit_state() give them, and Hugging Face's
// GPT-2.
//
// The header of a GPT-2 file is checked before a tensor is read: a tensor that has no place in the model is refused by
// name. Two kinds of tensors are left out: the causal masks h.<n>.attn.bias and h.<n>.attn.masked_bias, which Hugging
// Face saves beside the weights but computes anew, and lm_head.weight where it equals the embedding byte by byte.
//
// Errors: std::runtime_error, one sentence that begins with the path. A model is filled only when the whole file fits.

#include <heed/io/safetensors.hpp>
#include <heed/io/safetensors_writer.hpp>
#include <heed/models/gpt.hpp>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <type_traits>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

namespace detail {

[[nodiscard]] inline std::string shape_text(const std::vector<Index>& shape) {
  std::string text;
  for (const Index extent : shape) text += (text.empty() ? "" : " x ") + std::to_string(extent);
  return "(" + text + ")";
}

template <class... Parts>
[[noreturn]] void fail_load(const std::filesystem::path& path, const Parts&... parts) {
  throw std::runtime_error(heed::detail::sentence(path.string(), ": ", parts...));
}

// Throws unless the file has the tensor in this shape.
inline void require_tensor(const io::SafetensorsIndex& file, const std::filesystem::path& path,
                           const std::string& name, const std::vector<Index>& shape) {
  if (!file.contains(name)) fail_load(path, "there is no tensor ", name);
  if (file.info(name).shape != shape)
    fail_load(path, name, " has the shape ", shape_text(file.info(name).shape),
              ", the model needs ", shape_text(shape));
}
// The numbers of a tensor of this shape, stored in any floating type. Throws if there is none.
template <class Real>
[[nodiscard]] std::vector<Real> tensor_of(const io::Safetensors& file,
                                          const std::filesystem::path& path,
                                          const std::string& name,
                                          const std::vector<Index>& shape) {
  require_tensor(file, path, name, shape);
  return file.rounded<Real>(name);
}

// Calls f(name, value) for all weights of a layer, and for its state if it has one.
template <class Real, class Layer>
void visit_stored(Layer& layer, const StateVisitor<Real>& f) {
  layer.visit(Visitor<Real>(
      [&](const std::string& name, Param<Real>& value, Param<Real>&) { f(name, value); }));
  if constexpr (requires { layer.visit_state(f); }) layer.visit_state(f);
}

}  // namespace detail

// Adds all weights and the state of `layer`, named `prefix` + name.
template <class Real, class Layer>
void add_weights(io::SafetensorsWriter& writer, Layer& layer, const std::string& prefix = "") {
  detail::visit_stored<Real>(layer, [&](const std::string& name, Param<Real>& value) {
    writer.add(prefix + name, value.shape(),
               std::vector<Real>(value.data(), value.data() + value.size()));
  });
}

// Fills all weights and the state of `layer` from the tensors of these names.
template <class Real, class Layer>
void read_weights(const io::Safetensors& file, const std::filesystem::path& path, Layer& layer,
                  const std::string& prefix = "") {
  std::vector<std::pair<Param<Real>*, std::vector<Real>>> found;
  detail::visit_stored<Real>(layer, [&](const std::string& name, Param<Real>& value) {
    found.emplace_back(&value, detail::tensor_of<Real>(file, path, prefix + name, value.shape()));
  });
  for (const auto& [param, numbers] : found)
    std::copy(numbers.begin(), numbers.end(), param->data());  // cannot throw
}

// A GPT-2 of Hugging Face: sizes as its tensors have them, heads of 64 columns as all of its releases do. Names may start
// with "transformer.", and before it with torch's prefixes for modules: "_orig_mod.", "module.".
class Gpt2File {
 public:
  // check(options) is called with the sizes before a tensor is read, and may refuse the file by
  // throwing. Whether the head is tied is not yet known.
  using Check = std::function<void(const GptOptions&)>;

  explicit Gpt2File(const std::filesystem::path& path, const Check& check = {})
      : path_(path), file_(io::Safetensors::read(path, [&](const io::SafetensorsIndex& head) {
          set_prefix(head);
          options_ = sizes_of(head);
          masks_ = masks_of(options_.depth);
          require_tensors(head);
          if (check) check(options_);
        })) {
    options_.tied = !has_own_head();
  }
  [[nodiscard]] static bool is_gpt2(const io::SafetensorsIndex& file) {
    return find_prefix(file).has_value();
  }

  [[nodiscard]] const io::Safetensors& file() const { return file_; }
  [[nodiscard]] GptOptions options() const { return options_; }

  // Fills a model that was made with options() and whose attention layers have c_attn and c_proj. Weights that GPT-2 does
  // not have, such as those of an op, stay as they are. Throws if the model has no place for a tensor. seen(name, numbers)
  // gets each tensor, by the file's name and in the file's order, before the model is filled; it may throw.
  template <class Real>
  void fill(
      LanguageModel<Real>& model,
      const std::type_identity_t<std::function<void(const std::string&, const std::vector<Real>&)>>&
          seen = {}) const {
    std::vector<std::pair<Param<Real>*, std::vector<Real>>> found;
    std::set<std::string> used;
    model.visit(Visitor<Real>([&](const std::string& name, Param<Real>& value, Param<Real>&) {
      const Source source = source_of(name);
      if (source.name.empty()) return;
      found.emplace_back(&value, read<Real>(source, value.shape(), seen));
      used.insert(source.name);
    }));
    for (const auto& [name, info] : file_.tensors())
      if (!used.contains(name) && !masks_.contains(name) && !(options_.tied && name == head_))
        detail::fail_load(path_, "the model has no place for the tensor ", name);
    for (const auto& [param, numbers] : found)
      std::copy(numbers.begin(), numbers.end(), param->data());
  }

 private:
  struct Source {
    std::string name;
    bool turned = false;  // true for matrices, which Hugging Face's Conv1D stores as (in, out)
  };

  // A tensor of a block: its name without "h.<n>.", and each of its extents as a sum of widths of the model and of the
  // MLP.
  struct BlockTensor {
    const char* name;
    std::vector<std::pair<Index, Index>> extents;  // (w, c) stands for w width + c hidden
  };
  [[nodiscard]] static const std::vector<BlockTensor>& block_tensors() {
    static const std::vector<BlockTensor> all = {{"ln_1.weight", {{1, 0}}},
                                                 {"ln_1.bias", {{1, 0}}},
                                                 {"attn.c_attn.weight", {{1, 0}, {3, 0}}},
                                                 {"attn.c_attn.bias", {{3, 0}}},
                                                 {"attn.c_proj.weight", {{1, 0}, {1, 0}}},
                                                 {"attn.c_proj.bias", {{1, 0}}},
                                                 {"ln_2.weight", {{1, 0}}},
                                                 {"ln_2.bias", {{1, 0}}},
                                                 {"mlp.c_fc.weight", {{1, 0}, {0, 1}}},
                                                 {"mlp.c_fc.bias", {{0, 1}}},
                                                 {"mlp.c_proj.weight", {{0, 1}, {1, 0}}},
                                                 {"mlp.c_proj.bias", {{1, 0}}}};
    return all;
  }

  // The prefix of "wte.weight", and how much of it is before "lm_head.weight", too.
  struct Prefix {
    std::string whole, outer;
  };
  [[nodiscard]] static std::optional<Prefix> find_prefix(const io::SafetensorsIndex& head) {
    constexpr std::string_view table = "wte.weight", wrappers[] = {"_orig_mod.", "module."};
    for (const auto& [name, info] : head.tensors()) {
      if (!name.ends_with(table)) continue;
      const std::string whole = name.substr(0, name.size() - table.size());
      std::string_view rest = whole;
      for (bool more = true; more;) {
        more = false;
        for (const std::string_view wrapper : wrappers)
          if (rest.starts_with(wrapper)) {
            rest.remove_prefix(wrapper.size());
            more = true;
          }
      }
      if (rest.empty() || rest == "transformer.")
        return Prefix{whole, whole.substr(0, whole.size() - rest.size())};
    }
    return {};
  }
  void set_prefix(const io::SafetensorsIndex& head) {
    const std::optional<Prefix> found = find_prefix(head);
    if (!found) detail::fail_load(path_, "the file is not a GPT-2: there is no tensor wte.weight");
    prefix_ = found->whole;
    head_ = found->outer + kHead;
  }

  [[nodiscard]] GptOptions sizes_of(const io::SafetensorsIndex& head) const {
    GptOptions o;
    o.vocabulary = extent(head, "wte.weight", 0);
    o.width = extent(head, "wte.weight", 1);
    o.max_len = extent(head, "wpe.weight", 0);
    o.depth = 0;
    while (head.contains(block_name(o.depth, "ln_1.weight"))) ++o.depth;
    if (o.depth == 0) detail::fail_load(path_, "it has no block h.0");
    if (o.width % 64 != 0)
      detail::fail_load(path_, "its width is ", o.width, ", it must be a multiple of 64");
    o.heads = o.width / 64;
    o.hidden = extent(head, "h.0.mlp.c_fc.weight", 1);
    o.activation = Activation::gelu_tanh;
    return o;
  }
  [[nodiscard]] std::set<std::string> masks_of(Index depth) const {
    std::set<std::string> names;
    for (Index n = 0; n < depth; ++n)
      for (const char* mask : {"attn.bias", "attn.masked_bias"}) names.insert(block_name(n, mask));
    return names;
  }
  // Throws unless the file has every tensor of a GPT-2 of these sizes, and no other.
  void require_tensors(const io::SafetensorsIndex& head) const {
    const GptOptions& o = options_;
    std::map<std::string, std::vector<Index>> needed = {
        {prefix_ + "wte.weight", {o.vocabulary, o.width}},
        {prefix_ + "wpe.weight", {o.max_len, o.width}},
        {prefix_ + "ln_f.weight", {o.width}},
        {prefix_ + "ln_f.bias", {o.width}}};
    for (Index n = 0; n < o.depth; ++n)
      for (const BlockTensor& tensor : block_tensors()) {
        std::vector<Index>& shape = needed[block_name(n, tensor.name)];
        for (const auto& [widths, columns] : tensor.extents)
          shape.push_back(widths * o.width + columns * o.hidden);
      }
    if (head.contains(head_)) needed[head_] = {o.vocabulary, o.width};
    for (const auto& [name, shape] : needed) detail::require_tensor(head, path_, name, shape);
    for (const auto& [name, info] : head.tensors())
      if (!needed.contains(name) && !masks_.contains(name))
        detail::fail_load(path_, "a GPT-2 of ", o.depth, o.depth == 1 ? " block" : " blocks",
                          " has no place for the tensor ", name);
  }
  [[nodiscard]] std::string block_name(Index n, const std::string& part) const {
    return prefix_ + "h." + std::to_string(n) + "." + part;
  }

  // True if the file has a head whose bytes are not those of the embedding.
  [[nodiscard]] bool has_own_head() const {
    if (!file_.contains(head_)) return false;
    if (file_.info(head_).dtype != file_.info(prefix_ + "wte.weight").dtype) return true;
    const auto head = file_.bytes(head_), embedding = file_.bytes(prefix_ + "wte.weight");
    return !std::equal(head.begin(), head.end(), embedding.begin(), embedding.end());
  }

  // GPT-2's name of the tensor that heed calls `name`; empty if GPT-2 has no such tensor.
  [[nodiscard]] Source source_of(const std::string& name) const {
    static const std::map<std::string, std::string> whole = {{"embed.weight", "wte.weight"},
                                                             {"pos_emb.weight", "wpe.weight"},
                                                             {"ln_f.weight", "ln_f.weight"},
                                                             {"ln_f.bias", "ln_f.bias"}};
    static const std::map<std::string, std::string> in_block = {
        {"ln1.weight", "ln_1.weight"},
        {"ln1.bias", "ln_1.bias"},
        {"ln2.weight", "ln_2.weight"},
        {"ln2.bias", "ln_2.bias"},
        {"attn.c_attn.weight", "attn.c_attn.weight"},
        {"attn.c_attn.bias", "attn.c_attn.bias"},
        {"attn.c_proj.weight", "attn.c_proj.weight"},
        {"attn.c_proj.bias", "attn.c_proj.bias"},
        {"mlp.0.weight", "mlp.c_fc.weight"},
        {"mlp.0.bias", "mlp.c_fc.bias"},
        {"mlp.2.weight", "mlp.c_proj.weight"},
        {"mlp.2.bias", "mlp.c_proj.bias"}};
    if (name == kHead) return {head_};
    if (const auto found = whole.find(name); found != whole.end()) return {prefix_ + found->second};
    const std::string start = "blocks.";
    const std::size_t dot = name.find('.', start.size());
    if (!name.starts_with(start) || dot == std::string::npos) return {};
    const std::string part = name.substr(dot + 1);
    const auto found = in_block.find(part);
    if (found == in_block.end()) return {};
    const bool matrix = part.ends_with(".weight") && !part.starts_with("ln");
    return {prefix_ + "h." + name.substr(start.size(), dot - start.size()) + "." + found->second,
            matrix};
  }

  template <class Real, class Seen>
  [[nodiscard]] std::vector<Real> read(const Source& source, std::vector<Index> shape,
                                       const Seen& seen) const {
    if (source.turned) std::swap(shape.at(0), shape.at(1));
    std::vector<Real> stored = detail::tensor_of<Real>(file_, path_, source.name, shape);
    if (seen) seen(source.name, stored);
    if (!source.turned) return stored;
    const Index in = shape[0], out = shape[1];
    std::vector<Real> turned(stored.size());
    for (Index i = 0; i < in; ++i)
      for (Index o = 0; o < out; ++o)
        turned[std::size_t(o * in + i)] = stored[std::size_t(i * out + o)];
    return turned;
  }

  // An extent of a matrix that must not be empty.
  [[nodiscard]] Index extent(const io::SafetensorsIndex& head, const std::string& name,
                             std::size_t axis) const {
    const std::string full = prefix_ + name;
    if (!head.contains(full)) detail::fail_load(path_, "there is no tensor ", full);
    const auto& shape = head.info(full).shape;
    if (shape.size() != 2)
      detail::fail_load(path_, full, " has ", shape.size(), " extents, it must have 2");
    for (const Index one : shape)
      if (one == 0)
        detail::fail_load(path_, full, " has the shape ", detail::shape_text(shape),
                          ", it holds no number");
    return shape[axis];
  }

  static constexpr const char* kHead = "lm_head.weight";  // heed's name, and GPT-2's

  std::filesystem::path path_;
  std::string prefix_, head_;  // set while the file is read
  GptOptions options_;
  std::set<std::string> masks_;
  io::Safetensors file_;
};

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
