// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reads and writes a struct of settings as JSON. The struct lists its fields once: S::for_each_field(s, f) calls
// f(name, member) for each.

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

// Reads settings from JSON. A field that the text lacks keeps its default; a field that S lacks is refused. Throws
// std::invalid_argument with a sentence that begins with `what`.
template <class S>
[[nodiscard]] S from_json(const std::string& text, const std::string& what) {
  S settings;
  std::set<std::string> known;
  try {
    const nlohmann::json object = nlohmann::json::parse(text);
    heed::require(object.is_object(), what, " must be a JSON object");
    S::for_each_field(settings, [&](const char* name, auto& value) {
      known.insert(name);
      if (!object.contains(name)) return;
      const nlohmann::json& stored = object.at(name);
      stored.get_to(value);
      // Texts are compared too, since the JSON numbers -1 and 2^64 - 1 compare equal.
      const nlohmann::json taken(value);
      const bool same =
          taken == stored && (!stored.is_number_integer() || !taken.is_number_integer() ||
                              taken.dump() == stored.dump());
      heed::require(same, what, " has ", name, " = ", stored.dump(), ", which would be read as ",
                    taken.dump());
    });
    for (const auto& [name, value] : object.items())
      heed::require(known.contains(name), what, " has the field \"",
                    name.size() > 80 ? name.substr(0, 80) + "..." : name,
                    "\", which this program does not know");
  } catch (const nlohmann::json::exception& error) {
    const std::string words = error.what();  // may quote the whole text
    heed::fail(what, " cannot be read (", words.size() > 200 ? words.substr(0, 200) + "..." : words,
               ")");
  }
  return settings;
}

}  // namespace heed_lm
