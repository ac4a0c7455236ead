// SPDX-License-Identifier: Apache-2.0
#include "instructions.hpp"

#include "text_file.hpp"
#include "text_random.hpp"

#include <heed/core/error.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <numeric>
#include <utility>

namespace heed_lm {

namespace {

using Json = nlohmann::json;

[[nodiscard]] bool blank(std::string_view text) {
  return text.find_first_not_of(" \t\n\v\f\r") == std::string_view::npos;
}

// A line of the file, with its number for messages.
struct Line {
  std::string_view text;
  const std::string& name;
  Index number;

  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    heed::fail(name, " line ", number, ": ", parts...);
  }
};

[[nodiscard]] Json parse_object(const Line& line) {
  try {
    Json json = Json::parse(line.text);
    if (!json.is_object())
      line.fail("the line must be a JSON object, it is a JSON ", json.type_name());
    return json;
  } catch (const Json::parse_error& error) {
    line.fail("not JSON from byte ", error.byte, " of ", line.text.size(), " on");
  } catch (const Json::exception& error) {
    line.fail(error.what());  // a number too large for any type
  }
}

enum class Field { required, optional };

[[nodiscard]] std::string text_at(const Json& object, const char* key, Field field,
                                  const Line& line) {
  const auto found = object.find(key);
  if (found == object.end()) {
    if (field == Field::required) line.fail("the field \"", key, "\" is missing");
    return "";
  }
  if (!found->is_string())
    line.fail("\"", key, "\" must be text, it is a JSON ", found->type_name());
  return found->get<std::string>();
}

void add_examples(const Line& line, std::vector<Instruction>& examples) {
  const Json json = parse_object(line);
  const std::string instruction = text_at(json, "instruction", Field::required, line);
  const auto add = [&](const Json& object) {
    examples.push_back({instruction, text_at(object, "input", Field::optional, line),
                        text_at(object, "output", Field::required, line)});
  };
  const auto instances = json.find("instances");
  if (instances == json.end()) return add(json);
  if (!instances->is_array() || instances->empty())
    line.fail("\"instances\" must be a list of at least one instance");
  for (const Json& instance : *instances) {
    if (!instance.is_object())
      line.fail("each instance must be a JSON object, one is a ", instance.type_name());
    add(instance);
  }
}

}  // namespace

std::vector<Instruction> parse_instructions(std::string_view lines, const std::string& name) {
  std::vector<Instruction> examples;
  Index number = 0;
  while (!lines.empty()) {
    const std::size_t end = std::min(lines.find('\n'), lines.size());
    const Line line{lines.substr(0, end), name, ++number};
    if (!blank(line.text)) add_examples(line, examples);
    lines.remove_prefix(std::min(end + 1, lines.size()));
  }
  heed::require(!examples.empty(), name, ": none of its ", number, " lines holds an instruction");
  return examples;
}

std::vector<Instruction> read_instructions(const std::string& path) {
  return parse_instructions(read_text_file(path), path);
}

std::string prompt_of(const Instruction& example) {
  std::string prompt = "### Prompt:\n" + example.instruction + "\n";
  if (!blank(example.input)) prompt += "Input: " + example.input + "\n";
  return prompt + "### Response:";
}

std::vector<Index> example_order(Index count, std::uint64_t seed, std::uint64_t epoch) {
  heed::require(count >= 0, "example_order: count is ", count, ", must not be negative");
  Draws draws(seed, Purpose::example_order, epoch);
  std::vector<Index> order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), Index{0});
  for (Index last = count - 1; last > 0; --last)
    std::swap(order[std::size_t(last)], order[std::size_t(draws.below(last + 1))]);
  return order;
}

InstructionData::InstructionData(const std::vector<Instruction>& examples,
                                 const Tokenizer& tokenizer, Index len, EndOfText marks)
    : padding_(tokenizer.end_of_text().value_or(0)) {
  heed::require(len >= 2, "--len is ", len, ", --instructions needs at least 2");
  for (const Instruction& example : examples) {
    // GPT-2's pieces never reach across ":" and " ", so that two halves give the ids of the whole text.
    std::vector<Index> response = tokenizer.encode(" " + example.output, marks);
    if (const auto end = tokenizer.end_of_text()) response.push_back(*end);
    examples_.push_back(
        fit(tokenizer.encode(prompt_of(example), marks), std::move(response), len + 1));
  }
}

InstructionData::Example InstructionData::fit(std::vector<Index> prompt,
                                              std::vector<Index> response, Index room) {
  const Index prompt_size = Index(prompt.size()), response_size = Index(response.size());
  const Index kept = std::min(prompt_size, std::max(room - response_size, room / 2));
  const Index kept_response = std::min(response_size, room - kept);
  if (kept < prompt_size || kept_response < response_size) ++cut_;
  Example example{{prompt.end() - kept, prompt.end()}, kept};
  example.tokens.insert(example.tokens.end(), response.begin(), response.begin() + kept_response);
  return example;
}

Batch InstructionData::batch(std::span<const Index> examples) const {
  Index len = 0;
  for (const Index i : examples) {
    heed::require(i >= 0 && i < count(), "InstructionData::batch: example ", i,
                  " is asked for, but there are ", count());
    len = std::max(len, Index(examples_[std::size_t(i)].tokens.size()) - 1);
  }
  Batch batch(Index(examples.size()), len, padding_);
  for (Index row = 0; row < batch.rows; ++row) {
    const Example& example = examples_[std::size_t(examples[std::size_t(row)])];
    const auto& tokens = example.tokens;
    batch.lengths.push_back(Index(tokens.size()) - 1);
    std::copy(tokens.begin(), tokens.end() - 1, batch.inputs.begin() + row * len);
    std::copy(tokens.begin() + example.prompt, tokens.end(),
              batch.targets.begin() + row * len + example.prompt - 1);
  }
  return batch;
}

}  // namespace heed_lm
