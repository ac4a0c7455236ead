// SPDX-License-Identifier: Apache-2.0
// Context parallelism by gathering, on ranks that are threads: every op and mask has the bits of
// one process in all results per query.

#include "forgetting_score.hpp"
#include "message_of.hpp"
#include "moving_dialectical.hpp"
#include "parallel_call.hpp"
#include "thread_ranks.hpp"
#include "token_parts.hpp"

#include <heed/mask/patterns.hpp>
#include <heed/mask/visible.hpp>
#include <heed/variants.hpp>

#include <memory>

using namespace heed;
using namespace heed_test;
using heed::mpi::Sharding;
using heed::mpi::Shards;

namespace {

constexpr Geometry kSelf{2, 4, 4, 2, 150, 150, 6, 6};

template <class Op>
void check_gather(const std::string& name, const Op& op, const Geometry& g,
                  const Mask<typename Op::Scalar>& mask, const Options& options = {},
                  bool in_order = false) {
  using T = typename Op::Scalar;
  INFO(name << ", " << g.len_q << " queries");
  const OpCall<Op> whole = whole_call(op, g, mask, options);
  const Index step = share_step(op, g, options);
  for (const int ranks : {1, 3})
    for (const bool zigzag : {false, true}) {
      const auto shards = [&](Index len, Index by) {
        return zigzag ? Shards::zigzag(len, ranks, by) : Shards::contiguous(len, ranks, by);
      };
      const Sharding sharding{shards(g.len_q, step),
                              g.len_kv == g.len_q ? Shards{} : shards(g.len_kv, 1)};
      std::vector<Findings> found(std::size_t(ranks), Findings{});
      on_ranks(ranks, [&](const ThreadRank& comm) {
        RankTensors<Op> tensors{whole, sharding, comm.rank()};
        tensors.run(comm, in_order);
        found[std::size_t(comm.rank())] = tensors.compare(true, kShareBound<T>, in_order);
      });
      INFO(ranks << " ranks, " << (zigzag ? "zigzag" : "contiguous"));
      for (const Findings& of_rank : found)
        for (const std::string& finding : of_rank) FAIL_CHECK(finding);
    }
}

}  // namespace

TEST_CASE("shards make up the sequence and begin at multiples of their step", "[mpi]") {
  for (const Index len : {0, 1, 63, 64, 1000})
    for (const int ranks : {1, 2, 3, 4, 7})
      for (const Index step : {1, 16, 64})
        for (const bool zigzag : {false, true}) {
          const Shards shards =
              zigzag ? Shards::zigzag(len, ranks, step) : Shards::contiguous(len, ranks, step);
          std::vector<int> owners(std::size_t(len), 0);
          for (int r = 0; r < ranks; ++r) {
            Index held = 0, end = -1;
            for (const mpi::Tokens& piece : shards.pieces(r)) {
              CHECK(piece.begin > end);
              end = piece.end;
              CHECK((piece.begin % step == 0 && (piece.end % step == 0 || piece.end == len)));
              held += piece.count();
              for (Index t = piece.begin; t < piece.end; ++t) ++owners[std::size_t(t)];
            }
            CHECK(held == shards.held(r));
          }
          CHECK(owners == std::vector<int>(std::size_t(len), 1));
        }
  // Two pieces each, as far from the ends: the causal work of all is the same.
  const Shards four = Shards::zigzag(800, 4, 1);
  CHECK(four.pieces(1) == std::vector<mpi::Tokens>{{100, 200}, {600, 700}});
  CHECK(message_of([] { (void)Shards::zigzag(10, 0); }).find("ranks are 0") != std::string::npos);
}

TEST_CASE("gathered calls of every variant have the bits of one process", "[mpi]") {
  for_each_variant<double>(kSelf, [&]<class Op>(const Variant<Op>& variant) {
    check_gather(variant.name, variant.op, variant.geometry, causal<double>(), {.threads = 2});
  });
  check_gather(
      "dar of float", Dar<float>{}, kSelf, window<float>(60, 5) & key_lengths<float>({150, 70}),
      {.key_tile = 1, .panel_vectors = 1, .dropout = {.rate = 0.3, .seed = 11, .first_batch = 0}});
}

TEST_CASE("gradients that ranks add to in the order of one process have its bits", "[mpi]") {
  const Options narrow{.threads = 2,
                       .key_tile = 1,
                       .panel_vectors = 1,
                       .dropout = {.rate = 0.3, .seed = 11, .first_batch = 0}};
  for_each_variant<double>(kSelf, [&]<class Op>(const Variant<Op>& variant) {
    check_gather(variant.name, variant.op, variant.geometry, causal<double>(), {.threads = 2},
                 true);
  });
  std::vector<float> numbers(150 * 150);
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = std::sin(float(i));
  const Mask<float> biased = bias<float>({numbers.data(), {1, 1, 150, 150}}) & causal<float>();
  check_gather("dar of float", Dar<float>{}, kSelf, biased, narrow, true);
  check_gather("prototype of float", make_prototype<float>(kSelf, 5), kSelf, causal<float>(),
               narrow, true);
}

TEST_CASE("gathered calls whose rows depend on all rows, or read numbers of tokens", "[mpi]") {
  for (const Halting halting : {Halting::batch, Halting::adaptive})
    check_gather(
        "dialectical",
        moving_dialectical<double>(kSelf, {.max_steps = 5, .halt_eps = 0.3, .halting = halting}),
        kSelf, causal<double>());
  check_gather("sums of tokens",
               Attention<double, OwnScore<Forgetting, double>, GatedSink<double>, Gate<double>>{},
               kSelf, causal<double>());
}

TEST_CASE("gathered calls have the bits of one process under every mask", "[mpi]") {
  const Dar<double> op;
  for_each_placed_mask(kSelf,
                       [&](const char* name, const Geometry& g, const Mask<double>& mask,
                           const Options& options) { check_gather(name, op, g, mask, options); });
}

TEST_CASE("tensors of narrow numbers are gathered as they are stored", "[mpi]") {
  using Op = ScaledDot<float>;
  const OpCall<Op> whole = whole_call(Op{}, kSelf, causal<float>(), {});
  std::vector<bfloat16> key, value;
  for (const float x : whole.key) key.push_back(bfloat16(x));
  for (const float x : whole.value) value.push_back(bfloat16(x));
  std::vector<float> out(whole.out.size());
  forward(Op{},
          {whole.inputs().query, TensorView(std::as_const(key).data(), kSelf.key_shape()),
           TensorView(std::as_const(value).data(), kSelf.value_shape())},
          causal<float>(), {out.data(), kSelf.out_shape()});
  const Sharding sharding{Shards::zigzag(150, 2, share_step(Op{}, kSelf))};
  std::vector<char> same(2, 0);
  on_ranks(2, [&](const ThreadRank& comm) {
    RankTensors<Op> tensors{whole, sharding, comm.rank()};
    const std::vector<bfloat16> own_key = rank_rows(key, 4, 150, sharding.queries, comm.rank()),
                                own_value = rank_rows(value, 4, 150, sharding.queries, comm.rank());
    Inputs<float> in = tensors.inputs();
    in.key = TensorView(own_key.data(), in.key.shape());
    in.value = TensorView(own_value.data(), in.value.shape());
    mpi::forward(comm, Op{}, in, causal<float>(), sharding,
                 {tensors.out.data(), tensors.rows_of(6)});
    same[std::size_t(comm.rank())] = same_bits(tensors.out, tensors.queries(out, 4));
  });
  CHECK((same[0] == 1 && same[1] == 1));
}

TEST_CASE("shards that cut through what is computed together are refused", "[mpi]") {
  const OpCall<ScaledDot<double>> whole(ScaledDot<double>{}, kSelf);
  const Sharding sharding{Shards::contiguous(150, 3, 1)};
  on_ranks(3, [&](const ThreadRank& comm) {
    RankTensors<ScaledDot<double>> tensors{whole, sharding, comm.rank()};
    const std::string said = message_of([&] {
      mpi::forward(comm, ScaledDot<double>{}, tensors.inputs(), {}, sharding,
                   {tensors.out.data(), tensors.rows_of(6)});
    });
    if (said.find("it must begin and end at multiples of") == std::string::npos)
      throw std::runtime_error(said);
  });
}

TEST_CASE("calls that differ between ranks are refused on all of them by one sentence", "[mpi]") {
  using Op = ScaledDot<double>;
  const OpCall<Op> whole = whole_call(Op{}, kSelf, causal<double>(), {});
  const Index step = share_step(Op{}, kSelf);
  const Sharding sharding{Shards::contiguous(150, 3, step)};
  // Calls change(rank, inputs, mask, options, sharding) before the call
  const auto refusals = [&](auto&& change) {
    std::vector<std::string> said(3);
    on_ranks(3, [&](const ThreadRank& comm) {
      RankTensors<Op> tensors{whole, sharding, comm.rank()};
      Inputs<double> in = tensors.inputs();
      Mask<double> mask = causal<double>();
      Options options;
      Sharding own = sharding;
      change(comm.rank(), in, mask, options, own);
      said[std::size_t(comm.rank())] = message_of([&] {
        mpi::forward(comm, Op{}, in, mask, own, {tensors.out.data(), tensors.rows_of(6)}, nullptr,
                     options);
      });
    });
    CHECK((said[0] == said[1] && said[1] == said[2]));
    return said[0];
  };
  CHECK(refusals([](int rank, auto&, auto&, auto& options, auto&) {
          if (rank == 2) options.dropout.seed = 5;
        }) ==
        "heed::mpi::forward: the seed of dropout is 5 on rank 2, on rank 0 it is 0; it must be "
        "the same on all ranks");
  CHECK(
      refusals([](int rank, auto&, auto& mask, auto&, auto&) {
        if (rank == 1) mask = Mask<double>{};
      }).find("heed::mpi::forward: the mask's list of bands is none on rank 1, on rank 0 it is ") ==
      0);
  CHECK(refusals([](int rank, auto& in, auto&, auto&, auto&) {
          if (rank == 1) in.value = {};
        }) == "heed::mpi::forward: on rank 1: value was not given");
  CHECK(refusals([&](int rank, auto&, auto&, auto&, auto& own) {
          if (rank == 1) own.queries = Shards::contiguous(150, 2, step);
        }).find("the shards are for 2 ranks, the communicator has 3") != std::string::npos);
  CHECK(refusals([&](int, auto&, auto&, auto&, auto& own) {
          own.queries = Shards::contiguous(150, 3, 1);
        }).find("the rank's shard has 50") != std::string::npos);

  // Errors name the types that users read and write.
  const auto of_other_ops = [&](const ThreadRank& comm) {
    RankTensors<Op> tensors{whole, sharding, comm.rank()};
    const auto call = [&](const auto& op) {
      mpi::forward(comm, op, tensors.inputs(), {}, sharding,
                   {tensors.out.data(), tensors.rows_of(6)});
    };
    const std::string said =
        message_of([&] { comm.rank() == 2 ? call(Dar<double>{}) : call(Op{}); });
    if (said.find("heed::mpi::forward: the op's type is heed::Attention<double, "
                  "heed::DarScore<double>, heed::Softmax<double>, heed::Identity<double>") != 0 ||
        said.find(" on rank 2, on rank 0 it is heed::Attention<double, ") == std::string::npos ||
        said.find("heed::v") != std::string::npos)
      throw std::runtime_error(said);
  };
  on_ranks(3, of_other_ops);
}
