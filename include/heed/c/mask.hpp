// SPDX-License-Identifier: Apache-2.0
#pragma once

// Makes a Mask from a struct heed_mask.

#include <heed/c/lists.hpp>
#include <heed/c/structs.hpp>
#include <heed/c/tensors.hpp>
#include <heed/mask/block_lists.hpp>
#include <heed/mask/classify.hpp>
#include <heed/mask/combine.hpp>
#include <heed/mask/mask.hpp>

#include <memory>
#include <string>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace c {

// A caller's function of positions.
class AskedPairs final : public PairFunction {
 public:
  AskedPairs(heed_visible visible, void* context, Index shift)
      : visible_(visible), context_(context), shift_(shift) {}
  void fill(const PairBlock& at, std::uint64_t* words) const override {
    detail::clear_rows(at, words);
    for (Index r = 0; r < at.rows; ++r)
      for (Index j = 0; j < at.keys; ++j)
        if (ask(at.batch, at.head, at.query + r + shift_, at.key + j))
          detail::set_bits(words + r * kRuleWords, j, j + 1);
  }
  // The library cannot tell what the caller's function reads.
  [[nodiscard]] bool depends_on_batch() const override { return true; }
  [[nodiscard]] bool depends_on_head() const override { return true; }

 private:
  [[nodiscard]] bool ask(Index b, Index h, Index i, Index j) const {
    const int answer = visible_(context_, b, h, i, j);
    require(answer >= 0, "the mask's function answered ", answer, ", which ends the call");
    return answer != 0;
  }

  heed_visible visible_;
  void* context_;
  Index shift_;
};

class AskedFunction final : public detail::AskedRule {
 public:
  AskedFunction(heed_visible visible, void* context, Align align, Index offset)
      : visible_(visible), context_(context), align_(align), offset_(offset) {}
  [[nodiscard]] std::shared_ptr<const PairFunction> bind(const Geometry& g,
                                                         const char* where) const override {
    detail::require_near(offset_, "the mask's function", where);
    const Index shift = offset_ + (align_ == Align::bottom_right ? g.len_kv - g.len_q : 0);
    return std::make_shared<AskedPairs>(visible_, context_, shift);
  }
  [[nodiscard]] std::shared_ptr<const PairRule> moved(Index by) const override {
    return std::make_shared<AskedFunction>(visible_, context_, align_,
                                           align_ == Align::top_left ? offset_ + by : offset_);
  }
  [[nodiscard]] bool stands_at_first_key() const override {
    return align_ == Align::top_left && offset_ == 0;
  }
  void add_to(Digest& digest) const override {
    digest.add(int(align_));
    digest.add(offset_);
  }

 private:
  heed_visible visible_;
  void* context_;
  Align align_;
  Index offset_;
};

// The boolean mask as a view. uint8 is read as bool, so that each byte must be 0 or 1.
[[nodiscard]] inline TensorView<const bool> allowed_view(const DLTensor& tensor,
                                                         const char* where) {
  DLTensor as_bool = tensor;
  if (has_dtype(tensor, kDLUInt, 8)) as_bool.dtype.code = detail::kDlpackBool;
  const std::string who = std::string(where) + ": the boolean mask";
  require(has_dtype(as_bool, detail::kDlpackBool, 8), who, " has dtype ",
          detail::dtype_text(tensor.dtype), ", it must be bool or uint8");
  const auto view = detail::view_dlpack_as<const bool>(as_bool, who);
  if (as_bool.dtype.code == tensor.dtype.code || !view.has_elements()) return view;
  const auto* bytes = reinterpret_cast<const unsigned char*>(view.data());
  const Shape& s = view.shape();
  const Strides& by = view.strides();
  // Rows that broadcasting repeats are read once.
  const Index batches = by.batch == 0 ? 1 : s.batch, heads = by.head == 0 ? 1 : s.heads,
              rows = by.row == 0 ? 1 : s.len;
  for (Index b = 0; b < batches; ++b)
    for (Index h = 0; h < heads; ++h)
      for (Index i = 0; i < rows; ++i)
        for (Index j = 0; j < s.dim; ++j) {
          const int byte = bytes[b * by.batch + h * by.head + i * by.row + j];
          require(byte <= 1, who, " holds ", byte, " at (", b, ",", h, ",", i, ",", j,
                  "), it must hold 0 and 1");
        }
  return view;
}

// The most entries of a mask's lists, by the sizes of its call.
struct MaskLimits {
  ListLimit key_lengths, query_documents, key_documents, alibi, list_start, list_indices;
};

// Throws if an align or offset is given for a part that the mask does not have.
inline void require_part(bool given, int align, std::int64_t offset, const char* name,
                         const char* where) {
  require(given || (align == heed_top_left && offset == 0), where, ": the mask has ", name,
          "_align ", align, " and ", name, "_offset ", offset, ", but no ", name);
}

[[nodiscard]] inline BlockLists lists_of(const heed_mask& from, const MaskLimits& limits,
                                         const char* where) {
  const auto or_one = [](std::int64_t number) -> Index { return number == 0 ? 1 : number; };
  BlockLists lists{or_one(from.list_query_block), or_one(from.list_key_block), {}, {},
                   or_one(from.list_batch),       or_one(from.list_heads)};
  const auto copy = [&](const std::int64_t* list, std::size_t count, const char* name,
                        const ListLimit& limit) {
    return copy_of_list<Index>(list, count, name, limit, where).value_or(std::vector<Index>());
  };
  lists.start = copy(from.list_start, from.list_start_count, "list_start", limits.list_start);
  lists.indices =
      copy(from.list_indices, from.list_index_count, "list_indices", limits.list_indices);
  return lists;
}

template <class Real>
[[nodiscard]] Mask<Real> mask_of(const heed_mask* given, const MaskLimits& limits,
                                 const char* where) {
  Mask<Real> mask;
  if (given == nullptr) return mask;
  const heed_mask from = adopt(given, "the mask", where);
  require_part(from.causal != 0, from.causal_align, from.causal_offset, "causal", where);
  if (from.causal != 0)
    mask = mask & causal<Real>(align_of(from.causal_align, "the mask's causal_align", where),
                               Index(from.causal_offset));
  require_list(from.windows, from.window_count, "windows", kAnyList, where);
  for (std::size_t n = 0; n < from.window_count; ++n) {
    const heed_window& w = from.windows[n];
    mask.bands.push_back(detail::band_of_window(
        Index(w.left), Index(w.right), align_of(w.align, "the align of a window", where),
        Index(w.offset), std::string(where) + ": a window's"));
  }
  require_list(from.key_ranges, from.key_range_count, "key_ranges", kAnyList, where);
  for (std::size_t n = 0; n < from.key_range_count; ++n)
    mask = mask & key_range<Real>(Index(from.key_ranges[n].begin), Index(from.key_ranges[n].end));
  mask.key_lengths = copy_of_list<Index>(from.key_lengths, from.key_length_count, "key_lengths",
                                         limits.key_lengths, where);
  if (from.allowed != nullptr) mask.allowed = allowed_view(*from.allowed, where);
  if (from.bias != nullptr)
    mask.bias = detail::view_dlpack_as<const Real>(*from.bias, std::string(where) + ": the bias");
  mask.query_documents = copy_of_list<Index>(from.query_documents, from.query_document_count,
                                             "query_documents", limits.query_documents, where);
  mask.key_documents = copy_of_list<Index>(from.key_documents, from.key_document_count,
                                           "key_documents", limits.key_documents, where);
  require_part(from.alibi != nullptr, from.alibi_align, from.alibi_offset, "alibi", where);
  mask.slope_align = align_of(from.alibi_align, "the mask's alibi_align", where);
  mask.slope_offset = Index(from.alibi_offset);
  mask.slopes = copy_of_list<Real>(from.alibi, from.alibi_count, "alibi", limits.alibi, where);
  mask.soft_cap = Real(from.soft_cap);
  require(mask.soft_cap != Real(0) || from.soft_cap == 0, where, ": soft_cap is ", from.soft_cap,
          ", too small for the numbers of this call");
  require_part(from.visible != nullptr, from.visible_align, from.visible_offset, "visible", where);
  const Align visible = align_of(from.visible_align, "the mask's visible_align", where);
  if (from.visible != nullptr)
    mask.rules.push_back(std::make_shared<AskedFunction>(from.visible, from.visible_context,
                                                         visible, Index(from.visible_offset)));
  const bool sizes = from.list_query_block != 0 || from.list_key_block != 0 ||
                     from.list_batch != 0 || from.list_heads != 0;
  if (sizes || from.list_start != nullptr || from.list_start_count > 0 ||
      from.list_indices != nullptr || from.list_index_count > 0)
    mask = mask & block_lists<Real>(lists_of(from, limits, where), where);
  return mask;
}

}  // namespace c
}  // namespace HEED_ABI
}  // namespace heed
