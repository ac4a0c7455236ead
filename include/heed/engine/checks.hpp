// SPDX-License-Identifier: Apache-2.0
#pragma once

// The one place where the arguments of calls are checked: shapes, memory, options, and what an earlier call has saved. Each
// refusal is one sentence that names the argument and both values.

#include <heed/engine/call.hpp>
#include <heed/engine/sources.hpp>
#include <heed/engine/tiles.hpp>
#include <heed/engine/token_inputs.hpp>
#include <heed/mask/bound_mask.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

inline std::string door_name(const char* function, const char* op) {
  return op[0] == '\0' ? std::string(function) : std::string(function) + "(" + op + ")";
}

// The name of a tensor, such as "query", or of one that belongs to it, such as "grad_query". Words and input are joined where a
// sentence needs them.
struct TensorName {
  const char* words = "";
  const char* input;

  TensorName(const char* of) : input(of) {}
  TensorName(const char* before, const char* of) : words(before), input(of) {}
  [[nodiscard]] std::string text() const { return std::string(words) + input; }
};

inline void require_view(const MemoryView& view, const TensorName& name, const std::string& where) {
  const Shape& s = view.shape;
  require(s.batch >= 0 && s.heads >= 0 && s.len >= 0 && s.dim >= 0, where, ": ", name,
          " has shape ", s, ", extents must not be negative");
  if (Index count; __builtin_mul_overflow(s.batch, s.heads, &count) ||
                   __builtin_mul_overflow(count, s.len, &count) ||
                   __builtin_mul_overflow(count, s.dim, &count))
    (void)element_count(s, (where + ": " + name.text()).c_str());  // throws
  if (!view.has_elements()) return;
  for (Index p = 0; p < view.pages(); ++p) {
    (void)view.span(p);  // throws where an offset does not fit
    const std::uintptr_t address = view.address(p);
    require(address != 0, where, ": ", name, " has a null pointer and shape ", s);
    const std::uintptr_t past = address % std::uintptr_t(view.alignment);
    require(past == 0, where, ": ", name, " lies ", past, " bytes past a multiple of ",
            view.alignment, ", it must be aligned to ", view.alignment, " bytes");
  }
}

// Pages that tiles of keys do not straddle.
inline void require_pages(const MemoryView& view, Index lanes, const TensorName& name,
                          const std::string& where) {
  require(view.page_rows % lanes == 0, where, ": ", name, " has pages of ", view.page_rows,
          " rows, they must be multiples of ", lanes);
}
inline void require_one_piece(const MemoryView& view, const TensorName& name,
                              const std::string& where) {
  require(view.page_rows == 0, where, ": ", name, " has pages of ", view.page_rows,
          " rows, it must lie in one piece");
}

inline void require_shape(const MemoryView& view, const Shape& wanted, const TensorName& name,
                          const std::string& where) {
  require(view.shape != Shape{} || wanted == Shape{}, where, ": ", name,
          " was not given, it must have shape ", wanted);
  require_view(view, name, where);
  require_one_piece(view, name, where);
  require(view.shape == wanted, where, ": ", name, " has shape ", view.shape, ", it must be ",
          wanted);
}

// What is written: every number has a place of its own.
inline void require_output(const MemoryView& view, const Shape& wanted, const TensorName& name,
                           const std::string& where) {
  require_shape(view, wanted, name, where);
  if (!view.has_elements()) return;
  const Shape& s = view.shape;
  const Strides& strides = view.strides;
  // Strides that are not used may be anything.
  const auto step = [](Index stride, Index count) {
    return std::pair(count > 1 ? std::abs(stride) : 0, count);
  };
  std::array<std::pair<Index, Index>, 3> steps{
      {step(strides.batch, s.batch), step(strides.head, s.heads), step(strides.row, s.len)}};
  for (const auto& [i, j] : {std::pair{0U, 1U}, {1U, 2U}, {0U, 1U}})
    if (steps[j] < steps[i]) std::swap(steps[i], steps[j]);
  Index taken = s.dim;
  for (const auto& [stride, count] : steps) {
    if (count == 1) continue;
    require(stride >= taken, where, ": ", name, " has a stride of ", stride, " where ", taken,
            " numbers lie side by side; rows that are written must not overlap");
    taken = (count - 1) * stride + taken;
  }
}

// Throws unless the numbers of tokens are those that the op's parts read: for all heads, for each key-value head, or for one that
// serves all.
template <class Real>
void require_token_inputs(const OpTiles<Real>& op, const Inputs<Real>& in, const Geometry& g,
                          const std::string& where) {
  const auto check = [&](const StoredView<const Real>& view, Index len, Index count,
                         const char* argument, std::string (*name)()) {
    const Shape &s = view.shape(), whole{g.batch, g.heads, len, count};
    require(count > 0 || !view.given(), where, ": ", argument, " of shape ", s,
            " was given, the op reads none");
    if (count == 0) return;
    require_view(view, argument, where);
    require_one_piece(view, argument, where);
    if (!view.given())
      fail(where, ": the op needs the input ", name(), " of shape ", whole, ", or of 1 head, as ",
           argument, "; none was given");
    const bool heads_fit = s.heads == g.heads || s.heads == g.kv_heads || s.heads == 1;
    if (s != Shape{g.batch, s.heads, len, count} || !heads_fit)
      fail(where, ": ", argument, " (", name(), ") has shape ", s, ", it must be ", whole,
           ", or of 1 or ", g.kv_heads, " heads");
  };
  const TokenColumns& columns = op.columns;
  check(in.query_inputs, g.held_queries(), columns.query(), "query_inputs", columns.query_names);
  check(in.key_inputs, g.held_keys(), columns.key(), "key_inputs", columns.key_names);
  const ScoreTraits& score = op.score.traits;
  if (!score.sums_inputs) return;
  require(g.held_keys() == g.len_kv, where, ": sums of key_inputs (", score.key_inputs_name,
          ") run over all keys; ", g.held_keys(), " of ", g.len_kv, " are at hand");
  require(g.query_position(g.len_q) <= g.len_kv, where, ": sums of key_inputs (",
          score.key_inputs_name, ") are read at the queries' own tokens; first_query is ",
          g.first_query, ", len_q is ", g.len_q, ", len_kv is ", g.len_kv);
}

inline constexpr Index kLastPosition = Index(1) << 53;

inline void require_first_query(Index first_query, const std::string& where) {
  require(first_query >= 0 && first_query <= kLastPosition, where, ": first_query is ", first_query,
          ", it must lie in [0, ", kLastPosition, "]");
}

// Rejects sharded inputs.
template <class Real>
void refuse_share(const Inputs<Real>& in, const std::string& where) {
  require(in.share == Share{}, where,
          ": a share of a call was given (Inputs::share); forward() and backward() alone take one");
}

// len and what stands before and behind it, of queries or keys.
[[nodiscard]] inline Index whole_length(Index len, Index before, Index behind, const char* of,
                                        const std::string& where) {
  Index whole = 0;
  require(before >= 0 && behind >= 0 && !__builtin_add_overflow(before, behind, &whole) &&
              !__builtin_add_overflow(whole, len, &whole),
          where, ": share has ", before, " ", of, " before and ", behind, " behind the ", len,
          " at hand; neither may be negative, and their sum must fit 64 bits");
  return whole;
}

// Throws unless query, key and value are given, have rows of the same tokens and widths, and pages that tiles can keep to.
template <class Real>
void require_operands(const Inputs<Real>& in, const std::string& where) {
  require_view(in.query, "query", where);
  require_view(in.key, "key", where);
  require_view(in.value, "value", where);
  require_one_piece(in.query, "query", where);
  require_one_piece(in.extra, "extra", where);
  require_pages(in.key, kPanelLanes<Real>, "key", where);
  require_pages(in.value, kPanelLanes<Real>, "value", where);
  const Shape &q = in.query.shape(), &k = in.key.shape(), &v = in.value.shape();
  for (const auto& [view, name] :
       {std::pair{&in.query, "query"}, {&in.key, "key"}, {&in.value, "value"}})
    require(view->given(), where, ": ", name, " was not given");
  require(k.dim == q.dim, where, ": key has dim_qk ", k.dim, ", query has ", q.dim);
  require(q.dim > 0, where, ": query has dim_qk 0; it must be at least 1");
  require(v.dim > 0, where, ": value has dim_v 0; it must be at least 1");
  require(k.batch == q.batch, where, ": key has batch ", k.batch, ", query has ", q.batch);
  require(v.batch == q.batch, where, ": value has batch ", v.batch, ", query has ", q.batch);
  require(v.heads == k.heads, where, ": value has ", v.heads, " heads, key has ", k.heads);
  require(v.len == k.len, where, ": value has len ", v.len, ", key has ", k.len);
}

// Throws unless the inputs beside query, key and value are those that the op reads.
template <class Real>
void require_other_inputs(const OpTiles<Real>& op, const Inputs<Real>& in, const Geometry& g,
                          const std::string& where) {
  const Index extra = op.extra_dim(g);
  if (extra > 0) {
    require(in.extra.given(), where, ": the op needs the input ", op.readout.extra_name(),
            " of shape ", g.extra_shape(extra), ", none was given");
    require_shape(in.extra, g.extra_shape(extra), op.readout.extra_name(), where);
  } else {
    require(!in.extra.given(), where, ": an extra input of shape ", in.extra.shape(),
            " was given, the op reads none");
  }
  require_token_inputs(op, in, g, where);
  if (!op.readout.traits.uses_own_rows) return;
  const Index first = g.query_position(g.share.queries_before),
              end = g.query_position(g.held_queries_end());
  require(first == end || (g.share.keys_before <= first && end <= g.held_keys_end()), where,
          ": the readout reads key and value of the query's own token, the key at its position "
          "(Inputs::first_query); queries stand at [",
          first, ", ", end, "), keys [", g.share.keys_before, ", ", g.held_keys_end(), ") of ",
          g.len_kv, " are at hand");
}

}  // namespace detail

// Throws, its sentence starting with `where`, unless every option lies in its range for an op of Real.
template <class Real>
void require_options(const Options& options, const std::string& where) {
  require(options.threads >= 0, where, ": Options: threads is ", options.threads,
          ", it must be 0 (default) or positive");
  require(options.panel_vectors >= 0 && options.panel_vectors <= kPanelVectors, where,
          ": Options: panel_vectors is ", options.panel_vectors, ", it must lie in [0, ",
          kPanelVectors, "]");
  require(options.key_tile >= 0, where, ": Options: key_tile is ", options.key_tile,
          ", it must not be negative");
  require(options.dropout.valid(), where, ": Options: dropout.rate is ", options.dropout.rate,
          ", it must be in [0, 1)");
  require(!options.precision.mixes() || std::is_same_v<Real, float>, where,
          ": Options: precision is mixed, it must be storage for an op of double; an op of float "
          "has both");
  constexpr auto largest = double(std::numeric_limits<Real>::max());
  const double scale = options.scale.value_or(0);
  require(std::isfinite(scale), where, ": Options: scale is ", scale, ", it must be finite");
  require(std::abs(scale) <= largest, where, ": Options: scale is ", scale,
          ", its size must be at most ", largest);
}

// Throws unless calls of an op, whose queries have so many heads, may have these sizes. Inputs are not looked at.
inline void require_sizes(const Geometry& g, Index query_heads, const std::string& where) {
  require(g.batch >= 0 && g.heads >= 0 && g.kv_heads >= 0 && g.len_q >= 0 && g.len_kv >= 0, where,
          ": the geometry has batch ", g.batch, ", heads ", g.heads, ", kv_heads ", g.kv_heads,
          ", len_q ", g.len_q, ", len_kv ", g.len_kv, "; none may be negative");
  require(g.dim_qk > 0 && g.dim_v > 0, where, ": the geometry has dim_qk ", g.dim_qk, " and dim_v ",
          g.dim_v, ", both must be at least 1");
  detail::require_first_query(g.first_query, where);
  require(g.query_heads == query_heads, where, ": the geometry has query_heads ", g.query_heads,
          ", for ", g.heads, " heads of the op it must be ", query_heads);
  require(g.heads == 0 || (g.kv_heads > 0 && g.heads % g.kv_heads == 0), where, ": ", g.heads,
          " heads cannot share ", g.kv_heads, " kv_heads evenly");
}

// Sizes of a call; throws std::invalid_argument when the inputs do not fit each other.
template <class Real>
[[nodiscard]] Geometry geometry_of(const OpTiles<Real>& op, const Inputs<Real>& in,
                                   const std::string& where) {
  require(
      in.packed == nullptr, where,
      ": packed sequences were given, this takes one of them at a time; forward() and backward() "
      "take them as PackedInputs");
  detail::require_operands(in, where);
  const Shape &q = in.query.shape(), &k = in.key.shape(), &v = in.value.shape();
  const Index per_head = op.normaliser.query_heads(1);
  require(q.heads % per_head == 0, where, ": query has ", q.heads, " heads, the op reads them in ",
          per_head, "s");
  const Index heads = q.heads / per_head;
  require(heads == 0 || (k.heads > 0 && heads % k.heads == 0), where, ": ", heads,
          " heads cannot share ", k.heads, " kv_heads evenly");
  detail::require_first_query(in.first_query, where);
  const Share& share = in.share;
  const Geometry g{
      q.batch,
      heads,
      q.heads,
      k.heads,
      detail::whole_length(q.len, share.queries_before, share.queries_behind, "queries", where),
      detail::whole_length(k.len, share.keys_before, share.keys_behind, "keys", where),
      q.dim,
      v.dim,
      in.first_query,
      share,
      in.queries_at_end};
  op.validate(g, where.c_str());
  detail::require_sources(op, g, where);
  detail::require_other_inputs(op, in, g, where);
  return g;
}

template <class Real>
[[nodiscard]] double scale_of(const OpTiles<Real>& op, const Geometry& g, const Options& options) {
  if (options.scale) return *options.scale;
  const Index width = g.heads > 0 ? op.normaliser.source(g, 0, 0).width : g.dim_qk;
  return 1.0 / std::sqrt(double(width));
}

namespace detail {

template <class Real>
[[nodiscard]] Shape lse_shape(const OpTiles<Real>& op, const Geometry& g) {
  return {g.batch, g.heads, g.held_queries(), op.maps()};
}
template <class Real>
[[nodiscard]] Shape steps_shape(const OpTiles<Real>& op, const Geometry& g) {
  return {g.batch, g.heads, g.held_queries(), op.readout.step_columns(g)};
}

// Throws where the op, with its options, gives no steps; `name` says of what they were given.
template <class Real>
void require_steps(const OpTiles<Real>& op, const char* name, const std::string& where) {
  const char* why = op.readout.without_steps();
  require(why == nullptr, where, ": ", name, " was given, ", why ? why : "");
}

// A tensor of a call as its checks see it.
struct NamedMemory {
  TensorName name;
  bool given;
  MemoryView view, scales;  // scales: without elements unless its rows have some
};
template <class View>
[[nodiscard]] NamedMemory named_memory(const TensorName& name, const View& view) {
  MemoryView scales{};
  if constexpr (requires { view.scales(); }) scales = view.scales();
  return {name, view.given(), view, scales};
}

// All tensors of a set, or of inputs with the bias of their mask, and others behind them.
inline constexpr std::size_t kTensors = 7;
template <class Tensors, class Bias, class... Others>
[[nodiscard]] std::array<NamedMemory, kTensors + sizeof...(Others)> memory_of(
    const char* words, const Tensors& of, const Bias& bias, const Others&... others) {
  return {named_memory({words, "query"}, of.query),
          named_memory({words, "key"}, of.key),
          named_memory({words, "value"}, of.value),
          named_memory({words, "extra"}, of.extra),
          named_memory({words, "query_inputs"}, of.query_inputs),
          named_memory({words, "key_inputs"}, of.key_inputs),
          named_memory({words, "bias"}, bias),
          others...};
}
// All that a call reads.
template <class Real>
[[nodiscard]] auto memory_of(const Inputs<Real>& in, const Mask<Real>& mask) {
  return memory_of("", in, mask.bias, named_memory("the boolean mask", mask.allowed));
}
// What is written, or gradients or tangents of it.
template <class Element>
[[nodiscard]] std::array<NamedMemory, 3> memory_of(const char* words,
                                                   const OutputViews<Element>& of) {
  return {named_memory({words, "out"}, of.out), named_memory({words, "lse"}, of.lse),
          named_memory({words, "steps"}, of.steps)};
}
// Throws where memory that is written is part of another tensor.
inline void require_apart(const NamedMemory& out, const NamedMemory& input,
                          const std::string& where) {
  require(!may_overlap(out.view, input.view), where, ": ", out.name, " overlaps ", input.name);
  require(!may_overlap(out.view, input.scales), where, ": ", out.name, " overlaps the scales of ",
          input.name);
}
inline void require_apart(const NamedMemory& out, std::span<const NamedMemory> others,
                          const std::string& where) {
  for (const NamedMemory& other : others) require_apart(out, other, where);
}

template <class Real>
void check_outputs(const OpTiles<Real>& op, const Outputs<Real>& outputs, const Geometry& g,
                   const Inputs<Real>& in, const Mask<Real>& mask, const std::string& where) {
  const auto read = memory_of(in, mask);
  const auto written = memory_of("", outputs);
  const auto check = [&](std::size_t n, const Shape& shape) {
    require_output(written[n].view, shape, written[n].name, where);
    require_apart(written[n], read, where);
    require_apart(written[n], std::span(written).first(n), where);
  };
  check(0, g.out_shape());
  if (outputs.lse.given()) check(1, lse_shape(op, g));
  if (!outputs.steps.given()) return;
  require_steps(op, "steps", where);
  check(2, steps_shape(op, g));
}

// Throws unless each tensor that is given belongs to an input of the call, and has its shape.
template <class Real>
void check_tangents(std::span<const NamedMemory> tangents, const Inputs<Real>& in,
                    const Mask<Real>& mask, const std::string& where) {
  const auto read = memory_of(in, mask);
  for (std::size_t i = 0; i < kTensors; ++i) {
    if (!tangents[i].given) continue;
    require(read[i].given, where, ": ", tangents[i].name, " was given, the call has no ",
            read[i].name.input, std::string_view(read[i].name.input) == "extra" ? " input" : "");
    require_shape(tangents[i].view, read[i].view.shape, tangents[i].name, where);
  }
}

template <class Real>
void check_gradients(const Gradients<Real>& grads, const Inputs<Real>& in, const Mask<Real>& mask,
                     const StoredView<const Real>& out, const OutputGradients<Real>& output,
                     const std::string& where) {
  const auto read = memory_of(in, mask);
  const auto of_output = memory_of("grad_", output);
  const auto written = memory_of("grad_", grads, grads.bias);
  for (std::size_t i = 0; i < kTensors; ++i) {
    const NamedMemory& a = written[i];
    if (!a.given) continue;
    require(read[i].given, where, ": ", a.name, " was given, the call has no such input");
    require_output(a.view, read[i].view.shape, a.name, where);
    require_apart(a, read, where);
    require_apart(a, named_memory("out", out), where);
    require_apart(a, of_output, where);
    require_apart(a, std::span(written).subspan(i + 1), where);
  }
}

// Are these the rows that forward saves for such a call?
template <class Real>
void check_saved(const OpTiles<Real>& op, const Saved<Real>& saved, const CallStamp& call,
                 const std::string& where) {
  const NormaliserTraits& normaliser = op.normaliser.traits;
  const Geometry& g = call.geometry;
  const std::string difference = saved.stamp.difference(call);
  require(difference.empty(), where, ": saved ", difference);
  const auto check = [&](const std::vector<Real>& numbers, Index wanted, const char* what) {
    require(Index(numbers.size()) == wanted, where, ": saved holds ", numbers.size(), " ", what,
            ", the call needs ", wanted, "; it must come from forward() of the same op and inputs");
  };
  const Index rows = g.query_rows();
  check(saved.lse, normaliser.maps * rows, "log-sum-exps");
  check(saved.state, normaliser.streams ? normaliser.state_numbers * rows : 0, "states of rows");
  check(saved.mixed, op.readout.traits.saves_mixed ? rows * g.dim_v : 0, "mixed values");
}

// What backward() is given beside its inputs, of a call or of packed sequences.
template <class Real>
void check_backward(const OpTiles<Real>& op, const Geometry& g, const Inputs<Real>& in,
                    const Mask<Real>& mask, const StoredView<const Real>& out,
                    const OutputGradients<Real>& output, const Gradients<Real>& grads,
                    const std::string& where) {
  const Shape out_shape = g.out_shape();
  require_shape(out, out_shape, "out", where);
  require_shape(output.out, out_shape, "grad_out", where);
  if (output.lse.given()) {
    require(op.normaliser.traits.differentiates_lse, where,
            ": grad_lse was given, the op's normaliser has no derivative of lse "
            "(plug/normaliser.hpp)");
    require_shape(output.lse, lse_shape(op, g), "grad_lse", where);
  }
  if (output.steps.given()) {
    require_steps(op, "grad_steps", where);
    require_shape(output.steps, steps_shape(op, g), "grad_steps", where);
  }
  check_gradients(grads, in, mask, out, output, where);
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
