// SPDX-License-Identifier: Apache-2.0
#pragma once

// The page of pictures of a training run: losses, learning rate and speed, written again and again.

#include "training.hpp"

#include "../report/page.hpp"
#include "../report/plots.hpp"

namespace heed_lm {

// A loss as text: "1.2345" or "not finite".
[[nodiscard]] std::string loss_text(double loss);

class RunReport {
 public:
  // Makes the folder; throws if nothing can be written there.
  RunReport(std::filesystem::path folder, std::string title);

  void fact(std::string name, std::string value);
  void step(const Report& report);
  void evaluation(Index step, double loss);

  // Writes the page. If that fails, says so on standard error the first time, and training goes on.
  void write();
  [[nodiscard]] bool failed() const { return failed_; }

 private:
  static constexpr std::size_t kSpeeds = 60;  // points; more would scatter, of few steps each
  [[nodiscard]] heed_report::Page page() const;
  [[nodiscard]] heed_report::Picture losses() const;
  [[nodiscard]] heed_report::Picture speed() const;
  [[nodiscard]] static std::string mean_text(const heed_report::Curve& curve);

  std::filesystem::path folder_;
  heed_report::Page head_;
  heed_report::Curve training_, rate_;
  heed_report::Curve tokens_{kSpeeds}, seconds_{kSpeeds};  // numbers of each step
  heed_report::Series validation_{"validation", {}, {}, true};
  Report last_;
  Index skipped_ = 0;
  bool failed_ = false;
};

}  // namespace heed_lm
