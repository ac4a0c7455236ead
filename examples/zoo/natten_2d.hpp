// SPDX-License-Identifier: Apache-2.0
#pragma once

// Neighbourhood attention in an image: a pixel sees the window of pixels around it.
//
//   (i, j) is visible where |x_i' - x_j| <= r and |y_i' - y_j| <= r       window of 2 r + 1 pixels, pixel y * width + x
//
// (x', y') is the pixel nearest to i whose window lies inside of the image, so that every pixel sees as many.
//
// Source  A. Hassani et al., Neighborhood Attention Transformer (2023), section 3.1, with windows of 7 pixels, or of the
//         largest odd number that fits. Without its bias of positions. The sides of the image are the two factors of the
//         length that lie closest to each other, the height the shorter one.

#include "kit.hpp"

#include <heed/mask/patterns.hpp>

namespace zoo::natten_2d {

template <class T>
using Op = heed::ScaledDot<T>;

struct Image {
  Index height = 1, width = 1, window = 1;
};
inline Image image_of(Index pixels) {
  Image image;
  for (Index side = 1; side * side <= pixels; ++side)
    if (pixels % side == 0) image.height = side;
  image.width = pixels / image.height;
  image.window = std::min<Index>(7, (image.height - 1) / 2 * 2 + 1);
  return image;
}
template <class T>
heed::Mask<T> mask(const heed::Geometry& g) {
  heed::require(g.len_q == g.len_kv, "zoo:natten-2d: len_q is ", g.len_q, " and len_kv is ",
                g.len_kv, ", queries and keys must be the same pixels");
  const Image image = image_of(g.len_q);
  return heed::neighbourhood<T>(image.height, image.width, image.window);
}

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:natten-2d", "windows of 7 x 7", g, {}, {.reads_later_keys = true}, mask<T>};
}

// In plain loops.
inline Numbers plain(const Op<double>&, const PlainRow& row) {
  std::ptrdiff_t width = row.all_keys;  // the smallest factor that is not below the root
  for (std::ptrdiff_t side = width; side * side >= row.all_keys; --side)
    if (row.all_keys % side == 0) width = side;
  const std::ptrdiff_t height = row.all_keys / width;
  std::ptrdiff_t reach = 3;
  while (2 * reach + 1 > height) --reach;
  const auto near = [&](std::ptrdiff_t own, std::ptrdiff_t other, std::ptrdiff_t side) {
    const auto centre = std::min(std::max(own, reach), side - 1 - reach);
    return std::abs(centre - other) <= reach;
  };
  const PlainRow seen = row.seeing([&](std::ptrdiff_t j) {
    return near(row.position % width, j % width, width) &&
           near(row.position / width, j / width, height);
  });
  return mixed(seen, softmax(logits(seen)));
}

}  // namespace zoo::natten_2d
