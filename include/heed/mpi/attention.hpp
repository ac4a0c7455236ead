// SPDX-License-Identifier: Apache-2.0
#pragma once

// Context parallelism: one attention call whose tokens are spread over ranks. Each rank calls with the rows that it has:
//
//   const heed::mpi::Communicator comm(MPI_COMM_WORLD);
//   const auto shards = heed::mpi::Shards::zigzag(len, comm.size(), heed::mpi::shard_step(op, whole));
//   heed::mpi::Saved<float> saved;
//   heed::mpi::forward(comm, op, in, heed::causal<float>(), {shards}, out, &saved);
//   heed::mpi::backward(comm, op, in, heed::causal<float>(), {shards}, saved, out, grad_out, grads, &grad_op);
//
// Tensors hold the rows of the rank, its pieces one behind the other (mpi/shards.hpp). Every number of tokens counts the
// whole sequence: op, mask, options and first_query are those of the one call, the same on all ranks, and dropout drops the
// pairs that it drops in one process. A boolean mask and a bias are those of the whole call, on each rank.
//
//   gather   mpi/gather.hpp: any op; rows of queries have the bits of one process
//   ring     mpi/ring.hpp: memory O(len / ranks), for ops whose weights are softmaxes over the keys
//
// All ranks of the communicator make each call together, with threads of their own
// (Options::threads). Before any tensor travels the ranks compare their arguments: if one of them
// cannot make the call, or two differ, all throw std::invalid_argument with the same sentence. Comm
// is a Communicator (mpi/communicator.hpp), or any class with its members.

#include <heed/mpi/gathered.hpp>
#include <heed/mpi/ring.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace mpi {

namespace detail {

// The Way of the ring (mpi/rank_call.hpp).
template <class Real>
struct Ringing {
  const SharedOp<Real>& op;
  RingOp<Real> ring;

  [[nodiscard]] std::size_t pieces() const { return ring.maps.size(); }
  [[nodiscard]] Index step(const Geometry& g, const Options& options) const {
    return ring_step(ring, g, options);
  }
  void require(const Geometry& g, const Sharding& sharding, const std::string& where) const {
    require_ring(op.tiles, ring, g, where);
    heed::require(!op.tiles.readout.traits.uses_own_rows || keys_of(sharding) == sharding.queries,
                  where,
                  ": the readout reads key and value of its own row; in the ring the shards of "
                  "keys must be those of queries");
  }
  [[nodiscard]] auto call(const AnyCommunicator& comm, const Inputs<Real>& in,
                          const Mask<Real>& mask, const Sharding& sharding, const Geometry& g,
                          const Options& options) const {
    return RingCall<Real>(comm, op, ring, in, mask, sharding.queries, keys_of(sharding), g,
                          options);
  }
};

}  // namespace detail

// Multiples of this number, and the end, are where shards of queries may begin and end: share_step() of the call, or in the
// ring that of its single calls. `whole`: the sizes of the whole call.
template <class Op>
[[nodiscard]] Index shard_step(const Op& op, const Geometry& whole, Method method = Method::gather,
                               const Options& options = {}) {
  return method == Method::ring ? detail::ring_step(detail::ring_op(op), whole, options)
                                : share_step(op, whole, options);
}

// The rows of this rank from a tensor of all tokens, in the order of the rank's tensors, dense
// (batch, heads, shards.held(rank), dim).
template <class Element>
[[nodiscard]] std::vector<std::remove_const_t<Element>> own_rows(const Shards& shards, int rank,
                                                                 const TensorView<Element>& whole) {
  Shape shape = whole.shape();
  require(shape.len == shards.len(), "heed::mpi::own_rows: the tensor has len ", shape.len,
          ", the shards ", shards.len());
  shape.len = shards.held(rank);
  const std::vector<std::remove_const_t<Element>> packed =
      detail::pack_rows(shards, rank, whole, detail::kWholeRow);
  std::vector<std::remove_const_t<Element>> rows(packed.size());
  const TensorView<std::remove_const_t<Element>> to(rows.data(), shape);
  detail::for_packed_rows(shards, rank, shape, packed.data(), detail::kOwnRow,
                          [&](Index b, Index h, Index n, const auto* numbers) {
                            std::copy_n(numbers, shape.dim, to.row(b, h, n));
                          });
  return rows;
}

namespace detail {

template <class Real, bool fits>
struct SavedPointerArgument : heed::detail::ArgumentOf<Saved<Real>*> {
  static_assert(
      fits,
      "heed: saved, behind out, must be &saved, of a heed::mpi::Saved for numbers of the op's "
      "type, or nullptr (mpi/attention.hpp)");
};
template <class Real, bool fits>
struct SavedArgument : heed::detail::ArgumentOf<Saved<Real>> {
  static_assert(
      fits,
      "heed: saved, behind the sharding, must be the heed::mpi::Saved for numbers of the op's "
      "type that forward() filled (mpi/attention.hpp)");
};

}  // namespace detail

// heed::forward() of the whole call; `out` receives the rank's rows.
template <class Comm, AttentionOp Op, std::same_as<typename Op::Scalar> Real = typename Op::Scalar>
void forward(const Comm& comm, const Op& op, const Inputs<Real>& in,
             const Mask<typename Op::Scalar>& mask, const Sharding& sharding,
             const Outputs<typename Op::Scalar>& out, Saved<typename Op::Scalar>* saved = nullptr,
             const Options& options = {}) {
  if (sharding.method == Method::gather)
    return detail::forward_gathered(comm, op, in, mask, sharding, out, saved, options);
  static_assert(check_attention_op<Op>());
  heed::detail::share_op(op, nullptr, [&](const SharedOp<Real>& shared, auto*) {
    detail::forward_by(detail::Ringing<Real>{shared, detail::ring_op(op)}, AnyCommunicator(comm),
                       in, mask, sharding, out, saved, options);
  });
}

// heed::backward() of the whole call. Gradients of queries, keys, values and other inputs per token are written for the
// rank's rows; gradients of the bias and of the parameters are those of the whole call, on each rank.
template <class Comm, AttentionOp Op, std::same_as<typename Op::Scalar> Real = typename Op::Scalar>
void backward(const Comm& comm, const Op& op, const Inputs<Real>& in,
              const Mask<typename Op::Scalar>& mask, const Sharding& sharding,
              const Saved<typename Op::Scalar>& saved,
              const StoredView<const typename Op::Scalar>& out,
              const OutputGradients<typename Op::Scalar>& grad_out,
              const Gradients<typename Op::Scalar>& grads,
              std::type_identity_t<Op>* grad_op = nullptr, const Options& options = {}) {
  if (sharding.method == Method::gather)
    return detail::backward_gathered(comm, op, in, mask, sharding, saved, out, grad_out, grads,
                                     grad_op, options);
  static_assert(check_attention_op<Op>());
  heed::detail::share_op(op, grad_op,
                         [&](const SharedOp<Real>& shared, OpGradient<Real>* gradient) {
                           detail::backward_by(detail::Ringing<Real>{shared, detail::ring_op(op)},
                                               AnyCommunicator(comm), in, mask, sharding, saved,
                                               out, grad_out, grads, gradient, options);
                         });
}

// Overloads for calls that do not fit (engine/mistakes.hpp).
template <class Comm, class Op>
void forward(const Comm& comm, const Op& op,
             const heed::detail::Given<Op, heed::detail::InputsArgument>& in,
             const heed::detail::Given<Op, heed::detail::MaskArgument>& mask,
             const Sharding& sharding,
             const heed::detail::Given<Op, heed::detail::OutArgument>& out,
             const heed::detail::Given<Op, detail::SavedPointerArgument>& saved = nullptr,
             const Options& options = {});
template <class Comm, class Op>
void backward(const Comm& comm, const Op& op,
              const heed::detail::Given<Op, heed::detail::InputsArgument>& in,
              const heed::detail::Given<Op, heed::detail::MaskArgument>& mask,
              const Sharding& sharding, const heed::detail::Given<Op, detail::SavedArgument>& saved,
              const heed::detail::Given<Op, heed::detail::KnownOutArgument>& out,
              const heed::detail::Given<Op, heed::detail::GradOutArgument>& grad_out,
              const heed::detail::Given<Op, heed::detail::GradientsArgument>& grads,
              std::type_identity_t<Op>* grad_op = nullptr, const Options& options = {});

// The same for gathered calls, with the bits of one process in all gradients: the ranks add to the gradients of keys,
// values, bias and parameters one after the other, which takes the time of one process (mpi/gather.hpp).
template <class Comm, AttentionOp Op>
void backward_in_order(const Comm& comm, const Op& op, const Inputs<typename Op::Scalar>& in,
                       const Mask<typename Op::Scalar>& mask, const Sharding& sharding,
                       const Saved<typename Op::Scalar>& saved,
                       const StoredView<const typename Op::Scalar>& out,
                       const OutputGradients<typename Op::Scalar>& grad_out,
                       const Gradients<typename Op::Scalar>& grads,
                       std::type_identity_t<Op>* grad_op = nullptr, const Options& options = {}) {
  static_assert(!InputColumns<Op>::any,
                "heed: gradients in the order of one process are for ops that read no numbers of "
                "tokens (mpi/gather.hpp)");
  static_assert(check_attention_op<Op>());
  using Real = typename Op::Scalar;
  heed::detail::share_op(
      op, grad_op, [&](const SharedOp<Real>& shared, OpGradient<Real>* gradient) {
        detail::call_on_ranks(
            "heed::mpi::backward_in_order", detail::Gathering<Real>{shared}, AnyCommunicator(comm),
            in, mask, sharding, options,
            [&](const auto& call) {
              require(sharding.method == Method::gather, call.side.where,
                      ": the method is ring, only gathered calls have the bits of one process");
              call.check_gradients(saved, out, grad_out, grads);
            },
            [&](detail::RankStamp& stamp) {
              detail::RankSide<Real>::add_gradients(stamp, grad_out, grads, grad_op != nullptr);
            },
            [&](auto& run) { run.backward_in_order(saved, out, grad_out, grads, gradient); });
      });
}

}  // namespace mpi
}  // namespace HEED_ABI
}  // namespace heed
