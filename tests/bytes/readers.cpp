// SPDX-License-Identifier: Apache-2.0
// Readers of files: weights, checkpoints, vocabularies, examples of instructions, memories of prototypes.

#include "bytes/bytes.hpp"
#include "bytes/safetensors.hpp"
#include "heed_lm/bpe_tokenizer.hpp"
#include "heed_lm/checkpoint.hpp"
#include "heed_lm/instructions.hpp"
#include "programs/tiny_vocabulary.hpp"
#include "temporary.hpp"

#include <heed/models/art_memory_file.hpp>

#include <fstream>
#include <string>
#include <string_view>
#include <vector>

namespace heed_bytes {
namespace {

using Invalid = std::invalid_argument;
using Failed = std::runtime_error;

// A file with these bytes, which the next one of its name replaces.
[[nodiscard]] std::string file_of(const char* name, std::string_view bytes) {
  static const heed_test::TemporaryFolder folder;
  const std::string path = (folder.path / name).string();
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
  return path;
}

[[nodiscard]] std::string_view text_of(Bytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// A vocabulary that was taken encodes any bytes, and gives them back.
void encode(const heed_lm::Tokenizer& tokenizer, std::string_view text) {
  demand(tokenizer.decode(tokenizer.encode(text)) == text, "a text is not what was encoded");
  const auto again = heed_lm::tokenizer_from(tokenizer.state());
  demand(again->encode(text) == tokenizer.encode(text),
         "a tokenizer differs from that of its state");
}

}  // namespace

bool safetensors(Bytes bytes) { return fuzz_safetensors::run(std::as_bytes(bytes)); }

bool checkpoint(Bytes bytes) {
  const std::string path = file_of("checkpoint", text_of(bytes));
  return taken<Invalid, Failed>(path, [&] {
    heed_lm::Run run = heed_lm::load_run(path);
    const std::vector<heed::Index> tokens(1, 0);
    (void)run.tokenizer->decode(tokens);
  });
}

bool vocabulary(Bytes bytes) {
  const std::string path = file_of("vocab.json", text_of(bytes)),
                    merges = file_of("merges.txt", "a b\n");
  return taken<Invalid, Failed>(
      path, [&] { encode(*heed_lm::read_bpe_tokenizer(path, merges), "abc ab"); });
}

// Lines of merges, and behind a byte 0 a text.
bool merges(Bytes bytes) {
  static const std::string vocab = heed_test::vocab_json(heed_test::tiny_tokens());
  const std::string_view all = text_of(bytes);
  const std::size_t end = all.find('\0');
  const std::string path = file_of("merges.txt", all.substr(0, end)),
                    tokens = file_of("vocab.json", vocab);
  return taken<Invalid, Failed>(path, [&] {
    encode(*heed_lm::read_bpe_tokenizer(tokens, path),
           end < all.size() ? all.substr(end + 1) : "hello");
  });
}

bool instructions(Bytes bytes) {
  return taken<Invalid>("lines", [&] {
    const std::vector<heed_lm::Instruction> examples =
        heed_lm::parse_instructions(text_of(bytes), "lines");
    const heed_lm::InstructionData data(examples, heed_lm::ByteTokenizer(), 16);
    demand(data.count() == heed::Index(examples.size()), "examples are lost");
    for (heed::Index i = 0; i < data.count(); ++i) {
      const std::vector<heed::Index> one(1, i);
      (void)data.batch(one);
    }
  });
}

bool memory(Bytes bytes) {
  const auto all = std::as_bytes(bytes);
  return taken<Invalid, Failed>("", [&] {
    const auto file = heed::io::Safetensors::parse({all.begin(), all.end()});
    auto learns = heed::read_art_memory<float>(file, "memory", 1 << 16);
    demand(learns.count() >= 0 && learns.count() <= learns.options().capacity,
           "more prototypes than places");
    const std::string path = file_of("memory", "");
    heed::save_art_memory(path, learns);
    demand(heed::load_art_memory<float>(path).prototypes().size() == learns.prototypes().size(),
           "a memory is not what was saved");
  });
}

}  // namespace heed_bytes
