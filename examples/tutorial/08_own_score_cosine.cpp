// SPDX-License-Identifier: Apache-2.0

// Step 8 of 15. You learn which numbers of a row a score may read beside the dot product, how parameters and options are
// kept in range, and how to time an op. The score is a cosine with a learnt temperature, softly capped:
//
//   score_ij = cap tanh(temperature_h cos(q_i, k_j) / cap)
//
// InverseNorms gives pair.query[0] = 1/|q| and pair.key[0] = 1/|k|, computed once per row, with their derivatives. `cap`
// is an option and not a heed::Param: it is not learnt, but its range is checked.

#include <heed/check/op_timing.hpp>
#include <heed/plug/own_score.hpp>

#include <cstdio>
#include <stdexcept>

template <class T>
struct CappedCosine {
  heed::Param<T> temperature = T(10);
  double cap = 15;
  static constexpr auto parameters =
      std::tuple{heed::named("temperature", &CappedCosine::temperature, heed::Range::positive),
                 heed::named("cap", &CappedCosine::cap, heed::Range::positive)};
  using Features = heed::InverseNorms;
  using PlaceFree = CappedCosine;  // promises, see heed/plug/promises.hpp
  using NormedDots = CappedCosine;

  template <class S>
  S score(const auto& pair, const auto& p) const {
    return cap * heed::math::tanh(S(p[0] * heed::cosine(pair) / cap));
  }
};

int main() {
  heed::OwnAttention<CappedCosine, float> op;
  const heed::Geometry sizes{.batch = 1,
                             .heads = 4,
                             .query_heads = 4,
                             .kv_heads = 2,  // grouped heads
                             .len_q = 256,
                             .len_kv = 256,
                             .dim_qk = 64,
                             .dim_v = 64};
  std::printf("%s\n",
              heed::time_op(op, sizes, heed::causal<float>(), 5, {.threads = 1}).text().c_str());

  // The score does not change when a query is scaled, so the gradient of a query is orthogonal to it.
  heed::OpCall call(op, sizes, heed::causal<float>());
  call.forward();
  call.backward();
  double along = 0, size = 0;
  for (std::size_t i = 0; i < 64; ++i) {
    const std::size_t at = 200 * 64 + i;  // row 200 of head 0
    along += double(call.query[at]) * double(call.grad_query[at]);
    size += std::abs(double(call.query[at]) * double(call.grad_query[at]));
  }
  std::printf("q . dL/dq = %.1e of terms of size %.1e\n", along, size);

  op.score.temperature = {1.0F, -2.0F, 3.0F, 4.0F};
  try {
    op.validate(sizes, "CappedCosine");
  } catch (const std::invalid_argument& error) {
    std::printf("%s\n", error.what());
    return size > 0 && std::abs(along) < 1e-4 * size ? 0 : 1;
  }
  return 1;
}
