// SPDX-License-Identifier: Apache-2.0
#include "link.hpp"

#include "program.hpp"

namespace heed_program {

std::unique_ptr<Link> open_link() {
  const int count = launched_processes();
  if (count > 1)
    throw UsageError("a launcher started " + std::to_string(count) +
                     " processes together, this program was built without MPI and runs in one");
  return nullptr;
}

}  // namespace heed_program
