// SPDX-License-Identifier: Apache-2.0
// Every variant, forward and backward, from heed::compiled: a variant without a line in heed/compiled.hpp is an
// undefined reference here.
#include <heed/compiled.hpp>

#include <cstdio>
#include <string>
#include <vector>

template <class T>
struct Memory {
  std::vector<T> numbers;
  heed::Shape shape;

  explicit Memory(const heed::Shape& s, T value = T(0))
      : numbers(std::size_t(s.batch * s.heads * s.len * s.dim), value), shape(s) {}
  heed::TensorView<T> view() { return heed::TensorView<T>(numbers.data(), shape); }
};

// With one key, its value shows in the output, and the output's gradient in the value's.
template <class T, class Op>
bool mixes(const heed::Variant<Op>& variant) {
  const heed::Geometry& g = variant.geometry;
  Memory<T> query({1, g.query_heads, 1, g.dim_qk}, T(0.5)),
      key({1, g.kv_heads, 1, g.dim_qk}, T(0.25)), value({1, g.kv_heads, 1, g.dim_v}, T(0.75)),
      out({1, g.heads, 1, g.dim_v}), grad_out({1, g.heads, 1, g.dim_v}, T(1)),
      grad_value({1, g.kv_heads, 1, g.dim_v});
  Memory<T> extra({1, g.heads, 1, variant.op.extra_dim(g)});
  const heed::Inputs<T> in{query.view(), key.view(), value.view(),
                           extra.numbers.empty() ? heed::TensorView<T>{} : extra.view()};
  heed::Saved<T> saved;
  heed::forward(variant.op, in, {}, out.view(), &saved);
  heed::Gradients<T> grads;
  grads.value = grad_value.view();
  heed::backward(variant.op, in, {}, saved, out.view(), grad_out.view(), grads);
  return out.numbers[0] != T(0) && grad_value.numbers[0] != T(0);
}

template <class T>
int failures() {
  int failed = 0;
  heed::for_each_variant<T>({1, 2, 2, 2, 1, 1, 8, 8}, [&](const auto& variant) {
    if (mixes<T>(variant)) return;
    std::printf("%s gives zeros\n", variant.name);
    ++failed;
  });
  return failed;
}

int main() { return failures<float>() + failures<double>() == 0 ? 0 : 1; }
