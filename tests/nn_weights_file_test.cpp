// SPDX-License-Identifier: Apache-2.0

// Weights in files: heed's own names, and a GPT-2 as Hugging Face stores it.

#include "catch.hpp"
#include "nn_case.hpp"

#include <heed/models/weights_file.hpp>
#include <heed/ops/scaled_dot.hpp>

#include <filesystem>
#include <map>

#include <unistd.h>

using namespace heed_test;
namespace fs = std::filesystem;

namespace {

constexpr Index kVocabulary = 13, kWidth = 128, kMaxLen = 7, kHidden = 40;

using Model = nn::LanguageModel<float>;
using Tensors = std::map<std::string, heed::Param<float>>;

// A path that no other run uses, and nothing there once this is gone.
class TemporaryFile {
 public:
  TemporaryFile() : name_((fs::temp_directory_path() / "heed-weights-XXXXXX").string()) {
    const int file = mkstemp(name_.data());
    REQUIRE(file >= 0);
    close(file);
  }
  ~TemporaryFile() { fs::remove(name_); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  [[nodiscard]] fs::path path() const { return name_; }

 private:
  std::string name_;
};

template <class T = float>
nn::LanguageModel<T> gpt(const nn::GptOptions& o) {
  return nn::make_gpt<T>(o, [&](Index) {
    return std::make_unique<nn::ProjectedAttention<heed::ScaledDot<T>>>(
        nn::AttentionOptions::even(o.width, o.heads), heed::ScaledDot<T>{}, heed::causal<T>());
  });
}
nn::GptOptions gpt2_options(Index depth) {
  nn::GptOptions o;
  o.vocabulary = kVocabulary;
  o.width = kWidth;
  o.heads = 2;
  o.depth = depth;
  o.max_len = kMaxLen;
  o.hidden = kHidden;
  o.activation = nn::Activation::gelu_tanh;
  return o;
}

// (in, out), as Conv1D has it.
heed::Param<float> turned(const heed::Param<float>& weight) {
  const Index out = weight.extent(0), in = weight.extent(1);
  heed::Param<float> result(std::vector<Index>{in, out});
  for (Index o = 0; o < out; ++o)
    for (Index i = 0; i < in; ++i) result[i * out + o] = weight[o * in + i];
  return result;
}

// The tensors of a GPT-2 with the weights of `model`.
Tensors gpt2_of(Model& model, const std::string& prefix) {
  Tensors all;
  const auto add = [&](const std::string& own, const std::string& theirs, bool turn = false) {
    const heed::Param<float>* found = find_weight<float>(model, own);
    REQUIRE(found);
    all[prefix + theirs] = turn ? turned(*found) : *found;
  };
  add("embed.weight", "wte.weight");
  add("pos_emb.weight", "wpe.weight");
  for (std::size_t n = 0; n < model.blocks().size(); ++n) {
    const std::string own = "blocks." + std::to_string(n) + ".",
                      theirs = "h." + std::to_string(n) + ".";
    const auto both = [&](const std::string& a, const std::string& b, bool turn) {
      add(own + a + ".weight", theirs + b + ".weight", turn);
      add(own + a + ".bias", theirs + b + ".bias");
    };
    both("ln1", "ln_1", false);
    both("attn.c_attn", "attn.c_attn", true);
    both("attn.c_proj", "attn.c_proj", true);
    both("ln2", "ln_2", false);
    both("mlp.0", "mlp.c_fc", true);
    both("mlp.2", "mlp.c_proj", true);
    all[prefix + theirs + "attn.bias"] =
        heed::Param<float>(std::vector<Index>{1, 1, kMaxLen, kMaxLen});
  }
  add("ln_f.weight", "ln_f.weight");
  add("ln_f.bias", "ln_f.bias");
  return all;
}
void write(const Tensors& tensors, const fs::path& path) {
  heed::io::SafetensorsWriter writer;
  for (const auto& [name, tensor] : tensors)
    writer.add(name, tensor.shape(), std::span(tensor.data(), std::size_t(tensor.size())));
  writer.write(path);
}

template <class T>
std::vector<T> logits_of(nn::LanguageModel<T>& model) {
  nn::Context<T> c;
  const std::vector<Index> ids = random_ids(2 * kMaxLen, model.options().vocabulary, 1);
  nn::Matrix<T> logits(2 * kMaxLen, model.options().vocabulary);
  model.forward(c, 2, ids, logits.view());
  return numbers(logits.view());
}

// What std::runtime_error says, without the path that must stand in front.
template <class Call>
std::string complaint(const fs::path& path, const Call& call) {
  try {
    call();
  } catch (const std::runtime_error& error) {
    const std::string text = error.what(), start = path.string() + ": ";
    REQUIRE(text.starts_with(start));
    return text.substr(start.size());
  }
  return "no error";
}

}  // namespace

TEST_CASE("A GPT-2 in Hugging Face's names gives the logits of the model that wrote it") {
  const std::string prefix = GENERATE("", "transformer.");
  const Index depth = GENERATE(1, 2, 3);
  TemporaryFile file;
  Model direct = gpt(gpt2_options(depth));
  shake<float>(direct);
  write(gpt2_of(direct, prefix), file.path());

  const nn::Gpt2File stored(file.path());
  const nn::GptOptions o = stored.options();
  CHECK(o.vocabulary == kVocabulary);
  CHECK(o.width == kWidth);
  CHECK(o.heads == 2);
  CHECK(o.depth == depth);
  CHECK(o.max_len == kMaxLen);
  CHECK(o.hidden == kHidden);
  CHECK(o.tied);
  CHECK(o.activation == nn::Activation::gelu_tanh);
  Model loaded = gpt(o);
  stored.fill(loaded);
  CHECK(same_bits(all_weights<float>(loaded), all_weights<float>(direct)));
  CHECK(same_bits(logits_of(loaded), logits_of(direct)));

  auto wide = gpt<double>(o);
  stored.fill(wide);
  const std::vector<double> exact = logits_of(wide);
  const std::vector<float> rounded = logits_of(direct);
  CHECK(largest_difference(std::vector<double>(rounded.begin(), rounded.end()), exact) < 1e-2);
}

TEST_CASE("Weights that GPT-2 does not have stay as they are") {
  TemporaryFile file;
  Model direct = gpt(gpt2_options(2));
  shake<float>(direct);
  write(gpt2_of(direct, ""), file.path());
  const nn::GptOptions o = nn::Gpt2File(file.path()).options();
  REQUIRE(o.depth == 2);
  heed::Dar<float> op;
  op.score.strength = 0.0F;
  Model resonant = nn::make_gpt<float>(o, [&](Index) {
    return std::make_unique<nn::ProjectedAttention<heed::Dar<float>>>(
        nn::dar_attention<float>(o.width, o.heads, op, true, true));
  });
  nn::Gpt2File(file.path()).fill(resonant);
  CHECK((*find_weight<float>(resonant, "blocks.1.attn.strength"))[0] == 0.0F);
  CHECK((*find_weight<float>(resonant, "blocks.1.attn.vigilance"))[0] == op.score.vigilance[0]);
  CHECK(largest_difference(logits_of(resonant), logits_of(direct)) < 1e-3);
}

TEST_CASE("A GPT-2 that does not fit is refused in one sentence and changes nothing") {
  TemporaryFile file;
  Model direct = gpt(gpt2_options(2));
  shake<float>(direct);
  const Tensors right = gpt2_of(direct, "transformer.");
  Model model = gpt(gpt2_options(2));
  shake<float>(model, 99);
  const std::vector<float> before = all_weights<float>(model);
  const auto fill = [&](const Tensors& tensors) {
    write(tensors, file.path());
    return complaint(file.path(), [&] { nn::Gpt2File(file.path()).fill(model); });
  };

  Tensors wrong = right;
  wrong.erase("transformer.ln_f.bias");
  CHECK(fill(wrong) == "there is no tensor transformer.ln_f.bias");
  wrong = right;
  wrong["transformer.h.1.mlp.c_proj.weight"] =
      heed::Param<float>(std::vector<Index>{kWidth, kHidden});
  CHECK(fill(wrong) ==
        "transformer.h.1.mlp.c_proj.weight has the shape (128 x 40), the model needs (40 x 128)");
  wrong = right;
  wrong["transformer.ln_f.weight"] = heed::Param<float>(std::vector<Index>{4});
  CHECK(fill(wrong) == "transformer.ln_f.weight has the shape (4), the model needs (128)");
  wrong = right;
  wrong.erase("transformer.wte.weight");
  CHECK(fill(wrong) == "it is no GPT-2: there is no tensor wte.weight");
  CHECK(same_bits(all_weights<float>(model), before));
  CHECK(fill(right) == "no error");
  CHECK(same_bits(all_weights<float>(model), all_weights<float>(direct)));
}

TEST_CASE("The sizes of a GPT-2 are read from tensors that must be there") {
  TemporaryFile file;
  Model direct = gpt(gpt2_options(1));
  const Tensors right = gpt2_of(direct, "");
  const auto options = [&](const Tensors& tensors) {
    write(tensors, file.path());
    return complaint(file.path(), [&] { (void)nn::Gpt2File(file.path()).options(); });
  };
  Tensors wrong = right;
  wrong.erase("wpe.weight");
  CHECK(options(wrong) == "there is no tensor wpe.weight");
  wrong = right;
  wrong.erase("h.0.ln_1.weight");
  CHECK(options(wrong) == "it has no block h.0");
  wrong = right;
  wrong["wte.weight"] = heed::Param<float>(std::vector<Index>{kVocabulary, 100});
  CHECK(options(wrong) == "its width is 100, no multiple of 64");
  wrong = right;
  wrong["wpe.weight"] = heed::Param<float>(std::vector<Index>{7});
  CHECK(options(wrong) == "wpe.weight has 1 extents, it must have 2");
  CHECK(options(right) == "no error");
}

TEST_CASE("Weights written under heed's names are read back bit for bit") {
  TemporaryFile file;
  nn::GptOptions o = gpt2_options(2);
  o.tied = false;
  o.norm = nn::NormKind::rms;
  Model model = gpt(o), empty = gpt(o);
  shake<float>(model);
  heed::io::SafetensorsWriter writer;
  nn::add_weights<float>(writer, model, "model.");
  writer.add("step", {1}, std::vector<std::int64_t>{12});
  writer.write(file.path());
  const auto stored = heed::io::Safetensors::read(file.path());
  nn::read_weights<float>(stored, file.path(), empty, "model.");
  CHECK(same_bits(all_weights<float>(empty), all_weights<float>(model)));
  CHECK(stored.info("model.blocks.1.attn.c_attn.weight").shape ==
        std::vector<Index>{3 * kWidth, kWidth});

  shake<float>(model, 5);
  const std::vector<float> before = all_weights<float>(model);
  CHECK(complaint(file.path(), [&] {
          nn::read_weights<float>(stored, file.path(), model, "other.");
        }) == "there is no tensor other.embed.weight");
  o.hidden = kHidden + 1;
  Model larger = gpt(o);
  const std::vector<float> zeros = all_weights<float>(larger);
  CHECK(complaint(file.path(), [&] {
          nn::read_weights<float>(stored, file.path(), larger, "model.");
        }) == "model.blocks.0.mlp.0.weight has the shape (40 x 128), the model needs (41 x 128)");
  CHECK(same_bits(all_weights<float>(model), before));
  CHECK(same_bits(all_weights<float>(larger), zeros));
}
