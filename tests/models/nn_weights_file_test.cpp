// SPDX-License-Identifier: Apache-2.0

// Weights in files: heed's own names, and a GPT-2 as Hugging Face stores it.

#include "catch.hpp"
#include "nn_case.hpp"
#include "temporary.hpp"

#include <heed/compiled.hpp>
#include <heed/models/weights_file.hpp>
#include <heed/ops/scaled_dot.hpp>

#include <filesystem>
#include <map>

using namespace heed_test;
namespace fs = std::filesystem;

namespace {

constexpr Index kVocabulary = 13, kWidth = 128, kMaxLen = 7, kHidden = 40;

using Model = nn::LanguageModel<float>;
using Tensors = std::map<std::string, heed::Param<float>>;

struct TemporaryFile : heed_test::TemporaryFolder {
  [[nodiscard]] fs::path path() const { return TemporaryFolder::path / "weights.safetensors"; }
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

// A matrix as Conv1D has it, (in, out).
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

// A format of 16 bits: its fraction's bits and the bias of its exponent.
struct Half {
  const char* dtype;
  int fraction, bias;

  [[nodiscard]] double value(unsigned bits) const {
    const int exponent = int(bits & 0x7FFFU) >> fraction, steps = int(bits) & ((1 << fraction) - 1);
    double size = std::ldexp(exponent > 0 ? steps + (1 << fraction) : steps,
                             std::max(exponent, 1) - bias - fraction);
    if (exponent == 0x7FFF >> fraction)
      size = steps > 0 ? std::numeric_limits<double>::quiet_NaN()
                       : std::numeric_limits<double>::infinity();
    return bits >= 0x8000U ? -size : size;
  }
  // The bits of the number next to x, towards 0; x must lie in the format's range.
  [[nodiscard]] std::uint16_t bits(double x) const {
    const int exponent = std::max(x == 0 ? -bias : std::ilogb(x), 1 - bias);
    const int steps = int(std::ldexp(std::abs(x), fraction - exponent));
    const int from_one = (exponent + bias - 1)
                         << fraction;  // steps has the leading one, if there is one
    return std::uint16_t((std::signbit(x) ? 0x8000 : 0) | (from_one + steps));
  }
};
const Half kHalves[] = {{"F16", 10, 15}, {"BF16", 7, 127}};

template <class T>
std::vector<std::byte> bytes_of(const std::vector<T>& numbers) {
  const auto* first = reinterpret_cast<const std::byte*>(numbers.data());
  return {first, first + numbers.size() * sizeof(T)};
}
// A file of tensors whose bytes are given.
struct RawTensor {
  std::string dtype;
  std::vector<Index> shape;
  std::vector<std::byte> bytes;
};
std::vector<std::byte> file_of(const std::map<std::string, RawTensor>& tensors) {
  std::string header;
  std::vector<std::byte> data;
  for (const auto& [name, tensor] : tensors) {
    std::string shape;
    for (const Index extent : tensor.shape)
      shape += (shape.empty() ? "" : ",") + std::to_string(extent);
    header += (header.empty() ? "{\"" : ",\"") + name + R"(":{"dtype":")" + tensor.dtype +
              R"(","shape":[)" + shape + R"(],"data_offsets":[)" + std::to_string(data.size()) +
              "," + std::to_string(data.size() + tensor.bytes.size()) + "]}";
    data.insert(data.end(), tensor.bytes.begin(), tensor.bytes.end());
  }
  header += "}";
  std::vector<std::byte> file = bytes_of(std::vector<std::uint64_t>{header.size()});
  for (const char c : header) file.push_back(std::byte(c));
  file.insert(file.end(), data.begin(), data.end());
  return file;
}

template <class T>
std::vector<T> logits_of(nn::LanguageModel<T>& model) {
  nn::Context<T> c;
  const std::vector<Index> ids = random_ids(2 * kMaxLen, model.options().vocabulary, 1);
  nn::Matrix<T> logits(2 * kMaxLen, model.options().vocabulary);
  model.forward(c, 2, ids, logits.view());
  return numbers(logits.view());
}

// The text of std::runtime_error, without the path that must stand in front.
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
  const std::string prefix = GENERATE("", "transformer.", "_orig_mod.transformer.", "module.");
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

TEST_CASE("Every number of 16 bits is read as it is, subnormals, infinities and NaN too") {
  std::vector<std::uint16_t> all(0x10000);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = std::uint16_t(i);
  for (const Half& half : kHalves) {
    const auto file =
        heed::io::Safetensors::parse(file_of({{"all", {half.dtype, {0x10000}, bytes_of(all)}}}));
    const std::vector<float> narrow = file.rounded<float>("all");
    const std::vector<double> wide = file.rounded<double>("all");
    Index wrong = 0;
    for (unsigned i = 0; i < all.size(); ++i) {
      const double want = half.value(i);
      const bool same = std::isnan(want) ? std::isnan(narrow[i]) && std::isnan(wide[i])
                                         : double(narrow[i]) == want && wide[i] == want;
      wrong += same && std::signbit(narrow[i]) == (i >= 0x8000U) ? 0 : 1;
    }
    INFO(half.dtype);
    CHECK(wrong == 0);
  }
  const auto value = [](const char* dtype, std::uint16_t bits) {
    const auto raw = bytes_of(std::vector<std::uint16_t>{bits});
    return heed::io::Safetensors::parse(file_of({{"x", {dtype, {1}, raw}}})).rounded<float>("x")[0];
  };
  CHECK(value("F16", 0x3C00) == 1.0F);
  CHECK(value("F16", 0xC580) == -5.5F);
  CHECK(value("F16", 0x7BFF) == 65504.0F);
  CHECK(value("F16", 0x8001) == -0x1p-24F);
  CHECK(value("F16", 0x0400) == 0x1p-14F);
  CHECK(value("BF16", 0xC0B0) == -5.5F);
  CHECK(value("BF16", 0x0001) == 0x1p-133F);
  CHECK(value("BF16", 0x7F7F) == 0x1.FEp127F);
}

TEST_CASE("Numbers of 64 bits are rounded to float; what float cannot hold is refused") {
  const auto read = [](const std::vector<double>& numbers) {
    const auto file = heed::io::Safetensors::parse(
        file_of({{"x", {"F64", {Index(numbers.size())}, bytes_of(numbers)}},
                 {"n", {"I32", {1}, bytes_of(std::vector<std::int32_t>{1})}}}),
        "f");
    CHECK(complaint("f", [&] { (void)file.rounded<float>("n"); }) ==
          "tensor 'n' is I32, it must be F64, F32, F16 or BF16");
    CHECK(same_bits(file.rounded<double>("x"), numbers));
    return file.rounded<float>("x");
  };
  const double infinity = std::numeric_limits<double>::infinity();
  CHECK(read({0.1, -1.0 / 3, 1e-50, -infinity}) ==
        std::vector<float>{0.1F, -1.0F / 3, 0.0F, -std::numeric_limits<float>::infinity()});
  CHECK(complaint("f", [&] {
          (void)read({1, -1e300});
        }) == "tensor 'x' has -1e+300 at element 1, which is too large for F32");
}

TEST_CASE("A GPT-2 of 16-bit numbers gives the model that has them as its weights") {
  for (const Half& half : kHalves) {
    INFO(half.dtype);
    TemporaryFile file;
    Model direct = gpt(gpt2_options(1));
    shake<float>(direct);
    Tensors tensors = gpt2_of(direct, "transformer.");
    std::map<std::string, RawTensor> stored;
    for (auto& [name, tensor] : tensors) {
      std::vector<std::uint16_t> bits;
      for (Index i = 0; i < tensor.size(); ++i) {
        bits.push_back(half.bits(double(tensor[i])));
        tensor[i] = float(half.value(bits.back()));
      }
      stored[name] = {half.dtype, tensor.shape(), bytes_of(bits)};
    }
    const std::vector<std::byte> bytes = file_of(stored);
    const std::span<const std::byte> piece(bytes);
    heed::io::write_file_atomically(file.path(), {&piece, 1});
    Model loaded = gpt(gpt2_options(1)), wanted = gpt(gpt2_options(1));
    nn::Gpt2File(file.path()).fill(loaded);
    write(tensors, file.path());
    nn::Gpt2File(file.path()).fill(wanted);
    CHECK(same_bits(all_weights<float>(loaded), all_weights<float>(wanted)));
    const double change = largest_difference(logits_of(loaded), logits_of(direct));
    CHECK(change > 0);
    CHECK(change < 0.1);
  }
}

TEST_CASE("A head in a GPT-2 file is the embedding once more, or the model's own") {
  TemporaryFile file;
  nn::GptOptions o = gpt2_options(1);
  o.tied = false;
  Model direct = gpt(o);
  shake<float>(direct);
  const std::string outer = GENERATE("", "_orig_mod.", "module._orig_mod.");
  const std::string own_head = outer + "lm_head.weight";
  Tensors tensors = gpt2_of(direct, outer + "transformer.");
  tensors[own_head] = *find_weight<float>(direct, "lm_head.weight");
  write(tensors, file.path());
  CHECK_FALSE(nn::Gpt2File(file.path()).options().tied);
  Model loaded = gpt(nn::Gpt2File(file.path()).options());
  nn::Gpt2File(file.path()).fill(loaded);
  CHECK(same_bits(logits_of(loaded), logits_of(direct)));
  tensors[own_head] = tensors[outer + "transformer.wte.weight"];
  write(tensors, file.path());
  CHECK(nn::Gpt2File(file.path()).options().tied);
  tensors["model." + own_head] = tensors[own_head];
  write(tensors, file.path());
  CHECK(complaint(file.path(), [&] { (void)nn::Gpt2File(file.path()); }) ==
        "a GPT-2 of 1 block has no place for the tensor model." + own_head);
}

TEST_CASE("What a GPT-2 is filled with is seen before, as the file calls and orders it") {
  TemporaryFile file;
  Model direct = gpt(gpt2_options(1));
  shake<float>(direct);
  const Tensors tensors = gpt2_of(direct, "module.");
  write(tensors, file.path());
  Model loaded = gpt(gpt2_options(1));
  const std::vector<float> before = all_weights<float>(loaded);
  std::size_t seen = 0;
  nn::Gpt2File(file.path()).fill(loaded, [&](const auto& name, const auto& stored) {
    const heed::Param<float>& tensor = tensors.at(name);
    CHECK(same_bits(stored, std::vector<float>(tensor.data(), tensor.data() + tensor.size())));
    CHECK(same_bits(all_weights<float>(loaded), before));
    ++seen;
  });
  CHECK(seen == tensors.size() - 1);  // the mask is left out
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
  CHECK(fill(wrong) == "the file is not a GPT-2: there is no tensor wte.weight");
  CHECK(same_bits(all_weights<float>(model), before));
  CHECK(fill(right) == "no error");
  CHECK(same_bits(all_weights<float>(model), all_weights<float>(direct)));
}

TEST_CASE("Every tensor of a GPT-2 file is used or named in the refusal, the saved masks aside") {
  TemporaryFile file;
  Model direct = gpt(gpt2_options(1));
  shake<float>(direct);
  const std::string prefix = GENERATE("", "transformer.");
  const Tensors right = gpt2_of(direct, prefix);
  const heed::Param<float> vector(std::vector<Index>{kWidth}),
      mask(std::vector<Index>{1, 1, kMaxLen, kMaxLen});
  const auto load = [&](const std::map<std::string, heed::Param<float>>& more) {
    Tensors tensors = right;
    for (const auto& [name, tensor] : more) tensors[name] = tensor;
    write(tensors, file.path());
    return complaint(file.path(), [&] {
      Model model = gpt(nn::Gpt2File(file.path()).options());
      nn::Gpt2File(file.path()).fill(model);
    });
  };
  const std::string begins = "a GPT-2 of 1 block has no place for the tensor ";
  CHECK(load({}) == "no error");
  CHECK(load({{prefix + "h.0.attn.masked_bias", mask}}) == "no error");
  CHECK(load({{prefix + "h.5.ln_1.weight", vector}}) == begins + prefix + "h.5.ln_1.weight");
  CHECK(load({{prefix + "h.5.attn.bias", mask}}) == begins + prefix + "h.5.attn.bias");
  CHECK(load({{"score.weight", vector}}) == begins + "score.weight");
  CHECK(load({{prefix + "h.0.attn.rotary", vector}}) == begins + prefix + "h.0.attn.rotary");
  CHECK(load({{"adapter\x1b[2J", vector}}) == begins + "adapter\\x1B[2J");
  CHECK(load({{"lm_head.weight", vector}}) ==
        "lm_head.weight has the shape (128), the model needs (13 x 128)");

  // A model without a place for a tensor is not filled at all.
  write(right, file.path());
  Model latent = nn::make_gpt<float>(gpt2_options(1), [&](Index) {
    return std::make_unique<nn::ProjectedAttention<heed::ScaledDot<float>>>(
        nn::latent_attention<float>(kWidth, 2, 32));
  });
  const std::vector<float> before = all_weights<float>(latent);
  CHECK(complaint(file.path(), [&] { nn::Gpt2File(file.path()).fill(latent); }) ==
        "the model has no place for the tensor " + prefix + "h.0.attn.c_attn.bias");
  CHECK(same_bits(all_weights<float>(latent), before));
}

TEST_CASE("A GPT-2 of sizes that its file does not hold is refused before memory is taken") {
  TemporaryFile file;
  Model direct = gpt(gpt2_options(1));
  const Tensors right = gpt2_of(direct, "");
  const auto sizes = [&](const std::string& name, std::vector<Index> shape) {
    Tensors tensors = right;
    tensors[name] = heed::Param<float>(std::move(shape));
    write(tensors, file.path());
    return complaint(file.path(), [&] { (void)nn::Gpt2File(file.path()).options(); });
  };
  // 2^20 columns would be blocks of 13 TB.
  CHECK(sizes("wte.weight", {1, Index(1) << 20}) ==
        "h.0.attn.c_attn.bias has the shape (384), the model needs (3145728)");
  CHECK(sizes("h.0.mlp.c_fc.weight", {kWidth, 1 << 16}) ==
        "h.0.mlp.c_fc.bias has the shape (40), the model needs (65536)");
  CHECK(sizes("wpe.weight", {0, kWidth}) ==
        "wpe.weight has the shape (0 x 128), it holds no number");
  CHECK(sizes("wte.weight", {0, kWidth}) ==
        "wte.weight has the shape (0 x 128), it holds no number");
  CHECK(sizes("h.0.mlp.c_fc.weight", {kWidth, 0}) ==
        "h.0.mlp.c_fc.weight has the shape (128 x 0), it holds no number");
  write(right, file.path());
  CHECK(complaint(file.path(), [&] {
          (void)nn::Gpt2File(file.path(), [&](const nn::GptOptions& o) {
            heed::io::refuse(file.path().string(), "vocabulary ", o.vocabulary);
          });
        }) == "vocabulary 13");
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
  CHECK(options(wrong) == "its width is 100, it must be a multiple of 64");
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
