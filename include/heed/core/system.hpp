// SPDX-License-Identifier: Apache-2.0
#pragma once

// What heed asks of the operating system about its process and its memory. With system_files.hpp it is the only place that
// knows which system this is.
//
// Huge pages. A processor translates the address of each page that it reads, and remembers few of them: rows of a
// large matrix lie on a page each, and with pages of 4 KiB a product of matrices waits for translations. Linux backs memory
// with pages of 2 MiB where a program asks for them and memory is free (transparent huge pages, `madvise`).

#include <heed/core/config.hpp>

#if defined(_WIN32)
#include <process.h>
#else
#include <unistd.h>

#include <ctime>
#endif
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/mman.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace heed {
inline namespace HEED_ABI {

// Is this program compiled to notice the use of freed or of uninitialised memory?
#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool kIsSanitized = true;
#elif defined(__has_feature)
inline constexpr bool kIsSanitized =
    __has_feature(address_sanitizer) || __has_feature(memory_sanitizer);
#else
inline constexpr bool kIsSanitized = false;
#endif

// The number of this process; positive.
[[nodiscard]] inline long process_number() noexcept {
#if defined(_WIN32)
  return _getpid();
#else
  return ::getpid();
#endif
}

// Nanoseconds of processor time that this thread has taken; 0 where the system does not tell.
[[nodiscard]] inline long long thread_nanoseconds() noexcept {
#if defined(CLOCK_THREAD_CPUTIME_ID) && !defined(_WIN32)
  timespec time;
  if (::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time) == 0)
    return static_cast<long long>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
#endif
  return 0;
}

// Bytes of this machine's memory; 0 where the system does not tell.
[[nodiscard]] inline std::size_t machine_memory() noexcept {
#if defined(_SC_PHYS_PAGES)
  const long pages = ::sysconf(_SC_PHYS_PAGES), page = ::sysconf(_SC_PAGE_SIZE);
  if (pages > 0 && page > 0)
    return static_cast<std::size_t>(pages) * static_cast<std::size_t>(page);
#endif
  return 0;
}

// True if this processor, a 64-bit Arm, has products of bfloat16 (FEAT_BF16).
[[nodiscard]] inline bool has_bfloat_products() noexcept {
#if defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long bf16 = 1UL << 14;  // HWCAP2_BF16 of Linux
  return (::getauxval(AT_HWCAP2) & bf16) != 0;
#elif defined(__aarch64__) && defined(__APPLE__)
  int has = 0;
  std::size_t size = sizeof has;
  return ::sysctlbyname("hw.optional.arm.FEAT_BF16", &has, &size, nullptr, 0) == 0 && has == 1;
#else
  return false;
#endif
}

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
