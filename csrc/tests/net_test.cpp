// The HTTP/2 front end: answers, deadlines, cancellation, limits, broken clients, batches, shutdown, forks.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <thread>

#include "check.h"
#include "net/client/load.h"
#include "net/front.h"
#include "net/grpc.h"
#include "serving/varint.h"

using namespace shoal;
using namespace shoal::net;

namespace {

constexpr char kEcho[] = "/test.Echo/Echo";
constexpr char kPredict[] = "/test.Echo/Predict";
constexpr char kSlow[] = "/test.Echo/Slow";

int listening(int* port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  CHECK(::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  socklen_t size = sizeof address;
  CHECK(::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0);
  *port = ntohs(address.sin_port);
  CHECK(::listen(fd, 128) == 0);
  return fd;
}

// A front end with a thread in the role of Python: it echoes calls, and never answers the slow ones.
struct Served {
  explicit Served(Front::Options options = {}) : front(with_threads(options)) {
    front.add_method(kEcho, false, false);
    front.add_method(kPredict, false, true);
    front.add_method(kSlow, false, false);
    front.listen(listening(&port));
    front.start();
    answering = std::thread([this] { answer(); });
  }
  ~Served() {
    stop = true;
    answering.join();
    front.close();
  }
  static Front::Options with_threads(Front::Options options) {
    options.threads = 2;
    return options;
  }
  void answer() {
    while (!stop) {
      pollfd ready{front.event_fd(), POLLIN, 0};
      ::poll(&ready, 1, 20);
      for (Event& event : front.take_events()) {
        if (event.kind == EventKind::end) ++ended;
        if (event.kind != EventKind::call) continue;
        ++called;
        if (event.call->method->path == kSlow) continue;
        Reply reply;
        reply.data = framed(event.call->message.size());
        std::copy(event.call->message.begin(), event.call->message.end(), reply.data.begin() + kPrefix);
        front.reply(*event.call, std::move(reply));
      }
    }
  }
  LoadResult load(const char* path, std::string message, int connections = 2, int calls = 8, double seconds = 0.2,
                  int64_t timeout_ms = 0, double rate = 0) {
    LoadOptions options;
    options.port = port;
    options.path = path;
    options.message = std::move(message);
    options.connections = connections;
    options.calls = calls;
    options.seconds = seconds;
    options.timeout_ms = timeout_ms;
    options.rate = rate;
    return make_load(options);
  }
  int connect() const {
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(port));
    CHECK(::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    return fd;
  }
  Front front;
  int port = 0;
  std::atomic<bool> stop{false};
  std::atomic<int> called{0}, ended{0};
  std::thread answering;
};

void wait_for(const std::function<bool()>& condition) {
  for (int i = 0; i < 2000 && !condition(); ++i) ::usleep(5000);
  CHECK(condition());
}

bool only_good(const LoadResult& result) {
  return result.statuses.size() == 1 && result.statuses.begin()->first == 0 && !result.seconds.empty();
}

const std::string kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

std::string frame(int type, int flags, int stream, const std::string& payload) {
  std::string out;
  for (int shift : {16, 8, 0}) out += static_cast<char>(payload.size() >> shift);
  out += static_cast<char>(type);
  out += static_cast<char>(flags);
  for (int shift : {24, 16, 8, 0}) out += static_cast<char>(stream >> shift);
  return out + payload;
}

// Sends bytes and reads until the other end closes, or for at most a second.
void abuse(const Served& served, const std::string& bytes) {
  const int fd = served.connect();
  (void)!::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  timeval second{1, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &second, sizeof second);
  char scratch[4096];
  while (::recv(fd, scratch, sizeof scratch, 0) > 0) {
  }
  ::close(fd);
}

// A PredictRequest {model_spec {name: "m"}, inputs {"x": int64 [rows]}}.
std::string request(int64_t rows) {
  const auto field = [](int number, const std::string& payload) {
    std::string out(1, static_cast<char>(number << 3 | 2));
    const auto size = static_cast<int64_t>(payload.size());
    out.resize(1 + static_cast<size_t>(varint_size(&size, 1)));
    varint_encode(&size, 1, reinterpret_cast<uint8_t*>(out.data()) + 1);
    return out + payload;
  };
  const std::string dim = field(2, std::string("\x08") + static_cast<char>(rows));
  const std::string values(static_cast<size_t>(rows), '\x07');
  const std::string tensor = std::string("\x08\x09") + field(2, dim) + field(10, values);
  return field(1, field(1, "m")) + field(2, field(1, "x") + field(2, tensor));
}

}  // namespace

TEST(timeouts_and_texts) {
  CHECK(parse_timeout("100m") == 100'000'000);
  CHECK(parse_timeout("2S") == 2'000'000'000);
  CHECK(parse_timeout("1H") == 3'600'000'000'000);
  CHECK(parse_timeout("99999999H") == int64_t{3'000'000'000'000'000'000});
  for (const char* bad : {"", "m", "x5m", "5", "123456789m", "5x", "-5m"}) CHECK(parse_timeout(bad) == -1);
  CHECK(percent_encoded("a%b\n\xc3\xa4") == "a%25b%0A%C3%A4");
  CHECK(same_secret("abc", "abc"));
  CHECK(!same_secret("abc", "abd") && !same_secret("abc", "ab") && !same_secret("", "a") && !same_secret("a", ""));
}

TEST(calls_are_answered_of_any_size) {
  Served served;
  CHECK(only_good(served.load(kEcho, "")));
  CHECK(only_good(served.load(kEcho, "hello", 4, 16)));
  CHECK(only_good(served.load(kEcho, std::string(3 << 20, 'x'), 1, 2)));
  wait_for([&] { return served.front.calls() == 0; });
}

TEST(unknown_methods_and_large_messages_are_refused) {
  Front::Options options;
  options.limits.max_message = 1000;
  Served served(options);
  const auto unknown = served.load("/test.Echo/Nothing", "x", 1, 1, 0.05);
  CHECK(unknown.statuses.size() == 1 && unknown.statuses.begin()->first == kUnimplemented);
  const auto large = served.load(kEcho, std::string(1001, 'x'), 1, 1, 0.05);
  CHECK(large.statuses.size() == 1 && large.statuses.begin()->first == kResourceExhausted);
  CHECK(only_good(served.load(kEcho, std::string(1000, 'x'), 1, 1, 0.05)));
}

TEST(a_deadline_ends_a_call_and_the_answering_side_is_notified) {
  Served served;
  const auto result = served.load(kSlow, "x", 1, 4, 0.05, 60);
  CHECK(result.statuses.size() == 1 && result.statuses.begin()->first == kDeadlineExceeded);
  wait_for([&] { return served.ended == served.called && served.called >= 4; });
  CHECK(served.front.calls() == 0);
}

TEST(a_client_that_disconnects_ends_its_calls) {
  Served served;
  std::thread client([&] {
    Served* at = &served;
    const int fd = at->connect();
    std::string headers;
    const auto literal = [&](const std::string& name, const std::string& value) {
      headers += '\0';
      headers += static_cast<char>(name.size());
      headers += name;
      headers += static_cast<char>(value.size());
      headers += value;
    };
    literal(":method", "POST");
    literal(":scheme", "http");
    literal(":path", kSlow);
    literal(":authority", "x");
    literal("content-type", "application/grpc");
    std::string bytes = kPreface + frame(4, 0, 0, "") + frame(1, 4, 1, headers) + frame(0, 1, 1, framed(0));
    CHECK(::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()));
    wait_for([&] { return at->called == 1; });
    ::close(fd);
  });
  client.join();
  wait_for([&] { return served.ended == 1 && served.front.connections() == 0 && served.front.calls() == 0; });
}

TEST(broken_clients_hurt_nobody_else) {
  Served served;
  LoadResult good;
  std::thread honest([&] { good = served.load(kEcho, "hello", 2, 4, 1.0); });
  const std::string settings = kPreface + frame(4, 0, 0, "");
  abuse(served, "GET / HTTP/1.1\r\n\r\n");
  abuse(served, std::string(10'000, '\xff'));
  abuse(served, settings + frame(1, 4, 1, std::string(200, '\xff')));  // headers that are not HPACK
  abuse(served, settings + frame(0, 1, 1, "data of no stream"));
  abuse(served, settings + std::string("\x7f\xff\xff\x00\x00\x00\x00\x00\x01", 9) + std::string(100'000, 'x'));
  abuse(served, settings + frame(8, 0, 0, std::string("\x7f\xff\xff\xff", 4)) +
                    frame(8, 0, 0, std::string("\x7f\xff\xff\xff", 4)));  // a window that overflows
  std::string pings = settings;
  for (int i = 0; i < 20'000; ++i) pings += frame(6, 0, 0, "12345678");
  abuse(served, pings);
  std::string endless = settings + frame(1, 0, 1, std::string("\x82", 1));
  for (int i = 0; i < 2000; ++i) endless += frame(9, 0, 1, std::string(100, '\x82'));  // headers without an end
  abuse(served, endless);
  honest.join();
  CHECK(only_good(good));
  wait_for([&] { return served.front.connections() == 0; });
}

TEST(connections_that_send_nothing_are_closed) {
  Front::Options options;
  options.limits.open_ns = 200'000'000;
  Served served(options);
  std::vector<int> silent;
  for (int i = 0; i < 20; ++i) silent.push_back(served.connect());
  wait_for([&] { return served.front.connections() == 20; });
  CHECK(only_good(served.load(kEcho, "x", 1, 1, 0.05)));
  wait_for([&] { return served.front.connections() == 0; });
  for (int fd : silent) ::close(fd);
}

TEST(connections_beyond_the_limit_are_closed_at_once) {
  Front::Options options;
  options.limits.max_connections = 3;
  Served served(options);
  std::vector<int> open;
  for (int i = 0; i < 3; ++i) open.push_back(served.connect());
  wait_for([&] { return served.front.connections() == 3; });
  const int more = served.connect();
  char byte;
  while (::recv(more, &byte, 1, 0) > 0) {
  }
  ::close(more);
  for (int fd : open) ::close(fd);
  wait_for([&] { return served.front.connections() == 0; });
  CHECK(only_good(served.load(kEcho, "x", 1, 1, 0.05)));
}

TEST(incomplete_requests_take_bounded_memory) {
  Front::Options options;
  options.limits.max_arriving = 100'000;
  Served served(options);
  const auto literal = [](std::string* headers, const std::string& name, const std::string& value) {
    *headers += '\0';
    for (const std::string* each : {&name, &value}) {
      *headers += static_cast<char>(each->size());
      *headers += *each;
    }
  };
  std::string headers;
  for (const auto& [name, value] :
       std::vector<std::pair<std::string, std::string>>{{":method", "POST"},
                                                        {":scheme", "http"},
                                                        {":path", kEcho},
                                                        {":authority", "x"},
                                                        {"content-type", "application/grpc"}})
    literal(&headers, name, value);
  std::vector<int> open;
  for (int i = 0; i < 12; ++i) {  // each promises 1 MB and sends 15,000 bytes of it
    const std::string part = std::string("\0\0\x10\0\0", 5) + std::string(15'000, 'x');
    const std::string bytes = kPreface + frame(4, 0, 0, "") + frame(1, 4, 1, headers) + frame(0, 0, 1, part);
    open.push_back(served.connect());
    CHECK(::send(open.back(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()));
  }
  wait_for([&] { return served.front.connections() == 12 && served.front.hold(0) == 90'000; });  // six of them
  CHECK(only_good(served.load(kEcho, std::string(5000, 'x'), 1, 1, 0.05)));
  for (int fd : open) ::close(fd);
  wait_for([&] { return served.front.connections() == 0 && served.front.hold(0) == 0; });
}

TEST(requests_for_the_same_model_and_outputs_run_together) {
  Served served;
  CHECK(only_good(served.load(kPredict, request(2), 1, 1, 0.02)));  // without a lane, one by one
  const std::string key = Lanes::key_of(request(1));
  CHECK(key == Lanes::key_of(request(5)) && !key.empty());
  CHECK(Lanes::key_of("broken").empty());
  CHECK(served.front.lanes().add(key, "m") > 0);
  std::atomic<bool> stop{false};
  std::atomic<int> batches{0}, requests{0};
  const int before = served.called;
  const auto run = [&] {
    while (!stop) {
      const auto batch = served.front.lanes().next(20'000'000);
      if (!batch) continue;
      ++batches;
      requests += static_cast<int>(batch->size());
      if (batches % 50 == 49) continue;  // given back: answered one by one
      CHECK(batch->plan());
      CHECK(batch->inputs().size() == 1 && batch->inputs()[0].alias == "x" && batch->inputs()[0].dtype == 9);
      std::vector<int64_t> ids(static_cast<size_t>(batch->inputs()[0].shape[0]));
      batch->join_into({reinterpret_cast<uint8_t*>(ids.data())});
      for (int64_t id : ids) CHECK(id == 7);
      const std::vector<float> scores(ids.size(), 0.5f);
      int64_t rows = 0;
      for (const auto& [first, count, begin, own] : batch->parts(16)) {
        CHECK(begin == rows && own <= 16);
        rows += own;
        const Output output{"y", value_kind(1), {}, reinterpret_cast<const uint8_t*>(scores.data() + begin)};
        batch->answer(static_cast<size_t>(first), static_cast<size_t>(count), "spec", {output});
      }
    }
  };
  std::thread one(run), two(run);
  CHECK(only_good(served.load(kPredict, request(3), 4, 16, 1.0)));
  stop = true;
  one.join();
  two.join();
  CHECK(requests > batches);
  CHECK(served.called - before < requests);
  served.front.lanes().stop();
  CHECK(only_good(served.load(kPredict, request(2), 1, 1, 0.02)));
}

TEST(too_many_waiting_requests_and_those_without_time_are_refused) {
  Front::Options options;
  options.lanes.max_waiting = 8;
  Served served(options);
  CHECK(served.front.lanes().add(Lanes::key_of(request(1)), "m") > 0);
  std::atomic<bool> stop{false};
  std::thread slow([&] {
    const float score = 1;
    while (!stop) {
      const auto batch = served.front.lanes().next(20'000'000);
      if (!batch) continue;
      ::usleep(20'000);
      CHECK(batch->plan());
      std::vector<float> scores(static_cast<size_t>(batch->inputs()[0].shape[0]), score);
      const Output output{"y", value_kind(1), {}, reinterpret_cast<const uint8_t*>(scores.data())};
      batch->answer(0, batch->size(), "spec", {output});
    }
  });
  const auto result = served.load(kPredict, request(1), 2, 64, 0.6, 0, 3000);
  CHECK(result.statuses.count(kResourceExhausted) && result.statuses.count(0) && result.statuses.size() == 2);
  CHECK(served.front.lanes().refused() == result.statuses.at(kResourceExhausted));
  served.front.lanes().set_limit("m", 0);
  const auto none = served.load(kPredict, request(1), 1, 1, 0.02);
  CHECK(none.statuses.size() == 1 && none.statuses.count(kResourceExhausted));
  served.front.lanes().set_limit("m", 1000);
  const auto hurried = served.load(kPredict, request(1), 1, 1, 0.1, 1);  // a millisecond is not enough
  CHECK(!hurried.statuses.count(0));
  stop = true;
  slow.join();
}

TEST(draining_under_load_answers_all_accepted_calls) {
  for (int round = 0; round < 3; ++round) {
    auto served = std::make_unique<Served>();
    LoadResult result;
    std::thread client([&] { result = served->load(kEcho, "hello", 4, 8, 0.3); });
    wait_for([&] { return served->called > 20; });
    served->front.drain();
    wait_for([&] { return served->front.calls() == 0; });
    client.join();
    CHECK(result.statuses[0] == served->called);
    for (const auto& [status, count] : result.statuses) CHECK(status == 0 || status == -1);
    served.reset();
  }
}

TEST(closing_under_load_ends) {
  auto served = std::make_unique<Served>();
  std::thread client([&] { served->load(kSlow, "hello", 4, 8, 0.3); });
  wait_for([&] { return served->called > 8; });
  served->front.close();
  client.join();
}

TEST(a_forked_child_releases_the_descriptors) {
  Served served;
  CHECK(only_good(served.load(kEcho, "x", 2, 2, 0.05)));
  const pid_t child = ::fork();
  if (!child) {
    served.front.drain();
    served.front.close();
    _exit(served.front.take_events().empty() ? 0 : 1);
  }
  int status;
  CHECK(::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(only_good(served.load(kEcho, "x", 2, 2, 0.05)));
}
