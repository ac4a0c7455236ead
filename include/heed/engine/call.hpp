// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a call is given and what it leaves: the types of the doors. checks.hpp refuses what does not fit.

#include <heed/core/dropout.hpp>
#include <heed/core/geometry.hpp>
#include <heed/engine/key_features.hpp>
#include <heed/mask/mask_stamp.hpp>
#include <heed/simd/precision.hpp>
#include <heed/simd/stored_view.hpp>

#include <algorithm>
#include <concepts>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

template <class Real>
struct Packed;

// query (batch, query_heads, len_q, dim_qk), key (batch, kv_heads, len_kv, dim_qk), value (batch,
// kv_heads, len_kv, dim_v); query = key = value is fine. extra (batch, heads, len_q, op.extra_dim) only
// where the op asks for it: the intent, or the logits of a token-wise lambda. Each may be stored as Real, bfloat16 or
// half, or as int8 with a scale per row (core/scaled_view.hpp).
// key_features: those of the keys that forward() finds here and adds to, or null; backward() does without.
// query_inputs (batch, heads, len_q, n), key_inputs (batch, heads, len_kv, n): numbers of tokens, only where parts of the op
// read them (plug/token_inputs.hpp: columns of the score, then of the normaliser, then of the readout); of kv_heads or 1
// head each where heads share them. An op has one extra input; what it reads of a query beside it are query_inputs.
// first_query: where query 0 stands among the keys, whose positions count from 0. Query i has position first_query + i for all
// that an op reads of positions: those of pairs and rows, tables, transforms, sums over tokens. Queries that follow n tokens of
// a cache have n; KvCache::inputs() sets it. It moves no part of a mask: bands, slopes and functions of positions place
// queries by their own Align and offset (mask/mask.hpp), and Align::bottom_right is where KvCache::inputs() has them.
// queries_at_end: are the queries the last tokens of the keys? KvCache::inputs() and KvPool::inputs() say so. Where there are
// fewer of them than keys, bands, slopes and functions of positions that stand top left without an offset are then refused: they
// would place the queries at the first keys.
// backward(), jvp() and hvp() need the first_query of their forward(). Positions are numbers of Real: floats tell them apart up to
// 2^24, doubles up to 2^53, beyond which no query may stand.
// share: of a call that several share, how many queries and keys stand elsewhere, before and behind those of these tensors:
// queries [queries_before, queries_before + len) of a longer call. All that is counted counts them: mask, positions and dropout are those
// of the whole call, and each row that is computed has the bits that it has there, where all keys are at hand and the share
// begins and ends at a multiple of share_step() (engine/doors.hpp). Keys elsewhere are hidden. heed/mpi/ makes use of it.
// packed: null, or the lengths of sequences that lie one behind the other in tensors of batch 1.
template <class Real>
struct Inputs {
  StoredView<const Real> query, key, value, extra = {};
  KeyFeatures<Real>* key_features = nullptr;
  StoredView<const Real> query_inputs = {}, key_inputs = {};
  Index first_query = 0;
  const Packed<Real>* packed = nullptr;
  Share share = {};
  bool queries_at_end = false;
};

// Keys and values of one sequence (1, kv_heads, len, dim), where each has memory of its own, as in a KvPool.
template <class Real>
struct SequenceKeys {
  StoredView<const Real> key, value;
  KeyFeatures<Real>* key_features = nullptr;
};

// Sequences of lengths of their own in one call, without padding. Tensors are (1, heads, total, dim), or (total, heads, dim) by
// strides (view_bthd with batch 1); sequence n has the queries [queries[n], queries[n + 1]) and the keys [keys[n],
// keys[n + 1]) of them. Nothing is computed across sequences: each has the bits of a call of its own. All of them share the
// workers, and the gradient of a parameter is the sum over all sequences. No sequences, queries = {0}, are tensors without rows.
//
//   positions     of queries and keys count from the beginning of their sequence, in scores and in masks
//   masks         bands, key ranges, slopes and functions of positions hold in each sequence, which is batch n to a function;
//                 key_lengths has a number per sequence; documents an id per token, packed as they are; a boolean mask and a
//                 bias are those of a padded batch (sequences or 1, heads or 1, longest len_q or 1, longest len_kv), of which
//                 a sequence reads its own corner
//   dropout       of sequence n is that of batch n
//   Saved         has lse and diagnostics in rows [heads][total], and a Saved for backward() of each call in `sequences`
//   Halting::batch  ends a sequence when all of its own rows have halted
//
// Taken as PackedInputs by forward(), backward() and forward_partial() (engine/packed_doors.hpp), and by jvp(). Memory, beside
// that of one batch: about 10 KiB for each sequence that is more than a small part of the call, in backward for every
// sequence; where a score has tables, each of these sequences has its own.
template <class Real>
struct Packed {
  std::vector<Index> queries;  // 0, ..., total: where sequences begin, and the end of the last one
  std::vector<Index> keys = {};  // likewise; those of queries where there are none
  // Position of each sequence's first query; empty: Inputs::first_query.
  std::vector<Index> first_query = {};
  // Keys and values of each sequence, in place of Inputs::key and value.
  std::vector<SequenceKeys<Real>> caches = {};

  [[nodiscard]] Index sequences() const { return std::max<Index>(0, Index(queries.size()) - 1); }
};

// Inputs that may be packed sequences; without `packed`, those of a call as any other. They are a type of their own so that
// calls that have none compile nothing for them.
template <class Real>
struct PackedInputs : Inputs<Real> {
  PackedInputs() = default;
  PackedInputs(const Inputs<Real>& in, const Packed<Real>* lengths = nullptr) : Inputs<Real>(in) {
    if (lengths) this->packed = lengths;
  }
};

// What forward() writes, or gradients of it. A view alone stands for out.
template <class Element>
struct OutputViews {
  StoredView<Element> out, lse = {}, steps = {};

  template <class View>
  requires std::convertible_to<View, StoredView<Element>> OutputViews(View&& of)
      : out(static_cast<View&&>(of)) {}
  OutputViews(Element* data, const Shape& shape) : out(data, shape) {}
  OutputViews(Element* data, const Shape& shape, const Strides& strides)
      : out(data, shape, strides) {}
  OutputViews(const StoredView<Element>& of, const StoredView<Element>& of_lse,
              const StoredView<Element>& of_steps = {})
      : out(of), lse(of_lse), steps(of_steps) {}
};
// Where forward() writes: out (batch, heads, len_q, dim_v), and, if it is given, lse (batch, heads, len_q, maps): the
// natural-log sum of exp of the scores of each map (two for differences of softmaxes), -infinity for a row that sees no
// key. What a normaliser of one's own calls lse, it says itself (plug/streaming.hpp). steps (batch, heads, len_q,
// step_columns), where it is given, receives what the steps of each row come to, of ops whose readout counts them
// (counts_steps, plug/readout.hpp): one number, the time that the row takes, unless the readout says otherwise.
// {out, {}, steps} without lse.
template <class Real>
using Outputs = OutputViews<Real>;
// The gradients of the loss for what forward() wrote, of the same shapes: out's always, of zeros for a loss of lse alone;
// lse's only where the loss depends on it, and where the op's normaliser differentiates_lse (plug/normaliser.hpp); those of
// steps only where the loss depends on them, and where the op's readout counts them.
template <class Real>
using OutputGradients = OutputViews<const Real>;

// A tensor for each that a call reads as numbers: its values, tangents or gradients. Keys: the type of key and value, where
// tiles of them are widened.
template <class View, class Keys = View>
struct TensorSet {
  View query = {};
  Keys key = {}, value = {};
  View extra = {}, bias = {}, query_inputs = {}, key_inputs = {};
};

// Where gradients are written, shaped like the inputs; an empty view is not computed. bias has the
// shape of the mask's bias. {query, key, value, extra, bias, query_inputs, key_inputs}.
template <class Real>
using Gradients = TensorSet<StoredView<Real>>;

// A direction in the inputs of a call, each tensor of the shape of the input (bias: of the mask's bias). One that is
// not given does not move. The direction in the op's parameters is an object of the op's type, as their gradients are.
// {query, key, value, extra, bias, query_inputs, key_inputs}.
template <class Real>
using Tangents = TensorSet<StoredView<const Real>>;

struct Options {
  // Factor on q.k; 1 / sqrt(width of one score map) when not given.
  std::optional<double> scale = {};
  // 0: OpenMP's default, of a container no more than its CPU quota (core/parallel.hpp); fewer for small calls. Results do not
  // depend on it, not in their last bit.
  int threads = 0;
  // Keys per tile; 0 lets the plan choose. Rounded to whole panels, at least one. Small values make tests cross
  // tile borders at short lengths.
  Index key_tile = 0;
  // Vectors of queries per panel, 1 to kPanelVectors; 0 lets the plan choose.
  int panel_vectors = 0;
  // Stands in error texts: "heed::forward(dar): ...".
  const char* name = "";
  // Dropout of the weights, behind the normaliser; backward needs the same as forward. A dropped pair has weight 0, but is
  // seen: a NaN in its value shows.
  Dropout dropout = {};
  // Precision of products; backward needs the same as forward. Mixed precision is fast where heed is compiled for AVX-512
  // BF16 (kHasPairProducts), and slower than float elsewhere. What a score reads of queries and keys beside q.k (norms,
  // categories, projections) comes from rows that are not rounded. Panels of up to kFewRows queries, as in decoding, and
  // calls whose heads are taken for queries of one head, are bound by memory and compute as with Precision::storage. Bounds
  // of the errors stand in check/mixed_bounds.hpp.
  Precision precision = {};
};

// Which call it was: what backward() must share with the forward() that it follows.
struct CallStamp {
  std::string_view op;  // its type; empty before a call has succeeded
  Geometry geometry;
  double scale = 0;
  Dropout dropout;
  MaskStamp mask;
  Precision precision = {};
  Index sequences = 0;  // that were packed

  template <class Real>
  [[nodiscard]] static CallStamp of(std::string_view op, const Geometry& g, const Mask<Real>& mask,
                                    double scale, const Options& options) {
    CallStamp stamp{op, g, scale, options.dropout, MaskStamp(mask), options.precision, 0};
    stamp.geometry.queries_at_end = false;  // what it asks of the mask was asked before
    return stamp;
  }

  // In what `other` differs, as the end of a sentence about saved numbers; empty if in nothing.
  [[nodiscard]] std::string difference(const CallStamp& other) const {
    return !op.empty() && *this == other ? std::string() : text_of_difference(other);
  }
  [[nodiscard]] bool operator==(const CallStamp&) const = default;

 private:
  [[nodiscard, gnu::cold]] std::string text_of_difference(const CallStamp& other) const;
};

// What backward needs of forward, and what forward can report. Filled when a pointer to one is given.
template <class Real>
struct Saved {
  // Natural-log sum of exp of the scores, [map][batch * heads * len_q]; -infinity for a row that sees
  // no key.
  std::vector<Real> lse;
  // States of streaming normalisers, [number][row] (plug/streaming.hpp).
  std::vector<Real> state;
  // Rows before the readout, (batch, heads, len_q, dim_v), where the readout's backward needs them.
  std::vector<Real> mixed;
  // Numbers per row that the op reports, [name][row]; names in diagnostic_names.
  std::vector<std::vector<Real>> diagnostics;
  std::vector<std::string> diagnostic_names;
  // The call that filled it; set when that call succeeds.
  CallStamp stamp;
  // For packed sequences: what backward needs of each, or of neighbours of one length.
  std::vector<Saved> sequences;

  // The rows of one diagnostic; throws std::invalid_argument for a name that the op does not report.
  [[nodiscard]] const std::vector<Real>& diagnostic(const std::string& name) const {
    for (std::size_t i = 0; i < diagnostic_names.size(); ++i)
      if (diagnostic_names[i] == name) return diagnostics[i];
    std::string known;
    for (const std::string& of : diagnostic_names) known += (known.empty() ? "" : ", ") + of;
    fail("Saved::diagnostic: the op reports no ", name, ", it reports ",
         known.empty() ? "nothing" : known);
  }
};

namespace detail {

// The arguments of a door, handed on together. What they refer to outlives the call.
template <class Real>
struct CallArguments {
  const Inputs<Real>& in;
  const Mask<Real>& mask;
  const Options& options;
};
template <class Real>
struct ForwardArguments : CallArguments<Real> {
  const Outputs<Real>& out;
  Saved<Real>* saved;
};
template <class Real>
struct BackwardArguments : CallArguments<Real> {
  const Saved<Real>& saved;
  const StoredView<const Real>& out;
  const OutputGradients<Real>& grad_out;
  const Gradients<Real>& grads;
};

}  // namespace detail

inline std::string CallStamp::text_of_difference(const CallStamp& other) const {
  std::string text;
  const auto unless_same = [&text](bool same, const auto&... parts) {
    if (!same && text.empty()) text = detail::joined({detail::Part(parts)...});
  };
  const auto shapes = [](const Geometry& g) {
    return Shape{g.batch, g.query_heads, g.len_q, g.dim_qk}.text() + " and " +
           Shape{g.batch, g.kv_heads, g.len_kv, g.dim_v}.text();
  };
  unless_same(!op.empty(), "holds nothing: no forward() has filled it, or the last one threw");
  unless_same(op == other.op, "is of a call of another op");
  unless_same(sequences == other.sequences, "is of a call of ", sequences,
              " packed sequences, this one has ", other.sequences);
  Geometry moved = geometry;
  moved.first_query = other.geometry.first_query;
  moved.share = other.geometry.share;
  unless_same(moved == other.geometry, "is of a call with query and value of shapes ",
              shapes(geometry), ", these are ", shapes(other.geometry));
  unless_same(geometry.first_query == other.geometry.first_query, "is of a call with first_query ",
              geometry.first_query, ", this one has ", other.geometry.first_query);
  const auto from = [](const Geometry& g) {
    return "queries from " + std::to_string(g.share.queries_before) + " and keys from " +
           std::to_string(g.share.keys_before) + " on";
  };
  unless_same(geometry.share == other.geometry.share, "is of a share with ", from(geometry),
              ", this one has ", from(other.geometry));
  unless_same(scale == other.scale, "is of a call with scale ", scale, ", this one has ",
              other.scale);
  unless_same(dropout.first_batch == other.dropout.first_batch,
              "is of a call with dropout from batch ", dropout.first_batch, " on, this one has ",
              other.dropout.first_batch);
  unless_same(dropout == other.dropout, "is of a call with dropout ", dropout.rate, " and seed ",
              dropout.seed, ", this one has ", other.dropout.rate, " and ", other.dropout.seed);
  unless_same(precision == other.precision, "is of a call with precision ", precision.name(),
              ", this one has ", other.precision.name());
  return text.empty() ? mask.difference(other.mask) : text;
}

}  // namespace HEED_ABI
}  // namespace heed
