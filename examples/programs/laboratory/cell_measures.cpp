// SPDX-License-Identifier: Apache-2.0
#include "cell_measures.hpp"

#include "../../zoo/layers.hpp"
#include "../heed_lm/reading.hpp"

#include <heed/compiled.hpp>
#include <heed/models/layer_measures.hpp>

#include <algorithm>
#include <cmath>

namespace compare {

namespace {

namespace nn = heed::nn;

// Places in WeightRequest::sets.
constexpr std::size_t kSources = 0, kNoise = 1;

// The measures of a layer around any variant that programs offer.
[[nodiscard]] std::vector<nn::Measure> layer_measures(const nn::AttentionLayer<float>& layer,
                                                      Index rows, const nn::ChosenTokens& chosen) {
  const Index sequences = chosen.all() ? 2 : 4;  // answers are few
  const auto of_zoo = zoo::measures_of(layer, rows, sequences, chosen);
  return of_zoo ? *of_zoo : nn::measures_of(layer, rows, sequences, chosen);
}

// Means over layers.
class Means {
 public:
  void add(const std::string& name, double value) {
    sums_[name].first += value;
    ++sums_[name].second;
  }
  [[nodiscard]] Measures means() const {
    Measures means;
    for (const auto& [name, sum] : sums_) means[name] = sum.first / sum.second;
    return means;
  }

 private:
  std::map<std::string, std::pair<double, int>> sums_;
};

// Adds means over the rows of all heads that have a weight other than 0.
void add_rows(const heed::WeightMeasures& m, const nn::ChosenTokens& chosen, Means& to) {
  double entropy = 0, top = 0, rows = 0;
  for (Index b = 0; b < m.batch; ++b)
    for (Index h = 0; h < m.heads; ++h)
      for (Index i = 0; i < m.len_q; ++i) {
        const Index row = m.row(b, h, i);
        if (!chosen(b, i) || m.size[std::size_t(row)] == 0) continue;
        entropy += m.entropy[std::size_t(row)];
        top += std::abs(m.links_of(row)[0].weight);
        ++rows;
      }
  if (rows == 0) return;
  to.add("row_entropy", entropy / rows);
  to.add("top_weight", top / rows);
}

// The shares of a row's weight that a head gives to tokens with an answer and to noise, means over rows.
struct Given {
  double answer = 0, noise = 0, rows = 0;
};

[[nodiscard]] Given given_by(Index head, const heed::WeightMeasures& m,
                             const nn::ChosenTokens& chosen) {
  Given given;
  for (Index b = 0; b < m.batch; ++b)
    for (Index i = 0; i < m.len_q; ++i) {
      const auto row = std::size_t(m.row(b, head, i));
      if (!chosen(b, i) || m.size[row] == 0) continue;
      given.answer += m.share[kSources][row];
      given.noise += m.share[kNoise][row];
      ++given.rows;
    }
  given.answer /= given.rows;
  given.noise /= given.rows;
  return given;
}

// Adds means over heads, and the shares of the head that gives most to the answer.
void add_shares(const std::vector<heed::WeightMeasures>& layers, const nn::ChosenTokens& chosen,
                bool has_noise, Measures& to) {
  std::vector<Given> heads;
  for (const heed::WeightMeasures& layer : layers)
    for (Index h = 0; h < layer.heads; ++h)
      if (const Given given = given_by(h, layer, chosen); given.rows > 0) heads.push_back(given);
  if (heads.empty()) return;
  const Given& best =
      *std::max_element(heads.begin(), heads.end(),
                        [](const Given& a, const Given& b) { return a.answer < b.answer; });
  const auto add = [&](const std::string& name, double Given::*share) {
    double sum = 0;
    for (const Given& head : heads) sum += head.*share;
    to[name] = sum / double(heads.size());
    to[name + "_of_best_head"] = best.*share;
  };
  add("answer_share", &Given::answer);
  if (has_noise) add("noise_share", &Given::noise);
}

}  // namespace

void measure_model(heed_lm::Model& model, const heed_lm::DataSource& source, Index rows,
                   nn::Context<float>& context, CellResult& to) {
  Means all;
  model.visit(nn::Visitor<float>(
      [&](const std::string& name, heed::Param<float>& value, heed::Param<float>&) {
        if (value.size() == 1) all.add(name.substr(name.rfind('.') + 1), double(value[0]));
      }));
  const heed_lm::Batch batch = source.validation_batch(0, rows);
  const bool is_task = !batch.difficulties.empty();
  heed::WeightRequest request;
  if (is_task) request.sets = {batch.sources, batch.noise};  // indices kSources and kNoise
  const auto weights = heed_lm::read_layers(model, context, batch.rows, batch.inputs, request);
  const auto add = [&](Means& means, const nn::ChosenTokens& chosen) {
    for (auto& block : model.blocks())
      for (const auto& [name, value] : layer_measures(block.attention(), batch.rows, chosen))
        means.add(name, value);
    for (const heed::WeightMeasures& layer : weights) add_rows(layer, chosen, means);
  };
  add(all, {});
  to.measures = all.means();
  if (!is_task) return;                   // a text asks at every token
  std::vector<char> asked, others, held;  // held: the answer stands in tokens
  for (std::size_t t = 0; t < batch.targets.size(); ++t) {
    asked.push_back(batch.targets[t] != heed_lm::kNoTarget);
    others.push_back(!asked.back());
    held.push_back(!batch.sources.ranges[t].empty());
  }
  for (const auto& [marks, measures] :
       {std::pair{&asked, &to.at_answers}, {&others, &to.elsewhere}}) {
    Means means;
    add(means, {*marks, batch.len});
    *measures = means.means();
  }
  const auto& noise = batch.noise.ranges;
  const bool has_noise =
      std::any_of(noise.begin(), noise.end(), [](const auto& keys) { return !keys.empty(); });
  add_shares(weights, {held, batch.len}, has_noise, to.at_answers);
}

}  // namespace compare
