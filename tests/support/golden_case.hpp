// SPDX-License-Identifier: Apache-2.0
#pragma once

// One golden operator case (golden/FORMAT.md) as a problem for the reference and as inputs for the
// engine, and the measure by which results are compared with it. golden_case.cpp reads the files, once for all tests.

#include <heed/mask/block_mask.hpp>
#include <heed/reference/rows.hpp>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace heed_test {

using heed::Index;

// The cases of a folder whose file name starts with `prefix`, sorted.
std::vector<std::filesystem::path> golden_files(const std::filesystem::path& folder,
                                                const std::string& prefix = "");

// Largest |got - want| relative to the largest finite |want|, absolute where that is below `floor`.
// Infinite if only one side is NaN, infinities differ, or the sizes do.
template <class A, class B>
double deviation(const std::vector<A>& got, const std::vector<B>& want, double floor = 1e-12) {
  constexpr double never = std::numeric_limits<double>::infinity();
  if (got.size() != want.size()) return never;
  double worst = 0, largest = 0;
  for (std::size_t n = 0; n < got.size(); ++n) {
    const double a = double(got[n]), b = double(want[n]);
    if (std::isfinite(b)) largest = std::max(largest, std::abs(b));
    if (std::isfinite(a) && std::isfinite(b))
      worst = std::max(worst, std::abs(a - b));
    else if (!(a == b || (std::isnan(a) && std::isnan(b))))
      return never;
  }
  return largest < floor ? worst : worst / largest;
}

class GoldenCase {
 public:
  // Every sentence of an error starts with the file name.
  explicit GoldenCase(const std::filesystem::path& path);

  const std::string& path() const { return path_; }
  const std::string& name() const { return text("case"); }
  const std::string& variant() const { return text("variant"); }
  // Modules and models have neither q nor a mask of their own.
  bool is_operator() const { return has("q") && has("k") && has("v") && has("dout"); }

  // Metadata.
  bool has_text(const std::string& key) const { return metadata_.count(key) > 0; }
  const std::string& text(const std::string& key) const;
  double number(const std::string& key) const;
  Index integer(const std::string& key) const;
  bool flag(const std::string& key) const { return has_text(key) && integer(key) != 0; }

  // The floor for `deviation` of dq and dk. Logits of 1300 leave weights that are nearly 0 or 1,
  // and gradients of 1e-4 that are differences of terms above 1.
  double gradient_floor() const {
    return name().find("huge_logits") != std::string::npos ? 1.0 : 1e-12;
  }

  // Tensors.
  bool has(const std::string& tensor) const { return tensors_.count(tensor) > 0; }
  const std::map<std::string, std::vector<double>>& tensors() const { return tensors_; }
  const std::vector<double>& tensor(const std::string& tensor) const;
  const std::vector<Index>& extents(const std::string& tensor) const;
  heed::Shape shape(const std::string& tensor) const;
  // Rounded to T.
  template <class T>
  std::vector<T> rounded(const std::string& tensor) const {
    std::vector<T> numbers;
    for (const double x : this->tensor(tensor)) numbers.push_back(T(x));
    return numbers;
  }
  template <class T>
  heed::Param<T> param(const std::string& tensor) const {
    return heed::Param<T>(extents(tensor), rounded<T>(tensor));
  }
  // The tensor, or an empty vector.
  template <class T>
  std::vector<T> rounded_if_any(const std::string& tensor) const {
    return has(tensor) ? rounded<T>(tensor) : std::vector<T>();
  }

  heed::Geometry geometry() const;

  // Band, key lengths and boolean mask of the case. The bias, if the case has one, is a view of
  // `bias_values`; the boolean mask is a view of memory that copies of this case share.
  template <class T>
  heed::Mask<T> mask(const std::vector<T>& bias_values = {}) const {
    heed::Mask<T> mask;
    const Index left = integer("left"), right = integer("right");
    if (left >= 0 || right >= 0) mask.bands.push_back({left, right, align(), 0});
    if (has("lengths")) {
      const std::vector<double> lengths = tensor("lengths");
      mask.key_lengths.emplace(lengths.begin(), lengths.end());
    }
    if (has("mask")) mask.allowed = {allowed(), shape("mask")};
    if (lists_) mask = mask & heed::block_lists<T>(*lists_);
    if (!bias_values.empty()) mask.bias = {bias_values.data(), shape("bias")};
    return mask;
  }

  // The case in which each query sees those keys alone that its list holds.
  [[nodiscard]] GoldenCase choosing(const heed::BlockLists& lists) const {
    GoldenCase chosen = *this;
    chosen.lists_ = std::make_shared<const heed::BlockLists>(lists);
    return chosen;
  }

  // The case as the reference reads it, rounded to T first. The intent "i" is its extra input. Must not outlive the case.
  template <class T = double>
  heed::reference::Problem<T> problem() const {
    heed::reference::Problem<T> problem;
    problem.geometry = geometry();
    problem.query = rounded<T>("q");
    problem.key = rounded<T>("k");
    problem.value = rounded<T>("v");
    problem.extra = rounded_if_any<T>("i");
    problem.mask = mask<double>();
    problem.bias = rounded_if_any<T>("bias");
    if (has("bias")) problem.bias_shape = shape("bias");
    problem.scale = number("scale");
    return problem;
  }

 private:
  heed::Align align() const;
  const bool* allowed() const;
  void require_equal(const char* key, Index extent) const;

  std::string path_;
  std::map<std::string, std::string> metadata_;
  std::map<std::string, std::vector<double>> tensors_;
  std::map<std::string, std::vector<Index>> extents_;
  mutable std::shared_ptr<bool[]> allowed_;
  std::shared_ptr<const heed::BlockLists> lists_;
};

}  // namespace heed_test
