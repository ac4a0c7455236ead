// SPDX-License-Identifier: Apache-2.0
#include "training.hpp"

#include "../lm/text_data.hpp"
#include "../lm/text_file.hpp"
#include "../lm/training.hpp"
#include "progress.hpp"
#include "text_input.hpp"

#include <heed/models/attention_by_name.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <numeric>

namespace compare {

namespace {

namespace nn = heed::nn;
using heed_lm::ModelConfig;

// The baseline with the usual MLP of four widths, whatever the others have.
constexpr const char* kUnmatched = "sdpa-4x";

// A text in characters if it is UTF-8, else in bytes.
[[nodiscard]] std::unique_ptr<heed_lm::Tokenizer> tokenizer_for(const std::string& text) {
  try {
    return std::make_unique<heed_lm::CharacterTokenizer>(heed_lm::alphabet_of(text));
  } catch (const std::invalid_argument&) {
    return std::make_unique<heed_lm::ByteTokenizer>();
  }
}

class Trainer {
 public:
  // Throws UsageError where the text cannot be used.
  explicit Trainer(const Settings& settings) : settings_(settings) {
    try {
      open(settings);
    } catch (const std::exception& error) {
      throw UsageError(error.what());
    }
  }

  [[nodiscard]] std::string description() const {
    return source_->description() + ", vocabulary " + std::to_string(vocabulary_);
  }

  // The width of the MLP that brings a variant to `wanted` parameters, or next to it.
  [[nodiscard]] Index matched_hidden(const std::string& name, Index wanted) const {
    ModelConfig config = config_of(name, 1);
    const Index own = parameters(config);
    ++config.hidden;
    const Index each = parameters(config) - own;
    return config.hidden - 1 + (wanted - own + each / 2) / each;
  }
  [[nodiscard]] Index parameters(const ModelConfig& config) const {
    heed_lm::Model model = heed_lm::make_model(config);
    return nn::count_weights<float>(model);
  }
  [[nodiscard]] ModelConfig config_of(const std::string& name, std::uint64_t seed) const {
    ModelConfig config;
    config.variant = name == kUnmatched ? "sdpa" : name;
    config.vocabulary = vocabulary_;
    config.width = settings_.model.width;
    config.heads = settings_.model.heads;
    config.depth = settings_.model.depth;
    config.len = settings_.model.len;
    config.hidden = 4 * config.width;
    config.seed = seed;
    return config;
  }

  // Trains one seed; adds to `result`.
  void run(const ModelConfig& config, TrainedVariant& result, std::vector<double>& speeds,
           Progress& progress) const {
    heed_lm::Run run;
    run.config = config;
    run.train.steps = settings_.train_steps;
    run.train.warmup = std::min<Index>(100, settings_.train_steps / 10);
    run.train.batch = settings_.model.batch;
    run.train.seed = config.seed;
    run.train.learning_rate = 2e-3;
    run.model = std::make_unique<heed_lm::Model>(heed_lm::make_model(config));
    heed_lm::Watch watch;
    double speed = 0;
    watch.on_step = [&](const heed_lm::Report& r) {
      speed = r.tokens_per_second;
      progress.show(result.name + ", seed " + std::to_string(config.seed) + ": step " +
                    std::to_string(r.step) + " of " + std::to_string(r.steps));
    };
    heed_lm::train(run, *source_, settings_.threads, watch);
    nn::Context<float> context;
    context.threads = settings_.threads;
    result.losses.push_back(heed_lm::evaluate(*run.model, context, *source_, run.train.batch));
    speeds.push_back(speed);
    result.reports = reports_of(*run.model);
  }

 private:
  void open(const Settings& settings) {
    const std::string text =
        settings.text_file.empty() ? default_text() : heed_lm::read_text_file(settings.text_file);
    const auto tokenizer = tokenizer_for(text);
    vocabulary_ = tokenizer->vocab_size();
    heed_lm::DataSettings data;
    data.len = settings.model.len;
    source_ = heed_lm::make_text_source(tokenizer->encode(text), data);
  }

  // Scalars that the ops have learnt and what their last forward pass reports: means over layers.
  [[nodiscard]] static std::map<std::string, double> reports_of(heed_lm::Model& model) {
    std::map<std::string, std::pair<double, int>> sums;
    const auto note = [&](const std::string& name, double value) {
      sums[name].first += value;
      ++sums[name].second;
    };
    model.visit(nn::Visitor<float>([&](const std::string& name, heed::Param<float>& value,
                                       heed::Param<float>&) {
      if (value.size() == 1) note(name.substr(name.rfind('.') + 1), double(value[0]));
    }));
    for (auto& block : model.blocks())
      for (const auto& [name, value] : block.attention().diagnostics()) note(name, value);
    std::map<std::string, double> means;
    for (const auto& [name, sum] : sums) means[name] = sum.first / sum.second;
    return means;
  }

  const Settings& settings_;
  Index vocabulary_ = 0;
  std::unique_ptr<heed_lm::DataSource> source_;
};

[[nodiscard]] double mean_of(const std::vector<double>& x) {
  return std::accumulate(x.begin(), x.end(), 0.0) / double(x.size());
}
// Standard deviation; 0 of a single number.
[[nodiscard]] double spread_of(const std::vector<double>& x) {
  if (x.size() < 2) return 0;
  const double mean = mean_of(x);
  double sum = 0;
  for (const double v : x) sum += (v - mean) * (v - mean);
  return std::sqrt(sum / double(x.size() - 1));
}

[[nodiscard]] std::string reports_text(const TrainedVariant& v) {
  std::string text;
  char number[64];
  for (const auto& [name, value] : v.reports) {
    std::snprintf(number, sizeof number, "%s%s %.3g", text.empty() ? "" : ", ", name.c_str(), value);
    text += number;
  }
  return text;
}

[[nodiscard]] std::string training_table(const Settings& s, const TrainingComparison& c) {
  std::string out;
  char line[512];
  std::snprintf(line, sizeof line,
                "%s\nwidth %td, %td heads, %td blocks, %td tokens, batch %td, %td steps, %d seeds, %d "
                "threads; loss in nats per token, its spread over seeds\n\n",
                c.data.c_str(), s.model.width, s.model.heads, s.model.depth, s.model.len, s.model.batch,
                s.train_steps, s.seeds, s.threads);
  out += line;
  std::snprintf(line, sizeof line, "%-18s %10s %6s  %-17s %8s  %s\n", "variant", "parameters", "MLP",
                "validation loss", "tokens/s", "learnt and reported");
  out += line;
  for (const TrainedVariant& v : c.variants) {
    std::snprintf(line, sizeof line, "%-18s %10td %6td  %.4f +- %.4f  %8.0f  %s\n", v.name.c_str(),
                  v.parameters, v.hidden, mean_of(v.losses), spread_of(v.losses), v.tokens_per_second,
                  reports_text(v).c_str());
    out += line;
  }
  return out;
}

[[nodiscard]] std::string training_json(const TrainingComparison& c) {
  std::string out = "{\"variants\": [";
  char number[64];
  const auto put = [&](const char* format, auto value) {
    std::snprintf(number, sizeof number, format, value);
    out += number;
  };
  for (const TrainedVariant& v : c.variants) {
    out += (&v == c.variants.data() ? "\n" : ",\n");
    out += "  {\"name\": \"" + v.name + "\", ";
    put("\"parameters\": %td, ", v.parameters);
    put("\"hidden\": %td, \"losses\": [", v.hidden);
    for (std::size_t i = 0; i < v.losses.size(); ++i) put(i == 0 ? "%.17g" : ", %.17g", v.losses[i]);
    put("], \"tokens_per_second\": %.6g, \"reports\": {", v.tokens_per_second);
    bool first = true;
    for (const auto& [name, value] : v.reports) {
      out += (first ? "\"" : ", \"") + name + "\": ";
      put("%.9g", value);
      first = false;
    }
    out += "}}";
  }
  return out + "\n]}\n";
}

[[nodiscard]] std::string training_csv(const TrainingComparison& c) {
  std::string out = "variant,parameters,hidden,seed,loss,tokens_per_second\n";
  char line[256];
  for (const TrainedVariant& v : c.variants)
    for (std::size_t i = 0; i < v.losses.size(); ++i) {
      std::snprintf(line, sizeof line, "%s,%td,%td,%zu,%.17g,%.6g\n", v.name.c_str(), v.parameters,
                    v.hidden, i + 1, v.losses[i], v.tokens_per_second);
      out += line;
    }
  return out;
}

void write_to(const std::string& file, const std::string& text) {
  if (file.empty()) return;
  if (file == "-") {
    std::fputs(text.c_str(), stdout);
    return;
  }
  std::ofstream out(file, std::ios::binary);
  out << text;
  out.flush();
  if (!out) throw std::runtime_error(file + " cannot be written");
}

}  // namespace

TrainingComparison compare_training(const Settings& settings) {
  const Trainer trainer(settings);
  std::vector<std::string> names = {kUnmatched, nn::kLatentAttention};
  names.insert(names.end(), settings.variants.begin(), settings.variants.end());
  Index largest = 0;
  for (const std::string& name : names)
    largest = std::max(largest, trainer.parameters(trainer.config_of(name, 1)));
  TrainingComparison comparison;
  comparison.data = trainer.description();
  Progress progress;
  for (const std::string& name : names) {
    TrainedVariant result;
    result.name = name;
    ModelConfig config = trainer.config_of(name, 1);
    if (name != kUnmatched) config.hidden = trainer.matched_hidden(name, largest);
    result.hidden = config.hidden;
    result.parameters = trainer.parameters(config);
    std::vector<double> speeds;
    for (int seed = 0; seed < settings.seeds; ++seed) {
      config.seed = settings.seed + std::uint64_t(seed);
      trainer.run(config, result, speeds, progress);
    }
    std::sort(speeds.begin(), speeds.end());
    result.tokens_per_second = speeds[speeds.size() / 2];
    comparison.variants.push_back(std::move(result));
  }
  return comparison;
}

void write_training(const Settings& settings, const TrainingComparison& comparison) {
  const bool to_stdout = settings.json_file == "-" || settings.csv_file == "-";
  std::fputs(training_table(settings, comparison).c_str(), to_stdout ? stderr : stdout);
  write_to(settings.json_file, training_json(comparison));
  write_to(settings.csv_file, training_csv(comparison));
}

}  // namespace compare
