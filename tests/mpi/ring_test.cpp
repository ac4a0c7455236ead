// SPDX-License-Identifier: Apache-2.0
// Context parallelism by a ring, on ranks that are threads: within rounding of one process, and the same bits at each run.

#include "forgetting_score.hpp"
#include "message_of.hpp"
#include "moving_dialectical.hpp"
#include "parallel_call.hpp"
#include "thread_ranks.hpp"
#include "token_parts.hpp"

#include <heed/mask/patterns.hpp>
#include <heed/mask/visible.hpp>
#include <heed/variants.hpp>

using namespace heed;
using namespace heed_test;
using heed::mpi::Method;
using heed::mpi::Sharding;
using heed::mpi::Shards;

namespace {

constexpr Geometry kSelf{2, 4, 4, 2, 150, 150, 6, 6};

// Scores and gates are added up in another order, and lse comes from other sums.
template <class T>
constexpr double kRingBound = 8 * kShareBound<T>;

template <class Op>
void check_ring(const std::string& name, const OpCall<Op>& whole) {
  using T = typename Op::Scalar;
  const Op& op = whole.op;
  const Options& options = whole.options;
  const Geometry g = whole.geometry();
  INFO(name << ", " << g.len_q << " queries");
  const Index step = mpi::shard_step(op, g, Method::ring, options);
  for (const int ranks : {1, 3}) {
    Sharding sharding{Shards::zigzag(g.len_q, ranks, step), {}, Method::ring};
    if (g.len_kv != g.len_q) sharding.keys = Shards::contiguous(g.len_kv, ranks);
    std::vector<Findings> found(std::size_t(ranks), Findings{});
    on_ranks(ranks, [&](const ThreadRank& comm) {
      RankTensors<Op> tensors{whole, sharding, comm.rank()}, again = tensors;
      tensors.run(comm);
      Findings& findings = found[std::size_t(comm.rank())];
      findings = tensors.compare(false, kRingBound<T>);
      again.run(comm);
      if (!same_bits(tensors.out, again.out) || !same_bits(tensors.dq, again.dq) ||
          !same_bits(tensors.dk, again.dk) || !same_bits(tensors.dv, again.dv) ||
          numbers_of(tensors.grad_op) != numbers_of(again.grad_op))
        findings.push_back("the second run has other bits");
    });
    INFO(ranks << " ranks");
    for (const Findings& of_rank : found)
      for (const std::string& finding : of_rank) FAIL_CHECK(finding);
  }
}

template <class Op>
void check_ring(const std::string& name, const Op& op, const Geometry& g,
                const Mask<typename Op::Scalar>& mask, const Options& options = {}) {
  check_ring(name, whole_call(op, g, mask, options));
}

// A score that reads a number of the query's token and two of the key's.
template <class Real>
struct Tilted {
  using Features = TokenInputs<1, 2>;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit * (S(1) + pair.query[0] * pair.key[0]) + pair.key[1];
  }
};

template <class Real>
struct Registers : Softmax<Real> {
  using Mergeable = Registers;
  Param<Real> keys;
  std::vector<Index> key_shape(const Geometry& g) const { return {-1, -1, g.dim_qk}; }
  static constexpr auto parameters =
      std::tuple{tensor("keys", &Registers::keys, &Registers::key_shape)};
  static constexpr auto learnt_keys = &Registers::keys;
};

// A score that reads the number of keys that its query sees, as in SSMax.
template <class Real>
struct Counting {
  using Features = LogVisible;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit * pair.query[0];
  }
};

}  // namespace

TEST_CASE("the ring agrees with one process for every variant of softmaxes", "[mpi]") {
  for_each_variant<double>(kSelf, [&]<class Op>(const Variant<Op>& variant) {
    if constexpr (mpi::detail::ring_normaliser<Op>)
      check_ring(variant.name, variant.op, variant.geometry, causal<double>(), {.threads = 2});
  });
  check_ring("adaptive",
             moving_dialectical<double>(kSelf, {.max_steps = 4, .halting = Halting::adaptive}),
             kSelf, causal<double>());
  const Options dropping{.dropout = {.rate = 0.3, .seed = 11, .first_batch = 0}};
  check_ring("dar of float", Dar<float>{}, kSelf,
             window<float>(60, 5) & key_lengths<float>({150, 70}), dropping);
  check_ring("differential", Differential<double>{}, kSelf, causal<double>(), dropping);
  // Queries of later ranks see no key of the first one, but the keys that belong to the op.
  Attention<double, DotScore<double>, Registers<double>, Identity<double>> op;
  op.normaliser.keys = {std::vector<Index>{1, 2, kSelf.dim_qk},
                        std::vector<double>(std::size_t(2 * kSelf.dim_qk), 0.3)};
  check_ring("registers", op, kSelf, window<double>(20, 0), dropping);
}

TEST_CASE("the ring agrees with one process where op and readout read numbers of tokens", "[mpi]") {
  using Sums = Attention<double, OwnScore<Forgetting, double>, Softmax<double>, Gate<double>>;
  using Numbers = Attention<double, OwnScore<Tilted, double>, Softmax<double>, Gate<double>>;
  Geometry later = kSelf;  // queries whose tokens begin behind the first key
  later.len_kv = 190;
  later.first_query = 40;
  for (const Index heads : {4, 2, 1}) {
    const auto check = [&](const char* name, const auto& op, const Geometry& g) {
      using Op = std::decay_t<decltype(op)>;
      CallNumbers<double> numbers = normal_numbers(op, g);
      const auto keep = [&](std::vector<double>& x) {
        x.resize(x.size() / std::size_t(g.heads) * std::size_t(heads));
      };
      keep(numbers.query_inputs);
      keep(numbers.key_inputs);
      check_ring(std::string(name) + " of " + std::to_string(heads) + " heads",
                 whole_call(OpCall<Op>(op, g, causal<double>(), {.threads = 2}, numbers)));
    };
    check("sums", Sums{}, kSelf);
    check("sums of later queries", Sums{}, later);
    check("numbers", Numbers{}, kSelf);
  }
}

TEST_CASE("the ring agrees with one process under every mask", "[mpi]") {
  const Dar<double> op;
  for_each_placed_mask(kSelf, [&](const char* name, const Geometry& g, const Mask<double>& mask,
                                  const Options& options) {
    check_ring(name, op, g, mask, options);
    check_ring(std::string(name) + ", counted", OwnAttention<Counting, double>{}, g, mask, options);
  });
}

TEST_CASE("the ring refuses what it does not take, on all ranks, and names the other method",
          "[mpi]") {
  const auto refusal = [](const auto& op) {
    using Op = std::decay_t<decltype(op)>;
    const OpCall<Op> whole(op, kSelf);
    const Sharding sharding{Shards::contiguous(150, 2, 64), {}, Method::ring};
    std::vector<std::string> said(2);
    on_ranks(2, [&](const ThreadRank& comm) {
      RankTensors<Op> tensors{whole, sharding, comm.rank()};
      said[std::size_t(comm.rank())] = message_of([&] {
        mpi::forward(comm, op, tensors.inputs(), {}, sharding,
                     {tensors.out.data(), tensors.rows_of(6)});
      });
    });
    CHECK(said[0] == said[1]);
    return said[0];
  };
  CHECK(refusal(ResonantOde<double>{}).find("normaliser is of another kind; the method gather") !=
        std::string::npos);
  CHECK(refusal(make_dialectical<double>(kSelf, {.max_steps = 4, .halting = Halting::batch}))
            .find("a row knows of no other") != std::string::npos);
}
