// SPDX-License-Identifier: Apache-2.0
// The smallest user of heed: attention over one key gives back its value, whatever the query.
#include <heed/engine/doors.hpp>
#include <heed/ops/scaled_dot.hpp>

#include <cmath>
#include <vector>

int main() {
  const heed::Shape queries{1, 2, 3, 4}, keys{1, 2, 1, 4};
  std::vector<float> query(24), key(8), value(8), out(24);
  for (std::size_t i = 0; i < query.size(); ++i) query[i] = 0.1F * float(i);
  for (std::size_t i = 0; i < value.size(); ++i) key[i] = value[i] = float(i) - 3.0F;
  const auto view = [](const std::vector<float>& memory, const heed::Shape& shape) {
    return heed::TensorView<const float>(memory.data(), shape);
  };
  heed::forward(heed::ScaledDot<float>{},
                {view(query, queries), view(key, keys), view(value, keys)}, {},
                heed::TensorView<float>(out.data(), queries));
  for (std::size_t i = 0; i < out.size(); ++i)
    if (std::abs(out[i] - value[i / 12 * 4 + i % 4]) > 1e-5F) return 1;
  return 0;
}
