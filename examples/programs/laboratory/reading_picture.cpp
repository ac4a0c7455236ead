// SPDX-License-Identifier: Apache-2.0
#include "reading_picture.hpp"

#include "../heed_compare/print.hpp"
#include "../heed_lm/reading.hpp"

#include <cctype>

namespace compare {

heed_report::Picture reading_picture(heed_lm::Model& model, heed::nn::Context<float>& context,
                                     const std::string& variant, std::span<const Index> ids,
                                     const std::function<std::string(Index)>& name_of) {
  const auto layers = heed_lm::read_layers(model, context, 1, ids, {.links = 2});
  heed_lm::HeadReading sharpest = heed_lm::head_reading(layers, 0, 0);
  for (std::size_t layer = 0; layer < layers.size(); ++layer)
    for (Index head = 0; head < layers[layer].heads; ++head) {
      const heed_lm::HeadReading other = heed_lm::head_reading(layers, Index(layer), head);
      if (other.entropy < sharpest.entropy) sharpest = other;
    }
  heed_report::LinkMap map;
  map.name = "reads_";
  for (const char c : variant)
    map.name += std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : '_';
  map.title = "What tokens read after training: " + variant;
  map.note = print(
      "Layer %td, head %td: of all heads the one of lowest entropy, %.2f nats in the mean. The two "
      "largest weights of each token.",
      sharpest.layer, sharpest.head, sharpest.entropy);
  for (const Index id : ids) map.tokens.push_back(name_of(id));
  const heed::WeightMeasures& read = layers[std::size_t(sharpest.layer)];
  for (Index i = 0; i < read.len_q; ++i)
    for (const heed::WeightLink& link : read.links_of(read.row(0, sharpest.head, i)))
      if (link.key >= 0) map.links.push_back({std::size_t(i), std::size_t(link.key), link.weight});
  return draw(map);
}

}  // namespace compare
