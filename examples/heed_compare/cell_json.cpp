// SPDX-License-Identifier: Apache-2.0
#include "cell_json.hpp"

#include <nlohmann/json.hpp>

namespace compare {

namespace {

using Json = nlohmann::ordered_json;

[[nodiscard]] double number(const Json& json) {
  return json.is_null() ? kNotFinite : json.get<double>();
}
[[nodiscard]] std::vector<double> numbers(const Json& json) {
  std::vector<double> all;
  for (const Json& one : json) all.push_back(number(one));
  return all;
}

[[nodiscard]] Measures measures_of(const Json& json) {
  Measures measures;
  for (const auto& [name, value] : json.items()) measures[name] = number(value);
  return measures;
}

[[nodiscard]] Json json_of(const heed_lm::Score& score) {
  Json parts = Json::array();
  for (const auto& [difficulty, part] : score.by_difficulty)
    parts.push_back({difficulty, part.answers, part.right, part.reports});
  return {{"loss", score.loss},
          {"accuracy", score.accuracy},
          {"answers", score.answers},
          {"by_difficulty", parts}};
}
[[nodiscard]] heed_lm::Score score_of(const Json& json) {
  heed_lm::Score score;
  score.loss = number(json.at("loss"));
  score.accuracy = number(json.at("accuracy"));
  score.answers = json.at("answers").get<Index>();
  for (const Json& one : json.at("by_difficulty")) {
    heed_lm::Score::Part& part = score.by_difficulty[one.at(0).get<Index>()];
    part.answers = one.at(1).get<Index>();
    part.right = one.at(2).get<Index>();
    part.reports = measures_of(one.at(3));
  }
  return score;
}

[[nodiscard]] CellResult read(const Json& json) {
  CellResult result;
  result.parameters = json.at("parameters").get<Index>();
  result.skipped = json.at("skipped").get<Index>();
  result.tokens_per_second = number(json.at("tokens_per_second"));
  for (const Json& test : json.at("tests"))
    result.tests.push_back({test.at("test").get<std::string>(), score_of(test.at("score"))});
  for (const Json& one : json.at("course"))
    result.course.push_back({one.at(0).get<Index>(), number(one.at(1)), number(one.at(2))});
  for (const Json& one : json.at("stages"))
    result.stages.push_back(
        {one.at(0).get<Index>(), one.at(1).get<Index>(), number(one.at(2)), number(one.at(3))});
  result.curve = {numbers(json.at("curve").at("step")), numbers(json.at("curve").at("loss")),
                  json.at("curve").at("steps_per_point").get<Index>()};
  result.measures = measures_of(json.at("measures"));
  result.at_answers = measures_of(json.at("at_answers"));
  result.elsewhere = measures_of(json.at("elsewhere"));
  if (const Json& reading = json.at("reading"); !reading.is_null()) {
    result.reading.emplace();
    reading.at("name").get_to(result.reading->name);
    reading.at("title").get_to(result.reading->title);
    reading.at("body").get_to(result.reading->body);
    result.reading->height = number(reading.at("height"));
  }
  return result;
}

}  // namespace

std::string json_of(const CellResult& result) {
  Json tests = Json::array(), course = Json::array(), stages = Json::array();
  for (const TestScore& one : result.tests)
    tests.push_back({{"test", one.test}, {"score", json_of(one.score)}});
  for (const Evaluation& one : result.course) course.push_back({one.step, one.loss, one.accuracy});
  for (const StageScore& one : result.stages)
    stages.push_back({one.after, one.on, one.loss, one.accuracy});
  Json reading;
  if (const auto& picture = result.reading)
    reading = {{"name", picture->name},
               {"title", picture->title},
               {"body", picture->body},
               {"height", picture->height}};
  const Json whole = {{"parameters", result.parameters},
                      {"skipped", result.skipped},
                      {"tokens_per_second", result.tokens_per_second},
                      {"tests", tests},
                      {"course", course},
                      {"stages", stages},
                      {"curve",
                       {{"step", result.curve.step},
                        {"loss", result.curve.loss},
                        {"steps_per_point", result.curve.steps_per_point}}},
                      {"measures", result.measures},
                      {"at_answers", result.at_answers},
                      {"elsewhere", result.elsewhere},
                      {"reading", reading}};
  return whole.dump();
}

CellResult cell_result_of(const std::string& json) {
  try {
    return read(Json::parse(json));
  } catch (const nlohmann::json::exception& error) {
    throw std::runtime_error(error.what());
  }
}

}  // namespace compare
