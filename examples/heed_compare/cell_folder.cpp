// SPDX-License-Identifier: Apache-2.0
#include "cell_folder.hpp"

#include "cell_json.hpp"
#include "print.hpp"

#include "../tasks/task_list.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>

namespace compare {

namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

// Goes up when the files of a folder change: older ones are then refused as other settings.
constexpr int kFolderFormat = 1;

constexpr const char* kSettingsFile = "settings.json";

[[nodiscard]] Json read_json(const fs::path& path) {
  const std::vector<std::byte> bytes = heed::io::read_file(path);
  try {
    return Json::parse(reinterpret_cast<const char*>(bytes.data()),
                       reinterpret_cast<const char*>(bytes.data()) + bytes.size());
  } catch (const nlohmann::json::exception& error) {
    throw std::runtime_error(path.string() + ": " + error.what());
  }
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

// "steps is 100 there, 200 here; ..." for each field of one that the other has differently.
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

// The FNV-1a hash of a text.
[[nodiscard]] std::uint64_t hash_of(const std::string& text) {
  std::uint64_t hash = 0xCBF29CE484222325u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  return hash;
}

}  // namespace

CellFolder::CellFolder(fs::path folder, SharedSettings settings)
    : folder_(std::move(folder)), settings_(std::move(settings)) {
  const fs::path file = folder_ / kSettingsFile;
  std::error_code none;
  if (!fs::exists(file, none)) return;
  const Json there = heed_program::as_usage([&] { return read_json(file); });
  const std::string text = there.is_object() ? differences(there, json_of(settings_))
                                             : "settings.json is no JSON object";
  if (!text.empty())
    throw UsageError("--out " + folder_.string() + ": its cells have other settings: " + text);
}

void CellFolder::prepare() const {
  std::error_code error;
  fs::create_directories(folder_, error);
  if (error)
    throw std::runtime_error("--out " + folder_.string() + ": the folder cannot be made (" +
                             error.message() + ")");
  const fs::path file = folder_ / kSettingsFile;
  if (!fs::exists(file, error))
    heed_program::write_output(file.string(), json_of(settings_).dump(2) + "\n");
}

fs::path CellFolder::file_of(const Cell& cell) const {
  std::string name = cell.variant + "_" + tasks::task_name(cell.task);
  std::replace(name.begin(), name.end(), ':', '-');
  const std::string identity = json_of(cell).dump();
  return folder_ / (name + print("_lr%g_seed%llu_%016llx.json", cell.learning_rate,
                                 static_cast<unsigned long long>(cell.seed),
                                 static_cast<unsigned long long>(hash_of(identity))));
}

std::optional<CellResult> CellFolder::find(const Cell& cell) const {
  const fs::path file = file_of(cell);
  std::error_code none;
  if (!fs::exists(file, none)) return std::nullopt;
  const Json json = read_json(file);
  try {
    if (json.at("cell") != json_of(cell)) throw std::runtime_error("it is that of another cell");
    return cell_result_of(json.at("result").dump());
  } catch (const std::exception& error) {
    throw std::runtime_error(file.string() + ": " + error.what() +
                             "; without this file the cell is trained again");
  }
}

void CellFolder::keep(const Cell& cell, const std::string& result) const {
  heed_program::write_output(file_of(cell).string(),
                             "{\"cell\":" + json_of(cell).dump() + ",\"result\":" + result + "}\n");
}

}  // namespace compare
