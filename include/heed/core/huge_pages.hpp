// SPDX-License-Identifier: Apache-2.0
#pragma once

// Huge pages. A processor translates the address of each page that it reads, and remembers few of them: rows of a
// large matrix lie on a page each, and with pages of 4 KiB a product of matrices waits for translations. Linux backs memory
// with pages of 2 MiB where a program asks for them and memory is free (transparent huge pages, `madvise`).

#include <heed/core/config.hpp>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace heed {
inline namespace HEED_ABI {

// Bytes of a huge page on x86-64, and on AArch64 with pages of 4 KiB.
inline constexpr std::size_t kHugePage = std::size_t(2) << 20;

// Asks for huge pages within the `bytes` bytes at `memory`, which begins at a huge page. A system
// that has none to give leaves the memory as it is.
inline void ask_for_huge_pages([[maybe_unused]] void* memory, [[maybe_unused]] std::size_t bytes) {
#if defined(MADV_HUGEPAGE)
  (void)::madvise(memory, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
#endif
}

}  // namespace HEED_ABI
}  // namespace heed
