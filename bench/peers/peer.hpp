// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a user has without heed, in the same tables: a peer computes plain attention and its gradients.

#include "../suite/ops.hpp"

namespace heed_bench {

// Numbers of a call, (heads, len, dim) each.
template <class T>
struct Heads {
  Case shape;
  std::vector<T> q, k, v, dout, out, dq, dk, dv;

  explicit Heads(const Case& c)
      : shape(c),
        q(normals<T>(c.heads * c.len_q * c.dim, 1)),
        k(normals<T>(c.heads * c.len_kv * c.dim, 2)),
        v(normals<T>(c.heads * c.len_kv * c.dim_v, 3)),
        dout(normals<T>(c.heads * c.len_q * c.dim_v, 5)),
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
  Heads<T> ours(peer.shape);
  const heed::Geometry g = peer.shape.geometry();
  const heed::Shape q{1, g.heads, g.len_q, g.dim_qk}, k{1, g.heads, g.len_kv, g.dim_qk},
      v{1, g.heads, g.len_kv, g.dim_v}, out{1, g.heads, g.len_q, g.dim_v};
  const heed::ScaledDot<T> op;
  const auto mask = peer.causal() ? heed::causal<T>() : heed::Mask<T>{};
  const heed::Inputs<T> in{{ours.q.data(), q}, {ours.k.data(), k}, {ours.v.data(), v}, {}};
  heed::Saved<T> saved;
  heed::forward(op, in, mask, heed::TensorView<T>(ours.out.data(), out), &saved);
  if (pass == Pass::forward) return deviation(peer.out, ours.out);
  heed::backward(
      op, in, mask, saved, heed::TensorView<const T>(ours.out.data(), out),
      heed::TensorView<const T>(ours.dout.data(), out),
      heed::Gradients<T>{{ours.dq.data(), q}, {ours.dk.data(), k}, {ours.dv.data(), v}, {}, {}});
  return std::max(
      {deviation(peer.dq, ours.dq), deviation(peer.dk, ours.dk), deviation(peer.dv, ours.dv)});
}

// Peer  constructible from a Case; forward(), backward(); `heads`, a Heads<T>.
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
        const Contender other = baseline<T>(c);
        measure<T>(state, c, pass, {[peer] { peer->forward(); }, [peer] { peer->backward(); }},
                   &other);
      });
    }
  }
}

}  // namespace heed_bench
