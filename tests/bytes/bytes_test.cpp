// SPDX-License-Identifier: Apache-2.0
// Every file below tests/bytes, whole, cut and with bytes flipped, goes to the reader of its folder.

#include "bytes/bytes.hpp"

#include "catch.hpp"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

using namespace heed_bytes;

TEST_CASE("readers take bytes or refuse them by one sentence") {
  for (const Input& input : kInputs) {
    std::vector<std::filesystem::path> files;
    for (const auto& entry :
         std::filesystem::directory_iterator(std::string(HEED_BYTES) + "/" + input.name))
      files.push_back(entry.path());
    std::ranges::sort(files);
    INFO(input.name);
    CHECK_FALSE(files.empty());
    int accepted = 0, refused = 0;
    for (const auto& path : files) {
      INFO(path.string());
      std::ifstream stream(path, std::ios::binary);
      const std::vector<std::uint8_t> bytes{std::istreambuf_iterator<char>(stream), {}};
      const auto run = [&](Bytes changed) { (input.run(changed) ? accepted : refused) += 1; };
      run(bytes);
      const std::size_t step = bytes.size() / 16 + 1;
      for (std::size_t at = 0; at < bytes.size(); at += step) {
        run(Bytes(bytes).first(at));
        std::vector<std::uint8_t> flipped = bytes;
        flipped[at] ^= std::uint8_t(1U << (at % 8));
        run(flipped);
      }
    }
    // A reader that took all, or none, would be tested by half.
    CHECK(accepted > 0);
    CHECK(refused > 0);
  }
}
