// SPDX-License-Identifier: Apache-2.0
// Instantiates every op, both ways and over float and double, and the functions around them.
// build.cmake includes all headers in front of it.
template <class T>
struct Mine {
  heed::Param<T> slope = T(0.5);
  static constexpr auto parameters = std::tuple{heed::named("slope", &Mine::slope)};
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return p[0] * heed::math::tanh(pair.logit) - heed::math::sqrt(1 + heed::distance(pair));
  }
};
// Rows as a formula.
template <class T>
struct Rows : heed::PlainRows {
  auto forward(const auto& row) const { return row.softmax(row.score()); }
};

// A score that no other file can name, with learnt rows by distance.
namespace {
template <class T>
struct Relative {
  heed::Param<T> rows = heed::Param<T>(std::vector<heed::Index>{1, 3, 4});
  std::vector<heed::Index> shape(const heed::Geometry& g) const { return {-1, -1, g.dim_qk}; }
  static constexpr auto parameters =
      std::tuple{heed::tensor("rows", &Relative::rows, &Relative::shape)};
  static constexpr auto relative_rows = &Relative::rows;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit + pair.table;
  }
};
}  // namespace

template <class Real>
struct Call {
  std::vector<Real> numbers = std::vector<Real>(16);
  heed::Shape shape{1, 2, 2, 4};
  heed::TensorView<Real> to{numbers.data(), shape};
  heed::TensorView<const Real> from = to;
  heed::Inputs<Real> in{from, from, from};
  heed::Packed<Real> packed{.queries = {0, 2}};
  heed::PackedInputs<Real> sequences{in, &packed};
  heed::Mask<Real> mask = heed::causal<Real>();
  heed::Saved<Real> saved;
  heed::Geometry sizes = heed::kSmallSizes;

  template <class Op>
  void both_ways(const Op& op) {
    Op grad = op;
    heed::forward(op, in, mask, to, &saved);
    heed::backward(op, in, mask, saved, to, from, {to}, &grad);
    heed::forward(op, sequences, mask, to, &saved);
    heed::backward(op, sequences, mask, saved, to, from, {to}, &grad);
    heed::jvp(op, in, mask, saved, to, {from}, to, &grad);
    heed::jvp(op, in, mask, {from}, to, to, &grad);
    (void)heed::measure_weights(op, in, mask, saved);
    (void)heed::explain(op, sizes, mask, heed::Pass::backward);
    (void)heed::reference::gradients(op, heed::reference::Problem<Real>{}, numbers);
  }
  // Instantiates the calls that only ops with one softmax have.
  template <class Op>
  void of_softmax(Op op) {
    both_ways(op);
    heed::hvp(op, in, mask, saved, to, from, {from}, {}, {to}, &op);
    (void)heed::forward_partial(op, in, mask);
    (void)heed::forward_partial(op, sequences, mask);
  }
  void all() {
    of_softmax(heed::OwnAttention<Mine, Real>{});
    of_softmax(heed::OwnAttention<Relative, Real>{});
    both_ways(heed::Attention<Real, heed::DotScore<Real>, Rows<Real>, heed::Identity<Real>>{});
    heed::for_each_variant<Real>(sizes, [&](const auto& variant) { both_ways(variant.op); });
    of_softmax(heed::ScaledDot<Real>{});
    of_softmax(heed::Dar<Real>{});
    auto model = heed::nn::make_gpt<Real>({}, [](heed::Index layer) {
      return heed::nn::attention_by_name<Real>("dar", 8, 2, layer);
    });
    heed::nn::initialise<Real>(model, 1);
    (void)heed::nn::make_dialectical_lm<Real>(8, 8, 4, 8, 4, {});
  }
  void on_ranks(const heed::mpi::AnyCommunicator& comm) {
    const heed::mpi::Sharding sharding{
        heed::mpi::Shards::contiguous(2, 1), {}, heed::mpi::Method::ring};
    heed::mpi::Saved<Real> kept;
    heed::mpi::forward(comm, heed::ScaledDot<Real>{}, in, mask, sharding, to, &kept);
    heed::mpi::backward(comm, heed::ScaledDot<Real>{}, in, mask, sharding, kept, to, from, {to});
  }
};

template struct Call<float>;
template struct Call<double>;

template class heed::KvCache<float>;
template class heed::KvCache<double>;
template class heed::KvPool<float>;
template class heed::KvPool<double>;

bool passes() {
  return heed::check_op(heed::Dar<float>{}).passed() &&
         heed::check_jvp(heed::Dar<float>{}).passed() &&
         heed::check_causality(heed::Dar<float>{}).causal();
}
