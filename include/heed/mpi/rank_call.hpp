// SPDX-License-Identifier: Apache-2.0
#pragma once

// A rank's side of a call whose tokens are spread over ranks: its checks, the comparison of all ranks, and the way from the
// functions of mpi/attention.hpp and mpi/gathered.hpp to the code that computes the call: a Way, with the members
//
//   op                              the op (engine/shared_op.hpp)
//   step(g, options)                multiples at which shards of queries may begin
//   require(g, sharding, where)     throws where it does not take the call
//   pieces()                        number of results that backward() keeps for each piece of the queries
//   call(comm, in, mask, sharding, g, options)   an object with forward() and backward()

#include <heed/core/digest.hpp>
#include <heed/mask/block_mask.hpp>
#include <heed/mask/mask_stamp.hpp>
#include <heed/mpi/gather.hpp>

#include <functional>
#include <string>

namespace heed {
inline namespace HEED_ABI {
namespace mpi {

enum class Method { gather, ring };

// The way in which a call is spread over the ranks.
struct Sharding {
  Shards queries;
  Shards keys = {};  // empty: those of queries
  Method method = Method::gather;
};

namespace detail {

[[nodiscard]] inline const Shards& keys_of(const Sharding& sharding) {
  return sharding.keys.ranks() > 0 ? sharding.keys : sharding.queries;
}

// The view with another number of rows, which must not be read, for checks of the whole call.
template <class Element>
[[nodiscard]] StoredView<Element> with_rows(const StoredView<Element>& view, Index len) {
  if (!view.given()) return view;
  const auto longer = [len]<class Number>(const TensorView<Number>& of) -> TensorView<Number> {
    alignas(64) static std::remove_const_t<Number> nothing{};
    Shape shape = of.shape();
    shape.len = len;
    return {of.data() ? of.data() : &nothing, shape, dense_strides(shape)};
  };
  return view.visit([&](const auto& of) -> StoredView<Element> {
    if constexpr (requires { of.scales(); })
      return ScaledView(longer(of.numbers()), longer(of.scales()));
    else
      return longer(of);
  });
}

// A rank's side of one call, apart from the op.
template <class Real>
class RankSide {
 public:
  const Inputs<Real>& in;
  const Mask<Real>& mask;
  const Sharding& sharding;
  const Options& options;
  int rank, ranks;
  std::string where;
  Geometry geometry = {};  // geometry of the whole call

  // The sizes of this rank's part.
  [[nodiscard]] Geometry own_geometry() const {
    Geometry own = geometry;
    own.len_q = sharding.queries.held(rank);
    own.len_kv = keys_of(sharding).held(rank);
    return own;
  }

  // Throws if the inputs do not fit the shards. Returns views of all ranks' inputs, whose rows must not be read.
  [[nodiscard, gnu::noinline]] Inputs<Real> check_views() const {
    for (const Shards* shards : {&sharding.queries, &keys_of(sharding)})
      require(shards->ranks() == ranks, where, ": the shards are for ", shards->ranks(),
              " ranks, the communicator has ", ranks);
    require(in.share == Share{} && !in.packed && !in.key_features, where, ": ",
            in.packed         ? "packed sequences"
            : in.key_features ? "key_features"
                              : "a share",
            " of a call was given, this takes whole calls without them");
    const Index queries = sharding.queries.held(rank), keys = keys_of(sharding).held(rank);
    const auto require_rows = [&](const auto& view, Index rows, const char* name) {
      if (!view.given()) return;
      heed::detail::require_one_piece(view, name, where);
      require(view.shape().len == rows, where, ": ", name, " has len ", view.shape().len,
              ", the rank's shard has ", rows);
    };
    require_rows(in.query, queries, "query");
    require_rows(in.extra, queries, "extra");
    require_rows(in.query_inputs, queries, "query_inputs");
    require_rows(in.key, keys, "key");
    require_rows(in.value, keys, "value");
    require_rows(in.key_inputs, keys, "key_inputs");
    const Index len_q = sharding.queries.len(), len_kv = keys_of(sharding).len();
    Inputs<Real> whole = in;
    for (auto* view : {&whole.query, &whole.extra, &whole.query_inputs})
      *view = with_rows(*view, len_q);
    for (auto* view : {&whole.key, &whole.value, &whole.key_inputs})
      *view = with_rows(*view, len_kv);
    return whole;
  }
  // Sets the geometry of the whole call; throws if the inputs do not fit the shards or each other.
  [[gnu::noinline]] void find_geometry(const OpTiles<Real>& tiles) {
    require_options<Real>(options, where);
    geometry = geometry_of(tiles, check_views(), where);
  }
  [[gnu::noinline]] void check_outputs(const OpTiles<Real>& tiles, const Outputs<Real>& out) const {
    Geometry own = own_geometry();
    own.len_kv = geometry.len_kv;
    heed::detail::check_outputs(tiles, out, own, Inputs<Real>{}, Mask<Real>{}, where);
  }
  [[gnu::noinline]] void check_gradients(const OpTiles<Real>& tiles,
                                         const StoredView<const Real>& out,
                                         const OutputGradients<Real>& output,
                                         const Gradients<Real>& grads) const {
    heed::detail::check_backward(tiles, own_geometry(), in, mask, out, output, grads, where);
  }
  // Throws if a shard is not cut at multiples of `step`, or if the mask does not fit the call.
  [[gnu::noinline]] void check_shards(Index step) const {
    const Index len_q = sharding.queries.len();
    for (int r = 0; r < ranks; ++r)
      for (const Tokens& piece : sharding.queries.pieces(r))
        for (const Index at : {piece.begin, piece.end})
          require(at % step == 0 || at == len_q, where, ": a shard has queries [", piece.begin,
                  ", ", piece.end, "); it must begin and end at multiples of ", step,
                  " (shard_step()), or at the end");
    const BoundMask<Real> bound(without_rules(), geometry, where.c_str());
  }
  [[gnu::noinline]] void check_pieces(const Saved<Real>& saved, std::size_t of_each) const {
    const std::size_t pieces = of_each * sharding.queries.pieces(rank).size();
    require(saved.pieces.size() == pieces, where, ": saved holds ", saved.pieces.size(),
            " pieces, the rank has ", pieces,
            "; it must come from forward() of the same shards and method");
  }

  // Everything in which all ranks must agree.
  [[nodiscard, gnu::noinline]] RankStamp stamp(const std::string& type, const OpTiles<Real>& tiles,
                                               const Digest& parameters) const {
    RankStamp of;
    of.add("the call", where);
    of.add("the instruction set", heed::detail::instruction_set());
    of.add("the op's type", type);
    const auto shape = [](const StoredView<const Real>& view) { return view.shape(); };
    of.add("batch", shape(in.query).batch);
    of.add("the number of query heads", shape(in.query).heads);
    of.add("the number of key heads", shape(in.key).heads);
    of.add("dim_qk", shape(in.query).dim);
    of.add("dim_v", shape(in.value).dim);
    for (const auto& [view, name] :
         {std::pair{&in.key, "the storage of key"}, {&in.value, "the storage of value"}})
      of.add(name, view->scaled() ? "int8" : view->narrow() ? "16 bits" : "the op's own");
    of.add("the shape of key_inputs",
           Shape{in.key_inputs.shape().batch, in.key_inputs.shape().heads, 0,
                 in.key_inputs.shape().dim});
    of.add("first_query", in.first_query);
    of.add("queries_at_end", in.queries_at_end);
    of.add("the method", sharding.method == Method::ring ? "ring" : "gather");
    for (const auto& [shards, name] : {std::pair{&sharding.queries, "the shards of queries"},
                                       {&keys_of(sharding), "the shards of keys"}})
      of.add(name, text_of(*shards));
    of.add("scale", scale_of(tiles, geometry, options));
    of.add("key_tile", options.key_tile);
    of.add("panel_vectors", options.panel_vectors);
    of.add("precision", options.precision.name());
    of.add("the rate of dropout", options.dropout.rate);
    of.add("the seed of dropout", options.dropout.seed);
    of.add("first_batch of dropout", options.dropout.first_batch);
    of.add("the digest of the parameters", parameters);
    add_mask(of);
    return of;
  }
  [[gnu::noinline]] static void add_outputs(RankStamp& stamp, const Outputs<Real>& out) {
    stamp.add("whether lse is asked for", out.lse.given() ? "yes" : "no");
    stamp.add("whether steps are asked for", out.steps.given() ? "yes" : "no");
  }
  [[gnu::noinline]] static void add_gradients(RankStamp& stamp, const OutputGradients<Real>& output,
                                              const Gradients<Real>& grads, bool parameters) {
    std::string asked;
    for (const auto& [given, name] : {std::pair{grads.key.given(), "key"},
                                      {grads.value.given(), "value"},
                                      {grads.bias.given(), "bias"},
                                      {grads.key_inputs.given(), "key_inputs"},
                                      {parameters, "parameters"}})
      if (given) asked += (asked.empty() ? "" : ", ") + std::string(name);
    stamp.add("what gradients are asked for", asked);
    stamp.add("whether lse has a gradient", output.lse.given() ? "yes" : "no");
  }

  // Throws the same sentence on all ranks unless all of them can make the call, and it is the same on all: `stamp` checks it.
  [[gnu::noinline]] void agree(const AnyCommunicator& comm,
                               const std::function<RankStamp()>& stamp) const {
    RankStamp own;
    try {
      own = stamp();
    } catch (const std::invalid_argument& error) {
      own.error = error.what();
    }
    require_agreement(comm, own, where);
  }

  // The mask with its functions asked once for all pieces of the rank.
  [[nodiscard, gnu::noinline]] Mask<Real> asked_once() const {
    if (mask.rules.empty()) return mask;
    return BlockMask<Real>(mask, geometry, options.threads).mask();
  }

 private:
  [[nodiscard]] Mask<Real> without_rules() const {
    Mask<Real> rest = mask;
    rest.rules.clear();
    return rest;
  }
  [[nodiscard]] static std::string text_of(const Shards& shards) {
    std::string text;
    if (shards.ranks() > 16) {  // a text of each would be too long
      Digest digest;
      for (int r = 0; r < shards.ranks(); ++r)
        for (const Tokens& piece : shards.pieces(r))
          for (const Index number : {Index(r), piece.begin, piece.end}) digest.add(number);
      return digest.text();
    }
    for (int r = 0; r < shards.ranks(); ++r) {
      text += r > 0 ? " | " : "";
      if (shards.pieces(r).empty()) text += "none";
      for (const Tokens& piece : shards.pieces(r))
        text += "[" + std::to_string(piece.begin) + "," + std::to_string(piece.end) + ")";
    }
    return text;
  }
  [[gnu::noinline]] void add_mask(RankStamp& of) const {
    const MaskStamp stamp(mask);
    of.add("the mask's list of bands", texts_of(stamp.bands));
    of.add("the shape of the boolean mask", mask.allowed.shape());
    of.add("the shape of the bias", mask.bias.shape());
    of.add("the number of functions in the mask", mask.rules.size());
    Digest numbers;
    stamp.add_to(numbers);
    of.add("the digest of the mask's numbers", numbers);
  }
};

// A rank's side of a call of an op.
template <class Real, class Way>
struct RankCall {
  const Way& way;
  RankSide<Real> side;

  // Throws if the inputs do not fit the shards or each other.
  void check() {
    side.find_geometry(way.op.tiles);
    side.check_shards(way.step(side.geometry, side.options));
    require(!way.op.tiles.readout.traits.maps_values, side.where,
            ": the readout transforms values (value() in plug/readout.hpp), which calls over ranks "
            "do not");
    way.require(side.geometry, side.sharding, side.where);
  }
  void check_outputs(const Outputs<Real>& out) const { side.check_outputs(way.op.tiles, out); }
  void check_gradients(const Saved<Real>& saved, const StoredView<const Real>& out,
                       const OutputGradients<Real>& output, const Gradients<Real>& grads) const {
    side.check_pieces(saved, way.pieces());
    side.check_gradients(way.op.tiles, out, output, grads);
  }
  [[nodiscard]] RankStamp stamp() const {
    return side.stamp(way.op.type, way.op.tiles, way.op.parameters);
  }
};

// The common part of all calls: after check(call) has found no fault and all ranks agree, calls
// f(run) with the prepared mask. add(stamp) adds to what they must agree in.
template <class Way, class Real, class Check, class Add, class F>
void call_on_ranks(const char* door, const Way& way, const AnyCommunicator& comm,
                   const Inputs<Real>& in, const Mask<Real>& mask, const Sharding& sharding,
                   const Options& options, Check&& check, Add&& add, F&& f) {
  RankCall<Real, Way> call{way,
                           {in, mask, sharding, options, comm.rank(), comm.size(),
                            heed::detail::door_name(door, options.name)}};
  call.side.agree(comm, [&] {
    call.check();
    check(call);
    RankStamp stamp = call.stamp();
    add(stamp);
    return stamp;
  });
  const Mask<Real> asked = call.side.asked_once();
  auto run = way.call(comm, in, asked, sharding, call.side.geometry, options);
  f(run);
}

template <class Way, class Real>
void forward_by(const Way& way, const AnyCommunicator& comm, const Inputs<Real>& in,
                const Mask<Real>& mask, const Sharding& sharding, const Outputs<Real>& out,
                Saved<Real>* saved, const Options& options) {
  if (saved) saved->pieces.clear();
  call_on_ranks(
      "heed::mpi::forward", way, comm, in, mask, sharding, options,
      [&](const auto& call) { call.check_outputs(out); },
      [&](RankStamp& stamp) { RankSide<Real>::add_outputs(stamp, out); },
      [&](auto& run) { run.forward(out, saved); });
}

template <class Way, class Real>
void backward_by(const Way& way, const AnyCommunicator& comm, const Inputs<Real>& in,
                 const Mask<Real>& mask, const Sharding& sharding, const Saved<Real>& saved,
                 const StoredView<const Real>& out, const OutputGradients<Real>& grad_out,
                 const Gradients<Real>& grads, OpGradient<Real>* grad_op, const Options& options) {
  call_on_ranks(
      "heed::mpi::backward", way, comm, in, mask, sharding, options,
      [&](const auto& call) { call.check_gradients(saved, out, grad_out, grads); },
      [&](RankStamp& stamp) {
        RankSide<Real>::add_gradients(stamp, grad_out, grads, grad_op != nullptr);
      },
      [&](auto& run) { run.backward(saved, out, grad_out, grads, grad_op); });
}

}  // namespace detail

}  // namespace mpi
}  // namespace HEED_ABI
}  // namespace heed
