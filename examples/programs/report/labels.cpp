// SPDX-License-Identifier: Apache-2.0
#include "labels.hpp"

#include "drawing.hpp"

#include <algorithm>
#include <numeric>

namespace heed_report {

namespace {

// Labels that touch each other, each one gap below the one before. `sum` adds up their wished places, less the gaps between
// them and the first label of all: the mean is the block's best place.
struct Block {
  double sum = 0;
  std::size_t count = 0;
  [[nodiscard]] double place() const { return sum / double(count); }
};

}  // namespace

// Places without their gaps must not fall from one label to the next: the best such places are the
// means of blocks (isotonic regression), cut off at the bounds.
std::vector<double> spread_out(const std::vector<double>& wishes, double gap, double top,
                               double bottom) {
  std::vector<std::size_t> order(wishes.size());
  std::iota(order.begin(), order.end(), std::size_t(0));
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return wishes[a] < wishes[b]; });
  std::vector<Block> blocks;
  for (std::size_t rank = 0; rank < order.size(); ++rank) {
    blocks.push_back({wishes[order[rank]] - gap * double(rank), 1});
    // Invariant: the places of the blocks before the last one rise.
    while (blocks.size() > 1 && blocks[blocks.size() - 2].place() >= blocks.back().place()) {
      const Block last = blocks.back();
      blocks.pop_back();
      blocks.back() = {blocks.back().sum + last.sum, blocks.back().count + last.count};
    }
  }
  std::vector<double> places(wishes.size());
  const double lowest = bottom - gap * double(std::max<std::size_t>(1, order.size()) - 1);
  std::size_t rank = 0;
  for (const Block& block : blocks) {
    const double place = std::max(top, std::min(block.place(), lowest));
    for (std::size_t i = 0; i < block.count; ++i, ++rank)
      places[order[rank]] = place + gap * double(rank);
  }
  return places;
}

std::string fitted(const std::string& text, double width) {
  if (text_width(text) <= width) return text;
  const std::string ellipsis = "\u2026";
  std::string cut = text;
  while (!cut.empty() && text_width(cut + ellipsis) > width) {
    // Removes the last byte of a character, then the bytes before it that begin none.
    while (cut.size() > 1 && (static_cast<unsigned char>(cut.back()) & 0xC0u) == 0x80u)
      cut.pop_back();
    cut.pop_back();
  }
  return cut + ellipsis;
}

}  // namespace heed_report
