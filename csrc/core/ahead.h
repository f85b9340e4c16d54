// A background thread that prepares pages, so that a growing table does not wait for the kernel.
#pragma once
#include <cstddef>

namespace shoal {

// Requests of one owner of mapped memory. They are hints: a kernel that does not support them (before Linux 6.1)
// ignores them, and a page that is needed before its turn is created when it is touched.
class Ahead {
 public:
  Ahead() = default;
  ~Ahead() { stop(); }
  Ahead(const Ahead&) = delete;
  Ahead& operator=(const Ahead&) = delete;

  // Creates the pages of these bytes, which will be written soon.
  void populate(char* begin, size_t bytes);
  // Moves these 2 MiB, all of which are in use, to one huge page.
  void gather(char* begin);
  // Drops this owner's requests and waits for the one in progress; call it before unmapping the memory, and not
  // concurrently with the other calls.
  void stop();

 private:
  bool asked_ = false;
};

}  // namespace shoal
