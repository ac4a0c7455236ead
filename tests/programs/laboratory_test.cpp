// SPDX-License-Identifier: Apache-2.0

// The parts of heed_compare --train: plans, cells that are kept and resumed, work in processes, and statistics.

#include "catch.hpp"
#include "temporary.hpp"

#include "laboratory/cell_folder.hpp"
#include "laboratory/cell_json.hpp"
#include "laboratory/jobs.hpp"
#include "laboratory/lengths.hpp"
#include "laboratory/plan.hpp"
#include "laboratory/student.hpp"
#include "laboratory/training_settings.hpp"
#include "program/file_lock.hpp"
#include "program/machine.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstring>
#include <fstream>

using namespace compare;

namespace {

template <class F>
std::string message_of(F&& f) {
  try {
    f();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

bool same(double a, double b) {
  return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(a) && std::isnan(b));
}

CellResult some_result() {
  CellResult result;
  result.parameters = 1234;
  result.skipped = 2;
  result.tokens_per_second = 1.0 / 3;
  heed_lm::Score score;
  score.loss = 0.1;
  score.accuracy = 2.0 / 3;
  score.answers = 9;
  score.by_difficulty = {{-1, {4, 3, {}}}, {7, {5, 3, {{"tension", 0.3}}}}};
  result.tests = {{kHeldOut, score}, {"2x", {kNotFinite, kNotFinite, 0, {}}}};
  result.course = {{10, 0.7, 0.25}, {20, 0.3, 0.9}, {30, 0.2, 0.95}};
  result.stages = {{0, 0, 0.1, 0.2}, {0, 1, 3.5, kNotFinite}};
  result.curve = {{1, 2}, {5e-324, kNotFinite}, 4};
  result.measures = {{"lambda", 0.8}, {"steps used=2", kNotFinite}};
  result.at_answers = {{"lambda", 0.9}};
  result.elsewhere = {{"lambda", 1e300}};
  return result;
}

const SharedSettings kShared = {{"steps", "100"}, {"batch", "4"}};
const Cell kCell{"mqar:len=64", "zoo:alibi", 128, 0.002, 7, false};

}  // namespace

TEST_CASE("Quantiles of Student's distribution are those of the tables") {
  struct Case {
    double degrees, share, t;
  };
  for (const Case& c :
       {Case{1, 0.975, 12.706204736432095}, Case{2, 0.975, 4.302652729911275},
        Case{4, 0.975, 2.7764451051977934}, Case{9, 0.95, 1.8331129326536337},
        Case{30, 0.995, 2.7499956535670305}, Case{1000, 0.975, 1.9623390808264078}}) {
    INFO(c.degrees << " degrees");
    CHECK(std::abs(student_quantile(c.share, c.degrees) / c.t - 1) < 1e-9);
    CHECK(std::abs(student_quantile(1 - c.share, c.degrees) / c.t + 1) < 1e-9);
    CHECK(std::abs(student_share(c.t, c.degrees) - c.share) < 1e-9);
  }
  CHECK(student_share(0, 3) == 0.5);
}

TEST_CASE(
    "Differences are paired by seed: what both runs of a seed share does not widen the interval") {
  // Differences 0.1, 0.2, 0.3: mean 0.2, deviation 0.1, t of two degrees 4.302653.
  const auto d = paired_difference({1, 5, 9}, {1.1, 5.2, 9.3});
  REQUIRE(d.has_value());
  CHECK(d->pairs == 3);
  CHECK(std::abs(d->mean - 0.2) < 1e-12);
  const double half = 4.302652729911275 * 0.1 / std::sqrt(3.0);
  CHECK(std::abs(d->low - (0.2 - half)) < 1e-9);
  CHECK(std::abs(d->high - (0.2 + half)) < 1e-9);
  CHECK(d->may_be_none());
  CHECK_FALSE(paired_difference({1, 5, 9}, {1.19, 5.2, 9.21})->may_be_none());
  CHECK(paired_difference({1, 1}, {1, 1})->may_be_none());
  CHECK_FALSE(paired_difference({1}, {2}).has_value());
  CHECK_FALSE(paired_difference({1, 2}, {2, kNotFinite}).has_value());
}

TEST_CASE("A list of tasks may have numbers of a task between its commas") {
  CHECK(read_tasks("text") == std::vector<std::string>{kText});
  const auto specs =
      read_tasks("induction:len=20,vocabulary=12,text,parity,mqar:published,len=1024");
  REQUIRE(specs.size() == 4);
  CHECK(specs[0] == "induction:len=20,vocabulary=12");
  CHECK(specs[1] == kText);
  CHECK(specs[2] == "parity:least=1,len=20");
  CHECK(specs[3].starts_with("mqar:len=1024,pairs=64,vocabulary=8192"));
  const auto all = read_tasks("all");
  CHECK(all.size() == 17);
  CHECK(all.back() == kText);
  CHECK(
      message_of([] { (void)read_tasks("mqar,nope"); }).starts_with("--task is nope, it must be"));
  CHECK(message_of([] { (void)read_tasks("parity,parity"); }) ==
        "--task names parity:least=1,len=20 twice");
}

TEST_CASE("A longer task differs in its length alone") {
  CHECK(*longer_spec("induction:len=30,vocabulary=20", 4) == "induction:len=120,vocabulary=20");
  // No length of the test is as short as those of training.
  CHECK(*longer_spec("dyck:kinds=4,depth=4,least=1,len=64", 2) ==
        "dyck:kinds=4,depth=4,least=65,len=128");
  CHECK_FALSE(longer_spec("compress:len=16,vocabulary=16", 2).has_value());
  CHECK_FALSE(longer_spec("listops:depth=4,arguments=4,len=48,lists=0.4", 2).has_value());
  CHECK_FALSE(longer_spec("modular-addition:prime=97", 2).has_value());
  CHECK_FALSE(longer_spec("parity:least=1,len=65536", 2).has_value());
}

TEST_CASE("A lock on a file is held alone or shared, ends with its process, and leaves no file") {
  using heed_program::FileLock;
  const heed_test::TemporaryFolder temporary;
  const auto file = temporary.path / "lock";
  const std::string own = "process " + std::to_string(::getpid()) + " on ";
  {
    FileLock first(file), second(file), third(file);
    REQUIRE(first.try_alone());
    CHECK_FALSE(second.try_alone());
    CHECK(second.holder().starts_with(own));
    first.share();
    second.share();
    CHECK_FALSE(third.try_alone());
  }
  CHECK_FALSE(std::filesystem::exists(file));
  // A process that waits for a lock whose holder removes the file as it leaves gets a file that the next one sees.
  auto first = std::make_unique<FileLock>(file);
  REQUIRE(first->try_alone());
  const pid_t process = ::fork();
  if (process == 0) {
    FileLock waits(file);
    waits.share();
    std::ofstream(temporary.path / "has it").flush();
    while (true) ::pause();
  }
  ::usleep(100000);
  CHECK_FALSE(std::filesystem::exists(temporary.path / "has it"));
  first.reset();
  while (!std::filesystem::exists(temporary.path / "has it")) ::usleep(1000);
  FileLock next(file);
  CHECK_FALSE(next.try_alone());
  ::kill(process, SIGKILL);
  ::waitpid(process, nullptr, 0);
  CHECK(std::filesystem::exists(file));
  CHECK(next.try_alone());
  CHECK(next.holder().starts_with(own));
}

TEST_CASE("Work in processes gives the results of work in this one, each once") {
  for (const int at_once : {1, 3}) {
    Jobs jobs;
    jobs.count = 7;
    jobs.at_once = at_once;
    const pid_t own = ::getpid();
    jobs.work = [&](std::size_t n, const Say& say) {
      say("begun");
      if ((::getpid() == own) != (at_once == 1)) return std::string("in the wrong process");
      return std::string(n * 20000, char('a' + n));  // more than a pipe holds
    };
    std::vector<std::string> results(jobs.count);
    std::size_t done = 0, said = 0;
    jobs.done = [&](std::size_t n, const std::string& result) {
      CHECK(results[n].empty());
      results[n] = result;
      ++done;
    };
    jobs.progress = [&](std::size_t, const std::string& text) { said += text == "begun"; };
    jobs.name = [](std::size_t n) { return "piece " + std::to_string(n); };
    run_jobs(jobs);
    CHECK(done == 7);
    CHECK(said == 7);
    for (std::size_t n = 0; n < 7; ++n) CHECK(results[n] == std::string(n * 20000, char('a' + n)));
  }
}

TEST_CASE("A piece of work that fails is named, and those that ran beside it are finished") {
  Jobs jobs;
  jobs.count = 9;
  jobs.at_once = 2;
  jobs.progress = [](std::size_t, const std::string&) {};
  jobs.name = [](std::size_t n) { return "piece " + std::to_string(n); };
  std::vector<std::size_t> done;
  jobs.done = [&](std::size_t n, const std::string&) { done.push_back(n); };
  jobs.work = [](std::size_t n, const Say&) -> std::string {
    if (n == 0) throw std::runtime_error("no luck");
    ::usleep(200000);
    return "fine";
  };
  CHECK(message_of([&] { run_jobs(jobs); }) == "piece 0: no luck");
  CHECK(done == std::vector<std::size_t>{1});
  done.clear();
  jobs.work = [](std::size_t n, const Say&) -> std::string {
    if (n == 2) ::kill(::getpid(), SIGKILL);
    return "fine";
  };
  CHECK(message_of([&] { run_jobs(jobs); }) == "piece 2: its process was ended by signal 9");
}

TEST_CASE("The result of a cell comes back from JSON bit for bit, and from its folder") {
  const CellResult result = some_result(), back = cell_result_of(json_of(result));
  CHECK(json_of(back) == json_of(result));
  CHECK(back.parameters == 1234);
  CHECK(back.skipped == 2);
  CHECK(same(back.tokens_per_second, 1.0 / 3));
  REQUIRE(back.tests.size() == 2);
  CHECK(same(back.tests[0].score.accuracy, 2.0 / 3));
  CHECK(back.tests[0].score.by_difficulty.at(7).right == 3);
  CHECK(same(back.tests[0].score.by_difficulty.at(7).reports.at("tension"), 0.3));
  CHECK(std::isnan(back.tests[1].score.loss));
  CHECK(steps_to_90(back) == 20);
  CHECK(same(stage_of(back, 0, 1).loss, 3.5));
  CHECK(same(back.curve.loss[0], 5e-324));
  CHECK(back.measures.size() == 2);
  CHECK(same(back.elsewhere.at("lambda"), 1e300));

  const heed_test::TemporaryFolder temporary;
  const auto path = temporary.path / "cells";
  CellFolder folder(path, kShared);
  CHECK_FALSE(std::filesystem::exists(path));
  CHECK_FALSE(folder.find(kCell).has_value());
  folder.open();
  folder.keep(kCell, json_of(result));
  const CellFolder again(path, kShared);
  REQUIRE(again.find(kCell).has_value());
  CHECK(json_of(*again.find(kCell)) == json_of(result));
  for (const auto change :
       {+[](Cell& c) { c.task = "mqar:len=32"; }, +[](Cell& c) { c.hidden = 1; },
        +[](Cell& c) { c.learning_rate = 0.0020000000000000005; }, +[](Cell& c) { c.seed = 8; },
        +[](Cell& c) { c.chooses = true; }}) {
    Cell other = kCell;
    change(other);
    CHECK_FALSE(again.find(other).has_value());
    folder.keep(other, json_of(result));  // beside the first one, not in its place
    CHECK(again.find(other).has_value());
    CHECK(again.find(kCell).has_value());
  }
}

TEST_CASE("A folder in use is shared by runs of its settings, and refused to others") {
  const heed_test::TemporaryFolder temporary;
  const auto path = temporary.path / "cells";
  SharedSettings other = kShared;
  other[0].second = "200";
  other.emplace_back("text", "\"abc\"");
  const auto refusal = [&] { return message_of([&] { CellFolder(path, other).open(); }); };
  auto first = std::make_unique<CellFolder>(path, kShared);
  first->open();
  CHECK(std::filesystem::exists(path / "settings.json"));
  CellFolder second(path, kShared);
  second.open();
  const auto begin = "--out " + path.string() + ": process " + std::to_string(::getpid()) + " on ";
  CHECK(refusal().starts_with(begin));
  CHECK(refusal().ends_with(
      " uses it with other settings: steps is 100 there, 200 here; text is not given there, "
      "\"abc\" here"));
  std::filesystem::remove(path / "settings.json");
  CHECK(refusal().starts_with(begin));
  CHECK(refusal().ends_with(" uses it, and its settings.json is lost"));
}

TEST_CASE("Finished runs are read from a folder that cannot be written, and no other is begun") {
  const heed_test::TemporaryFolder temporary;
  const auto path = temporary.path / "cells";
  {
    CellFolder folder(path, kShared);
    folder.open();
    folder.keep(kCell, json_of(some_result()));
  }
  std::filesystem::permissions(temporary.path, std::filesystem::perms{0755});
  std::filesystem::permissions(path, std::filesystem::perms{0555});
  const pid_t process = ::fork();
  if (process == 0) {
    if (::geteuid() == 0 && ::setuid(65534) != 0) ::_exit(1);  // root may write anywhere
    CellFolder folder(path, kShared);
    folder.open();
    const bool found = folder.find(kCell).has_value();
    const std::string said = message_of([&] { folder.require_writable(); });
    ::_exit(found && said == "--out " + (path / "settings.json").string() +
                                 ": cannot create a temporary file in its folder (Permission "
                                 "denied)"
                ? 0
                : 1);
  }
  int status = -1;
  ::waitpid(process, &status, 0);
  CHECK(status == 0);
  std::filesystem::permissions(path, std::filesystem::perms{0755});
}

TEST_CASE("Settings that no cell has, and no run that lives, are nobody's; those of cells are") {
  const heed_test::TemporaryFolder temporary;
  const auto path = temporary.path / "cells", file = path / "settings.json";
  SharedSettings other = kShared;
  other[0].second = "200";
  CellFolder(path, kShared).open();
  CellFolder(path, other).open();
  CHECK(message_of([&] { CellFolder refused(path, kShared); }).empty());
  {
    CellFolder folder(path, kShared);
    folder.open();
    folder.keep(kCell, json_of(some_result()));
  }
  CHECK_FALSE(std::filesystem::exists(path / ".lock"));
  const auto kept = heed::io::read_file(file);
  const auto refused =
      "--out " + path.string() + ": its cells have other settings: steps is 100 there, 200 here";
  CHECK(message_of([&] { CellFolder(path, other); }) == refused);
  // A settings.json that is lost, damaged or edited is that of the cells.
  for (const char* text : {"", "{\"format\": ", "{\"format\": 2, \"steps\": 200, \"batch\": 4}"}) {
    INFO(text);
    if (*text == '\0')
      std::filesystem::remove(file);
    else
      std::ofstream(file) << text;
    CHECK(message_of([&] { CellFolder(path, other); }) == refused);
    CellFolder folder(path, kShared);
    folder.open();
    CHECK(folder.find(kCell).has_value());
    CHECK(heed::io::read_file(file) == kept);
  }
}

TEST_CASE("A result is read where it has its form, or the sentence names the field") {
  struct Case {
    const char *from, *to, *said;
  };
  const std::string text = json_of(some_result());
  for (const Case& c :
       {Case{"\"accuracy\":0.6666666666666666", "\"accuracy\":7.5",
             "result.tests[0].score.accuracy is 7.5, it must be null or a number from 0 to 1"},
        Case{"\"loss\":0.1", "\"loss\":-3",
             "result.tests[0].score.loss is -3, it must be null or a number from 0"},
        Case{"\"parameters\":1234", "\"parameters\":null",
             "result.parameters is null, it must be a whole number from 1"},
        Case{"\"parameters\":1234,", "", "result.parameters is missing"},
        Case{"\"skipped\":2", "\"skipped\":18446744073709551615",
             "result.skipped is 18446744073709551615, it must be a whole number from 0"},
        Case{"[10,0.7,0.25]", "[10,0.7]", "result.course[0] is [10,0.7], it must be a list of 3"},
        Case{"\"loss\":[5e-324,null]", "\"loss\":[]",
             "result.curve.loss is [], it must be a list of 2"},
        Case{"\"measures\":{", "\"measures\":[{\"a\":1}],\"other\":{",
             "result.measures is [{\"a\":1}], it must be an object"},
        Case{"\"lambda\":0.8", "\"lambda\":\"\"",
             "result.measures.lambda is \"\", it must be null or a number"},
        Case{"\"test\":\"2x\"", "\"test\":\"\"", "result.tests[1].test is \"\", it must be a text"},
        Case{"\"reading\":null", "\"reading\":{}", "result.reading.name is missing"}}) {
    INFO(c.to);
    std::string edited = text;
    REQUIRE(edited.find(c.from) != std::string::npos);
    edited.replace(edited.find(c.from), std::strlen(c.from), c.to);
    CHECK(message_of([&] { (void)cell_result_of(edited); }) == c.said);
  }
}

TEST_CASE("Backward transfer is the mean of what later stages did to earlier ones") {
  CellResult result;
  // Rows: after stage 1, 2, 3; columns: on stage 1, 2, 3.
  const double accuracy[3][3] = {{0.9, 0.1, 0.0}, {0.5, 0.8, 0.2}, {0.3, 0.6, 0.7}};
  for (Index after = 0; after < 3; ++after)
    for (Index on = 0; on < 3; ++on)
      result.stages.push_back({after, on, 1 - accuracy[after][on], accuracy[after][on]});
  CHECK(backward_transfer(result, &StageScore::accuracy) == Approx((0.3 - 0.9 + 0.6 - 0.8) / 2));
  CHECK(backward_transfer(result, &StageScore::loss) == Approx(0.4));
}

TEST_CASE("A sweep chooses the rate with the smallest loss, of means over seeds") {
  std::vector<Cell> cells;
  std::vector<CellResult> results;
  const auto add = [&](double rate, double loss) {
    cells.push_back({"parity", "dar", 1, rate, 1, true});
    heed_lm::Score score;
    score.loss = loss;
    score.accuracy = 1 - loss;
    results.emplace_back().tests = {{kWatched, score}};
  };
  add(1e-3, 0.5);
  add(1e-3, 0.1);
  add(1e-2, 0.3);
  add(1e-2, 0.2);
  add(1e-1, 0.0);
  add(1e-1, kNotFinite);
  const auto scores = rate_scores(cells, results);
  REQUIRE(scores.size() == 3);
  CHECK(std::abs(scores[0].loss - 0.3) < 1e-12);
  CHECK(std::abs(scores[1].accuracy - 0.75) < 1e-12);
  CHECK(best_rate(scores) == 1e-2);
  CHECK(best_rate({{0.2, kNotFinite, 0}, {0.1, kNotFinite, 0}}) == 0.1);
}

TEST_CASE("One disturbed round of measurements does not choose the number of jobs") {
  const Gain several = gain_of({1.8, 1.9, 0.3});
  CHECK(several.several);
  CHECK(several.times == 1.8);
  CHECK(several.least == 0.3);
  CHECK(several.most == 1.9);
  const Gain one = gain_of({4, 0.5, 0.8});
  CHECK_FALSE(one.several);
  CHECK(one.times == 1 / 0.8);
  CHECK(one.least == 0.25);
  CHECK(one.most == 2);
}

TEST_CASE("A machine is called by its class, others by vendor, family and model") {
  const auto kind = [](const char* vendor, const char* family, const char* model,
                       const char* flags) {
    return heed_program::machine_kind(std::string("processor\t: 0\nvendor_id\t: ") + vendor +
                                      "\ncpu family\t: " + family + "\nmodel\t\t: " + model +
                                      "\nmodel name\t: A name\nflags\t\t: fpu " + flags +
                                      "\n\nprocessor\t: 1\nvendor_id\t: Other\n");
  };
  CHECK(kind("AuthenticAMD", "25", "1", "sse2 avx avx2 vaes") == "Zen 3 (AVX2)");
  CHECK(kind("AuthenticAMD", "25", "17", "sse2 avx avx2 avx512f avx512vl") == "Zen 4 (AVX-512)");
  CHECK(kind("AuthenticAMD", "26", "2", "sse2 avx avx2 avx512f") == "Zen 5 (AVX-512)");
  CHECK(kind("GenuineIntel", "6", "207", "sse2 avx avx2 avx512f") == "Emerald Rapids (AVX-512)");
  CHECK(kind("GenuineIntel", "6", "106", "sse2 avx avx2 avx512f") == "Ice Lake (AVX-512)");
  CHECK(kind("GenuineIntel", "6", "143", "sse2 avx avx2 avx512f") ==
        "GenuineIntel family 6 model 143 (AVX-512)");
  CHECK(kind("GenuineIntel", "6", "42", "sse2 avx") == "GenuineIntel family 6 model 42 (AVX)");
  CHECK(heed_program::machine_kind("") == "unknown family unknown model unknown");
  CHECK_FALSE(heed_program::this_machine().flags.empty());
}
