// Pages made ready by a thread of their own, so that what grows does not wait for the kernel.
#pragma once
#include <cstddef>

namespace shoal {

// Requests of one owner of mapped memory. They are hints: a kernel that does not know them (before Linux 6.1) leaves
// pages as they are, and a page that is needed before its turn comes is made when it is touched.
class Ahead {
 public:
  Ahead() = default;
  ~Ahead() { stop(); }
  Ahead(const Ahead&) = delete;
  Ahead& operator=(const Ahead&) = delete;

  // These bytes will be written soon.
  void populate(char* begin, size_t bytes);
  // These 2 MiB are in use to the last byte: gathers them on one huge page.
  void gather(char* begin);
  // Returns when nobody works on requests of this owner any more, before it unmaps its memory. Not beside the others.
  void stop();

 private:
  bool asked_ = false;
};

}  // namespace shoal
