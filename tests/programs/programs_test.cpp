// SPDX-License-Identifier: Apache-2.0

// The common behaviour of heed's programs: exit codes, standard streams, and the fields of bench/FORMATS.md.

#include "catch.hpp"
#include "programs/shell.hpp"
#include "programs/tiny_vocabulary.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <regex>

namespace {

using namespace heed_test;
using Json = nlohmann::json;

const std::string kCompare =
    "heed_compare --quick --shape 1,2,32,16 --threads 1 --variants sdpa,dar,ode,dialectical ";
const std::string kTrain =
    "heed_compare --train 2 --seeds 2 --seed 7 --width 16 --heads 2 --depth 1 --len 16 --batch 2 "
    "--threads 1 --variants sdpa,dar --text text.txt ";
const std::string kLm =
    "heed_lm train --text text.txt --width 16 --heads 2 --depth 1 --len 16 --batch 2 --steps 4 "
    "--threads 1 ";

const std::string kTask =
    "heed_compare --train 2 --seeds 2 --seed 7 --width 16 --heads 2 --depth 1 --batch 2 "
    "--threads 1 --variants sdpa,dar --task flip-flop:len=16 ";

// The first column of the table below a heading of bench/FORMATS.md.
[[nodiscard]] Names documented(const std::string& heading) {
  Names names;
  bool inside = false;
  for (const std::string& line : lines_of(read(HEED_FORMATS))) {
    if (line.rfind("## ", 0) == 0) inside = line == "## " + heading;
    if (inside && line.rfind("| `", 0) == 0) names.insert(line.substr(3, line.find('`', 3) - 3));
  }
  INFO(heading);
  REQUIRE_FALSE(names.empty());
  return names;
}

// Adds the paths of a JSON value in the tables' notation; a star in the tables matches any name. An empty list has no path.
void add_paths(const Json& json, const std::string& path, const Names& known, Names& paths) {
  if (json.is_object())
    for (const auto& [key, value] : json.items()) {
      const std::string begin = path.empty() ? "" : path + ".";
      add_paths(value, begin + (known.count(begin + "*") > 0 ? "*" : key), known, paths);
    }
  else if (json.is_array())
    for (const Json& value : json) add_paths(value, path + "[]", known, paths);
  else
    paths.insert(json.is_null() && known.count(path + "[]") > 0 ? path + "[]" : path);
}
[[nodiscard]] Names paths_of(const std::string& text, const Names& known) {
  Names paths;
  add_paths(Json::parse(text), "", known, paths);
  return paths;
}

// Each name with the pattern that it matches; with itself if there is none.
[[nodiscard]] Names patterns_of(const Names& names, const Names& patterns) {
  Names found;
  for (const std::string& name : names) {
    std::string match = name;
    for (const std::string& pattern : patterns) {
      const std::size_t star = pattern.find('*');
      if (star == std::string::npos) continue;
      if (name.rfind(pattern.substr(0, star), 0) == 0 && name.ends_with(pattern.substr(star + 1)))
        match = pattern;
    }
    found.insert(match);
  }
  return found;
}

// A documented line as a regular expression: words in capitals stand for anything.
[[nodiscard]] std::regex line_pattern(const std::string& line) {
  const std::string plain = std::regex_replace(line, std::regex(R"([.()\[\]+*?])"), R"(\$&)");
  return std::regex(std::regex_replace(plain, std::regex(R"(\b[A-Z]{3,}\b)"), ".+"));
}
[[nodiscard]] Names lines_matched(const std::string& text, const Names& documented_lines) {
  Names found;
  for (const std::string& line : lines_of(text)) {
    std::string match = line;
    std::size_t fixed = 0;  // the pattern with the most fixed characters
    for (const std::string& pattern : documented_lines)
      if (std::regex_match(line, line_pattern(pattern)) &&
          (match == line || pattern.size() > fixed)) {
        match = pattern;
        fixed = pattern.size();
      }
    found.insert(match);
  }
  return found;
}

[[nodiscard]] Names csv_columns(const std::string& text) {
  Names names;
  std::istringstream head(lines_of(text).at(0));
  for (std::string name; std::getline(head, name, ',');) names.insert(name);
  return names;
}

}  // namespace

TEST_CASE("heed_compare writes the documented fields and files, and no others") {
  const Shell shell;
  (void)shell.done(kCompare + "--json a.json --csv a.csv --report pages");
  const Names fields = documented("heed_compare --json");
  const std::string json = read(shell.path("a.json"));
  CHECK(paths_of(json, fields) == fields);
  CHECK(Json::parse(json).at("format") == 1);
  CHECK(Json::parse(json).at("records").size() == 4 * 2 * 2);
  CHECK(csv_columns(read(shell.path("a.csv"))) == documented("heed_compare --csv"));
  const Json records = Json::parse(json).at("records");
  for (const Json& record : records) {
    CHECK(record.at("ratio_low") <= record.at("ratio_to_baseline"));
    CHECK(record.at("ratio_to_baseline") <= record.at("ratio_high"));
    if (record.at("variant") == "sdpa") CHECK(record.at("ratio_high") == 1);
  }
  const Names files = documented("heed_compare --report");
  CHECK(patterns_of(shell.files("pages"), files) == files);
}

TEST_CASE("heed_compare compares variants of the zoo, timed and trained, as it does its own") {
  if (!HEED_HAS_ZOO) return;
  const Shell shell;
  const std::string zoo =
      "heed_compare --quick --shape 1,2,32,16 --threads 1 --seed 2 --variants "
      "zoo:sink,sdpa,zoo:cosine,zoo:alibi,zoo:prefix-lm ";
  const Result timed = shell.done(zoo + "--json a.json --report pages");
  CHECK(timed.out.find("\nzoo:cosine") != std::string::npos);
  const Json json = Json::parse(read(shell.path("a.json")));
  Names names;
  for (const Json& record : json.at("records")) {
    names.insert(record.at("variant").get<std::string>());
    CHECK(record.at("ms") > 0);
    CHECK(record.at("gradient_error") < 1e-4);
  }
  CHECK(names == Names{"sdpa", "zoo:alibi", "zoo:cosine", "zoo:prefix-lm", "zoo:sink"});
  CHECK(json.at("records").size() == 5 * 2 * 2);
  CHECK(json.at("records").at(0).at("variant") == "sdpa");  // the library's list comes first
  CHECK(read(shell.path("pages/report.html")).find("zoo:sink") != std::string::npos);

  const Result trained = shell.done(
      "heed_compare --train 2 --width 16 --heads 2 --depth 1 --len 16 --batch 2 --threads 1 "
      "--text text.txt --variants sdpa,zoo:cosine,zoo:sink --json b.json");
  const Json runs = Json::parse(read(shell.path("b.json")));
  REQUIRE(runs.at("variants").size() == 3);
  CHECK(runs.at("variants").at(1).at("name") == "zoo:cosine");
  CHECK(runs.at("variants").at(1).at("measures").contains("temperature"));
  CHECK(runs.at("variants").at(2).at("measures").contains("height"));
  shell.refuses("heed_compare --variants zoo:none", "\"zoo:none\", which is not one of sdpa, dar");
  for (const std::string option : {"--causal", "--train"})
    shell.refuses(
        "heed_compare --variants zoo:prefix-lm " + option + (option == "--train" ? " 2" : ""),
        "--variants names \"zoo:prefix-lm\", which reads later keys by design; " + option +
            " hides them");
  shell.refuses("heed_lm train --text text.txt --steps 1 --variant zoo:natten-2d",
                "--variant is zoo:natten-2d, which reads later keys by design; a language model "
                "must not");
}

TEST_CASE(
    "heed_compare says how far ratios moved, and of a machine that moved them that it is busy") {
  const Shell shell;
  const Result result = shell.done(kCompare + "--dtype float --json a.json --report pages");
  const std::string page = read(shell.path("pages/report.html"));
  double most = 0;
  const Json records = Json::parse(read(shell.path("a.json"))).at("records");
  for (const Json& record : records) {
    const double low = record.at("ratio_low"), high = record.at("ratio_high");
    most = std::max(most, (high - low) / record.at("ratio_to_baseline").get<double>());
    if (high >= 10) continue;  // with fewer digits
    char shown[64];
    std::snprintf(shown, sizeof shown, "%.2f-%.2f", low, high);
    CHECK(result.out.find(std::string(" ") + shown + " ") != std::string::npos);
    CHECK(page.find(std::string("<td>") + shown + "</td>") != std::string::npos);
  }
  std::smatch said;
  REQUIRE(std::regex_search(
      result.out, said,
      std::regex("\nratios     (move by up to (\\d+) % between the quartiles of rounds \\([a-z]+, "
                 "(forward|backward), float\\))(; the machine is busy.*)?\n")));
  CHECK(std::abs(std::stod(said[2]) - 100 * most) <= 0.51);
  CHECK(said[4].matched == (most > 0.1));
  CHECK(page.find(said[1]) != std::string::npos);
}

TEST_CASE("heed_compare --dtype bf16 compares on tensors of bfloat16") {
  const Shell shell;
  (void)shell.done(kCompare + "--dtype bf16 --json a.json");
  const Json json = Json::parse(read(shell.path("a.json")));
  CHECK(json.at("machine").at("peak_gflops").size() == 1);
  REQUIRE(json.at("records").size() == 4 * 2);
  for (const Json& record : json.at("records")) {
    CHECK(record.at("dtype") == "bf16");
    // Rounding to 8 bits shows in gradients; in float their errors stay below 1e-4.
    CHECK(record.at("gradient_error") > 2e-4);
    CHECK(record.at("gradient_error") < 0.1);
  }
}

// The names that begin with `begin`, or all others.
[[nodiscard]] Names beginning(const Names& names, const std::string& begin, bool with) {
  Names chosen;
  for (const std::string& name : names)
    if ((name.rfind(begin, 0) == 0) == with) chosen.insert(name);
  return chosen;
}

// The names that begin with none of `begins`.
[[nodiscard]] Names without(Names names, const std::vector<std::string>& begins) {
  for (const std::string& begin : begins) names = beginning(names, begin, false);
  return names;
}

TEST_CASE(
    "heed_compare --train writes the documented fields and files, with and without a second text") {
  const Shell shell;
  // Difficulties, answers and accuracies of a page belong to tasks.
  const Names fields = without(documented("heed_compare --train --json"),
                               {"records[].by_diff", "courses[]", "variants[].sweep[]",
                                "variants[].measures_at_answers", "variants[].measures_elsewhere"}),
              files = without(documented("heed_compare --train --report"), {"accuracy"});
  (void)shell.done(kTrain + "--then text.txt --json a.json --csv a.csv --report pages");
  CHECK(paths_of(read(shell.path("a.json")), fields) == fields);
  CHECK(patterns_of(shell.files("pages"), files) == files);
  const std::string csv = read(shell.path("a.csv"));
  CHECK(csv_columns(csv) == documented("heed_compare --train --csv"));
  REQUIRE(lines_of(csv).size() == 1 + 2 * 2);
  CHECK(std::regex_search(lines_of(csv)[1], std::regex("^sdpa,\\d+,\\d+,7,")));
  CHECK(std::regex_search(lines_of(csv)[2], std::regex("^sdpa,\\d+,\\d+,8,")));

  const Result plain = shell.done(kTrain + "--json -");
  CHECK(paths_of(plain.out, fields) == without(fields, {"stages[]"}));
  const Json report = Json::parse(plain.out), first = report.at("variants").at(0);
  CHECK(first.at("losses").size() == 2);
  CHECK(first.at("second_losses").is_null());
  CHECK(first.at("forgotten_losses").is_null());
  REQUIRE(report.at("records").size() == 2 * 2);
  for (const Json& record : report.at("records")) {
    CHECK(record.at("task") == "text");
    CHECK(record.at("test") == "held out");
  }
}

TEST_CASE("heed_compare --train --task writes accuracy and loss of each seed and test") {
  const Shell shell;
  const Names fields =
                  without(documented("heed_compare --train --json"),
                          {"variants[].sweep[]", "stages[]", "records[].by_difficulty[].reports"}),
              files = without(documented("heed_compare --train --report"),
                              {"forgetting", "accuracy_by_task"});
  const Result result = shell.done(kTask + "--json a.json --csv a.csv --report pages");
  CHECK(result.out.find("task flip-flop:len=16,p_ignore=0.8, vocabulary 5, 15 positions; loss in "
                        "nats per answer\n") != std::string::npos);
  CHECK(std::regex_search(result.out, std::regex("\n    test sparse +accuracy 0\\.\\d+ ")));
  const std::string json = read(shell.path("a.json"));
  CHECK(paths_of(json, fields) == fields);
  CHECK(patterns_of(shell.files("pages"), files) == files);
  CHECK(csv_columns(read(shell.path("a.csv"))) == documented("heed_compare --train --csv"));
  const Json report = Json::parse(json);
  CHECK(report.at("tasks").at(0).at("positions") == 15);
  const Json& records = report.at("records");
  REQUIRE(records.size() == 2 * 2 * 3);  // variants, seeds, tests
  for (std::size_t i = 0; i < records.size(); ++i) {
    const Json& record = records[i];
    const char* tests[] = {"held out", "sparse", "dense"};
    CHECK(record.at("variant") == (i < 6 ? "sdpa" : "dar"));
    CHECK(record.at("seed") == (i % 6 < 3 ? 7 : 8));
    CHECK(record.at("task") == "flip-flop:len=16,p_ignore=0.8");
    CHECK(record.at("test") == tests[i % 3]);
    double right = 0, answers = 0;
    for (const Json& part : record.at("by_difficulty")) {
      answers += part.at("answers").get<double>();
      right += part.at("answers").get<double>() * part.at("accuracy").get<double>();
    }
    CHECK(answers == record.at("answers").get<double>());
    CHECK(answers >= 256);  // each of 256 sequences has a read at its end
    CHECK(std::abs(right / answers - record.at("accuracy").get<double>()) < 1e-9);
    const Json& variant = report.at("variants").at(i < 6 ? 0 : 1);
    if (i % 3 == 0) CHECK(record.at("loss") == variant.at("losses").at(i % 6 / 3));
  }
  // The same held-out answers for all seeds and variants.
  CHECK(records[0].at("answers") == records[9].at("answers"));
  // Lengths of tests count: 8 times as long, and the token that asks.
  const Result longer = shell.done(
      std::regex_replace(kTask, std::regex("flip-flop:len=16"), "parity:len=4") + "--json -");
  CHECK(Json::parse(longer.out).at("tasks").at(0).at("positions") == 33);
}

TEST_CASE("heed_compare --task help lists the tasks, and every name of it can be trained on") {
  const Shell shell;
  const Result help = shell.done("heed_compare --task help");
  Names names;
  for (const std::string& line : lines_of(help.out))
    if (std::regex_match(line, std::regex("[a-z-]+"))) names.insert(line);
  CHECK(names.size() == 16);
  for (const std::string& name : names) {
    const Result result = shell.done(
        "heed_compare --train 1 --width 16 --heads 2 --depth 2 --batch 2 --threads 1 "
        "--variants sdpa,prototype-art --json - --task " +
        name);
    const Json records = Json::parse(result.out).at("records");
    INFO(name);
    CHECK(records.at(0).at("task").get<std::string>().rfind(name + ":", 0) == 0);
    CHECK(records.at(0).at("accuracy").is_number());
  }
}

TEST_CASE(
    "heed_compare --train says which losses are not finite, in words, as null, and by its exit "
    "code") {
  const Shell shell;
  const Names fields = documented("heed_compare --train --json"),
              files = documented("heed_compare --train --report");
  for (const std::string& steps : {std::string("2"), std::string("30")}) {
    // After two steps the last loss is not finite; with thirty, ten steps in a row are not.
    const std::string command =
        std::regex_replace(kTrain, std::regex("--train 2"), "--train " + steps);
    const Result result =
        shell.run(std::regex_replace(command, std::regex(",dar"), ",intent") +
                  "--lr 1e20 --then text.txt --json a.json --csv a.csv --report pages");
    INFO(steps << "\n" << result.out << result.err);
    CHECK(result.code == 1);
    CHECK(result.err.find("heed_compare: the loss is not finite with sdpa, intent\n") !=
          std::string::npos);
    CHECK(result.out.find("not finite") != std::string::npos);
    CHECK((result.out + result.err).find("nan") == std::string::npos);
    const std::string json = read(shell.path("a.json"));
    const Json report = Json::parse(json);
    for (const Json& variant : report.at("variants")) {
      CHECK(variant.at("losses") == Json::parse("[null, null]"));
      CHECK(variant.at("forgotten_losses") == Json::parse("[null, null]"));
      CHECK(variant.at("measures").empty());
      if (steps == "30") CHECK(variant.at("skipped_steps") == 20);
    }
    CHECK(std::regex_search(lines_of(read(shell.path("a.csv")))[1],
                            std::regex("^sdpa,\\d+,\\d+,7,,,,")));
    CHECK(shell.files("pages").count("report.html") == 1);
    CHECK(read(shell.path("pages/report.html")).find("nan") == std::string::npos);
  }
}

TEST_CASE("heed_lm prints the documented lines, and its page has the documented files") {
  const Shell shell;
  const Result trained =
      shell.done(kLm + "--variant ode --out model --eval-every 2 --report pages");
  CHECK(trained.err.empty());  // progress is for terminals
  Names lines = documented("heed_lm train");
  lines.erase("stopped after step STEP of STEPS; DETAIL");
  CHECK(lines_matched(trained.out, lines) == lines);
  CHECK(lines_of(trained.out).size() == 3);
  const Names files = documented("heed_lm train --report");
  CHECK(patterns_of(shell.files("pages"), files) == files);

  lines = documented("heed_lm eval");
  const Result asked = shell.done("heed_lm eval model --text text.txt --held-out 0.2 --threads 1");
  CHECK(lines_matched(asked.out, lines) == lines);
  Names keys;
  for (const std::string& line : lines_of(shell.done("heed_lm info model").out))
    if (const std::size_t colon = line.find(": "); colon != std::string::npos)
      keys.insert(line.substr(0, colon));
  CHECK(keys == documented("Checkpoints of heed_lm"));
  const std::string info = shell.done("heed_lm info model").out;
  for (const char* field : {"prototypes", "ponder", "causal"})
    CHECK(info.find(field) == std::string::npos);
  CHECK(info.find("\"variant\":\"ode\"") != std::string::npos);
}

TEST_CASE("heed_lm inspect says which tokens are read, in lines, fields and files as documented") {
  const Shell shell;
  (void)shell.done(std::regex_replace(kLm, std::regex("--depth 1"), "--depth 2") +
                   "--variant differential --out model");
  const std::string inspect = "heed_lm inspect model --threads 1 --prompt 'line 4\nli' ";
  Names lines = documented("heed_lm inspect");
  lines.erase("special tokens: LIST");
  const Names fields = documented("heed_lm inspect --json"),
              files = documented("heed_lm inspect --report");
  const Result all = shell.done(inspect + "--json a.json --report pages");
  CHECK(lines_matched(all.out, lines) == lines);
  CHECK(lines_of(all.out).at(0) == "tokens 9, layers 2; differential");
  CHECK(lines_of(all.out).size() == 1 + 2 * 2 * 2);
  const std::string text = read(shell.path("a.json"));
  CHECK(paths_of(text, fields) == fields);
  CHECK(patterns_of(shell.files("pages"), files) == files);
  CHECK(shell.files("pages").size() == 3 + 2 * 2);
  const Json json = Json::parse(text);
  CHECK(json.at("tokens").size() == 9);
  REQUIRE(json.at("heads").size() == 4);
  for (const Json& head : json.at("heads")) {
    REQUIRE(head.at("rows").size() == 9);
    // The first token sees itself alone, and no token sees a later one.
    CHECK(head.at("rows").at(0).at("links").size() == 1);
    CHECK(head.at("rows").at(0).at("entropy") < 1e-6);
    for (std::size_t i = 0; i < 9; ++i) {
      const Json& row = head.at("rows").at(i);
      CHECK(row.at("links").size() == std::min<std::size_t>(3, i + 1));
      double before = 2;
      for (const Json& link : row.at("links")) {
        CHECK(link.at("token").get<std::size_t>() <= i);
        const double size = std::abs(link.at("weight").get<double>());
        CHECK(size <= before);
        before = size;
      }
    }
  }
  // A single head: a line for each token, which names as many others as were requested.
  const Result one = shell.done(inspect + "--layer 1 --head 0 --top 2 --json -");
  CHECK(lines_of(one.err).size() == 2 + 9);
  CHECK(std::regex_match(lines_of(one.err).at(10),
                         std::regex(R"(  8 'i'  reads \d '.+' -?\d\.\d{3}, \d '.+' -?\d\.\d{3})")));
  const Json chosen = Json::parse(one.out);
  REQUIRE(chosen.at("heads").size() == 1);
  CHECK(chosen.at("heads").at(0).at("layer") == 1);
  CHECK(chosen.at("heads").at(0).at("entropy") == json.at("heads").at(2).at("entropy"));
  const Result twice =
      shell.done("heed_lm inspect model --threads 2 --prompt 'line 4\nli' --json -");
  CHECK(Json::parse(twice.out) == json);

  shell.refuses(inspect + "--layer 2", "--layer is 2, the model has layers 0 to 1");
  shell.refuses(inspect + "--head 2", "--head is 2, the model has heads 0 to 1");
  shell.refuses(inspect + "--json model", "--json model: would replace the file of the checkpoint");
  shell.refuses("heed_lm inspect model --prompt 'lineline lineline'",
                "--prompt has 17 tokens, the model reads 16 at most");
  shell.refuses("heed_lm inspect model --prompt ''", "it must hold at least one character");
  shell.refuses("heed_lm inspect model", "--prompt is required");
}

TEST_CASE("heed_lm takes <|endoftext|> as the token, or as text where it is told so") {
  const Shell shell;
  const std::string mark = "<|endoftext|>", tokens = " --vocab vocab.json --merges merges.txt";
  std::ofstream(shell.path("vocab.json")) << vocab_json(tiny_tokens());
  std::ofstream(shell.path("merges.txt")) << joined(kMerges);
  for (int i = 0; i < 40; ++i) {
    std::ofstream(shell.path("docs.txt"), std::ios::app) << "hello world" << mark;
    std::ofstream(shell.path("ends.txt"), std::ios::app) << mark << mark;
  }
  const std::string train =
      std::regex_replace(kLm, std::regex("text.txt"), "docs.txt") + tokens + " --out model ";
  // 6 tokens of a document; its mark as text has 13 bytes.
  CHECK(shell.done(train).out.find("; 216 tokens for training, 24 held out\n") !=
        std::string::npos);
  const std::string asked = "heed_lm eval model --threads 1 --text docs.txt";
  CHECK(lines_of(shell.done(asked).out).size() == 2);
  CHECK(shell.done(asked + " --end-of-text text").out.find("not the data") != std::string::npos);
  CHECK(shell.done(train + "--overwrite --end-of-text text")
            .out.find("; 648 tokens for training, 72 held") != std::string::npos);

  (void)shell.done(
      "heed_lm train --text ends.txt --width 16 --heads 2 --depth 1 --len 16 --lr 0.1 "
      "--steps 20 --warmup 0 --threads 1 --out ends" +
      tokens);
  const std::string say = "heed_lm generate ends --threads 1 --temperature 0 --tokens 2 ";
  for (const std::string start : {"", "--prompt '' ", "--prompt '<|endoftext|>' "}) {
    CHECK(shell.done(say + start).out == mark + mark + "\n");
    CHECK(shell.done(say + start + "--stop-at-end").out == "\n");
  }
  CHECK(shell.done(say + "--prompt hello --stop-at-end").out == "hello\n");
  const std::string inspect = "heed_lm inspect ends --threads 1 --prompt '<|endoftext|>' ";
  CHECK(lines_of(shell.done(inspect).out).at(0) == "tokens 1, layers 1; sdpa");
  CHECK(lines_of(shell.done(inspect).out).at(1) == "special tokens: 264 '<|endoftext|>'");
  CHECK(lines_of(shell.done(inspect + "--end-of-text text").out).at(0) ==
        "tokens 13, layers 1; sdpa");

  (void)shell.done(kLm + "--out characters");
  const std::string none = ", the tokenizer characters has no token for the end of a text";
  shell.refuses("heed_lm generate characters --stop-at-end", "--stop-at-end was given" + none);
  shell.refuses(kLm + "--end-of-text token", "--end-of-text is token" + none);
  shell.refuses(kLm + "--end-of-text no", "--end-of-text is 'no', it must be token or text");
  shell.refuses("heed_lm generate ends --end-of-text text", "without --prompt there is no text");
  shell.refuses("heed_lm train --task parens --end-of-text text", "--task parens has no text");
}

TEST_CASE(
    "Every program has a help with its exit codes, a version, and says when they cannot be "
    "printed") {
  const Shell shell;
  for (const std::string program :
       {"heed_compare", "heed_lm", "heed_lm train", "heed_lm eval", "heed_lm generate",
        "heed_lm inspect", "heed_lm info", "heed_replay", "heed_bench"}) {
    if (program == "heed_bench" && !HEED_HAS_BENCH) continue;
    const Result help = shell.done(program + " --help");
    INFO(program << help.err);
    CHECK(help.err.empty());
    for (const char* part : {"Usage: ", "Exit codes:", "Standard output has"})
      CHECK(help.out.find(part) != std::string::npos);
    const Result full = shell.run(program + " --help >/dev/full");
    CHECK(full.code == 1);
    CHECK(full.err.find(": standard output cannot be written\n") != std::string::npos);
    CHECK(shell.run(program + " --help >&-").code == 1);
  }
  for (const std::string program : {"heed_compare", "heed_lm", "heed_replay", "heed_bench"}) {
    if (program == "heed_bench" && !HEED_HAS_BENCH) continue;
    CHECK(std::regex_match(shell.done(program + " --version").out,
                           std::regex(program + R"( \d+\.\d+\.\d+\n)")));
    CHECK(shell.run(program + " --version >/dev/full").code == 1);
  }
}

TEST_CASE("heed_compare refuses what it cannot use in one sentence with both values") {
  const Shell shell;
  shell.refuses("heed_compare --shape 1,2,3", "\"1,2,3\"");
  shell.refuses("heed_compare --threads 1025", "1024");
  shell.refuses("heed_compare --train nan", "--train: \"nan\" is not a whole number from 1");
  shell.refuses("heed_compare --train 1 --seeds 0",
                "--seeds: \"0\" is not a whole number from 1 to 1000");
  shell.refuses("heed_compare --train 1 --width 17 --heads 2", "17");
  shell.refuses("heed_compare --text none.txt", "--text none.txt");
  shell.refuses("heed_compare --train 1 --then none.txt", "--then none.txt");
  shell.refuses("heed_compare --train 1 --then empty.txt", "--then empty.txt: the file is empty");
  shell.refuses("heed_compare --train 1 --text empty.txt", "--text empty.txt: the file is empty");
  shell.refuses("heed_compare --json none/x", "--json none/x");
  shell.refuses("heed_compare --csv /dev/full", "--csv /dev/full");
  shell.refuses("heed_compare --json ''", "--json: \"\" names no file");
  shell.refuses("heed_compare --report ''", "--report: \"\" names no folder");
  shell.refuses("heed_compare --json a --csv ./a", "name one file");
  const std::string text = read(shell.path("text.txt"));
  fs::create_symlink("text.txt", shell.path("link"));
  for (const std::string output : {"--json text.txt", "--csv ./text.txt", "--json link"})
    for (const std::string input : {"--text", "--train 1 --then"})
      shell.refuses(
          "heed_compare " + output + " " + input + " text.txt",
          output + ": would replace the file of " + input.substr(input.rfind("--")) + " text.txt");
  fs::create_directory(shell.path("pages"));
  fs::create_symlink("../text.txt", shell.path("pages/speed.svg"));
  shell.refuses("heed_compare --train 1 --text text.txt --report pages",
                "pages/speed.svg: would replace the file of --text");
  shell.refuses("heed_compare --json pages/report.html --report pages",
                "pages/report.html: would replace the file of --json");
  shell.refuses("heed_compare --json " + std::string(300, 'x'), "File name too long");
  CHECK(read(shell.path("text.txt")) == text);
  const Result note = shell.done(kTrain + "--causal --csv -");
  CHECK(note.err.find("heed_compare: --causal has no effect with --train\n") != std::string::npos);
  const Result other = shell.done(kCompare + "--seeds 2 --csv -");
  CHECK(other.err.find("heed_compare: --seeds has no effect without --train\n") !=
        std::string::npos);
}

TEST_CASE("compress passes through one token: a model of one block cannot see past it") {
  const Shell shell;
  // In one block a reading position sees the token that holds the others only as it was embedded: it guesses one of three.
  const auto accuracy = [&](const std::string& depth) {
    const Result result = shell.done(
        "heed_compare --train 400 --width 32 --heads 2 --batch 16 --threads 1 --variants "
        "sdpa "
        "--task compress:len=4,vocabulary=4 --json - --depth " +
        depth);
    return Json::parse(result.out).at("records").at(0).at("accuracy").get<double>();
  };
  CHECK(accuracy("1") < 0.45);
  CHECK(accuracy("2") > 0.55);
}

TEST_CASE("heed_compare --task refuses what it cannot use in one sentence") {
  const Shell shell;
  shell.refuses("heed_compare --task mqar", "--task needs --train STEPS");
  shell.refuses("heed_compare --train 1 --task mqr", "--task is mqr, it must be one of mqar, ");
  shell.refuses("heed_compare --train 1 --task mqar:len=63",
                "--task mqar: len is 63, it must be even");
  for (const std::string option : {"--text", "--then"})
    shell.refuses("heed_compare --train 1 --task mqar " + option + " text.txt",
                  "--task is mqar and " + option + " names a text; it must be one of both");
  const Result note = shell.done(kTask + "--len 16");
  CHECK(note.err == "heed_compare: --len has no effect with --task, whose numbers say how long\n");
}

TEST_CASE("heed_lm refuses what it cannot use in one sentence with both values, before it trains") {
  const Shell shell;
  (void)shell.done(kLm + "--out good");
  shell.refuses("heed_lm", "the command is \"\"");
  shell.refuses("heed_lm nope", "the command is \"nope\"");
  shell.refuses("heed_lm trian", "--help says more; did you mean train?");
  const std::string train = "heed_lm train --text text.txt ";
  shell.refuses(train + "--lr nan", "--lr: \"nan\"");
  shell.refuses(train + "--clip -1", "--clip: \"-1\"");
  shell.refuses(train + "--precision half", "--precision is 'half', it must be float or mixed");
  shell.refuses(train + "--seed -1", "--seed: \"-1\" is not a whole number from 0 to 2^64 - 1");
  shell.refuses(train + "--steps 0", "--steps: \"0\"");
  shell.refuses(train + "--eval-every -1", "--eval-every: \"-1\"");
  shell.refuses(train + "--batch 9000000000000000000", "from 1 to 1048576");
  shell.refuses(train + "--threads 100000", "from 0 to 1024");
  shell.refuses(train + "--variant nope", "nope");
  shell.refuses(train + "--len 16 --out .", "--out .");
  shell.refuses(train + "--len 16 --out none/x", "--out none/x");
  shell.refuses(train + "--len 16 --out /dev/full", "--out /dev/full");
  shell.refuses(train + "--out ''", "--out: \"\" names no file");
  shell.refuses(train + "--report ''", "--report: \"\" names no folder");
  shell.refuses("heed_lm train --text empty.txt", "--text empty.txt: the file is empty");
  shell.refuses("heed_lm train --text bytes.txt", "--text bytes.txt");
  shell.refuses(train + "--resume good", "step 4 of 4 is done");
  shell.refuses("heed_lm generate good --tokens -1", "--tokens: \"-1\"");
  shell.refuses("heed_lm generate good --prompt ''", "--prompt");
  shell.refuses("heed_lm eval good --text text.txt --batch 0", "--batch: \"0\"");
  shell.refuses("heed_lm info text.txt", "text.txt");
}

TEST_CASE("heed_lm and heed_compare refuse in the words of their options, files and fields") {
  const Shell shell;
  (void)shell.done(kLm + "--out good");
  std::ofstream(shell.path("short.txt")) << "hello";
  const std::string example = R"({"instruction": "a", "output": "b"})";
  std::ofstream(shell.path("one.jsonl")) << example << "\n";
  std::ofstream(shell.path("three.jsonl")) << example << "\n" << example << "\n" << example << "\n";
  const auto says = [&](const std::string& command, const std::string& sentence) {
    const Result result = shell.run(command);
    INFO(command << "\n" << result.out);
    CHECK(result.code == 2);
    CHECK(result.err == command.substr(0, command.find(' ')) + ": " + sentence + "\n");
  };
  const std::string train = "heed_lm train --text text.txt ", task = "heed_lm train --task parens ",
                    lines = "heed_lm train --instructions three.jsonl ",
                    compare = "heed_compare --train 2 --variants differential ";
  const std::string sources = "; give one of --text, --instructions and --task";
  says("heed_lm train", "no data were given" + sources);
  says(train + "--task parens", "--text and --task were given" + sources);
  says(train + "--width 65", "--width is 65, it must be a multiple of --heads, 4");
  says("heed_compare --train 2 --width 65", "--width is 65, it must be a multiple of --heads, 4");
  says(train + "--init xavier", "--init is xavier, it must be fan-in or gpt2");
  says("heed_compare --train 2 --init xavier", "--init is xavier, it must be fan-in or gpt2");
  for (const std::string& program : {train + "--variant differential ", compare})
    says(program + "--width 6 --heads 2",
         "differential does not fit --width 6 with --heads 2, which make a head of 3 columns "
         "(ProjectedAttention: dim_qk is 3, it must be even: both maps read half a head)");
  says(train + "--width", "--width needs a value; --help lists the options");
  const std::string lists = " not expected; --help lists the options";
  says(train + "--layers 3 --wdith=5 'a b'",
       "the arguments --layers 3 --wdith=5 'a b' were" + lists + "; did you mean --depth?");
  says(train + "--wdith=5", "the argument --wdith=5 was" + lists + "; did you mean --width?");
  says("heed_lm info good more", "the argument more was" + lists);
  says("heed_lm generate good --layers 3", "the arguments --layers 3 were" + lists);
  says("heed_compare --varaints dar",
       "the arguments --varaints dar were" + lists + "; did you mean --variants?");
  says("heed_scaling --heds 3", "the arguments --heds 3 were" + lists + "; did you mean --heads?");
  for (const auto& [typed, meant] :
       {std::pair{"dra", "dar"}, {"DAR", "dar"}, {"oed-lm", "ode-lm"}, {"prototpye", "prototype"}})
    shell.refuses(train + "--variant " + typed,
                  "dialectical-lm; did you mean " + std::string(meant) + "?\n");
  shell.refuses(train + "--variant transformer", "dialectical-lm\n");
  shell.refuses("heed_compare --variants sdpa,intnet", "; did you mean intent?\n");
  if constexpr (HEED_HAS_ZOO) {
    shell.refuses(train + "--variant sinc", "; did you mean zoo:sink?\n");
    shell.refuses("heed_compare --variants zoo:sikn", "; did you mean zoo:sink?\n");
  } else {
    const std::string none = "this build has no zoo: it was configured with HEED_ZOO=OFF";
    says(train + "--variant zoo:sink", "--variant is zoo:sink, " + none);
    for (const std::string name : {"zoo", "zoo:sink"})
      says("heed_compare --variants " + name, "--variants names \"" + name + "\", " + none);
  }
  shell.refuses("heed_compare --task mqra",
                "--task needs --train STEPS; and --task is mqra, it must be one of mqar, ");
  says("heed_compare --task mqar", "--task needs --train STEPS");
  shell.refuses("heed_compare --train 1 --task mqra", "are; did you mean mqar?\n");
  says(train + "--depth 1 --depth 2", "--depth was given more than once; --help lists the options");
  says(train + "--held-out 1",
       "--held-out: \"1\" is not a number from 0 to below 1; --help lists the options");
  says(train + "--attention-dropout 1",
       "--attention-dropout: \"1\" is not a number from 0 to below 1; --help lists the options");
  says(train + "--variant dialectical-lm --attention-dropout 0.1",
       "--attention-dropout is 0.1, dialectical-lm has none; it must be 0");
  says(train + "--variant dialectical --ponder 0.1",
       "--ponder is 0.1, dialectical counts no steps; it must be 0");
  says(
      train + "--variant dialectical-act --ponder-prior 0.1",
      "--ponder-prior is 0.1, dialectical-act has no prior, which dialectical-pondernet alone has");
  says(train + "--no-mask",
       "--no-mask was given for sdpa, only dialectical-lm can do without its mask");
  says(task + "--len 1", "--len is 1, --task parens needs at least 2");
  says(task + "--tokenizer bytes", "--tokenizer is bytes, --task parens needs characters");
  says(task + "--vocab text.txt", "--vocab is text.txt, --task parens has an alphabet of its own");
  says(lines + "--len 1", "--len is 1, --instructions needs at least 2");
  says(lines + "--held-out 0.9",
       "--held-out is 0.9, which holds out all 3 examples of --instructions three.jsonl; at least "
       "one must be left");
  says(
      "heed_lm train --instructions one.jsonl",
      "--instructions one.jsonl: the file has 1 example, it must have at least 2, one of them held "
      "out");
  const std::string few =
      ": the text has 5 tokens, sequences of 16 tokens (--len) need 16 + 1 to train on and as many "
      "held out";
  says("heed_lm train --text short.txt --len 16", "--text short.txt" + few);
  says("heed_compare --train 2 --text short.txt --len 16", "--text short.txt" + few);
  says("heed_compare --train 2 --then short.txt --len 16", "--then short.txt" + few);
  says(
      "heed_lm train --text bytes.txt",
      "--text bytes.txt: byte 0 of 400 is not UTF-8, it has the value 255; --tokenizer bytes reads "
      "any file");
  says("heed_lm train --text none.txt",
       "--text none.txt: cannot open the file (No such file or directory)");
  says("heed_lm eval good --text short.txt",
       "--text short.txt: the character U+0068 'h' at byte 0 is not in the alphabet of 16 "
       "characters");
  says("heed_lm eval good --text text.txt --tokenizer bytes",
       "--tokenizer is bytes, good has characters");
  says("heed_lm eval good --text text.txt --vocab none",
       "--vocab is none, good has a tokenizer of its own");
  says("heed_lm generate good --merges none", "--merges is none, good has a tokenizer of its own");
  says("heed_lm generate good --prompt ?",
       "--prompt '?': the character U+003F '?' at byte 0 is not in the alphabet of 16 characters");
  says("heed_lm generate good --prompt ''",
       "--prompt is \"\", it must hold at least one character");
  says(train + "--resume good",
       "good: step 4 of 4 is done; --steps is 4, it must be more than 4 to go on");
  says(train + "--resume good --steps 2",
       "good: step 4 of 4 is done; --steps is 2, it must be more than 4 to go on");
  says(train + "--resume good --gpt2 good",
       "--resume and --gpt2 were given, it must be one of them");
  says(train + "--resume text.txt", "--resume text.txt: would replace the file of --text text.txt");
  says("heed_lm info text.txt",
       "text.txt: the file begins with a header length of 7785087821562145132, that of a "
       "safetensors file is at most 100000000");
  says(train + "--report text.txt",
       "--report text.txt: the folder cannot be made (Not a directory)");
  says("heed_compare --shape 1,2,8,5",
       "--shape is \"1,2,8,5\", its last number, the width of a head, is 5, it must be even: "
       "differential attention reads halves of a head");
}

TEST_CASE("Lost output ends with exit code 1, and a file is never where a stream was closed") {
  const Shell shell;
  (void)shell.done(kLm + "--out good");
  for (const std::string& command :
       {kTrain, kLm, std::string("heed_lm eval good --text text.txt"),
        std::string("heed_lm generate good"), std::string("heed_lm info good")}) {
    INFO(command);
    CHECK(shell.run(command + " >/dev/full").code == 1);
    CHECK(shell.run(command + " >&-").code == 1);
  }
  CHECK(shell.run(kTrain + "--json closed.json >&-").code == 1);
  CHECK(Json::parse(read(shell.path("closed.json"))).at("format") == 2);
  CHECK(shell.run(kLm + "--lr 1e30").code == 1);
  const Result same = shell.run(kTrain + "--json there > there");
  CHECK(same.code == 2);
  CHECK(same.err.find("--json there") != std::string::npos);
}

TEST_CASE("heed_scaling says whether the memory of a rank has gradients in it") {
  const Shell shell;
  const std::string table = "heed_scaling --gflops 100 --len 4096 --ranks 1,8 ",
                    memory = "MiB: keys and values that a rank holds";
  CHECK(shell.done(table).out.ends_with(memory + ", and their gradients\n"));
  CHECK(shell.done(table + "--forward").out.ends_with(memory + "\n"));
}

TEST_CASE("heed_replay tells a folder that cannot be used from a case that fails") {
  const Shell shell;
  fs::create_directory(shell.path("cases"));
  shell.refuses("heed_replay none", "\"none\"");
  shell.refuses("heed_replay text.txt", "\"text.txt\"");
  shell.refuses("heed_replay --nope", "--nope");
  shell.refuses("heed_replay a b", "2 folders");
  shell.refuses("heed_replay cases", "holds no");
  fs::copy_file(fs::path(HEED_GOLDEN_DIR) / "sdpa_t1.safetensors",
                shell.path("cases/one.safetensors"));
  CHECK(shell.done("heed_replay cases").out.find("1 passed, 0 failed") != std::string::npos);
  CHECK(shell.run("heed_replay cases >/dev/full").code == 1);
  fs::copy_file(shell.path("text.txt"), shell.path("cases/two.safetensors"));
  CHECK(shell.run("heed_replay cases").code == 1);
}

TEST_CASE("heed_bench refuses what it cannot use, and its file has the documented counters") {
  if (!HEED_HAS_BENCH) return;
  const Shell shell;
  shell.refuses("heed_bench --nope", "--nope");
  shell.refuses("heed_bench --benchmark_filtr=dar", "; did you mean --benchmark_filter?\n");
  if (!HEED_HAS_ZOO)
    shell.refuses("heed_bench --benchmark_filter=^zoo:sink", "this build has no zoo");
  shell.refuses("heed_bench --tune --benchmark_filter=dar", "--tune");
  shell.refuses("heed_bench --table --benchmark_filter=dar", "--table");
  shell.refuses("heed_bench --benchmark_format=nope", "\"nope\"");
  shell.refuses("heed_bench --benchmark_repetitions=-1", "\"-1\"");
  shell.refuses("heed_bench --benchmark_out=none/x", "none/x");
  shell.refuses("heed_bench --benchmark_out=", "--benchmark_out is \"\"");
  CHECK(shell.run("heed_bench --benchmark_filter=nothing").code == 2);
  const std::string two =
      "heed_bench "
      "--benchmark_filter='^(dar/forward/float/(H16_T1x1024_d64|H8_T200_d40)|layer/forward/"
      ".*threads)/' ";
  (void)shell.done(two + "--benchmark_out=a.json");
  // Repeated measurements of calls of microseconds end.
  const std::string decode = "heed_bench --benchmark_filter='^sdpa/forward/float/H1_T1x512_d64/' ";
  CHECK(shell.done(decode + "--benchmark_repetitions=3").out.find("_median") != std::string::npos);
  Names counters;
  const Names usual = {"name",
                       "family_index",
                       "per_family_instance_index",
                       "run_name",
                       "run_type",
                       "repetitions",
                       "repetition_index",
                       "threads",
                       "iterations",
                       "real_time",
                       "cpu_time",
                       "time_unit"};
  const Json filed = Json::parse(read(shell.path("a.json")));
  for (const Json& run : filed.at("benchmarks"))
    for (const auto& [name, value] : run.items())
      if (usual.count(name) == 0) counters.insert(name);
  CHECK(counters == documented("heed_bench"));
  CHECK(filed.at("context").at("machine").get<std::string>().find(", ") != std::string::npos);
  CHECK(filed.at("context").at("instructions").get<std::string>().find("openmp") !=
        std::string::npos);
}

TEST_CASE("heed_bench has one time in a row, to which its rates belong, and says what runs where") {
  if (!HEED_HAS_BENCH) return;
  const Shell shell;
  const Result result = shell.done(
      "heed_bench --benchmark_filter='^dar/forward/float/(H8_T200_d40|H16_T1x1024_d64)/' "
      "--benchmark_out=a.json");
  const Json filed = Json::parse(read(shell.path("a.json")));
  REQUIRE(filed.at("benchmarks").size() == 2);
  for (const Json& run : filed.at("benchmarks")) {
    // Products of 8 heads of 200 x 200 pairs and 40 columns; keys and values of 16 heads and 1,024 rows of 64 columns.
    const bool products = run.contains("GFLOP/s");
    const double amount = products ? 4.0 * 8 * 200 * 200 * 40 : 2.0 * 16 * 1024 * 64 * 4,
                 rate = run.at(products ? "GFLOP/s" : "GB/s");
    CHECK(run.at("real_time").get<double>() * 1e-3 * rate * 1e9 == Approx(amount).epsilon(1e-6));
  }
  const std::vector<std::string> lines = lines_of(result.out);
  REQUIRE(lines.size() > 4);
  CHECK(lines[0].starts_with(filed.at("context").at("machine").get<std::string>() + ", "));
  CHECK(lines[0].ends_with(filed.at("context").at("instructions").get<std::string>()));
  CHECK(std::regex_match(lines[2],
                         std::regex("Benchmark +Time +Calls +(GB/s|GFLOP/s) +(peak|read) +.*")));
  CHECK((result.out + result.err).find("DEBUG") == std::string::npos);
  CHECK(result.out.find("CPU ") == std::string::npos);
}

TEST_CASE(
    "Escape sequences are for terminals that know them, and colours for those who want them") {
  const Shell shell;
  const auto on_terminal = [&](const std::string& set, const std::string& command) {
    const Result result = shell.run("env " + set + " script -qec \"" + command + "\" /dev/null");
    INFO(command << result.out);
    CHECK(result.code == 0);
    return result.out.find('\x1B') != std::string::npos;
  };
  if (shell.run("script --version").code != 0) return;
  const std::string bench = "heed_bench --benchmark_filter=^sdpa/forward/float/H8_T200_d40/";
  CHECK(on_terminal("TERM=xterm", kTrain));
  CHECK_FALSE(on_terminal("TERM=dumb", kTrain));
  CHECK(on_terminal("TERM=xterm", kLm));
  CHECK_FALSE(on_terminal("TERM=dumb", kLm));
  if (!HEED_HAS_BENCH) return;
  CHECK(on_terminal("TERM=xterm NO_COLOR=", bench));
  CHECK_FALSE(on_terminal("TERM=xterm NO_COLOR=1", bench));
  CHECK_FALSE(on_terminal("TERM=dumb", bench));
}
