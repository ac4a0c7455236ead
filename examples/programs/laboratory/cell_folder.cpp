// SPDX-License-Identifier: Apache-2.0
#include "cell_folder.hpp"

#include "../heed_compare/print.hpp"
#include "cell_json.hpp"

#include "../tasks/task_list.hpp"

#include <heed/io/checksums.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>

namespace compare {

namespace {

using Json = nlohmann::json;  // fields are sorted by name, in whatever order a file has them
namespace fs = std::filesystem;

// Goes up when the format of a folder's files changes: older folders are then refused, as folders of other settings are.
constexpr int kFolderFormat = 3;

constexpr const char *kSettingsFile = "settings.json", *kLockFile = ".lock";

// A discarded value if the file is not JSON.
[[nodiscard]] Json read_json(const fs::path& path) {
  const std::vector<std::byte> bytes = heed::io::read_file(path);
  const auto* begin = reinterpret_cast<const char*>(bytes.data());
  return Json::parse(begin, begin + bytes.size(), nullptr, false);
}

// The object of that name in a cell. Throws std::runtime_error.
[[nodiscard]] const Json& object_in(const Json& cell, const char* name) {
  if (cell.is_discarded()) throw std::runtime_error("it is cut off, or is no JSON");
  if (!cell.is_object() || !cell.contains(name))
    throw std::runtime_error(std::string(name) + " is missing");
  if (!cell.at(name).is_object())
    throw std::runtime_error(std::string(name) + " is no JSON object");
  return cell.at(name);
}

[[nodiscard]] Json json_of(const Cell& cell) {
  Json json;
  Cell::for_each_field(cell, [&](const char* name, const auto& value) { json[name] = value; });
  return json;
}

[[nodiscard]] Json json_of(const SharedSettings& settings) {
  Json json = {{"format", kFolderFormat}};
  for (const auto& [name, value] : settings) json[name] = Json::parse(value);
  return json;
}

// A sentence for each field that differs: "steps is 100 there, 200 here; ...".
[[nodiscard]] std::string differences(const Json& there, const Json& here) {
  std::string text;
  const auto value = [](const Json& json, const std::string& name) {
    return json.contains(name) ? json.at(name).dump() : std::string("not given");
  };
  const auto compare = [&](const std::string& name) {
    const std::string a = value(there, name), b = value(here, name);
    if (a != b) text += (text.empty() ? "" : "; ") + name + " is " + a + " there, " + b + " here";
  };
  for (const auto& [name, own] : here.items()) compare(name);
  for (const auto& [name, other] : there.items())
    if (!here.contains(name)) compare(name);
  return text;
}

[[nodiscard]] std::string checksum_of(const Json& value) {
  const std::string text = value.dump();
  return heed::io::checksum_of(std::as_bytes(std::span(text)));
}

// The cell's result, from its file. Throws std::runtime_error that says what is wrong with the file.
[[nodiscard]] CellResult result_in(const Json& json, const Cell& cell) {
  if (object_in(json, "cell") != json_of(cell)) throw std::runtime_error("cell is another one");
  const Json &result = object_in(json, "result"), &sums = object_in(json, "checksums");
  CellResult read = cell_result_of(result.dump());
  for (const auto& [name, value] : result.items())
    if (!sums.contains(name) || sums.at(name) != checksum_of(value))
      throw std::runtime_error("result." + name + " is not what was written, by its checksum");
  return read;
}

// The settings in settings.json; null if it is missing or damaged.
[[nodiscard]] Json settings_in(const fs::path& folder) {
  const fs::path file = folder / kSettingsFile;
  std::error_code none;
  if (!fs::exists(file, none)) return nullptr;
  const Json json = heed_program::as_usage([&] { return read_json(file); });
  return json.is_object() ? json : nullptr;
}

// The settings that a cell of the folder carries; null without cells.
[[nodiscard]] Json settings_of_cells(const fs::path& folder) {
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(folder, none)) {
    if (entry.path().extension() != ".json" || entry.path().filename() == kSettingsFile ||
        !entry.is_regular_file(none))
      continue;
    const Json json = heed_program::as_usage([&] { return read_json(entry.path()); });
    try {
      (void)object_in(json, "cell");
      return object_in(json, "settings");
    } catch (const std::runtime_error&) {  // a damaged file says nothing of settings
    }
  }
  return nullptr;
}

}  // namespace

CellFolder::CellFolder(fs::path folder, SharedSettings settings)
    : folder_(std::move(folder)), settings_(std::move(settings)) {
  require_same(false);
}

void CellFolder::require_same(bool in_use) const {
  const Json own = json_of(settings_);
  const Json there = in_use ? settings_in(folder_) : settings_of_cells(folder_);
  if (!in_use && there.is_null()) return;
  const std::string out = "--out " + folder_.string() + ": ";
  if (there.is_null())
    throw UsageError(out + lock_->holder() + " uses it, and its settings.json is lost");
  const std::string text = differences(there, own);
  if (!text.empty())
    throw UsageError(out + (in_use ? lock_->holder() + " uses it with" : "its cells have") +
                     " other settings: " + text);
}

void CellFolder::open() {
  std::error_code error;
  fs::create_directories(folder_, error);
  if (error)
    throw std::runtime_error("--out " + folder_.string() + ": the folder cannot be made (" +
                             error.message() + ")");
  if (::access(folder_.c_str(), W_OK) != 0)
    return;  // finished runs can be read, and no run changes it
  heed::io::remove_leftovers(folder_);
  lock_.emplace(folder_ / kLockFile);
  if (lock_->try_alone()) {
    require_same(false);
    const Json own = json_of(settings_), there = settings_in(folder_);
    if (there.is_null() || !differences(there, own).empty())
      heed_program::write_output((folder_ / kSettingsFile).string(), own.dump(2) + "\n");
  }
  lock_->share();
  require_same(true);
}

fs::path CellFolder::file_of(const Cell& cell) const {
  std::string name = cell.variant + "_" + tasks::task_name(cell.task);
  std::replace(name.begin(), name.end(), ':', '-');
  return folder_ /
         (name +
          print("_lr%g_seed%llu_", cell.learning_rate, static_cast<unsigned long long>(cell.seed)) +
          checksum_of(json_of(cell)).substr(1) + ".json");
}

std::optional<CellResult> CellFolder::find(const Cell& cell) const {
  const fs::path file = file_of(cell);
  std::error_code none;
  if (!fs::exists(file, none)) return std::nullopt;
  const Json json = read_json(file);
  try {
    const std::string text = differences(object_in(json, "settings"), json_of(settings_));
    if (!text.empty())
      throw UsageError("--out " + folder_.string() + ": " + file.filename().string() +
                       " has other settings: " + text);
    return result_in(json, cell);
  } catch (const UsageError&) {
    throw;
  } catch (const std::runtime_error& error) {
    const std::string text = file.string() + ": " + error.what() + "; this run is made again";
    if (damaged_.insert(file).second)
      std::fprintf(stderr, "heed_compare: %s\n", heed::printable(text).c_str());
    return std::nullopt;
  }
}

void CellFolder::keep(const Cell& cell, const std::string& result) const {
  const Json parts = Json::parse(result);
  Json sums;
  for (const auto& [name, value] : parts.items()) sums[name] = checksum_of(value);
  const Json whole = {{"settings", json_of(settings_)},
                      {"cell", json_of(cell)},
                      {"checksums", sums},
                      {"result", parts}};
  heed_program::write_output(file_of(cell).string(), whole.dump() + "\n");
}

}  // namespace compare
