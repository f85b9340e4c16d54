// A minimal test kit that prints what failed: TEST(name) { CHECK(a == b); } and a main().
#pragma once
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <vector>

namespace check {

struct Case {
  const char* name;
  void (*run)();
};
inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}
struct Register {
  Register(const char* name, void (*run)()) { cases().push_back({name, run}); }
};

}  // namespace check

#define TEST(name)                                           \
  static void name();                                        \
  static const check::Register register_##name(#name, name); \
  static void name()

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                      \
    }                                                                                    \
  } while (0)

#define CHECK_THROWS(expression)                                                          \
  do {                                                                                    \
    bool threw = false;                                                                   \
    try {                                                                                 \
      expression;                                                                         \
    } catch (const std::exception&) {                                                     \
      threw = true;                                                                       \
    }                                                                                     \
    if (!threw) {                                                                         \
      std::fprintf(stderr, "%s:%d: %s did not throw\n", __FILE__, __LINE__, #expression); \
      std::exit(1);                                                                       \
    }                                                                                     \
  } while (0)

int main() {
  for (const auto& c : check::cases()) {
    std::printf("%s\n", c.name);
    std::fflush(stdout);
    c.run();
  }
  std::printf("%zu passed, 0 failed\n", check::cases().size());
  return 0;
}
