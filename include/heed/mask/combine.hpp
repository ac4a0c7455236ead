// SPDX-License-Identifier: Apache-2.0
#pragma once

// a | b shows every pair that a or b shows, and !a every pair that a hides. Both take masks made of parts that hide: bands,
// key lengths, documents, boolean masks, functions of positions, block lists, and results of | and !. Parts that change
// scores (bias, slopes, a soft cap) are refused; join them by & afterwards.

#include <heed/mask/bound_mask.hpp>
#include <heed/mask/classify.hpp>
#include <heed/mask/list_pairs.hpp>
#include <heed/mask/mask_stamp.hpp>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// Bands, key lengths, documents and a boolean mask.
template <class Real>
class PartPairs final : public PairFunction {
 public:
  PartPairs(const Mask<Real>& parts, const Geometry& g, const char* where)
      : parts_(parts), bound_(parts_, g, where) {}
  PartPairs(const PartPairs&) = delete;  // bound_ refers to parts_

  void fill(const PairBlock& at, std::uint64_t* words) const override {
    clear_rows(at, words);
    for (Index r = 0; r < at.rows; ++r) {
      std::uint64_t* row = words + r * kRuleWords;
      const Index i = at.query + r;
      const KeyRange seen = bound_.keys_of(at.batch, i);
      const Index from = std::clamp<Index>(seen.begin - at.key, 0, at.keys),
                  to = std::clamp<Index>(seen.end - at.key, from, at.keys);
      set_bits(row, from, to);
      const auto hide = [&](Index j) {
        row[(j - at.key) / 64] &= ~(std::uint64_t(1) << ((j - at.key) % 64));
      };
      bound_.for_keys_of_other_documents(at.batch, i, at.key + from, at.key + to, hide);
      if (!bound_.has_allowed()) continue;
      const bool* allowed = bound_.allowed_row(at.batch, at.head, i);
      for (Index j = at.key + from; j < at.key + to; ++j)
        if (!allowed[j]) hide(j);
    }
  }
  [[nodiscard]] bool depends_on_batch() const override {
    return parts_.key_lengths || parts_.query_documents || parts_.allowed.shape().batch > 1;
  }
  [[nodiscard]] bool depends_on_head() const override { return parts_.allowed.shape().heads > 1; }

 private:
  Mask<Real> parts_;
  BoundMask<Real> bound_;
};

template <class Real>
class PartRule final : public AskedRule {
 public:
  explicit PartRule(Mask<Real> parts) : parts_(std::move(parts)) {}
  [[nodiscard]] std::shared_ptr<const PairFunction> bind(const Geometry& g,
                                                         const char* where) const override {
    return std::make_shared<PartPairs<Real>>(parts_, g, where);
  }
  [[nodiscard]] std::shared_ptr<const PairRule> moved(Index by) const override {
    Mask<Real> parts = parts_;
    for (Band& band : parts.bands)
      if (band.align == Align::top_left) band.offset += by;
    return std::make_shared<PartRule>(std::move(parts));
  }
  [[nodiscard]] bool stands_at_first_key() const override {
    return std::any_of(parts_.bands.begin(), parts_.bands.end(),
                       [](const Band& band) { return band.stands_at_first_key(); });
  }
  void add_to(Digest& digest) const override { MaskStamp(parts_).add_to(digest); }

 private:
  Mask<Real> parts_;
};

// Pairs that all rules show, that any of them shows, or that the one rule hides.
enum class Joint { all, any, none };

class JointPairs final : public PairFunction {
 public:
  JointPairs(Joint joint, std::vector<std::shared_ptr<const PairFunction>> of)
      : joint_(joint), of_(std::move(of)) {}

  void fill(const PairBlock& at, std::uint64_t* words) const override {
    of_[0]->fill(at, words);
    if (joint_ == Joint::none) return turn_round(at, words);
    std::uint64_t other[kRuleWords];
    for (std::size_t n = 1; n < of_.size(); ++n)
      for (Index r = 0; r < at.rows; ++r) {
        PairBlock one = at;
        one.query += r;
        one.rows = 1;
        of_[n]->fill(one, other);
        std::uint64_t* row = words + r * kRuleWords;
        for (Index w = 0; w * 64 < at.keys; ++w)
          row[w] = joint_ == Joint::all ? row[w] & other[w] : row[w] | other[w];
      }
  }
  [[nodiscard]] bool depends_on_batch() const override {
    return std::any_of(of_.begin(), of_.end(), [](const auto& p) { return p->depends_on_batch(); });
  }
  [[nodiscard]] bool depends_on_head() const override {
    return std::any_of(of_.begin(), of_.end(), [](const auto& p) { return p->depends_on_head(); });
  }

 private:
  static void turn_round(const PairBlock& at, std::uint64_t* words) {
    std::uint64_t keys[kRuleWords] = {};
    set_bits(keys, 0, at.keys);
    for (Index r = 0; r < at.rows; ++r)
      for (Index w = 0; w * 64 < at.keys; ++w) words[r * kRuleWords + w] ^= keys[w];
  }

  Joint joint_;
  std::vector<std::shared_ptr<const PairFunction>> of_;
};

class JointRule final : public AskedRule {
 public:
  JointRule(Joint joint, std::vector<std::shared_ptr<const PairRule>> of)
      : joint_(joint), of_(std::move(of)) {}

  [[nodiscard]] std::shared_ptr<const PairFunction> bind(const Geometry& g,
                                                         const char* where) const override {
    std::vector<std::shared_ptr<const PairFunction>> bound;
    for (const auto& rule : of_) bound.push_back(rule->bind(g, where));
    return std::make_shared<JointPairs>(joint_, std::move(bound));
  }
  [[nodiscard]] std::shared_ptr<const PairRule> moved(Index by) const override {
    std::vector<std::shared_ptr<const PairRule>> all;
    for (const auto& rule : of_) all.push_back(rule->moved(by));
    return std::make_shared<JointRule>(joint_, std::move(all));
  }
  [[nodiscard]] bool stands_at_first_key() const override {
    return std::any_of(of_.begin(), of_.end(),
                       [](const auto& rule) { return rule->stands_at_first_key(); });
  }
  void add_to(Digest& digest) const override {
    digest.add(int(joint_));
    digest.add(of_.size());
    for (const auto& rule : of_) rule->add_to(digest);
  }

 private:
  Joint joint_;
  std::vector<std::shared_ptr<const PairRule>> of_;
};

// All parts of a mask as one rule; `of` names the mask in the error that refuses parts that change scores.
template <class Real>
[[nodiscard]] std::shared_ptr<const PairRule> rule_of(const Mask<Real>& mask, const char* of) {
  const char* adds = mask.bias.given()          ? "a bias"
                     : mask.slopes              ? "slopes"
                     : mask.soft_cap != Real(0) ? "a soft cap"
                                                : nullptr;
  require(adds == nullptr, "Mask: ", of, " has ", adds == nullptr ? "" : adds,
          ", it may only hide; join what adds to scores by & afterwards");
  auto rules = mask.rules;
  Mask<Real> parts = mask;
  parts.rules.clear();
  if (rules.empty() || !parts.bands.empty() || !parts.key_ranges.empty() || parts.key_lengths ||
      parts.allowed.given() || parts.query_documents || parts.key_documents)
    rules.insert(rules.begin(), std::make_shared<PartRule<Real>>(std::move(parts)));
  if (rules.size() == 1) return rules[0];
  return std::make_shared<JointRule>(Joint::all, std::move(rules));
}

template <class Real>
[[nodiscard]] Mask<Real> joint_mask(Joint joint, std::vector<std::shared_ptr<const PairRule>> of) {
  Mask<Real> mask;
  mask.rules.push_back(std::make_shared<JointRule>(joint, std::move(of)));
  return mask;
}

}  // namespace detail

template <class Real>
[[nodiscard]] Mask<Real> operator|(const Mask<Real>& a, const Mask<Real>& b) {
  return detail::joint_mask<Real>(detail::Joint::any, {detail::rule_of(a, "the left side of |"),
                                                       detail::rule_of(b, "the right side of |")});
}
template <class Real>
[[nodiscard]] Mask<Real> operator!(const Mask<Real>& a) {
  return detail::joint_mask<Real>(detail::Joint::none, {detail::rule_of(a, "the mask behind !")});
}

}  // namespace HEED_ABI
}  // namespace heed
