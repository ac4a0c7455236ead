// SPDX-License-Identifier: Apache-2.0

// Measures what sequences of unequal lengths cost in one call, and how fast many sequences decode together:
//
//   packed   forward and backward of packed sequences over one batch of equal lengths, and over a call for each sequence
//   decode   tokens per second and milliseconds per step of 1 to 64 sequences in a KvPool, beside a loop of calls for each
//
// Compared calls run in turns; times are medians, and each ratio compares two runs that follow each other.
//
//   heed_sequences packed --threads 1
//   heed_sequences decode --threads 2

#include "../examples/programs/program/options.hpp"
#include "../examples/programs/program/program.hpp"

#include <heed/check/op_call.hpp>
#include <heed/check/stopwatch.hpp>
#include <heed/compiled.hpp>
#include <heed/kv_cache.hpp>
#include <heed/kv_pool.hpp>
#include <heed/ops/dar.hpp>
#include <heed/ops/differential.hpp>
#include <heed/ops/scaled_dot.hpp>

#include <cmath>
#include <functional>
#include <numeric>

namespace {

using heed::Index;
using Lengths = std::vector<Index>;
using Action = std::function<void()>;

[[nodiscard]] Lengths sums_of(const Lengths& lengths) {
  Lengths at(1, 0);
  for (const Index length : lengths) at.push_back(at.back() + length);
  return at;
}

// Lengths from `least` to `most`, evenly on a logarithmic scale, in a mixed order.
[[nodiscard]] Lengths mixed_lengths(Index count, Index least, Index most) {
  Lengths lengths;
  for (Index n = 0; n < count; ++n) {
    const double place = double(n * 7 % count) / double(std::max<Index>(1, count - 1));
    lengths.push_back(
        Index(std::lround(double(least) * std::pow(double(most) / double(least), place))));
  }
  return lengths;
}

struct Compared {
  double first = 0, second = 0, ratio = 0;  // medians: seconds of either, and of first / second
};
// Runs both in turns; a sample lasts some milliseconds.
[[nodiscard]] Compared compare(const Action& first, const Action& second, int repeats) {
  first();
  second();
  const int calls = std::max(1, int(0.003 / std::max(1e-6, heed::seconds_of(second))));
  const auto sample = [calls](const Action& action) {
    return heed::seconds_of([&] {
             for (int i = 0; i < calls; ++i) action();
           }) /
           calls;
  };
  std::vector<double> a, b, ratios;
  for (int n = 0; n < repeats; ++n) {
    a.push_back(sample(first));
    b.push_back(sample(second));
    ratios.push_back(a.back() / b.back());
  }
  return {heed::median_of(a), heed::median_of(b), heed::median_of(ratios)};
}

// The same tensors as packed sequences, as a call for each sequence, and, if lengths are equal, as a batch.
template <class Op>
class Sequences {
 public:
  Sequences(const Op& op, heed::Geometry g, Lengths lengths, int threads)
      : op_(op), lengths_(std::move(lengths)), at_(sums_of(lengths_)) {
    options_.threads = threads;
    g.batch = 1;
    g.len_q = g.len_kv = at_.back();
    g_ = g;
    numbers_ = heed::normal_numbers(op, g);
    packed_.queries = at_;
    for (auto* of : {&out_, &dq_}) of->resize(numbers_.query.size());
    dk_.resize(numbers_.key.size());
    dv_.resize(numbers_.value.size());
    saved_.resize(lengths_.size());
  }

  void packed_forward() {
    heed::PackedInputs<float> in = inputs(1, 0, g_.len_q);
    in.packed = &packed_;
    heed::forward(op_, in, mask_, rows(out_, g_.heads, 1, 0, g_.len_q), &packed_saved_, options_);
  }
  void packed_backward() {
    heed::PackedInputs<float> in = inputs(1, 0, g_.len_q);
    in.packed = &packed_;
    backward(in, packed_saved_, 1, 0, g_.len_q);
  }
  void batch_forward() {
    heed::forward(op_, inputs(count(), 0, lengths_[0]), mask_,
                  rows(out_, g_.heads, count(), 0, lengths_[0]), saved_.data(), options_);
  }
  void batch_backward() {
    backward(inputs(count(), 0, lengths_[0]), saved_[0], count(), 0, lengths_[0]);
  }
  void separate_forward() {
    for (std::size_t n = 0; n < lengths_.size(); ++n)
      heed::forward(op_, inputs(1, at_[n], lengths_[n]), mask_,
                    rows(out_, g_.heads, 1, at_[n], lengths_[n]), &saved_[n], options_);
  }
  void separate_backward() {
    for (std::size_t n = 0; n < lengths_.size(); ++n)
      backward(inputs(1, at_[n], lengths_[n]), saved_[n], 1, at_[n], lengths_[n]);
  }

 private:
  [[nodiscard]] Index count() const { return Index(lengths_.size()); }
  // A view of (total, heads, dim) memory: `batch` sequences of `len` tokens from row `first` on.
  template <class Numbers>
  [[nodiscard]] auto rows(Numbers& x, Index heads, Index batch, Index first, Index len) const {
    const Index dim = Index(x.size()) / (heads * g_.len_q);
    return heed::view_bthd(x.data() + first * heads * dim, batch, len, heads, dim);
  }
  [[nodiscard]] heed::Inputs<float> inputs(Index batch, Index first, Index len) const {
    return {rows(numbers_.query, g_.query_heads, batch, first, len),
            rows(numbers_.key, g_.kv_heads, batch, first, len),
            rows(numbers_.value, g_.kv_heads, batch, first, len)};
  }
  // Runs backward() on Inputs or on PackedInputs.
  template <class In>
  void backward(const In& in, const heed::Saved<float>& saved, Index batch, Index first,
                Index len) {
    heed::backward(
        op_, in, mask_, saved,
        heed::StoredView<const float>(rows(std::as_const(out_), g_.heads, batch, first, len)),
        heed::StoredView<const float>(rows(numbers_.grad_out, g_.heads, batch, first, len)),
        {rows(dq_, g_.query_heads, batch, first, len), rows(dk_, g_.kv_heads, batch, first, len),
         rows(dv_, g_.kv_heads, batch, first, len)},
        &grad_op_, options_);
  }

  Op op_, grad_op_;
  Lengths lengths_, at_;
  heed::Geometry g_;
  heed::Mask<float> mask_ = heed::causal<float>();
  heed::Options options_;
  heed::CallNumbers<float> numbers_;
  heed::Packed<float> packed_;
  std::vector<float> out_, dq_, dk_, dv_;
  heed::Saved<float> packed_saved_;
  std::vector<heed::Saved<float>> saved_;
};

template <class Op>
void time_packed(const char* name, const Op& op, int threads, int repeats) {
  const heed::Geometry g{1, 8, 8, 8, 1, 1, 64, 64};
  const auto line = [&](const char* lengths, const char* beside, const Compared& forward,
                        const Compared& backward) {
    std::printf("%-13s %-22s over %-14s forward %8.3f ms %6.3f   backward %8.3f ms %6.3f\n", name,
                lengths, beside, forward.first * 1e3, forward.ratio, backward.first * 1e3,
                backward.ratio);
    std::fflush(stdout);
  };
  for (const auto& [text, count, length] : {std::tuple{"8 x 512", Index(8), Index(512)},
                                            {"32 x 128", Index(32), Index(128)},
                                            {"128 x 32", Index(128), Index(32)}}) {
    Sequences<Op> of(op, g, Lengths(std::size_t(count), length), threads);
    const Compared forward =
        compare([&] { of.packed_forward(); }, [&] { of.batch_forward(); }, repeats);
    line(text, "a batch", forward,
         compare([&] { of.packed_backward(); }, [&] { of.batch_backward(); }, repeats));
  }
  for (const auto& [text, lengths] : {std::pair{"8 of 64 to 2,048", mixed_lengths(8, 64, 2048)},
                                      {"32 of 16 to 512", mixed_lengths(32, 16, 512)},
                                      {"128 of 8 to 96", mixed_lengths(128, 8, 96)}}) {
    Sequences<Op> of(op, g, lengths, threads);
    const Compared forward =
        compare([&] { of.packed_forward(); }, [&] { of.separate_forward(); }, repeats);
    line(text, "separate calls", forward,
         compare([&] { of.packed_backward(); }, [&] { of.separate_backward(); }, repeats));
  }
}

// Sequences of mixed lengths that each get one token per step; keys and values are projected elsewhere.
template <class Op>
class Decoding {
 public:
  Decoding(const Op& op, const heed::Geometry& g, const Lengths& lengths, int threads)
      : op_(op), g_(g), pool_(g.kv_heads, g.dim_qk, g.dim_v, pages_for(lengths)) {
    options_.threads = threads;
    heed::Geometry longest = g;
    longest.len_q = longest.len_kv = *std::max_element(lengths.begin(), lengths.end());
    numbers_ = heed::normal_numbers(op, longest);
    out_.resize(std::size_t(Index(lengths.size()) * g.heads * g.dim_v));
    for (const Index length : lengths) {
      const Index number = pool_.add();
      pool_.append(number, rows(numbers_.key, g.kv_heads, length),
                   rows(numbers_.value, g.kv_heads, length));
      caches_.emplace_back(Index(1), g.kv_heads, g.dim_qk, g.dim_v);
      caches_.back().append(rows(numbers_.key, g.kv_heads, length),
                            rows(numbers_.value, g.kv_heads, length));
      sequences_.push_back(number);
      lengths_.push_back(length);
    }
  }
  // Decodes one token of each sequence, all in one call, and removes the tokens again.
  void together() {
    for (std::size_t n = 0; n < sequences_.size(); ++n)
      pool_.truncate(sequences_[n], lengths_[n] - 1);
    const Index count = Index(sequences_.size());
    pool_.append(sequences_, rows(numbers_.key, g_.kv_heads, count),
                 rows(numbers_.value, g_.kv_heads, count));
    heed::forward(op_, pool_.inputs(sequences_, rows(numbers_.query, g_.query_heads, count)), mask_,
                  rows(out_, g_.heads, count), nullptr, options_);
  }
  // The same by a call for each sequence.
  void one_by_one() {
    for (std::size_t n = 0; n < caches_.size(); ++n) {
      caches_[n].truncate(lengths_[n] - 1);
      caches_[n].append(rows(numbers_.key, g_.kv_heads, 1), rows(numbers_.value, g_.kv_heads, 1));
      heed::forward(op_, caches_[n].inputs(rows(numbers_.query, g_.query_heads, 1)), mask_,
                    rows(out_, g_.heads, 1), nullptr, options_);
    }
  }
  [[nodiscard]] double bytes() const {
    return double(std::accumulate(lengths_.begin(), lengths_.end(), Index(0))) *
           double(g_.kv_heads * (g_.dim_qk + g_.dim_v)) * double(sizeof(float));
  }

 private:
  [[nodiscard]] static Index pages_for(const Lengths& lengths) {
    Index pages = 0;
    for (const Index length : lengths) pages += length / heed::kDefaultPageRows + 1;
    return pages;
  }
  // The first `len` tokens of (len, heads, dim) memory.
  template <class Numbers>
  [[nodiscard]] auto rows(Numbers& x, Index heads, Index len) const {
    const Index dim = heads == g_.kv_heads ? g_.dim_qk : g_.dim_v;
    return heed::view_bthd(x.data(), 1, len, heads, dim);
  }

  Op op_;
  heed::Geometry g_;
  heed::KvPool<float> pool_;
  std::vector<heed::KvCache<float>> caches_;
  heed::Mask<float> mask_ = heed::causal<float>(heed::Align::bottom_right);
  heed::Options options_;
  heed::CallNumbers<float> numbers_;
  std::vector<float> out_;
  std::vector<Index> sequences_;
  Lengths lengths_;
};

template <class Op>
void time_decoding(const char* name, const Op& op, int threads, int repeats) {
  const heed::Geometry g{1, 8, 8, 2, 1, 1, 64, 64};
  for (const Index count : {1, 2, 4, 8, 16, 32, 64}) {
    Decoding<Op> of(op, g, mixed_lengths(count, 128, 4096), threads);
    const Compared step = compare([&] { of.together(); }, [&] { of.one_by_one(); }, repeats);
    std::printf(
        "%-13s %2td sequences of 128 to 4,096: %9.0f tokens/s, %7.3f ms a step, %6.2f GB/s, %5.2f "
        "of "
        "a loop of calls\n",
        name, count, double(count) / step.first, step.first * 1e3, of.bytes() / step.first * 1e-9,
        step.ratio);
    std::fflush(stdout);
  }
}

int run_program(int argc, char** argv) {
  CLI::App app(
      "Times packed sequences beside batches and separate calls, and steps of decoding of many "
      "sequences in a pool beside a loop of calls.");
  app.footer(heed_program::kExitCodes);
  std::string what = "all";
  int threads = 0, repeats = 31;
  app.add_option("what", what, "packed, decode or all (default)")
      ->check(CLI::IsMember({"packed", "decode", "all"}));
  app.add_option("--threads", threads, "Threads; 0: OMP_NUM_THREADS, or all processors (default 0)")
      ->check(heed_program::whole(0, 4096));
  app.add_option("--repeats", repeats, "Pairs of samples (default 31)")
      ->check(heed_program::whole(1, 100000));
  if (!heed_program::read_options(app, argc, argv)) return 0;
  const auto for_ops = [](auto&& f) {
    f("sdpa", heed::ScaledDot<float>{});
    f("dar", heed::Dar<float>{});
    f("differential", heed::Differential<float>{});
  };
  if (what != "decode")
    for_ops([&](const char* name, const auto& op) { time_packed(name, op, threads, repeats); });
  if (what != "packed")
    for_ops([&](const char* name, const auto& op) { time_decoding(name, op, threads, repeats); });
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return heed_program::run("heed_sequences", [&] { return run_program(argc, argv); });
}
