// A test is a main() that CHECKs; the first failure ends it with the line that failed.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#define CHECK(condition)                                                                \
  do {                                                                                  \
    if (!(condition)) {                                                                 \
      std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                     \
    }                                                                                   \
  } while (false)

// The message of the Error that `call` throws; fails when it throws none.
template <class Call>
std::string refused(Call&& call) {
  try {
    call();
  } catch (const std::exception& e) {
    return e.what();
  }
  std::fprintf(stderr, "expected a refusal, got none\n");
  std::exit(1);
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }
