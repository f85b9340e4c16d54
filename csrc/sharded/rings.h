// Bytes between the processes of one machine: shared memory with a ring for every ordered pair of ranks.
#pragma once
#include <cstdint>
#include <vector>

namespace shoal {

// All ranks map the same zeroed memory of `bytes(ranks, ring_bytes)`, and one exchange after another goes through it:
// every rank gives each other rank some bytes, and takes as many as that one gives. Pieces are copied into a ring while
// the other side copies earlier ones out, so they stay in a cache. Who finds nothing to do sleeps until a peer has
// moved something. One thread at a time.
//
// A message has its length in front, and a head of kHeadBytes that says what it is. A message of another length than is
// awaited is taken and thrown away, so that ranks which disagree can go on once they have told each other.
class Rings {
 public:
  static constexpr int64_t kHeadBytes = 64;
  struct Difference {
    int rank;
    int64_t sent, awaited;  // bytes
  };
  static int64_t bytes(int ranks, int64_t ring_bytes);
  Rings(char* memory, int rank, int ranks, int64_t ring_bytes);

  // Pieces of one buffer, rank after rank, and a head for all of them (or null: zeros). `out` may be read after `run`
  // has returned true; `data` is free then.
  void start(const char* data, const std::vector<int64_t>& send, char* out, const std::vector<int64_t>& recv,
             const char* head = nullptr);
  // Works until the exchange is done (true) or nothing has moved for some seconds (false; call it again or give up).
  bool run(double seconds);
  // After an exchange: who sent another number of bytes than was awaited. That rank's part of `out` is not written.
  std::vector<Difference> differences() const;
  // The head of each rank's message, [ranks, kHeadBytes].
  void heads(char* out) const;
  // The ranks that still have to take or to give something of this exchange; the others may end.
  std::vector<int> open() const;

 private:
  struct Bell;
  struct Ring;
  struct Front {
    int64_t length = 0;
    char head[kHeadBytes] = {};
  };
  struct Message {
    const char* data = nullptr;
    char* out = nullptr;
    int64_t send = 0, sent = 0;  // with what is in front
    int64_t recv = 0, received = 0;
    int64_t awaited = 0;
    Front front_out, front_in;
    bool is_open() const { return sent < send || received < recv; }
    bool differs() const { return front_in.length != awaited; }
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
