// SPDX-License-Identifier: Apache-2.0
#include "checkpoint.hpp"

#include "finite.hpp"
#include "json_fields.hpp"

#include <heed/compiled.hpp>
#include <heed/models/weights_file.hpp>

#include <charconv>

namespace heed_lm {

namespace {

namespace nn = heed::nn;
using heed::io::Safetensors;

constexpr const char* kFormat = "heed.lm";
constexpr const char* kVersion = "1";

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

void save_run(Run& run, const std::filesystem::path& path) {
  require_finite(run, path);
  heed::io::SafetensorsWriter writer;
  writer.set_metadata("format", kFormat);
  writer.set_metadata("version", kVersion);
  writer.set_metadata("model", json_of(run.config));
  writer.set_metadata("training", json_of(run.train));
  writer.set_metadata("tokenizer", run.tokenizer->state());
  writer.set_metadata("step", std::to_string(run.step));
  writer.set_metadata("skipped", std::to_string(run.skipped));
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
  run.config = from_json<ModelConfig>(metadata(file, path, "model"), path.string() + ": its model config");
  run.train = from_json<TrainSettings>(metadata(file, path, "training"),
                                       path.string() + ": its training config");
  run.tokenizer = tokenizer_from(metadata(file, path, "tokenizer"));
  run.step = number_of<Index>(file, path, "step");
  run.data = number_of<std::uint64_t>(file, path, "data");
  // Files of earlier versions come from runs that ended at a step that is skipped today.
  if (file.metadata().contains("skipped")) run.skipped = number_of<Index>(file, path, "skipped");
  heed::require(run.skipped >= 0 && run.skipped <= run.step, path.string(),
                ": metadata skipped is ", run.skipped, ", it must lie between 0 and step, ",
                run.step);
  run.model = std::make_unique<Model>(make_model(run.config));
  nn::read_weights<float>(file, path, *run.model);
  run.optimiser.prepare(*run.model);
  run.optimiser.set_steps(run.step - run.skipped);
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

Run run_from_gpt2(const std::filesystem::path& path, ModelConfig config,
                  std::shared_ptr<const Tokenizer> tokenizer) {
  heed::require(!has_own_frame(config.variant), path.string(), ": a GPT-2 cannot start ", config.variant,
                ", whose frame is its own");
  const nn::Gpt2File file(path);
  nn::GptOptions options = file.options();
  options.dropout = config.dropout;
  options.attention_dropout = config.attention_dropout;
  config.take(options);
  config.activation = "gelu_tanh";
  heed::require(tokenizer->vocab_size() == config.vocabulary, path.string(), ": it has ",
                config.vocabulary, " words, the tokenizer has ", tokenizer->vocab_size(),
                "; it needs its own --vocab and --merges");
  Run run;
  run.config = std::move(config);
  run.tokenizer = std::move(tokenizer);
  run.model = std::make_unique<Model>(make_model(run.config));
  file.fill(*run.model);
  return run;
}

}  // namespace heed_lm
