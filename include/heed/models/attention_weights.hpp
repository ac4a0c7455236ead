// SPDX-License-Identifier: Apache-2.0
#pragma once

// Measures which tokens the tokens of a model read: the measures of rows of attention weights
// (measure/weights.hpp) of each layer, after a forward pass of the model.
//
//   model.forward(context, batch, ids, logits);
//   for (auto& block : model.blocks())
//     if (const auto read = weights_of(block.attention(), context, batch, {.links = 3}))
//       read->links_of(read->row(b, h, i))[0]      // of head h and token i: the token that it weighs most
//
// Query i and key j are tokens i and j of the sequence.

#include <heed/measure/weights.hpp>
#include <heed/nn/ponder_attention.hpp>
#include <heed/nn/prototype_attention.hpp>
#include <heed/variants.hpp>

#include <optional>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

// The measures of the layer's last forward(), which had this context and `batch` sequences.
template <class Op>
[[nodiscard]] WeightMeasures weights_of(const ProjectedAttention<Op>& layer,
                                        const Context<typename Op::Scalar>& c, Index batch,
                                        const WeightRequest& request = {}) {
  const Inputs<typename Op::Scalar> in = layer.inputs(batch);
  return measure_weights(layer.stage.op, in, layer.stage.mask_read(), layer.saved(), request,
                         layer.stage.options(c, in.query.shape().len));
}

// The same for a layer whose variant is known only at run time: a layer around an op of the list
// (variants.hpp), with a memory of prototypes, or one that ponders. Other layers return nothing.
template <class Real>
[[nodiscard]] std::optional<WeightMeasures> weights_of(const AttentionLayer<Real>& layer,
                                                       const Context<Real>& c, Index batch,
                                                       const WeightRequest& request = {}) {
  if (const auto* remembers = dynamic_cast<const PrototypeAttention<Real>*>(&layer))
    return weights_of(remembers->projected, c, batch, request);
  if (const auto* ponders = dynamic_cast<const PonderAttention<Real>*>(&layer))
    return weights_of(ponders->projected, c, batch, request);
  std::optional<WeightMeasures> measures;
  const auto look = [&]<class Op>(std::type_identity<Op>) {
    if (const auto* projected = dynamic_cast<const ProjectedAttention<Op>*>(&layer))
      measures = weights_of(*projected, c, batch, request);
  };
  [&]<class... Ops>(OpList<Ops...>) { (look(std::type_identity<Ops>{}), ...); }(BuiltIn<Real>{});
  return measures;
}

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
