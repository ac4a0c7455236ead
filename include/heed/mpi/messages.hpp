// SPDX-License-Identifier: Apache-2.0
#pragma once

// Sums and tensors made from messages between ranks (mpi/any_communicator.hpp).
//
// Sums over ranks are added up in double in the order of the ranks, and rounded once: for a given number of ranks they are
// the same bits at each run.

#include <heed/core/error.hpp>
#include <heed/core/view.hpp>
#include <heed/mpi/any_communicator.hpp>
#include <heed/mpi/shards.hpp>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace mpi {

namespace detail {

// Numbers for each rank, or from each rank.
template <class Number>
using ByRank = std::vector<std::vector<Number>>;

// to[r] = what rank r has in from[own rank]. The sizes of `to` are known.
template <class Number>
void exchange(const AnyCommunicator& comm, const ByRank<Number>& from, ByRank<Number>& to) {
  std::vector<Send> sends;
  std::vector<Receive> receives;
  for (int r = 0; r < comm.size(); ++r) {
    const std::vector<Number>& out = from[std::size_t(r)];
    std::vector<Number>& in = to[std::size_t(r)];
    if (r == comm.rank()) {
      in = out;
      continue;
    }
    if (!out.empty()) sends.push_back({r, out.data(), out.size() * sizeof(Number)});
    if (!in.empty()) receives.push_back({r, in.data(), in.size() * sizeof(Number)});
  }
  comm.start(sends, receives).wait();
}

// The values of all ranks.
[[nodiscard]] inline std::vector<std::string> all_texts(const AnyCommunicator& comm,
                                                        const std::string& own) {
  const auto ranks = std::size_t(comm.size());
  ByRank<std::size_t> size(ranks, {own.size()}), sizes(ranks, {0});
  exchange(comm, size, sizes);
  ByRank<char> text(ranks, {own.begin(), own.end()}), texts(ranks);
  for (std::size_t r = 0; r < ranks; ++r) texts[r].resize(sizes[r][0]);
  exchange(comm, text, texts);
  std::vector<std::string> all;
  for (const std::vector<char>& one : texts) all.emplace_back(one.begin(), one.end());
  return all;
}

// The parts of a call that ranks compare, by names, and the reason why this rank cannot make the call, if there is one.
struct RankStamp {
  std::vector<std::pair<std::string, std::string>> parts;
  std::string error;

  template <class... Pieces>
  void add(const char* name, const Pieces&... pieces) {
    std::string text;
    (heed::detail::append(text, pieces), ...);
    parts.emplace_back(name, text.empty() ? "none" : text);
  }
};

// Throws std::invalid_argument with the same sentence on all ranks unless all of them can make the
// call, and it is the same on all.
inline void require_agreement(const AnyCommunicator& comm, const RankStamp& own,
                              const std::string& where) {
  std::string text = own.error;
  for (const auto& [name, value] : own.parts) text += '\0' + name + '\0' + value;
  const std::vector<std::string> all = all_texts(comm, text);
  const auto split = [](const std::string& from) {
    std::vector<std::string> pieces;
    for (std::size_t at = 0; at <= from.size();) {
      const std::size_t end = std::min(from.find('\0', at), from.size());
      pieces.push_back(from.substr(at, end - at));
      at = end + 1;
    }
    return pieces;
  };
  std::vector<std::vector<std::string>> said;
  for (const std::string& one : all) said.push_back(split(one));
  const std::string start = where + ": ";  // also of the rank's own sentence
  for (std::size_t r = 0; r < said.size(); ++r) {
    const std::string& error = said[r][0];
    if (!error.empty())
      fail(start, "on rank ", r, ": ", error.substr(error.starts_with(start) ? start.size() : 0));
  }
  for (std::size_t r = 1; r < said.size(); ++r)
    for (std::size_t n = 1; n + 1 < said[0].size(); n += 2) {
      const bool there = n + 1 < said[r].size() && said[r][n] == said[0][n];
      require(there && said[r][n + 1] == said[0][n + 1], where, ": ", said[0][n], " is ",
              there ? said[r][n + 1] : "another part of the call", " on rank ", r,
              ", on rank 0 it is ", said[0][n + 1], "; it must be the same on all ranks");
    }
}

// Sums over all ranks; each rank gets them.
inline void sum_over_ranks(const AnyCommunicator& comm, std::vector<double>& sums) {
  const auto ranks = std::size_t(comm.size()), own = std::size_t(comm.rank());
  const auto cut = [&](std::size_t r) { return sums.size() * r / ranks; };
  // Each rank adds up one piece, and sends it to the others.
  ByRank<double> from(ranks), to(ranks, std::vector<double>(cut(own + 1) - cut(own)));
  for (std::size_t r = 0; r < ranks; ++r)
    from[r].assign(sums.begin() + std::ptrdiff_t(cut(r)),
                   sums.begin() + std::ptrdiff_t(cut(r + 1)));
  exchange(comm, from, to);
  std::vector<double> piece = to[0];
  for (std::size_t r = 1; r < ranks; ++r)
    for (std::size_t i = 0; i < piece.size(); ++i) piece[i] += to[r][i];
  from.assign(ranks, piece);
  for (std::size_t r = 0; r < ranks; ++r) to[r].resize(cut(r + 1) - cut(r));
  exchange(comm, from, to);
  for (std::size_t r = 0; r < ranks; ++r)
    std::copy(to[r].begin(), to[r].end(), sums.begin() + std::ptrdiff_t(cut(r)));
}

// The rows of a rank's pieces, packed piece by piece and head by head. `row_of(token, n)` is the row of `view` with the
// rank's n-th token: `token` in tensors of the whole sequence, n in tensors of the rank.
template <class Element, class RowOf>
[[nodiscard]] std::vector<std::remove_const_t<Element>> pack_rows(const Shards& shards, int rank,
                                                                  const TensorView<Element>& view,
                                                                  RowOf&& row_of) {
  const Shape& s = view.shape();
  std::vector<std::remove_const_t<Element>> packed;
  packed.reserve(std::size_t(s.batch * s.heads * shards.held(rank) * s.dim));
  Index first = 0;
  for (const Tokens& piece : shards.pieces(rank)) {
    for (Index b = 0; b < s.batch; ++b)
      for (Index h = 0; h < s.heads; ++h)
        for (Index t = 0; t < piece.count(); ++t) {
          const Element* row = view.row(b, h, row_of(piece.begin + t, first + t));
          packed.insert(packed.end(), row, row + s.dim);
        }
    first += piece.count();
  }
  return packed;
}
// The reverse: calls f(row, numbers) for packed rows.
template <class Number, class RowOf, class F>
void for_packed_rows(const Shards& shards, int rank, const Shape& s, const Number* packed,
                     RowOf&& row_of, F&& f) {
  Index first = 0;
  for (const Tokens& piece : shards.pieces(rank)) {
    for (Index b = 0; b < s.batch; ++b)
      for (Index h = 0; h < s.heads; ++h)
        for (Index t = 0; t < piece.count(); ++t, packed += s.dim)
          f(b, h, row_of(piece.begin + t, first + t), packed);
    first += piece.count();
  }
}
inline constexpr auto kWholeRow = [](Index token, Index) { return token; };
inline constexpr auto kOwnRow = [](Index, Index n) { return n; };

// Writes dense numbers to the rows of `to`; returns where those behind them stand.
template <class Number, class Real>
const Number* write_rows(const Number* from, const TensorView<Real>& to) {
  for_each_row(to.shape(), [&](Index b, Index h, Index t) {
    for (Index c = 0; c < to.shape().dim; ++c) to(b, h, t, c) = Real(*from++);
  });
  return from;
}

// The rows of all tokens in their order, dense (batch, heads, shards.len(), dim), from the rows of each rank.
template <class Element>
[[nodiscard]] std::vector<std::remove_const_t<Element>> gather_rows(
    const AnyCommunicator& comm, const Shards& shards, const TensorView<Element>& own) {
  using Number = std::remove_const_t<Element>;
  const Shape& s = own.shape();
  const auto ranks = std::size_t(comm.size());
  ByRank<Number> from(ranks, pack_rows(shards, comm.rank(), own, kOwnRow)), to(ranks);
  for (std::size_t r = 0; r < ranks; ++r)
    to[r].resize(std::size_t(s.batch * s.heads * shards.held(int(r)) * s.dim));
  exchange(comm, from, to);
  std::vector<Number> all(std::size_t(s.batch * s.heads * shards.len() * s.dim));
  const TensorView<Number> whole(all.data(), {s.batch, s.heads, shards.len(), s.dim});
  for (std::size_t r = 0; r < ranks; ++r)
    for_packed_rows(shards, int(r), s, to[r].data(), kWholeRow,
                    [&](Index b, Index h, Index token, const Number* numbers) {
                      std::copy_n(numbers, s.dim, whole.row(b, h, token));
                    });
  return all;
}

// own = sum over ranks of `partial`, for the tokens of this rank.
template <class Real>
void sum_rows(const AnyCommunicator& comm, const Shards& shards,
              const TensorView<const Real>& partial, const TensorView<Real>& own) {
  const Shape& s = own.shape();
  const auto ranks = std::size_t(comm.size());
  ByRank<Real> from(ranks),
      to(ranks, std::vector<Real>(std::size_t(s.batch * s.heads * s.len * s.dim)));
  for (std::size_t r = 0; r < ranks; ++r) from[r] = pack_rows(shards, int(r), partial, kWholeRow);
  exchange(comm, from, to);
  std::size_t at = 0;
  for_packed_rows(shards, comm.rank(), s, to[0].data(), kOwnRow,
                  [&](Index b, Index h, Index n, const Real*) {
                    Real* row = own.row(b, h, n);
                    for (Index c = 0; c < s.dim; ++c, ++at) {
                      double sum = 0;
                      for (const std::vector<Real>& terms : to) sum += double(terms[at]);
                      row[c] = Real(sum);
                    }
                  });
}

}  // namespace detail
}  // namespace mpi
}  // namespace HEED_ABI
}  // namespace heed
