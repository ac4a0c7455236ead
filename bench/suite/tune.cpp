// SPDX-License-Identifier: Apache-2.0

// heed_bench --tune shows the plan's choice for plain attention, and which tile of keys and panel of queries would be
// faster on this machine. The plan does not depend on the machine: tiles decide the order of additions, and with it the
// last bits of a result. A call may ask for other tiles by Options::key_tile and Options::panel_vectors.

#include "ops.hpp"
#include "suite.hpp"

#include <cstdio>

namespace heed_bench {
namespace {

constexpr Index kTiles[] = {64, 96, 128, 192, 256, 384, 512};
constexpr int kPairs = 5;

struct Choice {
  Index tile;
  int vectors;
  bool operator==(const Choice&) const = default;
};

// Seconds of one call with a choice, and their ratio to those of the plan's choice: medians of calls in turns.
template <class T>
class Trial {
 public:
  Trial(const Case& c, Pass pass)
      : pass_(pass),
        call_(heed::ScaledDot<T>{}, c.geometry(), c.mask, {.threads = c.threads}),
        threads_(c.threads) {
    const auto plan =
        heed::explain(call_.call.op, c.geometry(), call_.call.mask, pass, call_.call.options);
    planned_ = {plan.key_tile, int(plan.lanes / heed::kLanes<T>)};
    call_.call.forward();
    (void)seconds(planned_);
  }
  [[nodiscard]] const Choice& planned() const { return planned_; }
  [[nodiscard]] double share_of_peak(double flops) {
    std::vector<double> shares;
    for (int i = 0; i < kPairs; ++i)
      shares.push_back(flops / seconds(planned_) / heed::peak_flops<T>(threads_));
    return heed::median_of(shares);
  }
  [[nodiscard]] double ratio(const Choice& other) {
    std::vector<double> ratios;
    (void)seconds(other);
    for (int i = 0; i < kPairs; ++i) ratios.push_back(seconds(other) / seconds(planned_));
    return heed::median_of(ratios);
  }

 private:
  [[nodiscard]] double seconds(const Choice& choice) {
    call_.call.options.key_tile = choice.tile;
    call_.call.options.panel_vectors = choice.vectors;
    return heed::seconds_of([&] {
      if (pass_ == Pass::forward)
        call_.call.forward();
      else
        call_.call.backward();
    });
  }

  Pass pass_;
  CaseCall<heed::ScaledDot<T>> call_;
  int threads_;
  Choice planned_{};
};

template <class T>
void tune_case(const Case& c, Pass pass, const char* dtype) {
  Trial<T> trial(c, pass);
  const Choice plan = trial.planned();
  std::printf("%-8s %-6s %-20s %4lld x %-3lld %5.0f %%", text(pass), dtype, c.text().c_str(),
              (long long)plan.tile, (long long)(plan.vectors * heed::kLanes<T>),
              100 * trial.share_of_peak(c.flops(pass)));
  Choice best = plan;
  double least = 1.0;
  for (const Index tile : kTiles)
    for (int vectors = 1; vectors <= heed::kPanelVectors; ++vectors) {
      const Choice other{tile, vectors};
      if (other == plan || tile > c.len_kv) continue;
      const double ratio = trial.ratio(other);
      if (ratio >= least) continue;
      least = ratio;
      best = other;
    }
  // Measures the best once more: the best of many noisy ratios looks too good.
  if (best != plan) least = trial.ratio(best);
  if (least < 0.98)
    std::printf("  %4lld x %-3lld %.2f\n", (long long)best.tile,
                (long long)(best.vectors * heed::kLanes<T>), least);
  else
    std::printf("  nothing by 2 %%\n");
  std::fflush(stdout);
}

}  // namespace

void tune() {
  std::puts(
      "Plain attention, usual cases. Tiles are keys x queries; the last column is the time over "
      "the "
      "plan's.\n\n"
      "pass     dtype  case                 plan        of peak  faster here");
  for (std::size_t i = 0; i < kUsualCases; ++i)
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      tune_case<float>(cases()[i], pass, "float");
      tune_case<double>(cases()[i], pass, "double");
    }
}

}  // namespace heed_bench
