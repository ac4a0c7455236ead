// SPDX-License-Identifier: Apache-2.0

// Memory that runs out: whichever allocation fails, the call throws std::bad_alloc, nothing is lost, and the same call made
// again gives the same bits. Under the address sanitizer this also finds leaks.

#include "conformance/counting_new.hpp"
#include "nn_model_case.hpp"
#include "temporary.hpp"

#include <heed/explain.hpp>
#include <heed/models/art_memory_file.hpp>
#include <heed/models/weights_file.hpp>

#include <algorithm>
#include <filesystem>
#include <functional>

using namespace heed_test;
namespace fs = std::filesystem;
using heed::io::Safetensors;
using heed::io::SafetensorsIndex;
using heed::io::SafetensorsWriter;

namespace {

// attempt() with the first allocation failing, then with the second, ... until it succeeds; check() after each
// failure. Returns the number of failures.
long for_each_failure(
    const std::function<void()>& attempt, const std::function<void()>& check = [] {}) {
  for (long failures = 0;; ++failures) {
    bool failed = false;
    heed_test::Allocations::until_failure = failures;
    try {
      attempt();
    } catch (const std::bad_alloc&) {
      failed = true;
    } catch (...) {
      heed_test::Allocations::until_failure = -1;
      throw;
    }
    const bool reached = heed_test::Allocations::until_failure < 0;
    heed_test::Allocations::until_failure = -1;
    INFO("allocation " << failures);
    REQUIRE(failed == reached);  // no failure is swallowed
    if (!failed) return failures;
    check();
    REQUIRE(failures < 100'000);
  }
}

nn::GptOptions small_options() {
  nn::GptOptions o;
  o.vocabulary = 11;
  o.width = 16;
  o.heads = 2;
  o.depth = 2;
  o.max_len = 12;
  o.hidden = 20;
  return o;
}
std::vector<float> state_of(nn::LanguageModel<float>& model) {
  std::vector<float> all = all_weights<float>(model);
  model.visit_state([&](const std::string&, heed::Param<float>& state) {
    all.insert(all.end(), state.data(), state.data() + state.size());
  });
  return all;
}

std::vector<std::byte> bytes_of(const fs::path& path) { return heed::io::read_file(path); }

}  // namespace

TEST_CASE("A cache without memory for new tokens holds the old ones") {
  constexpr Index page = heed::kPanelLanes<float>, len = 3 * page + 1;
  std::vector<float> numbers(2 * len * 4);
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = float(i);
  const heed::TensorView<const float> rows(numbers.data(), {1, 2, len, 4}),
      one(numbers.data(), {1, 2, 1, 4});
  for (const bool moved : {false, true}) {
    heed::KvCache<float> cache(1, 2, 4, 4, page);
    cache.append(one, one);
    if (moved) {
      heed::KvCache<float> other(std::move(cache));
      cache = std::move(other);
    }
    const float* place = cache.keys().row(0, 0, 0);
    const long failures = for_each_failure([&] { cache.append(rows, rows); },
                                           [&] {
                                             CHECK(cache.len() == 1);
                                             CHECK(cache.capacity() == page);
                                             CHECK(cache.keys().row(0, 0, 0) == place);
                                             CHECK(cache.values()(0, 1, 0, 3) == one(0, 1, 0, 3));
                                           });
    CHECK(failures >= 4);
    CHECK(cache.len() == 1 + len);
    CHECK(cache.keys().row(0, 0, 0) == place);
    CHECK(cache.keys()(0, 1, len, 3) == rows(0, 1, len - 1, 3));
  }
  std::optional<heed::KvCache<float>> made;
  (void)for_each_failure([&] { made.emplace(1, 2, 4, 4, page).append(rows, rows); });
  CHECK(made->len() == len);
}

TEST_CASE("Without memory a file of tensors is neither half written nor half read") {
  const TemporaryFolder folder;
  const fs::path path = folder.path / "m.safetensors";
  const std::vector<float> weights = {1, 2, 3, 4, 5, 6};
  SafetensorsWriter writer;
  (void)for_each_failure([&] {
    SafetensorsWriter fresh;
    fresh.set_metadata("note", "longer than a short string");
    fresh.add("a tensor with a long name", {2, 3}, weights);
    fresh.add("empty", {0}, std::vector<double>());
    writer = std::move(fresh);
  });
  const std::vector<std::byte> bytes = writer.bytes();
  (void)for_each_failure([&] { writer.add("more of the same tensors", {6}, weights); },
                         [&] { CHECK(writer.bytes() == bytes); });
  CHECK(writer.bytes().size() > bytes.size());
  const std::vector<std::byte> whole = writer.bytes();
  const std::span<const std::byte> old(bytes);
  heed::io::write_file_atomically(path, {&old, 1});
  (void)for_each_failure(
      [&] { writer.write(path); },
      [&] {
        CHECK(bytes_of(path) == bytes);
        CHECK(std::distance(fs::directory_iterator(folder.path), fs::directory_iterator()) == 1);
      });
  CHECK(bytes_of(path) == whole);
  std::vector<float> read;
  (void)for_each_failure(
      [&] { read = Safetensors::read(path).values<float>("a tensor with a long name"); });
  CHECK(read == weights);
  (void)for_each_failure(
      [&] { read = Safetensors::parse(whole).rounded<float>("more of the same tensors"); });
  CHECK(read == weights);
  (void)for_each_failure([&] { read.resize(SafetensorsIndex::read(path).tensors().size()); });
  CHECK(read.size() == 3);
  std::string said;
  (void)for_each_failure([&] {
    try {
      (void)Safetensors::read(folder.path / "there is no such file");
    } catch (const std::runtime_error& error) {
      said = error.what();
    }
  });
  CHECK(said.find("cannot open the file") != std::string::npos);
}

TEST_CASE("Without memory the memories of prototypes stay as they were, in memory and in files") {
  const TemporaryFolder folder;
  const fs::path path = folder.path / "memory.safetensors";
  heed::ArtOptions<double> options;
  options.capacity = 4;
  options.dim = 3;
  options.vigilance = 0.9;
  options.learning_rate = 1.0 / 3;
  options.eps = 1.0 / 7;
  std::vector<heed::ArtMemory<double>> memories = {heed::ArtMemory<double>(options),
                                                   heed::ArtMemory<double>(options)};
  std::vector<double> keys(2 * 5 * 3);
  for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = std::sin(double(i * i));
  const heed::TensorView<const double> rows(keys.data(), {1, 2, 5, 3});
  (void)for_each_failure([&] { (void)heed::learn_after_forward(memories, rows); },
                         [&] { CHECK(memories[0].count() + memories[1].count() == 0); });
  REQUIRE(memories[0].count() > 1);
  const auto numbers = [&] {
    std::vector<double> all;
    for (const auto& memory : memories)
      all.insert(all.end(), memory.prototypes().begin(), memory.prototypes().end());
    return all;
  };
  const std::vector<double> learned = numbers();
  heed::PrototypeMemory<double> taken;
  (void)for_each_failure([&] { taken.take(memories); }, [&] { CHECK_FALSE(taken.W.given()); });
  taken.W[0] = 5;
  (void)for_each_failure([&] { taken.give(memories); }, [&] { CHECK(numbers() == learned); });
  CHECK(memories[0].prototypes()[0] == 5);

  heed::save_art_memory(path, memories[1]);
  const std::vector<std::byte> before = bytes_of(path);
  (void)for_each_failure([&] { heed::save_art_memory(path, memories[0]); },
                         [&] { CHECK(bytes_of(path) == before); });
  std::optional<heed::ArtMemory<double>> loaded;
  (void)for_each_failure([&] { loaded.emplace(heed::load_art_memory<double>(path)); });
  CHECK(loaded->options() == options);
  CHECK(std::ranges::equal(loaded->prototypes(), memories[0].prototypes()));
}

TEST_CASE("explain tells the same after a failure") {
  const heed::Geometry g{2, 4, 4, 2, 300, 300, 32, 32};
  const heed::Mask<float> mask = heed::causal<float>() & heed::key_lengths<float>({300, 7});
  const heed::Dar<float> op;
  const std::string whole = heed::explain(op, g, mask).text();
  std::string told;
  CHECK(for_each_failure([&] { told = heed::explain(op, g, mask).text(); }) > 0);
  CHECK(told == whole);
}

TEST_CASE("Models, their gradients and their optimiser give the same bits after any failure") {
  const nn::GptOptions o = small_options();
  const std::vector<Index> ids = random_ids(2 * 5, o.vocabulary, 1),
                           targets = random_ids(2 * 5, o.vocabulary, 2);
  for (const int threads : {1, 2})
    for (const std::string& name : layer_names()) {
      INFO(name << ", " << threads << " threads");
      const auto make = [&] {
        nn::LanguageModel<float> model = gpt_around<float>(name, o);
        shake<float>(model);
        return model;
      };
      nn::Context<float> c;
      c.threads = threads;
      c.training = true;
      nn::LanguageModel<float> wanted = make();
      nn::AdamW<float> wanted_optimiser;
      const double loss = wanted.gradient(c, 2, ids, targets);
      wanted_optimiser.step(c, wanted);

      nn::LanguageModel<float> model = make();
      nn::AdamW<float> optimiser;
      double got = 0;
      // A layer learns in forward() even if a later part fails.
      const bool learns = name.starts_with("prototype-art");
      (void)for_each_failure([&] { got = model.gradient(c, 2, ids, targets); },
                             [&] {
                               nn::clear_gradients<float>(model);
                               if (learns) model = make();
                             });
      CHECK(got == loss);
      const std::vector<float> before = state_of(model);
      (void)for_each_failure([&] { optimiser.step(c, model); },
                             [&] {
                               CHECK(optimiser.steps() == 0);
                               CHECK(same_bits(state_of(model), before));
                             });
      CHECK(same_bits(state_of(model), state_of(wanted)));
    }
}

TEST_CASE("Models and caches are made whole or not at all") {
  for (const std::string name :
       {"sdpa", "dar", "differential-v2", "intent-calculated", "sdpa-latent", "prototype-art"}) {
    INFO(name);
    std::optional<nn::LanguageModel<float>> model;
    (void)for_each_failure([&] { model.emplace(gpt_around<float>(name, small_options())); },
                           [&] { CHECK_FALSE(model.has_value()); });
    nn::LanguageModel<float>::Cache cache;
    (void)for_each_failure([&] { cache = model->new_cache(2); });
    CHECK(cache.blocks.size() == 2);
  }
}

TEST_CASE("A step of decoding that fails leaves the cache as it was") {
  const nn::GptOptions o = small_options();
  const std::vector<Index> prompt = random_ids(3, o.vocabulary, 1),
                           next = random_ids(1, o.vocabulary, 2);
  for (const std::string& name : layer_names())
    for (const Index held : {Index(0), Index(3)}) {
      nn::LanguageModel<float> model = gpt_around<float>(name, o);
      if (!model.can_step()) continue;
      INFO(name << " after " << held);
      shake<float>(model);
      nn::Context<float> c;
      c.threads = 1;
      auto wanted_cache = model.new_cache(1), cache = model.new_cache(1);
      nn::Matrix<float> logits(3, o.vocabulary), wanted(1, o.vocabulary), got(1, o.vocabulary);
      for (auto* each : {&wanted_cache, &cache})
        if (held > 0) model.step(c, prompt, *each, logits.view());
      model.step(c, next, wanted_cache, wanted.view());
      model = gpt_around<float>(name, o);  // without activations from before
      shake<float>(model);
      (void)for_each_failure([&] { model.step(c, next, cache, got.view()); },
                             [&] {
                               for (const auto& block : cache.blocks) CHECK(block.len() == held);
                             });
      CHECK(cache.len() == held + 1);
      CHECK(same_bits(numbers(got.view()), numbers(wanted.view())));
    }
}

TEST_CASE("A layer by itself takes back the token of a step that fails") {
  auto layer = nn::attention_by_name<float>("dar", 16, 2, 0);
  nn::Context<float> c;
  c.threads = 1;
  heed::KvCache<float> cache = layer->new_cache(1);
  const nn::Matrix<float> x = normals<float>(1, 16, 1);
  nn::Matrix<float> y(1, 16);
  CHECK(for_each_failure([&] { layer->step(c, 1, x.view(), y.view(), cache); },
                         [&] { CHECK(cache.len() == 0); }) > 0);
  CHECK(cache.len() == 1);
}

TEST_CASE("Weights in a file are read all or not at all") {
  const TemporaryFolder folder;
  const fs::path path = folder.path / "weights.safetensors";
  nn::LanguageModel<float> model = gpt_around<float>("dar", small_options()),
                           other = gpt_around<float>("dar", small_options());
  shake<float>(model);
  (void)for_each_failure([&] {
    SafetensorsWriter writer;
    nn::add_weights<float>(writer, model);
    writer.write(path);
  });
  const std::vector<float> before = all_weights<float>(other);
  (void)for_each_failure([&] { nn::read_weights<float>(Safetensors::read(path), path, other); },
                         [&] { CHECK(same_bits(all_weights<float>(other), before)); });
  CHECK(same_bits(all_weights<float>(other), all_weights<float>(model)));
}
