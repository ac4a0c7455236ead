// SPDX-License-Identifier: Apache-2.0
#include "run.hpp"

#include <heed/ops/prototype.hpp>
#include <heed/ops/prototype/art_memory.hpp>

namespace heed_test {

namespace {

template <class T>
heed::Prototype<T> prototype_of(const GoldenCase& golden) {
  heed::Prototype<T> op;
  op.score.W = golden.param<T>("W");
  op.score.eps = golden.number("eps");
  op.score.strength = golden.param<T>("lam");
  op.readout.pull = golden.param<T>("mu");
  return op;
}

std::vector<double> unit(const double* row, Index dim, double eps) {
  double square = 0;
  for (Index c = 0; c < dim; ++c) square += row[c] * row[c];
  std::vector<double> u;
  for (Index c = 0; c < dim; ++c) u.push_back(row[c] / (std::sqrt(square) + eps));
  return u;
}

// Cosines of a row with the prototypes of head h.
std::vector<double> cosines(const double* row, const heed::Prototype<double>& op, Index h) {
  const auto& W = op.score.W;
  const Index count = W.extent(1), dim = W.extent(2);
  const std::vector<double> x = unit(row, dim, op.score.eps);
  std::vector<double> all;
  for (Index m = 0; m < count; ++m) {
    const std::vector<double> w = unit(W.data() + (h * count + m) * dim, dim, op.score.eps);
    double sum = 0;
    for (Index c = 0; c < dim; ++c) sum += x[std::size_t(c)] * w[std::size_t(c)];
    all.push_back(sum);
  }
  return all;
}

double best(const std::vector<double>& x) {
  return double(std::max_element(x.begin(), x.end()) - x.begin());
}

// Categories, winners and similarities in plain loops.
void check_categories(const heed::Prototype<double>& op, const GoldenCase& golden, Report& report) {
  const heed::Geometry g = golden.geometry();
  std::vector<double> categories, winners, similarity;
  for (Index b = 0; b < g.batch; ++b)
    for (Index h = 0; h < g.heads; ++h) {
      const Index kv = b * g.kv_heads + g.kv_head(h);
      const std::size_t first = categories.size();
      for (Index j = 0; j < g.len_kv; ++j)
        categories.push_back(
            best(cosines(golden.tensor("k").data() + (kv * g.len_kv + j) * g.dim_qk, op, h)));
      for (Index i = 0; i < g.len_q; ++i) {
        const auto all =
            cosines(golden.tensor("q").data() + g.row_index(b, h, i) * g.dim_qk, op, h);
        winners.push_back(best(all));
        for (Index j = 0; j < g.len_kv; ++j)
          similarity.push_back(all[std::size_t(categories[first + std::size_t(j)])]);
      }
    }
  report.equal("key_category", categories, golden.tensor("key_category"));
  report.equal("query_winner", winners, golden.tensor("query_winner"));
  if (golden.has("sim")) report.exact("sim", similarity, golden.tensor("sim"));
}

template <class T>
void check_memory(const GoldenCase& golden, Report& report) {
  const Index dim = golden.extents("h").at(1), capacity = golden.extents("W0").at(0);
  heed::ArtOptions<T> options;
  options.capacity = capacity;
  options.dim = dim;
  const std::string& mode = golden.text("mode");
  heed::require(mode == "cosine" || mode == "fuzzy", golden.path(), ": mode is ", mode,
                ", it must be cosine or fuzzy");
  options.matching = mode == "cosine" ? heed::ArtMatching::cosine : heed::ArtMatching::fuzzy;
  options.vigilance = T(golden.number("vigilance"));
  options.learning_rate = T(golden.number("eta"));
  options.choice_alpha = T(golden.number("choice_alpha"));
  options.eps = T(golden.number("eps"));
  heed::ArtMemory<T> memory(options);
  const auto rows = golden.rounded<T>("h"), initial = golden.rounded<T>("W0");
  const Index count = Index(golden.tensor("count0").at(0));
  memory.set_prototypes(std::span<const T>(initial.data(), std::size_t(count * dim)), count);

  std::vector<T> index, event, match, history;
  const auto snapshot = [&] {
    std::vector<T> all(initial.size(), T(0));
    std::copy(memory.prototypes().begin(), memory.prototypes().end(), all.begin());
    return all;
  };
  for (Index n = 0; n < golden.extents("h").at(0); ++n) {
    const auto e = memory.learn(std::span<const T>(rows.data() + n * dim, std::size_t(dim)));
    index.push_back(T(e.index));
    event.push_back(T(int(e.outcome)));
    match.push_back(e.match);
    const auto now = snapshot();
    history.insert(history.end(), now.begin(), now.end());
  }
  report.equal("index", index, golden.tensor("index"));
  report.equal("event", event, golden.tensor("event"));
  report.equal("count", std::vector<T>{T(memory.count())}, golden.tensor("count"));
  if constexpr (std::is_same_v<T, double>) {
    report.exact("match", match, golden.tensor("match"));
    report.exact("W", snapshot(), golden.tensor("W"));
    report.exact("W_history", history, golden.tensor("W_history"));
  } else {
    // One rounding per learned row and number, from inputs that are rounded themselves.
    const auto allow = [](const std::vector<double>& x) {
      const double eps = std::numeric_limits<float>::epsilon();
      return std::vector<double>(x.size(), 16 * eps * std::max(1.0, Report::largest(x)));
    };
    report.rounded("match", match, golden.tensor("match"), allow(golden.tensor("match")));
    report.rounded("W", snapshot(), golden.tensor("W"), allow(golden.tensor("W")));
    report.rounded("W_history", history, golden.tensor("W_history"),
                   allow(golden.tensor("W_history")));
  }
}

}  // namespace

void replay_prototype(const GoldenCase& golden, Report& report) {
  const ParamNames names = {{"W", "dW"}, {"strength", "dlam"}, {"pull", "dmu"}};
  check_operator(golden, names, report, [&]<class T>() { return prototype_of<T>(golden); });
  const auto op = prototype_of<double>(golden);
  report.exact("lse", run_engine(op, golden).saved.lse, golden.tensor("lse"));
  if (golden.has("attn")) report.exact("attn", engine_weights(op, golden), golden.tensor("attn"));
  check_categories(op, golden, report);
}

void replay_art(const GoldenCase& golden, Report& report) {
  check_memory<double>(golden, report);
  check_memory<float>(golden, report);
}

}  // namespace heed_test
