// The native tests' few macros: say what failed and where, then leave with status 1.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <sstream>
#include <string>

namespace stoker::testing {

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  std::fflush(stderr);
  std::_Exit(1);
}

template <class Left, class Right>
void check_equal(const Left& left, const Right& right, const char* text, const char* file,
                 int line) {
  if (left == right) return;
  std::ostringstream what;
  what << text << ": " << left << " is not " << right;
  fail(file, line, what.str());
}

}  // namespace stoker::testing

#define CHECK(condition)                                                      \
  do {                                                                        \
    if (!(condition)) ::stoker::testing::fail(__FILE__, __LINE__, #condition); \
  } while (false)

#define CHECK_EQ(left, right) \
  ::stoker::testing::check_equal((left), (right), #left " == " #right, __FILE__, __LINE__)

// Runs the statement, which must throw `type`; the message must contain `part`.
#define CHECK_THROWS(statement, type, part)                                              \
  do {                                                                                   \
    bool thrown = false;                                                                 \
    try {                                                                                \
      statement;                                                                         \
    } catch (const type& error) {                                                        \
      thrown = true;                                                                     \
      if (std::string(error.what()).find(part) == std::string::npos) {                   \
        ::stoker::testing::fail(__FILE__, __LINE__,                                      \
                                std::string("message without '") + part + "': " +        \
                                    error.what());                                       \
      }                                                                                  \
    }                                                                                    \
    if (!thrown) ::stoker::testing::fail(__FILE__, __LINE__, #statement " did not throw"); \
  } while (false)

// Names the case on standard output, so that a failure's log says how far the run came.
#define RUN(test)                    \
  do {                               \
    std::printf("%s\n", #test);      \
    std::fflush(stdout);             \
    test();                          \
  } while (false)
