// SPDX-License-Identifier: Apache-2.0
#pragma once

// Draws which tokens a trained model reads, as a picture for the page of --train --report.

#include "../heed_lm/model_config.hpp"
#include "../report/links.hpp"

#include <functional>
#include <span>
#include <string>

namespace compare {

using heed::Index;

// Runs the model on one sequence, and draws the two largest weights of each token in the model's
// sharpest head, whose rows have the lowest mean entropy. name_of(id) is a token as text. The
// picture is called reads_VARIANT, with "_" for any character that is no letter or digit.
[[nodiscard]] heed_report::Picture reading_picture(
    heed_lm::Model& model, heed::nn::Context<float>& context, const std::string& variant,
    std::span<const Index> ids, const std::function<std::string(Index)>& name_of);

}  // namespace compare
