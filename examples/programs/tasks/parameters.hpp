// SPDX-License-Identifier: Apache-2.0
#pragma once

// The description of a task, used for its checks, its help text and the command line.
//
// A task T declares a struct T::Options of Index and double members, a constructor from it, and
//
//   static Description<Options> describe();

#include "task.hpp"

#include <heed/core/error.hpp>

#include <cstdio>
#include <string>
#include <variant>
#include <vector>

namespace tasks {

// A number of a task's options, with the range that it may have.
template <class Options>
struct Parameter {
  const char* name;
  std::variant<Index Options::*, double Options::*> member;
  double least, most;
  const char* meaning;

  [[nodiscard]] bool whole() const { return member.index() == 0; }
  [[nodiscard]] double of(const Options& options) const {
    return std::visit([&](auto at) { return double(options.*at); }, member);
  }
  void set(Options& options, double value) const {
    if (whole())
      options.*std::get<0>(member) = Index(value);
    else
      options.*std::get<1>(member) = value;
  }
};

template <class Options>
struct Description {
  const char* name;
  const char* what;        // one sentence
  const char* source;      // the publication that defines it
  const char* difficulty;  // meaning of Answer::difficulty; empty if it is 0 everywhere
  Options published, shrunken;
  std::vector<Parameter<Options>> parameters;
};

// A number as people write it.
[[nodiscard]] inline std::string short_number(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.10g", x);
  return text;
}

[[nodiscard]] inline std::string range_text(bool whole, double least, double most) {
  return (whole ? "a whole number from " : "a number from ") + short_number(least) + " to " +
         short_number(most);
}

template <class Own>
[[nodiscard]] bool in_range(const typename Own::Options& options) {
  for (const auto& parameter : Own::describe().parameters) {
    const double value = parameter.of(options);
    if (!(value >= parameter.least && value <= parameter.most)) return false;
  }
  return true;
}

// Adds a test with other options. A test outside the ranges is left out.
template <class Own>
void add_test(std::vector<Task::Test>& tests, const char* name,
              const typename Own::Options& options) {
  if (in_range<Own>(options)) tests.push_back({name, std::make_unique<Own>(options)});
}

// "name:parameter=value,...". Throws std::invalid_argument for a number outside of its range.
template <class Own>
[[nodiscard]] std::string checked_spec(const typename Own::Options& options) {
  const auto described = Own::describe();
  std::string spec = described.name;
  char before = ':';
  for (const auto& parameter : described.parameters) {
    const double value = parameter.of(options);
    heed::require(value >= parameter.least && value <= parameter.most, "--task ", described.name,
                  ": ", parameter.name, " is ", value, ", it must be ",
                  range_text(parameter.whole(), parameter.least, parameter.most));
    spec += std::exchange(before, ',') + std::string(parameter.name) + "=" + short_number(value);
  }
  return spec;
}

}  // namespace tasks
