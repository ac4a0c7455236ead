// SPDX-License-Identifier: Apache-2.0
#include "checkpoint.hpp"

#include "finite.hpp"
#include "json_fields.hpp"

#include "../program/limits.hpp"

#include <heed/compiled.hpp>
#include <heed/models/weights_file.hpp>

#include <algorithm>
#include <charconv>
#include <set>

namespace heed_lm {

namespace {

namespace nn = heed::nn;
using heed::io::in_quotes;
using heed::io::Safetensors;
using heed::io::SafetensorsIndex;

constexpr const char* kFormat = "heed.lm";
constexpr const char* kVersion = "1";
constexpr const char *kFirst = "adamw.first.", *kSecond = "adamw.second.";

const std::string& metadata(const SafetensorsIndex& file, const std::filesystem::path& path,
                            const std::string& key) {
  const auto found = file.metadata().find(key);
  if (found == file.metadata().end())
    heed::fail(path.string(), ": the metadata has no ", key, "; it is no checkpoint of heed_lm");
  return found->second;
}

template <class Number>
Number number_of(const SafetensorsIndex& file, const std::filesystem::path& path,
                 const std::string& key) {
  const std::string& text = metadata(file, path, key);
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  heed::require(error == std::errc() && end == text.data() + text.size(), path.string(),
                ": metadata ", key, " is \"", text.substr(0, 80), "\", it must be a whole number");
  return value;
}

// Runs f() and puts `what` before the sentence that it throws, if any.
template <class F>
auto about(const std::string& what, F&& f) {
  try {
    return f();
  } catch (const std::invalid_argument& error) {
    heed::fail(what, ": ", error.what());
  }
}

template <class Number>
void require_within(const std::string& what, const char* name, Number value, Number least,
                    Number most) {
  heed::require(value >= least && value <= most, what, " has ", name, " = ", value,
                ", it must lie in [", least, ", ", most, "]");
}

void require_settings(const TrainSettings& s, const std::string& what) {
  using namespace heed_program;
  require_within<Index>(what, "batch", s.batch, 1, kMaxSize);
  require_within<Index>(what, "steps", s.steps, 1, kMaxSteps);
  require_within<Index>(what, "warmup", s.warmup, 0, kMaxSteps);
  require_within<Index>(what, "len", s.len, 0, kMaxSize);
  require_within(what, "learning_rate", s.learning_rate, 0.0, kMaxReal);
  require_within(what, "weight_decay", s.weight_decay, 0.0, kMaxReal);
  require_within(what, "clip", s.clip, 0.0, kMaxReal);
  require_within(what, "ponder", s.ponder, 0.0, kMaxReal);
  heed::require(s.ponder_prior > 0 && s.ponder_prior < 1, what,
                " has ponder_prior = ", s.ponder_prior, ", it must lie between 0 and 1");
  heed::require(precision_of(s.precision).has_value(), what,
                " has precision = ", in_quotes(s.precision), ", it must be ", kFloat, " or ",
                kMixed);
}

[[nodiscard]] bool is_moment(const std::string& name) {
  return name.starts_with(kFirst) || name.starts_with(kSecond);
}

// The number of blocks of which the file has a tensor, by the names "blocks.0.", "blocks.1.", ...
[[nodiscard]] Index count_blocks(const SafetensorsIndex& file) {
  const std::string start = "blocks.";
  std::set<std::string> numbers;
  for (const auto& [name, info] : file.tensors())
    if (name.starts_with(start))
      numbers.insert(name.substr(start.size(), name.find('.', start.size()) - start.size()));
  return Index(numbers.size());
}

// Throws unless the file's header can be that of a model of these settings. After this check, making the model takes
// memory in proportion to the file, whatever numbers the settings claim.
void require_model(const ModelConfig& c, const SafetensorsIndex& file, const std::string& what) {
  about(what + " cannot be used", [&] { require_usable(c); });
  const auto matches = [&](const char* field, Index value, const std::string& tensor,
                           std::vector<Index> shape) {
    const auto found = file.tensors().find(tensor);
    heed::require(found == file.tensors().end() || found->second.shape == shape, what, " has ",
                  field, " = ", value, ", for which the model needs ", tensor, " in the shape ",
                  nn::detail::shape_text(shape), "; it has ",
                  found == file.tensors().end() ? "" : nn::detail::shape_text(found->second.shape));
  };
  const bool numbered = c.variant != kDialecticalLm;
  const std::string table = numbered ? "embed.weight" : "emb.weight";
  if (const auto found = file.tensors().find(table); found != file.tensors().end()) {
    const auto& shape = found->second.shape;
    const bool words = shape.empty() || shape[0] != c.vocabulary;
    matches(words ? "vocabulary" : "width", words ? c.vocabulary : c.width, table,
            {c.vocabulary, c.width});
  }
  if (numbered) {
    const Index blocks = count_blocks(file);
    heed::require(c.depth == blocks, what, " has depth = ", c.depth, ", the file has ", blocks,
                  " blocks");
    matches("len", c.len, "pos_emb.weight", {c.len, c.width});
    if (c.hidden > 0) matches("hidden", c.hidden, "blocks.0.mlp.0.weight", {c.hidden, c.width});
  }
  double held = 0;
  for (const auto& [name, info] : file.tensors())
    if (!is_moment(name))
      held += double(info.end - info.begin) / double(heed::io::dtype_width(info.dtype));
  const std::string sizes =
      " has vocabulary = " + std::to_string(c.vocabulary) + ", width = " + std::to_string(c.width) +
      ", hidden = " + std::to_string(c.hidden) + ", depth = " + std::to_string(c.depth) +
      ", len = " + std::to_string(c.len) + " and prototypes = " + std::to_string(c.prototypes);
  // Prototypes count for every variant: making the model allocates them even if its variant has none.
  const double least = std::max(double(c.prototypes) * double(c.width),
                                about(what + " cannot be used", [&] { return least_numbers(c); }));
  heed::require(least <= held, what, sizes, ", which needs ", Index(least),
                " numbers at the least; the tensors hold ", Index(held));
}

// A table may have more rows than there are tokens, as training fills it up to a round number.
constexpr Index kMostPadding = 1023;
[[nodiscard]] bool fits_vocabulary(const Tokenizer& tokenizer, Index rows) {
  return tokenizer.vocab_size() <= rows && rows - tokenizer.vocab_size() <= kMostPadding;
}

// The run that the header describes, without its weights: every number is checked against the file, then the model is
// made.
[[nodiscard]] Run described(const SafetensorsIndex& file, const std::filesystem::path& path) {
  heed::require(metadata(file, path, "format") == kFormat, path.string(), ": its format is ",
                in_quotes(metadata(file, path, "format")), ", it must be ", kFormat);
  heed::require(metadata(file, path, "version") == kVersion, path.string(), ": its version is ",
                in_quotes(metadata(file, path, "version")), ", this program reads ", kVersion);
  const std::string model = path.string() + ": its model config",
                    training = path.string() + ": its training config";
  Run run;
  run.config = from_json<ModelConfig>(metadata(file, path, "model"), model);
  run.train = from_json<TrainSettings>(metadata(file, path, "training"), training);
  require_settings(run.train, training);
  run.step = number_of<Index>(file, path, "step");
  heed::require(run.step >= 0 && run.step <= run.train.steps, path.string(), ": metadata step is ",
                run.step, ", it must lie in [0, ", run.train.steps,
                "], the steps of its training config");
  // Files of earlier versions come from runs that ended at a step that is skipped today.
  if (file.metadata().contains("skipped")) run.skipped = number_of<Index>(file, path, "skipped");
  heed::require(run.skipped >= 0 && run.skipped <= run.step, path.string(),
                ": metadata skipped is ", run.skipped, ", it must lie between 0 and step, ",
                run.step);
  run.data = number_of<std::uint64_t>(file, path, "data");
  run.tokenizer =
      about(path.string(), [&] { return tokenizer_from(metadata(file, path, "tokenizer")); });
  heed::require(fits_vocabulary(*run.tokenizer, run.config.vocabulary), model,
                " has vocabulary = ", run.config.vocabulary, ", its tokenizer has ",
                run.tokenizer->vocab_size(), " tokens");
  require_model(run.config, file, model);
  run.model = about(model + " cannot be used",
                    [&] { return std::make_unique<Model>(make_model(run.config)); });
  return run;
}

// Throws unless each tensor of the file belongs to the model or to its optimiser, and each entry of
// the metadata to the run.
void require_known(Run& run, const SafetensorsIndex& file, const std::filesystem::path& path) {
  std::set<std::string> known;
  nn::detail::visit_stored<float>(*run.model, [&](const std::string& name, heed::Param<float>&) {
    for (const std::string& start : {std::string(), std::string(kFirst), std::string(kSecond)})
      known.insert(start + name);
  });
  for (const auto& [name, info] : file.tensors())
    heed::require(known.contains(name), path.string(), ": the model has no place for the tensor ",
                  in_quotes(name));
  const std::set<std::string> entries = {"format",   "version",   "model",
                                         "training", "tokenizer", "step",
                                         "skipped",  "data",      heed::io::kChecksums};
  for (const auto& [key, value] : file.metadata())
    heed::require(entries.contains(key), path.string(), ": the metadata has ", in_quotes(key),
                  ", which this program does not know");
}

}  // namespace

std::optional<heed::Precision> precision_of(const std::string& name) {
  if (name == kFloat) return heed::Precision::storage;
  if (name == kMixed) return heed::Precision::mixed;
  return std::nullopt;
}

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
  run.optimiser.visit_state(
      [&](const std::string& name, std::vector<float>& first, std::vector<float>& second) {
        writer.add(kFirst + name, {Index(first.size())}, first);
        writer.add(kSecond + name, {Index(second.size())}, second);
      });
  writer.set_checksums();
  writer.write(path);
}

Run load_run(const std::filesystem::path& path) {
  Run run;
  const Safetensors file = Safetensors::read(path, [&](const SafetensorsIndex& head) {
    run = described(head, path);
    require_known(run, head, path);
  });
  file.require_checksums();
  nn::read_weights<float>(file, path, *run.model);
  run.optimiser.prepare(*run.model);
  run.optimiser.set_steps(run.step - run.skipped);
  if (run.step > 0)
    run.optimiser.visit_state(
        [&](const std::string& name, std::vector<float>& first, std::vector<float>& second) {
          const std::vector<Index> shape = {Index(first.size())};
          first = nn::detail::tensor_of<float>(file, path, kFirst + name, shape);
          second = nn::detail::tensor_of<float>(file, path, kSecond + name, shape);
        });
  return run;
}

bool is_gpt2_file(const std::filesystem::path& path) {
  return nn::Gpt2File::is_gpt2(SafetensorsIndex::read(path));
}

Run run_from_gpt2(const std::filesystem::path& path, ModelConfig config,
                  std::shared_ptr<const Tokenizer> tokenizer) {
  heed::require(!has_own_frame(config.variant), path.string(), ": a GPT-2 cannot start ",
                config.variant, ", which has a frame of its own");
  const nn::Gpt2File file(path, [&](const nn::GptOptions& sizes) {
    heed::require(fits_vocabulary(*tokenizer, sizes.vocabulary), path.string(), ": it has ",
                  sizes.vocabulary, " words, the tokenizer has ", tokenizer->vocab_size(),
                  "; --vocab and --merges must be those of this model");
  });
  nn::GptOptions options = file.options();
  options.dropout = config.dropout;
  options.attention_dropout = config.attention_dropout;
  config.take(options);
  config.activation = "gelu_tanh";
  Run run;
  run.config = std::move(config);
  run.tokenizer = std::move(tokenizer);
  run.model = about(path.string(), [&] { return std::make_unique<Model>(make_model(run.config)); });
  file.fill(*run.model, [&](const std::string& name, const std::vector<float>& numbers) {
    require_finite(numbers, name, path);
  });
  return run;
}

}  // namespace heed_lm
