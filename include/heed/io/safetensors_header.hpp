// SPDX-License-Identifier: Apache-2.0
#pragma once

// The JSON header of a safetensors file, read strictly:
//   {"__metadata__": {key: text, ...},
//    name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}
//
// Bounds: <= 100 MB of header, <= 65,536 tensors, names <= 1 KiB, <= 8 extents, every number an
//   unsigned 64-bit integer, no key twice, no other keys; the spans [begin, end) tile the data from
//   its first byte to its last; begin = end for a tensor with a zero extent.
// Errors: std::runtime_error, one sentence from the source (file name or "safetensors") on.
// Source: the format description of Hugging Face safetensors; stricter on numbers and keys.

#include <heed/core/config.hpp>
#include <heed/io/safetensors_types.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace io {

// Receives the events of the JSON parser. The nesting is at most object > object > array, so that `place_` with its six
// values holds the whole state. An event at a wrong place is refused at once.
class SafetensorsHeader {
 public:
  // `data_bytes` is the number of bytes that follow the header.
  SafetensorsHeader(std::string source, std::size_t data_bytes)
      : source_(std::move(source)), data_bytes_(data_bytes) {}

  std::map<std::string, std::string> metadata;
  std::map<std::string, TensorInfo> tensors;

  // Parses the whole text and checks that the spans tile the data.
  void parse(std::string_view text) {
    // The parser would take a NUL byte for the end of its input and skip the rest.
    if (const auto nul = text.find('\0'); nul != text.npos)
      refuse(source_, "the header has a NUL byte at byte ", nul, " of ", text.size());
    if (text.empty() || text.front() != '{') refuse(source_, "the header does not start with '{'");
    if (!nlohmann::json::sax_parse(text.data(), text.data() + text.size(), this))
      refuse(source_, "the header is not valid JSON");
    check_tiling(8 + text.size());
  }

  // Parser events, named by the parser; each returns true or throws.
  bool null() { wrong("null"); }
  bool boolean(bool) { wrong("true or false"); }
  bool number_integer(std::int64_t value) { wrong("the negative number " + std::to_string(value)); }
  bool number_float(double, const std::string& text) {
    wrong("the number " + in_quotes(text) + ", no unsigned 64-bit integer");
  }
  bool binary(const nlohmann::json::binary_t&) { wrong("binary data"); }

  bool number_unsigned(std::uint64_t value) {
    if (place_ == Place::offsets) {
      if (offsets_.size() == 2) refuse(source_, here(), " has more than 2 numbers");
      offsets_.push_back(value);
    } else if (place_ == Place::shape) {
      if (shape_.size() == safetensors_limits::extents)
        refuse(source_, here(), " has more than ", safetensors_limits::extents, " extents");
      if (value > static_cast<std::uint64_t>(std::numeric_limits<Index>::max()))
        refuse(source_, here(), " has the extent ", value, ", which overflows a signed index");
      shape_.push_back(static_cast<Index>(value));
    } else {
      wrong("the number " + std::to_string(value));
    }
    return true;
  }

  bool string(const std::string& text) {
    if (place_ == Place::metadata) {
      metadata[key_] = text;
    } else if (place_ == Place::tensor && field_ == "dtype") {
      dtype_ = text;
    } else {
      wrong("the text " + in_quotes(text));
    }
    return true;
  }

  bool start_object(std::size_t) {
    if (place_ == Place::outside) {
      place_ = Place::root;
    } else if (place_ == Place::root) {
      place_ = name_ == "__metadata__" ? Place::metadata : Place::tensor;
      fields_ = {};
      dtype_.clear();
      shape_.clear();
      offsets_.clear();
    } else {
      wrong_nesting("an object");
    }
    return true;
  }

  bool key(const std::string& text) {
    if (place_ == Place::root) {
      enter_name(text);
    } else if (place_ == Place::metadata) {
      if (metadata.contains(text))
        refuse(source_, "__metadata__ has the key ", in_quotes(text), " twice");
      key_ = text;
    } else {
      enter_field(text);
    }
    return true;
  }

  bool end_object() {
    if (place_ == Place::tensor) enter_tensor();
    place_ = place_ == Place::root ? Place::outside : Place::root;
    return true;
  }

  bool start_array(std::size_t) {
    if (place_ != Place::tensor || field_ == "dtype") wrong_nesting("an array");
    place_ = field_ == "shape" ? Place::shape : Place::offsets;
    return true;
  }

  bool end_array() {
    place_ = Place::tensor;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception&) {
    refuse(source_, "the header is not valid UTF-8 JSON at byte ", position);
  }

 private:
  enum class Place { outside, root, metadata, tensor, shape, offsets };
  static constexpr std::array<std::string_view, 3> known_fields{"dtype", "shape", "data_offsets"};

  [[nodiscard]] std::string here() const {
    switch (place_) {
      case Place::outside: return "the header";
      case Place::metadata: return "the __metadata__ key " + in_quotes(key_);
      case Place::root: return name_ == "__metadata__" ? name_ : "tensor " + in_quotes(name_);
      default: return "tensor " + in_quotes(name_) + ": its " + field_;
    }
  }

  [[noreturn]] void wrong(const std::string& what) const {
    const bool text = place_ == Place::metadata || (place_ == Place::tensor && field_ == "dtype");
    const bool object = place_ == Place::root || place_ == Place::outside;
    const char* wanted = text                      ? "a string"
                         : object                  ? "an object"
                         : place_ == Place::tensor ? "an array"
                                                   : "unsigned 64-bit numbers";
    refuse(source_, here(), " holds ", what, " where ", wanted, " belongs");
  }

  [[noreturn]] void wrong_nesting(const std::string& what) const {
    if (place_ == Place::shape || place_ == Place::offsets)
      refuse(source_, here(), " holds ", what, ", nested deeper than 3 levels");
    wrong(what);
  }

  void enter_name(const std::string& name) {
    const bool is_metadata = name == "__metadata__";
    if (tensors.contains(name) || (is_metadata && has_metadata_))
      refuse(source_, "the header has the key ", in_quotes(name), " twice");
    if (name.size() > safetensors_limits::name_bytes)
      refuse(source_, "the tensor name ", in_quotes(name), " has ", name.size(),
             " bytes, more than ", safetensors_limits::name_bytes);
    if (!is_metadata && tensors.size() == safetensors_limits::tensors)
      refuse(source_, "tensor ", in_quotes(name), " is number ", tensors.size() + 1, ", more than ",
             safetensors_limits::tensors);
    has_metadata_ = has_metadata_ || is_metadata;
    name_ = name;
  }

  void enter_field(const std::string& field) {
    const auto found = std::find(known_fields.begin(), known_fields.end(), field);
    if (found == known_fields.end())
      refuse(source_, "tensor ", in_quotes(name_), " has the unknown key ", in_quotes(field));
    bool& seen = fields_[static_cast<std::size_t>(found - known_fields.begin())];
    if (seen)
      refuse(source_, "tensor ", in_quotes(name_), " has the key ", in_quotes(field), " twice");
    seen = true;
    field_ = field;
  }

  void enter_tensor() {
    const std::string tensor = "tensor " + in_quotes(name_);
    for (std::size_t i = 0; i < known_fields.size(); ++i)
      if (!fields_[i]) refuse(source_, tensor, " has no ", known_fields[i]);
    const std::size_t width = dtype_width(dtype_);
    if (width == 0) refuse(source_, tensor, " has the unknown dtype ", in_quotes(dtype_));
    if (offsets_.size() != 2)
      refuse(source_, tensor, " has ", offsets_.size(), " data_offsets, not 2");
    const std::uint64_t begin = offsets_[0], end = offsets_[1];
    if (begin > end) refuse(source_, tensor, " begins at byte ", begin, " after its end ", end);
    if (end > static_cast<std::uint64_t>(std::numeric_limits<Index>::max()))
      refuse(source_, tensor, " ends at byte ", end, ", which overflows a signed index");
    const std::optional<std::size_t> bytes = tensor_bytes(shape_, width);
    if (!bytes) refuse(source_, tensor, " has a shape whose size in bytes overflows an index");
    if (end - begin != *bytes)
      refuse(source_, tensor, " spans ", end - begin, " bytes, but its shape and dtype need ",
             *bytes);
    tensors[name_] = {dtype_, shape_, static_cast<std::size_t>(begin),
                      static_cast<std::size_t>(end)};
  }

  // Throws unless each span, sorted by (begin, end), starts where the one before it ended, the first at byte 0 and the
  // last ending with the data, which is behind `data_begin` bytes of the file. Empty spans sort before others that begin at
  // the same byte.
  void check_tiling(std::size_t data_begin) const {
    std::vector<const std::pair<const std::string, TensorInfo>*> spans;
    spans.reserve(tensors.size());
    for (const auto& entry : tensors) spans.push_back(&entry);
    std::sort(spans.begin(), spans.end(), [](const auto* a, const auto* b) {
      return std::pair(a->second.begin, a->second.end) < std::pair(b->second.begin, b->second.end);
    });
    std::size_t covered = 0;
    for (const auto* span : spans) {
      if (span->second.begin != covered)
        refuse(source_, "tensor ", in_quotes(span->first), " begins at byte ", span->second.begin,
               span->second.begin > covered ? ", a gap after byte " : ", an overlap before byte ",
               covered);
      covered = span->second.end;
    }
    if (covered > data_bytes_)
      refuse(source_, "the file is cut off: it has ", data_begin + data_bytes_, " of ",
             data_begin + covered, " bytes");
    if (covered < data_bytes_)
      refuse(source_, "the tensors end at byte ", covered, " of ", data_bytes_, " data bytes");
  }

  std::string source_;
  std::size_t data_bytes_;
  Place place_ = Place::outside;
  bool has_metadata_ = false;
  std::string name_, key_, field_, dtype_;
  std::array<bool, 3> fields_{};  // flags of the known_fields that were seen
  std::vector<Index> shape_;
  std::vector<std::uint64_t> offsets_;
};

}  // namespace io
}  // namespace HEED_ABI
}  // namespace heed
