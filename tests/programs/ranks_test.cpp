// SPDX-License-Identifier: Apache-2.0

// Ranks that share a batch. ctest runs this program by itself and under mpirun with several ranks; every check runs on each
// of them.

#include "catch.hpp"

#include "heed_lm/shared_batch.hpp"
#include "heed_lm/training.hpp"
#include "program/ranks.hpp"

#include <heed/compiled.hpp>

#include <cmath>
#include <cstring>
#include <numeric>

namespace {

namespace nn = heed::nn;
using heed::Index;
using heed_program::Ranks;

// All ranks of this program, until it ends.
struct World {
  std::unique_ptr<heed_program::Link> link = heed_program::open_link();
  heed_program::Link* open = link.get();
  std::optional<Ranks> ranks;
  World() {
    link ? ranks.emplace(std::move(link)) : ranks.emplace();
    ranks->timeout = 300;  // a failed check on one rank would let the others wait for ever
  }
  ~World() {
    if (open != nullptr) open->close();
  }
};
[[nodiscard]] Ranks& all_ranks() {
  static World world;
  return *world.ranks;
}

[[nodiscard]] heed_lm::ModelConfig small_config(const std::string& variant) {
  heed_lm::ModelConfig config;
  config.variant = variant;
  config.vocabulary = 11;
  config.width = 16;
  config.heads = 2;
  config.depth = 2;
  config.len = 12;
  config.dropout = 0.2;
  config.attention_dropout = 0.2;
  config.seed = 5;
  return config;
}

// Rows with unlike numbers of targets.
[[nodiscard]] heed_lm::Batch ragged_batch() {
  heed_lm::Batch batch(7, 12, 0);
  for (std::size_t i = 0; i < batch.inputs.size(); ++i) {
    batch.inputs[i] = Index(i * 7 % 11);
    if (Index(i) % batch.len >= Index(i) / batch.len) batch.targets[i] = Index(i * 5 % 11);
  }
  return batch;
}

// Rows that are long enough for four ranks, with unlike numbers of targets.
[[nodiscard]] heed_lm::Batch long_batch(Index len) {
  heed_lm::Batch batch(3, len, 0);
  for (std::size_t i = 0; i < batch.inputs.size(); ++i) {
    batch.inputs[i] = Index(i * i % 11);
    if (i % 3 != 1 || Index(i) > len) batch.targets[i] = Index((i * 5 + i / 7) % 11);
  }
  return batch;
}

[[nodiscard]] std::vector<float> gradients_of(heed_lm::Model& model) {
  std::vector<float> all;
  model.visit(
      nn::Visitor<float>([&](const std::string&, heed::Param<float>&, heed::Param<float>& grad) {
        all.insert(all.end(), grad.data(), grad.data() + grad.size());
      }));
  return all;
}

[[nodiscard]] nn::Context<float> training_context() {
  nn::Context<float> context;
  context.training = true;
  context.seed = 3;
  context.step = 4;
  return context;
}

[[nodiscard]] std::uint32_t bits_of(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

}  // namespace

TEST_CASE("Numbers of all ranks come in the order of the ranks") {
  Ranks& ranks = all_ranks();
  const std::vector<int> all = ranks.gather(10 * ranks.rank());
  REQUIRE(all.size() == std::size_t(ranks.count()));
  for (int r = 0; r < ranks.count(); ++r) CHECK(all[std::size_t(r)] == 10 * r);
  CHECK(ranks.any(ranks.rank() + 1 == ranks.count()));
  CHECK_FALSE(ranks.any(false));
}

TEST_CASE("Texts of all ranks keep their lengths") {
  Ranks& ranks = all_ranks();
  const std::vector<std::string> all =
      ranks.gather_texts(std::string(std::size_t(3 * ranks.rank()), 'x'));
  for (int r = 0; r < ranks.count(); ++r)
    CHECK(all[std::size_t(r)] == std::string(std::size_t(3 * r), 'x'));
}

TEST_CASE("A sum over ranks is that in double in their order, rounded once") {
  Ranks& ranks = all_ranks();
  // Numbers that ranks do not divide evenly, fewer than ranks, and none.
  for (const std::size_t count : {std::size_t(1001), std::size_t(1), std::size_t(0)}) {
    const auto number = [](int rank, std::size_t i) {
      return float(std::sin(double(i) + 1)) * (rank % 2 == 0 ? 1e4f : -0.37f);
    };
    std::vector<float> mine(count);
    for (std::size_t i = 0; i < count; ++i) mine[i] = number(ranks.rank(), i);
    ranks.sum(mine);
    for (std::size_t i = 0; i < count; ++i) {
      double sum = 0;
      for (int r = 0; r < ranks.count(); ++r) sum += double(number(r, i));
      CHECK(bits_of(mine[i]) == bits_of(float(sum)));
    }
  }
}

TEST_CASE("A text goes from each rank to the first") {
  Ranks& ranks = all_ranks();
  if (!ranks.first()) {
    ranks.send_text(0, "one of " + std::to_string(ranks.rank()));
    ranks.send_text(0, "two of " + std::to_string(ranks.rank()));
  }
  std::vector<int> from(std::size_t(ranks.count()) - 1);
  std::iota(from.begin(), from.end(), 1);
  std::vector<int> taken(std::size_t(ranks.count()), 0);
  for (int n = 0; ranks.first() && n < 2 * (ranks.count() - 1); ++n) {
    const auto [rank, text] = ranks.wait_text(from);
    CHECK(text == (++taken[std::size_t(rank)] == 1 ? "one of " : "two of ") + std::to_string(rank));
  }
  ranks.meet();
}

namespace {

// Compares loss and gradient of `batch` on `ranks`, whose groups of context_ranks share sequences, with those of one
// process. The float rule: a gradient in float is a sum of tokens' parts in another order; each order of n of them errs by
// at most n eps of the sum of magnitudes, which the largest gradient of the tensor bounds within a factor of some tens
// here. n is 84 for ragged_batch(), and serves the 3 * 600 tokens of long_batch(), too.
void check_shared_gradient(const heed_lm::ModelConfig& config, const heed_lm::Batch& batch,
                           Ranks& ranks, int context_ranks = 1) {
  heed_lm::Model whole = heed_lm::make_model(config), shared = heed_lm::make_model(config);
  if (whole.counts_steps()) {
    whole.set_ponder(0.5);
    shared.set_ponder(0.5);
  }
  nn::Context<float> context = training_context(), other = training_context();
  nn::clear_gradients<float>(whole);
  nn::clear_gradients<float>(shared);
  Ranks alone;
  const double loss = heed_lm::shared_gradient(whole, context, batch, alone),
               of_parts = heed_lm::shared_gradient(shared, other, batch, ranks, context_ranks);
  CHECK(std::abs(loss - of_parts) <= 1e-6 * std::abs(loss));
  CHECK((other.spread == nullptr && other.part.whole()));
  const std::vector<float> expected = gradients_of(whole), parts = gradients_of(shared);
  float largest = 0, worst = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    largest = std::max(largest, std::abs(expected[i]));
    worst = std::max(worst, std::abs(parts[i] - expected[i]));
  }
  CHECK(largest > 0);
  CHECK(worst <= 84 * 1.2e-7f * largest);
  if (ranks.count() == 1) CHECK(worst == 0);

  // The same bits on all ranks, and once more.
  std::uint64_t hash = 0;
  for (const float x : parts) hash = hash * 31 + bits_of(x);
  for (const std::uint64_t one : ranks.gather(hash)) CHECK(one == hash);
  nn::clear_gradients<float>(shared);
  CHECK(heed_lm::shared_gradient(shared, other, batch, ranks, context_ranks) == of_parts);
  CHECK(gradients_of(shared) == parts);
}

}  // namespace

TEST_CASE(
    "Ranks that share a batch have the loss and the gradient of the whole, with its dropout") {
  Ranks& ranks = all_ranks();
  for (const std::string variant : {"sdpa", "dar", "dialectical-act", "dialectical-pondernet"}) {
    INFO(variant << ", rank " << ranks.rank() << " of " << ranks.count());
    check_shared_gradient(small_config(variant), ragged_batch(), ranks);
  }
}

TEST_CASE("Ranks that share sequences have the loss and the gradient of one, and groups of them") {
  Ranks& ranks = all_ranks();
  constexpr Index kLen = 600;
  for (const std::string variant : {"sdpa", "dar", "ode", "differential-v2", "dialectical-act",
                                    "dialectical-pondernet", "qkvi"})
    for (int context_ranks = 1; context_ranks <= ranks.count(); ++context_ranks) {
      if (ranks.count() % context_ranks != 0 || ranks.count() / context_ranks > 3) continue;
      INFO(variant << ", rank " << ranks.rank() << " of " << ranks.count() << ", " << context_ranks
                   << " to a sequence");
      heed_lm::ModelConfig config = small_config(variant);
      config.len = kLen;
      check_shared_gradient(config, long_batch(kLen), ranks, context_ranks);
    }
}

TEST_CASE("Sequences that are too short for so many ranks are refused") {
  Ranks& ranks = all_ranks();
  heed_lm::Run run;
  run.config = small_config("sdpa");
  run.model = std::make_unique<heed_lm::Model>(heed_lm::make_model(run.config));
  const std::string count = std::to_string(ranks.count());
  CHECK_THROWS_WITH(heed_lm::require_shareable(run, 12, ranks, 5),
                    "--context-ranks is 5, " + count +
                        (ranks.count() == 1 ? " rank was" : " ranks were") +
                        " started; it must divide " + count);
  if (ranks.count() == 1) return;
  CHECK_THROWS_WITH(heed_lm::require_shareable(run, 12, ranks, ranks.count()),
                    Catch::Contains("--context-ranks is " + count +
                                    ", sequences of 12 tokens of sdpa are cut at multiples of ") &&
                        Catch::Contains(" into 1 piece; it must be at most 1"));
  CHECK_NOTHROW(heed_lm::require_shareable(run, 600, ranks, ranks.count()));
  run.train.batch = ranks.count() / 2 - 1;
  if (ranks.count() == 4)
    CHECK_THROWS_WITH(heed_lm::require_shareable(run, 600, ranks, 2),
                      "--batch is 1, 2 groups of 2 ranks share it; it must be at least 2");
}

TEST_CASE("The score on held-out rows has the same bits for any number of ranks") {
  Ranks& ranks = all_ranks();
  std::vector<Index> tokens(900);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = Index(i * i % 11);
  heed_lm::DataSettings settings;
  settings.len = 12;
  settings.held_out = 0.4;
  const auto data = heed_lm::make_text_source(std::move(tokens), settings);
  nn::Context<float> context = training_context();
  for (const std::string variant : {"sdpa", "dialectical-pondernet"}) {
    INFO(variant);
    heed_lm::Model model = heed_lm::make_model(small_config(variant));
    for (const Index batch : {Index(4), Index(100)}) {  // eight batches, and one
      const heed_lm::Score alone = heed_lm::score(model, context, *data, batch),
                           shared = heed_lm::score(model, context, *data, batch, &ranks);
      CHECK(alone.loss == shared.loss);
      CHECK(alone.accuracy == shared.accuracy);
      CHECK(alone.answers == shared.answers);
    }
  }
  CHECK(context.training);
}

TEST_CASE("A loss that is not finite on one rank is not finite on all, and ranks go on together") {
  Ranks& ranks = all_ranks();
  heed_lm::Model model = heed_lm::make_model(small_config("sdpa"));
  if (ranks.rank() + 1 == ranks.count()) {
    bool first = true;
    model.visit(
        nn::Visitor<float>([&](const std::string&, heed::Param<float>& value, heed::Param<float>&) {
          if (std::exchange(first, false))
            std::fill_n(value.data(), value.size(), std::numeric_limits<float>::quiet_NaN());
        }));
  }
  nn::Context<float> context = training_context();
  CHECK_FALSE(std::isfinite(heed_lm::shared_gradient(model, context, ragged_batch(), ranks)));
  CHECK(context.part.whole());
  ranks.meet();
}

TEST_CASE("Ranks with other weights, settings or data are refused on all ranks") {
  Ranks& ranks = all_ranks();
  heed_lm::Run run;
  run.config = small_config("sdpa");
  run.model = std::make_unique<heed_lm::Model>(heed_lm::make_model(run.config));
  run.optimiser.prepare(*run.model);
  CHECK_NOTHROW(heed_lm::require_same_run(run, 1, ranks));
  if (ranks.count() == 1) return;
  const std::string last = "rank " + std::to_string(ranks.count() - 1);
  const bool differs = ranks.rank() + 1 == ranks.count();
  CHECK_THROWS_WITH(heed_lm::require_same_run(run, differs ? 2 : 1, ranks),
                    last + " has other data than rank 0; all ranks must read the same files");
  run.train.batch = differs ? 17 : 16;
  CHECK_THROWS_WITH(heed_lm::require_same_run(run, 1, ranks),
                    Catch::Contains(last + " has other settings"));
  run.train.batch = 16;
  CHECK_THROWS_WITH(heed_lm::require_same_run(run, 1, ranks, differs ? 2 : 1),
                    Catch::Contains(last + " has other settings"));
  if (differs)
    run.model->blocks().front().attention().visit(
        nn::Visitor<float>([](const std::string&, heed::Param<float>& value, heed::Param<float>&) {
          value.data()[0] += 1;
        }));
  CHECK_THROWS_WITH(heed_lm::require_same_run(run, 1, ranks),
                    Catch::Contains(last + " has other weights than rank 0 at the beginning"));
  run.train.batch = ranks.count() - 1;
  CHECK_THROWS_WITH(heed_lm::require_shareable(run, 12, ranks),
                    Catch::Contains(" ranks share it; it must be at least "));
}
