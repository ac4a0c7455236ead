// SPDX-License-Identifier: Apache-2.0
#pragma once

// Attention that a user has without heed, for the same tables: a peer computes plain attention and its gradients.

#include "../suite/ops.hpp"

namespace heed_bench {

// Tensors of a call, (heads, len, dim) each.
template <class T>
struct Heads {
  Case shape;
  std::vector<T> q, k, v, dout, out, dq, dk, dv;

  explicit Heads(const Case& c)
      : Heads(c, heed::normal_numbers(heed::ScaledDot<T>{}, c.geometry())) {}
  Heads(const Case& c, heed::CallNumbers<T> numbers)
      : shape(c),
        q(std::move(numbers.query)),
        k(std::move(numbers.key)),
        v(std::move(numbers.value)),
        dout(std::move(numbers.grad_out)),
        out(dout.size()),
        dq(q.size()),
        dk(k.size()),
        dv(v.size()) {}

  [[nodiscard]] bool causal() const { return shape.mask == MaskKind::causal; }
  [[nodiscard]] T scale() const { return T(1 / std::sqrt(double(shape.dim))); }
};

// Largest difference from heed, relative to the largest number.
template <class T>
[[nodiscard]] double deviation_from_heed(const Heads<T>& peer, Pass pass) {
  CaseCall<heed::ScaledDot<T>> at(heed::ScaledDot<T>{}, peer.shape.geometry(), peer.shape.mask,
                                  {.threads = 1});
  heed::OpCall<heed::ScaledDot<T>>& ours = at.call;
  ours.forward();
  if (pass == Pass::forward) return deviation(peer.out, ours.out);
  ours.backward();
  return std::max({deviation(peer.dq, ours.grad_query), deviation(peer.dk, ours.grad_key),
                   deviation(peer.dv, ours.grad_value)});
}

// A Peer is constructible from a Case, and has forward(), backward(), and `heads`, a Heads<T>.
template <class Peer, class T>
void add_peer(const char* name, const char* dtype) {
  for (const Case& c : cases()) {
    const bool plain = c.mask == MaskKind::full || c.mask == MaskKind::causal;
    if (!plain || c.kv_heads != c.heads || c.threads > Peer::kThreads ||
        (Peer::kWholeMap && c.len_kv > 8192))
      continue;
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      if (c.decodes() && pass == Pass::backward) continue;
      add_benchmark(name, pass, dtype, c, [=](benchmark::State& state) {
        Case small = c;
        small.len_q = std::min<Index>(c.len_q, 70);
        small.len_kv = 70;
        Peer probe(small);
        probe.forward();
        if (pass == Pass::backward) probe.backward();
        if (!(deviation_from_heed(probe.heads, pass) < (sizeof(T) == 4 ? 1e-4 : 1e-12)))
          return state.SkipWithError("differs from heed");
        const auto peer = std::make_shared<Peer>(c);
        const Contender other = baseline<T>(c, {.threads = c.threads});
        measure<T>(state, c, pass, {[peer] { peer->forward(); }, [peer] { peer->backward(); }},
                   &other);
      });
    }
  }
}

}  // namespace heed_bench
