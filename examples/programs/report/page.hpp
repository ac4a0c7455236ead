// SPDX-License-Identifier: Apache-2.0
#pragma once

// A folder with a page of pictures: report.html, which needs nothing else, and each picture as a file of its
// own, <name>.svg, light or dark as its reader prefers. Each file is replaced as a whole; others in the folder are
// left alone.

#include "drawing.hpp"

#include <filesystem>
#include <utility>

namespace heed_report {

struct Table {
  std::string title;
  std::vector<std::string> head;
  std::vector<std::vector<std::string>> rows = {};  // each as long as the head
};

struct Page {
  std::string title;
  std::vector<std::pair<std::string, std::string>> facts;  // name, value
  std::vector<Picture> pictures;
  std::vector<Table> tables = {};  // above the pictures; a table without rows is not shown
};

[[nodiscard]] std::string html_text(const Page& page);
[[nodiscard]] std::string svg_text(const Picture& picture);

// Makes the folder if needed, and checks that files can be written. Throws std::runtime_error, one sentence.
void prepare_folder(const std::filesystem::path& folder);

// Throws std::runtime_error, one sentence.
void write_page(const std::filesystem::path& folder, const Page& page);

}  // namespace heed_report
