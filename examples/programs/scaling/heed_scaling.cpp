// SPDX-License-Identifier: Apache-2.0

// Predicts the time of a causal attention layer whose sequence is divided among ranks, by a cost model (cost_model.hpp) of
// the three ways to divide it, from the measured engine and a network's latency and bandwidth, for up to thousands of
// ranks. --check compares the model with this machine, and under mpirun with two ranks also with their messages.
//
// Exit code  0 done, 1 the work could not be finished, 2 options that cannot be used.

#include "../program/options.hpp"
#include "../program/ranks.hpp"
#include "../program/words.hpp"
#include "cost_model.hpp"

#include <heed/attention.hpp>
#include <heed/check/stopwatch.hpp>
#include <heed/compiled.hpp>

#include <cmath>
#include <cstdio>

namespace {

using namespace scaling;
using heed::Index;
using heed_program::Ranks;
using heed_program::UsageError;

// Tokens of --check, a few seconds of work; the table's tokens would take minutes.
constexpr Count kCheckLen = 2048;

struct Options {
  Problem problem;
  Machine machine;
  double gflops = 0, latency = 5, overhead = 1, bandwidth = 10;  // 0: measured; us, us, GB/s
  std::string ranks = "1,2,4,8,16,32,64,128,256,512,1024";
  int threads = 0;
  bool forward_only = false, contiguous = false, check = false;
};

// One call of the engine: queries at the end of the keys, causal.
class Call {
 public:
  Call(Index heads, Index kv_heads, Index dim, Index queries, Index keys, int threads)
      : query_shape_{1, heads, queries, dim},
        key_shape_{1, kv_heads, keys, dim},
        query_(std::size_t(heads * queries * dim)),
        key_(std::size_t(kv_heads * keys * dim)),
        value_(key_.size()),
        out_(query_.size()) {
    options_.threads = threads;
    for (std::vector<float>* x : {&query_, &key_, &value_})
      for (std::size_t i = 0; i < x->size(); ++i) (*x)[i] = float(std::sin(double(i)));
  }
  void run() {
    const heed::ScaledDot<float> op;
    heed::forward(
        op, {{query_.data(), query_shape_}, {key_.data(), key_shape_}, {value_.data(), key_shape_}},
        heed::causal<float>(heed::Align::bottom_right), {out_.data(), query_shape_}, nullptr,
        options_);
  }

 private:
  heed::Shape query_shape_, key_shape_;
  std::vector<float> query_, key_, value_, out_;
  heed::Options options_;
};

// The smallest of several times: other work of the machine only adds to it.
template <class Work>
[[nodiscard]] double least_seconds(int most, const Work& work) {
  double least = std::numeric_limits<double>::infinity(), sum = 0;
  for (int n = 0; n < 5 || (n < most && sum < 0.5); ++n) {
    const double seconds = heed::seconds_of(work);
    least = std::min(least, seconds);
    sum += seconds;
  }
  return least;
}

[[nodiscard]] double seconds_of_call(Call& call) {
  return least_seconds(100, [&] { call.run(); });
}

[[nodiscard]] double forward_flops(const Problem& p, double pairs) {
  return 4 * pairs * double(p.heads * p.dim);
}

// Sets flops and call of the machine: a line through the times of two lengths.
void measure_engine(const Problem& p, int threads, Machine& machine) {
  constexpr Index small = 128, large = 1024;
  const auto timed = [&](Index len) {
    Call call(p.heads, p.kv_heads, p.dim, len, len, threads);
    return seconds_of_call(call);
  };
  const double of_small = timed(small), of_large = timed(large);
  const auto flops = [&](Index len) { return forward_flops(p, double(len) * double(len + 1) / 2); };
  machine.flops = (flops(large) - flops(small)) / (of_large - of_small);
  machine.call = std::max(0.0, of_small - flops(small) / machine.flops);
}

// The smallest of several times of work that all ranks do together.
template <class Work>
[[nodiscard]] double least_together(Ranks& ranks, const Work& work) {
  double least = std::numeric_limits<double>::infinity();
  for (int n = 0; n < 15; ++n) {
    ranks.meet();
    double slowest = 0;
    for (const double one : ranks.gather(heed::seconds_of(work))) slowest = std::max(slowest, one);
    least = std::min(least, slowest);
  }
  return least;
}
[[nodiscard]] double seconds_to_gather(Ranks& ranks, const std::string& text) {
  return least_together(ranks, [&] { (void)ranks.gather_texts(text); });
}

void print_line(const char* what, double measured, double predicted) {
  std::printf("%-46s measured %9.3f ms, model %9.3f ms, ratio %.2f\n", what, 1e3 * measured,
              1e3 * predicted, measured / predicted);
  std::fflush(stdout);
}

// Compares the model's forward pass with this machine: one call of the whole sequence, and on several ranks the gather.
void check_model(const Options& o, Ranks& ranks) {
  Problem p = o.problem;
  p.backward = false;
  Machine machine = o.machine;
  std::printf("forward pass of %lld causal tokens, %lld heads, %lld kv heads, d %lld\n",
              static_cast<long long>(p.len), static_cast<long long>(p.heads),
              static_cast<long long>(p.kv_heads), static_cast<long long>(p.dim));
  std::fflush(stdout);
  if (ranks.first()) {
    Call whole(p.heads, p.kv_heads, p.dim, p.len, p.len, o.threads);
    print_line("one rank, forward", seconds_of_call(whole),
               simulate(Method::gather, p, machine, 1)->total);
  }
  if (ranks.count() == 1) return;
  ranks.meet();
  // All ranks at once, as in the gather below: they share the memory and perhaps the processors.
  measure_engine(p, o.threads, machine);
  const int n = ranks.count();
  const double own = machine.flops;
  machine.flops = 0;
  for (const double one : ranks.gather(own)) machine.flops += one / n;
  const std::size_t bytes = std::size_t(p.len / n * 2 * p.kv_heads * p.dim * p.bytes);
  const double empty = seconds_to_gather(ranks, "x"),
               half = seconds_to_gather(ranks, std::string(bytes / 2, 'x'));
  machine.latency = empty / (n - 1);
  machine.overhead = 0;
  machine.bandwidth = double(bytes / 2) * (n - 1) / std::max(1e-9, half - empty);
  std::printf("%d ranks: %.1f GFLOP/s each, %.1f us and %.2f GB/s between them\n", n,
              1e-9 * machine.flops, 1e6 * machine.latency, 1e-9 * machine.bandwidth);
  std::fflush(stdout);
  const std::string shard(bytes, 'x');
  const Index chunk = p.len / (2 * n), first = ranks.rank(), second = 2 * n - 1 - first;
  Call early(p.heads, p.kv_heads, p.dim, chunk, (first + 1) * chunk, o.threads),
      late(p.heads, p.kv_heads, p.dim, chunk, (second + 1) * chunk, o.threads);
  const double slowest = least_together(ranks, [&] {
    (void)ranks.gather_texts(shard);
    early.run();
    late.run();
  });
  print_line((std::to_string(n) + " ranks, gather, forward").c_str(), slowest,
             simulate(Method::gather, p, machine, n)->total);
}

[[nodiscard]] std::vector<int> read_ranks(const std::string& text) {
  std::vector<int> all;
  for (const std::string& item : heed_program::split(text)) {
    int count = 0;
    if (!heed_program::detail::read_number(item, count) || count < 1 || count > 4096)
      throw UsageError("--ranks is \"" + text +
                       "\", it must be whole numbers from 1 to 4096 such as 1,2,1024");
    all.push_back(count);
  }
  return all;
}

void print_table(const Options& o) {
  const Problem& p = o.problem;
  std::printf(
      "%s of %lld causal tokens, %lld heads, %lld kv heads, d %lld, %s shards\n"
      "each rank %.1f GFLOP/s; network %g us, %g us per message, %g GB/s\n\n"
      "%6s  %-30s %-30s %-30s %s\n%6s  %s %s %s\n",
      p.backward ? "forward and backward" : "forward", static_cast<long long>(p.len),
      static_cast<long long>(p.heads), static_cast<long long>(p.kv_heads),
      static_cast<long long>(p.dim), p.zigzag ? "zig-zag" : "contiguous", 1e-9 * o.machine.flops,
      o.latency, o.overhead, o.bandwidth, "ranks", "gather", "ring", "head-parallel", "fastest", "",
      "    ms  share   MiB           ", "    ms  share   MiB           ", "    ms  share   MiB");
  std::string last;
  std::vector<std::string> regions;
  for (const int ranks : read_ranks(o.ranks)) {
    std::printf("%6d  ", ranks);
    const char* best = nullptr;
    double least = std::numeric_limits<double>::infinity();
    for (const Method method : kMethods) {
      const std::optional<Times> times = simulate(method, p, o.machine, ranks);
      if (!times) {
        std::printf("%-30s ", "more ranks than heads");
        continue;
      }
      char cell[64];
      std::snprintf(cell, sizeof cell, "%9.3f %5.1f%% %7.1f", 1e3 * times->total,
                    100 * times->compute / times->total, times->memory / 1048576);
      std::printf("%-30s ", cell);
      if (times->total < least) {
        least = times->total;
        best = name_of(method);
      }
    }
    if (ranks == 1) best = "-";
    std::printf("%s\n", best);
    if (ranks > 1 && best != last) {
      regions.push_back(std::string(best) + " from " + std::to_string(ranks) + " ranks on");
      last = best;
    }
  }
  std::string text;
  for (const std::string& region : regions) text += (text.empty() ? "" : ", then ") + region;
  if (!text.empty()) std::printf("\nfastest: %s\n", text.c_str());
  std::printf(
      "share: fraction of the time in which the busiest rank computes; MiB: keys and values "
      "that a rank holds%s\n",
      p.backward ? ", and their gradients" : "");
}

int run(int argc, char** argv, Ranks& ranks) {
  Options o;
  CLI::App app{"Predicts the time of attention over a sequence that is divided among ranks.",
               "heed_scaling"};
  const auto size = [&](const char* name, Count& value, const char* text, std::int64_t most) {
    app.add_option(name, value, text)
        ->type_name("N")
        ->capture_default_str()
        ->check(heed_program::whole(1, most));
  };
  const auto real = [&](const char* name, double& value, const char* text) {
    app.add_option(name, value, text)
        ->type_name("X")
        ->capture_default_str()
        ->check(heed_program::number(0, 1e12));
  };
  size("--len", o.problem.len, "Number of tokens of the sequence", std::int64_t(1) << 32);
  size("--heads", o.problem.heads, "Number of query heads", 4096);
  size("--kv-heads", o.problem.kv_heads, "Number of heads of keys and values, a divisor of --heads",
       4096);
  size("--dim", o.problem.dim, "Width of a head", 1024);
  app.add_option("--ranks", o.ranks, "Numbers of ranks, at most 4096 each")
      ->type_name("A,B,...")
      ->capture_default_str();
  real("--gflops", o.gflops, "GFLOP/s of a rank; 0: those of heed's forward pass, measured here");
  real("--latency", o.latency, "Latency of a message, in microseconds");
  real("--overhead", o.overhead, "Time that a message takes of each end's port, in microseconds");
  real("--bandwidth", o.bandwidth, "Bandwidth of a rank in each direction, in GB/s");
  app.add_option(
         "--threads", o.threads,
         "Number of threads of a rank for measurements; 0: OMP_NUM_THREADS, or all processors")
      ->type_name("N")
      ->capture_default_str()
      ->check(heed_program::whole(0, heed_program::kMaxThreads));
  app.add_flag("--forward", o.forward_only, "The forward pass alone");
  app.add_flag("--contiguous", o.contiguous,
               "Ranks have consecutive tokens, which leaves late ones with more work");
  app.add_flag(
      "--check", o.check,
      "Instead of a table: holds the model's forward pass against this machine, on about " +
          std::to_string(kCheckLen) + " tokens unless --len says otherwise");
  app.footer(heed_program::kExitCodes);
  if (!heed_program::read_options(app, argc, argv)) return 0;
  if (o.problem.heads % o.problem.kv_heads != 0)
    throw UsageError("--kv-heads is " + std::to_string(o.problem.kv_heads) + ", --heads is " +
                     std::to_string(o.problem.heads) + "; it must be a divisor of it");
  if (o.bandwidth == 0) throw UsageError("--bandwidth is 0, it must be greater");
  if (ranks.count() > 1 && !o.check)
    throw UsageError(std::to_string(ranks.count()) +
                     " ranks were started, which --check alone makes use of");
  const Count chunks = 2 * ranks.count();  // two for each rank
  if (o.check && app.count("--len") == 0)
    o.problem.len = std::max<Count>(1, kCheckLen / chunks) * chunks;
  if (o.check && o.problem.len % chunks != 0)
    throw UsageError("--len is " + std::to_string(o.problem.len) +
                     ", with --check it must be a multiple of " + std::to_string(chunks) +
                     ", two chunks for each rank");
  (void)read_ranks(o.ranks);
  o.problem.backward = !o.forward_only;
  o.problem.zigzag = !o.contiguous;
  o.machine.latency = 1e-6 * o.latency;
  o.machine.overhead = 1e-6 * o.overhead;
  o.machine.bandwidth = 1e9 * o.bandwidth;
  o.machine.flops = 1e9 * o.gflops;
  if (o.gflops == 0 && ranks.first()) measure_engine(o.problem, o.threads, o.machine);
  ranks.meet();
  if (o.check)
    check_model(o, ranks);
  else
    print_table(o);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return heed_program::run_on_ranks("heed_scaling",
                                    [&](Ranks& ranks) { return run(argc, argv, ranks); });
}
