// SPDX-License-Identifier: Apache-2.0

// Step 6 of 15. You learn that heed reads and writes your memory where it lies. The same numbers in four layouts give the
// same bits: (batch, heads, len, dim), (batch, len, heads, dim), one packed projection, and rows with room behind each.

#include <heed/core/random.hpp>
#include <heed/engine/doors.hpp>
#include <heed/ops/scaled_dot.hpp>

#include <cstdio>
#include <vector>

namespace {

using namespace heed;
constexpr Index kBatch = 2, kHeads = 3, kLen = 50, kDim = 16,
                kCount = kBatch * kHeads * kLen * kDim;
constexpr Shape kShape{kBatch, kHeads, kLen, kDim};
using Memory = std::vector<float>;

// Number c of token t of head h of part 0 (query), 1 (key) or 2 (value).
float number(Index part, Index b, Index h, Index t, Index c) {
  return float(CounterRandom(3, std::uint64_t(part))
                   .normal(std::uint64_t(((b * kHeads + h) * kLen + t) * kDim + c)));
}

// Fills three views, runs attention from them, and returns the output as (batch, heads, len, dim).
template <class View>
Memory attend(View&& view) {
  for (Index part = 0; part < 3; ++part)
    for (Index b = 0; b < kBatch; ++b)
      for (Index h = 0; h < kHeads; ++h)
        for (Index t = 0; t < kLen; ++t)
          for (Index c = 0; c < kDim; ++c) view(part)(b, h, t, c) = number(part, b, h, t, c);
  Memory out(kCount);
  forward(ScaledDot<float>{}, {view(0), view(1), view(2)}, causal<float>(),
          TensorView<float>(out.data(), kShape));
  return out;
}

}  // namespace

int main() {
  Memory parts[3] = {Memory(kCount), Memory(kCount), Memory(kCount)};
  const Memory dense = attend([&](Index i) { return TensorView<float>(parts[i].data(), kShape); });
  const Memory bthd =
      attend([&](Index i) { return view_bthd(parts[i].data(), kBatch, kLen, kHeads, kDim); });

  Memory projection(3 * kCount);  // (batch, len, 3 * heads * dim)
  const Memory packed = attend(
      [&](Index i) { return view_packed(projection.data(), kBatch, kLen, kHeads, kDim, 3, i); });

  Memory wide(3 * 2 * kCount);  // each row followed by as much of something else
  const Strides strides{2 * kHeads * kLen * kDim, 2 * kLen * kDim, 2 * kDim};
  const Memory padded = attend(
      [&](Index i) { return TensorView<float>(wide.data() + i * 2 * kCount, kShape, strides); });

  const bool same = bthd == dense && packed == dense && padded == dense;
  std::printf("%td numbers from four layouts are %s\n", kCount, same ? "the same" : "NOT the same");
  return same ? 0 : 1;
}
