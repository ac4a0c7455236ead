// SPDX-License-Identifier: Apache-2.0
#include "cell_measures.hpp"

#include "../zoo/layers.hpp"

#include <heed/compiled.hpp>
#include <heed/models/layer_measures.hpp>

namespace compare {

namespace {

namespace nn = heed::nn;

// Of a layer around any variant that programs offer.
[[nodiscard]] std::vector<nn::Measure> layer_measures(const nn::AttentionLayer<float>& layer,
                                                      Index rows) {
  const auto of_zoo = zoo::measures_of(layer, rows);
  return of_zoo ? *of_zoo : nn::measures_of(layer, rows);
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

}  // namespace

void measure_model(heed_lm::Model& model, const heed_lm::DataSource& source, Index rows,
                   nn::Context<float>& context, CellResult& to) {
  Means all;
  model.visit(nn::Visitor<float>(
      [&](const std::string& name, heed::Param<float>& value, heed::Param<float>&) {
        if (value.size() == 1) all.add(name.substr(name.rfind('.') + 1), double(value[0]));
      }));
  const heed_lm::Batch batch = source.validation_batch(0, rows);
  (void)model.loss(context, batch.rows, batch.inputs, batch.targets);
  for (auto& block : model.blocks())
    for (const auto& [name, value] : layer_measures(block.attention(), batch.rows))
      all.add(name, value);
  to.measures = all.means();
}

}  // namespace compare
