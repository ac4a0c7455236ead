// SPDX-License-Identifier: Apache-2.0
#pragma once

// Sequences that are too long for one process: each rank has some tokens of every sequence, and only attention reads the
// tokens of other ranks. Rows of a layer are the tokens of this rank, sequence by sequence, in their order.
// mpi/spread_tokens.hpp has the ranks of a communicator.

#include <heed/engine/shared_op.hpp>

#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

// A layer's call of its op on all tokens. Tensors hold the rows of this rank.
template <class Real>
struct SpreadCall {
  const SharedOp<Real>& op;
  const Inputs<Real>& in;
  const Mask<Real>& mask;
  const Options& options;
};

// What layers ask of the ranks that share their tokens. Ranks make each call together.
class SpreadTokens {
 public:
  std::vector<Index> tokens;  // positions of this rank's tokens in their sequence

  virtual ~SpreadTokens() = default;
  [[nodiscard]] virtual int rank() const = 0;
  // Number of tokens of the whole sequence, and of this rank.
  [[nodiscard]] virtual Index len() const = 0;
  [[nodiscard]] Index held() const { return Index(tokens.size()); }

  virtual void forward(const SpreadCall<float>& call, const Outputs<float>& out,
                       SavedPieces<float>& saved) const = 0;
  virtual void forward(const SpreadCall<double>& call, const Outputs<double>& out,
                       SavedPieces<double>& saved) const = 0;
  // Gradients of the parameters are sums over all ranks, on each rank, and are added to `grad_op`.
  virtual void backward(const SpreadCall<float>& call, const SavedPieces<float>& saved,
                        const StoredView<const float>& out, const OutputGradients<float>& grad_out,
                        const Gradients<float>& grads, OpGradient<float>* grad_op) const = 0;
  virtual void backward(const SpreadCall<double>& call, const SavedPieces<double>& saved,
                        const StoredView<const double>& out,
                        const OutputGradients<double>& grad_out, const Gradients<double>& grads,
                        OpGradient<double>* grad_op) const = 0;
};

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
