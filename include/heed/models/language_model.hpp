// SPDX-License-Identifier: Apache-2.0
#pragma once

// A language model: embeddings, a stack of blocks, a head.
//
//   h      = E[ids] + P[0 .. len)             P where positions are learnt
//   h      = block_n(... block_1(drop(h)))
//   logits = norm(h) H^T + b                  H = E where tied
//   loss   = mean over the tokens that have a target of their cross-entropy l
//
// Where the last block's attention leaves a token after a step n that chance chooses (PonderNet, nn/ponder_attention.hpp),
// training runs block and head for each n, and the loss of a token is sum_n p_n l_n.
//
// In training the head computes a chunk of tokens at a time, so that no (tokens, vocabulary) matrix is held.

#include <heed/models/transformer_block.hpp>
#include <heed/nn/cross_entropy.hpp>
#include <heed/nn/embedding.hpp>
#include <heed/nn/token_places.hpp>

#include <algorithm>
#include <deque>
#include <numeric>
#include <span>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

struct LanguageModelOptions {
  Index vocabulary = 0, width = 0;
  Index max_len = 0;  // rows of the table of positions; 0: positions are not learnt
  bool tied = true;   // the head is the embedding
  bool head_bias = false;
  std::optional<NormKind> final_norm = NormKind::layer;
  double dropout = 0;            // rate for the embeddings
  double attention_dropout = 0;  // rate for the weights of all blocks; 0 keeps the rate of each

  std::string embedding = "embed", position = "pos_emb.weight", blocks = "blocks", norm = "ln_f",
              head = "lm_head";
  bool numbered = true;  // "blocks.0", "blocks.1"; else the one block is "block"
  std::vector<Index> position_shape() const {
    return numbered ? std::vector<Index>{max_len, width} : std::vector<Index>{1, max_len, width};
  }
};

template <class Real>
class LanguageModel {
 public:
  // Keys and values of earlier tokens, one cache per block.
  struct Cache {
    std::vector<KvCache<Real>> blocks;
    Index batch = 1;
    [[nodiscard]] Index len() const { return blocks.empty() ? 0 : blocks[0].len(); }
  };

  LanguageModel(const LanguageModelOptions& options, std::deque<TransformerBlock<Real>> blocks)
      : options_(options),
        embedding_(options.vocabulary, options.width),
        blocks_(std::move(blocks)) {
    if (options.max_len > 0) position_ = Weight<Real>(options.position_shape());
    if (options.final_norm) norm_.emplace(*options.final_norm, options.width);
    if (!options.tied) head_ = Linear<Real>(options.width, options.vocabulary, options.head_bias);
    for (std::size_t n = 0; n + 1 < blocks_.size(); ++n)
      require(blocks_[n].attention().scored_steps() == 1, "LanguageModel: block ", n, " of ",
              blocks_.size(),
              " learns from the loss of each of its steps, which only the last block has; it must "
              "be the last one");
    std::uint64_t stream = 1;
    for (TransformerBlock<Real>& block : blocks_) {
      block.stream = stream;
      if (options.attention_dropout != 0)
        block.attention().set_dropout(options.attention_dropout, kAttentionStreams + stream);
      stream += 2;
    }
  }

  [[nodiscard]] const LanguageModelOptions& options() const { return options_; }
  [[nodiscard]] std::deque<TransformerBlock<Real>>& blocks() { return blocks_; }

  // Computes the logits, (tokens, vocabulary), of `batch` sequences of ids, one below the other.
  void forward(Context<Real>& c, Index batch, std::span<const Index> ids,
               const MatrixView<Real>& logits) {
    require_one_answer(c, "forward");
    run_blocks(c, batch, ids);
    head(c, hidden(), logits);
  }

  // True if the last block's attention learns from the loss of each of its steps.
  [[nodiscard]] bool scores_steps() const {
    return !blocks_.empty() && blocks_.back().attention().scored_steps() > 1;
  }
  // True if steps may have a cost: steps of the last block if these are scored, else steps of all blocks.
  [[nodiscard]] bool counts_steps() const {
    if (scores_steps()) return blocks_.back().attention().counts_steps();
    return std::all_of(blocks_.begin(), blocks_.end(),
                       [](const auto& block) { return block.attention().counts_steps(); });
  }
  // Sets the cost of steps: gradient() becomes that of loss() + ponder_cost(), which is `weight`
  // times the mean of the steps that each block's attention takes, over heads and tokens, summed
  // over the blocks. Throws if a block counts no steps. If the last block's steps are scored,
  // `weight` is the beta of its prior (nn/ponder_attention.hpp), and of no other block.
  void set_ponder(double weight) {
    if (scores_steps()) return blocks_.back().attention().set_ponder(weight);
    for (TransformerBlock<Real>& block : blocks_) block.attention().set_ponder(weight);
  }
  // Sets the prior of the steps of the last block. Throws if these are not scored.
  void set_ponder_prior(double prior) {
    require(scores_steps(), "LanguageModel::set_ponder_prior: the prior is ", prior,
            ", the last block's steps are not scored, it has none");
    blocks_.back().attention().set_ponder_prior(prior);
  }
  // The cost of steps in the last pass; outside of training 0 if the last block's steps are scored.
  [[nodiscard]] double ponder_cost() const {
    double sum = 0;
    for (const TransformerBlock<Real>& block : blocks_) sum += block.attention().ponder_cost();
    return sum;
  }

  // Mean cross-entropy over the targets that are not ignored. `likeliest`, if it is given, gets the id with the largest
  // logit at each of these targets; its other entries stay as they are.
  [[nodiscard]] double loss(Context<Real>& c, Index batch, std::span<const Index> ids,
                            std::span<const Index> targets, std::span<Index> likeliest = {}) {
    require(likeliest.empty() || likeliest.size() == targets.size(),
            "LanguageModel::loss: ", "likeliest has ", likeliest.size(), " entries, targets has ",
            targets.size());
    if (!likeliest.empty()) require_one_answer(c, "loss");
    run_blocks(c, batch, ids);
    return run_head(c, targets, false, likeliest);
  }

  // Returns the same loss, and adds its gradient, with that of ponder_cost(), to those of the weights. For a part of a
  // batch (c.part), and for the tokens that a rank has of it (c.spread), it returns and adds the part's share: the shares
  // of all parts and ranks add up to loss and gradient of the batch.
  [[nodiscard]] double gradient(Context<Real>& c, Index batch, std::span<const Index> ids,
                                std::span<const Index> targets) {
    require(c.training || !scores_steps(),
            "LanguageModel::gradient: the context is not training, where the last block leaves "
            "each token after one of its steps; it must be, to have the loss of all of them");
    require(c.part.whole() || c.packed == nullptr,
            "LanguageModel::gradient: packed sequences were given as a part of a batch, which has "
            "sequences of equal length");
    run_blocks(c, batch, ids);
    const double loss = run_head(c, targets, true);
    if (norm_)
      norm_->backward(c, activations_.back().view(), dhidden_.view(), dhidden_.view(),
                      Into::overwrite);
    MatrixView<Real> dh = dhidden_.view();
    for (std::size_t n = blocks_.size(); n-- > 0;) {
      const MatrixView<Real> dx = dh.row_range(0, activations_[n].rows());
      blocks_[n].backward(c, batch, activations_[n].view(), dh, dx);
      dh = dx;
    }
    apply_dropout(c, options_.dropout, 0, dh, dh);
    embedding_.backward(c, ids, dh);
    if (position_.given())
      add_position_gradient(dh, TokenPlaces(c, Index(ids.size()), Index(ids.size()) / batch));
    return loss;
  }

  // True if forward(), loss() and gradient() take packed sequences, by Context::packed and a batch of 1.
  [[nodiscard]] bool takes_packed() const {
    return std::all_of(blocks_.begin(), blocks_.end(),
                       [](const auto& block) { return block.attention().takes_packed(); });
  }
  // `batch` sequences of `len` tokens may be spread over ranks (Context::spread) in shards that are cut at multiples of this
  // number; 0 where a block takes none.
  [[nodiscard]] Index spread_step(const Context<Real>& c, Index batch, Index len) const {
    Index step = 1;
    for (const TransformerBlock<Real>& block : blocks_)
      step = std::lcm(step, block.attention().spread_step(c, batch, len));
    return step;
  }
  [[nodiscard]] bool can_step() const {
    return std::all_of(blocks_.begin(), blocks_.end(),
                       [](const auto& block) { return block.attention().can_step(); });
  }
  [[nodiscard]] Cache new_cache(Index batch) const {
    Cache cache;
    cache.batch = batch;
    for (const auto& block : blocks_) cache.blocks.push_back(block.attention().new_cache(batch));
    return cache;
  }
  // Computes the logits of the tokens that follow those in the cache, and appends these tokens to it. Where it throws,
  // the cache holds what it held before.
  void step(Context<Real>& c, std::span<const Index> ids, Cache& cache,
            const MatrixView<Real>& logits) {
    const Index held = cache.len();
    require(c.packed == nullptr, "LanguageModel::step: packed sequences were given, a cache has ",
            cache.batch, " of equal length");
    require(c.spread == nullptr,
            "LanguageModel::step: the tokens are spread over ranks, a cache has all of them");
    try {
      embed(c, cache.batch, ids, held);
      for (std::size_t n = 0; n < blocks_.size(); ++n)
        blocks_[n].step(c, cache.batch, activations_[n].view(), activations_[n + 1].view(),
                        cache.blocks[n]);
      normalise(c);
      head(c, hidden(), logits);
    } catch (...) {
      for (KvCache<Real>& block : cache.blocks) block.truncate(std::min(held, block.len()));
      throw;
    }
  }

  void visit(const Visitor<Real>& f) {
    visit_part<Real>(options_.embedding, embedding_, f);
    visit_weight(options_.position.c_str(), position_, f);
    for (std::size_t n = 0; n < blocks_.size(); ++n) visit_part<Real>(block_name(n), blocks_[n], f);
    if (norm_) visit_part<Real>(options_.norm, *norm_, f);
    if (head_) visit_part<Real>(options_.head, *head_, f);
  }
  void keep_in_range() {
    for (TransformerBlock<Real>& block : blocks_) block.keep_in_range();
  }
  void visit_state(const StateVisitor<Real>& f) {
    for (std::size_t n = 0; n < blocks_.size(); ++n)
      visit_state_of<Real>(block_name(n), blocks_[n], f);
  }

 private:
  // Offset that keeps the random streams of attention weights apart from those of the residual rows.
  static constexpr std::uint64_t kAttentionStreams = std::uint64_t(1) << 32;
  // Size of a chunk of logits: 16 MiB of floats.
  static constexpr Index kHeadChunk = Index(1) << 22;

  [[nodiscard]] std::string block_name(std::size_t n) const {
    return options_.numbered ? options_.blocks + "." + std::to_string(n) : options_.blocks;
  }

  // h = E[ids] + P; the first token of each sequence has position `first`.
  void embed(Context<Real>& c, Index batch, std::span<const Index> ids, Index first) {
    const Index tokens = Index(ids.size());
    require(batch > 0 && tokens % batch == 0, "LanguageModel: ", tokens,
            " ids were given for a batch of ", batch, " sequences, it must be a multiple");
    require(c.packed == nullptr || (batch == 1 && takes_packed()),
            "LanguageModel: packed sequences were given ",
            batch == 1 ? "to a model whose rows depend on all rows of a batch, or choose their keys"
                       : "in several batches, they take one");
    if (c.spread != nullptr) require_spread(c, batch, tokens);
    const TokenPlaces places(c, tokens, tokens / batch);
    const Index longest = places.longest();
    require(!position_.given() || first + longest <= options_.max_len,
            "LanguageModel: a sequence has ", first + longest,
            " tokens, the table of positions has ", options_.max_len);
    activations_.resize(blocks_.size() + 1);
    for (Matrix<Real>& m : activations_) m.resize(tokens, options_.width);
    const MatrixView<Real> h = activations_[0].view();
    embedding_.forward(c, ids, h, Into::overwrite);
    for (Index r = 0, len = 0; r < tokens && position_.given(); r += len) {
      const Index from = places.position(r);
      for (len = 1; r + len < tokens && places.position(r + len) == from + len;) ++len;
      add<Real>(c,
                MatrixView<const Real>(position_.value.data() + (first + from) * options_.width,
                                       len, options_.width),
                h.row_range(r, len));
    }
    apply_dropout(c, options_.dropout, 0, h, h);
  }

  // Throws unless the rows are those of a rank.
  void require_spread(const Context<Real>& c, Index batch, Index tokens) const {
    require(
        c.packed == nullptr,
        "LanguageModel: packed sequences were given, and their tokens are spread over ranks; it "
        "must be one of them");
    require(tokens == batch * c.spread->held() && c.part.count == batch * c.spread->len(),
            "LanguageModel: ", tokens, " ids were given for ", batch,
            " sequences that are spread over ranks, ", c.spread->held(), " of ", c.spread->len(),
            " tokens here, and Context::part has ", c.part.count, " tokens; it must be ",
            batch * c.spread->held(), " ids of ", batch * c.spread->len());
    for (std::size_t n = 0; n < blocks_.size(); ++n)
      require(blocks_[n].attention().spread_step(c, batch, c.spread->len()) > 0,
              "LanguageModel: the tokens are spread over ranks, the attention of block ", n,
              " must have all of a batch");
  }

  void run_blocks(Context<Real>& c, Index batch, std::span<const Index> ids) {
    embed(c, batch, ids, 0);
    if (!blocks_.empty())
      activations_.back().resize(blocks_.back().rows_per_token(c) * Index(ids.size()),
                                 options_.width);
    for (std::size_t n = 0; n < blocks_.size(); ++n)
      blocks_[n].forward(c, batch, activations_[n].view(), activations_[n + 1].view());
    normalise(c);
  }
  void normalise(Context<Real>& c) {
    if (!norm_) return;
    normed_.resize(activations_.back().rows(), options_.width);
    norm_->forward(c, activations_.back().view(), normed_.view());
  }
  // The rows that the head reads.
  [[nodiscard]] MatrixView<const Real> hidden() const {
    return norm_ ? normed_.view() : activations_.back().view();
  }

  void head(Context<Real>& c, const MatrixView<const Real>& h,
            const MatrixView<Real>& logits) const {
    require_extents(logits, h.rows, options_.vocabulary, "LanguageModel", "logits");
    if (head_) return head_->forward(c, h, logits);
    multiply(c, options_.width, factor(h),
             transposed(MatrixView<const Real>(embedding_.weight.value.data(), options_.vocabulary,
                                               options_.width)),
             logits);
  }
  // Computes dh from dlogits, and adds to the gradient of the head, or of the embedding where that is the head.
  void head_backward(Context<Real>& c, const MatrixView<const Real>& h,
                     const MatrixView<const Real>& dlogits, const MatrixView<Real>& dh) {
    if (head_) return head_->backward(c, h, dlogits, dh);
    const Index words = options_.vocabulary, width = options_.width;
    multiply(c, words, factor(dlogits),
             factor(MatrixView<const Real>(embedding_.weight.value.data(), words, width)), dh);
    multiply(c, h.rows, transposed(dlogits), factor(h),
             MatrixView<Real>(embedding_.weight.grad.data(), words, width), Into::add);
  }

  // Throws if each token has an answer for every step.
  void require_one_answer(const Context<Real>& c, const char* where) const {
    require(!c.training || !scores_steps(), "LanguageModel::", where,
            ": the context is training, where the last block has an answer for each of its ",
            scores_steps() ? blocks_.back().attention().scored_steps() : 1,
            " steps; it must not be, to have one for each token");
  }

  [[nodiscard]] double run_head(Context<Real>& c, std::span<const Index> targets, bool backward,
                                std::span<Index> likeliest = {}) {
    const MatrixView<const Real> h = hidden();
    const Index tokens = activations_.front().rows();
    require(Index(targets.size()) == tokens, "LanguageModel: ", targets.size(),
            " targets were given for ", tokens, " tokens");
    const Index counted = c.part.whole()
                              ? tokens - std::count(targets.begin(), targets.end(), kIgnoreIndex)
                              : c.part.targets;
    if (backward) dhidden_.resize(h.rows, options_.width);
    if (h.rows == tokens) return run_head_rows(c, targets, counted, 0, backward, likeliest);
    // sum_n p_n l_n of each token
    step_losses_.resize(std::size_t(h.rows));
    double loss = 0;
    for (Index first = 0; first < h.rows; first += tokens)
      loss += run_head_rows(c, targets, counted, first, backward, {});
    std::vector<Real> parts;
    for (const Index target : targets)
      parts.push_back(target == kIgnoreIndex ? Real(0) : Real(1 / double(counted)));
    blocks_.back().attention().take_step_losses(step_losses_, parts);
    return loss;
  }

  // Runs the head on as many rows as there are targets, from row `above` on. Where steps are
  // scored, the loss of each row counts by its share and is written to step_losses_.
  [[nodiscard]] double run_head_rows(Context<Real>& c, std::span<const Index> targets,
                                     Index counted, Index above, bool backward,
                                     std::span<Index> likeliest) {
    const Index tokens = Index(targets.size());
    const MatrixView<const Real> h = hidden().row_range(above, tokens);
    const bool scored = hidden().rows != tokens;
    const Index chunk = std::max<Index>(1, kHeadChunk / options_.vocabulary);
    double sum = 0;
    for (Index first = 0; first < tokens; first += chunk) {
      const Index rows = std::min(chunk, tokens - first);
      logits_.resize(rows, options_.vocabulary);
      const MatrixView<Real> logits = logits_.view();
      head(c, h.row_range(first, rows), logits);
      if (!likeliest.empty())
        for (Index r = 0; r < rows; ++r)
          if (targets[std::size_t(first + r)] != kIgnoreIndex)
            likeliest[std::size_t(first + r)] = largest_of(logits.row(r));
      std::span<Real> losses;
      if (scored)
        losses = std::span(step_losses_).subspan(std::size_t(above + first), std::size_t(rows));
      const auto part =
          cross_entropy<Real>(c, logits, targets.subspan(std::size_t(first), std::size_t(rows)),
                              backward ? logits : MatrixView<Real>(), losses, counted);
      if (scored)
        sum +=
            weigh_steps(c, losses, above + first, counted, backward ? logits : MatrixView<Real>());
      else
        sum += part.loss;
      if (backward)
        head_backward(c, h.row_range(first, rows), logits,
                      dhidden_.view().row_range(above + first, rows));
    }
    return sum;
  }

  // p times the losses of rows, from row `first` of all on, divided by the number of targets; the
  // rows' dlogits are multiplied by p.
  [[nodiscard]] double weigh_steps(Context<Real>& c, std::span<const Real> losses, Index first,
                                   Index counted, const MatrixView<Real>& dlogits) const {
    const Real* p = blocks_.back().attention().step_shares().data() + first;
    double sum = 0;
    for (std::size_t r = 0; r < losses.size(); ++r) sum += double(p[r]) * double(losses[r]);
    if (dlogits.given())
      detail::for_row_blocks(c, dlogits.rows, dlogits.columns, [&](Index begin, Index end) {
        for (Index r = begin; r < end; ++r)
          for (Index i = 0; i < dlogits.columns; ++i) dlogits.row(r)[i] *= p[r];
      });
    return counted > 0 ? sum / double(counted) : 0;
  }

  [[nodiscard]] Index largest_of(const Real* row) const {
    return Index(std::max_element(row, row + options_.vocabulary) - row);
  }

  void add_position_gradient(const MatrixView<const Real>& dh, const TokenPlaces& places) {
    for (Index r = 0; r < dh.rows; ++r) {
      Real* to = position_.grad.data() + places.position(r) * options_.width;
      for (Index i = 0; i < dh.columns; ++i) to[i] += dh.row(r)[i];
    }
  }

  LanguageModelOptions options_;
  Embedding<Real> embedding_;
  Weight<Real> position_;
  std::deque<TransformerBlock<Real>> blocks_;
  std::optional<Norm<Real>> norm_;
  std::optional<Linear<Real>> head_;
  std::vector<Matrix<Real>> activations_;  // before each block, and after the last
  Matrix<Real> normed_, logits_, dhidden_;
  std::vector<Real> step_losses_;  // loss of each step and token, where steps are scored
};

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
