// SPDX-License-Identifier: Apache-2.0
#pragma once

// A mask that is a function of positions. It is asked about a vector of pairs at a time, behind one virtual call per tile,
// so that no op is compiled again for it:
//
//   const auto mask = heed::visible<float>([](auto b, auto h, auto i, auto j) { return (j <= i) & (i - j < 128); });
//
//   b, h  batch and head      i  position of the query on the key axis      j  key
//
// i is the query's index plus `offset`, and plus len_kv - len_q with Align::bottom_right, as p in mask.hpp; it may lie
// outside of [0, len_kv). The function returns true or a Seen (simd/positions.hpp). It must depend on nothing but its
// arguments and on captured values that stay as they are: it is asked on any thread, in any order, and about pairs that
// other parts of the mask hide. Numbers per token come in as TokenValues.
//
// Before a call all pairs are asked for once, and tiles that are hidden are then skipped. BlockMask (mask/block_mask.hpp)
// does so once for many calls. The answers serve all batches where the function does not read b,
// and all heads where it does not read h.

#include <heed/mask/classify.hpp>
#include <heed/mask/mask.hpp>
#include <heed/simd/positions.hpp>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

// The number of a batch or head; it notes when the function reads it.
class BatchOrHead {
 public:
  BatchOrHead(Index number, bool& read) : number_(number), read_(&read) {}
  operator Positions() const {
    *read_ = true;
    return number_;
  }

 private:
  Positions number_;
  bool* read_;
};

// Whole numbers per token that a mask's function reads: values(b, at) and values(b, h, at) at a vector of tokens. Throws
// std::invalid_argument for a batch, head or token that has none; since all pairs of a mask are
// asked for before a call, it throws then.
class TokenValues {
 public:
  // values has shape (batch or 1, heads or 1, 1, tokens); the memory stays the caller's.
  explicit TokenValues(const TensorView<const std::int32_t>& values) : values_(values) {
    const Shape& s = values.shape();
    require(s.len == 1, "TokenValues: values have shape ", s, ", len must be 1; dim counts tokens");
    require(!values.has_elements() || values.data() != nullptr,
            "TokenValues: values have a null pointer and shape ", s);
  }
  // One number per batch and token; with batch 1 they serve all batches.
  explicit TokenValues(std::vector<Index> numbers, Index batch = 1) {
    require(batch > 0 && Index(numbers.size()) % batch == 0, "TokenValues: ", numbers.size(),
            " values are no whole number of tokens for ", batch, " batches");
    std::vector<std::int32_t> narrow;
    for (const Index number : numbers) {
      narrow.push_back(std::int32_t(number));
      require(narrow.back() == number, "TokenValues: a value is ", number, ", it must fit 32 bits");
    }
    own_ = std::make_shared<const std::vector<std::int32_t>>(std::move(narrow));
    values_ = {own_->data(), Shape{batch, 1, 1, Index(numbers.size()) / batch}};
  }

  [[nodiscard]] Positions operator()(Positions b, Positions at) const {
    require(values_.shape().heads == 1, "TokenValues: values differ by head, of which there are ",
            values_.shape().heads, "; they are read without one");
    return (*this)(b, 0, at);
  }
  [[nodiscard]] Positions operator()(Positions b, Positions h, Positions at) const {
    const Shape& s = values_.shape();
    const Positions batch = inside(b, s.batch, "batch", s.batch == 1),
                    head = inside(h, s.heads, "head", s.heads == 1),
                    token = inside(at, s.dim, "token", false);
    // All lanes read one row when b and h are those that the function was given.
    if (((batch != batch.lane(0)) | (head != head.lane(0))).bits() == 0)
      return gather(values_.row(batch.lane(0), head.lane(0), 0), token);
    Positions values;
    for (int k = 0; k < Positions::width; ++k)
      values.v[k] = values_.row(batch.v[k], head.v[k], 0)[token.v[k]];
    return values;
  }

 private:
  [[nodiscard]] static Positions inside(Positions at, Index count, const char* what, bool shared) {
    if (shared) return 0;
    const std::uint32_t wrong = ((at < 0) | (at >= count)).bits();
    if (wrong != 0) refuse(at, wrong, count, what);
    return at;
  }
  [[noreturn, gnu::cold]] static void refuse(Positions at, std::uint32_t wrong, Index count,
                                             const char* what) {
    int k = 0;
    while ((wrong >> k & 1) == 0) ++k;
    fail("TokenValues: ", what, " ", at.lane(k), " is read, there are values for [0, ", count, ")");
  }

  TensorView<const std::int32_t> values_;
  std::shared_ptr<const std::vector<std::int32_t>> own_;
};

namespace detail {

template <class F>
class VisiblePairs final : public PairFunction {
 public:
  VisiblePairs(const F& f, Index shift, const Geometry& g) : f_(f), shift_(shift) {
    std::uint64_t word[kRuleWords];
    if (g.batch > 0 && g.heads > 0 && g.len_q > 0 && g.len_kv > 0)
      ask({0, 0, 0, 1, 0, 1}, word, reads_batch_, reads_head_);
  }
  void fill(const PairBlock& at, std::uint64_t* words) const override {
    bool batch, head;  // ask() keeps them in registers; nothing reads them here
    ask(at, words, batch, head);
  }
  [[nodiscard]] bool depends_on_batch() const override { return reads_batch_; }
  [[nodiscard]] bool depends_on_head() const override { return reads_head_; }

 private:
  void ask(const PairBlock& at, std::uint64_t* words, bool& reads_batch, bool& reads_head) const {
    constexpr Index W = Positions::width;
    const BatchOrHead b(at.batch, reads_batch), h(at.head, reads_head);
    const Positions last = at.key + at.keys - 1, lanes = Positions::iota();
    for (Index r = 0; r < at.rows; ++r) {
      const Positions i = at.query + r + shift_;
      for (Index from = 0; from < at.keys; from += 64) {
        const Index count = std::min<Index>(64, at.keys - from);
        std::uint64_t word = 0;
        for (Index j = 0; j < count; j += W) {
          const Positions key = min(Positions(at.key + from + j) + lanes, last);
          word |= std::uint64_t(Seen(f_(b, h, i, key)).bits()) << j;
        }
        words[r * kRuleWords + from / 64] = word & ~std::uint64_t(0) >> (64 - count);
      }
    }
  }

  F f_;
  Index shift_;
  bool reads_batch_ = false, reads_head_ = false;
};

// The sizes that a function requires of a call; -1 where any size will do.
struct AskedSizes {
  const char* name = "the mask";  // in error texts
  Index length = -1;              // length of both axes
  Index lengths = -1;             // count of the function's numbers: 1, or one per batch
  Index tokens = -1;              // most queries and keys that the function knows
};

template <class F>
class VisibleRule final : public AskedRule {
 public:
  VisibleRule(F f, Align align, Index offset, AskedSizes sizes = {})
      : f_(std::move(f)), align_(align), offset_(offset), sizes_(sizes) {}

  [[nodiscard]] std::shared_ptr<const PairFunction> bind(const Geometry& g,
                                                         const char* where) const override {
    const Index last = std::max(g.len_q, g.len_kv);
    require(last < kFarthest, where, ": a function of positions is asked about ", last,
            " tokens, there must be fewer than ", kFarthest);
    require_near(offset_, "a function of positions", where);
    for (const Index len : {g.len_q, g.len_kv})
      require(sizes_.length < 0 || len == sizes_.length, where, ": ", sizes_.name, " is one of ",
              sizes_.length, " tokens, the call has ", len);
    require(sizes_.lengths <= 1 || sizes_.lengths == g.batch, where, ": ", sizes_.name, " has ",
            sizes_.lengths, " lengths, the batch is ", g.batch);
    const Index shift = offset_ + (align_ == Align::bottom_right ? g.len_kv - g.len_q : 0);
    if (sizes_.tokens >= 0) {
      require(g.len_kv <= sizes_.tokens, where, ": ", sizes_.name, " has ", sizes_.tokens,
              " tokens, the call has ", g.len_kv, " keys");
      require(shift >= 0 && g.len_q <= sizes_.tokens - shift, where, ": ", sizes_.name, " has ",
              sizes_.tokens, " tokens, the queries of the call stand at [", shift, ", ",
              shift + g.len_q, ")");
    }
    return std::make_shared<VisiblePairs<F>>(f_, shift, g);
  }
  [[nodiscard]] std::shared_ptr<const PairRule> moved(Index by) const override {
    return std::make_shared<VisibleRule>(
        f_, align_, align_ == Align::top_left ? offset_ + by : offset_, sizes_);
  }
  [[nodiscard]] bool stands_at_first_key() const override {
    return align_ == Align::top_left && offset_ == 0;
  }
  void add_to(Digest& digest) const override {
    digest.add(int(align_));
    for (const Index number : {offset_, sizes_.length, sizes_.lengths, sizes_.tokens})
      digest.add(number);
  }

 private:
  F f_;
  Align align_;
  Index offset_;
  AskedSizes sizes_;
};

// A mask from a function that is made for calls of certain sizes.
template <class F>
[[nodiscard]] std::shared_ptr<const PairRule> visible_rule(F f, Align align, AskedSizes sizes) {
  return std::make_shared<const VisibleRule<F>>(std::move(f), align, 0, sizes);
}

template <class Real>
[[nodiscard]] Mask<Real> mask_of(std::shared_ptr<const PairRule> rule) {
  Mask<Real> mask;
  mask.rules.push_back(std::move(rule));
  return mask;
}

}  // namespace detail

// A query sees the keys for which f(b, h, i, j) is true.
template <class Real, class F>
[[nodiscard]] Mask<Real> visible(F f, Align align = Align::top_left, Index offset = 0) {
  static_assert(
      requires(const F& g, BatchOrHead b, Positions i) { Seen(g(b, b, i, i)); },
      "a mask's function takes batch, head, query and key, as [](auto b, auto h, auto i, auto j), "
      "changes nothing, and returns what a comparison of them gives");
  return detail::mask_of<Real>(
      std::make_shared<const detail::VisibleRule<F>>(std::move(f), align, offset));
}

}  // namespace HEED_ABI
}  // namespace heed
