// SPDX-License-Identifier: Apache-2.0
#include "../../zoo/zoo.hpp"
#include "runner.hpp"

#include <heed/variants.hpp>

namespace compare {

std::vector<std::string> variant_names() { return heed::variant_names(); }
std::vector<std::string> zoo_names() { return zoo::variant_names(); }

}  // namespace compare
