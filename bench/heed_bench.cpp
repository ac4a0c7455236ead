// SPDX-License-Identifier: Apache-2.0

// heed_bench runs Google Benchmark over variants x cases x {forward, backward} x {float, double, bf16, bf16-storage}, and
// over decoding x caches of {float, bf16, int8}, with peers (plain
// Eigen; OpenBLAS and libtorch where installed) in the same table. Each benchmark first compares a small call with the
// reference or with heed, and reports an error instead of a time if they differ. The baseline and the machine's peak are
// measured in turns with each benchmark. See bench/NOTES.md.
//
//   heed_bench                                           usual cases in float
//   heed_bench --benchmark_filter='^dar/forward/float'   any regular expression over the names
//   heed_bench --benchmark_filter='T1x'                  one query against the memory's bandwidth
//   heed_bench --benchmark_filter='/int8-cache/'         steps of decoding from a cache of int8
//   heed_bench --benchmark_filter='^layer'               a layer on all cores, free and busy, against one thread
//   heed_bench --benchmark_repetitions=5 --benchmark_report_aggregates_only=true
//   heed_bench --benchmark_out=FILE                      JSON, with all counters
//   heed_bench --table                                   the table of bench/NOTES.md for this machine
//   heed_bench --tune                                    which tile sizes are faster here than the plan's

#include "peers/peers.hpp"
#include "suite/case.hpp"
#include "suite/report.hpp"
#include "suite/suite.hpp"

#include "../examples/programs/program/program.hpp"
#include "../examples/programs/program/words.hpp"
#include "../examples/zoo/left_out.hpp"

#include <heed/version.hpp>

#include <charconv>
#include <cmath>
#include <cstdio>
#include <memory>
#include <optional>
#include <sstream>

namespace {

constexpr const char* kHelp =
    R"(Times every variant in several cases, forward and backward: in float, in double, and on tensors of bfloat16, with products in
bfloat16 (bf16) or all in float (bf16-storage); and steps of decoding from a cache (float-cache, bf16-cache, int8-cache). Other
libraries, plain attention and the machine's peak are measured in turns with it. Each benchmark first compares a small call with its
slow twin.
Usage: heed_bench [OPTIONS]

Options:
  -h,--help                                Prints this help and ends
  --version                                Prints the version and ends
  --table                                  Prints one table in Markdown: the variants in the usual cases in float, over
                                           plain attention, whose shares of the peak it has; takes minutes
  --tune                                   Prints what the plan of plain attention chooses in the usual cases, and
                                           which tile sizes are faster here; takes minutes
  --benchmark_filter=REGEX                 Runs the benchmarks whose name, CONTENDER/PASS/DTYPE/CASE, matches
                                           (default: the usual four cases in float)
  --benchmark_list_tests={true|false}      Lists their names instead of running them (default false)
  --benchmark_repetitions=N                Runs each N times and adds mean, median and spread (default 1)
  --benchmark_report_aggregates_only={true|false}
                                           Shows only mean, median and spread (default false)
  --benchmark_enable_random_interleaving={true|false}
                                           Runs the repetitions in random order (default false)
  --benchmark_format={console|json|csv}    Format of standard output (default console: rows and tables)
  --benchmark_out=FILE                     Writes the results into a file as well
  --benchmark_out_format={json|csv}        Format of that file (default json)
  --benchmark_color={auto|true|false}      Colours (default auto: on a terminal, unless NO_COLOR is set)
  --benchmark_context=KEY=VALUE,...        Adds entries to the head of JSON
Google Benchmark's other options work as well. Each benchmark runs for at least 0.1 s.

)";

constexpr const char* kOutput =
    "\nStandard output has the machine, what the program was compiled for, and the results: times "
    "are medians. bench/FORMATS.md\ndescribes names and counters.\n";

// The arguments of the command line; those that heed_bench reads itself are removed from it.
class Arguments {
 public:
  Arguments(int argc, char** argv) : words_(argv, argv + argc) {}

  [[nodiscard]] bool has(const std::string& word) const {
    return std::find(words_.begin() + 1, words_.end(), word) != words_.end();
  }
  // The value of the last --benchmark_NAME=VALUE.
  [[nodiscard]] std::optional<std::string> value(const std::string& name) const {
    std::optional<std::string> found;
    const std::string begin = "--benchmark_" + name + "=";
    for (const std::string& word : words_)
      if (word.starts_with(begin)) found = word.substr(begin.size());
    return found;
  }
  [[nodiscard]] bool names(const std::string& name) const {
    return value(name) || has("--benchmark_" + name);
  }
  void remove(const std::string& name) {
    std::erase_if(words_, [&](const std::string& word) {
      return word.starts_with("--benchmark_" + name + "=");
    });
  }
  void add(std::string word) { words_.push_back(std::move(word)); }

  // Passes the arguments to Google Benchmark, which takes those that it knows.
  void initialize() {
    std::vector<char*> pointers;
    for (std::string& word : words_) pointers.push_back(word.data());
    int count = int(pointers.size());
    pointers.push_back(nullptr);
    benchmark::Initialize(&count, pointers.data());
    if (count > 1)
      throw heed_program::UsageError(std::string("the argument is ") + pointers[1] +
                                     ", which is no option or has a wrong value; --help lists the "
                                     "options" +
                                     meant(pointers[1]));
  }

 private:
  // The option that the user may have meant, among those that begin a line of kHelp.
  [[nodiscard]] static std::string meant(const std::string& argument) {
    std::vector<std::string> known;
    std::istringstream help(kHelp);
    for (std::string line; std::getline(help, line);)
      if (const std::size_t at = line.find("--"); line.starts_with("  -"))
        known.push_back(line.substr(at, line.find_first_of("= ", at) - at));
    return heed_program::did_you_mean(argument.substr(0, argument.find('=')), known);
  }

  std::vector<std::string> words_;
};

// of_variants: leaves out the zoo.
[[nodiscard]] std::string usual_filter(bool of_variants) {
  std::string filter = of_variants ? "^[^:/]*/[a-z]*/float/(" : "/float/(";
  for (std::size_t i = 0; i < heed_bench::kUsualCases; ++i)
    filter += (i > 0 ? "|" : "") + heed_bench::cases()[i].text();
  return "--benchmark_filter=" + filter + ")/";
}

void add_all() {
  heed_bench::add_float();
  heed_bench::add_double();
  heed_bench::add_bfloat16();
  heed_bench::add_caches();
  heed_bench::add_zoo();
  heed_bench::add_layer();
  heed_bench::add_eigen();
#ifdef HEED_BENCH_BLAS
  heed_bench::add_blas();
#endif
#ifdef HEED_BENCH_TORCH
  heed_bench::add_torch();
#endif
}

void require_instruction_set() {
  if (const char* missing = heed_program::missing_instruction_set())
    throw std::runtime_error(std::string("compiled for ") + missing +
                             ", which this processor does not have; compile heed_bench on this "
                             "machine");
}

// Throws UsageError for values that Google Benchmark would misread, or for which it would end the program.
void require_values(const Arguments& arguments) {
  const auto one_of = [&](const char* name, const std::vector<std::string>& known) {
    const auto value = arguments.value(name);
    if (!value || std::find(known.begin(), known.end(), *value) != known.end()) return;
    std::string words;
    for (const std::string& word : known) words += (words.empty() ? "" : " or ") + word;
    throw heed_program::UsageError("--benchmark_" + std::string(name) + " is \"" + *value +
                                   "\", it must be " + words);
  };
  one_of("format", {"console", "json", "csv"});
  one_of("out_format", {"json", "csv"});
  if (const auto text = arguments.value("repetitions")) {
    int count = 0;
    const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), count);
    if (error != std::errc() || end != text->data() + text->size() || count < 1 ||
        count > 1'000'000)
      throw heed_program::UsageError("--benchmark_repetitions is \"" + *text +
                                     "\", it must be a whole number from 1 to 1000000");
  }
  if (const auto filter = arguments.value("filter"))
    if (const std::size_t at = filter->find("zoo:");
        at != std::string::npos && zoo::is_left_out(filter->substr(at)))
      throw heed_program::UsageError("--benchmark_filter is \"" + *filter + "\", " + zoo::kLeftOut);
  if (const auto out = arguments.value("out"))
    heed_program::require_output("--benchmark_out", *out);
}

[[nodiscard]] bool wants_colours(const Arguments& arguments) {
  const std::string wish = arguments.value("color").value_or("auto");
  return wish == "auto" ? heed_program::colours(STDOUT_FILENO)
                        : wish == "true" || wish == "yes" || wish == "1";
}

[[nodiscard]] std::unique_ptr<benchmark::BenchmarkReporter> reporter_named(
    const std::string& format, bool colours) {
  if (format == "markdown") return std::make_unique<heed_bench::MarkdownReporter>();
  if (format == "json") return std::make_unique<benchmark::JSONReporter>();
  if (format == "console") return std::make_unique<heed_bench::TableReporter>(colours);
  return std::make_unique<heed_bench::CsvReporter>();
}

int run_benchmarks(Arguments& arguments, bool as_table) {
  require_values(arguments);
  const auto shown =
      reporter_named(as_table ? "markdown" : arguments.value("format").value_or("console"),
                     wants_colours(arguments));
  const std::string out = arguments.value("out").value_or("");
  const auto filed =
      out.empty() ? nullptr : reporter_named(arguments.value("out_format").value_or("json"), false);
  for (const char* own : {"out", "out_format", "format"}) arguments.remove(own);
  if (!arguments.names("filter") && !arguments.names("list_tests"))
    arguments.add(usual_filter(as_table));
  arguments.initialize();
  const heed_program::Machine machine = heed_program::this_machine();
  benchmark::AddCustomContext("machine", machine.name + ", " + machine.kind);
  benchmark::AddCustomContext("compiler", machine.compiler);
  benchmark::AddCustomContext("instructions", machine.flags);
  add_all();
  heed_bench::Results results(*shown, filed.get());
  const std::size_t count = benchmark::RunSpecifiedBenchmarks(&results);
  benchmark::Shutdown();
  std::cout.flush();
  if (count == 0) return 2;  // Google Benchmark has printed the reason
  if (!out.empty() && !arguments.names("list_tests"))
    heed_program::write_output(out, results.file_text());
  if (!std::cout) throw std::runtime_error("standard output cannot be written");
  if (results.failed() > 0)
    throw std::runtime_error(std::to_string(results.failed()) + " of " + std::to_string(count) +
                             " benchmarks failed");
  return 0;
}

int run(int argc, char** argv) {
  require_instruction_set();
  Arguments arguments(argc, argv);
  if (arguments.has("--help") || arguments.has("-h")) {
    std::printf("%s%s%s", kHelp, heed_program::kExitCodes, kOutput);
    return 0;
  }
  if (arguments.has("--version")) {
    std::printf("heed_bench %s\n", heed::kVersionText);
    return 0;
  }
  if (arguments.has("--tune")) {
    if (argc > 2) throw heed_program::UsageError("--tune takes no other option beside it");
    heed_bench::tune();
    return 0;
  }
  if (arguments.has("--table")) {
    if (argc > 2) throw heed_program::UsageError("--table takes no other option beside it");
    Arguments usual(1, argv);
    return run_benchmarks(usual, true);
  }
  return run_benchmarks(arguments, false);
}

}  // namespace

int main(int argc, char** argv) {
  return heed_program::run("heed_bench", [&] { return run(argc, argv); });
}
