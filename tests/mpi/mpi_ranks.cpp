// SPDX-License-Identifier: Apache-2.0
// Context parallelism on MPI itself; ctest runs it through mpirun with 1, 2, 3 and 4 ranks. Each
// rank also computes the call by itself, and compares its rows with it.

#include "message_of.hpp"
#include "moving_dialectical.hpp"
#include "parallel_call.hpp"

#include <heed/mask/visible.hpp>
#include <heed/mpi/communicator.hpp>
#include <heed/variants.hpp>

#include <numeric>

using namespace heed;
using namespace heed_test;
using heed::mpi::Communicator;
using heed::mpi::Method;
using heed::mpi::Sharding;
using heed::mpi::Shards;

namespace {

// MPI from before the first test to behind the last one.
struct Program {
  Program() {
    int provided = 0;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);
  }
  ~Program() { MPI_Finalize(); }
};
const Program program;

constexpr Geometry kSelf{2, 4, 4, 2, 150, 150, 6, 6};

template <class Op>
void check_parallel(const Communicator& comm, const std::string& name, const Op& op,
                    const Mask<typename Op::Scalar>& mask, Method method, const Geometry& g = kSelf,
                    const Options& options = {.threads = 2}, bool in_order = false) {
  using T = typename Op::Scalar;
  INFO(name << (method == Method::ring ? ", ring" : ", gather") << ", rank " << comm.rank()
            << " of " << comm.size());
  const OpCall<Op> whole = whole_call(op, g, mask, options);
  const Index step = mpi::shard_step(op, g, method, options);
  const Sharding sharding{Shards::zigzag(g.len_q, comm.size(), step), {}, method};
  const bool gathers = method == Method::gather;
  RankTensors<Op> tensors{whole, sharding, comm.rank()}, again = tensors;
  tensors.run(comm, in_order);
  const Findings found = tensors.compare(gathers, (gathers ? 1 : 8) * kShareBound<T>, in_order);
  for (const std::string& finding : found) FAIL_CHECK(finding);
  again.run(comm, in_order);
  CHECK(same_bits(tensors.out, again.out));
  CHECK(same_bits(tensors.dk, again.dk));
  CHECK(same_bits(tensors.dv, again.dv));
  CHECK(numbers_of(tensors.grad_op) == numbers_of(again.grad_op));
}

}  // namespace

TEST_CASE("every variant on MPI: gathered with the bits of one process, in a ring within rounding",
          "[mpi]") {
  const Communicator comm(MPI_COMM_WORLD);
  for_each_variant<double>(kSelf, [&]<class Op>(const Variant<Op>& variant) {
    check_parallel(comm, variant.name, variant.op, causal<double>(), Method::gather,
                   variant.geometry);
    if constexpr (mpi::detail::ring_normaliser<Op>)
      check_parallel(comm, variant.name, variant.op, causal<double>(), Method::ring,
                     variant.geometry);
  });
}

TEST_CASE("masks, grouped heads and dropout on MPI", "[mpi]") {
  const Communicator comm(MPI_COMM_WORLD);
  std::vector<Index> ids;
  for (Index i = 0; i < 300; ++i) ids.push_back(i / 37);
  const Options dropping{.threads = 1, .dropout = {.rate = 0.3, .seed = 11, .first_batch = 0}};
  for (const Method method : {Method::gather, Method::ring}) {
    check_parallel(comm, "window", Dar<double>{},
                   window<double>(60, 5) & key_lengths<double>({150, 70}), method, kSelf, dropping);
    check_parallel(comm, "documents", ScaledDot<double>{},
                   documents<double>(ids, ids) & causal<double>(), method);
    check_parallel(comm, "function", ScaledDot<double>{},
                   visible<double>([](auto, auto h, auto i, auto j) {
                     return (j <= i) & (i - j < 20 * (h + 1));
                   }),
                   method);
  }
  check_parallel(comm, "in the order of one process", Dar<double>{}, causal<double>(),
                 Method::gather, kSelf, dropping, true);
  check_parallel(comm, "Halting::batch",
                 moving_dialectical<double>(
                     kSelf, {.max_steps = 5, .halt_eps = 0.3, .halting = Halting::batch}),
                 causal<double>(), Method::gather);
}

TEST_CASE("a message that is longer than MPI can count is sent in pieces", "[mpi]") {
  const auto pieces_of = [](std::size_t bytes) {
    std::vector<std::pair<std::size_t, int>> pieces;
    mpi::detail::for_counts(bytes,
                            [&](std::size_t at, int count) { pieces.emplace_back(at, count); });
    return pieces;
  };
  using Pieces = std::vector<std::pair<std::size_t, int>>;
  constexpr int most = 1 << 30;
  CHECK(pieces_of(0) == Pieces{{0, 0}});
  CHECK(pieces_of(7) == Pieces{{0, 7}});
  CHECK(pieces_of(std::size_t(most)) == Pieces{{0, most}});
  CHECK(pieces_of(3 * std::size_t(most) + 5) == Pieces{{0, most},
                                                       {std::size_t(most), most},
                                                       {2 * std::size_t(most), most},
                                                       {3 * std::size_t(most), 5}});
}

TEST_CASE("any communicator serves", "[mpi]") {
  int rank = 0, size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  // Two groups, in which the ranks stand the other way round.
  MPI_Comm half;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, -rank, &half);
  {
    const Communicator comm(half);
    for (const Method method : {Method::gather, Method::ring})
      check_parallel(comm, "half", Dar<double>{}, causal<double>(), method);
  }
  MPI_Comm_free(&half);
  CHECK(message_of([] {
          const Communicator none(MPI_COMM_NULL);
        }).find("the communicator is MPI_COMM_NULL") != std::string::npos);
}

TEST_CASE("ranks that call differently all throw, and go on", "[mpi]") {
  const Communicator comm(MPI_COMM_WORLD);
  using Op = ScaledDot<double>;
  const OpCall<Op> whole = whole_call(Op{}, kSelf, causal<double>(), {});
  const Sharding sharding{Shards::contiguous(150, comm.size(), mpi::shard_step(Op{}, kSelf))};
  RankTensors<Op> tensors{whole, sharding, comm.rank()};
  const auto said = [&](const Options& options) {
    return message_of([&] {
      mpi::forward(comm, Op{}, tensors.inputs(), causal<double>(), sharding,
                   {tensors.out.data(), tensors.rows_of(6)}, nullptr, options);
    });
  };
  Options options;
  options.scale = comm.rank() == 0 ? 1.0 : 2.0;
  const std::string difference = said(options);
  if (comm.size() > 1)
    CHECK(difference ==
          "heed::mpi::forward: scale is 2 on rank 1, on rank 0 it is 1; it must be the same on all "
          "ranks");
  options = {};
  options.threads = comm.rank() == comm.size() - 1 ? -1 : 1;
  CHECK(said(options).find("on rank " + std::to_string(comm.size() - 1) + ": ") !=
        std::string::npos);
  CHECK(said({}) == "nothing was thrown");
}
