// SPDX-License-Identifier: Apache-2.0

// Attention in libtorch: matmul, softmax, matmul, and its autograd.

#include "peer.hpp"
#include "peers.hpp"

#include <torch/torch.h>

namespace heed_bench {

namespace {

template <class T>
class TorchPeer {
 public:
  static constexpr int kThreads = 1 << 10;
  static constexpr bool kWholeMap = true;

  explicit TorchPeer(const Case& c) : heads(c) {
    q_ = tensor(heads.q, c.len_q, c.dim).requires_grad_();
    k_ = tensor(heads.k, c.len_kv, c.dim).requires_grad_();
    v_ = tensor(heads.v, c.len_kv, c.dim_v).requires_grad_();
    dout_ = tensor(heads.dout, c.len_q, c.dim_v);
    if (heads.causal()) hidden_ = torch::ones({c.len_q, c.len_kv}, torch::kBool).triu(1);
  }

  void forward() {
    at::set_num_threads(heads.shape.threads);
    auto scores = torch::matmul(q_, k_.transpose(1, 2)) * double(heads.scale());
    if (heads.causal())
      scores = scores.masked_fill(hidden_, -std::numeric_limits<double>::infinity());
    out_ = torch::matmul(torch::softmax(scores, -1), v_);
    copy(out_, heads.out);
  }
  // Keeps the graph, so that the time of forward is not part of backward's.
  void backward() {
    at::set_num_threads(heads.shape.threads);
    const auto grads = torch::autograd::grad({out_}, {q_, k_, v_}, {dout_}, /*retain_graph=*/true);
    copy(grads[0], heads.dq);
    copy(grads[1], heads.dk);
    copy(grads[2], heads.dv);
  }

  Heads<T> heads;

 private:
  [[nodiscard]] torch::Tensor tensor(std::vector<T>& x, Index rows, Index columns) const {
    return torch::from_blob(x.data(), {heads.shape.heads, rows, columns},
                            sizeof(T) == 4 ? torch::kFloat : torch::kDouble)
        .clone();
  }
  static void copy(const torch::Tensor& from, std::vector<T>& to) {
    const auto rows = from.detach().contiguous();
    std::copy_n(rows.template data_ptr<T>(), to.size(), to.data());
  }

  torch::Tensor q_, k_, v_, dout_, hidden_, out_;
};

}  // namespace

void add_torch() {
  add_peer<TorchPeer<float>, float>("libtorch", "float");
  add_peer<TorchPeer<double>, double>("libtorch", "double");
}

}  // namespace heed_bench
