// SPDX-License-Identifier: Apache-2.0
#include "report.hpp"

#include "print.hpp"

#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdio>
#include <sstream>

namespace compare {

namespace {

[[nodiscard]] std::string header_text(const Settings& settings, const Machine& machine,
                                      const Comparison& comparison) {
  const heed::Shape& s = settings.shape;
  std::ostringstream text;
  text << "machine    " << machine.name << ", " << machine.kind << ", " << machine.cores
       << " cores\n"
       << "compiled   " << machine.compiler << ": " << machine.flags << "\n"
       << "threads    " << settings.threads << "\n"
       << "shape      B,H,T,d = " << s.batch << "," << s.heads << "," << s.len << "," << s.dim
       << (settings.causal ? ", causal\n" : ", every token sees all\n") << "text       "
       << comparison.text_source << ", " << comparison.text_bytes << " bytes, repeated or cut to "
       << s.batch * s.len << " tokens; seed " << settings.seed << "\n";
  for (const auto& [dtype, peak] : comparison.peak_gflops)
    text << print("peak       %s %.1f GFLOP/s (%d threads), medians of %d rounds\n",
                  dtype_name(dtype), peak, settings.threads, comparison.rounds.at(dtype));
  if (!comparison.records.empty()) text << "ratios     " << movement_text(comparison) << "\n";
  return text.str();
}

[[nodiscard]] std::string scratch_text(Index bytes) {
  if (bytes < 10 * 1024) return std::to_string(bytes) + " B";
  if (bytes < 10 * 1024 * 1024) return print("%.0f KiB", double(bytes) / 1024);
  return print("%.0f MiB", double(bytes) / (1024.0 * 1024.0));
}

// "1.12-1.18"
[[nodiscard]] std::string quartiles_text(const heed::Spread& ratio) {
  const int decimals = ratio.upper < 10 ? 2 : 1;
  return print("%.*f-%.*f", decimals, ratio.lower, decimals, ratio.upper);
}

[[nodiscard]] std::string pass_columns(const Record& r) {
  return print(" %9.3f %5.1f %5.2f %9s %8s", r.ms, 100 * r.peak_share, r.ratio.median,
               quartiles_text(r.ratio).c_str(), scratch_text(r.scratch_bytes).c_str());
}

[[nodiscard]] std::string table_of(const Comparison& comparison, Dtype dtype) {
  const int name = 18, pass = 41;
  std::string text = print("\n%-*s |%*s |%*s | gradient\n", name, dtype_name(dtype), pass,
                           "forward             ", pass, "backward            ");
  const char* columns = "        ms peak% ratio quartiles  scratch";
  text += print("%-*s |%s|%s|    error\n", name, "", columns, columns);
  text += std::string(std::size_t(name + 2 * pass + 17), '-') + "\n";
  // Forward and backward of a variant stand side by side in the records.
  const std::vector<Record>& records = comparison.records;
  for (std::size_t i = 0; i + 1 < records.size(); i += 2) {
    if (records[i].dtype != dtype) continue;
    text += print("%-*s |%s |%s |  %7.1e\n", name, records[i].variant.c_str(),
                  pass_columns(records[i]).c_str(), pass_columns(records[i + 1]).c_str(),
                  records[i].gradient_error);
  }
  return text;
}

[[nodiscard]] std::string legend_text(const Comparison& comparison) {
  std::ostringstream text;
  text
      << "\npeak%     flops of plain attention's two (forward) or five (backward) products per "
         "second, "
         "as a share of the peak\n"
         "ratio     time relative to sdpa in the same round: median and quartiles of the rounds\n"
         "scratch   largest memory held during a call beyond inputs, outputs and saved rows\n"
         "gradient  worst |backward - difference| / max(1, |gradient|) over inputs and parameters; "
         "central differences\n"
         "          of forward in double, shape "
      << comparison.gradient_shape.text() << "\n";
  return text.str();
}

[[nodiscard]] std::string settings_text(const Settings& settings, const Comparison& comparison) {
  std::string text = "\nvariants: their options; hyper-parameters; shapes of their inputs\n";
  for (const Record& record : comparison.records)
    if (record.dtype == settings.dtypes.front() && record.pass == "forward")
      text += print("  %-18s ", record.variant.c_str()) + record.settings + "\n";
  return text;
}

[[nodiscard]] nlohmann::ordered_json record_json(const Settings& settings, const Record& r) {
  const heed::Shape& s = settings.shape;
  return {{"variant", r.variant},
          {"dtype", dtype_name(r.dtype)},
          {"shape", {s.batch, s.heads, s.len, s.dim}},
          {"causal", settings.causal},
          {"threads", settings.threads},
          {"pass", r.pass},
          {"ms", r.ms},
          {"gflops", r.gflops},
          {"peak_share", r.peak_share},
          {"ratio_to_baseline", r.ratio.median},
          {"ratio_low", r.ratio.lower},
          {"ratio_high", r.ratio.upper},
          {"scratch_bytes", r.scratch_bytes},
          {"gradient_error", r.gradient_error},
          {"settings", r.settings}};
}

[[nodiscard]] std::string csv_quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? "\"\"" : std::string(1, c);
  return quoted + "\"";
}

[[nodiscard]] std::string csv_line(const Settings& settings, const Record& r) {
  const heed::Shape& s = settings.shape;
  const std::string shape = print("%td,%td,%td,%td", s.batch, s.heads, s.len, s.dim);
  std::string line =
      print("%s,%s,\"%s\",%s,%d,%s,", r.variant.c_str(), dtype_name(r.dtype), shape.c_str(),
            settings.causal ? "true" : "false", settings.threads, r.pass.c_str());
  for (const double x : {r.ms, r.gflops, r.peak_share, r.ratio.median})
    line += csv_number(x, 6) + ",";
  return line + std::to_string(r.scratch_bytes) + "," + csv_number(r.gradient_error, 6) + "," +
         csv_quoted(r.settings) + "," + csv_number(r.ratio.lower, 6) + "," +
         csv_number(r.ratio.upper, 6) + "\n";
}

}  // namespace

void write_files(const Settings& settings, const std::string& json, const std::string& csv) {
  const auto write = [](const std::string& path, const std::string& text) {
    if (!path.empty()) heed_program::write_output(path, text);
  };
  heed_program::all_of(
      {[&] { write(settings.json_file, json); }, [&] { write(settings.csv_file, csv); }});
}

std::string table_text(const Settings& settings, const Machine& machine,
                       const Comparison& comparison) {
  std::string text = header_text(settings, machine, comparison);
  for (const Dtype dtype : settings.dtypes) text += table_of(comparison, dtype);
  return text + legend_text(comparison) + settings_text(settings, comparison);
}

heed_report::Table cost_table(const Comparison& comparison, Dtype dtype) {
  heed_report::Table table{
      std::string(dtype_name(dtype)) + ": time over that of sdpa, median and quartiles of rounds",
      {"variant", "pass", "ms", "peak %", "ratio", "quartiles", "scratch", "gradient error"}};
  for (const Record& r : comparison.records)
    if (r.dtype == dtype)
      table.rows.push_back({r.variant, r.pass, print("%.3f", r.ms),
                            print("%.1f", 100 * r.peak_share), print("%.2f", r.ratio.median),
                            quartiles_text(r.ratio), scratch_text(r.scratch_bytes),
                            print("%.1e", r.gradient_error)});
  return table;
}

std::string json_text(const Settings& settings, const Machine& machine,
                      const Comparison& comparison) {
  nlohmann::ordered_json peaks = nlohmann::ordered_json::object();
  for (const auto& [dtype, peak] : comparison.peak_gflops) peaks[dtype_name(dtype)] = peak;
  nlohmann::ordered_json records = nlohmann::ordered_json::array();
  for (const Record& record : comparison.records) records.push_back(record_json(settings, record));
  const nlohmann::ordered_json whole = {
      {"format", kJsonFormat},
      {"machine",
       {{"name", machine.name},
        {"cores", machine.cores},
        {"threads", settings.threads},
        {"flags", machine.flags},
        {"compiler", machine.compiler},
        {"peak_gflops", peaks}}},
      {"text", {{"source", comparison.text_source}, {"bytes", comparison.text_bytes}}},
      {"seed", settings.seed},
      {"records", records}};
  // A file name may be no UTF-8.
  return whole.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

std::string csv_text(const Settings& settings, const Comparison& comparison) {
  std::string text =
      "variant,dtype,shape,causal,threads,pass,ms,gflops,peak_share,ratio_to_baseline,"
      "scratch_bytes,gradient_error,settings,ratio_low,ratio_high\n";
  for (const Record& record : comparison.records) text += csv_line(settings, record);
  return text;
}

void write_reports(const Settings& settings, const Machine& machine, const Comparison& comparison) {
  std::fputs(table_text(settings, machine, comparison).c_str(),
             settings.data_on_stdout() ? stderr : stdout);
  write_files(settings, json_text(settings, machine, comparison), csv_text(settings, comparison));
}

}  // namespace compare
