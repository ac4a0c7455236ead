// SPDX-License-Identifier: Apache-2.0
#pragma once

// Whatever the bytes, the reader takes the file or refuses it by std::runtime_error with one
// sentence. A file that it takes keeps all rules, counted here a second time, and comes back equal
// from the writer. A breach throws std::logic_error.

#include "bytes/bytes.hpp"

#include <heed/io/safetensors.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace fuzz_safetensors {

using heed::Index;
using heed::io::Safetensors;
using heed::io::SafetensorsWriter;
using heed::io::TensorInfo;

using heed_bytes::demand;

// Every data byte belongs to exactly one tensor, and each tensor has the bytes of its shape and width.
inline void check_spans(const Safetensors& file, std::size_t file_bytes) {
  static const std::map<std::string, unsigned> widths{
      {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1},
      {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},
      {"U32", 4},  {"F32", 4}, {"I64", 8}, {"U64", 8},     {"F64", 8}};
  demand(file.tensors().size() <= 65536, "more than 65,536 tensors");
  std::vector<int> owners(file_bytes);
  std::size_t covered = 0;
  for (const auto& [name, info] : file.tensors()) {
    demand(name.size() <= 1024 && name != "__metadata__", "name");
    demand(widths.contains(info.dtype) && info.shape.size() <= 8, "dtype or rank");
    std::size_t bytes = widths.at(info.dtype);
    for (const Index extent : info.shape) {
      demand(extent >= 0, "negative extent");
      const auto factor = static_cast<std::size_t>(extent);
      demand(bytes == 0 || factor <= SIZE_MAX / bytes, "size overflows");
      bytes *= factor;
    }
    demand(info.begin <= info.end && bytes == info.end - info.begin, "span and shape disagree");
    demand(file.bytes(name).size() == bytes, "bytes() and shape disagree");
    for (std::size_t i = info.begin; i < info.end; ++i) ++owners.at(i);
    covered += info.end - info.begin;
  }
  for (std::size_t i = 0; i < covered; ++i) demand(owners[i] == 1, "gap or overlap");
}

template <class Call>
void allow_refusal(const Call& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    demand(std::string(error.what()).starts_with("safetensors: "), "message without its source");
  } catch (const std::runtime_error& error) {
    demand(std::string(error.what()).starts_with("safetensors: "), "message without its source");
  }
}

// Conversions may refuse, but neither crash nor change a number.
inline void check_values(const Safetensors& file) {
  for (const auto& tensor : file.tensors()) {
    const std::string& name = tensor.first;
    allow_refusal([&] {
      const std::vector<double> wide = file.values<double>(name);
      allow_refusal([&] {
        const std::vector<float> narrow = file.values<float>(name);
        for (std::size_t i = 0; i < wide.size(); ++i)
          demand(static_cast<double>(narrow[i]) == wide[i] || wide[i] != wide[i], "float");
      });
      allow_refusal([&] {
        const std::vector<Index> whole = file.values<Index>(name);
        for (std::size_t i = 0; i < wide.size(); ++i)
          demand(static_cast<double>(whole[i]) == wide[i], "Index");
      });
    });
    allow_refusal([&] { (void)file.values<bool>(name); });
    allow_refusal([&] { (void)file.values<std::int8_t>(name); });
    allow_refusal([&] { (void)file.values<std::uint64_t>(name); });
    allow_refusal([&] { (void)file.view<double>(name); });
    allow_refusal([&] { (void)file.view<float>(name); });
    allow_refusal([&] { (void)file.view<std::uint16_t>(name); });
  }
}

inline void check_round_trip(const Safetensors& file) {
  SafetensorsWriter writer;
  for (const auto& [key, value] : file.metadata()) writer.set_metadata(key, value);
  for (const auto& [name, info] : file.tensors())
    writer.add_bytes(name, info.dtype, info.shape, file.bytes(name));
  const std::vector<std::byte> written = writer.bytes();
  const Safetensors again = Safetensors::parse(written);
  demand(again.metadata() == file.metadata(), "metadata changed");
  demand(again.tensors().size() == file.tensors().size(), "number of tensors changed");
  for (const auto& [name, info] : file.tensors()) {
    const TensorInfo& copy = again.info(name);
    demand(copy.dtype == info.dtype && copy.shape == info.shape, "dtype or shape changed");
    const auto before = file.bytes(name), after = again.bytes(name);
    demand(std::vector(before.begin(), before.end()) == std::vector(after.begin(), after.end()),
           "data changed");
  }
}

// True when the reader takes the file.
inline bool run(std::span<const std::byte> bytes) {
  try {
    const Safetensors file = Safetensors::parse({bytes.begin(), bytes.end()});
    check_spans(file, bytes.size());
    check_values(file);
    check_round_trip(file);
    return true;
  } catch (const std::runtime_error& error) {
    const std::string text = error.what();
    demand(text.starts_with("safetensors: "), "message without its source");
    demand(text.find('\n') == text.npos && text.size() < 400, "message longer than a sentence");
    return false;
  }
}

}  // namespace fuzz_safetensors
