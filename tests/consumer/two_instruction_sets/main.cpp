// SPDX-License-Identifier: Apache-2.0
// Translation units for different instruction sets share one program: each keeps its own code, which runs on
// processors that have it, and both agree.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <vector>

std::vector<float> attend_base(const std::vector<float>& x, std::ptrdiff_t heads,
                               std::ptrdiff_t dim);
std::vector<float> attend_avx2(const std::vector<float>& x, std::ptrdiff_t heads,
                               std::ptrdiff_t dim);

int main() {
  const std::ptrdiff_t heads = 2, len = 37, dim = 16;
  std::vector<float> x(heads * len * dim);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = std::sin(float(i));
  const std::vector<float> base = attend_base(x, heads, dim);
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
    std::puts("this processor has no AVX2: only the base code was run");
    return std::isfinite(base[0]) ? 0 : 1;
  }
  const std::vector<float> wide = attend_avx2(x, heads, dim);
  float largest = 0;
  for (std::size_t i = 0; i < x.size(); ++i)
    largest = std::max(largest, std::abs(base[i] - wide[i]));
  std::printf("largest difference %g\n", double(largest));
  return largest < 1e-5F && largest > 0 ? 0 : 1;  // 0: one of the two ran twice
}
