// SPDX-License-Identifier: Apache-2.0

// Step 2 of 15. You learn that every variant takes the two calls of step 1, so that one program serves all of them.
// heed/variants.hpp lists the variants; visit() gives each op's parameters by name.

#include <heed/check/op_call.hpp>
#include <heed/variants.hpp>

#include <cmath>
#include <cstdio>

namespace {

template <class T>
double size_of(const std::vector<T>& numbers) {
  double squares = 0;
  for (const T x : numbers) squares += double(x) * double(x);
  return std::sqrt(squares);
}

}  // namespace

int main() {
  const heed::Geometry sizes{.batch = 1,
                             .heads = 4,
                             .query_heads = 4,
                             .kv_heads = 4,
                             .len_q = 64,
                             .len_kv = 64,
                             .dim_qk = 32,
                             .dim_v = 32};
  bool sound = true;
  std::printf("%-16s %-38s %8s %8s  parameters\n", "variant", "settings", "|out|", "|dL/dq|");
  heed::for_each_variant<float>(sizes, [&]<class Op>(const heed::Variant<Op>& variant) {
    heed::OpCall<Op> call(variant.op, variant.geometry, heed::causal<float>());
    call.forward();
    call.backward();
    const double out = size_of(call.out), grad_query = size_of(call.grad_query);
    sound = sound && out > 0 && grad_query > 0 && std::isfinite(out) && std::isfinite(grad_query);
    std::printf("%-16s %-38s %8.3f %8.3f ", variant.name, variant.settings, out, grad_query);
    heed::for_each_param(call.grad_op,
                         [](const char* name, const auto&) { std::printf(" %s", name); });
    std::printf("\n");
  });
  return sound ? 0 : 1;
}
