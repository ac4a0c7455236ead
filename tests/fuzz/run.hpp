// SPDX-License-Identifier: Apache-2.0
#pragma once

// One run of a case: its tensors laid out in memory at random, heed's forward and backward on them, and the results.

#include "fuzz/case.hpp"
#include "fuzz/tensor.hpp"

#include <heed/mask/block_mask.hpp>
#include <heed/mask/visible.hpp>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace fuzz::detail {

struct Named {
  std::string name;
  std::vector<double> numbers;
};
struct Results {
  std::vector<double> out;
  EngineResult engine;
  std::vector<Named>
      inputs;          // gradients of query, key, value, extra, bias; empty where not asked for
  std::string beside;  // the output beside which memory was overwritten
};

inline constexpr const char* kInputs[] = {"query", "key", "value", "extra", "bias"};

template <class T>
struct Arena {
  Tensor<T> query, key, value, extra, bias, out, grad_out;
  Tensor<T> grads[5];
  Tensor<bool> allowed;
};

// Memory and views of one run.
template <class T>
Arena<T> lay_out(const Case& c) {
  Draw draw(c.seed ^ 0x5bd1e995);
  const Plain<double>& p = c.plain;
  const Sizes& s = p.sizes;
  const heed::Shape q{s.batch, s.query_heads, s.len_q, s.dim_qk},
      k{s.batch, s.kv_heads, s.len_kv, s.dim_qk};
  const heed::Shape v{s.batch, s.kv_heads, s.len_kv, s.dim_v},
      o{s.batch, s.heads, s.len_q, s.dim_v};
  const heed::Shape x{s.batch, s.heads, s.len_q, s.extra};
  Arena<T> a;
  const auto pack = [&](Tensor<T>& first, Tensor<T>& second, Tensor<T>& third) {
    auto memory = std::make_shared<Memory<T>>(q.batch * q.heads * q.len * q.dim * 4 + 8);
    first = Tensor<T>(memory, q, 4, 0);
    second = Tensor<T>(memory, q, 4, 1);
    third = Tensor<T>(memory, q, 4, 2);
  };
  if (c.packed) {
    pack(a.query, a.key, a.value);
    pack(a.grads[0], a.grads[1], a.grads[2]);
  } else {
    a.query = Tensor<T>(draw, q), a.key = Tensor<T>(draw, k), a.value = Tensor<T>(draw, v);
    a.grads[0] = Tensor<T>(draw, q), a.grads[1] = Tensor<T>(draw, k),
    a.grads[2] = Tensor<T>(draw, v);
  }
  a.out = Tensor<T>(draw, o);
  a.grad_out = Tensor<T>(draw, o);
  if (s.extra > 0) a.extra = Tensor<T>(draw, x), a.grads[3] = Tensor<T>(draw, x);
  if (p.bias.given()) {
    const heed::Shape b{p.bias.batch, p.bias.heads, p.bias.len, p.bias.keys};
    a.bias = Tensor<T>(draw, b);
    a.grads[4] = Tensor<T>(draw, b);
    a.bias.fill(p.bias.numbers);
  }
  if (p.mask.allowed.given()) {
    const auto& m = p.mask.allowed;
    a.allowed = Tensor<bool>(draw, {m.batch, m.heads, m.len, m.keys});
    a.allowed.fill(m.numbers);
  }
  a.query.fill(p.query), a.key.fill(p.key), a.value.fill(p.value), a.extra.fill(p.extra);
  a.grad_out.fill(c.grad_out);
  for (Tensor<T>* written :
       {&a.out, &a.grads[0], &a.grads[1], &a.grads[2], &a.grads[3], &a.grads[4]})
    written->fill(T(7));  // must be overwritten
  return a;
}

template <class T>
heed::Mask<T> function_mask(const PlainFunction& f, const Sizes& s) {
  const auto align = f.bottom_right ? heed::Align::bottom_right : heed::Align::top_left;
  if (f.kind == PlainFunction::near)
    return heed::visible<T>(
        [n = f.number](auto, auto h, auto i, auto j) { return absolute(i - j) <= n + h; }, align,
        f.offset);
  if (f.kind == PlainFunction::modulo)
    return heed::visible<T>(
        [n = f.number](auto b, auto, auto i, auto j) { return (3 * i + j) % n != b % 2; }, align,
        f.offset);
  if (f.kind == PlainFunction::values)
    return heed::visible<T>(
        [values = heed::TokenValues(f.numbers, std::max<Index>(1, s.batch))](
            auto b, auto, auto i, auto j) { return values(b, j) <= absolute(i) % 4; },
        align, f.offset);
  heed::BlockLists lists{f.number, f.number, {0}, {}};
  const Index blocks = (s.len_kv + f.number - 1) / f.number;
  for (Index row = 0; row * f.number < s.len_q; ++row) {
    for (Index k = 0; k < blocks; ++k)
      if (f.numbers[std::size_t(row * blocks + k)] != 0) lists.indices.push_back(k);
    lists.start.push_back(Index(lists.indices.size()));
  }
  return heed::block_lists<T>(std::move(lists));
}
template <class T>
heed::Mask<T> functions_mask(const PlainMask& m, const Sizes& s) {
  const heed::Geometry g{s.batch, s.heads,  s.query_heads, s.kv_heads,
                         s.len_q, s.len_kv, s.dim_qk,      s.dim_v};
  heed::Mask<T> all;
  for (const PlainFunction& f : m.functions) {
    heed::Mask<T> one = function_mask<T>(f, s);
    if (f.negated) one = !one;
    if (f.kept) one = heed::BlockMask<T>(one, g).mask();
    all = &f == m.functions.data() ? one : m.united ? all | one : all & one;
  }
  return all;
}

template <class T>
heed::Mask<T> mask_of(const Case& c, const Arena<T>& a) {
  const PlainMask& m = c.plain.mask;
  const auto align = [](bool bottom_right) {
    return bottom_right ? heed::Align::bottom_right : heed::Align::top_left;
  };
  heed::Mask<T> mask = functions_mask<T>(m, c.plain.sizes);
  for (const PlainBand& band : m.bands)
    mask.bands.push_back({band.left, band.right, align(band.bottom_right), band.offset});
  if (!m.key_lengths.empty()) mask.key_lengths = m.key_lengths;
  if (!m.query_documents.empty() || !m.key_documents.empty()) {
    mask.query_documents = m.query_documents;
    mask.key_documents = m.key_documents;
  }
  if (!m.slopes.empty()) mask.slopes.emplace(m.slopes.begin(), m.slopes.end());
  mask.slope_align = align(m.slopes_bottom_right);
  mask.slope_offset = m.slopes_offset;
  mask.soft_cap = T(m.soft_cap);
  mask.bias = a.bias.view();
  mask.allowed = a.allowed.view();
  return mask;
}

template <class T>
Results run(const Case& c, int threads) {
  const Arena<T> a = lay_out<T>(c);
  EngineCall<T> call;
  call.tensors = {{a.query.view(), a.key.view(), a.value.view(), a.extra.view()},
                  a.out.view(),
                  a.grad_out.view(),
                  {}};
  call.tensors.inputs.first_query = c.plain.sizes.first_query;
  call.mask = mask_of(c, a);
  heed::Gradients<T>& of = call.tensors.grads;
  heed::StoredView<T>* grads[] = {&of.query, &of.key, &of.value, &of.extra, &of.bias};
  for (int n = 0; n < 5; ++n)
    if (c.wants[n]) *grads[n] = a.grads[n].view();
  call.options = c.options;
  call.options.threads = threads;
  call.backward = !c.visible_garbage;
  Results r;
  r.engine = c.op->run(call);
  r.out = a.out.dense();
  for (int n = 0; n < 5; ++n)
    r.inputs.push_back(
        {kInputs[n], c.wants[n] && call.backward ? a.grads[n].dense() : std::vector<double>()});
  if (!a.out.untouched()) r.beside = "out";
  for (int n = 0; n < 5; ++n)
    if (!a.grads[n].untouched()) r.beside = std::string("the gradient of ") + kInputs[n];
  return r;
}

inline bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
}
inline std::string different_bits(const Results& a, const Results& b,
                                  const std::vector<std::string>& params) {
  if (!same_bits(a.out, b.out)) return "out";
  for (std::size_t n = 0; n < a.engine.lse.size(); ++n)
    if (!same_bits(a.engine.lse[n], b.engine.lse[n])) return "lse";
  for (std::size_t n = 0; n < a.engine.reports.size(); ++n)
    if (!same_bits(a.engine.reports[n], b.engine.reports[n])) return "a report";
  for (std::size_t n = 0; n < a.inputs.size(); ++n)
    if (!same_bits(a.inputs[n].numbers, b.inputs[n].numbers))
      return "the gradient of " + a.inputs[n].name;
  for (std::size_t n = 0; n < a.engine.params.size(); ++n)
    if (!same_bits(a.engine.params[n], b.engine.params[n])) return "the gradient of " + params[n];
  return "";
}

}  // namespace fuzz::detail
