// SPDX-License-Identifier: Apache-2.0
#include "task_list.hpp"

#include "chomsky.hpp"
#include "dyck.hpp"
#include "flip_flop.hpp"
#include "induction.hpp"
#include "listops.hpp"
#include "mad.hpp"
#include "modular_addition.hpp"
#include "mqar.hpp"
#include "needles.hpp"
#include "parens.hpp"

#include "../program/words.hpp"

#include <algorithm>
#include <charconv>

namespace tasks {

namespace {

template <class Own>
[[nodiscard]] Entry entry_of() {
  const auto described = Own::describe();
  Entry entry{described.name, described.what, described.source, described.difficulty, {}, {}};
  for (const auto& p : described.parameters)
    entry.numbers.push_back({p.name, p.meaning, p.whole(), p.least, p.most,
                             p.of(described.published), p.of(described.shrunken)});
  entry.make = [described](const std::map<std::string, double>& given) -> std::unique_ptr<Task> {
    typename Own::Options options = described.shrunken;
    for (const auto& parameter : described.parameters)
      if (const auto value = given.find(parameter.name); value != given.end())
        parameter.set(options, value->second);
    return std::make_unique<Own>(options);
  };
  return entry;
}

template <class... Own>
[[nodiscard]] std::vector<Entry> entries() {
  return {entry_of<Own>()...};
}

// The names of a list.
template <class Named>
[[nodiscard]] std::vector<std::string> names_of(const std::vector<Named>& list) {
  std::vector<std::string> names;
  for (const Named& one : list) names.push_back(one.name);
  return names;
}

// The value of "name=value" as the spec has it.
[[nodiscard]] double read_number(const Entry& entry, const Entry::Number& number,
                                 const std::string& text) {
  const char* const end = text.data() + text.size();
  double value = 0;
  bool good;
  if (number.whole) {
    std::int64_t whole = 0;
    const auto [stop, error] = std::from_chars(text.data(), end, whole);
    good = error == std::errc() && stop == end;
    value = double(whole);
  } else {
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    good = error == std::errc() && stop == end;
  }
  // Numbers outside the range cannot be converted to Index safely, so that the range is checked here, too.
  heed::require(good && value >= number.least && value <= number.most, "--task ", entry.name, ": ",
                number.name, " is ", text.empty() ? "empty" : text, ", it must be ",
                range_text(number.whole, number.least, number.most));
  return value;
}

[[nodiscard]] std::string help_of(const Entry& entry) {
  std::string text = entry.name + "\n    " + entry.what + ". Source: " + entry.source + ".\n";
  if (!entry.difficulty.empty()) text += "    Difficulty: " + entry.difficulty + ".\n";
  for (const Entry::Number& n : entry.numbers) {
    std::string line = "    " + n.name;
    line.resize(std::max<std::size_t>(line.size() + 1, 22), ' ');
    text += line + short_number(n.shrunken) + " (published " + short_number(n.published) +
            "; from " + short_number(n.least) + " to " + short_number(n.most) + "): " + n.meaning +
            "\n";
  }
  return text;
}

}  // namespace

const std::vector<Entry>& task_list() {
  static const std::vector<Entry> list =
      entries<Mqar, MqarForgetting, NoisyRecall, FuzzyRecall, SelectiveCopy, Compress, Memorise,
              Induction, FlipFlop, Needles, Dyck, Parity, ModularSum, ListOps, ModularAddition,
              Parens>();
  return list;
}

const Entry& task_entry(const std::string& name) {
  for (const Entry& entry : task_list())
    if (entry.name == name) return entry;
  heed::fail("--task is ", name.empty() ? "empty" : name, ", it must be one of ",
             heed_program::joined(names_of(task_list())), "; --task help says what they are",
             heed_program::did_you_mean(name, names_of(task_list())));
}

std::string task_name(const std::string& spec) { return spec.substr(0, spec.find(':')); }

std::unique_ptr<Task> make_task(const std::string& spec) {
  const Entry& entry = task_entry(task_name(spec));
  std::map<std::string, double> given;
  if (spec.size() == entry.name.size()) return entry.make(given);
  bool first = true;
  for (const std::string& item : heed_program::split(spec.substr(entry.name.size() + 1))) {
    if (item == "published") {
      heed::require(first, "--task ", spec, ": published must stand in front of all numbers");
      for (const Entry::Number& number : entry.numbers) given[number.name] = number.published;
    } else {
      const std::size_t equals = item.find('=');
      const std::string name = item.substr(0, equals);
      const Entry::Number* known = nullptr;
      for (const Entry::Number& number : entry.numbers)
        if (number.name == name) known = &number;
      heed::require(known != nullptr, "--task ", entry.name, ": ", name.empty() ? "nothing" : name,
                    " is not one of its numbers, ", heed_program::joined(names_of(entry.numbers)),
                    heed_program::did_you_mean(name, names_of(entry.numbers)));
      heed::require(equals != std::string::npos, "--task ", entry.name, ": ", name,
                    " needs a value, such as ", name, "=", short_number(known->published));
      given[name] = read_number(entry, *known, item.substr(equals + 1));
    }
    first = false;
  }
  return entry.make(given);
}

std::string help_text(const std::string& name) {
  if (!name.empty()) return help_of(task_entry(name));
  std::string text =
      "A task is asked for by its name and the numbers that differ from the small setting, such as "
      "mqar:len=128,pairs=8;\nmqar:published has the numbers of the source.\n\n";
  for (const Entry& entry : task_list()) text += help_of(entry);
  return text;
}

}  // namespace tasks
