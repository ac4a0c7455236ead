// SPDX-License-Identifier: Apache-2.0
#include "checkpoint.hpp"

#include <heed/models/weights_file.hpp>

#include <nlohmann/json.hpp>

#include <charconv>

namespace heed_lm {

namespace {

namespace nn = heed::nn;
using heed::io::Safetensors;

constexpr const char* kFormat = "heed.lm";
constexpr const char* kVersion = "1";

template <class Settings, class F>
void for_each_field(Settings& s, F&& f) {
  f("batch", s.batch);
  f("steps", s.steps);
  f("warmup", s.warmup);
  f("learning_rate", s.learning_rate);
  f("weight_decay", s.weight_decay);
  f("clip", s.clip);
  f("seed", s.seed);
}

const std::string& metadata(const Safetensors& file, const std::filesystem::path& path,
                            const std::string& key) {
  const auto found = file.metadata().find(key);
  if (found == file.metadata().end())
    heed::fail(path.string(), ": the metadata has no ", key, "; it is no checkpoint of heed_lm");
  return found->second;
}

template <class Number>
Number number_of(const Safetensors& file, const std::filesystem::path& path, const std::string& key) {
  const std::string& text = metadata(file, path, key);
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  heed::require(error == std::errc() && end == text.data() + text.size(), path.string(), ": metadata ",
                key, " is \"", text, "\", it must be a whole number");
  return value;
}

}  // namespace

std::string TrainSettings::json() const {
  nlohmann::json object;
  for_each_field(*this, [&](const char* name, const auto& value) { object[name] = value; });
  return object.dump();
}

TrainSettings TrainSettings::from_json(const std::string& text, const std::string& where) {
  TrainSettings settings;
  try {
    const nlohmann::json object = nlohmann::json::parse(text);
    for_each_field(settings, [&](const char* name, auto& value) { object.at(name).get_to(value); });
  } catch (const nlohmann::json::exception& error) {
    heed::fail(where, ": its training settings cannot be read (", error.what(), ")");
  }
  return settings;
}

void save_run(Run& run, const std::filesystem::path& path) {
  heed::io::SafetensorsWriter writer;
  writer.set_metadata("format", kFormat);
  writer.set_metadata("version", kVersion);
  writer.set_metadata("model", run.config.json());
  writer.set_metadata("training", run.train.json());
  writer.set_metadata("tokenizer", run.tokenizer->state());
  writer.set_metadata("step", std::to_string(run.step));
  writer.set_metadata("data", std::to_string(run.data));
  nn::add_weights<float>(writer, *run.model);
  run.optimiser.visit_state([&](const std::string& name, std::vector<float>& first,
                                std::vector<float>& second) {
    writer.add("adamw.first." + name, {Index(first.size())}, first);
    writer.add("adamw.second." + name, {Index(second.size())}, second);
  });
  writer.write(path);
}

Run load_run(const std::filesystem::path& path) {
  const Safetensors file = Safetensors::read(path);
  heed::require(metadata(file, path, "format") == kFormat, path.string(), ": its format is ",
                metadata(file, path, "format"), ", it must be ", kFormat);
  heed::require(metadata(file, path, "version") == kVersion, path.string(), ": its version is ",
                metadata(file, path, "version"), ", this program reads ", kVersion);
  Run run;
  run.config = ModelConfig::from_json(metadata(file, path, "model"), path.string());
  run.train = TrainSettings::from_json(metadata(file, path, "training"), path.string());
  run.tokenizer = tokenizer_from(metadata(file, path, "tokenizer"));
  run.step = number_of<Index>(file, path, "step");
  run.data = number_of<std::uint64_t>(file, path, "data");
  run.model = std::make_unique<Model>(make_model(run.config));
  nn::read_weights<float>(file, path, *run.model);
  run.optimiser.prepare(*run.model);
  run.optimiser.set_steps(run.step);
  if (run.step > 0)
    run.optimiser.visit_state([&](const std::string& name, std::vector<float>& first,
                                  std::vector<float>& second) {
      const std::vector<Index> shape = {Index(first.size())};
      first = nn::detail::tensor_of<float>(file, path, "adamw.first." + name, shape);
      second = nn::detail::tensor_of<float>(file, path, "adamw.second." + name, shape);
    });
  return run;
}

bool is_gpt2_file(const std::filesystem::path& path) {
  return nn::Gpt2File::is_gpt2(Safetensors::read(path));
}

Run run_from_gpt2(const std::filesystem::path& path, const std::string& variant,
                  std::shared_ptr<const Tokenizer> tokenizer) {
  const nn::Gpt2File file(path);
  const nn::GptOptions sizes = file.options();
  Run run;
  run.config.variant = variant;
  run.config.vocabulary = sizes.vocabulary;
  run.config.width = sizes.width;
  run.config.heads = sizes.heads;
  run.config.depth = sizes.depth;
  run.config.len = sizes.max_len;
  run.config.hidden = sizes.hidden;
  run.config.activation = "gelu_tanh";
  run.tokenizer = std::move(tokenizer);
  run.model = std::make_unique<Model>(make_model(run.config));
  file.fill(*run.model);
  return run;
}

}  // namespace heed_lm
