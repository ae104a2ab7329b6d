// A small persistent thread pool. The caller works too, takes what sleeping workers leave, and nothing is process-wide
// but the threads themselves: how many of them a job may use is the job's own parameter.
#pragma once

#include <cstdint>

namespace dartspec {

// Runs run(context, chunk) once for each chunk in [0, num_chunks) on at most num_threads threads, the caller's among
// them, and returns when all are done. Chunks are claimed in ascending order by whoever is free, so a chunk's result
// must not depend on who computes it. Must not throw, must not be nested. Concurrent callers: one gets the workers,
// the others run alone.
void parallel_for(int num_threads, std::uint32_t num_chunks, void (*run)(void* context, std::uint32_t chunk),
                  void* context);

}  // namespace dartspec
