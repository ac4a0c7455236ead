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
struct Gathering {
  template <class Op>
  static constexpr std::size_t kPieces = 1;
  template <class Op>
  [[nodiscard]] static Index step(const Op& op, const Geometry& g, const Options& options) {
    return share_step(op, g, options);
  }
  template <class Op>
  static void require(const Op&, const Geometry&, const Sharding&, const std::string&) {}
  template <class Comm, class Op>
  [[nodiscard]] static auto call(const Comm& comm, const Op& op,
                                 const Inputs<typename Op::Scalar>& in,
                                 const Mask<typename Op::Scalar>& mask, const Sharding& sharding,
                                 const Geometry&, const Options& options) {
    return GatherCall<Op, Comm>(comm, op, in, mask, sharding.queries, keys_of(sharding), options);
  }
};

}  // namespace detail

// forward() with Method::gather; queries and keys have the same shards.
template <class Comm, AttentionOp Op>
void forward_gathered(const Comm& comm, const Op& op, const Inputs<typename Op::Scalar>& in,
                      const Mask<typename Op::Scalar>& mask, const Shards& shards,
                      const Outputs<typename Op::Scalar>& out,
                      Saved<typename Op::Scalar>* saved = nullptr, const Options& options = {}) {
  detail::forward_by<detail::Gathering>(comm, op, in, mask, Sharding{shards}, out, saved, options);
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
  detail::backward_by<detail::Gathering>(comm, op, in, mask, Sharding{shards}, saved, out, grad_out,
                                         grads, grad_op, options);
}

}  // namespace mpi
}  // namespace HEED_ABI
}  // namespace heed
