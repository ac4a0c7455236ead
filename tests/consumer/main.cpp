// SPDX-License-Identifier: Apache-2.0
// The smallest user of heed: reads the last element of a view of its own memory.
#include <heed/core/view.hpp>

#include <vector>

int main() {
  std::vector<float> memory(2 * 3 * 4);
  memory.back() = 7;
  const heed::TensorView<const float> view(memory.data(), {1, 2, 3, 4});
  const bool right = heed::element_count(view.shape(), "consumer") == 24 && view(0, 1, 2, 3) == 7;
  return right ? 0 : 1;
}
