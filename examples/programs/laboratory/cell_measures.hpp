// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cell.hpp"

namespace compare {

// Adds the scalars that the model's ops have learnt, and measures of its layers on the source's first held-out rows
// (models/attention_measures.hpp; row_entropy in nats and top_weight, the largest weight of a row without its sign, of
// measure/weights.hpp): for all tokens, and for a task also for tokens that are asked for an answer and for the others. At
// answers that stand in tokens of the sequence, answer_share is the share of a row's weight on these tokens, and
// noise_share its share on tokens on which no answer depends: means over all heads, and with `_of_best_head` the values of
// the head with the largest answer_share.
void measure_model(heed_lm::Model& model, const heed_lm::DataSource& source, Index rows,
                   heed::nn::Context<float>& context, CellResult& to);

}  // namespace compare
