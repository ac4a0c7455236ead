// SPDX-License-Identifier: Apache-2.0
#pragma once

// One case, a function of its seed: an op, sizes, a mask of several parts, numbers, options, and
// numbers that must have no effect: NaN, infinities and huge numbers at places that the mask hides.

#include "fuzz/op.hpp"

#include <optional>
#include <sstream>
#include <string>
#include <vector>

namespace fuzz {

struct Case {
  std::uint64_t seed = 0;
  const OpEntry* entry = nullptr;
  std::unique_ptr<AnyOp> op;
  Plain<double> plain;           // the numbers of all tensors, floats
  std::vector<double> grad_out;  // (batch, heads, len_q, dim_v)
  heed::Options options;
  bool in_float = false;
  int more_threads = 0;          // a second run on so many threads must give the same bits; 0: none
  bool visible_garbage = false;  // NaN or infinity at visible places: forward only
  bool packed = false;           // query, key, value in one projection's memory
  bool wants[5] = {true, true, true, true, true};  // gradients of query, key, value, extra, bias

  [[nodiscard]] static Case drawn(std::uint64_t seed);
  [[nodiscard]] std::string text() const;
};

namespace detail {

inline Index draw_length(Draw& draw) {
  const double which = draw.uniform();
  if (which < 0.05) return 0;
  if (which < 0.18) return 1;
  if (which < 0.75) return draw.between(2, 18);
  return which < 0.96 ? draw.between(15, 40) : draw.between(41, 140);
}

// Most multiplications of a pass of plain attention.
inline constexpr Index kBudget = 40000;

inline Sizes draw_sizes(Draw& draw, Index cost) {
  Sizes s;
  s.batch = draw.chance(0.02) ? 0 : draw.between(1, 3);
  s.kv_heads = draw.between(1, 3);
  s.heads = s.kv_heads * draw.between(1, 4);
  if (draw.chance(0.02)) s.heads = 0, s.kv_heads = draw.below(2);
  s.len_q = draw_length(draw);
  s.len_kv = draw.chance(0.4) ? s.len_q : draw_length(draw);
  s.dim_qk = draw.pick<Index>({1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 33, 64});
  s.dim_v = draw.chance(0.5) ? s.dim_qk : draw.pick<Index>({1, 2, 3, 4, 5, 8, 10, 16, 19, 32, 65});
  const auto work = [&] {
    return cost * s.batch * s.heads * s.len_q * s.len_kv * (s.dim_qk + s.dim_v + 8);
  };
  while (work() > kBudget) {
    if (s.batch > 1 && draw.chance(0.5))
      --s.batch;
    else if (s.heads > s.kv_heads && draw.chance(0.4))
      s.heads -= s.kv_heads;
    else if (s.len_q == s.len_kv)
      s.len_q = s.len_kv = s.len_q * 3 / 4;
    else
      (s.len_q > s.len_kv ? s.len_q : s.len_kv) = std::max(s.len_q, s.len_kv) * 3 / 4;
  }
  s.query_heads = s.heads;
  return s;
}

template <class S, class F>
Broadcast4<S> draw_broadcast(Draw& draw, const Sizes& s, F&& number) {
  Broadcast4<S> all;
  all.batch = draw.chance(0.5) ? 1 : s.batch;
  all.heads = draw.chance(0.5) ? 1 : s.heads;
  all.len = draw.chance(0.25) ? 1 : s.len_q;
  all.keys = s.len_kv;
  for (Index n = 0; n < all.batch * all.heads * all.len * all.keys; ++n)
    all.numbers.push_back(number());
  return all;
}

inline PlainFunction draw_function(Draw& draw, const Sizes& s) {
  PlainFunction f;
  f.kind = PlainFunction::Kind(draw.below(4));
  f.number = f.kind == PlainFunction::near ? draw.below(30) : draw.between(1, 20);
  f.negated = draw.chance(0.2);
  f.kept = draw.chance(0.3);
  if (f.kind == PlainFunction::blocks) {
    const Index rows = (s.len_q + f.number - 1) / f.number,
                keys = (s.len_kv + f.number - 1) / f.number;
    const double shown = draw.uniform(0.1, 1);
    for (Index n = 0; n < rows * keys; ++n) f.numbers.push_back(draw.chance(shown));
    return f;
  }
  f.bottom_right = draw.chance(0.5);
  if (draw.chance(0.3)) f.offset = draw.between(-4, 4);
  if (f.kind == PlainFunction::values)
    for (Index n = 0; n < s.batch * s.len_kv; ++n) f.numbers.push_back(draw.below(5));
  return f;
}

// Draws functions from a stream of their own, so that the cases of tests/FAULTS.md without a function stay the same.
inline void draw_functions(PlainMask& mask, const Sizes& s, std::uint64_t seed) {
  Draw draw(seed, 14);
  for (double chance = 0.2; draw.chance(chance); chance = 0.35)
    mask.functions.push_back(draw_function(draw, s));
  mask.united = draw.chance(0.3);
}

// Draws the offset of slopes, also from a stream of its own.
inline void draw_slopes_offset(PlainMask& mask, std::uint64_t seed) {
  Draw draw(seed, 16);
  if (draw.chance(0.3)) mask.slopes_offset = draw.between(-4, 4);
}
inline void draw_place(Sizes& s, std::uint64_t seed) {
  Draw draw(seed, 15);
  if (draw.chance(0.3))
    s.first_query = draw.chance(0.5) ? std::max<Index>(0, s.len_kv - s.len_q) : draw.below(40);
}

inline PlainMask draw_mask(Draw& draw, const Sizes& s) {
  PlainMask mask;
  while (draw.chance(0.35)) {
    PlainBand band;
    if (draw.chance(0.5)) band.left = draw.below(9);
    if (band.left < 0 || draw.chance(0.5)) band.right = draw.chance(0.5) ? 0 : draw.below(7);
    band.bottom_right = draw.chance(0.5);
    if (draw.chance(0.3)) band.offset = draw.between(-4, 4);
    mask.bands.push_back(band);
  }
  if (draw.chance(0.2))
    for (Index b = 0; b < s.batch; ++b) mask.key_lengths.push_back(draw.between(0, s.len_kv));
  if (draw.chance(0.2)) {
    const double shown = draw.uniform(0.2, 1);
    mask.allowed = draw_broadcast<char>(draw, s, [&] { return char(draw.chance(shown)); });
  }
  if (draw.chance(0.15)) {
    const Index length = draw.between(1, 8);
    for (Index n = 0; n < s.batch * s.len_q; ++n)
      mask.query_documents.push_back(n % std::max<Index>(1, s.len_q) / length);
    for (Index n = 0; n < s.batch * s.len_kv; ++n)
      mask.key_documents.push_back(n % std::max<Index>(1, s.len_kv) / length);
  }
  if (draw.chance(0.15)) {
    for (Index h = 0; h < s.heads; ++h) mask.slopes.push_back(draw.number(-0.1, 0.6));
    mask.slopes_bottom_right = draw.chance(0.5);
  }
  if (draw.chance(0.15)) mask.soft_cap = draw.number(0.5, 5);
  return mask;
}

inline std::vector<double> draw_rows(Draw& draw, Index count, Index dim, double spread) {
  std::vector<double> numbers;
  const bool zeros = draw.chance(0.1);
  for (Index r = 0; r < count; ++r) {
    const bool zero = zeros && draw.chance(0.3);
    for (Index c = 0; c < dim; ++c)
      numbers.push_back(zero ? 0.0 : double(float(spread * draw.normal())));
  }
  return numbers;
}

inline double draw_garbage(Draw& draw) {
  return draw.pick({kNaN, kInf, -kInf, 3e38, -3e38, 1e30, -1e30});
}

// Rows of a tensor that meet no visible pair.
inline std::vector<char> blind_queries(const Plain<double>& p) {
  const Sizes& s = p.sizes;
  std::vector<char> blind(std::size_t(s.rows()), 1);
  for (Index b = 0; b < s.batch; ++b)
    for (Index h = 0; h < s.heads; ++h)
      for (Index i = 0; i < s.len_q; ++i)
        for (Index j = 0; j < s.len_kv; ++j)
          if (p.sees(b, h, i, j)) blind[std::size_t(s.row(b, h, i))] = 0;
  return blind;
}
inline std::vector<char> unseen_keys(const Plain<double>& p) {
  const Sizes& s = p.sizes;
  std::vector<char> unseen(std::size_t(s.batch * s.kv_heads * s.len_kv), 1);
  for (Index b = 0; b < s.batch; ++b)
    for (Index h = 0; h < s.heads; ++h)
      for (Index i = 0; i < s.len_q; ++i)
        for (Index j = 0; j < s.len_kv; ++j)
          if (p.sees(b, h, i, j))
            unseen[std::size_t((b * s.kv_heads + s.kv_of(h)) * s.len_kv + j)] = 0;
  return unseen;
}
// Numbers of the bias that no visible pair reads.
inline std::vector<char> unread_bias(const Plain<double>& p) {
  const Sizes& s = p.sizes;
  std::vector<char> unread(p.bias.numbers.size(), 1);
  for (Index b = 0; b < s.batch; ++b)
    for (Index h = 0; h < s.heads; ++h)
      for (Index i = 0; i < s.len_q; ++i)
        for (Index j = 0; j < s.len_kv; ++j)
          if (p.bias.given() && p.sees(b, h, i, j)) unread[p.bias.at(b, h, i, j)] = 0;
  return unread;
}

// Fills rows that `where` names.
inline void spoil(Draw& draw, std::vector<double>& numbers, const std::vector<char>& where,
                  Index dim) {
  for (std::size_t row = 0; row < where.size(); ++row)
    for (Index c = 0; where[row] && c < dim; ++c)
      if (draw.chance(0.7)) numbers[row * std::size_t(dim) + std::size_t(c)] = draw_garbage(draw);
}

inline void hide_garbage(Draw& draw, Case& c) {
  Plain<double>& p = c.plain;
  const Sizes& s = p.sizes;
  if (p.bias.given()) {
    // These numbers are read by pairs that another part of the mask hides.
    const std::vector<double> before = p.bias.numbers;
    p.bias.numbers.assign(before.size(), 0.0);
    const std::vector<char> unread = unread_bias(p);
    p.bias.numbers = before;
    spoil(draw, p.bias.numbers, unread, 1);
  }
  const std::vector<char> unseen = unseen_keys(p), blind = blind_queries(p);
  if (!c.op->reads_own_rows) {
    spoil(draw, p.key, unseen, s.dim_qk);
    spoil(draw, p.value, unseen, s.dim_v);
  }
  if (!c.op->reads_query && s.query_heads == s.heads && c.op->maps == 1)
    spoil(draw, p.query, blind, s.dim_qk);
}

inline void show_garbage(Draw& draw, Case& c) {
  Plain<double>& p = c.plain;
  const auto put = [&](std::vector<double>& numbers, double x) {
    if (!numbers.empty()) numbers[std::size_t(draw.below(Index(numbers.size())))] = x;
  };
  const bool infinite = c.op->softmax_rows;
  const auto garbage = [&] { return infinite ? draw.pick({kNaN, kInf, -kInf}) : kNaN; };
  put(p.value, draw.pick({kNaN, kInf, -kInf}));
  if (draw.chance(0.6)) put(p.key, garbage());
  if (draw.chance(0.6)) put(p.query, garbage());
  if (infinite && p.bias.given() && draw.chance(0.3)) put(p.bias.numbers, draw.pick({kNaN, kInf}));
}

}  // namespace detail

inline Case Case::drawn(std::uint64_t seed) {
  Draw draw(seed);
  Case c;
  c.seed = seed;
  c.entry = &op_list()[std::size_t(draw.below(Index(op_list().size())))];
  Plain<double>& p = c.plain;
  Sizes& s = p.sizes;
  s = detail::draw_sizes(draw, c.entry->cost);
  c.op = c.entry->draw(draw, s);
  p.params = c.op->params();
  c.in_float = draw.chance(0.5);

  p.mask = detail::draw_mask(draw, s);
  detail::draw_functions(p.mask, s, seed);
  detail::draw_slopes_offset(p.mask, seed);
  detail::draw_place(s, seed);
  if (c.op->reads_own_rows) s.first_query = std::min(s.first_query, s.len_kv - s.len_q);
  if (draw.chance(0.3)) {
    const double hidden = draw.chance(0.5) ? draw.uniform(0, 0.6) : 0;
    p.bias = detail::draw_broadcast<double>(
        draw, s, [&] { return draw.chance(hidden) ? -kInf : draw.normal(); });
  }
  const double spread = draw.pick({1.0, 1.0, 0.1, 2.0});
  p.query = detail::draw_rows(draw, s.batch * s.query_heads * s.len_q, s.dim_qk, spread);
  p.key = detail::draw_rows(draw, s.batch * s.kv_heads * s.len_kv, s.dim_qk, spread);
  p.value = detail::draw_rows(draw, s.batch * s.kv_heads * s.len_kv, s.dim_v, 1);
  p.extra = detail::draw_rows(draw, s.rows(), s.extra, 1);
  c.grad_out = detail::draw_rows(draw, s.rows(), s.dim_v, 1);

  const bool whole = s.query_heads == 2 * s.heads || c.op->maps == 1;
  p.scale = 1 / std::sqrt(double(whole ? s.dim_qk : s.dim_qk / 2));
  if (draw.chance(0.3)) c.options.scale = p.scale = draw.pick({1.0, 0.0, -0.5, 0.125, 1e-3});
  c.options.threads = 1;
  c.options.key_tile = draw.pick<Index>({0, 0, 1, 8, 16, 33, 64});
  c.options.panel_vectors = int(draw.below(heed::kPanelVectors + 1));
  if (draw.chance(0.1)) {
    c.options.dropout = {draw.uniform(0.05, 0.7), seed};
    p.keep_factor = 1 / (1 - c.options.dropout.rate);
    for (Index b = 0; b < s.batch; ++b)
      for (Index h = 0; h < s.heads; ++h)
        for (Index i = 0; i < s.len_q; ++i)
          for (Index j = 0; j < s.len_kv; ++j)
            p.kept.push_back(
                char(heed::keeps(c.options.dropout.rate,
                                 c.options.dropout.row_keys(b, h).bits(std::uint64_t(i)), j)));
  }
  if (draw.chance(0.4)) c.more_threads = int(draw.between(2, 3));
  c.packed =
      draw.chance(0.3) && s.query_heads == s.kv_heads && s.len_q == s.len_kv && s.dim_qk == s.dim_v;
  if (draw.chance(0.1))
    for (bool& want : c.wants) want = draw.chance(0.6);
  c.visible_garbage = draw.chance(0.06) && c.op->plain_rows && p.kept.empty() && spread <= 1 &&
                      !c.options.scale;  // else weights vanish in float
  if (draw.chance(0.4)) detail::hide_garbage(draw, c);
  if (c.visible_garbage) detail::show_garbage(draw, c);
  if (c.in_float && !c.visible_garbage && draw.chance(0.3))
    c.options.precision = heed::Precision::mixed;
  return c;
}

inline std::string Case::text() const {
  const Sizes& s = plain.sizes;
  std::ostringstream text;
  text << entry->name << (op->settings.empty() ? "" : " (" + op->settings + ")") << " in "
       << (in_float ? "float" : "double") << ", batch " << s.batch << ", heads " << s.heads
       << " (query " << s.query_heads << ", kv " << s.kv_heads << "), len_q " << s.len_q
       << ", len_kv " << s.len_kv << ", first_query " << s.first_query << ", dim_qk " << s.dim_qk
       << ", dim_v " << s.dim_v << ", scale " << plain.scale << ", tiles " << options.key_tile
       << "/" << options.panel_vectors;
  for (const PlainBand& band : plain.mask.bands)
    text << ", band " << band.left << " " << band.right
         << (band.bottom_right ? " bottom right" : "") << " offset " << band.offset;
  if (!plain.mask.key_lengths.empty()) text << ", key lengths";
  if (plain.mask.allowed.given()) text << ", boolean";
  for (const PlainFunction& f : plain.mask.functions) {
    const char* const names[] = {"near", "modulo", "values", "blocks"};
    text << (plain.mask.united && &f != plain.mask.functions.data() ? " | " : ", ")
         << (f.negated ? "not " : "") << names[f.kind] << " " << f.number
         << (f.bottom_right ? " bottom right" : "") << " offset " << f.offset
         << (f.kept ? " kept" : "");
  }
  if (plain.bias.given())
    text << ", bias (" << plain.bias.batch << "," << plain.bias.heads << "," << plain.bias.len
         << ")";
  if (!plain.mask.query_documents.empty()) text << ", documents";
  if (!plain.mask.slopes.empty()) text << ", alibi offset " << plain.mask.slopes_offset;
  if (plain.mask.soft_cap != 0) text << ", soft cap " << plain.mask.soft_cap;
  if (!plain.kept.empty()) text << ", dropout";
  if (options.precision.mixes()) text << ", mixed precision";
  if (packed) text << ", packed";
  if (visible_garbage) text << ", NaN or infinity in sight";
  return text.str();
}

}  // namespace fuzz
