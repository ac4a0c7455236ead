// SPDX-License-Identifier: Apache-2.0

// heed_lm and heed_compare under mpirun, as their users start them: several ranks on this machine.

#include "shell.hpp"

#include <heed/io/safetensors.hpp>

#include <nlohmann/json.hpp>

#include <cmath>

namespace {

using heed_test::lines_of;
using heed_test::Result;
using heed_test::Shell;
using nlohmann::json;

constexpr long kSaveEvery = 5;  // steps
constexpr const char* kTrain =
    "heed_lm train --text text.txt --width 16 --heads 2 --depth 1 --len 16 --batch 6 --threads 1";

// Sequences that four ranks can share, of a text that make_long_text() writes.
constexpr const char* kTrainLong =
    "heed_lm train --text long.txt --width 16 --heads 2 --depth 2 --len 600 --batch 2 --threads 1";
void make_long_text(const Shell& shell) { (void)shell.done("seq 3000 > long.txt"); }

[[nodiscard]] std::string on_ranks(int ranks, const std::string& command) {
  return "'" HEED_MPIRUN "' -n " + std::to_string(ranks) + " " + command;
}

// The validation loss of the last line that has one.
[[nodiscard]] double last_loss(const std::string& out, const std::string& word) {
  const std::size_t at = out.rfind(word + " ");
  REQUIRE(at != std::string::npos);
  return std::stod(out.substr(at + word.size() + 1));
}

// The lines of standard error that come from heed; the launcher adds its own.
[[nodiscard]] std::vector<std::string> sentences(const std::string& err) {
  std::vector<std::string> own;
  for (const std::string& line : lines_of(err))
    if (line.starts_with("heed_")) own.push_back(line);
  return own;
}

// All numbers of a record of heed_compare except times.
[[nodiscard]] json without_times(const json& record) {
  if (!record.is_structured()) return record;
  json rest = record.is_array() ? json::array() : json::object();
  for (const auto& [name, value] : record.items()) {
    if (record.is_array()) rest.push_back(without_times(value));
    if (record.is_object() && name.find("second") == std::string::npos)
      rest[name] = without_times(value);
  }
  return rest;
}

// Starts a run of three ranks whose processes write their ids into files, does `then` to one of them once a checkpoint is
// there, and waits for the end.
[[nodiscard]] Result disturbed_run(const Shell& shell, const std::string& then,
                                   const std::string& options, const std::string& train = kTrain) {
  return shell.run(on_ranks(3, "sh -c 'echo $$ > id.$OMPI_COMM_WORLD_RANK; exec " + train +
                                   " --steps 1000000 --save-every " + std::to_string(kSaveEvery) +
                                   " --out run.st " + options + "'") +
                   " & job=$!; for i in $(seq 600); do test -e run.st && break; sleep 0.1; done; " +
                   then + "; wait $job");
}

[[nodiscard]] long step_of(const Shell& shell, const std::string& file) {
  return std::stol(heed::io::Safetensors::read(shell.path(file)).metadata().at("step"));
}

// One sentence that has `words` and names the step of the checkpoint, which is whole. A rank that was stopped while it saved
// may finish that when MPI wakes and ends it: the checkpoint is then one save ahead of the sentence.
void require_one_sentence(const Shell& shell, const Result& result, const std::string& words,
                          const std::string& text = "text.txt") {
  INFO(result.out << result.err);
  CHECK(result.code != 0);
  const std::vector<std::string> said = sentences(result.err);
  REQUIRE(said.size() == 1);
  const long held = step_of(shell, "run.st");
  const long named = result.err.find("run.st holds step " + std::to_string(held)) != result.err.npos
                         ? held
                         : held - kSaveEvery;
  CHECK(said[0] == "heed_lm: " + words + "; run.st holds step " + std::to_string(named));
  (void)shell.done("heed_lm eval run.st --text " + text);
}

}  // namespace

TEST_CASE("heed_lm train has the loss of one process on one, two and four ranks") {
  const Shell shell;
  const std::string rest =
      " --steps 50 --dropout 0.1 --attention-dropout 0.1 --eval-every 25 --out ";
  const Result alone = shell.done(kTrain + rest + "alone.st");
  for (const int ranks : {1, 2, 4}) {
    INFO(ranks);
    const std::string file = std::to_string(ranks) + ".st";
    const Result result = shell.done(on_ranks(ranks, kTrain + rest + file));
    for (const char* word : {"training", "validation"})
      CHECK(std::abs(last_loss(result.out, word) - last_loss(alone.out, word)) <= 1e-3);
    CHECK(lines_of(result.out).size() == lines_of(alone.out).size());
    CHECK(result.err.empty());
    (void)shell.done(on_ranks(ranks, kTrain + rest + "again.st --overwrite"));
    CHECK(heed_test::read(shell.path(file)) == heed_test::read(shell.path("again.st")));
  }
  CHECK(heed_test::read(shell.path("1.st")) == heed_test::read(shell.path("alone.st")));
}

TEST_CASE(
    "Ranks that share long sequences have the loss of one process, and so have groups of them") {
  const Shell shell;
  make_long_text(shell);
  const std::string train =
      std::string(kTrainLong) + " --dropout 0.1 --attention-dropout 0.1 --eval-every 25 ";
  const Result alone = shell.done(train + "--steps 50 --out alone.st");
  for (const auto& [ranks, context_ranks] : {std::pair{2, 2}, {4, 4}, {4, 2}}) {
    const std::string file = std::to_string(ranks) + "." + std::to_string(context_ranks) + ".st",
                      rest = "--context-ranks " + std::to_string(context_ranks) + " --out ";
    INFO(file);
    const Result result = shell.done(on_ranks(ranks, train + "--steps 50 " + rest + file));
    for (const char* word : {"training", "validation"})
      CHECK(std::abs(last_loss(result.out, word) - last_loss(alone.out, word)) <= 1e-3);
    CHECK(result.out.find("; " + std::to_string(ranks) + " ranks, each sequence on " +
                          std::to_string(context_ranks) + "\n") != std::string::npos);
    CHECK(result.err.empty());
  }
  (void)shell.done(on_ranks(4, train + "--steps 50 --context-ranks 2 --out again.st"));
  CHECK(heed_test::read(shell.path("again.st")) == heed_test::read(shell.path("4.2.st")));
  // One process goes on with the checkpoint of four, and four with that of one.
  const std::string more = "heed_lm train --text long.txt --threads 1 --eval-every 25 --steps 60 ";
  const Result from_four = shell.done(more + "--resume 4.2.st"),
               from_one = shell.done(on_ranks(4, more + "--context-ranks 2 --resume alone.st"));
  for (const char* word : {"training", "validation"})
    CHECK(std::abs(last_loss(from_four.out, word) - last_loss(from_one.out, word)) <= 1e-3);
}

TEST_CASE(
    "A run goes on with the same bits on as many ranks, and with the same batches on another "
    "number") {
  const Shell shell;
  const std::string rest = " --dropout 0.1 --eval-every 10";
  (void)shell.done(
      on_ranks(2, kTrain + rest + " --steps 30 --warmup 10 --save-every 20 --out whole.st"));
  // A run that is stopped after step 20 by the end of its steps has another schedule: it is cut off by its checkpoint.
  (void)shell.done(
      on_ranks(2, kTrain + rest +
                      " --steps 30 --warmup 10 --save-every 20 --out half.st & job=$!; "
                      "until test -e half.st; do sleep 0.01; done; cp half.st kept.st; "
                      "wait $job"));
  if (step_of(shell, "kept.st") != 20)
    return;  // the machine was slow to copy: nothing is left to resume
  (void)shell.done("cp kept.st two.st; cp kept.st three.st");
  const Result two = shell.done(
      on_ranks(2, "heed_lm train --text text.txt --threads 1 --eval-every 10 --resume two.st"));
  CHECK(heed_test::read(shell.path("two.st")) == heed_test::read(shell.path("whole.st")));
  const Result three = shell.done(
      on_ranks(3, "heed_lm train --text text.txt --threads 1 --eval-every 10 --resume three.st"));
  for (const char* word : {"training", "validation"})
    CHECK(std::abs(last_loss(two.out, word) - last_loss(three.out, word)) <= 1e-3);
}

TEST_CASE("What cannot run on several ranks is refused in one sentence") {
  const Shell shell;
  (void)shell.done(std::string(kTrain) + " --steps 2 --out run.st");
  const std::pair<std::string, std::string> wrong[] = {
      {"heed_lm train --text none.txt", "--text none.txt: cannot open the file"},
      {"heed_lm train --text text.txt --width 16 --heads 2 --len 16 --batch 2",
       "--batch is 2, 3 ranks share it; it must be at least 3"},
      {std::string(kTrain) + " --variant prototype-art",
       "whose memory learns the keys of a batch one after another"},
      {std::string(kTrain) + " --context-ranks 2",
       "--context-ranks is 2, 3 ranks were started; it must divide 3"},
      {std::string(kTrain) + " --context-ranks 3",
       "--context-ranks is 3, sequences of 16 tokens of sdpa are cut at multiples of "},
      {std::string(kTrain) + " --out /nowhere/run.st", "--out /nowhere/run.st"},
      {"heed_lm eval run.st --text text.txt", "the command is eval, which runs in one process"},
      {"heed_compare --quick", "3 ranks were started, which share the work of --train alone"},
      {"heed_compare --train 5 --jobs 2", "--jobs is 2 and 3 ranks were started"}};
  for (const auto& [command, words] : wrong) {
    const Result result = shell.run(on_ranks(3, command));
    INFO(command << "\n" << result.out << result.err);
    CHECK(result.code == 2);
    CHECK(result.out.empty());
    REQUIRE(sentences(result.err).size() == 1);
    CHECK(sentences(result.err)[0].find(words) != std::string::npos);
  }
}

TEST_CASE("A rank that is killed ends all ranks with one sentence and a whole checkpoint") {
  for (const std::string rank : {"0", "2"}) {
    const Shell shell;
    const Result result = disturbed_run(shell, "kill -9 $(cat id." + rank + ")", "");
    require_one_sentence(shell, result, "rank " + rank + " has ended too early");
  }
}

TEST_CASE("A signal to any rank ends a run as one to the first does") {
  for (const std::string rank : {"0", "1", "2"}) {
    const Shell shell;
    const Result result = disturbed_run(shell, "kill -TERM $(cat id." + rank + ")", "");
    INFO(rank << "\n" << result.out << result.err);
    CHECK(result.code == 0);
    CHECK(sentences(result.err).empty());
    const std::string step = std::to_string(step_of(shell, "run.st"));
    const std::size_t at = result.out.find("stopped after step " + step + " of 1000000; ");
    REQUIRE(at != std::string::npos);
    CHECK(result.out.find("--resume run.st goes on from here:\n", at) != std::string::npos);
    CHECK(lines_of(result.out.substr(at)).size() == 2);
  }
}

TEST_CASE("A rank that is stuck ends all ranks after --rank-timeout") {
  for (const std::string rank : {"0", "1"}) {
    const Shell shell;
    const Result result =
        disturbed_run(shell, "kill -STOP $(cat id." + rank + ")", "--rank-timeout 4");
    require_one_sentence(shell, result, "rank " + rank + " sent nothing for 4 s (--rank-timeout)");
  }
}

TEST_CASE("A rank that is lost in the middle of a sequence ends all ranks, too") {
  const std::pair<std::string, std::string> ends[] = {
      {"kill -9 $(cat id.1)", "rank 1 has ended too early"},
      {"kill -STOP $(cat id.1)", "rank 1 sent nothing for 4 s (--rank-timeout)"}};
  for (const auto& [then, words] : ends) {
    const Shell shell;
    make_long_text(shell);
    const Result result =
        disturbed_run(shell, then, "--context-ranks 3 --rank-timeout 4", kTrainLong);
    require_one_sentence(shell, result, words, "long.txt");
  }
}

TEST_CASE("heed_scaling --check takes a short sequence by itself, and says what it works on") {
  const Shell shell;
  const Result result =
      shell.done(on_ranks(2, "heed_scaling --check --heads 2 --kv-heads 1 --dim 16 --threads 1"));
  const std::vector<std::string> lines = lines_of(result.out);
  REQUIRE(lines.size() == 4);
  CHECK(lines[0] == "forward pass of 2048 causal tokens, 2 heads, 1 kv heads, d 16");
  CHECK(lines[1].rfind("one rank, forward ", 0) == 0);
  CHECK(lines[3].rfind("2 ranks, gather, forward ", 0) == 0);
}

TEST_CASE("heed_compare has the results of one process, and keeps them, on any number of ranks") {
  const Shell shell;
  const std::string command =
      "heed_compare --train 6 --variants sdpa,dar --seeds 3 --width 16 --heads 2 --depth 1 --len "
      "16 "
      "--batch 2 --threads 1 --sweep lr=1e-3,3e-3 --text text.txt --json ";
  (void)shell.done(command + "alone.json");
  const json alone = without_times(json::parse(heed_test::read(shell.path("alone.json"))));
  for (const int ranks : {1, 2, 4}) {
    INFO(ranks);
    const Result result =
        shell.done(on_ranks(ranks, command + "ranks.json --out cells" + std::to_string(ranks)));
    CHECK(without_times(json::parse(heed_test::read(shell.path("ranks.json")))) == alone);
    CHECK(shell.files("cells" + std::to_string(ranks)).size() ==
          11);  // settings.json, 4 to choose, 6
    CHECK(result.err.empty());
  }
  const Result lost = shell.run(on_ranks(
      2,
      "sh -c 'echo $$ > id.$OMPI_COMM_WORLD_RANK; exec heed_compare --train 1000000 --variants "
      "sdpa,dar --width 16 --heads 2 --depth 1 --len 16 --batch 2 --threads 1 --text text.txt' "
      "& job=$!; until test -s id.1; do sleep 0.1; done; sleep 3; kill -9 $(cat id.1); wait $job"));
  INFO(lost.err);
  CHECK(lost.code != 0);
  REQUIRE(sentences(lost.err).size() == 1);
  CHECK(sentences(lost.err)[0] == "heed_compare: rank 1 has ended too early");
}
