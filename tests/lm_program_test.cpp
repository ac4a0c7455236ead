// SPDX-License-Identifier: Apache-2.0

// heed_lm as a program: Ctrl-C, resuming, and what it does with bad files.

#include "catch.hpp"
#include "temporary.hpp"

#include <heed/io/atomic_file.hpp>
#include <heed/io/safetensors.hpp>

#include <nlohmann/json.hpp>

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

TEST_CASE("Files whose numbers cannot be believed end every command with one sentence and exit code 2") {
  const Folder folder;
  const std::string text = folder.write("text.txt", sample_text()), good = folder.file("good"),
                    bad = folder.file("bad"), vocab = folder.write("vocab.json", R"({"a": 0, "b": 1})"),
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
  const auto settings = [&](const std::string& key, const std::string& field, const nlohmann::json& value) {
    const auto file = heed::io::Safetensors::read(good);
    heed::io::SafetensorsWriter writer;
    for (const auto& [name, words] : file.metadata()) {
      nlohmann::json stored = name == key ? nlohmann::json::parse(words) : nlohmann::json();
      if (name == key) stored[field] = value;
      writer.set_metadata(name, name == key ? stored.dump() : words);
    }
    for (const auto& [name, info] : file.tensors()) writer.add_bytes(name, info.dtype, info.shape, file.bytes(name));
    writer.write(bad);
  };
  settings("training", "batch", std::int64_t(1) << 62);
  every_command(": its training config has batch = 4611686018427387904, it must lie in [1, 1048576]");
  settings("training", "clip", -1);
  every_command(": its training config has clip = -1, it must lie in [0, 1e+30]");
  settings("model", "width", -16);
  every_command(": its model config cannot be used: width is -16, it must be at least 1");
  settings("model", "depth", 100'000'000);
  every_command(": its model config cannot be used: depth is 100000000, it must be at most 1048576");
  settings("model", "width", 65'536);
  every_command(": its model config has width = 65536, for which the model needs embed.weight");
  settings("model", "vocabulary", std::int64_t(1) << 40);
  every_command(": its model config has vocabulary = 1099511627776, its tokenizer has ");
  settings("model", "variant", std::string("s\0\x1b[2J", 6));
  every_command("variant: s\\x00\\x1B[2J is no variant");

  // A terabyte without a byte on the disk: nothing, a checkpoint, and a header that claims it all.
  const auto stretch = [&] { fs::resize_file(bad, std::uintmax_t(1) << 40); };
  folder.write("bad", "");
  stretch();
  every_command(": the header does not start with '{'");
  refused({"info", bad}, ": the header does not start with '{'");
  refused({"train", "--text", bad, "--out", folder.file("out")}, ": the file has 1099511627776 bytes, this machine");
  refused({"train", "--text", text, "--vocab", bad, "--merges", merges}, ": the file has 1099511627776 bytes, this");
  refused({"train", "--instructions", bad}, ": the file has 1099511627776 bytes, this machine's memory ");
  fs::copy_file(good, bad, fs::copy_options::overwrite_existing);
  stretch();
  every_command(": the tensors end at byte ");
  refused({"info", bad}, ": the tensors end at byte ");

  // A GPT-2 that heed cannot take is said to be one by its tensors.
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
  refused({"info", bad}, ": its width is 100, no multiple of 64");
  gpt2({2, 64}, {0, 64});
  refused({"info", bad}, ": wpe.weight has the shape (0 x 64), it holds no number");
  refused({"train", "--gpt2", bad, "--text", text, "--tokenizer", "bytes"}, ": wpe.weight has the shape (0 x 64)");
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
