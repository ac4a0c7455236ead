// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reads and writes safetensors files: 8 bytes of header length N (little-endian), N bytes of JSON
// (rules in safetensors_header.hpp), then the tensors' bytes, row-major and little-endian.
//
// Errors: std::runtime_error for malformed files, values that do not fit and failed I/O;
//   std::invalid_argument for an unknown tensor name, a type that does not go with the dtype, and
//   whatever the writer is wrongly given. One sentence, from the file name or "safetensors" on.
// Bounds: little-endian hosts only.

#include <heed/core/config.hpp>
#include <heed/core/error.hpp>
#include <heed/io/atomic_file.hpp>
#include <heed/io/safetensors_header.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <ranges>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace heed::inline HEED_ABI::io {

// What a tensor's elements can be in memory: bool, the integers of 8 to 64 bits, float and double.
template <class T>
concept Element = std::same_as<T, std::remove_cv_t<T>> &&
                  (std::integral<T> || std::same_as<T, float> || std::same_as<T, double>);

template <Element T>
[[nodiscard]] constexpr std::string_view dtype_of() {
  static_assert(sizeof(T) <= 8, "the format has no elements of more than 64 bits");
  constexpr std::array<std::string_view, 4> of_signed{"I8", "I16", "I32", "I64"};
  constexpr std::array<std::string_view, 4> of_unsigned{"U8", "U16", "U32", "U64"};
  constexpr auto log2_size = static_cast<std::size_t>(std::bit_width(sizeof(T)) - 1);
  if constexpr (std::same_as<T, bool>) return "BOOL";
  else if constexpr (std::floating_point<T>) return sizeof(T) == 4 ? "F32" : "F64";
  else return std::signed_integral<T> ? of_signed[log2_size] : of_unsigned[log2_size];
}

// Whether To holds the number `from` without any rounding; NaN and infinity pass between floats.
template <Element To, Element From>
[[nodiscard]] bool fits_exactly(From from) {
  using Limits = std::numeric_limits<To>;
  if constexpr (std::same_as<To, From>) {
    return true;
  } else if constexpr (std::same_as<To, bool>) {
    return from == From{0} || from == From{1};
  } else if constexpr (std::integral<To> && std::integral<From>) {
    return std::in_range<To>(from);
  } else if constexpr (std::integral<To>) {
    // -2^k and 2^k are exact in From; the largest integer, 2^k - 1, need not be.
    return from >= static_cast<From>(Limits::min()) &&
           from < std::ldexp(From{1}, Limits::digits) && from == std::trunc(from);
  } else if constexpr (std::integral<From>) {
    const To rounded = static_cast<To>(from);
    return fits_exactly<From>(rounded) && static_cast<From>(rounded) == from;
  } else {
    if (!std::isfinite(from)) return true;
    if (sizeof(To) < sizeof(From) && std::abs(from) > static_cast<From>(Limits::max())) return false;
    return static_cast<From>(static_cast<To>(from)) == from;
  }
}

inline void require_little_endian(const std::string& source) {
  if constexpr (std::endian::native != std::endian::little)
    refuse(source, "the file is little-endian, this host is not");
}

// One file in memory, checked as a whole before any tensor can be asked for.
class Safetensors {
 public:
  // `source` begins the messages.
  [[nodiscard]] static Safetensors parse(std::vector<std::byte> file,
                                         std::string source = "safetensors") {
    return Safetensors(std::move(file), std::move(source));
  }

  [[nodiscard]] static Safetensors read(const std::filesystem::path& path) {
    return Safetensors(read_file(path), path.string());
  }

  [[nodiscard]] const std::map<std::string, std::string>& metadata() const { return metadata_; }
  [[nodiscard]] const std::map<std::string, TensorInfo>& tensors() const { return tensors_; }
  [[nodiscard]] bool contains(const std::string& name) const { return tensors_.contains(name); }

  [[nodiscard]] const TensorInfo& info(const std::string& name) const {
    const auto found = tensors_.find(name);
    require(found != tensors_.end(), source_, ": there is no tensor ", quoted(name));
    return found->second;
  }

  // The stored bytes, valid as long as this object lives.
  [[nodiscard]] std::span<const std::byte> bytes(const std::string& name) const {
    const TensorInfo& tensor = info(name);
    return std::span(file_).subspan(data_begin_ + tensor.begin, tensor.end - tensor.begin);
  }

  // The elements where they lie, valid as long as this object lives. The dtype must be that of T and
  // the first byte aligned for it. No bool: a stored byte may be neither 0 nor 1.
  template <Element T>
    requires(!std::same_as<T, bool>)
  [[nodiscard]] std::span<const T> view(const std::string& name) const {
    const TensorInfo& tensor = info(name);
    require(tensor.dtype == dtype_of<T>(), source_, ": tensor ", quoted(name), " is ",
            tensor.dtype, ", a view as ", dtype_of<T>(), " was asked for");
    const std::span<const std::byte> raw = bytes(name);
    if (raw.empty()) return {};
    const auto offset = reinterpret_cast<std::uintptr_t>(raw.data()) % alignof(T);
    if (offset != 0)
      refuse(source_, "tensor ", quoted(name), " lies ", offset, " bytes past a multiple of ",
             alignof(T), " and cannot be viewed as ", tensor.dtype);
    return {reinterpret_cast<const T*>(raw.data()), raw.size() / sizeof(T)};
  }

  // A converted copy. Every number must survive exactly: an F64 tensor of small integers is fine as
  // float or int, one that holds 0.1 is refused as float.
  template <Element T>
  [[nodiscard]] std::vector<T> values(const std::string& name) const {
    const std::string& dtype = info(name).dtype;
    if (dtype == "F64") return convert<T, double>(name);
    if (dtype == "F32") return convert<T, float>(name);
    if (dtype == "I64") return convert<T, std::int64_t>(name);
    if (dtype == "I32") return convert<T, std::int32_t>(name);
    if (dtype == "I16") return convert<T, std::int16_t>(name);
    if (dtype == "I8") return convert<T, std::int8_t>(name);
    if (dtype == "U64") return convert<T, std::uint64_t>(name);
    if (dtype == "U32") return convert<T, std::uint32_t>(name);
    if (dtype == "U16") return convert<T, std::uint16_t>(name);
    if (dtype == "U8") return convert<T, std::uint8_t>(name);
    if (dtype == "BOOL") return convert<T, bool>(name);
    fail(source_, ": tensor ", quoted(name), " is ", dtype, ", which has no conversion to ",
         dtype_of<T>());
  }

 private:
  Safetensors(std::vector<std::byte> file, std::string source)
      : file_(std::move(file)), source_(std::move(source)) {
    require_little_endian(source_);
    if (file_.size() < 8)
      refuse(source_, "the file has ", file_.size(), " bytes, fewer than the 8 of a header length");
    std::uint64_t length = 0;
    for (std::size_t i = 8; i-- > 0;) length = length << 8 | std::to_integer<std::uint64_t>(file_[i]);
    if (length > safetensors_limits::header_bytes)
      refuse(source_, "the header length ", length, " is more than the limit of ",
             safetensors_limits::header_bytes, " bytes");
    if (length > file_.size() - 8)
      refuse(source_, "the header length ", length, " is more than the ", file_.size() - 8,
             " bytes that follow it");
    data_begin_ = 8 + static_cast<std::size_t>(length);
    SafetensorsHeader header(source_, file_.size() - data_begin_);
    header.parse({reinterpret_cast<const char*>(file_.data()) + 8, data_begin_ - 8});
    metadata_ = std::move(header.metadata);
    tensors_ = std::move(header.tensors);
  }

  // By memcpy: the tensor need not be aligned.
  template <class To, class From>
  [[nodiscard]] std::vector<To> convert(const std::string& name) const {
    const std::span<const std::byte> raw = bytes(name);
    std::vector<To> result(raw.size() / sizeof(From));
    for (std::size_t i = 0; i < result.size(); ++i) {
      const From value = load<From>(name, raw, i);
      if (!fits_exactly<To>(value))
        refuse(source_, "tensor ", quoted(name), " has ", +value, " at element ", i, ", which ",
               dtype_of<To>(), " does not hold exactly");
      result[i] = static_cast<To>(value);
    }
    return result;
  }

  template <class From>
  [[nodiscard]] From load(const std::string& name, std::span<const std::byte> raw,
                          std::size_t i) const {
    if constexpr (std::same_as<From, bool>) {
      const auto value = std::to_integer<int>(raw[i]);
      if (value > 1)
        refuse(source_, "tensor ", quoted(name), " is BOOL, but has ", value, " at element ", i);
      return value == 1;
    } else {
      From value;
      std::memcpy(&value, raw.data() + i * sizeof(From), sizeof(From));
      return value;
    }
  }

  std::vector<std::byte> file_;
  std::string source_;
  std::size_t data_begin_ = 0;
  std::map<std::string, std::string> metadata_;
  std::map<std::string, TensorInfo> tensors_;
};

// Collects tensors (copies) and writes them. The bytes depend on the content only, not on the order
// of the calls: the header lists the names sorted, the data lies widest dtype first and then by name,
// so that with the header padded to a multiple of 8 every tensor is aligned.
class SafetensorsWriter {
 public:
  void set_metadata(const std::string& key, const std::string& value) {
    const std::string checked_value = json_text(value);
    metadata_[json_text(key)] = checked_value;
  }

  // As many values as the shape holds; an empty shape is a scalar. A name can be added once.
  template <std::ranges::contiguous_range Values>
    requires Element<std::ranges::range_value_t<Values>>
  void add(const std::string& name, const std::vector<Index>& shape, const Values& values) {
    const std::span all(std::ranges::data(values), std::ranges::size(values));
    add_bytes(name, std::string(dtype_of<std::ranges::range_value_t<Values>>()), shape,
              std::as_bytes(all));
  }

  // Any dtype of the format, as it is stored.
  void add_bytes(const std::string& name, const std::string& dtype, const std::vector<Index>& shape,
                 std::span<const std::byte> data) {
    const std::string tensor = "safetensors: tensor " + quoted(name);
    const std::size_t width = dtype_width(dtype);
    require(width != 0, tensor, " has the unknown dtype ", quoted(dtype));
    require(shape.size() <= safetensors_limits::extents, tensor, " has ", shape.size(),
            " extents, more than ", safetensors_limits::extents);
    const std::optional<std::size_t> bytes = tensor_bytes(shape, width);
    require(bytes.has_value(), tensor, " has a negative extent or a size that overflows an index");
    require(*bytes == data.size(), tensor, " has ", data.size() / width, " values (", data.size(),
            " bytes), its shape holds ", *bytes / width);
    require(name.size() <= safetensors_limits::name_bytes, tensor, " has a name of ", name.size(),
            " bytes, more than ", safetensors_limits::name_bytes);
    require(name != "__metadata__", tensor, " has a reserved name");
    require(!tensors_.contains(name), tensor, " was added before");
    require(tensors_.size() < safetensors_limits::tensors, tensor, " is number ",
            tensors_.size() + 1, ", more than ", safetensors_limits::tensors);
    tensors_[name] = {json_text(name), dtype, shape, {data.begin(), data.end()}};
  }

  [[nodiscard]] std::vector<std::byte> bytes() const {
    const std::string head = header();
    std::vector<std::byte> file;
    for (const std::span<const std::byte> piece : pieces(head))
      file.insert(file.end(), piece.begin(), piece.end());
    return file;
  }

  // All or nothing, see write_file_atomically.
  void write(const std::filesystem::path& path) const {
    const std::string head = header();
    write_file_atomically(path, pieces(head));
  }

 private:
  struct Tensor {
    std::string json_name, dtype;
    std::vector<Index> shape;
    std::vector<std::byte> data;
  };

  [[nodiscard]] static std::string json_text(const std::string& text) {
    try {
      return nlohmann::json(text).dump();
    } catch (const nlohmann::json::exception&) {
      fail("safetensors: the text ", quoted(text), " is not valid UTF-8");
    }
  }

  // Widest dtype first, then by name.
  [[nodiscard]] std::vector<const Tensor*> data_order() const {
    std::vector<const Tensor*> order;
    for (const auto& [name, tensor] : tensors_) order.push_back(&tensor);
    std::ranges::stable_sort(order, std::ranges::greater{},
                             [](const Tensor* tensor) { return dtype_width(tensor->dtype); });
    return order;
  }

  // The length of 8 bytes and the padded JSON.
  [[nodiscard]] std::string header() const {
    require_little_endian("safetensors");
    std::map<const Tensor*, std::size_t> begins;
    std::size_t data_bytes = 0;
    for (const Tensor* tensor : data_order()) {
      begins[tensor] = data_bytes;
      data_bytes += tensor->data.size();
    }
    std::string json = metadata_.empty() ? "" : "\"__metadata__\":{" + joined_metadata() + "}";
    for (const auto& [name, tensor] : tensors_)
      json += (json.empty() ? "" : ",") + entry(tensor, begins[&tensor]);
    json = "{" + json + "}";
    json.append((8 - json.size() % 8) % 8, ' ');
    require(json.size() <= safetensors_limits::header_bytes, "safetensors: the header has ",
            json.size(), " bytes, more than ", safetensors_limits::header_bytes);
    std::string length(8, '\0');
    for (std::size_t i = 0; i < 8; ++i)
      length[i] = static_cast<char>(static_cast<unsigned char>(std::uint64_t{json.size()} >> 8 * i));
    return length + json;
  }

  [[nodiscard]] std::string joined_metadata() const {
    std::string text;
    for (const auto& [key, value] : metadata_) text += (text.empty() ? "" : ",") + key + ":" + value;
    return text;
  }

  [[nodiscard]] static std::string entry(const Tensor& tensor, std::size_t begin) {
    std::string shape;
    for (const Index extent : tensor.shape)
      shape += (shape.empty() ? "" : ",") + std::to_string(extent);
    return tensor.json_name + ":{\"dtype\":\"" + tensor.dtype + "\",\"shape\":[" + shape +
           "],\"data_offsets\":[" + std::to_string(begin) + "," +
           std::to_string(begin + tensor.data.size()) + "]}";
  }

  // Views of `head` and of the tensors.
  [[nodiscard]] std::vector<std::span<const std::byte>> pieces(const std::string& head) const {
    std::vector<std::span<const std::byte>> all{std::as_bytes(std::span(head))};
    for (const Tensor* tensor : data_order()) all.emplace_back(tensor->data);
    return all;
  }

  std::map<std::string, std::string> metadata_;  // both sides as JSON text
  std::map<std::string, Tensor> tensors_;
};

}  // namespace heed::inline HEED_ABI::io
