// SPDX-License-Identifier: Apache-2.0
#include "cell_json.hpp"

#include "../heed_compare/print.hpp"

#include <nlohmann/json.hpp>

#include <cstdint>

namespace compare {

namespace {

using Json = nlohmann::ordered_json;

// A value, and its place, such as "result.tests[0].score". A value of the wrong form is refused in
// a sentence that begins with the place.
class Field {
 public:
  Field(const Json& value, std::string place) : value_(value), place_(std::move(place)) {}

  [[nodiscard]] bool is_null() const { return value_.is_null(); }
  [[nodiscard]] Field operator[](const char* name) const {
    require(value_.is_object(), "an object");
    if (!value_.contains(name)) throw std::runtime_error(place_ + "." + name + " is missing");
    return {value_.at(name), place_ + "." + name};
  }
  // The items of a list that must have from `least` to `most` of them.
  [[nodiscard]] std::vector<Field> items(std::size_t least = 0, std::size_t most = SIZE_MAX) const {
    require(value_.is_array() && value_.size() >= least && value_.size() <= most,
            least == 0 ? "a list"
                       : "a list of " + std::to_string(least) + (most > least ? " or more" : ""));
    std::vector<Field> all;
    for (const Json& item : value_)
      all.emplace_back(item, place_ + "[" + std::to_string(all.size()) + "]");
    return all;
  }
  [[nodiscard]] Index whole(Index least) const {
    const bool good = value_.is_number_integer() && value_.get<Index>() >= least;
    require(good, "a whole number from " + std::to_string(least));
    return value_.get<Index>();
  }
  // NaN for null.
  [[nodiscard]] double number(double least = -kInfinity, double most = kInfinity) const {
    if (value_.is_null()) return kNotFinite;
    const bool good =
        value_.is_number() && value_.get<double>() >= least && value_.get<double>() <= most;
    require(good, most < kInfinity     ? print("null or a number from %g to %g", least, most)
                  : least > -kInfinity ? print("null or a number from %g", least)
                                       : "null or a number");
    return value_.get<double>();
  }
  [[nodiscard]] double loss() const { return number(0); }
  [[nodiscard]] double share() const { return number(0, 1); }
  [[nodiscard]] std::string text() const {
    require(value_.is_string() && value_ != "", "a text");
    return value_.get<std::string>();
  }
  [[nodiscard]] Measures measures() const {
    require(value_.is_object(), "an object");
    Measures measures;
    for (const auto& [name, value] : value_.items())
      measures[name] = Field(value, place_ + "." + name).number();
    return measures;
  }

 private:
  static constexpr double kInfinity = std::numeric_limits<double>::infinity();

  void require(bool good, const std::string& form) const {
    if (good) return;
    const std::string value = value_.dump();
    throw std::runtime_error(place_ + " is " +
                             (value.size() > 60 ? value.substr(0, 60) + "..." : value) +
                             ", it must be " + form);
  }

  const Json& value_;
  std::string place_;
};

[[nodiscard]] Json json_of(const heed_lm::Score& score) {
  Json parts = Json::array();
  for (const auto& [difficulty, part] : score.by_difficulty)
    parts.push_back({difficulty, part.answers, part.right, part.reports});
  return {{"loss", score.loss},
          {"accuracy", score.accuracy},
          {"answers", score.answers},
          {"by_difficulty", parts}};
}
[[nodiscard]] heed_lm::Score score_of(const Field& field) {
  heed_lm::Score score;
  score.loss = field["loss"].loss();
  score.accuracy = field["accuracy"].share();
  score.answers = field["answers"].whole(0);
  for (const Field& one : field["by_difficulty"].items()) {
    const auto items = one.items(4, 4);
    heed_lm::Score::Part& part =
        score.by_difficulty[items[0].whole(std::numeric_limits<Index>::min())];
    part.answers = items[1].whole(0);
    part.right = items[2].whole(0);
    part.reports = items[3].measures();
  }
  return score;
}

[[nodiscard]] CellResult read(const Field& field) {
  CellResult result;
  result.parameters = field["parameters"].whole(1);
  result.skipped = field["skipped"].whole(0);
  result.tokens_per_second = field["tokens_per_second"].number(0);
  for (const Field& test : field["tests"].items(1))
    result.tests.push_back({test["test"].text(), score_of(test["score"])});
  for (const Field& one : field["course"].items()) {
    const auto items = one.items(3, 3);
    result.course.push_back({items[0].whole(1), items[1].loss(), items[2].share()});
  }
  for (const Field& one : field["stages"].items()) {
    const auto items = one.items(4, 4);
    result.stages.push_back(
        {items[0].whole(0), items[1].whole(0), items[2].loss(), items[3].share()});
  }
  const Field curve = field["curve"];
  for (const Field& step : curve["step"].items()) result.curve.step.push_back(step.number());
  const std::size_t points = result.curve.step.size();
  for (const Field& loss : curve["loss"].items(points, points))
    result.curve.loss.push_back(loss.number());
  result.curve.steps_per_point = curve["steps_per_point"].whole(1);
  result.measures = field["measures"].measures();
  result.at_answers = field["at_answers"].measures();
  result.elsewhere = field["elsewhere"].measures();
  if (const Field reading = field["reading"]; !reading.is_null())
    result.reading = {reading["name"].text(), reading["title"].text(), reading["body"].text(),
                      reading["height"].number(0)};
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
    return read({Json::parse(json), "result"});
  } catch (const nlohmann::json::exception& error) {
    throw std::runtime_error(error.what());
  }
}

}  // namespace compare
