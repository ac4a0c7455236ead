// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "measure.hpp"

namespace compare {

// Writes the page of pictures if --report asks for it; plots over length need times of shorter texts as well.
void write_pictures(const Settings&, const Machine&, const Comparison&);

}  // namespace compare
