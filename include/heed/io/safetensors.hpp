// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reads safetensors files: 8 bytes of header length (little-endian), JSON (its rules are in
// safetensors_header.hpp), then the tensors' bytes, row-major and little-endian. Includes the writer.
//
// Errors: std::runtime_error for malformed files, values that do not fit and failed I/O;
//   std::invalid_argument for an unknown tensor name and a type that does not go with the dtype.
//   One sentence, from the file name or "safetensors" on.
// Bounds: little-endian hosts only.

#include <heed/core/config.hpp>
#include <heed/core/error.hpp>
#include <heed/core/narrow.hpp>
#include <heed/io/atomic_file.hpp>
#include <heed/io/checksums.hpp>
#include <heed/io/foreign_file.hpp>
#include <heed/io/safetensors_header.hpp>
#include <heed/io/safetensors_types.hpp>
#include <heed/io/safetensors_writer.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace io {

// The header of a file, checked as a whole and against the file's size. No tensor is read.
class SafetensorsIndex {
 public:
  [[nodiscard]] static SafetensorsIndex read(const std::filesystem::path& path) {
    SafetensorsIndex index(path.string());
    InputFile file(path);
    (void)index.read_header(file);
    return index;
  }

  [[nodiscard]] const std::map<std::string, std::string>& metadata() const { return metadata_; }
  [[nodiscard]] const std::map<std::string, TensorInfo>& tensors() const { return tensors_; }
  [[nodiscard]] bool contains(const std::string& name) const { return tensors_.contains(name); }

  [[nodiscard]] const TensorInfo& info(const std::string& name) const {
    const auto found = tensors_.find(name);
    require(found != tensors_.end(), source_, ": there is no tensor ", in_quotes(name));
    return found->second;
  }

 protected:
  // `source`, a file name, begins the messages.
  explicit SafetensorsIndex(std::string source) : source_(std::move(source)) {
    require_little_endian(source_);
  }

  // Reads and parses the header. Returns the bytes that were read: at least those before the tensors.
  std::vector<std::byte> read_header(InputFile& file) {
    std::vector<std::byte> bytes(std::min(file.size(), foreign_bytes));
    file.read(bytes);
    const std::size_t begun = bytes.size();
    bytes.resize(std::max(begun, begin_of_data(bytes, file.size())));
    file.read(std::span(bytes).subspan(begun));
    parse_header(bytes, file.size());
    return bytes;
  }
  // Parses the header at the beginning of `bytes`; the file has `file_bytes` bytes in all.
  void parse_header(std::span<const std::byte> bytes, std::size_t file_bytes) {
    data_begin_ = begin_of_data(bytes, file_bytes);
    SafetensorsHeader header(source_, file_bytes - data_begin_);
    header.parse({reinterpret_cast<const char*>(bytes.data()) + 8, data_begin_ - 8});
    metadata_ = std::move(header.metadata);
    tensors_ = std::move(header.tensors);
  }

  std::string source_;
  std::size_t data_begin_ = 0;
  std::map<std::string, std::string> metadata_;
  std::map<std::string, TensorInfo> tensors_;

 private:
  // The offset of the tensors' bytes, by the header length in the first 8 bytes. Later bytes tell
  // which other kind a file may have.
  [[nodiscard]] std::size_t begin_of_data(std::span<const std::byte> bytes,
                                          std::size_t file_bytes) const {
    if (file_bytes < 8)
      refuse(source_, "the file has ", file_bytes, " bytes, fewer than the 8 of a header length");
    std::uint64_t length = 0;
    for (std::size_t i = 8; i-- > 0;)
      length = length << 8 | std::to_integer<std::uint64_t>(bytes[i]);
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    const bool brace = text.substr(8).starts_with('{');
    const std::string_view kind = foreign_kind(text);
    if (!kind.empty() && (!brace || length > file_bytes - 8)) refuse(source_, "the file ", kind);
    if (length > safetensors_limits::header_bytes)
      refuse(source_, "the file begins with a header length of ", length,
             ", that of a safetensors file is at most ", safetensors_limits::header_bytes);
    if (length > file_bytes - 8)
      refuse(source_, "the header length ", length, " is more than the ", file_bytes - 8,
             " bytes that follow it", brace ? ": the file is cut off" : "");
    return 8 + length;
  }
};

// A file in memory, checked as a whole before any tensor can be asked for.
class Safetensors : public SafetensorsIndex {
 public:
  // `source` begins the messages.
  [[nodiscard]] static Safetensors parse(std::vector<std::byte> file,
                                         std::string source = "safetensors") {
    Safetensors parsed(std::move(source));
    parsed.file_ = std::move(file);
    parsed.parse_header(parsed.file_, parsed.file_.size());
    return parsed;
  }

  [[nodiscard]] static Safetensors read(const std::filesystem::path& path) {
    return read(path, [](const SafetensorsIndex&) {});
  }
  // check(index) sees the header before memory for the tensors is taken, and may refuse the file by throwing.
  template <class Check>
  [[nodiscard]] static Safetensors read(const std::filesystem::path& path, Check&& check) {
    Safetensors result(path.string());
    InputFile file(path);
    result.file_ = result.read_header(file);
    const std::size_t begun = result.file_.size();
    file.require_memory();
    check(static_cast<const SafetensorsIndex&>(result));
    result.file_.resize(file.size());
    file.read(std::span(result.file_).subspan(begun));
    return result;
  }

  // The stored bytes, valid as long as this object lives.
  [[nodiscard]] std::span<const std::byte> bytes(const std::string& name) const {
    const TensorInfo& tensor = info(name);
    return std::span(file_).subspan(data_begin_ + tensor.begin, tensor.end - tensor.begin);
  }

  // Throws unless all tensors and the metadata have the checksums (checksums.hpp) that the file
  // holds. A file without checksums comes from another writer and passes.
  void require_checksums() const {
    const auto found = metadata_.find(kChecksums);
    if (found == metadata_.end()) return;
    const auto stored = nlohmann::json::parse(found->second, nullptr, false);
    const auto check = [&](const std::string& name, const std::string& what,
                           const std::string& sum) {
      if (!stored.is_object() || !stored.contains(name) || stored.at(name) != sum)
        refuse(source_, what, " does not have its checksum; the file was damaged or changed");
    };
    check(kMetadata, "its metadata", checksum_of(metadata_));
    for (const auto& [name, tensor] : tensors_)
      check(name, "tensor " + in_quotes(name), checksum_of(bytes(name)));
  }

  // The elements where they lie, valid as long as this object lives. The dtype must be that of Real
  // and the first byte aligned for it.
  template <Viewable Real>
  [[nodiscard]] std::span<const Real> view(const std::string& name) const {
    const TensorInfo& tensor = info(name);
    require(tensor.dtype == dtype_of<Real>(), source_, ": tensor ", in_quotes(name), " is ",
            tensor.dtype, ", a view as ", dtype_of<Real>(), " was asked for");
    const std::span<const std::byte> raw = bytes(name);
    if (raw.empty()) return {};
    const auto offset = reinterpret_cast<std::uintptr_t>(raw.data()) % alignof(Real);
    if (offset != 0)
      refuse(source_, "tensor ", in_quotes(name), " lies ", offset, " bytes past a multiple of ",
             alignof(Real), " and cannot be viewed as ", tensor.dtype);
    return {reinterpret_cast<const Real*>(raw.data()), raw.size() / sizeof(Real)};
  }

  // A converted copy. Every number must convert exactly: an F64 tensor of small integers is fine as
  // float or int, a tensor that holds 0.1 is refused as float.
  template <Element Real>
  [[nodiscard]] std::vector<Real> values(const std::string& name) const {
    const std::string& dtype = info(name).dtype;
    if (dtype == "F64") return convert<Real, double>(name);
    if (dtype == "F32") return convert<Real, float>(name);
    if (dtype == "I64") return convert<Real, std::int64_t>(name);
    if (dtype == "I32") return convert<Real, std::int32_t>(name);
    if (dtype == "I16") return convert<Real, std::int16_t>(name);
    if (dtype == "I8") return convert<Real, std::int8_t>(name);
    if (dtype == "U64") return convert<Real, std::uint64_t>(name);
    if (dtype == "U32") return convert<Real, std::uint32_t>(name);
    if (dtype == "U16") return convert<Real, std::uint16_t>(name);
    if (dtype == "U8") return convert<Real, std::uint8_t>(name);
    if (dtype == "BOOL") return convert<Real, bool>(name);
    fail(source_, ": tensor ", in_quotes(name), " is ", dtype, ", which has no conversion to ",
         dtype_of<Real>());
  }

  // A copy of a tensor of any floating dtype but the 8-bit ones, each number rounded to the nearest
  // Real. A finite number beyond the range of Real is refused.
  template <class Real>
  requires AnyOf<Real, float, double>
  [[nodiscard]] std::vector<Real> rounded(const std::string& name) const {
    const std::string& dtype = info(name).dtype;
    if (dtype == "F64") return round<Real, double>(name);
    if (dtype == "F32") return round<Real, float>(name);
    if (dtype == "F16") return round<Real, half>(name);
    if (dtype == "BF16") return round<Real, bfloat16>(name);
    refuse(source_, "tensor ", in_quotes(name), " is ", dtype,
           ", it must be F64, F32, F16 or BF16");
  }

 private:
  explicit Safetensors(std::string source) : SafetensorsIndex(std::move(source)) {}

  // Reads the elements by memcpy, since the tensor need not be aligned.
  template <class To, class From>
  [[nodiscard]] std::vector<To> convert(const std::string& name) const {
    const std::span<const std::byte> raw = bytes(name);
    std::vector<To> result(raw.size() / sizeof(From));
    for (std::size_t i = 0; i < result.size(); ++i) {
      const From value = load<From>(name, raw, i);
      if (!fits_exactly<To>(value))
        refuse(source_, "tensor ", in_quotes(name), " has ", +value, " at element ", i, ", which ",
               dtype_of<To>(), " does not hold exactly");
      result[i] = static_cast<To>(value);
    }
    return result;
  }

  template <class To, class Stored>
  [[nodiscard]] std::vector<To> round(const std::string& name) const {
    const std::span<const std::byte> raw = bytes(name);
    std::vector<To> result(raw.size() / sizeof(Stored));
    for (std::size_t i = 0; i < result.size(); ++i) {
      const ArithmeticOf<Stored> value = load<Stored>(name, raw, i);
      result[i] = static_cast<To>(value);
      if (std::isfinite(value) && !std::isfinite(result[i]))
        refuse(source_, "tensor ", in_quotes(name), " has ", value, " at element ", i,
               ", which is too large for ", dtype_of<To>());
    }
    return result;
  }

  template <class From>
  [[nodiscard]] From load(const std::string& name, std::span<const std::byte> raw,
                          std::size_t i) const {
    if constexpr (std::same_as<From, bool>) {
      const auto value = std::to_integer<int>(raw[i]);
      if (value > 1)
        refuse(source_, "tensor ", in_quotes(name), " is BOOL, but has ", value, " at element ", i);
      return value == 1;
    } else {
      From value;
      std::memcpy(&value, raw.data() + i * sizeof(From), sizeof(From));
      return value;
    }
  }

  std::vector<std::byte> file_;
};

}  // namespace io
}  // namespace HEED_ABI
}  // namespace heed
