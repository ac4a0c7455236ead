// SPDX-License-Identifier: Apache-2.0

// heed_lm as a program: signals, resuming, numbers that are not finite, and bad files.

#include "catch.hpp"
#include "temporary.hpp"

#include <heed/io/atomic_file.hpp>
#include <heed/io/safetensors.hpp>
#include <heed/io/safetensors_writer.hpp>

#include <nlohmann/json.hpp>

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

extern char** environ;

namespace {

namespace fs = std::filesystem;
using Bytes = std::vector<std::byte>;
using Arguments = std::vector<std::string>;

struct Folder : heed_test::TemporaryFolder {
  [[nodiscard]] std::string file(const std::string& name) const { return (path / name).string(); }
  std::string write(const std::string& name, const std::string& text) const {
    const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(text.data()),
                                           text.size());
    heed::io::write_file_atomically(path / name, {&bytes, 1});
    return file(name);
  }
  [[nodiscard]] std::size_t count() const {
    return std::size_t(std::distance(fs::directory_iterator(path), fs::directory_iterator()));
  }
};

// heed_lm in a process of its own. The output waits in a pipe of one page, so that the program
// cannot run far ahead of the test, however slow the machine.
class Program {
 public:
  explicit Program(const Arguments& arguments) {
    int ends[2];
    REQUIRE(pipe2(ends, O_CLOEXEC) == 0);
    REQUIRE(fcntl(ends[0], F_SETPIPE_SZ, 4096) > 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
    std::vector<std::string> words = {HEED_LM_PROGRAM};
    words.insert(words.end(), arguments.begin(), arguments.end());
    std::vector<char*> pointers;
    for (std::string& word : words) pointers.push_back(word.data());
    pointers.push_back(nullptr);
    // Signals have their defaults, whatever started the tests: nohup ignores SIGHUP.
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    sigset_t defaults;
    sigemptyset(&defaults);
    for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) sigaddset(&defaults, number);
    posix_spawnattr_setsigdefault(&attributes, &defaults);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF);
    const int error =
        posix_spawn(&process_, HEED_LM_PROGRAM, &actions, &attributes, pointers.data(), environ);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    output_end_ = ends[0];
    REQUIRE(error == 0);
  }
  ~Program() {
    close_output();
    if (running_) {
      kill(process_, SIGKILL);
      waitpid(process_, nullptr, 0);
    }
  }
  Program(const Program&) = delete;

  void read_until(const std::string& text) {
    while (output_.find(text) == std::string::npos) REQUIRE(read_some());
  }
  void interrupt(int number = SIGINT) const { REQUIRE(kill(process_, number) == 0); }
  // Closes the reading end of the program's output.
  void close_output() {
    if (output_end_ >= 0) close(output_end_);
    output_end_ = -1;
  }
  // The exit code; -1 if a signal ended it.
  int finish() {
    while (output_end_ >= 0 && read_some()) {
    }
    int status = 0;
    REQUIRE(waitpid(process_, &status, 0) == process_);
    running_ = false;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  [[nodiscard]] const std::string& output() const { return output_; }

 private:
  // False at the end of the output.
  bool read_some() {
    pollfd waiting{output_end_, POLLIN, 0};
    INFO("nothing was printed for five minutes after: " << output_);
    REQUIRE(poll(&waiting, 1, 300'000) == 1);
    char text[512];
    const ssize_t count = read(output_end_, text, sizeof text);
    REQUIRE(count >= 0);
    output_.append(text, std::size_t(count));
    return count > 0;
  }

  pid_t process_ = -1;
  int output_end_ = -1;
  bool running_ = true;
  std::string output_;
};

constexpr int kSteps = 400;

std::string sample_text() {
  std::string text;
  for (int i = 0; i < 60; ++i) text += "line " + std::to_string(i * i) + "\n";
  return text;
}
Arguments training(const std::string& text, const std::string& out, int steps = kSteps) {
  return {"train",
          "--text",
          text,
          "--out",
          out,
          "--steps",
          std::to_string(steps),
          "--width",
          "16",
          "--heads",
          "2",
          "--depth",
          "1",
          "--len",
          "16",
          "--batch",
          "4",
          "--variant",
          "dar",
          "--dropout",
          "0.1",
          "--threads",
          "1",
          "--warmup",
          "5"};
}
Arguments with(Arguments all, const Arguments& more) {
  all.insert(all.end(), more.begin(), more.end());
  return all;
}
// Returns the program's output.
std::string run(const Arguments& arguments) {
  Program program(arguments);
  const int code = program.finish();
  INFO(program.output());
  REQUIRE(code == 0);
  return program.output();
}

}  // namespace

TEST_CASE("Ctrl-C saves, and the resumed run ends with the file of one that was not interrupted") {
  const Folder folder;
  const std::string text = folder.write("text.txt", sample_text()), whole = folder.file("whole"),
                    parts = folder.file("parts");
  run(with(training(text, whole), {"--eval-every", "0"}));

  Program stopped(with(training(text, parts), {"--eval-every", "1"}));
  stopped.read_until("step 3  training ");
  CHECK_FALSE(fs::exists(parts));
  stopped.interrupt();
  CHECK(stopped.finish() == 0);
  INFO(stopped.output());
  const std::size_t at = stopped.output().find("stopped after step ");
  REQUIRE(at != std::string::npos);
  const int done = std::stoi(stopped.output().substr(at + 19));
  CHECK(done >= 3);
  CHECK(done < kSteps);
  CHECK(stopped.output().find("--resume " + parts + " goes on from here") != std::string::npos);
  const Bytes half = heed::io::read_file(parts);
  CHECK(half != heed::io::read_file(whole));

  run({"train", "--text", text, "--resume", parts, "--threads", "1"});
  CHECK(heed::io::read_file(parts) == heed::io::read_file(whole));
}

TEST_CASE("SIGTERM and SIGHUP save and end a run as Ctrl-C does, even when both come") {
  const Folder folder;
  const std::string text = folder.write("text.txt", sample_text());
  const std::vector<std::vector<int>> cases = {
      {SIGTERM}, {SIGHUP}, {SIGTERM, SIGHUP, SIGHUP, SIGTERM}};
  for (const std::vector<int>& signals : cases) {
    const std::string out =
        folder.file("run" + std::to_string(signals.size()) + std::to_string(signals[0]));
    Program stopped(with(training(text, out), {"--eval-every", "1"}));
    stopped.read_until("step 3  training ");
    for (const int number : signals) stopped.interrupt(number);
    const int code = stopped.finish();
    INFO("signal " << signals[0] << "\n" << stopped.output());
    CHECK(code == 0);
    CHECK(stopped.output().find("stopped after step ") != std::string::npos);
    CHECK(fs::exists(out));
  }
}

TEST_CASE("One signal ends a run in the middle of a step, however long that takes") {
  const Folder folder;
  // A step of a minute and more; it has begun when the first line is there.
  const std::string text = folder.write("text.txt", sample_text()), out = folder.file("out");
  Arguments heavy = training(text, out);
  for (std::string& word : heavy)
    if (word == "4") word = "20000";  // --batch
  Program stopped(heavy);
  stopped.read_until(" held out\n");
  stopped.interrupt(SIGTERM);
  CHECK(stopped.finish() == 0);
  INFO(stopped.output());
  CHECK(stopped.output().find("stopped after step 0 of " + std::to_string(kSteps)) !=
        std::string::npos);
  CHECK(heed::io::Safetensors::read(out).metadata().at("step") == "0");
}

TEST_CASE("A run goes on by itself where --out holds it, and replaces no other file untold") {
  const Folder folder;
  const std::string text = folder.write("text.txt", sample_text()), whole = folder.file("whole"),
                    parts = folder.file("parts"), notes = folder.write("notes.txt", "mine");
  run(training(text, whole));
  Program stopped(with(training(text, parts), {"--eval-every", "1"}));
  stopped.read_until("step 3  training ");
  stopped.interrupt();
  CHECK(stopped.finish() == 0);
  const std::string said = run(training(text, parts));
  CHECK(said.rfind("heed_lm: " + parts + " holds step ", 0) == 0);
  CHECK(said.find(" of this run, which goes on from there\n") != std::string::npos);
  CHECK(heed::io::read_file(parts) == heed::io::read_file(whole));

  const auto refuses = [&](const Arguments& arguments, const std::string& file,
                           const std::string& why) {
    const Bytes before = heed::io::read_file(file);
    Program program(arguments);
    CHECK(program.finish() == 2);
    CHECK(program.output() == "heed_lm: --out " + file + ": " + why + "\n");
    CHECK(heed::io::read_file(file) == before);
  };
  refuses(training(text, parts), parts,
          "step 400 of this run is done, --steps is 400; more of them go on, --overwrite begins "
          "anew");
  const std::string other =
      "the file is there, and is no checkpoint of this run; --overwrite replaces it";
  for (const Arguments& option : {Arguments{"--seed", "2"}, {"--lr", "0.01"}, {"--untied"}})
    refuses(with(training(text, parts), option), parts, other);
  refuses(training(text, notes), notes, other);
  refuses({"train", "--text", text, "--resume", whole, "--steps", "401", "--out", parts}, parts,
          other);
  run(with(training(text, notes, 2), {"--seed", "2", "--overwrite"}));
  CHECK(heed::io::Safetensors::read(notes).metadata().at("step") == "2");
  CHECK(folder.count() == 4);  // no lock is left
}

TEST_CASE("Two runs do not write one checkpoint at a time") {
  const Folder folder;
  const std::string text = folder.write("text.txt", sample_text()), out = folder.file("out");
  Program first(with(training(text, out), {"--eval-every", "1"}));
  first.read_until("step 3  training ");
  Program second(training(text, out));
  CHECK(second.finish() == 2);
  CHECK(second.output().rfind("heed_lm: --out " + out + ": another run writes it, process ", 0) ==
        0);
  first.interrupt();
  CHECK(first.finish() == 0);
  CHECK(first.output().find("stopped after step ") != std::string::npos);
}

#ifndef HEED_SANITIZED  // a sanitizer maps more addresses than these limits leave
TEST_CASE("Memory that cannot suffice is told by the options that ask for it, before any work") {
  const Folder folder;
  std::string lengthy;
  while (lengthy.size() < 6'000'000) lengthy += sample_text();
  const std::string text = folder.write("text.txt", sample_text()), said = folder.file("said"),
                    model = folder.file("model"), more = folder.write("more.txt", lengthy);
  run(training(text, model, 2));
  const auto refused = [&](const std::string& limit, const std::string& arguments,
                           const std::string& words, const std::string& may_use) {
    const std::string command = "ulimit -v " + limit + "; '" HEED_LM_PROGRAM "' " + arguments +
                                " --threads 1 >'" + said + "' 2>&1";
    const int status = std::system(command.c_str());
    const Bytes bytes = heed::io::read_file(said);
    const std::string got(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    INFO(got);
    CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 2));
    CHECK(got.find(words) != std::string::npos);
    CHECK(got.ends_with(", this process may use " + may_use + " GiB\n"));
    CHECK(got.find('\n') == got.size() - 1);
  };
  const std::string train = "train --len 16 --text '" + text + "' ";
  refused("4000000", train + "--width 64 --depth 2 --batch 1000000",
          "heed_lm: training needs 114 GiB of memory at the least: 114 GiB for the tokens of a "
          "step (--batch 1000000, --len 16) and ",
          "3.81");
  refused("4000000", train + "--width 65536 --heads 2 --depth 1",
          " GiB for sdpa with its moments (--width 65536, --depth 1, 16 tokens in the vocabulary)",
          "3.81");
  refused("400000", "eval '" + model + "' --batch 1000000 --text '" + more + "'",
          "heed_lm: --batch is 1000000, which needs ", "0.381");
}
#endif

TEST_CASE("Nothing is held out of a text by --held-out 0, and eval has nothing to say then") {
  const Folder folder;
  const std::string text = folder.write("text.txt", sample_text()), out = folder.file("out");
  const std::string said =
      run(with(training(text, out, 4), {"--held-out", "0", "--eval-every", "2"}));
  CHECK(said.find(" tokens for training, 0 held out\nstep 2  training ") != std::string::npos);
  CHECK(said.find("validation") == std::string::npos);
  Program program({"eval", out, "--text", text, "--held-out", "0", "--threads", "1"});
  CHECK(program.finish() == 2);
  CHECK(
      program.output() ==
      "heed_lm: --held-out is 0, which leaves nothing to compute a loss on; it must be above 0\n");
}

TEST_CASE("The command that a stopped run prints goes on from there when a shell is given it") {
  const Folder folder;
  const std::string whole = folder.file("whole"), parts = folder.file("it's \"a\" $HOME;\n`run`"),
                    text = folder.write("a text's name\twith a tab", sample_text());
  const Arguments data = {"--held-out", "0.2", "--eval-every", "1"};
  run(with(training(text, whole), data));
  Program stopped(with(training(text, parts), data));
  stopped.read_until("step 3  training ");
  stopped.interrupt();
  CHECK(stopped.finish() == 0);
  INFO(stopped.output());
  const std::string head = " goes on from here:\n";
  const std::size_t at = stopped.output().find(head);
  REQUIRE(at != std::string::npos);
  const std::string command = stopped.output().substr(at + head.size());
  CHECK(command.find('\n') == command.size() - 1);
  CHECK(command.find('\t') == std::string::npos);
  CHECK(command.find("train --resume ") != std::string::npos);
  // The script runs in bash, since $'...' came into other shells late.
  const std::string script = folder.write("script", command);
  CHECK(std::system(("cd / && bash '" + script + "' >/dev/null").c_str()) == 0);
  CHECK(heed::io::read_file(parts) == heed::io::read_file(whole));
}

TEST_CASE(
    "A run whose output nobody reads any more goes on, saves, and says by its exit code what was "
    "lost") {
  const Folder folder;
  const std::string text = folder.write("text.txt", sample_text()), whole = folder.file("whole"),
                    piped = folder.file("piped");
  run(with(training(text, whole), {"--eval-every", "1"}));
  Program program(with(training(text, piped), {"--eval-every", "1"}));
  program.read_until("step 3  training ");
  program.close_output();
  CHECK(program.finish() == 1);
  REQUIRE(fs::exists(piped));
  CHECK(heed::io::read_file(piped) == heed::io::read_file(whole));
}

TEST_CASE("Options that contradict the checkpoint of --resume are refused with both values") {
  const Folder folder;
  const std::string text = folder.write("text.txt", sample_text()), good = folder.file("good"),
                    vocab = folder.write("vocab.json", "{}"),
                    merges = folder.write("merges.txt", "");
  run(training(text, good, 2));
  const Bytes bytes = heed::io::read_file(good);
  const Arguments resume = {"train",   "--resume", good,        "--text", text,
                            "--steps", "3",        "--threads", "1"};
  const auto refuses = [&](const Arguments& options, const std::string& sentence) {
    Program program(with(resume, options));
    const int code = program.finish();
    INFO(program.output());
    CHECK(code == 2);
    CHECK(program.output() == "heed_lm: " + sentence + "\n");
    CHECK(heed::io::read_file(good) == bytes);
  };
  const std::string had = ", " + good + " was trained with ";
  refuses({"--variant", "sdpa"}, "--variant is sdpa" + had + "dar");
  refuses({"--width", "32"}, "--width is 32" + had + "16");
  refuses({"--heads", "4"}, "--heads is 4" + had + "2");
  refuses({"--depth", "2"}, "--depth is 2" + had + "1");
  refuses({"--hidden", "32"}, "--hidden is 32" + had + "64");
  refuses({"--len", "8"}, "--len is 8" + had + "16");
  refuses({"--dropout", "0"}, "--dropout is 0" + had + "0.1");
  refuses({"--attention-dropout", "0.5"}, "--attention-dropout is 0.5" + had + "0");
  refuses({"--init", "gpt2"}, "--init is gpt2" + had + "fan-in");
  refuses({"--untied"}, "--untied was given" + had + "the embedding as its head");
  refuses({"--no-mask"}, "--no-mask was given" + had + "its mask");
  refuses({"--batch", "32"}, "--batch is 32" + had + "4");
  refuses({"--warmup", "6"}, "--warmup is 6" + had + "5");
  refuses({"--lr", "0.01"}, "--lr is 0.01" + had + "0.001");
  refuses({"--weight-decay", "0"}, "--weight-decay is 0" + had + "0.1");
  refuses({"--clip", "0"}, "--clip is 0" + had + "1");
  refuses({"--ponder", "0.5"}, "--ponder is 0.5" + had + "0");
  refuses({"--ponder-prior", "0.5"}, "--ponder-prior is 0.5" + had + "0.3");
  refuses({"--seed", "2"}, "--seed is 2" + had + "1");
  refuses({"--precision", "mixed"}, "--precision is mixed" + had + "float");
  refuses({"--tokenizer", "bytes"}, "--tokenizer is bytes" + had + "characters");
  refuses({"--vocab", vocab, "--merges", merges},
          "--vocab was given" + had + "the tokenizer characters");
  // Options that agree with the checkpoint may be given again.
  run(with(resume,
           {"--variant", "dar", "--width", "16", "--hidden", "64", "--len", "16", "--dropout",
            "0.1", "--batch", "4", "--lr", "1e-3", "--seed", "1", "--tokenizer", "characters"}));
}

TEST_CASE("A resumed run of the parentheses task keeps the seed of its data") {
  const Folder folder;
  const std::string out = folder.file("run");
  run({"train",   "--task",  "parens",  "--out",  out,       "--steps",   "2",
       "--width", "16",      "--heads", "2",      "--depth", "1",         "--len",
       "16",      "--batch", "4",       "--seed", "7",       "--threads", "1"});
  run({"train", "--task", "parens", "--resume", out, "--steps", "3", "--threads", "1"});
}

TEST_CASE("Tokens of a task are numbers, and its answers have an accuracy") {
  const Folder folder;
  const std::string out = folder.file("run"), task = "parity:len=6";
  const std::string trained = run({"train",
                                   "--task",
                                   task,
                                   "--out",
                                   out,
                                   "--steps",
                                   "3",
                                   "--width",
                                   "16",
                                   "--heads",
                                   "2",
                                   "--depth",
                                   "2",
                                   "--batch",
                                   "4",
                                   "--variant",
                                   "dialectical-pondernet",
                                   "--ponder",
                                   "0.1",
                                   "--threads",
                                   "1"});
  CHECK(trained.find("  accuracy ") != std::string::npos);
  CHECK(run({"eval", out, "--task", task, "--threads", "1"}).find("  accuracy ") !=
        std::string::npos);
  const std::string text =
      run({"generate", out, "--prompt", "1 0", "--tokens", "2", "--threads", "1"});
  CHECK(text.rfind("1 0 ", 0) == 0);
  CHECK(std::count(text.begin(), text.end(), ' ') == 4);
  CHECK(run({"train", "--task", "help"}).find("\nparity\n") != std::string::npos);
}

TEST_CASE("An output that would replace an input is refused before any work, links included") {
  const Folder folder;
  const std::string text = folder.write("text.txt", sample_text()), good = folder.file("good"),
                    soft = folder.file("soft"), hard = folder.file("hard"),
                    lines = folder.write("lines.jsonl", R"({"instruction": "a", "output": "b"})"),
                    vocab = folder.write("vocab.json", "{}"),
                    merges = folder.write("merges.txt", ""), pages = folder.file("pages"),
                    page = folder.file("pages/loss.svg");
  run(training(text, good, 2));
  fs::create_symlink(text, soft);
  fs::create_hard_link(text, hard);
  fs::create_directory(pages);
  fs::create_symlink(text, page);
  const Bytes before = heed::io::read_file(text), weights = heed::io::read_file(good);
  const auto refuses = [&](const Arguments& arguments, const std::string& output,
                           const std::string& file, const std::string& input) {
    Program program(with({"train", "--threads", "1", "--steps", "1", "--len", "16", "--width", "16",
                          "--heads", "2", "--depth", "1"},
                         arguments));
    const int code = program.finish();
    INFO(program.output());
    CHECK(code == 2);
    CHECK(program.output() ==
          "heed_lm: " + output + ": would replace the file of " + input + " " + file + "\n");
    CHECK(heed::io::read_file(text) == before);
    CHECK(heed::io::read_file(good) == weights);
  };
  for (const std::string& out :
       {text, soft, hard, folder.file("./text.txt"), folder.file("pages/../text.txt")})
    refuses({"--text", text, "--out", out}, "--out " + out, text, "--text");
  refuses({"--text", soft, "--out", text}, "--out " + text, soft, "--text");
  refuses({"--instructions", lines, "--out", lines}, "--out " + lines, lines, "--instructions");
  refuses({"--text", text, "--vocab", vocab, "--merges", merges, "--out", vocab}, "--out " + vocab,
          vocab, "--vocab");
  refuses({"--text", text, "--vocab", vocab, "--merges", merges, "--out", merges},
          "--out " + merges, merges, "--merges");
  refuses({"--text", text, "--gpt2", good, "--out", good}, "--out " + good, good, "--gpt2");
  refuses({"--text", text, "--resume", text}, "--resume " + text, text, "--text");
  refuses({"--text", text, "--report", pages}, "--report " + page, text, "--text");
  fs::remove(page);
  const std::string report = folder.file("pages/report.html");
  refuses({"--text", text, "--out", report, "--report", pages}, "--report " + report, report,
          "--out");
  fs::copy_file(good, page);
  refuses({"--text", text, "--resume", page, "--out", folder.file("new"), "--report", pages},
          "--report " + page, page, "--resume");
}

TEST_CASE("An output name that cannot be written is found before training") {
  const Folder folder;
  const std::string text = folder.write("text.txt", sample_text()), lengthy(300, 'x');
  for (const std::string& out :
       {folder.file(lengthy), folder.file("text.txt/x"), folder.file("none/x"),
        std::string("/proc/heed"), folder.file(lengthy + "/x")}) {
    Program program(training(text, out));
    const int code = program.finish();
    INFO(program.output());
    CHECK(code == 2);
    CHECK(program.output().rfind("heed_lm: --out " + out + ": ", 0) == 0);
    CHECK(program.output().find('\n') == program.output().size() - 1);
  }
  Program program(with(training(text, folder.file("out")), {"--report", folder.file(lengthy)}));
  CHECK(program.finish() == 2);
  CHECK(folder.count() == 1);
}

TEST_CASE(
    "Numbers that are not finite are told once, end training with code 1, and never reach a file") {
  const Folder folder;
  const std::string text = folder.write("text.txt", sample_text());
  const Arguments shape = {"train", "--text",       text, "--width",      "16", "--heads",
                           "2",     "--len",        "16", "--batch",      "2",  "--threads",
                           "1",     "--save-every", "1",  "--eval-every", "0"};
  const auto fails = [&](const std::string& name, Arguments options) {
    const std::string out = folder.file(name);
    if (std::ranges::count(options, "--depth") == 0) options = with(options, {"--depth", "1"});
    Program program(with(with(shape, {"--out", out}), options));
    const int code = program.finish();
    const std::string& said = program.output();
    INFO(name << "\n" << said);
    CHECK(code == 1);
    CHECK(said.find("nan") == std::string::npos);
    CHECK(said.find("inf") == std::string::npos);
    std::size_t skips = 0;
    for (std::size_t at = 0; (at = said.find("is skipped", at)) != std::string::npos; ++at) ++skips;
    CHECK(skips <= 1);
    return said;
  };
  const auto all_finite = [](const std::string& path) {
    const auto file = heed::io::Safetensors::read(path);
    bool finite = true;
    for (const auto& [tensor, info] : file.tensors())
      for (const float x : file.rounded<float>(tensor)) finite = finite && std::isfinite(x);
    return finite;
  };
  const auto steps_of = [](const std::string& path) {
    return std::stoi(heed::io::Safetensors::read(path).metadata().at("step"));
  };
  for (const auto& [name, options] : std::vector<std::pair<std::string, Arguments>>{
           {"decay", {"--steps", "60"}},
           {"prototype", {"--variant", "prototype-art", "--steps", "60"}},
           {"keys", {"--variant", "prototype-art", "--depth", "2", "--steps", "60"}}}) {
    // A decay that turns weights round and makes them longer, step by step.
    const std::string said = fails(name, with(options, {"--weight-decay", "2e5"})),
                      out = folder.file(name);
    CHECK(said.find("10 steps in a row") != std::string::npos);
    CHECK(
        said.find(" nats per token, more than a sound model can have, 103.3; nothing is saved\n") !=
        std::string::npos);
    REQUIRE(fs::exists(out));
    CHECK(all_finite(out));
    const int step = steps_of(out);
    CHECK(step >= 1);
    CHECK(said.find(out + " holds step " + std::to_string(step)) != std::string::npos);
    // The kept file can be used.
    run({"eval", out, "--text", text, "--threads", "1"});
  }
  for (const auto& [rate, variant] : {std::pair{"1e4", "sdpa"}, {"1e10", "prototype-art"}}) {
    const std::string said =
        fails("rate", {"--lr", rate, "--steps", "60", "--variant", variant, "--depth", "2"});
    CHECK(said.find("10 steps in a row") != std::string::npos);
    CHECK(said.find("nothing was saved") != std::string::npos);
    CHECK_FALSE(fs::exists(folder.file("rate")));
  }
  const std::string one = fails("one", {"--lr", "1e20", "--warmup", "0", "--steps", "1"});
  CHECK(one.find("validation not finite") != std::string::npos);
  CHECK(one.find("nothing was saved") != std::string::npos);
  CHECK_FALSE(fs::exists(folder.file("one")));
  // A rate beyond all floats: no step is taken, and the weights stay the first ones.
  const std::string none =
      fails("none", {"--lr", "1e30", "--weight-decay", "1e30", "--warmup", "0", "--steps", "60"});
  CHECK(none.find("the weights would not be finite after it") != std::string::npos);
  CHECK(all_finite(folder.file("none")));

  const std::string good = folder.file("good");
  run(with(shape, {"--out", good, "--steps", "2", "--weight-decay", "2e5", "--depth", "1"}));
  const Bytes before = heed::io::read_file(good);
  Program resumed({"train", "--text", text, "--resume", good, "--steps", "60", "--threads", "1",
                   "--save-every", "0"});
  CHECK(resumed.finish() == 1);
  CHECK(resumed.output().find(good + " is as it was") != std::string::npos);
  CHECK(heed::io::read_file(good) == before);
}

TEST_CASE(
    "Weights and moments that are not finite are refused, and so are models whose loss is not") {
  const Folder folder;
  const std::string text = folder.write("text.txt", sample_text()), good = folder.file("good");
  Arguments prototype = training(text, good, 2);
  std::ranges::replace(prototype, std::string("dar"), std::string("prototype-art"));
  run(prototype);
  const auto file = heed::io::Safetensors::read(good);
  const auto changed = [&](const std::string& name, const std::string& tensor, float value,
                           bool all) {
    heed::io::SafetensorsWriter writer;
    for (const auto& [key, text_of] : file.metadata())
      if (key != heed::io::kChecksums) writer.set_metadata(key, text_of);
    for (const auto& [other, info] : file.tensors()) {
      std::vector<float> numbers = file.rounded<float>(other);
      if (other == tensor)
        std::fill(all ? numbers.begin() : numbers.begin() + 1,
                  all ? numbers.end() : numbers.begin() + 2, value);
      writer.add(other, info.shape, numbers);
    }
    writer.write(folder.path / name);
    return folder.file(name);
  };
  const auto ends = [&](const Arguments& arguments, int code, const std::string& sentence) {
    Program program(with(arguments, {"--threads", "1"}));
    const int ended = program.finish();
    INFO(program.output());
    CHECK(ended == code);
    CHECK(program.output().find("heed_lm: " + sentence) != std::string::npos);
  };
  const float nan = std::numeric_limits<float>::quiet_NaN(),
              inf = std::numeric_limits<float>::infinity();
  for (const auto& [tensor, value, word] : {std::tuple{"embed.weight", nan, "nan"},
                                            {"ln_f.bias", inf, "inf"},
                                            {"blocks.0.attn.memory.prototypes", nan, "nan"},
                                            {"adamw.first.embed.weight", nan, "nan"}}) {
    const std::string bad = changed("bad", tensor, value, false),
                      sentence =
                          bad + ": number 1 of " + tensor + " is " + word + ", it must be finite\n";
    ends({"eval", bad, "--text", text}, 2, sentence);
    ends({"generate", bad, "--tokens", "3"}, 2, sentence);
    ends({"train", "--resume", bad, "--text", text, "--steps", "3", "--out", folder.file("out")}, 2,
         sentence);
    CHECK_FALSE(fs::exists(folder.file("out")));
  }
  const std::string wild = changed("wild", "ln_f.weight", 1e6F, true);
  ends({"eval", wild, "--text", text}, 1, wild + ": the loss is ");
  const std::string below = changed("below", "adamw.second.embed.weight", -1e-9F, false);
  ends({"train", "--resume", below, "--text", text, "--steps", "3", "--out", folder.file("out")}, 2,
       below + ": number 1 of adamw.second.embed.weight is -1e-09, it must be at least 0\n");
  const std::string huge = changed("huge", "embed.weight", 3e38F, true);
  ends({"eval", huge, "--text", text}, 1, huge + ": the loss is not finite\n");
  ends({"generate", huge, "--tokens", "3"}, 1, "the logit of token 0 is ");
}

TEST_CASE("generate begins with what the model knows where no prompt is given") {
  const Folder folder;
  std::string spaced, solid;
  for (int i = 0; i < 100; ++i) spaced += "ab cb", solid += "qrqsr";
  const std::string with_space = folder.write("spaced", spaced),
                    without = folder.write("solid", solid);
  for (const auto& [text, start] : {std::pair{with_space, ' '}, {without, 'q'}}) {
    const std::string model = text + ".model";
    run(training(text, model, 2));
    Program program({"generate", model, "--tokens", "3", "--threads", "1"});
    const int code = program.finish();
    INFO(program.output());
    CHECK(code == 0);
    REQUIRE(program.output().size() == 1 + 3 + 1);
    CHECK(program.output()[0] == start);
  }
}

TEST_CASE("A prompt of more tokens than the model reads is cut, and said to be") {
  const Folder folder;
  const std::string text = folder.write("text.txt", sample_text()), model = folder.file("model");
  run(training(text, model, 2));
  const auto generated = [&](const std::string& prompt) {
    return run({"generate", model, "--prompt", prompt, "--tokens", "1", "--temperature", "0",
                "--threads", "1"});
  };
  const std::string tail = "line 49\nline 64\n";  // 16 tokens
  const std::string long_one = generated("line 36\n" + tail);
  CHECK(long_one.rfind("heed_lm: --prompt has 24 tokens, the model reads its last 16\n", 0) == 0);
  CHECK(generated(tail).rfind(tail, 0) == 0);
  CHECK(long_one.ends_with("line 36\n" + generated(tail)));
}

TEST_CASE("A bad file is refused in one sentence with exit code 2, and nothing is overwritten") {
  const Folder folder;
  const std::string text = folder.write("text.txt", sample_text()), good = folder.file("good");
  run(training(text, good, 2));
  const Bytes bytes = heed::io::read_file(good);
  const std::string as_text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const std::string out = folder.write("out", "as it was"),
                    cut = folder.write("cut", as_text.substr(0, as_text.size() - 7)),
                    short_cut = folder.write("short", as_text.substr(0, 90)),
                    other = folder.write("other.txt", sample_text() + "line 3\n"),
                    foreign = folder.write("foreign.txt", sample_text() + "\xC3\xA9\n"),
                    vocab = folder.write("vocab.json", R"({"a": 0, "b": 2})"),
                    broken = folder.write("broken.json", R"({"a": 0, )"),
                    merges = folder.write("merges.txt", "#version: 0.2\na b\n");
  const std::size_t files = folder.count();
  const auto refuses = [&](const Arguments& arguments, const std::string& begins,
                           const std::string& holds) {
    Program program(with(arguments, {"--out", out, "--overwrite", "--threads", "1"}));
    const int code = program.finish();
    const std::string& said = program.output();
    INFO(said);
    CHECK(code == 2);
    CHECK(said.rfind("heed_lm: " + begins, 0) == 0);
    CHECK(said.find(holds) != std::string::npos);
    CHECK(said.find('\n') == said.size() - 1);
    const Bytes now = heed::io::read_file(out);
    CHECK(std::string(reinterpret_cast<const char*>(now.data()), now.size()) == "as it was");
    CHECK(heed::io::read_file(good) == bytes);
    CHECK(folder.count() == files);
  };
  refuses({"train", "--resume", cut, "--text", text}, cut, "");
  refuses({"train", "--resume", short_cut, "--text", text}, short_cut, "");
  refuses({"train", "--resume", folder.file("none"), "--text", text}, folder.file("none"), "");
  refuses({"train", "--resume", good, "--text", other}, good, "other data");
  refuses({"train", "--resume", good, "--text", foreign}, "", "not in the alphabet");
  refuses({"train", "--text", folder.file("none.txt")}, "--text " + folder.file("none.txt"), "");
  refuses({"train", "--text", text, "--vocab", vocab, "--merges", merges}, "", "vocab.json");
  refuses({"train", "--text", text, "--vocab", broken, "--merges", merges}, "", "broken.json");
  refuses({"train", "--text", text, "--gpt2", good}, good, "the file is not a GPT-2");
}

TEST_CASE(
    "Files whose numbers cannot be believed end every command with one sentence and exit code 2") {
  const Folder folder;
  const std::string text = folder.write("text.txt", sample_text()), good = folder.file("good"),
                    bad = folder.file("bad"),
                    vocab = folder.write("vocab.json", R"({"a": 0, "b": 1})"),
                    merges = folder.write("merges.txt", "#version: 0.2\n");
  run(training(text, good, 2));
  const auto refused = [&](const Arguments& arguments, const std::string& holds) {
    Program program(arguments);
    const int code = program.finish();
    const std::string& said = program.output();
    INFO(said);
    CHECK(code == 2);
    CHECK(said.rfind("heed_lm: ", 0) == 0);
    CHECK(said.find(bad) != std::string::npos);
    CHECK(said.find(holds) != std::string::npos);
    CHECK(said.find('\n') == said.size() - 1);
    CHECK(said.find('\x1b') == std::string::npos);
  };
  const auto every_command = [&](const std::string& holds) {
    refused({"train", "--resume", bad, "--text", text}, holds);
    refused({"eval", bad, "--text", text}, holds);
    refused({"generate", bad, "--prompt", "line"}, holds);
  };
  // The good checkpoint with another number in its settings.
  const auto settings = [&](const std::string& key, const std::string& field,
                            const nlohmann::json& value) {
    const auto file = heed::io::Safetensors::read(good);
    heed::io::SafetensorsWriter writer;
    for (const auto& [name, words] : file.metadata()) {
      if (name == heed::io::kChecksums) continue;
      nlohmann::json stored = name == key ? nlohmann::json::parse(words) : nlohmann::json();
      if (name == key) stored[field] = value;
      writer.set_metadata(name, name == key ? stored.dump() : words);
    }
    for (const auto& [name, info] : file.tensors())
      writer.add_bytes(name, info.dtype, info.shape, file.bytes(name));
    writer.write(bad);
  };
  settings("training", "batch", std::int64_t(1) << 62);
  every_command(
      ": its training config has batch = 4611686018427387904, it must lie in [1, 1048576]");
  settings("training", "clip", -1);
  every_command(": its training config has clip = -1, it must lie in [0, 1e+30]");
  settings("training", "precision", "exact");
  every_command(": its training config has precision = 'exact', it must be float or mixed");
  settings("model", "width", -16);
  every_command(": its model config cannot be used: width is -16, it must be at least 1");
  settings("model", "depth", 100'000'000);
  every_command(
      ": its model config cannot be used: depth is 100000000, it must be at most 1048576");
  settings("model", "width", 65'536);
  every_command(": its model config has width = 65536, for which the model needs embed.weight");
  settings("model", "vocabulary", std::int64_t(1) << 40);
  every_command(": its model config has vocabulary = 1099511627776, its tokenizer has ");
  settings("model", "variant", std::string("s\0\x1b[2J", 6));
  every_command("variant is s\\x00\\x1B[2J, it must be one of ");

  // A terabyte without a byte on the disk: nothing, a checkpoint, and a header that claims it all.
  const auto stretch = [&] { fs::resize_file(bad, std::uintmax_t(1) << 40); };
  folder.write("bad", "");
  stretch();
  every_command(": the header does not start with '{'");
  refused({"info", bad}, ": the header does not start with '{'");
  refused({"train", "--text", bad, "--out", folder.file("out")},
          ": the file has 1099511627776 bytes, this machine");
  refused({"train", "--text", text, "--vocab", bad, "--merges", merges},
          ": the file has 1099511627776 bytes, this");
  refused({"train", "--instructions", bad},
          ": the file has 1099511627776 bytes, this machine's memory ");
  fs::copy_file(good, bad, fs::copy_options::overwrite_existing);
  stretch();
  every_command(": the tensors end at byte ");
  refused({"info", bad}, ": the tensors end at byte ");

  // A GPT-2 that heed cannot take is recognised by its tensors.
  const auto gpt2 = [&](std::vector<heed::Index> words, std::vector<heed::Index> positions) {
    heed::io::SafetensorsWriter writer;
    const auto add = [&](const std::string& name, const std::vector<heed::Index>& shape) {
      std::size_t count = 1;
      for (const heed::Index extent : shape) count *= std::size_t(extent);
      writer.add(name, shape, std::vector<float>(count));
    };
    add("wte.weight", words);
    add("wpe.weight", positions);
    add("h.0.ln_1.weight", {words[1]});
    writer.write(bad);
  };
  gpt2({2, 100}, {4, 100});
  refused({"info", bad}, ": its width is 100, it must be a multiple of 64");
  gpt2({2, 64}, {0, 64});
  refused({"info", bad}, ": wpe.weight has the shape (0 x 64), it holds no number");
  refused({"train", "--gpt2", bad, "--text", text, "--tokenizer", "bytes"},
          ": wpe.weight has the shape (0 x 64)");
}

TEST_CASE("What info prints of a file steers no terminal") {
  const Folder folder;
  heed::io::SafetensorsWriter writer;
  writer.set_metadata("k\x1b[2J", std::string("v\0w\x1b", 4));
  writer.add("weight\x1b]0;", {1}, std::vector<float>{1});
  writer.write(folder.path / "m");
  Program program({"info", folder.file("m")});
  CHECK(program.finish() == 0);
  CHECK(program.output() == "k\\x1B[2J: v\\x00w\\x1B\nF32  weight\\x1B]0;" + std::string(32, ' ') +
                                "(1)\n1 parameters\n");
}

TEST_CASE(
    "A page of pictures is there after training, and a folder that cannot be made is refused at "
    "once") {
  const Folder folder;
  const std::string text = folder.write("text.txt", sample_text()),
                    pages = folder.file("pages/of/this run"), plain = folder.file("plain"),
                    told = folder.file("told");
  run(training(text, plain, 6));
  run(with(training(text, told, 6), {"--report", pages, "--eval-every", "2"}));
  CHECK(heed::io::read_file(told) == heed::io::read_file(plain));
  const Bytes page = heed::io::read_file(fs::path(pages) / "report.html");
  const std::string html(reinterpret_cast<const char*>(page.data()), page.size());
  CHECK(html.find("6 of 6") != std::string::npos);
  CHECK(html.find("after step 6") != std::string::npos);
  CHECK(html.find(">validation</text>") != std::string::npos);
  CHECK(html.ends_with("</html>\n"));
  for (const char* name : {"loss.svg", "learning_rate.svg", "speed.svg"})
    CHECK(fs::exists(fs::path(pages) / name));

  const std::string none = folder.file("none");
  Program refused(with(training(text, none), {"--report", text}));
  CHECK(refused.finish() == 2);
  CHECK(refused.output().rfind("heed_lm: --report " + text + ": the folder cannot be made", 0) ==
        0);
  CHECK(refused.output().find('\n') == refused.output().size() - 1);
  CHECK_FALSE(fs::exists(none));
}
