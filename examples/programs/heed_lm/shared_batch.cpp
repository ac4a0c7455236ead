// SPDX-License-Identifier: Apache-2.0
#include "shared_batch.hpp"

#include "../program/rank_group.hpp"
#include "json_fields.hpp"
#include "training.hpp"

#include <heed/compiled_engine.hpp>
#include <heed/core/error.hpp>
#include <heed/mpi/compiled_ranks.hpp>
#include <heed/mpi/spread_tokens.hpp>
#include <heed/nn/not_finite.hpp>

#include <cstring>
#include <limits>
#include <optional>
#include <utility>

namespace heed_lm {

namespace {

namespace nn = heed::nn;
using heed_program::Ranks;

// The rows of a batch that one group of ranks computes: [first, end).
struct Rows {
  Index first, end;
  [[nodiscard]] Index count() const { return end - first; }
};
[[nodiscard]] Rows rows_of(Index rows, Index group, Index groups) {
  return {rows * group / groups, rows * (group + 1) / groups};
}

// The rows of `len` tokens on the ranks of this rank's group.
class Spread {
 public:
  Spread(const Model& model, const nn::Context<float>& context, Index rows, Index len, Ranks& ranks,
         int context_ranks)
      : group_(ranks, ranks.rank() / context_ranks * context_ranks, context_ranks),
        tokens_(
            heed::mpi::AnyCommunicator(group_),
            heed::mpi::Shards::zigzag(len, context_ranks, model.spread_step(context, rows, len))) {}
  Spread(const Spread&) = delete;
  [[nodiscard]] const nn::SpreadTokens& tokens() const { return tokens_; }

 private:
  heed_program::RankGroup group_;
  heed::mpi::SpreadTokens tokens_;
};

// Sets the context to a part of a batch, with its tokens on several ranks if `spread` is given, as
// long as this object lives.
class Sharing {
 public:
  Sharing(nn::Context<float>& context, const nn::BatchPart& part, const nn::SpreadTokens* spread)
      : context_(context) {
    context.part = part;
    context.spread = spread;
  }
  ~Sharing() {
    context_.part = {};
    context_.spread = nullptr;
  }
  Sharing(const Sharing&) = delete;

 private:
  nn::Context<float>& context_;
};

[[nodiscard]] double gradient_of(Model& model, nn::Context<float>& context, Index rows,
                                 std::span<const Index> inputs, std::span<const Index> targets) {
  try {
    return model.gradient(context, rows, inputs, targets);
  } catch (
      const nn::NotFinite&) {  // keys that a memory is to learn; the rows behind them have no loss
    return std::numeric_limits<double>::quiet_NaN();
  }
}

// Replaces the gradients of all weights by their sums over the ranks.
void sum_gradients(Model& model, Ranks& ranks) {
  std::vector<float> all;
  model.visit(
      nn::Visitor<float>([&](const std::string&, heed::Param<float>&, heed::Param<float>& grad) {
        all.insert(all.end(), grad.data(), grad.data() + grad.size());
      }));
  ranks.sum(all);
  const float* from = all.data();
  model.visit(
      nn::Visitor<float>([&](const std::string&, heed::Param<float>&, heed::Param<float>& grad) {
        std::copy_n(from, grad.size(), grad.data());
        from += grad.size();
      }));
}

// Adds to an FNV-1a hash of 32-bit words.
class Hash {
 public:
  void add(const float* numbers, Index count) {
    for (Index i = 0; i < count; ++i) {
      std::uint32_t bits;
      std::memcpy(&bits, numbers + i, sizeof bits);
      add(bits);
    }
  }
  void add(const std::string& text) {
    for (const char c : text) add(std::uint32_t(static_cast<unsigned char>(c)));
  }
  void add(std::uint64_t number) {
    add(std::uint32_t(number));
    add(std::uint32_t(number >> 32));
  }
  [[nodiscard]] std::uint64_t value() const { return hash_; }

 private:
  void add(std::uint32_t word) { hash_ = (hash_ ^ word) * 0x100000001B3u; }
  std::uint64_t hash_ = 0xCBF29CE484222325u;
};

}  // namespace

double shared_gradient(Model& model, nn::Context<float>& context, const Batch& batch, Ranks& ranks,
                       int context_ranks) {
  if (ranks.count() == 1) {
    const Packing all(batch, model.takes_packed());
    const Packed packed(context, all);
    return gradient_of(model, context, all.batch, all.inputs, all.targets);
  }
  const Rows rows =
      rows_of(batch.rows, ranks.rank() / context_ranks, ranks.count() / context_ranks);
  std::optional<Spread> spread;
  if (context_ranks > 1)
    spread.emplace(model, context, rows.count(), batch.len, ranks, context_ranks);
  std::vector<Index> inputs, targets;
  for (Index row = rows.first; row < rows.end; ++row) {
    const auto add = [&](Index t) {
      inputs.push_back(batch.inputs[std::size_t(row * batch.len + t)]);
      targets.push_back(batch.targets[std::size_t(row * batch.len + t)]);
    };
    if (spread)
      for (const Index t : spread->tokens().tokens) add(t);
    else
      for (Index t = 0; t < batch.len; ++t) add(t);
  }
  const auto gradient_of_part = [&] {
    const Sharing sharing(context,
                          {rows.first * batch.len, rows.count() * batch.len, batch.rows * batch.len,
                           count_targets(batch.targets)},
                          spread ? &spread->tokens() : nullptr);
    return gradient_of(model, context, rows.count(), inputs, targets);
  };
  struct Part {
    double loss;
    bool stopped;
  };
  Part mine{0, false};
  try {
    mine.loss = gradient_of_part();
  } catch (const PassStopped&) {
    mine.stopped = true;
  }
  double loss = 0;
  bool stopped = false;
  for (const Part& part : ranks.gather(mine)) {
    loss += part.loss;
    stopped = stopped || part.stopped;
  }
  if (stopped) throw PassStopped();
  if (std::isfinite(loss)) sum_gradients(model, ranks);
  return loss;
}

void require_shareable(Run& run, Index len, const Ranks& ranks, int context_ranks) {
  heed::require(ranks.count() % context_ranks == 0, "--context-ranks is ", context_ranks, ", ",
                ranks.count(), ranks.count() == 1 ? " rank was" : " ranks were",
                " started; it must divide ", ranks.count());
  if (ranks.count() == 1) return;
  const Index groups = ranks.count() / context_ranks;
  heed::require(run.train.batch >= groups, "--batch is ", run.train.batch, ", ", groups,
                context_ranks == 1 ? "" : " groups of ",
                context_ranks == 1 ? "" : std::to_string(context_ranks),
                " ranks share it; it must be at least ", groups);
  Index states = 0;
  run.model->visit_state(
      nn::StateVisitor<float>([&](const std::string&, heed::Param<float>&) { ++states; }));
  heed::require(states == 0, "--variant is ", run.config.variant,
                ", whose memory learns the keys of a batch one after another; it trains on one "
                "rank, not on ",
                ranks.count());
  if (context_ranks == 1) return;
  nn::Context<float> context;
  context.precision = *precision_of(run.train.precision);
  for (Index group = 0; group < groups; ++group) {
    const Index rows = rows_of(run.train.batch, group, groups).count(),
                step = run.model->spread_step(context, rows, len);
    heed::require(step > 0, "--context-ranks is ", context_ranks, ", --variant is ",
                  run.config.variant, ", which must have all tokens of a batch; it must be 1");
    const Index pieces = (len + step - 1) / step;
    heed::require(pieces >= context_ranks, "--context-ranks is ", context_ranks, ", sequences of ",
                  len, " tokens of ", run.config.variant, " are cut at multiples of ", step,
                  " into ", pieces, pieces == 1 ? " piece" : " pieces", "; it must be at most ",
                  pieces);
  }
}

void require_same_run(Run& run, std::uint64_t data, Ranks& ranks, int context_ranks) {
  if (ranks.count() == 1) return;
  Hash weights, settings;
  run.model->visit(nn::Visitor<float>(
      [&](const std::string& name, heed::Param<float>& value, heed::Param<float>&) {
        weights.add(name);
        weights.add(value.data(), value.size());
      }));
  run.optimiser.visit_state(
      [&](const std::string&, std::vector<float>& first, std::vector<float>& second) {
        weights.add(first.data(), Index(first.size()));
        weights.add(second.data(), Index(second.size()));
      });
  settings.add(json_of(run.train));
  settings.add(std::uint64_t(run.step));
  settings.add(std::uint64_t(context_ranks));
  struct Print {
    std::uint64_t weights, settings, data;
  };
  const std::vector<Print> all = ranks.gather(Print{weights.value(), settings.value(), data});
  for (std::size_t r = 1; r < all.size(); ++r) {
    heed::require(all[r].settings == all[0].settings, "rank ", r,
                  " has other settings of training, or another step, than rank 0; all ranks must "
                  "be given the same options and files");
    heed::require(all[r].data == all[0].data, "rank ", r,
                  " has other data than rank 0; all ranks must read the same files");
    heed::require(all[r].weights == all[0].weights, "rank ", r, " has other weights than rank 0 ",
                  run.step == 0 ? "at the beginning" : "after step " + std::to_string(run.step),
                  "; all ranks must run the same program on processors of one kind");
  }
}

}  // namespace heed_lm
