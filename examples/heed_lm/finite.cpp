// SPDX-License-Identifier: Apache-2.0
#include "finite.hpp"

#include <algorithm>
#include <cmath>

namespace heed_lm {

namespace {

namespace nn = heed::nn;

[[nodiscard]] std::span<const float> numbers_of(const heed::Param<float>& param) {
  return {param.data(), std::size_t(param.size())};
}

}  // namespace

void require_finite(std::span<const float> numbers, const std::string& name,
                    const std::filesystem::path& path) {
  const auto found = std::ranges::find_if_not(numbers, [](float x) { return std::isfinite(x); });
  if (found == numbers.end()) return;
  throw std::runtime_error(path.string() + ": number " + std::to_string(found - numbers.begin()) +
                           " of " + name + " is " + std::to_string(*found) + ", it must be finite");
}

void require_finite(Run& run, const std::filesystem::path& path) {
  run.model->visit(nn::Visitor<float>(
      [&](const std::string& name, heed::Param<float>& value, heed::Param<float>&) {
        require_finite(numbers_of(value), name, path);
      }));
  run.model->visit_state(
      nn::StateVisitor<float>([&](const std::string& name, heed::Param<float>& state) {
        require_finite(numbers_of(state), name, path);
      }));
  run.optimiser.visit_state(
      [&](const std::string& name, std::vector<float>& first, std::vector<float>& second) {
        require_finite(first, "adamw.first." + name, path);
        require_finite(second, "adamw.second." + name, path);
      });
}

}  // namespace heed_lm
