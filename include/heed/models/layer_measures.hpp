// SPDX-License-Identifier: Apache-2.0
#pragma once

// measures_of() for layers whose variant is known only at run time.

#include <heed/models/attention_measures.hpp>
#include <heed/nn/prototype_attention.hpp>
#include <heed/variants.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

// The measures (models/attention_measures.hpp) of a layer around an op of the list; if it has a memory of prototypes, also
// its diagnostics. Any other layer has only its diagnostics, and for chosen tokens its diagnostics per token.
template <class Real>
[[nodiscard]] std::vector<Measure> measures_of(const AttentionLayer<Real>& layer, Index batch,
                                               Index sequences = 2,
                                               const ChosenTokens& chosen = {}) {
  if (const auto* remembers = dynamic_cast<const PrototypeAttention<Real>*>(&layer)) {
    std::vector<Measure> measures = measures_of(remembers->projected, batch, sequences, chosen);
    for (Measure& own : remembers->diagnostics_of(chosen)) measures.push_back(std::move(own));
    return measures;
  }
  std::optional<std::vector<Measure>> measures;
  for_each_variant<Real>(kSmallSizes, [&]<class Op>(const Variant<Op>&) {
    if (measures) return;
    if (const auto* projected = dynamic_cast<const ProjectedAttention<Op>*>(&layer))
      measures = measures_of(*projected, batch, sequences, chosen);
  });
  if (measures) return *measures;
  if (chosen.all()) return layer.diagnostics();
  std::vector<Measure> means;
  const double count = double(chosen.count(batch));
  for (const TokenNumbers& numbers : layer.token_diagnostics()) {
    double sum = 0;
    for (Index t = 0; t < Index(numbers.of.size()); ++t)
      if (chosen(t / chosen.len, t % chosen.len)) sum += numbers.of[std::size_t(t)];
    means.emplace_back(numbers.name, sum / std::max(1.0, count));
  }
  return means;
}

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
