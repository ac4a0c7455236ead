// SPDX-License-Identifier: Apache-2.0
#include "training_report.hpp"

#include "print.hpp"
#include "report.hpp"
#include "statistics.hpp"
#include "training_pictures.hpp"

#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdio>

namespace compare {

namespace {

[[nodiscard]] std::string task_or_text(const Settings& settings) {
  return settings.task.empty() ? "text" : settings.task;
}

// Prints the table a line at a time, to standard error where standard output has the results as data.
class Table {
 public:
  explicit Table(const Settings& settings)
      : settings_(settings),
        to_(settings.json_file == "-" || settings.csv_file == "-" ? stderr : stdout) {}

  void head(const std::string& data) const {
    const ModelSizes& m = settings_.model;
    put(data + "\n" +
        print("width %td, %td heads, %td blocks, %td tokens, batch %td, %td steps, %d seeds, %d "
              "threads; loss "
              "in nats per token, its spread over seeds\n\n",
              m.width, m.heads, m.depth, m.len, m.batch, settings_.train_steps, settings_.seeds,
              settings_.threads) +
        print("%-18s %10s %6s  %-17s ", "variant", "parameters", "MLP", "validation loss") +
        (settings_.task.empty() ? "" : print("%-17s ", "accuracy")) +
        (forgets() ? print("%-17s  %-17s ", "second text", "first text then") : "") +
        print("%8s\n", "tokens/s"));
  }
  void row(const TrainedVariant& v) const {
    std::string text =
        print("%-18s %10td %6td  ", v.name.c_str(), v.parameters, v.hidden) + loss(v.losses);
    if (!settings_.task.empty()) text += loss(accuracies_of(v, kHeldOut));
    if (forgets()) text += loss(v.second) + " " + loss(v.forgotten);
    text += print("%8.0f\n", v.tokens_per_second);
    for (const std::string& test : tests_of(v))
      if (test != kHeldOut)
        text +=
            print("    test %-12s accuracy ", test.c_str()) + loss(accuracies_of(v, test)) + "\n";
    std::string line;
    for (const auto& [name, value] : v.measures) {
      const std::string part =
          std::isfinite(value) ? print("%s %.3g", name.c_str(), value) : name + " not finite";
      if (!line.empty() && line.size() + part.size() > 90) {
        text += "    " + line + "\n";
        line.clear();
      }
      line += (line.empty() ? "" : ", ") + part;
    }
    if (!line.empty()) text += "    " + line + "\n";
    if (v.skipped > 0)
      text += print("    %td %s skipped: numbers were not finite\n", v.skipped,
                    v.skipped == 1 ? "step was" : "steps were");
    put(text);
  }

 private:
  [[nodiscard]] bool forgets() const { return !settings_.then_file.empty(); }
  [[nodiscard]] static std::string loss(const std::vector<double>& losses) {
    const double mean = mean_of(losses);
    if (!std::isfinite(mean)) return print("%-16s  ", "not finite");
    return print("%.4f +- %.4f  ", mean, spread_of(losses));
  }
  void put(const std::string& text) const {
    std::fputs(text.c_str(), to_);
    std::fflush(to_);
  }
  const Settings& settings_;
  std::FILE* to_;
};

// A record for each test of each run.
void add_records(const Settings& settings, const TrainedVariant& v,
                 nlohmann::ordered_json& records) {
  for (const Outcome& outcome : v.outcomes) {
    nlohmann::ordered_json parts = nlohmann::ordered_json::array();
    for (const auto& [difficulty, part] : outcome.score.by_difficulty)
      parts.push_back({{"difficulty", difficulty},
                       {"answers", part.answers},
                       {"accuracy", double(part.right) / double(part.answers)}});
    records.push_back({{"variant", v.name},
                       {"seed", outcome.seed},
                       {"task", task_or_text(settings)},
                       {"test", outcome.test},
                       {"answers", outcome.score.answers},
                       {"loss", outcome.score.loss},
                       {"accuracy", outcome.score.accuracy},
                       {"by_difficulty", parts}});
  }
}

[[nodiscard]] nlohmann::ordered_json json_of(const TrainedVariant& v) {
  nlohmann::ordered_json json = {{"name", v.name},
                                 {"parameters", v.parameters},
                                 {"hidden", v.hidden},
                                 {"losses", v.losses},
                                 {"second_losses", v.second},
                                 {"forgotten_losses", v.forgotten},
                                 {"tokens_per_second", v.tokens_per_second},
                                 {"skipped_steps", v.skipped},
                                 {"measures", v.measures}};
  if (v.second.empty()) json["second_losses"] = json["forgotten_losses"] = nullptr;
  return json;
}

[[nodiscard]] std::string json_of(const Settings& settings, const TrainingComparison& c) {
  const ModelSizes& m = settings.model;
  nlohmann::ordered_json variants = nlohmann::ordered_json::array();
  nlohmann::ordered_json records = nlohmann::ordered_json::array();
  for (const TrainedVariant& v : c.variants) {
    variants.push_back(json_of(v));
    add_records(settings, v, records);
  }
  const nlohmann::ordered_json whole = {
      {"format", kJsonFormat},
      {"data", c.data},
      {"model", {{"width", m.width}, {"heads", m.heads}, {"depth", m.depth}, {"len", m.len}}},
      {"training",
       {{"steps", settings.train_steps},
        {"batch", m.batch},
        {"seeds", settings.seeds},
        {"seed", settings.seed},
        {"learning_rate", settings.learning_rate},
        {"init", settings.init},
        {"threads", settings.threads}}},
      {"variants", variants},
      {"records", records}};
  return whole.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

[[nodiscard]] std::string csv_of(const Settings& settings, const TrainingComparison& c) {
  std::string out =
      "variant,parameters,hidden,seed,loss,second_loss,forgotten_loss,tokens_per_second,accuracy\n";
  for (const TrainedVariant& v : c.variants) {
    const std::vector<double> accuracies = accuracies_of(v, kHeldOut);
    for (std::size_t i = 0; i < v.losses.size(); ++i) {
      out += print("%s,%td,%td,", v.name.c_str(), v.parameters, v.hidden);
      out += std::to_string(settings.seed + i) + "," + csv_number(v.losses[i], 17) + ",";
      out += v.second.empty() ? ","
                              : csv_number(v.second[i], 17) + "," + csv_number(v.forgotten[i], 17);
      out += print(",%.6g,", v.tokens_per_second) + csv_number(accuracies[i], 17) + "\n";
    }
  }
  return out;
}

// Throws std::runtime_error with the variants that have a loss that is not finite.
void require_finite(const TrainingComparison& comparison) {
  std::string names;
  for (const TrainedVariant& v : comparison.variants)
    if (!v.all_finite()) names += (names.empty() ? "" : ", ") + v.name;
  if (!names.empty()) throw std::runtime_error("the loss is not finite with " + names);
}

}  // namespace

void report_training(const Settings& settings) {
  const Table table(settings);
  const TrainingComparison comparison = compare_training(
      settings, [&](const std::string& data) { table.head(data); },
      [&](const TrainedVariant& v) { table.row(v); });
  heed_program::all_of(
      {[&] { write_files(settings, json_of(settings, comparison), csv_of(settings, comparison)); },
       [&] {
         if (!settings.report_folder.empty())
           heed_report::write_page(settings.report_folder, training_page(settings, comparison));
       },
       [&] { require_finite(comparison); }});
}

}  // namespace compare
