// Bytes between the processes of one machine: shared memory with a ring for every ordered pair of ranks.
#pragma once
#include <cstdint>
#include <vector>

namespace shoal {

// All ranks map the same zeroed memory of `bytes(ranks, ring_bytes)`, and one exchange after another goes through it:
// every rank gives each other rank some bytes, and takes as many as that one gives. Pieces are copied into a ring while
// the other side copies earlier ones out, so they stay in a cache. Who finds nothing to do sleeps until a peer has
// moved something. A message has its length in front: ranks that disagree are told. One thread at a time.
class Rings {
 public:
  static int64_t bytes(int ranks, int64_t ring_bytes);
  Rings(char* memory, int rank, int ranks, int64_t ring_bytes);

  // Pieces of one buffer, rank after rank. `out` may be read after `run` has returned true; `data` is free then.
  void start(const char* data, const std::vector<int64_t>& send, char* out, const std::vector<int64_t>& recv);
  // Works until the exchange is done (true) or nothing has moved for some seconds (false; call it again or give up).
  // Throws std::invalid_argument if a rank sends another number of bytes than is awaited.
  bool run(double seconds);
  // The ranks that still have to take or to give something of this exchange; the others may end.
  std::vector<int> open() const;

 private:
  struct Bell;
  struct Ring;
  struct Message {
    const char* data = nullptr;
    char* out = nullptr;
    int64_t send = 0, sent = 0;  // with the 8 bytes of the length
    int64_t recv = 0, received = 0;
    uint64_t length = 0, awaited = 0;
    bool is_open() const { return sent < send || received < recv; }
  };
  Bell& bell(int rank) const;
  Ring& ring(int from, int to) const;
  bool push(int peer);
  bool pull(int peer);
  void wake(int peer) const;

  char* const memory_;
  const int rank_, ranks_;
  const int64_t ring_bytes_;
  std::vector<Message> messages_;
};

}  // namespace shoal
