// SPDX-License-Identifier: Apache-2.0
// libFuzzer's entry: the reader that the environment's HEED_INPUT names gets the bytes.

#include "bytes/bytes.hpp"

#include <cstdlib>

namespace {

const heed_bytes::Input& chosen() {
  const char* name = std::getenv("HEED_INPUT");
  for (const heed_bytes::Input& input : heed_bytes::kInputs)
    if (name != nullptr && std::string(name) == input.name) return input;
  throw std::invalid_argument("HEED_INPUT names no folder of tests/bytes");
}

}  // namespace

// The fuzzer gives this name.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const heed_bytes::Input& input = chosen();
  (void)input.run({data, size});
  return 0;
}
