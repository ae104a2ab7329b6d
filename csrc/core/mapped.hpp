#pragma once

#include <cstddef>
#include <cstdint>

namespace dartspec {

// Another program may cut off a file while it is mapped here (`cp new.ngram old.ngram` does); a read beyond its new end
// raises SIGBUS, which would end this program. While a range is watched, the page that was read is replaced by zeros
// instead, and counted. Readers of an index take any bytes; they find nothing there.
class Watched {
 public:
  Watched(const void* at, std::size_t bytes) noexcept;
  ~Watched();
  Watched(const Watched&) = delete;
  Watched& operator=(const Watched&) = delete;

 private:
  std::size_t place_;  // among the watched ranges, or past them where there is no room: then nothing is watched
};

// Pages that were lost so, since the program began.
std::uint64_t num_lost_pages() noexcept;

}  // namespace dartspec
