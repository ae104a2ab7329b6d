#include "mapped.hpp"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <mutex>

namespace dartspec {

namespace {

// A signal handler may touch lock-free atomics and nothing that allocates or locks.
struct Range {
  std::atomic<bool> taken{false};
  std::atomic<std::uintptr_t> begin{0}, end{0};
};
std::array<Range, 256> ranges;
std::atomic<std::uint64_t> lost{0};
std::uintptr_t page_bytes = 4096;
struct sigaction before {};
std::once_flag installed;

void on_bus_error(int number, siginfo_t* info, void* context) {
  const auto at = reinterpret_cast<std::uintptr_t>(info->si_addr);
  for (const Range& range : ranges) {
    const std::uintptr_t begin = range.begin.load();
    if (begin == 0 || at < begin || at >= range.end.load()) continue;
    void* const page = reinterpret_cast<void*>(at & ~(page_bytes - 1));
    if (::mmap(page, page_bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) break;
    lost.fetch_add(1);
    return;  // the read is done again
  }
  // not ours: whoever was there before, else the read is done again and ends the program as it would have
  if ((before.sa_flags & SA_SIGINFO) != 0 && before.sa_sigaction != nullptr) {
    before.sa_sigaction(number, info, context);
  } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(number);
  } else {
    ::signal(number, SIG_DFL);
  }
}

void install() {
  page_bytes = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  struct sigaction ours {};
  ours.sa_sigaction = on_bus_error;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
  ::sigemptyset(&ours.sa_mask);
  ::sigaction(SIGBUS, &ours, &before);
}

}  // namespace

Watched::Watched(const void* at, std::size_t bytes) noexcept : place_(ranges.size()) {
  std::call_once(installed, install);
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    if (ranges[i].taken.exchange(true)) continue;
    const auto begin = reinterpret_cast<std::uintptr_t>(at);
    ranges[i].end.store(begin + bytes);
    ranges[i].begin.store(begin);
    place_ = i;
    return;
  }
}

Watched::~Watched() {
  if (place_ == ranges.size()) return;
  ranges[place_].begin.store(0);
  ranges[place_].taken.store(false);
}

std::uint64_t num_lost_pages() noexcept { return lost.load(); }

}  // namespace dartspec
