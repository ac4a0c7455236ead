// SPDX-License-Identifier: Apache-2.0
#pragma once

// heed::mpi::forward() and backward() (mpi/attention.hpp) by gathering alone: code that does not
// need the ring does not compile its kernels.

#include <heed/mpi/rank_call.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace mpi {

namespace detail {

// The Way of gathered calls (mpi/rank_call.hpp).
template <class Real>
struct Gathering {
  const SharedOp<Real>& op;

  [[nodiscard]] static std::size_t pieces() { return 1; }
  [[nodiscard]] Index step(const Geometry& g, const Options& options) const {
    return heed::detail::Driver<Real>::share_step(op.tiles, g, options);
  }
  static void require(const Geometry&, const Sharding&, const std::string&) {}
  [[nodiscard]] auto call(const AnyCommunicator& comm, const Inputs<Real>& in,
                          const Mask<Real>& mask, const Sharding& sharding, const Geometry&,
                          const Options& options) const {
    return GatherCall<Real>(comm, op, in, mask, sharding.queries, keys_of(sharding), options);
  }
};

template <class Comm, class Op, class Real = typename Op::Scalar>
void forward_gathered(const Comm& comm, const Op& op, const Inputs<Real>& in,
                      const Mask<Real>& mask, const Sharding& sharding, const Outputs<Real>& out,
                      Saved<Real>* saved, const Options& options) {
  static_assert(check_attention_op<Op>());
  heed::detail::share_op(op, nullptr, [&](const SharedOp<Real>& shared, auto*) {
    forward_by(Gathering<Real>{shared}, AnyCommunicator(comm), in, mask, sharding, out, saved,
               options);
  });
}
template <class Comm, class Op, class Real = typename Op::Scalar>
void backward_gathered(const Comm& comm, const Op& op, const Inputs<Real>& in,
                       const Mask<Real>& mask, const Sharding& sharding, const Saved<Real>& saved,
                       const StoredView<const Real>& out, const OutputGradients<Real>& grad_out,
                       const Gradients<Real>& grads, Op* grad_op, const Options& options) {
  static_assert(check_attention_op<Op>());
  heed::detail::share_op(op, grad_op,
                         [&](const SharedOp<Real>& shared, OpGradient<Real>* gradient) {
                           backward_by(Gathering<Real>{shared}, AnyCommunicator(comm), in, mask,
                                       sharding, saved, out, grad_out, grads, gradient, options);
                         });
}

}  // namespace detail

// forward() with Method::gather; queries and keys have the same shards.
template <class Comm, AttentionOp Op>
void forward_gathered(const Comm& comm, const Op& op, const Inputs<typename Op::Scalar>& in,
                      const Mask<typename Op::Scalar>& mask, const Shards& shards,
                      const Outputs<typename Op::Scalar>& out,
                      Saved<typename Op::Scalar>* saved = nullptr, const Options& options = {}) {
  detail::forward_gathered(comm, op, in, mask, Sharding{shards}, out, saved, options);
}

// backward() with Method::gather.
template <class Comm, AttentionOp Op>
void backward_gathered(const Comm& comm, const Op& op, const Inputs<typename Op::Scalar>& in,
                       const Mask<typename Op::Scalar>& mask, const Shards& shards,
                       const Saved<typename Op::Scalar>& saved,
                       const StoredView<const typename Op::Scalar>& out,
                       const OutputGradients<typename Op::Scalar>& grad_out,
                       const Gradients<typename Op::Scalar>& grads,
                       std::type_identity_t<Op>* grad_op = nullptr, const Options& options = {}) {
  detail::backward_gathered(comm, op, in, mask, Sharding{shards}, saved, out, grad_out, grads,
                            grad_op, options);
}

}  // namespace mpi
}  // namespace HEED_ABI
}  // namespace heed
