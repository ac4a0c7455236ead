// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a call will do, without doing it: its tiles, workers, scratch and flops, and what keeps it from the
// fastest path.
//
//   std::puts(heed::explain(op, geometry, mask).text().c_str());

#include <heed/engine/doors.hpp>
#include <heed/engine/schedule.hpp>

#include <sstream>
#include <string>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

enum class Pass : int { forward, backward };

struct Explanation {
  std::string instruction_set;  // that the headers were compiled for
  Index lanes = 0;              // queries per panel
  Index key_tile = 0;           // keys per tile
  Index group = 0;              // panels that share a pass over keys and values
  Index units = 0;              // units of work, handed out to the workers
  int workers = 0;
  int threads = 0;           // at most so many workers
  std::string threads_from;  // who says so: Options::threads, OpenMP's default, a CPU quota, ...
  double busy =
      1;  // backward: share of the workers' time in which they compute, had each a processor of its own
  Index scratch_bytes = 0;  // all workers, with derived values of keys and sums of gradients
  Index full_tiles = 0, partial_tiles = 0, skipped_tiles = 0;
  double visible_flops = 0;  // of the plain products, over the pairs in tiles that are not skipped
  double computed_flops =
      0;  // the same over the pairs that are computed, in whole vectors of queries
  std::vector<std::string> remarks;  // why not faster

  [[nodiscard]] std::string text() const {
    std::ostringstream out;
    out.exceptions(std::ios::badbit);  // else it swallows std::bad_alloc, and half of the text
    out << instruction_set << "; panels of " << lanes << " queries, " << group
        << " to a group, tiles of " << key_tile << " keys: " << full_tiles << " whole, "
        << partial_tiles << " masked, " << skipped_tiles << " skipped\n"
        << units << " units on " << workers << (workers == 1 ? " worker" : " workers") << " of "
        << threads << (threads == 1 ? " thread (" : " threads (") << threads_from << "), "
        << (scratch_bytes + 1023) / 1024 << " KiB of scratch, " << computed_flops * 1e-9
        << " GFLOP in products\n";
    for (const std::string& remark : remarks) out << "- " << remark << "\n";
    return out.str();
  }
};

namespace detail {

// Tiles of all panels by kind, and the products' flops in them.
template <class Real>
void count_tiles(const CallContext<Real>& c, Pass pass, Explanation& e) {
  const Geometry& g = c.geometry;
  const double per_pair = pass == Pass::forward ? 2.0 * double(g.dim_qk + g.dim_v)
                                                : 2.0 * double(3 * g.dim_qk + 2 * g.dim_v);
  Scratch<Real> none;
  Panel<Real> panel(c, none, pass == Pass::backward);
  for_each_row({g.batch, g.heads, c.plan.panels}, [&](Index b, Index h, Index p) {
    panel.move_to(b, h, p);
    for (Index t = 0; t < c.plan.tiles; ++t) {
      const PanelTile tile =
          panel.tile({t * c.plan.tile, std::min((t + 1) * c.plan.tile, g.len_kv)});
      if (tile.kind == TileKind::empty) {
        ++e.skipped_tiles;
        continue;
      }
      ++(tile.hides_pairs ? e.partial_tiles : e.full_tiles);
      e.visible_flops += per_pair * double(tile.at.keys * tile.at.rows);
      e.computed_flops += per_pair * computed_pairs<Real>(tile.at, c.plan.vectors);
    }
  });
}

template <class Real>
void remark(const CallContext<Real>& c, const Options& options, Index worker_bytes,
            Explanation& e) {
  const ScoreTraits& score = c.op.score.traits;
  const Geometry& g = c.geometry;
  const auto say = [&e](auto&&... parts) {
    std::ostringstream out;
    out.exceptions(std::ios::badbit);
    (out << ... << parts);
    e.remarks.push_back(out.str());
  };
  if (kRegisterBytes < 32 && sizeof(void*) == 8 && !kFusesMultiplyAdd)
    say("compiled without -march flags: registers of ", kRegisterBytes,
        " bytes and no fused multiply-add; -march=native is several times faster");
  if (e.units == 0) return say("nothing to compute");
  const Index last = g.len_q - (c.plan.panels - 1) * c.plan.lanes;
  if (last <= kFewRows<Real>)
    say("the last panel holds ", last, last == 1 ? " query" : " queries",
        ": products along the columns, which read each key and value once for four queries");
  else if (last < c.plan.lanes)
    say("the last panel fills ", last, " of ", c.plan.lanes, " lanes");
  if (!c.op.streams())
    say("the normaliser needs whole rows: scratch grows with len_kv",
        c.plan.vectors < kPanelVectors && g.len_q > c.plan.lanes && options.panel_vectors == 0
            ? ", and panels are narrow so that the rows stay in cache"
            : "");
  if (!score.plain && !score.has_vjp)
    say("the score has no score_vjp: backward differentiates it by dual numbers");
  const auto percent = [](double share) { return std::to_string(int(100 * share + 0.5)) + " %"; };
  if (c.plan.wide_tile > 0)
    say("tiles are ", c.plan.tile, " keys wide: the mask hides blocks, such tiles compute ",
        percent(c.plan.fraction), " of the pairs, ", c.plan.wide_tile, " keys would compute ",
        percent(c.plan.wide_fraction));
  else if (c.mask.has_allowed() && c.plan.fraction > 0.9)
    say("the boolean mask hides hardly a whole block of ", c.plan.tile, " keys by ", c.plan.lanes,
        " queries: hidden pairs are computed, too");
  else if (c.mask.has_rules() && c.plan.fraction > 0.9)
    say("the mask's function hides hardly a whole block of ", c.plan.tile, " keys by ",
        c.plan.lanes, " queries: hidden pairs are computed, too");
  if (c.mask.classifies_rules())
    say("the mask's function is asked about all pairs before the call: a BlockMask keeps what it "
        "says");
  if (c.mask.has_bias()) say("a bias is transposed tile by tile, and every tile counts as masked");
  if (c.mask.soft_cap() != Real(0)) say("a soft cap takes a tanh per pair");
  if (c.pair_products && g.len_q <= kFewRows<Real>)
    say("precision is mixed, but products for so few queries stay as they are");
  else if (c.pair_products && !kHasPairProducts)
    say("precision is mixed, but compiled without ", kPairProductsFlag,
        ": products of bfloat16 are put together from others, which is slower than float");
  if (c.dropout.rate > 0) say("dropout draws random bits for every pair");
  if (e.busy < 0.9) say("workers wait ", percent(1 - e.busy), " of the time");
  if (e.workers < e.threads) {
    if (e.units < e.threads)
      say("there are fewer units of work than threads (", e.units, " of ", e.threads, ")");
    else if (affordable_workers(e.threads, worker_bytes) < e.threads)
      say("scratch of ", worker_bytes / 1024, " KiB per worker is worth ", e.workers, " of ",
          e.threads, " workers");
    else
      say("the call is too small for more than ", e.workers, " of ", e.threads, " threads");
  }
}

// A call with a list of keys for each query.
template <class Real>
[[nodiscard]] Explanation explain_lists(const OpTiles<Real>& op, const OpVjps<Real>& vjps,
                                        const Geometry& g, const ListPairs& own,
                                        const BoundMask<Real>& bound, const Options& options) {
  const ListedKeys<Real> listed(op, g, own, bound, {}, options);
  Explanation e =
      Driver<Real>::explain(op, vjps, listed.geometry(), {}, Pass::forward, fold_heads(options));
  const Index bytes = e.scratch_bytes / std::max(1, e.workers);
  e.units = listed.count();
  e.workers = worker_count(options, listed.flops(), e.units, bytes);
  e.scratch_bytes = e.workers * bytes;
  e.visible_flops = e.computed_flops = listed.flops();
  e.remarks = {
      "each query has a list of keys of its own: it reads their rows one by one, and computes no "
      "other pair; panels and tiles are those of one query"};
  return e;
}

template <class Real>
Explanation Driver<Real>::explain(const OpTiles<Real>& op, const OpVjps<Real>& vjps,
                                  const Geometry& g, const Mask<Real>& mask, Pass pass,
                                  const Options& options) {
  const bool back = pass == Pass::backward;
  const std::string where = door_name("heed::explain", options.name);
  require_options<Real>(options, where);
  require_sizes(g, op.normaliser.query_heads(g.heads), where);
  op.validate(g, where.c_str());
  require_sources(op, g, where);
  const BoundMask<Real> bound(mask, g, where.c_str(), options.threads);
  if (!back && heads_fold(op, g, mask, bound, options.dropout)) {
    Explanation folded =
        explain(op, vjps, fold_heads(g), fold_heads(mask, bound, g), pass, fold_heads(options));
    folded.remarks.push_back("the heads of a group are taken for queries of one head");
    return folded;
  }
  const ListPairs* const own =
      back ? nullptr : takes_listed_keys(op, g, mask, bound, options.dropout);
  if (own) return explain_lists(op, vjps, g, *own, bound, options);
  DerivedKeys<Real> keys(op, g, {});
  const CallContext<Real> c = make_context(op, g, bound, Operands<Real>{}, keys, options,
                                           plan_call<Real>(op, g, bound, options, 0, back));
  Explanation e;
  e.instruction_set = instruction_set();
  e.lanes = c.plan.lanes;
  e.key_tile = c.plan.tile;
  e.group = c.plan.group;
  const ThreadCount threads = thread_count(options.threads);
  e.threads = threads.count;
  e.threads_from = threads.source;
  const Saved<Real> saved;
  std::optional<BackwardShared<Real>> shared;
  Index worker = 0;
  if (back) {
    e.units = g.batch * g.heads * c.groups_of(1);
    shared.emplace(c, vjps, saved, OutputGradientOperands<Real>{}, GradientOperands<Real>{},
                   threads.count);
    worker = scratch_elements<Real>(
        [&](Scratch<Real>& s) { return BackwardWorker<Real>(c, *shared, s); });
  } else {
    const Index groups = c.groups_of(g.group());
    const bool one_group = groups == 1, in_parts = one_group && op.normaliser.traits.mergeable;
    e.units = g.batch * g.kv_heads * groups;
    worker = scratch_elements<Real>([&](Scratch<Real>& s) {
      return ForwardWorker<Real>(c, {}, nullptr, one_group ? &keys : nullptr, s);
    });
    const Index parts = in_parts && e.units > 0 ? parts_of_keys(e.units, g.len_kv) : 1;
    e.units *= parts;
    if (parts > 1)
      e.remarks.push_back("the keys are read in " + std::to_string(parts) +
                          " parts, side by side, which are then joined");
  }
  const Index bytes = worker * Index(sizeof(Real));
  e.workers = worker_count(options, g, e.units, bytes);
  if (shared && e.workers > 1) e.busy = BackwardSchedule<Real>(c, *shared).busy(e.workers);
  e.scratch_bytes = e.workers * bytes + keys.bytes() + (shared ? shared->bytes(e.workers) : 0);
  if (e.units > 0) count_tiles(c, pass, e);
  remark(c, options, bytes, e);
  return e;
}

}  // namespace detail

// What forward() or backward() of `op` on inputs of these sizes will do. Throws as they do.
template <AttentionOp Op>
[[nodiscard]] Explanation explain(const Op& op, const Geometry& g,
                                  const Mask<typename Op::Scalar>& mask = {},
                                  Pass pass = Pass::forward, const Options& options = {}) {
  static_assert(check_attention_op<Op>());
  using Real = typename Op::Scalar;
  Explanation of_call;
  detail::Door<Op>::with_gradient(
      op, nullptr, [&](const OpTiles<Real>& tiles, const OpVjps<Real>& vjps, auto*) {
        of_call = detail::Driver<Real>::explain(tiles, vjps, g, mask, pass, options);
      });
  return of_call;
}

}  // namespace HEED_ABI
}  // namespace heed
