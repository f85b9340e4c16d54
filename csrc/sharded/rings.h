// Bytes between the processes of one machine: shared memory with a ring for every ordered pair of ranks.
#pragma once
#include <cstdint>
#include <vector>

namespace shoal {

// All ranks map the same zeroed memory of `bytes(ranks, ring_bytes)`. In each exchange every rank sends some bytes to
// each other rank and receives some from each. Pieces are copied into a ring while the other side copies earlier ones
// out, so they stay in a cache. A rank with nothing to do sleeps until a peer has copied something. For one thread at a
// time.
//
// A message begins with its length and a head of kHeadBytes that describes it. A message of an unexpected length is
// discarded, so that ranks which disagree can report it and continue.
class Rings {
 public:
  static constexpr int64_t kHeadBytes = 64;
  struct Difference {
    int rank;
    int64_t sent, awaited;  // bytes
  };
  static int64_t bytes(int ranks, int64_t ring_bytes);
  Rings(char* memory, int rank, int ranks, int64_t ring_bytes);

  // Starts an exchange: `data` and `out` hold the ranks' pieces one after another; `head` is sent with all of them
  // (null: zeros). After `run` has returned true, `out` may be read and `data` may be changed.
  void start(const char* data, const std::vector<int64_t>& send, char* out, const std::vector<int64_t>& recv,
             const char* head = nullptr);
  // Works until the exchange is done (true) or nothing was copied for `seconds` (false; call it again or give up).
  bool run(double seconds);
  // After an exchange: the ranks that sent another number of bytes than expected. Their parts of `out` are not written.
  std::vector<Difference> differences() const;
  // The head of each rank's message, [ranks, kHeadBytes].
  void heads(char* out) const;
  // The ranks that must still send or receive something in this exchange; the others may end.
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
    int64_t send = 0, sent = 0;  // including the length and the head
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
