// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "settings.hpp"

#include "../program/machine.hpp"

#include <heed/check/stopwatch.hpp>

#include <map>

namespace compare {

using heed_program::Machine;

// Results for one variant, dtype and pass.
struct Record {
  std::string variant;
  Dtype dtype = Dtype::float32;
  std::string pass;       // "forward", "backward"
  double ms = 0;          // median over the rounds
  double gflops = 0;      // for the two (forward) or five (backward) plain products
  double peak_share = 0;  // gflops over the measured peak of as many threads
  // Each round's ms over sdpa's in the same round, dtype and pass; and the quartiles of these.
  std::vector<double> ratios;
  heed::Spread ratio;
  Index scratch_bytes = 0;    // the call's memory beyond inputs, outputs, gradients and saved rows
  double gradient_error = 0;  // worst |analytic - numeric| / max(1, |gradient|)
  std::string settings;
};

struct Comparison {
  std::map<Dtype, double> peak_gflops;
  std::map<Dtype, int> rounds;
  std::vector<Record> records;  // dtype by dtype, variant by variant, forward before backward
  std::string text_source;
  Index text_bytes = 0;  // size of the file; a run reads batch * tokens of its bytes, repeated
  heed::Shape gradient_shape;
};

[[nodiscard]] Comparison run_comparison(const Settings& settings);

// The record whose ratios varied most from round to round, by the distance of their quartiles over
// their median. There must be records.
[[nodiscard]] const Record& most_moved(const Comparison& comparison);
[[nodiscard]] inline double movement_of(const Record& record) {
  return (record.ratio.upper - record.ratio.lower) / record.ratio.median;
}
// Ratios vary less than this on a quiet machine.
inline constexpr double kBusy = 0.1;
// "move by up to 3 % between the quartiles of rounds (dar, backward, float)", and whether the machine was busy.
[[nodiscard]] std::string movement_text(const Comparison& comparison);

// The largest gradient error that rounding explains: about a hundred times what is observed, thirty
// times in bfloat16. A gradient of that size with a wrong sign is found.
[[nodiscard]] constexpr double gradient_bound(Dtype dtype) {
  switch (dtype) {
    case Dtype::float32: return 1e-4;
    case Dtype::float64: return 3e-6;
    default: return 0.1;
  }
}
// Throws std::runtime_error if a gradient error is larger or not finite.
void require_gradients(const Comparison& comparison);

// Time of a pass at another length than settings.shape.len.
struct LengthTime {
  std::string variant, pass;
  Index len = 0;
  std::vector<double> ratios;  // ratios to sdpa in the same round, one per round
};

// The variants at a quarter and at half of the length, in three rounds of the first dtype; nothing below 16
// tokens.
[[nodiscard]] std::vector<LengthTime> time_shorter_texts(const Settings& settings);

}  // namespace compare
