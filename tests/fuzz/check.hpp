// SPDX-License-Identifier: Apache-2.0
#pragma once

// Runs one case, and compares it with the reference, with plain loops, and with memory that must not change:
//
//   out, lse, reports   the plain loops in double; out also the reference
//   gradients           entry by entry the reference's tape; and along one random direction of all
//                       tensors at once the plain loops
//   bits                the same for two and three threads
//   canaries            around every output unchanged
//   zeros               gradients of numbers that no visible pair reads
//
// In mixed precision rows before the readout, lse and the gradients of plain attention keep the bounds of
// check/mixed_bounds.hpp, and other gradients are those of float within some roundings.
//
// Allowances are those of tests/tolerances.hpp. If a choice (winner, halt) is about to change,
// numbers are not compared; if a slope jumps nearby, gradients are not.

#include "fuzz/mixed.hpp"
#include "fuzz/run.hpp"
#include "tolerances.hpp"

#include <functional>
#include <optional>
#include <sstream>
#include <string>

namespace fuzz {

// The fault; empty if there is none.
struct Verdict {
  std::string fault;
  bool compared = true;
};

namespace detail {

// The entry that exceeds its allowed error most; NaN must meet NaN, infinity the same infinity.
template <class Allowed>
std::string compare(const std::string& what, const std::vector<double>& got,
                    const std::vector<double>& wanted, const char* whose, Allowed&& allowed) {
  if (got.size() != wanted.size())
    return what + " has " + std::to_string(got.size()) + " numbers, " + whose + " " +
           std::to_string(wanted.size());
  double worst = 1;
  std::optional<std::size_t> at;
  for (std::size_t n = 0; n < got.size(); ++n) {
    if (got[n] == wanted[n] || (std::isnan(got[n]) && std::isnan(wanted[n]))) continue;
    const double error = std::abs(got[n] - wanted[n]), room = allowed(n);
    const double ratio = !std::isfinite(error) ? kInf : error <= room ? 0 : error / room;
    if (ratio > worst) worst = ratio, at = n;
  }
  if (!at) return {};
  std::ostringstream text;
  text.precision(17);
  text << what << "[" << *at << "] of " << got.size() << " is " << got[*at] << ", " << whose << " "
       << (*whose == 't' ? "has " : "have ") << wanted[*at] << ", " << allowed(*at)
       << " is allowed";
  return text.str();
}

inline double largest(const std::vector<double>& x) {
  double top = 0;
  for (const double v : x)
    if (std::isfinite(v)) top = std::max(top, std::abs(v));
  return top;
}
inline double largest_error(const std::vector<double>& a, const std::vector<double>& b) {
  double top = 0;
  for (std::size_t n = 0; n < a.size(); ++n)
    if (std::isfinite(a[n] - b[n])) top = std::max(top, std::abs(a[n] - b[n]));
  return top;
}
inline double longest_row(const std::vector<double>& x, Index dim) {
  double top = 0, squares = 0;
  for (std::size_t n = 0; n < x.size(); ++n) {
    if (n % std::size_t(dim) == 0) squares = 0;
    if (std::isfinite(x[n])) squares += x[n] * x[n];
    top = std::max(top, squares);
  }
  return std::sqrt(top);
}

// The comparisons of one case, in order; the first fault stays.
class Checker {
 public:
  explicit Checker(const Case& c) : c_(c), names_(c.op->param_names()) {}

  Verdict run() {
    results_ = c_.in_float ? detail::run<float>(c_, 1) : detail::run<double>(c_, 1);
    if (!results_.beside.empty()) fault("a number was written beside " + results_.beside);
    if (c_.more_threads > 0) {
      const Results again = c_.in_float ? detail::run<float>(c_, c_.more_threads)
                                        : detail::run<double>(c_, c_.more_threads);
      const std::string where = different_bits(results_, again, names_);
      if (!where.empty())
        fault(where + " has other bits on " + std::to_string(c_.more_threads) + " threads");
    }
    plain_ = c_.op->plain(c_.plain);
    if (plain_.to_jump < (c_.in_float ? 1e-4 : 1e-9)) {
      verdict_.compared = false;
      return verdict_;
    }
    if (c_.options.precision.mixes()) return run_mixed();
    check_lse();
    if (c_.visible_garbage) {
      check_out_beside_plain();
      return verdict_;
    }
    check_reports();
    run_twins();
    check_out();
    check_zeros();
    if (plain_.to_kink < (c_.in_float ? 1e-4 : 1e-9)) {
      verdict_.compared = false;
      return verdict_;
    }
    check_gradients();
    check_direction();
    return verdict_;
  }

 private:
  void fault(const std::string& text) {
    if (verdict_.fault.empty()) verdict_.fault = text;
  }
  template <class Allowed>
  void compare(const std::string& what, const std::vector<double>& got,
               const std::vector<double>& wanted, const char* whose, Allowed&& allowed) {
    fault(detail::compare(what, got, wanted, whose, allowed));
  }

  void check_lse() {
    namespace tolerance = heed_test::tolerance;
    if (results_.engine.lse.size() != plain_.lse.size())
      return fault("lse has another number of maps");
    for (std::size_t m = 0; m < plain_.lse.size(); ++m)
      compare("lse of map " + std::to_string(m), results_.engine.lse[m], plain_.lse[m], kLoops,
              [&](std::size_t n) {
                const double s = plain_.s_row[n], at = plain_.lse[m][n];
                return c_.in_float ? tolerance::lse<float>(s, at) : tolerance::lse<double>(s, at);
              });
  }

  Verdict run_mixed() {
    for (std::size_t row = 0; row < plain_.s_row.size(); ++row)
      score_error_.push_back(score_error(row));
    check_mixed_lse();
    check_mixed_rows();
    run_twins();
    check_zeros();
    check_mixed_gradients();
    return verdict_;
  }
  // Largest error of the scores of a row.
  [[nodiscard]] double score_error(std::size_t row) const {
    constexpr double dot = heed::kMixedDotError;
    const AnyOp& op = *c_.op;
    const double drive = dot * (plain_.s_row[row] + op.mixed_per_product * plain_.products[row]);
    return op.mixed_flow * (drive + std::min(op.mixed_largest, op.mixed_slope * dot));
  }
  void check_mixed_lse() {
    for (std::size_t m = 0; m < plain_.lse.size() && !c_.op->linear_rows; ++m)
      compare("lse of map " + std::to_string(m), results_.engine.lse[m], plain_.lse[m], kLoops,
              [&](std::size_t n) {
                return score_error_[n] +
                       heed_test::tolerance::lse<float>(plain_.s_row[n], plain_.lse[m][n]);
              });
  }
  void check_mixed_rows() {
    const bool saved = !results_.engine.mixed.empty();
    if (!saved && !c_.op->plain_rows) return;
    const Sizes& s = c_.plain.sizes;
    const double keys = c_.plain.keep_factor * double(s.len_kv) * seen_value();
    compare("mixed rows", saved ? results_.engine.mixed : results_.out, plain_.mixed, kLoops,
            [&](std::size_t n) {
              const std::size_t row = n / std::size_t(s.dim_v);
              const double e = score_error_[row], terms = plain_.mixed_terms[n];
              constexpr double dot = heed::kMixedDotError;
              // Weights of the Lagrange flow are linear in the drive.
              const double bound = c_.op->linear_rows ? dot * terms + 2 * e * (1 + dot) * keys
                                                      : heed::mixed_out_error(e) * terms;
              const double room = heed_test::tolerance::forward<float>(plain_.s_row[row], terms);
              return bound + room + (terms > 0 ? 1e-37 : 0);
            });
  }
  // The largest visible value.
  [[nodiscard]] double seen_value() const {
    const std::vector<char> unseen = unseen_keys(c_.plain);
    const auto dim = std::size_t(c_.plain.sizes.dim_v);
    double top = 0;
    for (std::size_t n = 0; n < c_.plain.value.size(); ++n)
      if (!unseen[n / dim]) top = std::max(top, std::abs(c_.plain.value[n]));
    return top;
  }

  void check_mixed_gradients() {
    const bool derived = c_.entry->name == std::string("sdpa") && c_.plain.mask.soft_cap == 0;
    // Measured bounds hold for rows of normal numbers and scores of their usual size.
    if (!derived && (c_.options.scale || largest(score_error_) > kUsualScoreError)) return;
    const auto bounds = derived ? MixedGradientBounds(c_, score_error_).bounds
                                : std::array<std::vector<double>, 5>{};
    for (std::size_t t = 0; t < 5 + names_.size(); ++t) {
      const bool input = t < 5;
      const std::vector<double>& got =
          input ? results_.inputs[t].numbers : results_.engine.params[t - 5];
      if (input && (!c_.wants[t] || got.empty())) continue;
      const std::vector<double>& exact = input ? exact_.inputs[t] : exact_.params[t - 5];
      const std::vector<double>& naive = input ? naive_.inputs[t] : naive_.params[t - 5];
      const std::vector<char> steep = steep_entries(t);
      const double in_float = gradient_room(without(exact, steep), without(naive, steep), input);
      const double size = std::max(largest(without(exact, steep)), gradient_terms(input));
      compare("the gradient of " + (input ? results_.inputs[t].name : names_[t - 5]), got, exact,
              kTwin, [&](std::size_t n) {
                const double level = derived ? bounds[t][n] * 1.001
                                             : kGradientRoundings * heed::kBfloatRoundoff * size;
                return (n < steep.size() && steep[n] ? 1e8 : 1.0) * (level + in_float);
              });
    }
  }
  // Largest error of a gradient in roundings of bfloat16, relative to the size of its terms: the
  // most that mixed_precision_test allows a variant. The numbers are measured; the first 2,500
  // cases of sdpa, dar, ode and prototype keep to a tenth of it.
  static constexpr double kGradientRoundings = 10, kUsualScoreError = 0.1;

  // Counts and winners are exact; a residual has the accuracy of a mixed row, and a tension that of what the readout makes of one.
  void check_reports() {
    if (results_.engine.reports.size() != plain_.reports.size())
      return fault("there are other reports");
    for (std::size_t n = 0; n < plain_.reports.size(); ++n)
      compare("report " + std::to_string(n), results_.engine.reports[n], plain_.reports[n], kLoops,
              [&](std::size_t row) {
                const double s = plain_.s_row[row];
                return (c_.in_float ? heed_test::tolerance::eps<float>
                                    : heed_test::tolerance::eps<double>)*64 *
                       (1 + s) * plain_.gain;
              });
  }

  // The allowance for underflow, added to the rule.
  [[nodiscard]] double row_room(std::size_t n) const {
    const double s = plain_.s_row[n / std::size_t(c_.plain.sizes.dim_v)], terms = plain_.terms[n];
    return c_.in_float ? heed_test::tolerance::forward<float>(s, terms) + (terms > 0 ? 1e-37 : 0)
                       : heed_test::tolerance::forward<double>(s, terms) + (terms > 0 ? 1e-300 : 0);
  }
  void check_out_beside_plain() {
    compare("out", results_.out, plain_.out, kLoops, [&](std::size_t n) { return row_room(n); });
  }

  void run_twins() {
    heed::reference::Problem<double> problem;
    const Sizes& s = c_.plain.sizes;
    problem.geometry = {s.batch,  s.heads,  s.query_heads, s.kv_heads,   s.len_q,
                        s.len_kv, s.dim_qk, s.dim_v,       s.first_query};
    problem.query = c_.plain.query;
    problem.key = c_.plain.key;
    problem.value = c_.plain.value;
    problem.extra = c_.plain.extra;
    const Arena<double> arena = lay_out<double>(c_);
    heed::reference::use_mask(problem, mask_of(c_, arena));
    problem.scale = c_.plain.scale;
    problem.dropout = c_.options.dropout;
    exact_ = c_.op->twin(problem, c_.grad_out, false);
    if (c_.in_float) naive_ = c_.op->twin(problem, c_.grad_out, true);
  }

  void check_out() {
    namespace tolerance = heed_test::tolerance;
    const double top = largest(exact_.out);
    if (c_.op->plain_rows) {
      check_out_beside_plain();
      compare("out", results_.out, exact_.out, kTwin, [&](std::size_t n) { return row_room(n); });
    } else if (!c_.in_float) {
      const double room = tolerance::relative_to_largest(top);
      compare("out", results_.out, plain_.out, kLoops, [room](std::size_t) { return room; });
      compare("out", results_.out, exact_.out, kTwin, [room](std::size_t) { return room; });
    } else {
      const double level =
          tolerance::forward_beside_naive(largest_error(naive_.out, exact_.out), top);
      const auto room = [&](std::size_t n) {
        return c_.op->terms_known ? std::max(level, row_room(n)) : level;
      };
      compare("out", results_.out, plain_.out, kLoops, room);
      compare("out", results_.out, exact_.out, kTwin, room);
    }
  }

  void check_zeros() {
    const auto zero = [&](std::size_t tensor, const std::vector<char>& where, Index dim) {
      const std::vector<double>& grad = results_.inputs[tensor].numbers;
      for (std::size_t n = 0; n < grad.size(); ++n)
        if (where[n / std::size_t(dim)] && grad[n] != 0)
          return fault("the gradient of " + results_.inputs[tensor].name + "[" + std::to_string(n) +
                       "] is " + std::to_string(grad[n]) + ", no visible pair reads it");
    };
    const Sizes& s = c_.plain.sizes;
    if (!c_.op->reads_query && s.query_heads == s.heads && c_.op->maps == 1)
      zero(0, blind_queries(c_.plain), s.dim_qk);
    if (!c_.op->reads_own_rows) {
      zero(1, unseen_keys(c_.plain), s.dim_qk);
      zero(2, unseen_keys(c_.plain), s.dim_v);
    }
    if (c_.plain.bias.given()) zero(4, unread_bias(c_.plain), 1);
  }

  // Entries of query or key in rows of zeros whose gradients are 1e8 times those of others, and as much less exact.
  [[nodiscard]] std::vector<char> steep_entries(std::size_t t) const {
    const Sizes& s = c_.plain.sizes;
    const std::vector<double>& x = t == 0 ? c_.plain.query : c_.plain.key;
    std::vector<char> steep(t < 2 && c_.op->steep_zeros ? x.size() : 0, 1);
    for (std::size_t n = 0; n < steep.size(); ++n) {
      const std::size_t row = n / std::size_t(s.dim_qk) * std::size_t(s.dim_qk);
      for (std::size_t c = row; c < row + std::size_t(s.dim_qk); ++c)
        if (x[c] != 0) steep[n] = 0;
    }
    return steep;
  }
  [[nodiscard]] static std::vector<double> without(std::vector<double> x,
                                                   const std::vector<char>& steep) {
    for (std::size_t n = 0; n < std::min(x.size(), steep.size()); ++n)
      if (steep[n]) x[n] = 0;
    return x;
  }

  // The factor of a cosine in gradients.
  [[nodiscard]] double steepness() const {
    return c_.op->short_rows ? 1 / std::min({plain_.shortest, shortest_row(c_.plain.query),
                                             shortest_row(c_.plain.key)})
                             : 1.0;
  }
  // The sizes of |dout| |v| that a gradient is a sum of. Where they cancel, the rest is rounding of
  // these, times the factors of score and readout.
  [[nodiscard]] double gradient_terms(bool input) const {
    const Sizes& s = c_.plain.sizes;
    const double q = longest_row(c_.plain.query, s.dim_qk), k = longest_row(c_.plain.key, s.dim_qk);
    const double v = longest_row(c_.plain.value, s.dim_v);
    double terms = longest_row(c_.grad_out, s.dim_v) * (c_.op->reads_query ? std::max(v, q) : v);
    if (c_.op->reads_squares) terms *= std::max(1.0, q * k + k * k);
    terms *= steepness() * (1 + largest(plain_.s_row) / 4);
    if (c_.op->reads_positions && !input)
      terms *= double(std::max(s.first_query + s.len_q, s.len_kv));
    terms *= plain_.gain * plain_.gain;
    return terms;
  }

  // The allowed error of each other entry of a gradient.
  [[nodiscard]] double gradient_room(const std::vector<double>& exact,
                                     const std::vector<double>& naive, bool input) const {
    namespace tolerance = heed_test::tolerance;
    const double top = largest(exact);
    const double steep = steepness();
    const Sizes& s = c_.plain.sizes;
    const double naive_error = largest_error(naive, exact);
    const double terms = gradient_terms(input);
    if (!c_.in_float)
      return std::max(tolerance::exact_gradient(top) * steep,
                      4 * tolerance::eps<double> * terms * std::sqrt(double(s.rows())));
    if (input && s.len_kv != 1)
      return std::max(tolerance::backward_beside_naive(naive_error, top),
                      tolerance::sum_of_terms(0, terms));
    const double keys = c_.op->linear_rows ? double(s.len_kv) : 1.0;
    return tolerance::sum_of_terms(naive_error,
                                   std::max(top, terms * std::sqrt(double(s.rows()) * keys)));
  }
  // The length of the shortest row of query or key that is not zero; 1 without such a row.
  [[nodiscard]] double shortest_row(const std::vector<double>& x) const {
    const auto dim = std::size_t(c_.plain.sizes.dim_qk);
    double least = 1;
    for (std::size_t row = 0; row + dim <= x.size(); row += dim) {
      double squares = 0;
      for (std::size_t c = row; c < row + dim; ++c)
        squares += std::isfinite(x[c]) ? x[c] * x[c] : 0;
      if (squares > 0) least = std::min(least, std::sqrt(squares));
    }
    return least;
  }

  void check_gradients() {
    for (std::size_t t = 0; t < 5 + names_.size(); ++t) {
      const bool input = t < 5;
      const std::vector<double>& got =
          input ? results_.inputs[t].numbers : results_.engine.params[t - 5];
      if (input && (!c_.wants[t] || got.empty())) continue;
      const std::vector<double>& exact = input ? exact_.inputs[t] : exact_.params[t - 5];
      const std::vector<double> none;
      const std::vector<double>& naive = !c_.in_float ? none
                                         : input      ? naive_.inputs[t]
                                                      : naive_.params[t - 5];
      const std::vector<char> steep = steep_entries(t);
      const double level = gradient_room(without(exact, steep), without(naive, steep), input);
      const auto room = [&](std::size_t n) {
        return n < steep.size() && steep[n] ? 1e8 * level : level;
      };
      compare("the gradient of " + (input ? results_.inputs[t].name : names_[t - 5]), got, exact,
              kTwin, room);
      add_direction(t, got, room);
    }
  }

  // Moves tensor t along its direction: in the engine's gradient and in the plain loops.
  template <class Room>
  void add_direction(std::size_t t, const std::vector<double>& grad, const Room& room) {
    Draw draw(c_.seed * 31 + t);
    if (!moved_) {
      moved_.emplace();
      const Plain<double>& p = c_.plain;
      const auto cast = [](const std::vector<double>& x) {
        return std::vector<Dual>(x.begin(), x.end());
      };
      *moved_ = {p.sizes,
                 cast(p.query),
                 cast(p.key),
                 cast(p.value),
                 cast(p.extra),
                 {p.bias.batch, p.bias.heads, p.bias.len, p.bias.keys, cast(p.bias.numbers)},
                 {},
                 p.mask,
                 p.scale,
                 p.kept,
                 p.keep_factor};
      for (const auto& param : p.params) moved_->params.push_back(cast(param));
    }
    std::vector<Dual>* inputs[] = {&moved_->query, &moved_->key, &moved_->value, &moved_->extra,
                                   &moved_->bias.numbers};
    std::vector<Dual>& tensor = t < 5 ? *inputs[t] : moved_->params[t - 5];
    for (std::size_t n = 0; n < grad.size() && n < tensor.size(); ++n) {
      tensor[n].d = draw.uniform(-1, 1);
      along_ += grad[n] * tensor[n].d;
      along_room_ += std::abs(tensor[n].d) * (room(n) + 1e-13 * std::abs(grad[n]));
    }
  }

  void check_direction() {
    if (!moved_) return;
    const PlainResult<Dual> result = c_.op->plain(*moved_);
    double wanted = 0;
    for (std::size_t n = 0; n < result.out.size(); ++n) wanted += result.out[n].d * c_.grad_out[n];
    const std::vector<float> dsteps = grad_of_steps(Index(result.steps.size()));
    for (std::size_t n = 0; n < dsteps.size(); ++n) wanted += result.steps[n].d * double(dsteps[n]);
    compare("the derivative along one direction", {along_}, {wanted}, kLoops,
            [&](std::size_t) { return along_room_; });
  }

  static constexpr const char* kTwin = "the twin";
  static constexpr const char* kLoops = "plain loops";

  const Case& c_;
  std::vector<std::string> names_;
  Verdict verdict_;
  Results results_;
  std::vector<double> score_error_;  // error of each row's scores in mixed precision
  PlainResult<double> plain_;
  TwinResult exact_, naive_;
  std::optional<Plain<Dual>> moved_;
  double along_ = 0, along_room_ = 0;
};

}  // namespace detail

// Runs a case; an exception is a fault, too.
inline Verdict check(const Case& c) {
  try {
    return detail::Checker(c).run();
  } catch (const std::exception& error) {
    return {std::string("it throws: ") + error.what(), true};
  }
}

}  // namespace fuzz
