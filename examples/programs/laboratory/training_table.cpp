// SPDX-License-Identifier: Apache-2.0
#include "training_table.hpp"

#include "../heed_compare/print.hpp"
#include "statistics.hpp"

#include "../tasks/task_list.hpp"

#include <cmath>

namespace compare {

namespace {

constexpr std::size_t kTableWidth = 100;

// Mean and spread as text; a single number has no spread.
[[nodiscard]] std::string mean_and_spread(const std::vector<double>& x) {
  const double mean = mean_of(x);
  if (!std::isfinite(mean)) return "not finite";
  return print("%.4f", mean) + (x.size() < 2 ? "" : print(" +- %.4f", spread_of(x)));
}

[[nodiscard]] std::string padded(const std::vector<double>& x) {
  return print("%-16s  ", mean_and_spread(x).c_str());
}

// "loss 0.3120 0.2980": every seed's value.
[[nodiscard]] std::string each_of(const char* name, const std::vector<double>& x) {
  std::string text = name;
  for (const double value : x)
    text += std::isfinite(value) ? print(" %.4f", value) : std::string(" not finite");
  return text;
}

[[nodiscard]] std::string number_or_words(double x) {
  return std::isfinite(x) ? print("%.3g", x) : "not finite";
}

// Joins items with commas, in lines of up to 92 characters behind an indent of four.
[[nodiscard]] std::string lines_of(const std::string& begin,
                                   const std::vector<std::string>& items) {
  std::string text, line = begin;
  bool first = true;
  for (const std::string& item : items) {
    if (!first && line.size() + item.size() > 90) {
      text += "    " + line + ",\n";
      line = item;
    } else {
      line += (first ? "" : ", ") + item;
    }
    first = false;
  }
  return items.empty() ? "" : text + "    " + line + "\n";
}

[[nodiscard]] std::string measure_lines(const TrainedVariant& v) {
  const Measures all = means_of(v, &CellResult::measures),
                 answers = means_of(v, &CellResult::at_answers),
                 others = means_of(v, &CellResult::elsewhere);
  std::vector<std::string> items;
  for (const auto& [name, value] : all) {
    std::string item = name + " " + number_or_words(value);
    const auto at = answers.find(name), off = others.find(name);
    if (at != answers.end() && off != others.end())
      item += " (answers " + number_or_words(at->second) + ", others " +
              number_or_words(off->second) + ")";
    items.push_back(item);
  }
  for (const auto& [name, value] : answers)
    if (all.count(name) == 0) items.push_back(name + " " + number_or_words(value));
  return lines_of("", items);
}

[[nodiscard]] std::string steps_line(const TrainedVariant& v) {
  if (v.task == kText) return "";
  std::string text;
  for (const CellResult& run : v.runs) {
    if (run.course.empty()) continue;
    const std::optional<Index> steps = steps_to_90(run);
    text += (text.empty() ? "" : ", ") + (steps ? std::to_string(*steps) : std::string("never"));
  }
  return text.empty() ? "" : "    90 % right after steps: " + text + "\n";
}

// "smallest" or "largest" for a best rate at an edge of the sweep, which says little since rates beyond it were not tried.
[[nodiscard]] std::string edge_of(const TrainedVariant& v) {
  double least = v.learning_rate, most = v.learning_rate;
  for (const RateScore& one : v.sweep) {
    least = std::min(least, one.learning_rate);
    most = std::max(most, one.learning_rate);
  }
  if (least == most || (least < v.learning_rate && v.learning_rate < most)) return "";
  return v.learning_rate == least ? "smallest" : "largest";
}

[[nodiscard]] std::string sweep_lines(const TrainedVariant& v) {
  std::vector<std::string> items;
  for (const RateScore& one : v.sweep)
    items.push_back(print("%g loss ", one.learning_rate) + number_or_words(one.loss));
  const std::string edge = edge_of(v);
  return lines_of(print("learning rate %g of ", v.learning_rate), items) +
         (edge.empty() ? ""
                       : print("    the %s of --sweep; %s ones may do better\n", edge.c_str(),
                               edge == "smallest" ? "smaller" : "larger"));
}

// The quantity to report: accuracy for a task, loss for a text.
[[nodiscard]] Quantity quantity_of(const std::string& task) {
  return task == kText ? Quantity::loss : Quantity::accuracy;
}

// Scores on all stages after each stage, means over seeds.
[[nodiscard]] std::string stage_lines(const TrainedVariant& v) {
  if (v.runs.front().stages.empty()) return "";
  const bool loss = quantity_of(v.task) == Quantity::loss;
  const auto score = loss ? &StageScore::loss : &StageScore::accuracy;
  const Index last = v.runs.front().stages.back().after;
  std::string text;
  for (Index after = 0; after <= last; ++after) {
    text += print("    after stage %td, %s on each:", after + 1, loss ? "loss" : "accuracy");
    for (Index on = 0; on <= last; ++on) {
      std::vector<double> of_seeds;
      for (const CellResult& run : v.runs) of_seeds.push_back(stage_of(run, after, on).*score);
      const double mean = mean_of(of_seeds);
      text += std::isfinite(mean) ? print(" %.4f", mean) : std::string(" not finite");
    }
    text += "\n";
  }
  return text + "    backward transfer " + mean_and_spread(backward_transfers_of(v, score)) + "\n";
}

// A marked score: "0.987+" is better than the baseline. Sets `marked` if it was compared.
[[nodiscard]] std::string marked_score(const TrainingComparison& comparison,
                                       const TrainedVariant& v, bool& marked) {
  const Quantity quantity = quantity_of(v.task);
  const double mean = mean_of(quantity == Quantity::loss ? losses_of(v) : accuracies_of(v));
  if (!std::isfinite(mean)) return "- ";
  const TrainedVariant* baseline = baseline_of(comparison, v.task);
  const auto d =
      baseline == nullptr ? std::nullopt : difference_of(*baseline, v, kHeldOut, quantity);
  marked = marked || d.has_value();
  const bool differs = d && !d->may_be_none();
  const bool better = differs && (d->mean > 0) == (quantity == Quantity::accuracy);
  return print("%.3f", mean) + (differs ? (better ? "+" : "-") : " ");
}

[[nodiscard]] std::string interval_text(const Difference& d) {
  return print("%+.4f [%+.4f, %+.4f]", d.mean, d.low, d.high);
}

}  // namespace

std::string training_head(const Settings& settings) {
  const TrainingSettings& t = settings.training;
  const ModelSizes& m = t.model;
  return print("width %td, heads %td, blocks %td, batch %td, steps %td, seeds %d, threads %d%s\n",
               m.width, m.heads, m.depth, m.batch, t.steps, t.seeds, settings.threads,
               t.seeds > 1 ? "; means and standard deviations over seeds" : "");
}

std::string task_head(const Experiment::Task& task) {
  return task.data +
         print(", %td positions; loss in %s\n", task.positions, loss_unit_of(task.spec)) +
         print("%-21s %10s %6s  %-17s ", "variant", "parameters", "MLP", "validation loss") +
         (task.spec == kText ? "" : print("%-17s ", "accuracy")) +
         (task.stages.size() < 2 ? ""
                                 : print("%-17s  %-17s ", "second stage", "first stage then")) +
         print("%8s\n", "tokens/s");
}

std::string variant_lines(const TrainedVariant& v) {
  std::string text =
      print("%-21s %10td %6td  ", v.name.c_str(), v.runs.front().parameters, v.hidden) +
      padded(losses_of(v));
  if (v.task != kText) text += padded(accuracies_of(v));
  if (!second_losses_of(v).empty())
    text += padded(second_losses_of(v)) + " " + padded(forgotten_losses_of(v));
  text += print("%8.0f\n", tokens_per_second_of(v));
  text += sweep_lines(v);
  if (v.runs.size() > 1) {
    text += "    each seed: " + each_of("loss", losses_of(v));
    text += (v.task == kText ? "" : each_of("; accuracy", accuracies_of(v))) + "\n";
  }
  for (const std::string& test : tests_of(v))
    if (test != kHeldOut)
      text += print("    test %-12s ", test.c_str()) +
              (v.task == kText ? "loss " + mean_and_spread(losses_of(v, test))
                               : "accuracy " + mean_and_spread(accuracies_of(v, test))) +
              "\n";
  text += steps_line(v) + stage_lines(v) + measure_lines(v);
  if (const Index skipped = skipped_of(v); skipped > 0)
    text += print("    %td %s skipped: numbers were not finite\n", skipped,
                  skipped == 1 ? "step was" : "steps were");
  return text;
}

std::string answers_line(const TrainingComparison& comparison, const std::string& task) {
  const std::vector<const TrainedVariant*> variants = variants_of(comparison, task);
  std::string text;
  for (const std::string& test : tests_of(*variants.front()))
    text += print("%s %s %td", text.empty() ? "" : ",", test.c_str(), answers_in(variants, test));
  return (task == kText ? "tokens of each score:" : "answers of each score:") + text +
         "; the same ones for all seeds and variants\n";
}

heed_report::Table difference_table(const TrainingComparison& comparison, const std::string& task) {
  heed_report::Table table;
  const TrainedVariant* baseline = baseline_of(comparison, task);
  if (baseline == nullptr || baseline->runs.size() < 2) return table;
  const Quantity quantity = quantity_of(task);
  table.title = print("difference in %s to %s, mean and %.0f %% interval of the pairs of one seed",
                      name_of(quantity), baseline->name.c_str(), 100 * kConfidence);
  table.head = {"variant", "test", "difference", "verdict"};
  for (const TrainedVariant* v : variants_of(comparison, task)) {
    if (v == baseline) continue;
    for (const std::string& test : tests_of(*v)) {
      const auto d = difference_of(*baseline, *v, test, quantity);
      table.rows.push_back({test == kHeldOut ? v->name : "", test,
                            d ? interval_text(*d) : "not finite", d ? verdict_of(d) : ""});
    }
  }
  return table;
}

heed_report::Table score_table(const TrainingComparison& comparison, const Experiment::Task& task) {
  const bool answers = task.spec != kText;
  heed_report::Table table{task.data + "; loss in " + loss_unit_of(task.spec) + ", held out",
                           {"variant", "parameters", "MLP", "learning rate", "loss"},
                           {}};
  if (answers) table.head.push_back("accuracy");
  for (const TrainedVariant* v : variants_of(comparison, task.spec)) {
    const std::string edge = edge_of(*v);
    table.rows.push_back({v->name, std::to_string(v->runs.front().parameters),
                          std::to_string(v->hidden),
                          print("%g", v->learning_rate) + (edge.empty() ? "" : " (" + edge + ")"),
                          mean_and_spread(losses_of(*v))});
    if (answers) table.rows.back().push_back(mean_and_spread(accuracies_of(*v)));
  }
  return table;
}

std::string difference_lines(const TrainingComparison& comparison, const std::string& task) {
  const heed_report::Table table = difference_table(comparison, task);
  if (table.rows.empty()) return "";
  std::string text = table.title + "\n";
  for (const std::vector<std::string>& row : table.rows)
    text += print("%-21s %-12s ", row[0].c_str(), row[1].c_str()) + row[2] +
            (row[3].empty() ? "" : "  " + row[3]) + "\n";
  return text;
}

std::string tasks_table(const TrainingComparison& comparison) {
  if (comparison.tasks.size() < 2) return "";
  const std::vector<const TrainedVariant*> all =
      variants_of(comparison, comparison.tasks.front().spec);
  const auto column_of = [](const std::string& name) {
    return int(std::max<std::size_t>(8, name.size() + 2));
  };
  std::string text = "accuracy on what is held out, of text the loss\n";
  bool marked = false;
  // Invariant: the variants before `first` stand in tables above; variants from there to `last` fit into one table.
  for (std::size_t first = 0, last = 0; first < all.size(); first = last) {
    std::string head = print("%-17s", "");
    for (; last < all.size(); ++last) {
      const int column = column_of(all[last]->name);
      if (last > first && head.size() + std::size_t(column) > kTableWidth) break;
      head += print("%*s ", column, all[last]->name.c_str());
    }
    text += (first > 0 ? "\n" : "") + head + "\n";
    for (const Experiment::Task& task : comparison.tasks) {
      text += print("%-17s", tasks::task_name(task.spec).c_str());
      for (const TrainedVariant* v : variants_of(comparison, task.spec))
        for (std::size_t n = first; n < last; ++n)
          if (v->name == all[n]->name)
            text +=
                print("%*s", column_of(v->name) + 1, marked_score(comparison, *v, marked).c_str());
      text += "\n";
    }
  }
  if (marked)
    text += print(
        "+ better, - worse than %s by the %.0f %% interval of the pairs of one seed; elsewhere no "
        "difference seen\n",
        baseline_of(comparison, comparison.tasks.front().spec)->name.c_str(), 100 * kConfidence);
  return text;
}

}  // namespace compare
