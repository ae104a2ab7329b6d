// The core's one exception: a sentence with what was found, what was expected and what to do.
#pragma once

#include <stdexcept>
#include <string>

namespace dartspec {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace dartspec
