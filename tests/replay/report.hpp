// SPDX-License-Identifier: Apache-2.0
#pragma once

// The results of replaying one case: the worst error of each kind, and its place.

#include "golden_case.hpp"

#include <string>
#include <vector>

namespace heed_test {

// One tensor's comparison: error over the allowed error.
struct Finding {
  std::string where = "nothing";
  double error = 0, share = 0;
};

class Report {
 public:
  // double: |got - want| <= 1e-12 of the largest |want|, absolute where the tensor is zero. `terms`
  // is the size of the terms that cancelled in `want`: 16 roundings of it are allowed in addition.
  template <class T>
  void exact(const std::string& name, const std::vector<T>& got, const std::vector<double>& want,
             double terms = 0) {
    const double eps = std::numeric_limits<double>::epsilon();
    const double allowed = 1e-12 * std::max(largest(want), floor_) + 16 * eps * terms;
    note(exact_, name, got, want, std::vector<double>(want.size(), allowed));
  }
  // double: |got - want| <= allowed.
  template <class T>
  void near(const std::string& name, const std::vector<T>& got, const std::vector<double>& want,
            double allowed) {
    note(exact_, name, got, want, std::vector<double>(want.size(), allowed));
  }
  // Numbers that are decisions: equal.
  template <class T>
  void equal(const std::string& name, const std::vector<T>& got, const std::vector<double>& want) {
    note(exact_, name, got, want, std::vector<double>(want.size(), 0.0));
  }
  // float: |got - want| <= allowed, element by element.
  template <class T>
  void rounded(const std::string& name, const std::vector<T>& got, const std::vector<double>& want,
               const std::vector<double>& allowed) {
    note(float_, name, got, want, allowed);
  }
  void fail(const std::string& why) { failures_.push_back(why); }

  [[nodiscard]] bool passed() const { return failures_.empty(); }
  [[nodiscard]] const Finding& worst_exact() const { return exact_; }
  [[nodiscard]] const Finding& worst_float() const { return float_; }
  [[nodiscard]] const std::vector<std::string>& failures() const { return failures_; }

  [[nodiscard]] static double largest(const std::vector<double>& x) {
    double top = 0;
    for (const double v : x)
      if (std::isfinite(v)) top = std::max(top, std::abs(v));
    return top;
  }

 private:
  // A tensor that is zero in exact arithmetic holds rounding noise of the numbers from which it is made.
  static constexpr double floor_ = 1e-2;

  template <class T>
  void note(Finding& worst, const std::string& name, const std::vector<T>& got,
            const std::vector<double>& want, const std::vector<double>& allowed) {
    if (got.size() != want.size())
      return fail(name + " has " + std::to_string(got.size()) + " numbers, the case has " +
                  std::to_string(want.size()));
    Finding here;
    for (std::size_t i = 0; i < want.size(); ++i) {
      const double a = double(got[i]), b = want[i];
      const bool both = std::isfinite(a) && std::isfinite(b);
      const bool same = a == b || (std::isnan(a) && std::isnan(b));
      const double error = both ? std::abs(a - b) : same ? 0.0 : HUGE_VAL;
      const double share = error == 0 ? 0 : allowed[i] > 0 ? error / allowed[i] : HUGE_VAL;
      if (share > here.share) here = {name + "[" + std::to_string(i) + "]", error, share};
    }
    if (here.share > worst.share) worst = here;
    if (here.share > 1) {
      std::ostringstream text;
      text << here.where << ": error " << here.error << " is " << here.share
           << " times what is allowed";
      fail(text.str());
    }
  }

  Finding exact_, float_;
  std::vector<std::string> failures_;
};

}  // namespace heed_test
