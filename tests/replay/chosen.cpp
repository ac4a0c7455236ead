// SPDX-License-Identifier: Apache-2.0
// Keys chosen per query: lists that the case holds, and choices by scores, which must be those of the case.

#include "run.hpp"

#include <heed/measure/index_loss.hpp>
#include <heed/measure/select.hpp>
#include <heed/ops/dar.hpp>
#include <heed/ops/scaled_dot.hpp>

#include <optional>

namespace heed_test {

namespace {

// (batch, heads, rows, blocks) of 0 and 1 as lists.
heed::BlockLists lists_of(const GoldenCase& golden, const std::string& name, Index query_block,
                          Index key_block) {
  const heed::Shape s = golden.shape(name);
  heed::BlockLists lists{query_block, key_block, {0}, {}, s.batch, s.heads};
  const std::vector<double>& keep = golden.tensor(name);
  for (Index row = 0; row < s.batch * s.heads * s.len; ++row) {
    for (Index k = 0; k < s.dim; ++k)
      if (keep[std::size_t(row * s.dim + k)] != 0) lists.indices.push_back(k);
    lists.start.push_back(Index(lists.indices.size()));
  }
  return lists;
}

// The case's tensors as inputs, which must not outlive `memory`.
struct CaseInputs {
  std::vector<double> query, key;
  heed::Inputs<double> in;
  explicit CaseInputs(const GoldenCase& golden)
      : query(golden.tensor("q")), key(golden.tensor("k")) {
    in.query = heed::TensorView<const double>(query.data(), golden.shape("q"));
    in.key = heed::TensorView<const double>(key.data(), golden.shape("k"));
    in.first_query = golden.geometry().first_query;
  }
};

void check_plain(const GoldenCase& golden, Report& report) {
  check_with_lse(golden, {}, report, []<class T>() { return heed::ScaledDot<T>{}; });
}
// The choice must be that of the case.
void check_lists(const heed::BlockLists& got, const heed::BlockLists& want, Report& report) {
  if (got.start != want.start || got.indices != want.indices)
    report.fail("the blocks that are kept are not those of the case");
}

template <class T>
heed::Dar<T> dar(const GoldenCase& golden) {
  heed::Dar<T> op;
  op.score.iterations = 2;
  op.score.strength = golden.param<T>("lam");
  op.score.vigilance = golden.param<T>("rho");
  op.score.sharpness = golden.param<T>("alpha");
  op.score.feedback = golden.param<T>("beta");
  return op;
}

// One of several softmaxes over keys of its own, whose outputs are added, each times a gate of the query.
class Branch {
 public:
  // keys and values (batch, kv_heads, keys, dim); gate: its column of the case's gates.
  Branch(const GoldenCase& golden, std::vector<double> keys, std::vector<double> values,
         Index len_kv, const heed::Mask<double>& mask, std::size_t gate,
         const heed::Options& options) {
    const std::vector<double>&gates = golden.tensor("gates"), &dout = golden.tensor("dout");
    heed::Geometry g = golden.geometry();
    g.len_kv = len_kv;
    const auto gate_of = [&](std::size_t n) { return gates[n / std::size_t(g.dim_v) * 3 + gate]; };
    std::vector<double> down = dout;
    for (std::size_t n = 0; n < down.size(); ++n) down[n] *= gate_of(n);
    call_.emplace(heed::ScaledDot<double>{}, g, mask, options,
                  heed::CallNumbers<double>{
                      golden.tensor("q"), std::move(keys), std::move(values), {}, std::move(down)});
    call_->forward();
    call_->backward();
    out = call_->out;
    dgate.assign(std::size_t(g.query_rows()), 0.0);
    for (std::size_t n = 0; n < out.size(); ++n) {
      dgate[n / std::size_t(g.dim_v)] += out[n] * dout[n];
      out[n] *= gate_of(n);
    }
  }
  [[nodiscard]] const heed::OpCall<heed::ScaledDot<double>>& call() const { return *call_; }
  std::vector<double> out, dgate;

 private:
  std::optional<heed::OpCall<heed::ScaledDot<double>>> call_;
};

// Means of windows of rows (batch, heads, len, dim), and the gradient of the rows from that of the means.
std::vector<double> means_of(const GoldenCase& golden, const std::string& name,
                             const heed::Windows& windows) {
  const heed::Shape s = golden.shape(name);
  const std::vector<double>& rows = golden.tensor(name);
  std::vector<double> means;
  for (Index head = 0; head < s.batch * s.heads; ++head)
    for (Index j = 0; j < windows.count(s.len); ++j)
      for (Index c = 0; c < s.dim; ++c) {
        double sum = 0;
        for (Index t = 0; t < windows.size; ++t)
          sum += rows[std::size_t((head * s.len + j * windows.stride + t) * s.dim + c)];
        means.push_back(sum / double(windows.size));
      }
  return means;
}
std::vector<double> spread(const GoldenCase& golden, const std::string& name,
                           const heed::Windows& windows, const std::vector<double>& dmeans) {
  const heed::Shape s = golden.shape(name);
  std::vector<double> drows(golden.tensor(name).size(), 0.0);
  std::size_t n = 0;
  for (Index head = 0; head < s.batch * s.heads; ++head)
    for (Index j = 0; j < windows.count(s.len); ++j)
      for (Index c = 0; c < s.dim; ++c, ++n)
        for (Index t = 0; t < windows.size; ++t)
          drows[std::size_t((head * s.len + j * windows.stride + t) * s.dim + c)] +=
              dmeans[n] / double(windows.size);
  return drows;
}

void check_nsa(const GoldenCase& golden, const heed::BlockLists& lists,
               const heed::Windows& windows, const heed::Options& options, const std::string& tag,
               Report& report) {
  const Index len = golden.geometry().len_kv;
  const std::vector<Branch> branches = [&] {
    std::vector<Branch> all;
    all.emplace_back(golden, means_of(golden, "k", windows), means_of(golden, "v", windows),
                     windows.count(len), windows.seen_by<double>(), 0, options);
    all.emplace_back(golden, golden.tensor("k2"), golden.tensor("v2"), len,
                     heed::causal<double>() & heed::block_lists<double>(lists), 1, options);
    all.emplace_back(golden, golden.tensor("k3"), golden.tensor("v3"), len,
                     heed::window<double>(golden.integer("window") - 1, 0), 2, options);
    return all;
  }();
  std::vector<double> out(branches[0].out.size()), dq(golden.tensor("q").size()), dgates;
  for (const Branch& branch : branches) {
    for (std::size_t n = 0; n < out.size(); ++n) out[n] += branch.out[n];
    for (std::size_t n = 0; n < dq.size(); ++n) dq[n] += branch.call().grad_query[n];
  }
  for (std::size_t row = 0; row < branches[0].dgate.size(); ++row)
    for (const Branch& branch : branches) dgates.push_back(branch.dgate[row]);
  report.exact(tag + "out", out, golden.tensor("out"));
  report.exact(tag + "dq", dq, golden.tensor("dq"));
  report.exact(tag + "dgates", dgates, golden.tensor("dgates"));
  report.exact(tag + "dk", spread(golden, "k", windows, branches[0].call().grad_key),
               golden.tensor("dk"));
  report.exact(tag + "dv", spread(golden, "v", windows, branches[0].call().grad_value),
               golden.tensor("dv"));
  for (const std::size_t c : {1U, 2U}) {
    const std::string of = std::to_string(c + 1);
    report.exact(tag + "dk" + of, branches[c].call().grad_key, golden.tensor("dk" + of));
    report.exact(tag + "dv" + of, branches[c].call().grad_value, golden.tensor("dv" + of));
  }
}

}  // namespace

void replay_key_list(const GoldenCase& golden, Report& report) {
  const GoldenCase listed = golden.choosing(
      lists_of(golden, "keep", golden.integer("query_block"), golden.integer("key_block")));
  if (!golden.has("lam")) return check_plain(listed, report);
  const ParamNames names = {
      {"strength", "dlam"}, {"vigilance", "drho"}, {"sharpness", "dalpha"}, {"feedback", "dbeta"}};
  check_with_lse(listed, names, report, [&]<class T>() { return dar<T>(golden); });
}
void replay_top_k(const GoldenCase& golden, Report& report) {
  const CaseInputs of(golden);
  check_plain(golden.choosing(heed::select_keys(of.in, golden.mask<double>(), golden.integer("k"))),
              report);
}
void replay_moba(const GoldenCase& golden, Report& report) {
  const CaseInputs of(golden);
  const Index block = golden.integer("block");
  const heed::BlockLists lists =
      heed::select_blocks(of.in, golden.mask<double>(), block, golden.integer("blocks_kept"));
  check_lists(lists, lists_of(golden, "blocks", 1, block), report);
  check_plain(golden.choosing(lists), report);
}

// DeepSeek's sparse attention: keys by an indexer, and the loss that teaches it.
void replay_dsa(const GoldenCase& golden, Report& report) {
  const CaseInputs of(golden);
  const std::vector<Index>& q = golden.extents("qi");  // (B, T, J, di)
  const Index batch = q[0], len = q[1], heads = q[2], dim = q[3];
  // Views of tensors that have the index heads behind the tokens.
  const auto per_head = [&](auto* data, Index columns) {
    return heed::TensorView(data, {batch, heads, len, columns},
                            {len * heads * columns, columns, heads * columns});
  };
  heed::IndexInputs<double> index;
  index.query = per_head(golden.tensor("qi").data(), dim);
  index.key = heed::TensorView<const double>(golden.tensor("ki").data(), {batch, 1, len, dim});
  index.weights = per_head(golden.tensor("wi").data(), 1);
  const heed::BlockLists lists =
      heed::select_indexed(index, golden.mask<double>(), golden.integer("keys_kept"));
  const GoldenCase chosen = golden.choosing(lists);
  if (golden.has("kept")) {
    std::vector<double> kept(golden.tensor("kept").size(), 0.0);
    for (Index row = 0; row < batch * len; ++row)
      for (Index n = lists.start[std::size_t(row)]; n < lists.start[std::size_t(row) + 1]; ++n)
        kept[std::size_t(row * len + lists.indices[std::size_t(n)])] = 1;
    report.equal("kept", kept, golden.tensor("kept"));
  }
  check_plain(chosen, report);
  std::vector<double> dq(golden.tensor("qi").size()), dk(golden.tensor("ki").size()),
      dw(golden.tensor("wi").size());
  heed::Options options;
  options.scale = golden.number("scale");
  options.threads = 3;
  const double loss = heed::index_loss(
      of.in, chosen.mask<double>(), index,
      {per_head(dq.data(), dim), {dk.data(), {batch, 1, len, dim}}, per_head(dw.data(), 1)},
      options);
  report.exact("loss", std::vector<double>{loss}, golden.tensor("loss"));
  report.exact("dqi", dq, golden.tensor("dqi"));
  report.exact("dki", dk, golden.tensor("dki"));
  report.exact("dwi", dw, golden.tensor("dwi"));
}

// Native sparse attention: windows that are compressed, blocks by their weights, and the last keys.
void replay_nsa(const GoldenCase& golden, Report& report) {
  const heed::Windows windows{golden.integer("compress_block"), golden.integer("compress_stride")};
  const Index block = golden.integer("select_block");
  const heed::Geometry g = golden.geometry();
  const std::vector<double> keys = means_of(golden, "k", windows);
  heed::Options options;
  options.scale = golden.number("scale");
  heed::Inputs<double> in;
  in.query = heed::TensorView<const double>(golden.tensor("q").data(), golden.shape("q"));
  in.key = heed::TensorView<const double>(keys.data(),
                                          {g.batch, g.kv_heads, windows.count(g.len_kv), g.dim_qk});
  const heed::BlockLists lists =
      heed::select_weighed(in, windows, g.len_kv, block, golden.integer("blocks_kept"), options);
  check_lists(lists, heed::detail::for_query_heads(lists_of(golden, "blocks", 1, block), g),
              report);
  check_nsa(golden, lists, windows, options, "", report);
  heed::Options small = small_tiles();
  small.scale = options.scale;
  check_nsa(golden, lists, windows, small, "small tiles: ", report);
}

}  // namespace heed_test
