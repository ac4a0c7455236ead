// SPDX-License-Identifier: Apache-2.0
// Mistakes that callers make, one for each value of MISTAKE, and for 0 a program without one, with
// arguments in all the forms in which they may be written.
#include <heed/attention.hpp>
#include <heed/engine/hvp.hpp>
#include <heed/measure/weights.hpp>
#include <heed/mpi/any_communicator.hpp>
#include <heed/mpi/attention.hpp>

#include <vector>

int main() {
  const heed::Shape shape{1, 1, 2, 2}, row{1, 1, 2, 1};
  float x[4] = {1, 0, 0, 1}, to[4], lse[2], grad[4];
  const float fixed[4] = {};
  double wide[4] = {};
  int whole[4] = {};
  std::vector<float> numbers(4);
  heed::ScaledDot<float> op, op_grad;
  const heed::TensorView<const float> view(x, shape);
  const heed::TensorView<float> out(to, shape);
  const heed::Inputs<float> in{view, view, view};
  const auto mask = heed::causal<float>();
  heed::Saved<float> saved;
#if MISTAKE == 0 || MISTAKE == 70 || MISTAKE == 71
  const auto on_ranks = [&](const heed::mpi::AnyCommunicator& comm) {
    const heed::mpi::Sharding sharding{heed::mpi::Shards::contiguous(2, 1)};
    heed::mpi::Saved<float> pieces;
#if MISTAKE == 70
    heed::mpi::forward(comm, op, in, mask, sharding, out, &saved);
#elif MISTAKE == 71
    heed::mpi::backward(comm, op, {{wide, shape}, view, view}, {}, sharding, pieces, out, view, {});
#else
    heed::mpi::forward(comm, op, {view, view, view}, {}, sharding, {to, shape}, &pieces);
    heed::mpi::backward(comm, op, {view, view, view}, {}, sharding, pieces, {to, shape}, {x, shape},
                        {{grad, shape}});
#endif
  };
  (void)on_ranks;
#endif
#if MISTAKE == 0
  const auto same = op;
  const heed::Packed<float> packed{.queries = {0, 2}};
  const heed::PackedInputs<float> sequences(in, &packed);
  const bool seen[] = {true, false, true, true};
  heed::forward(op, {{x, shape}, {fixed, {1, 1, 2, 2}}, view}, {}, {to, shape});
  heed::forward(same, in, mask, {{to, shape}, {lse, row}}, &saved, {.threads = 1});
  heed::forward(heed::Dar<double>{}, {{wide, shape}, {wide, shape}, {wide, shape}}, {},
                {wide, shape}, {}, {});
  heed::forward(op, {.query = view, .key = view, .value = view}, {}, out, nullptr);
  heed::forward(op, in, heed::boolean({seen, shape}), out, &saved);
  heed::backward(op, {view, view, view}, mask, saved, out, {x, shape}, {{grad, shape}}, &op_grad);
  heed::backward(same, in, {}, saved, {to, shape}, {{x, shape}, {}}, {.key = {grad, shape}},
                 nullptr, {});
  heed::forward(op, sequences, mask, out, &saved);
  heed::backward(op, sequences, mask, saved, out, view, {{grad, shape}});
  heed::jvp(op, in, mask, saved, out, {view}, {grad, shape}, &op);
  heed::jvp(op, {view, view, view}, {}, {{x, shape}}, {to, shape}, {grad, shape}, nullptr, {});
  heed::jvp(op, {view, view, view}, {}, {}, {to, shape}, {grad, shape}, {}, {});
  heed::hvp(op, {view, view, view}, {}, saved, {to, shape}, {x, shape}, {}, {}, {{grad, shape}});
  (void)heed::forward_partial(op, in);
  (void)heed::forward_partial(op, {view, view, view}, {}, &saved);
  (void)heed::forward_partial(same, sequences, mask);
  (void)heed::measure_weights(op, {view, view, view});
  (void)heed::measure_weights(op, {view, view, view}, {}, saved, {}, {});
#elif MISTAKE == 47
  heed::forward(op, {{wide, shape}, {wide, shape}, {wide, shape}}, {}, {to, shape});
#elif MISTAKE == 48
  heed::forward(op, {{whole, shape}, {x, shape}, {x, shape}}, mask, {to, shape}, &saved);
#elif MISTAKE == 49
  heed::forward(op, {numbers, numbers, numbers}, {}, {to, shape});
#elif MISTAKE == 50
  heed::forward(heed::Dar<double>{}, in, {}, {wide, shape});
#elif MISTAKE == 51
  heed::forward(shape, in, {}, {to, shape});
#elif MISTAKE == 52
  heed::forward(op, in, {to, shape});
#elif MISTAKE == 53
  heed::forward(op, {view, view, view}, {to, shape}, &saved);
#elif MISTAKE == 54
  heed::forward(op, in, heed::causal<double>(), {to, shape});
#elif MISTAKE == 55
  heed::forward(op, in, mask, {fixed, shape});
#elif MISTAKE == 56
  heed::forward(op, {view, view, view}, {}, numbers);
#elif MISTAKE == 57
  heed::forward(op, in, mask, {to, shape}, saved);
#elif MISTAKE == 58
  heed::backward(op, {view, view, view}, {}, {to, shape}, {x, shape}, {{grad, shape}});
#elif MISTAKE == 59
  heed::backward(op, in, mask, &saved, out, {x, shape}, {{grad, shape}});
#elif MISTAKE == 60
  heed::backward(op, in, {}, saved, {wide, shape}, {x, shape}, {{grad, shape}});
#elif MISTAKE == 61
  heed::backward(op, in, {}, saved, out, {whole, shape}, {{grad, shape}});
#elif MISTAKE == 62
  heed::backward(op, in, {}, saved, out, {x, shape}, {{grad, shape}, {fixed, shape}}, &op_grad);
#elif MISTAKE == 63
  heed::jvp(op, in, mask, saved, out, {{wide, shape}}, {grad, shape});
#elif MISTAKE == 64
  heed::jvp(op, in, mask, {view}, {to, shape}, {fixed, shape}, &op);
#elif MISTAKE == 65
  heed::jvp(op, {view, view, view}, mask, {to, shape}, {view});
#elif MISTAKE == 66
  heed::hvp(op, in, {}, saved, out, view, {view}, {wide, shape}, {{grad, shape}});
#elif MISTAKE == 67
  heed::hvp(op, in, saved, out, view, {view}, {}, {{grad, shape}});
#elif MISTAKE == 68
  (void)heed::forward_partial(op, {{wide, shape}, view, view}, mask);
#elif MISTAKE == 69
  (void)heed::measure_weights(op, in, heed::causal<double>());
#elif MISTAKE == 72
  heed::jvp(op, in, mask, saved, out, {view}, {grad, shape}, heed::Options{});
#endif
}
