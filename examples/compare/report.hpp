// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "measure.hpp"

namespace compare {

// Throws UsageError unless a file can be written there; leaves nothing behind.
void require_writable(const std::string& path);

[[nodiscard]] std::string table_text(const Settings&, const Machine&, const Comparison&);
[[nodiscard]] std::string json_text(const Settings&, const Machine&, const Comparison&);
// A header line, then one line per record.
[[nodiscard]] std::string csv_text(const Settings&, const Comparison&);

// The table, and the files that were asked for.
void write_reports(const Settings&, const Machine&, const Comparison&);

}  // namespace compare
