// SPDX-License-Identifier: Apache-2.0
#include "bytes/safetensors.hpp"
#include "catch.hpp"
#include "temporary.hpp"

#include <heed/io/atomic_file.hpp>
#include <heed/io/safetensors.hpp>

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

using heed::Index;
using heed::io::Safetensors;
using heed::io::SafetensorsWriter;
namespace fs = std::filesystem;

namespace {

using Bytes = std::vector<std::byte>;

Bytes text_bytes(const std::string& text) {
  const auto view = std::as_bytes(std::span(text));
  return {view.begin(), view.end()};
}

// Length, header as given, then `data_bytes` zeros.
Bytes file_of(const std::string& header, std::size_t data_bytes = 0) {
  std::string length(8, '\0');
  for (std::size_t i = 0; i < 8; ++i)
    length[i] = static_cast<char>(header.size() >> (8 * i) & 0xFF);
  return text_bytes(length + header + std::string(data_bytes, '\0'));
}

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":[" + shape +
         "],\"data_offsets\":[" + offsets + "]}";
}

template <class Exception, class Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const Exception& error) {
    return error.what();
  }
  return "(no such exception)";
}

std::string refusal(const Bytes& bytes) {
  return message_of<std::runtime_error>([&] { (void)Safetensors::parse(bytes); });
}

struct Malformed {
  const char* rule;
  Bytes bytes;
  std::string message;  // words that it must contain
};

std::string many_tensors(std::size_t count) {
  std::string header = "{";
  for (std::size_t i = 0; i < count; ++i)
    header += (i ? "," : "") + entry(std::to_string(i), "U8", "0", "0,0");
  return header + "}";
}

std::vector<Malformed> malformed_lengths() {
  return {
      {"size", text_bytes("1234567"), "7 bytes, fewer than the 8"},
      {"size", {}, "0 bytes, fewer than the 8"},
      {"length", text_bytes(std::string("\x03\0\0\0\0\0\0\0{}", 10)),
       "length 3 is more than the 2"},
      {"length", text_bytes(std::string(8, '\xFF') + "{}"), "length of 18446744073709551615"},
      {"length", text_bytes(std::string("\x01\xE1\xF5\x05\0\0\0\0{}", 10)),
       "length of 100000001, that of a safetensors file is at most 100000000"},
      {"length", text_bytes(std::string("\x00\xE1\xF5\x05\0\0\0\0{}", 10)),
       "length 100000000 is more than the 2 bytes that follow it: the file is cut off"},
      {"kind", text_bytes("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5\n"),
       "the file begins like a Git LFS pointer: fetch the file itself"},
      {"kind", text_bytes("\r\n <!DOCTYPE html><html></html>"), "begins like an HTML page"},
      {"kind", text_bytes("<html lang=en></html>"), "begins like an HTML page: fetch the file"},
      {"kind", text_bytes("\x1F\x8B\x08 some bytes"), "begins like gzip: unpack it"},
      {"kind", text_bytes("PK\x03\x04 some bytes"), "begins like a zip archive, as torch.save"},
      {"kind", text_bytes(std::string("\x80\x02\x00\x00\0\0\0\0.", 9) + std::string(700, 'x')),
       "begins like a pickle, as torch.save writes"},
  };
}

std::vector<Malformed> malformed_json() {
  const std::string good = entry("a", "F32", "1", "0,4");
  return {
      {"brace", file_of(""), "does not start with '{'"},
      {"brace", file_of(" {}"), "does not start with '{'"},
      {"brace", file_of("[]"), "does not start with '{'"},
      {"UTF-8", file_of("{\"__metadata__\":{\"k\":\"\xC3\x28\"}}"), "not valid UTF-8 JSON at byte"},
      {"UTF-8", file_of("{\"__metadata__\":{\"k\":\"\xED\xA0\x80\"}}"), "not valid UTF-8 JSON"},
      {"UTF-8", file_of("{}\xFF"), "not valid UTF-8 JSON at byte 3"},
      {"JSON", file_of("{"), "not valid UTF-8 JSON"},
      {"JSON", file_of("{\"a\""), "not valid UTF-8 JSON"},
      {"JSON", file_of("{} {}"), "not valid UTF-8 JSON at byte 4"},
      {"JSON", file_of("{}/* */"), "not valid UTF-8 JSON"},
      {"JSON", file_of("{" + good + ",}", 4), "not valid UTF-8 JSON"},
      {"NUL", file_of(std::string("{}\0\0", 4)), "NUL byte at byte 2 of 4"},
      {"NUL", file_of(std::string("{}\0{\"a\":1}", 10)), "NUL byte at byte 2 of 10"},
      {"depth", file_of("{\"a\":{\"shape\":[[1]]}}"),
       "'a': its shape holds an array, nested deeper"},
      {"depth", file_of("{\"a\":{\"data_offsets\":[{}]}}"),
       "holds an object, nested deeper than 3"},
      {"depth", file_of("{\"a\":" + std::string(100000, '[')),
       "'a' holds an array where an object"},
      {"depth", file_of("{\"a\":{\"dtype\":{\"b\":1}}}"),
       "its dtype holds an object where a string"},
      {"keys", file_of("{" + good + "," + good + "}", 4), "the key 'a' twice"},
      {"keys", file_of("{" + good + "," + entry("\\u0061", "F32", "1", "0,4") + "}", 4),
       "the key 'a' twice"},
      {"keys", file_of("{\"__metadata__\":{},\"__metadata__\":{}}"), "'__metadata__' twice"},
      {"keys", file_of("{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}"), "the key 'k' twice"},
      {"keys", file_of("{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\"}}"),
       "'a' has the key 'dtype' twice"},
      {"keys", file_of("{\"a\":{\"strides\":[1]}}"), "'a' has the unknown key 'strides'"},
      {"keys", file_of("{\"a\":{\"shape\":[],\"data_offsets\":[0,4]}}", 4), "'a' has no dtype"},
      {"keys", file_of("{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4),
       "'a' has no shape"},
      {"keys", file_of("{\"a\":{\"dtype\":\"F32\",\"shape\":[]}}", 4), "'a' has no data_offsets"},
  };
}

std::vector<Malformed> malformed_values() {
  const auto shape = [](const std::string& text) {
    return file_of("{" + entry("a", "U8", text, "0,1") + "}", 1);
  };
  return {
      {"numbers", shape("-1"), "'a': its shape holds the negative number -1"},
      {"numbers", shape("1.0"), "its shape holds the number '1.0', no unsigned 64-bit integer"},
      {"numbers", shape("1e0"), "the number '1e0', no unsigned 64-bit"},
      {"numbers", shape("18446744073709551616"), "the number '18446744073709551616', no unsigned"},
      {"numbers", shape("9223372036854775808"), "extent 9223372036854775808, which overflows"},
      {"numbers", shape("true"), "its shape holds true or false where unsigned"},
      {"numbers", shape("null"), "its shape holds null where unsigned"},
      {"numbers", shape("\"1\""), "its shape holds the text '1' where unsigned"},
      {"numbers", file_of("{" + entry("a", "U8", "1", "0,1.5") + "}", 1), "its data_offsets holds"},
      {"extents", shape("1,1,1,1,1,1,1,1,1"), "'a': its shape has more than 8 extents"},
      {"metadata", file_of("{\"__metadata__\":{\"k\":1}}"),
       "key 'k' holds the number 1 where a str"},
      {"metadata", file_of("{\"__metadata__\":{\"k\":null}}"), "key 'k' holds null where a string"},
      {"metadata", file_of("{\"__metadata__\":{\"k\":{}}}"), "key 'k' holds an object where a str"},
      {"metadata", file_of("{\"__metadata__\":[]}"), "__metadata__ holds an array where an object"},
      {"metadata", file_of("{\"__metadata__\":null}"), "__metadata__ holds null where an object"},
      {"tensor", file_of("{\"a\":\"b\"}"), "tensor 'a' holds the text 'b' where an object belongs"},
      {"tensor", file_of("{\"a\":{\"shape\":3}}"), "its shape holds the number 3 where an array"},
      {"dtype", file_of("{" + entry("a", "F31", "1", "0,4") + "}", 4), "unknown dtype 'F31'"},
      {"dtype", file_of("{" + entry("a", "f32", "1", "0,4") + "}", 4), "unknown dtype 'f32'"},
      {"dtype", file_of("{" + entry("a", "", "1", "0,4") + "}", 4), "unknown dtype ''"},
      {"dtype", file_of("{\"a\":{\"dtype\":5}}"), "its dtype holds the number 5 where a string"},
      {"names", file_of("{" + entry(std::string(1025, 'n'), "U8", "0", "0,0") + "}"),
       "...' has 1025 bytes, more than 1024"},
      {"count", file_of(many_tensors(65537)), "'65536' is number 65537, more than 65536"},
  };
}

std::vector<Malformed> malformed_spans() {
  const auto one = [](const char* dtype, const char* shape, const char* offsets, std::size_t data) {
    return file_of("{" + entry("a", dtype, shape, offsets) + "}", data);
  };
  const auto two = [](const char* first, const char* second, std::size_t data) {
    return file_of("{" + entry("a", "U8", "4", first) + "," + entry("b", "U8", "4", second) + "}",
                   data);
  };
  return {
      {"overflow", one("F64", "4294967296,4294967296", "0,0", 0), "'a' has a shape whose size"},
      {"overflow", one("F64", "2305843009213693952", "0,0", 0), "size in bytes overflows"},
      {"overflow", one("U8", "0,9223372036854775807,2", "0,0", 0), "size in bytes overflows"},
      {"offsets", one("U8", "1", "0", 1), "'a' has 1 data_offsets, not 2"},
      {"offsets", one("U8", "1", "", 1), "'a' has 0 data_offsets, not 2"},
      {"offsets", one("U8", "1", "0,1,1", 1), "its data_offsets has more than 2 numbers"},
      {"offsets", one("U8", "1", "1,0", 1), "'a' begins at byte 1 after its end 0"},
      {"offsets", one("U8", "2", "0,2", 1), "the file is cut off: it has 62 of 63 bytes"},
      {"offsets", two("0,4", "4,8", 3), "the file is cut off: it has "},
      {"offsets", one("U8", "1", "18446744073709551614,18446744073709551615", 1),
       "ends at byte 18446744073709551615, which overflows a signed index"},
      {"bytes", one("F32", "2,3", "0,20", 20),
       "'a' spans 20 bytes, but its shape and dtype need 24"},
      {"bytes", one("F32", "2,3", "0,28", 28), "spans 28 bytes, but its shape and dtype need 24"},
      {"bytes", one("F64", "", "0,4", 4), "spans 4 bytes, but its shape and dtype need 8"},
      {"bytes", one("F64", "0", "0,8", 8), "spans 8 bytes, but its shape and dtype need 0"},
      {"tiling", one("U8", "4", "1,5", 5), "'a' begins at byte 1, a gap after byte 0"},
      {"tiling", one("U8", "4", "0,4", 5), "the tensors end at byte 4 of 5 data bytes"},
      {"tiling", file_of("{}", 1), "the tensors end at byte 0 of 1 data bytes"},
      {"tiling", two("0,4", "5,9", 9), "'b' begins at byte 5, a gap after byte 4"},
      {"tiling", two("0,4", "3,7", 7), "'b' begins at byte 3, an overlap before byte 4"},
      {"tiling", two("0,4", "0,4", 4), "begins at byte 0, an overlap before byte 4"},
      {"tiling",
       file_of("{" + entry("a", "U8", "4", "0,4") + "," + entry("b", "U8", "0", "2,2") + "}", 4),
       "'b' begins at byte 2, an overlap before byte 4"},
  };
}

std::vector<Malformed> all_malformed() {
  std::vector<Malformed> all = malformed_lengths();
  for (const auto& more : {malformed_json(), malformed_values(), malformed_spans()})
    all.insert(all.end(), more.begin(), more.end());
  return all;
}

// A file with several dtypes, an empty tensor, a scalar and metadata.
SafetensorsWriter mixed_writer() {
  SafetensorsWriter writer;
  writer.set_metadata("note", "line\n\"quoted\" \\ \xC3\xA4 \xF0\x9F\x8C\x8A");
  writer.set_metadata("empty", "");
  writer.add("odd", {3}, std::vector<std::uint8_t>{1, 2, 255});
  writer.add("weights", {2, 2}, std::vector<double>{0.1, -0.0, 1e300, -2.5});
  writer.add("half", {}, std::array<float, 1>{0.5F});
  writer.add("nothing", {4, 0, 2}, std::vector<float>{});
  writer.add("ids", {2}, std::vector<std::int64_t>{-1, std::numeric_limits<std::int64_t>::max()});
  writer.add("small", {2}, std::vector<std::int16_t>{-3, 4});
  writer.add("flags", {2}, std::array<bool, 2>{true, false});
  return writer;
}

struct Folder : heed_test::TemporaryFolder {
  Folder() { fs::permissions(path, fs::perms{0755}); }
  [[nodiscard]] std::size_t files() const {
    return static_cast<std::size_t>(std::distance(fs::directory_iterator(path), {}));
  }
};

// All values are `number`, and so says the metadata.
void write_version(const fs::path& path, int number, Index count) {
  SafetensorsWriter writer;
  writer.set_metadata("version", std::to_string(number));
  writer.add("x", {count}, std::vector<double>(static_cast<std::size_t>(count), number));
  writer.write(path);
}

// The version that the file holds; -1 if its parts disagree.
int version_of(const fs::path& path, Index count) {
  const Safetensors file = Safetensors::read(path);
  const int number = std::stoi(file.metadata().at("version"));
  const auto x = file.view<double>("x");
  const bool whole = static_cast<Index>(x.size()) == count &&
                     std::ranges::all_of(x, [&](double value) { return value == number; });
  return whole ? number : -1;
}

// Runs the call in a child process and returns whether it came back true; changes of the child to
// itself (limits, user) do not reach the tests.
template <class Call>
bool holds_in_child(const Call& call) {
  const pid_t child = ::fork();
  if (child == 0) {
    bool result = false;
    try {
      result = call();
    } catch (...) {
    }
    ::_exit(result ? 0 : 1);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// The error of writing a version 2 to this path.
std::string write_failure(const fs::path& path) {
  return message_of<std::runtime_error>([&] { write_version(path, 2, 10); });
}

}  // namespace

TEST_CASE("a file that breaks one rule is refused by a sentence that names the problem") {
  for (const Malformed& file : all_malformed()) {
    const std::string message = refusal(file.bytes);
    INFO(file.rule << ": " << message << "\nwanted: " << file.message);
    CHECK(message.starts_with("safetensors: "));
    CHECK(message.find(file.message) != message.npos);
  }
}

TEST_CASE("files at the edge of each rule are taken") {
  CHECK(Safetensors::parse(file_of("{}")).tensors().empty());
  CHECK(Safetensors::parse(file_of("{} \n\t\r ")).tensors().empty());
  CHECK(Safetensors::parse(file_of("{\"__metadata__\":{}}")).metadata().empty());
  const std::string name(1024, 'n');
  CHECK(Safetensors::parse(file_of("{" + entry(name, "U8", "0", "0,0") + "}")).contains(name));
  CHECK(Safetensors::parse(file_of(many_tensors(65536))).tensors().size() == 65536);
  const auto ranks =
      Safetensors::parse(file_of("{" + entry("a", "U8", "1,1,1,1,1,1,1,2", "0,2") + "}", 2));
  CHECK(ranks.info("a").shape == std::vector<Index>{1, 1, 1, 1, 1, 1, 1, 2});
  const auto empty = Safetensors::parse(file_of("{" + entry("a", "U8", "4", "0,4") + "," +
                                                    entry("b", "F64", "0,9223372036854775", "4,4") +
                                                    "," + entry("c", "F64", "3,0", "0,0") + "}",
                                                4));
  CHECK(empty.values<double>("b").empty());
  CHECK(empty.view<double>("c").empty());
  CHECK(Safetensors::parse(file_of("{" + entry("", "U8", "", "0,1") + "}", 1)).contains(""));
}

TEST_CASE("every dtype has its width") {
  const std::vector<std::pair<std::string, std::size_t>> widths{
      {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1},
      {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},
      {"U32", 4},  {"F32", 4}, {"I64", 8}, {"U64", 8},     {"F64", 8}};
  for (const auto& [dtype, width] : widths) {
    INFO(dtype);
    const std::size_t bytes = 3 * width;
    const auto file = Safetensors::parse(
        file_of("{" + entry("a", dtype, "3", "0," + std::to_string(bytes)) + "}", bytes));
    CHECK(file.bytes("a").size() == bytes);
    CHECK(refusal(file_of("{" + entry("a", dtype, "3", "0," + std::to_string(bytes + 1)) + "}",
                          bytes + 1))
              .find("need " + std::to_string(bytes)) != std::string::npos);
  }
}

TEST_CASE("what is written is read back bit by bit") {
  const auto file = Safetensors::parse(mixed_writer().bytes());
  CHECK(file.metadata().at("note") == "line\n\"quoted\" \\ \xC3\xA4 \xF0\x9F\x8C\x8A");
  CHECK(file.metadata().at("empty").empty());
  CHECK(file.metadata().size() == 2);
  CHECK(file.tensors().size() == 7);
  const auto weights = file.view<double>("weights");
  REQUIRE(weights.size() == 4);
  CHECK(weights[0] == 0.1);
  CHECK(std::signbit(weights[1]));
  CHECK(weights[2] == 1e300);
  CHECK(weights[3] == -2.5);
  CHECK(file.info("weights").shape == std::vector<Index>{2, 2});
  CHECK(file.info("half").shape.empty());
  CHECK(file.view<float>("half")[0] == 0.5F);
  CHECK(file.info("nothing").shape == std::vector<Index>{4, 0, 2});
  CHECK(file.values<std::int64_t>("ids") ==
        std::vector<std::int64_t>{-1, std::numeric_limits<std::int64_t>::max()});
  CHECK(file.view<std::int16_t>("small")[0] == -3);
  CHECK(file.values<int>("odd") == std::vector<int>{1, 2, 255});
  CHECK(file.values<bool>("flags") == std::vector<bool>{true, false});
  CHECK(file.info("flags").dtype == "BOOL");
}

TEST_CASE("the written bytes are those of the format") {
  SafetensorsWriter writer;
  writer.add("b", {1}, std::vector<float>{1.0F});
  writer.add("a", {2}, std::vector<std::uint8_t>{7, 9});
  writer.set_metadata("k", "v");
  const std::string json =
      "{\"__metadata__\":{\"k\":\"v\"},\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[4,6]"
      "},"
      "\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}";
  REQUIRE(json.size() == 131);
  CHECK(writer.bytes() == text_bytes(std::string("\x88\0\0\0\0\0\0\0", 8) + json + "     " +
                                     std::string("\0\0\x80\x3F\x07\x09", 6)));
}

TEST_CASE("the written bytes do not depend on the order of the calls, and all data is aligned") {
  SafetensorsWriter one, other;
  const std::vector<double> wide{1, 2};
  const std::vector<std::int8_t> narrow{1, 2, 3};
  one.set_metadata("a", "1");
  one.set_metadata("b", "2");
  one.add("n", {3}, narrow);
  one.add("w", {2}, wide);
  other.add("w", {2}, wide);
  other.add("n", {3}, narrow);
  other.set_metadata("b", "0");
  other.set_metadata("b", "2");
  other.set_metadata("a", "1");
  CHECK(one.bytes() == other.bytes());
  const auto file = Safetensors::parse(mixed_writer().bytes());
  for (const auto& [name, info] : file.tensors())
    CHECK(info.begin % heed::io::dtype_width(info.dtype) == 0);
  for (std::size_t extra = 0; extra < 9; ++extra) {
    SafetensorsWriter padded;
    padded.add(std::string(extra, 'x'), {1}, std::vector<double>{3.0});
    CHECK(padded.bytes().size() % 8 == 0);
    CHECK(Safetensors::parse(padded.bytes()).view<double>(std::string(extra, 'x'))[0] == 3.0);
  }
}

TEST_CASE("a file with checksums is refused wherever a bit of a tensor or of the metadata changed",
          "[safetensors]") {
  SafetensorsWriter writer = mixed_writer();
  CHECK_NOTHROW(Safetensors::parse(writer.bytes()).require_checksums());
  writer.set_checksums();
  const Bytes sound = writer.bytes();
  const Safetensors file = Safetensors::parse(sound);
  CHECK_NOTHROW(file.require_checksums());
  const auto is_refused = [](const Bytes& bytes, const std::string& words) {
    const std::string said =
        message_of<std::runtime_error>([&] { Safetensors::parse(bytes).require_checksums(); });
    INFO(said);
    CHECK(said.find(words + " does not have its checksum; the file was damaged") !=
          std::string::npos);
  };
  std::size_t header = 8;
  for (std::size_t i = 0; i < 8; ++i) header += std::size_t(sound[i]) << (8 * i);
  for (std::size_t at = header; at < sound.size(); ++at) {
    Bytes damaged = sound;
    damaged[at] ^= std::byte(1 << at % 8);
    is_refused(damaged, "");
  }
  Bytes renamed = sound;
  const Bytes empty = text_bytes("empty");
  const auto key = std::search(renamed.begin(), renamed.end(), empty.begin(), empty.end());
  REQUIRE(key != renamed.end());
  *key = std::byte('E');
  is_refused(renamed, "its metadata");
  CHECK(heed::io::checksum_of(file.bytes("ids")) != heed::io::checksum_of(file.bytes("odd")));
  CHECK(heed::io::checksum_of(std::span<const std::byte>()) !=
        heed::io::checksum_of(std::as_bytes(std::span("", 1))));
}

TEST_CASE("numbers are converted exactly or refused with their place") {
  SafetensorsWriter writer;
  writer.add("whole", {3}, std::vector<double>{-2, 0, 16777216});
  writer.add("tenth", {2}, std::vector<double>{1, 0.1});
  writer.add("huge", {1}, std::vector<double>{1e39});
  writer.add("special", {2}, std::vector<double>{-INFINITY, NAN});
  writer.add("limit", {1}, std::vector<std::int64_t>{std::numeric_limits<std::int64_t>::max()});
  writer.add("power", {1}, std::vector<double>{9223372036854775808.0});
  writer.add("odd", {1}, std::vector<std::int32_t>{16777217});
  const auto file = Safetensors::parse(writer.bytes());
  CHECK(file.values<float>("whole") == std::vector<float>{-2, 0, 16777216});
  CHECK(file.values<Index>("whole") == std::vector<Index>{-2, 0, 16777216});
  CHECK(file.values<double>("odd") == std::vector<double>{16777217});
  CHECK(file.values<std::uint64_t>("power") == std::vector<std::uint64_t>{std::uint64_t{1} << 63});
  CHECK(file.values<std::uint64_t>("limit")[0] == (std::uint64_t{1} << 63) - 1);
  CHECK(std::isnan(file.values<float>("special")[1]));
  CHECK(file.values<float>("special")[0] == -INFINITY);

  const auto text = [&](auto type, const char* name) {
    return message_of<std::runtime_error>([&] { (void)file.values<decltype(type)>(name); });
  };
  CHECK(text(0.0F, "tenth") ==
        "safetensors: tensor 'tenth' has 0.1 at element 1, "
        "which F32 does not hold exactly");
  CHECK(text(0.0F, "huge").find("1e+39") != std::string::npos);
  CHECK(text(0.0F, "huge").find("F32 does not") != std::string::npos);
  CHECK(text(0.0F, "odd").find("16777217 at element 0, which F32") != std::string::npos);
  CHECK(text(0.0, "limit").find("9223372036854775807 at element 0, which F64") !=
        std::string::npos);
  CHECK(text(0L, "power").find("which I64 does not hold") != std::string::npos);
  CHECK(text(0L, "special").find("-inf at element 0") != std::string::npos);
  CHECK(text(0L, "tenth").find("element 1, which I64") != std::string::npos);
  CHECK(text(0U, "whole").find("-2 at element 0, which U32") != std::string::npos);
  CHECK(text(true, "whole").find("-2 at element 0, which BOOL") != std::string::npos);
}

TEST_CASE("the ends of an integer type are inside it, the next numbers are not") {
  SafetensorsWriter writer;
  writer.add("ends", {2}, std::vector<double>{-128, 127});
  writer.add("below", {1}, std::vector<double>{-129});
  writer.add("above", {1}, std::vector<double>{128});
  writer.add("zero", {1}, std::vector<float>{0});
  writer.add("lowest", {1}, std::vector<double>{-9223372036854775808.0});
  writer.add("all_ones", {1},
             std::vector<std::uint64_t>{std::numeric_limits<std::uint64_t>::max()});
  const auto file = Safetensors::parse(writer.bytes());
  CHECK(file.values<std::int8_t>("ends") == std::vector<std::int8_t>{-128, 127});
  CHECK(file.values<std::uint32_t>("zero") == std::vector<std::uint32_t>{0});
  CHECK(file.values<std::int64_t>("lowest")[0] == std::numeric_limits<std::int64_t>::min());
  CHECK_THROWS_AS(file.values<std::int8_t>("below"), std::runtime_error);
  CHECK_THROWS_AS(file.values<std::int8_t>("above"), std::runtime_error);
  CHECK_THROWS_AS(file.values<std::uint64_t>("lowest"), std::runtime_error);
  CHECK_THROWS_AS(file.values<double>("all_ones"), std::runtime_error);
  CHECK_THROWS_AS(file.values<std::int64_t>("all_ones"), std::runtime_error);
}

TEST_CASE("a BOOL byte other than 0 and 1 is refused") {
  Bytes bytes = file_of("{" + entry("a", "BOOL", "2", "0,2") + "}", 2);
  bytes.end()[-2] = std::byte{1};
  CHECK(Safetensors::parse(bytes).values<int>("a") == std::vector<int>{1, 0});
  bytes.back() = std::byte{2};
  CHECK(message_of<std::runtime_error>([&] {
          (void)Safetensors::parse(bytes).values<bool>("a");
        }) == "safetensors: tensor 'a' is BOOL, but has 2 at element 1");
}

TEST_CASE("a wrong name or type is the caller's error") {
  const auto file = Safetensors::parse(mixed_writer().bytes(), "m.safetensors");
  const auto text = [](const auto& call) { return message_of<std::invalid_argument>(call); };
  CHECK(text([&] { (void)file.values<double>("no\nne"); }) ==
        "m.safetensors: there is no tensor 'no?ne'");
  CHECK(text([&] { (void)file.view<float>("weights"); }) ==
        "m.safetensors: tensor 'weights' is F64, a view as F32 was asked for");
  CHECK(text([&] { (void)file.view<std::uint16_t>("small"); }).find("I16, a view as U16") !=
        std::string::npos);
  CHECK_FALSE(file.contains("none"));
  const auto half = Safetensors::parse(file_of("{" + entry("h", "F16", "1", "0,2") + "}", 2));
  CHECK(text([&] { (void)half.values<float>("h"); }) ==
        "safetensors: tensor 'h' is F16, which has no conversion to F32");
}

TEST_CASE("an unaligned tensor is not viewed, but is converted") {
  std::string header = "{" + entry("a", "F64", "1", "0,8") + "}";
  while (header.size() % 8 != 3) header += ' ';
  Bytes bytes = file_of(header, 8);
  const double value = -1.5;
  std::memcpy(bytes.data() + bytes.size() - 8, &value, 8);
  const auto file = Safetensors::parse(bytes);
  CHECK(message_of<std::runtime_error>([&] { (void)file.view<double>("a"); }) ==
        "safetensors: tensor 'a' lies 3 bytes past a multiple of 8 and cannot be viewed as F64");
  CHECK(file.values<double>("a") == std::vector<double>{-1.5});
}

TEST_CASE("the writer refuses what the reader would refuse") {
  SafetensorsWriter writer;
  const std::vector<float> six(6);
  writer.add("a", {2, 3}, six);
  const Bytes before = writer.bytes();
  const auto text = [&](const std::string& name, const std::vector<Index>& shape) {
    return message_of<std::invalid_argument>([&] { writer.add(name, shape, six); });
  };
  CHECK(text("a", {6}) == "safetensors: tensor 'a' was added before");
  CHECK(text("b", {7}) == "safetensors: tensor 'b' has 6 values (24 bytes), its shape holds 7");
  CHECK(
      text("b", {-2, -3}) ==
      "safetensors: tensor 'b' has shape [-2,-3], with a negative extent or a size that overflows "
      "an index");
  CHECK(text("b", {Index{1} << 62}).find("overflows") != std::string::npos);
  CHECK(text("b", {1, 1, 1, 1, 1, 1, 1, 1, 6}).find("9 extents, more than 8") != std::string::npos);
  CHECK(text("__metadata__", {6}).find("reserved") != std::string::npos);
  CHECK(text(std::string(1025, 'n'), {6}).find("1025 bytes, more than 1024") != std::string::npos);
  CHECK(text("\xFF", {6}).find("not valid UTF-8") != std::string::npos);
  CHECK(message_of<std::invalid_argument>([&] {
          writer.set_metadata("k", "\xC3");
        }).find("not valid UTF-8") != std::string::npos);
  CHECK(message_of<std::invalid_argument>([&] {
          writer.add_bytes("b", "F31", {0}, {});
        }).find("unknown dtype 'F31'") != std::string::npos);
  CHECK(writer.bytes() == before);
}

TEST_CASE("every golden file is read and written again") {
  std::size_t files = 0;
  for (const auto& item : fs::recursive_directory_iterator(HEED_GOLDEN_DIR)) {
    if (item.path().extension() != ".safetensors") continue;
    INFO(item.path().string());
    const auto file = Safetensors::read(item.path());
    REQUIRE_FALSE(file.tensors().empty());
    CHECK(file.metadata().contains("case"));
    for (const auto& [name, info] : file.tensors()) {
      const auto view = file.view<double>(name);
      const auto values = file.values<double>(name);
      CHECK(std::equal(view.begin(), view.end(), values.begin(), values.end(),
                       [](double a, double b) { return a == b; }));
    }
    fuzz_safetensors::check_round_trip(file);
    ++files;
  }
  INFO("folder " << HEED_GOLDEN_DIR);
  CHECK(files > 0);
}

TEST_CASE("a save replaces the file, keeps its permissions and leaves nothing else") {
  const Folder folder;
  const fs::path path = folder.path / "m.safetensors";
  write_version(path, 1, 10);
  CHECK(version_of(path, 10) == 1);
  fs::permissions(path, fs::perms{0600});
  write_version(path, 2, 10);
  CHECK(version_of(path, 10) == 2);
  CHECK(fs::status(path).permissions() == fs::perms{0600});
  CHECK(folder.files() == 1);
  CHECK(heed::io::read_file(path).size() == fs::file_size(path));
}

TEST_CASE("a relative path without a folder is written to the working folder") {
  const Folder folder;
  CHECK(holds_in_child([&] {
    fs::current_path(folder.path);
    write_version("m.safetensors", 1, 10);
    return version_of("m.safetensors", 10) == 1;
  }));
  CHECK(folder.files() == 1);
}

TEST_CASE("a save to a place that cannot take it says so and changes nothing") {
  const Folder folder;
  const fs::path file = folder.path / "m.safetensors";
  write_version(file, 1, 10);
  CHECK(write_failure(folder.path / "none" / "m") ==
        (folder.path / "none" / "m").string() +
            ": cannot open its folder (No such file or directory)");
  CHECK(write_failure(file / "m").find("cannot open its folder (Not a directory)") !=
        std::string::npos);
  CHECK(write_failure(folder.path) == folder.path.string() + ": exists and is not a regular file");
  CHECK(write_failure(folder.path / std::string(300, 'n')).find("(File name too long)") !=
        std::string::npos);
  CHECK(message_of<std::invalid_argument>([&] {
          write_version(folder.path / "", 2, 10);
        }).find("it must name a file") != std::string::npos);
  CHECK(version_of(file, 10) == 1);
  CHECK(folder.files() == 1);
}

TEST_CASE("a device is neither written nor replaced") {
  const Folder folder;
  const fs::path link = folder.path / "full";
  fs::create_symlink("/dev/full", link);  // a link, so that a mistake costs the link alone
  CHECK(write_failure(link) == link.string() + ": exists and is not a regular file");
  CHECK(fs::is_symlink(link));
  CHECK(folder.files() == 1);
  CHECK(message_of<std::runtime_error>([] { (void)Safetensors::read("/dev/full"); }) ==
        "/dev/full: not a regular file");
}

TEST_CASE("a full disk, a failed sync and a failed read are errors with the system's words") {
  const fs::path name = "m.safetensors";
  const std::vector<std::byte> data(100);
  heed::io::File full(::open("/dev/full", O_WRONLY | O_CLOEXEC), name, "open");
  CHECK(message_of<std::runtime_error>([&] { full.write_all(data); }) ==
        "m.safetensors: cannot write the file (No space left on device)");
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  heed::io::File in(ends[0], name, "open"), out(ends[1], name, "open");
  CHECK(message_of<std::runtime_error>([&] { out.sync(); }) ==
        "m.safetensors: cannot sync the file to disk (Invalid argument)");
  std::vector<std::byte> target(1);
  CHECK(message_of<std::runtime_error>([&] { (void)out.read_all(target); }) ==
        "m.safetensors: cannot read the file (Bad file descriptor)");
  CHECK(message_of<std::runtime_error>([] { (void)Safetensors::read("/no/such"); }) ==
        "/no/such: cannot open the file (No such file or directory)");
  CHECK(message_of<std::runtime_error>([] { (void)Safetensors::read("/tmp"); }) ==
        "/tmp: not a regular file");
}

TEST_CASE("a sparse file of a terabyte is refused by its header, before memory for it is taken") {
  const Folder folder;
  const fs::path path = folder.path / "m.safetensors";
  const auto spread = [&](const Bytes& head) {
    const std::span<const std::byte> piece(head);
    heed::io::write_file_atomically(path, {&piece, 1});
    fs::resize_file(path, std::uintmax_t{1} << 40);
  };
  const auto said = [&](const auto& call) {
    const std::string text = message_of<std::runtime_error>(call), start = path.string() + ": ";
    CHECK(text.starts_with(start));
    return text.substr(std::min(text.size(), start.size()));
  };
  const auto read = [&] { return said([&] { (void)Safetensors::read(path); }); };
  spread({});
  CHECK(read() == "the header does not start with '{'");
  spread(mixed_writer().bytes());
  CHECK(read().find(" of 10995116") != std::string::npos);
  CHECK(read().find("the tensors end at byte ") == 0);
  const std::string rest = std::to_string((std::size_t{1} << 40) - 8 - 128);
  std::string header = "{" + entry("a", "U8", rest, "0," + rest) + "}";
  header.resize(128, ' ');
  spread(file_of(header));
  CHECK(read().find("the file has 1099511627776 bytes, this machine's memory ") == 0);
  CHECK(said([&] {
          (void)heed::io::read_file(path);
        }).find("the file has 1099511627776 bytes, this") == 0);
  // The file's own description can still be read.
  CHECK(heed::io::SafetensorsIndex::read(path).info("a").shape ==
        std::vector<Index>{Index(std::stoll(rest))});
}

TEST_CASE("a file whose header is shorter than what tells other files is read whole") {
  const Folder folder;
  const fs::path path = folder.path / "short.safetensors";
  Bytes bytes = file_of("{" + entry("a", "U8", "3", "0,3") + "}", 3);
  for (std::size_t i = 1; i <= 3; ++i) bytes[bytes.size() - i] = std::byte(i);
  const std::span<const std::byte> piece = bytes;
  heed::io::write_file_atomically(path, {&piece, 1});
  CHECK(Safetensors::read(path).values<int>("a") == std::vector<int>{3, 2, 1});
  CHECK(heed::io::SafetensorsIndex::read(path).contains("a"));
}

TEST_CASE("a file can be refused by its header, before its tensors are read") {
  const Folder folder;
  const fs::path path = folder.path / "m.safetensors";
  write_version(path, 7, 10);
  std::string version;
  const Safetensors file = Safetensors::read(path, [&](const heed::io::SafetensorsIndex& head) {
    version = head.metadata().at("version") + " " + std::to_string(head.info("x").shape[0]);
  });
  CHECK(version == "7 10");
  CHECK(file.values<int>("x") == std::vector<int>(10, 7));
  CHECK(message_of<std::runtime_error>([&] {
          (void)Safetensors::read(path,
                                  [](const auto&) { throw std::runtime_error("not this one"); });
        }) == "not this one");
}

TEST_CASE("an error made of foreign bytes is whole and printable") {
  const auto said = [](const std::string& bytes) {
    return message_of<std::invalid_argument>(
        [&] { heed::fail("the name is '", bytes, "', it must be short"); });
  };
  const auto whole = [](const std::string& name) {
    return "the name is '" + name + "', it must be short";
  };
  CHECK(said(std::string("a\0b", 3)) == whole("a\\x00b"));
  CHECK(said("\x1b]0;title\a\n\r\x7f") == whole("\\x1B]0;title\\x07\\x0A\\x0D\\x7F"));
  CHECK(said("\xC2\x9B"
             "2J") == whole("\\xC2\\x9B2J"));  // CSI of 8 bits
  CHECK(said("\xC2\xA0 \xC3\xA4 \xE2\x82\xAC \xF0\x9F\x8C\x8A") ==
        whole("\xC2\xA0 \xC3\xA4 \xE2\x82\xAC \xF0\x9F\x8C\x8A"));
  CHECK(said("\x80 \xC0\xAF \xED\xA0\x80 \xF4\x90\x80\x80 \xE2\x82") ==
        whole("\\x80 \\xC0\\xAF \\xED\\xA0\\x80 \\xF4\\x90\\x80\\x80 \\xE2\\x82"));
  CHECK(heed::printable(heed::printable("\x01\\")) == heed::printable("\x01\\"));
  const fs::path none = std::string("/no/such\n\x1b[31m");
  CHECK(message_of<std::runtime_error>([&] { (void)heed::io::read_file(none); }) ==
        "/no/such\\x0A\\x1B[31m: cannot open the file (No such file or directory)");
  const auto file = file_of("{" + entry("\\u0000\\u001b[2J\xC2\x9B", "F31", "1", "0,4") + "}", 4);
  CHECK(refusal(file) ==
        "safetensors: tensor '?"
        "?[2J?"
        "?' has the unknown dtype 'F31'");
}

TEST_CASE("a write that fails halfway leaves the old file and no temporary one") {
  const Folder folder;
  const fs::path path = folder.path / "m.safetensors";
  write_version(path, 1, 10);
  CHECK(holds_in_child([&] {
    const struct rlimit limit { 4096, 4096 };  // bytes of any file
    std::signal(SIGXFSZ, SIG_IGN);
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return false;
    return message_of<std::runtime_error>([&] { write_version(path, 2, 10000); }) ==
           path.string() + ": cannot write the file (File too large)";
  }));
  CHECK(version_of(path, 10) == 1);
  CHECK(folder.files() == 1);
}

TEST_CASE("a read-only folder refuses the save and keeps the old file") {
  const Folder folder;
  const fs::path path = folder.path / "m.safetensors";
  write_version(path, 1, 10);
  fs::permissions(folder.path, fs::perms{0555});
  CHECK(holds_in_child([&] {
    if (::geteuid() == 0 && ::setuid(65534) != 0) return false;  // root may write anywhere
    return write_failure(path) ==
           path.string() + ": cannot create a temporary file in its folder (Permission denied)";
  }));
  fs::permissions(folder.path, fs::perms{0755});
  CHECK(version_of(path, 10) == 1);
  CHECK(folder.files() == 1);
}

TEST_CASE("a writer killed at any moment leaves the old file or the new one") {
  constexpr int children = 30;
  constexpr Index count = 100000;  // 800 kB: most of the time is spent in the write
  const Folder folder;
  const fs::path path = folder.path / "m.safetensors";
  write_version(path, 0, count);
  std::mt19937 random(20240607);
  int old = 0;
  for (int child = 1; child <= children; ++child) {
    // Half of the children are killed during their first save, the others after it at the earliest.
    const bool wait_for_first = child % 2 == 0;
    int ends[2];
    REQUIRE(::pipe(ends) == 0);
    const pid_t pid = ::fork();
    if (pid == 0) {
      for (int save = 0; save < 100000; ++save) {
        write_version(path, child * 100000 + save, count);
        if (save == 0 && ::write(ends[1], "1", 1) != 1) ::_exit(1);
      }
      ::_exit(0);
    }
    ::close(ends[1]);
    char answer = 0;
    if (wait_for_first) CHECK(::read(ends[0], &answer, 1) == 1);
    ::usleep(static_cast<useconds_t>(random() % 5000));
    CHECK(::kill(pid, SIGKILL) == 0);
    int status = 0;
    CHECK(::waitpid(pid, &status, 0) == pid);
    ::close(ends[0]);

    const int now = version_of(path, count);
    INFO("child " << child << ", version " << old << " before, " << now << " after");
    const bool is_new = now / 100000 == child;
    CHECK((is_new || (now == old && !wait_for_first)));
    old = now;
  }
  CHECK(old / 100000 == children);
  // The next save removes leftovers of killed processes, but no file with a living writer or another name.
  const fs::path other = folder.path / ".heed-notes.tmp";
  std::ofstream(other).flush();
  const heed::io::TemporaryFile living(folder.path, path);
  write_version(path, 7, count);
  CHECK(version_of(path, count) == 7);
  CHECK(fs::exists(other));
  CHECK(folder.files() == 3);
}

TEST_CASE("the fuzzer's oracle holds on a corpus of sound, broken, cut and flipped files") {
  const Bytes mixed = mixed_writer().bytes();
  REQUIRE(fuzz_safetensors::run(mixed));
  for (const Malformed& file : all_malformed()) {
    INFO(file.rule << ": " << file.message);
    CHECK_FALSE(fuzz_safetensors::run(file.bytes));
  }
  for (std::size_t length = 0; length < mixed.size(); ++length)
    CHECK_FALSE(fuzz_safetensors::run(std::span(mixed).first(length)));
  std::size_t taken = 0;
  for (std::size_t at = 0; at < mixed.size(); ++at)
    for (const int flip : {0x01, 0x04, 0x10, 0x20, 0x80}) {
      Bytes changed = mixed;
      changed[at] ^= static_cast<std::byte>(flip);
      taken += fuzz_safetensors::run(changed) ? 1U : 0U;
    }
  // Data bytes and letters of names may change freely, the rest of the header may not.
  CHECK(taken > 0);
  CHECK(taken < 5 * mixed.size() / 2);
}
