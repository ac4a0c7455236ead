// SPDX-License-Identifier: Apache-2.0
#pragma once

// Context parallelism by a ring: keys and values travel from rank to rank, and no rank has more than two shards of them at a
// time. With the shard of rank s = rank - step present, step = 0, 1, ...
//
//   forward    each map m:   state_m = join(state_m, state of the shard), out_m likewise
//              at the end    out = readout(sum over m of f_m out_m), with f_m the map's factor: 1, or -lambda of a difference
//   backward   dmixed = readout's vjp(dout),   dout_m = f_m dmixed,   df_m = rowsum(dmixed o out_m)
//              each map m:   dQ += ..., and dK, dV of the shard, by backward() of the shard with the joined state; dK and dV
//                            travel with their shard, one step behind it, and end at their own rank
//
// While a shard is computed the next one is on its way. Shards join in the order in which they
// arrive, which is the same at each run; so results have the same bits at each run for a given
// number of ranks. They differ from the results of one process by rounding.
//
// Ops       weights that are one softmax over the keys (Mergeable), or a sum of several times factors (SumOfSoftmaxes: the
//           differential forms, whose maps keep a state each), with any readout that is local to a row. Other row
//           normalisers (ODE, your own) and Halting::batch are refused; gathered calls take them
// Memory    O(len / ranks) per rank: two shards of K and V, in backward two of dK and dV more. If scores read numbers of
//           keys (plug/token_inputs.hpp), each rank has those of all tokens, and their sums
// Traffic   per rank, in numbers: forward batch kv_heads len (dim_qk + dim_v) received, backward twice that; numbers of keys
//           travel once per call, to all ranks, and so do their gradients
// Bounds    a row whose visible scores within one shard are all -infinity is NaN, as where parts merge (engine/partial.hpp)

#include <heed/engine/doors.hpp>
#include <heed/mpi/gather.hpp>
#include <heed/mpi/readout_pass.hpp>
#include <heed/mpi/ring_op.hpp>

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace mpi {
namespace detail {

// Throws unless the ring takes the op.
template <class Real>
void require_ring(const OpTiles<Real>& op, const RingOp<Real>& ring, const Geometry& g,
                  const std::string& where) {
  constexpr const char* gathered = "; the method gather takes it";
  require(!ring.maps.empty(), where,
          ": the ring joins softmaxes of parts of the keys, the op's normaliser is of another kind",
          gathered);
  require(!op.readout.needs_rehearsal(), where,
          ": in the ring a row knows of no other, the op's rows depend on all of them", gathered);
  require(!op.readout.traits.uses_own_rows || g.len_q == g.len_kv, where,
          ": the readout reads key and value of its own row; len_q is ", g.len_q, ", len_kv is ",
          g.len_kv);
}

// Shards of a ring's queries may begin at multiples of this number.
template <class Real>
[[nodiscard]] Index ring_step(const RingOp<Real>& ring, const Geometry& g, const Options& options) {
  Index step = 1;
  for (const RingMap<Real>& map : ring.maps)
    step = std::lcm(step, heed::detail::Driver<Real>::share_step(map.tiles, g, options));
  return step;
}

// Joins the results of other keys for the same rows: states and lse of `other` into those of `to`,
// and the rows of out likewise.
template <class Real>
void join_rows(const NormaliserTiles<Real>& normaliser, Index rows, Index dim,
               heed::Saved<Real>& to, Real* out, const heed::Saved<Real>& other,
               const Real* other_out) {
  constexpr Index W = kLanes<Real>;
  const Index numbers = normaliser.traits.state_numbers;
  Scratch<Real> scratch((2 * numbers + 4) * W);
  Real *const memory = scratch.take((2 * numbers + 4) * W),
              *const of_own = memory + 2 * numbers * W, *const of_other = of_own + W,
              *const lse = of_other + W, *const unused = lse + W;
  const LaneTile<Real> own{memory, numbers, W}, others{memory + numbers * W, numbers, W};
  for (Index first = 0; first < rows; first += W) {
    const Index count = std::min(W, rows - first);
    const auto load = [&](const heed::Saved<Real>& from, const LaneTile<Real>& states) {
      normaliser.begin({}, 0, states);
      for (Index n = 0; n < numbers; ++n)
        std::copy_n(from.state.data() + n * rows + first, count, states.row(n));
    };
    load(to, own);
    load(other, others);
    const Pack<Real> before = own.load(0, 0);
    normaliser.join(own, others, 1, of_own, of_other);
    normaliser.finish(own, 1, unused, lse);
    for (Index n = 0; n < numbers; ++n)
      std::copy_n(own.row(n), count, to.state.data() + n * rows + first);
    const Pack<Real> inverse = inverse_or_zero(own.load(0, 0)),
                     share = before * Pack<Real>::load(of_own) * inverse,
                     other_share = others.load(0, 0) * Pack<Real>::load(of_other) * inverse;
    for (Index i = 0; i < count; ++i) {
      to.lse[std::size_t(first + i)] = lse[i];
      Real* row = out + (first + i) * dim;
      const Real* other_row = other_out + (first + i) * dim;
      for (Index c = 0; c < dim; ++c)
        row[c] = share.v[i] * row[c] + other_share.v[i] * other_row[c];
    }
  }
}

// A rank's part of a call whose keys travel.
template <class Real>
class RingCall {
 public:
  [[gnu::noinline]] RingCall(const AnyCommunicator& comm, const SharedOp<Real>& op,
                             const RingOp<Real>& ring, const Inputs<Real>& in,
                             const Mask<Real>& mask, const Shards& queries, const Shards& keys,
                             const Geometry& whole, const Options& options)
      : comm_(comm),
        op_(op),
        tiles_(op.tiles),
        ring_(ring),
        mask_(mask),
        queries_(queries),
        keys_(keys),
        g_(whole),
        options_(options),
        bound_(mask, whole, "heed::mpi"),
        copies_(options.threads),
        query_(copies_.read(in.query)),
        key_(copies_.read(in.key)),
        value_(copies_.read(in.value)),
        extra_(copies_.read(in.extra)),
        query_inputs_(copies_.read(in.query_inputs)),
        all_key_inputs_(comm, keys, in.key_inputs),
        inputs_(tiles_.score, g_,
                heed::detail::columns_of(query_inputs_, tiles_.columns.score_query),
                heed::detail::columns_of(copies_.read(all_key_inputs_.view()),
                                         tiles_.columns.score_key),
                resolve_threads(options.threads)) {}
  RingCall(const RingCall&) = delete;

  [[gnu::noinline]] void forward(const Outputs<Real>& out, Saved<Real>* saved) {
    Saved<Real> own;
    own.pieces.resize(std::size_t(maps()) * pieces().size());
    for_pieces([&](std::size_t p, const Tokens& piece, Index) {
      for (int m = 0; m < maps(); ++m) begin(at(own, p, m), g_.batch * g_.heads * piece.count());
    });
    travel([&](const Block& block, const auto& poke) {
      for_pairs(block, [&](std::size_t p, const Tokens& piece, Index first, const Tokens& keys,
                           Index first_key) {
        for (int m = 0; m < maps(); ++m) {
          add_forward(m, piece, first, block, keys, first_key, at(own, p, m));
          poke();
        }
      });
    });
    write_out(own, out);
    if (saved) *saved = std::move(own);
  }

  [[gnu::noinline]] void backward(const Saved<Real>& saved, const StoredView<const Real>& out,
                                  const OutputGradients<Real>& output, const Gradients<Real>& grads,
                                  OpGradient<Real>* grad_op) {
    const TensorView<Real> dquery = copies_.write(grads.query), dkey = copies_.write(grads.key),
                           dvalue = copies_.write(grads.value), dextra = copies_.write(grads.extra),
                           dbias = copies_.write(grads.bias),
                           dquery_inputs = copies_.write(grads.query_inputs),
                           dkey_inputs = copies_.write(grads.key_inputs);
    heed::detail::set_zero<Real>({dquery, dkey, dvalue, dextra, dquery_inputs},
                                 resolve_threads(options_.threads));
    // Gradients of the numbers of all keys, from this rank's queries.
    std::vector<Real> of_key_inputs;
    TensorView<Real> from_own;
    if (dkey_inputs.given()) from_own = room(of_key_inputs, all_key_inputs_.view().shape());
    dquery_inputs_ = heed::detail::columns_of(dquery_inputs, tiles_.columns.score_query);
    dkey_inputs_ = from_own;
    inputs_.take_gradients(dquery_inputs_, dkey_inputs_);
    sums_.assign(std::size_t(OpGradient<Real>(op_.vjps).numbers()), 0.0);
    bias_.assign(grads.bias.given() ? std::size_t(element_count(mask_.bias.shape(), "bias")) : 0,
                 0.0);
    std::vector<MapGradients> of_maps(std::size_t(maps()) * pieces().size());
    const TensorView<const Real> known = copies_.read(out), dout = copies_.read(output.out),
                                 dlse = copies_.read(output.lse),
                                 dsteps = copies_.read(output.steps);
    for_pieces([&](std::size_t p, const Tokens& piece, Index first) {
      begin_backward(p, piece, first, saved, known, dout, dlse, dsteps,
                     {dquery, dkey, dvalue, dextra, nullptr, nullptr},
                     heed::detail::columns_of(dquery_inputs, tiles_.columns.readout_query),
                     of_maps);
    });
    travel_back(dkey, dvalue, [&](const Block& block, const Block& gradients, const auto& poke) {
      for_pairs(block, [&](std::size_t p, const Tokens& piece, Index first, const Tokens& keys,
                           Index first_key) {
        for (int m = 0; m < maps(); ++m) {
          add_backward(m, piece, first, block, gradients, keys, first_key,
                       saved.pieces[place(p, m)], of_maps[place(p, m)], dquery);
          poke();
        }
      });
    });
    inputs_.chain();
    if (dkey_inputs.given()) sum_rows<Real>(comm_, keys_, from_own, dkey_inputs);
    add_up(grad_op, dbias);
    copies_.round();
  }

 private:
  using Driver = heed::detail::Driver<Real>;

  // Gradients of parameters and of the bias, from the sums of all ranks.
  void add_up(OpGradient<Real>* grad_op, const TensorView<Real>& dbias) {
    const std::size_t count = sums_.size();
    sums_.insert(sums_.end(), bias_.begin(), bias_.end());
    sum_over_ranks(comm_, sums_);
    if (grad_op) grad_op->add_from(sums_.data());
    if (dbias.given()) write_rows(sums_.data() + count, dbias);
  }

  // Keys and values of a rank, dense, or the gradients of both.
  struct Block {
    int rank = 0;
    std::vector<Real> numbers;
    TensorView<Real> key, value;
  };
  // dL/dout and dL/dlse of one map of a piece.
  struct MapGradients {
    std::vector<Real> out, lse;
  };

  [[nodiscard]] const std::vector<Tokens>& pieces() const { return queries_.pieces(comm_.rank()); }
  [[nodiscard]] int maps() const { return int(ring_.maps.size()); }
  // Where results of a map of a piece stand among those of all.
  [[nodiscard]] std::size_t place(std::size_t piece, int m) const {
    return piece * ring_.maps.size() + std::size_t(m);
  }
  [[nodiscard]] heed::Saved<Real>& at(Saved<Real>& of, std::size_t piece, int m) const {
    return of.pieces[place(piece, m)];
  }
  [[nodiscard]] Shape rows_shape(const Tokens& piece, Index dim) const {
    return {g_.batch, g_.heads, piece.count(), dim};
  }
  // Calls body(number, tokens, first own row) for each piece of the rank.
  template <class Body>
  void for_pieces(Body&& body) const {
    Index first = 0;
    std::size_t n = 0;
    for (const Tokens& piece : pieces()) {
      body(n++, piece, first);
      first += piece.count();
    }
  }
  // Calls body(piece, tokens, first row, keys, first key) for pieces of own queries and of a
  // block's keys with a pair that may be visible.
  template <class Body>
  void for_pairs(const Block& block, Body&& body) const {
    for_pieces([&](std::size_t p, const Tokens& piece, Index first) {
      Index first_key = 0;
      for (const Tokens& keys : keys_.pieces(block.rank)) {
        if (may_see(piece, keys)) body(p, piece, first, keys, first_key);
        first_key += keys.count();
      }
    });
  }
  // True if bands, key lengths and key ranges let some query of the piece see one of the keys, or if keys of the op stand in front
  // of them.
  [[nodiscard]] bool may_see(const Tokens& piece, const Tokens& keys) const {
    bool any = tiles_.normaliser.learnt.count > 0 && keys.begin == 0;
    for (Index b = 0; b < g_.batch; ++b) {
      const KeyRange seen = bound_.keys_of_rows(b, piece.begin, piece.count());
      any = any || std::max(seen.begin, keys.begin) < std::min(seen.end, keys.end);
    }
    return any;
  }

  [[nodiscard]] Geometry geometry(const Tokens& piece, const Tokens& keys) const {
    Geometry g = g_;
    g.share = {piece.begin, g.len_q - piece.end, keys.begin, g.len_kv - keys.end};
    return g;
  }
  [[nodiscard]] Inputs<Real> inputs(const Tokens& piece, Index first, const Block& block,
                                    const Tokens& keys, Index first_key) const {
    Inputs<Real> in{rows_of(query_, first, piece.count()),
                    rows_of(TensorView<const Real>(block.key), first_key, keys.count()),
                    rows_of(TensorView<const Real>(block.value), first_key, keys.count()),
                    {}};
    in.first_query = g_.first_query;
    in.share = geometry(piece, keys).share;
    in.query_inputs = score_inputs(inputs_.query(), piece, first);
    in.key_inputs = rows_of(inputs_.key(), keys.begin, keys.count());
    return in;
  }
  // The rows of a piece in the score's inputs of queries. Sums have a row for each token of the
  // sequence, plain numbers one for each token of the rank.
  template <class Element>
  [[nodiscard]] TensorView<Element> score_inputs(const TensorView<Element>& view,
                                                 const Tokens& piece, Index first) const {
    return rows_of(view, tiles_.score.traits.sums_inputs ? piece.begin : first, piece.count());
  }

  // Sets the state before any key. `mixed` holds the map's rows.
  void begin(heed::Saved<Real>& saved, Index rows) const {
    const NormaliserTiles<Real>& normaliser = ring_.maps[0].tiles.normaliser;
    const Index numbers = normaliser.traits.state_numbers;
    Scratch<Real> scratch(numbers * kLanes<Real>);
    const LaneTile<Real> states{scratch.take(numbers * kLanes<Real>), numbers, kLanes<Real>};
    normaliser.begin({}, 0, states);
    saved.state.clear();
    for (Index n = 0; n < numbers; ++n)
      saved.state.insert(saved.state.end(), std::size_t(rows), *states.row(n));
    saved.lse.assign(std::size_t(rows), -kInfinity<Real>);
    saved.mixed.assign(std::size_t(rows * g_.dim_v), Real(0));
  }

  // Joins the results of a piece of the queries with the keys of a piece of a block.
  void add_forward(int m, const Tokens& piece, Index first, const Block& block, const Tokens& keys,
                   Index first_key, heed::Saved<Real>& to) {
    const OpTiles<Real>& op = ring_.maps[std::size_t(m)].tiles;
    heed::Saved<Real> part;
    part_.resize(to.mixed.size());
    const Inputs<Real> in = inputs(piece, first, block, keys, first_key);
    Driver::forward(op,
                    {{in, mask_, options_}, {part_.data(), rows_shape(piece, g_.dim_v)}, &part});
    join_rows(op.normaliser, Index(to.lse.size()), g_.dim_v, to, to.mixed.data(), part,
              part_.data());
  }

  // The factor of map m in row (b, h, n) of the rank.
  [[nodiscard]] Real factor(Index b, Index h, Index n, int m) const {
    return ring_.factor ? ring_.factor(h, m, extra_of(b, h, n)) : Real(1);
  }
  [[nodiscard]] Real extra_of(Index b, Index h, Index n) const {
    return tiles_.normaliser.traits.uses_extra ? *extra_.row(b, h, n) : Real(0);
  }
  // Calls body(b, h, row in the piece's dense arrays, own row) for each row.
  template <class Body>
  void for_rows(const Tokens& piece, Index first, Body&& body) const {
    std::size_t row = 0;
    for (Index b = 0; b < g_.batch; ++b)
      for (Index h = 0; h < g_.heads; ++h)
        for (Index i = 0; i < piece.count(); ++i, ++row) body(b, h, row, first + i);
  }
  // Rows before the readout, (batch, heads, tokens of the piece, dim_v).
  [[nodiscard]] std::vector<Real> mixed_rows(const Saved<Real>& saved, std::size_t p,
                                             const Tokens& piece, Index first) const {
    const auto dim = std::size_t(g_.dim_v);
    std::vector<Real> mixed = saved.pieces[place(p, 0)].mixed;
    if (ring_.factor) {
      std::fill(mixed.begin(), mixed.end(), Real(0));
      for_rows(piece, first, [&](Index b, Index h, std::size_t row, Index n) {
        for (int m = 0; m < maps(); ++m) {
          const Real f = factor(b, h, n, m);
          const Real* from = saved.pieces[place(p, m)].mixed.data() + row * dim;
          for (std::size_t c = 0; c < dim; ++c) mixed[row * dim + c] += f * from[c];
        }
      });
    }
    return mixed;
  }
  // lse of all maps, [map][row].
  [[nodiscard]] std::vector<Real> lse_rows(const Saved<Real>& saved, std::size_t p) const {
    std::vector<Real> lse;
    for (int m = 0; m < maps(); ++m) {
      const std::vector<Real>& of_map = saved.pieces[place(p, m)].lse;
      lse.insert(lse.end(), of_map.begin(), of_map.end());
    }
    return lse;
  }
  // The sizes of the readout's call on a piece's rows: keys are those of the same tokens, or none.
  [[nodiscard]] Geometry readout_geometry(const Tokens& piece) const {
    return geometry(piece,
                    tiles_.readout.traits.uses_own_rows ? piece : Tokens{g_.len_kv, g_.len_kv});
  }
  [[nodiscard]] Operands<Real> readout(const Tokens& piece, Index first) const {
    Operands<Real> in{{.query = whole_rows(query_, first, piece),
                       .key = key_,
                       .value = value_,
                       .extra = whole_rows(extra_, first, piece)}};
    in.readout_query = whole_rows(
        heed::detail::columns_of(query_inputs_, tiles_.columns.readout_query), first, piece);
    if (tiles_.readout.traits.uses_own_rows) {
      in.key = whole_rows(key_, first, piece);
      in.value = whole_rows(value_, first, piece);
    }
    return in;
  }
  template <class Element>
  [[nodiscard]] TensorView<Element> whole_rows(const TensorView<Element>& own, Index first,
                                               const Tokens& piece) const {
    return heed::detail::rows_of_call(rows_of(own, first, piece.count()), piece.begin);
  }

  void write_out(Saved<Real>& saved, const Outputs<Real>& outputs) {
    const TensorView<Real> out = copies_.write(outputs.out), lse = copies_.write(outputs.lse),
                           steps = copies_.write(outputs.steps);
    for_pieces([&](std::size_t p, const Tokens& piece, Index first) {
      std::vector<Real> rows = mixed_rows(saved, p, piece, first);
      const std::vector<Real> lses = lse_rows(saved, p);
      const std::size_t count = lses.size() / ring_.maps.size();
      heed::Saved<Real>& reports = at(saved, p, 0);
      reports.diagnostics.assign(
          std::size_t(tiles_.normaliser.traits.diagnostics + tiles_.readout.traits.diagnostics),
          std::vector<Real>(count));
      heed::detail::name_diagnostics(tiles_, reports);
      if (!tiles_.readout.traits.identity) {
        const Operands<Real> in = readout(piece, first);
        heed::detail::ReadoutPass<Real>(tiles_, readout_geometry(piece), in, options_)
            .forward(rows.data(), lses.data(), whole_rows(steps, first, piece), &reports);
      }
      for_rows(piece, first, [&](Index b, Index h, std::size_t row, Index n) {
        std::copy_n(rows.data() + row * std::size_t(g_.dim_v), g_.dim_v, out.row(b, h, n));
        for (int m = 0; m < maps() && lse.given(); ++m)
          lse.row(b, h, n)[m] = lses[std::size_t(m) * count + row];
      });
    });
    copies_.round();
  }

  // Computes the gradients of each map's results from the gradients of out.
  void begin_backward(std::size_t p, const Tokens& piece, Index first, const Saved<Real>& saved,
                      const TensorView<const Real>& known, const TensorView<const Real>& dout,
                      const TensorView<const Real>& dlse, const TensorView<const Real>& dsteps,
                      const typename heed::detail::ReadoutPass<Real>::Gradients& to,
                      const TensorView<Real>& dreadout_inputs, std::vector<MapGradients>& of_maps) {
    const auto dim = std::size_t(g_.dim_v);
    const std::vector<Real> lses = lse_rows(saved, p);
    const std::size_t count = lses.size() / ring_.maps.size();
    std::vector<Real> rows(count * dim), dlses(lses.size(), Real(0));
    for_rows(piece, first, [&](Index b, Index h, std::size_t row, Index n) {
      std::copy_n(dout.row(b, h, n), dim, rows.data() + row * dim);
      for (int m = 0; m < maps() && dlse.given(); ++m)
        dlses[std::size_t(m) * count + row] = dlse.row(b, h, n)[m];
    });
    if (!tiles_.readout.traits.identity) {
      std::vector<Real> known_rows(count * dim);
      if (tiles_.readout.traits.saves_mixed)
        known_rows = mixed_rows(saved, p, piece, first);
      else
        for_rows(piece, first, [&](Index b, Index h, std::size_t row, Index n) {
          std::copy_n(known.row(b, h, n), dim, known_rows.data() + row * dim);
        });
      const Operands<Real> in = readout(piece, first);
      std::vector<Real> of_inputs(count * std::size_t(tiles_.columns.readout_query.count));
      heed::detail::ReadoutPass<Real>(tiles_, readout_geometry(piece), in, options_)
          .backward(op_.vjps, rows.data(), known_rows.data(), lses.data(),
                    whole_rows(dsteps, first, piece),
                    {whole_rows(to.query, first, piece), whole_rows(to.key, first, piece),
                     whole_rows(to.value, first, piece), whole_rows(to.extra, first, piece),
                     dlses.data(), of_inputs.data()},
                    sums_);
      if (dreadout_inputs.given())
        heed::detail::sum_over_readers(of_inputs, g_.heads, 1,
                                       rows_of(dreadout_inputs, first, piece.count()),
                                       resolve_threads(options_.threads));
    }
    for (int m = 0; m < maps(); ++m) {
      MapGradients& of = of_maps[place(p, m)];
      of.out = rows;
      of.lse.assign(dlses.begin() + std::ptrdiff_t(std::size_t(m) * count),
                    dlses.begin() + std::ptrdiff_t(std::size_t(m + 1) * count));
    }
    if (ring_.factor) weigh_maps(p, piece, first, saved, rows, to.extra, of_maps);
  }
  // dout_m = f_m dmixed, df_m = rowsum(dmixed o out_m)
  void weigh_maps(std::size_t p, const Tokens& piece, Index first, const Saved<Real>& saved,
                  const std::vector<Real>& dmixed, const TensorView<Real>& dextra,
                  std::vector<MapGradients>& of_maps) {
    const auto dim = std::size_t(g_.dim_v);
    for (int m = 0; m < maps(); ++m) {
      const std::vector<Real>& out = saved.pieces[place(p, m)].mixed;
      std::vector<Real>& dout = of_maps[place(p, m)].out;
      std::vector<double> of_head(std::size_t(g_.heads), 0.0);
      for_rows(piece, first, [&](Index b, Index h, std::size_t row, Index n) {
        const Real f = factor(b, h, n, m);
        double df = 0;
        for (std::size_t c = row * dim; c < (row + 1) * dim; ++c) {
          df += double(dmixed[c]) * double(out[c]);
          dout[c] = f * dmixed[c];
        }
        of_head[std::size_t(h)] += df;
        if (ring_.factor_slope && dextra.given())
          *dextra.row(b, h, n) += Real(df) * ring_.factor_slope(m, extra_of(b, h, n));
      });
      if (ring_.add_factors) ring_.add_factors(m, of_head, sums_.data());
    }
  }

  void add_backward(int m, const Tokens& piece, Index first, const Block& block,
                    const Block& gradients, const Tokens& keys, Index first_key,
                    const heed::Saved<Real>& saved, const MapGradients& from,
                    const TensorView<Real>& dquery) {
    heed::Saved<Real> joined;
    joined.state = saved.state;
    joined.lse = saved.lse;
    const Geometry g = geometry(piece, keys);
    const RingMap<Real>& map = ring_.maps[std::size_t(m)];
    joined.stamp =
        CallStamp::of(map.tiles.type, g, mask_, scale_of(map.tiles, g, options_), options_);
    const TensorView<Real> dq = room(dq_, g.query_shape()), dk = room(dk_, g.key_shape()),
                           dv = room(dv_, g.value_shape());
    StoredView<Real> dbias;
    if (!bias_.empty()) dbias = room(dbias_, mask_.bias.shape());
    // Gradients of the score's inputs of the piece and of the keys.
    const TensorView<Real> of_query = score_inputs(dquery_inputs_, piece, first),
                           of_keys = rows_of(dkey_inputs_, keys.begin, keys.count());
    TensorView<Real> dquery_inputs, dkey_inputs;
    if (of_query.given()) dquery_inputs = room(dq_inputs_, of_query.shape());
    if (of_keys.given()) dkey_inputs = room(dk_inputs_, of_keys.shape());
    const Shape rows = rows_shape(piece, g_.dim_v), lse = rows_shape(piece, 1);
    OpGradient<Real> grad(map.vjps);
    const Inputs<Real> in = inputs(piece, first, block, keys, first_key);
    Driver::backward(map.tiles, map.vjps,
                     {{in, mask_, options_},
                      joined,
                      StoredView<const Real>(saved.mixed.data(), rows),
                      {StoredView<const Real>(from.out.data(), rows),
                       StoredView<const Real>(from.lse.data(), lse)},
                      {dq, dk, dv, {}, dbias, dquery_inputs, dkey_inputs}},
                     &grad);
    add(dq, rows_of(dquery, first, piece.count()));
    add(dk, rows_of(gradients.key, first_key, keys.count()));
    add(dv, rows_of(gradients.value, first_key, keys.count()));
    add(dquery_inputs, of_query);
    add(dkey_inputs, of_keys);
    for (std::size_t i = 0; i < bias_.size(); ++i) bias_[i] += double(dbias_[i]);
    grad.add_to(sums_.data());  // a map's parameters are the first of the op's
  }

  [[nodiscard]] static TensorView<Real> room(std::vector<Real>& memory, const Shape& shape) {
    memory.resize(std::size_t(element_count(shape, "heed::mpi: a gradient")));
    return {memory.data(), shape};
  }
  // A block with room for the keys and values of a rank.
  [[nodiscard]] Block block_for(int rank) const {
    Block block;
    block.rank = rank;
    const Index rows = g_.batch * g_.kv_heads * keys_.held(rank);
    block.numbers.assign(std::size_t(rows * (g_.dim_qk + g_.dim_v)), Real(0));
    const Shape key{g_.batch, g_.kv_heads, keys_.held(rank), g_.dim_qk};
    block.key = {block.numbers.data(), key};
    block.value = {block.numbers.data() + rows * g_.dim_qk,
                   {key.batch, key.heads, key.len, g_.dim_v}};
    return block;
  }
  static void copy_rows(const TensorView<const Real>& from, const TensorView<Real>& to) {
    for_each_row(from.shape(), [&](Index b, Index h, Index t) {
      std::copy_n(from.row(b, h, t), from.shape().dim, to.row(b, h, t));
    });
  }
  // Adds the terms to a tensor that is given.
  static void add(const TensorView<Real>& terms, const TensorView<Real>& to) {
    if (!to.given()) return;
    for_each_row(terms.shape(), [&](Index b, Index h, Index t) {
      for (Index c = 0; c < terms.shape().dim; ++c) to(b, h, t, c) += terms(b, h, t, c);
    });
  }
  [[nodiscard]] Block own_block() const {
    Block block = block_for(comm_.rank());
    copy_rows(key_, block.key);
    copy_rows(value_, block.value);
    return block;
  }
  [[nodiscard]] int neighbour(int by) const {
    return (comm_.rank() + by + comm_.size()) % comm_.size();
  }
  // The rank whose keys are present at a step.
  [[nodiscard]] int owner(int step) const {
    return (comm_.rank() - step % comm_.size() + comm_.size()) % comm_.size();
  }
  // Sends a block to the right, and receives one from the left.
  [[nodiscard]] auto pass_on(const Block& block, Block& next) const {
    const auto bytes = [](const Block& of) { return of.numbers.size() * sizeof(Real); };
    std::vector<Send> sends;
    std::vector<Receive> receives;
    if (bytes(block) > 0) sends.push_back({neighbour(1), block.numbers.data(), bytes(block)});
    if (bytes(next) > 0) receives.push_back({neighbour(-1), next.numbers.data(), bytes(next)});
    return comm_.start(sends, receives);
  }

  // Calls body(block, poke) for the keys of all ranks, one after the other, while the next are on
  // their way; poke() lets MPI move the messages on.
  template <class Body>
  void travel(Body&& body) const {
    Block block = own_block();
    for (int step = 0; step < comm_.size(); ++step) {
      Block next;
      AnyCommunicator::Transfer transfer;
      if (step + 1 < comm_.size()) {
        next = block_for(owner(step + 1));
        transfer = pass_on(block, next);
      }
      body(std::as_const(block), [&] { transfer.poke(); });
      transfer.wait();
      block = std::move(next);
    }
  }
  // Calls body(block, gradients, poke), which adds to the gradients of the block; these travel one
  // step behind it. The gradients of the rank's own keys are added to dkey and dvalue.
  template <class Body>
  void travel_back(const TensorView<Real>& dkey, const TensorView<Real>& dvalue,
                   Body&& body) const {
    // Invariant: behind step s, `sums` holds the terms that ranks owner(s), owner(s) + 1, ..., own
    // rank have added for the keys of owner(s).
    Block block = own_block(), sums, sent;
    AnyCommunicator::Transfer sums_transfer;
    for (int step = 0; step < comm_.size(); ++step) {
      Block next;
      AnyCommunicator::Transfer transfer;
      if (step + 1 < comm_.size()) {
        next = block_for(owner(step + 1));
        transfer = pass_on(block, next);
      }
      Block own = block_for(block.rank);
      body(std::as_const(block), std::as_const(own), [&] {
        transfer.poke();
        sums_transfer.poke();
      });
      sums_transfer.wait();
      if (step > 0)
        for (std::size_t i = 0; i < own.numbers.size(); ++i) own.numbers[i] += sums.numbers[i];
      sent = std::move(own);
      sums = block_for(owner(step + 1));
      if (comm_.size() > 1) sums_transfer = pass_on(sent, sums);
      transfer.wait();
      block = std::move(next);
    }
    sums_transfer.wait();
    const Block& home = comm_.size() > 1 ? sums : sent;
    add(home.key, dkey);
    add(home.value, dvalue);
  }

  const AnyCommunicator& comm_;
  const SharedOp<Real>& op_;
  const OpTiles<Real>& tiles_;
  const RingOp<Real>& ring_;
  const Mask<Real>& mask_;
  const Shards &queries_, &keys_;
  Geometry g_;
  const Options& options_;
  BoundMask<Real> bound_;
  WidenedTensors<Real> copies_;
  TensorView<const Real> query_, key_, value_, extra_, query_inputs_;
  GatheredRows<Real> all_key_inputs_;
  heed::detail::SummedInputs<Real> inputs_;       // inputs of the score
  TensorView<Real> dquery_inputs_, dkey_inputs_;  // gradients of the score's inputs
  std::vector<Real> part_, dq_, dk_, dv_, dq_inputs_, dk_inputs_, dbias_;  // memory for one call
  std::vector<double> sums_, bias_;  // gradients of the parameters and of the bias
};

}  // namespace detail
}  // namespace mpi
}  // namespace HEED_ABI
}  // namespace heed
