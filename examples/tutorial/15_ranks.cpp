// SPDX-License-Identifier: Apache-2.0

// Step 15 of 15. You learn to spread one call over the processes that mpirun starts, for sequences that one machine cannot
// hold. Each rank calls with the rows of its tokens; out has the bits of one process, gradients are those of one process
// within rounding. Zig-zag shards give each rank early and late tokens, so that a causal mask leaves all of them as much work.
//
//   mpirun -n 2 build/bin/example_15_ranks

#include <heed/core/random.hpp>
#include <heed/mpi/attention.hpp>
#include <heed/mpi/communicator.hpp>
#include <heed/ops/dar.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

using namespace heed;
using Floats = std::vector<float>;

constexpr Shape kWhole{1, 4, 512, 32};

Floats normals(std::uint64_t stream) {
  Floats x(std::size_t(kWhole.batch * kWhole.heads * kWhole.len * kWhole.dim));
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = float(CounterRandom(5, stream).normal(i));
  return x;
}
double largest_difference(const Floats& a, const Floats& b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    largest = std::max(largest, std::abs(double(a[i]) - double(b[i])));
  return largest;
}

int run() {
  const mpi::Communicator comm(MPI_COMM_WORLD);
  const Dar<float> op;
  const Geometry sizes{kWhole.batch, kWhole.heads, kWhole.heads, kWhole.len,
                       kWhole.len,   kWhole.dim,   kWhole.dim,   kWhole.dim};
  const mpi::Shards shards =
      mpi::Shards::zigzag(kWhole.len, comm.size(), mpi::shard_step(op, sizes));
  Shape held = kWhole;
  held.len = shards.held(comm.rank());
  // A program of many tokens would make or read only its own rank's tokens.
  const auto own = [&](const Floats& all) {
    return mpi::own_rows(shards, comm.rank(), TensorView(all.data(), kWhole));
  };
  const Floats query = normals(1), key = normals(2), value = normals(3), grad_out = normals(4);
  const Floats own_query = own(query), own_key = own(key), own_value = own(value),
               own_grad_out = own(grad_out);

  const Inputs<float> in{
      {own_query.data(), held}, {own_key.data(), held}, {own_value.data(), held}};
  Floats out(own_query.size()), grad_query(out.size()), grad_key(out.size()),
      grad_value(out.size());
  mpi::Saved<float> saved;
  Dar<float> grad_op;
  mpi::forward(comm, op, in, causal<float>(), {shards}, {out.data(), held}, &saved);
  mpi::backward(comm, op, in, causal<float>(), {shards}, saved, {out.data(), held},
                {own_grad_out.data(), held},
                {{grad_query.data(), held}, {grad_key.data(), held}, {grad_value.data(), held}},
                &grad_op);

  // The same in one process.
  const Inputs<float> all{{query.data(), kWhole}, {key.data(), kWhole}, {value.data(), kWhole}};
  Floats whole_out(query.size()), whole_key(query.size());
  Saved<float> whole_saved;
  forward(op, all, causal<float>(), {whole_out.data(), kWhole}, &whole_saved);
  backward(op, all, causal<float>(), whole_saved, {whole_out.data(), kWhole},
           {grad_out.data(), kWhole}, {{}, {whole_key.data(), kWhole}, {}});
  const double of_out = largest_difference(out, own(whole_out)),
               of_key = largest_difference(grad_key, own(whole_key));
  std::printf("rank %d of %d has %td of %td tokens: out differs by %.1e, grad_key by %.1e\n",
              comm.rank(), comm.size(), held.len, kWhole.len, of_out, of_key);
  return of_out == 0 && of_key < 1e-4 ? 0 : 1;
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const int code = run();
  MPI_Finalize();
  return code;
}
