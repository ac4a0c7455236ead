// SPDX-License-Identifier: Apache-2.0

// heed_lm as a program: Ctrl-C, resuming, and what it does with bad files.

#include "catch.hpp"
#include "temporary.hpp"

#include <heed/io/atomic_file.hpp>

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
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
    const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(text.data()), text.size());
    heed::io::write_file_atomically(path / name, {&bytes, 1});
    return file(name);
  }
  [[nodiscard]] std::size_t count() const {
    return std::size_t(std::distance(fs::directory_iterator(path), fs::directory_iterator()));
  }
};

// heed_lm in a process of its own. What it prints waits in a pipe of one page: a program that prints cannot
// run far ahead of the test, however slow the machine.
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
    const int error = posix_spawn(&process_, HEED_LM_PROGRAM, &actions, nullptr, pointers.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    output_end_ = ends[0];
    REQUIRE(error == 0);
  }
  ~Program() {
    close(output_end_);
    if (running_) {
      kill(process_, SIGKILL);
      waitpid(process_, nullptr, 0);
    }
  }
  Program(const Program&) = delete;

  void read_until(const std::string& text) {
    while (output_.find(text) == std::string::npos) REQUIRE(read_some());
  }
  void interrupt() const { REQUIRE(kill(process_, SIGINT) == 0); }
  // The exit code; -1 if a signal ended it.
  int finish() {
    while (read_some()) {
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
  return {"train",   "--text", text, "--out",   out, "--steps",   std::to_string(steps),
          "--width", "16",     "--heads", "2",  "--depth", "1", "--len", "16", "--batch", "4",
          "--variant", "dar",  "--dropout", "0.1", "--threads", "1", "--warmup", "5"};
}
Arguments with(Arguments all, const Arguments& more) {
  all.insert(all.end(), more.begin(), more.end());
  return all;
}
void run(const Arguments& arguments) {
  Program program(arguments);
  const int code = program.finish();
  INFO(program.output());
  REQUIRE(code == 0);
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
  const auto refuses = [&](const Arguments& arguments, const std::string& begins, const std::string& holds) {
    Program program(with(arguments, {"--out", out, "--threads", "1"}));
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
  refuses({"train", "--text", folder.file("none.txt")}, folder.file("none.txt"), "");
  refuses({"train", "--text", text, "--vocab", vocab, "--merges", merges}, "", "vocab.json");
  refuses({"train", "--text", text, "--vocab", broken, "--merges", merges}, "", "broken.json");
  refuses({"train", "--text", text, "--gpt2", good}, good, "no GPT-2");
}

TEST_CASE("A page of pictures is there after training, and a folder that cannot be made is refused at once") {
  const Folder folder;
  const std::string text = folder.write("text.txt", sample_text()), pages = folder.file("pages/of/this run"),
                    plain = folder.file("plain"), told = folder.file("told");
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
  CHECK(refused.output().rfind("heed_lm: --report: the folder " + text + " cannot be made", 0) == 0);
  CHECK(refused.output().find('\n') == refused.output().size() - 1);
  CHECK_FALSE(fs::exists(none));
}
