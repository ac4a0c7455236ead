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

// Throws unless good(number) is true of all numbers; the words describe it.
template <class Good>
void require_all(std::span<const float> numbers, const std::string& name,
                 const std::filesystem::path& path, Good&& good, const char* words) {
  const auto found = std::ranges::find_if_not(numbers, good);
  if (found == numbers.end()) return;
  throw std::runtime_error(heed::detail::sentence(path.string(), ": number ",
                                                  found - numbers.begin(), " of ", name, " is ",
                                                  *found, ", it must be ", words));
}

}  // namespace

void require_finite(std::span<const float> numbers, const std::string& name,
                    const std::filesystem::path& path) {
  require_all(
      numbers, name, path, [](float x) { return std::isfinite(x); }, "finite");
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
        // Second moments are means of squares: the root of a negative one would make every later step a skipped step.
        require_all(
            second, "adamw.second." + name, path, [](float x) { return x >= 0; }, "at least 0");
      });
}

}  // namespace heed_lm
