// SPDX-License-Identifier: Apache-2.0
#pragma once

// Writes safetensors files: 8 bytes of header length (little-endian), JSON padded with spaces to a
// multiple of 8, then the tensors' bytes. Included by safetensors.hpp.
//
// Errors: std::invalid_argument, one sentence from "safetensors" on, for the caller's arguments;
//   std::runtime_error, from the path on, when a file cannot be written.

#include <heed/core/config.hpp>
#include <heed/core/error.hpp>
#include <heed/io/atomic_file.hpp>
#include <heed/io/checksums.hpp>
#include <heed/io/safetensors_types.hpp>

#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <ranges>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace io {

// Collects tensors (copies) and writes them. The bytes depend on the content only, not on the order
// of the calls: the header lists the names sorted; the data lies widest dtype first and then by
// name, so that with the header padded to a multiple of 8 every tensor is aligned.
class SafetensorsWriter {
 public:
  void set_metadata(const std::string& key, const std::string& value) {
    for (const std::string* text : {&key, &value}) (void)json_text(*text);
    metadata_.insert_or_assign(key, value);
  }
  // Sets the entry that Safetensors::require_checksums() reads, for the tensors and the metadata
  // that have been added so far.
  void set_checksums() {
    nlohmann::json sums = {{kMetadata, checksum_of(metadata_)}};
    for (const auto& [name, tensor] : tensors_) sums[name] = checksum_of(tensor.data);
    set_metadata(kChecksums, sums.dump());
  }

  // Adds a tensor. `values` must have as many elements as the shape holds; an empty shape is that of a scalar. A name can
  // be added once.
  template <std::ranges::contiguous_range Values>
  requires Element<std::ranges::range_value_t<Values>>
  void add(const std::string& name, const std::vector<Index>& shape, const Values& values) {
    const std::span all(std::ranges::data(values), std::ranges::size(values));
    add_bytes(name, std::string(dtype_of<std::ranges::range_value_t<Values>>()), shape,
              std::as_bytes(all));
  }

  // Adds a tensor of any dtype of the format, from its stored bytes.
  void add_bytes(const std::string& name, const std::string& dtype, const std::vector<Index>& shape,
                 std::span<const std::byte> data) {
    const std::string tensor = "safetensors: tensor " + in_quotes(name);
    const std::size_t width = dtype_width(dtype);
    require(width != 0, tensor, " has the unknown dtype ", in_quotes(dtype));
    require(shape.size() <= safetensors_limits::extents, tensor, " has ", shape.size(),
            " extents, more than ", safetensors_limits::extents);
    const std::optional<std::size_t> bytes = tensor_bytes(shape, width);
    require(bytes.has_value(), tensor, " has shape [", extents_of(shape),
            "], with a negative extent or a size that overflows an index");
    require(*bytes == data.size(), tensor, " has ", data.size() / width, " values (", data.size(),
            " bytes), its shape holds ", *bytes / width);
    require(name.size() <= safetensors_limits::name_bytes, tensor, " has a name of ", name.size(),
            " bytes, more than ", safetensors_limits::name_bytes);
    require(name != kMetadata, tensor, " has a reserved name");
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

  // Writes the file as a whole or not at all, see write_file_atomically.
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
      fail("safetensors: the text ", in_quotes(text), " is not valid UTF-8");
    }
  }

  // The tensors in the order of their data: widest dtype first, then by name.
  [[nodiscard]] std::vector<const Tensor*> data_order() const {
    std::vector<const Tensor*> order;
    for (const std::size_t width : {8U, 4U, 2U, 1U})
      for (const auto& [name, tensor] : tensors_)
        if (dtype_width(tensor.dtype) == width) order.push_back(&tensor);
    return order;
  }

  // The header as it is stored: 8 bytes of length and the padded JSON.
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
      length[i] = static_cast<char>(std::uint64_t{json.size()} >> (8 * i) & 0xFFU);
    return length + json;
  }

  [[nodiscard]] std::string joined_metadata() const {
    std::string text;
    for (const auto& [key, value] : metadata_)
      text += (text.empty() ? "" : ",") + json_text(key) + ":" + json_text(value);
    return text;
  }

  [[nodiscard]] static std::string extents_of(const std::vector<Index>& shape) {
    std::string text;
    for (const Index extent : shape) text += (text.empty() ? "" : ",") + std::to_string(extent);
    return text;
  }
  [[nodiscard]] static std::string entry(const Tensor& tensor, std::size_t begin) {
    return tensor.json_name + ":{\"dtype\":\"" + tensor.dtype + "\",\"shape\":[" +
           extents_of(tensor.shape) + "],\"data_offsets\":[" + std::to_string(begin) + "," +
           std::to_string(begin + tensor.data.size()) + "]}";
  }

  // The pieces of the file in their order, as views of `head` and of the tensors.
  [[nodiscard]] std::vector<std::span<const std::byte>> pieces(const std::string& head) const {
    std::vector<std::span<const std::byte>> all{std::as_bytes(std::span(head))};
    for (const Tensor* tensor : data_order()) all.emplace_back(tensor->data);
    return all;
  }

  std::map<std::string, std::string> metadata_;
  std::map<std::string, Tensor> tensors_;
};

}  // namespace io
}  // namespace HEED_ABI
}  // namespace heed
