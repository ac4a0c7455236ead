// SPDX-License-Identifier: Apache-2.0
#pragma once

// An ART memory as a safetensors file.
//
//   tensor    prototypes (count, dim), F32 or F64, the bits as they are in memory
//   metadata  format = heed.art_memory, version = 1, capacity, dim, count,
//             matching (cosine | fuzzy), vigilance, learning_rate, choice_alpha, eps; numbers
//             printed to max_digits10 digits
//
// A loaded memory equals the saved one bit for bit, and goes on learning as the saved one would have.
// Errors: std::runtime_error, one sentence that begins with the path. A failed save leaves an old file as it was.

#include <heed/io/safetensors.hpp>
#include <heed/ops/prototype/art_memory.hpp>

#include <charconv>
#include <filesystem>
#include <limits>
#include <stdexcept>
#include <string>

namespace heed {
inline namespace HEED_ABI {

namespace detail {

// A number as text that reads back as the same number, in any locale. No stream is used, since streams swallow
// std::bad_alloc and then leave half a number.
template <class Real>
[[nodiscard]] std::string round_trip_text(Real value) {
  char digits[40];
  const auto [end, error] =
      std::to_chars(digits, digits + sizeof digits, value, std::chars_format::general,
                    std::numeric_limits<Real>::max_digits10);
  require(error == std::errc(), "round_trip_text: the number has more than ", sizeof digits,
          " characters");
  return {digits, end};
}

// Reads the fields of one file; every fault is a std::runtime_error with the file's name.
template <class Real>
class ArtMemoryReader {
 public:
  ArtMemoryReader(const io::Safetensors& file, const std::string& source)
      : file_(file), source_(source) {}

  [[nodiscard]] ArtMemory<Real> read(Index max_values) const {
    require_text("format", "heed.art_memory");
    require_text("version", "1");
    const ArtOptions<Real> options = read_options();
    const Index count = integer("count");
    if (count < 0 || count > options.capacity)
      refuse("count ", count, " is outside [0, ", options.capacity, "], the capacity");
    if (options.capacity > max_values / (options.dim + 2))
      refuse("capacity ", options.capacity, " x (dim ", options.dim,
             " + 2) is more than the limit of ", max_values, " values");
    require_prototypes(count, options.dim);
    try {
      ArtMemory<Real> memory(options);
      memory.set_prototypes(file_.values<Real>("prototypes"), count);
      return memory;
    } catch (const std::invalid_argument& error) {
      refuse(error.what());
    }
  }

 private:
  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    throw std::runtime_error(sentence(source_, ": ", parts...));
  }

  // The text in quotes for a message: at most 40 characters, with '?' for all that is not printable ASCII.
  [[nodiscard]] static std::string shown(const std::string& text) {
    std::string result = "'" + text.substr(0, 40) + (text.size() > 40 ? "...'" : "'");
    for (char& c : result)
      if (c < ' ' || c > '~') c = '?';
    return result;
  }

  [[nodiscard]] const std::string& text(const std::string& key) const {
    const auto found = file_.metadata().find(key);
    if (found == file_.metadata().end()) refuse("the metadata have no ", key);
    return found->second;
  }

  void require_text(const std::string& key, const std::string& expected) const {
    if (text(key) != expected)
      refuse(key, " is ", shown(text(key)), ", it must be ", shown(expected));
  }

  [[nodiscard]] Index integer(const std::string& key) const {
    const std::string& digits = text(key);
    Index value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error != std::errc() || end != digits.data() + digits.size())
      refuse(key, " is ", shown(digits), ", it must be an integer");
    return value;
  }

  [[nodiscard]] Real number(const std::string& key) const {
    const std::string& digits = text(key);
    Real value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error != std::errc() || end != digits.data() + digits.size())
      refuse(key, " is ", shown(digits), ", it must be a number");
    return value;
  }

  [[nodiscard]] ArtOptions<Real> read_options() const {
    ArtOptions<Real> options;
    options.capacity = integer("capacity");
    options.dim = integer("dim");
    const std::string& matching = text("matching");
    if (matching != "cosine" && matching != "fuzzy")
      refuse("matching is ", shown(matching), ", it must be cosine or fuzzy");
    options.matching = matching == "fuzzy" ? ArtMatching::fuzzy : ArtMatching::cosine;
    options.vigilance = number("vigilance");
    options.learning_rate = number("learning_rate");
    options.choice_alpha = number("choice_alpha");
    options.eps = number("eps");
    try {
      return checked_art_options(options);
    } catch (const std::invalid_argument& error) {
      refuse(error.what());
    }
  }

  void require_prototypes(Index count, Index dim) const {
    if (!file_.contains("prototypes")) refuse("there is no tensor prototypes");
    const io::TensorInfo& info = file_.info("prototypes");
    if (info.dtype != io::dtype_of<Real>())
      refuse("prototypes are ", info.dtype, ", the memory to load holds ", io::dtype_of<Real>());
    if (info.shape.size() != 2)
      refuse("prototypes have ", info.shape.size(), " extents, they must have 2");
    if (info.shape[0] != count || info.shape[1] != dim)
      refuse("prototypes have the shape (", info.shape[0], ",", info.shape[1],
             "), count and dim are (", count, ",", dim, ")");
  }

  const io::Safetensors& file_;
  const std::string& source_;
};

}  // namespace detail

template <class Real>
void save_art_memory(const std::filesystem::path& path, const ArtMemory<Real>& memory) {
  const ArtOptions<Real>& options = memory.options();
  io::SafetensorsWriter writer;
  writer.set_metadata("format", "heed.art_memory");
  writer.set_metadata("version", "1");
  writer.set_metadata("capacity", std::to_string(options.capacity));
  writer.set_metadata("dim", std::to_string(options.dim));
  writer.set_metadata("count", std::to_string(memory.count()));
  writer.set_metadata("matching", options.matching == ArtMatching::fuzzy ? "fuzzy" : "cosine");
  writer.set_metadata("vigilance", detail::round_trip_text(options.vigilance));
  writer.set_metadata("learning_rate", detail::round_trip_text(options.learning_rate));
  writer.set_metadata("choice_alpha", detail::round_trip_text(options.choice_alpha));
  writer.set_metadata("eps", detail::round_trip_text(options.eps));
  writer.add("prototypes", {memory.count(), memory.dim()}, memory.prototypes());
  writer.write(path);
}

// Makes the memory of a file that is read already; `source` begins the messages. Since a file of a few bytes can claim
// any capacity, capacity * (dim + 2), the numbers that a memory allocates, must be at most max_values.
template <class Real>
[[nodiscard]] ArtMemory<Real> read_art_memory(const io::Safetensors& file,
                                              const std::string& source,
                                              Index max_values = Index(1) << 28) {
  return detail::ArtMemoryReader<Real>(file, source).read(max_values);
}

// Reads a memory from a file. Real must be the type that was saved, so that nothing is rounded.
template <class Real>
[[nodiscard]] ArtMemory<Real> load_art_memory(const std::filesystem::path& path,
                                              Index max_values = Index(1) << 28) {
  return read_art_memory<Real>(io::Safetensors::read(path), path.string(), max_values);
}

}  // namespace HEED_ABI
}  // namespace heed
