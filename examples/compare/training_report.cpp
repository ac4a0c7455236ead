// SPDX-License-Identifier: Apache-2.0
#include "training_report.hpp"

#include "statistics.hpp"
#include "training_pictures.hpp"

#include <cstdio>
#include <fstream>

namespace compare {

namespace {

template <class... Args>
[[nodiscard]] std::string format(const char* pattern, Args... args) {
  char text[512];
  std::snprintf(text, sizeof text, pattern, args...);
  return text;
}

// The table, a line at a time.
class Table {
 public:
  explicit Table(const Settings& settings)
      : settings_(settings),
        to_(settings.json_file == "-" || settings.csv_file == "-" ? stderr : stdout) {}

  void head(const std::string& data) const {
    const ModelSizes& m = settings_.model;
    put(data + "\n" +
        format("width %td, %td heads, %td blocks, %td tokens, batch %td, %td steps, %d seeds, %d threads; loss "
               "in nats per token, its spread over seeds\n\n",
               m.width, m.heads, m.depth, m.len, m.batch, settings_.train_steps, settings_.seeds,
               settings_.threads) +
        format("%-18s %10s %6s  %-17s ", "variant", "parameters", "MLP", "validation loss") +
        (forgets() ? format("%-17s  %-17s ", "second text", "first text then") : "") +
        format("%8s\n", "tokens/s"));
  }
  void row(const TrainedVariant& v) const {
    std::string text = format("%-18s %10td %6td  ", v.name.c_str(), v.parameters, v.hidden) + loss(v.losses);
    if (forgets()) text += loss(v.second) + " " + loss(v.forgotten);
    text += format("%8.0f\n", v.tokens_per_second);
    std::string line;
    for (const auto& [name, value] : v.measures) {
      const std::string part = format("%s %.3g", name.c_str(), value);
      if (!line.empty() && line.size() + part.size() > 90) {
        text += "    " + line + "\n";
        line.clear();
      }
      line += (line.empty() ? "" : ", ") + part;
    }
    put(line.empty() ? text : text + "    " + line + "\n");
  }

 private:
  [[nodiscard]] bool forgets() const { return !settings_.then_file.empty(); }
  [[nodiscard]] static std::string loss(const std::vector<double>& losses) {
    return format("%.4f +- %.4f  ", mean_of(losses), spread_of(losses));
  }
  void put(const std::string& text) const {
    std::fputs(text.c_str(), to_);
    std::fflush(to_);
  }
  const Settings& settings_;
  std::FILE* to_;
};

[[nodiscard]] std::string numbers(const std::vector<double>& x) {
  std::string text = "[";
  for (const double v : x) text += format(&v == x.data() ? "%.17g" : ", %.17g", v);
  return text + "]";
}

[[nodiscard]] std::string json_of(const TrainingComparison& c) {
  std::string out = "{\"variants\": [";
  for (const TrainedVariant& v : c.variants) {
    out += &v == c.variants.data() ? "\n" : ",\n";
    out += "  {\"name\": \"" + v.name + "\", " +
           format("\"parameters\": %td, \"hidden\": %td, \"losses\": ", v.parameters, v.hidden) +
           numbers(v.losses);
    if (!v.second.empty())
      out += ", \"second_losses\": " + numbers(v.second) + ", \"forgotten_losses\": " + numbers(v.forgotten);
    out += format(", \"tokens_per_second\": %.6g, \"measures\": {", v.tokens_per_second);
    bool first = true;
    for (const auto& [name, value] : v.measures) {
      out += (first ? "\"" : ", \"") + name + "\": " + format("%.9g", value);
      first = false;
    }
    out += "}}";
  }
  return out + "\n]}\n";
}

[[nodiscard]] std::string csv_of(const TrainingComparison& c) {
  std::string out = "variant,parameters,hidden,seed,loss,second_loss,forgotten_loss,tokens_per_second\n";
  for (const TrainedVariant& v : c.variants)
    for (std::size_t i = 0; i < v.losses.size(); ++i) {
      out += format("%s,%td,%td,%zu,%.17g,", v.name.c_str(), v.parameters, v.hidden, i + 1, v.losses[i]);
      out += v.second.empty() ? "," : format("%.17g,%.17g", v.second[i], v.forgotten[i]);
      out += format(",%.6g\n", v.tokens_per_second);
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

void report_training(const Settings& settings) {
  const Table table(settings);
  const TrainingComparison comparison =
      compare_training(settings, [&](const std::string& data) { table.head(data); },
                       [&](const TrainedVariant& v) { table.row(v); });
  write_to(settings.json_file, json_of(comparison));
  write_to(settings.csv_file, csv_of(comparison));
  if (!settings.report_folder.empty())
    heed_report::write_page(settings.report_folder, training_page(settings, comparison));
}

}  // namespace compare
