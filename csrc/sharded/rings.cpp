#include "sharded/rings.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace shoal {
namespace {

constexpr int64_t kPiece = 256 << 10;  // bytes that are copied before the other side is notified
constexpr int kSpins = 200;            // checks before sleeping; a peer at the same step needs fewer

void sleep_on(std::atomic<uint32_t>& word, uint32_t seen, int milliseconds) {
#if defined(__linux__)
  const timespec limit{milliseconds / 1000, (milliseconds % 1000) * 1000000L};
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &limit, nullptr, 0);
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

struct alignas(64) Rings::Bell {
  std::atomic<uint32_t> rung;
  std::atomic<uint32_t> sleeping;
};

struct Rings::Ring {
  alignas(64) std::atomic<uint64_t> head;  // bytes put in so far
  alignas(64) std::atomic<uint64_t> tail;  // bytes taken out so far
  alignas(64) char data[64];               // in fact ring_bytes
};

static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

namespace {
constexpr int64_t kRingHead = 128;
constexpr int64_t kFront = 8 + Rings::kHeadBytes;  // bytes in front of a message
}  // namespace

int64_t Rings::bytes(int ranks, int64_t ring_bytes) {
  return ranks * int64_t{64} + int64_t{ranks} * ranks * (kRingHead + ring_bytes);
}

Rings::Rings(char* memory, int rank, int ranks, int64_t ring_bytes)
    : memory_(memory), rank_(rank), ranks_(ranks), ring_bytes_(ring_bytes), messages_(ranks) {
#if !defined(__linux__)
  throw std::invalid_argument("shared memory between ranks is supported only on Linux");
#endif
  if (rank < 0 || rank >= ranks)
    throw std::invalid_argument("rank must be 0.." + std::to_string(ranks - 1) + ", got " + std::to_string(rank));
  if (ring_bytes < 64 || ring_bytes % 64)
    throw std::invalid_argument("the bytes of a ring must be a positive multiple of 64, got " +
                                std::to_string(ring_bytes));
  if (reinterpret_cast<uintptr_t>(memory) % 64) throw std::invalid_argument("the memory must be aligned to 64 bytes");
}

Rings::Bell& Rings::bell(int rank) const { return *reinterpret_cast<Bell*>(memory_ + rank * int64_t{64}); }

Rings::Ring& Rings::ring(int from, int to) const {
  const int64_t number = int64_t{from} * ranks_ + to;
  return *reinterpret_cast<Ring*>(memory_ + ranks_ * int64_t{64} + number * (kRingHead + ring_bytes_));
}

void Rings::wake(int peer) const {
  Bell& other = bell(peer);
  other.rung.fetch_add(1);
  if (other.sleeping.load()) wake_all(other.rung);
}

void Rings::start(const char* data, const std::vector<int64_t>& send, char* out, const std::vector<int64_t>& recv,
                  const char* head) {
  if (static_cast<int>(send.size()) != ranks_ || static_cast<int>(recv.size()) != ranks_)
    throw std::invalid_argument("send and recv must have one number of bytes per rank, " + std::to_string(ranks_) +
                                ", got " + std::to_string(send.size()) + " and " + std::to_string(recv.size()));
  for (int p = 0; p < ranks_; ++p) {
    if (send[p] < 0 || recv[p] < 0)
      throw std::invalid_argument("numbers of bytes must be >= 0, got " + std::to_string(std::min(send[p], recv[p])));
  }
  if (send[rank_] != recv[rank_])
    throw std::invalid_argument("a rank must send itself as many bytes as it receives, got " +
                                std::to_string(send[rank_]) + " and " + std::to_string(recv[rank_]));
  for (int p = 0; p < ranks_; ++p) {
    Message& m = messages_[p];
    m = {};
    m.data = data;
    m.out = out;
    m.send = send[p] + kFront;
    m.recv = recv[p] + kFront;
    m.awaited = recv[p];
    m.front_out.length = send[p];
    if (head) std::memcpy(m.front_out.head, head, kHeadBytes);
    if (p == rank_) {
      m.front_in = m.front_out;
      if (send[p]) std::memcpy(out, data, static_cast<size_t>(send[p]));
      m.sent = m.send;
      m.received = m.recv;
    }
    data += send[p];
    out += recv[p];
  }
}

bool Rings::push(int peer) {
  Message& m = messages_[peer];
  Ring& r = ring(rank_, peer);
  const uint64_t head = r.head.load(std::memory_order_relaxed);
  const int64_t room = ring_bytes_ - static_cast<int64_t>(head - r.tail.load(std::memory_order_acquire));
  const int64_t n = std::min({room, m.send - m.sent, kPiece});
  if (n <= 0) return false;
  for (int64_t done = 0; done < n;) {
    const int64_t at = static_cast<int64_t>((head + done) % ring_bytes_), behind = m.sent + done;
    const bool in_front = behind < kFront;
    const char* from = in_front ? reinterpret_cast<const char*>(&m.front_out) + behind : m.data + (behind - kFront);
    const int64_t some = std::min({n - done, ring_bytes_ - at, in_front ? kFront - behind : n});
    std::memcpy(r.data + at, from, static_cast<size_t>(some));
    done += some;
  }
  m.sent += n;
  r.head.store(head + n, std::memory_order_release);
  wake(peer);
  return true;
}

bool Rings::pull(int peer) {
  Message& m = messages_[peer];
  Ring& r = ring(peer, rank_);
  const uint64_t tail = r.tail.load(std::memory_order_relaxed);
  const int64_t there = static_cast<int64_t>(r.head.load(std::memory_order_acquire) - tail);
  int64_t n = std::min({there, m.recv - m.received, kPiece});
  if (n <= 0) return false;
  for (int64_t done = 0; done < n;) {
    const int64_t at = static_cast<int64_t>((tail + done) % ring_bytes_), behind = m.received + done;
    if (behind < kFront) {
      const int64_t some = std::min({n - done, ring_bytes_ - at, kFront - behind});
      std::memcpy(reinterpret_cast<char*>(&m.front_in) + behind, r.data + at, static_cast<size_t>(some));
      done += some;
      if (behind + some == kFront && m.differs()) {
        m.recv = m.front_in.length + kFront;
        n = std::min(n, m.recv - m.received);  // the rest belongs to the next exchange
      }
      continue;
    }
    const int64_t some = std::min(n - done, ring_bytes_ - at);
    if (!m.differs()) std::memcpy(m.out + (behind - kFront), r.data + at, static_cast<size_t>(some));
    done += some;
  }
  m.received += n;
  r.tail.store(tail + n, std::memory_order_release);
  wake(peer);
  return true;
}

bool Rings::run(double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto limit = std::chrono::duration<double>(seconds);
  auto moved_at = Clock::now();
  Bell& mine = bell(rank_);
  for (int idle = 0;;) {
    const uint32_t seen = mine.rung.load();
    bool moved = false, left = false;
    for (int step = 1; step < ranks_; ++step) {
      const int to = (rank_ + step) % ranks_, from = (rank_ + ranks_ - step) % ranks_;
      if (messages_[to].sent < messages_[to].send) moved |= push(to);
      if (messages_[from].received < messages_[from].recv) moved |= pull(from);
    }
    for (const Message& m : messages_) left |= m.is_open();
    if (!left) return true;
    if (moved) {
      idle = 0;
      continue;
    }
    if (++idle < kSpins) {
      relax();
      continue;
    }
    if (idle == kSpins) moved_at = Clock::now();
    if (Clock::now() - moved_at > limit) return false;
    mine.sleeping.store(1);
    sleep_on(mine.rung, seen, 50);
    mine.sleeping.store(0);
  }
}

std::vector<Rings::Difference> Rings::differences() const {
  std::vector<Difference> found;
  for (int p = 0; p < ranks_; ++p) {
    const Message& m = messages_[p];
    if (m.differs()) found.push_back({p, m.front_in.length, m.awaited});
  }
  return found;
}

void Rings::heads(char* out) const {
  for (int p = 0; p < ranks_; ++p) std::memcpy(out + p * kHeadBytes, messages_[p].front_in.head, kHeadBytes);
}

std::vector<int> Rings::open() const {
  std::vector<int> found;
  for (int p = 0; p < ranks_; ++p) {
    if (messages_[p].is_open()) found.push_back(p);
  }
  return found;
}

}  // namespace shoal
