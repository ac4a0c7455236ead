// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "measure.hpp"

#include "../report/page.hpp"

namespace compare {

// The field "format" of both kinds of JSON (bench/FORMATS.md). It goes up when a field changes or goes away.
inline constexpr int kJsonFormat = 1;

// Writes the texts to the files of --json and --csv, if these are given.
void write_files(const Settings&, const std::string& json, const std::string& csv);

[[nodiscard]] std::string table_text(const Settings&, const Machine&, const Comparison&);
[[nodiscard]] std::string json_text(const Settings&, const Machine&, const Comparison&);
// The table of a dtype, for pages.
[[nodiscard]] heed_report::Table cost_table(const Comparison&, Dtype);
// A header line, then one line per record.
[[nodiscard]] std::string csv_text(const Settings&, const Comparison&);

// Prints the table, and writes the requested files.
void write_reports(const Settings&, const Machine&, const Comparison&);

}  // namespace compare
