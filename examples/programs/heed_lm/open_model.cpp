// SPDX-License-Identifier: Apache-2.0
#include "open_model.hpp"

#include "bpe_tokenizer.hpp"
#include "data_source.hpp"
#include "finite.hpp"

#include <heed/compiled.hpp>
#include <heed/models/weights_file.hpp>

namespace heed_lm {

Run open_run(const std::string& checkpoint, const std::string& vocab, const std::string& merges) {
  const bool gpt2 = is_gpt2_file(checkpoint);
  heed::require(!gpt2 || (!vocab.empty() && !merges.empty()), checkpoint,
                ": a GPT-2 of Hugging Face needs --vocab and --merges");
  Run run = gpt2 ? run_from_gpt2(checkpoint, {}, read_bpe_tokenizer(vocab, merges))
                 : load_run(checkpoint);
  for (const auto& [option, file] : {std::pair{"--vocab", &vocab}, {"--merges", &merges}})
    heed::require(gpt2 || file->empty(), option, " is ", *file, ", ", checkpoint,
                  " has a tokenizer of its own");
  require_finite(run, checkpoint);
  return run;
}

std::vector<Index> encode_prompt(const Tokenizer& tokenizer, const std::string& prompt,
                                 const std::string& end_of_text) {
  const EndOfText end = end_of_text_named(end_of_text, tokenizer);
  if (prompt.empty() && tokenizer.end_of_text()) return {*tokenizer.end_of_text()};
  heed::require(!prompt.empty(), "--prompt is \"\", it must hold at least one character");
  try {
    return tokenizer.encode(prompt, end);
  } catch (const std::invalid_argument& error) {
    heed::fail("--prompt ", heed::io::in_quotes(prompt), ": ", error.what());
  }
}

}  // namespace heed_lm
