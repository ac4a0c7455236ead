// SPDX-License-Identifier: Apache-2.0

// Step 5 of 15. You learn to decode, one token at a time. A cache of pages holds the keys and values; each new token
// attends to them in place, and its row is the one that the whole sequence at once would give. DAR's norms of keys are
// computed once, and kept in the cache. Eight query heads share two key-value heads.

#include <heed/core/random.hpp>
#include <heed/engine/doors.hpp>
#include <heed/kv_cache.hpp>
#include <heed/ops/dar.hpp>

#include <cmath>
#include <cstdio>
#include <vector>

int main() {
  using namespace heed;
  const Index batch = 2, heads = 8, kv_heads = 2, len = 300, prompt = 270, dim = 32;
  const auto normals = [](Index count, std::uint64_t stream) {
    std::vector<float> x(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = float(CounterRandom(5, stream).normal(i));
    return x;
  };
  const auto query = normals(batch * heads * len * dim, 1);
  const auto key = normals(batch * kv_heads * len * dim, 2),
             value = normals(batch * kv_heads * len * dim, 3);
  // Tokens [from, from + count) of (batch, heads, len, dim) memory.
  const auto tokens = [&](auto* memory, Index of_heads, Index from, Index count) {
    return TensorView(memory + from * dim, Shape{batch, of_heads, count, dim},
                      Strides{of_heads * len * dim, len * dim, dim});
  };

  const Dar<float> op;
  std::vector<float> whole(query.size()), stepwise(query.size());
  forward(op,
          {tokens(query.data(), heads, 0, len), tokens(key.data(), kv_heads, 0, len),
           tokens(value.data(), kv_heads, 0, len)},
          causal<float>(), tokens(whole.data(), heads, 0, len));

  KvCache<float> cache(batch, kv_heads, dim, dim);
  // The last query stands at the last key. cache.inputs() tells ops that read positions the same (Inputs::first_query).
  const auto last = causal<float>(Align::bottom_right);
  for (Index from = 0, count = prompt; from < len; from += count, count = 1) {
    cache.append(tokens(key.data(), kv_heads, from, count),
                 tokens(value.data(), kv_heads, from, count));
    forward(op, cache.inputs(tokens(query.data(), heads, from, count)), last,
            tokens(stepwise.data(), heads, from, count));
  }

  double difference = 0;
  for (std::size_t i = 0; i < whole.size(); ++i)
    difference = std::max(difference, std::abs(double(whole[i]) - double(stepwise[i])));
  std::printf("a prompt of %td tokens and %td steps: largest difference from the whole %.1e\n",
              prompt, len - prompt, difference);
  return difference < 1e-5 ? 0 : 1;
}
