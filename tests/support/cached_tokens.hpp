// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tokens of a sequence, the last of which asks a cache: it must get the last rows of the whole sequence.

#include <heed/check/op_call.hpp>
#include <heed/kv_cache.hpp>

#include <cmath>
#include <vector>

namespace heed_test {

// Four query heads on two heads of rows that are keys and values at once.
class CachedTokens {
 public:
  CachedTokens(heed::Index len, heed::Index dim)
      : len_(len),
        dim_(dim),
        keys_(numbers(2 * len * dim, 1)),
        queries_(numbers(4 * len * dim, 2)) {}

  [[nodiscard]] heed::TensorView<const float> keys() const {
    return {keys_.data(), {1, 2, len_, dim_}};
  }
  [[nodiscard]] heed::TensorView<const float> last_query() const {
    return {
        queries_.data() + (len_ - 1) * dim_, {1, 4, 1, dim_}, {4 * len_ * dim_, len_ * dim_, dim_}};
  }
  [[nodiscard]] heed::KvCache<float> cache() const {
    heed::KvCache<float> cache(1, 2, dim_, dim_);
    cache.append(keys(), keys());
    return cache;
  }
  // Out of the last token, (heads, dim), by a call with these inputs.
  template <class Op>
  [[nodiscard]] std::vector<float> last(const Op& op, const heed::Inputs<float>& in) const {
    std::vector<float> out(std::size_t(4 * dim_));
    heed::forward(op, in, {}, {out.data(), {1, 4, 1, dim_}});
    return out;
  }
  // The distance of this output from the last rows of the whole sequence.
  template <class Op>
  [[nodiscard]] double distance_to_whole(const Op& op, const std::vector<float>& last) const {
    const heed::Shape all{1, 4, len_, dim_};
    std::vector<float> whole(queries_.size());
    heed::forward(op, {heed::TensorView<const float>(queries_.data(), all), keys(), keys()},
                  heed::causal<float>(), {whole.data(), all});
    double worst = 0;
    for (heed::Index h = 0; h < 4; ++h)
      for (heed::Index c = 0; c < dim_; ++c) {
        const double distance =
            std::abs(double(last[std::size_t(h * dim_ + c)]) -
                     double(whole[std::size_t((h * len_ + len_ - 1) * dim_ + c)]));
        if (!(distance <= worst)) worst = distance;  // NaN, too
      }
    return worst;
  }

 private:
  [[nodiscard]] static std::vector<float> numbers(heed::Index count, double at) {
    std::vector<float> x(static_cast<std::size_t>(count));
    for (std::size_t n = 0; n < x.size(); ++n) x[n] = float(std::sin(at + 3 * double(n)));
    return x;
  }

  heed::Index len_, dim_;
  std::vector<float> keys_, queries_;
};

}  // namespace heed_test
