// SPDX-License-Identifier: Apache-2.0
#pragma once

// Settings as JSON. A struct names its fields once: S::for_each_field(s, f) calls f(name, member).

#include <heed/core/error.hpp>

#include <nlohmann/json.hpp>

#include <set>
#include <string>

namespace heed_lm {

template <class S>
[[nodiscard]] std::string json_of(const S& settings) {
  nlohmann::json object;
  S::for_each_field(settings, [&](const char* name, const auto& value) { object[name] = value; });
  return object.dump();
}

// A field that the text does not have keeps its default; one that S does not have is refused. Throws
// std::invalid_argument; `what` begins the sentence.
template <class S>
[[nodiscard]] S from_json(const std::string& text, const std::string& what) {
  S settings;
  std::set<std::string> known;
  try {
    const nlohmann::json object = nlohmann::json::parse(text);
    heed::require(object.is_object(), what, " is no JSON object");
    S::for_each_field(settings, [&](const char* name, auto& value) {
      known.insert(name);
      if (!object.contains(name)) return;
      object.at(name).get_to(value);
      heed::require(nlohmann::json(value) == object.at(name), what, " has ", name, " = ",
                    object.at(name).dump(), ", which would be read as ", nlohmann::json(value).dump());
    });
    for (const auto& [name, value] : object.items())
      heed::require(known.contains(name), what, " has the field \"", name,
                    "\", which this program does not know");
  } catch (const nlohmann::json::exception& error) {
    heed::fail(what, " cannot be read (", error.what(), ")");
  }
  return settings;
}

}  // namespace heed_lm
