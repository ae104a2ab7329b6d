#include "kernels_pool.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace dartspec {
namespace {

constexpr int kMaxWorkers = 255;
constexpr auto kSpin = std::chrono::microseconds(100);  // between two products of one forward; then sleep

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

class Pool {
 public:
  void run(int num_threads, std::uint32_t num_chunks, void (*fn)(void*, std::uint32_t), void* context) {
    std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) {
      for (std::uint32_t chunk = 0; chunk < num_chunks; ++chunk) fn(context, chunk);
      return;
    }
    const int workers = std::min({num_threads - 1, kMaxWorkers, static_cast<int>(std::min(num_chunks, 256u)) - 1});
    for (; started_ < workers; ++started_) std::thread(&Pool::work, this, started_).detach();
    fn_ = fn;
    context_ = context;
    num_chunks_ = num_chunks;
    done_.store(0, std::memory_order_relaxed);
    generation_ = (generation_ + 1) & 0xFFFFFF;
    ticket_.store(generation_ << 40 | static_cast<std::uint64_t>(workers) << 32 | num_chunks);
    signal_.fetch_add(1);
    signal_.notify_all();
    drain(-1);
    for (int spins = 0; done_.load(std::memory_order_acquire) != num_chunks; ++spins) {
      if (spins < 4000) pause();
      else std::this_thread::yield();
    }
  }

 private:
  // Claims and runs chunks until none is left that this worker may take; the caller is number -1. A job's fields are
  // read only after a successful claim: until that chunk is counted in done_, the job cannot end or be replaced.
  void drain(int worker) {
    std::uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (static_cast<std::uint32_t>(ticket) != 0 && worker < static_cast<int>(ticket >> 32 & 0xFF)) {
      if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) continue;
      fn_(context_, num_chunks_ - static_cast<std::uint32_t>(ticket));
      done_.fetch_add(1, std::memory_order_release);
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  void work(int worker) {
    for (;;) {
      const std::uint32_t seen = signal_.load();
      drain(worker);
      const auto start = std::chrono::steady_clock::now();
      while (signal_.load(std::memory_order_relaxed) == seen) {
        for (int i = 0; i < 16 && signal_.load(std::memory_order_relaxed) == seen; ++i) pause();
        if (std::chrono::steady_clock::now() - start > kSpin) signal_.wait(seen);
      }
    }
  }

  std::mutex mutex_;
  int started_ = 0;
  void (*fn_)(void*, std::uint32_t) = nullptr;
  void* context_ = nullptr;
  std::uint32_t num_chunks_ = 0;
  std::uint64_t generation_ = 0;
  alignas(64) std::atomic<std::uint64_t> ticket_{0};  // generation (24 bits), workers (8), chunks left (32)
  alignas(64) std::atomic<std::uint32_t> signal_{0};
  alignas(64) std::atomic<std::uint32_t> done_{0};
};

std::atomic<Pool*> pool{nullptr};  // never destroyed: its threads outlive static destructors

Pool& the_pool() {
  Pool* current = pool.load(std::memory_order_acquire);
  if (current != nullptr) return *current;
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (pool.load() == nullptr) {
#if defined(__unix__) || defined(__APPLE__)
    // A forked child has none of the threads: it begins again with a pool of its own.
    static const int once = pthread_atfork(nullptr, nullptr, [] { pool.store(nullptr); });
    static_cast<void>(once);
#endif
    pool.store(new Pool);
  }
  return *pool.load();
}

}  // namespace

void parallel_for(int num_threads, std::uint32_t num_chunks, void (*run)(void* context, std::uint32_t chunk),
                  void* context) {
  if (num_chunks == 0) return;
  if (num_threads <= 1 || num_chunks == 1) {
    for (std::uint32_t chunk = 0; chunk < num_chunks; ++chunk) run(context, chunk);
    return;
  }
  the_pool().run(num_threads, num_chunks, run, context);
}

}  // namespace dartspec
