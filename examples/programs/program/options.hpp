// SPDX-License-Identifier: Apache-2.0
#pragma once

// Checks of option values that run while a value is still text, because CLI11's own conversion takes NaN for
// any number and -1 for 2^64 - 1; and CLI11's refusals as sentences, with the option that may be meant.

#include "limits.hpp"
#include "program.hpp"
#include "words.hpp"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

namespace heed_program {

namespace detail {

template <class Number>
[[nodiscard]] bool read_number(const std::string& text, Number& number) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && stop == end;
}

[[nodiscard]] inline std::string short_text(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", x);
  return text;
}

// Accepts numbers x with accepts(x); the others are refused as not `range`, such as "a number from 0 to 1".
template <class Number, class Accepts>
[[nodiscard]] CLI::Validator number_that(Accepts accepts, const std::string& range) {
  return CLI::Validator(
      [=](std::string& text) {
        Number x{};
        const bool good = read_number(text, x) && accepts(x);
        return good ? std::string() : "\"" + text + "\" is not " + range;
      },
      "");
}
template <class Number>
[[nodiscard]] CLI::Validator number_in(Number least, Number most, const std::string& range) {
  return number_that<Number>([=](Number x) { return x >= least && x <= most; }, range);
}

}  // namespace detail

// Accepts whole numbers from `least` to `most`.
[[nodiscard]] inline CLI::Validator whole(std::int64_t least, std::int64_t most) {
  return detail::number_in(
      least, most, "a whole number from " + std::to_string(least) + " to " + std::to_string(most));
}
// Accepts numbers from `least` to `most`, and never NaN.
[[nodiscard]] inline CLI::Validator number(double least, double most) {
  return detail::number_in(
      least, most,
      "a number from " + detail::short_text(least) + " to " + detail::short_text(most));
}
// Accepts fractions: numbers from 0 on that are less than 1.
[[nodiscard]] inline CLI::Validator share() {
  return detail::number_that<double>([](double x) { return x >= 0 && x < 1; },
                                     "a number from 0 to below 1");
}
// Accepts probabilities that leave both outcomes possible.
[[nodiscard]] inline CLI::Validator probability() {
  return detail::number_that<double>([](double x) { return x > 0 && x < 1; },
                                     "a number above 0 and below 1");
}
[[nodiscard]] inline CLI::Validator seed() {
  return detail::number_in(std::uint64_t(0), ~std::uint64_t(0),
                           "a whole number from 0 to 2^64 - 1");
}
// Accepts any name but the empty one, of a "file" or "folder" as `what` says.
[[nodiscard]] inline CLI::Validator path_of(const std::string& what) {
  return CLI::Validator(
      [=](std::string& text) { return text.empty() ? "\"\" names no " + what : std::string(); },
      "");
}

// A command line that CLI11 refuses, as one sentence.
[[nodiscard]] inline std::string sentence_of(const CLI::ParseError& error) {
  const std::string text = error.what(), help = "; --help lists the options";
  // CLI11 writes "--width: 1 required N missing" and "--width: At Most 1 required but received 2".
  const std::size_t colon = text.find(": ");
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) == nullptr || colon == std::string::npos)
    return text + help;
  const bool repeated = text.find("but received", colon) != std::string::npos;
  return text.substr(0, colon) + (repeated ? " was given more than once" : " needs a value") + help;
}

// Names that other programs have for some options.
inline constexpr std::pair<const char*, const char*> kOtherNames[] = {
    {"--layers", "--depth"},      {"--n-layer", "--depth"},    {"--blocks", "--depth"},
    {"--dim", "--width"},         {"--d-model", "--width"},    {"--n-embd", "--width"},
    {"--n-head", "--heads"},      {"--context", "--len"},      {"--block-size", "--len"},
    {"--seq-len", "--len"},       {"--batch-size", "--batch"}, {"--learning-rate", "--lr"},
    {"--attention", "--variant"}, {"--max-tokens", "--tokens"}};

// Arguments that the program or its command does not have, in the order of the command line, as one sentence.
[[nodiscard]] inline std::string unexpected_arguments(const CLI::App& app) {
  std::vector<std::string> known;
  const auto add = [&](const CLI::App& one) {
    for (const CLI::Option* option : one.get_options())
      for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
  };
  add(app);
  for (const CLI::App* command : app.get_subcommands()) add(*command);
  std::string arguments, meant;
  const std::vector<std::string> all = app.remaining(true);
  for (const std::string& argument : all) {
    arguments += " " + shell_word(argument);
    std::string name = argument.substr(0, argument.find('='));
    if (!meant.empty() || !name.starts_with("--")) continue;
    for (const auto& [other, own] : kOtherNames)
      if (name == other && std::ranges::count(known, own) > 0) name = own;
    meant = did_you_mean(name, known);
  }
  return (all.size() == 1 ? "the argument" : "the arguments") + arguments +
         (all.size() == 1 ? " was" : " were") + " not expected; --help lists the options" + meant;
}

// Reads the command line of a program. Returns false if help or version was requested and printed,
// so that the program is done.
[[nodiscard]] inline bool read_options(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
    return true;
  } catch (const CLI::CallForHelp&) {
    std::fputs(app.help().c_str(), stdout);
  } catch (const CLI::CallForVersion& version) {
    std::puts(version.what());
  } catch (const CLI::ExtrasError&) {
    throw UsageError(unexpected_arguments(app));
  } catch (const CLI::ParseError& error) {
    throw UsageError(sentence_of(error));
  }
  return false;
}

}  // namespace heed_program
