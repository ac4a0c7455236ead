// SPDX-License-Identifier: Apache-2.0
#pragma once

// The tokens of layers on the ranks of a communicator (nn/spread_tokens.hpp), gathered.

#include <heed/mpi/any_communicator.hpp>
#include <heed/mpi/gathered.hpp>
#include <heed/nn/spread_tokens.hpp>

#include <utility>

namespace heed {
inline namespace HEED_ABI {
namespace mpi {

class SpreadTokens final : public nn::SpreadTokens {
 public:
  // The shards are parts of each sequence.
  SpreadTokens(AnyCommunicator ranks, Shards of_ranks)
      : comm_(std::move(ranks)), shards_(std::move(of_ranks)) {
    require(shards_.ranks() == comm_.size(), "SpreadTokens: the shards are for ", shards_.ranks(),
            " ranks, the communicator has ", comm_.size());
    for (int r = 0; r < shards_.ranks(); ++r)
      require(shards_.held(r) > 0, "SpreadTokens: rank ", r, " of ", shards_.ranks(),
              " has none of the ", shards_.len(), " tokens of a sequence; each must have some");
    for (const Tokens& piece : shards_.pieces(comm_.rank()))
      for (Index t = piece.begin; t < piece.end; ++t) tokens.push_back(t);
  }

  [[nodiscard]] int rank() const override { return comm_.rank(); }
  [[nodiscard]] Index len() const override { return shards_.len(); }

  void forward(const nn::SpreadCall<float>& call, const Outputs<float>& out,
               Saved<float>& saved) const override {
    run_forward(call, out, saved);
  }
  void forward(const nn::SpreadCall<double>& call, const Outputs<double>& out,
               Saved<double>& saved) const override {
    run_forward(call, out, saved);
  }
  void backward(const nn::SpreadCall<float>& call, const Saved<float>& saved,
                const StoredView<const float>& out, const OutputGradients<float>& grad_out,
                const Gradients<float>& grads, OpGradient<float>* grad_op) const override {
    run_backward(call, saved, out, grad_out, grads, grad_op);
  }
  void backward(const nn::SpreadCall<double>& call, const Saved<double>& saved,
                const StoredView<const double>& out, const OutputGradients<double>& grad_out,
                const Gradients<double>& grads, OpGradient<double>* grad_op) const override {
    run_backward(call, saved, out, grad_out, grads, grad_op);
  }

 private:
  template <class Real>
  void run_forward(const nn::SpreadCall<Real>& call, const Outputs<Real>& out,
                   Saved<Real>& saved) const {
    detail::forward_by(detail::Gathering<Real>{call.op}, comm_, call.in, call.mask,
                       Sharding{shards_}, out, &saved, call.options);
  }
  template <class Real>
  void run_backward(const nn::SpreadCall<Real>& call, const Saved<Real>& saved,
                    const StoredView<const Real>& out, const OutputGradients<Real>& grad_out,
                    const Gradients<Real>& grads, OpGradient<Real>* grad_op) const {
    detail::backward_by(detail::Gathering<Real>{call.op}, comm_, call.in, call.mask,
                        Sharding{shards_}, saved, out, grad_out, grads, grad_op, call.options);
  }

  AnyCommunicator comm_;
  Shards shards_;
};

}  // namespace mpi
}  // namespace HEED_ABI
}  // namespace heed
