// SPDX-License-Identifier: Apache-2.0
// Packed sequences have the bits of calls of each sequence, whatever the op, the mask and the number of threads.

#include "message_of.hpp"
#include "packed_call.hpp"

#include <heed/compiled.hpp>
#include <heed/engine/doors.hpp>
#include <heed/mask/patterns.hpp>
#include <heed/mask/visible.hpp>

using namespace heed;
using namespace heed_test;

namespace {

// Longer and shorter than a panel, one query, none, and neighbours of one length.
const Lengths kSelf{{5, 70, 0, 1, 37, 37, 37, 19}, {5, 70, 0, 1, 37, 37, 37, 19}};
const Lengths kCross{{5, 70, 4, 0, 1, 1, 17, 17}, {9, 3, 0, 6, 130, 40, 33, 33}};

template <class T>
PackedMask<T> everywhere(const std::string& name, const Mask<T>& mask) {
  return {name, mask, [mask](Index) { return mask; }};
}

}  // namespace

TEST_CASE("packed sequences of every variant have the bits of separate calls", "[packed]") {
  const Geometry g{1, 4, 4, 2, 1, 1, 6, 6};
  for_each_variant<double>(g, [&]<class Op>(const Variant<Op>& variant) {
    for (const int threads : {1, 4})
      check_packed(variant.name, variant.op, variant.geometry, kSelf,
                   everywhere("causal", causal<double>()), {.threads = threads});
    check_packed(variant.name, variant.op, variant.geometry, kSelf,
                 everywhere("window", window<double>(6, 3)),
                 {.threads = 3,
                  .key_tile = 1,
                  .panel_vectors = 1,
                  .dropout = {.rate = 0.3, .seed = 11, .first_batch = 0}});
    check_packed(variant.name, variant.op, variant.geometry, {},
                 everywhere("causal, no sequences", causal<double>()));
    if (!Op::ReadoutType::uses_own_rows)
      check_packed(variant.name, variant.op, variant.geometry, kCross,
                   everywhere("causal, bottom right", causal<double>(Align::bottom_right)),
                   {.threads = 2});
  });
}
