// SPDX-License-Identifier: Apache-2.0

// heed_compare --train as its users run it: plans, runs that go on, several at a time, sweeps and tests of its own.

#include "catch.hpp"
#include "programs/shell.hpp"

#include <heed/core/parallel.hpp>

#include <nlohmann/json.hpp>

#include <cmath>
#include <functional>
#include <map>
#include <regex>
#include <set>
#include <sstream>

using namespace heed_test;
using Json = nlohmann::json;

namespace {

const std::string kSmall =
    "heed_compare --train 4 --seed 7 --width 16 --heads 2 --depth 1 --batch 4 --threads 1 "
    "--variants sdpa,dar ";

// The results without what depends on the clock and on other runs.
[[nodiscard]] Json timeless(const std::string& text) {
  Json json = Json::parse(text);
  for (Json& variant : json.at("variants")) variant.erase("tokens_per_second");
  json.at("training").erase("jobs");
  return json;
}

[[nodiscard]] std::set<std::string> tests_in(const Json& json) {
  std::set<std::string> names;
  for (const Json& record : json.at("records")) names.insert(record.at("test"));
  return names;
}

}  // namespace

TEST_CASE("A run that was stopped goes on with what is missing, and ends with the same bits") {
  const Shell shell;
  const std::string command = kSmall + "--task parity:len=6,induction:len=10 ";
  const Json whole = timeless(shell.done(command + "--seeds 3 --json -").out);
  (void)shell.done(command + "--seeds 1 --out cells");
  const Names first = shell.files("cells");
  CHECK(first.size() == 1 + 2 * 2);  // settings.json, variants, tasks
  const std::string kept = *std::next(first.begin());
  const std::string text = read(shell.path("cells/" + kept));
  const auto written = fs::last_write_time(shell.path("cells/" + kept));
  const std::string missing = *first.begin();
  fs::remove(shell.path("cells/" + missing));
  const Result second = shell.done(command + "--seeds 3 --out cells --json a.json");
  CHECK(
      second.out.find("12 runs of 4 steps: 2 tasks, 2 variants, 3 seeds; 3 are done in cells\n") !=
      std::string::npos);
  CHECK(timeless(read(shell.path("a.json"))) == whole);
  CHECK(shell.files("cells").size() == 1 + 2 * 2 * 3);
  CHECK(shell.files("cells").count(missing) == 1);
  CHECK(read(shell.path("cells/" + kept)) == text);
  CHECK(fs::last_write_time(shell.path("cells/" + kept)) == written);
  // Nothing is left to do: no step is measured.
  const Result third = shell.done(command + "--seeds 3 --out cells --json a.json");
  CHECK(third.out.find("; 12 are done in cells\n\n") != std::string::npos);
  CHECK(timeless(read(shell.path("a.json"))) == whole);
}

TEST_CASE("A folder of other settings is refused, and what differs is named") {
  const Shell shell;
  const std::string command = kSmall + "--task parity:len=6 --out cells ";
  (void)shell.done(command);
  shell.refuses(std::regex_replace(command, std::regex("--batch 4"), "--batch 2") + "--noise 0.5",
                "--out cells: its cells have other settings: batch is 4 there, 2 here; noise is "
                "[] there, [0.5] here\n");
  // Another rate is another cell of the same folder.
  (void)shell.done(command + "--lr 1e-3");
  CHECK(shell.files("cells").size() == 1 + 2 * 2);
}

TEST_CASE("A variant more does not change the models of the others") {
  const Shell shell;
  const std::string command = kSmall + "--task parity:len=6 --out cells ";
  const Json two = Json::parse(shell.done(command + "--json -").out);
  const std::string more = std::regex_replace(command, std::regex("sdpa,dar"), "sdpa,dar,intent");
  const Result plan = shell.done(more + "--json a.json");
  CHECK(plan.out.find("; 2 are done in cells\n") != std::string::npos);
  const Json three = Json::parse(read(shell.path("a.json")));
  CHECK(two.at("variants").at(0).at("hidden") == 64);  // four times the width
  for (const std::size_t n : {0u, 1u})
    CHECK(three.at("variants").at(n) == two.at("variants").at(n));
  CHECK(three.at("variants").at(2).at("hidden") < 64);
  const auto parameters = [&](std::size_t n) {
    return three.at("variants").at(n).at("parameters").get<double>();
  };
  CHECK(parameters(2) == Approx(parameters(0)).margin(17));  // half of what a column has
  shell.refuses("heed_compare --train 1 --width 1 --heads 1 --text text.txt --variants prototype",
                "--width is 1, with which prototype without an MLP has ");
}

TEST_CASE("A folder in use is refused to other settings, and a killed run leaves it free") {
  const Shell shell;
  const auto command = [](const std::string& steps) {
    return std::regex_replace(kSmall, std::regex("--train 4"), "--train " + steps) +
           "--task parity:len=6 --out cells ";
  };
  (void)shell.done("(ulimit -t 60; exec " + command("10000000") +
                   ") & echo $! > id; "
                   "for i in $(seq 600); do test -e cells/settings.json && break; sleep 0.1; done");
  const Result refused = shell.run(command("4"));
  INFO(refused.err);
  CHECK(refused.code == 2);
  CHECK(std::regex_match(
      refused.err,
      std::regex("heed_compare: --out cells: process " + lines_of(read(shell.path("id")))[0] +
                 " on \\S+ uses it with other settings: steps is 10000000 there, 4 "
                 "here\n")));
  (void)shell.run("kill -9 $(cat id); while kill -0 $(cat id); do sleep 0.01; done");
  CHECK(shell.files("cells").count(".lock") == 1);
  std::ofstream(shell.path("cells/.heed-1-0.tmp")) << "left";
  (void)shell.done(command("4"));
  CHECK(shell.files("cells").size() == 1 + 2);  // settings.json, variants
  // Several runs of the same settings may use the folder.
  (void)shell.done(command("4") + "--seeds 2 & " + command("4") +
                   "--seeds 2 --lr 1e-3; code=$?; wait $! && test $code = 0");
  CHECK(shell.files("cells").size() == 1 + 2 * 2 * 2);
  // Also a run that writes nothing removes leftovers of a killed one.
  std::ofstream(shell.path("cells/.heed-1-0.tmp")) << "left";
  (void)shell.done(command("4") + "--seeds 2");
  CHECK(shell.files("cells").size() == 1 + 2 * 2 * 2);
}

TEST_CASE("Runs whose files are damaged are named and made again, and the others are used") {
  const Shell shell;
  const std::string command = kSmall + "--task parity:len=6 --seeds 3 --out cells ";
  const auto results = [](const std::string& text) { return timeless(text).at("records"); };
  const Json whole = results(shell.done(command + "--json -").out);
  Names names = shell.files("cells");
  names.erase("settings.json");
  std::vector<std::string> files;
  for (const std::string& name : names) files.push_back("cells/" + name);
  const auto edit = [&](std::size_t n, const std::function<void(Json&)>& change) {
    Json cell = Json::parse(read(shell.path(files[n])));
    change(cell);
    std::ofstream(shell.path(files[n])) << cell.dump();
  };
  edit(0, [](Json& cell) { cell["result"]["tests"][0]["score"]["accuracy"] = 7.5; });
  edit(1, [](Json& cell) { cell["result"]["measures"].erase("row_entropy"); });
  edit(2, [](Json& cell) { cell.erase("result"); });
  edit(3, [](Json& cell) { cell["cell"]["seed"] = 77; });
  std::ofstream(shell.path(files[4])) << "{\"settings\": {";
  const std::string kept = read(shell.path(files[5]));
  const Result again = shell.done(command + "--json -");
  CHECK(results(again.out) == whole);
  const std::string expected[] = {
      "result.tests[0].score.accuracy is 7.5, it must be null or a number from 0 to 1",
      "result.measures is not what was written, by its checksum", "result is missing",
      "cell is another one", "it is cut off, or is no JSON"};
  for (std::size_t n = 0; n < 5; ++n) {
    const std::string line =
        "heed_compare: " + files[n] + ": " + expected[n] + "; this run is made again\n";
    INFO(line << again.err);
    CHECK(again.err.find(line) != std::string::npos);
    CHECK(again.err.find(line) == again.err.rfind(line));
  }
  CHECK(read(shell.path(files[5])) == kept);
  CHECK(again.err.find("plan: 6 runs of 4 steps: 1 task, 2 variants, 3 seeds; 1 is done in") !=
        std::string::npos);
  // A cell with other settings is not damaged: both runs are worth keeping.
  edit(1, [](Json& cell) { cell["settings"]["steps"] = 5; });
  shell.refuses(command, "--out cells: " + files[1].substr(6) +
                             " has other settings: steps is 5 there, 4 here");
}

TEST_CASE("Results do not depend on how many runs are made at a time") {
  const Shell shell;
  const std::string command =
      kSmall + "--variants sdpa,dar,prototype-art --task flip-flop:len=12 --seeds 2 --json - ";
  const std::string wide = std::regex_replace(command, std::regex("--variants sdpa,dar "), "");
  const Json one = timeless(shell.done(wide).out);
  CHECK(timeless(shell.done(wide + "--jobs 3").out) == one);
  CHECK(one.at("records").size() == 3 * 2 * 3);
}

TEST_CASE("Without --jobs and --threads the plan says which is faster, and results are the same") {
  if (heed::resolve_threads(2) == 1) return;  // without OpenMP there is nothing to choose
  const Shell shell;
  const std::string command = std::regex_replace(kSmall, std::regex("--threads 1 "), "");
  const std::string tasks = "--task flip-flop:len=12,parity:len=6 --seeds 2 ",
                    two_threads = "OMP_NUM_THREADS=2 ";
  const auto undivided = [](Json json) {
    json.at("training").erase("threads");
    return timeless(json.dump());
  };
  const Result chosen = shell.done(two_threads + command + tasks + "--json a.json");
  CHECK(std::regex_search(
      chosen.out,
      std::regex("about [0-9]+ s with (1 job of 2 threads, [0-9.e+]+ times as fast as 2 jobs of 1 "
                 "thread|2 jobs of 1 thread, [0-9.e+]+ times as fast as 1 job of 2 threads) by "
                 "measured steps, [0-9.e+-]+ to [0-9.e+-]+ in 3 rounds\\n")));
  const Json json = Json::parse(read(shell.path("a.json")));
  const Json& training = json.at("training");
  CHECK(training.at("jobs").get<int>() * training.at("threads").get<int>() == 2);
  CHECK(undivided(json) ==
        undivided(Json::parse(shell.done(command + tasks + "--threads 1 --json -").out)));
  // With one thread, --threads, or one run there is nothing to choose.
  for (const std::string& plain :
       {"OMP_NUM_THREADS=1 " + command + tasks, two_threads + command + tasks + "--threads 2",
        two_threads + std::regex_replace(command, std::regex("sdpa,dar"), "sdpa") +
            "--task parity:len=6"})
    CHECK(std::regex_search(shell.done(plain + " --plan").out,
                            std::regex("with 1 job of [12] threads?\\n")));
}

TEST_CASE("--plan says what is to do and does nothing") {
  const Shell shell;
  const Result plan =
      shell.done(kSmall + "--task parity:len=6 --seeds 3 --plan --out cells --json a.json");
  CHECK(std::regex_search(
      plan.out,
      std::regex("plan: 6 runs of 4 steps: 1 task, 2 variants, 3 seeds; 0 are done in "
                 "cells\n  a step of parity takes [0-9.e+-]+ ms \\((sdpa|dar)\\) to [0-9.e+-]+ ms "
                 "\\((sdpa|dar)\\)\n  "
                 "about [0-9.]+ (s|min) with 1 job of 1 thread\n")));
  CHECK_FALSE(fs::exists(shell.path("cells")));
  CHECK_FALSE(fs::exists(shell.path("a.json")));
}

TEST_CASE("A sweep chooses the rate of each variant on rows of its own, and reports fresh seeds") {
  const Shell shell;
  // With a rate of 1e-9 nothing is learnt in 60 steps.
  const std::string command =
      std::regex_replace(kSmall, std::regex("--train 4"), "--train 60") +
      "--task memorise:len=8,vocabulary=6 --seeds 2 --sweep lr=1e-9,1e-2 --sweep-seeds 2 ";
  const Json json = Json::parse(shell.done(command + "--json - --out cells").out);
  for (const Json& variant : json.at("variants")) {
    CHECK(variant.at("learning_rate") == 1e-2);
    REQUIRE(variant.at("sweep").size() == 2);
    CHECK(variant.at("sweep").at(0).at("learning_rate") == 1e-9);
    CHECK(variant.at("sweep").at(0).at("loss") > variant.at("sweep").at(1).at("loss"));
  }
  REQUIRE(json.at("records").size() == 2 * 2);
  for (const Json& record : json.at("records")) CHECK(record.at("seed") <= 8);
  CHECK(shell.files("cells").size() == 1 + 2 * 2 * 2 + 2 * 2);
  // Rows of a text that choose a rate are not among the reported ones.
  const std::string text = kSmall + "--text text.txt --len 8 --json - ";
  const auto answers = [&](const std::string& more) {
    return Json::parse(shell.done(text + more).out).at("records").at(0).at("answers").get<int>();
  };
  const int all = answers(""), half = answers("--sweep lr=1e-3,1e-2");
  CHECK(half > all / 4);
  CHECK(half < all * 3 / 4);
}

TEST_CASE("Steps to 90 % are counted on rows of their own, every so many steps") {
  const Shell shell;
  const std::string command = std::regex_replace(kSmall, std::regex("--train 4"), "--train 150") +
                              "--task memorise:len=8,vocabulary=6 --lr 1e-2 --json - ";
  const Json json = Json::parse(shell.done(command + "--eval-every 10").out);
  CHECK(json.at("courses").size() == 2 * 15);
  for (const Json& variant : json.at("variants")) {
    const Json& steps = variant.at("steps_to_90").at(0);
    REQUIRE(steps.is_number());
    bool before = true;
    for (const Json& one : json.at("courses")) {
      if (one.at("variant") != variant.at("name")) continue;
      if (one.at("step") == steps) {
        CHECK(one.at("accuracy") >= 0.9);
        before = false;
      }
      CHECK((one.at("accuracy") < 0.9 || !before));
    }
  }
  // Scores in between do not change the training.
  const Json without = Json::parse(shell.done(command + "--eval-every 0").out);
  CHECK(without.at("courses").empty());
  CHECK(without.at("records") == json.at("records"));
  CHECK(without.at("variants").at(0).at("steps_to_90") == Json::parse("[null]"));
}

TEST_CASE("Differences to the baseline have intervals and a verdict") {
  const Shell shell;
  const Result result = shell.done(kSmall + "--task parity:len=6 --seeds 3 --json a.json");
  const Json json = Json::parse(read(shell.path("a.json")));
  CHECK(json.at("confidence") == 0.95);
  double mean = 0;
  for (const Json& record : json.at("records")) {
    if (record.at("test") != "held out") continue;
    const double sign = record.at("variant") == "dar" ? 1 : -1;
    mean += sign * record.at("loss").get<double>() / 3;
  }
  const Json& d = json.at("differences").at(0);
  CHECK(d.at("of") == "loss");
  CHECK(d.at("variant") == "dar");
  CHECK(d.at("baseline") == "sdpa");
  CHECK(std::abs(d.at("mean").get<double>() - mean) < 1e-9);
  const bool none = d.at("low") <= 0 && d.at("high") >= 0;
  CHECK((d.at("verdict") == "no difference seen") == none);
  CHECK(result.out.find("difference in accuracy to sdpa, mean and 95 % interval") !=
        std::string::npos);
  // One seed tells nothing about chance.
  const Json one = Json::parse(shell.done(kSmall + "--task parity:len=6 --json -").out);
  CHECK(one.at("differences").at(0).at("verdict") == "unknown");
  CHECK(one.at("differences").at(0).at("low").is_null());
}

TEST_CASE("One seed has no spread, several have") {
  const Shell shell;
  const std::string command = kSmall + "--task parity:len=6 ";
  const Result one = shell.done(command), two = shell.done(command + "--seeds 2");
  CHECK(one.out.find("+-") == std::string::npos);
  CHECK(std::regex_search(one.out,
                          std::regex("\nsdpa +\\d+ +\\d+  \\d\\.\\d{4} +0\\.\\d{4} +\\d+\n")));
  CHECK(one.out.find("standard deviations") == std::string::npos);
  CHECK(std::regex_search(two.out,
                          std::regex("\nsdpa +\\d+ +\\d+  \\d\\.\\d{4} \\+- \\d\\.\\d{4} ")));
  CHECK(two.out.find("; means and standard deviations over seeds\n") != std::string::npos);
}

TEST_CASE("Losses have one unit, and scores say of how many answers they are") {
  const Shell shell;
  const Result result =
      shell.done(kSmall +
                 "--task flip-flop:len=12,text --text text.txt --len 16 --seeds 2 "
                 "--json a.json --report pages");
  CHECK(result.out.find("11 positions; loss in nats per answer\n") != std::string::npos);
  CHECK(result.out.find("16 positions; loss in nats per token\n") != std::string::npos);
  CHECK(read(shell.path("pages/training_loss_flip-flop.svg")).find("nats per token") ==
        std::string::npos);
  CHECK(read(shell.path("pages/validation_loss_text.svg")).find("nats per token") !=
        std::string::npos);
  std::map<std::string, std::set<int>> answers;  // the answers in a task's test
  const Json json = Json::parse(read(shell.path("a.json")));
  for (const Json& record : json.at("records"))
    answers[record.at("task").get<std::string>().substr(0, 4) + " " +
            record.at("test").get<std::string>()]
        .insert(record.at("answers").get<int>());
  const auto count = [&](const std::string& test) {
    REQUIRE(answers.at(test).size() == 1);
    return std::to_string(*answers.at(test).begin());
  };
  const std::string same = "; the same ones for all seeds and variants\n";
  CHECK(result.out.find("answers of each score: held out " + count("flip held out") + ", sparse " +
                        count("flip sparse") + ", dense " + count("flip dense") + same) !=
        std::string::npos);
  CHECK(result.out.find("tokens of each score: held out " + count("text held out") + same) !=
        std::string::npos);
  CHECK(read(shell.path("pages/accuracy_flip-flop.svg")).find(count("flip held out")) !=
        std::string::npos);
}

TEST_CASE("A sweep whose best rate lies at an edge says so") {
  const Shell shell;
  const std::string command = std::regex_replace(kSmall, std::regex("--train 4"), "--train 60") +
                              "--task memorise:len=8,vocabulary=6 --sweep lr=";
  const auto out = [&](const std::string& rates) {
    return shell.done(std::regex_replace(command, std::regex("sdpa,dar"), "sdpa") + rates).out;
  };
  CHECK(out("1e-9,1e-2").find("\n    the largest of --sweep; larger ones may do better\n") !=
        std::string::npos);
  CHECK(out("1e-2,1e5").find("\n    the smallest of --sweep; smaller ones may do better\n") !=
        std::string::npos);
  CHECK(out("1e-9,1e-2,1e5").find("of --sweep;") == std::string::npos);
}

TEST_CASE("A text that is not UTF-8 is read as bytes, and the report says which and why") {
  const Shell shell;
  const std::string command = kSmall + "--text bytes.txt --len 16 ",
                    why = "byte 0 of 400 is not UTF-8, it has the value 255)";
  CHECK(shell.done(command).out.find("vocabulary 256, bytes (--text bytes.txt: " + why) !=
        std::string::npos);
  CHECK(shell.done(kSmall + "--text text.txt --then bytes.txt --len 16")
            .out.find("vocabulary 256, bytes (--then bytes.txt: " + why) != std::string::npos);
  CHECK(shell.done(kSmall + "--text text.txt --len 16").out.find("bytes") == std::string::npos);
}

TEST_CASE("A page has the scores, differences, intervals and verdicts of the terminal") {
  const Shell shell;
  const Result result =
      shell.done(std::regex_replace(kSmall, std::regex("sdpa,dar"), "sdpa,intent") +
                 "--task parity:len=6,induction:len=10 --seeds 3 --report pages");
  const std::string page = read(shell.path("pages/report.html"));
  std::size_t differences = 0;
  for (const std::string& line : lines_of(result.out)) {
    std::smatch found;
    if (!std::regex_search(line, found, std::regex("([+-]\\S+ \\[\\S+ \\S+\\])  (.+)$"))) continue;
    ++differences;
    CHECK(page.find("<td>" + found[1].str() + "</td><td>" + found[2].str() + "</td>") !=
          std::string::npos);
  }
  // One of induction and four of parity, at 1, 2, 4 and 8 times the length.
  CHECK(differences == 1 + 4);
  CHECK(page.find("difference in accuracy to sdpa, mean and 95 % interval") != std::string::npos);
  CHECK(read(shell.path("pages/accuracy_by_task.svg")).find("class=\"on-") != std::string::npos);
  // The intent of this setting can be calculated from queries, keys and values: mere rounding errors make no picture.
  CHECK(shell.files("pages").count("measure_intent_distance_parity.svg") == 0);
  CHECK(shell.files("pages").count("measure_mean_gate_parity.svg") == 1);
}

TEST_CASE("Several tasks make one table, one JSON and one page") {
  const Shell shell;
  const Result result =
      shell.done(kSmall +
                 "--task parity:len=6,induction:len=10,text --text text.txt --len 16 --seeds 2 "
                 "--json a.json --csv a.csv --report pages");
  for (const char* lines :
       {"\n +sdpa +dar *\nparity +0\\.\\d+ ", "\ninduction +0\\.\\d+ ", "\ntext +\\d\\.\\d+ "})
    CHECK(std::regex_search(result.out, std::regex(lines)));
  const Json json = Json::parse(read(shell.path("a.json")));
  CHECK(json.at("tasks").size() == 3);
  CHECK(json.at("variants").size() == 3 * 2);
  CHECK(json.at("variants").at(5).at("task") == "text");
  CHECK(lines_of(read(shell.path("a.csv"))).size() == 1 + 3 * 2 * 2);
  for (const char* file : {"reads_sdpa_parity.svg", "reads_dar_text.svg"})
    CHECK(shell.files("pages").count(file) == 1);
  for (const char* file :
       {"accuracy_by_task.svg", "accuracy_parity.svg", "validation_loss_text.svg"})
    CHECK(shell.files("pages").count(file) == 1);
}

TEST_CASE("The table of tasks has each variant once, beside as many others as a line takes") {
  const Shell shell;
  const Result result = shell.done(
      "heed_compare --train 2 --width 16 --heads 2 --depth 1 --batch 2 --threads 1 --json a.json "
      "--task parity:len=6,induction:len=10");
  const std::size_t table = result.out.find("accuracy on what is held out");
  REQUIRE(table != std::string::npos);
  std::map<std::string, std::map<std::string, std::string>> shown;  // by task and variant
  std::vector<std::string> heads;
  int blocks = 0;
  for (const std::string& line : lines_of(result.out.substr(table))) {
    CHECK(line.size() <= 101);
    std::istringstream stream(line);
    std::vector<std::string> words;
    for (std::string word; stream >> word;) words.push_back(word);
    if (line.starts_with("  ")) {
      heads = words;
      ++blocks;
    } else if (line.starts_with("parity ") || line.starts_with("induction ")) {
      REQUIRE(words.size() == 1 + heads.size());
      for (std::size_t n = 0; n < heads.size(); ++n)
        CHECK(shown[words[0]].emplace(heads[n], words[1 + n]).second);
    }
  }
  CHECK(blocks > 1);
  const Json json = Json::parse(read(shell.path("a.json")));
  REQUIRE(json.at("variants").size() == shown.at("parity").size() + shown.at("induction").size());
  for (const Json& record : json.at("records")) {
    if (record.at("test") != "held out") continue;
    const std::string task = record.at("task").get<std::string>();
    const std::string& text = shown.at(task.substr(0, task.find(':'))).at(record.at("variant"));
    CHECK(std::stod(text) == Approx(record.at("accuracy").get<double>()).margin(5e-4));
  }
}

TEST_CASE("--lengths tests on longer sequences, where a task has such") {
  const Shell shell;
  const Json json = Json::parse(
      shell.done(kSmall + "--task induction:len=10,compress:len=4 --lengths 2,4 --json -").out);
  CHECK(tests_in(json) == Names{"held out", "2x", "4x"});
  CHECK(json.at("records").size() == 2 * (3 + 1));
  CHECK(json.at("tasks").at(0).at("positions") == 41);
  CHECK(json.at("tasks").at(1).at("positions") == 7);
}

TEST_CASE("Noise on queries and keys is a test of its own, which changes no other") {
  const Shell shell;
  const std::string command = std::regex_replace(kSmall, std::regex("--train 4"), "--train 150") +
                              "--task memorise:len=8,vocabulary=10 --lr 1e-2 --json - ";
  const Json with = Json::parse(shell.done(command + "--noise 0.01,30").out);
  CHECK(tests_in(with) == Names{"held out", "noise 0.01", "noise 30"});
  const auto records = [](const Json& json, const std::string& test) {
    std::vector<Json> found;
    for (const Json& record : json.at("records"))
      if (record.at("test") == test) found.push_back(record);
    return found;
  };
  const Json without = Json::parse(shell.done(command).out);
  CHECK(records(with, "held out") == records(without, "held out"));
  for (const std::size_t n : {0u, 1u})  // the measured data have none
    CHECK(with.at("variants").at(n).at("measures") == without.at("variants").at(n).at("measures"));
  CHECK(records(with, "noise 0.01")[0].at("loss") != records(with, "held out")[0].at("loss"));
  CHECK(records(with, "noise 0.01")[0].at("loss").get<double>() ==
        Approx(records(with, "held out")[0].at("loss").get<double>()).margin(0.1));
  CHECK(records(with, "noise 30")[0].at("loss") > records(with, "noise 0.01")[0].at("loss"));
}

TEST_CASE("Measures stand at answers and elsewhere, of a task and not of a text") {
  const Shell shell;
  const std::string small = std::regex_replace(kSmall, std::regex("sdpa,dar"), "dar,differential");
  const Json task = Json::parse(shell.done(small + "--task induction:len=10 --json -").out);
  for (const Json& variant : task.at("variants")) {
    const char* name = variant.at("name") == "dar" ? "mean_resonance" : "lambda";
    for (const char* where : {"measures", "measures_at_answers", "measures_elsewhere"})
      CHECK(variant.at(where).contains(name));
  }
  for (const Json& variant : task.at("variants"))
    for (const char* where : {"measures", "measures_at_answers", "measures_elsewhere"}) {
      CHECK(variant.at(where).at("row_entropy") > 0);
      CHECK(variant.at(where).at("row_entropy") <= std::log(11.0));  // a row of all tokens
      CHECK(variant.at(where).at("top_weight") > 0.05);
    }
  // Tokens that ask for answers come behind all others, where rows are longest.
  CHECK(task.at("variants").at(0).at("measures_at_answers").at("row_entropy") >
        task.at("variants").at(0).at("measures_elsewhere").at("row_entropy"));
  const Json& dar = task.at("variants").at(0);
  CHECK(dar.at("measures_at_answers").at("mean_resonance") !=
        dar.at("measures_elsewhere").at("mean_resonance"));
  const Json text =
      Json::parse(shell.done(small + "--text text.txt --len 16 --json -").out).at("variants");
  CHECK(text.at(0).at("measures_at_answers").empty());
  CHECK(text.at(0).at("measures").contains("mean_resonance"));
}

TEST_CASE("What rows give to an answer and to noise is measured where tokens hold the answer") {
  const Shell shell;
  // The rows of small first weights are almost uniform: a row of an answer has 8 tokens, of which 1 holds it and 4 are hay.
  const auto at_answers = [&](const std::string& task) {
    const std::string command = kSmall + "--init gpt2 --lr 1e-9 --json - --task " + task;
    return Json::parse(shell.done(command).out).at("variants").at(0).at("measures_at_answers");
  };
  const Json needles = at_answers("needles:len=8,needles=1,asked=1");
  for (const char* of : {"", "_of_best_head"}) {
    CHECK(needles.at("answer_share" + std::string(of)).get<double>() ==
          Approx(1.0 / 8).margin(5e-3));
    CHECK(needles.at("noise_share" + std::string(of)).get<double>() ==
          Approx(4.0 / 8).margin(5e-3));
  }
  CHECK(needles.at("answer_share_of_best_head") >= needles.at("answer_share"));
  const Json induction = at_answers("induction:len=10");
  CHECK(induction.at("answer_share") > 0);
  CHECK_FALSE(induction.contains("noise_share"));
  CHECK_FALSE(at_answers("memorise:len=4,vocabulary=8").contains("answer_share"));
}

TEST_CASE("Records say what attention reported at answers of each difficulty") {
  const Shell shell;
  const Json json =
      Json::parse(shell
                      .done(std::regex_replace(kSmall, std::regex("sdpa,dar"), "sdpa,dialectical") +
                            "--task induction:len=10 --json -")
                      .out);
  for (const Json& record : json.at("records"))
    for (const Json& part : record.at("by_difficulty")) {
      const Json& reports = part.at("reports");
      CHECK(reports.contains("tension") == (record.at("variant") == "dialectical"));
      if (reports.contains("steps_used")) CHECK(reports.at("steps_used") >= 1);
    }
}

TEST_CASE("Alphabets follow each other: what is learnt with one is scored on all after each") {
  const Shell shell;
  const std::string command =
      "heed_compare --train 120 --seed 7 --width 16 --heads 2 --depth 1 --batch 8 --threads 1 --lr "
      "1e-2 --task memorise:len=8,vocabulary=6 --alphabets 3 --eval-every 0 --variants "
      "prototype-art,prototype-art-frozen,prototype-art-off ";
  const Result result = shell.done(command + "--json a.json --report pages");
  const Json json = Json::parse(read(shell.path("a.json")));
  CHECK(json.at("tasks").at(0).at("vocabulary") == 18);
  CHECK(json.at("stages").size() == 3 * 3 * 3);
  std::map<std::string, std::map<std::pair<int, int>, double>> loss;
  for (const Json& one : json.at("stages"))
    loss[one.at("variant")][{one.at("after"), one.at("on")}] = one.at("loss");
  for (const auto& [name, of] : loss) {
    INFO(name);
    for (const int stage : {1, 2, 3}) CHECK(of.at({stage, stage}) < 1);
    CHECK(of.at({1, 2}) > of.at({1, 1}) + 2);  // tokens that it has not seen
    CHECK(of.at({1, 3}) > of.at({1, 1}) + 2);
  }
  // The memories differ as they should: frozen is the whole one up to the end of the first stage, and none stays empty.
  const auto &learning = loss.at("prototype-art"), &frozen = loss.at("prototype-art-frozen");
  CHECK(frozen.at({1, 1}) == learning.at({1, 1}));
  CHECK(frozen.at({2, 1}) != learning.at({2, 1}));
  CHECK(json.at("variants").at(0).at("measures").at("prototypes") > 0);
  CHECK(json.at("variants").at(2).at("measures").at("prototypes") == 0);
  for (const Json& variant : json.at("variants"))
    CHECK(variant.at("backward_transfer_accuracy").size() == 1);
  CHECK(result.out.find("    after stage 3, accuracy on each: ") != std::string::npos);
  CHECK(result.out.find("    backward transfer ") != std::string::npos);
  CHECK(shell.files("pages").count("forgetting.svg") == 1);
  // Without stages a frozen memory makes no sense.
  (void)shell.done(kSmall + "--text text.txt --then text.txt --then text.txt --len 8");
  shell.refuses("heed_compare --train 1 --alphabets 2",
                "--alphabets was given and --task is text, but a text has one alphabet");
}

TEST_CASE("--quick needs no number of steps, and other options say otherwise") {
  const Shell shell;
  const Result plan = shell.done("heed_compare --task parity:len=6 --quick --plan");
  CHECK(plan.out.find("width 64, heads 2, blocks 2, batch 16, steps 200, seeds 2") !=
        std::string::npos);
  const Result other = shell.done(
      "heed_compare --task parity:len=6 --quick --plan --train 9 --seeds 3 --width 16 --depth 1 "
      "--variants sdpa");
  CHECK(other.out.find("width 16, heads 2, blocks 1, batch 16, steps 9, seeds 3") !=
        std::string::npos);
}

TEST_CASE("Options of experiments are refused in one sentence") {
  const Shell shell;
  shell.refuses("heed_compare --train 1 --sweep 1e-3,1e-2",
                "--sweep is \"1e-3,1e-2\", it must be lr= and two or more learning rates");
  shell.refuses("heed_compare --train 1 --sweep lr=1e-3", "--sweep is \"lr=1e-3\", it must be");
  shell.refuses("heed_compare --train 1 --sweep lr=1e-3,1e-3", "which has a number twice");
  shell.refuses("heed_compare --train 1 --sweep lr=1e-3,1e-2 --lr 1e-3",
                "--lr and --sweep were given; it must be one of both");
  shell.refuses("heed_compare --train 1 --sweep-seeds 2", "--sweep-seeds needs --sweep");
  shell.refuses("heed_compare --train 1 --lengths 1",
                "--lengths is \"1\", it must be whole numbers from 2 to 64");
  shell.refuses("heed_compare --train 1 --noise 0.1,-1", "--noise is \"0.1,-1\", it must be");
  shell.refuses("heed_compare --train 1 --jobs 0", "--jobs: \"0\" is not a whole number from 1");
  shell.refuses("heed_compare --train 1 --out ''", "--out: \"\" names no folder");
  shell.refuses("heed_compare --train 1 --task parity,nope", "--task is nope, it must be one of");
  shell.refuses(
      "heed_compare --train 1 --text text.txt --len 16 --task text,parity --then text.txt",
      "--task is text,parity and --then names a text; it must be one of both");
}
