// SPDX-License-Identifier: Apache-2.0
// Parts of a user's op that throw: the exception reaches the caller, from any thread, and no other worker waits for the one
// that failed. Also children of fork(), which have only the thread that called it.

#include "catch.hpp"
#include "door_case.hpp"

#include <heed/plug/row_kit.hpp>

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <stdexcept>

using namespace heed;
using namespace heed_test;

namespace {

struct PartFailed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Throws in the call whose number is `at`, counted over all threads.
struct Fuse {
  std::atomic<int> calls{0};
  int at = -1;
  void burn() {
    if (calls.fetch_add(1) == at) throw PartFailed("this part fails");
  }
};
Fuse fuse;

template <class T>
struct FailingRows : PlainRows {
  void forward(const RowBlock<T>& block) const {
    fuse.burn();
    for (int v = 0; v < block.vectors; ++v) (void)weigh(block, v, block.scores[0]);
  }
  void vjp(const RowBlock<T>& block, FailingRows&) const {
    fuse.burn();
    for (int v = 0; v < block.vectors; ++v) {
      weigh(block, v, block.dscores[0]);
      (void)softmax_row_vjp(block, v);
    }
  }
  static void weigh(const RowBlock<T>& block, int v, const LaneTile<T>& weights) {
    const auto [top, sum] = exponentiate_row(block, v, weights);
    scale_row(weights, v, Pack<T>(T(1) / sum));
  }
};

template <class T>
struct FailingReadout : PlainReadout {
  void forward(const ReadoutPanel<T>&) const { fuse.burn(); }
  void vjp(const ReadoutPanel<T>& panel, FailingReadout&) const {
    fuse.burn();
    lane_dot<T>(panel.tile, panel.saved, panel.vectors, panel.delta);
  }
};

// A call of 2 x 4 heads that share one row of bias, so that all groups of panels queue behind each other.
template <class Op>
struct Queue {
  static constexpr Geometry g{2, 4, 4, 2, 150, 150, 4, 4};
  Op op;
  reference::Problem<float> problem = random_problem<float>(g, 0, 3);
  std::vector<float> bias = std::vector<float>(std::size_t(g.len_kv), 0.5F), dbias = bias;
  std::vector<float> out = std::vector<float>(problem.query.size()), dout = out, dq = out,
                     dk = std::vector<float>(problem.key.size()), dv = dk;
  Saved<float> saved;
  Mask<float> mask = heed::bias<float>(TensorView<const float>(bias.data(), {1, 1, 1, g.len_kv}));
  Shape q{g.batch, g.heads, g.len_q, g.dim_qk}, k{g.batch, g.kv_heads, g.len_kv, g.dim_qk};
  Inputs<float> in{{problem.query.data(), q}, {problem.key.data(), k}, {problem.value.data(), k}};
  Options options{.key_tile = 1, .panel_vectors = 1};

  void forward(int threads, int fail_at) {
    fuse.calls = 0;
    fuse.at = fail_at;
    options.threads = threads;
    heed::forward(op, in, mask, {out.data(), q}, &saved, options);
  }
  void backward(int threads, int fail_at) {
    fuse.calls = 0;
    fuse.at = fail_at;
    options.threads = threads;
    heed::backward(
        op, in, mask, saved, TensorView<const float>(out.data(), q),
        TensorView<const float>(dout.data(), q),
        {{dq.data(), q}, {dk.data(), k}, {dv.data(), k}, {}, {dbias.data(), {1, 1, 1, g.len_kv}}},
        &op, options);
  }
};

template <class Op>
void check_every_failure() {
  Queue<Op> queue;
  alarm(240);  // a worker that waits for ever ends the program
  for (const int threads : {1, 2, 3, 4}) {
    queue.forward(threads, -1);
    const int calls = fuse.calls;
    REQUIRE(calls > 8);
    for (const int at : {0, 1, 5, calls / 2, calls - 1}) {
      INFO(threads << " threads, call " << at);
      CHECK_THROWS_AS(queue.forward(threads, at), PartFailed);
      CHECK_THROWS_AS(queue.backward(threads, -1),
                      std::invalid_argument);  // `saved` belongs to a call that failed
      queue.forward(threads, -1);
      CHECK_THROWS_AS(queue.backward(threads, at), PartFailed);
      CHECK_NOTHROW(queue.backward(threads, -1));
    }
  }
  alarm(0);
}

}  // namespace

TEST_CASE(
    "an exception of a user's normaliser reaches the caller from any thread, and nobody waits for "
    "ever") {
  check_every_failure<Attention<float, DotScore<float>, FailingRows<float>, Identity<float>>>();
}

TEST_CASE(
    "an exception of a user's readout reaches the caller from any thread, and nobody waits for "
    "ever") {
  check_every_failure<Attention<float, DotScore<float>, Softmax<float>, FailingReadout<float>>>();
}

TEST_CASE("a child of fork() may call with one thread after its parent has used several") {
  Queue<Attention<float, DotScore<float>, Softmax<float>, FailingReadout<float>>> queue;
  queue.forward(3, -1);
  queue.backward(3, -1);
  const std::vector<float> out = queue.out, dq = queue.dq;
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    alarm(60);
    queue.out.assign(queue.out.size(), 0.0F);
    queue.forward(1, -1);
    queue.backward(1, -1);
    _exit(queue.out == out && queue.dq == dq ? 0 : 1);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}
