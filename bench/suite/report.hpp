// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reports results: rows on the console below a line about the machine, after them one table per
// pass and type, contenders by cases; and a file.

#include "../../examples/programs/program/machine.hpp"

#include <heed/version.hpp>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <ctime>
#include <iomanip>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

namespace heed_bench {

// "AMD EPYC 7763, Zen 3 (AVX2), 2 processors, load 0.1; g++ 12.2.0: avx2 fma avx optimised ndebug openmp"
[[nodiscard]] inline std::string machine_line(const benchmark::CPUInfo& info) {
  const heed_program::Machine machine = heed_program::this_machine();
  std::ostringstream line;
  line << machine.name << ", " << machine.kind << ", " << machine.cores << " processors";
  if (!info.load_avg.empty()) line << ", load " << info.load_avg[0];
  line << "; " << machine.compiler << ": " << machine.flags << "\n";
  return line.str();
}

// The parts of a benchmark's name.
struct RunName {
  std::string contender, pass, dtype, shape;

  explicit RunName(const benchmark::BenchmarkReporter::Run& run) {
    std::istringstream parts(run.run_name.function_name);
    for (std::string* part : {&contender, &pass, &dtype, &shape}) std::getline(parts, *part, '/');
  }
};

[[nodiscard]] inline double counter(const benchmark::UserCounters& counters, const char* name) {
  const auto found = counters.find(name);
  return found == counters.end() ? 0.0 : found->second.value;
}
// With repetitions the median comes last.
[[nodiscard]] inline bool is_result(const benchmark::BenchmarkReporter::Run& run) {
  using Run = benchmark::BenchmarkReporter::Run;
  return !run.error_occurred &&
         (run.run_type == Run::RT_Iteration || run.aggregate_name == "median");
}
inline void add_once(std::vector<std::string>& list, const std::string& x) {
  if (std::find(list.begin(), list.end(), x) == list.end()) list.push_back(x);
}

// Rows with the wall time of a benchmark. Processor time is that of one thread, and is only in JSON.
class TableReporter : public benchmark::ConsoleReporter {
 public:
  explicit TableReporter(bool colors) : ConsoleReporter(colors ? OO_Defaults : OO_Tabular) {}

  bool ReportContext(const Context& context) override {
    name_field_width_ = context.name_field_width;
    GetOutputStream() << machine_line(context.cpu_info);
    return true;
  }

  void ReportRuns(const std::vector<Run>& runs) override {
    ConsoleReporter::ReportRuns(runs);
    for (const Run& run : runs)
      if (is_result(run)) note(run);
  }

  void Finalize() override {
    ConsoleReporter::Finalize();
    for (const auto& [name, table] : tables_) print(name, table);
  }

 protected:
  void PrintHeader(const Run& run) override {
    std::ostringstream head;
    head << name_of("Benchmark") << std::setw(kTime + 2) << "Time" << std::setw(kCalls) << "Calls";
    for (const auto& [name, value] : run.counters) head << std::setw(width_of(name)) << name;
    const std::string rule(head.str().size(), '-');
    GetOutputStream() << rule << "\n" << head.str() << "\n" << rule << "\n";
  }

  void PrintRunData(const Run& run) override {
    std::ostream& out = GetOutputStream();
    const bool colours = (output_options_ & OO_Color) != 0;
    out << (colours ? "\033[32m" : "") << name_of(run.benchmark_name())
        << (colours ? "\033[m" : "");
    if (run.error_occurred) {
      out << " failed: " << run.error_message << "\n";
      return;
    }
    const bool percent = run.run_type == Run::RT_Aggregate &&
                         run.aggregate_unit == benchmark::StatisticUnit::kPercentage;
    const auto put = [&](int width, double value, const char* unit) {
      out << std::setw(width) << number(percent ? 100 * value : value)
          << (percent ? "%" : std::string(unit));
    };
    if (percent)
      put(kTime, run.real_accumulated_time, "");
    else
      put(kTime, run.GetAdjustedRealTime(), benchmark::GetTimeUnitString(run.time_unit));
    out << std::setw(percent ? kCalls + 1 : kCalls) << run.iterations;
    for (const auto& [name, counter] : run.counters)
      put(width_of(name) - (percent ? 1 : 0), counter.value, "");
    out << "\n";
  }

 private:
  static constexpr int kTime = 12, kCalls = 9;

  [[nodiscard]] std::string name_of(std::string name) const {
    name.resize(std::max(name.size(), name_field_width_), ' ');
    return name;
  }
  [[nodiscard]] static int width_of(const std::string& counter) {
    return std::max(11, int(counter.size()) + 1);
  }
  // A number with four digits.
  [[nodiscard]] static std::string number(double value) {
    std::ostringstream text;
    text << std::setprecision(4) << value;
    return text.str();
  }

  struct Table {
    std::vector<std::string> rows, columns;
    std::map<std::pair<std::string, std::string>, std::string> cells;
  };

  void note(const Run& run) {
    const RunName name(run);
    Table& table = tables_[name.pass + " " + name.dtype];
    add_once(table.rows, name.contender);
    add_once(table.columns, name.shape);
    table.cells[{name.contender, name.shape}] = cell(run.counters);
  }
  [[nodiscard]] static std::string cell(const benchmark::UserCounters& counters) {
    std::ostringstream out;
    for (const char* name : {"x_sdpa", "x_one_thread"})
      if (const double ratio = counter(counters, name); ratio > 0)
        out << std::fixed << std::setprecision(ratio < 10 ? 2 : 1) << ratio << "x ";
    if (counters.contains("x_one_thread")) return out.str();
    out << std::fixed << std::setprecision(0)
        << 100 * (counter(counters, "peak") + counter(counters, "read")) << "%";
    return out.str();
  }

  void print(const std::string& name, const Table& table) {
    std::ostream& out = GetOutputStream();
    std::size_t first = 0;
    for (const std::string& row : table.rows) first = std::max(first, row.size());
    out << "\n"
        << name
        << ": time over sdpa's (layer: over one thread's), and share of the FMA peak (one query: "
           "of the read "
           "bandwidth)\n"
        << std::string(first, ' ');
    const auto width = [](const std::string& column) {
      return int(std::max<std::size_t>(column.size(), 10)) + 2;
    };
    for (const std::string& column : table.columns) out << std::setw(width(column)) << column;
    out << "\n";
    for (const std::string& row : table.rows) {
      out << std::left << std::setw(int(first)) << row << std::right;
      for (const std::string& column : table.columns) {
        const auto found = table.cells.find({row, column});
        out << std::setw(width(column)) << (found == table.cells.end() ? "" : found->second);
      }
      out << "\n";
    }
  }

  std::map<std::string, Table> tables_;
};

// The table of --table, in Markdown: contenders by cases, forward / backward; of plain attention the shares of the FMA peak, of
// others the time over its.
class MarkdownReporter : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context& context) override {
    const std::time_t now = std::time(nullptr);
    GetOutputStream() << machine_line(context.cpu_info) << "heed " << heed::kVersionText
                      << ", commit " << HEED_COMMIT << ", "
                      << std::put_time(std::gmtime(&now), "%F") << "\n\n";
    return true;
  }
  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) {
      if (!is_result(run)) continue;
      const RunName name(run);
      add_once(rows_, name.contender);
      add_once(columns_, name.shape);
      std::ostringstream cell;
      cell << std::fixed;
      if (const double ratio = counter(run.counters, "x_sdpa"); ratio > 0)
        cell << std::setprecision(ratio < 10 ? 2 : 1) << ratio;
      else
        cell << std::setprecision(0) << 100 * counter(run.counters, "peak") << " %";
      cells_[{name.contender, name.shape, name.pass}] = cell.str();
    }
  }
  void Finalize() override {
    std::ostream& out = GetOutputStream();
    out << "|";
    for (const std::string& column : columns_) out << " | " << column;
    out << " |\n|---|";
    for (std::size_t i = 0; i < columns_.size(); ++i) out << "---|";
    for (const std::string& row : rows_) {
      out << "\n| " << row;
      for (const std::string& column : columns_) {
        const auto cell = [&](const char* pass) {
          const auto found = cells_.find({row, column, pass});
          return found == cells_.end() ? "-" : found->second;
        };
        out << " | " << cell("forward") << " / " << cell("backward");
      }
      out << " |";
    }
    out << "\n";
  }

 private:
  std::vector<std::string> rows_, columns_;
  std::map<std::tuple<std::string, std::string, std::string>, std::string> cells_;
};

// Google Benchmark warns that its CSV reporter is deprecated; it has no other.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
class CsvReporter : public benchmark::CSVReporter {
 public:
  bool ReportContext(const Context& context) override {
    GetErrorStream() << machine_line(context.cpu_info);
    return true;
  }
};
#pragma GCC diagnostic pop

// The console's output, the text of a file beside it, and the number of benchmarks that failed.
class Results : public benchmark::BenchmarkReporter {
 public:
  Results(benchmark::BenchmarkReporter& shown, benchmark::BenchmarkReporter* filed)
      : shown_(shown), filed_(filed) {
    if (filed_ == nullptr) return;
    filed_->SetOutputStream(&text_);
    filed_->SetErrorStream(&std::cerr);
  }
  bool ReportContext(const Context& context) override {
    if (filed_ != nullptr && !filed_->ReportContext(context)) return false;
    return shown_.ReportContext(context);
  }
  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) failed_ += run.error_occurred;
    shown_.ReportRuns(runs);
    if (filed_ != nullptr) filed_->ReportRuns(runs);
  }
  void Finalize() override {
    shown_.Finalize();
    if (filed_ != nullptr) filed_->Finalize();
  }
  [[nodiscard]] int failed() const { return failed_; }
  [[nodiscard]] std::string file_text() const { return text_.str(); }

 private:
  benchmark::BenchmarkReporter& shown_;
  benchmark::BenchmarkReporter* filed_;
  std::ostringstream text_;
  int failed_ = 0;
};

}  // namespace heed_bench
