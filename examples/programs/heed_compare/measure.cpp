// SPDX-License-Identifier: Apache-2.0
#include "measure.hpp"

#include "memory_meter.hpp"
#include "print.hpp"
#include "runner.hpp"

#include "../program/progress.hpp"

#include <heed/check/machine_peak.hpp>
#include <heed/core/thread_limit.hpp>
#include <heed/variants.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace compare {

namespace {

using heed_program::Progress;

constexpr heed::Shape kGradientShape{1, 2, 24, 16};
// Calls are repeated until one sample lasts this long.
constexpr double kSampleSeconds = 0.01;

// GFLOP/s of multiply-adds in this dtype, of float ones for bfloat16; the best of a few probes, about 20 ms.
[[nodiscard]] double measure_peak(Dtype dtype, int threads) {
  double best = 0;
  for (int i = 0; i < 16; ++i)
    best = std::max(best, dtype == Dtype::float64 ? heed::peak_flops<double>(threads)
                                                  : heed::peak_flops<float>(threads));
  return best * 1e-9;
}

// One pass of one variant: the settings and results of its timing.
struct Pass {
  void (Runner::*run)() = nullptr;
  Index scratch_bytes = 0;
  int calls = 1;                     // per sample
  std::vector<double> samples = {};  // ms per call

  void prepare(Runner& runner) {
    (runner.*run)();  // memory of the caller gets its size
    const double once = std::max(time_calls(runner, 1), 1e-9);
    calls = int(std::clamp(std::ceil(kSampleSeconds / once), 1.0, 10'000.0));
  }

  void sample(Runner& runner) { samples.push_back(time_calls(runner, calls) * 1e3 / calls); }

  // Returns the total seconds. Memory is the largest of all calls: not every call needs all workers.
  [[nodiscard]] double time_calls(Runner& runner, int count) {
    const MemoryMeter meter;
    const double elapsed = heed::seconds_of([&] {
      for (int i = 0; i < count; ++i) (runner.*run)();
    });
    scratch_bytes = std::max(scratch_bytes, meter.peak_bytes());
    return elapsed;
  }

  [[nodiscard]] double median() const { return heed::median_of(samples); }

  // Each round's time over the baseline's in the same round.
  [[nodiscard]] std::vector<double> ratios_to(const Pass& baseline) const {
    std::vector<double> ratios;
    for (std::size_t round = 0; round < samples.size(); ++round)
      ratios.push_back(samples[round] / baseline.samples[round]);
    return ratios;
  }
};

struct Timed {
  Runner* runner;
  Pass forward{&Runner::forward}, backward{&Runner::backward};
};

[[nodiscard]] Runners make_runners(Dtype dtype, RunnerSetup setup, const TextInput& text) {
  if (dtype == Dtype::bfloat16) setup.precision = heed::Precision::mixed;
  switch (dtype) {
    case Dtype::float32: return make_float_runners(setup, text);
    case Dtype::float64: return make_double_runners(setup, text);
    default: return make_bfloat16_runners(setup, text);
  }
}

// Rounds over all variants, each forward then backward; the peak is measured around every round.
// Returns how many rounds there were.
int time_rounds(std::vector<Timed>& all, const Settings& settings, Dtype dtype, double& peak,
                Progress& progress) {
  const double deadline = heed::wall_seconds() + settings.seconds_per_dtype();
  const auto say = [&](const std::string& what, const Timed& one) {
    progress.show(std::string(dtype_name(dtype)) + ": " + what + ", " + one.runner->name());
  };
  for (Timed& one : all) {
    say("first calls", one);
    one.forward.prepare(*one.runner);
    one.backward.prepare(*one.runner);
  }
  int round = 0;
  double longest = 0;
  while (round < settings.min_rounds() ||
         (round < settings.max_rounds() && heed::wall_seconds() + longest < deadline)) {
    const double start = heed::wall_seconds();
    ++round;
    peak = std::max(peak, measure_peak(dtype, settings.threads));
    for (Timed& one : all) {
      say("round " + std::to_string(round) + " of " + std::to_string(settings.max_rounds()), one);
      one.forward.sample(*one.runner);
      one.backward.sample(*one.runner);
    }
    peak = std::max(peak, measure_peak(dtype, settings.threads));
    longest = std::max(longest, heed::wall_seconds() - start);
  }
  return round;
}

// Compares backward in `dtype` with central differences of forward in double, at the same numbers.
[[nodiscard]] std::map<std::string, double> gradient_errors(const Settings& settings, Dtype dtype,
                                                            const std::string& text,
                                                            Progress& progress) {
  const TextInput input(text, kGradientShape.batch, kGradientShape.len, settings.seed);
  const RunnerSetup setup{settings.variants, baseline_geometry(kGradientShape), settings.causal, 1,
                          settings.seed};
  const Runners checked = make_runners(dtype, setup, input);
  const Runners twins = make_runners(Dtype::float64, setup, input);
  heed::GradcheckOptions options;
  options.max_entries_per_tensor = 32;
  std::map<std::string, double> errors;
  for (std::size_t i = 0; i < checked.size(); ++i) {
    progress.show(std::string(dtype_name(dtype)) + ": gradients of " + checked[i]->name());
    const GradientPoint point = checked[i]->gradient_point();
    const auto loss = [&](const std::vector<std::vector<double>>& at) {
      return twins[i]->loss(at, point.grad_out);
    };
    errors[checked[i]->name()] =
        heed::check_gradient_on<double>(loss, point.tensors, point.gradients, options).worst_error;
  }
  return errors;
}

[[nodiscard]] Record record_of(const Timed& one, const Pass& pass, const Pass& baseline,
                               const char* pass_name, double flops) {
  Record record;
  record.variant = one.runner->name();
  record.pass = pass_name;
  record.ms = pass.median();
  record.gflops = flops / record.ms * 1e-6;
  record.ratios = pass.ratios_to(baseline);
  record.ratio = heed::spread_of(record.ratios);
  record.scratch_bytes = pass.scratch_bytes;
  record.settings = one.runner->settings();
  return record;
}

[[nodiscard]] const Timed& baseline_of(const std::vector<Timed>& all) {
  return *std::find_if(all.begin(), all.end(),
                       [](const Timed& one) { return one.runner->name() == heed::kBaseline; });
}

// The names of variants, and the baseline's, whose time is the unit of theirs.
[[nodiscard]] std::vector<std::string> with_baseline(std::vector<std::string> names) {
  if (std::find(names.begin(), names.end(), heed::kBaseline) == names.end())
    names.emplace_back(heed::kBaseline);
  return names;
}

void add_records(const std::vector<Timed>& all, const Settings& settings, Dtype dtype,
                 const std::map<std::string, double>& errors, Comparison& comparison) {
  const Timed& baseline = baseline_of(all);
  for (const Timed& one : all) {
    const auto error = errors.find(one.runner->name());
    if (error == errors.end()) continue;  // a baseline that was not requested
    const double product = 2 * one.runner->visible_pairs() * double(settings.shape.dim);
    for (Record record :
         {record_of(one, one.forward, baseline.forward, "forward", 2 * product),
          record_of(one, one.backward, baseline.backward, "backward", 5 * product)}) {
      record.dtype = dtype;
      record.peak_share = record.gflops / comparison.peak_gflops.at(dtype);
      record.gradient_error = error->second;
      comparison.records.push_back(record);
    }
  }
}

void compare_dtype(const Settings& settings, Dtype dtype, const std::string& text,
                   Comparison& comparison, Progress& progress) {
  const auto errors = gradient_errors(settings, dtype, text, progress);
  progress.show(std::string(dtype_name(dtype)) + ": projecting the text");
  const TextInput input(text, settings.shape.batch, settings.shape.len, settings.seed);
  const Runners runners =
      make_runners(dtype,
                   {with_baseline(settings.variants), baseline_geometry(settings.shape),
                    settings.causal, settings.threads, settings.seed},
                   input);
  std::vector<Timed> all;
  for (const auto& runner : runners) all.push_back({runner.get()});
  double& peak = comparison.peak_gflops[dtype];
  comparison.rounds[dtype] = time_rounds(all, settings, dtype, peak, progress);
  add_records(all, settings, dtype, errors, comparison);
}

}  // namespace

Comparison run_comparison(const Settings& settings) {
  const std::string text =
      settings.text_file.empty() ? default_text() : read_text(settings.text_file);
  Comparison comparison;
  comparison.text_source = settings.text_file.empty() ? "built in" : settings.text_file;
  comparison.text_bytes = Index(text.size());
  comparison.gradient_shape = kGradientShape;
  Progress progress;
  for (const Dtype dtype : settings.dtypes)
    compare_dtype(settings, dtype, text, comparison, progress);
  return comparison;
}

const Record& most_moved(const Comparison& comparison) {
  return *std::max_element(
      comparison.records.begin(), comparison.records.end(),
      [](const Record& a, const Record& b) { return movement_of(a) < movement_of(b); });
}

std::string movement_text(const Comparison& comparison) {
  const Record& most = most_moved(comparison);
  const double movement = movement_of(most);
  const std::string text =
      print("move by up to %.0f %% between the quartiles of rounds (%s, %s, %s)", 100 * movement,
            most.variant.c_str(), most.pass.c_str(), dtype_name(most.dtype));
  if (movement <= kBusy) return text;
  return text +
         print("; the machine is busy: on a quiet one they move by less than %.0f %%", 100 * kBusy);
}

void require_gradients(const Comparison& comparison) {
  for (const Record& r : comparison.records) {
    if (r.gradient_error <= gradient_bound(r.dtype)) continue;
    char text[160];
    std::snprintf(text, sizeof text,
                  "the gradient check of %s in %s failed: the error is %.2g, it must be at most %g",
                  r.variant.c_str(), dtype_name(r.dtype), r.gradient_error,
                  gradient_bound(r.dtype));
    throw std::runtime_error(text);
  }
}

std::vector<LengthTime> time_shorter_texts(const Settings& settings) {
  const std::string text =
      settings.text_file.empty() ? default_text() : read_text(settings.text_file);
  const Dtype dtype = settings.dtypes.front();
  std::vector<LengthTime> times;
  Progress progress;
  for (const Index part : {4, 2}) {
    Settings shorter = settings;
    shorter.quick = true;
    shorter.shape.len = settings.shape.len / part;
    if (shorter.shape.len < 16) continue;
    const TextInput input(text, shorter.shape.batch, shorter.shape.len, settings.seed);
    const Runners runners =
        make_runners(dtype,
                     {with_baseline(settings.variants), baseline_geometry(shorter.shape),
                      settings.causal, settings.threads, settings.seed},
                     input);
    std::vector<Timed> all;
    for (const auto& runner : runners) all.push_back({runner.get()});
    double peak = 0;
    time_rounds(all, shorter, dtype, peak, progress);
    const Timed& baseline = baseline_of(all);
    for (const Timed& one : all) {
      times.push_back({one.runner->name(), "forward", shorter.shape.len,
                       one.forward.ratios_to(baseline.forward)});
      times.push_back({one.runner->name(), "backward", shorter.shape.len,
                       one.backward.ratios_to(baseline.backward)});
    }
  }
  return times;
}

}  // namespace compare
