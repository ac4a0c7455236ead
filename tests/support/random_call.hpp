// SPDX-License-Identifier: Apache-2.0
#pragma once

// Random calls for the conformance tests: tensors in every layout, masks of every kind, all drawn from
// constant seeds.

#include <heed/core/random.hpp>
#include <heed/engine/call.hpp>
#include <heed/mask/block_mask.hpp>
#include <heed/mask/visible.hpp>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace heed_test {

using heed::Geometry;
using heed::Index;
using heed::Shape;

inline constexpr std::uint64_t kSeed = 20250611;

template <class T>
[[nodiscard]] bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || !std::memcmp(a.data(), b.data(), a.size() * sizeof(T)));
}

// Layouts of a tensor in memory.
enum class Layout {
  dense,     // (batch, heads, len, dim)
  bthd,      // (batch, len, heads, dim)
  padded,    // dense with gaps behind rows, heads and batches
  one_off,   // dense, one element behind an aligned address
  reversed,  // padded, every axis but the last from its end to its begin: negative strides
};
inline constexpr Layout kLayouts[] = {Layout::dense, Layout::bthd, Layout::padded, Layout::one_off,
                                      Layout::reversed};

// At least `count` normal numbers of a stream. Calls of all variants on the same sizes read the same ones, and to draw them anew
// for each takes as long as everything else in a test.
[[nodiscard]] inline const std::vector<double>& drawn_normals(std::uint64_t stream, Index count) {
  constexpr std::size_t kStreams = 64;  // what is kept
  thread_local std::map<std::uint64_t, std::vector<double>> drawn;
  if (drawn.size() == kStreams && !drawn.contains(stream)) drawn.clear();
  std::vector<double>& numbers = drawn[stream];
  const heed::CounterRandom random(kSeed, stream);
  while (Index(numbers.size()) < count) numbers.push_back(random.normal(numbers.size()));
  return numbers;
}

// A tensor and its memory. The memory between and around its rows holds NaN: a read there shows in
// the results, a write is found by untouched().
template <class T>
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(const Shape& s, Layout layout = Layout::dense) : shape_(s) {
    if (layout == Layout::bthd)
      strides_ = {s.len * s.heads * s.dim, s.dim, s.heads * s.dim};
    else if (layout == Layout::padded || layout == Layout::reversed)
      strides_ = {(s.heads * (s.len * (s.dim + 3) + 5)) + 7, s.len * (s.dim + 3) + 5, s.dim + 3};
    else
      strides_ = {s.heads * s.len * s.dim, s.len * s.dim, s.dim};
    first_ = layout == Layout::dense ? 0 : 1;
    memory_.assign(std::size_t(first_ + s.batch * strides_.batch + 9), gap());
    if (layout == Layout::reversed && size() > 0) {
      first_ += (s.batch - 1) * strides_.batch + (s.heads - 1) * strides_.head +
                (s.len - 1) * strides_.row;
      strides_ = {-strides_.batch, -strides_.head, -strides_.row};
    }
    for_each([](T& x) { x = T(0); });
  }

  // Normal numbers of standard deviation `spread`.
  void randomise(std::uint64_t stream, double spread = 1.0) {
    const double* next = drawn_normals(stream, size()).data();
    for_each([&](T& x) { x = T(heed::ArithmeticOf<T>(spread * *next++)); });
  }
  // Makes each number larger or smaller by the rounding of one operation, at random.
  void nudge(std::uint64_t stream) {
    const heed::CounterRandom random(kSeed, stream);
    std::uint64_t n = 0;
    for_each([&](T& x) {
      x *= T(1) + (random.uniform(n++) < 0.5 ? -1 : 1) * std::numeric_limits<T>::epsilon();
    });
  }
  void fill(T value) {
    for_each([value](T& x) { x = value; });
  }

  [[nodiscard]] const Shape& shape() const { return shape_; }
  [[nodiscard]] Index size() const { return shape_.batch * shape_.heads * shape_.len * shape_.dim; }
  [[nodiscard]] bool given() const { return shape_ != Shape{}; }
  [[nodiscard]] heed::TensorView<T> view() {
    return given() ? heed::TensorView<T>(memory_.data() + first_, shape_, strides_)
                   : heed::TensorView<T>();
  }
  [[nodiscard]] heed::TensorView<const T> view() const {
    return given() ? heed::TensorView<const T>(memory_.data() + first_, shape_, strides_)
                   : heed::TensorView<const T>();
  }
  [[nodiscard]] T& operator()(Index b, Index h, Index t, Index c) { return view()(b, h, t, c); }
  [[nodiscard]] T operator()(Index b, Index h, Index t, Index c) const {
    return view()(b, h, t, c);
  }

  // All numbers in (batch, heads, len, dim) order.
  template <class U = T>
  [[nodiscard]] std::vector<U> dense() const {
    std::vector<U> numbers;
    numbers.reserve(std::size_t(size()));
    const_cast<Tensor*>(this)->for_each([&](T& x) { numbers.push_back(U(x)); });
    return numbers;
  }
  [[nodiscard]] const std::vector<T>& memory() const { return memory_; }

  // True if no gap was written to.
  [[nodiscard]] bool untouched() const {
    Tensor copy = *this;
    copy.fill(gap());
    return same_bits(copy.memory_, std::vector<T>(memory_.size(), gap()));
  }

 private:
  [[nodiscard]] static T gap() {
    return T(std::numeric_limits<heed::ArithmeticOf<T>>::quiet_NaN());
  }

  template <class F>
  void for_each(F&& f) {
    for (Index b = 0; b < shape_.batch; ++b)
      for (Index h = 0; h < shape_.heads; ++h)
        for (Index t = 0; t < shape_.len; ++t)
          for (Index c = 0; c < shape_.dim; ++c)
            f(memory_[std::size_t(first_ + b * strides_.batch + h * strides_.head +
                                  t * strides_.row + c)]);
  }

  Shape shape_;
  heed::Strides strides_;
  Index first_ = 0;
  std::vector<T> memory_;
};

// Tokens [first, first + count) of a tensor, in place.
template <class T>
[[nodiscard]] heed::TensorView<const T> tokens_of(const Tensor<T>& x, Index first, Index count) {
  const auto view = x.view();
  return {view.row(0, 0, first),
          {x.shape().batch, x.shape().heads, count, x.shape().dim},
          view.strides()};
}

// A mask with the memory that its views need. Copies share it.
template <class T>
struct OwnedMask {
  heed::Mask<T> mask;
  std::shared_ptr<std::unique_ptr<bool[]>> allowed;
  std::shared_ptr<Tensor<T>> bias;

  friend OwnedMask operator&(const OwnedMask& a, const OwnedMask& b) {
    return {a.mask & b.mask, a.allowed ? a.allowed : b.allowed, a.bias ? a.bias : b.bias};
  }
};

template <class T>
[[nodiscard]] OwnedMask<T> owned(heed::Mask<T> mask) {
  return {std::move(mask), nullptr, nullptr};
}

// A boolean mask of `shape` by a rule f(b, h, i, j).
template <class T, class F>
[[nodiscard]] OwnedMask<T> boolean_mask(const Shape& s, F&& f) {
  OwnedMask<T> owned;
  const auto count = std::size_t(s.batch * s.heads * s.len * s.dim);
  owned.allowed = std::make_shared<std::unique_ptr<bool[]>>(new bool[count + 1]);
  bool* at = owned.allowed->get();
  for (Index b = 0; b < s.batch; ++b)
    for (Index h = 0; h < s.heads; ++h)
      for (Index i = 0; i < s.len; ++i)
        for (Index j = 0; j < s.dim; ++j) *at++ = f(b, h, i, j);
  owned.mask = heed::boolean<T>(heed::TensorView<const bool>(owned.allowed->get(), s));
  return owned;
}

// Three of four pairs are visible, drawn at random.
template <class T>
[[nodiscard]] OwnedMask<T> random_boolean(const Shape& s, std::uint64_t stream) {
  const heed::CounterRandom random(kSeed, stream);
  std::uint64_t n = 0;
  return boolean_mask<T>(s, [&](Index, Index, Index, Index) { return random.uniform(n++) < 0.75; });
}

// Normal numbers; `hidden` of them are -infinity.
template <class T>
[[nodiscard]] OwnedMask<T> random_bias(const Shape& s, std::uint64_t stream, double hidden = 0.0,
                                       Layout layout = Layout::dense) {
  OwnedMask<T> owned;
  owned.bias = std::make_shared<Tensor<T>>(s, layout);
  owned.bias->randomise(stream);
  const heed::CounterRandom random(kSeed, stream + 1);
  std::uint64_t n = 0;
  for (Index b = 0; b < s.batch; ++b)
    for (Index h = 0; h < s.heads; ++h)
      for (Index i = 0; i < s.len; ++i)
        for (Index j = 0; j < s.dim; ++j)
          if (random.uniform(n++) < hidden)
            (*owned.bias)(b, h, i, j) = -std::numeric_limits<T>::infinity();
  owned.mask = heed::bias<T>(std::as_const(*owned.bias).view());
  return owned;
}

// Documents of three tokens each, on both axes, and differently long ones in odd batches.
template <class T>
[[nodiscard]] OwnedMask<T> random_documents(const Geometry& g) {
  std::vector<Index> queries, keys;
  for (Index b = 0; b < g.batch; ++b) {
    for (Index i = 0; i < g.len_q; ++i) queries.push_back(i / (3 + b));
    for (Index j = 0; j < g.len_kv; ++j) keys.push_back(j / (3 + b));
  }
  return owned(heed::documents<T>(queries, keys));
}

// 1/2, 1/4, ... per head, for distances from the key behind the query's own.
template <class T>
[[nodiscard]] OwnedMask<T> random_alibi(const Geometry& g, heed::Align align) {
  std::vector<T> slopes;
  for (Index h = 0; h < g.heads; ++h) slopes.push_back(T(std::ldexp(1.0, -int(h) - 1)));
  return owned(heed::alibi<T>(slopes, align, 1));
}

// The last batch sees no key, the others less and less.
[[nodiscard]] inline std::vector<Index> shrinking_lengths(const Geometry& g) {
  std::vector<Index> lengths;
  for (Index b = 0; b < g.batch; ++b)
    lengths.push_back(
        b + 1 == g.batch && g.batch > 1 ? 0 : g.len_kv - b * g.len_kv / g.batch - g.len_kv / 5);
  return lengths;
}

template <class T>
struct MaskCase {
  const char* name;
  std::function<OwnedMask<T>(const Geometry&)> make;
};

// Every kind of mask, in every broadcast form, and some combinations.
template <class T>
[[nodiscard]] std::vector<MaskCase<T>> mask_cases() {
  using heed::Align;
  using G = const Geometry&;
  const auto lengths = [](G g) { return owned(heed::key_lengths<T>(shrinking_lengths(g))); };
  return {
      {"none", [](G) { return OwnedMask<T>{}; }},
      {"causal", [](G) { return owned(heed::causal<T>()); }},
      {"causal, bottom right", [](G) { return owned(heed::causal<T>(Align::bottom_right)); }},
      {"causal, offset 3", [](G) { return owned(heed::causal<T>(Align::top_left, 3)); }},
      {"causal, offset -2", [](G) { return owned(heed::causal<T>(Align::top_left, -2)); }},
      {"window 4, 2", [](G) { return owned(heed::window<T>(4, 2)); }},
      {"window 0, open", [](G) { return owned(heed::window<T>(0, -1)); }},
      {"window 6, 0, bottom right",
       [](G) { return owned(heed::window<T>(6, 0, Align::bottom_right)); }},
      {"key lengths", lengths},
      {"boolean",
       [](G g) {
         return random_boolean<T>({g.batch, g.heads, g.len_q, g.len_kv}, 31);
       }},
      {"boolean per head",
       [](G g) {
         return random_boolean<T>({1, g.heads, g.len_q, g.len_kv}, 32);
       }},
      {"boolean per batch",
       [](G g) {
         return random_boolean<T>({g.batch, 1, g.len_q, g.len_kv}, 33);
       }},
      {"boolean per key",
       [](G g) {
         return random_boolean<T>({g.batch, 1, 1, g.len_kv}, 34);
       }},
      {"boolean, rows that see nothing",
       [](G g) {
         return boolean_mask<T>({1, 1, g.len_q, g.len_kv}, [](Index, Index, Index i, Index j) {
           return i % 3 != 1 && j % 5 != 2;
         });
       }},
      {"bias",
       [](G g) {
         return random_bias<T>({g.batch, g.heads, g.len_q, g.len_kv}, 41, 0.1);
       }},
      {"bias per head",
       [](G g) {
         return random_bias<T>({1, g.heads, g.len_q, g.len_kv}, 43);
       }},
      {"bias per batch",
       [](G g) {
         return random_bias<T>({g.batch, 1, g.len_q, g.len_kv}, 45, 0.1, Layout::padded);
       }},
      {"bias per pair",
       [](G g) {
         return random_bias<T>({1, 1, g.len_q, g.len_kv}, 47, 0.3);
       }},
      {"bias per key",
       [](G g) {
         return random_bias<T>({g.batch, 1, 1, g.len_kv}, 49, 0.2);
       }},
      {"bias per key, shared",
       [](G g) {
         return random_bias<T>({1, 1, 1, g.len_kv}, 51);
       }},
      {"bias per head and key",
       [](G g) {
         return random_bias<T>({1, g.heads, 1, g.len_kv}, 53);
       }},
      {"documents", [](G g) { return random_documents<T>(g); }},
      {"alibi", [](G g) { return random_alibi<T>(g, Align::top_left); }},
      {"soft cap", [](G) { return owned(heed::soft_cap<T>(T(1.5))); }},
      {"causal & key lengths & bias & alibi",
       [lengths](G g) {
         return owned(heed::causal<T>()) & lengths(g) &
                random_bias<T>({1, g.heads, g.len_q, g.len_kv}, 55, 0.1) &
                random_alibi<T>(g, Align::bottom_right);
       }},
      {"window & documents & boolean & soft cap",
       [](G g) {
         return owned(heed::window<T>(5, 3, Align::bottom_right)) & random_documents<T>(g) &
                random_boolean<T>({1, 1, g.len_q, g.len_kv}, 57) & owned(heed::soft_cap<T>(T(2)));
       }},
      {"function of batch, head and positions",
       [](G) {
         return owned(heed::visible<T>([](auto b, auto h, auto i, auto j) {
           return (j <= i + 3 * h) & ((i + j + b) % 4 != 1) & (i % 6 != 5);
         }));
       }},
      {"function of values per token",
       [](G g) {
         std::vector<Index> groups;
         for (Index n = 0; n < g.batch * std::max(g.len_q, g.len_kv); ++n)
           groups.push_back(n * n % 5);
         return owned(heed::visible<T>(
             [values = heed::TokenValues(groups, std::max<Index>(1, g.batch))](
                 auto b, auto, auto i, auto j) { return values(b, i) != values(b, j) + 1; }));
       }},
      {"causal & function & bias & alibi",
       [](G g) {
         return owned(heed::causal<T>(Align::bottom_right)) &
                owned(heed::visible<T>([](auto, auto, auto, auto j) { return j % 3 != 1; })) &
                random_bias<T>({1, g.heads, g.len_q, g.len_kv}, 59, 0.1) &
                random_alibi<T>(g, Align::bottom_right);
       }},
      {"key lengths | not a window",
       [lengths](G g) { return owned(lengths(g).mask | !heed::window<T>(2, 4)); }},
      {"blocks of 8",
       [](G g) {
         heed::BlockLists lists{8, 8, {0}, {}};
         for (Index q = 0; q < (g.len_q + 7) / 8; ++q) {
           for (Index k = q % 3; k < (g.len_kv + 7) / 8; k += 2) lists.indices.push_back(k);
           lists.start.push_back(Index(lists.indices.size()));
         }
         return owned(heed::block_lists<T>(lists));
       }},
      {"two bands", [](G) { return owned(heed::causal<T>() & heed::window<T>(7, 5)); }},
  };
}

// The inputs of one forward and backward, in any layout.
template <class T>
struct Call {
  Geometry geometry;
  Tensor<T> query, key, value, extra, grad_out;
  OwnedMask<T> mask;
  heed::Options options;

  [[nodiscard]] heed::Inputs<T> inputs() const {
    heed::Inputs<T> in{query.view(), key.view(), value.view(), extra.view()};
    in.first_query = geometry.first_query;
    return in;
  }
};

// A call on one thread; `extra_dim` is the width of the op's extra input, 0 for none.
template <class T>
[[nodiscard]] Call<T> random_call(const Geometry& g, Index extra_dim, std::uint64_t seed = 1,
                                  Layout layout = Layout::dense) {
  Call<T> call;
  call.geometry = g;
  call.options.threads = 1;
  call.query = Tensor<T>(g.query_shape(), layout);
  call.key = Tensor<T>(g.key_shape(), layout);
  call.value = Tensor<T>(g.value_shape(), layout);
  call.grad_out = Tensor<T>(g.out_shape(), layout);
  if (extra_dim > 0) call.extra = Tensor<T>(g.extra_shape(extra_dim), layout);
  std::uint64_t stream = 100 * seed;
  for (Tensor<T>* tensor : {&call.query, &call.key, &call.value, &call.extra, &call.grad_out})
    tensor->randomise(++stream);
  return call;
}

// Tiles so small that 33 tokens cross several: one vector of queries, as many keys.
[[nodiscard]] inline heed::Options small_tiles(int threads = 1) {
  heed::Options options;
  options.threads = threads;
  options.key_tile = 1;
  options.panel_vectors = 1;
  return options;
}

}  // namespace heed_test
