// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "measure.hpp"

namespace compare {

// The page of pictures, if it was asked for; it times shorter texts for it.
void write_pictures(const Settings&, const Machine&, const Comparison&);

}  // namespace compare
