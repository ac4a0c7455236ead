// SPDX-License-Identifier: Apache-2.0
#include "run_report.hpp"

#include <cmath>
#include <cstdio>

namespace heed_lm {

using heed_report::LinePlot;

std::string loss_text(double loss) {
  if (!std::isfinite(loss)) return "not finite";
  char text[64];
  std::snprintf(text, sizeof text, "%.4f", loss);
  return text;
}

RunReport::RunReport(std::filesystem::path folder, std::string title) : folder_(std::move(folder)) {
  heed_report::prepare_folder(folder_);
  head_.title = std::move(title);
}

void RunReport::fact(std::string name, std::string value) {
  head_.facts.emplace_back(std::move(name), std::move(value));
}

void RunReport::step(const Report& report) {
  last_ = report;
  const double at = double(report.step);
  // A skipped step must not make the mean over many steps NaN.
  if (report.skipped)
    ++skipped_;
  else
    training_.add(at, report.loss);
  rate_.add(at, report.rate);
  tokens_.add(at, double(report.step_tokens));
  seconds_.add(at, report.step_seconds);
}

void RunReport::evaluation(Index step, double loss) {
  validation_.x.push_back(double(step));
  validation_.y.push_back(loss);
}

void RunReport::write() {
  try {
    heed_report::write_page(folder_, page());
  } catch (const std::runtime_error& error) {
    if (!failed_) std::fprintf(stderr, "\nheed_lm: the page is out of date: %s\n", error.what());
    failed_ = true;
  }
}

std::string RunReport::mean_text(const heed_report::Curve& curve) {
  const std::size_t each = curve.steps_per_point();
  return each == 1 ? "" : "Each point is the mean of " + std::to_string(each) + " steps.";
}

heed_report::Picture RunReport::losses() const {
  LinePlot plot{"loss",
                "Loss on training and validation text",
                mean_text(training_),
                {"step"},
                {"loss, nats per token"},
                {training_.series("training")}};
  if (!validation_.x.empty()) plot.series.push_back(validation_);
  return draw(plot);
}

// A point shows the tokens of its steps over the seconds of its steps.
heed_report::Picture RunReport::speed() const {
  heed_report::Series series = tokens_.series("");
  const heed_report::Series seconds = seconds_.series("");
  for (std::size_t i = 0; i < series.y.size(); ++i) series.y[i] /= seconds.y[i];
  return draw(LinePlot{"speed",
                       "Speed of training steps",
                       "Evaluations and the writing of files are not in it. " + mean_text(tokens_),
                       {"step"},
                       {"tokens per second", false, true},
                       {series}});
}

heed_report::Page RunReport::page() const {
  heed_report::Page page = head_;
  page.facts.emplace_back("step",
                          std::to_string(last_.step) + " of " + std::to_string(last_.steps));
  if (skipped_ > 0) page.facts.emplace_back("skipped steps", std::to_string(skipped_));
  page.facts.emplace_back("training loss", loss_text(last_.loss));
  if (!validation_.y.empty()) {
    char step[32];
    std::snprintf(step, sizeof step, "%.0f", validation_.x.back());
    page.facts.emplace_back("validation loss",
                            loss_text(validation_.y.back()) + " after step " + step);
  }
  page.pictures = {losses(),
                   draw(LinePlot{"learning_rate",
                                 "Learning rate of each step",
                                 "",
                                 {"step"},
                                 {"learning rate", false, true},
                                 {rate_.series("")}}),
                   speed()};
  return page;
}

}  // namespace heed_lm
