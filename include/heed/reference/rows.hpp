// SPDX-License-Identifier: Apache-2.0
#pragma once

// Problem, the input of the reference (reference.hpp) in dense memory over any scalar S, and MapScores, which computes the
// score of each pair in plain loops, with the features of both rows that the op's score asks for:
//
//   logit_ij = scale q_i . k_j,  or  cap tanh(scale q_i . k_j / cap)
//   score_ij = op's score(pair) - slope_h |p_i - j| + bias(b, h, i, j)

#include <heed/autodiff/tape.hpp>
#include <heed/core/dropout.hpp>
#include <heed/core/scalar.hpp>
#include <heed/mask/bound_mask.hpp>
#include <heed/plug/attention.hpp>
#include <heed/plug/feature_calls.hpp>
#include <heed/plug/token_inputs.hpp>
#include <heed/plug/transform.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace reference {

// The inputs of one attention call, dense (batch, heads, len, dim).
template <class S>
struct Problem {
  Geometry geometry;
  std::vector<S> query;  // (batch, query_heads, len_q, dim_qk)
  std::vector<S> key;    // (batch, kv_heads, len_kv, dim_qk)
  std::vector<S> value;  // (batch, kv_heads, len_kv, dim_v)
  std::vector<S> extra;  // (batch, heads, len_q, op.extra_dim), for ops that have one
  // A bias that is differentiated: (batch or 1, heads or 1, len_q or 1, len_kv). If it is given,
  // mask.bias is not read. A bias of -infinity hides its pair.
  std::vector<S> bias;
  Shape bias_shape;
  // Visibility, ALiBi slopes and soft cap; its views must outlive the problem.
  Mask<double> mask;
  std::optional<double> scale;  // default_scale when empty
  Dropout dropout = {};
  // Numbers of tokens, (batch, heads, kv_heads or 1, len_q or len_kv, n), for ops whose parts read them.
  std::vector<S> query_inputs = {}, key_inputs = {};
  Shape query_inputs_shape = {}, key_inputs_shape = {};
};

// 1 / sqrt(width of one map).
template <class Op>
[[nodiscard]] double default_scale(const Op& op, const Geometry& g) {
  const bool has_heads = g.heads > 0 && g.kv_heads > 0;
  return 1.0 / std::sqrt(double(has_heads ? op.normaliser.source(g, 0, 0).width : g.dim_qk));
}

// The same numbers over another scalar: U(x) for every x.
template <class U, class S>
[[nodiscard]] Problem<U> cast_problem(const Problem<S>& problem) {
  const auto cast = [](const std::vector<S>& x) { return std::vector<U>(x.begin(), x.end()); };
  return {problem.geometry,
          cast(problem.query),
          cast(problem.key),
          cast(problem.value),
          cast(problem.extra),
          cast(problem.bias),
          problem.bias_shape,
          problem.mask,
          problem.scale,
          problem.dropout,
          cast(problem.query_inputs),
          cast(problem.key_inputs),
          problem.query_inputs_shape,
          problem.key_inputs_shape};
}

// Sets the problem's mask to a mask over any type. The mask's bias is copied into problem.bias, so that gradients
// include it; its boolean mask stays a view.
template <class S, class Real>
void use_mask(Problem<S>& problem, const Mask<Real>& mask) {
  std::optional<std::vector<double>> slopes;
  if (mask.slopes) slopes.emplace(mask.slopes->begin(), mask.slopes->end());
  problem.mask = Mask<double>{mask.bands,
                              mask.key_ranges,
                              mask.key_lengths,
                              mask.allowed,
                              {},
                              mask.query_documents,
                              mask.key_documents,
                              std::move(slopes),
                              mask.slope_align,
                              mask.slope_offset,
                              double(mask.soft_cap),
                              mask.rules};
  problem.bias.clear();
  problem.bias_shape = mask.bias.shape();
  for_each_row(problem.bias_shape, [&](Index b, Index h, Index i) {
    for (Index j = 0; j < problem.bias_shape.dim; ++j)
      problem.bias.push_back(S(mask.bias(b, h, i, j)));
  });
}

// What an op asks of the sizes of a problem.
struct OpSizes {
  Index query_heads, extra_dim;
  Index query_inputs, key_inputs;  // columns
  bool sums_inputs;
};
template <class Op>
[[nodiscard]] OpSizes sizes_of(const Op& op, const Geometry& g) {
  return {op.normaliser.query_heads(g.heads), op.extra_dim(g), InputColumns<Op>::query,
          InputColumns<Op>::key, sums_inputs<typename Op::ScoreType>};
}

// Throws unless the sizes of all tensors agree with the geometry and the op.
template <class S>
void require_sizes(const OpSizes& op, const Problem<S>& problem, const char* where) {
  const Geometry& g = problem.geometry;
  require(g.batch >= 0 && g.heads >= 0 && g.kv_heads >= 0 && g.len_q >= 0 && g.len_kv >= 0, where,
          ": an extent of the geometry is negative");
  require(g.dim_qk > 0 && g.dim_v > 0, where, ": dim_qk is ", g.dim_qk, " and dim_v is ", g.dim_v,
          ", both must be positive");
  require(g.first_query >= 0, where, ": first_query is ", g.first_query,
          ", it must not be negative");
  const bool divides = g.heads == 0 || (g.kv_heads > 0 && g.heads % g.kv_heads == 0);
  require(divides, where, ": kv_heads is ", g.kv_heads, ", it must divide heads, ", g.heads);
  require(g.query_heads == op.query_heads, where, ": query_heads is ", g.query_heads,
          ", the op needs ", op.query_heads);
  const auto check = [where](const std::vector<S>& tensor, const Shape& shape, const char* name) {
    require(Index(tensor.size()) == element_count(shape, where), where, ": ", name, " has ",
            tensor.size(), " numbers, its shape is ", shape);
  };
  check(problem.query, {g.batch, g.query_heads, g.len_q, g.dim_qk}, "query");
  check(problem.key, {g.batch, g.kv_heads, g.len_kv, g.dim_qk}, "key");
  check(problem.value, {g.batch, g.kv_heads, g.len_kv, g.dim_v}, "value");
  check(problem.extra, {g.batch, g.heads, g.len_q, op.extra_dim}, "extra");
  check(problem.bias, problem.bias_shape, "bias");
  const auto check_inputs = [&](const std::vector<S>& inputs, const Shape& shape, Index len,
                                Index count, const char* name) {
    check(inputs, shape, name);
    const bool fits = shape == Shape{g.batch, shape.heads, len, count} &&
                      (shape.heads == g.heads || shape.heads == g.kv_heads || shape.heads == 1);
    require(count == 0 ? inputs.empty() : fits, where, ": ", name, " has shape ", shape,
            ", the op reads ", Shape{g.batch, g.heads, len, count}, ", or of 1 or ", g.kv_heads,
            " heads");
  };
  check_inputs(problem.query_inputs, problem.query_inputs_shape, g.len_q, op.query_inputs,
               "query_inputs");
  check_inputs(problem.key_inputs, problem.key_inputs_shape, g.len_kv, op.key_inputs, "key_inputs");
  require(!op.sums_inputs || g.query_position(g.len_q) <= g.len_kv, where,
          ": sums over tokens are read at those of the queries; first_query is ", g.first_query,
          ", len_q is ", g.len_q, ", len_kv is ", g.len_kv);
  if (!problem.bias.empty()) require_mask_shape(problem.bias_shape, g, "bias", where);
}

// The op over another scalar, as cast_op() makes it. Throws if the conversion lost a fixed projection of the score.
template <class U, class Op>
[[nodiscard]] typename Op::template rebind<U> cast_whole_op(const Op& op) {
  auto cast = cast_op<U>(op);
  if constexpr (Op::ScoreType::has_projection)
    require(cast.score.projection().shape() == op.score.projection().shape(),
            "cast_op: the projection of the score has ", op.score.projection().size(), " numbers, ",
            cast.score.projection().size(), " after the cast");
  return cast;
}

// Index of the first number of row (b, h, i) of a dense tensor; extents of 1 are broadcast.
[[nodiscard]] inline Index broadcast_row_begin(const Shape& s, Index b, Index h, Index i) {
  const Index batch = s.batch == 1 ? 0 : b, head = s.heads == 1 ? 0 : h, row = s.len == 1 ? 0 : i;
  return ((batch * s.heads + head) * s.len + row) * s.dim;
}

// The numbers of token t that head h reads, of inputs of shape s.
template <class S>
[[nodiscard]] const S* inputs_of(const std::vector<S>& inputs, const Shape& s, const Geometry& g,
                                 Index b, Index h, Index t) {
  return inputs.data() + ((b * s.heads + h * s.heads / g.heads) * s.len + t) * s.dim;
}
// Some columns of them.
template <class S>
[[nodiscard]] std::vector<S> inputs_of(const std::vector<S>& inputs, const Shape& s,
                                       const Geometry& g, Index b, Index h, Index t,
                                       const ColumnRange& columns) {
  const S* first = inputs_of(inputs, s, g, b, h, t) + columns.first;
  return {first, first + columns.count};
}
// Columns of the numbers of all queries' tokens, (batch, heads, len_q, columns.count).
template <class S>
[[nodiscard]] std::vector<S> query_columns(const Problem<S>& problem, const ColumnRange& columns) {
  const Geometry& g = problem.geometry;
  std::vector<S> all;
  if (columns.count == 0) return all;
  for_each_row(g.out_shape(), [&](Index b, Index h, Index t) {
    for (const S& number :
         inputs_of(problem.query_inputs, problem.query_inputs_shape, g, b, h, t, columns))
      all.push_back(number);
  });
  return all;
}

// One row of a map's columns, as it is handed to the feature functions of a score.
template <class S>
struct Row {
  using Scalar = S;
  const S* first = nullptr;
  Index width = 0;
  std::vector<S> by_projection, by_table;
  std::vector<S> transformed;  // replaces `first` if the score has a transform
  Index position = 0, seen = 0;
  const S* inputs = nullptr;

  [[nodiscard]] Index dim() const { return width; }
  [[nodiscard]] Index rank() const { return Index(by_projection.size()); }
  [[nodiscard]] Index table_rows() const { return Index(by_table.size()); }
  [[nodiscard]] const S* numbers() const {
    return transformed.empty() ? first : transformed.data();
  }
  [[nodiscard]] S x(Index c) const { return numbers()[c]; }
  [[nodiscard]] S projected(Index c) const { return by_projection[std::size_t(c)]; }
  [[nodiscard]] S table(Index m) const { return by_table[std::size_t(m)]; }
  [[nodiscard]] S index() const { return math::constant<S>(double(position)); }
  [[nodiscard]] S visible() const { return math::constant<S>(double(seen)); }
  [[nodiscard]] S input(Index c) const { return inputs[c]; }
};

// A row that a score's transform overwrites.
template <class S>
struct RowInPlace {
  using Scalar = S;
  std::vector<S>& numbers;
  Index position;

  [[nodiscard]] Index dim() const { return Index(numbers.size()); }
  [[nodiscard]] const S& operator()(Index c) const { return numbers[std::size_t(c)]; }
  void set(Index c, const S& x) const { numbers[std::size_t(c)] = x; }
  [[nodiscard]] S index() const { return math::constant<S>(double(position)); }
};

// The pairs of one head as the mask and the problem change them, the same for every op.
template <class S>
class HeadPairs {
 public:
  HeadPairs(const Problem<S>& problem, const BoundMask<double>& mask, Index b, Index h)
      : problem_(problem), mask_(mask), b_(b), h_(h) {}

  [[nodiscard]] std::vector<Index> visible_keys(Index i) const {
    std::vector<Index> keys;
    for (Index j = 0; j < problem_.geometry.len_kv; ++j)
      if (mask_.visible(b_, h_, i, j) && !hidden_by_bias(i, j)) keys.push_back(j);
    return keys;
  }
  // The numbers of token t that the head reads, beginning with the score's.
  [[nodiscard]] const S* inputs_of(const std::vector<S>& inputs, const Shape& s, Index t) const {
    return reference::inputs_of(inputs, s, problem_.geometry, b_, h_, t);
  }
  [[nodiscard]] S capped(const S& logit) const {
    if (mask_.soft_cap() == 0) return logit;
    const S cap = math::constant<S>(mask_.soft_cap());
    return cap * math::tanh(S(logit / cap));
  }
  [[nodiscard]] S with_bias(S score, Index i, Index j) const {
    if (mask_.has_slopes()) {
      const double distance = std::abs(double(i + mask_.slope_shift() - j));
      score = score - math::constant<S>(mask_.slope(h_)) * math::constant<S>(distance);
    }
    if (!problem_.bias.empty()) return score + bias(i, j);
    if (mask_.has_bias()) return score + math::constant<S>(mask_.bias_row(b_, h_, i)[j]);
    return score;
  }

 private:
  [[nodiscard]] const S& bias(Index i, Index j) const {
    return problem_.bias[std::size_t(broadcast_row_begin(problem_.bias_shape, b_, h_, i) + j)];
  }
  [[nodiscard]] bool hidden_by_bias(Index i, Index j) const {
    return !problem_.bias.empty() &&
           double(math::value_of(bias(i, j))) == -std::numeric_limits<double>::infinity();
  }

  const Problem<S>& problem_;
  const BoundMask<double>& mask_;
  Index b_, h_;
};

// The scores that map `map` of head h in batch b gives to its pairs. Rows are prepared when they are first needed, so that
// a key that no query sees is never read. The op, the problem and the mask must outlive it.
template <class Score, class S>
class MapScores {
  template <int Features>
  struct Side {
    Row<S> row;
    std::array<S, std::size_t(Features)> features{};
  };
  using DerivedQueries = Side<Score::query_features>;
  using DerivedKeys = Side<Score::key_features>;

 public:
  template <class Op>
  MapScores(const Op& op, const Problem<S>& problem, const BoundMask<double>& mask, Index b,
            Index h, int map)
      : MapScores(op.score, op.normaliser.source(problem.geometry, h, map),
                  problem.scale.value_or(default_scale(op, problem.geometry)), problem, mask, b,
                  h) {}

  // Makes query i the current one, which pair() and operator() read.
  void take_query(Index i) {
    const Geometry& g = problem_.geometry;
    const Index row = (b_ * g.query_heads + source_.query_head) * g.len_q + i;
    i_ = i;
    position_ = g.query_position(i);
    query_.row = row_at(RowSide::query,
                        problem_.query.data() + row * g.dim_qk + source_.query_column, position_);
    if constexpr (sums_inputs<Score>)
      query_.row.inputs = sum_up_to(position_);
    else if constexpr (query_inputs_of<Score> > 0)
      query_.row.inputs = pairs_.inputs_of(problem_.query_inputs, problem_.query_inputs_shape, i);
    if constexpr (Score::counts_visible) query_.row.seen = Index(pairs_.visible_keys(i).size());
    heed::detail::features_of<heed::detail::OfQueries>(score_, query_.row, scalars_,
                                                       query_.features.data());
  }

  // The score that is normalised, for the current query and a key that it sees.
  [[nodiscard]] S operator()(Index j) {
    return pairs_.with_bias(score_.score(pair(j), scalars_), i_, j);
  }

  [[nodiscard]] const ScalarsOf<Score, S>& scalars() const { return scalars_; }
  // The numbers that the op's score reads for the current query and key j.
  [[nodiscard]] PairOf<Score, S> pair(Index j) {
    const DerivedKeys& key = derived_keys(j);
    PairOf<Score, S> pair;
    pair.dot = dot(key);
    pair.logit = pairs_.capped(math::constant<S>(scale_) * pair.dot);
    pair.projected = heed::dot(query_.row.by_projection.data(), 1, key.row.by_projection.data(), 1,
                               key.row.rank());
    pair.query = query_.features;
    pair.key = key.features;
    if constexpr (table_by_distance<Score>)
      pair.table = query_.row.table(table_row(score_, position_, j));
    else if constexpr (Score::has_table)
      pair.table = query_.row.table(category(key));
    if constexpr (Score::has_positions) {
      const Param<S>& table = score_.*Score::positions;
      pair.position = table[position_row(table, h_) + bucket_of(score_, position_, j)];
    }
    pair.query_index = math::constant<S>(double(position_));
    pair.key_index = math::constant<S>(j);
    return pair;
  }

  // |scale| sum_c |q_c k_jc| for the current query and key j.
  [[nodiscard]] double absolute_logit(Index j) {
    const DerivedKeys& key = derived_keys(j);
    const auto value = [](const S& x) { return double(math::value_of(x)); };
    double sum = 0;
    if constexpr (Score::numbers_per_column > 0)
      for (Index c = 0; c < columns(); ++c) sum += std::abs(value(column(key, c)));
    else
      for (Index c = 0; c < source_.width; ++c)
        sum += std::abs(value(query_.row.x(c)) * value(key.row.x(c)));
    return std::abs(scale_) * sum;
  }

 private:
  MapScores(const Score& score, const Source& source, double scale, const Problem<S>& problem,
            const BoundMask<double>& mask, Index b, Index h)
      : score_(score),
        problem_(problem),
        pairs_(problem, mask, b, h),
        source_(source),
        scale_(scale),
        b_(b),
        h_(h),
        keys_(std::size_t(problem.geometry.len_kv)) {
    for (int i = 0; i < scalars_of<Score>; ++i)
      scalars_[std::size_t(i)] = scalar_of<S>(score, i, h);
    prepare_shared();
  }

  // q . k, or the sum over the columns.
  [[nodiscard]] S dot(const DerivedKeys& key) const {
    if constexpr (Score::numbers_per_column > 0)
      return math::dot_product(
          columns(), [&](Index c) { return column(key, c); },
          [](Index) { return math::constant<S>(1); });
    else
      return heed::dot(query_.row.numbers(), 1, key.row.numbers(), 1, source_.width);
  }
  [[nodiscard]] Index columns() const requires(Score::numbers_per_column > 0) {
    return source_.width / Score::numbers_per_column;
  }
  [[nodiscard]] S column(const DerivedKeys& key, Index c) const
      requires(Score::numbers_per_column > 0) {
    std::array<S, std::size_t(Score::numbers_per_column)> q, k;
    for (std::size_t n = 0; n < q.size(); ++n) {
      q[n] = query_.row.x(Index(n) * columns() + c);
      k[n] = key.row.x(Index(n) * columns() + c);
    }
    std::array<S, std::size_t(Score::weights_per_column)> w;
    if constexpr (Score::weights_per_column > 0) {
      const Param<S>& weights = score_.*Score::column_weights;
      const Index first = weights.extent(0) == 1 ? 0 : h_ * weights.extent(1) * columns();
      for (std::size_t m = 0; m < w.size(); ++m) w[m] = weights[first + Index(m) * columns() + c];
    }
    return score_.template column<S>(q, k, w);
  }
  // Sums of the score's summands over tokens 0 ... t.
  [[nodiscard]] const S* sum_up_to(Index t) const { return sums_.data() + t * kInputs; }

  // Prepares the projection, the table and sums over tokens, which all rows of the head share.
  void prepare_shared() {
    if constexpr (Score::has_projection) {
      projection_ = &score_.projection();
      if (projection_->given()) {
        rank_ = projection_->extent(1);
        require(projection_->extent(0) == source_.width, "reference: the projection has ",
                projection_->extent(0), " rows, a map is ", source_.width, " wide");
      }
    }
    if constexpr (Score::has_table) {
      table_rows_ = score_.table_size();
      table_.assign(std::size_t(table_rows_ * source_.width), math::constant<S>(0));
      score_.prepare_table(h_, source_.width, table_.data());
    }
    if constexpr (sums_inputs<Score>) {
      std::vector<S> sum(std::size_t(kInputs), math::constant<S>(0));
      for (Index t = 0; t < problem_.geometry.len_kv; ++t) {
        const S* x = pairs_.inputs_of(problem_.key_inputs, problem_.key_inputs_shape, t);
        for (std::size_t c = 0; c < sum.size(); ++c) sum[c] = sum[c] + score_.summand(x[c]);
        sums_.insert(sums_.end(), sum.begin(), sum.end());
      }
    }
  }

  [[nodiscard]] Row<S> row_at([[maybe_unused]] RowSide side, const S* first, Index position) const {
    Row<S> row{first, source_.width, {}, {}, {}, position};
    if constexpr (Score::has_transform) {
      row.transformed.assign(first, first + source_.width);
      score_.transform(side, h_, RowInPlace<S>{row.transformed, position});
    }
    const S* const x = row.numbers();
    for (Index c = 0; c < rank_; ++c)
      row.by_projection.push_back(heed::dot(x, 1, projection_->data() + c, rank_, source_.width));
    const bool reads_table = side == RowSide::query || !table_by_distance<Score>;
    for (Index m = 0; reads_table && m < table_rows_; ++m)
      row.by_table.push_back(heed::dot(x, 1, table_.data() + m * source_.width, 1, source_.width));
    return row;
  }

  [[nodiscard]] const DerivedKeys& derived_keys(Index j) {
    auto& side = keys_[std::size_t(j)];
    if (!side) {
      const Geometry& g = problem_.geometry;
      const Index row = (b_ * g.kv_heads + source_.kv_head) * g.len_kv + j;
      side.emplace();
      side->row =
          row_at(RowSide::key, problem_.key.data() + row * g.dim_qk + source_.key_column, j);
      if constexpr (sums_inputs<Score>)
        side->row.inputs = sum_up_to(j);
      else if constexpr (key_inputs_of<Score> > 0)
        side->row.inputs = pairs_.inputs_of(problem_.key_inputs, problem_.key_inputs_shape, j);
      heed::detail::features_of<heed::detail::OfKeys>(score_, side->row, scalars_,
                                                      side->features.data());
    }
    return *side;
  }

  // The row of the table that belongs to a key: its feature 0, a whole number.
  [[nodiscard]] Index category(const DerivedKeys& key) const {
    const double number = double(math::value_of(key.features[0]));
    require(number >= 0 && number < double(table_rows_), "reference: the category of a key is ",
            number, ", it must lie in [0, ", table_rows_, ")");
    return Index(number);
  }

  const Score& score_;
  const Problem<S>& problem_;
  HeadPairs<S> pairs_;
  Source source_;
  double scale_;
  Index b_, h_, i_ = 0;  // the current query: its row,
  Index position_ = 0;   // and its position
  ScalarsOf<Score, S> scalars_{};
  const Param<S>* projection_ = nullptr;
  Index rank_ = 0, table_rows_ = 0;
  std::vector<S> table_;  // (table_rows_, width)
  static constexpr Index kInputs = key_inputs_of<Score>;
  std::vector<S> sums_;  // (len_kv, kInputs)
  DerivedQueries query_;
  std::vector<std::optional<DerivedKeys>> keys_;
};

template <class Op, class S>
MapScores(const Op&, const Problem<S>&, const BoundMask<double>&, Index, Index, int)
    -> MapScores<typename Op::ScoreType, S>;

}  // namespace reference
}  // namespace HEED_ABI
}  // namespace heed
