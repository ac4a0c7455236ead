// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a file of the zoo starts from: heed's plug points, and plain loops for its second version. Each file has a
// namespace of its own with
//
//   Op<T>                  the op
//   variant<T>(geometry)   its line in programs: name, settings, sizes, op with starting values, traits, mask where it has one
//                          of its own (heed/variants.hpp)
//   plain(op, row)         the same row by row in plain loops; rows see what the caller's mask shows them, and the variant's own
//                          mask is a part of what plain() does

#include "plain.hpp"

#include <heed/mask/patterns.hpp>
#include <heed/plug/own_score.hpp>
#include <heed/variants.hpp>

namespace zoo {

using heed::Index;

template <class T, class Score = heed::DotScore<T>, class Normaliser = heed::Softmax<T>,
          class Readout = heed::Identity<T>>
using Attention = heed::Attention<T, Score, Normaliser, Readout>;

// The log-sum-exp of vector v that a row normaliser without exponentials reports: 0, or -infinity for a row that sees no
// key.
template <class T>
void report_no_lse(const heed::RowBlock<T>& block, int v) {
  const heed::Index at = v * heed::kLanes<T>;
  const auto top = heed::Pack<T>::load(block.score_max[0] + at);
  select(heed::is_hidden(top), top, heed::Pack<T>(T(0))).store(block.lse[0] + at);
}

}  // namespace zoo
