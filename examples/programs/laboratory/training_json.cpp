// SPDX-License-Identifier: Apache-2.0
#include "training_json.hpp"

#include "../heed_compare/print.hpp"

#include <nlohmann/json.hpp>

namespace compare {

namespace {

using Json = nlohmann::ordered_json;

// The field "format". It goes up when a field changes or goes away.
constexpr int kFormat = 2;

[[nodiscard]] Json number_or_null(const std::optional<Index>& x) { return x ? Json(*x) : Json(); }

// A list, or null for an empty one.
[[nodiscard]] Json list_or_null(const std::vector<double>& x) {
  return x.empty() ? Json() : Json(x);
}

[[nodiscard]] Json json_of(const Experiment::Task& task) {
  return {{"task", task.spec},
          {"data", task.data},
          {"vocabulary", task.vocabulary},
          {"positions", task.positions},
          {"eval_every", task.evaluate_every}};
}

[[nodiscard]] Json json_of(const TrainedVariant& v) {
  Json sweep = Json::array(), steps = Json::array();
  for (const RateScore& one : v.sweep)
    sweep.push_back(
        {{"learning_rate", one.learning_rate}, {"loss", one.loss}, {"accuracy", one.accuracy}});
  for (const CellResult& run : v.runs) steps.push_back(number_or_null(steps_to_90(run)));
  return {
      {"task", v.task},
      {"name", v.name},
      {"parameters", v.runs.front().parameters},
      {"hidden", v.hidden},
      {"learning_rate", v.learning_rate},
      {"sweep", sweep},
      {"losses", losses_of(v)},
      {"second_losses", list_or_null(second_losses_of(v))},
      {"forgotten_losses", list_or_null(forgotten_losses_of(v))},
      {"backward_transfer_loss", list_or_null(backward_transfers_of(v, &StageScore::loss))},
      {"backward_transfer_accuracy", list_or_null(backward_transfers_of(v, &StageScore::accuracy))},
      {"steps_to_90", steps},
      {"tokens_per_second", tokens_per_second_of(v)},
      {"skipped_steps", skipped_of(v)},
      {"measures", means_of(v, &CellResult::measures)},
      {"measures_at_answers", means_of(v, &CellResult::at_answers)},
      {"measures_elsewhere", means_of(v, &CellResult::elsewhere)}};
}

// The attention's reports at these answers, as means.
[[nodiscard]] Measures means_of(const heed_lm::Score::Part& part) {
  Measures means;
  for (const auto& [name, sum] : part.reports) means[name] = sum / double(part.answers);
  return means;
}

// Adds a record for each test of each run.
void add_records(const TrainedVariant& v, Json& records) {
  for (std::size_t run = 0; run < v.runs.size(); ++run)
    for (const auto& [test, score] : v.runs[run].tests) {
      Json parts = Json::array();
      for (const auto& [difficulty, part] : score.by_difficulty)
        parts.push_back({{"difficulty", difficulty},
                         {"answers", part.answers},
                         {"accuracy", double(part.right) / double(part.answers)},
                         {"reports", means_of(part)}});
      records.push_back({{"variant", v.name},
                         {"seed", v.seeds[run]},
                         {"task", v.task},
                         {"test", test},
                         {"answers", score.answers},
                         {"loss", score.loss},
                         {"accuracy", score.accuracy},
                         {"by_difficulty", parts}});
    }
}

void add_courses(const TrainedVariant& v, Json& courses) {
  for (std::size_t run = 0; run < v.runs.size(); ++run)
    for (const Evaluation& one : v.runs[run].course)
      courses.push_back({{"variant", v.name},
                         {"seed", v.seeds[run]},
                         {"task", v.task},
                         {"step", one.step},
                         {"loss", one.loss},
                         {"accuracy", one.accuracy}});
}

void add_stages(const TrainedVariant& v, Json& stages) {
  for (std::size_t run = 0; run < v.runs.size(); ++run)
    for (const StageScore& one : v.runs[run].stages)
      stages.push_back({{"variant", v.name},
                        {"seed", v.seeds[run]},
                        {"task", v.task},
                        {"after", one.after + 1},
                        {"on", one.on + 1},
                        {"loss", one.loss},
                        {"accuracy", one.accuracy}});
}

void add_differences(const TrainingComparison& c, const TrainedVariant& v, Json& differences) {
  const TrainedVariant* baseline = baseline_of(c, v.task);
  if (baseline == nullptr || baseline->name == v.name) return;
  for (const std::string& test : tests_of(v))
    for (const Quantity quantity : {Quantity::loss, Quantity::accuracy}) {
      const auto d = difference_of(*baseline, v, test, quantity);
      differences.push_back({{"task", v.task},
                             {"test", test},
                             {"variant", v.name},
                             {"baseline", baseline->name},
                             {"of", name_of(quantity)},
                             {"seeds", v.seeds.size()},
                             {"mean", d ? Json(d->mean) : Json()},
                             {"low", d ? Json(d->low) : Json()},
                             {"high", d ? Json(d->high) : Json()},
                             {"verdict", verdict_of(d)}});
    }
}

}  // namespace

std::string training_json(const Settings& settings, const TrainingComparison& c) {
  const TrainingSettings& training = settings.training;
  const ModelSizes& m = training.model;
  Json tasks = Json::array(), variants = Json::array(), records = Json::array(),
       courses = Json::array(), stages = Json::array(), differences = Json::array();
  for (const Experiment::Task& task : c.tasks) tasks.push_back(json_of(task));
  for (const TrainedVariant& v : c.variants) {
    variants.push_back(json_of(v));
    add_records(v, records);
    add_courses(v, courses);
    add_stages(v, stages);
    add_differences(c, v, differences);
  }
  const double prior = training.ponder_prior.value_or(heed_lm::TrainSettings{}.ponder_prior);
  const Json whole = {{"format", kFormat},
                      {"model", {{"width", m.width}, {"heads", m.heads}, {"depth", m.depth}}},
                      {"training",
                       {{"steps", training.steps},
                        {"batch", m.batch},
                        {"seeds", training.seeds},
                        {"seed", settings.seed},
                        {"learning_rates", training.rates},
                        {"init", training.init},
                        {"ponder", training.ponder},
                        {"ponder_prior", prior},
                        {"sweep_seeds", training.rates.size() > 1 ? training.sweep_seeds : 0},
                        {"jobs", training.jobs},
                        {"threads", settings.threads}}},
                      {"confidence", kConfidence},
                      {"tasks", tasks},
                      {"variants", variants},
                      {"records", records},
                      {"courses", courses},
                      {"stages", stages},
                      {"differences", differences}};
  return whole.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

std::string training_csv(const TrainingComparison& c) {
  std::string out =
      "variant,parameters,hidden,seed,loss,second_loss,forgotten_loss,tokens_per_second,accuracy,"
      "steps_to_90,learning_rate,task\n";
  for (const TrainedVariant& v : c.variants) {
    const std::vector<double> losses = losses_of(v), second = second_losses_of(v),
                              forgotten = forgotten_losses_of(v), accuracies = accuracies_of(v);
    for (std::size_t i = 0; i < v.runs.size(); ++i) {
      const std::optional<Index> steps = steps_to_90(v.runs[i]);
      out +=
          print("%s,%td,%td,", v.name.c_str(), v.runs[i].parameters, v.hidden) +
          std::to_string(v.seeds[i]) + "," + csv_number(losses[i], 17) + "," +
          (second.empty() ? "," : csv_number(second[i], 17) + "," + csv_number(forgotten[i], 17)) +
          print(",%.6g,", tokens_per_second_of(v)) + csv_number(accuracies[i], 17) + "," +
          (steps ? std::to_string(*steps) : "") + print(",%.9g,\"", v.learning_rate) + v.task +
          "\"\n";
    }
  }
  return out;
}

}  // namespace compare
