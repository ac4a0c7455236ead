// SPDX-License-Identifier: Apache-2.0
#include "layers.hpp"

#include "zoo.hpp"

#include <heed/models/attention_weights.hpp>
#include <heed/mpi/compiled_ranks.hpp>

namespace zoo {

namespace nn = heed::nn;

std::optional<heed::WeightMeasures> weights_of(const nn::AttentionLayer<float>& layer,
                                               const nn::Context<float>& context, heed::Index batch,
                                               const heed::WeightRequest& request) {
  std::optional<heed::WeightMeasures> measures;
  for_each_zoo_variant<float>(heed::kSmallSizes, [&]<class Op>(const heed::Variant<Op>&) {
    if (measures) return;
    if (const auto* projected = dynamic_cast<const nn::ProjectedAttention<Op>*>(&layer))
      measures = nn::weights_of(*projected, context, batch, request);
  });
  return measures;
}

}  // namespace zoo
