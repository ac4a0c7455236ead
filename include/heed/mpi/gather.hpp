// SPDX-License-Identifier: Apache-2.0
#pragma once

// Context parallelism by gathering: every rank gets the keys and values of all tokens, in their order, and computes its own
// queries as shares of the whole call (Inputs::share).
//
//   forward    all-gather of K and V; out, lse, steps of the rank's queries have the bits of one process
//   backward   all-gather of K and V once more; dQ and other gradients of the rank's queries have the bits of one process.
//              dK, dV: each rank computes a term for all keys; the owner of a key sums them over ranks, in the order of the
//              ranks; gradients of parameters and of the mask's bias likewise
//
// backward_in_order() gives dK, dV and the gradients of parameters and bias the bits of one process, too: only one rank adds to
// them at a time, in the order of one process. That order goes through the query heads that share a key-value head, and for
// each of them through the pieces of the queries from the last to the first; a rank that has added
// its piece sends the sums to the rank of the next piece. Cost: backward takes the time of one
// process, and the sums, batch kv_heads len (dim_qk + dim_v) numbers and those of parameters and
// bias, travel once for each piece (one or two per rank) of each of these heads.
//
// Any op, any mask. If an op's rows depend on all rows of a call (Halting::batch), the rehearsal's reports are gathered.
//
// Memory    O(len) per rank for K and V, and for dK and dV in backward; the rest O(len / ranks)
// Traffic   per rank, in numbers: forward batch kv_heads len (dim_qk + dim_v) received, backward twice that

#include <heed/engine/doors.hpp>
#include <heed/engine/shared_op.hpp>
#include <heed/mpi/messages.hpp>

#include <algorithm>
#include <array>
#include <concepts>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace mpi {

// Results of forward() that backward() needs.
template <class Real>
using Saved = SavedPieces<Real>;

namespace detail {

// Rows [first, first + count).
template <class Element>
[[nodiscard]] TensorView<Element> rows_of(const TensorView<Element>& view, Index first,
                                          Index count) {
  if (!view.given()) return view;
  Shape shape = view.shape();
  shape.len = count;
  return {view.data() ? view.data() + first * view.strides().row : nullptr, shape, view.strides()};
}
template <class Element>
[[nodiscard]] StoredView<Element> rows_of(const StoredView<Element>& view, Index first,
                                          Index count) {
  if (!view.given()) return view;
  return view.visit([&](const auto& of) -> StoredView<Element> {
    using View = std::remove_cvref_t<decltype(of)>;
    if constexpr (std::same_as<View, ScaledView>)
      return View(rows_of(of.numbers(), first, count), rows_of(of.scales(), first, count));
    else
      return rows_of(of, first, count);
  });
}

// A tensor of all tokens, stored in the type of the ranks' tensors.
template <class Real>
class GatheredRows {
 public:
  GatheredRows(const AnyCommunicator& comm, const Shards& shards,
               const StoredView<const Real>& own) {
    if (!own.given()) return;
    view_ = own.visit([&](const auto& of) -> StoredView<const Real> {
      if constexpr (requires { of.scales(); }) {
        const auto numbers = gather(comm, shards, of.numbers());
        return ScaledView(numbers, gather(comm, shards, of.scales()));
      } else {
        return gather(comm, shards, of);
      }
    });
  }
  [[nodiscard]] const StoredView<const Real>& view() const { return view_; }

 private:
  template <class Element>
  [[nodiscard]] TensorView<Element> gather(const AnyCommunicator& comm, const Shards& shards,
                                           const TensorView<Element>& own) {
    auto rows = std::make_shared<const std::vector<std::remove_const_t<Element>>>(
        gather_rows(comm, shards, own));
    memory_.push_back(rows);
    Shape shape = own.shape();
    shape.len = shards.len();
    return {rows->data(), shape};
  }

  std::vector<std::shared_ptr<const void>> memory_;
  StoredView<const Real> view_;
};

// A rank's part of a call whose keys are gathered. What a call reaches is not inlined, so that it is compiled once for all ops
// (mpi/compiled_ranks.hpp). Gradients of the op's parameters are added to `grad_op`, if it is given.
template <class Real>
class GatherCall {
 public:
  [[gnu::noinline]] GatherCall(const AnyCommunicator& comm, const SharedOp<Real>& op,
                               const Inputs<Real>& in, const Mask<Real>& mask,
                               const Shards& queries, const Shards& keys, const Options& options)
      : comm_(comm),
        op_(op),
        in_(in),
        mask_(mask),
        queries_(queries),
        keys_(keys),
        options_(options),
        key_(comm, keys, in.key),
        value_(comm, keys, in.value),
        key_inputs_(comm, keys, in.key_inputs) {}
  GatherCall(const GatherCall&) = delete;

  [[gnu::noinline]] void forward(const Outputs<Real>& out, Saved<Real>* saved) {
    settle([&](const OpTiles<Real>& rehearsal, Saved<Real>& reports) {
      run(rehearsal, out, &reports);
    });
    run(tiles(), out, saved);
  }

  // The gradients of the parameters are sums over all ranks.
  [[gnu::noinline]] void backward(const Saved<Real>& saved, const StoredView<const Real>& out,
                                  const OutputGradients<Real>& output, const Gradients<Real>& grads,
                                  OpGradient<Real>* grad_op) {
    settle([&](const OpTiles<Real>&, Saved<Real>& reports) { reports = saved; });
    WidenedTensors<Real> copies(options_.threads);
    Sums of_keys(in_.key.shape(), keys_, grads.key.given()),
        of_values(in_.value.shape(), keys_, grads.value.given()),
        of_inputs(in_.key_inputs.shape(), keys_, grads.key_inputs.given()),
        of_bias(mask_.bias.shape(), grads.bias.given());
    const std::size_t parameters = grad_op ? std::size_t(grad_op->numbers()) : 0;
    std::vector<double> numbers(parameters);  // of parameters, and behind them of the bias
    for_pieces([&](std::size_t n, const Tokens& piece, Index first, const Inputs<Real>& in) {
      const auto own = [&](const auto& view) { return rows_of(view, first, piece.count()); };
      OpGradient<Real> of_piece(vjps());
      Driver::backward(tiles(), vjps(),
                       {{in, mask_, options_},
                        saved.pieces[n],
                        own(out),
                        {own(output.out), own(output.lse), own(output.steps)},
                        {own(grads.query), of_keys.piece(), of_values.piece(), own(grads.extra),
                         of_bias.piece(), own(grads.query_inputs), of_inputs.piece()}},
                       grad_op ? &of_piece : nullptr);
      if (grad_op) of_piece.add_to(numbers.data());
      for (Sums* sums : {&of_keys, &of_values, &of_inputs, &of_bias}) sums->add();
    });
    const auto give = [&](const Sums& sums, const StoredView<Real>& to) {
      if (to.given()) sum_rows(comm_, keys_, sums.total(), copies.write(to));
    };
    give(of_keys, grads.key);
    give(of_values, grads.value);
    give(of_inputs, grads.key_inputs);
    if (grads.bias.given()) of_bias.append_to(numbers);
    sum_over_ranks(comm_, numbers);
    if (grad_op) grad_op->add_from(numbers.data());
    if (grads.bias.given()) write_rows(numbers.data() + parameters, copies.write(grads.bias));
    copies.round();
  }

  // The same, with the bits of one process in all gradients. For ops that read no inputs per token.
  [[gnu::noinline]] void backward_in_order(const Saved<Real>& saved,
                                           const StoredView<const Real>& out,
                                           const OutputGradients<Real>& output,
                                           const Gradients<Real>& grads,
                                           OpGradient<Real>* grad_op) {
    settle([&](const OpTiles<Real>&, Saved<Real>& reports) { reports = saved; });
    WidenedTensors<Real> copies(options_.threads);
    const TensorView<Real> dquery = copies.write(grads.query), dextra = copies.write(grads.extra);
    heed::detail::set_zero<Real>({dquery, dextra}, resolve_threads(options_.threads));
    Sums of_keys(in_.key.shape(), keys_, grads.key.given()),
        of_values(in_.value.shape(), keys_, grads.value.given()),
        of_bias(mask_.bias.shape(), grads.bias.given());
    heed::detail::HandedOn<Real> on;
    OpGradient<Real> sums(vjps());
    const std::vector<Stage> stages = stages_of(grads.bias.given());
    for (std::size_t s = 0; s < stages.size(); ++s) {
      const Stage& stage = stages[s];
      if (stage.rank != comm_.rank()) continue;
      const auto parts = [&] {
        return std::array{&of_keys.memory(), &of_values.memory(), &of_bias.memory(), &on.rows};
      };
      if (s > 0 && stages[s - 1].rank != stage.rank)
        receive_state(stages[s - 1].rank, parts(), on.sums);
      on.member = stage.member;
      const bool last = s + 1 == stages.size();
      for_pieces([&](std::size_t n, const Tokens& piece, Index first, const Inputs<Real>& in) {
        if (piece != stage.piece) return;
        const auto own = [&](const auto& view) { return rows_of(view, first, piece.count()); };
        Driver::backward(
            tiles(), vjps(),
            {{in, mask_, options_},
             saved.pieces[n],
             own(out),
             {own(output.out), own(output.lse), own(output.steps)},
             {own(dquery), of_keys.piece(), of_values.piece(), own(dextra), of_bias.piece()}},
            grad_op ? &sums : nullptr, &on, last);
      });
      if (!last && stages[s + 1].rank != stage.rank)
        send_state(stages[s + 1].rank, parts(), on.sums);
    }
    // The last stage's rank has all sums.
    const int root = stages.empty() ? 0 : stages.back().rank;
    const auto give = [&](const Sums& of, const StoredView<Real>& to) {
      if (to.given()) give_rows(root, of.of_piece(), copies.write(to));
    };
    give(of_keys, grads.key);
    give(of_values, grads.value);
    std::vector<Real> all = of_bias.memory();
    std::vector<double> parameters(std::size_t(sums.numbers()));
    sums.add_to(parameters.data());
    for (const double number : parameters) all.push_back(Real(number));
    all = from_root(root, std::move(all));
    const Real* from = all.data();
    if (grads.bias.given()) from = write_rows(from, copies.write(grads.bias));
    parameters.assign(from, std::as_const(all).data() + all.size());
    if (grad_op) grad_op->add_from(parameters.data());
    copies.round();
  }

 private:
  using Driver = heed::detail::Driver<Real>;

  // Gradients of a tensor of all tokens: for the current piece of the queries, and their sum over the pieces of the rank.
  class Sums {
   public:
    Sums(Shape shape, bool wanted) : shape_(shape) {
      if (!wanted) return;
      const auto count = std::size_t(element_count(shape, "heed::mpi: a gradient"));
      piece_.resize(count);
      total_.resize(count);
      wanted_ = true;
    }
    Sums(Shape shape, const Shards& shards, bool wanted)
        : Sums({shape.batch, shape.heads, shards.len(), shape.dim}, wanted) {}

    [[nodiscard]] StoredView<Real> piece() {
      if (!wanted_) return {};
      return {piece_.data(), shape_};
    }
    [[nodiscard]] std::vector<Real>& memory() { return piece_; }
    [[nodiscard]] TensorView<const Real> of_piece() const { return {piece_.data(), shape_}; }
    void add() {
      for (std::size_t i = 0; i < total_.size(); ++i) total_[i] += piece_[i];
    }
    [[nodiscard]] TensorView<const Real> total() const { return {total_.data(), shape_}; }
    void append_to(std::vector<double>& numbers) const {
      numbers.insert(numbers.end(), total_.begin(), total_.end());
    }

   private:
    Shape shape_;
    bool wanted_ = false;
    std::vector<Real> piece_, total_;
  };

  // The order in which ranks add: for each head of a family, the pieces of the queries from the last to the first.
  struct Stage {
    Index member;
    Tokens piece;
    int rank;
  };
  [[nodiscard]] std::vector<Stage> stages_of(bool bias) const {
    Geometry g;
    g.batch = in_.query.shape().batch;
    g.query_heads = in_.query.shape().heads;
    g.heads = g.query_heads / op_.tiles.normaliser.query_heads(1);
    g.kv_heads = in_.key.shape().heads;
    g.len_q = queries_.len();
    g.len_kv = keys_.len();
    g.dim_qk = in_.key.shape().dim;
    g.dim_v = in_.value.shape().dim;
    const auto family = heed::detail::family_of(op_.tiles, g, mask_.bias.shape(), bias);
    std::vector<Stage> of_member, stages;
    for (int r = 0; r < comm_.size(); ++r)
      for (const Tokens& piece : queries_.pieces(r)) of_member.push_back({0, piece, r});
    std::sort(of_member.begin(), of_member.end(),
              [](const Stage& a, const Stage& b) { return a.piece.begin > b.piece.begin; });
    for (Index member = 0; member < family.batches * family.heads; ++member)
      for (Stage& stage : of_member) {
        stage.member = member;
        stages.push_back(stage);
      }
    return stages;
  }

  // Calls body(number, tokens, first own row, inputs) for each piece of the rank.
  template <class Body>
  void for_pieces(Body&& body) const {
    Index first = 0;
    std::size_t n = 0;
    for (const Tokens& piece : queries_.pieces(comm_.rank())) {
      Inputs<Real> in = in_;
      in.query = rows_of(in_.query, first, piece.count());
      in.extra = rows_of(in_.extra, first, piece.count());
      in.query_inputs = rows_of(in_.query_inputs, first, piece.count());
      in.key = key_.view();
      in.value = value_.view();
      in.key_inputs = key_inputs_.view();
      in.share = {piece.begin, queries_.len() - piece.end, 0, 0};
      body(n++, piece, first, std::as_const(in));
      first += piece.count();
    }
  }
  void run(const OpTiles<Real>& op, const Outputs<Real>& out, Saved<Real>* saved) const {
    if (saved) saved->pieces.assign(queries_.pieces(comm_.rank()).size(), {});
    for_pieces([&](std::size_t n, const Tokens& piece, Index first, const Inputs<Real>& in) {
      const auto own = [&](const auto& view) { return rows_of(view, first, piece.count()); };
      Driver::forward(op, {{in, mask_, options_},
                           {own(out.out), own(out.lse), own(out.steps)},
                           saved ? &saved->pieces[n] : nullptr});
    });
  }

  [[nodiscard]] OpTiles<Real> with(const ReadoutTiles<Real>& readout) const {
    return {op_.tiles.score, op_.tiles.normaliser, readout, op_.tiles.columns, op_.tiles.type};
  }
  // The op, settled where its rows depend on each other.
  [[nodiscard]] OpTiles<Real> tiles() const {
    return with(settled_ ? *settled_ : op_.tiles.readout);
  }
  [[nodiscard]] OpVjps<Real> vjps() const {
    return {op_.vjps.score, op_.vjps.normaliser, settled_vjps_ ? *settled_vjps_ : op_.vjps.readout};
  }
  // Settles an op whose rows depend on each other: rehearse(op, reports) finds the reports of the
  // rank's rows, and the reports of all ranks are gathered.
  template <class Rehearse>
  void settle(Rehearse&& rehearse) {
    if (!op_.tiles.readout.needs_rehearsal()) return;
    const std::unique_ptr<ReadoutTiles<Real>> rehearsal = op_.tiles.readout.rehearsal();
    Saved<Real> own;
    rehearse(with(*rehearsal), own);
    const heed::Saved<Real> all = gather_reports(
        own, in_.query.shape().heads / op_.tiles.normaliser.query_heads(1), report_names());
    settled_ = op_.tiles.readout.settled(all);
    settled_vjps_ = op_.vjps.readout.settled(all);
  }
  [[nodiscard]] std::vector<std::string> report_names() const {
    std::vector<std::string> names;
    const auto add = [&](const auto& part) {
      for (int d = 0; d < part.traits.diagnostics; ++d) names.push_back(part.diagnostic_name(d));
    };
    add(op_.tiles.normaliser);
    add(op_.tiles.readout);
    return names;
  }

  template <class Parts>
  void send_state(int to, const Parts& parts, const std::vector<double>& sums) const {
    const std::array<std::size_t, 2> sizes{parts.back()->size(), sums.size()};
    std::vector<Send> sends{{to, sizes.data(), sizeof sizes}};
    for (const std::vector<Real>* part : parts)
      if (!part->empty()) sends.push_back({to, part->data(), part->size() * sizeof(Real)});
    if (!sums.empty()) sends.push_back({to, sums.data(), sums.size() * sizeof(double)});
    comm_.start(sends, {}).wait();
  }
  template <class Parts>
  void receive_state(int from, const Parts& parts, std::vector<double>& sums) const {
    std::array<std::size_t, 2> sizes{};
    const Receive first[] = {{from, sizes.data(), sizeof sizes}};
    comm_.start({}, first).wait();
    parts.back()->resize(sizes[0]);
    sums.resize(sizes[1]);
    std::vector<Receive> receives;
    for (std::vector<Real>* part : parts)
      if (!part->empty()) receives.push_back({from, part->data(), part->size() * sizeof(Real)});
    if (!sums.empty()) receives.push_back({from, sums.data(), sums.size() * sizeof(double)});
    comm_.start({}, receives).wait();
  }
  // Sends numbers of one rank to all ranks, which know how many they are.
  [[nodiscard]] std::vector<Real> from_root(int root, std::vector<Real> own) const {
    const auto ranks = std::size_t(comm_.size());
    ByRank<Real> from(ranks), to(ranks);
    to[std::size_t(root)].resize(own.size());
    if (comm_.rank() == root) from.assign(ranks, own);
    exchange(comm_, from, to);
    return to[std::size_t(root)];
  }
  // own = the rank's rows of `whole`, which the root has.
  void give_rows(int root, const TensorView<const Real>& whole, const TensorView<Real>& own) const {
    const auto ranks = std::size_t(comm_.size());
    ByRank<Real> from(ranks), to(ranks);
    const Shape& s = own.shape();
    to[std::size_t(root)].resize(std::size_t(element_count(s, "heed::mpi: a gradient")));
    for (std::size_t r = 0; r < ranks && comm_.rank() == root; ++r)
      from[r] = pack_rows(keys_, int(r), whole, kWholeRow);
    exchange(comm_, from, to);
    for_packed_rows(keys_, comm_.rank(), s, to[std::size_t(root)].data(), kOwnRow,
                    [&](Index b, Index h, Index n, const Real* numbers) {
                      std::copy_n(numbers, s.dim, own.row(b, h, n));
                    });
  }

  // Gathers the reports of all rows of so many heads; `own` has the reports of the rank's pieces.
  [[nodiscard]] heed::Saved<Real> gather_reports(const Saved<Real>& own, Index heads,
                                                 const std::vector<std::string>& names) const {
    heed::Saved<Real> all;
    const Shape& q = in_.query.shape();
    for (std::size_t d = 0; d < names.size(); ++d) {
      all.diagnostic_names.push_back(names[d]);
      // The reports of the pieces as rows of one tensor.
      std::vector<Real> rows(std::size_t(q.batch * heads * q.len));
      const TensorView<Real> view(rows.data(), {q.batch, heads, q.len, 1});
      Index first = 0;
      std::size_t n = 0;
      for (const Tokens& piece : queries_.pieces(comm_.rank())) {
        const Real* from = own.pieces[n++].diagnostics[d].data();
        for (Index b = 0; b < q.batch; ++b)
          for (Index h = 0; h < heads; ++h, from += piece.count())
            std::copy_n(from, piece.count(), view.row(b, h, first));
        first += piece.count();
      }
      all.diagnostics.push_back(gather_rows(comm_, queries_, view));
    }
    return all;
  }

  const AnyCommunicator& comm_;
  const SharedOp<Real>& op_;
  const Inputs<Real>& in_;
  const Mask<Real>& mask_;
  const Shards &queries_, &keys_;
  const Options& options_;
  GatheredRows<Real> key_, value_, key_inputs_;
  std::unique_ptr<ReadoutTiles<Real>> settled_;
  std::unique_ptr<ReadoutVjps<Real>> settled_vjps_;
};

}  // namespace detail
}  // namespace mpi
}  // namespace HEED_ABI
}  // namespace heed
