// SPDX-License-Identifier: Apache-2.0
#pragma once

// Does a token see the future? Changes one token of one sequence at a time, in several ways, runs
// the layer or model again, and asks that every output before it, and every output of the other
// sequences, is the same in its last bit.
//
//   const auto run = [&](const std::vector<float>& x) { return layer(x); };
//   const CausalityReport report = audit_causality(run, inputs, len);
//   if (!report.causal) std::puts(report.text().c_str());
//
// Tokens of a floating-point type become 1e30, -1e30, NaN, +infinity and random numbers in all
// their columns: a leak that is multiplied by 0 shows under NaN, one behind a saturated gate under
// random numbers. Tokens of an integer type (ids) become other ids below options.vocabulary.
//
// Shapes  inputs (batch, len, width); run(inputs) returns (batch, len, out_width), dense, in any
//         container of float, double or integers with data() and size().
// Bounds  a leak is found when some change carries it into an output; `effective` says how many of
//         the changes had an effect where they may have one.
// Errors  std::invalid_argument when sizes do not divide, an id is not below vocabulary, or run
//         returns a different number of outputs than before.
// Cost    2 + batch * tokens * 5 runs; 2 instead of 5 for ids.

#include <heed/core/error.hpp>
#include <heed/core/random.hpp>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <limits>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

struct CausalityOptions {
  Index batch = 1;
  Index vocabulary = 0;               // ids: tokens become other numbers in [0, vocabulary)
  Index max_tokens = 0;               // per sequence; 0: all; otherwise this many, evenly spread
  bool check_other_sequences = true;  // a change may not reach another sequence at all
  std::uint64_t seed = 20240607;
};

// The first leak that was found, and how much was looked at.
struct CausalityReport {
  bool causal = true;
  Index runs = 0;       // changes tried
  Index effective = 0;  // changes that reached an output which they may change
  Index leaks = 0;      // outputs, over all runs, that changed and may not
  // The first of them: what became of the token ("nothing" when run is not the same twice), which
  // token that was, and the output that noticed.
  std::string change;
  Index batch = -1, token = -1;
  Index out_batch = -1, position = -1, column = -1;
  double before = 0, after = 0;

  // One line.
  [[nodiscard]] std::string text() const {
    std::ostringstream line;
    line.precision(17);
    if (causal) {
      line << "causal: " << runs << " changes, " << effective << " with an effect, no leak";
      return line.str();
    }
    if (token < 0)
      line << "not reproducible: run returned two results for the same input";
    else
      line << "not causal: token " << token << " of sequence " << batch << " set to " << change;
    line << "; output (" << out_batch << ", " << position << ", " << column << ") was " << before
         << " and became " << after << "; " << leaks << " leaks in " << runs << " changes";
    return line.str();
  }
};

namespace detail {

// Ways to change a token. An id never becomes itself.
template <class Real>
struct TokenChanges {
  static constexpr int count = std::integral<Real> ? 2 : 5;

  [[nodiscard]] static const char* name(int change) {
    if constexpr (std::integral<Real>) return change == 0 ? "the next id" : "another id";
    static constexpr const char* names[] = {"1e30", "-1e30", "NaN", "+infinity", "random numbers"};
    return names[change];
  }

  static void apply(int change, Real* token, Index width, Index vocabulary,
                    RandomSequence& random) {
    for (Index c = 0; c < width; ++c) token[c] = changed(change, token[c], vocabulary, random);
  }

 private:
  [[nodiscard]] static Real changed(int change, Real old, Index vocabulary,
                                    RandomSequence& random) {
    if constexpr (std::integral<Real>) {
      const Index step = change == 0 ? 1 : 1 + random.below(vocabulary - 1);
      return Real((Index(old) + step) % vocabulary);
    } else {
      switch (change) {
        case 0: return Real(1e30);
        case 1: return Real(-1e30);
        case 2: return std::numeric_limits<Real>::quiet_NaN();
        case 3: return std::numeric_limits<Real>::infinity();
        default: return Real(4 * random.uniform() - 2);
      }
    }
  }
};

template <class Number>
[[nodiscard]] bool same_bits(const Number& a, const Number& b) {
  return std::memcmp(&a, &b, sizeof(Number)) == 0;
}

// Compares the outputs of a run with those of the first one.
template <class Number>
class OutputWatch {
 public:
  using Out = std::vector<Number>;

  OutputWatch(Out before, Index len, const CausalityOptions& options)
      : before_(std::move(before)),
        len_(len),
        width_(Index(before_.size()) / std::max<Index>(1, options.batch * len)),
        options_(options) {
    require(options.batch * len * width_ == Index(before_.size()), "audit_causality: run returned ",
            before_.size(), " numbers, they do not divide into ", options.batch, " x ", len,
            " rows");
  }

  // Token -1: nothing was changed, so no output may change.
  void compare(const Out& after, Index batch, Index token, const char* change,
               CausalityReport& report) const {
    require(after.size() == before_.size(), "audit_causality: run returned ", after.size(),
            " numbers, and ", before_.size(), " before");
    bool effective = false;
    for (Index n = 0; n < Index(before_.size()); ++n) {
      const Number a = before_[std::size_t(n)], b = after[std::size_t(n)];
      if (same_bits(a, b)) continue;
      const Index out_batch = n / (len_ * width_), position = n / width_ % len_;
      if (may_change(batch, token, out_batch, position))
        effective = true;
      else if (report.leaks++ == 0)
        report = {false, report.runs, report.effective, 1,          change,    batch,
                  token, out_batch,   position,         n % width_, double(a), double(b)};
    }
    if (effective) ++report.effective;
  }

 private:
  [[nodiscard]] bool may_change(Index batch, Index token, Index out_batch, Index position) const {
    if (token < 0 || position < token) return false;
    return out_batch == batch || !options_.check_other_sequences;
  }

  Out before_;
  Index len_, width_;
  const CausalityOptions& options_;
};

template <class Real>
void require_auditable(const std::vector<Real>& inputs, Index len,
                       const CausalityOptions& options) {
  require(len >= 0 && options.batch >= 0, "audit_causality: len is ", len, " and batch is ",
          options.batch, ", neither may be negative");
  const Index rows = options.batch * len;
  require(rows == 0 ? inputs.empty() : Index(inputs.size()) % rows == 0,
          "audit_causality: inputs has ", inputs.size(), " numbers, they do not divide into ",
          options.batch, " x ", len, " tokens");
  require(options.max_tokens >= 0, "audit_causality: max_tokens is ", options.max_tokens,
          ", it must be at least 0");
  if constexpr (std::integral<Real>) {
    require(options.vocabulary >= 2, "audit_causality: vocabulary is ", options.vocabulary,
            ", ids need at least 2");
    for (const Real id : inputs)
      require(Index(id) >= 0 && Index(id) < options.vocabulary, "audit_causality: an id is ",
              Index(id), ", it must lie in [0, ", options.vocabulary, ")");
  }
}

}  // namespace detail

// Changes every token of `inputs` in turn and reports whether an output of an earlier token, or of
// another sequence, changed.
template <class Real, class Run>
requires std::same_as<Real, float> || std::same_as<Real, double> || std::integral<Real>
[[nodiscard]] CausalityReport audit_causality(Run&& run, const std::vector<Real>& inputs, Index len,
                                              const CausalityOptions& options = {}) {
  using Changes = detail::TokenChanges<Real>;
  using Number = std::remove_cvref_t<decltype(*run(inputs).data())>;
  static_assert(
      std::integral<Number> || std::same_as<Number, float> || std::same_as<Number, double>,
      "heed: audit_causality compares float, double or integers bit by bit");
  detail::require_auditable(inputs, len, options);
  const Index width = Index(inputs.size()) / std::max<Index>(1, options.batch * len);
  const Index tokens = options.max_tokens == 0 ? len : std::min(len, options.max_tokens);

  const auto outputs = [&](const std::vector<Real>& x) {
    auto&& y = run(x);
    return std::vector<Number>(y.data(), y.data() + y.size());
  };

  CausalityReport report;
  const detail::OutputWatch<Number> watch(outputs(inputs), len, options);
  watch.compare(outputs(inputs), -1, -1, "nothing", report);
  RandomSequence random(options.seed);
  for (Index b = 0; b < options.batch; ++b)
    for (Index n = 0; n < tokens; ++n)
      for (int change = 0; change < Changes::count; ++change) {
        const Index token = len - 1 - n * len / tokens;
        std::vector<Real> changed = inputs;
        Changes::apply(change, changed.data() + (b * len + token) * width, width,
                       options.vocabulary, random);
        ++report.runs;
        watch.compare(outputs(changed), b, token, Changes::name(change), report);
      }
  return report;
}

}  // namespace HEED_ABI
}  // namespace heed
