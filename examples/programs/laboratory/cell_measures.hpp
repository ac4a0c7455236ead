// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cell.hpp"

namespace compare {

// Adds the scalars that the model's ops have learnt, and what its layers do with the source's first held-out rows
// (models/attention_measures.hpp; row_entropy in nats and top_weight, the largest weight of a row without its sign, of
// measure/weights.hpp): of all tokens, and for a task of those that are asked for an answer and of the others. At answers that
// stand in tokens of the sequence, answer_share is the share of a row's weight on those tokens, noise_share that on tokens
// that no answer depends on: means over all heads, and `_of_best_head` of the head with the largest answer_share.
void measure_model(heed_lm::Model& model, const heed_lm::DataSource& source, Index rows,
                   heed::nn::Context<float>& context, CellResult& to);

}  // namespace compare
