// SPDX-License-Identifier: Apache-2.0
#pragma once

// One golden operator case (golden/FORMAT.md) as a problem for the reference and as inputs for the
// engine, and the measure by which results are compared with it.

#include <heed/io/safetensors.hpp>
#include <heed/mask/block_mask.hpp>
#include <heed/reference/rows.hpp>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace heed_test {

using heed::Index;

// The cases of a folder whose file name starts with `prefix`, sorted.
inline std::vector<std::filesystem::path> golden_files(const std::filesystem::path& folder,
                                                       const std::string& prefix = "") {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::filesystem::path& path = entry.path();
    if (path.extension() == ".safetensors" && path.filename().string().rfind(prefix, 0) == 0)
      files.push_back(path);
  }
  std::sort(files.begin(), files.end());
  return files;
}

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
  explicit GoldenCase(const std::filesystem::path& path)
      : path_(path.string()), file_(heed::io::Safetensors::read(path)) {
    for (const auto& entry : file_.tensors())
      tensors_.emplace(entry.first, file_.values<double>(entry.first));
  }

  const std::string& path() const { return path_; }
  const std::string& name() const { return text("case"); }
  const std::string& variant() const { return text("variant"); }
  // Modules and models have neither q nor a mask of their own.
  bool is_operator() const { return has("q") && has("k") && has("v") && has("dout"); }

  // Metadata.
  bool has_text(const std::string& key) const { return file_.metadata().count(key) > 0; }
  const std::string& text(const std::string& key) const {
    const auto found = file_.metadata().find(key);
    heed::require(found != file_.metadata().end(), path_, ": the metadata has no ", key);
    return found->second;
  }
  double number(const std::string& key) const {
    const std::string& value = text(key);
    char* end = nullptr;
    const double result = std::strtod(value.c_str(), &end);
    heed::require(!value.empty() && *end == '\0', path_, ": metadata ", key, " is \"", value,
                  "\", it must be a number");
    return result;
  }
  Index integer(const std::string& key) const {
    const double value = number(key);
    heed::require(value == std::floor(value), path_, ": metadata ", key, " is ", value,
                  ", it must be whole");
    return Index(value);
  }
  bool flag(const std::string& key) const { return has_text(key) && integer(key) != 0; }

  // The floor for `deviation` of dq and dk. Logits of 1300 leave weights that are nearly 0 or 1,
  // and gradients of 1e-4 that are differences of terms above 1.
  double gradient_floor() const {
    return name().find("huge_logits") != std::string::npos ? 1.0 : 1e-12;
  }

  // Tensors.
  bool has(const std::string& tensor) const { return tensors_.count(tensor) > 0; }
  const std::map<std::string, std::vector<double>>& tensors() const { return tensors_; }
  const std::vector<double>& tensor(const std::string& tensor) const {
    const auto found = tensors_.find(tensor);
    heed::require(found != tensors_.end(), path_, ": there is no tensor ", tensor);
    return found->second;
  }
  const std::vector<Index>& extents(const std::string& tensor) const {
    return file_.info(tensor).shape;
  }
  heed::Shape shape(const std::string& tensor) const {
    const std::vector<Index>& e = extents(tensor);
    heed::require(e.size() == 4, path_, ": ", tensor, " has ", e.size(),
                  " extents, it must have 4");
    return {e[0], e[1], e[2], e[3]};
  }
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

  heed::Geometry geometry() const {
    const heed::Shape q = shape("q"), k = shape("k"), v = shape("v"), out = shape("dout");
    heed::Geometry g{q.batch, out.heads, q.heads, k.heads, q.len, k.len, q.dim, v.dim};
    if (has_text("first_query")) g.first_query = integer("first_query");
    require_equal("B", g.batch);
    require_equal("H", g.heads);
    require_equal("Hkv", g.kv_heads);
    require_equal("Tq", g.len_q);
    require_equal("Tk", g.len_kv);
    require_equal("d", g.dim_qk);
    require_equal("dv", g.dim_v);
    return g;
  }

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
  heed::Align align() const {
    const std::string& value = text("align");
    heed::require(value == "tl" || value == "br", path_, ": metadata align is \"", value,
                  "\", it must be tl or br");
    return value == "tl" ? heed::Align::top_left : heed::Align::bottom_right;
  }

  const bool* allowed() const {
    if (allowed_ == nullptr) {
      const std::vector<double>& numbers = tensor("mask");
      allowed_ = std::shared_ptr<bool[]>(new bool[std::max<std::size_t>(1, numbers.size())]);
      std::transform(numbers.begin(), numbers.end(), allowed_.get(),
                     [](double x) { return x != 0; });
    }
    return allowed_.get();
  }

  void require_equal(const char* key, Index extent) const {
    if (has_text(key))
      heed::require(integer(key) == extent, path_, ": metadata ", key, " is ", integer(key),
                    ", the tensors say ", extent);
  }

  std::string path_;
  heed::io::Safetensors file_;
  std::map<std::string, std::vector<double>> tensors_;
  mutable std::shared_ptr<bool[]> allowed_;
  std::shared_ptr<const heed::BlockLists> lists_;
};

}  // namespace heed_test
