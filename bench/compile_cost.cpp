// SPDX-License-Identifier: Apache-2.0

// Measures what including heed costs a compiler: seconds and memory of one file, medians of three,
// beside the standard headers alone.
//   heed_compile_cost FOLDER COMPILER FLAG...      FOLDER takes the files that are compiled

#include <algorithm>
#include <array>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>

namespace {

struct Unit {
  std::string name, flag, text;
};

struct Cost {
  double seconds;    // processor time, which other programs disturb least
  double megabytes;  // most memory resident at a time
};

std::string includes(const std::vector<std::string>& headers) {
  std::string text;
  for (const std::string& header : headers) text += "#include <" + header + ">\n";
  return text;
}

// Code that calls forward and backward of Dar<float>, with the given header for both.
std::string both_calls(const std::string& header) {
  return includes({header, "heed/ops/dar.hpp"}) + R"(
void both(const heed::Dar<float>& op, const heed::Inputs<float>& in, const heed::TensorView<float>& out,
          heed::Saved<float>& saved, const heed::Gradients<float>& grads, heed::Dar<float>& grad_op) {
  heed::forward(op, in, heed::causal<float>(), out, &saved);
  const heed::TensorView<const float> read(out);
  heed::backward(op, in, heed::causal<float>(), saved, read, read, grads, &grad_op);
}
)";
}

// The files heed/ops/*.hpp of the folder that the first -I flag names.
std::vector<std::string> headers_of_ops(const std::vector<std::string>& command) {
  const auto flag = std::find_if(command.begin(), command.end(), [](const std::string& word) {
    return word.size() > 2 && word.compare(0, 2, "-I") == 0;
  });
  if (flag == command.end()) throw std::runtime_error("no flag -I names heed's include folder");
  std::vector<std::string> headers;
  for (const auto& entry : std::filesystem::directory_iterator(flag->substr(2) + "/heed/ops"))
    if (entry.path().extension() == ".hpp")
      headers.push_back("heed/ops/" + entry.path().filename().string());
  std::sort(headers.begin(), headers.end());
  return headers;
}

std::vector<Unit> units(const std::vector<std::string>& command) {
  std::vector<Unit> all{{"<string> <vector> <algorithm> <cmath>", "-O2",
                         includes({"string", "vector", "algorithm", "cmath"})}};
  for (const std::string& header : headers_of_ops(command))
    all.push_back({header, "-O2", includes({header})});
  for (const char* flag : {"-O0", "-O2"})
    all.push_back({"Dar<float>, forward and backward", flag, both_calls("heed/engine/doors.hpp")});
  all.push_back(
      {"the same by heed/compiled_engine.hpp", "-O2", both_calls("heed/compiled_engine.hpp")});
  all.push_back({"the same from heed/compiled.hpp", "-O2", both_calls("heed/compiled.hpp")});
  all.push_back({"heed/attention.hpp", "-O2", includes({"heed/attention.hpp"})});
  all.push_back({"Dar<float> through heed/attention.hpp", "-O2", both_calls("heed/attention.hpp")});
  return all;
}

Cost compile(const std::vector<std::string>& command) {
  std::vector<char*> arguments;
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  pid_t child = 0;
  const int started =
      posix_spawnp(&child, arguments[0], nullptr, nullptr, arguments.data(), environ);
  if (started != 0) throw std::runtime_error("cannot start " + command[0]);
  int status = 0;
  rusage used{};
  if (wait4(child, &status, 0, &used) != child || status != 0)
    throw std::runtime_error(command[0] + " failed at " + command.back());
  const auto seconds = [](const timeval& t) { return double(t.tv_sec) + 1e-6 * double(t.tv_usec); };
  return {seconds(used.ru_utime) + seconds(used.ru_stime), double(used.ru_maxrss) / 1024.0};
}

Cost median_cost(const Unit& unit, const std::string& folder, std::vector<std::string> command) {
  const std::string source = folder + "/unit.cpp";
  std::ofstream(source) << unit.text;
  command.insert(command.end(), {unit.flag, "-o", folder + "/unit.o", "-c", source});
  std::array<Cost, 3> costs{};
  for (Cost& cost : costs) cost = compile(command);
  std::sort(costs.begin(), costs.end(),
            [](const Cost& a, const Cost& b) { return a.seconds < b.seconds; });
  return costs[1];
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 3) throw std::runtime_error("usage: heed_compile_cost FOLDER COMPILER FLAG...");
  const std::string folder = argv[1];
  const std::vector<std::string> command(argv + 2, argv + argc);
  std::filesystem::create_directories(folder);
  std::printf("%-40s %-5s %8s %8s\n", "file that includes", "", "seconds", "MB");
  for (const Unit& unit : units(command)) {
    const Cost cost = median_cost(unit, folder, command);
    std::printf("%-40s %-5s %8.2f %8.0f\n", unit.name.c_str(), unit.flag.c_str(), cost.seconds,
                cost.megabytes);
    std::fflush(stdout);
  }
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "heed_compile_cost: %s\n", error.what());
  return 2;
}
